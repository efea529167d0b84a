"""Parameters in a plain dict under jax.jit; the feed-forward layers are Pallas kernels (interpreted here).

    python examples/trainers/pallas_kernel.py --steps 200

There is nothing of lioncub_jax in it. docs/how_to/trainer.md shows the lines that make its workers vote.
"""

import functools

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

AXES = {"data": 8}
BATCH, WIDTH, DEPTH, ROWS = 256, 64, 3, 16


def kernel(x, w, out):
    """A block of rows times a matrix, and what is below zero left out."""
    out[...] = jnp.maximum(x[...] @ w[...], 0)


@jax.custom_vjp
def layer(x, w):
    rows, width = x.shape
    block = pl.BlockSpec((ROWS, width), lambda i: (i, 0))
    whole = pl.BlockSpec(w.shape, lambda i: (0, 0))
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((rows, w.shape[1]), x.dtype),
        grid=(rows // ROWS,), in_specs=[block, whole], out_specs=block,
        interpret=jax.default_backend() != "tpu",
    )  # fmt: skip
    return call(x, w)


def forward(x, w):
    y = layer(x, w)
    return y, (x, w, y)


def backward(kept, g):
    x, w, y = kept
    g = jnp.where(y > 0, g, 0)
    return g @ w.T, x.T @ g


layer.defvjp(forward, backward)


def init_params(key):
    keys = jax.random.split(key, DEPTH + 1)
    matrices = [jax.random.normal(k, (WIDTH, WIDTH)) * np.sqrt(2 / WIDTH) for k in keys]
    return {"layers": matrices[:-1], "out": matrices[-1][:, :10]}


def loss_fn(params, batch):
    """How badly digits are told apart."""
    images, labels = batch
    x = images.reshape(len(images), -1)
    for w in params["layers"]:
        x = layer(x, w)
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["out"], labels).mean()


def build(mesh, learning_rate):
    """The first state, the same on all devices, and the jitted step."""
    tx = optax.lion(learning_rate, weight_decay=0.1)
    params = jax.device_put(init_params(jax.random.key(0)), NamedSharding(mesh, P()))

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    return (params, tx.init(params)), train_step


def batches(mesh):
    return common.placed(common.digit_batches(BATCH), mesh)


if __name__ == "__main__":
    common.main(AXES, build, batches)
