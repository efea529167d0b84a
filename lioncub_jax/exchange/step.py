"""One worker's step. Read this file first. It runs inside ``shard_map``, once on each device.

Worker i of W holds a gradient ``g_i``, a momentum ``mu_i`` and, with error feedback, the error ``e_i`` of
its earlier codes. Its leaves lie in rows of 128 elements, and the rows are cut into W *chunks*. Worker j is
the *owner* of chunk j, as of a shard of the optimizer's state in ZeRO-1. It may hold a state ``s_j`` and
the error ``f_j`` of its earlier replies. A *codec* maps values to *codes*, integers from 0 to max_code:
``Q`` is that of the messages, and ``R`` that of the replies. The functions called here follow below or are
in `wires`; *decide* is the decision's own. The last column has the file of each formula.

    interpolate  c_i = b1 mu_i + (1 - b1) g_i                worker i            momentum.py
    encode       q_i = Q(c_i + e_i)                                              quantize.py
    remember     e_i = c_i + e_i - dequantize(q_i)                               step.py
    collect      all-to-all: chunk j of q_i to owner j                           wires.py
    decide       u_j, s_j = decide(q_1, ..., q_W; s_j)       owner j             votes.py, decide.py
                 r_j = R(u_j + f_j)                                              votes.py, decide.py
                 f_j = u_j + f_j - dequantize(r_j)                               decide.py
    publish      all-gather of r_j                                               wires.py
    decode       u = dequantize(r_1, ..., r_W)               every worker        votes.py, decide.py
    remember     mu_i = b2 mu_i + (1 - b2) g_i               worker i            momentum.py

`lion_cub` counts votes, so it has no e_i, s_j and f_j. `owner_adamw` runs Adam at the owners, so there is
no mu_i, and c_i is g_i. `optimizers` says which components each method has.

Votes are signed codes ``v_i = 2 q_i - max_code``, without scales. `majority` replies with
``sign(sum_i v_i)`` in one bit: a tie is a fair bit, the same everywhere. `ternary` replies in two bits: a
tie is 0. `average` replies with the sum: ``u = sum_i v_i / (n max_code)`` of the n workers that vote on a
row. An optimizer ``tx`` at the owners: ``u_j, s_j = tx(mean_i dequantize(q_i); s_j)``, and R is
``decide.codes(2)`` by default. A later transform of the chain multiplies ``u`` by the negative learning
rate.

Arrays of a bucket with the two-phase wire: N rows, padding included, of which a chunk has m = N / W. The
column of votes holds for `majority`, that of values for replies of ``decide.codes(p)``. Dense values are
one plane of 64 or 128 words a row.

                 each plane                          row data of votes      row data of values
    message      uint32[4 N]                         uint32[N / 32]         scales bfloat16[N]
    is sent as   uint32[W, words]: of each chunk its planes, one word that says whether the worker takes
                 part, the row data, and padding to whole cache lines
    received     uint32[workers W, chunks 1, 4 m]    uint32[W, 1, m / 32]   scales float32[W, 1, m]
    reply        uint32[chunks 1, words 4 m]         uint32[1, m / 32]      uint32[1, m / 2]
    is sent as   uint32[words]: planes, ties, workers that took part, pairs of votes, row data, padding
    replies      uint32[chunks W, words 4 m]         uint32[W, m / 32]      uint32[W, m / 2]
    decoded      ``u`` of each piece, float32[devices 1, rows, 128], or int32 of `ternary`

Plane k has bit k of each code, and a word has the bits of 32 elements. The bit of a row is 1 where the
worker votes on it; in a reply where the row moves. Replies of `codes(p)` have half of each row's scale, two
bfloat16 in a word. With other wires every worker decides on all W chunks, and ``received`` may be a sum.

Leaves travel in *buckets*: one for each set of mesh axes over which leaves vary; ``bucket_size`` splits
them. What is computed of elements is computed of each *piece* of a bucket by itself: a large leaf, or all
small leaves joined. Rows and words are those of the whole bucket, since that is fewer kernels to compile. A
worker with a NaN or infinity in any leaf abstains: it casts no vote, and its mu_i and e_i stay. It abstains
from all buckets; with ``bucket_size`` only from those with such a value.

A worker may be sharded over inner mesh axes: each device takes this step with its shards of the leaves, and
`encode` and `participation` also communicate inside the worker, and so does `decide` of whole matrices. A
worker may be a group of devices. Each device has the group's mean gradient of one *part* of the parameters,
by a reduce-scatter. This part is its leaves here, and `publish` gathers the replies of the whole group. A
worker alone sends nothing to other workers: `single_worker_step` is its own.
"""

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from lioncub_jax.exchange import bits, layout, wires, xla
from lioncub_jax.exchange.bits import BLOCK, ROW, WORDS_PER_ROW, saturated
from lioncub_jax.exchange.layout import Piece
from lioncub_jax.exchange.plan import BucketPlan, Plan
from lioncub_jax.exchange.quantize import Codec, Context
from lioncub_jax.exchange.wires import (
    Coded,
    Message,
    Reply,
    addressed,
    collect,
    publish,
)
from lioncub_jax.mesh import axes


class PieceInput(NamedTuple):
    """Arrays of a piece at this worker, in the shape of its leaf, or joined as ``[rows, 128]``.

    Attributes:
      piece: its rows.
      gradient: ``g``.
      momentum: ``mu``, or None.
      error: ``e``, or None.
      direction: ``c``.
      values: ``c + e`` as ``float32[rows, 128]``.
    """

    piece: Piece
    gradient: jax.Array
    momentum: Any
    error: jax.Array | None
    direction: jax.Array
    values: jax.Array


class StepResult(NamedTuple):
    """Result of a step.

    Attributes:
      updates: ``u`` of each leaf by index, the same on every worker; in a group ``[devices, rows, 128]``,
        the parts of all of its devices. A leaf without elements has none.
      mu: the next one of each leaf, or None.
      error: likewise, ``e``.
      owner_states: for each bucket the next ``s`` and ``f`` of the rows on which this worker decides: of
        its chunk; of all rows if the wire is not ``sharded``. () for decisions without state. Counters
        have moved even if no worker participates: `transform.held_counters` undoes that, once the count of
        workers present is replicated, as counters are.
      replies: for each bucket what its owners say, of which the statistics are read.
    """

    updates: dict[int, jax.Array]
    mu: list[Any]
    error: list[Any]
    owner_states: list[optax.OptState]
    replies: list[Reply]


def step(
    plan: Plan,
    grads: Sequence[jax.Array],
    mu: Sequence[Any],
    error: Sequence[Any],
    owner_states: Sequence[optax.OptState],
    abstain: jax.Array | None,
) -> StepResult:
    """Takes one step of this worker, which meets the others in ``collect`` and ``publish`` only.

    Args:
      plan: the components, this worker's index, and the places of its leaves in buckets.
      grads: ``g`` of each leaf; varies over the workers.
      mu: of each leaf, None where there is none; varies over the workers.
      error: likewise, ``e``.
      owner_states: for each bucket ``s`` and ``f`` of the rows on which this worker decides; () for
        decisions without state.
      abstain: ``bool[]``, True to abstain; or None.
    """
    if plan.num_workers == 1:
        return single_worker_step(plan, grads, mu, error, owner_states, abstain)

    # All buckets are encoded before one is sent: a NaN in the last may keep this worker out of the first.
    inputs, coded = [], []  # of each bucket
    for bucket in plan.buckets:
        own = [interpolate(plan, piece, grads, mu, error) for piece in bucket.pieces]
        inputs.append(own)
        coded.append(encode(plan, bucket, [x.values for x in own]))
    reuses_momentum = any(x is not None for x in mu)
    participates = participation(plan, coded, reuses_momentum, abstain)

    updates: dict[int, jax.Array] = {}
    # A leaf without elements is in no bucket, and stays.
    new_mu, new_error, new_owner_states, all_replies = list(mu), list(error), [], []
    for k, bucket in enumerate(plan.buckets):
        here = participates[k]
        message = addressed(coded[k], bucket.message, here)
        with jax.named_scope("lioncub.remember"):
            if inputs[k][0].error is not None:
                remember_errors(plan, bucket, inputs[k], coded[k], here, new_error)
                message, new_error = xla.in_order(message, new_error)
        replies, owner_state = exchange_bucket(plan, bucket, message, owner_states[k])
        new_owner_states.append(owner_state)
        all_replies.append(replies)

        for x, u in zip(inputs[k], decode(plan, bucket, replies), strict=True):
            updates |= split_update(plan, x.piece, u)
            if x.momentum is None:
                continue
            with jax.named_scope("lioncub.remember"):
                new = plan.exchange.momentum_rule.update(x.gradient, x.momentum)
                remember(x.piece, x.momentum, new, here, new_mu)
    return StepResult(updates, new_mu, new_error, new_owner_states, all_replies)


def exchange_bucket(
    plan: Plan, bucket: BucketPlan, message: Message, owner_state: Any
) -> tuple[Reply, Any]:
    """Collects, decides, publishes: replies of all owners about a bucket, and this owner's next state."""
    exchange, wire = plan.exchange, plan.exchange.wire
    received = collect(wire, message, bucket.message, exchange.axis)
    with jax.named_scope("lioncub.decide"):
        context = decision_context(plan, bucket)
        reply, owner_state = exchange.decision.decide(received, context, owner_state)
    replies = publish(wire, reply, bucket.reply, exchange.axis, exchange.group)
    return replies, owner_state


def single_worker_step(
    plan: Plan,
    grads: Sequence[jax.Array],
    mu: Sequence[Any],
    error: Sequence[Any],
    owner_states: Sequence[optax.OptState],
    abstain: jax.Array | None,
) -> StepResult:
    """Takes one step of a worker alone: ``u = sign(c)`` of votes; ``u, s = tx(c + e, s)`` at an owner.

    To the latter the error ``f`` of its earlier replies is added, and no error is left. A worker with a
    value that is not finite abstains from all buckets.

    Args:
      plan: the components, and the places of its leaves.
      grads: ``g`` of each leaf.
      mu: of each leaf.
      error: of each leaf, ``e``.
      owner_states: for each bucket the owner's state; () for decisions without state.
      abstain: ``bool[]``, True to abstain; or None.
    """
    rule, decision = plan.exchange.momentum_rule, plan.exchange.decision
    axis, group = plan.exchange.axis, plan.exchange.group
    values, abstains = [], jnp.zeros((), bool) if abstain is None else abstain
    for g, m, e in zip(grads, mu, error, strict=True):
        values.append(plus_error(rule.interpolate(g, m), e))
    abstains = axes.any_over_shards(abstains | ~axes.all_finite(values), axis)
    present = 1 - abstains.astype(jnp.uint32)

    decided, new_owner_states = list(values), list(owner_states)
    if decision.decide_locally is not None:
        for k, bucket in enumerate(plan.buckets):
            mean = bucket.layout.join(values)
            context, state = decision_context(plan, bucket), owner_states[k]
            u, new_owner_states[k] = decision.decide_locally(mean, present, context, state)
            for i, x in bucket.layout.split(u).items():
                decided[i] = x

    updates, new_mu, new_error = {}, [], []
    for i, (g, m, e) in enumerate(zip(grads, mu, error, strict=True)):
        u = jnp.where(abstains, 0, decision.reply_codec.local_update(decided[i]))
        u = axes.same_everywhere(u, axis)
        updates[i] = wires.from_group(u, group) if group else u
        if m is not None:
            m = jnp.where(abstains, m, saturated(rule.update(g, m), m.dtype))
        new_mu.append(m)
        new_error.append(None if e is None else jnp.where(abstains, e, 0))

    present = axes.same_everywhere(present, axis)
    no_ties = jnp.zeros(1, jnp.uint32)
    reply = Reply(planes=(), row_data=None, ties=no_ties, pairs=(), present=present)
    each = [reply] * len(plan.buckets)
    return StepResult(updates, new_mu, new_error, new_owner_states, each)


def plus_error(direction: jax.Array, error: jax.Array | None) -> jax.Array:
    """``c + e``."""
    if error is None:
        return direction
    return direction.astype(jnp.float32) + error.astype(jnp.float32)


# --- Pieces of a bucket

BLOCKS = -3  # the dimension of the blocks of what is half packed


def concatenated(pieces: Sequence[Any], axis: int = 0) -> Any:
    """Trees of arrays of each piece as one of a bucket."""
    return jax.tree.map(lambda *each: jnp.concatenate(each, axis), *pieces)


def cut(tree: Any, first: jax.Array, size: int, axis: int = 0) -> Any:
    """What belongs to a piece, of a tree of arrays of its bucket: ``size`` places from ``first`` on."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, size, axis), tree)


# --- Interpolate and encode


def interpolate(
    plan: Plan, piece: Piece, grads: Sequence[jax.Array], mu: Sequence[Any], error: Sequence[Any]
) -> PieceInput:
    """``c`` of a piece, of ``g`` and ``mu`` of all leaves; and ``c + e`` in rows."""
    rule = plan.exchange.momentum_rule
    g, m, e = [layout.join_piece(x, piece) for x in (grads, mu, error)]
    c = rule.interpolate(g, m)
    with jax.named_scope("lioncub.pack"):
        if plan.for_tpu and layout.lies_in_rows(piece):
            # Computed again, in rows: the kernel that packs then reads g, mu and e as they lie in memory.
            in_rows = jax.tree.map(partial(layout.piece_to_rows, piece=piece), [g, m, e])
            g_rows, m_rows, e_rows = xla.recomputed(in_rows)
            values = plus_error(rule.interpolate(g_rows, m_rows), e_rows).astype(jnp.float32)
        else:
            values = layout.piece_to_rows(plus_error(c, e).astype(jnp.float32), piece)
    return PieceInput(piece, g, m, e, direction=c, values=values)


@jax.named_scope("lioncub.pack")
def encode(plan: Plan, bucket: BucketPlan, inputs: Sequence[jax.Array]) -> Coded:
    """``q = Q(c + e)`` of a bucket, of ``c + e`` of its pieces."""
    codec, whole = plan.exchange.message_codec, bucket_context(plan, bucket, inputs)
    # Functions of pieces are traced once for all large leaves of one shape.
    measure = jax.jit(codec.measure)
    by_row = codec.rows(concatenated([measure(x) for x in inputs]), whole)

    @jax.jit
    def packed_piece(x: jax.Array, start: jax.Array, by_row: Any) -> Any:
        own = cut(by_row, start * BLOCK, len(x))
        fields = codec.encode(x, own, whole)
        if codec.dense is not None:
            return fields
        # One bit more than a code: not zero, or not finite, see `Codec.encode`.
        return bits.half_packed(whole.in_chunks(fields), bucket.message.planes + 1)

    pieces = zip(inputs, bucket.starts, strict=True)
    packed = [packed_piece(x, start, by_row) for x, start in pieces]
    in_bucket = concatenated(packed, BLOCKS if codec.dense is None else 0)
    return codec.finish(in_bucket, by_row, whole)


def bucket_context(plan: Plan, bucket: BucketPlan, inputs: Sequence[jax.Array]) -> Context:
    """Facts that the codec needs about a bucket, of ``c + e`` of its pieces."""
    codec, places, sizes = plan.exchange.message_codec, bucket.layout, bucket.row_sizes
    draw = bits.draw_signs(plan.num_steps, plan.worker, plan.num_workers)
    if plan.exchange.abstains_per_bucket:
        # Each bucket has its own copy, so that the first does not wait for the last gradient.
        draw = [xla.delayed_by(x, inputs[0][0, 0]) for x in draw]
    first_word = (places.first_row + bucket.shard * places.total_rows) * WORDS_PER_ROW
    rows = sum(piece.rows for piece in bucket.pieces)
    return Context(
        codec=codec,
        format=bucket.message,
        num_chunks=places.packed_chunks,
        num_steps=plan.num_steps,
        row_sizes=None if sizes is None else sizes[:rows],
        first_word=jnp.asarray(first_word, jnp.uint32),
        worker=plan.worker,
        zero_signs=bits.random_signs(first_word, rows * WORDS_PER_ROW, *draw),
        leaf_mean=leaf_means(plan, bucket, inputs) if codec.uses_leaf_mean else None,
    )


def leaf_means(plan: Plan, bucket: BucketPlan, rows: Sequence[jax.Array]) -> jax.Array:
    """Mean magnitude of the leaf of each row of all pieces, all shards together: ``float32[rows]``."""
    sums = [sums_of_leaves(x, piece) for x, piece in zip(rows, bucket.pieces, strict=True)]
    # All leaves in one sum, and none at all where nothing is cut.
    totals = axes.sum_over_shards(jnp.concatenate(sums), plan.exchange.axis)
    by_row, first = [], 0
    for piece in bucket.pieces:
        own = totals[first : first + len(piece.segments)]
        first += len(piece.segments)
        sizes = [float(s.size) * bucket.num_shards for s in piece.segments]
        low, high = own[:, 0] / np.array(sizes, np.float32), own[:, 1] / np.array(sizes, np.float32)
        means = jnp.where(jnp.isfinite(low), low, high * 2.0**64)
        by_row += [jnp.full(s.rows, means[i]) for i, s in enumerate(piece.segments)]
        by_row.append(jnp.zeros(piece.idle))
    return jnp.concatenate(by_row)


def sums_of_leaves(x: jax.Array, piece: Piece) -> jax.Array:
    """``float32[leaves, 2]``: sums of magnitudes, and times 2**-64, which hold where the first overflow."""
    magnitude = jnp.abs(x)
    by_row = xla.reduced([operator.add] * 2, [magnitude, magnitude * 2.0**-64], 1)
    each_row, sums = jnp.stack(by_row, -1), []
    for s in piece.segments:
        first = s.first_row - piece.first_row
        sums.append(jnp.sum(each_row[first : first + s.rows], axis=0))
    return jnp.stack(sums)


def participation(
    plan: Plan, coded: Sequence[Coded], reuses_momentum: bool, abstain: jax.Array | None
) -> list[jax.Array]:
    """``bool[]`` for each bucket: all values are finite on all devices of the worker, and not ``abstain``.

    One flag for all buckets; or one for each, since a common flag would make the first bucket wait for the
    last gradient. Where momentum is overwritten in place, the flag depends on a word of the codes, for XLA
    alone: see `xla.all_delayed_by`.
    """

    def participates(coded: Sequence[Coded]) -> jax.Array:
        abstains = jnp.zeros((), bool) if abstain is None else abstain
        words = [x.planes[0][0] for x in coded] if reuses_momentum else []
        flags = [*[x.finite for x in coded], ~abstains]
        return ~axes.any_over_shards(~xla.all_delayed_by(flags, words), plan.exchange.axis)

    if plan.exchange.abstains_per_bucket:
        return [participates([x]) for x in coded]
    return [participates(coded)] * len(coded)


# --- Decide


def decision_context(plan: Plan, bucket: BucketPlan) -> Context:
    """The rows of a bucket on which this worker decides: its chunk, or all if it owns none or is alone."""
    places, sizes = bucket.layout, bucket.row_sizes
    num_chunks, first = plan.num_workers, jnp.uint32(0)
    if plan.exchange.wire.sharded and plan.num_workers > 1:
        num_chunks, first = 1, plan.worker.astype(jnp.uint32) * places.rows_per_chunk
    if sizes is not None:
        sizes = lax.dynamic_slice_in_dim(sizes, first, num_chunks * places.rows_per_chunk)
    row = places.first_row + first
    row += bucket.shard * places.total_rows
    return Context(
        codec=plan.exchange.message_codec,
        format=bucket.message,
        num_chunks=num_chunks,
        num_steps=plan.num_steps,
        row_sizes=sizes,
        first_word=row * WORDS_PER_ROW,
        worker=plan.worker,
        deal=bucket.deal,
    )


# --- Decode


@jax.named_scope("lioncub.unpack")
def decode(plan: Plan, bucket: BucketPlan, replies: Reply) -> list[jax.Array]:
    """``u`` of each piece, ``[devices, rows, 128]``."""
    codec = plan.exchange.decision.reply_codec
    fmt, large = bucket.reply, bucket.layout.large
    # Planes are [devices chunks, words]; a device's chunks follow each other as the rows of its bucket do.
    devices = len(replies.planes[0]) // fmt.num_workers
    words = list(replies.planes), replies.row_data
    if large:
        blocks = bucket.layout.rows // BLOCK
        words = jax.tree.map(lambda x: x.reshape(devices, blocks, -1), words)

    @partial(jax.jit, static_argnums=2)  # traced once for all large leaves of one shape
    def of_leaf(words: Any, start: jax.Array, rows: int) -> Any:
        own = cut(words, start, rows // BLOCK, 1)
        planes, data = jax.tree.map(lambda x: x.reshape(devices, -1), own)
        return codec.decode(planes, data, rows, fmt)

    def each_piece(words: Any) -> list[Any]:
        if not large:  # one piece
            planes, data = words
            return [codec.decode(planes, data, fmt.num_rows, fmt)]
        pairs = zip(bucket.starts, bucket.pieces, strict=True)
        return [of_leaf(words, start, piece.rows) for start, piece in pairs]

    updates = []
    for numbers, scales in xla.stored(each_piece, words):
        updates.append(codec.value(numbers, scales, fmt).reshape(devices, -1, ROW))
    return updates


def split_update(plan: Plan, piece: Piece, u: jax.Array) -> dict[int, jax.Array]:
    """``u`` of each leaf of a piece by index; in a group of parts, ``[devices, rows, 128]``."""
    if not plan.shared:
        # Float32, as it is used: a conversion for each leaf is work for a compiler.
        return layout.split_piece(u.astype(jnp.float32), piece)
    parts = {}
    for s in piece.segments:
        first = s.first_row - piece.first_row
        parts[s.leaf] = u[:, first : first + plan.shared[s.leaf].rows_per_chunk]
    return parts


# --- Remember
#
# These form c + e again, because `PieceInput.values` would have to live from encode to the errors: that
# made temporaries of `owner_adamw` 104 MB instead of 86 (a model of 20 arrays and width 768 on 8 CPU
# devices).


def next_error(
    codec: Codec, bucket: BucketPlan, coded: Coded, start: jax.Array, exact: jax.Array
) -> jax.Array:
    """``e = c + e - dequantize(q)``, of the rows ``c + e`` of a piece. Padding may hold anything.

    The piece begins with block ``start`` of the bucket, which has these codes.
    """
    scales, halves = coded.scales, coded.halves
    if bucket.layout.large:  # else there is one piece
        scales = cut(scales, start * BLOCK, len(exact))
        halves = cut(halves, start, len(exact) // BLOCK, BLOCKS)
    assert codec.decode is not None and scales is not None
    codes = bits.half_unpacked(halves, len(coded.planes))
    rows = codec.decode(codes, scales.reshape(codes.shape[:-1]))
    return exact - rows.reshape(exact.shape).astype(exact.dtype)


def remember_errors(
    plan: Plan, bucket: BucketPlan, inputs: Sequence[PieceInput], coded: Coded,
    participates: jax.Array, leaves: list[Any],
) -> None:  # fmt: skip
    """Puts the new errors of a bucket into ``leaves``, as `remember`: of single ones all in one branch."""
    codec = plan.exchange.message_codec
    single, errors, directions = [], [], []
    for x, start in zip(inputs, bucket.starts, strict=True):
        assert x.error is not None
        if x.piece.joined:
            exact = plus_error(x.direction, x.error)
            error = next_error(codec, bucket, coded, start, exact)
            remember(x.piece, x.error, error, participates, leaves)
            continue
        single.append((x.piece, start))
        errors.append(xla.by_words(partial(layout.piece_to_rows, piece=x.piece), x.error))
        directions.append(x.direction)

    @partial(jax.jit, static_argnums=0)  # traced once for all leaves of one shape
    def of_leaf(
        piece: Piece,
        start: jax.Array,
        error: jax.Array,
        direction: jax.Array,
        coded: Coded,
        sizes: Any,
    ) -> jax.Array:
        exact = plus_error(layout.piece_to_rows(direction, piece), error)
        made = next_error(codec, bucket, coded, start, exact)
        return saturated(layout.zero_padding(made, sizes), error.dtype)

    def updated(
        errors: list[jax.Array], directions: list[jax.Array], coded: Coded
    ) -> list[jax.Array]:
        made = []
        for (piece, start), error, direction in zip(single, errors, directions, strict=True):
            sizes = plan.row_sizes[piece.segments[0].leaf]
            if sizes is not None:  # rows that fill the chunks of all workers have none
                sizes = layout.pad_rows(sizes, piece.rows)
            made.append(of_leaf(piece.kind, start, error, direction, coded, sizes))
        return made

    def kept(errors: list[jax.Array], directions: list[jax.Array], coded: Coded) -> list[jax.Array]:
        return errors

    if single:
        errors = xla.chosen(participates, updated, kept, errors, directions, coded)
    for (piece, _), error in zip(single, errors, strict=True):
        [segment] = piece.segments
        to_leaf = partial(layout.rows_to_leaf, segment=segment)
        leaves[segment.leaf] = xla.by_words(to_leaf, error)


def remember(
    piece: Piece, old: jax.Array, new: jax.Array, participates: jax.Array, leaves: list[Any]
) -> None:
    """Puts the new momentum (or error) of a piece into ``leaves``, where each keeps its dtype.

    It is the old one if the worker abstains. ``old`` and ``new`` are arrays of the piece.
    """
    dtypes = {leaves[s.leaf].dtype for s in piece.segments}
    if len(dtypes) == 1:  # one cast for the whole piece
        dtype = dtypes.pop()
        new, old = saturated(new, dtype), old.astype(dtype)
    for i, x in layout.split_piece(jnp.where(participates, new, old), piece).items():
        leaves[i] = saturated(x, leaves[i].dtype)
