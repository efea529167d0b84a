"""jax.pmap with a state that is replicated and gradients that are averaged, as Flax's older examples do.

    python examples/trainers/pmap_replicated.py --steps 200

There is nothing of lioncub_jax in it. docs/how_to/trainer.md shows the lines that make its workers vote.
"""

import functools

import common
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.common_utils import shard
from flax.training.train_state import TrainState
from jax import lax

AXES = {"batch": 8}
BATCH = 256


class Digits(nn.Module):
    """Logits of the ten digits."""

    @nn.compact
    def __call__(self, images):
        x = nn.relu(nn.Dense(128)(images.reshape(len(images), -1)))
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


def build(mesh, learning_rate):
    """The first state, a copy on each device, and the step."""
    model = Digits()
    params = model.init(jax.random.key(0), jnp.zeros((1, 8, 8)))["params"]
    schedule = optax.linear_schedule(learning_rate, learning_rate / 10, 1000)
    tx = optax.lion(schedule, weight_decay=0.1)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    state = jax.tree.map(lambda x: jnp.stack([x] * mesh.size), state)

    @functools.partial(jax.pmap, axis_name="batch", devices=list(mesh.devices.flat))
    def train_step(state, batch):
        images, labels = batch

        def loss_fn(params):
            logits = state.apply_fn({"params": params}, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        grads = lax.pmean(grads, axis_name="batch")
        metrics = lax.pmean({"loss": loss}, axis_name="batch")
        return state.apply_gradients(grads=grads), metrics

    return state, train_step


def batches(mesh):
    return map(shard, common.digit_batches(BATCH))


if __name__ == "__main__":
    common.main(AXES, build, batches)
