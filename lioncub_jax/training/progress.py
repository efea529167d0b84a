"""How a program that ``lioncub run`` has started says that it trains."""

import os
from pathlib import Path
from typing import Any

import jax

STEPPED = "LIONCUB_STEPPED"  # the file that says so; another for each start


def stepped(result: Any = ()) -> None:
    """Says that a step is done and its numbers are there; a start that ends before is a strike.

    The steps of ``make_train_step`` say it themselves. A training loop of your own calls it behind a step;
    once is enough. Does nothing, and waits for nothing, where ``lioncub run`` did not start the program.

    Args:
      result: arrays of the step, such as its loss, which are waited for.

    Example:
      >>> from lioncub_jax import elastic
      >>> elastic.stepped()

    Source: this library.
    """
    if told := os.environ.get(STEPPED):
        jax.block_until_ready(result)
        Path(told).touch()
