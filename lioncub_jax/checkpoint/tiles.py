"""Arrays in the tiles in which devices hold them, and back onto any mesh from whoever has which.

What a process needs and has itself it places; an array of which some process lacks a tile is added
up by the compiler, of what each process has.
"""

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lioncub_jax.means import mean_of

Index = tuple[tuple[int, int], ...]  # from, to: of each dimension
Tile = tuple[str, Index]  # of which array, and which part of it
ALL = "all"  # the axis of a mesh of all devices in a row


def index_of(slices: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Index:
    """Slices, as JAX gives them, in numbers."""
    assert slices is not None
    return tuple(s.indices(n)[:2] for s, n in zip(slices, shape, strict=True))


def parts_of(x: jax.Array) -> tuple[int, ...]:
    """In how many parts an array is cut, in each dimension."""
    shard = x.sharding.shard_shape(x.shape)
    return tuple(n // size for n, size in zip(x.shape, shard, strict=True))


def indices(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[Index]:
    """The tiles of an array that is cut in so many parts, in order."""
    cuts = []
    for n, count in zip(shape, parts, strict=True):
        size = n // count
        cuts.append([(k * size, (k + 1) * size) for k in range(count)])
    return list(itertools.product(*cuts))


def copied(arrays: Mapping[str, jax.Array]) -> dict[Tile, np.ndarray]:
    """The tiles that this process holds, each once, as copies on the host."""
    found: dict[Tile, jax.Array] = {}
    for path, x in arrays.items():
        for shard in x.addressable_shards:
            found.setdefault((path, index_of(shard.index, x.shape)), shard.data)
    for data in found.values():
        data.copy_to_host_async()  # of all devices at once
    return {tile: np.array(data) for tile, data in found.items()}  # no view: it may be donated


# --- Back onto a mesh


def placed(
    place: jax.ShapeDtypeStruct,
    who: Mapping[Index, Collection[int]],
    held: Mapping[Index, np.ndarray],
    fill: str = "",
) -> jax.Array:
    """An array from its tiles.

    Args:
      place: its shape, dtype and sharding.
      who: its tiles, and the processes that have each, the same in every process; nobody: it is lost.
      held: those that this process has.
      fill: what rows of the first dimension become that are lost: ``"mean"`` of the others, of whole
        numbers the largest; ``"zero"``; or a ``"key"`` of their own.
    """
    sharding: Any = place.sharding
    shape, dtype, me = place.shape, jnp.dtype(place.dtype), jax.process_index()
    wanted = sharding.devices_indices_map(shape).items()
    near = jax.process_count() == 1 or all(
        device.process_index in who.get(index_of(slices, shape), ()) for device, slices in wanted
    )
    near = near and all(who.values())
    whole = np.zeros(shape, dtype)  # what is not touched takes no memory
    for index, value in held.items():
        if near or min(who[index]) == me:
            whole[tuple(slice(*pair) for pair in index)] = value
    if near:
        return jax.make_array_from_callback(shape, sharding, lambda at: whole[at])
    lost = sorted({row for index in who if not who[index] for row in range(*index[0])})

    def added_up(parts: jax.Array) -> jax.Array:
        x = jnp.sum(parts, axis=0, dtype=jnp.uint8).view(dtype)[..., 0]
        if not lost:
            return x
        left = np.setdiff1d(np.arange(shape[0]), lost)
        return x.at[np.array(lost)].set(_filled(x[left], lost, fill))

    # One after the other: a device may hold a whole array meanwhile, but never two.
    parts = _of_each_process(whole, sharding.mesh)
    return jax.jit(added_up, out_shardings=sharding)(parts).block_until_ready()


def _of_each_process(whole: np.ndarray, mesh: Mesh) -> jax.Array:
    """What each process has, zeros elsewhere, in bytes ``[devices, *shape, bytes]``: on its first device.

    In a sum of bytes of which all but one are zero nothing is rounded.
    """
    mine = whole[..., None].view(np.uint8)
    local = [k for k, d in enumerate(mesh.devices.flat) if d.process_index == jax.process_index()]
    line = NamedSharding(Mesh(mesh.devices.reshape(-1), (ALL,)), P(ALL))

    def of_device(at: tuple[slice, ...] | None) -> np.ndarray:
        assert at is not None
        first = (at[0].start or 0) == local[0]
        return (mine if first else np.zeros_like(mine))[None]

    return jax.make_array_from_callback((mesh.size, *mine.shape), line, of_device)


def _filled(left: jax.Array, lost: list[int], fill: str) -> jax.Array:
    """``[rows lost, ...]``, of the rows that are left."""
    if fill == "key":  # another for each
        first = jnp.broadcast_to(left[0], (len(lost), *left.shape[1:]))
        apart = jnp.array(lost, left.dtype).reshape(-1, *[1] * (left.ndim - 1))
        return first + apart + 1
    new = jnp.zeros_like(left[0]) if fill == "zero" else mean_of(left)
    return jnp.broadcast_to(new, (len(lost), *left.shape[1:])).astype(left.dtype)
