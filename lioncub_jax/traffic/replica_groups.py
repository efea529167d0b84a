"""Which devices a collective joins: HLO's replica groups in all their spellings, as mesh axes.

XLA's own names for mesh axes cannot be trusted (its partitioner makes up new ones), so groups are read
as positions in the program's device assignment, and the axes are those along which these differ.
What does not fit is answered with None, and the reader of the program says which line it was.
"""

import itertools
import math
import re
from collections.abc import Sequence

import jax
import numpy as np

AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
Axes = tuple[str, ...] | None

PEERS = re.compile(r", (?:replica_groups|source_target_pairs)=")
_LISTS = re.compile(PEERS.pattern + r"\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r", replica_groups=\[(\d+,\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXIS = r"'((?:[^'\\]|\\.)*)'"
_MESH_AXIS = re.compile(_AXIS + r"=(\d+)")
_AXIS_PART = re.compile(_AXIS + r"(?::\((\d+)\)(\d+))?")
_NAMED = re.compile(
    rf", replica_groups=mesh\[(?P<axes>(?:{_MESH_AXIS.pattern},?)+)\]"
    r"(?:, device_ids=\((?:\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?|(?P<ids>[\d,]+))\))?"
    rf" \{{(?P<parts>(?:{_AXIS_PART.pattern},?)+)\}}"
)


def grouped(attributes: str, mesh: AnyMesh) -> tuple[Axes, int] | None:
    """Finds the mesh axes along which a collective's groups run, all or part of the way, and their size."""
    try:
        groups = _groups(attributes, mesh.size)
    except (KeyError, ValueError):  # names or numbers that do not fit each other
        groups = []
    if sorted(itertools.chain.from_iterable(groups)) != list(range(mesh.size)):
        return None
    sizes = set(map(len, groups))
    if len(sizes) > 1:
        return None, max(sizes)
    places = np.unravel_index(np.array(groups), tuple(mesh.shape.values()))
    differ = [(at != at[:, :1]).any() for at in places]
    return tuple(itertools.compress(mesh.axis_names, differ)), sizes.pop()


def permuted(attributes: str, mesh: AnyMesh) -> tuple[Axes, int] | None:
    """Finds the mesh axes along which a permute moves anything, and how many devices those span."""
    match = _LISTS.search(attributes)
    pairs = np.array(_numbers(match[1]) if match else [mesh.size] * 2, int).reshape(-1, 2)
    if pairs.max(initial=0) >= mesh.size:
        return None
    here, there = (np.array(np.unravel_index(ids, tuple(mesh.shape.values()))) for ids in pairs.T)
    moves = (here != there).any(axis=1)
    axes = tuple(axis for axis, moved in zip(mesh.axis_names, moves, strict=True) if moved)
    return axes, math.prod(mesh.shape[axis] for axis in axes)


def _groups(attributes: str, devices: int) -> list[list[int]]:
    """Reads replica_groups in any form, as positions in the program's device assignment.

    HLO can also mean ids of replicas, each of many partitions. JAX compiles for one replica, so
    such ids would not cover the devices, and `grouped` turns them down.
    """
    if match := _LISTS.search(attributes):
        groups = [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", match[1])]
        return groups or [list(range(devices))]
    if match := _IOTA.search(attributes):
        return _iota(match[2], match[3]).reshape(_numbers(match[1])).tolist()
    if match := _NAMED.search(attributes):
        ids, dims = match["ids"], match["dims"] or str(devices)
        positions = np.array(_numbers(ids)) if ids else _iota(dims, match["order"])
        return _named(positions, _MESH_AXIS.findall(match["axes"]), match["parts"])
    return []


def _named(positions: np.ndarray, axes: list[tuple[str, str]], parts: str) -> list[list[int]]:
    """Forms groups along axes of XLA's own mesh (its names may differ from ours) or parts of them.

    The part `'x':(2)4` of an axis x of size 24 is the middle one of its factors 2, 4 and 3.
    """
    spans: dict[str, list[tuple[int, int]]] = {name: [] for name, _ in axes}
    for name, low, part in _AXIS_PART.findall(parts):
        start = int(low or 1)
        spans[name].append((start, start * int(part or dict(axes)[name])))
    shape: list[int] = []
    along: list[int] = []
    for name, size in axes:
        cuts = sorted({1, int(size), *itertools.chain.from_iterable(spans[name])})
        for low, high in itertools.pairwise(cuts):
            along += [len(shape)] if any(start <= low < stop for start, stop in spans[name]) else []
            shape.append(high // low)
    return _split(positions.reshape(shape), along)


def _split(positions: np.ndarray, along: Sequence[int]) -> list[list[int]]:
    """Splits an array of device positions into the groups that differ along these axes alone."""
    size = math.prod(positions.shape[axis] for axis in along)
    last = range(positions.ndim - len(along), positions.ndim)
    return np.moveaxis(positions, along, last).reshape(-1, size).tolist()


def _iota(dims: str, order: str | None) -> np.ndarray:
    """Counts through an array of these dimensions and transposes it."""
    shape = _numbers(dims)
    return np.arange(math.prod(shape)).reshape(shape).transpose(_numbers(order) if order else None)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
