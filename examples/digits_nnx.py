"""A CNN on handwritten digits by flax.nnx: batch norm, dropout, clipping, EMA, early stopping.

    JAX_NUM_CPU_DEVICES=4 python examples/digits_nnx.py

docs/how_to/trainer.md shows it as a diff to the same program with optax.adamw on one device.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import optax
from flax import nnx, serialization
from sklearn.datasets import load_digits

import lioncub_jax as lc

BATCH, HELD_OUT, PATIENCE = 128, 360, 5
workers = lc.Workers.one_per_device()


class CNN(nnx.Module):
    """Logits of ten digits for images ``[batch, 8, 8, 1]``."""

    def __init__(self, rngs):
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(4 * 32, 10, rngs=rngs)

    def __call__(self, images):
        x = nnx.max_pool(nnx.relu(self.norm1(self.conv1(images))), (2, 2), (2, 2))
        x = nnx.max_pool(nnx.relu(self.norm2(self.conv2(x))), (2, 2), (2, 2))
        return self.out(self.dropout(x.reshape(len(x), -1)))


def loss_fn(model, batch):
    images, labels = batch
    logits = model(images)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, (logits.argmax(-1) == labels).mean()


evaluate = nnx.jit(loss_fn)


def build(seed, schedule):
    """The model, its optimizer, and the step."""
    model = CNN(nnx.Rngs(seed))
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        lc.owner_adamw(schedule, weight_decay=1e-2, workers=workers),
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, ema, batch):
        grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
        (loss, hits), grads = grad_fn(model, batch)
        optimizer.update(model, grads)
        ema = optax.incremental_update(nnx.state(model, nnx.Param), ema, 0.1)
        return ema, {"loss": loss, "accuracy": hits}

    train_step = lc.map_step(train_step, workers)
    return model, optimizer, train_step


def train(folder, epochs, seed):
    """Trains until the accuracy on held-out digits no longer rises; returns the best."""
    digits = load_digits()
    data = np.float32(digits.images[..., None] / 16), digits.target
    order = np.random.default_rng(0).permutation(len(digits.target))
    held_out, trained_on = order[:HELD_OUT], order[HELD_OUT:]
    steps = len(trained_on) // BATCH
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps, epochs * steps)
    model, optimizer, train_step = build(seed, schedule)
    ema = nnx.state(model, nnx.Param)
    rng, best, best_epoch = np.random.default_rng(seed), 0.0, 0

    folder.mkdir(parents=True, exist_ok=True)
    for epoch in range(1, epochs + 1):
        model.train()
        for rows in rng.permutation(trained_on)[: steps * BATCH].reshape(steps, BATCH):
            ema, metrics = train_step(model, optimizer, ema, [x[rows] for x in data])

        evaluated = nnx.clone(model)
        nnx.update(evaluated, ema)
        evaluated.eval()
        _, metrics["held_out"] = evaluate(evaluated, [x[held_out] for x in data])

        row = {"epoch": epoch, **{name: round(float(x), 4) for name, x in metrics.items()}}
        print(row)
        with open(folder / "metrics.jsonl", "a") as log:
            log.write(json.dumps(row) + "\n")
        if row["held_out"] > best:
            best, best_epoch = row["held_out"], epoch
            weights = nnx.to_pure_dict(nnx.state(evaluated, (nnx.Param, nnx.BatchStat)))
            (folder / "best.msgpack").write_bytes(serialization.to_bytes(weights))
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
