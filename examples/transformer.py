"""A small GPT trained by Muon in about five bits, by workers that each own whole matrices.

    python examples/transformer.py     # a minute or two on two cores; runs/transformer.png has the loss

Hidden matrices go to Muon; embeddings, the head and norms to AdamW, also at the owners. Muon knows the
matrices by their two dimensions, so the tables of vectors are named.
"""

import inspect
import json
import tarfile
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from optax.contrib import MuonDimensionNumbers

import lioncub_jax as lc

STEPS, WIDTH, HEADS, LAYERS, CONTEXT = 200, 64, 4, 2, 64
jax.config.update("jax_num_cpu_devices", 8)  # where the CPU has to stand in for GPUs or TPUs
workers = lc.Workers.one_per_device()


class Block(nnx.Module):
    """Attention and a hidden layer, each behind a norm and beside the residual."""

    def __init__(self, rngs):
        self.norm1, self.norm2 = (nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.mix = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        heads = self.qkv(self.norm1(x)).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = (heads[:, :, n] for n in range(3))
        seen = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """Logits of the next byte, ``[batch, time, 256]``."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(256, WIDTH, rngs=rngs)
        self.place = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 256, use_bias=False, rngs=rngs)

    def __call__(self, text):
        x = self.embed(text) + self.place(np.arange(CONTEXT))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model, windows):
    logits = model(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def matrices(params):
    """Muon's parameters; tables of vectors, the head and norms are AdamW's."""

    def one(path, x):
        table = any(name in jax.tree_util.keystr(path) for name in ("embed", "place", "head"))
        return None if table or x.ndim < 2 else MuonDimensionNumbers(0, 1)

    return jax.tree.map_with_path(one, params)


def train_step(model, optimizer, windows):
    loss, grads = nnx.value_and_grad(loss_of)(model, windows)
    optimizer.update(model, grads)
    return loss


model = GPT(nnx.Rngs(0))
rate = optax.warmup_cosine_decay_schedule(0.0, 2e-2, STEPS // 20, STEPS)
tx = lc.owner_muon(rate, weight_decay=0.1, workers=workers, muon_weight_dimension_numbers=matrices)
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
train_step = lc.map_step(train_step, workers)

files = (inspect, json, tarfile)
text = np.frombuffer(b"".join(Path(one.__file__).read_bytes() for one in files), np.uint8)
windows = np.lib.stride_tricks.sliding_window_view(text.astype(np.int32), CONTEXT + 1)
rng = np.random.default_rng(0)
losses = []
for _ in range(STEPS):
    batch = windows[rng.integers(len(windows), size=8 * workers.num_gradients)]
    losses.append(train_step(model, optimizer, batch))

compiled = train_step.lower(model, optimizer, batch).compile()
sent = lc.audit.sent_bytes(lc.audit.collectives(compiled, workers.mesh))[("data",)]
size = optax.tree.size(nnx.state(model, nnx.Param))
float32 = lc.audit.float32_all_reduce_bytes(size, workers.num_gradients)
print(f"loss {losses[0]:.2f} before, {np.mean(losses[-10:]):.2f} after {STEPS} steps")
print(f"each worker sends {sent / 1e3:.0f} kB a step; float32 gradients are {float32 / 1e3:.0f} kB")

figure = Figure(figsize=(5, 3), layout="constrained")
axis = figure.subplots()
axis.plot(np.array(losses))
axis.set(xlabel="steps", ylabel="loss, nats per byte")
Path("runs").mkdir(exist_ok=True)
figure.savefig("runs/transformer.png")
