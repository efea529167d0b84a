"""Rows by setting, and what a loss costs in tokens, read from the lengths of runs.

A line goes through the last losses of a method over the logarithm of its tokens. Where it comes to the
last loss of AdamW in a setting, there are the method's tokens to that loss, with a schedule made for it. A
method that ran in one length is taken to have the slope of AdamW.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from report import Rows, rows_of

from goal import curves
from goal.contenders import Hyper
from goal.model import LONGER, STEPS, WIDTH
from goal.paired import Difference, Pooled, pooled

BASE = "adamw"
BEYOND = 2.0  # times the longest run of a method, or its shortest: lines are drawn no further
Points = Sequence[tuple[float, float]]  # logarithms of steps, and last losses


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
    def of(cls, row: dict[str, Any]) -> "Key":
        steps = STEPS if steps_of(row) == LONGER else steps_of(row)
        return cls(row["data"], row["tokens"], row["workers"], row.get("width", WIDTH), steps)


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
    return [row for row in rows if steps_of(row) == steps]


def steps_of(row: dict[str, Any]) -> int:
    """Steps of the run of a row."""
    return row.get("steps", STEPS)


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
            result[Key.of(row)][row["contender"]].append(row)
    return {key: Cell(key, methods) for key, methods in sorted(result.items())}


# --- Tokens to a loss


class Reading(NamedTuple):
    """Tokens of a method to the last loss of AdamW in a setting, over AdamW's.

    Attributes:
      ratio: of the tokens.
      error: half of its 95 % interval; None where nothing ran twice.
      beyond: whether no runs of the method are on both sides.
    """

    ratio: float
    error: float | None
    beyond: bool


def reading(name: str, cells: Cells, goal: Key) -> Reading | None:
    """Reads a ratio off a line; None where there is no line, or where it does not come there."""
    points, slope = points_of(name, cells, goal), slope_at(cells, goal)
    start, target = math.log(goal.steps), cells[goal].pooled.means[BASE]
    if len(points) == 1 and points[0][0] == start and slope is not None:
        at = start + (target - points[0][1]) / slope
        found = (at, slope) if abs(at - start) <= math.log(BEYOND) else None
    else:
        found = crossing(points, target)
    if found is None:
        return None
    at, slope = found
    ratio, behind = math.exp(at - start), cells[goal].behind(name)
    error = behind.error and ratio * behind.error / abs(slope) if behind else None
    return Reading(ratio, error, not points[0][0] <= at <= points[-1][0])


def points_of(name: str, cells: Cells, goal: Key) -> Points:
    """The last losses of a method in a setting, for all lengths of runs."""
    return sorted(
        (math.log(key.steps), cell.pooled.means[name])
        for key, cell in cells.items()
        if key[:4] == goal[:4] and name in cell.losses
    )


def slope_at(cells: Cells, goal: Key) -> float | None:
    """AdamW's slope beside a length, of the same width or else of the usual one; None for one length."""
    for width in (goal.width, WIDTH):
        pieces = list(itertools.pairwise(points_of(BASE, cells, goal._replace(width=width))))
        if pieces:
            before = [piece for piece in pieces if piece[0][0] < math.log(goal.steps)]
            (start, high), (end, low) = before[-1] if before else pieces[0]
            return (low - high) / (end - start)
    return None


def crossing(points: Points, target: float) -> tuple[float, float] | None:
    """The place where a line through points first falls to a target, and its slope there.

    The first piece begins and the last one ends `BEYOND` times outside of the runs.
    """
    more = math.log(BEYOND)
    for (before, high), (after, low) in itertools.pairwise(points):
        slope = (low - high) / (after - before)
        at = before + (target - high) / slope if slope < 0 else math.inf
        first, last = before == points[0][0], after == points[-1][0]
        if before - more * first <= at <= after + more * last:
            return at, slope
    return None
