"""Output of the commands, and the files that they write.

``rich`` is imported for tables and terminals alone.
"""

import io
import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Any

PIPE_WIDTH = 140  # a pipe has no width of its own; the 80 of rich would fold tables


def show(*parts: Any) -> None:
    """Prints texts and ``rich`` tables, each on lines of its own.

    Texts are broken at the width of a terminal, and not at all in a pipe or a file.
    """
    terminal = sys.stdout.isatty()
    if not terminal and all(isinstance(part, str) for part in parts):
        write("".join(f"{part}\n" for part in parts))
        return
    from rich.console import Console

    # Not to standard output at once: rich has ends of its own for a pipe that is closed.
    printed = io.StringIO()
    console = Console(
        file=printed, force_terminal=terminal, width=None if terminal else PIPE_WIDTH,
        # Texts hold paths and shapes, whose [...] and :...: are no markup.
        markup=False, emoji=False, highlight=False,
    )  # fmt: skip
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str) and not terminal)
    write(printed.getvalue())


def as_text(answer: Any) -> str:
    """JSON; named tuples are objects, and a number that is not finite is null: JSON has no infinity."""
    return json.dumps(_plain(answer), indent=2, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(text: str) -> None:
    """Writes to standard output now.

    Raises:
      OSError: where it takes no more; ``BrokenPipeError`` if its reader has ended, as ``head`` does.
    """
    try:
        print(text, end="", flush=True)
    except OSError as error:
        if sys.stdout is sys.__stdout__:
            # Python writes what is left in the buffer when it ends, and would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        error.filename = "standard output"
        raise
