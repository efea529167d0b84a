"""A whole training step inside a shard_map written by hand: every device sees its own rows.

    python examples/trainers/manual_shard_map.py --steps 200

There is nothing of lioncub_jax in it. docs/how_to/trainer.md shows the lines that make its workers vote.
"""

import functools

import common
import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

AXES = {"data": 8}
CONTEXT, BATCH, WIDTH = 8, 512, 64


def init_params(key):
    shapes = {"embed": (256, 32), "hidden": (CONTEXT * 32, WIDTH), "out": (WIDTH, 256)}
    return {k: jax.random.normal(key, shape) / np.sqrt(shape[0]) for k, shape in shapes.items()}


def loss_fn(params, windows):
    """Cross-entropy of a byte, guessed from the eight before it."""
    x = params["embed"][windows[:, :-1]].reshape(len(windows), -1)
    logits = jax.nn.gelu(x @ params["hidden"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, -1]).mean()


def build(mesh, learning_rate):
    """The first state, the same on all devices, and the jitted step."""
    schedule = optax.cosine_decay_schedule(learning_rate, 1000)
    tx = optax.lion(schedule, weight_decay=0.1)
    params = jax.device_put(init_params(jax.random.key(0)), NamedSharding(mesh, P()))
    opt_state = tx.init(params)
    state_specs = (P(), P())

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(state_specs, P("data")), out_specs=(state_specs, P())
    )
    def train_step(state, windows):
        params, opt_state = state
        own = jax.tree.map(lambda x: lax.pcast(x, "data", to="varying"), params)
        loss, grads = jax.value_and_grad(loss_fn)(own, windows)
        loss, grads = lax.pmean((loss, grads), "data")
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    return (params, opt_state), train_step


def batches(mesh):
    return common.placed(common.text_batches(BATCH, CONTEXT), mesh)


if __name__ == "__main__":
    common.main(AXES, build, batches)
