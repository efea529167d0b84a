"""Means of what workers sent, and what keeps a few of them from deciding: bounds, and values left out."""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

NETWORK = 32  # workers whose values are sorted side by side; compiling grows with W log2(W)^2
LEAST = 2.0**-126  # of what is above 0: CPUs take smaller numbers for 0


def share(present: jax.Array) -> jax.Array:
    """What a worker counts for in a mean."""
    # 1/n once: XLA rewrites x / n to x * (1/n) only sometimes, and the bits would depend on the rest of the
    # program.
    return 1 / jnp.maximum(present, 1).astype(jnp.float32)


def bounded(steps: jax.Array, dominance: float) -> jax.Array:
    """Cuts steps on a row to ``dominance`` times the lower median of those that are not 0.

    The lower median of n steps has (n - 1) // 2 steps below it. Fewer than n / 2 liars cannot move it
    outside the honest steps, and n / 2 cannot lift it above them.
    """
    # A liar may send any bits: NaN, infinity, negative, subnormal.
    steps = jnp.where((steps >= LEAST) & (steps < jnp.inf), steps, 0)
    # Radix selection of the lower median, two bits in each of eight rounds. The bits of positive bfloat16
    # numbers are in the order of the numbers; minus 1, a step of 0 becomes the largest key.
    keys = lax.bitcast_convert_type(steps.astype(jnp.bfloat16), jnp.uint16) - jnp.uint16(1)
    count = jnp.uint16 if len(steps) < 2**16 else jnp.uint32
    number = jnp.sum(steps > 0, axis=0, dtype=count)
    rank = (jnp.maximum(number, 1) - 1) >> 1

    def with_two_bits(k: Any, key: jax.Array) -> jax.Array:
        shift, bits = (14 - 2 * k).astype(jnp.uint16), jnp.uint16(0)
        for i in range(1, 4):
            below = keys < key + (jnp.uint16(i) << shift)
            bits += jnp.sum(below, axis=0, dtype=count) <= rank
        return key + (bits << shift)

    # The largest number with so few below it. A sort of a few workers' steps takes 25 times as long on a
    # CPU, and bits that are not in a loop half a second to compile.
    key = lax.fori_loop(0, 8, with_two_bits, number.astype(jnp.uint16) * 0)
    median = lax.bitcast_convert_type(key + jnp.uint16(1), jnp.bfloat16).astype(jnp.float32)
    return jnp.minimum(steps, jnp.where(number > 0, dominance * median, jnp.inf))


def trimmed(values: jax.Array, takes_part: jax.Array, trim: int) -> jax.Array:
    """The mean over axis 0 without the ``trim`` largest and smallest, of those that take part."""
    workers = len(values)
    if 2 * trim >= workers:
        most = (workers - 1) // 2
        raise ValueError(
            f"trim={trim} leaves nobody of {workers} workers: so many are left out on each side; give at "
            f"most {most}, the median"
        )
    present = jnp.sum(takes_part, dtype=jnp.int32)
    cut = jnp.minimum(trim, jnp.maximum(present - 1, 0) // 2)
    # Who is absent comes last, and so does what is no number, which no code is.
    counted = takes_part & ~jnp.isnan(values)
    ordered = _sorted(jnp.where(counted, values, jnp.inf))
    inner = [jnp.where((k >= cut) & (k < present - cut), x, 0) for k, x in enumerate(ordered)]
    return reduce(jnp.add, inner) * share(present - 2 * cut)


def _sorted(values: jax.Array) -> list[jax.Array]:
    """Arrays, the parts of one along axis 0, sorted element by element.

    By a network of minima and maxima, which XLA makes one loop of with what the values are decoded from:
    on a CPU 180 times as fast as `jnp.sort` for 8 workers, which sorts one column after the other.

    Source: Batcher, Sorting networks and their applications, 1968 (the odd-even merge).
    """
    if len(values) > NETWORK:
        return list(jnp.sort(values, axis=0))
    ordered = list(values)
    for i, j in _comparators(len(ordered)):
        low, high = ordered[i], ordered[j]
        ordered[i], ordered[j] = jnp.minimum(low, high), jnp.maximum(low, high)
    return ordered


def _comparators(count: int) -> list[tuple[int, int]]:
    """The pairs that are brought in order, one after the other, to sort so many."""
    pairs, run = [], 1
    while run < count:  # runs of so many are in order, and two are merged
        apart = run
        while apart:
            for first in range(apart % run, count - apart, 2 * apart):
                each = [(i, i + apart) for i in range(first, min(first + apart, count - apart))]
                pairs += [(i, j) for i, j in each if i // (2 * run) == j // (2 * run)]
            apart //= 2
        run *= 2
    return pairs
