"""Trains a byte-level GPT by workers that vote: on Python's standard library, or on any text.

    python examples/train_gpt.py
    python examples/train_gpt.py --bits 3 --workers 16
    python examples/train_gpt.py --mesh data=4,fsdp=2 --checkpoint runs/saved --resume
    python examples/train_gpt.py --optimizer lion --text war_and_peace.txt --out runs/float32

On a CPU the workers are devices that JAX simulates; accelerators are taken as they are. The output
folder receives metrics.jsonl, loss.png and sample.txt. examples/README.md tells of clusters.
"""

import argparse
import sys
import time
from typing import Any

import jax
import optax
from flax import nnx
from gpt import corpus, meshes, options, processes, report, saving, training
from gpt.meshes import Layout
from gpt.model import GPT
from gpt.optimizers import RECIPES
from rich.console import Console

import lioncub_jax as lc


def main(argv: list[str] | None = None) -> None:
    began = time.perf_counter()
    parser = options.make_parser(__doc__)
    args = parser.parse_args(argv)
    try:
        options.settle(args)
        text = corpus.from_files(args.text) if args.text else corpus.standard_library()
        corpus.check_length(text, args.context)
        processes.start(args, args.mesh)
        layout = meshes.build(args.mesh)
        if processes.is_first():
            report.claim(args.out, args.overwrite, args.resume)
    except ValueError as error:
        parser.error(str(error))
    try:
        with saving.opened(args, layout) as checkpoints:
            train(args, text, layout, checkpoints, began)
    except saving.Refused as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print(f"\nstopped; what was measured so far is in {args.out}", file=sys.stderr)
        sys.exit(130)


def train(
    args: argparse.Namespace, text: corpus.Corpus, layout: Layout, checkpoints: Any, began: float
) -> None:
    console = Console(markup=False, highlight=False, quiet=not processes.is_first())
    console.print(f"{about(layout)}; compiling the step", soft_wrap=True)
    run = saving.resumed(prepare(args, text, layout), checkpoints, args.steps)
    report.introduce(console, run)
    metrics = report.MetricsFile(args.out, writes=processes.is_first())
    rows = metrics.begin(run, {"config": options.as_json(args), **report.environment(layout)})
    with (
        report.Screen(console, args.steps, run) as screen,
        saving.during(run, checkpoints, args.save_every) as stops,
    ):

        def follow(row: training.Row) -> None:
            rows.append(row)
            metrics.write("step", row._asdict())
            screen.show(row)

        before = rows[-1].seconds if rows else 0.0
        run, stopped = training.train(run, args.steps, follow, stops, before)
    if stopped:
        console.print(saving.farewell(run, args.checkpoint), soft_wrap=True)
        sys.exit(args.stopped_status)
    params = training.whole(run)
    if processes.is_first():
        sample = training.sample(run, params)
        final = report.results(run, rows[-1], time.perf_counter() - began)
        metrics.write("result", final)
        report.plot(rows, final, label(args, layout), args.out / "loss.png")
        report.conclude(console, final, sample, args.out)


def prepare(args: argparse.Namespace, text: corpus.Corpus, layout: Layout) -> training.Run:
    model = GPT(
        layers=args.layers, width=args.width, heads=args.heads, context=args.context,
        dropout=args.dropout, tied=not args.untied, rngs=nnx.Rngs(args.seed),
    )  # fmt: skip
    chosen: dict[str, Any] = {}
    if args.bits:
        chosen["bits"] = args.bits
    if args.sync_every:
        chosen["sync"] = lc.sync.every(args.sync_every)
    tx = RECIPES[args.optimizer].build(
        **chosen,
        workers=layout.voters,
        learning_rate=schedule(args.lr, args.steps),
        weight_decay=args.weight_decay,
    )
    return training.prepare(model, text, tx, layout, batch=args.batch, seed=args.seed)


def schedule(peak: float, steps: int) -> optax.Schedule:
    """Up for a tenth of the steps, then down to zero along a cosine."""
    warmup = max(1, steps // 10)
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(warmup + 1, steps))


def about(layout: Layout) -> str:
    count = jax.process_count()
    said = f", process 0 of {count}" if count > 1 else ""
    return f"{layout.describe()} ({report.device_kind(layout.mesh)}){said}"


def label(args: argparse.Namespace, layout: Layout) -> str:
    bits = "" if args.bits is None else f", {args.bits} bit{'s' * (args.bits > 1)} up"
    return f"{args.optimizer}{bits}, {layout.describe()}"


if __name__ == "__main__":
    main()
