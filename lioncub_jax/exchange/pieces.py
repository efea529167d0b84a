"""Parts of a step: leaves to rows and codes, and replies to leaves. `step` has the order in which they run.

A *bucket* holds the leaves that travel together, in rows of 128 elements. A *piece* of it is encoded by
itself: a large leaf in its own shape, or the rows of all small leaves, joined. Much here is for XLA's sake,
see `xla`; none of it changes a value.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lioncub_jax.exchange import bits, dealing, kernels, layout, quantize, rotation, xla
from lioncub_jax.exchange.bits import BLOCK, ROW, WORDS_PER_ROW
from lioncub_jax.exchange.dealing import Deal
from lioncub_jax.exchange.decision import DecideContext, Decision, Place
from lioncub_jax.exchange.layout import BucketLayout, Piece
from lioncub_jax.exchange.means import at_least_float32
from lioncub_jax.exchange.message import Format, Message, Reply
from lioncub_jax.exchange.momentum import MomentumRule
from lioncub_jax.exchange.quantize import Codec, EncodeContext
from lioncub_jax.mesh import axes
from lioncub_jax.mesh.axes import Axes


class BucketPlan(NamedTuple):
    """A bucket of this worker, in this step.

    Attributes:
      layout: places of its leaves; static.
      pieces: those of ``layout``, with starts that are known at run time only, see `layout.pieces`.
      format: contents and sizes of messages and replies.
      row_sizes: ``int32[rows]``, elements of each row that are no padding; None where all are, or where
        padding cannot count.
      shard: ``uint32[]``, index of the shard of the leaves on this device; 0 for whole leaves.
      num_shards: shards of each leaf.
      deal: of its rows, if whole matrices were dealt; else None.
    """

    layout: BucketLayout
    pieces: Sequence[Piece]
    format: Format
    row_sizes: jax.Array | None
    shard: jax.Array | int
    num_shards: int
    deal: Deal | None = None


class WorkerPlan(NamedTuple):
    """The index of this device's worker, and the places of its leaves in buckets.

    Attributes:
      axis: mesh axes of the workers.
      worker: ``int32[]``, index of the worker; varies over the workers.
      num_workers: W.
      num_steps: ``int32[]``, steps taken before.
      buckets: in which its leaves travel.
      group_buckets: in a group of devices, the buckets of whole leaves that the group shares; this device's
        part of each is a leaf of ``buckets``. Likewise deals of whole matrices. () without either.
      row_sizes: for each part of a group bucket ``int32[rows]``, elements that are no padding; None for a
        leaf that is whole.
      abstains_per_bucket: the worker abstains only from buckets with a value that is not finite.
    """

    axis: Axes
    worker: jax.Array
    num_workers: int
    num_steps: jax.Array
    buckets: Sequence[BucketPlan]
    group_buckets: Sequence[BucketLayout | Deal]
    row_sizes: Sequence[jax.Array | None]
    abstains_per_bucket: bool


class WorkerState(NamedTuple):
    """State of a worker: for each leaf ``mu`` and ``e``, arrays or None."""

    mu: list[Any]
    error: list[Any]


class PieceInput(NamedTuple):
    """Arrays of a piece at this worker, in the shape of its leaf, or joined as ``[rows, 128]``.

    Attributes:
      piece: its rows.
      gradient: ``g``.
      momentum: ``mu``, or None.
      error: ``e``, or None.
      direction: ``c``.
      rows: ``c + e`` as ``float32[rows, 128]``.
    """

    piece: Piece
    gradient: jax.Array
    momentum: Any
    error: jax.Array | None
    direction: jax.Array
    rows: jax.Array


def plus_error(direction: jax.Array, error: jax.Array | None) -> jax.Array:
    """``c + e``."""
    if error is None:
        return direction
    return direction.astype(jnp.float32) + error.astype(jnp.float32)


# --- Interpolate and encode


def interpolate(
    rule: MomentumRule, piece: Piece, grads: Sequence[jax.Array], state: WorkerState
) -> PieceInput:
    """``c`` of a piece, of ``g`` and ``mu`` of all leaves; and ``c + e`` in rows."""
    g, mu, e = [layout.join_piece(x, piece) for x in (grads, state.mu, state.error)]
    c = rule.interpolate(g, mu)
    with jax.named_scope("lioncub.pack"):
        if kernels.for_tpu() and layout.lies_in_rows(piece):
            # Computed again, in rows: the kernel that packs then reads g, mu and e as they lie in memory.
            in_rows = []
            for x in (g, mu, e):
                in_rows.append(None if x is None else layout.piece_to_rows(x, piece))
            own_g, own_mu, own_e = xla.recomputed(in_rows)
            rows = plus_error(rule.interpolate(own_g, own_mu), own_e).astype(jnp.float32)
        else:
            rows = layout.piece_to_rows(plus_error(c, e).astype(jnp.float32), piece)
    return PieceInput(piece, g, mu, e, direction=c, rows=rows)


@jax.named_scope("lioncub.pack")
def encode(
    codec: Codec, plan: WorkerPlan, bucket: BucketPlan, inputs: Sequence[PieceInput]
) -> list[Message]:
    """``q = Q(c + e)`` of each piece of a bucket."""
    rows = [x.rows for x in inputs]
    contexts = encode_contexts(codec, plan, bucket, rows)
    return [codec.encode(x, context) for x, context in zip(rows, contexts, strict=True)]


def encode_contexts(
    codec: Codec, plan: WorkerPlan, bucket: BucketPlan, rows: Sequence[jax.Array]
) -> list[EncodeContext]:
    """Facts that the codec needs about each piece of a bucket, of values ``rows``."""
    pieces = bucket.pieces
    means: Sequence[jax.Array | None] = [None] * len(pieces)
    if codec.uses_leaf_mean:
        means = leaf_means(plan, bucket, rows)
    first_rows = [bucket.layout.first_row + piece.first_row for piece in pieces]
    first_words = xla.runtime_constants([x * WORDS_PER_ROW for x in first_rows], plan.num_steps)
    draw = bits.draw_signs(plan.num_steps, plan.worker, plan.num_workers)
    if plan.abstains_per_bucket:
        # XLA fuses kernels with a common operand, and the first bucket would wait for the last gradient. So
        # each bucket has its own copy.
        draw = bits.SignDraw(*[xla.delayed_by(x, rows[0][0, 0]) for x in draw])
    contexts, rounding = [], codec.rounding
    for k, piece in enumerate(pieces):
        sizes, first, size = bucket.row_sizes, piece.first_row, piece.rows
        first_word = first_words[k] + bucket.shard * bucket.layout.total_rows * WORDS_PER_ROW
        context = EncodeContext(
            packed_parts=bucket.layout.packed_parts,
            num_workers=plan.num_workers,
            num_steps=plan.num_steps,
            row_sizes=None if sizes is None else sizes[first:][:size],
            random_signs=bits.random_signs(first_word, size * WORDS_PER_ROW, draw),
            noise=None if rounding is None else noise(rounding.seed, plan, bucket, piece),
            leaf_mean=means[k],
        )
        contexts.append(context)
    return contexts


def noise(seed: int, plan: WorkerPlan, bucket: BucketPlan, piece: Piece) -> jax.Array:
    """``float32[rows, 128]`` in [0, 1), added before rounding down; by seed, step, worker and leaf."""
    key = jax.random.key(seed)
    for part in (plan.num_steps, plan.worker):
        key = jax.random.fold_in(key, part)
    drawn = []
    for s in piece.segments:
        own = jax.random.fold_in(key, s.leaf)
        if bucket.num_shards > 1:
            own = jax.random.fold_in(own, bucket.shard)
        drawn.append(jax.random.uniform(own, (s.rows, ROW), jnp.float32))
    return layout.pad_rows(jnp.concatenate(drawn), piece.rows)


def leaf_means(plan: WorkerPlan, bucket: BucketPlan, rows: Sequence[jax.Array]) -> list[jax.Array]:
    """Mean magnitude of the leaf of each row, all shards together: ``float32[rows]`` for each piece."""
    sums = []
    for x, piece in zip(rows, bucket.pieces, strict=True):
        sums.append(sums_of_leaves(x, piece))
    # All leaves in one sum, and none at all where nothing is cut.
    totals = axes.sum_over_shards(jnp.concatenate(sums), plan.axis)
    by_piece, first = [], 0
    for piece in bucket.pieces:
        own = totals[first : first + len(piece.segments)]
        first += len(piece.segments)
        sizes = [float(s.size) * bucket.num_shards for s in piece.segments]
        low, high = own[:, 0] / np.array(sizes, np.float32), own[:, 1] / np.array(sizes, np.float32)
        means = jnp.where(jnp.isfinite(low), low, high * 2.0**64)
        by_row = [jnp.full(s.rows, means[i]) for i, s in enumerate(piece.segments)]
        by_piece.append(jnp.pad(jnp.concatenate(by_row), (0, piece.idle)))
    return by_piece


def sums_of_leaves(x: jax.Array, piece: Piece) -> jax.Array:
    """``float32[leaves, 2]``: sums of magnitudes, plain and times 2**-64, which do not overflow."""
    magnitude = jnp.abs(x)
    by_row = xla.reduced([operator.add] * 2, [magnitude, magnitude * 2.0**-64], 1)
    each_row, sums = jnp.stack(by_row, -1), []
    for s in piece.segments:
        first = s.first_row - piece.first_row
        sums.append(jnp.sum(each_row[first : first + s.rows], axis=0))
    return jnp.stack(sums)


def participation(
    plan: WorkerPlan, encoded: Sequence[Sequence[Message]], abstain: jax.Array | None
) -> list[jax.Array]:
    """``bool[]`` for each bucket: all values are finite on all devices of the worker, and not ``abstain``.

    One flag for all buckets; or one for each, since a common flag would make the first bucket wait for the
    last gradient.
    """

    def participates(messages: Sequence[Message]) -> jax.Array:
        abstains = jnp.zeros((), bool) if abstain is None else abstain
        if messages:
            # Behind the codes, so that momentum can be overwritten in place.
            flags = [*[x.participates for x in messages], ~abstains]
            abstains = ~xla.all_delayed_by(flags, [x.planes[0][0] for x in messages])
        return ~axes.any_over_shards(abstains, plan.axis)

    if plan.abstains_per_bucket:
        return [participates(messages) for messages in encoded]
    return [participates([x for messages in encoded for x in messages])] * len(encoded)


# --- Decide


def decide_context(
    codec: Codec, plan: WorkerPlan, bucket: BucketPlan, sharded: bool
) -> DecideContext:
    """The rows of a bucket on which this worker decides: its chunk if ``sharded``, else all."""
    places, sizes = bucket.layout, bucket.row_sizes
    num_chunks, first = plan.num_workers, jnp.uint32(0)
    if sharded:
        num_chunks, first = 1, plan.worker.astype(jnp.uint32) * places.rows_per_chunk
    if sizes is not None:
        sizes = lax.dynamic_slice_in_dim(sizes, first, num_chunks * places.rows_per_chunk)
    row = places.first_row + first
    row += bucket.shard * places.total_rows
    words = places.rows_per_chunk * WORDS_PER_ROW
    tie_bits = bits.tie_bits(row * WORDS_PER_ROW, num_chunks * words, plan.num_steps)
    return DecideContext(
        codec=codec,
        format=bucket.format,
        num_chunks=num_chunks,
        row_sizes=sizes,
        tie_bits=tie_bits.reshape(num_chunks, words),
        num_steps=plan.num_steps,
        place=Place(plan.worker, bucket.deal),
    )


# --- Decode


@jax.named_scope("lioncub.unpack")
def decode(
    decision: Decision, plan: WorkerPlan, bucket: BucketPlan, reply: Reply
) -> list[jax.Array]:
    """``u`` of each piece, ``[devices, rows, 128]``."""
    fmt, num_rows = bucket.format, bucket.layout.rows
    devices = len(reply.planes[0]) // fmt.num_workers
    if not bucket.layout.large:  # one piece
        u = decision.decode(reply.planes, reply.row_data, fmt.num_rows, fmt)
        return [u.reshape(devices, -1, ROW)]
    # Each piece by itself: large leaves of one shape share a kernel.
    first_blocks = [piece.first_row // BLOCK for piece in bucket.pieces]
    starts = xla.runtime_constants(first_blocks, plan.num_steps)
    data = reply.row_data
    by_block = (devices, num_rows // BLOCK, -1)
    updates = []
    for start, piece in zip(starts, bucket.pieces, strict=True):
        size = piece.rows // BLOCK
        planes = [slice_blocks(x.reshape(by_block), start, size) for x in reply.planes]
        row_data = None if data is None else slice_blocks(data.reshape(by_block), start, size)
        updates.append(decision.decode(planes, row_data, piece.rows, fmt))
    return updates


def slice_blocks(words: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """``[devices, words]`` of ``size`` blocks from ``start`` on, of ``[devices, blocks, words]``."""
    return lax.dynamic_slice_in_dim(words, start, size, 1).reshape(len(words), -1)


def split_update(plan: WorkerPlan, piece: Piece, u: jax.Array) -> dict[int, jax.Array]:
    """``u`` of each leaf of a piece by index; in a group of parts, ``[devices, rows, 128]``."""
    if not plan.group_buckets:
        # Float32, as it is used: a conversion for each leaf is work for a compiler.
        return layout.split_piece(u.astype(jnp.float32), piece)
    parts = {}
    for s in piece.segments:
        first = s.first_row - piece.first_row
        parts[s.leaf] = u[:, first : first + plan.group_buckets[s.leaf].rows_per_chunk]
    return parts


def leaves_of_group(plan: WorkerPlan, parts: dict[int, jax.Array]) -> dict[int, jax.Array]:
    """Leaves by index, from all parts of each group bucket, ``[devices, rows, 128]``."""
    leaves: dict[int, jax.Array] = {}
    for k, bucket in enumerate(plan.group_buckets):
        rows = parts[k].reshape(-1, ROW)
        if isinstance(bucket, Deal):
            leaves |= dealing.split(rows, bucket)
        else:
            leaves |= layout.split_bucket(rows, layout.pieces(bucket, plan.num_steps))
    return leaves


# --- Remember


def next_momentum(
    rule: MomentumRule, x: PieceInput, u: jax.Array, error: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """``mu = b2 mu + (1 - b2) g`` of a piece; after a sync in codes ``mu = u + e``."""
    if not rule.synchronizes:
        return rule.update(x.gradient, x.momentum)
    exact = at_least_float32(layout.piece_to_rows(plus_error(x.direction, x.error), x.piece))
    return layout.rows_to_piece(error(exact) + u.reshape(exact.shape), x.piece)


def next_error(
    codec: Codec, plan: WorkerPlan, bucket: BucketPlan, message: Message, exact: jax.Array
) -> jax.Array:
    """``e = keep (c + e - dequantize(q))``, of the rows ``c + e`` of a piece. Padding may hold anything."""
    assert codec.decode is not None and message.scales is not None
    scales = message.scales.reshape(bucket.layout.packed_parts, -1)
    planes = [plane.reshape(len(scales), -1) for plane in message.planes]
    rows = codec.decode(bits.unpack(planes, scales.shape[1]), scales)
    if codec.rotates:
        rows = rotation.undone(rows, plan.num_steps)
    error = exact - rows.reshape(exact.shape).astype(exact.dtype)
    return error if codec.keep == 1 else codec.keep * error


def store_error(
    x: PieceInput, codec: Codec, plan: WorkerPlan, bucket: BucketPlan, message: Message,
    leaves: Sequence[jax.Array], participates: jax.Array,
) -> dict[int, jax.Array]:  # fmt: skip
    """The new error of each leaf of a piece, as `store`."""
    assert x.error is not None and message.scales is not None
    if x.piece.joined:
        exact = at_least_float32(plus_error(x.direction, x.error))
        error = next_error(codec, plan, bucket, message, exact)
        return store(plan, x.piece, x.error, error, leaves, participates)
    [s] = x.piece.segments
    error, sizes = layout.piece_to_rows(x.error, x.piece), plan.row_sizes[s.leaf]
    if sizes is not None:  # rows that fill the chunks of all workers have none
        sizes = layout.pad_rows(sizes, len(error))

    def new(error: jax.Array, direction: jax.Array, message: Message) -> jax.Array:
        exact = plus_error(layout.piece_to_rows(direction, x.piece), error)
        made = next_error(codec, plan, bucket, message, at_least_float32(exact))
        return quantize.saturated(layout.zero_padding(made, sizes), error.dtype)

    def old(error: jax.Array, direction: jax.Array, message: Message) -> jax.Array:
        return error

    message = message._replace(scales=message.scales.astype(jnp.float32))
    error = xla.chosen(participates, new, old, error, x.direction, message)
    return {s.leaf: layout.rows_to_piece(error, x.piece)}


def store(
    plan: WorkerPlan, piece: Piece, old: jax.Array, new: jax.Array, leaves: Sequence[jax.Array],
    participates: jax.Array,
) -> dict[int, jax.Array]:  # fmt: skip
    """The new momentum (or error) of each leaf of a piece, in its own dtype, by index.

    It is the old one if the worker abstains. ``old`` and ``new`` are arrays of the piece, ``leaves`` are
    those of all leaves before the step.
    """
    dtypes = {leaves[s.leaf].dtype for s in piece.segments}
    if len(dtypes) == 1:  # one cast for the whole piece
        dtype = dtypes.pop()
        new, old = quantize.saturated(new, dtype), old.astype(dtype)
    updated = layout.split_piece(jnp.where(participates, new, old), piece)
    for i, x in updated.items():
        x = layout.zero_padding(x, plan.row_sizes[i])
        updated[i] = quantize.saturated(x, leaves[i].dtype)
    return updated
