"""The seam: the one transform in which workers talk.

A step of a worker reads as a sentence: make a message from gradient and memory, turn it into codes,
send them up the wire, let the owner of each slice decide, read the answer, remember.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from lioncub_jax import bits, checks, decide, layout, messages, momentum, quantize, wires
from lioncub_jax.bits import WORDS_PER_ROW
from lioncub_jax.decide import Down, Owner
from lioncub_jax.layout import Bucket
from lioncub_jax.momentum import Memory
from lioncub_jax.quantize import Ballot, Place, Quantizer
from lioncub_jax.wires import AxisName, Wire


class CommunicateState(NamedTuple):
    """State of `communicate`.

    Attributes:
      count: ``int32[]``, steps taken; same on every worker.
      mu: momentum, shaped like the parameters, each worker's own (or None leaves).
      error: quantisation error kept for the next step, shaped like the parameters, each worker's own
        (or None leaves).
      owner: for each bucket the owner's state for the slice that this worker owns.
      ties: ``float32[]``, parameters whose votes cancelled in the last step; same on every worker.
      parameters: ``float32[]``, parameters that were voted on; same on every worker.
      abstained: ``int32[]``, workers that sat out the last step; same on every worker.
      abstentions: ``int32[]``, their sum over all steps; same on every worker.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: Any
    error: Any
    owner: Any
    ties: jax.Array
    parameters: jax.Array
    abstained: jax.Array
    abstentions: jax.Array


class VoteStats(NamedTuple):
    """What the votes of the last step were like; same on every worker.

    Attributes:
      tie_rate: ``float32[]``, the share of parameters whose votes cancelled.
      abstained: ``int32[]``, workers that sat out.
      abstentions: ``int32[]``, their sum over all steps.

    Example:
      See `vote_stats`.
    """

    tie_rate: jax.Array
    abstained: jax.Array
    abstentions: jax.Array


def communicate(
    *,
    axis_name: AxisName,
    memory: Memory | None = None,
    up: Quantizer | None = None,
    owner: Owner | None = None,
    down: Down | None = None,
    wire: Wire | None = None,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The one place where workers talk: gradients of each worker in, one agreed update out.

    ``c = memory.message(g, mu)``; codes of ``c`` go up the wire; the owner of each slice decides; the
    answer comes back to all; ``mu = memory.remember(g, mu)``.

    A worker with a value that is not finite anywhere, or told to by ``abstain``, sits the step out: it
    casts no vote, and its momentum and error stay as they are. A row of 64 elements whose values are
    all exactly zero is not voted on by that worker; a row on which nobody votes gets update 0. One
    worker alone sends nothing, so nothing is quantised either.

    Args:
      axis_name: mesh axis of the workers, bound by ``jax.shard_map`` or ``jax.pmap``.
      memory: ``blend(b1, b2)``, or ``nothing()`` (default).
      up: how values become codes; default ``sign()``.
      owner: ``count()`` (default) or ``momentum_at_owner(tx)``.
      down: ``majority()`` (default), ``ternary_sum()`` (default for codes with a zero), ``average()``
        or ``floats()``.
      wire: ``two_phase()`` (default), ``gathered()``, ``counts()``, ``lanes()`` or ``all_reduce()``.
      bucket_size: elements after which a new flat buffer begins; None for one buffer.

    Returns:
      A transform. ``update(updates, state, params, abstain=None)`` takes gradients that vary over
      ``axis_name``, floating leaves of any shape, and returns updates of the same shapes and dtypes
      that are the same on every worker. ``abstain``: ``bool[]`` of this worker, True to sit out.

    Raises:
      ValueError: for parts that do not fit together; when traced, for an axis that is not bound,
        gradients that were already reduced, or too many workers for a code or wire.
      TypeError: when traced, for integer or complex leaves.

    Example:
      >>> import lioncub_jax as lc, optax
      >>> tx = optax.chain(
      ...     lc.communicate(axis_name="data", memory=lc.blend(0.9, 0.99), up=lc.midrise(2)),
      ...     optax.add_decayed_weights(0.1),
      ...     optax.scale_by_learning_rate(1e-4),
      ... )
    """
    memory = momentum.nothing() if memory is None else memory
    up = quantize.sign() if up is None else up
    owner = decide.count() if owner is None else owner
    checks.check_kinds(up=(up, Quantizer))
    down = decide.fitting(up) if down is None else down
    wire = wires.two_phase() if wire is None else wire
    checks.check_kinds(
        memory=(memory, Memory), owner=(owner, Owner), down=(down, Down), wire=(wire, Wire)
    )
    checks.check_parts(up, owner, down, wire)
    checks.check_axis(axis_name)
    if bucket_size is not None:
        wanted = "a number of elements, or None"
        checks.check_count(f"bucket_size={bucket_size!r}", bucket_size, wanted)
    plan = Plan(axis_name, memory, up, owner, down, wire, bucket_size)

    def init(params: optax.Params) -> CommunicateState:
        checks.check_leaves(params)
        counts = [jnp.zeros((), jnp.int32) for _ in range(3)]
        error = jax.tree.map(lambda p: _zeros_of(p, up.feedback), params)
        slices = _init_owner(plan, params)
        ties, parameters = jnp.zeros(()), jnp.zeros(())
        return CommunicateState(
            counts[0], memory.init(params), error, slices, ties, parameters, counts[1], counts[2]
        )

    def update(
        updates: optax.Updates,
        state: CommunicateState,
        params: optax.Params | None = None,
        *,
        abstain: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, CommunicateState]:
        del params, extra
        workers = wires.workers_on(axis_name)
        checks.check_leaves(updates)
        checks.check_local(updates, axis_name)
        voter = Voter(wires.worker_index(axis_name), workers, state.count)
        return worker_step(plan, voter, updates, state, abstain)

    return optax.GradientTransformationExtraArgs(init, update)


class Plan(NamedTuple):
    """The parts of a `communicate`, put together."""

    axis: AxisName
    memory: Memory
    up: Quantizer
    owner: Owner
    down: Down
    wire: Wire
    bucket_size: int | None

    def buckets(self, leaves: Sequence[jax.Array], workers: int) -> tuple[Bucket, ...]:
        """The flat buffers in which these leaves travel."""
        return layout.buckets(leaves, workers, self.up.rows_per_step, self.bucket_size)


class _Agreed(NamedTuple):
    """What the workers agreed on for one bucket; all but ``owner`` the same on every worker."""

    rows: jax.Array  # float[rows, 64]
    owner: Any
    ties: jax.Array
    present: jax.Array


class Voter(NamedTuple):
    """Who takes a step: which worker of how many, after how many earlier steps."""

    worker: jax.Array
    workers: int
    step: jax.Array


def worker_step(
    plan: Plan, voter: Voter, updates: Any, state: CommunicateState, told_to_abstain: Any
) -> tuple[Any, CommunicateState]:
    """What one worker does in a step; it meets the others only in ``plan.wire``."""
    grads, tree = _flatten(updates)
    workers = voter.workers
    mus, errors = tree.flatten_up_to(state.mu), tree.flatten_up_to(state.error)
    sent = [plan.memory.message(g, mu) for g, mu in zip(grads, mus, strict=True)]
    said = _with_errors(sent, errors)
    buckets = plan.buckets(grads, workers)
    speak = _quantize if workers > 1 else _keep_values
    ballots = [speak(plan, voter, bucket, said) for bucket in buckets]
    abstains = _abstains(plan.axis, told_to_abstain, ballots)
    agree = _exchange if workers > 1 else _decide_alone
    slices = state.owner if plan.owner.needs_values else ((),) * len(buckets)
    agreed = [
        agree(plan, voter, bucket, cast, abstains, slice_state)
        for bucket, cast, slice_state in zip(buckets, ballots, slices, strict=True)
    ]
    if workers > 1:
        # Made anew from the same inputs: kept, it would cost an array as large as the gradient.
        said_again = _with_errors(*lax.optimization_barrier((sent, errors)))
        missed = _missed(plan, buckets, ballots, said_again, workers)
        errors = _withheld(abstains, [missed.get(i) for i in range(len(errors))], errors)
    kept = [plan.memory.remember(g, mu) for g, mu in zip(grads, mus, strict=True)]
    new_state = CommunicateState(
        optax.safe_increment(state.count),
        tree.unflatten(_withheld(abstains, kept, mus)),
        tree.unflatten(errors),
        tuple(a.owner for a in agreed) if plan.owner.needs_values else (),
        *_statistics(plan.axis, grads, agreed, state, workers),
    )
    return tree.unflatten(_to_leaves(buckets, agreed, sent)), new_state


def _flatten(tree: Any) -> tuple[list[jax.Array], Any]:
    return jax.tree.flatten(tree)


def _with_errors(sent: list[jax.Array], errors: list[Any]) -> list[jax.Array]:
    """What is to be said: this step's message and what earlier codes missed."""
    return [
        c if e is None else c.astype(jnp.float32) + e.astype(jnp.float32)
        for c, e in zip(sent, errors, strict=True)
    ]


def _quantize(plan: Plan, voter: Voter, bucket: Bucket, said: list[jax.Array]) -> list[Ballot]:
    ballots = []
    for segment in bucket.segments:
        first_word = (bucket.first_row + segment.first_row) * WORDS_PER_ROW
        place = Place(
            first_word, segment.size, segment.leaf, voter.step, voter.worker, voter.workers
        )
        ballots.append(plan.up.encode(layout.to_rows(said[segment.leaf], segment), place))
    return ballots


def _keep_values(plan: Plan, voter: Voter, bucket: Bucket, said: list[jax.Array]) -> list[Ballot]:
    """One worker's ballots: the values themselves, in rows, of the bucket's own dtype."""
    rows = [layout.to_rows(said[s.leaf], s) for s in bucket.segments]
    return [
        Ballot(x.astype(bucket.dtype), jnp.ones(x.shape[:1], bool), None, ~jnp.all(jnp.isfinite(x)))
        for x in rows
    ]


def _abstains(axis: AxisName, told: Any, ballots: list[list[Ballot]]) -> jax.Array:
    """``bool[]``: whether this worker sits out, by its own values or because it was told to."""
    flags = [ballot.flagged for cast in ballots for ballot in cast]
    told = jnp.zeros((), bool) if told is None else checks.as_flag(told)
    sits_out = functools.reduce(operator.or_, [told, *flags])
    # The devices that share a worker sit out as one.
    return wires.same_over_shards(sits_out.astype(jnp.uint32), axis) > 0


def _exchange(
    plan: Plan,
    voter: Voter,
    bucket: Bucket,
    ballots: list[Ballot],
    abstains: jax.Array,
    slice_state: Any,
) -> _Agreed:
    """Up the wire, the owner's decision, and back."""
    workers = voter.workers
    ballot = _join(plan.up, bucket, ballots, abstains, workers, not plan.owner.needs_values)
    received = plan.wire.collect(
        ballot, ~abstains, plan.up, plan.owner.needs_values, bucket, plan.axis
    )
    result, slice_state = plan.owner.decide(received, plan.up, workers, bucket.dtype, slice_state)
    rows = plan.wire.owned_rows(bucket, workers)
    first_row = bucket.first_row + (rows * voter.worker if plan.wire.owns_slice else 0)
    coin = bits.coin(first_row * WORDS_PER_ROW, rows * WORDS_PER_ROW, voter.step)
    words = messages.pack_answer(
        plan.down.encode(result, coin), received.present, plan.down, workers
    )
    answers = plan.wire.publish(words, plan.axis)
    answer, present = messages.open_answers(answers, plan.down, plan.up, rows, workers)
    values = plan.down.decode(answer.planes, answer.per_row, plan.up.top(workers), workers)
    ties = answer.ties - _tied_padding(plan.up, bucket, answer.per_row)
    return _Agreed(values.reshape(-1, bits.ROW), slice_state, ties, present)


def _tied_padding(up: Quantizer, bucket: Bucket, moved: Any) -> jax.Array | float:
    """Padding of dense values is zero and ties where its row moves; padding of codes never does."""
    if not up.dense or moved is None:
        return 0.0
    short = [(s.first_row + s.rows - 1, s.rows * bits.ROW - s.size) for s in bucket.segments]
    return sum((moved[row].astype(jnp.float32) * pad for row, pad in short if pad), jnp.zeros(()))


def _join(
    up: Quantizer,
    bucket: Bucket,
    ballots: list[Ballot],
    abstains: jax.Array,
    workers: int,
    counted: bool,
) -> Ballot:
    """The bucket's ballot, padded to what travels; empty if the worker abstains."""
    voted = bucket.pad(jnp.concatenate([b.voted for b in ballots]), workers) & ~abstains
    rows = workers * bucket.chunk
    top = up.top(workers)
    payloads = [b.payload for b in ballots]
    if up.has_zero:
        payloads = [
            jnp.where(abstains, quantize.fill_padding(_silence(up, p, workers), s.size, top), p)
            for p, s in zip(payloads, bucket.segments, strict=True)
        ]
    payload = jnp.concatenate(payloads, axis=1)
    idle = rows * up.words_per_row - payload.shape[1]
    payload = jnp.pad(payload, ((0, 0), (0, idle)))
    if up.has_zero:
        payload = quantize.fill_padding(payload, bucket.rows * bits.ROW, top)
    elif counted:
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


def _decide_alone(
    plan: Plan,
    voter: Voter,
    bucket: Bucket,
    ballots: list[Ballot],
    abstains: jax.Array,
    slice_state: Any,
) -> _Agreed:
    """With one worker the owner's transform runs on values that were never quantised."""
    rows = bucket.pad(jnp.concatenate([b.payload for b in ballots]), 1)
    update, new_state = plan.owner.alone(rows.reshape(-1, bits.WORD), slice_state)
    new_state = decide.keep_unless(~abstains, new_state, slice_state)
    update = jnp.where(abstains, 0, update).reshape(-1, bits.ROW)
    present = 1 - abstains.astype(jnp.uint32)
    same = [wires.same_everywhere(x, plan.axis) for x in (update, present)]
    return _Agreed(same[0], new_state, jnp.zeros(()), same[1])


def _missed(
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


def _withheld(abstains: jax.Array, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    """The new state of this worker, or the old one if it abstains; None where there is none."""
    return [
        o if n is None else jnp.where(abstains, o, n.astype(o.dtype))
        for n, o in zip(new, old, strict=True)
    ]


def _to_leaves(
    buckets: tuple[Bucket, ...], agreed: list[_Agreed], sent: list[jax.Array]
) -> list[jax.Array]:
    leaves = [jnp.zeros(c.shape, c.dtype) for c in sent]  # empty ones stay
    for bucket, answer in zip(buckets, agreed, strict=True):
        for s in bucket.segments:
            rows = answer.rows[s.first_row : s.first_row + s.rows]
            leaves[s.leaf] = layout.from_rows(rows, s).astype(sent[s.leaf].dtype)
    return leaves


def _statistics(
    axis: AxisName,
    grads: list[jax.Array],
    agreed: list[_Agreed],
    state: CommunicateState,
    workers: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    parameters = jnp.float32(sum(g.size * wires.shards_of(g, axis) for g in grads))
    ties = sum((wires.sum_over_shards(a.ties, axis) for a in agreed), jnp.zeros(()))
    if not agreed:
        return ties, parameters, state.abstained, state.abstentions
    present = wires.same_over_shards(agreed[0].present, axis)
    abstained = workers - present.astype(jnp.int32)
    return ties, parameters, abstained, state.abstentions + abstained


def _init_owner(plan: Plan, params: optax.Params) -> tuple[Any, ...]:
    """Each bucket's slice state; only a transform that keeps one needs to know the workers."""
    if not plan.owner.needs_values:
        return ()
    workers = wires.workers_on(plan.axis)
    states = []
    for bucket in plan.buckets(jax.tree.leaves(params), workers):
        size = plan.wire.owned_rows(bucket, workers) * bits.ROW
        state = plan.owner.init(jnp.zeros((size // bits.WORD, bits.WORD), bucket.dtype))
        own = plan.wire.owns_slice or workers == 1
        states.append(_vary_slices(state, plan) if own else state)
    return tuple(states)


def _vary_slices(state: Any, plan: Plan) -> Any:
    """Types the arrays of a slice as the owner's own; counters stay the same on every worker."""
    return jax.tree.map(lambda x: wires.varying(x, plan.axis) if x.ndim else x, state)


def _zeros_of(p: jax.Array, dtype: Any) -> jax.Array | None:
    return None if dtype is None else jnp.zeros_like(p, dtype=dtype)


def vote_stats(opt_state: Any) -> VoteStats | None:
    """Reads what the last votes were like out of the state of any chain of transforms.

    Args:
      opt_state: the state of a transform that holds one or more ``communicate``.

    Returns:
      ``VoteStats`` over all of them, or None if nothing votes. Of per-worker state stacked by
      ``jax.pmap`` take one worker's copy first.

    Example:
      >>> import jax.numpy as jnp, lioncub_jax as lc
      >>> tx = lc.lion_cub(1e-4, axis_name="data")
      >>> float(lc.vote_stats(tx.init({"w": jnp.ones(3)})).tie_rate)
      0.0
    """
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, CommunicateState))
    found = [x for x in leaves if isinstance(x, CommunicateState)]
    if not found:
        return None
    ties, parameters = sum(s.ties for s in found), sum(s.parameters for s in found)
    return VoteStats(
        ties / jnp.maximum(parameters, 1),
        jnp.max(jnp.stack([s.abstained for s in found])),
        jnp.max(jnp.stack([s.abstentions for s in found])),
    )
