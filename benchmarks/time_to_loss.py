"""Time to loss: the hours that a user buys, and not bits or milliseconds. Who is first at the goal?

    python benchmarks/time_to_loss.py [--part curves longer times]
    python benchmarks/time_to_loss.py --again       # sums up the committed rows, measures nothing

A GPT of 430,720 parameters learns Python's standard library, byte by byte. Three noises (32, 256 and 2,048
bytes for each worker and step), 4, 8 and 32 workers; every method is tuned over rate, betas and decay by
one rule and one number of runs, with a seed that nothing else uses.

* "curves": simulated workers, one core for each of two processes; then seeds of the best choice. Steps to a
  goal are those of the mean curve; the goal is where the better of float32 Lion and AdamW stands after
  60, 80 and 100 % of its run.
* "longer": runs half as long again, of those who were not there by 80 %.
* "times": milliseconds of the real training step of four workers, in the network lab at each rate, all
  methods in turns.

``--torch`` times DistributedDataParallel with AdamW, a bfloat16 hook and PowerSGD (pip install -r
requirements/peers.txt), which take the steps of the same method in JAX.

Time to the loss is steps times milliseconds. Rows that are in the file are not run again.
"""

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import report
from goal import curves, evidence, lab, pages, plan
from goal.contenders import CONTENDERS, contender_named
from goal.model import TOKENS

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks" / "results" / "time_to_loss.jsonl"
PARTS = ("curves", "longer", "times")
# One thread each: small programs gain nothing from a second core.
FLAGS = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def main(argv: list[str] | None = None) -> None:
    args = parsed(argv)
    if not args.again:
        for part in args.part or PARTS:
            {"curves": run_curves, "longer": run_longer, "times": run_times}[part](args)
    rows = report.read(args.save, curves.key_of)
    if not report.rows_of(rows, part="curve"):
        print("There is no goal until lion and adamw have run: --part curves")
        return
    print(json.dumps({"benchmark": "time_to_loss", **pages.keys(evidence.evidence(rows))}))


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = report.rows_parser(__doc__, ROWS)
    parser.add_argument("--part", nargs="+", choices=PARTS, help="some only, in this order")
    parser.add_argument("--contender", action="append", help="some only")
    rounds = range(len(plan.ROUNDS))
    parser.add_argument("--rounds", nargs="+", type=int, default=[*rounds], choices=rounds)
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one core each")
    parser.add_argument("--torch", action="store_true", help="time those of PyTorch, too")
    parser.add_argument("--rates", nargs="+", default=list(lab.RATES), choices=lab.RATES)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), choices=TOKENS)
    parser.add_argument("--again", action="store_true", help="measure nothing: sum up the rows")
    args = parser.parse_args(argv)
    try:
        for name in args.contender or ():
            contender_named(name)
        report.read(args.save, curves.key_of)
    except ValueError as error:
        parser.error(str(error))
    args.contender = args.contender or list(CONTENDERS)
    return args


def run_curves(args: argparse.Namespace) -> None:
    """Round after round, for a round needs what the one before tuned."""
    for jobs in plan.jobs(args.contender, args.rounds):
        run_jobs(jobs, args)


def run_longer(args: argparse.Namespace) -> None:
    """Of those who were not there."""
    run_jobs(plan.longer(report.read(args.save), args.contender, args.rounds), args)


def run_jobs(jobs: list[plan.Job], args: argparse.Namespace) -> None:
    before = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{before} {FLAGS}".strip()
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for job, done in [(job, pool.submit(plan.run_job, job, args.save)) for job in jobs]:
            done.result()
            print(f"{job.contender}, {job.cell}, {job.steps} steps", flush=True)
    os.environ["XLA_FLAGS"] = before  # the lab's workers are timed without


def run_times(args: argparse.Namespace) -> None:
    """Of every stage of each contender, with each noise at each rate."""
    names = [*args.contender, lab.NOTHING, *(lab.TORCH if args.torch else ())]
    for tokens in args.tokens:
        for rate in args.rates:
            for row in lab.timed(lab.entries(names, tokens), rate):
                report.append(args.save, [row | report.provenance()])


if __name__ == "__main__":
    main()
