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
mesh = jax.sharding.Mesh(devices, "data")
workers = lc.Workers(mesh, "data")


class NextByte(nnx.Module):
    """Guesses a byte of text from the eight before it."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(256, 32, rngs=rngs)
        self.hidden = nnx.Linear(8 * 32, 256, rngs=rngs)
        self.out = nnx.Linear(256, 256, rngs=rngs)

    def __call__(self, text):
        x = self.embed(text).reshape(len(text), -1)
        return self.out(nnx.relu(self.hidden(x)))


def loss(model, windows):
    logits = model(windows[:, :8])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 8]).mean()


# AdamW whose moments the workers hold in slices: 3 bits of gradient to their owners, 2 bits of update back.
rate = optax.cosine_decay_schedule(3e-3, 300)
tx = lc.owner_adamw(rate, 0.8, 0.98, weight_decay=0.1, workers=workers)

loss_fn, params, model_state = lc.from_nnx(NextByte(nnx.Rngs(0)), loss)
state = lc.init_state(tx, params, workers, model_state=model_state)
step = lc.make_train_step(loss_fn, tx, workers)

with open(inspect.__file__, "rb") as file:
    text = np.frombuffer(file.read(), np.uint8).astype(np.int32)
windows = np.lib.stride_tricks.sliding_window_view(text, 9)
rng = np.random.default_rng(jax.process_index())

losses = []
for _ in track(range(300), "training", disable=jax.process_index() > 0):
    # 64 for each worker; of several hosts each reads the rows of its own workers.
    batch = windows[rng.integers(len(windows), size=64 * len(mesh.local_devices))]
    state, metrics = step(state, batch)
    losses.append(metrics["loss"])  # stays on the devices, so that no step waits for it

sent = lc.audit.sent_bytes(lc.audit.collectives(step.lower(state, batch).compile(), mesh))
size = sum(x.size for x in jax.tree.leaves(params))
print(f"loss {losses[0]:.2f} before, {losses[-1]:.2f} after")
float32 = lc.audit.float32_all_reduce_bytes(size, workers.count)
print(f"each worker sends {sent[('data',)] / 1000:.0f} kB a step for {size:,} parameters;")
print(f"an all-reduce of float32 gradients sends {float32 / 1000:.0f} kB")
