"""Arrays in the tiles in which devices hold them, and back onto any mesh from whoever has which.

Checkpoints and snapshots hold the same tiles: a checkpoint each once, a snapshot what each process has.
What a process needs and has itself it places; an array of which some process lacks a tile is added
up by the compiler, of what each process has.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lioncub_jax.checkpoint.leaves import Leaf, Stored
from lioncub_jax.exchange.layout import Holder
from lioncub_jax.exchange.means import mean_of

Index = tuple[tuple[int, int], ...]  # from, to: of each dimension
Tile = tuple[str, Index]  # of which array, and which part of it
ALL = "all"  # the axis of a mesh of all devices in a row


def index_of(slices: Any, shape: tuple[int, ...]) -> Index:
    """Slices, as JAX gives them, in numbers."""
    return tuple(s.indices(n)[:2] for s, n in zip(slices, shape, strict=True))


def shape_of(index: Sequence[Any]) -> tuple[int, ...]:
    """The shape of a part."""
    return tuple(end - start for start, end in index)


def cut(stored: Stored, shape: Sequence[int]) -> list[Tile]:
    """The tiles of an array, all of that shape, in order."""
    ends = [range(0, n + 1, size) for n, size in zip(stored.leaf.shape, shape, strict=True)]
    return [(stored.path, index) for index in itertools.product(*map(itertools.pairwise, ends))]


def holders(x: Any) -> dict[Index, set[int]]:
    """The parts of an array, or of what is to be one, and the processes that hold each."""
    found: dict[Index, set[int]] = {}
    device: Any
    for device, slices in x.sharding.devices_indices_map(x.shape).items():
        found.setdefault(index_of(slices, x.shape), set()).add(device.process_index)
    return found


def copied(
    arrays: Mapping[str, jax.Array], wanted: Iterable[Tile] | None = None
) -> dict[Tile, np.ndarray]:
    """The tiles that this process holds, or some of them, as copies on the host, each once."""
    found: dict[Tile, jax.Array] = {}
    for path, x in arrays.items():
        for shard in x.addressable_shards:
            found.setdefault((path, index_of(shard.index, x.shape)), shard.data)
    if wanted is not None:
        found = {tile: found[tile] for tile in wanted}
    for data in found.values():
        data.copy_to_host_async()  # of all devices at once
    # No views: the arrays may be donated.
    return {tile: np.array(data, order="C") for tile, data in found.items()}


def bytes_of(x: np.ndarray) -> np.ndarray:
    """What is written of a tile."""
    return x.reshape(-1).view(np.uint8)


# --- Back onto a mesh


def placed(
    stored: Stored,
    place: jax.ShapeDtypeStruct,
    who: Mapping[Tile, set[int]],
    held: Mapping[Tile, np.ndarray],
) -> jax.Array:
    """An array from its tiles.

    Args:
      stored: what it is.
      place: its shape, dtype and sharding.
      who: its tiles, and the processes that have each, the same in every process; nobody: it is lost.
      held: tiles that this process has.
    """
    shape, dtype, me = place.shape, jnp.dtype(place.dtype), jax.process_index()
    near = all(who.values()) and (
        jax.process_count() == 1
        or all(
            some <= who.get((stored.path, index), set()) for index, some in holders(place).items()
        )
    )
    whole = np.zeros(shape, dtype)  # what is not touched takes no memory
    for tile, some in who.items():
        if tile in held and (near or min(some) == me):
            whole[tuple(slice(*ends) for ends in tile[1])] = held[tile]
    if near:
        return jax.make_array_from_callback(shape, place.sharding, lambda at: whole[at])
    lost = sorted({row for (_, index), some in who.items() if not some for row in range(*index[0])})

    def added_up(parts: jax.Array) -> jax.Array:
        x = jnp.sum(parts, axis=0, dtype=jnp.uint8).view(dtype)[..., 0]
        if lost:
            left = x[np.setdiff1d(np.arange(shape[0]), lost)]
            x = x.at[np.array(lost)].set(_filled(left, lost, stored.leaf))
        return x

    # One after the other: a device may hold a whole array meanwhile, but never two.
    parts = _of_each_process(whole, place.sharding.mesh)  # type: ignore[union-attr]
    return jax.jit(added_up, out_shardings=place.sharding)(parts).block_until_ready()


def _of_each_process(whole: np.ndarray, mesh: Mesh) -> jax.Array:
    """What each process has, zeros elsewhere, in bytes ``[devices, *shape, bytes]``: on its first device.

    In a sum of bytes of which all but one are zero nothing is rounded.
    """
    mine = whole[None, ..., None].view(np.uint8)
    line = NamedSharding(Mesh(mesh.devices.reshape(-1), (ALL,)), P(ALL))
    first = [device.process_index for device in mesh.devices.flat].index(jax.process_index())

    def of_device(at: Any) -> np.ndarray:
        return mine if (at[0].start or 0) == first else np.zeros_like(mine)

    return jax.make_array_from_callback((mesh.size, *mine.shape[1:]), line, of_device)


def _filled(left: jax.Array, lost: list[int], leaf: Leaf) -> jax.Array:
    """Rows that are lost, ``[lost, ...]``, of those that are left: they owe nothing, and else the mean."""
    new = jnp.zeros_like(left[0]) if leaf.holder is Holder.FEEDBACK else mean_of(left)
    new = jnp.broadcast_to(new, (len(lost), *left.shape[1:])).astype(left.dtype)
    if leaf.is_key:  # of the largest words, and so another for each
        new = jax.vmap(jnp.add)(new, jnp.array(lost, new.dtype) + 1)
    return new
