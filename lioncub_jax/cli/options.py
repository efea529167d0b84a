"""What the options of the commands have in common."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from lioncub_jax import units

# An argument: its name, how its text is read (or choices, or bool for one that takes no text), and help.
Row = tuple[str, Any, str]


def add(command: argparse.ArgumentParser, rows: Sequence[Row]) -> None:
    """Gives a command these arguments."""
    for name, kind, words in rows:
        how = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        command.add_argument(
            name, help=words, **({"action": "store_true"} if kind is bool else how)
        )


def reads(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argparse type whose own message is shown."""

    def value(text: str) -> Any:
        try:
            return read(text)
        except ValueError as wrong:
            raise argparse.ArgumentTypeError(str(wrong)) from wrong

    return value


COUNT, RATE, SECONDS = reads(units.count), reads(units.rate), reads(units.seconds)


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of the options that were given."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def refuse(args: argparse.Namespace, name: str, why: str) -> None:
    """Raises ``ValueError`` for an option that was given and would have no effect."""
    if given(args, name):
        raise ValueError(f"--{name.replace('_', '-')}: {why}; leave it out")
