"""Leaves of a state, from its arrays and back.

In training, momentum of a group lies in slices of buckets, and momentum of owners in slices of 1/W: rows of
128 with padding in between. A checkpoint knows neither a mesh nor a bucket. It holds parameters whole, what
each worker has of its own ``[workers, *shape]``, and what owners hold in the shape of the parameters. A
field keeps its name, ``.opt_state.owner.mu['w']``, so that one level and two read each other.

`_rows_to_leaves` cuts the leaves out of rows by reshapes, transposes and slices. It is linear, and the way
back is its transpose, which JAX derives: slices become padding, and splits become joins. Both are exact,
to the sign of a zero. Arrays that are leaves already go straight to their place.

Another number of workers meets a rule, in `_resize`.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lioncub_jax.checkpoint.layout import (
    IN_ROWS,
    ArrayInfo,
    ArrayLayout,
    Layout,
    layout_of,
    paths_of,
)
from lioncub_jax.exchange.bits import ROW
from lioncub_jax.exchange.holder import Holder
from lioncub_jax.exchange.layout import BucketLayout, Segment, to_shape
from lioncub_jax.exchange.means import merge_over_workers
from lioncub_jax.mesh.checksum import untyped
from lioncub_jax.mesh.hosts import is_key, key_words
from lioncub_jax.mesh.placement import Workers

# --- From a state to leaves


def arrays_of(state: Any) -> dict[str, jax.Array]:
    """Arrays with elements, by path, of random keys their words, on a mesh that leaves all to XLA."""
    arrays = {}
    for path, x in paths_of(state).items():
        if x.size:
            words = jax.jit(key_words)(x) if is_key(x) else x
            arrays[path] = jax.device_put(words, _auto(x.sharding))
    return arrays


def _auto(sharding: Any) -> NamedSharding:
    return NamedSharding(untyped(sharding.mesh), sharding.spec)


def leaf_infos(layout: Layout) -> dict[str, ArrayInfo]:
    """Infos of the leaves of a state, by name."""
    infos: dict[str, ArrayInfo] = {}
    for array in layout:
        leaves = jax.eval_shape(functools.partial(_rows_to_leaves, array), array.info.abstract())
        infos |= {name: array.info._replace(shape=x.shape) for name, x in leaves.items()}
    return infos


def leaves_of(layout: Layout, mesh: Mesh, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Leaves of the arrays of a state; those in rows are spread over the mesh."""
    in_rows = tuple(array for array in layout if array.rows)
    leaves = {array.path: arrays[array.path] for array in layout if not array.rows}
    return leaves | _unpack(in_rows, mesh, [arrays[array.path] for array in in_rows])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _unpack(layout: Layout, mesh: Mesh, arrays: list[jax.Array]) -> dict[str, jax.Array]:
    leaves: dict[str, jax.Array] = {}
    for array, x in zip(layout, arrays, strict=True):
        leaves |= _rows_to_leaves(array, x)
    shardings = {name: spread(x.shape, mesh) for name, x in leaves.items()}
    return lax.with_sharding_constraint(leaves, shardings)


def spread(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Cuts an array over as many axes of a mesh as will divide it, first dimensions first, as rows lie."""
    left = list(shape)
    cuts: list[tuple[str, ...]] = [()] * len(shape)
    for axis, size in mesh.shape.items():
        for d in [d for d, n in enumerate(left) if n % size == 0][:1]:
            left[d] //= size
            cuts[d] = (*cuts[d], axis)
    return NamedSharding(mesh, P(*[over or None for over in cuts]))


def _rows_to_leaves(array: ArrayLayout, x: jax.Array) -> dict[str, jax.Array]:
    """Leaves in the rows of an array, by name; an array without rows is a leaf itself."""
    rows = array.rows
    if rows is None or not x.shape:  # a counter is the same in all buckets
        return {array.name: x}
    params, inner = dict(rows.params), dict(rows.inner)
    x = x.reshape(array.num_workers, rows.group_size, math.prod(inner.values()), -1, ROW)
    # [shards, devices of a group, rows of all workers, ROW], or [workers, shards, devices, rows, ROW].
    owned = array.info.holder is Holder.OWNER
    x = _merge_rows(x.transpose(2, 1, 0, 3, 4)) if owned else x.transpose(0, 2, 1, 3, 4)
    buckets = [(rows.bucket, x)]
    if rows.cuts:
        slices = [(rows.cuts[s.leaf], part) for s, part in _split(rows.bucket, x)]
        buckets = [(cut, part[..., : cut.rows_per_chunk, :]) for cut, part in slices]
    leaves = {}
    for bucket, x in buckets:
        for segment, part in _split(bucket, _merge_rows(x)):
            param = params[segment.leaf]
            flat = part.reshape(*part.shape[:-2], -1)[..., : segment.size]
            shards = to_shape(flat, segment)
            leaves[array.name + param.path] = _join_shards(shards, inner, param.shape, param.cuts)
    return leaves


def _merge_rows(rows: jax.Array) -> jax.Array:
    """``[..., a, b, ROW]`` as ``[..., a * b, ROW]``."""
    return rows.reshape(*rows.shape[:-3], -1, ROW)


def _split(bucket: BucketLayout, rows: jax.Array) -> list[tuple[Segment, jax.Array]]:
    """The rows of each segment, of ``[..., rows, ROW]``: one after the other, then padding."""
    sizes = [s.rows for s in bucket.segments]
    # Split, and not sliced: the transpose joins all of them at once.
    parts = lax.split(rows, [*sizes, rows.shape[-2] - sum(sizes)], rows.ndim - 2)
    return list(zip(bucket.segments, parts[:-1], strict=True))


def _join_shards(
    shards: jax.Array, inner: Mapping[str, int], shape: Sequence[int], cuts: Sequence[Sequence[str]]
) -> jax.Array:
    """``[*batch, inner shards, *local shape]`` to ``[*batch, *shape]`` of a parameter."""
    batch, local = shards.shape[: -1 - len(shape)], shards.shape[shards.ndim - len(shape) :]
    n, names, order = len(batch), list(inner), list(range(len(batch)))
    for d, over in enumerate(cuts):
        order += [*(n + names.index(a) for a in over), n + len(names) + d]
    split = shards.reshape(*batch, *inner.values(), *local)
    return split.transpose(order).reshape(*batch, *shape)


# --- From leaves to a state


class Target:
    """The state that a restore is to give: its layout and its leaves.

    Args:
      like: a state with the structure that is wanted.
      placed: its arrays, or ``ShapeDtypeStruct``s with shardings, all on one mesh.
      workers: the workers of that mesh.
    """

    def __init__(self, like: Any, placed: Any, workers: Workers):
        self.layout, self._tree = layout_of(placed, workers), jax.tree.structure(like)
        self._wanted, self.mesh = paths_of(placed), untyped(workers.mesh)
        self.leaves = leaf_infos(self.layout)

    def sharding(self, path: str) -> NamedSharding:
        """The sharding of an array of the state, on a mesh that leaves all to XLA."""
        return _auto(self._wanted[path].sharding)

    def place(self, name: str, saved: ArrayInfo) -> jax.ShapeDtypeStruct:
        """A saved leaf with its sharding: that of the array it becomes, or spread over all devices."""
        direct = self._is_direct(name, saved)
        return saved.abstract(self.sharding(name) if direct else spread(saved.shape, self.mesh))

    def _is_direct(self, name: str, saved: ArrayInfo) -> bool:
        """True for a leaf that is an array of the state as it is."""
        info = self.leaves.get(name)
        same = info is not None and (info.shape, info.packing) == (saved.shape, saved.packing)
        return same and saved.packing != IN_ROWS

    def build(
        self, saved: Mapping[str, ArrayInfo], leaves: dict[str, jax.Array], keep: bool
    ) -> Any:
        """Makes the state of leaves that lie where `place` says; see `_resize` for ``keep``."""
        direct = {name for name, info in saved.items() if self._is_direct(name, info)}
        computed = [array for array in self.layout if array.path not in direct]

        def compute(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
            resized = self._resized(saved, leaves, keep)
            return {array.path: _leaves_to_rows(array, resized) for array in computed}

        shardings = {array.path: self.sharding(array.path) for array in computed}
        others = {name: x for name, x in leaves.items() if name not in direct}
        return self.fill(leaves | jax.jit(compute, out_shardings=shardings)(others))

    def _resized(
        self, saved: Mapping[str, ArrayInfo], leaves: dict[str, jax.Array], keep: bool
    ) -> dict[str, jax.Array]:
        """Leaves for the wanted number of workers; drift that was not measured is -1."""
        resized = dict(leaves)
        for name, info in self.leaves.items():
            if name not in saved:
                resized[name] = jnp.full(info.shape, -1, info.dtype)
            elif name in leaves and info.shape != saved[name].shape:
                x, count = leaves[name], info.shape[0]
                if info.is_key:
                    resized[name] = _resize_keys(x, count, self._wanted[name].dtype)
                else:
                    is_feedback = Holder.FEEDBACK in (info.holder, saved[name].holder)
                    resized[name] = _resize(x, count, keep, is_feedback)
        return resized

    def fill(self, arrays: dict[str, jax.Array]) -> Any:
        """Makes the state of arrays as `arrays_of` has them."""
        state = []
        for path, like in self._wanted.items():
            if not like.size:
                state.append(jnp.zeros(like.shape, like.dtype, device=like.sharding))
                continue
            x = jax.device_put(arrays[path], like.sharding)
            if is_key(like):
                wrap = functools.partial(jax.random.wrap_key_data, impl=like.dtype)
                x = jax.jit(wrap, out_shardings=like.sharding)(x)
            state.append(x)
        return jax.tree.unflatten(self._tree, state)


def _leaves_to_rows(array: ArrayLayout, leaves: dict[str, jax.Array]) -> jax.Array:
    """An array of its leaves; undoes `_rows_to_leaves`, with zeros in the padding."""
    shaped, to_leaves = array.info.abstract(), functools.partial(_rows_to_leaves, array)
    parts = {name: leaves[name].astype(shaped.dtype) for name in jax.eval_shape(to_leaves, shaped)}
    if not array.rows or not shaped.shape:
        return next(iter(parts.values()))
    [rows] = jax.linear_transpose(to_leaves, shaped)(parts)
    return rows


def _resize(x: jax.Array, count: int, keep: bool, is_feedback: bool) -> jax.Array:
    """``[workers, ...]`` for another number of workers.

    Args:
      x: what each worker has.
      count: the number of workers from now on.
      keep: workers that survive keep theirs, and newcomers get the mean; else all get the mean.
      is_feedback: the mean over the workers stays as it was: no error is lost with its worker.
    """
    survivors = x[: min(count, len(x))] if keep else x[:0]
    mean = merge_over_workers(x)
    new = jnp.broadcast_to(mean, (count - len(survivors), *x.shape[1:])).astype(x.dtype)
    new = jnp.concatenate([survivors, new])
    if is_feedback and keep and count < len(x):
        new = (new.astype(mean.dtype) + mean - merge_over_workers(new)).astype(x.dtype)
    return new


def _resize_keys(words: jax.Array, count: int, impl: Any) -> jax.Array:
    """Workers that survive keep their keys; each newcomer folds its index into one of them."""
    keys = jax.random.wrap_key_data(words, impl=impl)
    if count <= len(words):
        return words[:count]
    index = jnp.arange(len(words), count)
    parents = keys.reshape(len(words), -1)[index % len(words)]
    added = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)))(parents, index)
    return jax.random.key_data(jnp.concatenate([keys, added.reshape(len(index), *keys.shape[1:])]))
