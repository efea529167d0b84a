"""A byte-level GPT: pre-norm blocks, learned positions, tied or untied output."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

VOCABULARY, TEMPERATURE = 256, 0.8
normal = nnx.initializers.normal


class Sizes(NamedTuple):
    """Sizes of a transformer."""

    layers: int
    width: int
    heads: int
    dropout: float = 0.0


class Attention(nnx.Module):
    """Self-attention over [batch, time, width]; each place sees itself and those before."""

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs):
        width = sizes.width
        # Heads are a dimension of their own, so that a mesh can share them out.
        shape, init = (3, sizes.heads, width // sizes.heads), residual(sizes.layers)
        self.qkv = nnx.LinearGeneral(width, shape, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        batch, time, width = x.shape
        queries, keys, values = jnp.moveaxis(self.qkv(x), 2, 0)
        mixed = jax.nn.dot_product_attention(queries, keys, values, is_causal=True)
        return self.out(mixed.reshape(batch, time, width))


class MLP(nnx.Module):
    """Two layers."""

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs):
        width, hidden, init = sizes.width, 4 * sizes.width, residual(sizes.layers)
        self.up = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(hidden, width, use_bias=False, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x)))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(sizes.width, use_bias=False, rngs=rngs)
        self.attention = Attention(sizes, rngs=rngs)
        self.norm2 = nnx.LayerNorm(sizes.width, use_bias=False, rngs=rngs)
        self.mlp = MLP(sizes, rngs=rngs)
        self.dropout = nnx.Dropout(sizes.dropout, rngs=rngs)

    def __call__(self, x, deterministic: bool):
        x = x + self.dropout(self.attention(self.norm1(x)), deterministic=deterministic)
        return x + self.dropout(self.mlp(self.norm2(x)), deterministic=deterministic)


class GPT(nnx.Module):
    """Bytes [batch, time] to logits [batch, time, 256] for the byte that follows each.

    Beside its own arguments it takes those of `Sizes`.
    """

    def __init__(self, *, context: int, tied: bool = True, rngs: nnx.Rngs, **sizes):
        known = Sizes(**sizes)
        width = known.width
        self.context = context
        self.read = nnx.Embed(VOCABULARY, width, embedding_init=normal(width**-0.5), rngs=rngs)
        self.positions = nnx.Embed(context, width, embedding_init=normal(0.02), rngs=rngs)
        self.dropout = nnx.Dropout(known.dropout, rngs=rngs)
        self.blocks = nnx.List(Block(known, rngs=rngs) for _ in range(known.layers))
        self.norm = nnx.LayerNorm(width, use_bias=False, rngs=rngs)
        options = {"use_bias": False, "kernel_init": normal(0.02), "rngs": rngs}
        self.write = None if tied else nnx.Linear(width, VOCABULARY, **options)

    def __call__(self, tokens, deterministic: bool = True):
        x = self.read(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        x = self.dropout(x, deterministic=deterministic)
        for block in self.blocks:
            x = block(x, deterministic)
        x = self.norm(x)
        return self.read.attend(x) if self.write is None else self.write(x)


def residual(depth: int):
    """Two branches per block add to the stream; this keeps its variance from growing with the depth."""
    return jax.nn.initializers.variance_scaling(0.5 / depth, "fan_in", "truncated_normal")


def next_byte_loss(model: GPT, windows, deterministic: bool = False):
    """Mean cross-entropy in nats of windows [batch, context + 1] of bytes."""
    tokens = windows.astype(jnp.int32)
    logits = model(tokens[:, :-1], deterministic)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@functools.partial(nnx.jit, static_argnames="length")
def continue_text(model: GPT, prompt, key, *, length: int):
    """The prompt [n] of bytes (n at most the context) followed by `length` sampled bytes."""
    window = jnp.zeros(model.context, jnp.int32).at[: prompt.size].set(prompt)

    def grow(carry, key):
        window, filled = carry
        logits = model(window[None])[0, filled - 1]
        token = jax.random.categorical(key, logits / TEMPERATURE)
        full = filled == model.context
        window = jnp.where(full, jnp.roll(window, -1), window)
        window = window.at[jnp.where(full, filled - 1, filled)].set(token)
        return (window, jnp.where(full, filled, filled + 1)), token

    _, tokens = jax.lax.scan(grow, (window, prompt.size), jax.random.split(key, length))
    return tokens.astype(jnp.uint8)
