"""Rows by setting, and what a loss costs in tokens, read from the lengths of runs.

A line goes through the last losses of AdamW over the logarithm of its tokens. It says after how many tokens
AdamW is at the last loss of a method, each with a schedule made for its length. Losses fall less and less,
so what is behind AdamW is behind at least so much.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

from report import Rows, rows_of

from goal import curves
from goal.contenders import Hyper
from goal.model import LONGER, STEPS, WIDTH
from goal.paired import Difference, Pooled, pooled

BASE = "adamw"
BEYOND = 2.0  # times shorter than AdamW's runs: the line is drawn no further
Point = tuple[float, float]  # the logarithm of steps, and a last loss


class Key(NamedTuple):
    """A cell, in the order of the file.

    Attributes:
      data: "alike" or "different".
      tokens: that a worker sees in a step.
      workers: how many.
      width: of the model.
      steps: of a worker in a run; those of runs half as long again are in the cell of the others.
    """

    data: str
    tokens: int
    workers: int
    width: int
    steps: int

    @classmethod
    def of(cls, run: curves.Run) -> "Key":
        steps = STEPS if run.steps == LONGER else run.steps
        return cls(run.data, run.tokens, run.workers, run.width, steps)


def chosen(rows: Rows, steps: int) -> Rows:
    """Runs of the choice that ran with most seeds; of several the one with the least loss."""
    each: dict[Hyper, Rows] = defaultdict(list)
    for row in rows:
        each[curves.hyper_of(row)].append(row)

    def worth(some: Rows) -> tuple[int, float]:
        seen = usual(some, steps)
        return -len(seen), min((last(row) for row in seen), default=math.inf)

    return min(each.values(), key=worth)


def last(row: dict[str, Any]) -> float:
    """The loss at the end; infinite for a run that diverged."""
    return math.inf if row["loss"][-1] is None else row["loss"][-1]


def usual(rows: Rows, steps: int) -> Rows:
    """Those of runs that are not half as long again."""
    return [row for row in rows if row["steps"] == steps]


class Cell:
    """The runs of a setting.

    Attributes:
      all: every run of each method.
      chosen: those of its best hyperparameters.
      rows: those of the setting's length.
      losses: their last losses by seed, of methods of which no run diverged.
    """

    def __init__(self, key: Key, methods: Mapping[str, Rows]):
        self.all = methods
        self.chosen = {name: chosen(rows, key.steps) for name, rows in methods.items()}
        self.rows = {name: usual(rows, key.steps) for name, rows in self.chosen.items()}
        self.losses = {
            name: {row["seed"]: last(row) for row in rows}
            for name, rows in self.rows.items()
            if rows and all(math.isfinite(last(row)) for row in rows)
        }

    @cached_property
    def pooled(self) -> Pooled:
        return pooled(self.losses)

    def behind(self, name: str, other: str = BASE) -> Difference | None:
        """The loss of a method less that of another; None where one did not run, or diverged."""
        return self.pooled.less(name, other) if self.losses else None


Cells = Mapping[Key, Cell]


def cells_of(rows: Rows) -> Cells:
    """All cells, each run once, in the order of their keys."""
    result: dict[Key, dict[str, Rows]] = defaultdict(lambda: defaultdict(list))
    for run, row in {curves.key_of(row): row for row in rows_of(rows, part="curve")}.items():
        if run is not None:
            result[Key.of(run)][run.contender].append(run._asdict() | row)
    return {key: Cell(key, methods) for key, methods in sorted(result.items())}


# --- Tokens to a loss


class Reading(NamedTuple):
    """Tokens of a method over those after which AdamW is at the same loss.

    Attributes:
      ratio: of the tokens.
      error: half of its 95 % interval; None where nothing ran twice.
      beyond: whether AdamW's runs are not on both sides.
    """

    ratio: float
    error: float | None
    beyond: bool


def reading(name: str, cells: Cells, goal: Key) -> Reading | None:
    """Reads a ratio off AdamW's line; None where there is no line, or where it does not come there."""
    behind, piece = cells[goal].behind(name), piece_at(cells, goal)
    if behind is None or piece is None:
        return None
    (start, high), (end, low) = piece
    slope, here = (high - low) / (end - start), math.log(goal.steps)
    away = behind.value / slope
    if away > here - min(start, here) + math.log(BEYOND):
        return None
    ratio, error = math.exp(away), behind.error
    beyond = not start <= here - away <= end
    return Reading(ratio, error and ratio * error / slope, beyond)


def piece_at(cells: Cells, goal: Key) -> tuple[Point, Point] | None:
    """The last losses of AdamW on both sides, of the same width or else of the usual one."""
    for width in (goal.width, WIDTH):
        points = sorted(
            (math.log(key.steps), cell.pooled.means[BASE])
            for key, cell in cells.items()
            if (*key[:3], key.width) == (*goal[:3], width) and BASE in cell.losses
        )
        pieces = list(itertools.pairwise(points))
        before = [piece for piece in pieces if piece[0][0] < math.log(goal.steps)]
        if pieces:
            return before[-1] if before else pieces[0]
    return None
