"""What the planner says, in cells of the lab beside what was measured, and for networks that no lab has.

In the lab it is given what its user knows: the links, the time of a step that sends nothing, and what
packing takes on that machine, which `CPU_MEMORY` stands for.
"""

import math
from typing import Any, NamedTuple

from goal import curves, summary
from goal.lab import NOTHING, UNSHAPED, WORKERS
from goal.summary import Cell, Found
from lioncub_jax.audit import units
from lioncub_jax.tools import plan as planner
from lioncub_jax.tools.plan import evidence

# Of 4 workers on 2 cores. A message by Gloo: an unshaped float32 mean of 27 arrays, over its 108 hops.
# Bits of memory a second, and of an unshaped link.
LATENCY, CPU_MEMORY, LOOPBACK = 1.2e-3, 8e9, 8e9
WITHIN = 1.05  # of the best's time: less is not worth a change
# GPT-2 small, 16,384 tokens for each H100: 6 flops a token and parameter, 40 % of 756 Tflop/s in bfloat16.
SIZE, COMPUTE, MACHINES, RATES = 124_000_000, 0.040, "8xh100-ethernet", ("10gbit", "100gbit")


class Planned(NamedTuple):
    """A noise in a network that was not run, on `MACHINES`.

    Attributes:
      tokens: that a worker sees in a step of the study, which stand for a noise.
      network: its rate.
      plan: what the planner says.
    """

    tokens: int
    network: str
    plan: planner.Plan

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.network}, planned"

    def speedup(self) -> tuple[str, str, float]:
        """The best of ours, the best peer or mean, and how many times faster ours is."""
        times, own, peer = (
            self.plan.times(),
            self.plan.first("ours"),
            self.plan.first("peer", "mean"),
        )
        return own, peer, summary.rounded(times[peer] / times[own])

    def limit(self) -> float:
        """Seconds of the better optimizer in full precision, by steps without communication."""
        steps = min(self.plan.rows[name].steps() for name in ("lion", "adamw"))
        return summary.rounded(steps * self.plan.compute)


def cells() -> list[Planned]:
    """Every noise that was measured, on links of each rate."""
    machines = planner.cluster_named(MACHINES).cluster
    noises = sorted({one.tokens for one in evidence.packaged().cells if one.data == "alike"})
    return [
        Planned(n, rate, planner.plan(SIZE, machines.at(units.rate(rate)), COMPUTE, tokens=n))
        for n in noises
        for rate in RATES
    ]


def advised(found: Found, cell: Cell) -> tuple[str, float] | None:
    """Whom the planner names in a cell of the lab, and its measured time over that of the first."""
    times = {name: x for name, x in summary.times(found, cell).items() if name in _known()}
    alone = summary.step_seconds(found, cell).get((NOTHING, ""))
    if not times or alone is None:
        return None
    rate = LOOPBACK if cell.network == UNSHAPED else units.rate(cell.network)
    at = planner.Cluster(
        WORKERS, planner.Link(rate, LATENCY), on_cpu=True, memory_bandwidth=CPU_MEMORY
    )
    plan = planner.plan(curves.shapes(), at, alone, tokens=cell.tokens)
    name = plan.rows[plan.use()].scheme.learns
    return name, times.get(name, math.inf) / min(times.values())


def _known() -> set[str]:
    """PyTorch's are not the planner's to name."""
    return {scheme.learns for scheme in planner.SCHEMES}


def keys(found: Found) -> dict[str, Any]:
    """The figures of the benchmark."""
    told: dict[str, Any] = summary.keys(found)
    for one in cells():
        told["speedup_over_best_peer"][str(one)] = one.speedup()
        told["limit"][str(one)] = one.limit()
    said = {str(cell): advised(found, cell) for cell in summary.cells(found)}
    told["advice"] = {cell: one and (one[0], summary.rounded(one[1])) for cell, one in said.items()}
    known = [one[1] <= WITHIN for one in said.values() if one]
    told["advice_agrees"] = sum(known) / len(known) if known else None
    return told
