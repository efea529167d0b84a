"""The cost of a safe run: comparing replicas, snapshots in memory, and checkpoints on disk.

    python benchmarks/checks.py [--every 100]

A GPT of 7.2 million parameters, `owner_lion`, four workers on the devices of this
machine (a CPU stands in for four). Steps and what is measured take turns. Shares are of the seconds of so
many steps: of a compare all of it, of a snapshot or a checkpoint what the loop waits for; the rest is
written while steps go on. Then the last state is read, from memory and from disk.
"""

import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import report
from flax import nnx

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from gpt import corpus, meshes
from gpt.model import GPT, next_byte_loss

import lioncub_jax as lc
from lioncub_jax.tools import faults, run

WORKERS, CONTEXT = 4, 64
MODEL = {"layers": 4, "width": 384, "heads": 6, "context": CONTEXT}
MEMORY = Path("/dev/shm")


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--every", type=int, default=100, help="steps from one to the next")
    parser.add_argument("--turns", type=int, default=10)
    args = parser.parse_args()
    layout = meshes.build({"data": WORKERS})
    workers = layout.voters
    model = GPT(**MODEL, rngs=nnx.Rngs(0))
    loss, params, model_state = lc.from_nnx(model, next_byte_loss)
    tx = lc.owner_lion(1e-4, workers=workers)
    state = lc.init_state(tx, params, workers, model_state=model_state)
    step = lc.make_train_step(loss, tx, workers)
    batch = corpus.draw(corpus.standard_library().train, 2 * WORKERS, CONTEXT, (0, 0))
    batch = layout.place(batch)
    replicas = faults.Replicas(workers, every=args.every)
    with (
        tempfile.TemporaryDirectory() as disk,
        tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as memory,
        lc.Checkpoints(disk, workers=workers) as saved,
        run.Snapshots(saved, memory, buddies=1) as snapshots,
    ):
        parts: dict[str, Callable[[Any], object]] = {
            "check": replicas.check,
            "snapshot": snapshots.save,
            "snapshot_written": lambda _: snapshots.wait(),
            "checkpoint": saved.save,
            "checkpoint_written": lambda _: saved.wait(),
        }
        taken: dict[str, list[float]] = {name: [] for name in ("step", *parts)}
        for _ in range(args.turns + 1):
            began = time.perf_counter()
            state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
            taken["step"].append(time.perf_counter() - began)
            for name, part in parts.items():
                taken[name].append(seconds(part, state))
        like = lc.training.abstract_state(tx, params, workers, model_state=model_state)
        taken["from_memory"] = [seconds(snapshots.restore, like) for _ in range(3)]
        snapshots.clear()
        taken["from_disk"] = [seconds(saved.restore, like) for _ in range(3)]
    ms = {f"{name}_ms": round(1e3 * median(times[1:]), 1) for name, times in taken.items()}
    shares = {
        f"{name}_share": float(f"{ms[f'{name}_ms'] / (args.every * ms['step_ms']):.3g}")
        for name in ("check", "snapshot", "checkpoint")
    }
    parameters = sum(math.prod(p.shape) for p in jax.tree.leaves(params))
    about = {"benchmark": "checks", "parameters": parameters, "every": args.every}
    report.finish({**about, **ms, **shares}, args.save)


def seconds(what: Callable[..., object], *args: Any) -> float:
    """Until it is done and its arrays are there."""
    began = time.perf_counter()
    jax.block_until_ready(what(*args))
    return time.perf_counter() - began


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", WORKERS)
    main()
