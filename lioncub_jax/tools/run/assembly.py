"""Arrays of a snapshot, put together of the tiles that processes have.

A process places what it needs and has. An array of which some process lacks a tile is a sum over all
processes of what each has: in a sum of bytes of which all but one are zero nothing is rounded.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lioncub_jax.checkpoint.layout import ArrayInfo, ArrayLayout
from lioncub_jax.checkpoint.tiles import Tile, processes_of
from lioncub_jax.exchange.holder import Holder
from lioncub_jax.exchange.means import merge_over_workers

ALL = "all"  # the axis of a mesh of all devices in a row


def tiles_of(array: ArrayLayout, shape: Sequence[int]) -> list[Tile]:
    """The tiles of an array, all of that shape, in order."""
    parts = []
    for n, size in zip(array.info.shape, shape, strict=True):
        parts.append([(start, start + size) for start in range(0, n, size)])
    return [(array.path, index) for index in itertools.product(*parts)]


def assemble(
    array: ArrayLayout,
    place: jax.ShapeDtypeStruct,
    having: Mapping[Tile, set[int]],
    held: Mapping[Tile, np.ndarray],
) -> jax.Array:
    """Makes an array of its tiles.

    Args:
      array: its layout in the snapshot.
      place: its shape, dtype and sharding.
      having: for each of its tiles the processes that have it, the same in every process; none: it is lost.
      held: tiles that this process has.
    """
    shape, dtype, me = place.shape, jnp.dtype(place.dtype), jax.process_index()
    is_local = all(having.values()) and (
        jax.process_count() == 1
        or all(
            needing <= having.get((array.path, index), set())
            for index, needing in processes_of(place).items()
        )
    )
    whole = np.zeros(shape, dtype)  # what is not touched takes no memory
    for tile, processes in having.items():
        if tile in held and (is_local or min(processes) == me):
            whole[tuple(slice(*ends) for ends in tile[1])] = held[tile]
    if is_local:
        return jax.make_array_from_callback(shape, place.sharding, lambda at: whole[at])
    lost = sorted(
        {row for (_, index), some in having.items() if not some for row in range(*index[0])}
    )

    def add_up(parts: jax.Array) -> jax.Array:
        x = jnp.sum(parts, axis=0, dtype=jnp.uint8).view(dtype)[..., 0]
        if lost:
            left = x[np.setdiff1d(np.arange(shape[0]), lost)]
            x = x.at[np.array(lost)].set(_replacement(left, lost, array.info))
        return x

    # One after the other: a device may hold a whole array meanwhile, but never two.
    parts = _bytes_of_processes(whole, place.sharding.mesh)  # type: ignore[union-attr]
    return jax.jit(add_up, out_shardings=place.sharding)(parts).block_until_ready()


def _bytes_of_processes(whole: np.ndarray, mesh: Mesh) -> jax.Array:
    """Bytes that a process has on its first device, zeros on others, ``[devices, *shape, bytes]``."""
    mine = whole[None, ..., None].view(np.uint8)
    line = NamedSharding(Mesh(mesh.devices.reshape(-1), (ALL,)), P(ALL))
    first = [device.process_index for device in mesh.devices.flat].index(jax.process_index())

    def of_device(at: Any) -> np.ndarray:
        return mine if (at[0].start or 0) == first else np.zeros_like(mine)

    return jax.make_array_from_callback((mesh.size, *mine.shape[1:]), line, of_device)


def _replacement(left: jax.Array, lost: list[int], info: ArrayInfo) -> jax.Array:
    """Rows for lost ones, ``[lost, ...]``: the mean of those that are left, and no feedback."""
    new = jnp.zeros_like(left[0]) if info.holder is Holder.FEEDBACK else merge_over_workers(left)
    new = jnp.broadcast_to(new, (len(lost), *left.shape[1:])).astype(left.dtype)
    if info.is_key:  # of the largest words, and so another for each
        new = jax.vmap(jnp.add)(new, jnp.array(lost, new.dtype) + 1)
    return new
