"""Bytes of parameters and optimizer state on a device: 6.7B parameters on 64 workers of eight devices.

    python benchmarks/memory.py

By the shapes of a GPT in float32, and by shardings: nothing is compiled or allocated. Our state has 24
bytes of counters more than optax.lion's. What a compiled step allocates is in ``ahead_of_time.py``.
"""

import math
from typing import Any

import jax
import report
from aot import programs

import lioncub_jax as lc

MODEL = "gpt-7b, fsdp 8"
WORKERS, DEVICES = 64, 8


def held(tree: Any) -> int:
    """Bytes of arrays on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def main() -> None:
    args = report.parser(__doc__).parse_args()
    jax.config.update("jax_num_cpu_devices", WORKERS * DEVICES)
    model, rows, ratios, lion = programs.MODELS[MODEL](), [], {}, 0
    for inner in ("fsdp", "group"):
        mesh = jax.make_mesh((WORKERS, DEVICES), ("data", inner))
        # Where ours has two levels, every device is a worker to optimizers of optax.
        workers = lc.Workers(mesh, "data", "group" if inner == "group" else None)
        specs = programs.specs_of(model, mesh)
        for name, make in programs.OPTIMIZERS.items():
            tx = make(workers=workers)
            state = lc.training.abstract_state(tx, model.params, workers, specs=specs)
            size = held(state.opt_state)
            lion = size if name == programs.LION else lion
            rows.append([inner, name, held(state.params), size])
            ratios[f"{inner}: {name}"] = size / lion
            print(*rows[-1], flush=True)
    summary = {"benchmark": "memory", "over_optax_lion": ratios, "rows": rows}
    report.finish(summary, args.save)


if __name__ == "__main__":
    main()
