"""A small Vision Transformer: patches, learned positions, pre-norm blocks, the mean of all places."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from gpt.model import Block, Sizes, normal


class ViT(nnx.Module):
    """Images uint8 [batch, height, width, channels] to logits [batch, classes]."""

    def __init__(self, size: Any, shape: tuple[int, int, int], classes: int, rngs: nnx.Rngs):
        """``size`` is a `tasks.Shape`."""
        patches, width = size.inputs, size.width
        height, across, channels = shape
        if height != across or height % patches:
            raise ValueError(
                f"{patches} patches a side must divide square images, and these are {height} x {across}"
            )
        places, self.patch = patches**2, height // patches
        self.read = nnx.Linear(self.patch**2 * channels, width, use_bias=False, rngs=rngs)
        self.positions = nnx.Embed(places, width, embedding_init=normal(0.02), rngs=rngs)
        sizes = Sizes(size.layers, width, size.heads, size.expansion)
        self.blocks = nnx.List(Block(sizes, causal=False, rngs=rngs) for _ in range(size.layers))
        self.norm = nnx.LayerNorm(width, use_bias=False, rngs=rngs)
        self.write = nnx.Linear(width, classes, use_bias=False, kernel_init=normal(0.02), rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        patches = patches_of(images.astype(jnp.float32) / 127.5 - 1, self.patch)
        x = self.read(patches) + self.positions(jnp.arange(patches.shape[1]))
        for block in self.blocks:
            x = block(x, True)
        return self.write(self.norm(x).mean(axis=1))


def patches_of(images: jax.Array, size: int) -> jax.Array:
    """``[batch, height, width, channels]`` to ``[batch, places, size * size * channels]``."""
    batch, height, width, channels = images.shape
    rows, columns = height // size, width // size
    cut = images.reshape(batch, rows, size, columns, size, channels)
    return jnp.moveaxis(cut, 3, 2).reshape(batch, rows * columns, size * size * channels)
