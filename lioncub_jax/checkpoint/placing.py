"""The arrays of a state as a checkpoint holds them, and the way back onto a mesh."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lioncub_jax.checkpoint import reshard
from lioncub_jax.checkpoint.reshard import Layout
from lioncub_jax.mesh.keys import is_key
from lioncub_jax.mesh.sums import untyped


def words(state: Any) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Arrays with elements, by path, random keys as words; of keys the generator and how many words."""
    arrays, keys = {}, {}
    for path, x in reshard.paths_of(state).items():
        words = _key_words(x) if is_key(x) else x
        if is_key(x):
            keys[path] = [str(jax.random.key_impl(x)), words.shape[-1]]
        if x.size:
            arrays[path] = words
    return arrays, keys


_key_words = jax.jit(jax.random.key_data)


def places(saved: Layout, target: Layout, like: Any, keys: dict[str, Any]) -> dict[str, Any]:
    """Where each array of a checkpoint is read to: where it is wanted, or spread over all devices."""
    wanted = reshard.paths_of(like)
    direct = set(target.arrays) - set(reshard.moved(saved, target))
    mesh = untyped(next(iter(wanted.values())).sharding.mesh)
    out = {}
    for path, x in saved.arrays.items():
        if 0 in x.shape:
            continue
        shape = (*x.shape, keys[path][1]) if path in keys else x.shape
        dtype = jnp.uint32 if path in keys else jnp.dtype(x.dtype)
        spec = wanted[path].sharding.spec if path in direct else _spread(x.shape, mesh)
        out[path] = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    return out


def _spread(shape: tuple[int, ...], mesh: Mesh) -> P:
    """Cuts an array over as many axes of a mesh as will divide it."""
    left = list(shape)
    cuts: list[tuple[str, ...]] = [()] * len(shape)
    for axis, size in mesh.shape.items():
        fitting = [d for d, n in enumerate(left) if n % size == 0]
        if fitting:
            d = max(fitting, key=lambda d: left[d])
            left[d] //= size
            cuts[d] = (*cuts[d], axis)
    return P(*[axes or None for axes in cuts])


def placed(
    saved: Layout,
    target: Layout,
    like: Any,
    arrays: dict[str, Any],
    keys: dict[str, Any],
    keep: bool,
) -> Any:
    """The state wanted, of the arrays of a checkpoint, each read to its place."""
    wanted = reshard.paths_of(like)
    mesh = untyped(next(iter(wanted.values())).sharding.mesh)
    moved = reshard.moved(saved, target)
    empty = {path: x for path, x in wanted.items() if 0 in x.shape}
    made = {path: NamedSharding(mesh, wanted[path].sharding.spec) for path in [*moved, *empty]}

    def make(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        new = reshard.converted(saved, target, arrays, keys, keep) if moved else {}
        return new | {path: jnp.zeros(x.shape, x.dtype) for path, x in empty.items()}

    found = arrays | jax.jit(make, out_shardings=made)(arrays if moved else {})
    leaves = [_leaf(found[path], x.sharding, keys.get(path)) for path, x in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _leaf(x: jax.Array, sharding: Any, key: Any) -> jax.Array:
    if key is None:
        return jax.device_put(x, sharding)
    wrap = functools.partial(jax.random.wrap_key_data, impl=key[0])
    return jax.jit(wrap, out_shardings=sharding)(jax.device_put(x, sharding))
