"""Flax's `TrainState`, with batches by grain; orbax saves the state and the place in the data.

    python examples/large/flax_linen.py

Without the lines that end with `# lioncub` it trains on one device.
"""

from typing import Any

import grain
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from etils import epath
from flax import linen as nn
from flax.training import train_state

import lioncub_jax as lc  # lioncub

STEPS, RATE, SEED, FOLDER = 40, 1e-2, 0, "runs/flax_linen"

workers = lc.Workers.one_per_device()  # lioncub
tx = optax.adamw(RATE)
tx = lc.owner_adamw(RATE, workers=workers)  # lioncub
tx = optax.chain(optax.clip_by_global_norm(1.0), tx)


class Images(grain.sources.RandomAccessDataSource):
    """Images of ten classes, 8 by 8 pixels, and their labels."""

    def __len__(self):
        return 4096

    def __getitem__(self, i):
        centers = np.random.default_rng(0).normal(size=(10, 64))
        draw = np.random.default_rng([0, int(i)])
        label = draw.integers(10)
        return np.float32(centers[label] + 2.0 * draw.normal(size=64)), label


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(256)(x))
        x = nn.Dropout(0.1, deterministic=False)(nn.relu(x))
        return nn.Dense(10)(x)


class TrainState(train_state.TrainState):
    batch_stats: Any
    key: jax.Array


def train_step(state, batch):
    images, labels = batch
    key = jax.random.fold_in(state.key, state.step)

    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = model.apply(variables, images, rngs={"dropout": key}, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), new["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss


model = Model()
keys = jax.random.split(jax.random.key(SEED), 3)
variables = model.init({"params": keys[0], "dropout": keys[1]}, np.zeros((1, 64)))
state = TrainState.create(
    apply_fn=model.apply, tx=tx, key=jax.random.key_data(keys[2]), **variables
)
data = grain.MapDataset.source(Images()).seed(SEED).shuffle().repeat()
batches = iter(data.to_iter_dataset().batch(256, drop_remainder=True))
step = jax.jit(train_step)
step = lc.map_step(train_step, workers)  # lioncub
with ocp.CheckpointManager(epath.Path(FOLDER).resolve()) as manager:
    start = 0 if manager.latest_step() is None else manager.latest_step() + 1
    if start:
        args = {
            "state": ocp.args.StandardRestore(state),
            "data": grain.checkpoint.CheckpointRestore(batches),
        }
        restored = manager.restore(start - 1, args=ocp.args.Composite(**args))
        state, batches = restored["state"], restored["data"]
    for i in range(start, STEPS):
        state, loss = step(state, next(batches))
        print(i, float(loss))
    args = {"state": ocp.args.StandardSave(state), "data": grain.checkpoint.CheckpointSave(batches)}
    manager.save(STEPS - 1, args=ocp.args.Composite(**args))
