"""Functions for the commands: a step to probe, and a program whose bytes are counted.

JAX_NUM_CPU_DEVICES=2 lioncub probe --step examples.targets:training
JAX_NUM_CPU_DEVICES=8 lioncub bytes examples.targets:lowered
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import lioncub_jax as lc

SIZES = {"embed": (256, 128), "hidden": (128, 512), "out": (512, 256)}
BATCH = 64


def loss(params: dict[str, jax.Array], text: jax.Array, rng: jax.Array) -> jax.Array:
    """Cross-entropy of the next byte, for ``text`` int32[batch, 2]; nothing is drawn from ``rng``."""
    del rng
    x = jax.nn.relu(params["embed"][text[:, 0]] @ params["hidden"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(x, text[:, 1]).mean()


def training(workers: lc.Workers) -> tuple[Any, lc.training.StepState, jax.Array]:
    """For ``probe --step``: a step that averages gradients in float32, its first state and a batch."""
    return _training(lc.global_gradients(optax.adamw(1e-3), workers=workers), workers)


def lowered() -> tuple[jax.stages.Lowered, jax.sharding.Mesh]:
    """For ``bytes``: a training step that votes, and its mesh."""
    axis = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=axis)
    workers = lc.Workers(mesh, "data")
    step, state, batch = _training(lc.lion_cub(1e-3, workers=workers), workers)
    return step.lower(state, batch), mesh


def _training(
    tx: optax.GradientTransformation, workers: lc.Workers
) -> tuple[Any, lc.training.StepState, jax.Array]:
    params = {name: jnp.full(shape, shape[0] ** -0.5) for name, shape in SIZES.items()}
    state = lc.init_state(tx, params, workers)
    processes = len({device.process_index for device in workers.mesh.devices.flat})
    batch = jnp.zeros((BATCH * workers.num_gradients // processes, 2), jnp.int32)  # of this process
    return lc.make_train_step(loss, tx, workers), state, batch
