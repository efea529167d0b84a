"""Means over the workers, and the dtypes in which numbers are added."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


def common_dtype(*given: Any) -> np.dtype:
    """The dtype that holds what those of arrays or dtypes hold, whatever promotion JAX is set to."""
    # JAX promotes no float of 8 bits, and moments of an owner would be 0 in one.
    given = tuple(jnp.float32 if _is_float8(x) else x for x in given)
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*given)


def at_least_float32(x: jax.Array) -> jax.Array:
    """The same numbers, wide enough that results are rounded once, when they are stored."""
    return x.astype(common_dtype(x, jnp.float32))


def saturated(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """A cast that keeps finite values finite: those that the dtype cannot hold become its largest."""
    largest = float(jnp.finfo(dtype).max)
    if largest < float(jnp.finfo(x.dtype).max):
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)


def _is_float8(x: Any) -> bool:
    dtype = jnp.result_type(x)
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1


def halves(x: jax.Array) -> jax.Array:
    """Upper and lower bits of whole numbers, ``[..., 2]``, to add thousands of them; floats as they are."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    half = 4 * x.dtype.itemsize
    return jnp.stack([x >> half, x & (2**half - 1)], -1)


def of_halves(sums: jax.Array, dtype: np.dtype) -> jax.Array:
    """Sums of `halves` as numbers; one beyond its dtype is the largest, or the least, that this holds."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return sums
    half, kind = 4 * dtype.itemsize, jnp.iinfo(dtype)
    least, most = dtype.type(kind.min), dtype.type(kind.max)
    upper = sums[..., 0] + (sums[..., 1] >> half)
    total = (upper << half) | (sums[..., 1] & (2**half - 1))
    total = jnp.where(upper > most >> half, most, total)
    return jnp.where(upper < least >> half, least, total)


def merge_over_workers(x: jax.Array) -> jax.Array:
    """The mean of ``[workers, ...]``, in float32 at least; of whole numbers and bools the largest."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.max(x, axis=0)
    return jnp.mean(at_least_float32(x), axis=0)
