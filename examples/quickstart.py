"""The smallest complete run: eight workers train on real source code and exchange codes of 2 and 3 bits."""

import inspect

import jax
import numpy as np
import optax
from flax import nnx
from rich.progress import track

import lioncub_jax as lc

# Workers are the GPUs or TPUs, if there are several; or eight devices that the CPU stands in for.
jax.config.update("jax_num_cpu_devices", 8)
devices = jax.devices() if jax.device_count() > 1 else jax.devices("cpu")
workers = lc.Workers(jax.sharding.Mesh(devices, "data"), "data")


class NextByte(nnx.Module):
    """Guesses a byte of text from the eight before it."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(256, 32, rngs=rngs)
        self.hidden = nnx.Linear(8 * 32, 256, rngs=rngs)
        self.out = nnx.Linear(256, 256, rngs=rngs)

    def __call__(self, text):
        x = self.embed(text).reshape(len(text), -1)
        return self.out(nnx.relu(self.hidden(x)))


def loss_of(model, windows):
    logits = model(windows[:, :8])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 8]).mean()


with open(inspect.__file__, "rb") as file:
    text = np.frombuffer(file.read(), np.uint8).astype(np.int32)
windows = np.lib.stride_tricks.sliding_window_view(text, 9)
rng = np.random.default_rng(jax.process_index())
rows = 64 * len(workers.mesh.local_devices)  # of several hosts each reads those of its own workers
batches = [windows[rng.integers(len(windows), size=rows)] for _ in range(300)]

# [quickstart]
model = NextByte(nnx.Rngs(0))
rate = optax.cosine_decay_schedule(3e-3, 300)
optimizer = nnx.Optimizer(model, lc.owner_adamw(rate, workers=workers), wrt=nnx.Param)


def train_step(model, optimizer, windows):  # as on one device
    loss, grads = nnx.value_and_grad(loss_of)(model, windows)
    optimizer.update(model, grads)
    return loss


train_step = lc.map_step(train_step, workers)  # on each worker, with its part of the rows
losses = [train_step(model, optimizer, batch) for batch in track(batches)]
# [/quickstart]

compiled = train_step.lower(model, optimizer, batches[0]).compile()
sent = lc.audit.sent_bytes(lc.audit.collectives(compiled, workers.mesh))
size = optax.tree.size(nnx.state(model, nnx.Param))
print(f"loss {losses[0]:.2f} before, {losses[-1]:.2f} after")
float32 = lc.audit.float32_all_reduce_bytes(size, workers.num_gradients)
print(f"each worker sends {sent[('data',)] / 1000:.0f} kB a step for {size:,} parameters;")
print(f"an all-reduce of float32 gradients sends {float32 / 1000:.0f} kB")
