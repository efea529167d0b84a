"""A CNN on handwritten digits by flax.linen: batch norm, dropout, clipping, EMA, early stopping.

    JAX_NUM_CPU_DEVICES=4 python examples/digits_linen.py

docs/how_to/trainer.md shows it as a diff to the same program with optax.adamw on one device.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from flax import serialization
from flax.training import train_state
from sklearn.datasets import load_digits

import lioncub_jax as lc

BATCH, HELD_OUT, PATIENCE = 128, 360, 5
workers = lc.Workers.one_per_device()


class TrainState(train_state.TrainState):
    batch_stats: Any
    ema: Any
    key: jax.Array


class CNN(nn.Module):
    """Logits of ten digits for images ``[batch, 8, 8, 1]``."""

    @nn.compact
    def __call__(self, x, train):
        for features in (16, 32):
            x = nn.Conv(features, (3, 3))(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.Dropout(0.2, deterministic=not train)(x.reshape(len(x), -1))
        return nn.Dense(10)(x)


model = CNN()


def loss_fn(params, batch_stats, batch, key):
    images, labels = batch
    logits, updated = model.apply(
        {"params": params, "batch_stats": batch_stats},
        images, train=True, rngs={"dropout": key}, mutable=["batch_stats"],
    )  # fmt: skip
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, (updated["batch_stats"], (logits.argmax(-1) == labels).mean())


@jax.jit
def accuracy(variables, batch):
    images, labels = batch
    return (model.apply(variables, images, train=False).argmax(-1) == labels).mean()


def build(seed, schedule):
    """The first state and the step."""
    key = jax.random.key(seed)
    variables = model.init(key, np.zeros((1, 8, 8, 1), np.float32), train=False)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        lc.owner_adamw(schedule, weight_decay=1e-2, workers=workers),
    )
    more = {"ema": variables["params"], "key": key}
    state = TrainState.create(apply_fn=model.apply, tx=tx, **variables, **more)

    @jax.jit
    def train_step(state, batch):
        key = jax.random.fold_in(state.key, state.step)
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (batch_stats, hits)), grads = grad_fn(state.params, state.batch_stats, batch, key)
        state = state.apply_gradients(grads=grads, batch_stats=batch_stats)
        state = state.replace(ema=optax.incremental_update(state.params, state.ema, 0.1))
        return state, {"loss": loss, "accuracy": hits}

    train_step = lc.map_step(train_step, workers)
    return state, train_step


def train(folder, epochs, seed):
    """Trains until the accuracy on held-out digits no longer rises; returns the best."""
    digits = load_digits()
    data = np.float32(digits.images[..., None] / 16), digits.target
    order = np.random.default_rng(0).permutation(len(digits.target))
    held_out, trained_on = order[:HELD_OUT], order[HELD_OUT:]
    steps = len(trained_on) // BATCH
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps, epochs * steps)
    state, train_step = build(seed, schedule)
    rng, best, best_epoch = np.random.default_rng(seed), 0.0, 0

    folder.mkdir(parents=True, exist_ok=True)
    for epoch in range(1, epochs + 1):
        for rows in rng.permutation(trained_on)[: steps * BATCH].reshape(steps, BATCH):
            state, metrics = train_step(state, [x[rows] for x in data])

        evaluated = {"params": state.ema, "batch_stats": state.batch_stats}
        metrics["held_out"] = accuracy(evaluated, [x[held_out] for x in data])

        row = {"epoch": epoch, **{name: round(float(x), 4) for name, x in metrics.items()}}
        print(row)
        with open(folder / "metrics.jsonl", "a") as log:
            log.write(json.dumps(row) + "\n")
        if row["held_out"] > best:
            best, best_epoch = row["held_out"], epoch
            (folder / "best.msgpack").write_bytes(serialization.to_bytes(evaluated))
        elif epoch - best_epoch >= PATIENCE:
            break
    return best


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/digits"))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"the best accuracy on held-out digits: {train(**vars(args)):.3f}")
