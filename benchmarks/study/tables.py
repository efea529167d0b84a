"""The tables of docs/convergence_tables.md, in Markdown, from the rows of the study; and the whole report.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``, and is written anew by `report`.
One that begins with ``<!-- table: NAME of FILE -->`` is of the rows in FILE.jsonl, beside the study's own;
``repeated of FILE`` holds the two against each other.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from report import markdown as in_columns

from study import analysis, figures, plan, store
from study.analysis import METRICS, Mean, Rows
from study.methods import METHODS
from study.peers import UNCOMPRESSED
from study.plan import rows_of
from study.tasks import SIZES

DOCUMENT = "convergence_tables.md"
MARKED = re.compile(r"(<!-- table: ([\w-]+)(?: of (\w+))? -->\n).*?(<!-- end -->)", re.DOTALL)
SIGN_PLACES = ((8, "iid"), (32, "iid"), (8, "class"))
NONE = "–"


def report(rows: Rows, folder: Path, results: Path) -> None:
    """Writes the tables of ``folder/convergence_tables.md`` anew, and draws the figures beside it.

    ``results`` is the folder of other files of rows that the document names.

    Raises:
      ValueError: for no rows, rows that do not belong together, and unknown or missing markers.
    """
    path = folder / DOCUMENT
    text = path.read_text()
    text = rewritten(text, rows, named_rows(text, results))
    figures.draw(rows, folder)
    path.write_text(text)


def named_rows(text: str, results: Path) -> dict[str, Rows]:
    """The rows of the other files that a document names."""
    names = {name for _, _, name, _ in MARKED.findall(text) if name}
    return {name: store.read(results / f"{name}.jsonl") for name in sorted(names)}


def rewritten(text: str, rows: Rows, others: dict[str, Rows]) -> str:
    """The document with its tables from these rows; the same rows give the same text."""
    files = {"": rows, **others}
    for some in files.values():
        analysis.checked(some)
    found = MARKED.findall(text)
    own = [table for _, table, name, _ in found if not name]
    beside = {table for _, table, name, _ in found if name}
    known = {*TABLES, "repeated"}
    marks = text.count("<!-- table: ")
    if sorted(own) != sorted(TABLES) or not beside <= known or marks != len(found):
        raise ValueError(
            f"{DOCUMENT} has tables {', '.join([*own, *sorted(beside)]) or 'none'}; it must have each of "
            f"{', '.join(TABLES)} once, between <!-- table: NAME --> and <!-- end -->, and more of the "
            "same only from other files, <!-- table: NAME of FILE -->"
        )

    def table(name: str, some: Rows) -> str:
        return repeated(some, rows) if name == "repeated" else TABLES[name](some)

    return MARKED.sub(lambda at: at[1] + table(at[2], files[at[3] or ""]) + at[4], text)


# --- The parts of a table


def markdown(head: Iterable[str], lines: Iterable[Iterable[str]], part: str, words: int = 1) -> str:
    """A table, its first columns of words to the left; or which part of the study it waits for."""
    body = [list(line) for line in lines]
    if not body:
        return f"No rows yet: `python benchmarks/convergence.py --part {part}`.\n"
    return in_columns(head, body, words)


def number(x: float | None, task: str, signed: bool = False) -> str:
    """Accuracy in percent, text in bits per byte."""
    if x is None:
        return NONE
    sign = "+" if signed else ""
    return f"{100 * x:{sign}.2f}" if task == "images" else f"{x:{sign}.4f}"


def spread(found: Mean, task: str, signed: bool = False) -> str:
    """A mean, its standard deviation, how many runs, and how many ended without a number."""
    if found.mean is None:
        said = NONE
    else:
        around = f" ± {number(found.std, task)}" if found.std is not None else ""
        said = f"{number(found.mean, task, signed)}{around} ({found.n})"
    return said + (f", **{found.diverged} diverged**" if found.diverged else "")


def compared(rows: Rows, lion: Rows) -> list[str]:
    """The metric, the difference to Lion in pairs, and whether it is within one standard deviation."""
    task = rows[0]["task"]
    here = spread(analysis.mean(analysis.by_seed(rows).values()), task)
    if rows == lion or (rows[0]["method"] == "lion" and not lion):
        return [here, "", ""]
    within = analysis.within_one_std(rows, lion)
    said = NONE if within is None else "yes" if within else "no"
    return [here, spread(analysis.difference(rows, lion), task, signed=True), said]


def unit(task: str) -> str:
    return "accuracy, %" if task == "images" else "bits per byte"


def share(x: float | None, digits: int = 1) -> str:
    return NONE if x is None else f"{100 * x:.{digits}f} %"


def bits(x: float) -> str:
    return f"{x:.2f}" if x < 100 else f"{x:.0f}"


def label(method: str) -> str:
    return METHODS[method].label


def found_methods(rows: Rows) -> list[str]:
    """The methods of rows, in the order of the study."""
    there = {row["method"] for row in rows}
    return [name for name in METHODS if name in there]


def rates(rows: Rows) -> str:
    return ", ".join(f"{rate:g}" for rate in sorted({row["rate"] for row in rows}))


COMPARED = ("minus Lion, paired", "within 1 std")


def by_workers(rows: Rows) -> Iterator[tuple[str, int, Rows, Rows]]:
    """Method, workers, its rows and Lion's, for fewer workers first."""
    for workers in sorted({row["workers"] for row in rows}):
        at = rows_of(rows, workers=workers)
        lion = rows_of(at, method="lion")
        for name in found_methods(at):
            yield name, workers, rows_of(at, method=name), lion


# --- Tables


def main(task: str, rows: Rows) -> str:
    """All methods at each number of workers, the same batch for all of them together."""
    head = ("method", "source", "W", "bits", "bits, large", "rate", unit(task), *COMPARED)

    def lines() -> Iterator[list[str]]:
        for _, _, own, lion in by_workers(rows_of(rows, part="main", task=task)):
            yield tuned_line(own, lion)

    return markdown(head, lines(), "main", words=2)


def tuned_line(own: Rows, lion: Rows) -> list[str]:
    """A method with a rate of its own, at one number of workers."""
    method = METHODS[own[0]["method"]]
    return [
        method.label, method.source or NONE, str(own[0]["workers"]), bits(analysis.bits_of(own)),
        bits(analysis.large_bits(own[0])), rates(own), *compared(own, lion),
    ]  # fmt: skip


def peers(task: str, rows: Rows) -> str:
    """What users take today, beside what is ours; and what each pays to its own optimizer."""
    head = ("method", "source", "W", "bits", "bits, large", "rate", unit(task), *COMPARED,
            "minus its own in float32")  # fmt: skip

    def lines() -> Iterator[list[str]]:
        found = rows_of(rows, part="peers", task=task)
        for workers in workers_of(found):
            base = rows_of(rows, part="main", task=task, workers=workers)
            lion = rows_of(base, method="lion")
            beside = [row for row in base if row["method"] in BESIDE_PEERS]
            at = beside + rows_of(found, workers=workers)
            for name in found_methods(at):
                own, plain = rows_of(at, method=name), ""
                if name in UNCOMPRESSED:
                    exact = rows_of(base, method=UNCOMPRESSED[name])
                    plain = spread(analysis.difference(own, exact), task, signed=True)
                yield [*tuned_line(own, lion), plain]

    return markdown(head, lines(), "peers", words=2)


BESIDE_PEERS = ("lion", "adamw", "sgd", "vote", "owner-3")


def noniid(task: str, split: str, rows: Rows) -> str:
    """Workers whose data differ, and how much of what the plain vote loses comes back."""
    head = ("method", "bits", "x vote's", "rate", unit(task), *COMPARED, "regained")

    def lines() -> Iterator[list[str]]:
        at = rows_of(rows, part="noniid", task=task, split=split)
        lion, vote = rows_of(at, method="lion"), rows_of(at, method="vote")
        for name in found_methods(at):
            own = rows_of(at, method=name)
            times, back = NONE, ""
            if vote:
                found = analysis.recovered(own, vote, lion)
                times = f"{found.bits:.2f}"
                back = share(found.share, 0) if name not in ("lion", "vote") else ""
            sent = bits(analysis.bits_of(own))
            yield [label(name), sent, times, rates(own), *compared(own, lion), back]

    return markdown(head, lines(), "noniid")


def ablation(task: str, rows: Rows) -> str:
    """What each choice is worth, beside the methods it changes in one thing."""
    head = ("method", "W", "bits", unit(task), *COMPARED)

    def lines() -> Iterator[list[str]]:
        changed = rows_of(rows, part="ablation", task=task)
        for workers in sorted({row["workers"] for row in changed}):
            base = rows_of(rows, part="main", task=task, workers=workers)
            beside = [row for row in base if row["method"] in BESIDE]
            at = beside + rows_of(changed, workers=workers)
            lion = rows_of(base, method="lion")
            for name in found_methods(at):
                own = rows_of(at, method=name)
                yield [label(name), str(workers), bits(analysis.bits_of(own)), *compared(own, lion)]

    return markdown(head, lines(), "ablation")


BESIDE = ("lion", "vote", "int8", "vote-4", "owner-1", "owner-3")


def candidates(rows: Rows) -> str:
    """One bit for many workers, the closest to Lion first; and Lion that hears fewer of them."""
    head = ("method", "W", "bits", "bits, large", unit("text"), *COMPARED)
    at = rows_of(rows, part="candidates")
    lion = rows_of(at, method="lion", workers=plan.CROWD)
    tried = [
        rows_of(at, method=name, workers=w) for name in found_methods(at) for w in workers_of(at)
    ]
    tried = [own for own in tried if own]

    def lines() -> Iterator[list[str]]:
        for own in sorted(tried, key=lambda own: analysis.difference(own, lion).mean or 0.0):
            sent = bits(analysis.bits_of(own)), bits(analysis.large_bits(own[0]))
            yield [label(own[0]["method"]), str(own[0]["workers"]), *sent, *compared(own, lion)]

    return markdown(head, lines(), "candidates")


def workers_of(rows: Rows) -> list[int]:
    return sorted({row["workers"] for row in rows})


def local(task: str, rows: Rows) -> str:
    """A fixed batch for each worker: more workers see more."""
    head = ("method", "W", "batch of all", unit(task), *COMPARED)

    def lines() -> Iterator[list[str]]:
        for name, workers, own, lion in by_workers(rows_of(rows, part="local", task=task)):
            together = str(workers * own[0]["batch"])
            yield [label(name), str(workers), together, *compared(own, lion)]

    return markdown(head, lines(), "local")


def seconds(task: str, rows: Rows) -> str:
    """What a run takes by the model of `analysis`, at 32 workers."""
    head = ("method", *analysis.BANDWIDTHS)

    def lines() -> Iterator[list[str]]:
        at = rows_of(rows, part="main", task=task, workers=32)
        compute = analysis.compute_seconds(rows, task, 32, at[0]["batch"]) if at else None
        for name in found_methods(at) if compute is not None else ():
            row = rows_of(at, method=name)[0]
            taken = [analysis.run_seconds(row, compute, x) for x in analysis.BANDWIDTHS.values()]
            yield [label(name), *(f"{x:.3g} s" for x in taken)]

    return markdown(head, lines(), "main")


def at_place(rows: Rows, task: str, method: str, place: tuple[int, str]) -> dict[str, Any] | None:
    """The row of the part "signs" with so many workers and this split."""
    workers, split = place
    found = rows_of(rows, part="signs", task=task, method=method, workers=workers, split=split)
    return found[0] if found else None


def kept(task: str, rows: Rows) -> str:
    """Signs of full-precision Lion that are kept, in training and of synthetic noise."""
    places = [f"W = {workers}, {split}" for workers, split in SIGN_PLACES]
    head = ("method", *places, "least to most, by layer, W = 32", "noise, W = 8", "noise, W = 32")

    def lines() -> Iterator[list[str]]:
        for name in found_methods(rows_of(rows, part="signs", task=task)):
            found = [at_place(rows, task, name, place) for place in SIGN_PLACES]
            late = [row and analysis.late(row["kept_overall"]) for row in found]
            drawn = [rows_of(rows, part="synthetic", method=name, workers=w) for w in (8, 32)]
            noise = [share(some[0]["kept"]) if some else NONE for some in drawn]
            yield [label(name), *map(share, late), extremes(found[1]), *noise]

    return markdown(head, lines(), "signs")


def extremes(row: dict[str, Any] | None) -> str:
    """The leaves of which the least and the most is kept."""
    if row is None:
        return NONE
    late = {leaf.rpartition(".")[0]: analysis.late(x) for leaf, x in row["kept"].items()}
    least, most = min(late, key=late.__getitem__), max(late, key=late.__getitem__)
    return f"{share(late[least])} (`{least}`) to {share(late[most])} (`{most}`)"


def drift(task: str, rows: Rows) -> str:
    """How far momenta are apart, by layer: the mean over its leaves in the last half of training."""
    chosen = [
        ("vote", (8, "iid")), ("vote", (8, "class")), ("vote-coded-3", (8, "iid")),
        ("vote-coded-3", (8, "class")),
    ]  # fmt: skip
    head = ("layer", *(f"{name}, {split}" for name, (_, split) in chosen), "independent momenta")
    found = [at_place(rows, task, name, place) for name, place in chosen]
    layers = [analysis.by_layer(row["drift"]) if row else {} for row in found]

    def lines() -> Iterator[list[str]]:
        for layer in sorted(set().union(*layers)):
            values = [
                f"{sum(of[layer]) / len(of[layer]):.3f}" if layer in of else NONE for of in layers
            ]
            yield [f"`{layer}`", *values, f"{1 - 1 / 8:.3f}"]

    return markdown(head, lines(), "signs")


def repeated(rows: Rows, before: Rows) -> str:
    """Runs of several seeds before and after a change of the library, both against Lion of before."""
    head = ("method", "data", "W", "before", "after", "minus Lion, before", "after", "Lion's std",
            "farthest seed, std")  # fmt: skip

    def lines() -> Iterator[list[str]]:
        for (task, split), at in by_data(rows_of(rows, part="main") + rows_of(rows, part="noniid")):
            for name, workers, own, _ in by_workers(at):
                if len(analysis.repeats(own, before)) > 1:
                    place = f"{task}, {split}", str(workers)
                    yield [label(name), *place, *before_and_after(own, before)]

    return markdown(head, lines(), "main", words=2)


def before_and_after(own: Rows, before: Rows) -> list[str]:
    """Means of equal seeds, their differences to Lion, and how far one seed moved."""
    task = own[0]["task"]
    like = {field: own[0][field] for field in ("part", "task", "workers", "split")}
    lion = rows_of(before, method="lion", **like)
    same = rows_of(before, method=own[0]["method"], **like)
    both = [row for row in same if row["seed"] in analysis.by_seed(own)], own
    means = [spread(analysis.mean(map(analysis.value_of, some)), task) for some in both]
    away = [number(analysis.difference(some, lion).mean, task, signed=True) for some in both]
    std = analysis.mean(map(analysis.value_of, lion)).std
    farthest = max(abs(one.away or 0) for one in analysis.repeats(own, before))
    return [*means, *away, number(std, task), f"{farthest:.1f}"]


def by_data(rows: Rows) -> Iterator[tuple[tuple[str, str], Rows]]:
    """Task, split and their rows; first data that are alike."""
    for task, split in sorted(
        {(r["task"], r["split"]) for r in rows}, key=lambda at: (at[1] != "iid", at)
    ):
        yield (task, split), rows_of(rows, task=task, split=split)


def tuning(rows: Rows) -> str:
    """Every rate that was tried, its validation loss, and the choice."""
    head = ("method", "task", "data", "rate: validation loss", "chosen")

    def lines() -> Iterator[list[str]]:
        for task in METRICS:
            for split in ("iid", "class"):
                at = rows_of(rows, part="tuning", task=task, split=split)
                for name, own in on_grid(at):
                    losses = plan.losses(own)
                    best = plan.best(losses)
                    edge = " (edge)" if best in (min(losses), max(losses)) else ""
                    yield [label(name), task, split, listed(losses), f"{best:g}{edge}"]

    return markdown(head, lines(), "tuning", words=4)


def betas(rows: Rows) -> str:
    """Lion, the vote and the owner with momenta that remember longer or shorter."""
    head = ("method", "task", "rate: validation loss", "best")

    def lines() -> Iterator[list[str]]:
        for task in METRICS:
            for name, own in on_grid(rows_of(rows, part="betas", task=task)):
                losses = plan.losses(own)
                loss = losses[plan.best(losses)]
                yield [label(name), task, listed(losses), NONE if loss is None else f"{loss:.4f}"]

    return markdown(head, lines(), "betas", words=3)


def on_grid(rows: Rows) -> Iterator[tuple[str, Rows]]:
    """Each method's rows at the rates that it is tuned over."""
    for name in found_methods(rows):
        grid = plan.Study(SIZES[rows[0]["size"]], (rows[0]["task"],), []).rates(name)
        own = [row for row in rows_of(rows, method=name) if row["rate"] in grid]
        if own:
            yield name, own


def listed(losses: dict[float, float | None]) -> str:
    return ", ".join(
        f"{rate:g}: {NONE if loss is None else format(loss, '.4f')}"
        for rate, loss in losses.items()
    )


TABLES: dict[str, Callable[[Rows], str]] = {
    **{
        f"{name}-{task}": partial(table, task)
        for name, table in {
            "main": main, "ablation": ablation, "seconds": seconds, "signs": kept, "drift": drift,
            "peers": peers,
        }.items()
        for task in METRICS
    },
    **{f"class-{task}": partial(noniid, task, "class") for task in METRICS},
    "dirichlet-images": partial(noniid, "images", "dirichlet"),
    "local-images": partial(local, "images"),
    "candidates": candidates,
    "tuning": tuning,
    "betas": betas,
}  # fmt: skip
