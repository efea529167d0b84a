"""Targets that the commands can be tried on, and written like: a small model, a step, a program.

lioncub plan --model lioncub_jax.cli.examples:model ...
lioncub plan --measure lioncub_jax.cli.examples:one_step ...
lioncub bytes lioncub_jax.cli.examples:lowered --devices 8
python -m lioncub_jax.cli.examples > step.hlo       # for 8 devices
"""

from typing import Any

import jax
import jax.numpy as jnp

import lioncub_jax as lc

SIZES = {"embed": (256, 128), "hidden": (128, 512), "out": (512, 256)}
BATCH = 64


def model() -> dict[str, jax.Array]:
    """For ``plan --model``: parameters, an ``nnx.Module`` or linen variables; only shapes are made.

    Example:
      >>> model()["embed"].shape
      (256, 128)
    """
    keys = jax.random.split(jax.random.key(0), len(SIZES))
    return {
        name: jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, (name, shape) in zip(keys, SIZES.items(), strict=True)
    }


def loss(params: dict[str, jax.Array], text: jax.Array, rng: jax.Array | None = None) -> jax.Array:
    """Cross-entropy of the next byte, for ``text`` int32[batch, 2]; nothing is drawn from ``rng``."""
    del rng
    x = jax.nn.relu(params["embed"][text[:, 0]] @ params["hidden"]) @ params["out"]
    return -jnp.take_along_axis(jax.nn.log_softmax(x), text[:, 1:], 1).mean()


_gradients = jax.jit(jax.value_and_grad(loss))


def one_step() -> Any:
    """For ``plan --measure``: one step of one worker, without communication; returns its arrays."""
    return _gradients(model(), jnp.zeros((BATCH, 2), jnp.int32))


def lowered() -> tuple[jax.stages.Lowered, jax.sharding.Mesh]:
    """For ``bytes``: a training step, lowered or compiled, and its mesh."""
    axis = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=axis)
    tx = lc.lion_cub(1e-3, axis_name="data")
    state = lc.init_state(tx, model(), mesh, axis_name="data")
    step = lc.make_train_step(loss, tx, mesh, axis_name="data")
    return step.lower(state, jnp.zeros((BATCH * mesh.size, 2), jnp.int32)), mesh


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_platforms", "cpu")
    print(lowered()[0].compile().as_text())
