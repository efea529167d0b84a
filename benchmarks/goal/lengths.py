"""The runs of the study of lengths and sizes, in the order of their worth.

Every method has the same tuning. With E exchanges in a run the first rate is ``r (256 / E)^(1/4)``, where r
was best in 256 steps (of the method itself, or of the one that it varies), the second is half of that.
Then come the other betas and the other decay, each with what was best before: four runs in all.
"""

import statistics
from collections.abc import Callable
from typing import NamedTuple

import report
from report import Rows

from goal import tuning
from goal.contenders import OUTERS, REASONS, Family, Hyper, contender_named
from goal.curves import Run, hyper_of
from goal.model import STEPS, WIDTH
from goal.settings import last

WORKERS, TOKENS = 8, 256
SEEDS = 3
METHODS = (
    "adamw", "lion", "vote", "owner-adamw", "owner-lion", "vote-2-bits", "powersgd-8",
    "adamw-micro-4", "vote-micro-4", "powersgd-4", "powersgd-16", "local-8-coded", "diloco-32-coded",
    "one-bit-adam", "adamw-micro-16", "vote-micro-16",
)  # fmt: skip
MUONS = "muon", "owner-muon", "powersgd-8-muon", "diloco-32-muon", "muon-bfloat16"
# Whose rate of 256 steps a method begins with that did not run there.
LIKE = {
    "vote-2-bits": "vote",
    "powersgd-8": "powersgd-16", "local-8-coded": "local-2-coded", "diloco-32-coded": "local-2-coded",
    "adamw-micro-4": "adamw", "adamw-micro-16": "adamw",
    "vote-micro-4": "vote", "vote-micro-16": "vote",
    "owner-muon": "muon", "muon-bfloat16": "muon", "powersgd-8-muon": "muon", "diloco-32-muon": "muon",
}  # fmt: skip
BEST = "powersgd-16", "local-8-coded"  # ranks, and local steps, of least loss after 1,024 steps
FACTORS = {"vote-mean": (2.0, 4.0)}  # of the rate of one whose updates are smaller than 1


class Job(NamedTuple):
    """A method in one setting: its tuning, then its seeds.

    Attributes:
      contender: its name.
      steps: micro-steps of a worker.
      tokens: that a worker sees in each.
      width: of the model.
      factors: of the rate that was best in 1,024 steps, tried on seed 0; empty for the four tuning runs.
      seeds: of the best choice.
      like: whose best choice in 1,024 steps it takes, where not its own; the decay stays as strong.
      data: "alike", or "different": that begins with the best choice of as many steps of the other.
    """

    contender: str
    steps: int
    tokens: int = TOKENS
    width: int = WIDTH
    factors: tuple[float, ...] = ()
    seeds: int = SEEDS
    like: str = ""
    data: str = "alike"


SIZED = "adamw", "vote", "owner-adamw", "lion"  # methods of the ladder of sizes
# The jobs of each part, those that others need first.
PARTS: dict[str, list[Job]] = {
    "1024": [Job(name, 1024) for name in (*METHODS, *MUONS)],
    "reason": [
        Job(name, 1024, factors=FACTORS.get(name, (1.0,)), like="owner-muon" if "muon" in name else "lion")
        for name in REASONS
    ],
    "tokens": [
        *(
            Job(name, 512, tokens=2048, factors=(1.0, 1.41))
            for name in ("adamw", "vote", "owner-adamw", "owner-lion", "powersgd-16", *MUONS[:2], MUONS[-1])
        ),
        Job("adamw", 256, tokens=2048, factors=(1.41, 2.0)),  # the other end of its line
    ],
    "4096": [
        Job(name, 4096, factors=(0.5, 0.25), seeds=2)
        for name in ("adamw", "vote", "owner-adamw", "lion", *BEST)
    ]
    + [Job(name, 4096, factors=(1.0, 0.5), seeds=2) for name in (*MUONS[:2], MUONS[-1])],
    "ladder": [
        *(
            Job(name, 1024, width=width, factors=(2.0, 1.0, 0.5), seeds=2)
            for width in (64, 256) for name in (*SIZED, *MUONS[:2])
        ),
        *(Job(name, 1024, width=384, factors=(1.0, 0.5), seeds=1) for name in (*SIZED[:3], *MUONS[:2])),
    ],
    "256": [
        # Those of 32 local steps have no step at each of the 16 points.
        Job(name, STEPS) for name in ("powersgd-8", "adamw-micro-4", "vote-micro-4", *MUONS[:3])
    ],
    "different": [
        Job(name, STEPS, factors=(1.0,), seeds=2, data="different") for name in MUONS[:2]
    ],
}  # fmt: skip


def run(job: Job, once: report.Once, short: Rows) -> None:
    """Tunes the method and runs its seeds; ``short`` are rows of 256 steps that another file has."""
    name = job.contender

    def ran(part: str, name: str, hyper: Hyper, seed: int) -> float:
        size = job.steps, job.width
        return last(once.run(Run(part, name, job.tokens, WORKERS, job.data, *hyper, seed, *size)))

    if job.factors:
        best = best_of(once.rows(), job.like or name, 1024 if job.data == "alike" else job.steps)
        tried = [
            best._replace(
                rate=tuning.rounded(best.rate * f), decay=best.decay / (f if job.like else 1)
            )
            for f in job.factors
        ]
        hyper = min(tried, key=lambda h: ran("curve", name, h, 0))
    else:
        family = contender_named(name).family
        start = first(job, [*short, *once.rows()])
        hyper = tuned(lambda h: ran("tuning", name, h, tuning.SEED), start, family)
        if name in OUTERS:
            name = min(OUTERS[name], key=lambda one: ran("tuning", one, hyper, tuning.SEED))
    for seed in range(job.seeds):
        ran("curve", name, hyper, seed)


def first(job: Job, known: Rows) -> Hyper:
    """The first hyperparameters of tuning."""
    one = contender_named(job.contender)
    name = LIKE.get(job.contender, job.contender)
    short = [
        row
        for row in report.rows_of(
            known, part="curve", contender=name, tokens=TOKENS, workers=WORKERS
        )
        if (row.get("steps", STEPS), row["data"], row.get("width", WIDTH))
        == (STEPS, "alike", WIDTH)
    ]
    hyper = hyper_of(short[0]) if short else tuning.first(one.family)
    exchanges = job.steps // one.accumulate
    return hyper._replace(rate=tuning.rounded(hyper.rate * (STEPS / exchanges) ** 0.25))


def tuned(measure: Callable[[Hyper], float], start: Hyper, family: Family) -> Hyper:
    """The best of four runs: two rates, the other betas, the other decay."""

    def half(hyper: Hyper) -> Hyper:
        return hyper._replace(rate=tuning.rounded(hyper.rate / 2))

    losses = {start: measure(start)}
    for change in (half, family.other_betas, family.other_decay):
        hyper = change(min(losses, key=losses.__getitem__))
        losses[hyper] = measure(hyper)
    return min(losses, key=losses.__getitem__)


def best_of(rows: Rows, name: str, steps: int) -> Hyper:
    """The best hyperparameters of so many steps.

    Raises:
      ValueError: where that part has not run.
    """
    known = report.rows_of(
        rows, part="curve", contender=name, steps=steps, tokens=TOKENS, width=WIDTH, data="alike"
    )
    if not known:
        raise ValueError(f"{name} has not run for {steps:,} steps: run --part {steps} first")
    return hyper_of(known[0])


# --- How long it takes


def size_of(steps: int, tokens: int, width: int) -> float:
    """A run in steps of 2,048 tokens of the usual model."""
    return steps * tokens / TOKENS * max((width / WIDTH) ** 1.7, 0.4)


def work_of(job: Job) -> float:
    """All runs of a job, as `size_of`."""
    tries = len(job.factors) + job.seeds - 1 if job.factors else 4 + job.seeds
    tries += len(OUTERS.get(job.contender, " ")) - 1
    return tries * size_of(job.steps, job.tokens, job.width)


def hours_left(jobs: list[Job], done: Rows, known: Rows, seconds: float = 0.08) -> float:
    """Core hours of what has not run, by a core's seconds in rows that know them, or ``seconds`` a step."""
    pace = [
        row["cpu_seconds"] / size_of(row["steps"], row["tokens"], row["width"])
        for row in known
        if "cpu_seconds" in row
    ]
    each = statistics.median(pace) if pace else seconds
    size = sum(size_of(row["steps"], row["tokens"], row["width"]) for row in done)
    return max(sum(map(work_of, jobs)) - size, 0) * each / 3600
