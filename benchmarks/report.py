"""Parts that benchmarks share: rows in files, tables, and one JSON object as the last line."""

import argparse
import datetime
import json
import pathlib
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import flax
import jax
import optax

Rows = list[dict[str, Any]]


def commit() -> str:
    """The commit that runs, and whether files differ from it."""
    words = "git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"
    here = pathlib.Path(__file__).parent
    return subprocess.run(words, cwd=here, capture_output=True, text=True).stdout.strip()


COMMIT = commit()  # that this process began with


def parser(doc: str, rows: pathlib.Path | None = None) -> argparse.ArgumentParser:
    """A parser with the option that all benchmarks have; ``rows`` is the file of those that read theirs."""
    out = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = "a file of rows, JSON lines, that is added to"
    out.add_argument("--save", type=pathlib.Path, default=rows, help=text)
    return out


def finish(summary: dict[str, Any], save: pathlib.Path | None) -> None:
    """Prints the summary as the last line and appends it, with command, versions and date."""
    row = summary | provenance()
    append(save, [row])
    print(json.dumps(row))


def provenance() -> dict[str, Any]:
    """The facts that repeat a row."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": COMMIT,
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "optax": optax.__version__,
        "device": jax.devices()[0].device_kind,
        "processor": platform.machine(),
    }


def in_a_process(*words: str, environment: Mapping[str, str]) -> Any:
    """Runs Python with these words; the JSON of its last line.

    Raises:
      SystemExit: with the last line of its errors, where it fails.
    """
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
    if done.returncode:
        errors = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise SystemExit(f"error: {', '.join(words[1:])}: {errors[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def read(path: pathlib.Path, key: Callable[[dict[str, Any]], Any] = dict) -> Rows:
    """The rows of a file, one JSON object a line, or none if there is no file.

    Raises:
      ValueError: for a line that is no row, as ``key`` finds.
    """
    rows = []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
        try:
            row = json.loads(line)
            key(row)
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number}: no row of this benchmark ({error!r}); delete the line, or give "
                "the file that it wrote to --save"
            ) from error
        rows.append(row)
    return rows


class Once(NamedTuple):
    """Runs that are made once: a row is added to a file for each that it does not have.

    Attributes:
      save: the file.
      key: of a row, its run.
      runner: ``runner.run(run)`` makes a row.
    """

    save: pathlib.Path
    key: Callable[[dict[str, Any]], Any]
    runner: Any

    def rows(self) -> Rows:
        """The rows of the file."""
        return read(self.save, self.key)

    def run(self, run: Any) -> dict[str, Any]:
        """The row of a run."""
        for row in self.rows():
            if self.key(row) == run:
                return row
        row: dict[str, Any] = self.runner.run(run)
        append(self.save, [row | provenance()])
        return row


def append(path: pathlib.Path | None, rows: Iterable[dict[str, Any]]) -> None:
    """Adds rows at the end of a file, if there is one to be."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def rows_of(rows: Iterable[dict[str, Any]], **wanted: Any) -> Rows:
    """The rows in which all these fields are so."""
    return [row for row in rows if all(row.get(k) == v for k, v in wanted.items())]


def written(document: str, texts: Mapping[str, str]) -> str:
    """The document with each text by name between ``<!-- name -->`` and ``<!-- end -->``.

    Raises:
      ValueError: for a document without such a place.
    """
    for name, text in texts.items():
        before, mark, rest = document.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not mark or not end:
            raise ValueError(f"there is no place <!-- {name} --> ... <!-- end --> for the table")
        document = f"{before}{mark}{text}{end}{after}"
    return document


def markdown(head: Iterable[str], lines: Iterable[Iterable[str]], columns: str = "---:") -> str:
    """A table in Markdown; all columns but the first are numbers, if ``columns`` says no other."""
    names = list(head)
    rule = ["---"] + [columns] * (len(names) - 1)
    return "".join("| " + " | ".join(cells) + " |\n" for cells in [names, rule, *lines])
