"""Trains a byte-level GPT by workers that vote: on Python's standard library, or on any text.

    python examples/train_gpt.py
    python examples/train_gpt.py --bits 3 --workers 16
    python examples/train_gpt.py --mesh data=4,fsdp=2 --checkpoint runs/saved --resume
    python examples/train_gpt.py --optimizer lion --text war_and_peace.txt --out runs/float32

On a CPU the workers are devices that JAX simulates; accelerators are taken as they are. The output
folder receives metrics.jsonl and sample.txt. examples/README.md tells of clusters.
"""

import argparse
import contextlib
import signal
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


def by_signals() -> contextlib.AbstractContextManager:
    """Of clusters and launchers that ask a program to stop, such as Open MPI by SIGUSR1."""
    return lc.stop_on_sigterm(signals=(signal.SIGTERM, signal.SIGUSR1))


def main(argv: list[str] | None = None, asks: saving.Asks = by_signals) -> None:
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
    except (ValueError, TimeoutError) as error:
        parser.error(str(error))
    try:
        with saving.opened(args, layout) as checkpoints:
            train(args, text, layout, checkpoints, began, asks)
    except saving.Refused as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print(f"\nstopped; what was measured so far is in {args.out}", file=sys.stderr)
        sys.exit(130)


def train(
    args: argparse.Namespace, text: corpus.Corpus, layout: Layout, checkpoints: Any, began: float,
    asks: saving.Asks,
) -> None:  # fmt: skip
    console = Console(markup=False, highlight=False, quiet=not processes.is_first())
    devices = f"{layout.describe()}, {jax.process_count()} processes on {jax.default_backend()}"
    console.print(f"{devices}; compiling the step", soft_wrap=True)
    run = saving.resumed(prepare(args, text, layout), checkpoints, args.steps)
    report.introduce(console, run)
    metrics = report.MetricsFile(args.out, processes.is_first())
    before = metrics.begin(run, {"config": options.as_json(args), **report.environment(layout)})
    with saving.during(run, checkpoints, args.save_every, asks) as stops, lc.mesh.end_on_error():

        def follow(row: training.Row) -> None:
            metrics.write("step", row._asdict())
            report.show(console, row, args.steps)

        run, last, stopped = training.train(run, args.steps, follow, stops, before)
    if stopped:
        done = f"stopped after step {int(run.state.step)} and saved in {args.checkpoint}"
        console.print(f"{done}; the same command with --resume goes on from there", soft_wrap=True)
        sys.exit(args.stopped_status)
    sample = training.sample(run)
    if processes.is_first():
        final = report.results(run, last, time.perf_counter() - began)
        metrics.write("result", final)
        report.conclude(console, final, sample, args.out)


def prepare(args: argparse.Namespace, text: corpus.Corpus, layout: Layout) -> training.Run:
    model = GPT(
        layers=args.layers, width=args.width, heads=args.heads, context=args.context,
        dropout=args.dropout, tied=not args.untied, rngs=nnx.Rngs(args.seed),
    )  # fmt: skip
    chosen = {}
    if args.bits:
        chosen["bits"] = args.bits
    if args.sync_every:
        chosen["sync"] = lc.sync.every(args.sync_every)
    tx = RECIPES[args.optimizer].build(
        workers=layout.voters, learning_rate=schedule(args.lr, args.steps),
        weight_decay=args.weight_decay, **chosen,
    )  # fmt: skip
    return training.prepare(model, text, tx, layout, batch=args.batch, seed=args.seed)


def schedule(peak: float, steps: int) -> optax.Schedule:
    """Up for a tenth of the steps, then down to zero along a cosine."""
    warmup = max(1, steps // 10)
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(warmup + 1, steps))


if __name__ == "__main__":
    main()
