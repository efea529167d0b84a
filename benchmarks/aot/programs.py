"""Programs to compile: a training step of a model, by shape, with a method."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import lioncub_jax as lc

LION, ADAMW, MUON = "optax.lion", "optax.adamw", "optax.contrib.muon"
# Ordinary data parallelism, in which XLA adds up float32 gradients: what the methods are compared with.
PLAIN: dict[str, Callable[[], optax.GradientTransformation]] = {
    LION: lambda: optax.lion(1e-4),
    ADAMW: lambda: optax.adamw(1e-4),
    MUON: lambda: optax.contrib.muon(1e-2, muon_weight_dimension_numbers=hidden),
}
# What optimizers are compared by memory and on GPUs.
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    LION: lambda **axes: lc.global_gradients(optax.lion(1e-4), **axes),
    "optax.adamw": lambda **axes: lc.global_gradients(optax.adamw(1e-4), **axes),
    "lion_cub": lambda **axes: lc.lion_cub(1e-4, **axes),
    "owner_lion": lambda **axes: lc.owner_lion(1e-4, **axes),
    "owner_adamw": lambda **axes: lc.owner_adamw(1e-4, **axes),
    "owner_muon": lambda **axes: lc.owner_muon(1e-2, muon_weight_dimension_numbers=hidden, **axes),
}
METHODS: dict[str, Callable[..., Any]] = {
    "vote, 1 bit": OPTIMIZERS["lion_cub"],
    "vote, 2 bits": lambda **axes: lc.lion_cub(1e-4, quantizer=lc.quantize.midrise(2), **axes),
    "average": lambda **axes: lc.distributed_lion(1e-4, average=True, **axes),
    "owner, 3 bits": OPTIMIZERS["owner_lion"],
    "owner_adamw": OPTIMIZERS["owner_adamw"],
    "owner_muon": OPTIMIZERS["owner_muon"],
}
OF_OPTAX = {
    "owner_adamw": ADAMW,
    "owner_muon": MUON,
}  # what a method is measured by, if not by Lion
BUCKETS = "vote, 1 bit, 8 buckets"  # with what XLA must be told to overlap them
# docs/reports/accelerators.md says what each does; on a CPU collectives are synchronous.
GPU_OVERLAP: dict[str, Any] = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 64,
    "xla_gpu_all_gather_combine_threshold_bytes": 1,
}
TPU_OVERLAP = {"xla_tpu_enable_async_all_to_all": "true", "xla_enable_async_all_gather": "true"}
OVERLAP: dict[str, dict[str, Any]] = {
    "gpu": GPU_OVERLAP, "cuda": GPU_OVERLAP, "rocm": GPU_OVERLAP, "tpu": TPU_OVERLAP, "cpu": {},
}  # fmt: skip


def hidden(params: Any) -> Any:
    """Which leaves are matrices: of a GPT those of its layers, and no embeddings."""

    def numbers(path: Any, x: Any) -> MuonDimensionNumbers | None:
        inside = "layers" not in params or path[0].key == "layers"
        return MuonDimensionNumbers() if inside and x.ndim == 2 else None

    return jax.tree.map_with_path(numbers, params)


class Model(NamedTuple):
    """A model by shape.

    Attributes:
      params: tree of ``jax.ShapeDtypeStruct``.
      loss: ``(params, windows, rng) -> float32[]``; None where the update alone is compiled, of gradients
        that are there.
      windows: of one worker, ``int32[batch, context + 1]``.
      fsdp: devices that share a worker's parameters.
    """

    params: Any
    loss: Callable[..., jax.Array] | None = None
    windows: tuple[int, int] = (0, 0)
    fsdp: int = 1

    @property
    def size(self) -> int:
        """The number of parameters."""
        return sum(x.size for x in jax.tree.leaves(self.params))


def gpt(layers: int, width: int, heads: int, vocabulary: int, context: int) -> tuple[Any, Any]:
    """Shapes and loss of a GPT-2 in bfloat16 with float32 parameters, 12 arrays a layer and 4 more."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def dense(rows: int, columns: int) -> dict[str, Any]:
        return {"kernel": array(rows, columns), "bias": array(columns)}

    norm = {"scale": array(width), "bias": array(width)}
    layer = {
        "norm1": norm, "query_key_value": dense(width, 3 * width), "out": dense(width, width),
        "norm2": norm, "up": dense(width, 4 * width), "down": dense(4 * width, width),
    }  # fmt: skip
    params = {
        "read": array(vocabulary, width),
        "positions": array(context, width),
        "layers": [layer] * layers,
        "norm": norm,
    }

    def loss(params: Any, windows: jax.Array, rng: Any = None) -> jax.Array:
        read = params["read"].astype(jnp.bfloat16)
        x = read[windows[:, :-1]] + params["positions"].astype(jnp.bfloat16)
        for each in params["layers"]:
            x = jax.checkpoint(_layer, static_argnums=2)(each, x, heads)
        logits = (_norm(params["norm"], x) @ read.T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

    return params, loss


def _layer(w: Any, x: jax.Array, heads: int) -> jax.Array:
    y = _dense(w["query_key_value"], _norm(w["norm1"], x))
    parts = [p.reshape(*p.shape[:2], heads, -1) for p in jnp.split(y, 3, -1)]
    x += _dense(w["out"], jax.nn.dot_product_attention(*parts, is_causal=True).reshape(x.shape))
    return x + _dense(w["down"], jax.nn.gelu(_dense(w["up"], _norm(w["norm2"], x))))


def _dense(w: Any, x: jax.Array) -> jax.Array:
    return x @ w["kernel"].astype(x.dtype) + w["bias"].astype(x.dtype)


def _norm(w: Any, x: jax.Array) -> jax.Array:
    wide = jax.nn.standardize(x.astype(jnp.float32), epsilon=1e-5)
    return (wide * w["scale"] + w["bias"]).astype(x.dtype)


def _gpt(batch: int, *shape: int, fsdp: int = 1) -> Model:
    params, loss = gpt(*shape)
    return Model(params, loss, (batch, shape[-1] + 1), fsdp)


def _update(*shape: int) -> Model:
    return Model(gpt(*shape)[0])


MODELS: dict[str, Callable[[], Model]] = {
    "matrix": lambda: Model({"w": jax.ShapeDtypeStruct((2048, 4096), jnp.float32)}),
    "gpt-2m": lambda: _gpt(8, 2, 256, 4, 512, 128),
    "gpt-124m": lambda: _gpt(8, 12, 768, 12, 50304, 1024),
    "gpt-124m, update": lambda: _update(12, 768, 12, 50304, 1024),
    "gpt-7b, fsdp 8": lambda: _gpt(1, 32, 4096, 32, 50304, 2048, fsdp=8),
}


def sizes(model: Model, devices: int, group: int = 1) -> dict[str, int]:
    """Axes of the mesh: workers, and the devices of each."""
    if devices % (model.fsdp * group) or devices < 2 * model.fsdp * group:
        raise ValueError(f"{devices} devices are no two workers of {model.fsdp * group}")
    inner = {"group": group} if group > 1 else {"fsdp": model.fsdp} if model.fsdp > 1 else {}
    return {"data": devices // (model.fsdp * group), **inner}


def lowered(model: Model, method: str, mesh: Mesh) -> tuple[Any, Any]:
    """The step of a method, before XLA; and its transform, None for an optimizer of `PLAIN`.

    Raises:
      TypeError: for a model whose loss cannot be traced by the shapes of its parameters and windows.
    """
    specs = specs_of(model, mesh)
    if method in PLAIN:
        return _plain(PLAIN[method](), model, mesh, specs), None
    group = "group" if "group" in mesh.axis_names else None
    workers = lc.Workers(mesh, "data", group)
    options = None
    if method == BUCKETS:
        tx = lc.lion_cub(1e-4, workers=workers, bucket_size=-(-model.size // 8))
        options = OVERLAP[mesh.devices.flat[0].platform]
    else:
        tx = METHODS[method](workers=workers)
    state = lc.training.abstract_state(tx, model.params, workers, specs=specs)
    if model.loss is not None:
        axes = tuple(mesh.axis_names)
        step = lc.make_train_step(model.loss, tx, workers, batch_spec=P(axes)).compiled(options)
        return step.lower(state, _batch(model, mesh)), tx

    # Donated and returned in one order: XLA gives donated buffers to results of their size as they come.
    def update(grads: Any, params: Any, state: Any) -> Any:
        updates, state = tx.update(jax.tree.map(lambda g: g[0], grads), state, params)
        return optax.apply_updates(params, updates), state

    grads = _of_each(model, workers.num_gradients, mesh, workers.axes)
    step = lc.map_step(update, workers, rows="grads", donate=("params", "state"))
    return step.lower(grads, state.params, state.opt_state), tx


def specs_of(model: Model, mesh: Mesh) -> Any:
    """Specs of the parameters of a worker."""
    return jax.tree.map(lambda x: P("fsdp") if _cut(x, mesh) else P(), model.params)


def _plain(tx: optax.GradientTransformation, model: Model, mesh: Mesh, specs: Any) -> Any:
    """An optimizer of optax as users run it: ordinary data parallelism under ``jit``."""
    axes = tuple(mesh.axis_names)

    def lay(x: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    params = jax.tree.map(lay, model.params, specs)

    def is_masked(x: Any) -> bool:
        return isinstance(x, optax.MaskedNode)

    state = optax.tree.map_params(
        tx, lambda old, x: old if is_masked(old) else x, jax.eval_shape(tx.init, model.params),
        params, transform_non_params=lambda x: lay(x, P()), is_leaf=is_masked,
    )  # fmt: skip

    def step(grads_or_batch: Any, params: Any, state: Any) -> Any:
        loss = None
        if model.loss is None:
            grads = jax.tree.map(lambda g: jnp.mean(g, 0), grads_or_batch)
        else:
            loss, grads = jax.value_and_grad(model.loss)(params, grads_or_batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    update_alone = model.loss is None
    given = _of_each(model, mesh.size, mesh, axes) if update_alone else _batch(model, mesh)
    return jax.jit(step, donate_argnums=(1, 2)).lower(given, params, state)


def _of_each(model: Model, count: int, mesh: Mesh, axes: Any) -> Any:
    """Gradients ``[workers, ...]``."""

    def lay(x: Any) -> jax.ShapeDtypeStruct:
        where = NamedSharding(mesh, P(axes))
        return jax.ShapeDtypeStruct((count, *x.shape), x.dtype, sharding=where)

    return jax.tree.map(lay, model.params)


def _batch(model: Model, mesh: Mesh) -> jax.ShapeDtypeStruct:
    rows, length = model.windows
    where = NamedSharding(mesh, P(tuple(mesh.axis_names)))
    return jax.ShapeDtypeStruct((rows * mesh.size, length), jnp.int32, sharding=where)


def _cut(x: Any, mesh: Mesh) -> bool:
    parts = mesh.shape.get("fsdp", 1)
    return parts > 1 and x.ndim > 1 and x.shape[0] % parts == 0
