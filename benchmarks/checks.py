"""The cost of a safe run: comparing replicas, and checkpoints on disk.

    python benchmarks/checks.py [--every 100]

A GPT of 7.2 million parameters, `owner_lion`, four workers on the devices of this
machine (a CPU stands in for four). Steps and what is measured take turns. Shares are of the seconds of so
many steps: of a compare all of it, of a checkpoint what the loop waits for; the rest is written while steps
go on. Then the last state is read.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

import goal  # noqa: F401 (finds the examples)
import jax
import report
from flax import nnx
from gpt import corpus, meshes
from gpt.model import GPT, next_byte_loss

import lioncub_jax as lc

WORKERS, CONTEXT = 4, 64
MODEL = {"layers": 4, "width": 384, "heads": 6, "context": CONTEXT}
TURNS = 10


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--every", type=int, default=100, help="steps from one to the next")
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
    replicas = lc.audit.Replicas(workers, every=args.every)
    with (
        tempfile.TemporaryDirectory() as disk,
        lc.Checkpoints(disk, workers=workers) as saved,
    ):
        taken: dict[str, list[float]] = defaultdict(list)

        def timed(name: str, what: Callable[..., Any], *given: Any) -> Any:
            """Until it is done and its arrays are there."""
            began = time.perf_counter()
            result = jax.block_until_ready(what(*given))
            taken[name].append(time.perf_counter() - began)
            return result

        for _ in range(TURNS + 1):
            state, _ = timed("step", step, state, batch)
            timed("check", replicas.check, state)
            timed("checkpoint", saved.save, state)
            timed("checkpoint_written", saved.wait)
        for _ in range(3):
            timed("from_disk", saved.restore, state)
    ms = {f"{name}_ms": 1e3 * median(times[1:]) for name, times in taken.items()}
    shares = {
        f"{name}_share": ms[f"{name}_ms"] / (args.every * ms["step_ms"])
        for name in ("check", "checkpoint")
    }
    figures = {name: float(f"{x:.3g}") for name, x in (ms | shares).items()}
    parameters = sum(x.size for x in jax.tree.leaves(params))
    about = {"benchmark": "checks", "parameters": parameters, "every": args.every}
    report.finish(about | figures, args.save)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", WORKERS)
    main()
