"""The tables of docs/convergence_tables.md, in Markdown, from the rows of the study.

A table stands between ``<!-- table: PART TASK SPLIT -->`` and ``<!-- end -->``, and is written anew. One
that begins with ``<!-- table: PART TASK SPLIT of FILE -->`` is of the rows in FILE.jsonl; float32 Lion is
of the study's own rows where it was not run again.

Runs of equal seed start from the same parameters and see the same examples, so methods are compared in
pairs. A run that ended without a number counts as diverged: it is in no mean, and never passes.
"""

import re
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import report
from report import Rows, rows_of

from study.methods import METHODS, method_named
from study.runs import Spec, key_of

DOCUMENT = "convergence_tables.md"
MARKED = re.compile(
    r"(<!-- table: (\w+) (\w+) (\w+)(?: of (\w+))? -->\n).*?(<!-- end -->)", re.DOTALL
)
# What is reported of a task, and whether more of it is better.
METRICS = {"images": ("accuracy", True), "text": ("bits_per_byte", False)}
UNITS = {"images": "accuracy, %", "text": "bits per byte"}
# Of "main", beside the methods of other parts.
BESIDE = {
    "peers": ("lion", "adamw", "sgd", "vote", "owner-3"),
    "ablation": ("lion", "vote", "int8", "vote-4", "owner-1", "owner-3"),
}
HEAD = ("method", "source", "W", "bits", "bits, large", "rate")
COMPARED = ("minus Lion, paired", "within 1 std")


class Mean(NamedTuple):
    """A mean over seeds.

    Attributes:
      mean: of those with a number; None without any.
      std: sample standard deviation; None for fewer than two.
      n: runs with a number.
      diverged: runs without.
    """

    mean: float | None
    std: float | None
    n: int
    diverged: int = 0


def rewritten(text: str, rows: Rows, results: Path) -> str:
    """The document with its tables from these rows, and those of other files in a folder of results.

    Raises:
      ValueError: for rows that do not belong together, and for a mark that is none of a table.
    """
    if text.count("<!-- table: ") != len(MARKED.findall(text)):
        raise ValueError(
            f"{DOCUMENT}: a table stands between <!-- table: PART TASK SPLIT --> and <!-- end -->"
        )
    checked(rows)

    def written(at: re.Match[str]) -> str:
        before, part, task, split, name, end = at.groups()
        some = checked(report.read(results / f"{name}.jsonl", key_of)) if name else rows
        if not rows_of(some, method="lion"):
            some = some + rows_of(rows, method="lion")
        return before + table(some, part, task, split) + end

    return MARKED.sub(written, text)


def checked(rows: Rows) -> Rows:
    """The rows again; raises ``ValueError`` where they do not belong into one report."""
    for task in METRICS:
        for field in ("size", "dataset", "parameters", "steps"):
            found = sorted({str(row.get(field)) for row in rows_of(rows, task=task)})
            if len(found) > 1:
                raise ValueError(
                    f"{task}: rows of more than one {field} ({', '.join(found)}) cannot be compared; "
                    "keep them in a file each and give one by --save"
                )
    seen: dict[Spec, Spec] = {}
    for run in map(key_of, rows):
        same = run if run.part == "tuning" else run._replace(rate=0.0)
        if same in seen:
            raise ValueError(
                f"two rows of one run: {run} and {seen[same]}; delete the lines of those whose "
                "rate is not what tuning chose, and run them anew"
            )
        seen[same] = run
    return rows


# --- Means and pairs


def by_seed(rows: Rows) -> dict[int, float | None]:
    """The metric of runs of one kind by their seeds; None for one that diverged."""
    return {row["seed"]: row["test"][METRICS[row["task"]][0]] for row in rows}


def mean(values: Iterable[float | None]) -> Mean:
    """Mean and sample standard deviation of the numbers among the values."""
    given = list(values)
    found = [x for x in given if x is not None]
    std = statistics.stdev(found) if len(found) > 1 else None
    center = statistics.fmean(found) if found else None
    return Mean(center, std, len(found), len(given) - len(found))


def difference(rows: Rows, lion: Rows) -> Mean:
    """Of the metric to Lion's, over the seeds that both have; neither may have diverged to count."""
    ours, theirs = by_seed(rows), by_seed(lion)
    pairs = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    return mean(None if a is None or b is None else a - b for a, b in pairs)


def within_one_std(rows: Rows, lion: Rows) -> bool | None:
    """Whether the mean is no worse than Lion's by more than Lion's standard deviation, on equal seeds.

    None where that cannot be said, for want of two equal seeds at which Lion has a number.
    """
    ours, theirs = by_seed(rows), by_seed(lion)
    common = sorted(ours.keys() & theirs.keys())
    found, baseline = (mean(some[seed] for seed in common) for some in (ours, theirs))
    if baseline.mean is None or baseline.std is None:
        return None
    if found.diverged or found.mean is None:
        return False
    sign = 1 if METRICS[rows[0]["task"]][1] else -1
    return sign * (found.mean - baseline.mean) >= -baseline.std


# --- A table


def table(rows: Rows, part: str, task: str, split: str) -> str:
    """All methods of a part, at each number of workers, beside float32 Lion."""
    here = rows_of(rows, task=task, split=split)
    own = rows_of(here, part=part)
    workers = sorted({row["workers"] for row in own if row["method"] != "lion"})
    if not workers:
        return f"No rows yet: `python benchmarks/convergence.py --part {part}`.\n"

    def lines() -> Iterator[list[str]]:
        for count in workers:
            main = rows_of(here, part="main", workers=count)
            beside = [row for row in main if row["method"] in BESIDE.get(part, ())]
            at = rows_of(own, workers=count) + beside
            for name in METHODS:
                if some := rows_of(at, method=name):
                    yield line_of(some, rows_of(at, method="lion"))

    return report.markdown([*HEAD, UNITS[task], *COMPARED], lines(), words=2)


def line_of(rows: Rows, lion: Rows) -> list[str]:
    """A method at one number of workers."""
    row, task = rows[0], rows[0]["task"]
    method = method_named(row["method"])
    sent = statistics.fmean(row["bits_per_parameter"] for row in rows)
    rates = ", ".join(f"{rate:g}" for rate in sorted({row["rate"] for row in rows}))
    said = [
        method.label, method.source or "–", str(row["workers"]), bits(sent), bits(large_bits(row)),
        rates, spread(mean(by_seed(rows).values()), task),
    ]  # fmt: skip
    if row["method"] == "lion":
        return [*said, "", ""]
    within = {True: "yes", False: "no", None: "–"}[within_one_std(rows, lion)]
    return [*said, spread(difference(rows, lion), task, "+"), within]


def large_bits(row: dict[str, Any]) -> float:
    """Bits that a worker sends for each parameter of one large matrix, where padding vanishes."""
    params = {"leaf": jax.ShapeDtypeStruct((2**13, 2**13), jnp.float32)}
    sent = method_named(row["method"]).sent(params, row["workers"], row["steps"], row["syncs"])
    return 8 * sent / row["steps"] / 2**26


def bits(x: float) -> str:
    return f"{x:.2f}" if x < 100 else f"{x:.0f}"


def spread(found: Mean, task: str, sign: str = "") -> str:
    """A mean, its standard deviation, how many runs, and how many ended without a number."""

    def number(x: float, sign: str = "") -> str:
        return f"{100 * x:{sign}.2f}" if task == "images" else f"{x:{sign}.4f}"

    if found.mean is None:
        said = "–"
    else:
        around = f" ± {number(found.std)}" if found.std is not None else ""
        said = f"{number(found.mean, sign)}{around} ({found.n})"
    return said + (f", **{found.diverged} diverged**" if found.diverged else "")
