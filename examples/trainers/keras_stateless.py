"""Keras with the JAX backend in a loop of one's own: stateless_call, batch statistics and dropout.

    python examples/trainers/keras_stateless.py --steps 200

There is nothing of lioncub_jax in it. docs/how_to/trainer.md shows the lines that make its workers vote.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import common
import jax
import keras
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

AXES = {"data": 8}
BATCH = 256


def digits_model():
    """Logits of the ten digits."""
    keras.utils.set_random_seed(0)
    layers = [keras.Input((8, 8)), keras.layers.Reshape((8, 8, 1))]
    for features in (16, 32):
        layers += [
            keras.layers.Conv2D(features, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.AveragePooling2D(2),
        ]
    layers += [keras.layers.Flatten(), keras.layers.Dropout(0.2), keras.layers.Dense(10)]
    return keras.Sequential(layers)


def build(mesh, learning_rate):
    """Values of the variables, the same on all devices, and the jitted step."""
    model = digits_model()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainable = [v.value for v in model.trainable_variables]
    non_trainable = [v.value for v in model.non_trainable_variables]
    trainable, non_trainable = jax.device_put((trainable, non_trainable), NamedSharding(mesh, P()))
    tx = optax.lion(learning_rate, weight_decay=0.1)
    state = {
        "trainable": trainable,
        "non_trainable": non_trainable,
        "opt_state": tx.init(trainable),
    }

    def compute_loss(trainable, non_trainable, batch):
        images, labels = batch
        logits, non_trainable = model.stateless_call(
            trainable, non_trainable, images, training=True
        )
        return loss_of(labels, logits), non_trainable

    grad_fn = jax.value_and_grad(compute_loss, has_aux=True)

    @jax.jit
    def train_step(state, batch):
        trainable = state["trainable"]
        (loss, non_trainable), grads = grad_fn(trainable, state["non_trainable"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], trainable)
        return {
            "trainable": optax.apply_updates(trainable, updates),
            "non_trainable": non_trainable,
            "opt_state": opt_state,
        }, {"loss": loss}

    return state, train_step


def batches(mesh):
    return common.placed(common.digit_batches(BATCH), mesh)


if __name__ == "__main__":
    common.main(AXES, build, batches)
