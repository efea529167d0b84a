"""Whole matrices dealt to owners, and all other elements in the holes between them.

An optimizer that mixes the elements of a matrix needs whole ones. So matrices go, the most work first, each
to the owner with the least work so far. Equal parts travel, as large as the fullest owner's, and embeddings
and vectors, which any owner may have a slice of, fill the others up. With G devices in a group, O owners,
and S rows of 128 of each owner on a device, the rows of a *deal* lie so::

    device 0 of the group       owner 0: S rows | owner 1: S rows | ... | owner O-1: S rows
    ...                         its matrices, kind by kind | slices of other leaves | padding
    device G-1                  likewise: each device has 1/G of the rows of each matrix

Owners are workers. Where matrices are cut over the devices of a worker, and there are enough of them, each
of its devices is an owner of whole ones; else the devices share all of them. What is done with them is at
the end: a transform runs on one matrix at a time. What is not known (padding, or no finite mean) counts
as 0 in its matrix, and its state stays.
"""

import heapq
import itertools
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

from lioncub_jax.exchange import wires
from lioncub_jax.exchange.bits import (
    BLOCK,
    ROW,
    at_least_float32,
    divide_up,
    round_up,
    saturated,
    whole_rows,
)
from lioncub_jax.exchange.layout import SMALL
from lioncub_jax.mesh import axes
from lioncub_jax.mesh.specs import cuts_of, joined_shards, restrict

# A tree (prefix) of ``MuonDimensionNumbers`` like the parameters, or a function of them to one; None for
# leaves of two dimensions.
DimensionNumbers: TypeAlias = Any
Cut = tuple[tuple[str, int], ...]  # the inner axes that cut a dimension, and their sizes
WORTH = (
    1.1  # times the bytes between workers, at most, for whole matrices on each device of a worker
)


class Matrices(NamedTuple):
    """The matrices ``[batch, m, n]`` of a leaf, or a leaf without any.

    Attributes:
      order: its dimensions: those of the batch, of the rows, and of the columns; of no matrix, as they are.
      batch_dims: how many are of the batch.
      row_dims: how many are of the rows; 0 for no matrix.
      cuts: for each dimension, in that order, the inner axes that cut it.
      leaf: its index in the flattened tree; -1 before it is dealt.
      shape: of its shard; () before.
    """

    order: tuple[int, ...]
    batch_dims: int
    row_dims: int
    cuts: tuple[Cut, ...]
    leaf: int = -1
    shape: tuple[int, ...] = ()

    @property
    def in_order(self) -> tuple[int, ...]:
        """The shape in the order of the matrices' dimensions."""
        return tuple([self.shape[d] for d in self.order])


class Hand(NamedTuple):
    """Matrices of one shape that are cut alike, and how they are dealt.

    Attributes:
      work: operations of a step of Newton-Schulz, their weight.
      matrix: ``m, n`` of a whole one.
      whole: its dimensions of rows and of columns.
      shape: those of a shard.
      cuts: for each of these the inner axes that cut it.
      rows: of one of them on a device; 0 before they are dealt.
      numbers: how many each owner has, one behind the other.
      first_rows: where the first of them begins, counted from the owner's first row.
    """

    work: int
    matrix: tuple[int, int]
    whole: tuple[int, ...]
    shape: tuple[int, ...]
    cuts: tuple[tuple[str, ...], ...]
    rows: int = 0
    numbers: tuple[int, ...] = ()
    first_rows: tuple[int, ...] = ()

    @classmethod
    def of(cls, one: Matrices) -> "Hand":
        """The hand of the matrices of a leaf, and of others like them, before it is dealt."""
        shape, cuts = one.in_order[one.batch_dims :], one.cuts[one.batch_dims :]
        each = zip(shape, cuts, strict=True)
        whole = tuple([n * math.prod([size for _, size in cut]) for n, cut in each])
        matrix = math.prod(whole[: one.row_dims]), math.prod(whole[one.row_dims :])
        short, long = sorted(matrix)
        names = tuple([tuple([name for name, _ in cut]) for cut in cuts])
        return cls(4 * short**2 * long + 2 * short**3, matrix, whole, shape, names)


class Run(NamedTuple):
    """Equal slices of a leaf, one behind the other: some of its matrices, or one slice of another leaf.

    Attributes:
      first_row: where they begin, of the rows of a device.
      rows: of each slice on a device.
      number: how many.
      leaf: place of their leaf in the deal.
      start: their first element, in the order of the leaf.
      size: elements of each.
    """

    first_row: int
    rows: int
    number: int
    leaf: int
    start: int
    size: int


class Deal(NamedTuple):
    """The rows of some leaves, see above.

    Attributes:
      pieces: in the order of the rows.
      hands: of its matrices, those with most work first.
      segments: its leaves.
      group: the mesh axes of the devices of a group.
      num_chunks: G, how many they are.
      rows: S, of an owner on one device.
      filled: for each owner, how many of them hold something.
      matrix_rows: likewise, how many of them hold matrices, which come first.
      axes: mesh axes over which the leaves vary.
      moved: the inner axes that cut matrices.
      devices_own: True where each device of a worker is an owner.
      dtype: float32.
    """

    pieces: tuple[Run, ...]
    hands: tuple[Hand, ...]
    segments: tuple[Matrices, ...]
    group: tuple[str, ...]
    num_chunks: int
    rows: int
    filled: tuple[int, ...]
    matrix_rows: tuple[int, ...]
    axes: tuple[str, ...]
    moved: Cut
    devices_own: bool = False
    dtype: np.dtype[Any] = np.dtype(np.float32)

    @property
    def rows_per_chunk(self) -> int:
        """Rows of a device."""
        return len(self.filled) * self.rows

    @property
    def shared_by(self) -> tuple[str, ...]:
        """The mesh axes of the devices that have a part of each matrix."""
        return (*self.group, *[name for name, _ in self.moved])

    def span(self, which: str) -> slice:
        """The rows of an owner in which its "matrices" may lie, slices of the "rest", or "" for either."""
        if which == "matrices":
            return slice(0, max(self.matrix_rows))
        if not which:
            return slice(0, self.rows)
        both = [x for x in zip(self.matrix_rows, self.filled, strict=True) if x[0] < x[1]]
        first, end = zip(*both, strict=True) if both else ([0], [0])
        return slice(min(first), max(end))

    def join(self, leaves: Any) -> jax.Array:
        """All of its leaves as ``float32[G rows, 128]``, zeros in the padding."""
        flat, parts, at, devices = {}, [], 0, self.num_chunks
        for k, one in enumerate(self.segments):
            flat[k] = leaves[one.leaf].transpose(one.order).reshape(-1)
        for run in self.pieces:
            parts.append(jnp.zeros((devices, run.first_row - at, ROW)))
            x = flat[run.leaf][run.start :][: run.number * run.size].astype(jnp.float32)
            missing = devices * run.rows * ROW - run.size
            x = jnp.pad(x.reshape(run.number, run.size), ((0, 0), (0, missing)))
            x = x.reshape(run.number, devices, -1).swapaxes(0, 1)
            parts.append(x.reshape(devices, -1, ROW))
            at = run.first_row + run.number * run.rows
        parts.append(jnp.zeros((devices, self.rows_per_chunk - at, ROW)))
        return jnp.concatenate(parts, 1).reshape(-1, ROW)

    def split(self, rows: jax.Array, num_steps: jax.Array | None = None) -> dict[int, jax.Array]:
        """Undoes `join`: each leaf by its index."""
        del num_steps  # which `BucketLayout.split` is given
        x, slices = rows.reshape(self.num_chunks, -1, ROW), defaultdict(list)
        for run in self.pieces:  # those of a leaf in the order of its elements
            part = x[:, run.first_row : run.first_row + run.number * run.rows]
            part = part.reshape(self.num_chunks, run.number, -1).swapaxes(0, 1)
            part = part.reshape(run.number, -1)[:, : run.size]
            slices[run.leaf].append(part.reshape(-1))
        leaves = {}
        for k, own in slices.items():
            one = self.segments[k]
            in_order = jnp.concatenate(own).reshape(one.in_order)
            leaves[one.leaf] = in_order.transpose(np.argsort(one.order))
        return leaves

    def part_sizes(self, device: jax.Array, padding_counts: bool = True) -> jax.Array:
        """Elements of each row of a device of a group that are no padding: ``int32[rows]``."""
        del padding_counts  # which `BucketLayout.part_sizes` is given
        row, filled = jnp.arange(self.rows)[None], jnp.array(self.filled)[:, None]
        sizes = jnp.where(row < filled, ROW, 0).reshape(-1).astype(jnp.int32)
        for run in self.pieces:
            if run.size < self.num_chunks * run.rows * ROW:
                own = device * run.rows + jnp.arange(run.rows, dtype=jnp.int32)
                own = jnp.tile(jnp.clip(run.size - own * ROW, 0, ROW), run.number)
                sizes = sizes.at[run.first_row : run.first_row + len(own)].set(own)
        return sizes


def matrices_of(
    numbers: DimensionNumbers, params: optax.Params, specs: Sequence[P] | None = None
) -> tuple[Matrices, ...]:
    """The matrices of each leaf.

    Args:
      numbers: as optax's ``muon_weight_dimension_numbers``.
      params: arrays.
      specs: of each, over the inner axes; None where types say them.

    Raises:
      ValueError: for numbers that do not fit the parameters.
    """

    def is_leaf(x: Any) -> bool:
        return x is None or isinstance(x, MuonDimensionNumbers)

    leaves = jax.tree_util.tree_leaves_with_path(params)
    given = numbers(params) if callable(numbers) else numbers
    if given is None:
        many = [jax.tree_util.keystr(path) for path, x in leaves if x.ndim > 2]
        if many:
            warnings.warn(
                f"{', '.join(many[:3])} have more than two dimensions and are no matrices by default: give "
                "muon_weight_dimension_numbers, such as MuonDimensionNumbers(1, 2) for scanned layers, or "
                "None for a leaf that is none",
                stacklevel=2,
            )
        given = jax.tree.map(lambda x: MuonDimensionNumbers() if x.ndim == 2 else None, params)
    try:
        each = jax.tree.leaves(jax.tree.broadcast(given, params, is_leaf), is_leaf=is_leaf)
    except ValueError as error:
        raise ValueError(
            f"dimension numbers {given!r} do not fit the parameters: give MuonDimensionNumbers, or None "
            "for no matrix, for each leaf of them or for a whole subtree"
        ) from error
    mesh = jax.sharding.get_abstract_mesh()
    if specs is None:
        specs = [restrict(jax.typeof(x).sharding.spec, mesh.explicit_axes) for _, x in leaves]
    found = []
    for (path, x), one, spec in zip(leaves, each, specs, strict=True):
        found.append(_matrices(path, x, one, spec, mesh))
    return tuple(found)


def _matrices(
    path: Any, x: jax.Array, given: MuonDimensionNumbers | None, spec: P, mesh: Any
) -> Matrices:
    if given is None:
        return Matrices(tuple(range(x.ndim)), 0, 0, ())
    rows, columns = [(d,) if isinstance(d, int) else tuple(d) for d in given]
    taken = [d % max(x.ndim, 1) for d in (*rows, *columns)]
    if not (rows and columns and len({*taken}) == len(taken) <= x.ndim):
        raise ValueError(
            f"{jax.tree_util.keystr(path)} of shape {x.shape} is no matrix by {given}: give axes of its "
            "rows and others of its columns, and None for a leaf that is none"
        )
    order = (*[d for d in range(x.ndim) if d not in taken], *taken)
    cuts = [tuple([(n, mesh.shape[n]) for n in cut]) for cut in cuts_of(tuple(spec), x.ndim)]
    return Matrices(order, x.ndim - len(taken), len(rows), tuple([cuts[d] for d in order]))


def deals(
    leaves: Sequence[Any],
    over: Sequence[Collection[str]],
    matrices: Sequence[Matrices],
    num_workers: int,
    group: tuple[str, ...],
    group_size: int,
) -> tuple[Deal, ...]:
    """Deals the leaves of a worker, those together that vary over and move along the same mesh axes.

    Args:
      leaves: arrays of a device, or anything with ``shape``; empty ones take no row.
      over: for each the mesh axes over which it varies.
      matrices: of each.
      num_workers: W.
      group: the mesh axes of the devices of a group.
      group_size: G, how many they are.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax.exchange import matrices
      >>> leaves = [jnp.zeros((3, 128, 256)), jnp.zeros((128, 128)), jnp.zeros(129)]
      >>> numbers = [MuonDimensionNumbers(1, 2), MuonDimensionNumbers(), None]
      >>> found = matrices.matrices_of(numbers, leaves)
      >>> deal, = matrices.deals(leaves, [()] * 3, found, num_workers=2, group=(), group_size=1)
      >>> deal.rows, deal.filled, [hand.numbers for hand in deal.hands]
      (512, (512, 386), [(2, 1), (0, 1)])
    """
    groups: dict[tuple[tuple[str, ...], Cut], list[Matrices]] = {}
    for i in sorted(range(len(leaves)), key=lambda i: not matrices[i].row_dims):
        one, shape, varying = matrices[i], tuple(leaves[i].shape), tuple(sorted(over[i]))
        moved = tuple(sorted({cut for cuts in one.cuts[one.batch_dims :] for cut in cuts}))
        if not one.row_dims:  # in the holes of matrices that vary alike
            moved = next((moved for known, moved in groups if known == varying), ())
        if math.prod(shape):
            groups.setdefault((varying, moved), []).append(one._replace(leaf=i, shape=shape))
    dealt = []
    for (varying, cut), own in groups.items():
        devices = group_size * math.prod([size for _, size in cut])
        shared, whole = [_deal(own, num_workers, each, group_size) for each in (1, devices)]
        fits = devices > 1 and devices * whole.rows <= WORTH * shared.rows
        best = whole if fits else shared
        dealt.append(best._replace(axes=varying, moved=cut, group=group, devices_own=fits))
    return tuple(dealt)


def _deal(leaves: Sequence[Matrices], num_workers: int, each: int, group_size: int) -> Deal:
    """A deal to ``each`` owners of every worker."""
    found: dict[Hand, list[tuple[int, int]]] = defaultdict(list)  # leaf and number of each matrix
    for k, one in enumerate(leaves):
        if one.row_dims:
            batch = math.prod(one.in_order[: one.batch_dims])
            found[Hand.of(one)] += [(k, number) for number in range(batch)]
    pieces, hands, filled = [], [], [0] * (num_workers * each)
    for hand, counts in _shares(found, len(filled)).items():
        size, units = math.prod(hand.shape), iter(found[hand])
        rows, first_rows = slice_rows(size, group_size), [*filled]
        for owner, count in enumerate(counts):
            own = itertools.islice(units, count)
            for k, some in itertools.groupby(own, key=lambda unit: unit[0]):
                numbers = [number for _, number in some]
                first, start = filled[owner], numbers[0] * size
                pieces.append((owner, first, rows, len(numbers), k, start, size))
                filled[owner] += rows * len(numbers)
        hands.append(hand._replace(rows=rows, numbers=tuple(counts), first_rows=tuple(first_rows)))
    matrix_rows = tuple(filled)
    rest = {k: math.prod(x.shape) for k, x in enumerate(leaves) if not x.row_dims}
    all_rows = sum(filled) + sum(slice_rows(size, group_size) for size in rest.values())
    level = max(*filled, divide_up(all_rows, len(filled)))  # rows of the fullest owner
    for k, size in rest.items():
        start = 0
        while start < size:
            owner = next(o for o, n in enumerate(filled) if n < level)
            rows = min(level - filled[owner], slice_rows(size - start, group_size))
            here = min(rows * ROW * group_size, size - start)
            pieces.append((owner, filled[owner], rows, 1, k, start, here))
            start, filled[owner] = start + here, filled[owner] + rows
    rows = round_up(level, BLOCK // math.gcd(BLOCK, each))
    if each == 1 and num_workers * level <= SMALL:
        rows = whole_rows(level)
    runs = [Run(owner * rows + first, *rest) for owner, first, *rest in sorted(pieces)]
    return Deal(
        tuple(runs), tuple(hands), tuple(leaves), (), group_size, rows, tuple(filled),
        matrix_rows, axes=(), moved=(),
    )  # fmt: skip


def _shares(found: dict[Hand, list[Any]], owners: int) -> dict[Hand, list[int]]:
    """How many matrices of each hand each owner has: those of most work first, to who has least."""
    shares, heap = {}, [(0, owner) for owner in range(owners)]
    for hand in sorted(found, reverse=True):
        shares[hand] = [0] * owners
        for _ in found[hand]:
            load, owner = heap[0]
            shares[hand][owner] += 1
            heapq.heapreplace(heap, (load + hand.work, owner))
    return shares


def slice_rows(size: int, group_size: int) -> int:
    """Rows of 128 on each device of a group, of so many elements."""
    return divide_up(size, ROW * group_size)


# --- One matrix at a time


def matrix_of(parts: jax.Array, hand: Hand, deal: Deal) -> jax.Array:
    """A matrix ``[m, n]``, of what each device that shares it has: ``[devices, rows, 128]``."""
    inner = dict(deal.moved)
    shards = math.prod(inner.values())
    x = parts.reshape(deal.num_chunks, shards, -1).swapaxes(0, 1).reshape(shards, -1)
    x = x[:, : math.prod(hand.shape)].reshape(shards, *hand.shape)
    return joined_shards(x, inner, hand.whole, hand.cuts).reshape(hand.matrix)


def cut_rows(rows: jax.Array, deal: Deal, which: str) -> jax.Array:
    """Of all rows of a worker's owners those in a span, see `Deal.span`: ``[rows, 128]``."""
    return rows.reshape(-1, deal.rows, ROW)[:, deal.span(which)].reshape(-1, ROW)


def in_place(x: jax.Array, deal: Deal, which: str, each: int) -> jax.Array:
    """Undoes `cut_rows`, for ``each`` owners of a worker, with zeros elsewhere."""
    span = deal.span(which)
    x = x.reshape(each, span.stop - span.start, ROW)
    return jnp.pad(x, ((0, 0), (span.start, deal.rows - span.stop), (0, 0))).reshape(-1, ROW)


def update_matrices(
    tx: optax.GradientTransformation, mean: jax.Array, worker: jax.Array, deal: Deal, state: Any
) -> tuple[jax.Array, Any]:
    """``u`` of the matrices of a worker, and the next state.

    Args:
      tx: is given one matrix at a time.
      mean: ``[owners of the worker, rows, 128]`` on this device, NaN for what is not known.
      worker: ``int32[]``, its index.
      deal: of the leaves.
      state: arrays ``[rows, 128]`` of all these rows, and numbers.
    """
    owner, state = worker, on_rows(lambda x: x.reshape(mean.shape), state)
    devices, mine = axes.workers_on(deal.shared_by), axes.worker_index(deal.shared_by)
    swap = partial(wires.swapped, devices=deal.shared_by)
    if deal.devices_own:
        owner, mean = worker * devices + mine, swap(mean)
    elif devices > 1:
        mean, state = on_rows(partial(wires.gathered_parts, devices=deal.shared_by), (mean, state))

    along = jax.tree.map(lambda x: 0 if x.ndim else None, state)
    # Of one matrix; vmap sees to it that no counter depends on it.
    each = jax.vmap(tx.update, in_axes=(0, along), out_axes=(0, along))
    _, counted = each(*on_rows(lambda x: jnp.zeros((1, 1, 1), widened(x).dtype), (mean, state)))
    u = axes.varying(jnp.zeros(mean.shape), (*axes.varying_axes(mean),))
    rows = u, state
    for hand in deal.hands:
        first, number = [jnp.array(x)[owner] for x in (hand.first_rows, hand.numbers)]
        turn = partial(_turn, each, deal, hand, first, mean)
        rows = lax.fori_loop(0, number, turn, rows)
    u, state = rows
    if deal.devices_own:
        u = swap(u)
    elif devices > 1:
        u, state = on_rows(lambda x: lax.dynamic_index_in_dim(x, mine), (u, state))
    new = jax.tree.map(lambda x, n: x.reshape(-1, ROW) if x.ndim else n, state, counted)
    return u, new


def on_rows(fn: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
    """Of all arrays of rows or matrices in a tree ``fn``; counters as they are."""
    return jax.tree.map(lambda x: fn(x) if x.ndim else x, tree)


def _turn(
    update: Any, deal: Deal, hand: Hand, first: jax.Array, mean: jax.Array, t: jax.Array, rows: Any
) -> Any:
    """``u`` and the state, in the rows of all matrices, with those of the matrix in turn."""
    to_matrix, at = partial(matrix_of, hand=hand, deal=deal), first + t * hand.rows

    def cut(rows: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(rows, at, hand.rows, 1)

    def put(rows: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
        if not rows.ndim:
            return rows
        new = jnp.where(known, saturated(new, rows.dtype), old)[0]
        [back] = jax.linear_transpose(to_matrix, cut(rows))(new)
        return lax.dynamic_update_slice_in_dim(rows, back, at, 1)

    x, old = on_rows(lambda rows: to_matrix(cut(rows))[None], (mean, rows[1]))
    known = jnp.isfinite(x)
    new = update(jnp.where(known, x, 0), jax.tree.map(widened, old))
    return jax.tree.map(put, rows, new, (jnp.zeros_like(x), old))


def widened(x: jax.Array) -> jax.Array:
    """A moment wide enough that no beta is rounded with it; a counter as it is."""
    return at_least_float32(x) if jnp.issubdtype(x.dtype, jnp.floating) else x
