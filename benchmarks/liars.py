"""Who survives which liars, and how many missing votes? Simulated workers that learn a text.

    python benchmarks/liars.py --text ~/data/gutenberg     # 8, 16 and 32 workers
    python benchmarks/liars.py --again                     # sums up the committed rows, runs nothing

A GPT of 40,160 parameters reads a folder of texts, or Python's own standard library, byte by byte: 800
steps, of 32 windows of 32 bytes for all workers together. The learning rate rises for a twentieth of them
and falls along a cosine; each method keeps the highest that is best without liars, for nobody knows of
any. Of 8 workers 1, 2 or 3 lie; of 16 1, 4 or 7; of 32 1, 8 or 15: just below half. Liars flip the signs of
their gradients, send noise, multiply by 1e6 or -1e6, send NaN, or push one leaf together; of more than 8
workers only the worst of it, on some methods. Besides, of 8 workers' votes 10, 30 and 50 % are missing, or
late, drawn anew in each step, and some methods run with workers that see other data than the others. Rows
that are in the file are not run again.
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import report
from harm import liars, simulated
from harm.liars import ATTACKS, BASES, Lie
from report import Rows
from rich.console import Console

from lioncub_jax import arguments

ROWS = Path(__file__).parent / "results" / "liars.jsonl"
DOCUMENT = Path(__file__).parents[1] / "docs" / "reports" / "faults.md"
WORKERS = (8, 16, 32)
SPLITS = {"iid": "the whole text", "class": "a part of the text each"}
# One thread each: small programs gain nothing from a second core.
FLAGS = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def main(argv: list[str] | None = None) -> None:
    args = parsed(argv)
    if not args.again:
        run_all(args, {liars.key_of(row) for row in read(args.save)})
    rows = read(args.save)
    show(rows, Console(width=130))
    if args.report:
        DOCUMENT.write_text(documented(DOCUMENT.read_text(), rows))
    report.finish({"benchmark": "liars", **keys(rows)}, None)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = report.rows_parser(__doc__, ROWS)
    parser.add_argument("--text", type=Path, help="folder of text files")
    parser.add_argument("--workers", type=int, nargs="+", choices=WORKERS, default=list(WORKERS))
    parser.add_argument("--method", nargs="+", choices=list(BASES), default=list(BASES))
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one core each on a CPU")
    parser.add_argument("--again", action="store_true", help="run nothing: sum up the rows")
    parser.add_argument(
        "--report", action="store_true", help="write the tables of docs/reports/faults.md"
    )
    args = parser.parse_args(argv)
    try:
        arguments.check_count(f"--jobs {args.jobs}", args.jobs)
        if not args.again:
            simulated.load(args.text)  # looked at before anything runs
        elif not read(args.save):
            raise ValueError(f"--again sums up the rows of {args.save}, and there are none")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return args


def read(path: Path) -> Rows:
    """The rows of a file, or none if there is no file."""
    return report.read(path, liars.key_of)


def run_all(args: argparse.Namespace, done: set[Lie]) -> None:
    """Runs what is missing, several at a time; rows are written as they come."""
    wanted = dict.fromkeys(liars.planned(WORKERS) + liars.unlike())
    wanted = [lie for lie in wanted if lie.base in args.method and lie.workers in args.workers]
    wanted = [lie for lie in wanted if lie not in done]
    groups = [list(some) for _, some in groupby(wanted, key=lambda lie: (lie.base, lie.workers))]
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        runs = [pool.submit(run_some, some, args.text, args.save) for some in groups]
        for run in as_completed(runs):
            print(f"{run.result()}: done", flush=True)


_runner: list[liars.Runner] = []  # of this process; data are read once


def run_some(lies: list[Lie], folder: Path | None, save: Path) -> str:
    """Runs lies about one method, in a process of its own, and says which it was."""
    _runner[:] = _runner or [liars.Runner(simulated.load(folder))]
    for lie in lies:
        report.append(save, [_runner[0].run(lie) | report.provenance()])
    return f"{lies[0].base}, {lies[0].workers} workers"


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
