"""Who survives which liars, and how many missing votes? Simulated workers on the study's text task.

    python benchmarks/liars.py --text ~/data/gutenberg     # 8, 16 and 32 workers
    python benchmarks/liars.py --again                     # sums up the committed rows, runs nothing

Each method keeps the learning rate that the study tuned for it without liars, for nobody knows of
any. Of 8 workers 1, 2 or 3 lie; of 16 1, 4 or 7; of 32 1, 8 or 15: just below half. Liars flip the signs of
their gradients, send noise, multiply by 1e6 or -1e6, send NaN, or push one leaf together; of more than 8
workers only the worst of it, on some methods. Besides, of 8 workers' votes 10, 30 and 50 % are missing, or
late, drawn anew in each step, and some methods run with workers that see other data than the others. Rows
that are in the file are not run again.
"""

import argparse
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import report
from report import Rows
from rich.console import Console
from study import liars, pool, tasks
from study.liars import ATTACKS, BASES, Lie
from study.plan import Study
from study.runs import key_of

RESULTS = Path(__file__).parent / "results"
ROWS = RESULTS / "liars.jsonl"
DOCUMENT = Path(__file__).parents[1] / "docs" / "faults.md"
WORKERS = (8, 16, 32)
SPLITS = {"iid": "the whole text", "class": "a part of the text each"}


def main(argv: list[str] | None = None) -> None:
    args = parsed(argv)
    rows = read(args.save)
    if not args.again:
        rows += run_all(args, {liars.key_of(row) for row in rows})
    show(rows, Console(width=130))
    if args.report:
        DOCUMENT.write_text(documented(DOCUMENT.read_text(), rows))
    report.finish({"benchmark": "liars", **keys(rows)}, None)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = report.rows_parser(__doc__, ROWS)
    parser.add_argument("--text", type=Path, help="folder of text files")
    parser.add_argument("--workers", type=int, nargs="+", choices=WORKERS, default=list(WORKERS))
    parser.add_argument("--method", nargs="+", choices=list(BASES), default=list(BASES))
    parser.add_argument("--size", choices=list(tasks.SIZES), default="small")
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one core each on a CPU")
    parser.add_argument("--again", action="store_true", help="run nothing: sum up the rows")
    parser.add_argument("--report", action="store_true", help="write the tables of docs/faults.md")
    args = parser.parse_args(argv)
    try:
        if args.jobs < 1:
            raise ValueError(f"--jobs {args.jobs}: give 1 or more")
        if not args.again:
            tasks.load("text", args.text, tasks.SIZES[args.size])  # looked at before anything runs
        elif not read(args.save):
            raise ValueError(f"--again sums up the rows of {args.save}, and there are none")
    except ValueError as error:
        parser.error(str(error))
    return args


def read(path: Path) -> Rows:
    """The rows of a file, or none if there is no file."""
    return report.read(path, liars.key_of)


def run_all(args: argparse.Namespace, done: set[Lie]) -> Rows:
    """Runs what is missing, several at a time; rows are written as they come."""
    wanted = dict.fromkeys(liars.planned(WORKERS) + liars.unlike())
    wanted = [lie for lie in wanted if lie.base in args.method and lie.workers in args.workers]
    wanted = [lie for lie in wanted if lie not in done]
    same = groupby(wanted, key=lambda lie: (lie.base, lie.workers, lie.split))
    run = partial(run_some, folder=args.text, size=args.size)
    return pool.run_all([list(some) for _, some in same], run, args.jobs, args.save)


_runner: list[liars.LiarsRunner] = []  # of this process; data are read once


def run_some(lies: list[Lie], folder: Path | None, size: str) -> Rows:
    """Runs lies about one method, in a process of the pool."""
    if not _runner:
        shape = tasks.SIZES[size]
        tuned = Study(shape, ("text",), report.read(RESULTS / "convergence.jsonl", key_of))
        rate = partial(tuned.best_rate, "text")
        task = tasks.load("text", folder, shape)
        _runner.append(liars.LiarsRunner(task, shape.steps, shape.text.batch, rate))
    return [_runner[0].run(lie) | report.provenance() for lie in lies]


def table_of(rows: Rows, workers: int) -> tuple[list[str], list[list[str]]]:
    """Head and lines, of the methods that ran: bits per byte behind the same method without liars."""
    lines = []
    clean = {"workers": workers, "attack": "nobody", "liars": 0, "missing": 0.0}
    bases = [base for base in liars.attacked(workers) if liars.ends(rows, base=base, **clean)]
    ends = [liars.ends(rows, base=base, **clean) for base in bases]
    lines.append(["nobody: bits per byte", *[f"{sum(x) / len(x):.3f}" for x in ends]])
    cases = [
        (f"{count} {attack}", clean | {"attack": attack, "liars": count})
        for attack in list(ATTACKS)[1:]
        for count in liars.numbers_of_liars(workers)
    ]
    cases += [(f"{share:.0%} missing", clean | {"missing": share}) for share in liars.SHARES]
    cases += [(f"{share:.0%} late", clean | {"late": share}) for share in liars.SHARES]
    for what, lie in cases:
        each = [liars.behind(rows, lie | {"base": base}) for base in bases]
        if any(x is not None for x in each):
            lines.append([what, *["" if x is None else f"{x:+.3f}" for x in each]])
    return ["liars", *bases], lines


def table_of_unlike(rows: Rows) -> tuple[list[str], list[list[str]]]:
    """Head and lines: bits per byte of workers that see unlike data, and what a liar adds to it."""
    lines, bases = [], list(dict.fromkeys(liars.UNLIKE + liars.CROWDED + liars.TURNED))
    clean = {"attack": "nobody", "liars": 0, "missing": 0.0}
    loud = {"attack": "times -1e6", "liars": 1, "missing": 0.0}
    crowds = [(f"{n} workers, {SPLITS[split]}", n, split) for n, split in liars.CROWDS]
    for name, workers, split in crowds:
        at = {"workers": workers, "split": split, **clean}
        each = [liars.ends(rows, base=base, **at) for base in bases]
        each = [ends if len(ends) == 3 else [] for ends in each]  # of one seed it would mislead
        if any(each):
            lines.append([name, *[f"{sum(x) / len(x):.3f}" if x else "" for x in each]])
    for name, workers, split in crowds:
        at = {"workers": workers, "split": split, **loud}
        lost = [liars.behind(rows, at | {"base": base}) for base in bases]
        if split != "iid" and any(x is not None for x in lost):
            said = ["" if x is None else f"{x:+.3f}" for x in lost]
            lines.append([f"{name}; 1 times -1e6", *said])
    return ["workers, and what they see", *bases], lines


def show(rows: Rows, console: Console) -> None:
    for workers in sorted({row["workers"] for row in rows}):
        title = f"{workers} workers: bits per byte behind the same without liars"
        console.print(report.table(title, *table_of(rows, workers)))
    head, lines = table_of_unlike(rows)
    if lines:
        console.print(report.table("bits per byte", head, lines))


def documented(document: str, rows: Rows) -> str:
    """The document with the tables of these rows."""
    for workers in sorted({row["workers"] for row in rows}):
        text = report.markdown(*table_of(rows, workers))
        document = report.written(document, f"liars {workers}", text)
    return report.written(document, "liars unlike", report.markdown(*table_of_unlike(rows)))


def keys(rows: Rows) -> dict[str, Any]:
    """What is claimed: 3 flippers of 8, one liar of 8 who sends -1e6 times its gradient, 30 % missing."""
    flipped = {"workers": 8, "attack": "flip", "liars": 3, "missing": 0.0}
    loud = {"workers": 8, "attack": "times -1e6", "liars": 1, "missing": 0.0}
    away = {"workers": 8, "attack": "nobody", "liars": 0, "missing": 0.3}
    said = {
        "vote_3_flippers_of_8": liars.behind(rows, flipped | {"base": "vote"}),
        "median_3_flippers_of_8": liars.behind(rows, flipped | {"base": "median"}),
        "mean_1_loud_of_8": liars.behind(rows, loud | {"base": "mean"}),
        "owner_1_loud_of_8": liars.behind(rows, loud | {"base": "owner"}),
        "vote_30_percent_missing": liars.behind(rows, away | {"base": "vote"}),
        "vote_30_percent_late": liars.behind(
            rows, away | {"base": "vote", "missing": 0.0, "late": 0.3}
        ),
    }
    return {name: None if x is None else float(f"{x:.4g}") for name, x in said.items()}


if __name__ == "__main__":
    main()
