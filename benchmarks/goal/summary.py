"""Steps to the loss times seconds of a step: who is first with each noise in each network."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import report
from rich.console import Console

from goal.contenders import CODED, CONTENDERS, FULL, OURS, WARMUP
from goal.lab import NOTHING, TORCH, UNSHAPED, WORKERS
from lioncub_jax.tools.plan.evidence import TARGET, TARGETS

WITHOUT = "nobody"  # who is first where nobody gets there
Found = dict[str, Any]  # what the packaged file holds


class Cell(NamedTuple):
    """A noise in a network.

    Attributes:
      tokens: that a worker sees in a step.
      network: its rate.
    """

    tokens: int
    network: str

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.network}"


def ours(name: str) -> bool:
    return name in CONTENDERS and CONTENDERS[name].whose == OURS


def code_of(name: str) -> str:
    """How a method is written in a program."""
    return (
        CONTENDERS[name].code if name in CONTENDERS else f"PyTorch: {name.removeprefix('torch-')}"
    )


def steps_of(found: Found, tokens: int, workers: int, share: float = TARGET) -> dict[str, float]:
    """Steps to a loss of all methods that get there; PyTorch's are those of the same method in JAX."""
    place = TARGETS.index(share)
    steps = {
        name: of["steps"][place]
        for cell in found["cells"]
        if (cell["tokens"], cell["workers"], cell["data"]) == (tokens, workers, "alike")
        for name, of in cell["methods"].items()
        if of["steps"][place] is not None
    }
    return steps | {name: steps[like] for name, like in TORCH.items() if like in steps}


def step_seconds(found: Found, cell: Cell) -> dict[tuple[str, str], float]:
    """Of a step, by method and stage."""
    return {
        (one["method"], one["stage"]): one["seconds"]
        for one in found["times"]
        if (one["tokens"], one["network"]) == cell
    }


def seconds_to(name: str, steps: float, timed: dict[tuple[str, str], float]) -> float | None:
    """Steps times seconds; None where a stage was not timed."""
    kinds = {"": steps}
    if name in CONTENDERS and len(CONTENDERS[name].stages) > 1:
        kinds = {FULL: min(steps, WARMUP), CODED: max(steps - WARMUP, 0)}
    if any((name, stage) not in timed for stage in kinds):
        return None
    return sum(n * timed[name, stage] for stage, n in kinds.items())


def times(found: Found, cell: Cell, share: float = TARGET) -> dict[str, float]:
    """Seconds to the loss in the lab, the first first."""
    timed = step_seconds(found, cell)
    each = {
        name: took
        for name, steps in steps_of(found, cell.tokens, WORKERS, share).items()
        if (took := seconds_to(name, steps, timed)) is not None
    }
    return dict(sorted(each.items(), key=lambda one: one[1]))


def limit(found: Found, cell: Cell, share: float = TARGET) -> float | None:
    """Seconds of the better optimizer in full precision, by steps without communication."""
    steps = steps_of(found, cell.tokens, WORKERS, share)
    alone = step_seconds(found, cell).get((NOTHING, ""))
    known = [steps[name] for name in ("lion", "adamw") if name in steps]
    return min(known) * alone if known and alone is not None else None


def cells(found: Found) -> list[Cell]:
    """Those of the lab that were timed."""
    return sorted({Cell(one["tokens"], one["network"]) for one in found["times"]})


def drawn(cell: Cell) -> bool:
    """Whether the picture of seconds shows it: it has those whose network has a rate."""
    return cell.network != UNSHAPED


def first(times: dict[str, float], some: Iterable[str]) -> str:
    """Who of some is first."""
    there = set(some)
    return min((name for name in times if name in there), key=times.__getitem__, default=WITHOUT)


def speedup(times: dict[str, float]) -> tuple[str, str, float | None]:
    """The best of ours, the best peer, and how many times faster ours is."""
    own, peer = (first(times, (n for n in times if ours(n) == yes)) for yes in (True, False))
    if WITHOUT in (own, peer):
        return own, peer, None
    return own, peer, rounded(times[peer] / times[own])


def keys(found: Found) -> dict[str, Any]:
    """The figures of the benchmark."""
    told: dict[str, Any] = {"speedup_over_best_peer": {}, "limit": {}}
    for cell in cells(found):
        told["speedup_over_best_peer"][str(cell)] = speedup(times(found, cell))
        bound = limit(found, cell)
        told["limit"][str(cell)] = None if bound is None else rounded(bound)
    return told


def rounded(x: float) -> float:
    return float(f"{x:.3g}")


def show(found: Found, console: Console) -> None:
    """A table for each cell, the first first."""
    for cell in cells(found):
        timed, bound = step_seconds(found, cell), limit(found, cell)
        at = {share: times(found, cell, share) for share in TARGETS}
        names = [*at[TARGET], *(n for n in at[TARGETS[0]] if n not in at[TARGET])]
        lines = [
            [
                name,
                " and ".join(f"{1e3 * s:.0f}" for (n, _), s in timed.items() if n == name),
                *(f"{at[share][name]:.1f}" if name in at[share] else "never" for share in TARGETS),
            ]
            for name in names
        ]
        title = f"{cell}: seconds to the loss; the limit is {bound or math.nan:.1f}"
        head = ["method", "ms a step", *(f"{share:.0%}" for share in TARGETS)]
        console.print(report.table(title, head, lines))
