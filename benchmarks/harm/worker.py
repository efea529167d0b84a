"""One worker of `benchmarks/faults.py`: a GPT that goes on from its newest snapshot or checkpoint.

    python benchmarks/harm/worker.py CHECKPOINTS    # by lioncub run

Says ``step N LOSS`` after each step, and ``save N`` when it begins to save.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import jax
from flax import nnx
from gpt import corpus, meshes
from gpt.model import GPT, next_byte_loss

import lioncub_jax as lc
from lioncub_jax.tools import faults, run

STEPS, EVERY, SNAPSHOTS = 120, 20, 5  # steps from save to save, and from snapshot to snapshot
BATCH, CONTEXT = 12, 32


def main() -> None:
    # One that ends with an error waits for the others no longer, and those are ended.
    jax.distributed.initialize(shutdown_timeout_seconds=5)
    memory = run.memory_folder()
    assert memory, "started by lioncub run"
    layout = meshes.build({"data": jax.device_count()})
    workers, text = layout.voters, corpus.standard_library().train
    model = GPT(layers=2, width=64, heads=2, context=CONTEXT, rngs=nnx.Rngs(0))
    loss, params, model_state = lc.from_nnx(model, next_byte_loss)
    tx = lc.owner_lion(1e-3, workers=workers)
    state = lc.init_state(tx, params, workers, model_state=model_state)
    with (
        # A save takes a second at most; nobody waits longer for one whose disk failed.
        lc.Checkpoints(sys.argv[1], workers=workers, timeout=10) as saved,
        run.Snapshots(saved, memory / "snapshots", every=SNAPSHOTS) as snapshots,
        lc.stop_on_sigterm() as stopping,
    ):
        restored = snapshots.restore(state)
        if restored is None:
            snapshots.save(state)  # the first one may be the one that is needed
        else:
            state = restored.state
        step = lc.make_train_step(loss, tx, workers)
        replicas = faults.Replicas(workers, every=EVERY)
        for t in range(int(state.step), STEPS):
            batch = layout.place(corpus.draw(text, BATCH, CONTEXT, (0, t)))
            state, metrics = step(replicas(state), batch)
            say(f"step {t + 1} {float(metrics['loss']):.6f}")
            snapshots(state)
            stop = stopping(t + 1)
            if stop or (t + 1) % EVERY == 0:
                say(f"save {t + 1}")
                saved.save(state, wait=stop)
            if stop:
                sys.exit(75)


def say(line: str) -> None:
    if jax.process_index() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
