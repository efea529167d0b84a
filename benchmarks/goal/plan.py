"""Which runs there are, in the order in which they are worth having: cells of noise, workers and data."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import report
from report import Rows

from goal import evidence, tuning
from goal.contenders import CONTENDERS, Hyper
from goal.curves import Run, Runner, hyper_of, key_of
from goal.model import LONGER, STEPS, TOKENS
from lioncub_jax.tools.plan.evidence import RANKED


class Cell(NamedTuple):
    """Where methods are compared.

    Attributes:
      tokens: that a worker sees in a step.
      workers: how many.
      data: "alike" or "different".
      seeds: of the reported runs.
    """

    tokens: int
    workers: int
    data: str
    seeds: int


SMALL, MIDDLE, LARGE = TOKENS
SEEDS_OF_LONGER = 2
# By rounds: a round needs what the one before tuned.
ROUNDS = (
    (Cell(SMALL, 8, "alike", 4),),
    (Cell(MIDDLE, 8, "alike", 3),),
    (Cell(SMALL, 4, "alike", 3), Cell(SMALL, 32, "alike", 2), Cell(MIDDLE, 4, "alike", 3)),
    (Cell(LARGE, 4, "alike", 1),),
    (Cell(MIDDLE, 32, "alike", 2),),
    (Cell(MIDDLE, 8, "different", 2),),
)
CELLS = tuple(cell for cells in ROUNDS for cell in cells)


class Job(NamedTuple):
    """A contender in a cell: one program, in one process.

    Attributes:
      contender: its name.
      cell: where.
      steps: of each run.
    """

    contender: str
    cell: Cell
    steps: int = STEPS


def jobs(names: list[str], rounds: list[int]) -> Iterator[list[Job]]:
    for n in rounds:
        yield [Job(name, cell) for cell in ROUNDS[n] for name in names]


def longer(rows: Rows, names: list[str], rounds: list[int]) -> list[Job]:
    """Runs half as long again, of those who were not at the ranked loss."""
    cells = {(one.tokens, one.workers, one.data): one for n in rounds for one in ROUNDS[n]}
    return [
        Job(name, cells[key], LONGER)
        for cell in evidence.evidence(rows)["cells"]
        if (key := (cell["tokens"], cell["workers"], cell["data"])) in cells
        for name, of in cell["methods"].items()
        if name in names and of["steps"][RANKED] is None
    ]


_runner: list[Runner] = []  # of this process


def run_job(job: Job, save: Path) -> None:
    """Tunes if that is done in this cell, and runs the seeds; rows are written as they come."""
    _runner[:] = _runner or [Runner()]
    rows = report.read(save, key_of)
    done = {key_of(row): row for row in rows}
    name, cell, steps = job

    def ran(part: str, hyper: Hyper, seed: int) -> dict[str, Any]:
        run = Run(part, name, cell.tokens, cell.workers, cell.data, *hyper, seed, steps)
        if run not in done:
            done[run] = _runner[0].run(run)
            report.append(save, [done[run] | report.provenance()])
        return done[run]

    def measure(hyper: Hyper) -> float:
        return last(ran("tuning", hyper, tuning.SEED))

    place, family = TOKENS.index(cell.tokens), CONTENDERS[name].family
    if steps == STEPS and cell.workers == tuning.TUNED_AT[place] and cell.data == "alike":
        start = best_hyper(rows, name, place - 1) if place else tuning.first(family)
        hyper = tuning.search(measure, start, family, tuning.RUNS[place]).hyper
    else:
        hyper = best_hyper(rows, name, place)
    for seed in range(cell.seeds if steps == STEPS else min(cell.seeds, SEEDS_OF_LONGER)):
        ran("curve", hyper, seed)


def best_hyper(rows: Rows, name: str, place: int) -> Hyper:
    """What was best at a noise.

    Raises:
      ValueError: where it is not tuned yet.
    """
    tuned = report.rows_of(rows, part="tuning", contender=name, tokens=TOKENS[place])
    if not tuned:
        raise ValueError(
            f"{name} is not tuned with {TOKENS[place]} tokens a worker: run the rounds before"
        )
    return hyper_of(min(tuned, key=last))


def last(row: dict[str, Any]) -> float:
    """The loss at the end; infinite for a run that diverged."""
    return math.inf if row["loss"][-1] is None else row["loss"][-1]
