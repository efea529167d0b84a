"""flax.linen with batch statistics and dropout, in the style of Flax's ImageNet example.

    python examples/trainers/linen_batch_stats.py --steps 200

There is nothing of lioncub_jax in it. docs/how_to/trainer.md shows the lines that make its workers vote.
"""

from typing import Any

import common
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

AXES = {"data": 8}
BATCH = 256


class TrainState(train_state.TrainState):
    batch_stats: Any


class Digits(nn.Module):
    """Which digit a picture shows."""

    @nn.compact
    def __call__(self, images, train):
        x = images[..., None]
        for features in (16, 32):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.Dropout(0.2, deterministic=not train)(x.reshape(len(x), -1))
        return nn.Dense(10)(x)


def build(mesh, learning_rate):
    """The first state, the same on all devices, and the jitted step."""
    model = Digits()
    variables = model.init(jax.random.key(0), jnp.zeros((1, 8, 8)), train=False)
    variables = jax.device_put(variables, NamedSharding(mesh, P()))
    tx = optax.lion(learning_rate, weight_decay=0.1)
    state = TrainState.create(apply_fn=model.apply, tx=tx, **variables)

    def loss_fn(params, batch_stats, batch, key):
        images, labels = batch
        logits, updates = model.apply(
            {"params": params, "batch_stats": batch_stats},
            images, train=True, rngs={"dropout": key}, mutable=["batch_stats"],
        )  # fmt: skip
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, updates["batch_stats"]

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)

    @jax.jit
    def train_step(state, batch):
        key = jax.random.fold_in(jax.random.key(1), state.step)
        (loss, batch_stats), grads = grad_fn(state.params, state.batch_stats, batch, key)
        state = state.apply_gradients(grads=grads, batch_stats=batch_stats)
        return state, {"loss": loss}

    return state, train_step


def batches(mesh):
    return common.placed(common.digit_batches(BATCH), mesh)


if __name__ == "__main__":
    common.main(AXES, build, batches)
