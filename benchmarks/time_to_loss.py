"""Time to loss: the hours that a user buys, and not bits or milliseconds. Who is first at the goal?

    python benchmarks/time_to_loss.py [--part tuning curves times confirm]
    python benchmarks/time_to_loss.py --again            # sums up the committed rows, measures nothing

The goal is the validation loss at which float32 Lion stands after 60, 80 and 100 % of its run, on a GPT
of 7.3 million parameters: 4 workers, 2 windows of 64 bytes each. Every contender is tuned
over four choices (learning rates; of PowerSGD ranks too, of DiLoCo how many steps a worker takes alone,
of 1-bit Adam its warm-up), by the loss at the end of a run with a seed that nothing else uses. Then:

* "curves": three seeds of the best choice by the real training step; who does not reach the goal gets runs
  half as long again, with a schedule of that length. Steps to a goal are those of the mean curve.
* "times": milliseconds of a step, in the network lab at each rate, all contenders in turns.
* "confirm": the best of ours and the best of the peers run to the goal in the lab, by the clock.

``--torch`` adds DistributedDataParallel with AdamW, its bfloat16 hook and PowerSGD (pip install -r
requirements/peers.txt), from the same parameters, with the choice of the same method in JAX.

Time to the loss is steps times milliseconds. Rows that are in the file are not run again. For 8 to 256
workers with a GPU's computing it is what `lioncub plan` says, from evidence that is packaged
(``python benchmarks/convergence.py --evidence`` makes it of these rows).
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import report
from goal import curves, lab, planned, summary
from goal.contenders import CONTENDERS, contender_named
from goal.curves import Run
from goal.summary import SHARES, STEPS
from rich.console import Console

ROWS = Path(__file__).parent / "results" / "time_to_loss.jsonl"
PARTS = ("tuning", "curves", "times", "confirm")
WORKERS = 4
TUNING_SEED, SEEDS = 1000, (0, 1, 2)


def main(argv: list[str] | None = None) -> None:
    args = parsed(argv)
    if not args.again:
        for part in args.part or PARTS:
            PARTS_RUN[part](args)
    found = report.read(args.save, curves.key_of)
    if not summary.mean_curve(found, summary.LION_NAME, STEPS):
        print(f"There is no goal until {summary.LION_NAME} has run: --part curves")
        return
    summed = summary.summed(found)
    console, at_scale = Console(), planned.plans()
    summary.show(found, summed, console)
    planned.show(at_scale, console)
    if args.figures:
        summary.draw(found, args.figures)
    keys = summed.keys | {"planned": planned.firsts(at_scale)}
    keys["planner_beside_measured"] = planned.beside_measured(found)
    report.finish({"benchmark": "time_to_loss", **keys}, None)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = report.rows_parser(__doc__, ROWS)
    parser.add_argument("--part", nargs="+", choices=PARTS, help="some only, in this order")
    parser.add_argument("--contender", action="append", help="some only")
    parser.add_argument("--torch", action="store_true", help="those of PyTorch, too")
    parser.add_argument("--rates", nargs="+", default=list(lab.RATES), choices=lab.RATES)
    parser.add_argument("--again", action="store_true", help="measure nothing: sum up the rows")
    parser.add_argument("--figures", type=Path, help="a folder for time_to_loss.png")
    args = parser.parse_args(argv)
    try:
        frameworks = ["jax", "torch"] if args.torch else ["jax"]
        args.contender = args.contender or [
            name for name, one in CONTENDERS.items() if one.framework in frameworks
        ]
        for name in args.contender:
            contender_named(name)
        found = report.read(args.save, curves.key_of)
        if args.again:
            summary.goals(found)
    except ValueError as error:
        parser.error(str(error))
    return args


def run_tuning(args: argparse.Namespace) -> None:
    wanted = [
        Run("tuning", name, *choice, WORKERS, STEPS, TUNING_SEED)
        for name in args.contender
        for choice in CONTENDERS[name].choices
    ]
    train_all(wanted, args.save)


def run_curves(args: argparse.Namespace) -> None:
    """At the best choice; longer ones of who has not reached the goal."""
    for steps in summary.LENGTHS:
        found, wanted = report.read(args.save, curves.key_of), []
        for name in args.contender:
            if steps == STEPS or not summary.reached(found, name):
                choice = summary.best_choice(found, name)
                wanted += [Run("curve", name, *choice, WORKERS, steps, seed) for seed in SEEDS]
        train_all(wanted, args.save)


def train_all(wanted: list[Run], save: Path) -> None:
    """Trains what is missing, and writes each row as it comes."""
    done = {curves.key_of(row) for row in report.read(save, curves.key_of)}
    mesh = curves.mesh_of(jax.devices()[:WORKERS])
    for n, run in enumerate(wanted):
        if run not in done:
            contender = CONTENDERS[run.contender]
            by_jax = contender.framework == "jax"
            row = curves.train(mesh, contender, run) if by_jax else lab.trained(run)
            report.append(save, [row | report.provenance()])
            said = f"{row['loss'][-1]:.4f} bits per byte, {row['seconds']:.0f} s"
            print(
                f"{n + 1}/{len(wanted)} {' '.join(map(str, run[:4]))} seed {run.seed}: {said}",
                flush=True,
            )


def run_times(args: argparse.Namespace) -> None:
    """Of each contender at its best choice, every stage."""
    found = report.read(args.save, curves.key_of)
    entries = []
    for name in args.contender:
        option = summary.best_choice(found, name).option
        stages = dict.fromkeys(stage for _, stage in CONTENDERS[name].stages(STEPS, option))
        entries += [lab.Entry(name, stage, option) for stage in stages]
    for rate in args.rates:
        for row in lab.timed(entries, rate, WORKERS):
            report.append(args.save, [row | report.provenance()])


def run_confirm(args: argparse.Namespace) -> None:
    """Runs to the goal by the clock."""
    found = report.read(args.save, curves.key_of)
    for rate in args.rates:
        for name in summary.to_confirm(found, rate):
            loss, share = summary.goals(found)[SHARES[-1]], SHARES[-1]
            way = summary.reach(found, name, loss)
            goal = lab.Goal(share, loss, way.length, SEEDS[0])
            row = lab.confirmed(name, summary.best_choice(found, name), goal, rate, WORKERS)
            report.append(args.save, [row | report.provenance()])


PARTS_RUN: dict[str, Any] = {
    "tuning": run_tuning, "curves": run_curves, "times": run_times, "confirm": run_confirm,
}  # fmt: skip


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", WORKERS)
    main()
