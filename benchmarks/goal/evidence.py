"""The results of all rows, of which `lioncub_jax/tools/plan/evidence.json` has what the planner reads.

Of every cell of noise, workers and data, by curves of the validation loss, averaged over seeds, with a
running minimum:

    target = where the better of float32 Lion and AdamW stands after 60, 80 or 100 % of its run
    steps  = those at which a method's mean curve is first at or below it

Between points a curve is a line; before the first it is not known. The rate falls to zero at the end of a
run, so a method that ends a little above the target runs once more, half as long again. Who does not get
there in that either has no steps. The error is the standard error of the steps of single seeds. Where
several ran and only one got there itself, steps are not measured: the mean hangs on that one. The rate and
the decay are divided by those of AdamW in the cell.

The planner has one ratio of tokens for each method, ``to_loss``. Where AdamW ran in several lengths it is
`settings.reading`; elsewhere it is the steps to the target of 80 %, over those of AdamW.
"""

import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from report import Rows, rows_of

from goal import curves
from goal.contenders import GONE, Hyper
from goal.model import STEPS
from goal.settings import BASE, Cells, Key, cells_of, last, piece_at, reading, usual

TARGETS = (
    0.6,
    0.8,
    1.0,
)  # shares of the better float32 optimizer's run, after which its loss is a target
TARGET = 0.8  # of the tables of time to the loss
RANKED = TARGETS.index(TARGET)
ONE_RUN = 0.1  # relative standard error of steps that one run was seen to take
Curve = list[tuple[float, float]]  # steps and the least loss so far
BASELINES = "lion", "adamw"
TUNED = "rate_over_adamw", "b1", "b2", "decay_over_adamw"
# Without all of them a cell has no answer: of short runs, and of longer ones and other sizes.
COMPARED = {
    True: (*BASELINES, "vote", "owner-adamw", "powersgd-16"),
    False: ("adamw", "vote", "owner-adamw"),
}
DIGITS = 4


def evidence(rows: Rows) -> dict[str, Any]:
    """All cells and times.

    Raises:
      ValueError: for rows of no cell in which all ran that are compared.
    """
    known = cells_of(rows)
    compared = [
        cell_of(key, known)
        for key, cell in known.items()
        if all(name in cell.rows for name in COMPARED[key.steps == STEPS])
    ]
    if not compared:
        raise ValueError(f"no cell in which {', '.join(COMPARED[True])} ran: run them first")
    return {
        "cells": compared,
        "times": times_of(rows),
    }


def cell_of(key: Key, cells: Cells) -> dict[str, Any]:
    """All that was run in a cell."""
    steps, cell = key.steps, cells[key]
    means = {name: mean_of(cell.rows[name], steps) for name in BASELINES if name in cell.rows}
    better = min(means, key=lambda name: means[name][-1][1])
    targets = [at(means[better], share * steps) for share in TARGETS]
    adamw = curves.hyper_of(cell.rows[BASE][-1])
    methods = {
        name: learned_of(cell.chosen[name], steps, targets, adamw, name == better)
        for name in cell.rows
    }
    lines = piece_at(cells, key) is not None
    for name, how in methods.items():
        to_loss = by_line(name, cells, key) if lines else by_steps(how, methods[BASE])
        if to_loss:
            how["to_loss"] = to_loss
    return {
        "tokens": key.tokens, "workers": key.workers, "data": key.data, "steps": steps,
        "parameters": curves.size(key.width), "better": better,
        "loss": dict(zip(map(str, TARGETS), map(rounded, targets), strict=True)),
        "methods": methods,
    }  # fmt: skip


def by_line(name: str, cells: Cells, key: Key) -> dict[str, Any]:
    """Tokens over AdamW's to the same loss; no ratio for a line that does not come there."""
    read, runs = reading(name, cells, key), len(cells[key].rows[name])
    if read is None:
        return {"ratio": None, "error": 0.0, "runs": runs}
    error = ONE_RUN * read.ratio if read.error is None else read.error / 2  # of a 95 % interval
    if name == BASE:
        error = 0.0
    return {"ratio": rounded(read.ratio), "error": rounded(error), "runs": runs}


def by_steps(how: dict[str, Any], base: dict[str, Any]) -> dict[str, Any] | None:
    """Steps to the target over AdamW's; None for what is not measured."""
    steps, runs = how["steps"][RANKED], how["runs"][RANKED]
    if not runs or not steps:
        return {"ratio": None, "error": 0.0, "runs": runs} if runs else None
    ratio = steps / base["steps"][RANKED]
    error = ratio * math.hypot(relative(how), relative(base)) if how is not base else 0.0
    return {"ratio": rounded(ratio), "error": rounded(error), "runs": runs}


def relative(how: dict[str, Any]) -> float:
    """The standard error of the steps to the target, over these steps."""
    error = how["error"][RANKED]
    return ONE_RUN if error is None else error / how["steps"][RANKED]


def mean_of(rows: Rows, steps: int) -> Curve:
    """The mean curve of runs of this length."""
    return falling([curve_of(row) for row in usual(rows, steps)])


def learned_of(
    rows: Rows, steps: int, targets: Sequence[float], adamw: Hyper, defines: bool = False
) -> dict[str, Any]:
    """The entry of a method in a cell; one method defines the targets by its own mean."""
    longer = [row for row in rows if row["steps"] > steps]
    rows, hyper = usual(rows, steps), curves.hyper_of(rows[-1])
    never = None, None, len(longer or rows)
    there = [reached(rows, x, defines) or reached(longer, x) or never for x in targets]
    ends = [last(row) for row in rows]
    diverged = math.inf in ends
    return {
        "steps": [rounded(steps) for steps, _, _ in there],
        "error": [rounded(error) for _, error, _ in there],
        "runs": [runs for _, _, runs in there],
        "loss": None if diverged else rounded(statistics.fmean(ends)),
        "loss_std": None if diverged or len(ends) < 2 else rounded(statistics.stdev(ends)),
        "seeds": len(rows),
        "rate_over_adamw": rounded(hyper.rate / adamw.rate),
        "b1": hyper.b1,
        "b2": hyper.b2,
        "decay_over_adamw": rounded(hyper.decay / adamw.decay),
    }


def reached(
    rows: Rows, target: float, defines: bool = False
) -> tuple[float | None, float | None, int] | None:
    """Steps of the mean curve to a target, their standard error, and runs; None if it never is there.

    Of several runs at least two must be there themselves, or it is not measured: no steps, and no runs.
    """
    each = [curve_of(row) for row in rows]
    steps = reaches(falling(each), target) if each else None
    if steps is None:
        return None
    singles = [x for one in each if (x := reaches(falling([one]), target)) is not None]
    if len(singles) < min(2, len(rows)) and not defines:
        return None, None, 0
    count = len(singles)
    error = statistics.stdev(singles) / math.sqrt(count) if count > 1 else None
    return steps, error, len(rows)


def times_of(rows: Rows) -> list[dict[str, Any]]:
    """The last times of steps in the lab."""
    result = {
        (row["tokens"], row["network"], row["contender"], row["stage"]): row
        for row in rows_of(rows, part="time")
        if row["contender"] not in GONE
    }
    return [
        {
            "tokens": tokens, "workers": row["workers"], "network": network, "method": method,
            "stage": stage, "seconds": rounded(row["seconds"]),
            "fastest": rounded(row["fastest"]), "slowest": rounded(row["slowest"]),
            "sent_bytes": rounded(row["interface_bytes"]),
        }
        for (tokens, network, method, stage), row in sorted(result.items())
    ]  # fmt: skip


# --- Curves


def curve_of(row: dict[str, Any]) -> Curve:
    """The points of a run; what is no number is infinite, for nothing is reached there."""
    losses = [math.inf if x is None else x for x in row["loss"]]
    return [(row["steps"] * (i + 1) / len(losses), x) for i, x in enumerate(losses)]


def falling(curves: Sequence[Curve]) -> Curve:
    """Their mean, as the least loss so far."""
    steps, losses = np.moveaxis(np.array(curves), -1, 0)
    least = np.minimum.accumulate(losses.mean(axis=0))
    return list(zip(steps[0].tolist(), least.tolist(), strict=True))


def at(curve: Curve, steps: float) -> float:
    """The loss after so many steps: of the line between points."""
    points, losses = np.array(curve).T
    return float(np.interp(steps, points, losses))


def reaches(curve: Curve, target: float) -> float | None:
    """Steps until the loss is no more than that; None if it never is."""
    before, high = curve[0][0], math.inf
    for after, low in curve:
        if low <= target:
            share = 1.0 if high == math.inf else (high - target) / (high - low)
            return before + share * (after - before)
        before, high = after, low
    return None


def rounded(x: float | None) -> float | None:
    return None if x is None else float(f"{x:.{DIGITS}g}")


def text_of(result: dict[str, Any]) -> str:
    """What the planner reads, as JSON with a line for each method of a cell, so that what changes shows."""
    return "[\n" + ",\n".join(cell_text(cell) for cell in result["cells"]) + "\n]\n"


def cell_text(cell: dict[str, Any]) -> str:
    head = {field: cell[field] for field in ("tokens", "data", "steps", "parameters")}
    head = json.dumps(head | {"num_workers": cell["workers"]}).removesuffix("}")
    methods = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(how['to_loss'] | {x: how[x] for x in TUNED})}"
        for name, how in cell["methods"].items()
        if "to_loss" in how
    )
    return f' {head}, "methods": {{\n{methods}}}}}'
