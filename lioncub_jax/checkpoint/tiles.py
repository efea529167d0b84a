"""Arrays in the tiles in which devices hold them: to files, and back onto any mesh from whoever has which.

What a process needs and has itself it reads; arrays of which some process lacks a tile are sent
around, one after the other, by the compiler.
"""

import hashlib
import json
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lioncub_jax import own

Index = tuple[tuple[int, int], ...]  # from, to: of each dimension
DIGEST = 32  # bytes of a SHA-256
PART = ".part"  # behind the name of a file that is being written
ALL = "all"  # the axis of a mesh of all devices in a row


class Tile(NamedTuple):
    """A part of an array that is held somewhere.

    Attributes:
      path: of the array, in the state.
      at: which part of it.
      value: the part, on the host.
    """

    path: str
    at: Index
    value: np.ndarray


def index_of(slices: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Index:
    """Slices, as JAX gives them, in numbers."""
    assert slices is not None
    return tuple(s.indices(n)[:2] for s, n in zip(slices, shape, strict=True))


def index_from(pairs: Any) -> Index:
    """An index as JSON gives it back, in lists."""
    return tuple((int(a), int(b)) for a, b in pairs)


def holders_of(x: Any) -> dict[Index, list[int]]:
    """The tiles of an array, and the processes that hold each."""
    found: dict[Index, set[int]] = {}
    for device, slices in x.sharding.devices_indices_map(x.shape).items():
        found.setdefault(index_of(slices, x.shape), set()).add(device.process_index)
    return {index: sorted(processes) for index, processes in found.items()}


def copied(arrays: Mapping[str, jax.Array]) -> list[Tile]:
    """The tiles that this process holds, by path, each once, as copies on the host."""
    found: dict[tuple[str, Index], jax.Array] = {}
    for path, x in arrays.items():
        for shard in x.addressable_shards:
            found.setdefault((path, index_of(shard.index, x.shape)), shard.data)
    for data in found.values():
        data.copy_to_host_async()  # of all devices at once
    # Never a view: the array may be donated.
    return [Tile(path, index, np.array(data)) for (path, index), data in found.items()]


# --- Files


def write(path: Path, about: dict[str, Any], tiles: list[Tile]) -> None:
    """Whole or not at all: under another name first."""
    places = [[t.path, t.at, str(t.value.dtype)] for t in tiles]
    head = json.dumps({**about, "tiles": places}).encode()
    digest = hashlib.sha256()
    temporary = path.with_name(path.name + PART)
    try:
        temporary.touch(0o600)  # whatever the umask
        with temporary.open("wb") as file:
            for piece in (len(head).to_bytes(8, "little"), head, *(_bytes(t.value) for t in tiles)):
                digest.update(piece)
                file.write(piece)
            file.write(digest.digest())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, path)


def _bytes(x: np.ndarray) -> Any:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


def read(path: Path) -> tuple[dict[str, Any], list[Tile]] | None:
    """What `write` wrote; None if it is not as it was written, ``ValueError`` if others may write it."""
    content = own.read(path)
    body = memoryview(content)[:-DIGEST]
    if len(content) < DIGEST + 8 or hashlib.sha256(body).digest() != content[-DIGEST:]:
        return None
    at = 8 + int.from_bytes(body[:8], "little")
    about = json.loads(bytes(body[8:at]))
    tiles = []
    for name, pairs, dtype in about.pop("tiles"):
        index = index_from(pairs)
        shape = _shape(index)
        size = math.prod(shape) * jnp.dtype(dtype).itemsize
        value = np.frombuffer(body[at : at + size], jnp.dtype(dtype)).reshape(shape)
        tiles.append(Tile(name, index, value))
        at += size
    return about, tiles


def _shape(index: Index) -> tuple[int, ...]:
    return tuple(b - a for a, b in index)


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
    if all(who.values()) and _all_have_theirs(place, who):
        tiles = {index: held[index] for index in who if index in held}
        return jax.make_array_from_callback(
            place.shape, sharding, lambda at: _region(tiles, index_of(at, place.shape), place.dtype)
        )
    return _sent(place, who, held, fill)


def _all_have_theirs(place: jax.ShapeDtypeStruct, who: Mapping[Index, Collection[int]]) -> bool:
    """Whether each process has the tiles of which its devices want a part."""
    sharding: Any = place.sharding
    for device, slices in sharding.devices_indices_map(place.shape).items():
        wanted = index_of(slices, place.shape)
        for index, processes in who.items():
            if device.process_index not in processes and _overlap(index, wanted) is not None:
                return False
    return True


def _overlap(one: Index, other: Index) -> Index | None:
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(a < b for a, b in both) else None


def _region(tiles: Mapping[Index, np.ndarray], wanted: Index, dtype: Any) -> np.ndarray:
    if wanted in tiles:
        return tiles[wanted].astype(dtype)
    region, found = np.empty(_shape(wanted), dtype), 0
    for index, value in tiles.items():
        both = _overlap(index, wanted)
        if both is not None:
            region[_within(both, wanted)] = value[_within(both, index)]
            found += math.prod(_shape(both))
    assert found == region.size, f"{wanted} is not covered by {sorted(tiles)}"
    return region


def _within(part: Index, whole: Index) -> tuple[slice, ...]:
    return tuple(
        slice(a - start, b - start) for (a, b), (start, _) in zip(part, whole, strict=True)
    )


def _sent(
    place: jax.ShapeDtypeStruct,
    who: Mapping[Index, Collection[int]],
    held: Mapping[Index, np.ndarray],
    fill: str,
) -> jax.Array:
    """The array, each of its tiles from one device of a process that has it."""
    sharding: Any = place.sharding
    mesh: Mesh = sharding.mesh
    tiles = sorted(who)
    rows, order = _rows(tiles, who, mesh)
    shape = _shape(tiles[0])
    line = NamedSharding(Mesh(mesh.devices.reshape(-1), (ALL,)), P(ALL))
    zeros = np.zeros(shape, place.dtype)

    def of_device(at: tuple[slice, ...] | None) -> np.ndarray:
        first, last = index_of(at, (len(rows), *shape))[0]
        mine = rows[first:last]
        return np.stack([zeros if i is None else held[i].astype(place.dtype) for i in mine])

    given = jax.make_array_from_callback((len(rows), *shape), line, of_device)
    lost = sorted({row for index in tiles if not who[index] for row in range(*index[0])})

    def assembled(given: jax.Array) -> jax.Array:
        whole = _grid(given[np.array(order)], tiles, place.shape)
        if not lost:
            return whole
        left = np.setdiff1d(np.arange(place.shape[0]), lost)
        return whole.at[np.array(lost)].set(_filled(whole[left], lost, fill))

    # One after the other: a device may hold a whole array meanwhile, but never two.
    return jax.jit(assembled, out_shardings=sharding)(given).block_until_ready()


def _filled(left: jax.Array, lost: list[int], fill: str) -> jax.Array:
    """``[rows lost, ...]``, of the rows that are left."""
    if fill == "key":  # another for each
        first = jnp.broadcast_to(left[0], (len(lost), *left.shape[1:]))
        apart = jnp.array(lost, left.dtype).reshape(-1, *[1] * (left.ndim - 1))
        return first + apart + 1
    if fill == "zero":
        new = jnp.zeros_like(left[0])
    elif jnp.issubdtype(left.dtype, jnp.floating):
        new = jnp.mean(left.astype(jnp.float32), axis=0).astype(left.dtype)
    else:
        new = jnp.max(left, axis=0)
    return jnp.broadcast_to(new, (len(lost), *left.shape[1:]))


def _rows(
    tiles: list[Index], who: Mapping[Index, Collection[int]], mesh: Mesh
) -> tuple[list[Index | None], list[int]]:
    """The tile that each row of what is sent holds, as many rows a device; and the row of each tile."""
    devices = list(mesh.devices.flat)
    of_device: list[list[Index]] = [[] for _ in devices]
    for index in tiles:
        having = [k for k, d in enumerate(devices) if d.process_index in who[index]]
        if having:
            of_device[min(having, key=lambda k: len(of_device[k]))].append(index)
    most = max(map(len, of_device))
    rows = [i for mine in of_device for i in [*mine, *[None] * (most - len(mine))]]
    return rows, [rows.index(index) if who[index] else 0 for index in tiles]


def _grid(parts: jax.Array, tiles: list[Index], shape: tuple[int, ...]) -> jax.Array:
    """``[tiles, *tile]``, in the order of their places, side by side."""
    tile = _shape(tiles[0])
    counts = tuple(n // t for n, t in zip(shape, tile, strict=True))
    assert math.prod(counts) == len(tiles), "tiles of an array are alike and leave no gap"
    n = len(tile)
    order = [d for pair in zip(range(n), range(n, 2 * n), strict=True) for d in pair]
    return parts.reshape(*counts, *tile).transpose(order).reshape(shape)
