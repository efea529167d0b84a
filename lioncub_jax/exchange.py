"""The seam: the one transform in which workers talk. Read this first.

A step of a worker reads as a sentence: make a message from gradient and memory, turn it into codes,
send them up the wire, let the owner of each slice decide, read the reply, remember. Profilers show these
parts by name: ``lioncub.pack``, ``up``, ``decide``, ``down``, ``unpack``, ``remember``.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from lioncub_jax import bits, checks, decide, layout, momentum, quantize, wires
from lioncub_jax.bits import BLOCK, ROW, WORDS_PER_ROW
from lioncub_jax.decide import Down, Owner, Slice
from lioncub_jax.layout import Bucket, Flat, Holder, Piece
from lioncub_jax.mesh import placement
from lioncub_jax.mesh.specs import cut_of
from lioncub_jax.momentum import Memory
from lioncub_jax.quantize import Message, Place, Quantizer
from lioncub_jax.wires import AxisName, Format, Sent, Sums, Wire


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
      abstained: ``int32[]``, workers that abstained from the last step; same on every worker.
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

    @staticmethod
    def holders() -> dict[str, Holder]:
        """Whose the fields are, for checkpoints."""
        return {"mu": Holder.WORKER, "error": Holder.FEEDBACK, "owner": Holder.OWNER}


class VoteStats(NamedTuple):
    """What the votes of the last step were like; same on every worker.

    Attributes:
      tie_rate: ``float32[]``, the share of parameters whose votes cancelled.
      abstained: ``int32[]``, workers that abstained.
      abstentions: ``int32[]``, their sum over all steps.

    Example:
      See `vote_stats`.
    """

    tie_rate: jax.Array
    abstained: jax.Array
    abstentions: jax.Array


class Asked(NamedTuple):
    """A question to a transform: what does a device send in a step?

    Attributes:
      leaves: shapes of what one device holds, ``jax.ShapeDtypeStruct`` or arrays.
      axes: inner mesh axes that cut each of them.
      workers: how many.
      group_size: devices of one worker, in two levels.
      platform: "cpu" for XLA's CPU backend, which all-reduces bfloat16 as float32; None for all others.
      step: steps taken before, where they matter; None for a late one.
    """

    leaves: list[Any]
    axes: list[frozenset]
    workers: int
    group_size: int = 1
    platform: str | None = None
    step: int | None = None


class Sending(optax.GradientTransformationExtraArgs):
    """A transform that can be asked what it sends: ``lioncub_jax.traffic.of(tx, params, workers)``.

    Attributes:
      scheme: the codes, the wire and what comes back, for people.
      sends: ``Asked -> (Sent, ...)``.
    """

    scheme: str
    sends: Callable[[Asked], tuple[Sent, ...]]

    @classmethod
    def like(cls, tx: Any, scheme: str, sends: Callable[[Asked], tuple[Sent, ...]]) -> "Sending":
        """The transform ``tx``, with an answer."""
        asked = cls(tx.init, tx.update)
        asked.scheme, asked.sends = scheme, sends
        return asked

    def around(self, tx: Any) -> "Sending":
        """A transform that sends what this one sends, such as a chain that it is in."""
        return Sending.like(tx, self.scheme, self.sends)

    def _replace(self, **changes: Any) -> "Sending":
        return self.around(super()._replace(**changes))


def communicate(
    *,
    axis_name: AxisName,
    memory: Memory | None = None,
    up: Quantizer | None = None,
    owner: Owner | None = None,
    down: Down | None = None,
    wire: Wire | None = None,
    group_axis: AxisName | None = None,
    bucket_size: int | None = None,
) -> Sending:
    """The one place where workers talk: gradients of each worker in, one agreed update out.

    ``c = memory.message(g, mu)``; codes of ``c`` go up the wire; the owner of each slice decides; the
    answer comes back to all; ``mu = memory.remember(g, mu)``.

    A worker with a value that is not finite anywhere, or asked to by ``abstain``, abstains: it
    casts no vote, and its momentum and error stay as they are. A row of 128 elements whose values are
    all exactly zero is not voted on by that worker; a row on which nobody votes gets update 0. One
    worker alone sends nothing, so nothing is quantised either.

    Args:
      axis_name: mesh axis of the workers, bound by ``jax.shard_map`` or ``jax.pmap``; or several, a
        tuple, that are one group of voters together.
      memory: ``blend(b1, b2)``, or ``nothing()`` (default).
      up: how values become codes; default ``sign()``.
      owner: ``count()`` (default) or ``momentum_at_owner(tx)``.
      down: ``majority()`` (default), ``ternary_sum()`` (default for codes with a zero), ``average()``
        or ``floats()``.
      wire: ``two_phase()`` (default), ``gathered()``, ``counts()``, ``lanes()`` or ``all_reduce()``.
      group_axis: mesh axis of the devices that make up one worker, each with a gradient of its own: two
        levels. The gradients are averaged in full precision inside the group by a reduce-scatter, each
        device keeps momentum and votes for its slice of the parameters, and the packed answers are
        gathered inside the group.
      bucket_size: elements after which a new flat buffer begins; None for one buffer.

    Returns:
      A transform, which `traffic.of` can ask what it sends. ``update(updates, state, params,
      abstain=None)`` takes gradients that vary over ``axis_name``, floating leaves of any shape, and
      returns updates of the same shapes and dtypes that are the same on every worker. ``abstain``:
      ``bool[]`` of this worker, True to abstain.

    Raises:
      ValueError: for parts that do not fit together; when traced, for an axis that is not bound,
        gradients that were already reduced, or too many workers for a code or wire.
      TypeError: when traced, for integer or complex leaves.

    Example:
      >>> import lioncub_jax as lc, optax
      >>> tx = optax.chain(
      ...     lc.communicate(axis_name="data", memory=lc.momentum.blend(), up=lc.quantize.midrise(2)),
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
    checks.check_group(group_axis, axis_name, up)
    if bucket_size is not None:
        wanted = "a number of elements, or None"
        checks.check_count(f"bucket_size={bucket_size!r}", bucket_size, wanted)
    plan = Plan(axis_name, group_axis, memory, up, owner, down, wire, bucket_size)

    def init(params: optax.Params) -> CommunicateState:
        checks.check_leaves(params)
        if group_axis is not None:
            wires.workers_on(group_axis)  # bound here, or nobody knows whose slices these are
        mu = error = None
        owners: tuple[Flat, ...] = ()
        if owner.needs_values or group_axis is not None:
            mu, error, owners = placement.on_shards(partial(_init_slices, plan), (params,))
        if group_axis is None:
            mu = memory.init(params)
            error = jax.tree.map(lambda p: _zeros_of(p, up.feedback), params)
        count, abstained, abstentions = (jnp.zeros((), jnp.int32) for _ in range(3))
        ties, parameters = (jnp.zeros((), jnp.float32) for _ in range(2))
        return CommunicateState(count, mu, error, owners, ties, parameters, abstained, abstentions)

    def update(
        updates: optax.Updates,
        state: CommunicateState,
        params: optax.Params | None = None,
        *,
        abstain: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, CommunicateState]:
        del params, extra
        wires.workers_on(axis_name)
        checks.check_leaves(updates)
        checks.check_local(updates, axis_name, group_axis)
        abstain = None if abstain is None else checks.as_flag(abstain)
        # Results lie as what they replace.
        cut = cut_of((updates, state))
        return placement.on_shards(partial(on_device, plan), (updates, state, abstain), cut)

    tx = optax.GradientTransformationExtraArgs(init, update)
    return Sending.like(tx, plan.scheme, plan.sends)


class Plan(NamedTuple):
    """The parts of a `communicate`, put together."""

    axis: AxisName | None
    group: AxisName | None
    memory: Memory
    up: Quantizer
    owner: Owner
    down: Down
    wire: Wire
    bucket_size: int | None

    def buckets(self, leaves: list[jax.Array], workers: int) -> tuple[Bucket, ...]:
        """The flat buffers in which these leaves travel between workers."""
        limit = self.bucket_size
        if limit is not None and self.group is not None:
            limit = max(limit // wires.workers_on(self.group), 1)
        return layout.buckets(leaves, workers, limit, [wires.varying_axes(x) for x in leaves])

    def cuts(self, leaves: list[jax.Array]) -> tuple[Bucket, ...]:
        """The flat buffers that the devices of a group share; none without a group."""
        if self.group is None:
            return ()
        axes = [wires.varying_axes(x) for x in leaves]
        return layout.buckets(leaves, wires.workers_on(self.group), self.bucket_size, axes)

    def format(self, bucket: Bucket) -> Format:
        """What travels for a bucket."""
        return Format.of(self.up, self.owner, self.down, bucket)

    @property
    def scheme(self) -> str:
        """The codes, the wire and what comes back, for people."""
        result = f"{self.owner.name}, {self.down.name}"
        return f"{self.up.name}, {self.wire.name}, " + (
            result if self.owner.needs_values else self.down.name
        )

    def sends(self, asked: Asked) -> tuple[Sent, ...]:
        """What each device sends in a step, one collective after the other."""
        leaves, axes, limit = asked.leaves, asked.axes, self.bucket_size
        workers, devices = asked.workers, asked.group_size
        if devices > 1 and self.group is None:
            raise ValueError(
                f"group_size={devices}: the transform has no group_axis, so a worker is one device; leave "
                "group_size out, or build the transform with group_axis"
            )
        sent: list[Sent] = []
        if devices > 1:
            cuts = layout.buckets(leaves, devices, limit, axes)
            leaves = [jax.ShapeDtypeStruct((cut.chunk, ROW), cut.dtype) for cut in cuts]
            axes = [frozenset(cut.axes) for cut in cuts]
            limit = None if limit is None else max(limit // devices, 1)
            slices = [4.0 * (devices - 1) * x.shape[0] * ROW for x in leaves]
            sent += [Sent("reduce-scatter", True, each) for each in slices]
            if workers == 1:  # float32 values come back
                sent += [Sent("all-gather", True, each) for each in slices]
        for bucket in layout.buckets(leaves, workers, limit, axes) if workers > 1 else ():
            form = self.format(bucket)
            sent += self.wire.sends(form, asked.platform)
            if devices > 1:
                replies = 4.0 * (devices - 1) * workers * form.reply_words
                sent.append(Sent("all-gather", True, replies))
        return tuple(sent)


class Worker(NamedTuple):
    """Who takes a step.

    Attributes:
      index: ``int32[]``, which worker; varies over the workers.
      workers: of how many.
      step: ``int32[]``, after how many earlier steps.
      counts: for each leaf ``int32[rows]``, the elements of each row that are no padding; None where the
        leaf's size says it. Slices of a group's buckets have padding anywhere.
    """

    index: jax.Array  # type: ignore[assignment]
    workers: int
    step: jax.Array
    counts: list[jax.Array | None]


class Kept(NamedTuple):
    """What a worker remembers of its leaves: momentum and quantisation error, or None for each leaf."""

    mu: list[Any]
    error: list[Any]


class Decided(NamedTuple):
    """What all workers get to know of a bucket: replies ``uint32[W, words]``, the same on all of them."""

    bucket: Bucket
    replies: jax.Array
    owner: Any


def on_device(
    plan: Plan, updates: Any, state: CommunicateState, abstain: Any
) -> tuple[Any, CommunicateState]:
    """A worker's step on one of its devices, where every axis of the mesh is manual."""
    index, workers = wires.worker_index(plan.axis), wires.workers_on(plan.axis)
    worker = Worker(index, workers, state.count, [None] * len(jax.tree.leaves(updates)))
    step = worker_step if plan.group is None else _step_in_group
    return step(plan, worker, updates, state, abstain)


def worker_step(
    plan: Plan, worker: Worker, updates: Any, state: CommunicateState, abstain: Any
) -> tuple[Any, CommunicateState]:
    """The step of a worker that is one device, or of its shard of a worker that is several."""
    grads, tree = _flatten(updates)
    kept = Kept(tree.flatten_up_to(state.mu), tree.flatten_up_to(state.error))
    owners = [flat.value for flat in state.owner]
    if worker.workers == 1:
        leaves, found, owners, kept = _alone(plan, worker, grads, kept, owners, abstain)
    else:
        decided, kept = vote(plan, worker, grads, kept, owners, abstain)
        owners = [x.owner for x in decided]
        leaves, found = [jnp.zeros(g.shape, g.dtype) for g in grads], []
        for x in decided:
            rows, *numbers = open_replies(plan, x.bucket, x.replies[None])
            found.append(numbers)
            for s in x.bucket.segments:
                leaves[s.leaf] = layout.from_rows(rows[0, s.first_row : s.first_row + s.rows], s)
    updates = [x.astype(g.dtype) for x, g in zip(leaves, grads, strict=True)]
    mu, error = (tree.unflatten(x) for x in kept)
    return tree.unflatten(updates), _next_state(
        plan, worker, state, grads, mu, error, owners, found
    )


def vote(
    plan: Plan, worker: Worker, grads: list[jax.Array], kept: Kept, owners: Any, abstain: Any
) -> tuple[list[Decided], Kept]:
    """What one of several workers does with its leaves; workers meet in ``plan.wire``."""
    messages = [plan.memory.message(g, mu) for g, mu in zip(grads, kept.mu, strict=True)]
    sent = _with_errors(messages, kept.error)
    buckets = plan.buckets(grads, worker.workers)
    with jax.named_scope("lioncub.pack"):
        encoded = [encode(plan, worker, bucket, sent) for bucket in buckets]
    abstains = abstains_now(plan, abstain, encoded)
    states = owners or [()] * len(buckets)
    decided = [
        decide_on(plan, worker, bucket, codes, abstains, state)
        for bucket, codes, state in zip(buckets, encoded, states, strict=True)
    ]
    error = kept.error
    if plan.up.feedback is not None:
        # Made anew from the same inputs: kept, it would cost an array as large as the gradient.
        anew = [lax.optimization_barrier(pair) for pair in zip(messages, error, strict=True)]
        sent = _with_errors([c for c, _ in anew], [e for _, e in anew])
        missed = uncoded(plan, worker, buckets, encoded, sent)
        error = [_unless(abstains, missed.get(i), e) for i, e in enumerate(error)]
    with jax.named_scope("lioncub.remember"):
        mu = [
            _unless(abstains, plan.memory.remember(g, m), m)
            for g, m in zip(grads, kept.mu, strict=True)
        ]
    return decided, Kept(mu, error)


def encode(plan: Plan, worker: Worker, bucket: Bucket, sent: list[jax.Array]) -> list[Message]:
    """The codes of each piece of a bucket."""
    rows = [layout.join(sent, piece) for piece in bucket.pieces]
    shard, shards = wires.shard_index(rows[0], plan.axis), wires.shards_of(rows[0], plan.axis)
    first = bucket.first_row + shard * bucket.total_rows
    totals: Any = [None] * len(rows)
    if plan.up.measure is not None:
        measured = [plan.up.measure(x, p) for x, p in zip(rows, bucket.pieces, strict=True)]
        # All leaves in one sum, and none at all where nothing is cut.
        sums = wires.sum_over_shards(jnp.concatenate(measured), plan.axis)
        totals = jnp.split(sums, np.cumsum([len(m) for m in measured])[:-1])
    return [
        plan.up.encode(
            x,
            Place(
                bucket, piece, (first + piece.first_row) * WORDS_PER_ROW,
                worker.step, worker.index, worker.workers,
                _counts(worker, piece) if bucket.ragged or _sliced(worker, bucket) else None,
                plan.format(bucket).sends_steps, shard, shards, total,
            ),
        )
        for x, piece, total in zip(rows, bucket.pieces, totals, strict=True)
    ]  # fmt: skip


def abstains_now(plan: Plan, abstain: Any, encoded: list[list[Message]]) -> jax.Array:
    """``bool[]``: whether this worker abstains, by its own values or because it was asked to."""
    flags = [~message.finite for codes in encoded for message in codes]
    asked = jnp.zeros((), bool) if abstain is None else abstain
    abstains = functools.reduce(operator.or_, flags, asked)
    # Never true, but known only when all codes are made: momentum is then overwritten in place, where it
    # would be copied for the codes that are still to be made of it. A barrier does not last that long.
    words = [message.planes[0][0] for codes in encoded for message in codes]
    late = [lax.population_count(word) > BLOCK for word in words]
    abstains = functools.reduce(operator.or_, late, abstains)
    # The devices that share a worker abstain as one.
    return wires.same_over_shards(abstains.astype(jnp.uint32), plan.axis) > 0


def decide_on(
    plan: Plan,
    worker: Worker,
    bucket: Bucket,
    codes: list[Message],
    abstains: jax.Array,
    owner: Any,
) -> Decided:
    """Up the wire, the owner's decision, and back."""
    assert plan.axis is not None  # without one there is one worker
    form, chunks = plan.format(bucket), plan.wire.owned(worker.workers)
    with jax.named_scope("lioncub.pack"):
        message = _joined(form, codes, abstains)
    with jax.named_scope("lioncub.up"):
        received = plan.wire.collect(message, ~abstains, form, plan.axis)
    with jax.named_scope("lioncub.decide"):
        first = worker.index.astype(jnp.uint32) if plan.wire.owns_slice else 0
        counts = _owned_counts(plan, worker, bucket, first, chunks)
        where = Slice(chunks, bucket.chunk, worker.workers, plan.up, bucket.dtype, counts)
        result, owner = plan.owner.decide(received, where, owner)
        row = bucket.first_row + first * bucket.chunk
        row += wires.shard_index(codes[0].planes[0], plan.axis) * bucket.total_rows
        words = bucket.chunk * WORDS_PER_ROW
        coin = bits.coin(row * WORDS_PER_ROW, chunks * words, worker.step)
        reply = plan.down.encode(result, coin.reshape(chunks, words))
        replies = form.pack_reply(reply, received.present)
    with jax.named_scope("lioncub.down"):
        return Decided(bucket, plan.wire.publish(replies, plan.axis), owner)


def open_replies(
    plan: Plan, bucket: Bucket, replies: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows ``[slices, rows, 128]`` of replies ``uint32[slices, W, words]``, ties, and who took part."""
    with jax.named_scope("lioncub.unpack"):
        form = plan.format(bucket)
        reply, present = form.unpack_reply(replies.reshape(-1, replies.shape[-1]))
        where = Slice(1, bucket.chunk, bucket.workers, plan.up, bucket.dtype, None)
        rows = plan.down.decode(reply.planes, reply.rows, where)
        return rows.reshape(len(replies), -1, ROW), jnp.sum(reply.ties), present


def uncoded(
    plan: Plan,
    worker: Worker,
    buckets: tuple[Bucket, ...],
    encoded: list[list[Message]],
    sent: list[jax.Array],
) -> dict[int, jax.Array]:
    """The quantisation error of each leaf, ``float32`` of its shape."""
    missed: dict[int, jax.Array] = {}
    for bucket, codes in zip(buckets, encoded, strict=True):
        for piece, message in zip(bucket.pieces, codes, strict=True):
            assert message.steps is not None
            steps = bucket.by_chunk(message.steps)
            planes = [x.reshape(len(steps), -1) for x in message.planes]
            rows = plan.up.values(
                planes, steps, steps.shape[1], worker.workers, bits.unpack_once
            ).reshape(-1, ROW)
            for s in piece.segments:
                own = rows[s.first_row - piece.first_row :][: s.rows]
                error = sent[s.leaf] - layout.from_rows(own, s)
                if (count := worker.counts[s.leaf]) is not None:
                    error = jnp.where(jnp.arange(ROW) < count[:, None], error, 0)
                missed[s.leaf] = error
    return missed


def _joined(form: Format, codes: list[Message], abstains: jax.Array) -> Message:
    """The message about a whole bucket, padded to its chunks; without votes if the worker abstains."""
    words = form.workers * form.rows * form.up.words_per_row
    planes = [_padded(each, words) for each in zip(*[x.planes for x in codes], strict=True)]
    voted, steps = None, None
    if form.sends_votes:
        blocks = form.workers * bits.row_words(form.rows)
        voted = jnp.where(abstains, 0, _padded([x.voted for x in codes], blocks))
        mask = bits.over_rows(voted.reshape(form.workers, -1), form.rows).reshape(-1)
        planes = [x & mask for x in planes]
    if form.up.has_zero:
        zero = form.up.top(form.workers) // 2
        planes = [
            jnp.where(abstains, jnp.uint32(0xFFFFFFFF if zero >> k & 1 else 0), x)
            for k, x in enumerate(planes)
        ]
    if form.sends_steps:
        steps = jnp.where(abstains, 0, _padded([x.steps for x in codes], form.workers * form.rows))
    return Message(planes, voted, steps, ~abstains)


def _padded(parts: Sequence[Any], size: int) -> jax.Array:
    """The parts one after the other, then zeros."""
    return layout.pad_rows(jnp.concatenate(parts) if len(parts) > 1 else parts[0], size)


def _counts(worker: Worker, piece: Piece) -> jax.Array:
    """``int32[rows]``: how many elements of each row of a piece are no padding."""
    if all(worker.counts[s.leaf] is None for s in piece.segments):
        return layout.filled(piece.segments, piece.first_row, piece.rows)
    each = []
    for s in piece.segments:
        count = worker.counts[s.leaf]
        own = layout.filled([s], s.first_row, s.rows) if count is None else count
        each.append(layout.pad_rows(own, s.rows))
    return layout.pad_rows(jnp.concatenate(each), piece.rows)


def _sliced(worker: Worker, bucket: Bucket) -> bool:
    """Whether leaves have padding where their sizes do not say it."""
    return any(worker.counts[s.leaf] is not None for s in bucket.segments)


def _owned_counts(
    plan: Plan, worker: Worker, bucket: Bucket, first: Any, chunks: int
) -> jax.Array | None:
    """The same for the chunks that this worker owns; None where no padding can be taken for a value."""
    padded = plan.up.has_zero and bucket.padded
    if not bucket.ragged and not padded and not _sliced(worker, bucket):
        return None
    counts = jnp.concatenate([_counts(worker, piece) for piece in bucket.pieces])
    counts = layout.pad_rows(counts, bucket.rows)
    return lax.dynamic_slice_in_dim(counts, first * bucket.chunk, chunks * bucket.chunk)


def _alone(
    plan: Plan, worker: Worker, grads: list[jax.Array], kept: Kept, owners: Any, abstain: Any
) -> tuple[list[jax.Array], list[Any], Any, Kept]:
    """One worker's step: nothing travels, so nothing is quantised, and nothing is left out."""
    messages = [plan.memory.message(g, mu) for g, mu in zip(grads, kept.mu, strict=True)]
    asked = jnp.zeros((), bool) if abstain is None else abstain
    strange = functools.reduce(operator.or_, [~jnp.all(jnp.isfinite(c)) for c in messages], asked)
    abstains = wires.same_over_shards(strange.astype(jnp.uint32), plan.axis) > 0
    values, states = list(messages), list(owners)
    if plan.owner.needs_values and not plan.owner.feedback:
        for k, bucket in enumerate(plan.buckets(grads, 1)):
            rows = _bucket_rows(messages, bucket)
            where = Slice(1, bucket.chunk, 1, quantize.dense(), bucket.dtype, None)
            received = Sums(rows, None, 1 - abstains.astype(jnp.uint32))
            result, states[k] = plan.owner.decide(received, where, states[k])
            for s in bucket.segments:
                own = result.values.reshape(-1, ROW)[s.first_row : s.first_row + s.rows]
                values[s.leaf] = layout.from_rows(own, s)
    mu = [
        _unless(abstains, plan.memory.remember(g, m), m)
        for g, m in zip(grads, kept.mu, strict=True)
    ]
    updates = [jnp.where(abstains, 0, plan.down.exact(x)) for x in values]
    updates = [wires.same_everywhere(x, plan.axis) for x in updates]
    present = wires.same_everywhere(1 - abstains.astype(jnp.uint32), plan.axis)
    return updates, [(jnp.zeros((), jnp.float32), present)], states, Kept(mu, kept.error)


def _flatten(tree: Any) -> tuple[list[jax.Array], Any]:
    return jax.tree.flatten(tree)


def _with_errors(messages: list[jax.Array], errors: list[Any]) -> list[jax.Array]:
    """What is encoded: this step's message and the error of earlier codes."""
    return [
        c if e is None else c.astype(jnp.float32) + e.astype(jnp.float32)
        for c, e in zip(messages, errors, strict=True)
    ]


def _unless(abstains: jax.Array, new: Any, old: Any) -> Any:
    """The new state of this worker, or the old one if it abstains; None where there is none."""
    if new is None:
        return old
    return jnp.where(abstains, old, quantize.saturated(new, old.dtype))


# --- Two levels: a worker that is a group of devices, each with a slice of every bucket


def _step_in_group(
    plan: Plan, worker: Worker, updates: Any, state: CommunicateState, abstain: Any
) -> tuple[Any, CommunicateState]:
    """Around the ordinary exchange: a reduce-scatter in the group, and an all-gather of the replies."""
    grads, tree = _flatten(updates)
    assert plan.group is not None
    cuts, device = plan.cuts(grads), wires.worker_index(plan.group)
    slices = [wires.mean_slice(_bucket_rows(grads, cut), plan.group) for cut in cuts]
    worker = worker._replace(counts=[slice_counts(plan, cut, device) for cut in cuts])
    kept = Kept([x.value for x in state.mu], [x.value for x in state.error])
    owners = [flat.value for flat in state.owner]
    if worker.workers == 1:
        each, found, owners, kept = _alone(plan, worker, slices, kept, owners, abstain)
        whole = [wires.from_group(x, plan.group) for x in each]
    else:
        decided, kept = vote(plan, worker, slices, kept, owners, abstain)
        owners = [x.owner for x in decided]
        whole, found = [x[None] for x in slices], []
        for x in decided:
            replies = wires.from_group(x.replies, plan.group)
            rows, *numbers = open_replies(plan, x.bucket, replies)
            found.append(numbers)
            for s in x.bucket.segments:
                whole[s.leaf] = rows[:, s.first_row : s.first_row + cuts[s.leaf].chunk]
    leaves = [jnp.zeros(g.shape, g.dtype) for g in grads]
    for cut, rows in zip(cuts, whole, strict=True):
        for s in cut.segments:
            own = rows.reshape(-1, ROW)[s.first_row : s.first_row + s.rows]
            leaves[s.leaf] = layout.from_rows(own, s).astype(grads[s.leaf].dtype)
    mu, error = (tuple(map(Flat, x, cuts)) for x in kept)
    return tree.unflatten(leaves), _next_state(plan, worker, state, grads, mu, error, owners, found)


def _bucket_rows(leaves: list[jax.Array], bucket: Bucket) -> jax.Array:
    """All leaves of a bucket as ``float32[rows, 128]``, zeros in the padding."""
    rows = jnp.concatenate([layout.join(leaves, piece) for piece in bucket.pieces])
    return layout.pad_rows(rows, bucket.rows)


def slice_counts(plan: Plan, cut: Bucket, device: jax.Array) -> jax.Array | None:
    """Elements of each row of a device's slice that are no padding; None where none is mistaken."""
    if not cut.ragged and not (plan.up.has_zero and cut.padded):
        return None
    each = [layout.filled(p.segments, p.first_row, p.rows) for p in cut.pieces]
    counts = layout.pad_rows(jnp.concatenate(each), cut.rows)
    return lax.dynamic_slice_in_dim(counts, device * cut.chunk, cut.chunk)


# --- State


def _next_state(
    plan: Plan,
    worker: Worker,
    state: CommunicateState,
    grads: list[jax.Array],
    mu: Any,
    error: Any,
    owners: list[Any],
    found: list[Any],
) -> CommunicateState:
    statistics = _statistics(plan, grads, found, state, worker.workers)
    some = statistics[2] < worker.workers

    def counted(new: jax.Array, old: jax.Array) -> jax.Array:
        # Counters of a transform are the same on all workers by type, so what all know must stop them.
        return new if new.ndim else jnp.where(some, new, old)

    kept = tuple(
        Flat(jax.tree.map(counted, new, old.value), old.bucket)
        for new, old in zip(
            owners, state.owner, strict=False
        )  # without states there are still buckets
    )
    return CommunicateState(optax.safe_increment(state.count), mu, error, kept, *statistics)


def _statistics(
    plan: Plan, grads: list[jax.Array], found: list[Any], state: CommunicateState, workers: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Ties and presence over a worker's shards, in one sum if it has any."""
    everyone = (*wires.names(plan.axis), *wires.names(plan.group))
    size = float(sum(math.prod(g.shape) * wires.shards_of(g, everyone) for g in grads))
    parameters = jnp.float32(size)
    if not found:
        return jnp.zeros((), jnp.float32), parameters, state.abstained, state.abstentions
    # The sum runs over all axes that cut any bucket; a bucket of which there are copies counts once.
    ties = sum((t * wires.shards_of(t, plan.axis) for t, _ in found), jnp.zeros((), jnp.float32))
    both = jnp.stack([ties, found[0][1].astype(jnp.float32)])
    both = wires.sum_over_shards(both / wires.shards_of(both, plan.axis), plan.axis)
    abstained = workers - both[1].astype(jnp.int32)
    return both[0], parameters, abstained, state.abstentions + abstained


def _init_slices(plan: Plan, params: optax.Params) -> tuple[Any, Any, Any]:
    """Momentum and errors of a group's slices, and owners' states, where every axis is manual."""
    leaves = jax.tree.leaves(params)
    mu, error = None, None
    if plan.group is not None:
        cuts = plan.cuts(leaves)
        leaves = [_zero_rows(b.chunk, b.dtype, (*b.axes, *wires.names(plan.group))) for b in cuts]
        mu = tuple(map(Flat, plan.memory.init(leaves), cuts))
        errors = [_zeros_of(x, plan.up.feedback) for x in leaves]
        error = tuple(map(Flat, errors, cuts))
    return mu, error, init_owners(plan, leaves)


def init_owners(plan: Plan, leaves: list[jax.Array]) -> tuple[Flat, ...]:
    """Each bucket's slice state; only a transform that keeps one needs to know the workers."""
    if not plan.owner.needs_values:
        return ()
    workers = wires.workers_on(plan.axis)
    own = wires.names(plan.axis) if plan.wire.owns_slice or workers == 1 else ()
    states = []
    for bucket in plan.buckets(leaves, workers):
        rows = plan.wire.owned(workers) * bucket.chunk
        state = plan.owner.init(jnp.zeros((rows, ROW), bucket.dtype))
        axes = [n for n in bucket.axes if n not in wires.names(plan.axis)]
        states.append(Flat(_vary_arrays(state, (*own, *axes)), bucket))
    return tuple(states)


def _vary_arrays(state: Any, axes: tuple[str, ...]) -> Any:
    """Types the arrays of a slice as the owner's own; counters stay the same on every worker."""
    return jax.tree.map(lambda x: wires.varying(x, axes) if x.ndim else x, state)


def _zero_rows(rows: int, dtype: Any, axes: tuple[str, ...]) -> jax.Array:
    return wires.varying(jnp.zeros((rows, ROW), dtype), axes)


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
