"""One worker of `benchmarks/faults.py`: a GPT that goes on from its newest snapshot or checkpoint.

Says ``step N LOSS`` after each step, and ``save N`` when it begins to save.
"""

import argparse
import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from flax import nnx
from gpt import corpus, meshes
from gpt.model import GPT, next_byte_loss

import lioncub_jax as lc
from lioncub_jax.tools import faults, run

BATCH, CONTEXT = 12, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True, help="steps from save to save")
    parser.add_argument(
        "--snapshots", type=int, required=True, help="steps from snapshot to snapshot"
    )
    parser.add_argument("--checkpoint", type=Path, required=True)
    args = parser.parse_args()
    # One that ends with an error waits for the others no longer, and those are ended.
    jax.distributed.initialize(shutdown_timeout_seconds=5)
    memory = run.memory_folder()
    assert memory, "started by lioncub run"
    layout = meshes.build({"data": jax.device_count()})
    workers = layout.voters
    text = corpus.standard_library().train
    tx = lc.owner_lion(1e-3, workers=workers)
    with (
        # A save takes a second at most; nobody waits longer for one whose disk failed.
        lc.Checkpoints(args.checkpoint, workers=workers, timeout=10) as saved,
        run.Snapshots(saved, memory / "snapshots", every=args.snapshots) as snapshots,
        lc.stop_on_sigterm() as stopping,
    ):
        shapes = lc.from_nnx(nnx.eval_shape(model), next_byte_loss)
        like = lc.training.abstract_state(tx, shapes[1], workers, model_state=shapes[2])
        restored = snapshots.restore(like)
        if restored is None:  # what is read need not be made first
            _, params, model_state = lc.from_nnx(model(), next_byte_loss)
            state = lc.init_state(tx, params, workers, model_state=model_state)
            snapshots.save(state)  # the first one may be the one that is needed
        else:
            state = restored.state
        loss = shapes[0]
        step = lc.make_train_step(loss, tx, workers)
        replicas = faults.Replicas(workers, every=args.every)
        for t in range(int(state.step), args.steps):
            batch = layout.place(corpus.draw(text, BATCH, CONTEXT, (0, t)))
            state, metrics = step(replicas(state), batch)
            say(f"step {t + 1} {float(metrics['loss']):.6f}")
            snapshots(state)
            stop = stopping(t + 1)
            if stop or (t + 1) % args.every == 0:
                say(f"save {t + 1}")
                saved.save(state, wait=stop)
            if stop:
                sys.exit(75)


def model() -> GPT:
    return GPT(layers=2, width=64, heads=2, context=CONTEXT, rngs=nnx.Rngs(0))


def say(line: str) -> None:
    if jax.process_index() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
