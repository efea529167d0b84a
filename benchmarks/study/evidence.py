"""What the planner knows about learning: how many times float32 Lion's steps each method takes to its loss.

Of every task, split and number of workers, by the curves of the validation loss, with a running minimum,
averaged over the seeds that a method and Lion both have:

    target = what Lion's curve is after 60, 80 or 100 % of its run
    factor = steps at which the method's curve is first at or below it, over Lion's own

Between points a curve is a line; before the first it is not known, so no factor is less than what the first
point allows. A method that does not get there in a run of the same length has no factor. The spread
is the standard deviation of the factors of single seeds.
"""

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

from report import Rows

from lioncub_jax.planner.evidence import TARGETS

Curve = list[tuple[float, float]]  # steps and the least loss so far

# Parts whose batch is the same for all numbers of workers; a method's runs are those of the first that has
# them, so that Lion and the votes have the rates that they were tuned to.
PARTS = ("main", "noniid", "ablation", "peers")
LOSS = {"images": "loss", "text": "bits_per_byte"}
SPLITS = {"iid": "alike", "class": "different"}
BASELINE = "lion"
DIGITS = 4


class Told(NamedTuple):
    """What another study says.

    Attributes:
      tasks: by name, as `about` has them.
      factors: of methods on them, as the packaged file has them.
    """

    tasks: dict[str, Any]
    factors: list[dict[str, Any]]


def evidence(rows: Rows, more: Told | None = None) -> dict[str, Any]:
    """What the packaged file holds, with what else was measured.

    Raises:
      ValueError: for rows without any of float32 Lion.
    """
    found, more = runs(rows), more or Told({}, [])
    if not any(method == BASELINE for *_, method in found):
        raise ValueError(
            f"no rows of {BASELINE!r} in the parts {', '.join(PARTS)}: run them first, for factors are of "
            "its steps"
        )
    factors = [
        {"task": task, "data": SPLITS[split], "workers": workers, "method": method, **told}
        for (task, split, workers, method), own in sorted(found.items())
        if (told := compared(own, found.get((task, split, workers, BASELINE), {})))
    ]
    return {
        "targets": list(TARGETS),
        "tasks": about(rows, {one["task"] for one in factors}) | more.tasks,
        "factors": [*factors, *more.factors],
    }


def runs(rows: Rows) -> dict[tuple[str, str, int, str], dict[int, Curve]]:
    """Curves by task, split, workers and method, and then by seed."""
    parts: dict[Any, dict[str, dict[int, Curve]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["part"] in PARTS and row["split"] in SPLITS:
            key = row["task"], row["split"], row["workers"], row["method"]
            parts[key][row["part"]][row["seed"]] = curve_of(row)
    return {key: of[min(of, key=PARTS.index)] for key, of in parts.items()}


def about(rows: Rows, tasks: set[str]) -> dict[str, Any]:
    """What the tasks are; raises ``ValueError`` where rows of one task differ in that."""
    told = {}
    for task in sorted(tasks):
        of = [row for row in rows if row["task"] == task and row["part"] in PARTS]
        facts = {(row["dataset"], row["parameters"], row["steps"]) for row in of}
        if len(facts) > 1:
            raise ValueError(f"{task}: rows of more than one study cannot be compared: {facts}")
        told[task] = dict(zip(("dataset", "parameters", "steps"), facts.pop(), strict=True))
    return told


def curve_of(row: dict[str, Any]) -> Curve:
    """The points of a run; what is no number is infinite, for nothing is reached there."""
    losses = [inf if x is None else x for x in row["curve"][LOSS[row["task"]]]]
    return [(row["steps"] * (i + 1) / len(losses), x) for i, x in enumerate(losses)]


def falling(curves: Sequence[Curve]) -> Curve:
    """Their mean, as the least loss so far."""
    found: Curve = []
    least = inf
    for points in zip(*curves, strict=True):
        least = min(least, statistics.fmean(x for _, x in points))
        found.append((points[0][0], least))
    return found


def compared(own: dict[int, Curve], lion: dict[int, Curve]) -> dict[str, Any] | None:
    """Factors at each target with their spread over seeds; None without two seeds that both have."""
    seeds = sorted(own.keys() & lion.keys())
    if len(seeds) < 2:
        return None
    of = [factors([own[seed]], [lion[seed]]) for seed in seeds]
    singles = [[one for one in at if one is not None] for at in zip(*of, strict=True)]
    return {
        "factor": rounded(factors([own[s] for s in seeds], [lion[s] for s in seeds])),
        "std": rounded([statistics.stdev(at) if len(at) > 1 else None for at in singles]),
        "seeds": len(seeds),
        "reached": [len(at) for at in singles],  # by how many of them, one by one
    }


def factors(own: Sequence[Curve], lion: Sequence[Curve]) -> list[float | None]:
    """At each target; None where it is not reached."""
    ours, theirs = falling(own), falling(lion)
    found: list[float | None] = []
    for share in TARGETS:
        target = at(theirs, share * theirs[-1][0])
        there = reaches(theirs, target)
        steps = None if target == inf else reaches(ours, target)
        found.append(None if steps is None or there is None else steps / there)
    return found


def at(curve: Curve, steps: float) -> float:
    """The loss after so many steps: of the line between points."""
    for (before, high), (after, low) in itertools.pairwise(curve):
        if before <= steps <= after:
            return (
                low if steps == after else high + (low - high) * (steps - before) / (after - before)
            )
    return curve[0][1] if steps < curve[0][0] else curve[-1][1]


def reaches(curve: Curve, target: float) -> float | None:
    """Steps until the loss is no more than that; None if it never is."""
    before, high = curve[0]
    if high <= target:
        return before
    for after, low in curve[1:]:
        if low <= target:
            share = 1.0 if high == inf else (high - target) / (high - low)
            return before + share * (after - before)
        before, high = after, low
    return None


def rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if x is None else float(f"{x:.{DIGITS}g}") for x in values]


def text_of(found: dict[str, Any]) -> str:
    """JSON with a line for each factor, so that what changes shows."""
    lines = ",\n".join(f"  {json.dumps(one)}" for one in found["factors"])
    head = json.dumps({k: v for k, v in found.items() if k != "factors"}, indent=1)
    return f'{head.removesuffix("}").rstrip()},\n "factors": [\n{lines}\n ]\n}}\n'
