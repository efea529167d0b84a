"""Checksums of arrays, the same for any sharding; and a check that copies of an array are equal.

Each device sums up its own shard or copy. Copies are compared to the bit, since a sharding may call copies
one value that differ: ``shard_map(check_vma=False)`` lets them out so.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def checksums(
    arrays: Mapping[str, jax.Array], rows: Mapping[str, int] | None = None
) -> Callable[[], tuple[dict[str, Any], dict[str, Any]]]:
    """Begins to compute two words for each array, of which one wrong byte changes both.

    Args:
      arrays: by path, on one mesh, each with elements; of random keys their words.
      rows: of an array that became longer, to be cut over a mesh, how many rows count.

    Returns:
      A function that waits for the devices and returns ``(sums, differ)``: for each path its two words, the
      same for an array that is cut otherwise; and for each array with copies that differ, the ids of two
      devices between which they do.
    """
    begun = copies(arrays, rows)

    def wait() -> tuple[dict[str, Any], dict[str, Any]]:
        sums, differ = {}, {}
        for path, (each, devices, mesh) in begun().items():
            sums[path] = tuple(each[0].sum(axis=0, dtype=np.uint32).tolist())
            if (others := np.argwhere((each != each[0]).any(axis=-1))).size:
                copy, shard = others[0]
                one, other = mesh.devices.flat[devices[[0, copy], shard]]
                differ[path] = one.id, other.id
        return sums, differ

    return wait


def host_checksum(x: np.ndarray) -> tuple[int, ...]:
    """The two words of an array of this host, computed there."""
    x = np.ascontiguousarray(x.astype(_in_bytes(x.dtype), copy=False)).reshape(-1)
    words = x.view(_width(x.dtype))  # whatever jax_enable_x64 says in this thread
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names none: an accelerator has the array for a moment
        cpu = None
    with jax.default_device(cpu):
        return tuple(np.asarray(jax.jit(checksum)(words)).tolist())


class Copies(NamedTuple):
    """Checksums of the parts of one array, which may be cut over a mesh and then copied.

    Attributes:
      sums: ``uint32[copies, shards, 2]``, the words of what each device holds.
      devices: ``int[copies, shards]``, which device: places in ``mesh.devices.flat``.
      mesh: the mesh.
    """

    sums: np.ndarray
    devices: np.ndarray
    mesh: Mesh


def copies(
    arrays: Mapping[str, jax.Array], rows: Mapping[str, int] | None = None
) -> Callable[[], dict[str, Copies]]:
    """Begins to compute checksums of what each device holds of each array; all processes call it.

    Args:
      arrays: as `checksums`.
      rows: as `checksums`.

    Returns:
      A function that waits for the devices and has the checksums, in every process.
    """
    if not arrays:
        return dict
    paths = sorted(arrays)
    given: list[Any] = [arrays[path] for path in paths]
    mesh = untyped(given[0].sharding.mesh)
    shardings = [NamedSharding(mesh, x.sharding.spec) for x in given]
    plain = jax.device_put(given, shardings)
    with jax.set_mesh(mesh):  # whatever mesh the caller has set
        each = [
            _device_checksums(x, lies, (rows or {}).get(path))
            for path, x, lies in zip(paths, plain, shardings, strict=True)
        ]
        # For every process.
        begun = jax.jit(jnp.stack, out_shardings=NamedSharding(mesh, P()))(each)
    starts = [_starts(lies, x.shape) for lies, x in zip(shardings, plain, strict=True)]

    def wait() -> dict[str, Copies]:
        sums, held = np.asarray(begun), {}
        for i, path in enumerate(paths):
            # Those that hold the same shard, next to each other.
            devices = np.argsort(starts[i], kind="stable").reshape(len({*starts[i]}), -1).T
            held[path] = Copies(sums[i, devices], devices, mesh)
        return held

    return wait


def untyped(mesh: Mesh) -> Mesh:
    """The mesh with all axes left to the compiler, which may then move anything anywhere."""
    return mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _device_checksums(whole: jax.Array, sharding: NamedSharding, rows: int | None) -> jax.Array:
    """Sums over what each device holds of an array, ``uint32[devices, 2]``; compiled once for a shape."""
    starts = _starts(sharding, whole.shape)
    # Of its rows so many count.
    own_rows = None if rows is None else rows - starts // math.prod(whole.shape[1:])

    def of_device(own: Any, start: Any, rows: Any) -> jax.Array:
        return checksum(own, start[0], whole.shape, None if rows is None else rows[0])[None]

    every = P(sharding.mesh.axis_names)
    run = jax.shard_map(
        of_device,
        mesh=sharding.mesh,
        in_specs=(sharding.spec, every, every),
        out_specs=every,
        check_vma=False,
    )
    return run(whole, starts.astype(np.uint32), own_rows)


@functools.cache
def _starts(sharding: NamedSharding, shape: tuple[int, ...]) -> np.ndarray:
    """``int[devices]``: the number, in the whole array, of the first element that a device holds."""
    slices = sharding.devices_indices_map(shape)
    first = [[at.start or 0 for at in slices[device]] for device in sharding.mesh.devices.flat]
    return np.array(first, int) @ _strides(shape)


def _strides(shape: tuple[int, ...]) -> np.ndarray:
    return np.array([math.prod(shape[d + 1 :]) for d in range(len(shape))], int)


def checksum(
    x: jax.Array, start: Any = 0, whole: tuple[int, ...] = (), rows: Any = None
) -> jax.Array:
    """``uint32[2]``: sums over the elements of a hash of bits and place.

    Args:
      x: an array, or a shard of one.
      start: of a shard the number of its first element in the whole array.
      whole: of a shard the shape of that.
      rows: how many of its rows count, below 1 for none; None for all.
    """
    words, k = to_words(x), max(1, x.dtype.itemsize // 4)
    whole = whole or x.shape
    shape = (*whole[:-1], math.prod(whole[-1:]) * k)
    index = jnp.full(words.shape, jnp.uint32(start) * k)
    for d, stride in enumerate(_strides(shape)):
        place = lax.broadcasted_iota(jnp.uint32, words.shape, d)
        index += place * jnp.uint32(stride % 2**32)
    # Both hashes are one to one in the bits, so that a change of one element cannot cancel.
    one = mix(words ^ (index + jnp.uint32(1)) * jnp.uint32(0x9E3779B1))
    if rows is not None:
        row = lax.broadcasted_iota(jnp.int32, words.shape, 0) // (len(words) // len(x))
        one = jnp.where(row < rows, one, 0)
    other = (one ^ (one >> 15)) * jnp.uint32(0x2C1B3C6D)
    # One reduction of both: XLA's CPU takes six times as long for two.
    zeros, dims = (jnp.uint32(0),) * 2, range(words.ndim)
    sums = lax.reduce((one, other), zeros, lambda x, y: (x[0] + y[0], x[1] + y[1]), dims)
    return jnp.stack(sums)


def mix(h: jax.Array) -> jax.Array:
    """A hash of ``uint32`` that is one to one, as MurmurHash3 ends: for checksums and for coins."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def to_words(x: jax.Array) -> jax.Array:
    """The bits of all elements in words ``uint32``, one each, or two of 8 bytes along the last axis."""
    x = jnp.atleast_1d(x).astype(_in_bytes(x.dtype))
    return x.view(_width(x.dtype)).astype(jnp.uint32)


def from_words(words: jax.Array, like: jax.Array) -> jax.Array:
    """Undoes `to_words` of an array of that dtype and shape."""
    held = _in_bytes(like.dtype)
    return words.astype(_width(held)).view(held).astype(like.dtype).reshape(like.shape)


def _in_bytes(dtype: np.dtype) -> np.dtype:
    """A dtype; for one of a part of a byte another that has all its values."""
    small = {"float4_e2m1fn": "bfloat16", "int": "int8", "uint": "uint8"}
    kind = dtype.name.rstrip("24")
    return jnp.dtype(small.get(dtype.name) or small.get(kind, dtype.name))


def _width(dtype: np.dtype) -> str:
    return f"uint{8 * min(dtype.itemsize, 4)}"
