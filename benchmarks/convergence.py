"""The study of lengths and sizes: losses after 1,024 and 4,096 steps, with 2,048 tokens, of four sizes.

    python benchmarks/convergence.py [--part 1024 reason tokens 4096 ladder 256 different] [--jobs 2]
    python benchmarks/convergence.py --left     # says what there is to run, and runs nothing
    python benchmarks/convergence.py --report   # makes evidence.json, pages' numbers and pictures from rows

Eight simulated workers, one core for each process. Rows are written as they come and never run twice. A
run that is stopped goes on from the last of its 16 points, equal to the bit.
"""

import argparse
import functools
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import report
from goal import contenders, evidence, lengths, pages
from goal.curves import key_of, runner
from goal.runner import use_one_thread
from goal.study import Study
from time_to_loss import ROWS as SHORT

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks" / "results" / "convergence.jsonl"
EVIDENCE = ROOT / "lioncub_jax" / "tools" / "plan" / "evidence.json"
KEPT = ROOT / "runs" / "convergence"


def main(argv: list[str] | None = None) -> None:
    parser = report.parser(__doc__, ROWS)
    parts = list(lengths.PARTS)
    parser.add_argument("--part", nargs="+", choices=parts, default=parts, help="in this order")
    parser.add_argument("--contender", nargs="+", help="of these alone; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one core each")
    parser.add_argument("--left", action="store_true", help="say what is left, and run nothing")
    parser.add_argument(
        "--report", action="store_true", help="make pages and pictures from rows, and run nothing"
    )
    args = parser.parse_args(argv)
    if args.report:
        EVIDENCE.write_text(evidence.text_of(packaged()))
        for path, text in made().items():
            path.write_text(text)
        import pictures  # not needed by the processes that train

        pictures.main()
        return
    for part in args.part:
        print(left(part, args.save), flush=True)
    if args.left:
        return
    use_one_thread()
    for part in args.part:
        run(part, args)


def read() -> report.Rows:
    """The rows of all runs."""
    return [row for path in (SHORT, ROWS) for row in report.read(path, key_of)]


def made() -> dict[Path, str]:
    """The packaged evidence, and pages with numbers from rows; the planner reads the file as it is."""
    known = packaged()
    return {EVIDENCE: evidence.text_of(known), **pages.rewritten(known, Study(read()).tables())}


def packaged() -> dict[str, Any]:
    """All methods, but not the runs that look for a reason."""
    return evidence.evidence([row for row in read() if row["contender"] not in contenders.TRIED])


def left(part: str, save: Path) -> str:
    """A line on what is left of a part, in core hours."""
    steps = {job.steps for job in lengths.PARTS[part]}
    rows = {key_of(row): row for row in report.read(save, key_of)}.values()
    done = [row for row in rows if part_of(row) == part]
    hours = lengths.hours_left(lengths.PARTS[part], done, list(rows))
    return f"part {part}, {max(steps):,} steps: {len(done)} runs done, {hours:.1f} core hours left"


def part_of(row: dict) -> str:
    """The part that a row is of."""
    if row["contender"] in contenders.TRIED:
        return "reason"
    if row["width"] != lengths.WIDTH:
        return "ladder"
    if row["data"] != "alike":
        return row["data"]
    return "tokens" if row["tokens"] != lengths.TOKENS else str(row["steps"])


def run(part: str, args: argparse.Namespace) -> None:
    """All jobs of a part; a bar of what is done is printed behind each."""
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        jobs = [
            job
            for job in lengths.PARTS[part]
            if args.contender is None or job.contender in args.contender
        ]
        waiting = {pool.submit(run_job, job, args.save): job for job in jobs}
        for done in as_completed(waiting):
            done.result()
            print(f"{waiting[done].contender} is done; {left(part, args.save)}", flush=True)


def run_job(job: lengths.Job, save: Path) -> None:
    """A job in a process of its own."""
    lengths.run(job, once(save), report.read(SHORT, key_of))


@functools.cache
def once(save: Path) -> report.Once:
    """The runs of this process, which keep the last program."""
    return report.Once(save, key_of, runner(KEPT))


if __name__ == "__main__":
    main()
