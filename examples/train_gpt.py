"""Trains a byte-level GPT by workers that vote: on Python's standard library, or on any text.

    python examples/train_gpt.py
    python examples/train_gpt.py --bits 3 --workers 16
    python examples/train_gpt.py --optimizer lion --text war_and_peace.txt --out runs/float32

On a CPU the workers are devices that JAX simulates; accelerators are taken as they are. The output
folder receives metrics.jsonl, loss.png and sample.txt.
"""

import argparse
import datetime
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import optax
from flax import nnx
from gpt import corpus, report, training
from gpt.model import GPT
from gpt.optimizers import RECIPES
from jax.sharding import Mesh
from rich.console import Console

import lioncub_jax as lc


def main(argv: list[str] | None = None) -> None:
    began = time.perf_counter()
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        settle(args)
        text = corpus.from_files(args.text) if args.text else corpus.standard_library()
        corpus.check_length(text, args.context)
        mesh = training.worker_mesh(args.workers)
        report.claim(args.out, args.overwrite)
    except ValueError as error:
        parser.error(str(error))
    try:
        train(args, text, mesh, began)
    except KeyboardInterrupt:
        print(f"\nstopped; what was measured so far is in {args.out}", file=sys.stderr)
        sys.exit(130)


def train(args: argparse.Namespace, text: corpus.Corpus, mesh: Mesh, began: float) -> None:
    console = Console(markup=False, highlight=False)
    console.print(
        f"{mesh.size} workers ({report.device_kind(mesh)}); compiling the step", soft_wrap=True
    )
    run = prepare(args, text, mesh)
    report.introduce(console, run)
    metrics = report.MetricsFile(args.out)
    metrics.write("run", {"config": config(args), **report.environment(mesh)})
    rows: list[training.Row] = []
    with report.Screen(console, args.steps, run) as screen:

        def follow(row: training.Row) -> None:
            rows.append(row)
            metrics.write("step", row._asdict())
            screen.show(row)

        params = training.train(run, args.steps, follow)
    sample = training.sample(run, params)
    final = report.results(run, rows[-1], time.perf_counter() - began)
    metrics.write("result", final)
    report.plot(rows, final, label(args, mesh), args.out / "loss.png")
    report.conclude(console, final, sample, args.out)


def prepare(args: argparse.Namespace, text: corpus.Corpus, mesh: Mesh) -> training.Run:
    model = GPT(
        layers=args.layers, width=args.width, heads=args.heads, context=args.context,
        dropout=args.dropout, tied=not args.untied, rngs=nnx.Rngs(args.seed),
    )  # fmt: skip
    tx = RECIPES[args.optimizer].build(
        bits=args.bits,
        sync=lc.every(args.sync_every) if args.sync_every else None,
        axis_name=training.AXIS,
        learning_rate=schedule(args.lr, args.steps),
        weight_decay=args.weight_decay,
    )
    return training.prepare(model, text, tx, mesh, batch=args.batch, seed=args.seed)


def schedule(peak: float, steps: int) -> optax.Schedule:
    """Up for a tenth of the steps, then down to zero along a cosine."""
    warmup = max(1, steps // 10)
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(warmup + 1, steps))


def label(args: argparse.Namespace, mesh: Mesh) -> str:
    bits = "" if args.bits is None else f", {args.bits} bit{'s' * (args.bits > 1)} up"
    return f"{args.optimizer}{bits}, {mesh.size} workers"


def config(args: argparse.Namespace) -> dict:
    """The arguments as JSON holds them."""
    return {**vars(args), "out": str(args.out), "text": [str(path) for path in args.text or ()]}


def settle(args: argparse.Namespace) -> None:
    """Fills in what depends on the optimizer, and refuses what does not go together."""
    recipe = RECIPES[args.optimizer]
    if args.bits and not recipe.bits:
        fitting = " or ".join(name for name, other in RECIPES.items() if other.bits)
        raise ValueError(f"--bits: {args.optimizer} leaves no choice of bits; {fitting} does")
    if args.sync_every and not recipe.drifts:
        fitting = ", ".join(name for name, other in RECIPES.items() if other.drifts)
        raise ValueError(
            f"--sync-every: {args.optimizer} has one momentum for all workers; it is for {fitting}"
        )
    if args.width % args.heads:
        raise ValueError(f"--width {args.width} must be a multiple of --heads {args.heads}")
    args.bits = args.bits or recipe.bits
    args.lr = recipe.learning_rate if args.lr is None else args.lr
    args.weight_decay = recipe.weight_decay if args.weight_decay is None else args.weight_decay
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    args.out = args.out or Path("runs") / f"gpt-{args.optimizer}-{now}"


def make_parser() -> argparse.ArgumentParser:
    summary, details = __doc__.split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_workers(parser.add_argument_group("workers and votes"))
    add_training(parser.add_argument_group("training"))
    add_model(parser.add_argument_group("model"))
    add_files(parser.add_argument_group("files"))
    return parser


def add_workers(group: argparse._ArgumentGroup) -> None:
    summaries = "; ".join(f"{name}: {recipe.summary}" for name, recipe in RECIPES.items())
    group.add_argument(
        "--optimizer",
        choices=RECIPES,
        default="lion-cub",
        help=f"{summaries} (default %(default)s)",
    )
    defaults = ", ".join(f"{r.bits} for {name}" for name, r in RECIPES.items() if r.bits)
    group.add_argument(
        "--bits", type=whole(1, 8), metavar="P",
        help=f"bits per parameter that a worker sends up, 1 to 8 (default {defaults})",
    )  # fmt: skip
    group.add_argument(
        "--workers", type=whole(1), metavar="N",
        help="default 8, or as many as there are accelerators if those are fewer",
    )  # fmt: skip
    group.add_argument(
        "--sync-every", type=whole(1), metavar="T",
        help="average the workers' momenta in full precision every T steps (default: never)",
    )  # fmt: skip


def add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--steps", type=whole(1), default=1000, help="default %(default)s")
    group.add_argument(
        "--batch",
        type=whole(1),
        default=4,
        help="windows per worker and step (default %(default)s)",
    )
    for flag, what in (
        ("--lr", "peak learning rate"),
        ("--weight-decay", "decoupled weight decay"),
    ):
        field = "learning_rate" if flag == "--lr" else "weight_decay"
        values = ", ".join(f"{getattr(r, field):g} for {name}" for name, r in RECIPES.items())
        group.add_argument(flag, type=number(0.0), help=f"{what} (default {values})")
    group.add_argument("--dropout", type=number(0.0, 1.0), default=0.0, help="default %(default)s")
    group.add_argument(
        "--seed",
        type=whole(0),
        default=0,
        help="a run with the same seed repeats (default %(default)s)",
    )


def add_model(group: argparse._ArgumentGroup) -> None:
    for flag, default in (("--layers", 2), ("--width", 128), ("--heads", 4)):
        group.add_argument(flag, type=whole(1), default=default, help="default %(default)s")
    group.add_argument(
        "--context", type=whole(1), default=64, help="bytes the model sees (default %(default)s)"
    )
    group.add_argument(
        "--untied", action="store_true", help="a weight matrix of its own for writing bytes"
    )


def add_files(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE",
        help="train on these; of ten files or more every tenth, by the hash of its name, is for "
        "validation, of fewer the last tenth of each (default: Python's standard library)",
    )  # fmt: skip
    group.add_argument(
        "--out", type=Path, metavar="DIR", help="default runs/gpt-OPTIMIZER-DATE-TIME"
    )
    group.add_argument(
        "--overwrite", action="store_true", help="replace the results that are in the folder"
    )


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            bounds = f"at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number {bounds}")
        return int(text)

    return parse


def number(least: float, below: float = math.inf) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            if least <= float(text) < below:
                return float(text)
        except ValueError:
            pass
        bounds = f"at least {least:g}" + (f" and below {below:g}" if below < math.inf else "")
        raise argparse.ArgumentTypeError(f"{text!r} is no number {bounds}")

    return parse


if __name__ == "__main__":
    main()
