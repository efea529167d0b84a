"""Mid-rise codes with one step for a whole leaf: an ablation, which the library does not offer."""

from typing import Any

import jax
import jax.numpy as jnp

from lioncub_jax.reference import lion as reference
from lioncub_jax.reference.lion import Buffer, Codes, Message


def midrise(p: int) -> Codes:
    """`reference.midrise`, rounded to nearest, but for its step."""
    half, by_row = 2 ** (p - 1), reference.midrise(p)

    def encode(x: jax.Array, buffer: Buffer, t: Any) -> Message:
        step = reference.to_bfloat16(reference.GAUSSIAN_STEP[p] * reference.leaf_mean(x, buffer))
        inward = jnp.floor(jnp.abs(reference.quotient(x, step)))
        inward = jnp.minimum(inward, half - 1).astype(jnp.int32)
        q = jnp.where(x > 0, half + inward, half - 1 - inward)
        zeros = by_row.encode(jnp.zeros_like(x), buffer, t).q  # each takes its side
        return Message(jnp.where(x == 0, zeros, q), step)

    return Codes(by_row.top, encode)
