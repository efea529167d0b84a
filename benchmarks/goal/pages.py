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
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import report

import lioncub_jax as lc
from goal import answer, curves, published
from goal.contenders import CODED, CONTENDERS, FULL, OURS, WARMUP, Hyper, contender_named
from goal.evidence import TARGET, TARGETS
from goal.lab import NOTHING, TORCH, UNSHAPED, WORKERS
from goal.model import STEPS
from lioncub_jax.audit import units
from lioncub_jax.tools import plan as planner
from lioncub_jax.tools.cli import main as cli
from lioncub_jax.tools.plan import parameters_in

ROOT = Path(__file__).parents[2]
WITHOUT = "nobody"  # the first where no method gets there
Found = dict[str, Any]  # what the packaged file holds
PAGES = {
    "README.md": ("answer", "losses", "sooner"),
    "docs/how_to/planner.md": (),
    "docs/explain/planner.md": ("shares", "published", "measured"),
    "docs/how_to/choose.md": ("what to use",),
    "docs/reports/learnt.md": ("learnt",),
    "docs/reports/convergence.md": (
        "lengths", "reason", "tokens to a loss", "sizes", "tuning", "not run", "batches",
    ),
    "docs/reports/benchmarks.md": ("seconds", "time to loss"),
}  # fmt: skip
NONE = "Nothing was timed with this version yet.\n"
PRINTED = re.compile(r"(<!-- plan -->\n```console\n\$ lioncub )(.*)\n(?s:.*?)```")
# For the planner, of 4 workers on 2 cores: a message by Gloo, from an unshaped float32 mean of 27 arrays
# over its 108 hops; bits a second of an unshaped link.
LATENCY, LOOPBACK = 1.2e-3, 8e9
WARM = WARMUP / STEPS  # of 1-bit Adam
WITHIN = 1.05  # of the best's time: less is not worth a change


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
    return name not in TORCH and contender_named(name).side == OURS


def code_of(name: str) -> str:
    """The code of a method in a program."""
    if name in TORCH:
        return f"PyTorch: {name.removeprefix('torch-')}"
    one = contender_named(name)
    return one.code + f", {one.accumulate} micro-steps" * (one.accumulate > 1)


def steps_of(packaged: Found, tokens: int, workers: int, share: float = TARGET) -> dict[str, float]:
    """Steps to a loss of all methods that get there; PyTorch's are those of the same method in JAX."""
    place = TARGETS.index(share)
    steps = {
        name: of["steps"][place]
        for cell in packaged["cells"]
        if (cell["tokens"], cell["workers"], cell["data"]) == (tokens, workers, "alike")
        for name, of in cell["methods"].items()
        if of["steps"][place] is not None
    }
    return steps | {name: steps[like] for name, like in TORCH.items() if like in steps}


def step_seconds(packaged: Found, cell: Cell) -> dict[tuple[str, str], float]:
    """Seconds of a step, by method and stage."""
    return {
        (one["method"], one["stage"]): one["seconds"]
        for one in packaged["times"]
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


def times(packaged: Found, cell: Cell, share: float = TARGET) -> dict[str, float]:
    """Seconds to the loss in the lab, the first first."""
    timed = step_seconds(packaged, cell)
    each = {
        name: took
        for name, steps in steps_of(packaged, cell.tokens, WORKERS, share).items()
        if (took := seconds_to(name, steps, timed)) is not None
    }
    return dict(sorted(each.items(), key=lambda one: one[1]))


def limit(packaged: Found, cell: Cell, share: float = TARGET) -> float | None:
    """Seconds of the better optimizer in full precision, by steps without communication."""
    steps = steps_of(packaged, cell.tokens, WORKERS, share)
    no_exchange = step_seconds(packaged, cell).get((NOTHING, ""))
    known = [steps[name] for name in ("lion", "adamw") if name in steps]
    return min(known) * no_exchange if known and no_exchange is not None else None


def cells(packaged: Found) -> list[Cell]:
    """Those of the lab that were timed."""
    return sorted({Cell(one["tokens"], one["network"]) for one in packaged["times"]})


def first(times: dict[str, float], some: Iterable[str]) -> str:
    """The first of some methods."""
    there = set(some)
    return min((name for name in times if name in there), key=times.__getitem__, default=WITHOUT)


def speedup(times: dict[str, float]) -> tuple[str, str, float | None]:
    """The best of ours, the best of others, and how many times faster ours is."""
    own, other = (first(times, (n for n in times if ours(n) == yes)) for yes in (True, False))
    if WITHOUT in (own, other):
        return own, other, None
    return own, other, rounded(times[other] / times[own])


def advised(packaged: Found, cell: Cell) -> tuple[str, float] | None:
    """Whom the planner names in a cell of the lab, and its measured time over that of the first."""
    known = {scheme.learns for scheme in planner.SCHEMES}  # PyTorch's are not the planner's to name
    took = {name: x for name, x in times(packaged, cell).items() if name in known}
    no_exchange = step_seconds(packaged, cell).get((NOTHING, ""))
    if not took or no_exchange is None:
        return None
    rate = LOOPBACK if cell.network == UNSHAPED else units.rate(cell.network)
    at = planner.Cluster(WORKERS, planner.Link(rate, LATENCY), on_cpu=True)
    plan = planner.plan(curves.shapes(), at, no_exchange, tokens=cell.tokens)
    name = plan.rows[plan.use()].scheme.learns
    return name, rounded(took.get(name, math.inf) / min(took.values()))


def keys(packaged: Found) -> dict[str, Any]:
    """Figures that no table has: what the planner advises, and its time over the best of its own."""
    advice = {str(cell): advised(packaged, cell) for cell in cells(packaged)}
    near = [one[1] <= WITHIN for one in advice.values() if one]
    return {"advice": advice, "advice_agrees": sum(near) / len(near) if near else None}


def rounded(x: float) -> float:
    return float(f"{x:.3g}")


# --- Tables


def rewritten(packaged: Found, tables: Mapping[str, str]) -> dict[Path, str]:
    """Each page with its tables; those of the study of lengths are given."""
    made: dict[str, Callable[[], str]] = {
        "answer": answer.answer_text,
        "what to use": answer.what_to_use_text,
        "sooner": lambda: sooner(packaged),
        "shares": published.shares,
        "published": published.table,
        "measured": published.measured,
        "seconds": lambda: seconds(packaged),
        "time to loss": lambda: speedups(packaged),
    }
    pages = {}
    for name, places in PAGES.items():
        text = (ROOT / name).read_text()
        for place in places:
            text = report.written(text, place, tables.get(place) or made[place]())
        pages[ROOT / name] = PRINTED.sub(printed, text)
    return pages


def printed(at: re.Match[str]) -> str:
    """A command of the planner, and what it prints, in lines that fit a page."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        cli(shlex.split(at[2]))
    lines = [textwrap.fill(line, 108) for line in out.getvalue().splitlines()]
    return f"{at[1]}{at[2]}\n{chr(10).join(lines)}\n```"


@functools.cache
def bits(name: str, workers: int) -> float:
    """That a worker sends for a parameter of this model, in the mean of its steps."""
    one, stages = contender_named(name), sent(name, workers)
    whole = WARM * stages[0] + (1 - WARM) * stages[-1] if len(one.stages) > 1 else stages[-1]
    if one.syncs_every:
        whole += (stages[0] - whole) / one.syncs_every
    return 8 * whole / parameters_in(curves.shapes()) / one.local_steps / one.accumulate


def sent(name: str, workers: int) -> list[float]:
    """Bytes of an exchange, the most first."""
    at = lc.Workers(jax.sharding.AbstractMesh((workers,), ("data",)), "data")
    tx = contender_named(name).made(Hyper(1e-3, 0.9, 0.99, 0.1), lambda t: 1e-3, at)
    return sorted(lc.audit.of(tx, curves.shapes(), at).stages, reverse=True)


def seconds(packaged: Found) -> str:
    """Milliseconds of a step in the lab, and seconds to the loss."""
    some = cells(packaged)
    if not some:
        return NONE
    head = ["method", *map(str, some)]
    names = dict.fromkeys(name for cell in some for name in times(packaged, cell))
    lines = [
        [f"`{code_of(name)}`", *(lab_cell(packaged, cell, name) for cell in some)] for name in names
    ]
    limits = ["JAX, no communication", *(lab_cell(packaged, cell, NOTHING) for cell in some)]
    return report.markdown(head, [*lines, limits])


def lab_cell(packaged: Found, cell: Cell, name: str) -> str:
    timed = [s for (n, _), s in step_seconds(packaged, cell).items() if n == name]
    steps = " and ".join(f"{1e3 * s:.0f}" for s in timed)
    known = times(packaged, cell) | {NOTHING: limit(packaged, cell)}
    took = known.get(name)
    return f"{steps} ms" * bool(steps) + (f", {took:.1f} s" if took else "")


def speedups(packaged: Found) -> str:
    """A table of the first in each cell, and by how much."""
    head = ["tokens a worker", "network", "best of ours", "best of others", "times faster", "limit"]

    def lines() -> Iterator[list[str]]:
        for cell in cells(packaged):
            took, bound = times(packaged, cell), limit(packaged, cell)
            own, other, ratio = speedup(took)
            best = "" if bound is None or other not in took else f"{took[other] / bound:.2f}"
            yield [
                f"{cell.tokens:,}", cell.network, own, other, number(ratio, ".2f"), best,
            ]  # fmt: skip

    return report.markdown(head, lines())


def sooner(packaged: Found) -> str:
    """How much sooner PyTorch is at the loss, in cells of the lab where it is first."""
    lines = []
    for cell in cells(packaged):
        _, other, ratio = speedup(times(packaged, cell))
        if ratio and ratio < 1 and other in TORCH:
            lines.append(f"{cell.tokens:,} tokens, {cell.network}: {1 / ratio:.1f} times")
    page = "docs/reports/benchmarks.md#time-to-loss"
    return (
        "PyTorch computes this model faster on a CPU. "
        f"In the [lab]({page}) it was sooner at the loss with {'; '.join(lines)}.\n"
    )


def number(x: float | None, form: str) -> str:
    return "" if x is None else format(x, form)
