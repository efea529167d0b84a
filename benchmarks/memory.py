"""Bytes per device of a training step: parameters, optimizer state and temporaries.

    python benchmarks/memory.py

A decoder with the shapes of Llama 7B on 64 nodes of eight devices is compiled by shape only, nothing is
allocated, for CPU devices that JAX simulates. Parameters and state are what shardings say of a device.
Temporaries are XLA's own count for its CPU backend, which plans one device's program: it is no
promise for an accelerator. It computes matrix products of bfloat16 in float32, does not fuse
attention, and lays out gradients of the whole tree at once; that part is the same in all rows of a mesh,
so compare rows and not sizes. Our state has 16 bytes of counters more than optax.lion's.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
COLUMNS = [
    "mesh", "optimizer", "params", "optimizer state", "momentum", "temporaries",
    "state / optax.lion",
]  # fmt: skip


class Measured(NamedTuple):
    """Bytes on one device."""

    params: int
    state: int  # of the optimizer
    momentum: int | None  # the part of it that is Lion's momentum, where it has a tree of its own
    temporaries: int


def main() -> None:
    args = report.parser(__doc__).parse_args()
    rows, lines, ratios = [], [], {}
    for sizes in MESHES:
        workers = meshes.build(sizes).voters
        label = ", ".join(f"{name} {size}" for name, size in sizes.items())
        found = {name: measure(make(workers=workers), workers) for name, make in OPTIMIZERS.items()}
        lion = found["optax.lion"]
        for name, one in found.items():
            ratio = one.state / lion.state
            lines.append([label, name, *(size_text(x) for x in one), f"{ratio:.4f}"])
            rows.append([label, name, *one, ratio])
        ratios[label] = {
            "lion_cub": found["lion_cub"].state / lion.state,
            "lion_cub_momentum": found["lion_cub"].momentum / lion.momentum,
            "owner_lion": found["owner_lion"].state / lion.state,
        }
    Console(width=120).print(report.table("bytes on one device", COLUMNS, lines))
    summary = {
        "benchmark": "memory",
        "opt_ratio_vs_lion": ratios,
        "model": "7B: float32 parameters and momentum, bfloat16 products, layers computed again for the "
        "gradient; each worker takes 8 windows of 2048 tokens",
        "columns": COLUMNS,
        "rows": rows,
    }  # fmt: skip
    report.finish(summary, args.save)


# --- What is compared


def baseline(make: Callable[..., Any], workers: lc.Workers) -> Any:
    """On the same devices; where ours has two levels, every device is a worker to it."""
    return lc.global_gradients(make(1e-4), workers=workers)


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "optax.lion": partial(baseline, optax.lion),
    "optax.adamw": partial(baseline, optax.adamw),
    "lion_cub": partial(lc.lion_cub, 1e-4),
    "owner_lion": partial(lc.owner_lion, 1e-4),
}


# --- A decoder with the shapes of Llama 7B

LAYERS, WIDTH, HIDDEN, HEADS, VOCABULARY, CONTEXT = 32, 4096, 11008, 32, 32000, 2048
SHAPES = {
    "embed": (VOCABULARY, WIDTH),
    "head": (WIDTH, VOCABULARY),
    "norm": (WIDTH,),
    "layers": {
        **dict.fromkeys(("query", "key", "value", "out"), (LAYERS, WIDTH, WIDTH)),
        **dict.fromkeys(("gate", "up"), (LAYERS, WIDTH, HIDDEN)),
        "down": (LAYERS, HIDDEN, WIDTH),
        **dict.fromkeys(("norm1", "norm2"), (LAYERS, WIDTH)),
    },
}
ROWS_CUT = {"embed", "out", "down"}  # over "tensor"; of other matrices the columns


def is_shape(x: Any) -> bool:
    return isinstance(x, tuple)


def large_specs(mesh: Mesh) -> Any:
    """Matrices cut over fsdp by rows, over tensor as in Megatron-LM."""

    def spec(path: Any, shape: tuple[int, ...]) -> P:
        name, stacked = path[-1].key, len(path) > 1
        if len(shape) - stacked < 2 or meshes.GROUP in mesh.axis_names:
            return P()
        matrix = P("fsdp") if "fsdp" in mesh.axis_names else P(None, "tensor")
        if "tensor" in mesh.axis_names and name in ROWS_CUT:
            matrix = P("tensor")
        return P(*[None] * stacked, *matrix)

    return jax.tree_util.tree_map_with_path(spec, SHAPES, is_leaf=is_shape)


def next_token_loss(params: Any, windows: jax.Array, rng: jax.Array) -> jax.Array:
    del rng
    x = params["embed"].astype(jnp.bfloat16)[windows[:, :-1]]
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    logits = normed(x, params["norm"]) @ params["head"].astype(jnp.bfloat16)
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), windows[:, 1:]
    ).mean()


def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
    w = jax.tree.map(lambda a: a.astype(jnp.bfloat16), weights)
    h = normed(x, w["norm1"])
    heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
    queries, keys, values = ((h @ w[name]).reshape(heads) for name in ("query", "key", "value"))
    mixed = jax.nn.dot_product_attention(queries, keys, values, is_causal=True)
    x = x + mixed.reshape(x.shape) @ w["out"]
    h = normed(x, w["norm2"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None


def normed(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * weight.astype(x.dtype)


# --- Compiling it by shape


def measure(tx: Any, workers: lc.Workers) -> Measured:
    mesh = workers.mesh
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), SHAPES, is_leaf=is_shape
    )
    state = lc.training.abstract_state(tx, params, workers, specs=large_specs(mesh))
    inner = [name for name in mesh.axis_names if name not in ("data", "tensor")]
    step = lc.make_train_step(next_token_loss, tx, workers, batch_spec=P(("data", *inner)))
    batch = jax.ShapeDtypeStruct((8 * mesh.shape["data"], CONTEXT + 1), jnp.int32)
    plan = step.lower(state, batch).compile().memory_analysis()
    momentum = sum(held(tree) for _, tree in optax.tree.get_all_with_path(state.opt_state, "mu"))
    return Measured(
        held(state.params), held(state.opt_state), momentum or None, plan.temp_size_in_bytes
    )


def held(tree: Any) -> int:
    """Bytes of arrays on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def size_text(count: int | None) -> str:
    if count is None:
        return "-"
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.3f} MB"


if __name__ == "__main__":
    main()
