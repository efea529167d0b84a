"""Many arrays over the border of a ``shard_map``, in a few.

Shardy's time grows with the square of the arrays that enter: a second and a half for 900. So those that
fit together enter as one, and are cut apart inside. XLA finds that a slice of what it joined is what went
in, and drops both: the compiled program is the same, and nothing is copied. With `MANY` out of reach
``benchmarks/compile_time.py`` has a step of 300 arrays compile 0.7 to 1 s longer (JAX 0.10.2): that of
votes 1.5 times as long as ``optax.lion``'s and not 1.3.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

MANY = 64  # arrays; fewer enter as they are


def crossed(over: Callable[..., Any], fn: Callable[..., Any], in_specs: Any) -> Callable[..., Any]:
    """``shard_map`` of ``fn``, whose arrays enter joined.

    Args:
      over: ``jax.shard_map`` with all that it needs but the function and ``in_specs``.
      fn: takes and returns trees of arrays.
      in_specs: a tree (prefix) like its arguments.
    """

    def run(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        specs = jax.tree.leaves(jax.tree.broadcast(in_specs, args))
        sets = _sets(leaves, specs)
        if len(sets) == len(leaves):
            return over(fn, in_specs=in_specs)(*args)
        axes = [len(specs[own[0]]) for own in sets]
        joined = [_join([leaves[i] for i in own], at) for own, at in zip(sets, axes, strict=True)]
        inside = [specs[own[0]] for own in sets]

        def apart(joined: list[jax.Array]) -> Any:
            each: list[Any] = [None] * len(leaves)
            for own, at, whole in zip(sets, axes, joined, strict=True):
                for i, x in zip(own, _cut(whole, [leaves[i] for i in own], at), strict=True):
                    each[i] = x
            return fn(*jax.tree.unflatten(tree, each))

        return over(apart, in_specs=(inside,))(joined)

    return run


def _sets(leaves: Sequence[Any], specs: Sequence[P]) -> list[list[int]]:
    """Which arrays enter as one: those that differ in the first dimension that is not cut, if at all."""
    sets: dict[Any, list[int]] = {}
    for i, (x, spec) in enumerate(zip(leaves, specs, strict=True)):
        key: Any = i
        # Only a compiler drops the joint. It knows best of all where empty arrays lie.
        fits = isinstance(x, jax.core.Tracer) and x.ndim > len(spec) and x.size
        if fits and len(leaves) >= MANY:
            rest = x.shape[: len(spec)] + x.shape[len(spec) + 1 :]
            key = spec, rest, x.aval.update(shape=())
        sets.setdefault(key, []).append(i)
    return list(sets.values())


def _join(arrays: Sequence[jax.Array], axis: int) -> jax.Array:
    if len(arrays) == 1:
        return arrays[0]
    return jnp.concatenate([_as_bits(x) for x in arrays], axis)


def _cut(whole: jax.Array, arrays: Sequence[jax.Array], axis: int) -> list[jax.Array]:
    """Undoes `_join`."""
    if len(arrays) == 1:
        return [whole]
    found, start = [], 0
    for x in arrays:
        end = start + x.shape[axis]
        own = lax.slice_in_dim(whole, start, end, axis=axis)
        found.append(own if own.dtype == x.dtype else lax.bitcast_convert_type(own, x.dtype))
        start = end
    return found


def _as_bits(x: jax.Array) -> jax.Array:
    """Short floats as whole numbers: XLA for CPU joins them as float32 otherwise, and keeps that."""
    short = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}") if short else x
