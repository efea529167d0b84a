"""equinox with its filtered transformations: the model itself is the tree of parameters.

    python examples/trainers/equinox_filter.py --steps 200

There is nothing of lioncub_jax in it. docs/how_to/trainer.md shows the lines that make its workers vote.
"""

import common
import equinox as eqx
import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

AXES = {"data": 8}
BATCH = 256


class Digits(eqx.Module):
    """Logits of the ten digits."""

    layers: list

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 16, 3, padding=1, key=keys[0]),
            jax.nn.relu,
            eqx.nn.AvgPool2d(2, 2),
            eqx.nn.Conv2d(16, 32, 3, padding=1, key=keys[1]),
            jax.nn.relu,
            eqx.nn.AvgPool2d(2, 2),
            jax.numpy.ravel,
            eqx.nn.Linear(128, 10, key=keys[2]),
        ]

    def __call__(self, image):
        x = image[None]
        for layer in self.layers:
            x = layer(x)
        return x


def build(mesh, learning_rate):
    """The model and the optimizer's state, the same on all devices, and the jitted step."""
    model = eqx.filter_shard(Digits(jax.random.key(0)), NamedSharding(mesh, P()))
    tx = optax.lion(learning_rate, weight_decay=0.1)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    def loss_fn(model, batch):
        images, labels = batch
        logits = jax.vmap(model)(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @eqx.filter_jit
    def train_step(state, batch):
        model, opt_state = state
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (eqx.apply_updates(model, updates), opt_state), {"loss": loss}

    return (model, opt_state), train_step


def batches(mesh):
    return common.placed(common.digit_batches(BATCH), mesh)


if __name__ == "__main__":
    common.main(AXES, build, batches)
