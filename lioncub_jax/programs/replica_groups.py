"""Groups of devices that a collective joins: HLO's replica groups in all their spellings, as mesh axes.

XLA's own names for mesh axes cannot be trusted (its partitioner makes up new ones), so groups are read
as positions in the program's device assignment, and the axes are those along which these differ.
What does not fit is a ``ValueError``, and the reader of the program says which line it was.

Of several slices of TPUs a program is written for one slice, and groups in it are of each slice; what the
runtime between slices sends, called megascale, names slices from 1 on and devices of a slice from 0 on.
"""

import itertools
import math
import re

import jax
import numpy as np

AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
Axes = tuple[str, ...] | None

PEERS = ("replica_groups=", "source_target_pairs=")
_LISTS = re.compile(rf", (?:{'|'.join(PEERS)})" + r"\{((?:\{[\d,]*\},?)*)\}")
_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_GRID = re.compile(rf", replica_groups=\[([\d,]+)\]<={_IOTA}")
_NAME = r"'(?:[^'\\]|\\.)*'"
_AXIS = re.compile(rf"({_NAME})=(\d+)")
_PART = re.compile(rf"({_NAME})(?::\((\d+)\)(\d+))?")
_NAMED = re.compile(
    rf", replica_groups=mesh\[((?:{_NAME}=\d+,?)+)\]"
    rf"(?:, device_ids=\((?:{_IOTA}|([\d,]+))\))?"
    rf" \{{((?:{_NAME}(?::\(\d+\)\d+)?,?)+)\}}"
)


_GRIDS = re.compile(r'_xla_megascale_target="\{([\d,]+)\}x\{(\d+):(\d+)\}"')
_MEMBERS = re.compile(r"_xla_megascale_target=\{((?:\{[\d,>-]+\},?)+)\}")
_SLICE = 100_000  # the number of a device, 200003: the fourth of the second slice


def slices_of(mesh: AnyMesh, devices: int) -> list[np.ndarray]:
    """Places in the mesh of the devices of each slice, ``int[slices, devices]``: all that they may be.

    A mesh of real devices knows; of another one each axis may have a factor that counts slices, and is
    major to the rest of the axis, as in meshes of ``mesh_utils.create_hybrid_device_mesh``. Those with
    slices along the first axes come first.
    """
    places, count = np.arange(mesh.size), mesh.size // devices
    if isinstance(mesh, jax.sharding.Mesh):
        index = [getattr(device, "slice_index", 0) for device in mesh.devices.flat]
        return [places[np.argsort(index, kind="stable")].reshape(count, devices)]
    ways = []
    for outer in itertools.product(*(range(n, 0, -1) for n in mesh.shape.values())):
        inner = [n // k for n, k in zip(mesh.shape.values(), outer, strict=True)]
        if math.prod(outer) == count and math.prod(inner) == devices:
            each = places.reshape([*itertools.chain(*zip(outer, inner, strict=True))])
            axes = range(each.ndim)
            ways.append(each.transpose(*axes[::2], *axes[1::2]).reshape(count, devices))
    return ways


def joined(text: str, mesh: AnyMesh, slices: np.ndarray, *, pairs: bool) -> tuple[Axes, int]:
    """Finds the mesh axes along which a collective's groups run, all or part of the way, and their size.

    Of ``pairs`` those along which anything moves, and how many devices these span. ``slices`` is one of
    those of `slices_of`.
    """
    if pairs and ", source_target_pairs={}" in text:
        return (), 1  # as along an axis of one device: nothing moves
    groups = _between_slices(text, slices)
    groups = groups or [of[g].tolist() for of in slices for g in _groups(text, slices.shape[1])]
    each, devices = sorted(itertools.chain(*groups)), [*range(mesh.size)]
    fits = {*each} <= {*devices} if pairs else each == devices
    if not (groups and fits):
        raise ValueError(f"{each} are not the devices of a mesh of {mesh.size}")
    sizes = set(map(len, groups))
    if len(sizes) > 1:
        return None, max(sizes)
    places = np.unravel_index(np.array(groups), tuple(mesh.shape.values()))
    differ = [(at != at[:, :1]).any() for at in places]
    axes = tuple(itertools.compress(mesh.axis_names, differ))
    return axes, math.prod(mesh.shape[axis] for axis in axes) if pairs else sizes.pop()


def _between_slices(text: str, slices: np.ndarray) -> list[list[int]]:
    """Groups of what the runtime sends between slices, as places in the mesh."""
    if match := _GRIDS.search(text):
        first, last = int(match[2]), int(match[3])
        return slices[np.array(_numbers(match[1])) - 1, first : last + 1].T.tolist()
    if match := _MEMBERS.search(text):
        each = [_numbers(group) for group in re.findall(r"\{([^{}]+)\}", match[1])]
        return [[int(slices[n // _SLICE - 1, n % _SLICE]) for n in group] for group in each]
    return []


def _groups(attributes: str, devices: int) -> list[list[int]]:
    """Reads groups in any form, as positions in the program's device assignment.

    HLO can also mean ids of replicas, each of many partitions. JAX compiles for one replica, so
    such ids would not cover the devices, and `joined` turns them down.
    """
    if match := _LISTS.search(attributes):
        groups = [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", match[1])]
        return groups or [list(range(devices))]
    if match := _GRID.search(attributes):
        number, size = _numbers(match[1])
        return _iota(match[2], match[3]).reshape(number, size).tolist()
    if match := _NAMED.search(attributes):
        axes, dims, order, ids, parts = match.groups()
        positions = np.array(_numbers(ids)) if ids else _iota(dims or str(devices), order)
        sizes = {name: int(size) for name, size in _AXIS.findall(axes)}
        return _named(positions.reshape([*sizes.values()]), sizes, _PART.findall(parts))
    return []


def _named(
    positions: np.ndarray, sizes: dict[str, int], parts: list[tuple[str, str, str]]
) -> list[list[int]]:
    """Groups along axes of XLA's own mesh (its names may differ from ours), or parts of them.

    The part `'x':(2)4` of an axis x of size 24 is the middle one of its factors 2, 4 and 3. A group has in
    common where it is along all else.
    """
    at = np.indices(positions.shape)
    for name, low, part in parts:
        axis, factor = [*sizes].index(name), int(part or sizes[name])
        turns, rest = divmod(sizes[name], int(low or 1) * factor)
        if rest:
            raise ValueError(f"{sizes[name]} is no multiple of {low} times {part}")
        at[axis] -= at[axis] // turns % factor * turns
    common = np.ravel_multi_index([*at], positions.shape)
    order = np.argsort(common, axis=None, kind="stable")
    return positions.flat[order].reshape(len(np.unique(common)), -1).tolist()


def _iota(dims: str, order: str | None) -> np.ndarray:
    """Counts through an array of these dimensions and transposes it."""
    shape = _numbers(dims)
    return np.arange(math.prod(shape)).reshape(shape).transpose(_numbers(order) if order else None)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
