"""Rows on disk: one JSON object a line, one line a run, appended as runs end."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from study.runs import Spec


def key_of(row: dict[str, Any]) -> Spec:
    """The run that a row is of."""
    return Spec(*(row[name] for name in Spec._fields))


def read(path: Path, key: Callable[[dict[str, Any]], Any] = key_of) -> list[dict[str, Any]]:
    """The rows of a file, or none if there is no file.

    Raises:
      ValueError: for a line that is no row, as ``key`` finds.
    """
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            key(row)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: no row of the study ({error!r}); delete the line to run it anew"
            ) from error
        rows.append(row)
    return rows


def append(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Adds rows at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
