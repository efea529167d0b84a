"""Steps to the goal times milliseconds of a step: who is first."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import report
from report import Rows, rows_of
from rich.console import Console
from study.evidence import Curve, at, falling, reaches

from goal.contenders import CONTENDERS, VOTES, Choice
from goal.lab import RATES

LION_NAME = "Lion, float32"
PEERS = tuple(name for name in CONTENDERS if name not in VOTES)
STEPS, LONGER = 384, 576  # of a run; every number of steps that a worker takes alone divides them
LENGTHS = STEPS, LONGER
SHARES = 0.6, 0.8, 1.0  # of float32 Lion's run, where it stands there is a goal


def best_choice(found: Rows, name: str) -> Choice:
    """The choice with the least loss at the end of its run.

    Raises:
      ValueError: where it is not tuned yet.
    """
    contender = CONTENDERS[name]
    name = contender.like or name
    choices = [c for c in CONTENDERS[name].choices if contender.only in (0, c.option)]
    tuned = {
        Choice(row["rate"], row["option"]): row["loss"][-1]
        for row in rows_of(found, part="tuning", contender=name)
    }
    missing = [choice for choice in choices if choice not in tuned]
    if missing:
        raise ValueError(f"{name} is not tuned yet: run --part tuning first")
    last = {choice: loss if math.isfinite(loss) else math.inf for choice, loss in tuned.items()}
    return min(choices, key=last.__getitem__)


class Reach(NamedTuple):
    """How a contender gets to a goal.

    Attributes:
      steps: of a worker, on its mean curve.
      length: of the run whose schedule it has.
    """

    steps: float
    length: int


class Summed(NamedTuple):
    """Everything that the rows say.

    Attributes:
      goals: bits per byte by the share of float32 Lion's run.
      reaches: by contender and share; None where it never gets there.
      seconds: to the goal, by network, contender and share.
      keys: the benchmark's figures.
    """

    goals: dict[float, float]
    reaches: dict[tuple[str, float], Reach | None]
    seconds: dict[tuple[str, str, float], float]
    keys: dict[str, Any]


def mean_curve(found: Rows, name: str, length: int) -> Curve:
    """Steps and the least mean loss of all seeds so far; nothing without rows."""
    return falling(list(curves_of(found, name, length).values()))


def curves_of(found: Rows, name: str, length: int, **more: Any) -> dict[int, Curve]:
    """Curves by seed; a loss that is no number is infinite, for nothing is reached there."""
    return {
        row["seed"]: [
            (steps, loss if math.isfinite(loss) else math.inf)
            for steps, loss in zip(row["taken"], row["loss"], strict=True)
        ]
        for row in rows_of(found, part="curve", contender=name, steps=length, **more)
    }


def goals(found: Rows) -> dict[float, float]:
    """The loss of float32 Lion's mean curve after each share of its run.

    Raises:
      ValueError: where it has not run.
    """
    lion = mean_curve(found, LION_NAME, STEPS)
    if not lion:
        raise ValueError(f"{LION_NAME} has not run, so there is no goal: run --part curves first")
    return {share: at(lion, share * STEPS) for share in SHARES}


def reach(found: Rows, name: str, goal: float) -> Reach | None:
    """The fewest steps to the goal, in a run of either length."""
    ways = [
        Reach(steps, length)
        for length in LENGTHS
        if (curve := mean_curve(found, name, length))
        and (steps := reaches(curve, goal)) is not None
    ]
    return min(ways, default=None)


def reached(found: Rows, name: str) -> bool:
    """Whether a contender gets to the last goal."""
    return reach(found, name, goals(found)[SHARES[-1]]) is not None


def step_seconds(found: Rows, name: str, network: str) -> dict[str, float]:
    """Of a step of each stage there, at the contender's best choice, as they were timed last."""
    timed = rows_of(found, part="time", contender=name, network=network)
    option = best_choice(found, name).option if timed else 0
    return {row["stage"]: row["seconds"] for row in rows_of(timed, option=option)}


def seconds_to(found: Rows, name: str, network: str, way: Reach) -> float | None:
    """Steps of each stage times what a step of it takes there; None where it was not timed."""
    option, total = best_choice(found, name).option, 0.0
    timed = step_seconds(found, name, network)
    stages = [(first, stage) for first, stage in CONTENDERS[name].stages(way.length, option)]
    ends = [first for first, _ in stages[1:]] + [math.inf]
    for (first, stage), end in zip(stages, ends, strict=True):
        steps = min(end, way.steps) - first
        if steps <= 0:
            break
        if stage not in timed:
            return None
        total += steps * timed[stage]
    return total


def summed(found: Rows) -> Summed:
    """All of it, of the contenders that have run."""
    wanted = goals(found)
    run = [name for name in CONTENDERS if mean_curve(found, name, STEPS)]
    reaches = {(n, share): reach(found, n, goal) for n in run for share, goal in wanted.items()}
    networks, seconds = networks_of(found), {}
    for network in networks:
        for (name, share), way in reaches.items():
            took = way and seconds_to(found, name, network, way)
            if took is not None:
                seconds[network, name, share] = took
    keys: dict[str, Any] = {"goals": wanted, "steps": {}, "speedups": {}}
    for (name, share), way in reaches.items():
        keys["steps"].setdefault(name, {})[share] = way and round(way.steps, 1)
    for network in networks:
        for share in SHARES:
            ours, peers = (best_of(seconds, network, share, some) for some in (VOTES, PEERS))
            if ours and peers:
                ratio = seconds[network, peers, share] / seconds[network, ours, share]
                keys["speedups"][f"{network} {share:.0%}"] = [ours, peers, ratio]
                if share == SHARES[-1]:
                    keys[f"speedup_over_best_peer_{network}"] = ratio
    keys["clock_over_product"] = confirmed(found)
    return Summed(wanted, reaches, seconds, keys)


def networks_of(found: Rows) -> list[str]:
    """Those where something was timed, the fastest first."""
    timed = {row["network"] for row in rows_of(found, part="time")}
    return [rate for rate in RATES if rate in timed]


def confirmed(found: Rows) -> dict[str, list[float]]:
    """Of each run to the goal: seconds by the clock, by the product for as many steps, and their ratio."""
    ratios = {}
    for row in rows_of(found, part="confirm", reached=True):
        way = Reach(row["taken"], row["steps"])
        product = seconds_to(found, row["contender"], row["network"], way)
        if product is not None:
            by_clock = [row["seconds"], product, row["seconds"] / product]
            ratios[f"{row['network']} {row['contender']}"] = [round(x, 3) for x in by_clock]
    return ratios


def best_of(
    seconds: dict[Any, float], network: str, share: float, some: Iterable[str]
) -> str | None:
    """Who of some is first at the goal; None if nobody gets there."""
    there = {
        name: seconds[network, name, share] for name in some if (network, name, share) in seconds
    }
    return min(there, key=there.__getitem__, default=None)


def to_confirm(found: Rows, network: str) -> list[str]:
    """The best of ours and of the peers at a rate, who were not run to the goal there yet."""
    seconds = summed(found).seconds
    names = [best_of(seconds, network, SHARES[-1], some) for some in (VOTES, PEERS)]
    done = {row["contender"] for row in rows_of(found, part="confirm", network=network)}
    return [name for name in names if name and name not in done]


def show(found: Rows, sums: Summed, console: Console) -> None:
    """A table for each network, the first at the last goal first."""
    last = SHARES[-1]
    head = [
        "contender",
        "ms a step",
        *(f"{s:.0%}: {x:.3f}" for s, x in sums.goals.items()),
        "steps",
    ]
    names = list(dict.fromkeys(name for name, _ in sums.reaches))
    for network in networks_of(found):
        names.sort(key=lambda n, at=network: sums.seconds.get((at, n, last), math.inf))
        lines = []
        for name in names:
            steps = [f"{1e3 * x:.0f}" for x in step_seconds(found, name, network).values()]
            ways = [sums.reaches[name, share] for share in sums.goals]
            took = [sums.seconds.get((network, name, share)) for share in sums.goals]
            said = map(seconds_said, took, ways)
            there = "never" if ways[-1] is None else f"{ways[-1].steps:.0f}"
            lines.append([name, " and ".join(steps), *said, there])
        console.print(report.table(f"seconds to the goal, {network}", head, lines))


def seconds_said(took: float | None, way: Reach | None) -> str:
    """For the table: without a time, whether the goal is out of reach or steps were not timed."""
    if took is None:
        return "never" if way is None else "not timed"
    return f"{took:.1f}"


def draw(found: Rows, folder: Path) -> None:
    """Loss against seconds, a panel for each rate: ``folder/time_to_loss.png``."""
    import matplotlib.pyplot as plt

    networks = networks_of(found)
    figure, axes = plt.subplots(
        1, len(networks), figsize=(4.2 * len(networks), 4.2), sharey=True, squeeze=False
    )
    shown = [name for name in CONTENDERS if mean_curve(found, name, STEPS)]
    for axis, network in zip(axes[0], networks, strict=True):
        for n, name in enumerate(shown):  # of one colour in all panels, whoever was timed there
            taken, losses = zip(*mean_curve(found, name, STEPS), strict=True)
            took = [seconds_to(found, name, network, Reach(n, STEPS)) for n in taken]
            if None not in took:
                style = {"lw": 2.2} if name in VOTES else {"lw": 1.0, "ls": "--"}
                axis.plot(took, losses, label=name, color=plt.cm.tab20(n % 20), **style)
        axis.axhline(goals(found)[SHARES[-1]], color="grey", lw=0.6)
        axis.set(xscale="log", xlabel="seconds", title=network)
    axes[0][0].set_ylabel("bits per byte, validation")
    axes[0][-1].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(folder / "time_to_loss.png", dpi=110)
    plt.close(figure)
