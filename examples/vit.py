"""A vision transformer on the digits of scikit-learn, by eight workers.

    python examples/vit.py     # half a minute on two cores; runs/vit.png has the loss

Three lines are of this library: the workers, the optimizer, and `map_step`.
"""

from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import lioncub_jax as lc

STEPS, HELD_OUT = 150, 297
jax.config.update("jax_num_cpu_devices", 8)  # where the CPU has to stand in for GPUs or TPUs
workers = lc.Workers.one_per_device()


class Block(nnx.Module):
    """Attention and a hidden layer, each behind a norm and beside the residual."""

    def __init__(self, width, heads, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.hidden = nnx.Linear(width, 4 * width, rngs=rngs)
        self.out = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.out(nnx.gelu(self.hidden(self.norm2(x))))


class ViT(nnx.Module):
    """Logits of ten digits for images ``[batch, 8, 8, 1]``."""

    def __init__(self, patch, width, heads, layers, positions, classes, rngs):
        self.patch = nnx.Conv(1, width, (patch, patch), strides=patch, rngs=rngs)
        self.place = nnx.Param(0.02 * jax.random.normal(rngs.params(), (positions, width)))
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, images):
        x = self.patch(images).reshape(len(images), -1, self.place.shape[-1]) + self.place[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(1)))


def loss_of(model, batch):
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, grads)
    return loss


model = ViT(patch=2, width=32, heads=4, layers=2, positions=16, classes=10, rngs=nnx.Rngs(0))
rate = optax.cosine_decay_schedule(1e-2, STEPS)
tx = lc.owner_adamw(rate, weight_decay=0.05, workers=workers)
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
train_step = lc.map_step(train_step, workers)

images, labels = load_digits(return_X_y=True)
rng = np.random.default_rng(0)
order = rng.permutation(len(labels))
images, labels = np.float32(images[order] / 16).reshape(-1, 8, 8, 1), labels[order]
losses = []
for _ in range(STEPS):
    rows = rng.integers(HELD_OUT, len(labels), size=16 * workers.num_gradients)
    batch = images[rows], labels[rows]
    losses.append(train_step(model, optimizer, batch))

compiled = train_step.lower(model, optimizer, batch).compile()
sent = lc.audit.sent_bytes(lc.audit.collectives(compiled, workers.mesh))[("data",)]
size = optax.tree.size(nnx.state(model, nnx.Param))
float32 = lc.audit.float32_all_reduce_bytes(size, workers.num_gradients)
accuracy = (model(images[:HELD_OUT]).argmax(-1) == labels[:HELD_OUT]).mean()
print(f"loss {losses[0]:.2f} before, {np.mean(losses[-10:]):.2f} after {STEPS} steps")
print(f"accuracy {accuracy:.3f} on {HELD_OUT} other digits")
print(f"each worker sends {sent / 1e3:.0f} kB a step; float32 gradients are {float32 / 1e3:.0f} kB")

figure = Figure(figsize=(5, 3), layout="constrained")
axis = figure.subplots()
axis.plot(np.array(losses))
axis.set(xlabel="steps", ylabel="loss, nats")
Path("runs").mkdir(exist_ok=True)
figure.savefig("runs/vit.png")
