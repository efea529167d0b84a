"""Bytes per device of a training step: parameters, optimizer state and temporaries.

    python benchmarks/memory.py [--only demo | --only 7b]

Two models: the GPT of `examples/train_gpt.py` on eight devices, and a decoder with the shapes of
Llama 7B on 64 nodes of eight devices. Both are compiled by shape only, nothing is allocated, for CPU
devices that JAX simulates. Parameters and state are what their shardings say of one device.
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
from flax import nnx  # noqa: E402
from gpt import meshes  # noqa: E402
from gpt.model import GPT, next_byte_loss  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from rich.console import Console  # noqa: E402

import lioncub_jax as lc  # noqa: E402

DEMO_MESHES = [
    {"data": 8},
    {"data": 4, "fsdp": 2},
    {"data": 2, "tensor": 4},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"data": 2, "group": 4},
    {"data": 4, "group": 2},
]
LARGE_MESHES = [{"data": 64, axis: 8} for axis in ("fsdp", "tensor", "group")]
COLUMNS = [
    "model", "mesh", "optimizer", "params", "optimizer state", "momentum", "temporaries",
    "state / optax.lion",
]  # fmt: skip


class Model(NamedTuple):
    """A loss, and the shapes of what it is a function of."""

    name: str
    loss: Any
    params: Any
    model_state: Any
    specs: Callable[[Mesh], Any]
    windows: jax.ShapeDtypeStruct  # of one worker


class Measured(NamedTuple):
    """Bytes on one device."""

    params: int
    state: int  # of the optimizer
    momentum: int | None  # the part of it that is Lion's momentum, where it has a tree of its own
    temporaries: int


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--only", choices=["demo", "7b"], help="one of the models (default: both)")
    args = parser.parse_args()
    runs = [(demo, each) for each in DEMO_MESHES if args.only != "7b"]
    runs += [(seven_billion, each) for each in LARGE_MESHES if args.only != "demo"]
    rows, lines, ratios = [], [], {}
    for build, sizes in runs:
        model, workers = build(), meshes.build(sizes).voters
        label = ", ".join(f"{name} {size}" for name, size in sizes.items())
        found = {
            name: measure(model, make(workers=workers), workers)
            for name, make in OPTIMIZERS.items()
        }
        lion = found["optax.lion"]
        for name, one in found.items():
            ratio = one.state / lion.state
            shown = [size_text(x) for x in one]
            lines.append([model.name, label, name, *shown, f"{ratio:.4f}"])
            rows.append([model.name, label, name, *one, ratio])
        ratios[f"{model.name}: {label}"] = {
            "lion_cub": found["lion_cub"].state / lion.state,
            "lion_cub_momentum": found["lion_cub"].momentum / lion.momentum,
            "owner_lion": found["owner_lion"].state / lion.state,
        }
    Console(width=120).print(report.table("bytes on one device", COLUMNS, lines))
    summary = {
        "benchmark": "memory",
        "opt_ratio_vs_lion": ratios,
        "7b": "float32 parameters and momentum, bfloat16 products, layers computed again for the "
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


def demo() -> Model:
    """As `make demo` trains it."""
    gpt = GPT(layers=2, width=128, heads=4, context=64, rngs=nnx.Rngs(0))
    loss, params, model_state = lc.from_nnx(gpt, next_byte_loss)
    windows = jax.ShapeDtypeStruct((4, 65), jnp.uint8)
    return Model("demo", loss, params, model_state, partial(meshes.specs, params), windows)


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


def seven_billion() -> Model:
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), SHAPES, is_leaf=is_shape
    )
    windows = jax.ShapeDtypeStruct((8, CONTEXT + 1), jnp.int32)
    return Model("7B", next_token_loss, params, (), large_specs, windows)


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


def measure(model: Model, tx: Any, workers: lc.Workers) -> Measured:
    mesh = workers.mesh
    state = lc.training.abstract_state(
        tx, model.params, workers, specs=model.specs(mesh), model_state=model.model_state
    )
    inner = [name for name in mesh.axis_names if name not in ("data", "tensor")]
    step = lc.make_train_step(model.loss, tx, workers, batch_spec=P(("data", *inner)))
    rows, *rest = model.windows.shape
    batch = jax.ShapeDtypeStruct((rows * mesh.shape["data"], *rest), model.windows.dtype)
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
