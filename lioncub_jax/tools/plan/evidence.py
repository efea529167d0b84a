"""Evidence of learning: the tokens of each method to a loss, by setting.

`evidence.json`, beside this file, is made from committed rows of runs. It has a list of cells:

    {"tokens": 256, "num_workers": 8, "data": "alike", "steps": 1024, "parameters": 430720,
     "methods": {"vote": {"ratio": 1.12, "error": 0.03, "runs": 3, "rate_over_adamw": 0.35,
                          "b1": 0.8, "b2": 0.9, "decay_over_adamw": 10.0}}}

A cell is one setting: the tokens that a worker sees in a (micro-)step, workers, data, the length of a run
in (micro-)steps of a worker, and the size of the model. Cells may differ in ``steps`` or ``parameters``
alone. A method that was not measured is not there.
"""

import functools
import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lioncub_jax.exchange.checks import check_number

DATA = ("alike", "different")  # what workers see: the same kind, or classes or texts of their own
WINDOW = 32  # tokens; no worker saw less in a step
HERE, NEAR, FAR = "here", "near", "far"
FAR_TOKENS, FAR_WORKERS = 4, 2  # ratios; beyond them a cell says little
BORDER = 1.5  # a ratio, by which tokens or workers may differ from a border that is near
REFERENCE = "adamw"


class Learned(NamedTuple):
    """Learning of a method in a cell, in units of float32 AdamW there.

    Attributes:
      steps: of a worker in a run.
      parameters: of the model.
      ratio: its tokens to the loss over AdamW's; None where it was not seen to get there.
      error: standard error of that.
      runs: of the method.
      rate_over_adamw: the highest learning rate, divided by AdamW's.
      b1: weight of the momentum.
      b2: decay of Lion's momentum, or of Adam's second moment.
      decay_over_adamw: decoupled weight decay, divided by AdamW's.
    """

    steps: int
    parameters: int
    ratio: float | None
    error: float
    runs: int
    rate_over_adamw: float
    b1: float
    b2: float
    decay_over_adamw: float


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


class Found(NamedTuple):
    """The measured setting that is nearest to what was asked.

    Attributes:
      cell: the setting; of several lengths and sizes the longest run of the nearest size.
      distance: "here" for that setting itself, "near" it, or "far" from all.
      methods: each by its longest run; one without the longest is taken to need more tokens by the factor
        that the worst of the others came to need.
      neighbour: what is found on the other side of a border, where one is within ``BORDER`` times the
        tokens or the workers; None elsewhere.
    """

    cell: Cell
    distance: str
    methods: Mapping[str, Learned]
    neighbour: "Found | None" = None


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
    check_one_of("data", data, DATA)
    found = _nearest(num_workers, tokens, data, parameters)
    for x, y in ((1, 1 / BORDER), (1, BORDER), (1 / BORDER, 1), (BORDER, 1)):
        other = _nearest(x * num_workers, y * tokens, data, parameters)
        both = {other.distance, found.distance}
        crossed = FAR in both or other.cell is not found.cell
        if crossed and both != {FAR} and found.distance != HERE:
            return found._replace(neighbour=other)
    return found


def _nearest(workers: float, tokens: float, data: str, parameters: int) -> Found:
    """Finds the nearest setting, without a look at its neighbours."""

    def away(cell: Cell) -> tuple[float, float]:
        return _ratio(tokens, cell.tokens), _ratio(workers, cell.num_workers)

    def worth(cell: Cell) -> tuple[bool, float, int, float]:
        size = _ratio(parameters, cell.parameters)
        return cell.data != data, math.prod(away(cell)), -cell.steps, size

    first, *others = sorted(packaged(), key=worth)
    methods = {**first.methods}
    for cell in others:
        if (cell.data, away(cell)) == (first.data, away(first)):
            # The largest factor between ratios of tokens in shorter and in longer runs.
            both = [(methods[n].ratio, x.ratio) for n, x in cell.methods.items() if n in methods]
            grown = max([1.0, *(long / short for long, short in both if long and short)])
            for name, how in cell.methods.items():
                ratio, error = how.ratio and grown * how.ratio, grown * how.error
                methods.setdefault(name, how._replace(ratio=ratio, error=error))
    noise, number = away(first)
    far = first.data != data or noise > FAR_TOKENS or number > FAR_WORKERS
    return Found(first, FAR if far else HERE if noise == number == 1 else NEAR, methods)


def _ratio(a: float, b: float) -> float:
    return max(a / b, b / a)


def rows_of(name: str) -> Any:
    """Reads a JSON file that lies beside this module."""
    return json.loads(Path(__file__).with_name(name).read_text())


@functools.cache
def packaged() -> list[Cell]:
    """Reads what comes with the library: all settings."""
    cells = []
    for row in rows_of("evidence.json"):
        run = {field: row[field] for field in ("steps", "parameters")}
        methods = {name: Learned(**run, **how) for name, how in row["methods"].items()}
        cells.append(Cell(**row | {"methods": methods}))
    return cells
