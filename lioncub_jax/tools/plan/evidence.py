"""Evidence of learning: the steps of each method to a loss, by setting.

`evidence.json`, beside this file, is made from committed rows of runs and read on first use. Its schema:

    {"version": 3,
     "study": {"model": "byte GPT", "dataset": "..."},
     "cells": [{"tokens": 256, "workers": 8, "data": "alike", "steps": 1024, "parameters": 430720,
                "agreement": 0.525, "noise_scale": 7663, "vote_over_lion": 1.19, "better": "adamw",
                "loss": {"0.6": 2.9, "0.8": 2.7, "1.0": 2.6},
                "methods": {"vote": {"steps": [207.1, null, null], "error": [4.4, null, null],
                                     "runs": [3, 0, 2], "loss": 2.784, "rate_over_adamw": 0.5,
                                     "b1": 0.8, "b2": 0.9, "decay_over_adamw": 10.0}}}],
     "times": [...]}

A cell is one setting: the tokens that a worker sees in a (micro-)step, workers, data, the length of a run
in (micro-)steps of a worker, and the size of the model. Cells may differ in ``steps`` or ``parameters``
alone. ``loss`` holds the losses of the better float32 optimizer after 60, 80 and 100 % of its run. The
lists of a method have one entry for each of them: (micro-)steps of a worker to that loss, their standard
error over seeds (null where fewer than two runs got there), and runs behind them (0: not measured).
``vote-micro-4`` is ``vote`` with one exchange in 4 micro-steps; its steps are micro-steps, so that steps
are tokens in all methods. Every cell has ``adamw``, in whose units rates and decays are. A file may say
more; only ``times`` (of the benchmark) and the fields of `Cell` and `Learned` are read.
"""

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lioncub_jax.exchange.arguments import check_count, check_number

VERSION = 3  # of the packaged file
# Shares of the better float32 optimizer's run, after which it has the loss to reach.
TARGETS = (0.6, 0.8, 1.0)
TARGET = 0.8  # the one that methods are ranked by
RANKED = TARGETS.index(TARGET)
DATA = ("alike", "different")  # what workers see: the same kind, or classes or texts of their own
WINDOW = 32  # tokens; no worker saw less in a step
HERE, NEAR, FAR = "here", "near", "far"
FAR_NOISE, FAR_WORKERS = 4, 2  # ratios; beyond them a cell says little about what was asked

Made = TypeVar("Made")


class Learned(NamedTuple):
    """How a method learns in a cell, with what it was tuned to.

    Rates and decays are ratios, since a rate of a small model says nothing about a larger one.

    Attributes:
      steps: of a worker to the losses of ``TARGETS``; None where the mean run does not get there, and
        for what is not measured.
      error: standard error of these over seeds; None where fewer than two got there.
      runs: behind each of ``steps``; 0 for what is not measured, as at most one run got there.
      loss: at the end of a run.
      rate_over_adamw: the highest learning rate, divided by that of float32 AdamW in the cell.
      b1: weight of the momentum.
      b2: decay of Lion's momentum, or of Adam's second moment.
      decay_over_adamw: decoupled weight decay, divided by that of float32 AdamW in the cell.
    """

    steps: tuple[float | None, ...]
    error: tuple[float | None, ...]
    runs: tuple[int, ...]
    loss: float
    rate_over_adamw: float
    b1: float
    b2: float
    decay_over_adamw: float


class Cell(NamedTuple):
    """Where methods were compared.

    Attributes:
      tokens: that a worker sees in a step.
      workers: how many.
      data: one of ``DATA``.
      steps: of a worker in a run.
      parameters: of the model.
      agreement: how often two workers vote alike, 0.5 for coins; None where nobody looked.
      noise_scale: the gradient noise scale, in tokens.
      vote_over_lion: steps of a vote to where float32 Lion stands after 60 % of its run, over those.
      loss: the targets, by their shares.
      methods: by name; one that was not run is not there.
    """

    tokens: int
    workers: int
    data: str
    steps: int
    parameters: int
    agreement: float | None
    noise_scale: float | None
    vote_over_lion: float | None
    loss: Mapping[str, float]
    methods: Mapping[str, Learned]


class Evidence(NamedTuple):
    """All that is known.

    Attributes:
      study: what was trained: "model" and "dataset".
      cells: where methods were compared.
    """

    study: Mapping[str, Any]
    cells: tuple[Cell, ...]


class Found(NamedTuple):
    """The measured cell that is nearest to what was asked.

    Attributes:
      cell: that.
      away: "here" for that cell itself, "near" it, or "far": more than 4 times the noise or twice the
        workers from it, or other data, which nobody measured.
    """

    cell: Cell
    away: str


def check_one_of(kind: str, name: str, known: Any) -> None:
    """Raises ``ValueError`` for a name that is not known."""
    if name not in known:
        raise ValueError(f"{kind} {name!r}: give one of {', '.join(known)}")


def cell_for(
    workers: int, tokens: int | None = None, agreement: float | None = None, data: str = DATA[0]
) -> Found:
    """The nearest cell, by the ratios of the noise and of the numbers of workers.

    Args:
      workers: how many.
      tokens: that one worker sees in a step: its batch times the length. More is less noise.
      agreement: or ``votes/agreement`` of `lioncub_jax.metrics`, of a job that runs. Compared by
        what is above 0.5 of it.
      data: what workers see, one of ``DATA``.

    Returns:
      A `Found`.

    Raises:
      ValueError: without tokens and agreement, or with both; for less than a window of tokens, an
        agreement outside [0.5, 1], other data, or an agreement where no cell has one.

    Example:
      >>> cell_for(8, 32).away
      'here'
    """
    _check_noise(tokens, agreement)
    check_count(f"workers={workers!r}", workers)
    check_one_of("data", data, DATA)
    cells = [one for one in packaged().cells if tokens or one.agreement is not None]
    if not cells:
        raise ValueError("agreement: no cell of the evidence has one; give tokens instead")
    cells = [one for one in cells if one.data == data] or cells

    def away(cell: Cell) -> tuple[float, float]:
        alike = agreement, cell.agreement
        noise = (tokens, cell.tokens) if tokens else map(_signal, alike)
        return _ratio(*noise), _ratio(workers, cell.workers)

    cell = min(cells, key=lambda one: math.prod(away(one)))
    noise, number = away(cell)
    if noise > FAR_NOISE or number > FAR_WORKERS or cell.data != data:
        return Found(cell, FAR)
    return Found(cell, HERE if noise == number == 1 else NEAR)


def _check_noise(tokens: int | None, agreement: float | None) -> None:
    if (tokens is None) == (agreement is None):
        raise ValueError(
            "give one of --tokens-per-worker (tokens=), what ONE worker sees in a step, its batch times "
            "the length, and --agreement (agreement=), the votes/agreement of lioncub_jax.metrics in a job "
            "that runs: the noise of a worker's gradient decides more than the network does"
        )
    if tokens is not None:
        check_number(
            f"tokens={tokens!r}", tokens, lambda n: n >= WINDOW,
            f"nobody measured less than one window of {WINDOW} tokens a worker and step; give its batch "
            "times the length, of one worker and not of a device or of all",
            int,
        )  # fmt: skip
    if agreement is not None:
        check_number(
            f"agreement={agreement!r}", agreement, lambda a: 0.5 <= a <= 1,
            "give votes/agreement, from 0.5, where votes are coin flips, to 1, where all are alike",
        )  # fmt: skip


def _signal(agreement: Any) -> float:
    return max(
        agreement - 0.5, 1e-9
    )  # of coins there is none, and they are still nearest to the least


def _ratio(a: float, b: float) -> float:
    return max(a / b, b / a)


@functools.cache
def packaged() -> Evidence:
    """What comes with the library."""
    return read(Path(__file__).with_name("evidence.json"))


def read(path: Path) -> Evidence:
    """Reads evidence from a file.

    Raises:
      ValueError: for a file of another version.
    """
    found = json.loads(path.read_text())
    if found.get("version") != VERSION:
        raise ValueError(
            f"{path}: evidence of version {found.get('version')!r}, and this library reads {VERSION}; "
            "install it again, or make the file by the benchmarks of its own version"
        )
    cells = []
    for row in found["cells"]:
        methods = {name: _made(Learned, one) for name, one in row["methods"].items()}
        cells.append(_made(Cell, row | {"methods": methods}))
    return Evidence(found["study"], tuple(cells))


def _made(kind: type[Made], row: Mapping[str, Any]) -> Made:
    """Of the fields that it has: a file may say more."""
    return kind(*(row.get(name) for name in kind._fields))  # type: ignore[attr-defined]
