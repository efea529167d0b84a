"""Checksums of arrays, the same however they lie; and whether what is labelled one value is one.

Each device sums up what it holds, so copies of an array are summed up one by one. They are compared on
the way, to the bit: a label may lie, as where ``check_vma=False`` lets out as one what differs.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lioncub_jax.mesh.specs import axes_of, cuts_of, product


def checksums(
    arrays: dict[str, jax.Array],
) -> tuple[dict[str, list[int]], dict[str, tuple[int, int]]]:
    """Two words for each array, one wrong byte changes both; and the arrays that are not one value.

    Args:
      arrays: by path, on one mesh, each with elements; of random keys their words.

    Returns:
      ``(sums, apart)``: for each path its two words, the same for an array that is cut otherwise; and
      for each array with copies that differ, the ids of two devices between which they do.
    """
    sums, apart = {}, {}
    for path, (each, devices, mesh) in copies(arrays).items():
        sums[path] = [int(word) for word in each[0].sum(axis=0, dtype=np.uint32)]
        if (other := np.argwhere((each != each[0]).any(axis=-1))).size:
            copy, shard = other[0]
            ids = [int(mesh.devices.flat[devices[which, shard]].id) for which in (0, copy)]
            apart[path] = ids[0], ids[1]
    return sums, apart


class Copies(NamedTuple):
    """What the devices of a mesh hold of one array, which may be cut and then copied.

    Attributes:
      sums: ``uint32[copies, shards, 2]``, the words of what each device holds.
      devices: ``int[copies, shards]``, which device: places in ``mesh.devices.flat``.
      mesh: the mesh.
    """

    sums: np.ndarray
    devices: np.ndarray
    mesh: Mesh


def copies(arrays: dict[str, jax.Array]) -> dict[str, Copies]:
    """What each device holds of each array, in words; for every process.

    Args:
      arrays: as `checksums`.
    """
    if not arrays:
        return {}
    paths = sorted(arrays)
    mesh = untyped(arrays[paths[0]].sharding.mesh)  # type: ignore[attr-defined]
    specs = tuple(arrays[path].sharding.spec for path in paths)  # type: ignore[attr-defined]
    plain = [
        jax.device_put(arrays[p], NamedSharding(mesh, s)) for p, s in zip(paths, specs, strict=True)
    ]
    with jax.set_mesh(mesh):  # whatever mesh the caller has set
        found = np.asarray(_summing(mesh, specs)(plain))
    places = np.arange(mesh.devices.size)[:, None]
    return {
        path: Copies(_by_copy(mesh, spec, found[:, i]), _by_copy(mesh, spec, places)[..., 0], mesh)
        for i, (path, spec) in enumerate(zip(paths, specs, strict=True))
    }


def untyped(mesh: Mesh) -> Mesh:
    """The mesh with all axes left to the compiler, which may then move anything anywhere."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def cutting(spec: P) -> list[str]:
    """The axes that cut an array."""
    return [axis for entry in spec for axis in axes_of(entry)]


def _by_copy(mesh: Mesh, spec: P, found: np.ndarray) -> np.ndarray:
    """``[devices, n]`` as ``[copies, shards, n]`` of an array that is cut as the spec says."""
    cut_by = cutting(spec)
    whole = [d for d, axis in enumerate(mesh.axis_names) if axis not in cut_by]
    parts = [mesh.axis_names.index(axis) for axis in cut_by]
    shards = math.prod(mesh.shape[axis] for axis in cut_by)
    in_order = found.reshape(*mesh.devices.shape, -1).transpose(*whole, *parts, mesh.devices.ndim)
    return in_order.reshape(-1, shards, found.shape[-1])


@functools.cache
def _summing(mesh: Mesh, specs: tuple[P, ...]) -> Callable[[list[jax.Array]], jax.Array]:
    """Sums over what each device holds of each array, ``uint32[devices, arrays, 2]``, for every process."""

    def of_device(arrays: list[jax.Array], starts: list[Any], shapes: Any) -> jax.Array:
        sums = map(_checksum, arrays, (start[0] for start in starts), shapes)
        return jnp.stack(list(sums))[None]

    def of_all(arrays: list[jax.Array]) -> jax.Array:
        starts = [_starts(mesh, spec, x) for spec, x in zip(specs, arrays, strict=True)]
        run = jax.shard_map(
            functools.partial(of_device, shapes=[x.shape for x in arrays]),
            mesh=mesh,
            in_specs=(list(specs), P(mesh.axis_names)),
            out_specs=P(mesh.axis_names),
            check_vma=False,
        )
        return run(arrays, starts)

    return jax.jit(of_all, out_shardings=NamedSharding(mesh, P()))


def _starts(mesh: Mesh, spec: P, x: jax.Array) -> np.ndarray:
    """``uint32[devices]``: the number, in the whole array, of the first word that a device holds."""
    at = dict(zip(mesh.axis_names, np.indices(mesh.devices.shape), strict=True))
    starts = np.zeros(mesh.devices.shape, np.int64)
    for d, axes in enumerate(cuts_of(tuple(spec), x.ndim)):
        part = np.zeros_like(starts)
        for axis in axes:
            part = part * mesh.shape[axis] + at[axis]
        starts += part * (math.prod(x.shape[d:]) // product(mesh.shape, axes))
    words = max(1, x.dtype.itemsize // 4)
    return (starts * words).reshape(-1).astype(np.uint32)


def _checksum(x: jax.Array, start: jax.Array, whole: tuple[int, ...]) -> jax.Array:
    """``uint32[2]``: sums over the elements of a hash of bits and place, in the whole array."""
    words = bits_of(x)
    index = jnp.full(words.shape, start)
    shape = *whole, *words.shape[len(whole) :]
    for d in range(words.ndim):
        stride = math.prod(shape[d + 1 :]) % 2**32
        index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, d) * jnp.uint32(stride)
    # The hash is one to one in the bits, so that a change of one element cannot cancel.
    hashed = [_mix(words ^ _mix(index + jnp.uint32(seed))) for seed in (1, 0x9E3779B9)]
    return jnp.stack([jnp.sum(h, dtype=jnp.uint32) for h in hashed])


def _mix(h: jax.Array) -> jax.Array:
    """A hash that is one to one."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
    return h ^ (h >> 16)


def bits_of(x: jax.Array) -> jax.Array:
    """The bits of every element, in words ``uint32``; elements of 8 bytes give two, in one more axis."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    width = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32)


def of_bits(words: jax.Array, dtype: Any) -> jax.Array:
    """Undoes `bits_of`."""
    if dtype == jnp.bool_:
        return words.astype(jnp.bool_)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = jnp.finfo(dtype).dtype
        both = of_bits(words, part)
        return jax.lax.complex(both[..., 0], both[..., 1])
    width = {1: jnp.uint8, 2: jnp.uint16}.get(jnp.dtype(dtype).itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(words.astype(width), dtype)
