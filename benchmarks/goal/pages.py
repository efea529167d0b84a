"""Tables of pages, from the evidence: steps to the loss times seconds of a step, and what stands behind.

No page has a number of its own. A page has a place for a table between ``<!-- name -->`` and ``<!-- end
-->``; the planner's page has what its command prints.
"""

import contextlib
import functools
import io
import math
import re
import shlex
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import report

import lioncub_jax as lc
from goal import answer, curves, published
from goal.contenders import CODED, CONTENDERS, FULL, OURS, WARMUP, Hyper, contender_named
from goal.evidence import BASELINES, RANKED
from goal.lab import NOTHING, TORCH, UNSHAPED, WORKERS
from goal.model import STEPS
from lioncub_jax.programs import units
from lioncub_jax.tools import cli
from lioncub_jax.tools import plan as planner

ROOT = Path(__file__).parents[2]
WITHOUT = "nobody"  # the first where no method gets there
PAGES = (
    "README.md", "docs/how_to/planner.md", "docs/explain/planner.md", "docs/how_to/choose.md",
    "docs/reports/learnt.md", "docs/reports/convergence.md", "docs/reports/benchmarks.md",
)  # fmt: skip
PRINTED = re.compile(r"(<!-- plan -->\n```console\n\$ lioncub )(.*)\n(?s:.*?)```")
# For the planner, of 4 workers on 2 cores: a message by Gloo, from an unshaped float32 mean of 27 arrays
# over its 108 hops; bits a second of an unshaped link.
LATENCY, LOOPBACK = 1.2e-3, 8e9
WARM = WARMUP / STEPS  # of 1-bit Adam
WITHIN = 1.05  # of the best's time: less is not worth a change


class Cell(NamedTuple):
    """A noise in a network of the lab.

    Attributes:
      tokens: that a worker sees in a step.
      network: its rate.
      seconds: of a step, by method and stage.
      steps: to the loss, of all methods that get there; PyTorch's are those of the same method in JAX.
    """

    tokens: int
    network: str
    seconds: dict[tuple[str, str], float]
    steps: dict[str, float]

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.network}"

    def times(self) -> dict[str, float]:
        """Seconds to the loss of methods of which every stage was timed, the first first."""
        result = {}
        for name, steps in self.steps.items():
            stages = {"": steps}
            if name in CONTENDERS and len(CONTENDERS[name].stages) > 1:
                stages = {FULL: min(steps, WARMUP), CODED: max(steps - WARMUP, 0)}
            if all((name, stage) in self.seconds for stage in stages):
                result[name] = sum(n * self.seconds[name, stage] for stage, n in stages.items())
        return dict(sorted(result.items(), key=lambda one: one[1]))

    def limit(self) -> float:
        """Seconds of the better optimizer in full precision, by steps without communication."""
        steps = min(self.steps[name] for name in BASELINES if name in self.steps)
        return steps * self.seconds[NOTHING, ""]


def cells(packaged: dict[str, Any]) -> list[Cell]:
    """Those of the lab that were timed, from the sums of all rows."""
    timed: dict[tuple[int, str], dict[tuple[str, str], float]] = defaultdict(dict)
    for one in packaged["times"]:
        timed[one["tokens"], one["network"]][one["method"], one["stage"]] = one["seconds"]
    return [Cell(*at, timed[at], steps_of(packaged, at[0])) for at in sorted(timed)]


def steps_of(packaged: dict[str, Any], tokens: int) -> dict[str, float]:
    """See `Cell`."""
    steps = {
        name: of["steps"][RANKED]
        for cell in packaged["cells"]
        if (cell["tokens"], cell["workers"], cell["data"]) == (tokens, WORKERS, "alike")
        for name, of in cell["methods"].items()
        if of["steps"][RANKED] is not None
    }
    return steps | {name: steps[like] for name, like in TORCH.items() if like in steps}


def ours(name: str) -> bool:
    return name not in TORCH and contender_named(name).side == OURS


def code_of(name: str) -> str:
    """The code of a method in a program."""
    if name in TORCH:
        return f"PyTorch: {name.removeprefix('torch-')}"
    one = contender_named(name)
    return one.code + f", {one.accumulate} micro-steps" * (one.accumulate > 1)


def speedup(times: dict[str, float]) -> tuple[str, str, float | None]:
    """The best of ours, the best of others, and how many times faster ours is."""
    own, other = (next((n for n in times if ours(n) == yes), WITHOUT) for yes in (True, False))
    if WITHOUT in (own, other):
        return own, other, None
    return own, other, rounded(times[other] / times[own])


def advised(cell: Cell) -> tuple[str, float]:
    """Whom the planner names in a cell of the lab, and its measured time over that of the first."""
    # PyTorch's are not the planner's to name.
    known = {scheme.learns for scheme in planner.SCHEMES.values()}
    took = {name: x for name, x in cell.times().items() if name in known}
    rate = LOOPBACK if cell.network == UNSHAPED else units.rate(cell.network)
    at = planner.Cluster(WORKERS, planner.Link(rate, LATENCY), on_cpu=True)
    plan = planner.plan(curves.size(), at, cell.seconds[NOTHING, ""], tokens=cell.tokens)
    _, row = plan.answer()
    name = row.scheme.learns if row else WITHOUT
    return name, rounded(took.get(name, math.inf) / min(took.values()))


def keys(packaged: dict[str, Any]) -> dict[str, Any]:
    """Figures that no table has: what the planner advises, and its time over the best of its own."""
    advice = {str(cell): advised(cell) for cell in cells(packaged)}
    near = [ratio <= WITHIN for _, ratio in advice.values()]
    return {"advice": advice, "advice_agrees": statistics.mean(near)}


def rounded(x: float) -> float:
    return float(f"{x:.3g}")


# --- Tables


def rewritten(packaged: dict[str, Any], tables: Mapping[str, str]) -> dict[Path, str]:
    """Each page with its tables; those of the study of lengths are given."""
    timed, made = cells(packaged), {}
    tables = {
        **tables,
        "answer": answer.answer_text(), "what to use": answer.what_to_use_text(),
        "shares": published.shares(), "published": published.table(),
        "measured": published.measured(),
        "sooner": sooner(timed), "time to loss": speedups(timed),
    }  # fmt: skip
    for name in PAGES:
        text = (ROOT / name).read_text()
        here = {place: table for place, table in tables.items() if f"<!-- {place} -->" in text}
        made[ROOT / name] = PRINTED.sub(printed, report.written(text, here))
    return made


def printed(at: re.Match[str]) -> str:
    """A command of the planner, and what it prints, in lines that fit a page."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        cli.main(shlex.split(at[2]))
    lines = [textwrap.fill(line, 108) for line in out.getvalue().rstrip().splitlines()]
    return f"{at[1]}{at[2]}\n{chr(10).join(lines)}\n```"


@functools.cache
def bits(name: str, workers: int) -> float:
    """That a worker sends for a parameter of this model, in the mean of its steps."""
    one = contender_named(name)
    at = lc.Workers(jax.sharding.AbstractMesh((workers,), ("data",)), "data")
    tx = one.made(Hyper(1e-3, 0.9, 0.99, 0.1), lambda t: 1e-3, at)
    stages = lc.audit.of(tx, curves.shapes(), at).stages
    most, whole = max(stages), min(stages)  # bytes of an exchange
    if len(one.stages) > 1:
        whole += WARM * (most - whole)
    if one.syncs_every:
        whole += (most - whole) / one.syncs_every
    return 8 * whole / curves.size() / one.local_steps / one.accumulate


def speedups(timed: list[Cell]) -> str:
    """A table of the first in each cell, with their seconds, and by how much."""
    head = ["tokens a worker", "network", "best of ours", "best of others", "times faster", "limit"]
    lines = []
    for cell in timed:
        took = cell.times()
        own, other, ratio = speedup(took)
        ratios = [f"{ratio:.2f}", f"{took[other] / cell.limit():.2f}"] if ratio else ["", ""]
        firsts = (f"{name}, {took[name]:.1f} s" if name in took else name for name in (own, other))
        lines.append([f"{cell.tokens:,}", cell.network, *firsts, *ratios])
    return report.markdown(head, lines)


def sooner(timed: list[Cell]) -> str:
    """How much sooner PyTorch is at the loss, in cells of the lab where it is first."""
    lines: list[str] = []
    for cell in timed:
        _, other, ratio = speedup(cell.times())
        if ratio and ratio < 1 and other in TORCH:
            fast = f"{1 / ratio:.1f} times{' as fast' * (not lines)}"
            lines.append(f"{fast} with {cell.tokens:,} tokens at {cell.network}")
    page = "../reports/benchmarks.md#time-to-loss"
    return (
        "PyTorch computes this model faster on a CPU. "
        f"In the [lab]({page}) it reached the loss {', '.join(lines)}.\n"
    )
