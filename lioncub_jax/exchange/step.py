"""One training step of all workers: the only transform in which workers communicate. Read this first.

Worker i, in one step (`Worker.vote`), with the place of each line:

    c_i  = b1 m_i + (1 - b1) g_i         message         Memory.message                 momentum.py
    q_i  = Q(c_i + e_i)                  codes           Quantizer.encode               quantize.py
    r    = all-to-all(q)                 up              Wire.collect                   wires.py
    u, s = decide(r, s)                  owner           Decision.answer                decide.py
    u    = all-gather(u)                 down            Wire.publish                   wires.py
    m_i  = b2 m_i + (1 - b2) g_i         momentum        Memory.remember                momentum.py
    e_i  = keep (c_i + e_i - Q^-1(q_i))  error feedback  Worker.quantization_errors     here

Momentum is updated after the vote. If a worker abstains, m_i and e_i keep their old values. `Worker.alone`
is the same step for W = 1: no collective and no code. Profilers show the parts as ``lioncub.pack``,
``up``, ``decide``, ``down``, ``unpack`` and ``remember``.

In two levels a worker is a group of devices. A reduce-scatter before the step gives each device a slice of
each buffer, and an all-gather after it joins the replies. Everything else is the same.
"""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from lioncub_jax.exchange import (
    bits,
    checks,
    compilations,
    decide,
    layout,
    quantize,
    rotation,
    wires,
    xla,
)
from lioncub_jax.exchange.arguments import check_count, check_kinds
from lioncub_jax.exchange.bits import BLOCK, ROW, WORDS_PER_ROW
from lioncub_jax.exchange.decide import Decision, Slice, Sums
from lioncub_jax.exchange.layout import Bucket, Flat, Holder, Piece
from lioncub_jax.exchange.means import common_dtype
from lioncub_jax.exchange.momentum import Memory
from lioncub_jax.exchange.quantize import EncodeContext, Message, Quantizer
from lioncub_jax.exchange.wires import Format, Wire
from lioncub_jax.mesh import axes, kernels, placement
from lioncub_jax.mesh.axes import Axes, AxisName
from lioncub_jax.mesh.placement import Workers


class VoteCounts(NamedTuple):
    """Statistics of votes, the same on every worker; `metrics` gives them to a logger.

    Attributes:
      ties: ``float32[]``, parameters whose votes cancelled in the last step.
      parameters: ``float32[]``, parameters that were voted on.
      abstained: ``int32[]``, workers that abstained from the last step, of buckets with votes of their own
        from the one with the fewest.
      abstentions: ``int32[]``, their sum over all steps.
      unlike: ``float32[]``, of ``pairs`` those whose votes differ; ``()`` but for votes of one bit.
      pairs: ``float32[]``, pairs of two workers' votes on one parameter in the last step; likewise.
    """

    ties: jax.Array
    parameters: jax.Array
    abstained: jax.Array
    abstentions: jax.Array
    unlike: Any
    pairs: Any


class CommunicateState(NamedTuple):
    """State of `communicate`.

    Attributes:
      count: ``int32[]``, steps taken; same on every worker.
      mu: momentum, shaped like the parameters, each worker's own (or None leaves).
      error: quantization error kept for the next step, shaped like the parameters, each worker's own
        (or None leaves).
      owner: for each bucket the owner's state for the slice that this worker owns.
      votes: statistics.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: Any
    error: Any
    owner: Any
    votes: VoteCounts

    def exchanges(self) -> bool:
        """Whether workers communicate in the transform of this state."""
        return True

    @staticmethod
    def holders() -> dict[str, Holder]:
        """Who holds each field, for checkpoints."""
        return {"mu": Holder.WORKER, "error": Holder.FEEDBACK, "owner": Holder.OWNER}


def communicate(
    *,
    workers: AxisName | Workers | None,
    memory: Memory,
    quantizer: Quantizer | None = None,
    decision: Decision | None = None,
    wire: Wire | None = None,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Gradients of each worker in, one replicated update out: the one place where workers communicate.

    ``c = memory.message(g, mu)``; codes of ``c`` go up the wire; the owner of each slice decides; the
    reply comes back to all; ``mu = memory.remember(g, mu)``.

    A worker with a value that is not finite anywhere, or asked to by ``abstain``, abstains: it
    casts no vote, and its momentum and error stay as they are (with ``bucket_size``: on that bucket). A
    row of 128 elements whose values are all exactly zero is not voted on by that worker; a row on which
    nobody votes gets update 0. One worker alone sends nothing, so nothing is quantized either.

    Args:
      workers: who votes: a `Workers`; the name of a mesh axis, bound by ``jax.shard_map`` or ``jax.pmap``,
        or of several, a tuple, that are one group of voters together; None for one device without a mesh.
        `Workers` with a ``group`` are two levels: the gradients are averaged in full precision inside the
        group by a reduce-scatter, each device keeps momentum and votes for its slice of the parameters, and
        the packed answers are gathered inside the group.
      memory: ``blend(b1, b2)``, or ``nothing()``: signSGD, or momentum that lives at the owner.
      quantizer: how values become codes; default ``sign()``.
      decision: what the owner of a slice answers: ``majority()`` (default), ``ternary()`` (default for
        codes with a zero), ``average()`` or ``at_owner(tx)``.
      wire: ``two_phase()`` (default), ``gathered()``, ``counts()``, ``lanes()`` or ``all_reduce()``.
      bucket_size: elements after which a new flat buffer begins; None for one buffer. Each travels as
        soon as its gradients are there, so a worker abstains from each by itself: with a value that is
        not finite it still votes on the others. See docs/reports/accelerators.md for when it pays.

    Returns:
      A transform. ``update(updates, state, params, abstain=None)`` takes gradients that vary over
      ``workers``, floating leaves of any shape, and returns updates of the same shapes and dtypes that are
      the same on every worker. ``abstain``: ``bool[]`` of this worker, True to abstain. `traffic.of` says
      what it sends.

    Raises:
      ValueError: for parts that do not fit together; when traced, for an axis that is not bound,
        gradients that were already reduced, a state of other parameters, an ``abstain`` that is no
        ``bool[]``, or too many workers for a code or wire.
      TypeError: without a memory, or for a part of another kind; when traced, for integer or complex
        leaves, or a misspelled ``abstain``.

    Example:
      >>> import lioncub_jax as lc, optax
      >>> tx = optax.chain(
      ...     lc.communicate(workers="data", memory=lc.momentum.blend(), quantizer=lc.quantize.midrise(2)),
      ...     optax.add_decayed_weights(0.1),
      ...     optax.scale_by_learning_rate(1e-4),
      ... )
    """
    up = quantize.sign() if quantizer is None else quantizer
    check_kinds(quantizer=(up, Quantizer))
    decision = decide.fitting(up) if decision is None else decision
    wire = wires.two_phase() if wire is None else wire
    check_kinds(memory=(memory, Memory), decision=(decision, Decision), wire=(wire, Wire))
    decision.check(up, wire)
    axis, group = placement.names_of(workers)
    if group:
        checks.check_group(up)
    if bucket_size is not None:
        wanted = "a number of elements, or None"
        check_count(f"bucket_size={bucket_size!r}", bucket_size, wanted)
    plan = Plan(axis, group, memory, up, decision, wire, bucket_size)
    apart = (*axis, *group)

    def init(params: optax.Params) -> CommunicateState:
        params = checks.check_leaves(params)
        mu, error = memory.init(params), _no_errors(params, up.feedback)
        owners: Any = ()
        if checks.stands_in(params):
            arrays = [memory.init(jnp.zeros(1)), _no_errors(jnp.zeros(1), up.feedback)]
            mu, error = (params if jax.tree.leaves(x) and not group else 0 for x in arrays)
            owners = 0 if decision.decodes else ()
        elif group or decision.decodes:
            axes.workers_on(apart)  # bound here, or nobody knows whose slices these are
            params = axes.varying(params, apart)  # as gradients do, from which buckets are made
            owners = placement.on_shards(_init_owners, (plan, params))
        if group and not checks.stands_in(params):
            mu, error = placement.on_shards(_init_slices, (plan, params))
        # Each an array of its own: a training step donates them all.
        whole, real = partial(jnp.zeros, (), jnp.int32), partial(jnp.zeros, (), jnp.float32)
        pairs = (real(), real()) if decision.counts_pairs(up) else ((), ())
        votes = VoteCounts(real(), real(), whole(), whole(), *pairs)
        return CommunicateState(whole(), mu, error, owners, votes)

    def update(
        updates: optax.Updates,
        state: CommunicateState,
        params: optax.Params | None = None,
        *,
        abstain: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, CommunicateState]:
        axes.workers_on(axis)
        abstain = checks.check_abstain(abstain, extra)
        updates = checks.check_leaves(updates)
        checks.check_local(updates, apart)
        if not group:
            checks.check_state(updates, state.mu, state.error)
        if not axis:
            checks.warn_if_on_several_devices(updates)
        checks.watch_workers(updates, params, state.count, axis)
        # Results have the sharding of what they replace.
        return placement.on_shards(_step, (plan, updates, state, abstain), (updates, state))

    return optax.GradientTransformationExtraArgs(init, update)


class Plan(NamedTuple):
    """The parts of a `communicate`, put together; numbers in them may be arrays."""

    axis: Axes
    group: Axes
    memory: Memory
    up: Quantizer
    decision: Decision
    wire: Wire
    bucket_size: int | None = None

    @property
    def counts_all(self) -> bool:
        """Whether rows of nothing but padding can be mistaken: they have votes, or an owner's state."""
        return self.up.has_zero or self.decision.decodes

    def buckets(
        self, leaves: Sequence[Any], over: Sequence[Any], workers: int, devices: int = 1
    ) -> tuple[tuple[Bucket, ...], tuple[Bucket, ...]]:
        """``(cuts, buckets)``: what a group reduce-scatters, and what travels between workers.

        Without a group there are no cuts. With one the leaves of the buckets are one device's slices of the
        cuts. ``over``: for each leaf the mesh axes over which it varies.
        """
        cuts: tuple[Bucket, ...] = ()
        limit = self.bucket_size
        if self.group:
            cuts = layout.buckets(leaves, devices, limit, over)
            leaves = [jax.ShapeDtypeStruct((cut.chunk, ROW), cut.dtype) for cut in cuts]
            over = [cut.axes for cut in cuts]
            limit = None if limit is None else max(limit // devices, 1)
        return cuts, layout.buckets(leaves, workers, limit, over)


def _no_errors(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda p: None if dtype is None else jnp.zeros_like(p, dtype=dtype), tree)


def _init_slices(plan: Plan, params: Any) -> tuple[tuple[Flat, ...], tuple[Flat, ...]]:
    """Momentum and errors of a group's slices, where every axis is manual."""
    worker, slices = Worker.of(plan, jax.tree.leaves(params), jnp.int32(0)), []
    for cut in worker.cuts:
        zeros = jnp.zeros((cut.chunk, ROW), cut.dtype)
        slices.append(axes.varying(zeros, (*cut.axes, *plan.group)))
    mu, error = plan.memory.init(slices), _no_errors(slices, plan.up.feedback)
    flat = lambda x: tuple(map(Flat, x, worker.cuts))  # noqa: E731
    return flat(mu), flat(error)


def _init_owners(plan: Plan, params: Any) -> tuple[Flat, ...]:
    return Worker.of(plan, jax.tree.leaves(params), jnp.int32(0)).init_owners()


# --- A worker's step, where every axis of the mesh is manual


class Kept(NamedTuple):
    """What a worker remembers of its leaves: momentum and quantization error, or None for each leaf."""

    mu: list[Any]
    error: list[Any]


class Ballot(NamedTuple):
    """What became of a bucket in an exchange.

    Attributes:
      form: what travelled.
      codes: this worker's, for each piece.
      abstains: ``bool[]``, whether this worker abstained from it.
      replies: ``uint32[W, words]`` of all owners, the same on all workers.
      owner: the new state of the slice that this worker owns.
    """

    form: Format
    codes: list[Message]
    abstains: jax.Array
    replies: jax.Array
    owner: Any


class Numbers(NamedTuple):
    """Statistics of a bucket.

    Attributes:
      ties: ``uint32[chunks]``.
      pairs: ``float32[chunks]`` each, see `decide.Reply`.
      present: ``uint32[]``, how many took part.
    """

    ties: jax.Array
    pairs: Sequence[jax.Array]
    present: jax.Array

    def totals(self, tie: int, pair: int) -> jax.Array:
        """Ties, in units of ``2**tie``, and sums of ``pairs``, in units of ``2**pair``: ``uint32[n]``."""
        ties = jnp.sum(self.ties >> tie, dtype=jnp.uint32)
        pairs = [jnp.round(jnp.sum(x) * 2.0**-pair).astype(jnp.uint32) for x in self.pairs]
        return jnp.stack([ties, *pairs])


class Done(NamedTuple):
    """What became of a worker's leaves in a step.

    Attributes:
      updates: by index, float32 or integers in the shape of the leaf; in two levels of the whole leaves.
      kept: what the worker remembers.
      owners: the states of the slices that it owns.
      numbers: of each bucket.
    """

    updates: dict[int, jax.Array]
    kept: Kept
    owners: list[Any]
    numbers: list[Numbers]


def _step(
    plan: Plan, updates: Any, state: CommunicateState, abstain: Any
) -> tuple[Any, CommunicateState]:
    """A worker's step on one of its devices."""
    return Worker.of(plan, jax.tree.leaves(updates), state.count).take(updates, state, abstain)


class Worker(NamedTuple):
    """Who takes a step, and with what.

    Attributes:
      plan: the parts.
      index: ``int32[]``, which worker; varies over the workers.
      workers: of how many.
      step: ``int32[]``, after how many earlier steps.
      cuts: the buffers that the devices of a group share; else empty.
      buckets: those in which its leaves, or slices of the cuts, travel.
      counts: for each leaf ``int32[rows]``, the elements of each row that are no padding; None where the
        leaf's size says it. Slices of a group's buckets have padding anywhere.
    """

    plan: Plan
    index: jax.Array  # type: ignore[assignment]
    workers: int
    step: jax.Array
    cuts: tuple[Bucket, ...]
    buckets: tuple[Bucket, ...]
    counts: list[jax.Array | None]

    @classmethod
    def of(cls, plan: Plan, leaves: Sequence[Any], step: jax.Array) -> "Worker":
        """The worker here, whose gradients are these."""
        workers, devices = axes.workers_on(plan.axis), axes.workers_on(plan.group)
        over = list(map(axes.varying_axes, leaves))
        cuts, buckets = plan.buckets(leaves, over, workers, devices)
        counts: list[jax.Array | None] = [None] * len(leaves)
        if plan.group:
            device = axes.worker_index(plan.group)
            counts = [layout.counts_of_slice(cut, device, plan.counts_all) for cut in cuts]
        return cls(plan, axes.worker_index(plan.axis), workers, step, cuts, buckets, counts)

    def init_owners(self) -> tuple[Flat, ...]:
        """The state of the owned slice of each bucket; empty if the decision only counts votes."""
        plan, states = self.plan, []
        shared = not (plan.wire.owns_slice or self.workers == 1)
        own = () if shared else plan.axis
        for bucket in self.buckets if plan.decision.decodes else ():
            rows = bucket.rows if not plan.wire.owns_slice else bucket.chunk
            over = (*own, *[n for n in bucket.axes if n not in plan.axis])
            state = plan.decision.init(jnp.zeros((rows, ROW), bucket.dtype))
            # Arrays of an owned slice vary over the workers; counters are replicated.
            own_arrays = lambda x, over=over: axes.varying(x, over) if x.ndim else x  # noqa: E731
            states.append(Flat(jax.tree.map(own_arrays, state), bucket))
        return tuple(states)

    def take(
        self, updates: Any, state: CommunicateState, abstain: Any
    ) -> tuple[Any, CommunicateState]:
        """Takes the step: gradients in, one agreed update out."""
        tree: Any
        grads, tree = jax.tree.flatten(updates)
        group, cuts = self.plan.group, self.cuts
        if not group:
            leaves = list(grads)
            kept = Kept(tree.flatten_up_to(state.mu), tree.flatten_up_to(state.error))
        else:
            leaves = [wires.mean_slice(layout.join_bucket(grads, cut), group) for cut in cuts]
            layout.check_order([*state.mu, *state.error], [*cuts, *cuts])
            kept = Kept([x.value for x in state.mu], [x.value for x in state.error])
        done = (self.alone if self.workers == 1 else self.vote)(leaves, kept, state.owner, abstain)
        again = (lambda x: tuple(map(Flat, x, cuts))) if group else tree.unflatten
        state = state._replace(mu=again(done.kept.mu), error=again(done.kept.error))
        state = self.next_state(state, grads, done)
        for i, g in enumerate(grads):
            x = done.updates.get(i)
            grads[i] = jnp.zeros(g.shape, g.dtype) if x is None else x.astype(g.dtype)
        return tree.unflatten(grads), state

    # --- Several workers

    def vote(
        self, grads: list[jax.Array], kept: Kept, owners: Sequence[Flat], abstain: Any
    ) -> Done:
        """What one of several workers does with its leaves; workers meet in ``plan.wire``."""
        plan, pieces = self.plan, layout.pieces(self.buckets, self.step)
        g, mu, error = (layout.join_pieces(x, pieces) for x in (grads, *kept))
        wide = [(_wide(a), _wide(b)) for a, b in zip(g, mu, strict=True)]
        messages = list(starmap(plan.memory.message, wide))
        sent = list(map(_with_error, messages, error))
        made = zip(pieces, g, mu, error, sent, strict=True)
        ballots = self.exchange(list(starmap(self._to_encode, made)), owners, abstain)
        errors: list[Any] = [None] * len(pieces)
        if plan.up.feedback is not None:
            for i, piece in enumerate(pieces):
                if not piece.joined:
                    # Computed again: storing it would cost an array as large as the gradient.
                    sent[i] = _with_error(*xla.recomputed([messages[i], error[i]]))
            errors = self.quantization_errors(ballots, sent)
        with jax.named_scope("lioncub.remember"):
            remembered = list(starmap(plan.memory.remember, wide))
            after = partial(self.new_or_kept, pieces, ballots)
            kept = Kept(after(remembered, mu, kept.mu), after(errors, error, kept.error))
        updates, numbers = self.decode_replies(ballots, pieces)
        return Done(updates, kept, [ballot.owner for ballot in ballots], numbers)

    def _to_encode(self, piece: Piece, g: Any, mu: Any, error: Any, sent: jax.Array) -> jax.Array:
        """``message + error`` of a piece as ``float32[rows, 128]``, which is encoded.

        On a TPU it is computed in rows if the leaf lies in memory in that order.
        """
        if kernels.for_tpu() and layout.lies_in_rows(piece):
            rows = [None if x is None else layout.piece_to_rows(x, piece) for x in (g, mu, error)]
            g, mu, error = xla.recomputed(rows)
            message = self.plan.memory.message(_wide(g), _wide(mu))
            return _with_error(message, error).astype(jnp.float32)
        return layout.piece_to_rows(sent.astype(jnp.float32), piece)

    def exchange(
        self, values: Sequence[jax.Array], owners: Sequence[Flat], abstain: Any
    ) -> list[Ballot]:
        """Values to codes, up the wire, the owners' decisions and back.

        ``values``: ``float32[rows, 128]`` of each piece of all buckets.
        """
        plan, rest = self.plan, iter(values)
        forms, encoded, ballots = [], [], []
        layout.check_order(owners, self.buckets if plan.decision.decodes else ())
        with jax.named_scope("lioncub.pack"):
            for bucket in self.buckets:
                forms.append(Format.of(bucket, plan.up, plan.decision))
                counts = layout.counts(bucket, self.counts, plan.counts_all)
                own = list(itertools.islice(rest, len(bucket.pieces)))
                encoded.append((self._encode(forms[-1], own, counts), counts))
            each = [codes for codes, _ in encoded]
            if plan.bucket_size is None:
                flags = [self._abstains(list(itertools.chain(*each)), abstain)] * len(each)
            else:
                # Each bucket has its own flag: a common flag would make the first bucket wait for the last
                # gradient.
                flags = [self._abstains(codes, abstain) for codes in each]
        for k, (form, (codes, counts), abstains) in enumerate(
            zip(forms, encoded, flags, strict=True)
        ):
            state = owners[k].value if owners else ()
            with jax.named_scope("lioncub.pack"):
                message = form.joined(codes, abstains)
            replies, state = self._decide(form, message, counts, state)
            ballots.append(Ballot(form, codes, abstains, replies, state))
        return ballots

    def _abstains(self, messages: list[Message], abstain: Any) -> jax.Array:
        """Whether ``abstain`` is set, or a value is not finite on any of the worker's devices."""
        abstains = jnp.zeros((), bool) if abstain is None else abstain
        if messages:
            words = [x.planes[0][0] for x in messages]
            abstains = ~xla.all_delayed_by([*[x.valid for x in messages], ~abstains], words)
        return axes.any_over_shards(abstains, self.plan.axis)

    def _encode(self, form: Format, rows: list[Any], counts: jax.Array | None) -> list[Message]:
        """The codes of each piece of a bucket, of ``float32[rows, 128]`` each."""
        plan, bucket, pieces = self.plan, form.bucket, form.bucket.pieces
        totals: list[Any] = [None] * len(pieces)
        shard, shards = axes.shard(rows[0], plan.axis)
        if plan.up.measure is not None:
            measured = list(map(plan.up.measure, rows, pieces))
            # All leaves in one sum, and none at all where nothing is cut.
            sums = axes.sum_over_shards(jnp.concatenate(measured), plan.axis)
            totals = jnp.split(sums, np.cumsum([len(m) for m in measured])[:-1])
        before = [(bucket.first_row + piece.first_row) * WORDS_PER_ROW for piece in pieces]
        firsts, codes = xla.runtime_constants(before, self.step), []
        who = self.step, self.index, self.workers
        drawn = bits.draw(*who)
        if plan.bucket_size is not None:
            # XLA fuses kernels with a common operand. That would make the first bucket wait for the last,
            # so each bucket gets its own copy.
            drawn = bits.Draw(*[xla.delayed_by(x, rows[0][0, 0]) for x in drawn])
        for x, piece, total, first in zip(rows, pieces, totals, firsts, strict=True):
            own = None if counts is None else counts[piece.first_row :][: piece.rows]
            first += shard * bucket.total_rows * WORDS_PER_ROW
            context = EncodeContext(
                bucket, piece, first, *who, drawn, own, form.sends_scales, shard, shards, total
            )
            codes.append(plan.up.encode(x, context))
        return codes

    def _decide(
        self, form: Format, message: Message, counts: jax.Array | None, state: Any
    ) -> tuple[jax.Array, Any]:
        """Up the wire, the decision, and back: replies ``uint32[W, words]``, and the owner's state."""
        plan, bucket = self.plan, form.bucket
        chunks, first = self.workers, jnp.uint32(0)
        if plan.wire.owns_slice:
            chunks, first = 1, self.index.astype(jnp.uint32) * bucket.chunk
        with jax.named_scope("lioncub.up"), wires.voting(plan.axis):
            received = plan.wire.collect(compilations.marked(message), form, plan.axis)
        with jax.named_scope("lioncub.decide"):
            if counts is not None:
                counts = lax.dynamic_slice_in_dim(counts, first, chunks * bucket.chunk)
            where = Slice(
                chunks, bucket.chunk, self.workers, plan.up, bucket.dtype, counts, self.step
            )
            row = bucket.first_row + first
            row += axes.shard(message.planes[0], plan.axis)[0] * bucket.total_rows
            words = bucket.chunk * WORDS_PER_ROW
            coin = bits.coin(row * WORDS_PER_ROW, chunks * words, self.step)
            reply, state = plan.decision.answer(received, where, coin.reshape(chunks, words), state)
            replies = form.pack_reply(reply, received.present)
        with jax.named_scope("lioncub.down"):
            return plan.wire.publish(replies, plan.axis), state

    def decode_replies(
        self, ballots: Sequence[Ballot], pieces: Sequence[Piece]
    ) -> tuple[dict[int, jax.Array], list[Numbers]]:
        """Updates by leaf index, decoded from the replies; and the statistics of each bucket."""
        rows: list[jax.Array] = []
        numbers = []
        for ballot in ballots:
            replies = ballot.replies[None]
            if self.plan.group:
                replies = wires.from_group(ballot.replies, self.plan.group)
            each, found = self._decode_bucket(ballot.form, replies)
            rows += each
            numbers.append(found)
        if not self.plan.group:
            # As it is used: a conversion for each leaf is work for a compiler.
            return layout.split_pieces([x.astype(jnp.float32) for x in rows], pieces), numbers
        whole = {}
        for x, piece in zip(rows, pieces, strict=True):
            for s in piece.segments:
                first = s.first_row - piece.first_row
                whole[s.leaf] = x[:, first : first + self.cuts[s.leaf].chunk]
        return self.from_slices(whole), numbers

    def from_slices(self, whole: dict[int, jax.Array]) -> dict[int, jax.Array]:
        """Leaves by index, cut from a group's buffers, each of which is given in slices."""
        leaves: dict[int, jax.Array] = {}
        for k, cut in enumerate(self.cuts):
            pieces = layout.pieces([cut], self.step)
            leaves |= layout.split_bucket(whole[k].reshape(-1, ROW), pieces)
        return leaves

    def _decode_bucket(self, form: Format, replies: jax.Array) -> tuple[list[jax.Array], Numbers]:
        """Rows ``[slices, rows, 128]`` of each piece, and the statistics.

        Of replies ``uint32[slices, W, words]``.
        """
        with jax.named_scope("lioncub.unpack"):
            slices, bucket, decode = len(replies), form.bucket, self.plan.decision.coder.decode
            reply, present = form.unpack_reply(replies.reshape(-1, replies.shape[-1]))
            where = Slice(1, form.rows, form.workers, self.plan.up, bucket.dtype, None)
            found, rows = Numbers(reply.ties, reply.pairs, present), list[jax.Array]()
            if not bucket.large:  # one piece
                whole = decode(reply.planes, reply.rows, where)
                return [whole.reshape(slices, -1, ROW)], found
            in_blocks = lambda x: x.reshape(slices, bucket.rows // BLOCK, -1)  # noqa: E731
            words = jax.tree.map(in_blocks, (reply.planes, reply.rows))
            # Each piece by itself: large leaves of one shape share a kernel.
            before = [p.first_row // BLOCK for p in bucket.pieces]
            starts = xla.runtime_constants(before, self.step)
            for start, piece in zip(starts, bucket.pieces, strict=True):
                cut = partial(_cut, start=start, blocks=piece.rows // BLOCK)
                planes, numbers = jax.tree.map(cut, words)
                rows.append(decode(planes, numbers, where._replace(rows=piece.rows)))
            return rows, found

    def quantization_errors(
        self, ballots: Sequence[Ballot], sent: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Quantization error of each piece, ``sent - decoded``; padding may hold anything."""
        up, errors = self.plan.up, list[jax.Array]()
        for ballot in ballots:
            bucket = ballot.form.bucket
            for message, piece in zip(ballot.codes, bucket.pieces, strict=True):
                assert message.scales is not None
                steps = bucket.by_chunk(message.scales)
                planes = [x.reshape(len(steps), -1) for x in message.planes]
                rows = up.values(planes, steps, steps.shape[1], self.workers, stored=True)
                rows = rotation.undone(rows, self.step) if up.rotates else rows
                exact = _wide(sent[len(errors)])
                error = exact - layout.rows_to_piece(rows, piece).astype(exact.dtype)
                errors.append(error if up.keep == 1 else up.keep * error)
        return errors

    def new_or_kept(
        self,
        pieces: Sequence[Piece],
        ballots: Sequence[Ballot],
        new: Sequence[Any],
        before: Sequence[Any],
        leaves: list[Any],
    ) -> list[Any]:
        """The new momentum (or error) of each leaf in its dtype; the old one where the worker abstains.

        ``before`` is what `layout.join_pieces` makes of the leaves. Leaves that are in no piece stay.
        """
        if not new or new[0] is None:
            return leaves
        kept, abstains = [], [b.abstains for b in ballots for _ in b.codes]
        for piece, away, x, old in zip(pieces, abstains, new, before, strict=True):
            dtypes = {leaves[s.leaf].dtype for s in piece.segments}
            if len(dtypes) == 1:  # one cast for the whole piece
                dtype = dtypes.pop()
                x, old = quantize.saturated(x, dtype), old.astype(dtype)
            kept.append(jnp.where(away, old, x))
        found = layout.split_pieces(kept, pieces)
        for i, x in found.items():
            found[i] = quantize.saturated(layout.zero_padding(x, self.counts[i]), leaves[i].dtype)
        return [found.get(i, x) for i, x in enumerate(leaves)]

    # --- One worker

    def alone(
        self, grads: list[jax.Array], kept: Kept, owners: Sequence[Flat], abstain: Any
    ) -> Done:
        """The step of a single worker: no collective, no codes; earlier errors are added in full."""
        plan, decision = self.plan, self.plan.decision
        messages = list(map(plan.memory.message, grads, kept.mu))
        values = list(map(_with_error, messages, kept.error))
        abstains = jnp.zeros((), bool) if abstain is None else abstain
        for x in values:
            abstains |= ~jnp.all(jnp.isfinite(x))
        abstains = axes.any_over_shards(abstains, plan.axis)
        present, states = 1 - abstains.astype(jnp.uint32), []
        layout.check_order(owners, self.buckets if decision.decodes else ())
        for owner in owners:
            bucket = owner.bucket
            counts = layout.counts(bucket, self.counts, True)
            where = Slice(1, bucket.chunk, 1, quantize.dense(), bucket.dtype, counts)
            received = Sums(layout.join_bucket(values, bucket), None, present)
            rows, state = decision.alone(received, where, owner.value)
            states.append(state)
            for i, x in layout.split_bucket(rows, bucket.pieces).items():
                values[i] = x
        mu = list(
            map(partial(_unless, abstains), map(plan.memory.remember, grads, kept.mu), kept.mu)
        )
        error = [e if e is None else jnp.where(abstains, e, 0) for e in kept.error]
        updates = [jnp.where(abstains, 0, decision.coder.exact(x)) for x in values]
        *updates, present = [axes.same_everywhere(x, plan.axis) for x in (*updates, present)]
        leaves = dict(enumerate(updates))
        if plan.group:
            leaves = {k: wires.from_group(x, plan.group) for k, x in leaves.items()}
            leaves = self.from_slices(leaves)
        numbers = Numbers(jnp.zeros(1, jnp.uint32), (), present)
        return Done(leaves, Kept(mu, error), states, [numbers])

    # --- Mean of the momenta in codes, for sync.coded

    def coded_mean(
        self, leaves: list[jax.Array], owners: Sequence[Flat]
    ) -> tuple[list[Any], tuple[Flat, ...]]:
        """One sync in codes: ``u + (x_i - Q(x_i))``, with the owners' reply ``u`` to ``mean_i Q(x_i) + e``.

        A worker that abstains keeps x_i, and leaves that are in no bucket stay. With W = 1 the owner's
        error is added.
        """
        pieces = layout.pieces(self.buckets, self.step)
        if self.workers == 1:
            of_bucket = {s.leaf for piece in pieces for s in piece.segments}
            own = [x if i in of_bucket else x.ravel()[:0] for i, x in enumerate(leaves)]
            nothing = [None] * len(leaves)
            done = self.alone(own, Kept(nothing, nothing), owners, None)
            [numbers], states = done.numbers, done.owners
            for i in of_bucket:
                value = _unless(numbers.present == 0, done.updates[i], leaves[i])
                leaves[i] = axes.varying(value, self.plan.axis)
        else:
            sent = layout.join_pieces(leaves, pieces)
            rows = [
                layout.piece_to_rows(x.astype(jnp.float32), piece)
                for x, piece in zip(sent, pieces, strict=True)
            ]
            ballots = self.exchange(rows, owners, None)
            states, errors, replies = (
                [b.owner for b in ballots],
                self.quantization_errors(ballots, sent),
                [],
            )
            for ballot in ballots:
                replies += self._decode_bucket(ballot.form, ballot.replies[None])[0]
            for i, piece in enumerate(pieces):
                errors[i] += layout.rows_to_piece(replies[i], piece).astype(errors[i].dtype)
            leaves = self.new_or_kept(pieces, ballots, errors, sent, leaves)
        return leaves, tuple(map(Flat, states, self.buckets))

    # --- State

    def next_state(
        self, state: CommunicateState, grads: list[jax.Array], done: Done
    ) -> CommunicateState:
        """The state with new statistics and owner states; counts are added over shards in one sum."""
        plan, voted = self.plan, list[Any]()
        ties, _, abstained, abstentions, *pairs = jax.tree.map(jnp.zeros_like, state.votes)
        abstentions = state.votes.abstentions
        size = sum(math.prod(x.shape) * axes.shard(x, (*plan.axis, *plan.group))[1] for x in grads)
        if done.numbers:
            tie, pair = unit_of(size), unit_of(size * self.workers**2)
            totals = [each.totals(tie, pair) for each in done.numbers]
            # Without bucket_size all buckets have the same voters.
            each_own = plan.bucket_size is not None
            voters = [each.present for each in done.numbers[: None if each_own else 1]]
            found = axes.total_over_shards(totals, voters, plan.axis)
            ties = jnp.minimum(found[0].astype(jnp.float32) * 2**tie, jnp.float32(size))
            here = found[-len(voters) :].astype(jnp.int32)
            if done.numbers[0].pairs:
                pairs = [x.astype(jnp.float32) * 2.0**pair for x in found[1:3]]
            abstained = self.workers - jnp.min(here)
            abstentions = bits.add_count(abstentions, abstained)
            voted = [here[k if each_own else 0] for k in range(len(state.owner))]
        owner = []
        for here, new, flat in zip(voted, done.owners, state.owner, strict=False):
            # A counter has the type of a replicated value. So the number of voters, which is replicated
            # too, decides whether it moves.
            stop = lambda n, o, here=here: n if n.ndim else jnp.where(here > 0, n, o)  # noqa: E731
            owner.append(Flat(jax.tree.map(stop, new, flat.value), flat.bucket))
        votes = VoteCounts(ties, jnp.float32(size), abstained, abstentions, *pairs)
        count = optax.safe_increment(state.count)
        return state._replace(count=count, owner=tuple(owner), votes=votes)


def unit_of(most: int) -> int:
    """The power of two in units of which a word holds a sum, for more than ``2**32`` parameters say."""
    return max(most.bit_length() - 32, 0)


def _wide(x: Any) -> Any:
    """Float32 at least: results are rounded once, when they are stored."""
    return None if x is None else x.astype(common_dtype(x, jnp.float32))


def _with_error(message: jax.Array, error: Any) -> jax.Array:
    """What is encoded: this step's message and the error of earlier codes."""
    return message if error is None else message.astype(jnp.float32) + error.astype(jnp.float32)


def _unless(abstains: jax.Array, new: Any, old: Any) -> Any:
    """The new state of this worker, or the old one if it abstains; None where there is none."""
    if new is None:
        return old
    return jnp.where(abstains, old, quantize.saturated(new, old.dtype))


def _cut(words: jax.Array, start: jax.Array, blocks: int) -> jax.Array:
    """Some blocks of ``uint32[slices, all blocks, words]``, as ``uint32[slices, words]``."""
    return lax.dynamic_slice_in_dim(words, start, blocks, 1).reshape(len(words), -1)
