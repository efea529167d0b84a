"""What comparing replicas costs: a check beside a step, of the race's GPT of 7.3 million parameters.

    python benchmarks/replicas.py [--every 100]

Four workers on the devices of this machine (a CPU stands in for four). Steps and checks take turns, and the
share is the seconds of a check over those of so many steps.
"""

import math
import sys
import time
from pathlib import Path
from statistics import median

import jax
import report
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from flax import nnx
from gpt import corpus
from gpt.model import GPT, next_byte_loss
from race import model as race

import lioncub_jax as lc

WORKERS, AXIS = 4, "data"


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--every", type=int, default=100, help="steps from check to check")
    parser.add_argument("--turns", type=int, default=10)
    args = parser.parse_args()
    mesh = jax.make_mesh(
        (WORKERS,), (AXIS,), devices=jax.devices()[:WORKERS], axis_types=(AxisType.Auto,)
    )
    shape = {"layers": race.LAYERS, "width": race.WIDTH, "heads": race.HEADS}
    model = GPT(**shape, context=race.CONTEXT, rngs=nnx.Rngs(0))
    loss, params, model_state = lc.from_nnx(model, next_byte_loss)
    tx = lc.owner_lion(1e-4, axis_name=AXIS)
    state = lc.init_state(tx, params, mesh, axis_name=AXIS, model_state=model_state)
    step = lc.make_train_step(loss, tx, mesh, axis_name=AXIS)
    replicas = lc.faults.Replicas(mesh, axis_name=AXIS, every=args.every)
    batch = corpus.draw(corpus.standard_library().train, 2 * WORKERS, race.CONTEXT, (0, 0))
    batch = jax.device_put(batch, NamedSharding(mesh, P(AXIS)))
    steps, checks = [], []
    for _ in range(args.turns + 1):
        began = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        between = time.perf_counter()
        state = replicas.check(state)
        steps.append(between - began)
        checks.append(time.perf_counter() - between)
    taken, checked = median(steps[1:]), median(checks[1:])
    report.finish(
        {
            "benchmark": "replicas",
            "parameters": sum(math.prod(p.shape) for p in jax.tree.leaves(params)),
            "every": args.every,
            "step_ms": round(1e3 * taken, 1),
            "check_ms": round(1e3 * checked, 1),
            "share": float(f"{checked / (args.every * taken):.3g}"),
        },
        args.save,
    )


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", WORKERS)
    main()
