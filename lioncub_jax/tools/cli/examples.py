"""Examples of targets: a small model, a step, a program.

lioncub plan --model lioncub_jax.tools.cli.examples:model ...
lioncub probe --step lioncub_jax.tools.cli.examples:training --devices 2
lioncub bytes lioncub_jax.tools.cli.examples:lowered --devices 8
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import lioncub_jax as lc

SIZES = {"embed": (256, 128), "hidden": (128, 512), "out": (512, 256)}
BATCH = 64


def model() -> dict[str, jax.Array]:
    """For ``plan --model``: parameters, an ``nnx.Module`` or linen variables; only shapes are made.

    Example:
      >>> model()["embed"].shape
      (256, 128)
    """
    return {name: jnp.full(shape, shape[0] ** -0.5) for name, shape in SIZES.items()}


def loss(params: dict[str, jax.Array], text: jax.Array, rng: jax.Array) -> jax.Array:
    """Cross-entropy of the next byte, for ``text`` int32[batch, 2]; nothing is drawn from ``rng``."""
    del rng
    x = jax.nn.relu(params["embed"][text[:, 0]] @ params["hidden"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(x, text[:, 1]).mean()


def training(workers: lc.Workers) -> tuple[Any, lc.StepState, jax.Array]:
    """For ``probe --step``: a step that averages gradients in float32, its first state and a batch."""
    return _training(lc.global_gradients(optax.adamw(1e-3), workers=workers), workers)


def lowered() -> tuple[jax.stages.Lowered, jax.sharding.Mesh]:
    """For ``bytes``: a training step that votes, lowered or compiled, and its mesh."""
    axis = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=axis)
    workers = lc.Workers(mesh, "data")
    step, state, batch = _training(lc.lion_cub(1e-3, workers=workers), workers)
    return step.lower(state, batch), mesh


def _training(
    tx: optax.GradientTransformation, workers: lc.Workers
) -> tuple[Any, lc.StepState, jax.Array]:
    state = lc.init_state(tx, model(), workers)
    processes = len({device.process_index for device in workers.mesh.devices.flat})
    batch = jnp.zeros((BATCH * workers.count // processes, 2), jnp.int32)  # of this process
    return lc.make_train_step(loss, tx, workers), state, batch
