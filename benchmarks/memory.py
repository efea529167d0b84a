"""Bytes of parameters and optimizer state on a device: 7B parameters on 64 workers of eight devices.

    python benchmarks/memory.py

By the shapes of Llama 7B, in float32, and by shardings alone: nothing is compiled or allocated. Our state
has 16 bytes of counters more than optax.lion's. What a compiled step allocates is in ``ahead_of_time.py``.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 512)
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
import report  # noqa: E402
from gpt import meshes  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from rich.console import Console  # noqa: E402

import lioncub_jax as lc  # noqa: E402

MESHES = [{"data": 64, axis: 8} for axis in ("fsdp", "tensor", "group")]
LAYERS, WIDTH, HIDDEN, VOCABULARY = 32, 4096, 11008, 32000
SQUARE, UP = (LAYERS, WIDTH, WIDTH), (LAYERS, WIDTH, HIDDEN)
PARAMS = {
    name: jax.ShapeDtypeStruct(shape, jnp.float32)
    for name, shape in {
        "embed": (VOCABULARY, WIDTH), "head": (WIDTH, VOCABULARY), "norm": (WIDTH,),
        "query": SQUARE, "key": SQUARE, "value": SQUARE, "out": SQUARE,
        "gate": UP, "up": UP, "down": (LAYERS, HIDDEN, WIDTH), "norms": (LAYERS, 2, WIDTH),
    }.items()
}  # fmt: skip
WHOLE = "norm", "norms"
ROWS_CUT = "embed", "out", "down"  # over "tensor", as in Megatron-LM; of other matrices the columns


def baseline(make: Callable[..., Any], workers: lc.Workers) -> Any:
    """On the same devices; where ours has two levels, every device is a worker to it."""
    return lc.global_gradients(make(1e-4), workers=workers)


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "optax.lion": partial(baseline, optax.lion),
    "optax.adamw": partial(baseline, optax.adamw),
    "lion_cub": partial(lc.lion_cub, 1e-4),
    "owner_lion": partial(lc.owner_lion, 1e-4),
    "owner_adamw": partial(lc.owner_adamw, 1e-4),
}


def specs(mesh: Mesh) -> dict[str, P]:
    """Matrices cut over fsdp by rows, over tensor by rows or columns."""

    def spec(name: str, axes: int) -> P:
        inner = next((axis for axis in ("fsdp", "tensor") if axis in mesh.axis_names), None)
        if inner is None or name in WHOLE:
            return P()
        by_rows = inner == "fsdp" or name in ROWS_CUT
        return P(*[None] * (axes - 2), *((inner, None) if by_rows else (None, inner)))

    return {name: spec(name, x.ndim) for name, x in PARAMS.items()}


def held(tree: Any) -> int:
    """Bytes of arrays on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def main() -> None:
    args = report.parser(__doc__).parse_args()
    rows = []
    for sizes in MESHES:
        workers = meshes.build(sizes).voters
        label = ", ".join(f"{name} {size}" for name, size in sizes.items())
        lion = 0
        for name, make in OPTIMIZERS.items():
            tx = make(workers=workers)
            state = lc.training.abstract_state(tx, PARAMS, workers, specs=specs(workers.mesh))
            lion = lion or held(state.opt_state)
            rows.append(
                [
                    label,
                    name,
                    held(state.params),
                    held(state.opt_state),
                    held(state.opt_state) / lion,
                ]
            )
    head = ["mesh", "optimizer", "parameters", "optimizer state", "over optax.lion"]
    lines = [
        [*row[:2], f"{row[2] / 1e9:.2f} GB", f"{row[3] / 1e9:.2f} GB", f"{row[4]:.4f}"]
        for row in rows
    ]
    Console(width=120).print(report.table("bytes on one device", head, lines))
    ratios = {f"{mesh}: {name}": ratio for mesh, name, _, _, ratio in rows}
    report.finish(
        {"benchmark": "memory", "over_optax_lion": ratios, "columns": head, "rows": rows}, args.save
    )


if __name__ == "__main__":
    main()
