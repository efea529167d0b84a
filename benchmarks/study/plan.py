"""Which runs make up the study, in the order in which they are worth having.

Learning rates are tuned first, for each method and task over as many values as for any other, at eight
workers, by the validation examples and seeds that no reported number uses. Then come the parts:

* "main": all methods, 4 to 32 workers, the same batch for all of them together.
* "noniid": eight workers that see other classes, or other parts of a text; tuned again.
* "ablation": bits, scales, feedback, ties; 8 and 32 workers.
* "local": a fixed batch for each worker instead.
* "signs": signs kept, and drift.
* "betas": three pairs of betas, at every learning rate.
* "peers": what users take today, 4 to 32 workers, tuned as "main" is.
* "candidates": one bit for many workers, on text with 32, at the rate of the vote.
"""

from collections.abc import Collection, Iterable, Iterator
from itertools import product
from math import inf
from statistics import fmean
from typing import Any

from study.candidates import CANDIDATES
from study.methods import HORIZONS, METHODS
from study.peers import PEERS
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
ABLATION = (
    "vote-2", "vote-3", "vote-2-leaf", "vote-4-leaf", "vote-1-feedback", "vote-3-feedback", "ternary",
    "ties-up", "owner-2", "owner-4", "owner-3-float32", "owner-3-plain", "owner-3-random",
)  # fmt: skip
SYNCS = (
    "vote-sync-10", "vote-sync-64", "vote-sync-100", "vote-thinning", "vote-head", "vote-small",
    "vote-matrices", "vote-adaptive", "vote-coded-2", "vote-coded-3", "vote-coded-6",
    "vote-coded-12", "vote-4-coded-3",
)  # fmt: skip
NONIID = (*CLAIMED, "owner-4", "owner-1", "vote-4", "average", "signum", "adamw")
NONIID_CLAIMED = ("lion", "owner-3", "owner-4", "vote", "vote-coded-3")
NONIID_TEXT = ("lion", "vote", "vote-4", "owner-3", "vote-sync-64", "vote-coded-3")
IID_SYNCS = ("vote-sync-100", "vote-coded-3", "vote-adaptive")
DIRICHLET = ("lion", "vote", "vote-4", "owner-3", "vote-coded-3")
LOCAL = ("lion", "vote", "owner-3")
SIGNS = (
    "vote", "int8", "vote-2", "vote-4", "owner-1", "owner-2", "owner-3", "vote-coded-3",
)  # fmt: skip
PARTS = ("tuning", "main", "noniid", "ablation", "local", "signs", "betas", "peers", "candidates")
CROWD = 32  # workers, of "candidates"; with more seeds what came out close
FEWER = (
    29,
    26,
    22,
    18,
)  # workers of float32 Lion that hear less: what a share of the gradients costs
CLOSE = ("lion", "owner-1-faded", "rotated-decays-0.7", "rotated-0.7-2-few")
# What a sample repeats of what is claimed; of full-precision Lion one run, which shows whether anything
# but votes has changed.
SAMPLED_WORKERS = (8, 32)
SAMPLED_SEEDS = {"lion": 1, "vote": 3, "owner-3": 3, "owner-4": 3, "vote-coded-3": 3}


def rows_of(rows: Iterable[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """The rows in which all these fields are so."""
    return [row for row in rows if all(row.get(k) == v for k, v in wanted.items())]


class Study:
    """The runs of a study of one size, given the rows that there are already."""

    def __init__(self, size: Size, tasks: tuple[str, ...], rows: list[dict[str, Any]]):
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

    def rates(self, method: str) -> tuple[float, ...]:
        """What a method is tuned over."""
        return tuple(rate * self._size.rate for rate in METHODS[method].rates)

    def best_rate(self, task: str, method: str, split: str) -> float:
        """The rate with the least validation loss; "dirichlet" uses that of "class"."""
        split = "iid" if split == "iid" else "class"
        method = tuned_as(method, split)
        found = rows_of(self._rows, part="tuning", task=task, method=method, split=split)
        found = [row for row in found if row["rate"] in self.rates(method)]
        if len(found) < len(self.rates(method)) * len(TUNING_SEEDS[split]):
            raise ValueError(
                f"{method} on {task}, {split}, is not tuned yet: run --part tuning first"
            )
        return best(losses(found))

    def _spec(
        self, part: str, task: str, method: str, workers: int, seed: int, **given: Any
    ) -> Spec:
        split = given.get("split", "iid")
        batch = given.get("batch") or self._size.of(task).batch // workers
        rate = given.get("rate", 0.0)  # 0: the one that tuning chose
        return Spec(part, task, method, workers, split, batch, self._size.steps, rate, seed)

    def _tuning(self) -> Iterator[Spec]:
        for task in self._tasks:
            for split, methods in (("iid", (*MAIN, *PEERS)), ("class", noniid(task))):
                for method in methods:
                    for rate, seed in product(self.rates(method), TUNING_SEEDS[split]):
                        yield self._spec(
                            "tuning", task, method, TUNED_AT, seed, rate=rate, split=split
                        )

    def _main(self) -> Iterator[Spec]:
        for task in self._tasks:
            for workers in WORKERS:
                for method in MAIN:
                    more = method in CLAIMED and workers > 4
                    for seed in range(MORE_SEEDS if more else SEEDS):
                        yield self._spec("main", task, method, workers, seed)

    def _noniid(self) -> Iterator[Spec]:
        for task in self._tasks:
            for method in noniid(task):
                for seed in range(MORE_SEEDS if method in NONIID_CLAIMED else SEEDS):
                    yield self._spec("noniid", task, method, 8, seed, split="class")
            for method in DIRICHLET if task == "images" else ():
                for seed in range(SEEDS):
                    yield self._spec("noniid", task, method, 8, seed, split="dirichlet")

    def _ablation(self) -> Iterator[Spec]:
        for task in self._tasks:
            for workers in (8, 32) if task == "images" else (32,):
                for method in (*ABLATION, *IID_SYNCS):
                    for seed in range(SEEDS):
                        yield self._spec("ablation", task, method, workers, seed)

    def _local(self) -> Iterator[Spec]:
        for task in {"images"} & set(self._tasks):
            for workers in WORKERS:
                for method in LOCAL:
                    for seed in range(SEEDS):
                        batch = self._size.of(task).local_batch
                        yield self._spec("local", task, method, workers, seed, batch=batch)

    def _signs(self) -> Iterator[Spec]:
        for task in self._tasks:
            for workers, split in ((8, "iid"), (32, "iid"), (8, "class")):
                for method in SIGNS:
                    rate = self.best_rate(task, "vote", "iid")
                    yield self._spec("signs", task, method, workers, 0, split=split, rate=rate)

    def _betas(self) -> Iterator[Spec]:
        (seed,) = TUNING_SEEDS["iid"]
        for task in self._tasks:
            for name in ("lion", "vote"):
                for horizon in HORIZONS:
                    method = f"{name}-{horizon}"
                    for rate in self.rates(method):
                        yield self._spec("betas", task, method, TUNED_AT, seed, rate=rate)

    def _peers(self) -> Iterator[Spec]:
        for task in self._tasks:
            for workers in WORKERS:
                for method in PEERS:
                    for seed in range(SEEDS):
                        yield self._spec("peers", task, method, workers, seed)

    def _candidates(self) -> Iterator[Spec]:
        for task in {"text"} & set(self._tasks):
            for method in ("lion", "vote", "owner-1", *CANDIDATES):
                for seed in range(MORE_SEEDS if method in CLOSE else SEEDS):
                    rate = self.best_rate(task, "vote", "iid")
                    yield self._spec("candidates", task, method, CROWD, seed, rate=rate)
            for workers in FEWER:
                for seed in range(SEEDS):
                    rate = self.best_rate(task, "lion", "iid")
                    yield self._spec("candidates", task, "lion", workers, seed, rate=rate)


def sample(rows: Iterable[dict[str, Any]]) -> list[Spec]:
    """The runs to repeat after a change of the library, of those in the rows, with their rates.

    First some seeds of what is claimed where data are alike, with 8 and 32 workers; then each other
    method once; then all seeds of the owner; then what is claimed where images differ between workers.
    """
    known = [row for row in rows if row["part"] in SAMPLED_PARTS]
    main = [row for row in rows_of(known, part="main") if row["workers"] in SAMPLED_WORKERS]
    main = [row for row in main if row["method"] in CLAIMED]
    main.sort(key=lambda row: row["workers"])
    apart = rows_of(known, part="noniid", task="images", split="class")
    apart = [row for row in apart if row["method"] in NONIID_CLAIMED]
    once = [once_of(known, method) for method in METHODS if method not in CLAIMED]
    few = [
        [row for row in some if row["seed"] < SAMPLED_SEEDS[row["method"]]]
        for some in (main, apart)
    ]
    chosen = [*few[0], *filter(None, once), *rows_of(main, method="owner-3"), *few[1]]
    return list(dict.fromkeys(Spec(*(row[name] for name in Spec._fields)) for row in chosen))


SAMPLED_PARTS = (
    "main",
    "ablation",
    "noniid",
    "betas",
)  # a method is repeated in the first that has it


def once_of(rows: list[dict[str, Any]], method: str) -> dict[str, Any] | None:
    """The row of a method that `sample` repeats, on images at eight workers; of "betas" the best."""
    found = rows_of(rows, method=method, task="images", workers=TUNED_AT)
    found = [row for row in found if row["split"] != "dirichlet"]

    def order(row: dict[str, Any]) -> tuple[float, ...]:
        loss = loss_of(row) if row["part"] == "betas" else None
        return SAMPLED_PARTS.index(row["part"]), row["seed"], inf if loss is None else loss

    return min(found, key=order, default=None)


def noniid(task: str) -> tuple[str, ...]:
    """The methods for data that differ; of text, those about which something is claimed."""
    return (*NONIID, *SYNCS) if task == "images" else NONIID_TEXT


def tuned_as(method: str, split: str) -> str:
    """Ablations take the learning rate of what they differ from in one thing."""
    if split == "iid" and (method in ABLATION or method in SYNCS):
        return "owner-3" if method.startswith("owner") else "vote"
    return method


def loss_of(row: dict[str, Any]) -> float | None:
    """What rates are chosen by: nats of images, bits per byte of text; None if the run diverged."""
    return row["validation"]["loss" if row["task"] == "images" else "bits_per_byte"]


def losses(rows: list[dict[str, Any]]) -> dict[float, float | None]:
    """The mean validation loss at each rate, in their order; None where a run diverged."""
    found: dict[float, list[float | None]] = {}
    for row in sorted(rows, key=lambda row: row["rate"]):
        found.setdefault(row["rate"], []).append(loss_of(row))
    return {rate: None if None in some else fmean(some) for rate, some in found.items()}


def best(found: dict[float, float | None]) -> float:
    """The rate with the least of `losses`; one at which a run diverged is the worst."""
    return min(found, key=lambda rate: inf if found[rate] is None else found[rate])
