"""The options of `train_gpt.py`: what they are, and which of them go together."""

import argparse
import datetime
import math
from collections.abc import Callable
from pathlib import Path

from gpt import meshes
from gpt.optimizers import RECIPES


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
    args.mesh = sizes_of(args)
    if args.mesh:
        meshes.check(args.mesh, heads=args.heads, batch=args.batch)
    if args.resume and not args.checkpoint:
        raise ValueError("--resume: give --checkpoint DIR, the folder to go on from")
    args.bits = args.bits or recipe.bits
    args.lr = recipe.learning_rate if args.lr is None else args.lr
    args.weight_decay = recipe.weight_decay if args.weight_decay is None else args.weight_decay
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    args.out = args.out or Path("runs") / f"gpt-{args.optimizer}-{now}"


def as_json(args: argparse.Namespace) -> dict:
    """The arguments as JSON holds them."""
    flat = {
        key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()
    }
    return {**flat, "text": [str(path) for path in args.text or ()]}


def sizes_of(args: argparse.Namespace) -> dict[str, int] | None:
    if args.mesh and args.workers:
        raise ValueError(
            f"--workers {args.workers} is short for --mesh data={args.workers}: give one"
        )
    if args.workers:
        return {"data": args.workers}
    return meshes.parse(args.mesh) if args.mesh else None


def make_parser(doc: str) -> argparse.ArgumentParser:
    summary, details = doc.split("\n\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_workers(parser.add_argument_group("workers and votes").add_argument)
    add_training(parser.add_argument_group("training").add_argument)
    add_files(parser.add_argument_group("files").add_argument)
    add_processes(parser.add_argument_group("several processes").add_argument)
    return parser


def add_workers(add: Callable) -> None:
    recipes = "; ".join(f"{name}: {recipe.summary}" for name, recipe in RECIPES.items())
    add("--optimizer", choices=RECIPES, default="lion-cub", help=f"{recipes} (default %(default)s)")
    add(
        "--bits", type=whole(1, 8), metavar="P",
        help="bits per parameter that a worker sends up, 1 to 8 (default 1 for lion-cub, 3 for owner)",
    )  # fmt: skip
    add(
        "--workers", type=whole(1), metavar="N",
        help="short for --mesh data=N; default 8, or as many as there are accelerators if fewer",
    )  # fmt: skip
    add(
        "--mesh", metavar="NAME=SIZE,...",
        help="workers: data, and pod outside of it; devices of one worker: fsdp and tensor cut its "
        "model, group shares its batch and cuts its momentum (such as pod=2,data=2,fsdp=2)",
    )  # fmt: skip
    add(
        "--sync-every", type=whole(1), metavar="T",
        help="average the workers' momenta in full precision every T steps (default: never)",
    )  # fmt: skip


def add_training(add: Callable) -> None:
    for flag, default, what in [
        ("--steps", 1000, "of the run"),
        ("--batch", 4, "windows per worker and step"),
        ("--layers", 2, "of the model"),
        ("--width", 128, "of the model"),
        ("--heads", 4, "of each layer"),
        ("--context", 64, "bytes that the model sees"),
    ]:
        add(flag, type=whole(1), default=default, help=f"{what} (default %(default)s)")
    add("--lr", type=number(0.0), help="peak learning rate (default: that of the optimizer)")
    add("--weight-decay", type=number(0.0), help="decoupled (default: that of the optimizer)")
    add("--dropout", type=number(0.0, 1.0), default=0.0, help="default %(default)s")
    add("--seed", type=whole(0), default=0, help="a run with the same seed repeats (default 0)")
    add("--untied", action="store_true", help="a weight matrix of its own for writing bytes")


def add_files(add: Callable) -> None:
    add(
        "--text", type=Path, nargs="+", metavar="FILE",
        help="train on these; the last tenth of each is for validation (default: the sources of Python's "
        "standard library)",
    )  # fmt: skip
    add("--out", type=Path, metavar="DIR", help="default runs/gpt-OPTIMIZER-DATE-TIME")
    add("--overwrite", action="store_true", help="replace the results that are in the folder")
    add(
        "--checkpoint", type=Path, metavar="DIR",
        help="save the run here, the last three times; after SIGTERM it is saved and ends well",
    )  # fmt: skip
    add("--save-every", type=whole(1), default=100, metavar="N", help="steps (default %(default)s)")
    add(
        "--resume", action="store_true",
        help="go on from the newest checkpoint, if there is one; the mesh may be another",
    )  # fmt: skip
    add(
        "--stopped-status", type=whole(0, 255), default=0, metavar="CODE",
        help="exit status after SIGTERM (default %(default)s); a Kubernetes Job starts those pods "
        "again that end with another than 0",
    )  # fmt: skip


def add_processes(add: Callable) -> None:
    add(
        "--distributed", action="store_true",
        help="this is one process of several, and its launcher (srun, mpirun, a TPU pod) knows the others",
    )  # fmt: skip
    add(
        "--heartbeat", type=whole(1), default=100, metavar="SECONDS",
        help="after so long without a sign of a process the others end (%(default)s)",
    )  # fmt: skip
    add("--coordinator", metavar="HOST:PORT", help="where process 0 can be reached")
    add("--processes", type=whole(1), metavar="N", help="how many there are")
    add("--process", type=whole(0), metavar="I", help="which this is, from 0")


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
