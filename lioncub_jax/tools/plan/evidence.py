"""Evidence of learning: the tokens of each method to a loss, by setting.

`evidence.json`, beside this file, is made from committed rows of runs and read on first use. Its schema:

    {"version": 4,
     "study": {"model": "byte GPT", "dataset": "..."},
     "cells": [{"tokens": 256, "workers": 8, "data": "alike", "steps": 1024, "parameters": 430720,
                "methods": {"vote": {"to_loss": {"ratio": 1.12, "error": 0.03, "runs": 3},
                                     "rate_over_adamw": 0.35, "b1": 0.8, "b2": 0.9,
                                     "decay_over_adamw": 10.0}}}]}

A cell is one setting: the tokens that a worker sees in a (micro-)step, workers, data, the length of a run
in (micro-)steps of a worker, and the size of the model. Cells may differ in ``steps`` or ``parameters``
alone. ``to_loss`` has a method's tokens to a loss over those of float32 AdamW, their standard error, and
runs behind them; a ratio is null where the method was not seen to get there, and a method without
``to_loss`` was not measured. ``vote-micro-4`` is ``vote`` with one exchange in 4 micro-steps. Rates and
decays are in units of AdamW's. A file may say more.
"""

import functools
import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lioncub_jax.exchange.arguments import check_count, check_number

VERSION = 4  # of the packaged file
DATA = ("alike", "different")  # what workers see: the same kind, or classes or texts of their own
WINDOW = 32  # tokens; no worker saw less in a step
HERE, NEAR, FAR = "here", "near", "far"
FAR_TOKENS, FAR_WORKERS = 4, 2  # ratios; beyond them a cell says little
REFERENCE = "adamw"
LONG_RUN = 1000  # steps; in shorter ones the order of methods was another


class Learned(NamedTuple):
    """Learning of a method in a cell, in units of float32 AdamW there.

    Attributes:
      ratio: its tokens to the loss over AdamW's; infinite where it was not seen to get there.
      error: standard error of that.
      steps: of a worker in a run.
      parameters: of the model.
      runs: of the method.
      rate_over_adamw: the highest learning rate, divided by AdamW's.
      b1: weight of the momentum.
      b2: decay of Lion's momentum, or of Adam's second moment.
      decay_over_adamw: decoupled weight decay, divided by AdamW's.
    """

    ratio: float
    error: float
    steps: int
    parameters: int
    runs: int
    rate_over_adamw: float
    b1: float
    b2: float
    decay_over_adamw: float

    def with_micro_steps(self, base: "Learned", micro: "Learned") -> "Learned":
        """Returns this method with micro-steps, which cost it the tokens that they cost another."""
        ratio = self.ratio * micro.ratio / base.ratio
        error = ratio * math.hypot(self.error / self.ratio, micro.error / micro.ratio)
        rate = self.rate_over_adamw * micro.rate_over_adamw / base.rate_over_adamw
        runs = min(self.runs, micro.runs)
        return self._replace(ratio=ratio, error=error, runs=runs, rate_over_adamw=rate)

    def times(self, factor: float) -> "Learned":
        """Returns this method with so many times the tokens."""
        return self._replace(ratio=factor * self.ratio, error=factor * self.error)


class Cell(NamedTuple):
    """A setting in which methods were compared.

    Attributes:
      tokens: that a worker sees in a step.
      num_workers: how many workers.
      data: one of ``DATA``.
      steps: of a worker in a run.
      parameters: of the model.
      methods: by name; one that was not measured is not there.
    """

    tokens: int
    num_workers: int
    data: str
    steps: int
    parameters: int
    methods: Mapping[str, Learned]


class Evidence(NamedTuple):
    """All that is known.

    Attributes:
      study: what was trained: "model" and "dataset".
      cells: settings in which methods were compared.
    """

    study: Mapping[str, str]
    cells: tuple[Cell, ...]


class Found(NamedTuple):
    """The measured setting that is nearest to what was asked.

    Attributes:
      cell: the setting; of several lengths and sizes the longest run of the nearest size.
      distance: "here" for that setting itself, "near" it, or "far" from all.
      methods: each by its longest run; one without the longest is taken to need more tokens by the factor
        that the worst of the others came to need.
    """

    cell: Cell
    distance: str
    methods: Mapping[str, Learned]


def check_one_of(kind: str, name: str, known: Collection[str]) -> None:
    """Raises ``ValueError`` for a name that is not known."""
    if name not in known:
        raise ValueError(f"{kind} {name!r}: give one of {', '.join(known)}")


def cell_for(num_workers: int, tokens: int, data: str = DATA[0], parameters: int = 1) -> Found:
    """Finds the nearest setting, by the ratios of tokens and of the numbers of workers.

    Args:
      num_workers: how many workers.
      tokens: that one worker sees in a step: its batch times the length. More is less noise.
      data: what workers see, one of ``DATA``.
      parameters: of the model.

    Returns:
      A `Found`. It is "far" with more than 4 times the tokens or twice the workers of all settings, and for
      data that were not measured.

    Raises:
      ValueError: for less than a window of tokens, and for other data.

    Example:
      >>> cell_for(8, 32).distance
      'here'
    """
    check_number(
        f"tokens={tokens!r}", tokens, lambda n: n >= WINDOW,
        f"nobody measured less than one window of {WINDOW} tokens a worker and step; give its batch "
        "times the length, of one worker and not of a device or of all",
        int,
    )  # fmt: skip
    check_count(f"num_workers={num_workers!r}", num_workers)
    check_one_of("data", data, DATA)

    def ratios(cell: Cell) -> tuple[float, float]:
        return _ratio(tokens, cell.tokens), _ratio(num_workers, cell.num_workers)

    def worth(cell: Cell) -> tuple[float, int, float]:
        return math.prod(ratios(cell)), -cell.steps, _ratio(parameters, cell.parameters)

    known = packaged().cells
    cells = sorted([one for one in known if one.data == data] or known, key=worth)
    nearest = cells[0]
    methods: dict[str, Learned] = {}
    for cell in cells:
        if ratios(cell) == ratios(nearest):
            grown = _growth(cell.methods, methods)
            methods = {name: how.times(grown) for name, how in cell.methods.items()} | methods
    noise, number = ratios(nearest)
    if noise > FAR_TOKENS or number > FAR_WORKERS or nearest.data != data:
        return Found(nearest, FAR, methods)
    return Found(nearest, HERE if noise == number == 1 else NEAR, methods)


def _growth(short: Mapping[str, Learned], long: Mapping[str, Learned]) -> float:
    """The largest factor between ratios of tokens in shorter and in longer runs; at least 1."""
    each = [long[name].ratio / how.ratio for name, how in short.items() if name in long]
    return max([1.0, *(x for x in each if x < math.inf)])


def _ratio(a: float, b: float) -> float:
    return max(a / b, b / a)


def rows_of(name: str) -> Any:
    """Reads a JSON file that lies beside this module."""
    return json.loads(Path(__file__).with_name(name).read_text())


@functools.cache
def packaged() -> Evidence:
    """Reads what comes with the library."""
    return read(Path(__file__).with_name("evidence.json"))


def read(path: Path) -> Evidence:
    """Reads evidence from a file.

    Raises:
      ValueError: for a file of another version.
    """
    file = json.loads(path.read_text())
    if file.get("version") != VERSION:
        raise ValueError(
            f"{path}: evidence of version {file.get('version')!r}, and this library reads {VERSION}; "
            "install it again, or make the file by the benchmarks of its own version"
        )
    return Evidence(file["study"], tuple(map(_cell, file["cells"])))


def _cell(row: Mapping[str, Any]) -> Cell:
    """A cell of the file, with the methods that were measured."""
    methods = {}
    for name, one in row["methods"].items():
        if to_loss := one.get("to_loss"):
            methods[name] = Learned(
                ratio=math.inf if to_loss["ratio"] is None else to_loss["ratio"],
                error=to_loss["error"] or 0.0,
                runs=to_loss["runs"],
                steps=row["steps"],
                parameters=row["parameters"],
                **{field: one[field] for field in Learned._fields[-4:]},
            )
    given = {field: row[field] for field in ("tokens", "data", "steps", "parameters")}
    return Cell(num_workers=row["workers"], methods=methods, **given)
