"""Kinds of options that commands share."""

import argparse
from collections.abc import Callable
from typing import Any

from lioncub_jax.audit import units

# An argument: its name, what argparse is told of it, and help.
Row = tuple[str, dict[str, Any], str]


def reads(read: Callable[[str], Any]) -> dict[str, Any]:
    """An argument that is read so, by a function whose own message is shown."""

    def value(text: str) -> Any:
        try:
            return read(text)
        except ValueError as wrong:
            raise argparse.ArgumentTypeError(str(wrong)) from wrong

    return {"type": value}


COUNT, RATE, SECONDS, SIZE = (
    reads(read) for read in (units.count, units.rate, units.seconds, units.size)
)
FLAG = {"action": "store_true"}
