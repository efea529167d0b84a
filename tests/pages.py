"""The code blocks of pages: a comment above each says who runs it, or ``not run:`` and why.

As a program it prints what a notebook among the pages runs, ``python tests/pages.py start/tutorial.md``, or
the notebook itself, with ``--notebook`` in front.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^(?:<!-- ([^\n]*) -->\n\n?)?```([^\n]*)\n(.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    mark: str  # the comment, or nothing
    language: str
    code: str


def blocks(page):
    """Of a page below docs, in their order."""
    return [Block(*found) for found in _BLOCK.findall((ROOT / "docs" / page).read_text())]


def block(page, mark):
    """The one block with that comment."""
    (found,) = [one for one in blocks(page) if one.mark == mark]
    return found.code


def applied(diff, source, old=" -", new=" +"):
    """The text that a diff makes of another; with the last two exchanged, the text that it was made of."""
    for hunk in diff.split("@@\n")[1:]:
        lines = hunk.splitlines(keepends=True)
        before, after = ("".join(x[1:] for x in lines if x[0] in kept) for kept in (old, new))
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    return source


def cells(page):
    """The program of a notebook, without what its cells say to the site."""
    found = [one.code for one in blocks(page) if one.language.startswith("{code-cell}")]
    return "\n".join(re.sub(r"\A(---\n.*?\n---\n|:.*?\n)", "", x, flags=re.S) for x in found)


def notebook(page):
    """A page that is a notebook, as Jupyter has it, with links from the folder of examples."""
    text = re.sub(
        r"\A---\n.*?\n---\n|^<!-- .* -->\n",
        "",
        (ROOT / "docs" / page).read_text(),
        flags=re.S | re.M,
    )
    made = []
    for n, part in enumerate(
        re.split(r"^```\{code-cell\}[^\n]*\n(.*?)^```$", text, flags=re.M | re.S)
    ):
        if n % 2:
            part = re.sub(r"\A(---\n.*?\n---\n|:.*?\n)", "", part, flags=re.S)
        if part.strip():
            cell = {"cell_type": "code" if n % 2 else "markdown", "id": f"cell-{n}", "metadata": {}}
            source = part.strip("\n") if n % 2 else part.strip().replace("](../", "](../docs/")
            cell |= {"source": source.splitlines(keepends=True)}
            made.append(cell | ({"execution_count": None, "outputs": []} if n % 2 else {}))
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return {"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


def run_commands(code, folder):
    """What each line says, one after the other; it begins with a dollar and must end well."""
    for name in ("examples", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    environment = dict(os.environ)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    for line in code.replace("\\\n", " ").splitlines():
        dollar, line = line[:2], line[2:]
        assert dollar == "$ "
        if line.startswith("export "):
            environment |= dict(pair.split("=") for pair in line.split()[1:])
            continue
        done = subprocess.run(
            line, shell=True, cwd=folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        yield done.stdout


if __name__ == "__main__":
    print(json.dumps(notebook(sys.argv[2]), indent=1) if len(sys.argv) > 2 else cells(sys.argv[1]))
