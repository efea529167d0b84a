"""Keras's `Model.fit`: validation, callbacks, and `BackupAndRestore`, with which it goes on.

    KERAS_BACKEND=jax python examples/large/keras_fit.py

Without the lines that end with `# lioncub` it trains on one device.
"""

import keras
import numpy as np

import lioncub_jax as lc  # lioncub
from lioncub_jax.training.keras import OptaxOptimizer  # lioncub

STEPS, RATE, SEED, FOLDER = 40, 1e-3, 0, "runs/keras_fit"

workers = lc.Workers.one_per_device()  # lioncub
Model = keras.Sequential


class Mapped(keras.Sequential):  # lioncub
    def train_step(self, state, data):  # lioncub
        return self.optimizer.mapped(super().train_step, workers)(state, data)  # lioncub


Model = Mapped  # lioncub


def data(rows, seed):
    """Images of ten classes, 8 by 8 pixels, and their labels."""
    centers, draw = np.random.default_rng(0).normal(size=(10, 64)), np.random.default_rng(seed)
    labels = draw.integers(0, 10, rows)
    return (centers[labels] + 3.0 * draw.normal(size=(rows, 64))).astype("float32"), labels


keras.utils.set_random_seed(SEED)
model = Model([
    keras.Input((64,)), keras.layers.Dense(256), keras.layers.BatchNormalization(), keras.layers.ReLU(),
    keras.layers.Dense(10),
])  # fmt: skip
optimizer = keras.optimizers.AdamW(RATE, weight_decay=1e-4)
optimizer = OptaxOptimizer(lc.owner_adamw(RATE, workers=workers))  # lioncub
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss=loss, metrics=["accuracy"])
images, labels = data(4096, [1, SEED])
history = model.fit(
    images, labels, batch_size=256, epochs=STEPS, shuffle=False, verbose=0,
    validation_data=data(512, 2),
    callbacks=[
        keras.callbacks.BackupAndRestore(FOLDER, delete_checkpoint=False),
        keras.callbacks.ReduceLROnPlateau("loss", patience=3),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: print(epoch, logs["loss"], flush=True)
        ),
    ],
)  # fmt: skip
