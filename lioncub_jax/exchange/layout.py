"""Buckets: leaves as rows of 128 elements, and back.

| from | to | and back |
|---|---|---|
| leaves | the array of a piece | `join_piece`, `split_piece` |
| the array of a piece | its rows ``[rows, 128]`` | `piece_to_rows`; `rows_to_leaf` of a large one |
| leaves | the rows of a whole bucket | `BucketLayout.join`, `BucketLayout.split` |

Leaves are cut into rows of 128 elements, the last one padded. The rows of many leaves are one *bucket*,
so that a step costs two collectives for each bucket, however many leaves there are. On a TPU a leaf of
whole tiles of 8 x 128 elements has its rows in the order of the tiles, as it lies in memory there. A large
leaf takes whole blocks and is packed alone; all small ones are joined in one array and packed together.
Leaves that vary over different mesh axes may not share an array, so there is a bucket for each set of mesh
axes. ``bucket_size`` splits buckets further, and then a worker abstains from each bucket separately.
"""

import dataclasses
import math
import zlib
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lioncub_jax.exchange import xla
from lioncub_jax.exchange.bits import BLOCK, ROW, common_dtype, divide_up, round_up, whole_rows
from lioncub_jax.mesh.specs import StateSpecs, flax_in_use

# Leaves of at most so many rows are joined: a copy of little, one kernel for all of them, and no padding to
# blocks. Of more, on a CPU, the copies of them all take several times as long as kernels of their own.
SMALL = 16 * BLOCK
SUBLANES = 8  # rows of a TPU's tile, which are 128 elements long


class Segment(NamedTuple):
    """The rows of one leaf.

    Attributes:
      leaf: index of the leaf in the flattened tree.
      shape: its shape.
      size: its number of elements, at least 1.
      first_row: where its rows begin in the bucket.
      rows: how many there are, padding included.
      tiles: whether they lie in the order of tiles of 8 x 128 elements, and not in that of the leaf.
    """

    leaf: int
    shape: tuple[int, ...]
    size: int
    first_row: int
    rows: int
    tiles: bool = False


class Piece(NamedTuple):
    """Rows that are packed together: one large leaf, or all small ones.

    Attributes:
      segments: its leaves.
      first_row: where it begins in the bucket.
      rows: how many rows, what pads it to whole blocks or chunks included.
      starts: where each leaf's rows begin in it; ``uint32[]`` at run time, see `pieces`.
    """

    segments: tuple[Segment, ...]
    first_row: int
    rows: int
    starts: Sequence[Any]

    @property
    def joined(self) -> bool:
        """True for several leaves, joined; else its array is the leaf itself."""
        return len(self.segments) > 1

    @property
    def kind(self) -> "Piece":
        """A large leaf's without its place: the same for all of one shape."""
        only = self.segments[0]._replace(leaf=0, first_row=0)
        return self._replace(segments=(only,), first_row=0, starts=())

    @property
    def idle(self) -> int:
        """Rows behind its leaves."""
        return self.rows - sum(s.rows for s in self.segments)


class BucketLayout(NamedTuple):
    """Leaves that travel together.

    Attributes:
      pieces: what is packed by itself, in the order of the rows, which may end before the last chunk
        does: each large leaf, then all small ones.
      large: whether any leaf is large.
      first_row: rows in the buckets before this one.
      rows_per_chunk: rows of a chunk; whole blocks, and if no leaf is large a short block, see `bits`.
      num_chunks: chunks of equal size, one for each worker; or of a bucket that a group shares one for each
        device, called the device's part.
      dtype: of the leaves, the widest if they differ.
      axes: mesh axes over which the leaves vary, by name.
      total_rows: rows of all buckets, padding included; the offset between two shards.
    """

    pieces: tuple[Piece, ...]
    large: bool
    first_row: int
    rows_per_chunk: int
    num_chunks: int
    dtype: np.dtype[Any]
    axes: tuple[str, ...]
    total_rows: int = 0

    @property
    def rows(self) -> int:
        """Rows that travel, padding included."""
        return self.num_chunks * self.rows_per_chunk

    @property
    def segments(self) -> list[Segment]:
        """Places of the leaves, in the order of the rows."""
        return [s for piece in self.pieces for s in piece.segments]

    @property
    def packed_chunks(self) -> int:
        """The number of equal runs of rows in which a piece is packed."""
        # Chunks of whole blocks begin with a block, wherever pieces begin.
        return 1 if self.large else self.num_chunks

    def join(self, leaves: Any, dtype: Any = jnp.float32) -> jax.Array:
        """All of its leaves as ``[rows, 128]`` of a dtype, zeros in the padding."""
        rows = []
        for piece in self.pieces:
            rows.append(piece_to_rows(join_piece(leaves, piece).astype(dtype), piece))
        return pad_rows(jnp.concatenate(rows), self.rows)

    def split(self, rows: jax.Array, num_steps: jax.Array | None = None) -> dict[int, jax.Array]:
        """Undoes `join`: each leaf by its index; in a step with ``num_steps``, see `pieces`."""
        leaves: dict[int, jax.Array] = {}
        for piece in self.pieces if num_steps is None else pieces(self, num_steps):
            leaves |= split_piece(rows[piece.first_row :][: piece.rows], piece)
        return leaves

    def part_sizes(self, device: jax.Array, padding_counts: bool) -> jax.Array | None:
        """`row_sizes` of the part of one device of a group: ``int32[rows]``."""
        sizes = row_sizes(self, (), padding_counts)
        if sizes is None:
            return None
        return lax.dynamic_slice_in_dim(sizes, device * self.rows_per_chunk, self.rows_per_chunk)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Flat:
    """Arrays that lie as a bucket does and not as its leaves do, with what is needed to find them.

    Attributes:
      value: tree of arrays over rows, ``[rows, 128]``: a chunk, or a part; all rows of the bucket if every
        worker decides on all.
      bucket: the bucket whose rows they are.
    """

    value: Any
    bucket: Any = dataclasses.field(metadata={"static": True})


def register_with_flax() -> None:
    """Lets ``flax.serialization`` write and read what a state has of ours, where flax is in use.

    Called where the first state is made, as an import of flax takes longer than that of this library.
    """
    if not flax_in_use():
        return
    from flax import serialization

    def to_state_dict(flat: Flat) -> dict[str, Any]:
        return {"value": serialization.to_state_dict(flat.value), "order": _checksum(flat.bucket)}

    def from_state_dict(flat: Flat, state: dict[str, Any]) -> Flat:
        if state["order"] != _checksum(flat.bucket):
            raise ValueError(
                _OTHER_ORDER.format("saved chunks", "the state that they are read into")
            )
        return dataclasses.replace(
            flat, value=serialization.from_state_dict(flat.value, state["value"])
        )

    register = serialization.register_serialization_state
    register(Flat, to_state_dict, from_state_dict, override=True)
    register(StateSpecs, lambda specs: {}, lambda specs, state: specs, override=True)


def _checksum(bucket: BucketLayout) -> int:
    """A number of the order of a bucket's elements."""
    return zlib.crc32(repr((bucket.pieces, bucket.num_chunks)).encode())


_OTHER_ORDER = (
    "{} are others or lie in another order than those of {}: the state was made on another platform, for "
    "other workers, by another optimizer or for other parameters; make it anew, or restore it from "
    "lioncub_jax.Checkpoints, which know its order"
)


def check_order(flats: Sequence[Flat], buckets: Sequence[Any]) -> None:
    """Raises ``ValueError`` if a state was built for other buckets than this step has."""
    if [x.bucket.pieces for x in flats] != [bucket.pieces for bucket in buckets]:
        given = f"chunks of the state, of {len(flats)} buckets,"
        raise ValueError(_OTHER_ORDER.format(given, f"this step, of {len(buckets)}"))


def buckets(
    leaves: Sequence[Any],
    num_chunks: int,
    limit: int | None = None,
    axes: Sequence[Collection[str]] = (),
) -> tuple[BucketLayout, ...]:
    """Plans the buckets of a list of leaves.

    Args:
      leaves: arrays or anything with ``shape`` and ``dtype``; empty leaves take no row.
      num_chunks: chunks of each bucket, see `BucketLayout`.
      limit: elements after which a new bucket begins (at the next leaf), or None for no limit.
      axes: for each leaf the mesh axes over which it varies; none by default.

    Returns:
      The buckets, in an order that depends only on the tree and the axes.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax.exchange import layout
      >>> bucket, = layout.buckets([jnp.zeros(129), jnp.zeros((2, 32))], num_chunks=2)
      >>> [(s.first_row, s.rows) for s in bucket.segments], bucket.rows_per_chunk
      ([(0, 2), (2, 1)], 2)
    """
    most = math.inf if limit is None else limit
    groups: dict[tuple[str, ...], list[list[int]]] = {}
    filled = dict[tuple[str, ...], int]()  # elements in the last bucket over these axes
    for index, leaf in enumerate(leaves):
        size = math.prod(leaf.shape)
        if size == 0:
            continue
        over = tuple(sorted(axes[index])) if axes else ()
        own = groups.setdefault(over, [])
        if not own or filled[over] + size > most:
            own.append([])
            filled[over] = 0
        own[-1].append(index)
        filled[over] += size
    placed, first = list[BucketLayout](), 0
    for over in sorted(groups):
        for members in groups[over]:
            placed.append(_place(leaves, members, num_chunks, over, first))
            first += placed[-1].rows
    return tuple([bucket._replace(total_rows=first) for bucket in placed])


def _place(
    leaves: Sequence[jax.Array],
    members: list[int],
    num_chunks: int,
    over: tuple[str, ...],
    begin: int,
) -> BucketLayout:
    """The bucket of some leaves, ``begin`` rows behind the first."""
    sizes = {index: math.prod(leaves[index].shape) for index in members}
    segments, first, for_tpu = list[Segment](), 0, xla.for_tpu()
    for index in sorted(members, key=lambda index: sizes[index] <= SMALL * ROW):
        shape, size = tuple(leaves[index].shape), sizes[index]
        rows = divide_up(size, ROW)
        rows = round_up(rows, BLOCK) if rows > SMALL else rows
        tiles = for_tpu and made_of_tiles(shape)
        segments.append(Segment(index, shape, size, first_row=first, rows=rows, tiles=tiles))
        first += rows
    pieces = [Piece((s,), s.first_row, s.rows, (0,)) for s in segments if s.rows > SMALL]
    large, small = bool(pieces), segments[len(pieces) :]
    chunk = divide_up(first, num_chunks)
    chunk = round_up(chunk, BLOCK) if large else whole_rows(chunk)
    if small:
        row = small[0].first_row
        rows = round_up(first - row, BLOCK) if large else num_chunks * chunk
        pieces.append(Piece(tuple(small), row, rows, tuple(s.first_row - row for s in small)))
    dtype = common_dtype(*{leaves[index].dtype for index in members})
    return BucketLayout(
        tuple(pieces),
        large,
        begin,
        rows_per_chunk=chunk,
        num_chunks=num_chunks,
        dtype=dtype,
        axes=over,
    )


def pieces(bucket: BucketLayout, num_steps: jax.Array) -> list[Piece]:
    """The pieces of a bucket; the start of a small leaf is known at run time only, see `xla`."""
    all_pieces = []
    for piece in bucket.pieces:
        if piece.joined:
            piece = piece._replace(starts=xla.runtime_constants(piece.starts, num_steps))
        all_pieces.append(piece)
    return all_pieces


def join_piece(leaves: Sequence[Any], piece: Piece) -> Any:
    """The array of a piece: a leaf in its own shape, or the rows of all its leaves.

    Small leaves are worth no kernel of their own: what is computed of them is computed of all at once.

    Args:
      leaves: arrays of any floating dtype, or None for each.
      piece: the places of some of these leaves.

    Returns:
      A leaf as it is; joined ones at least float32 ``[rows, 128]``, zeros in the padding; or None.
    """
    own = [leaves[s.leaf] for s in piece.segments]
    if own[0] is None or not piece.joined:
        return own[0]
    wide = common_dtype(jnp.float32, *own)
    rows = []
    for x, s in zip(own, piece.segments, strict=True):
        rows.append(_leaf_to_rows(x.astype(wide), s, s.rows))
    if piece.idle:  # a pad of the whole would copy it
        rows.append(jnp.zeros((piece.idle, ROW), wide))
    return jnp.concatenate(rows)


def piece_to_rows(x: jax.Array, piece: Piece) -> jax.Array:
    """An array of `join_piece` as ``[rows, 128]`` of its dtype, zeros in the padding."""
    return x if piece.joined else _leaf_to_rows(x, piece.segments[0], piece.rows)


def _leaf_to_rows(x: jax.Array, segment: Segment, rows: int) -> jax.Array:
    # In as few operations as can be: with hundreds of leaves it is they that a compiler works at.
    if segment.tiles:
        x = x.reshape(-1, SUBLANES, segment.shape[-1] // ROW, ROW).swapaxes(1, 2)
    if x.size < rows * ROW:
        x = pad_rows(x.reshape(-1), rows * ROW)
    return x.reshape(rows, ROW)


def made_of_tiles(shape: tuple[int, ...]) -> bool:
    """True for a leaf of whole tiles of 8 x 128 elements, and more than one column of them.

    A TPU keeps it so, and would lay it out anew twice a step if its rows had any other order: a whole step
    of the GPT of 124M parameters with `owner_lion`, compiled for v5e, accesses 738 bytes a parameter in
    place of 846, and allocates 23.6 in place of 27.0. A CPU would take twice the time with theirs.

    Example:
      >>> from lioncub_jax.exchange import layout
      >>> [layout.made_of_tiles(shape) for shape in ((3, 16, 256), (12, 256), (16, 128))]
      [True, False, False]
    """
    # In one column the two orders are the same.
    return len(shape) > 1 and shape[-1] > ROW and not (shape[-1] % ROW or shape[-2] % SUBLANES)


def lies_in_rows(piece: Piece) -> bool:
    """True where a TPU has the rows of a piece without a copy: whole tiles, and no padding."""
    if piece.joined:
        return True
    [s] = piece.segments
    whole = s.tiles or len(s.shape) < 2 or s.shape[-1] == ROW
    return whole and s.size == piece.rows * ROW


def split_piece(x: jax.Array, piece: Piece) -> dict[int, jax.Array]:
    """Undoes `join_piece`: each leaf of a piece in its own shape, by its index."""
    if not piece.joined:
        return {piece.segments[0].leaf: rows_to_leaf(x, piece.segments[0])}
    leaves, first_column = {}, jnp.zeros((), jnp.uint32)
    rows = xla.materialized(x.reshape(-1, ROW))
    for start, s in zip(piece.starts, piece.segments, strict=True):
        corner = jnp.asarray(start, jnp.uint32), first_column
        leaves[s.leaf] = rows_to_leaf(lax.dynamic_slice(rows, corner, (s.rows, ROW)), s)
    return leaves


def rows_to_leaf(x: jax.Array, segment: Segment) -> jax.Array:
    """A leaf in its own shape: as it is, or of its rows ``[rows, 128]``, which may end in padding."""
    shape = segment.shape
    if x.shape == shape:
        return x
    if x.size > segment.size:
        x = lax.slice_in_dim(x.reshape(-1), 0, segment.size)
    if segment.tiles:
        x = x.reshape(-1, shape[-1] // ROW, SUBLANES, ROW).swapaxes(1, 2)
    return x.reshape(shape)


def pad_rows(x: jax.Array, rows: int) -> jax.Array:
    """Zeros behind ``x``, up to so many rows."""
    short = rows - x.shape[0]
    if not short:
        return x
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, short, 0)] + [(0, 0, 0)] * (x.ndim - 1))


def real_elements(sizes: jax.Array) -> jax.Array:
    """``bool[rows, 128]``: elements that are no padding, of rows of these sizes."""
    return jnp.arange(ROW, dtype=jnp.int32)[None] < sizes[:, None]


def zero_padding(rows: jax.Array, sizes: jax.Array | None) -> jax.Array:
    """``[rows, 128]`` with zeros behind ``sizes[row]`` elements of each row; None for no padding."""
    return rows if sizes is None else jnp.where(real_elements(sizes), rows, 0)


def row_sizes(
    bucket: BucketLayout, own: Sequence[jax.Array | None], padding_counts: bool
) -> jax.Array | None:
    """Elements of each row of a bucket that are no padding.

    Args:
      bucket: the bucket.
      own: for each leaf ``int32[rows]``, the sizes of its rows, if the leaf is a device's part of a group's
        bucket; else None; () for none.
      padding_counts: True where rows of nothing but padding are voted on, or have an owner's state, and
        must not be taken for ties.

    Returns:
      ``int32[rows]``; None where no padding can be mistaken.
    """
    segments, sizes = bucket.segments, []
    given = {leaf: x for leaf, x in enumerate(own) if x is not None}
    of_group = any(s.leaf in given for s in segments)
    ragged = any(s.size % ROW for s in segments)
    empty = sum(s.size for s in segments) < bucket.rows * ROW
    if not (of_group or ragged or (padding_counts and empty)):
        return None
    for piece in bucket.pieces:
        if not of_group:
            sizes.append(_filled(piece))
            continue
        each = []
        for s in piece.segments:
            full = jnp.full(s.size // ROW, ROW, jnp.int32)
            each.append(pad_rows(given.get(s.leaf, full), s.rows))
        sizes.append(pad_rows(jnp.concatenate(each), piece.rows))
    return pad_rows(jnp.concatenate(sizes), bucket.rows)


def _filled(piece: Piece) -> jax.Array:
    """``int32[rows]``: elements of each row that are no padding."""
    row = jnp.arange(piece.rows, dtype=jnp.int32)
    if not piece.joined:  # large, perhaps: computed where it is used, and never kept
        full, rest = divmod(piece.segments[0].size, ROW)
        if full == piece.rows:
            return jnp.full(full, ROW, jnp.int32)
        return jnp.where(row < full, ROW, jnp.where(row == full, rest, 0)).astype(jnp.int32)
    short = [s for s in piece.segments if s.size % ROW]
    last = np.array([s.first_row + s.rows - 1 - piece.first_row for s in short], np.int32)
    missing = np.array([-s.size % ROW for s in short], np.int32)
    sizes = jnp.where(row < piece.rows - piece.idle, ROW, 0).astype(jnp.int32)
    return sizes.at[last].add(-missing)
