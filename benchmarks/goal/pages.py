"""Numbers of pages, from the evidence: no page has a number of its own.

A page has a place for a table between ``<!-- name -->`` and ``<!-- end -->``; the head of the library has
the answer in short, and the planner's page what its command prints.
"""

import contextlib
import io
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report

from goal import answer, curves, planned, summary
from goal.contenders import CONTENDERS
from goal.lab import NOTHING
from lioncub_jax.tools import plan as planner
from lioncub_jax.tools.cli import main as cli
from lioncub_jax.tools.plan.evidence import TARGETS

Found = dict[str, Any]  # what the packaged file holds
ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": ("answer",),
    "docs/how_to/planner.md": (),
    "docs/how_to/choose.md": ("what to use",),
    "docs/reports/convergence.md": ("noise", "methods"),
    "docs/reports/benchmarks.md": ("seconds", "time to loss"),
}
NONE = "Nothing was timed with this version yet.\n"
PRINTED = re.compile(r"(<!-- plan -->\n```console\n\$ lioncub )(.*)\n(?s:.*?)```")
SHORT = re.compile(r"(has the code of each:\n\n)(?: {4}.*\n)+")


def rewritten(found: Found) -> dict[Path, str]:
    """Each page with its tables."""
    made = {
        "answer": answer.answer_text,
        "what to use": answer.what_to_use_text,
        "noise": lambda: noise(found),
        "methods": lambda: methods(found),
        "seconds": lambda: seconds(found),
        "time to loss": lambda: speedups(found),
    }
    pages = {}
    for name, places in PAGES.items():
        text = (ROOT / name).read_text()
        for place in places:
            text = report.written(text, place, made[place]())
        pages[ROOT / name] = PRINTED.sub(printed, text)
    head = ROOT / "lioncub_jax" / "__init__.py"
    short = textwrap.indent(answer.what_to_use_short(), "    ")
    return pages | {head: SHORT.sub(lambda at: f"{at[1]}{short}\n", head.read_text(), count=1)}


def printed(at: re.Match[str]) -> str:
    """A command of the planner, and what it prints, in lines that fit a page."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        cli(shlex.split(at[2]))
    lines = [textwrap.fill(line, 108) for line in out.getvalue().splitlines()]
    return f"{at[1]}{at[2]}\n{chr(10).join(lines)}\n```"


def noise(found: Found) -> str:
    """How noisy the cells are, and what that costs the vote and AdamW at the owner."""
    head = [
        "tokens a worker",
        "workers",
        "data",
        "agreement",
        "noise scale",
        "`lion_cub`",
        "`owner_adamw`",
    ]

    def lines() -> Iterator[list[str]]:
        for cell in found["cells"]:
            yield [
                f"{cell['tokens']:,}", str(cell["workers"]), cell["data"],
                number(cell["agreement"], ".3f"), number(cell["noise_scale"], ",.0f"),
                number(cell["vote_over_lion"], ".2f"),
                more(cell, "owner-adamw", "adamw"),
            ]  # fmt: skip

    return report.markdown(head, lines())


def more(cell: dict[str, Any], name: str, than: str) -> str:
    """Steps to the first loss, over those of the optimizer in float32."""
    own, other = (cell["methods"].get(one, {"steps": [None]})["steps"][0] for one in (name, than))
    return "not reached" if own is None or other is None else f"{own / other:.2f}"


def methods(found: Found) -> str:
    """A table for each cell: what was sent, the loss at the end, the steps, and what tuning chose."""
    head = [
        "method", "whose", "bits", "loss", *(f"{share:.0%}" for share in TARGETS), "rate", "decay", "betas",
    ]  # fmt: skip
    return "\n".join(
        f"**{cell['tokens']:,} tokens a worker, {cell['workers']} workers, data {cell['data']}**\n\n"
        + report.markdown(head, [line(cell, name, of) for name, of in cell["methods"].items()])
        for cell in found["cells"]
    )


def line(cell: dict[str, Any], name: str, of: dict[str, Any]) -> list[str]:
    std = "" if of["loss_std"] is None else f" ± {of['loss_std']:.3f}"
    loss = "diverged" if of["loss"] is None else f"{of['loss']:.3f}{std} ({of['seeds']})"
    one = CONTENDERS[name]
    steps = [
        "not measured" if not runs else "–" if x is None else f"{x:.0f}"
        for x, runs in zip(of["steps"], of["runs"], strict=True)
    ]
    betas = f"{of['b1']:g}, {of['b2']:g}"
    return [
        f"`{one.code}`", one.whose, f"{bits(name, cell['workers']):.2f}",
        loss, *steps, f"{of['rate_over_adamw']:.2g}", f"{of['decay_over_adamw']:.2g}", betas,
    ]  # fmt: skip


def bits(name: str, workers: int) -> float:
    """That a worker sends for a parameter of this model, in the mean step."""
    shapes, free = curves.shapes(), planner.Cluster(workers, planner.Link(1e9, 0.0))
    step = planner.step_time(planner.scheme_named(name), shapes, free, 1.0)
    return 8 * step.sent_bytes / planner.parameters_in(shapes)


def seconds(found: Found) -> str:
    """Milliseconds of a step in the lab; and seconds to the loss where no picture shows them."""
    cells = summary.cells(found)
    if not cells:
        return NONE
    head = ["method", *map(str, cells)]
    names = dict.fromkeys(name for cell in cells for name in summary.times(found, cell))
    lines = [
        [f"`{summary.code_of(name)}`", *(said(found, cell, name) for cell in cells)]
        for name in names
    ]
    limits = ["JAX, no communication", *(said(found, cell, NOTHING) for cell in cells)]
    return report.markdown(head, [*lines, limits])


def said(found: Found, cell: summary.Cell, name: str) -> str:
    timed = [s for (n, _), s in summary.step_seconds(found, cell).items() if n == name]
    steps = " and ".join(f"{1e3 * s:.0f}" for s in timed)
    known = summary.times(found, cell) | {NOTHING: summary.limit(found, cell)}
    took = None if summary.drawn(cell) else known.get(name)
    return f"{steps} ms" * bool(steps) + (f", {took:.1f} s" if took else "")


def speedups(found: Found) -> str:
    """Who is first in each cell, and by how much."""
    head = ["tokens a worker", "network", "best of ours", "best peer", "times faster", "limit"]

    def lines() -> Iterator[list[str]]:
        for cell in summary.cells(found):
            times = summary.times(found, cell)
            own, peer, ratio = summary.speedup(times)
            bound = summary.limit(found, cell)
            best = "" if bound is None or peer not in times else f"{times[peer] / bound:.2f}"
            yield [
                f"{cell.tokens:,}", cell.network, own, peer, number(ratio, ".2f"), best,
            ]  # fmt: skip
        for one in planned.cells():
            own, peer, ratio = one.speedup()
            left = one.plan.times()[peer] / one.limit()
            yield [
                f"{one.tokens:,}", f"{one.network}, planned", own, peer, f"{ratio:.2f}", f"{left:.2f}",
            ]  # fmt: skip

    return report.markdown(head, lines())


def number(x: float | None, form: str) -> str:
    return "" if x is None else format(x, form)
