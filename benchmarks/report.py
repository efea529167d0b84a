"""How every benchmark ends: one JSON object as its last line, kept in a file if asked."""

import argparse
import datetime
import json
import pathlib
import platform
import sys
from collections.abc import Iterable
from typing import Any

import flax
import jax
import optax
from rich.table import Table


def parser(doc: str) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    out = argparse.ArgumentParser(description=doc.splitlines()[0])
    out.add_argument("--save", type=pathlib.Path, help="append the JSON line to this file")
    return out


def finish(summary: dict[str, Any], save: pathlib.Path | None) -> None:
    """Prints the summary as the last line and appends it, with command, versions and date."""
    line = json.dumps(summary | provenance())
    if save:
        save.parent.mkdir(parents=True, exist_ok=True)
        with save.open("a") as file:
            file.write(line + "\n")
    print(line)


def provenance() -> dict[str, Any]:
    """What is needed to repeat a row."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "optax": optax.__version__,
        "device": jax.devices()[0].device_kind,
        "processor": platform.machine(),
    }


def written(document: str, name: str, text: str) -> str:
    """The document with this text between ``<!-- name -->`` and ``<!-- end -->``.

    Raises:
      ValueError: for a document without that place.
    """
    before, mark, rest = document.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not mark or not end:
        raise ValueError(f"there is no place <!-- {name} --> ... <!-- end --> for the table")
    return f"{before}{mark}{text}{end}{after}"


def table(title: str, head: list[str], lines: list[list[str]]) -> Table:
    """A table for a terminal; all columns but the first are numbers."""
    found = Table(title=title)
    for n, column in enumerate(head):
        found.add_column(column, justify="right" if n else "left")
    for line in lines:
        found.add_row(*line)
    return found


def markdown(head: Iterable[str], lines: Iterable[Iterable[str]], words: int = 1) -> str:
    """The same for a document, its first columns of words to the left."""
    names = list(head)
    rule = ["---"] * words + ["---:"] * (len(names) - words)
    return "".join("| " + " | ".join(cells) + " |\n" for cells in [names, rule, *lines])
