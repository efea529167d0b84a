"""Which runs make up the study, in the order in which they are worth having.

Learning rates are tuned first, for each method and task over as many values as for any other, at eight
workers, by the validation examples and seeds that no reported number uses. Then come the parts:

* "main": all methods, 4 to 32 workers, the same batch for all of them together.
* "noniid": eight workers that see other classes, or other parts of a text; tuned again.
* "peers": what users take today, 4 to 32 workers, tuned as "main" is.
* "ablation": other bits, zeros and rotations, at the rate of the method that they change in one thing.
"""

from collections.abc import Collection, Iterator
from itertools import product
from math import inf
from statistics import fmean
from typing import Any

from report import Rows, rows_of

from study.methods import METHODS, PEERS
from study.runs import Spec
from study.tasks import Size

WORKERS = (4, 8, 16, 32)
TUNED_AT = 8
# More where data differ, for there a seed also says which classes meet at a worker.
TUNING_SEEDS = {"iid": (1000,), "class": (1000, 1001, 1002)}
SEEDS, MORE_SEEDS = 3, 6

# Reported with more seeds, because something is claimed about the difference.
CLAIMED = ("lion", "owner-3", "vote")
MAIN = (
    *CLAIMED, "average", "int8", "vote-4", "owner-1", "signum", "signsgd", "sgd", "adamw",
    "ef-signsgd", "terngrad", "qsgd", "dgc",
)  # fmt: skip
ROTATED = "owner-1-faded"  # with many workers and text alone, where one bit is not enough
ABLATION = ("vote-2", "ternary", "owner-2", "owner-4", ROTATED)
NONIID = (*CLAIMED, "owner-4", "owner-1", "vote-4", "average", "signum", "adamw", "vote-coded-3")
NONIID_CLAIMED = (*CLAIMED, "owner-4", "vote-coded-3")
NONIID_TEXT = (*CLAIMED, "vote-4", "vote-coded-3")
PARTS = ("tuning", "main", "noniid", "peers", "ablation")


class Study:
    """The runs of a study of one size, given the rows that tune it."""

    def __init__(self, size: Size, tasks: tuple[str, ...], rows: Rows):
        self._size, self._tasks, self._rows = size, tasks, rows

    def specs(
        self, part: str, methods: Collection[str] = (), workers: Collection[int] = ()
    ) -> list[Spec]:
        """The runs of a part, of all or some; those but "tuning" need its rows of their methods."""
        if part not in PARTS:
            raise ValueError(f"{part!r} is no part of the study; there are {', '.join(PARTS)}")
        return [
            spec._replace(rate=spec.rate or self.best_rate(spec.task, spec.method, spec.split))
            for spec in getattr(self, f"_{part}")()
            if (not methods or spec.method in methods) and (not workers or spec.workers in workers)
        ]

    def best_rate(self, task: str, method: str, split: str) -> float:
        """The rate with the least validation loss."""
        method = tuned_as(method, split)
        found = rows_of(self._rows, part="tuning", task=task, method=method, split=split)
        found = [row for row in found if row["rate"] in METHODS[method].rates]
        if len(found) < len(METHODS[method].rates) * len(TUNING_SEEDS[split]):
            raise ValueError(
                f"{method} on {task}, {split}, is not tuned yet: run --part tuning first, or name a file "
                "in which it is by --tuned"
            )
        return best(losses(found))

    def _spec(
        self, part: str, task: str, method: str, workers: int, seed: int, **given: Any
    ) -> Spec:
        """At the rate that tuning chose, which 0 stands for, and where data are alike."""
        batch, steps = self._size.of(task).batch // workers, self._size.steps
        made = Spec(part, task, method, workers, "iid", batch, steps, 0.0, seed)
        return made._replace(**given)

    def _tuning(self) -> Iterator[Spec]:
        for task in self._tasks:
            for split, methods in (("iid", (*MAIN, *PEERS)), ("class", noniid(task))):
                for method in methods:
                    for rate, seed in product(METHODS[method].rates, TUNING_SEEDS[split]):
                        yield self._spec(
                            "tuning", task, method, TUNED_AT, seed, rate=rate, split=split
                        )

    def _main(self) -> Iterator[Spec]:
        for task, workers, method in product(self._tasks, WORKERS, MAIN):
            more = method in CLAIMED and workers > 4
            for seed in range(MORE_SEEDS if more else SEEDS):
                yield self._spec("main", task, method, workers, seed)

    def _noniid(self) -> Iterator[Spec]:
        for task in self._tasks:
            for method in noniid(task):
                for seed in range(MORE_SEEDS if method in NONIID_CLAIMED else SEEDS):
                    yield self._spec("noniid", task, method, 8, seed, split="class")

    def _peers(self) -> Iterator[Spec]:
        for task, workers, method, seed in product(self._tasks, WORKERS, PEERS, range(SEEDS)):
            yield self._spec("peers", task, method, workers, seed)

    def _ablation(self) -> Iterator[Spec]:
        for task in self._tasks:
            for workers, method in product((8, 32) if task == "images" else (32,), ABLATION):
                if method != ROTATED or task == "text":
                    for seed in range(MORE_SEEDS if method == ROTATED else SEEDS):
                        yield self._spec("ablation", task, method, workers, seed)


def noniid(task: str) -> tuple[str, ...]:
    """The methods for data that differ; of text, those about which something is claimed."""
    return NONIID if task == "images" else NONIID_TEXT


def tuned_as(method: str, split: str) -> str:
    """Ablations take the learning rate of what they differ from in one thing."""
    if split != "iid" or method not in ABLATION:
        return method
    return "owner-3" if method in ("owner-2", "owner-4") else "vote"


def loss_of(row: dict[str, Any]) -> float | None:
    """What rates are chosen by: nats of images, bits per byte of text; None if the run diverged."""
    return row["validation"]["loss" if row["task"] == "images" else "bits_per_byte"]


def losses(rows: Rows) -> dict[float, float | None]:
    """The mean validation loss at each rate, in their order; None where a run diverged."""
    found: dict[float, list[float | None]] = {}
    for row in sorted(rows, key=lambda row: row["rate"]):
        found.setdefault(row["rate"], []).append(loss_of(row))
    return {rate: None if None in some else fmean(some) for rate, some in found.items()}


def best(found: dict[float, float | None]) -> float:
    """The rate with the least of `losses`; one at which a run diverged is the worst."""
    return min(found, key=lambda rate: inf if found[rate] is None else found[rate])
