"""How a program that ``lioncub run`` has started says that it trains."""

import os
from pathlib import Path

STEPPED = "LIONCUB_STEPPED"  # the file that says so; another for each start


def stepped() -> None:
    """Says that a step is done and its numbers are there; a start that ends before is a strike.

    The steps of ``make_train_step`` say it themselves. A training loop of your own calls it behind a step
    whose result it has waited for; once is enough. Does nothing where ``lioncub run`` did not start the
    program.

    Example:
      >>> from lioncub_jax import elastic
      >>> elastic.stepped()

    Source: this library.
    """
    if told := os.environ.get(STEPPED):
        Path(told).touch()
