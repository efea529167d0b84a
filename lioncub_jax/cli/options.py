"""What the options of the commands have in common."""

import argparse
from collections.abc import Callable, Iterable
from typing import Any


def reads(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argparse type whose own message is shown."""

    def value(text: str) -> Any:
        try:
            return read(text)
        except ValueError as wrong:
            raise argparse.ArgumentTypeError(str(wrong)) from wrong

    return value


def refuse(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Refuses options that were given and would have no effect.

    Raises:
      ValueError: if one of them was given.
    """
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None]
    if given:
        raise ValueError(f"{', '.join(given)}: {why}; leave it out")
