"""A mesh with Explicit axes: the types of arrays say how they are cut, and products say what becomes of it.

    python examples/trainers/explicit_types.py --steps 200

There is nothing of lioncub_jax in it. docs/drop_in.md shows the lines that make its workers vote.
"""

import contextlib

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

AXES = {"data": 4, "tensor": 2}
CONTEXT, BATCH, WIDTH, HIDDEN = 8, 512, 32, 128


def explicit(mesh):
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * 2)


@contextlib.contextmanager
def around(mesh):
    """Where specs need no mesh."""
    with jax.set_mesh(explicit(mesh)):
        yield


def init_params(key):
    """What reads eight bytes, what makes the hidden units, and what guesses the next byte."""
    embed, up, down = jax.random.split(key, 3)
    normal = jax.random.normal
    return {
        "embed": 0.1 * normal(embed, (256, WIDTH)),
        "up": normal(up, (CONTEXT * WIDTH, HIDDEN)) / np.sqrt(CONTEXT * WIDTH),
        "down": normal(down, (HIDDEN, 256)) / np.sqrt(HIDDEN),
    }


def loss_fn(params, windows):
    """How badly a byte is guessed from the eight before it."""
    rows, hidden = P("data", None), P("data", "tensor")
    x = params["embed"].at[windows[:, :-1]].get(out_sharding=P("data", None, None))
    x = jnp.reshape(x, (len(x), -1), out_sharding=rows)
    x = jax.nn.relu(jnp.dot(x, params["up"], out_sharding=hidden))
    logits = jnp.dot(x, params["down"], out_sharding=rows)
    correct = jax.nn.one_hot(windows[:, -1], 256, dtype=logits.dtype)
    return -jnp.sum(jax.nn.log_softmax(logits) * correct, axis=-1).mean()


def build(mesh, learning_rate):
    """The first state, hidden units cut over tensor, and the jitted step."""
    specs = {"embed": P(), "up": P(None, "tensor"), "down": P("tensor", None)}
    params = jax.tree.map(reshard, init_params(jax.random.key(0)), specs)
    tx = optax.lion(learning_rate, weight_decay=0.1)

    @jax.jit
    def train_step(state, windows):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, windows)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    return (params, tx.init(params)), train_step


def batches(mesh):
    for windows in common.text_batches(BATCH, CONTEXT):
        yield jax.device_put(windows, NamedSharding(explicit(mesh), P("data")))


if __name__ == "__main__":
    common.main(AXES, build, batches, around)
