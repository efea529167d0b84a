"""Many arrays that enter a ``shard_map`` as a few: joined in front of it, and cut again inside.

Shardy's time grows with the square of the arrays that enter: a second and a half for 900. XLA finds that a
slice of what was joined is what went in, and drops both: the compiled program is the same, and nothing is
copied. With `MANY` out of reach ``benchmarks/compile_time.py`` has a step of 300 arrays compile 0.7 to 1 s
longer (JAX 0.10.2): that of votes 1.5 times as long as ``optax.lion``'s and not 1.3.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

MANY = 64  # fewer arrays enter as they are


def joined_at_border(
    over: Callable[..., Any], fn: Callable[..., Any], in_specs: Any
) -> Callable[..., Any]:
    """``over(fn, in_specs=in_specs)`` of a ``shard_map``; arrays of one kind enter as one.

    Those have one spec, one dtype, and one shape in the dimensions that the spec names: rows and what is
    each worker's own may both lie as ``P("data")``, and cannot be joined.
    """

    def run(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        # Only a compiler drops the joint.
        if len(leaves) < MANY or not any(isinstance(x, jax.core.Tracer) for x in leaves):
            return over(fn, in_specs=in_specs)(*args)
        specs = jax.tree.leaves(jax.tree.broadcast(in_specs, args))
        places: dict[Any, list[int]] = {}  # of leaves, by what they have in common
        for i, spec in enumerate(specs):
            kind = jax.typeof(leaves[i])
            # A key has no bits that could be joined with those of others.
            alone = i if jnp.issubdtype(kind.dtype, jax.dtypes.prng_key) else None
            common = spec, kind.dtype, kind.weak_type, kind.shape[: len(spec)], alone
            places.setdefault(common, []).append(i)
        groups, shapes = [*places.values()], [jnp.shape(x) for x in leaves]

        def cut_inside(joined: list[jax.Array]) -> Any:
            parts = list(leaves)
            for own, whole in zip(groups, joined, strict=True):
                first = own[0]
                behind = [shapes[i][len(specs[first]) :] for i in own]
                each = _cut(whole, behind, leaves[first].dtype) if len(own) > 1 else [whole]
                for i, x in zip(own, each, strict=True):
                    parts[i] = x
            return fn(*jax.tree.unflatten(tree, parts))

        joined = []
        for own in groups:
            arrays = [leaves[i] for i in own]
            joined.append(_join(arrays, len(specs[own[0]])) if len(own) > 1 else arrays[0])
        return over(cut_inside, in_specs=([specs[own[0]] for own in groups],))(joined)

    return run


def _join(arrays: Sequence[jax.Array], lead: int) -> jax.Array:
    """Arrays as one, all of their dimensions behind the leading ones as one."""
    flat = [jnp.reshape(x, (*x.shape[:lead], math.prod(x.shape[lead:]))) for x in arrays]
    return jnp.concatenate([_as(x, _carrier(x.dtype)) for x in flat], lead)


def _cut(whole: jax.Array, behind: Sequence[tuple[int, ...]], dtype: Any) -> list[jax.Array]:
    """Undoes `_join`, for the shapes behind the leading dimensions."""
    flat = lax.split(whole, [math.prod(shape) for shape in behind], whole.ndim - 1)
    each = zip(flat, behind, strict=True)
    return [_as(x, dtype).reshape(*x.shape[:-1], *shape) for x, shape in each]


def _as(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def _carrier(dtype: Any) -> Any:
    """Short floats as whole numbers: XLA for CPU joins them as float32 otherwise, and keeps that."""
    short = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return f"uint{8 * dtype.itemsize}" if short else dtype
