"""Flax's nnx: `nnx.Optimizer` changes the model in place, and orbax saves both.

    python examples/large/flax_nnx.py

Without the lines that end with `# lioncub` it trains on one device.
"""

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx

import lioncub_jax as lc  # lioncub

STEPS, RATE, SEED, FOLDER = 40, 1e-2, 0, "runs/flax_nnx"

workers = lc.Workers.one_per_device()  # lioncub
tx = optax.adamw(RATE)
tx = lc.owner_adamw(RATE, workers=workers)  # lioncub


def batch(step, rows=256):
    """Images of ten classes, 8 by 8 pixels, and their labels."""
    draw = np.random.default_rng([SEED, step])
    centers = np.random.default_rng(0).normal(size=(10, 64))
    labels = draw.integers(0, 10, rows)
    return (centers[labels] + 2.0 * draw.normal(size=(rows, 64))).astype(np.float32), labels


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(64, 256, rngs=rngs)
        self.norm = nnx.BatchNorm(256, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))


def train_step(model, optimizer, batch):
    def loss_fn(model):
        images, labels = batch
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


step = nnx.jit(train_step)
step = lc.map_step(train_step, workers)  # lioncub
model = Model(nnx.Rngs(SEED))
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
with ocp.CheckpointManager(epath.Path(FOLDER).resolve()) as manager:
    last = manager.latest_step()
    start = 0 if last is None else last + 1
    if start:
        like = nnx.state((model, optimizer))
        restored = manager.restore(start - 1, args=ocp.args.StandardRestore(like))
        nnx.update((model, optimizer), restored)
    for i in range(start, STEPS):
        print(i, float(step(model, optimizer, batch(i))))
    state = jax.block_until_ready(nnx.state((model, optimizer)))
    manager.save(STEPS - 1, args=ocp.args.StandardSave(state))
