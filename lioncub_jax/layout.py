"""One flat buffer for the whole tree: which rows of it belong to which leaf.

Every leaf is cut into rows of 64 elements, the last one padded, and the rows of all leaves are joined,
so that a step costs two collectives however many leaves there are. Leaves that vary over different
mesh axes may not share an array; each such set has a buffer, a *bucket*, of its own. A limit on the
size of a bucket splits it further.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lioncub_jax.bits import ROW


class Segment(NamedTuple):
    """The rows of one leaf.

    Attributes:
      leaf: index of the leaf in the flattened tree.
      shape: its shape.
      size: its number of elements, at least 1.
      first_row: where its rows begin in the bucket.
      rows: how many there are, padding included.
    """

    leaf: int
    shape: tuple[int, ...]
    size: int
    first_row: int
    rows: int


class Bucket(NamedTuple):
    """Leaves that travel together.

    Attributes:
      segments: where each leaf lies.
      first_row: rows in the buckets before this one.
      rows: rows in this one.
      chunk: rows that each worker owns; ``workers * chunk >= rows``.
      dtype: of the leaves, the widest if they differ.
      axes: mesh axes over which the leaves vary, by name.
      total_rows: rows of all buckets, what each worker pads them to included.
    """

    segments: tuple[Segment, ...]
    first_row: int
    rows: int
    chunk: int
    dtype: Any
    axes: tuple[str, ...] = ()
    total_rows: int = 0

    def pad(self, x: jax.Array, workers: int) -> jax.Array:
        """Fills ``[rows, ...]`` with zeros to the ``workers * chunk`` rows that travel."""
        short = workers * self.chunk - self.rows
        return jnp.pad(x, [(0, short)] + [(0, 0)] * (x.ndim - 1)) if short else x


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Flat:
    """Arrays that lie as a bucket does and not as its leaves do, with what is needed to find them.

    Attributes:
      value: tree of arrays over the rows that a device owns, ``[words, 32]`` or ``[rows, 64]``.
      bucket: the bucket whose slice they are.
    """

    value: Any
    bucket: Bucket = dataclasses.field(metadata={"static": True})


class Cut(NamedTuple):
    """A slice of a bucket, as a device of a group holds it.

    Attributes:
      bucket: what is cut; each device holds ``chunk`` rows of it.
      filled: ``int32[chunk]``, how many elements of each row here are no padding.
    """

    bucket: Bucket
    filled: jax.Array


def varying_axes(x: jax.Array) -> frozenset:
    """The mesh axes over which the type of ``x`` varies; none outside ``shard_map``."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def buckets(
    leaves: Sequence[jax.Array],
    workers: int,
    rows_per_step: int = 1,
    limit: int | None = None,
    axes: Sequence[frozenset] | None = None,
) -> tuple[Bucket, ...]:
    """Plans the buffers for a list of leaves.

    Args:
      leaves: arrays or anything with ``shape``, ``size`` and a type; empty leaves take no row.
      workers: how many workers share the ownership of each bucket.
      rows_per_step: rows that share a quantisation step; leaves and chunks are padded to it.
      limit: elements after which a new bucket begins (at the next leaf), or None for no limit.
      axes: mesh axes over which each leaf varies; None reads them off the types.

    Returns:
      The buckets, in an order that depends only on the tree and the types.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax import layout
      >>> bucket, = layout.buckets([jnp.zeros(65), jnp.zeros((2, 32))], workers=2)
      >>> [(s.first_row, s.rows) for s in bucket.segments], bucket.chunk
      ([(0, 2), (2, 1)], 2)
    """
    axes = [varying_axes(leaf) for leaf in leaves] if axes is None else axes
    names = [tuple(sorted(map(str, over))) for over in axes]
    open_groups: dict[tuple[str, ...], list[list[int]]] = {}
    filled: dict[tuple[str, ...], int] = {}
    for index, leaf in enumerate(leaves):
        if leaf.size == 0:
            continue
        over = names[index]
        groups = open_groups.setdefault(over, [[]])
        if groups[-1] and limit is not None and filled[over] + leaf.size > limit:
            groups.append([])
        filled[over] = (filled.get(over, 0) if groups[-1] else 0) + leaf.size
        groups[-1].append(index)
    placed: list[Bucket] = []
    before = 0
    for over in sorted(open_groups):
        for group in open_groups[over]:
            bucket = _place([(i, leaves[i]) for i in group], workers, rows_per_step)
            placed.append(bucket._replace(first_row=before, axes=over))
            before += workers * bucket.chunk
    return tuple(bucket._replace(total_rows=before) for bucket in placed)


def _place(members: list[tuple[int, jax.Array]], workers: int, rows_per_step: int) -> Bucket:
    segments, first = [], 0
    for index, leaf in members:
        rows = _round_up(-(-leaf.size // ROW), rows_per_step)
        segments.append(Segment(index, tuple(leaf.shape), leaf.size, first, rows))
        first += rows
    chunk = _round_up(-(-first // workers), rows_per_step)
    dtype = jnp.result_type(*(leaf.dtype for _, leaf in members))
    return Bucket(tuple(segments), 0, first, chunk, dtype)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def to_rows(x: jax.Array, segment: Segment) -> jax.Array:
    """A leaf as ``float32[rows, 64]``, zeros behind its end."""
    flat = x.reshape(-1).astype(jnp.float32)
    pad = segment.rows * ROW - segment.size
    return (jnp.pad(flat, (0, pad)) if pad else flat).reshape(segment.rows, ROW)


def from_rows(rows: jax.Array, segment: Segment) -> jax.Array:
    """Undoes ``to_rows``: ``[rows, 64]`` to the leaf's own shape."""
    return rows.reshape(-1)[: segment.size].reshape(segment.shape)


def join(leaves: Sequence[jax.Array], bucket: Bucket, parts: int) -> jax.Array:
    """All leaves of a bucket as ``float32[parts * chunk, 64]``, zeros in the padding."""
    return bucket.pad(jnp.concatenate([to_rows(leaves[s.leaf], s) for s in bucket.segments]), parts)


def filled(bucket: Bucket, index: jax.Array) -> jax.Array:
    """``int32[chunk]``: how many elements of each row in a slice of a bucket are no padding.

    Args:
      bucket: what is cut into slices of ``chunk`` rows.
      index: ``int32[]``, which slice.
    """
    first = index.astype(jnp.int32) * bucket.chunk
    row = first + jnp.arange(bucket.chunk, dtype=jnp.int32)
    ends = [short for segment in bucket.segments for short in short_rows(segment)]
    short = np.array(ends, np.int32).reshape(-1, 2)
    at = jnp.asarray(short[:, 0]) - first
    # Rows of other slices fall out of range; a negative index would count from the end.
    at = jnp.where(at < 0, bucket.chunk, at)
    counts = jnp.where(row < bucket.rows, ROW, 0).astype(jnp.int32)
    return counts.at[at].add(-short[:, 1], mode="drop")


def short_rows(segment: Segment) -> list[tuple[int, int]]:
    """The rows of a segment's bucket that end in padding, with how many elements of it they hold."""
    ends = range(segment.size // ROW, segment.rows)
    return [(segment.first_row + n, min(ROW, (n + 1) * ROW - segment.size)) for n in ends]


class Holder(enum.Enum):
    """Who holds a value of its own for a field of a state.

    A state class says it by a static method ``holders() -> dict[field, Holder]``. Fields that it does
    not name are states with ``holders`` of their own, or arrays whose sharding says it.
    """

    ALL = "all"  # one value, the same everywhere
    WORKER = "worker"  # each worker its own
    FEEDBACK = "feedback"  # each worker its own error; their mean over the workers must be kept
    OWNER = "owner"  # the owner of each slice of a bucket its own
    MEASURED = "measured"  # one value, the same everywhere, which the next measurement replaces
