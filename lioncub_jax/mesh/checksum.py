"""Checksums of arrays, the same for any sharding; and a check that copies of an array are equal.

Each device sums up its own shard or copy. Copies are compared to the bit, since a sharding may call copies
one value that differ: ``shard_map(check_vma=False)`` lets them out so.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def checksums(
    arrays: dict[str, jax.Array],
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, int]]]:
    """Two words for each array, one wrong byte changes both; and the arrays that are not one value.

    Args:
      arrays: by path, on one mesh, each with elements; of random keys their words.

    Returns:
      ``(sums, differ)``: for each path its two words, the same for an array that is cut otherwise; and
      for each array with copies that differ, the ids of two devices between which they do.
    """
    sums, differ = {}, {}
    for path, (each, devices, mesh) in copies(arrays).items():
        sums[path] = tuple(each[0].sum(axis=0, dtype=np.uint32).tolist())
        if (others := np.argwhere((each != each[0]).any(axis=-1))).size:
            copy, shard = others[0]
            one, other = mesh.devices.flat[devices[[0, copy], shard]]
            differ[path] = one.id, other.id
    return sums, differ


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


def copies(arrays: dict[str, jax.Array]) -> dict[str, Copies]:
    """Checksums of what each device holds of each array; all processes call it and have the result.

    Args:
      arrays: as `checksums`.
    """
    if not arrays:
        return {}
    paths = sorted(arrays)
    mesh = untyped(arrays[paths[0]].sharding.mesh)  # type: ignore[attr-defined]
    specs = [arrays[path].sharding.spec for path in paths]  # type: ignore[attr-defined]
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    plain = jax.device_put([arrays[path] for path in paths], shardings)
    with jax.set_mesh(mesh):  # whatever mesh the caller has set
        each = [_device_checksums(*one) for one in zip(plain, shardings, strict=True)]
        # For every process.
        sums = np.asarray(jax.jit(jnp.stack, out_shardings=NamedSharding(mesh, P()))(each))
    held = {}
    for i, path in enumerate(paths):
        starts = _starts(shardings[i], plain[i].shape)
        # Those that hold the same shard, next to each other.
        devices = np.argsort(starts, kind="stable").reshape(len({*starts}), -1).T
        held[path] = Copies(sums[i, devices], devices, mesh)
    return held


def untyped(mesh: Mesh) -> Mesh:
    """The mesh with all axes left to the compiler, which may then move anything anywhere."""
    return mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))


@functools.partial(jax.jit, static_argnums=1)
def _device_checksums(whole: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Sums over what each device holds of an array, ``uint32[devices, 2]``; compiled once for a shape."""

    def of_device(own: Any, start: Any) -> jax.Array:
        return checksum(own, start[0], whole.shape)[None]

    every = P(sharding.mesh.axis_names)
    run = jax.shard_map(
        of_device,
        mesh=sharding.mesh,
        in_specs=(sharding.spec, every),
        out_specs=every,
        check_vma=False,
    )
    return run(whole, _starts(sharding, whole.shape).astype(np.uint32))


@functools.cache
def _starts(sharding: NamedSharding, shape: tuple[int, ...]) -> np.ndarray:
    """``int[devices]``: the number, in the whole array, of the first element that a device holds."""
    slices = sharding.devices_indices_map(shape)
    first = [[at.start or 0 for at in slices[device]] for device in sharding.mesh.devices.flat]
    return np.array(first, int) @ _strides(shape)


def _strides(shape: tuple[int, ...]) -> np.ndarray:
    return np.array([math.prod(shape[d + 1 :]) for d in range(len(shape))], int)


def checksum(x: jax.Array, start: Any = 0, whole: tuple[int, ...] = ()) -> jax.Array:
    """``uint32[2]``: sums over the elements of a hash of bits and place.

    Args:
      x: an array, or a shard of one.
      start: of a shard the number of its first element in the whole array.
      whole: of a shard the shape of that.
    """
    words, k = to_words(x), max(1, x.dtype.itemsize // 4)
    whole = whole or x.shape
    shape = (*whole[:-1], math.prod(whole[-1:]) * k)
    index = jnp.full(words.shape, jnp.uint32(start) * k)
    for d, stride in enumerate(_strides(shape)):
        place = jax.lax.broadcasted_iota(jnp.uint32, words.shape, d)
        index += place * jnp.uint32(stride % 2**32)
    # The hash is one to one in the bits, so that a change of one element cannot cancel.
    hashed = [mix(words ^ mix(index + jnp.uint32(seed))) for seed in (1, 0x9E3779B9)]
    return jnp.stack([jnp.sum(h, dtype=jnp.uint32) for h in hashed])


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
