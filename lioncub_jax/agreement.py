"""From one bucket's values to rows on which all workers agree.

Values become a ballot, the ballot goes up the wire, the owner of each slice decides, and the packed
answers come back: to a whole worker, where its devices each hold their slice of a bucket. Profilers show
these parts by name: ``lioncub.pack``, ``up``, ``decide``, ``down``, ``unpack``.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lioncub_jax import bits, decide, layout, messages, wires
from lioncub_jax.ballots import Ballot, Place, Quantizer, fill_padding
from lioncub_jax.bits import WORDS_PER_ROW
from lioncub_jax.decide import Answer, Down, Owner
from lioncub_jax.layout import Bucket, Cut
from lioncub_jax.wires import AxisName, Wire


class Plan(NamedTuple):
    """The parts of a `communicate`, put together; ``memory`` is a ``momentum.Memory``."""

    axis: AxisName
    group: AxisName | None
    memory: Any
    up: Quantizer
    owner: Owner
    down: Down
    wire: Wire
    bucket_size: int | None

    def buckets(self, pieces: list[jax.Array], workers: int) -> tuple[Bucket, ...]:
        """The flat buffers in which these pieces travel between workers."""
        limit = self.bucket_size
        if limit is not None and self.group is not None:
            limit = max(limit // wires.workers_on(self.group), 1)
        return layout.buckets(pieces, workers, self.up.rows_per_step, limit)

    def cuts(self, leaves: list[jax.Array]) -> tuple[Bucket, ...]:
        """The flat buffers that the devices of a group cut among themselves; none without a group."""
        if self.group is None:
            return ()
        size = wires.workers_on(self.group)
        return layout.buckets(leaves, size, self.up.rows_per_step, self.bucket_size)


class Voter(NamedTuple):
    """Who takes a step: which worker of how many, after how many earlier steps."""

    worker: jax.Array
    workers: int
    step: jax.Array


class Agreed(NamedTuple):
    """What the workers agreed on for one bucket; all but ``owner`` the same on every worker."""

    rows: jax.Array  # float[slices, rows, 64], a slice for each device of a group
    owner: Any
    ties: jax.Array
    present: jax.Array


def quantized(
    plan: Plan, voter: Voter, bucket: Bucket, said: list[jax.Array], cuts: list[Cut | None]
) -> list[Ballot]:
    """A ballot for each piece of a bucket."""
    rows = [layout.to_rows(said[s.leaf], s) for s in bucket.segments]
    shard = wires.shard_index(rows[0], plan.axis)
    shards = wires.shards_of(rows[0], plan.axis)
    first = bucket.first_row + shard * bucket.total_rows
    totals: Any = [None] * len(rows)
    if plan.up.measure is not None:
        # All leaves in one sum, and none at all where nothing is cut.
        totals = wires.sum_over_shards(jnp.stack([plan.up.measure(x) for x in rows]), plan.axis)
    ballots = []
    for x, s, total in zip(rows, bucket.segments, totals, strict=True):
        place = Place(
            (first + s.first_row) * WORDS_PER_ROW, s.size, s.leaf,
            voter.step, voter.worker, voter.workers, shard, shards, total, _filled(cuts[s.leaf]),
        )  # fmt: skip
        ballots.append(plan.up.encode(x, place))
    return ballots


def values_kept(bucket: Bucket, said: list[jax.Array]) -> list[Ballot]:
    """One worker's ballots: the values themselves, in rows, of the bucket's own dtype."""
    rows = [layout.to_rows(said[s.leaf], s) for s in bucket.segments]
    return [
        Ballot(x.astype(bucket.dtype), jnp.ones(x.shape[:1], bool), None, ~jnp.all(jnp.isfinite(x)))
        for x in rows
    ]


def abstains_now(axis: AxisName, told: Any, ballots: list[list[Ballot]]) -> jax.Array:
    """``bool[]``: whether this worker sits out, by its own values or because it was told to."""
    flags = [ballot.flagged for cast in ballots for ballot in cast]
    told = jnp.zeros((), bool) if told is None else told
    sits_out = functools.reduce(operator.or_, [told, *flags])
    # The devices that share a worker sit out as one.
    return wires.same_over_shards(sits_out.astype(jnp.uint32), axis) > 0


def exchanged(
    plan: Plan,
    voter: Voter,
    bucket: Bucket,
    ballots: list[Ballot],
    abstains: jax.Array,
    slice_state: Any,
    cuts: list[Cut | None],
) -> Agreed:
    """Up the wire, the owner's decision, and back."""
    workers = voter.workers
    with jax.named_scope("lioncub.pack"):
        ballot = _join(plan, bucket, ballots, abstains, workers, cuts)
    with jax.named_scope("lioncub.up"):
        received = plan.wire.collect(
            ballot, ~abstains, plan.up, plan.owner.needs_values, bucket, plan.axis
        )
    with jax.named_scope("lioncub.decide"):
        result, slice_state = plan.owner.decide(
            received, plan.up, workers, bucket.dtype, slice_state
        )
        rows = plan.wire.owned_rows(bucket, workers)
        first_row = bucket.first_row + (rows * voter.worker if plan.wire.owns_slice else 0)
        first_row += wires.shard_index(ballot.voted, plan.axis) * bucket.total_rows
        coin = bits.coin(first_row * WORDS_PER_ROW, rows * WORDS_PER_ROW, voter.step)
        words = messages.pack_answer(
            plan.down.encode(result, coin), received.present, plan.down, workers
        )
    with jax.named_scope("lioncub.down"):
        answers = plan.wire.publish(words, plan.axis)
    with jax.named_scope("lioncub.unpack"):
        values, ties, present = _opened(plan, bucket, answers, workers, cuts)
    return Agreed(values, slice_state, ties, present)


def _opened(
    plan: Plan,
    bucket: Bucket,
    answers: jax.Array,
    workers: int,
    cuts: list[Cut | None],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Reads the answers of all owners; in a group, of the owners of all its devices' slices."""
    rows = plan.wire.owned_rows(bucket, workers)

    def read(answers: jax.Array) -> tuple[Answer, jax.Array, jax.Array]:
        answer, present = messages.open_answers(answers, plan.down, plan.up, rows, workers)
        planes = plan.down.decode(answer.planes, answer.per_row, plan.up.top(workers), workers)
        return answer, present, planes.reshape(-1, bits.ROW)

    slices = answers[None] if plan.group is None else wires.from_group(answers, plan.group)
    # One slice needs no mapping, and mapping it would keep its reads from being fused.
    read_all = jax.vmap(read) if plan.group else lambda x: jax.tree.map(_one, read(x[0]))
    answer, present, values = read_all(slices)
    ties = jnp.sum(answer.ties) - _tied_padding(plan.up, bucket, answer.per_row, cuts)
    return values, ties, present[0]


def _one(x: jax.Array) -> jax.Array:
    return x[None]


def _tied_padding(
    up: Quantizer, bucket: Bucket, moved: Any, cuts: list[Cut | None]
) -> jax.Array | float:
    """Padding of dense values is zero and ties where its row moves; padding of codes never does."""
    if not up.dense or moved is None:
        return 0.0
    short: list[tuple[int, int, int]] = []  # slice, row, elements
    for s in bucket.segments:
        cut = cuts[s.leaf]
        if cut is None:
            short += [(0, row, pad) for row, pad in layout.short_rows(s)]
            continue
        chunk = cut.bucket.chunk
        ends = [end for leaf in cut.bucket.segments for end in layout.short_rows(leaf)]
        short += [(row // chunk, s.first_row + row % chunk, pad) for row, pad in ends]
    return sum((moved[i, row].astype(jnp.float32) * pad for i, row, pad in short), jnp.zeros(()))


def _filled(cut: Cut | None) -> jax.Array | None:
    return None if cut is None else cut.filled


def _join(
    plan: Plan,
    bucket: Bucket,
    ballots: list[Ballot],
    abstains: jax.Array,
    workers: int,
    cuts: list[Cut | None],
) -> Ballot:
    """The bucket's ballot, padded to what travels; empty if the worker abstains."""
    up = plan.up
    voted = bucket.pad(jnp.concatenate([b.voted for b in ballots]), workers) & ~abstains
    rows = workers * bucket.chunk
    top = up.top(workers)
    payloads = [b.payload for b in ballots]
    if up.has_zero:
        payloads = [
            jnp.where(
                abstains,
                fill_padding(_silence(up, p, workers), s.size, top, _filled(cuts[s.leaf])),
                p,
            )
            for p, s in zip(payloads, bucket.segments, strict=True)
        ]
    payload = jnp.concatenate(payloads, axis=1)
    idle = rows * up.words_per_row - payload.shape[1]
    payload = jnp.pad(payload, ((0, 0), (0, idle)))
    if up.has_zero:
        payload = fill_padding(payload, bucket.rows * bits.ROW, top)
    elif not plan.owner.needs_values:
        payload &= jnp.repeat(bits.as_mask(voted), up.words_per_row)
    steps = None
    if ballots[0].steps is not None:
        joined = jnp.concatenate([b.steps for b in ballots if b.steps is not None])
        joined = jnp.pad(joined, (0, rows // up.rows_per_step - joined.shape[0]))
        steps = jnp.where(abstains, 0, joined)
    return Ballot(payload, voted, steps, abstains)


def _silence(up: Quantizer, like: jax.Array, workers: int) -> jax.Array:
    """Planes of the code that means zero."""
    zero = np.array([[up.top(workers) // 2 >> k & 1] for k in range(len(like))], np.uint32)
    return jnp.broadcast_to(bits.as_mask(jnp.asarray(zero)), like.shape)


def decided_alone(
    plan: Plan, bucket: Bucket, ballots: list[Ballot], abstains: jax.Array, slice_state: Any
) -> Agreed:
    """With one worker the owner's transform runs on values that were never quantised."""
    rows = bucket.pad(jnp.concatenate([b.payload for b in ballots]), 1)
    update, new_state = plan.owner.alone(rows.reshape(-1, bits.WORD), slice_state)
    new_state = decide.keep_unless(~abstains, new_state, slice_state)
    update = jnp.where(abstains, 0, update).reshape(-1, bits.ROW)
    present = 1 - abstains.astype(jnp.uint32)
    update, present = (wires.same_everywhere(x, plan.axis) for x in (update, present))
    slices = update[None] if plan.group is None else wires.from_group(update, plan.group)
    return Agreed(slices, new_state, jnp.zeros(()), present)


def missed(
    plan: Plan,
    buckets: tuple[Bucket, ...],
    ballots: list[list[Ballot]],
    said: list[jax.Array],
    workers: int,
) -> dict[int, jax.Array]:
    """What the codes failed to say, for each leaf, if it is to be said later."""
    missed: dict[int, jax.Array] = {}
    if plan.up.feedback is None:
        return missed
    for bucket, cast in zip(buckets, ballots, strict=True):
        for segment, ballot in zip(bucket.segments, cast, strict=True):
            heard = plan.up.values(ballot.payload, ballot.steps, workers)
            heard = layout.from_rows(heard.reshape(-1, bits.ROW), segment)
            missed[segment.leaf] = said[segment.leaf] - heard
    return missed
