"""A sign of a program to ``lioncub run``, which started it, that it trains."""

import os
from pathlib import Path
from typing import Any

import jax

STEPPED = "LIONCUB_STEPPED"  # a file that the program makes after a step; another for each start


def stepped(result: Any = ()) -> None:
    """Says that a step is done; a start that ends before its first step has failed.

    Call it after each step. It waits for the first step of a start, and then does nothing. Nor does it do
    anything where ``lioncub run`` did not start the program.

    Args:
      result: arrays of the step, such as its loss, which are waited for.

    Example:
      >>> from lioncub_jax.tools.run import stepped
      >>> stepped()

    Source: this library.
    """
    path = os.environ.get(STEPPED)
    if path and not Path(path).exists():
        jax.block_until_ready(result)
        Path(path).touch()
