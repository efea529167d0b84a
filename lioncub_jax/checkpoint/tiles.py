"""Tiles: the parts in which devices hold arrays. Checkpoints are written in tiles."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

Index = tuple[tuple[int, int], ...]  # (start, end) of each dimension
Tile = tuple[str, Index]  # path of an array, and a part of it


def index_of(slices: Any, shape: tuple[int, ...]) -> Index:
    """Numbers of slices, as JAX gives them."""
    return tuple(s.indices(n)[:2] for s, n in zip(slices, shape, strict=True))


def shape_of(index: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """The shape of a part."""
    return tuple(end - start for start, end in index)


def processes_of(x: Any) -> dict[Index, set[int]]:
    """The parts of an array, or of a ``ShapeDtypeStruct``, and the processes that hold each."""
    parts: dict[Index, set[int]] = {}
    device: Any
    for device, slices in x.sharding.devices_indices_map(x.shape).items():
        parts.setdefault(index_of(slices, x.shape), set()).add(device.process_index)
    return parts


def copy_to_host(
    arrays: Mapping[str, jax.Array], wanted: Iterable[Tile] | None = None
) -> dict[Tile, np.ndarray]:
    """Copies the tiles that this process holds, or some of them, each once."""
    shards: dict[Tile, jax.Array] = {}
    for path, x in arrays.items():
        for shard in x.addressable_shards:
            shards.setdefault((path, index_of(shard.index, x.shape)), shard.data)
    if wanted is not None:
        shards = {tile: shards[tile] for tile in wanted}
    for data in shards.values():
        data.copy_to_host_async()  # of all devices at once
    # No views: the arrays may be donated.
    return {tile: np.array(data, order="C") for tile, data in shards.items()}


def bytes_of(x: np.ndarray) -> np.ndarray:
    """The bytes of a tile, as they are written."""
    return x.reshape(-1).view(np.uint8)
