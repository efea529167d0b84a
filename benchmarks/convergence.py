"""Does it still learn? Methods, workers, data and seeds, by simulated workers on real data.

    python benchmarks/convergence.py --images ~/data/fashion-mnist --text ~/data/gutenberg
    python benchmarks/convergence.py                     # what is embedded: digits, the standard library
    python benchmarks/convergence.py --part noniid --method vote --method owner-3
    python benchmarks/convergence.py --size paper --images ~/data/cifar-10 --task images   # wants a GPU
    python benchmarks/convergence.py --sample again.jsonl --images DIR --text DIR   # some, once more

Runs that are in the file of rows are not run again, so it may be stopped at any time. Each row says
what ran and what came out; ``--report`` makes of them the tables and figures of docs/convergence_tables.md.
``--sample`` repeats some of the rows after a change of the library, in a file of their own: nothing is
tuned again, and what differs from the row of before is due to the change. ``--evidence`` makes of the
rows, and of those of time_to_loss.py, what `lioncub plan` knows about learning,
lioncub_jax/planner/evidence.json.
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import report
from goal import evidence as goal_evidence
from goal import rows as goal_rows
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from study import analysis, evidence, plan, signs, store, tables, tasks
from study.methods import method_named
from study.runs import Runner, Spec

from lioncub_jax import checks

ROWS = Path(__file__).parent / "results" / "convergence.jsonl"
GOAL_ROWS = ROWS.parent / "time_to_loss.jsonl"
DOCS = Path(__file__).parents[1] / "docs"
EVIDENCE = Path(__file__).parents[1] / "lioncub_jax" / "planner" / "evidence.json"
AT_ONCE = 8  # runs of one program that a process takes before its rows are written


def main(argv: list[str] | None = None) -> None:
    args = parsed(argv)
    rows = store.read(args.save)
    if args.report:
        tables.report(rows, DOCS, ROWS.parent)
        return
    if args.evidence:
        evidence.write(rows, EVIDENCE, goal_evidence.told(goal_rows.read(GOAL_ROWS)))
        return
    if args.sample:
        found = sampled(args, rows)
        summary = {"benchmark": "convergence", "rows": len(found), "size": args.size}
        report.finish(summary, None)
        return
    study = plan.Study(tasks.SIZES[args.size], tuple(args.task or tasks.TASKS), rows)
    for part in args.part or plan.PARTS:
        done = {store.key_of(row) for row in rows}
        wanted = study.specs(part, args.method or (), args.workers or ())
        specs = [spec for spec in wanted if spec not in done]
        rows += run_all(specs, args, part, args.save)
        if part == "signs" and not plan.rows_of(rows, part="synthetic"):
            noise = [row | facts(args, part) for row in analysis.synthetic_rows()]
            store.append(args.save, noise)
            rows += noise
    summary = {"benchmark": "convergence", "rows": len(rows), "size": args.size}
    report.finish(summary, None)


def sampled(args: argparse.Namespace, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Repeats a sample of the rows in a file of its own, and returns all rows of that file."""
    found = store.read(args.sample)
    done = {store.key_of(row) for row in found}
    wanted = plan.sample(plan.rows_of(rows, size=args.size))
    for field in ("part", "task", "method", "workers"):
        given = getattr(args, field)
        wanted = [spec for spec in wanted if not given or getattr(spec, field) in given]
    specs = [spec for spec in wanted if spec not in done]
    return found + run_all(specs, args, "sample", args.sample)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--images", type=Path, help="folder of IDX files, CIFAR-10 batches or an npz"
    )
    parser.add_argument("--text", type=Path, help="folder of text files")
    parser.add_argument("--task", action="append", choices=list(tasks.TASKS), help="one only")
    parser.add_argument(
        "--part", action="append", choices=plan.PARTS, help="some only, in this order"
    )
    parser.add_argument("--method", action="append", help="some only")
    parser.add_argument(
        "--workers", action="append", type=int, choices=(*plan.WORKERS, *plan.FEWER)
    )
    parser.add_argument("--size", choices=list(tasks.SIZES), default="small")
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one core each on a CPU")
    parser.add_argument("--save", type=Path, default=ROWS, help="file of rows, read and added to")
    parser.add_argument(
        "--sample", type=Path, metavar="FILE",
        help="repeat a sample of the rows in --save at their rates: what is claimed with 8 and 32 workers, "
        "each method once; rows are added to this file",
    )  # fmt: skip
    parser.add_argument(
        "--report", action="store_true", help="run nothing: write docs/convergence_tables.md"
    )
    parser.add_argument(
        "--evidence",
        action="store_true",
        help="run nothing: write what the planner knows of learning",
    )
    args = parser.parse_args(argv)
    try:
        checks.check_count(f"--jobs {args.jobs}", args.jobs)
        for name in args.method or ():
            method_named(name)
        check_sample(args)
        wanted = () if args.report or args.evidence else args.task or tuple(tasks.TASKS)
        for task in wanted:  # data are looked at before anything runs
            found = tasks.load(task, getattr(args, task), tasks.SIZES[args.size])
            check_dataset(args, found)
    except ValueError as error:
        parser.error(str(error))
    return args


def check_sample(args: argparse.Namespace) -> None:
    if args.evidence and (args.report or args.sample):
        raise ValueError("--evidence runs nothing and draws nothing: give it alone, or with --save")
    if args.sample is None:
        return
    if args.report:
        raise ValueError("--sample runs and --report does not: give one of them")
    if args.sample.resolve() == args.save.resolve():
        raise ValueError(
            f"--sample {args.sample} is the file of --save, whose rows it repeats: give another file"
        )
    if not args.save.exists():
        raise ValueError(
            f"--sample repeats rows of --save {args.save}, which is not there: run it first"
        )


def check_dataset(args: argparse.Namespace, task: tasks.Task) -> None:
    """What a sample repeats must be of the same data."""
    rows = plan.rows_of(store.read(args.save) if args.sample else [], task=task.name)
    before = sorted({row["dataset"] for row in rows} - {task.dataset})
    if before:
        raise ValueError(
            f"--sample repeats rows of {', '.join(before)}, and this is {task.dataset}: give the folder of "
            f"the same data by --{task.name}, or the other task alone by --task"
        )


def facts(args: argparse.Namespace, part: str) -> dict[str, Any]:
    """What is needed to repeat a row, besides what it says itself."""
    return {"size": args.size, **report.provenance(), "command": command(args, part)}


def command(args: argparse.Namespace, part: str) -> str:
    """What repeats the rows of a part; folders by their names, for they may lie anywhere."""
    which = ["--sample", args.sample.name] if args.sample else ["--part", part]
    words = ["python", "benchmarks/convergence.py", *which, "--size", args.size]
    for task in tasks.TASKS:
        folder = getattr(args, task)
        words += [f"--{task}", folder.resolve().name] if folder else []
    return " ".join(words)


def run_all(
    specs: list[Spec], args: argparse.Namespace, part: str, save: Path
) -> list[dict[str, Any]]:
    """Runs what is missing, several at a time; rows are written as they come."""
    groups = [list(group) for _, group in groupby(specs, key=lambda spec: spec.program)]
    chunks = [group[i : i + AT_ONCE] for group in groups for i in range(0, len(group), AT_ONCE)]
    found = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    # One thread each: small programs gain nothing from a second core.
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    pool = ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn"))
    with pool, Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task(part, total=len(specs))
        folders = {task: getattr(args, task) for task in tasks.TASKS}
        waiting = [pool.submit(run_some, chunk, folders, args.size) for chunk in chunks]
        for done in as_completed(waiting):
            rows = [row | facts(args, part) for row in done.result()]
            store.append(save, rows)
            found += rows
            progress.advance(bar, len(rows))
    return found


_runners: dict[Any, Runner] = {}  # of this process; data are read once


def run_some(specs: list[Spec], folders: dict[str, Path | None], size: str) -> list[dict[str, Any]]:
    """Runs specs of one program, in a process of the pool."""
    kind = signs.SignsRunner if specs[0].part == "signs" else Runner
    key = kind, specs[0].task
    if key not in _runners:
        _runners[key] = kind(tasks.load(specs[0].task, folders[specs[0].task], tasks.SIZES[size]))
    return [_runners[key].run(spec) for spec in specs]


if __name__ == "__main__":
    main()
