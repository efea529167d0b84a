"""Time to the loss by the planner: where nobody measured it, and beside what was measured in the lab."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import report
from aot.programs import named
from report import Rows, rows_of
from rich.console import Console

from goal import curves
from goal.evidence import SCHEMES
from goal.lab import UNSHAPED
from goal.summary import STEPS, Reach, best_choice, seconds_to, summed
from lioncub_jax import planner, units
from lioncub_jax.planner.evidence import TARGET

MODEL = "gpt-124m"
WORKERS, RATES = (8, 32, 256), (10e9, 100e9)  # bits per second
# Of an H100 SXM: 8 windows of 1,024 tokens at 40 % of 989 TFLOP/s in bfloat16, 6 operations a parameter and
# token; and its memory.
COMPUTE = 6 * 124e6 * 8 * 1024 / (0.4 * 989e12)
MEMORY = 3350 * 8e9  # bits per second
LATENCY = 20e-6

Plans = Mapping[tuple[int, float], planner.Plan]


def plans() -> Plans:
    """By workers and rate; a worker is a GPU with a link of its own."""
    params = named(MODEL).params
    return {
        (workers, rate): planner.plan(
            params,
            planner.Cluster(workers, planner.Link(rate, LATENCY), memory_bandwidth=MEMORY),
            COMPUTE,
        )
        for rate in RATES
        for workers in WORKERS
    }


def firsts(found: Plans) -> dict[str, tuple[str, float]]:
    """Of each cluster who is first, and in which share of float32 Lion's time."""
    told = {}
    for (workers, rate), plan in found.items():
        name, time = next(iter(plan.times().items()))
        told[f"{workers} workers, {units.rate_text(rate)}"] = name, float(f"{time:.4g}")
    return told


def show(found: Plans, console: Console) -> None:
    """A row for each method that was measured, with its time over float32 Lion's."""
    title = (
        f"time to 80 % of float32 Lion's run over float32 Lion's, by the planner: {MODEL}, "
        f"{units.seconds_text(COMPUTE)} of computing; steps as of 4 workers and 7.3 million parameters"
    )
    head = ["method", *(f"{workers}\n{units.rate_text(rate)}" for workers, rate in found)]
    times = [plan.times() for plan in found.values()]
    names = dict.fromkeys(name for each in times for name in each)
    lines = [
        [name, *(f"{each[name]:.3g}" if name in each else "" for each in times)]
        for name in sorted(names, key=lambda n: times[0].get(n, 2.0))
    ]
    console.print(report.table(title, head, lines))


def beside_measured(found: Rows) -> dict[str, dict[str, Any]]:
    """By network: who is first by the planner and who by the lab, and how far the first is from being it.

    Of contenders that the planner knows and that were timed without a limit on the links: that is all that
    it is told about the machine. Nothing without those.
    """
    step, told = mean_steps(found, UNSHAPED), {}
    shapes = curves.shapes()
    free = planner.Cluster(4, planner.Link(math.inf, 0.0), on_cpu=True)
    compute = min(step.values(), default=0.0)  # any will do: what is left is each method's own
    # What each method spends besides, so that the model gives the steps of that network.
    free = dataclasses.replace(free, local_seconds=dict.fromkeys(step, 0.0))
    local = {
        name: took - planner.step_time(planner.scheme_named(name), shapes, free, compute).step
        for name, took in step.items()
    }
    free = dataclasses.replace(free, local_seconds=local)
    seconds = summed(found).seconds
    for network in dict.fromkeys(network for network, _, _ in seconds):
        if network == UNSHAPED or not step:
            continue
        at = free.at(units.rate(network))
        times = planner.plan(shapes, at, compute).times()
        errors = [
            planner.step_time(planner.scheme_named(scheme), shapes, at, compute).step / took - 1
            for scheme, took in mean_steps(found, network).items()
            if scheme in step
        ]
        measured = {
            scheme: seconds[network, name, TARGET]
            for name, (scheme, _) in SCHEMES.items()
            if (network, name, TARGET) in seconds and scheme in step and scheme in times
        }
        planned = min(measured, key=times.__getitem__)
        first = min(measured, key=measured.__getitem__)
        told[network] = {
            "planned": planned, "measured": first, "ratio": measured[planned] / measured[first],
            "of": len(measured), "worst_step_error": max(errors, key=abs),
        }  # fmt: skip
    return told


def mean_steps(found: Rows, network: str) -> dict[str, float]:
    """Seconds of a step in a whole run, of the planner's schemes that were timed there."""
    steps = {}
    for name, (scheme, option) in SCHEMES.items():
        timed = rows_of(found, part="time", contender=name, network=network)
        if not timed or best_choice(found, name).option != option:
            continue
        took = seconds_to(found, name, network, Reach(STEPS, STEPS))
        if took is not None:
            steps[scheme] = took / STEPS
    return steps
