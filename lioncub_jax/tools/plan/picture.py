"""A picture of a plan: the time to the loss against the bandwidth, a line for each method that matters."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lioncub_jax.programs.units import rate_text
from lioncub_jax.tools.plan.verdict import Plan, plan

AROUND = 30  # times the given rates, to each side
POINTS = 60
GREY, MEAN, OTHER = "0.45", "the best all-reduce", "the best method of others"


def lines(one: Plan, rates: Sequence[float]) -> dict[str, list[float]]:
    """The time to the loss at each rate, over that of AdamW without a network; methods that reach it."""
    found: dict[str, list[float]] = {}
    for rate in rates:
        at = replace(one.cluster, link=replace(one.cluster.link, bandwidth=rate))
        there = plan(one.parameters, at, one.compute, tokens=one.tokens, data=one.data)
        best: dict[str, float] = {}
        for name, x in there.numbers()["methods"].items():  # the first at the loss first
            scheme = there.rows[name].scheme
            if name in one.rows and x["tokens"] and scheme.kind != "alone":
                title = {"mean": MEAN, "other": OTHER}.get(scheme.kind, scheme.title)
                best.setdefault(title, x["tokens"] * x["seconds"] / one.compute)
        for title, time in best.items():
            found.setdefault(title, []).append(time)
    return found


def draw(plans: Sequence[Plan], path: Path) -> None:
    """Draws plans of one model, which differ in their bandwidth alone.

    Raises:
      ValueError: for links that were measured, or have no rate; and without matplotlib.
    """
    given = [one.cluster.link.bandwidth for one in plans]
    if plans[0].cluster.measured or math.isinf(max(given)):
        raise ValueError(
            "--plot draws over bandwidths: give --bandwidth or --cluster, not --measured"
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'lioncub_jax[plots]'") from error
    rates = np.geomspace(min(given) / AROUND, max(given) * AROUND, POINTS)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis: Any = figure.subplots()
    for title, times in lines(plans[0], rates.tolist()).items():
        axis.plot(rates, times, label=title, color=GREY if title == MEAN else None)
    for rate in given:
        axis.axvline(rate, color="0.8", lw=1, zorder=0)
    axis.set(xscale="log", yscale="log", ylabel="time to the loss (1: AdamW without a network)")
    axis.set(xlabel="bandwidth of a worker's link; grey: as given")
    decades = 10.0 ** np.arange(math.ceil(math.log10(rates[0])), math.log10(rates[-1]))
    axis.set_xticks(decades, [rate_text(rate) for rate in decades])
    axis.yaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.legend(frameon=False)
    try:
        figure.savefig(path)
    except ValueError as error:  # of matplotlib, for a suffix that it does not know
        raise ValueError(f"--plot {path}: {error}; such as plan.png") from error
