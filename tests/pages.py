"""The code blocks of pages: a comment above each says who runs it, or ``not run:`` and why.

As a program it prints what a notebook among the pages runs: ``python tests/pages.py start/tutorial.md``.
"""

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
    print(cells(sys.argv[1]))
