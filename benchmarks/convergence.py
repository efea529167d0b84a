"""Does it still learn? Methods, workers, data and seeds, by simulated workers on real data.

    python benchmarks/convergence.py --images ~/data/fashion-mnist --text ~/data/gutenberg
    python benchmarks/convergence.py --save again.jsonl    # what is embedded: digits, the standard library
    python benchmarks/convergence.py --part noniid --method vote --method owner-3

Runs that are in the file of rows are not run again, so it may be stopped at any time. Each row says
what ran and what came out; ``--report`` makes of them the tables of docs/convergence_tables.md, and
``--evidence``, with those of time_to_loss.py, what `lioncub plan` knows about learning,
lioncub_jax/planner/evidence.json. ``--tuned`` takes rates from another file of rows: to repeat some after
a change of the library, in a file of their own, so that what differs is due to the change.
"""

import argparse
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import report
from goal import evidence as goal_evidence
from study import evidence, plan, pool, tables, tasks
from study.methods import method_named
from study.runs import Runner, Spec, key_of

from lioncub_jax import arguments

ROWS = Path(__file__).parent / "results" / "convergence.jsonl"
GOAL_ROWS = ROWS.parent / "time_to_loss.jsonl"
DOCUMENT = Path(__file__).parents[1] / "docs" / tables.DOCUMENT
EVIDENCE = Path(__file__).parents[1] / "lioncub_jax" / "planner" / "evidence.json"


def main(argv: list[str] | None = None) -> None:
    args = parsed(argv)
    rows = report.read(args.save, key_of)
    if args.report:
        DOCUMENT.write_text(tables.rewritten(DOCUMENT.read_text(), rows, ROWS.parent))
        return
    if args.evidence:
        EVIDENCE.write_text(evidence_of(rows))
        return
    names = tuple(args.task or tasks.TASKS)
    folders = {task: getattr(args, task) for task in tasks.TASKS}
    for part in args.part or plan.PARTS:
        tuned = report.read(args.tuned, key_of) if args.tuned else rows
        study = plan.Study(tasks.SIZES[args.size], names, tuned)
        done = {key_of(row) for row in rows}
        wanted = study.specs(part, args.method or (), args.workers or ())
        specs = [spec for spec in wanted if spec not in done]
        groups = [list(group) for _, group in groupby(specs, key=lambda spec: spec.program)]
        facts = {"size": args.size, "command": command(args, part)}
        run = partial(run_some, folders=folders, facts=facts)
        rows += pool.run_all(groups, run, args.jobs, args.save)
    report.finish({"benchmark": "convergence", "rows": len(rows), "size": args.size}, None)


def evidence_of(rows: report.Rows) -> str:
    """What the packaged file holds, of these rows and of those of time_to_loss.py."""
    more = goal_evidence.told(report.read(GOAL_ROWS))
    return evidence.text_of(evidence.evidence(rows, more))


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = report.rows_parser(__doc__, ROWS)
    parser.add_argument("--images", type=Path, help="folder of IDX files or an npz")
    parser.add_argument("--text", type=Path, help="folder of text files")
    parser.add_argument("--task", action="append", choices=list(tasks.TASKS), help="one only")
    parser.add_argument(
        "--part", action="append", choices=plan.PARTS, help="some only, in this order"
    )
    parser.add_argument("--method", action="append", help="some only")
    parser.add_argument("--workers", action="append", type=int, choices=plan.WORKERS)
    parser.add_argument("--size", choices=list(tasks.SIZES), default="small")
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one core each on a CPU")
    parser.add_argument(
        "--tuned", type=Path, help="file of rows that rates are taken from (--save)"
    )
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
        arguments.check_count(f"--jobs {args.jobs}", args.jobs)
        for name in args.method or ():
            method_named(name)
        runs = not (args.report or args.evidence)
        for task in (args.task or tasks.TASKS) if runs else ():  # looked at before anything runs
            found = tasks.load(task, getattr(args, task), tasks.SIZES[args.size])
            for path in filter(None, (args.save, args.tuned)):
                check_dataset(path, found)
    except ValueError as error:
        parser.error(str(error))
    return args


def check_dataset(path: Path, task: tasks.Task) -> None:
    """Rows that are added to, or say the rates, must be of the same data."""
    rows = report.rows_of(report.read(path, key_of), task=task.name)
    others = sorted({row["dataset"] for row in rows} - {task.dataset})
    if others:
        raise ValueError(
            f"{path} has rows of {', '.join(others)}, and this is {task.dataset}: give the folder of the "
            f"same data by --{task.name}, the other task alone by --task, or another file by --save"
        )


def command(args: argparse.Namespace, part: str) -> str:
    """What repeats the rows of a part; folders by their names, for they may lie anywhere."""
    words = ["python", "benchmarks/convergence.py", "--part", part, "--size", args.size]
    for task in tasks.TASKS:
        folder = getattr(args, task)
        words += [f"--{task}", folder.resolve().name] if folder else []
    return " ".join(words)


_runners: dict[str, Runner] = {}  # of this process; data are read once


def run_some(specs: list[Spec], folders: dict[str, Any], facts: dict[str, Any]) -> report.Rows:
    """Runs specs of one program, in a process of the pool."""
    task = specs[0].task
    if task not in _runners:
        _runners[task] = Runner(tasks.load(task, folders[task], tasks.SIZES[facts["size"]]))
    return [_runners[task].run(spec) | report.provenance() | facts for spec in specs]


if __name__ == "__main__":
    main()
