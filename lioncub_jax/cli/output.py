"""What commands print, and the files that they write.

``rich`` is imported where tables are printed, and not for numbers.
"""

import io
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PIPE_WIDTH = 140  # a pipe has no width of its own; the 80 of rich would fold tables


def show(*parts: Any) -> None:
    """Prints texts and ``rich`` tables, each on lines of its own.

    Texts are broken at the width of a terminal, and not at all in a pipe or a file.
    """
    from rich.console import Console

    # Not to standard output at once: rich has ends of its own for a pipe that is closed.
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    printed = io.TextIOWrapper(io.BytesIO(), encoding, errors="replace", newline="\n")
    terminal = sys.stdout is not None and sys.stdout.isatty()
    console = Console(
        file=printed, force_terminal=terminal, width=None if terminal else PIPE_WIDTH,
        # Texts hold paths and shapes, whose [...] and :...: are no markup.
        markup=False, emoji=False, highlight=False,
    )  # fmt: skip
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str) and not terminal)
    printed.seek(0)
    write(printed.read())


def show_json(found: Mapping[str, Any]) -> None:
    """Prints numbers by the standard of JSON, which has no infinity: null stands for it."""
    write(as_text(found))


def as_text(found: Any) -> str:
    """JSON; named tuples are objects, and a number that is not finite is null."""
    return json.dumps(_plain(found), indent=2, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def write(text: str) -> None:
    """Writes to standard output now.

    Raises:
      OSError: where it takes no more; ``BrokenPipeError`` if its reader has ended, as ``head`` does.
    """
    try:
        print(text, end="", flush=True)
    except OSError as error:
        if sys.stdout is sys.__stdout__ and sys.stdout is not None:
            # Python writes what is left in the buffer when it ends, and would fail again.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        error.filename = "standard output"
        raise


def check_writable(path: Path) -> None:
    """Finds out that a file cannot be written before work is done whose result it would hold.

    Raises:
      ValueError: where it cannot.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}; make it, or name another")
    there = path.exists()
    try:
        if there and not path.is_dir() and not path.is_file():
            return  # opening a pipe or a device would be noticed at its other end
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; name a file that can be written") from None
    if not there:
        path.unlink()
