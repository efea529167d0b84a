"""Rows on disk: one JSON object a line, of four kinds by their "part"."""

import json
from pathlib import Path
from typing import Any

from study import store

from goal.contenders import CONTENDERS
from goal.curves import Run

KINDS = ("tuning", "curve", "time", "confirm")


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, or none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, row: dict[str, Any]) -> None:
    """Adds a row at the end."""
    store.append(path, [row])


def key_of(row: dict[str, Any]) -> Run | None:
    """The training run that a row is of; None for a row of another kind."""
    return Run(*(row[name] for name in Run._fields)) if row["part"] in ("tuning", "curve") else None


def check(found: list[dict[str, Any]], path: Path) -> None:
    """Raises ``ValueError`` for rows of another study, or of a contender that is no longer there."""
    for number, row in enumerate(found, 1):
        if row.get("part") not in KINDS or "contender" not in row:
            raise ValueError(
                f"{path}, line {number}: no row of this benchmark; give the file that it wrote, or a new "
                "one, to --save"
            )
        if row["contender"] not in CONTENDERS:
            raise ValueError(
                f"{path}, line {number}: {row['contender']!r} does not run any more; delete the line"
            )


def of(found: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """The rows in which all these fields are so."""
    return [row for row in found if all(row.get(k) == v for k, v in wanted.items())]
