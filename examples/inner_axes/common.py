"""What the programs of this folder share: text in windows of nine bytes, and a loop that prints the loss.

Each runs as ``JAX_NUM_CPU_DEVICES=8 python examples/inner_axes/NAME.py``.
"""

import re
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

text = np.frombuffer(Path(re.__file__).read_bytes(), np.uint8).astype(np.int32)
windows = np.lib.stride_tricks.sliding_window_view(text, 9)[:128]


def train(mesh, state, step, rows=None, rules=(), steps=20):
    """Trains on the same rows, which are cut over the mesh, and prints the first loss and the last."""
    losses = []
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        batch = jax.device_put(windows, NamedSharding(mesh, rows or P("data")))
        for _ in range(steps):
            state, loss = step(state, batch)
            losses.append(float(loss))
    print(f"loss {losses[0]:.2f} before, {losses[-1]:.2f} after {steps} steps")
