"""The seam: the one transform in which workers talk. Read this first.

A step of a worker reads as a sentence: make a message from gradient and memory, turn it into codes,
send them up the wire, let the owner of each slice decide, read the reply, remember. Profilers show these
parts by name: ``lioncub.pack``, ``up``, ``decide``, ``down``, ``unpack``, ``remember``.
"""

import contextvars
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from lioncub_jax import bits, checks, decide, kernels, layout, quantize, rotation, wires
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
      abstained: ``int32[]``, workers that abstained from the last step, of buckets with votes of their own
        from the one with the fewest; same on every worker.
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


class Asked(NamedTuple):
    """A question to a transform: what does a device send in a step?

    Attributes:
      tree: shapes of what one device holds, ``jax.ShapeDtypeStruct`` or arrays.
      axes: inner mesh axes that cut each of them.
      workers: how many.
      group_size: devices of one worker, in two levels.
      platform: "cpu" for XLA's CPU backend, which all-reduces bfloat16 as float32; None for all others.
      step: steps taken before, where they matter; None for a late one, as most are.
    """

    tree: Any
    axes: list[frozenset]
    workers: int
    group_size: int = 1
    platform: str | None = None
    step: int | None = None

    @property
    def leaves(self) -> list[Any]:
        """Those of the tree."""
        return jax.tree.leaves(self.tree)


_asking = contextvars.ContextVar("whether transforms are asked what they send", default=False)


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

        def init(params: Any) -> Any:
            return optax.EmptyState() if _asking.get() else tx.init(params)

        def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
            before, after = wires.trace.senders, (updates, state)
            if not _asking.get():
                after = tx.update(updates, state, params, **checks.taken(extra))
            if not checks.only_types.get():
                # This one, and not those that it is made of; of steps that nothing traces the last.
                noted = *before, (asked, jax.tree.map(jax.typeof, updates))
                wires.trace.senders = noted[-256:]
            return after

        asked = cls(init, update)
        asked.scheme, asked.sends = scheme, sends
        return asked

    def around(self, tx: Any) -> "Sending":
        """A transform that sends what this one sends, such as a chain that it is in."""
        return Sending.like(tx, self.scheme, self.sends)

    def _replace(self, **changes: Any) -> "Sending":
        return self.around(super()._replace(**changes))


def senders(tx: Any, params: Any) -> list[tuple[Sending, Any]]:
    """The transforms in ``tx`` that send, in chains and wrappers too, each with the shapes it is given."""
    tx, found = optax.with_extra_args_support(tx), {}

    def ask(params: Any) -> Any:
        before, wires.trace.senders = wires.trace.senders, ()
        # A value of the loss, which some transforms ask for.
        updates, _ = tx.update(params, tx.init(params), params, value=0.0)
        given: tuple[Any, ...] = wires.trace.senders
        for one, tree in given:
            found[one.scheme, str(tree)] = one, tree  # optax.MultiSteps traces what it may skip too
        wires.trace.senders = before
        return updates

    with checks.during(_asking, True):
        jax.eval_shape(ask, params)
    return [*found.values()]


def communicate(
    *,
    axis_name: AxisName,
    memory: Memory,
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
    casts no vote, and its momentum and error stay as they are (with ``bucket_size``: on that bucket). A
    row of 128 elements whose values are all exactly zero is not voted on by that worker; a row on which
    nobody votes gets update 0. One worker alone sends nothing, so nothing is quantised either.

    Args:
      axis_name: mesh axis of the workers, bound by ``jax.shard_map`` or ``jax.pmap``; or several, a
        tuple, that are one group of voters together.
      memory: ``blend(b1, b2)``, or ``nothing()``: signSGD, or momentum that lives at the owner.
      up: how values become codes; default ``sign()``.
      owner: ``count()`` (default) or ``momentum_at_owner(tx)``.
      down: ``majority()`` (default), ``ternary_sum()`` (default for codes with a zero), ``average()``
        or ``floats()``.
      wire: ``two_phase()`` (default), ``gathered()``, ``counts()``, ``lanes()`` or ``all_reduce()``.
      group_axis: mesh axis of the devices that make up one worker, each with a gradient of its own: two
        levels. The gradients are averaged in full precision inside the group by a reduce-scatter, each
        device keeps momentum and votes for its slice of the parameters, and the packed answers are
        gathered inside the group.
      bucket_size: elements after which a new flat buffer begins; None for one buffer. Each travels as
        soon as its gradients are there, so a worker abstains from each by itself: with a value that is
        not finite it still votes on the others. See docs/accelerators.md for when it pays.

    Returns:
      A transform, which `traffic.of` can ask what it sends. ``update(updates, state, params,
      abstain=None)`` takes gradients that vary over ``axis_name``, floating leaves of any shape, and
      returns updates of the same shapes and dtypes that are the same on every worker. ``abstain``:
      ``bool[]`` of this worker, True to abstain.

    Raises:
      ValueError: for parts that do not fit together; when traced, for an axis that is not bound,
        gradients that were already reduced, a state of other parameters, an ``abstain`` that is no
        ``bool[]``, or too many workers for a code or wire.
      TypeError: without a memory, or for a part of another kind; when traced, for integer or complex
        leaves, or a misspelt ``abstain``.

    Example:
      >>> import lioncub_jax as lc, optax
      >>> tx = optax.chain(
      ...     lc.communicate(axis_name="data", memory=lc.momentum.blend(), up=lc.quantize.midrise(2)),
      ...     optax.add_decayed_weights(0.1),
      ...     optax.scale_by_learning_rate(1e-4),
      ... )
    """
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
    built = checks.callers_line() if axis_name is None else None
    apart = (*wires.names(axis_name), *wires.names(group_axis))

    def init(params: optax.Params) -> CommunicateState:
        checks.check_leaves(params)
        mu = error = None
        owners: tuple[Flat, ...] = ()
        if group_axis is None:
            mu, error = memory.init(params), _no_errors(params, up.feedback)
        if group_axis is not None or owner.needs_values:
            for axis in (axis_name, group_axis):
                wires.workers_on(axis)  # bound here, or nobody knows whose slices these are
            params = wires.varying(params, apart)  # as gradients do, from which buckets are made
        if group_axis is not None:
            mu, error, owners = placement.on_shards(partial(_init_slices, plan), (params,))
        elif owner.needs_values:
            leaves = jax.tree.leaves(params)
            owners = placement.on_shards(partial(init_owners, plan), (leaves,))
        # Each an array of its own: a training step donates them all.
        whole, real = partial(jnp.zeros, (), jnp.int32), partial(jnp.zeros, (), jnp.float32)
        return CommunicateState(whole(), mu, error, owners, real(), real(), whole(), whole())

    def update(
        updates: optax.Updates,
        state: CommunicateState,
        params: optax.Params | None = None,
        *,
        abstain: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, CommunicateState]:
        del extra
        wires.workers_on(axis_name)
        if checks.only_types.get():
            return _of_those_types(updates, state, apart)
        checks.check_leaves(updates)
        checks.check_local(updates, axis_name, group_axis)
        if group_axis is None:
            checks.check_state(updates, state.mu, state.error)
        if built is not None:
            checks.warn_alone(updates, built)
        checks.watch_workers(updates, params, state.count, axis_name)
        args = updates, state, abstain, _injectable(plan)
        # Results lie as what they replace.
        return placement.on_shards(partial(on_device, plan), args, cut_of((updates, state)))

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

    @property
    def scheme(self) -> str:
        """The codes, the wire and what comes back, for people."""
        owner = f"{self.owner.name}, " if self.owner.needs_values else ""
        return f"{self.up.name}, {self.wire.name}, {owner}{self.down.name}"

    def buckets(self, leaves: list[jax.Array], workers: int) -> tuple[Bucket, ...]:
        """The flat buffers in which leaves, or slices of a group's buckets, travel between workers."""
        limit, devices = self.bucket_size, wires.workers_on(self.group)
        limit = None if limit is None else max(limit // devices, 1)
        return layout.buckets(leaves, workers, limit, list(map(wires.varying_axes, leaves)))

    def cuts(self, leaves: list[jax.Array]) -> tuple[Bucket, ...]:
        """The flat buffers that the devices of a group share."""
        devices, axes = wires.workers_on(self.group), list(map(wires.varying_axes, leaves))
        return layout.buckets(leaves, devices, self.bucket_size, axes)

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
            form = Format.of(self.up, self.owner, self.down, bucket)
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


def _of_those_types(updates: Any, state: CommunicateState, axes: AxisName) -> Any:
    """Something of the types of an update and the next state."""
    mu, error = wires.varying((state.mu, state.error), axes)
    agreed = jax.tree.map(partial(wires.same_everywhere, axis=axes), updates)
    return agreed, state._replace(mu=mu, error=error)


def _injectable(plan: Plan) -> list[list[Any]]:
    """Numbers that are arrays, which a ``shard_map`` in explicit axes may not close over; else None."""
    numbers = plan.memory.numbers, plan.owner.numbers
    return [[x if isinstance(x, jax.Array) else None for x in each] for each in numbers]


def _injected(part: Any, arrays: list[Any]) -> Any:
    """A memory or owner with arrays for its numbers."""
    if all(x is None for x in arrays):
        return part
    return part.with_numbers(
        *[n if x is None else x for n, x in zip(part.numbers, arrays, strict=True)]
    )


def on_device(
    plan: Plan, updates: Any, state: CommunicateState, abstain: Any, injected: Any
) -> tuple[Any, CommunicateState]:
    """A worker's step on one of its devices, where every axis of the mesh is manual."""
    memory, owner = _injected(plan.memory, injected[0]), _injected(plan.owner, injected[1])
    plan = plan._replace(memory=memory, owner=owner)
    index, workers = wires.worker_index(plan.axis), wires.workers_on(plan.axis)
    worker = Worker(index, workers, state.count, [None] * len(jax.tree.leaves(updates)))
    step = worker_step if plan.group is None else _step_in_group
    return step(plan, worker, updates, state, abstain)


def worker_step(
    plan: Plan, worker: Worker, updates: Any, state: CommunicateState, abstain: Any
) -> tuple[Any, CommunicateState]:
    """The step of a worker that is one device, or of its shard of a worker that is several."""
    tree: Any
    grads, tree = jax.tree.flatten(updates)
    kept = Kept(tree.flatten_up_to(state.mu), tree.flatten_up_to(state.error))
    rows: list[jax.Array] = []
    owners: list[Any] = []
    numbers, updates = [], []
    if worker.workers == 1:
        values, found, owners, kept = alone(plan, worker, grads, kept, state.owner, abstain)
        leaves, numbers = dict(enumerate(values)), [found]
    else:
        buckets = plan.buckets(grads, worker.workers)
        pieces = layout.pieces(buckets, worker.step)
        ballots, kept = vote(plan, worker, buckets, pieces, grads, kept, state.owner, abstain)
        for ballot in ballots:
            each, found = open_replies(plan, worker, ballot.form, ballot.replies[None])
            # As it is used: a conversion for each leaf is work for a compiler.
            rows += [x.astype(jnp.float32) for x in each]
            owners.append(ballot.owner)
            numbers.append(found)
        leaves = layout.apart(rows, pieces)
    for i, g in enumerate(grads):
        updates.append(leaves[i].astype(g.dtype) if i in leaves else jnp.zeros(g.shape, g.dtype))
    mu, error = tree.unflatten(kept.mu), tree.unflatten(kept.error)
    new = _next_state(plan, worker, state, grads, mu, error, owners, numbers)
    return tree.unflatten(updates), new


def vote(
    plan: Plan,
    worker: Worker,
    buckets: Sequence[Bucket],
    pieces: Sequence[Piece],
    grads: list[jax.Array],
    kept: Kept,
    owners: Any,
    abstain: Any,
) -> tuple[list[Ballot], Kept]:
    """What one of several workers does with its leaves; workers meet in ``plan.wire``."""
    g, mu, error = (layout.joined(x, pieces) for x in (grads, *kept))
    wide = [(_wide(a), _wide(b)) for a, b in zip(g, mu, strict=True)]
    messages = list(starmap(plan.memory.message, wide))
    sent = list(map(_with_error, messages, error))
    made = zip(pieces, g, mu, error, messages, sent, strict=True)
    values = list(starmap(partial(_in_rows, plan), made))
    ballots = exchange(plan, worker, buckets, values, owners, abstain)
    missed: list[Any] = []
    if plan.up.feedback is not None:
        for i, piece in enumerate(pieces):
            if len(piece.segments) == 1:
                # Made anew from the same inputs: kept, it would cost an array as large as the gradient.
                sent[i] = _with_error(*lax.optimization_barrier((messages[i], error[i])))
        missed = uncoded(plan, worker, ballots, sent)
    with jax.named_scope("lioncub.remember"):
        remembered = list(starmap(plan.memory.remember, wide))
        after = partial(by_leaf, worker, pieces, ballots)
        kept = Kept(after(remembered, mu, kept.mu), after(missed, error, kept.error))
    return ballots, kept


def _in_rows(
    plan: Plan, piece: Piece, g: Any, mu: Any, error: Any, message: jax.Array, sent: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """What is encoded of a piece, ``float32[rows, 128]``: of leaves, or where it is free, of their rows.

    And where errors alone are not sent, the message without the error.
    """
    waits = error is not None and plan.owner.bounds
    if kernels.for_tpu() and layout.lies_in_rows(piece):
        rows = [None if x is None else layout.as_rows(x, piece) for x in (g, mu, error)]
        g, mu, error = kernels.as_they_lie(rows)
        message = plan.memory.message(_wide(g), _wide(mu))
        encoded = _with_error(message, error).astype(jnp.float32)
    else:
        encoded = layout.in_rows(sent, piece)
        message = layout.as_rows(message, piece) if waits else message
    return encoded, message if waits else None


def _wide(x: Any) -> Any:
    """Float32 at least: what is computed of it is rounded when it is kept, and not before."""
    return None if x is None else x.astype(jnp.promote_types(x.dtype, jnp.float32))


def by_leaf(
    worker: Worker,
    pieces: Sequence[Piece],
    ballots: Sequence[Ballot],
    new: Sequence[Any],
    before: Sequence[Any],
    leaves: list[Any],
) -> list[Any]:
    """What a worker keeps of each leaf, in its dtype: the new, or that of before if it abstains.

    ``before`` is what `layout.joined` makes of the leaves; they stay where there is nothing new.
    """
    if not new or new[0] is None:
        return leaves
    kept, abstains = [], [b.abstains for b in ballots for _ in b.codes]
    for piece, away, x, old in zip(pieces, abstains, new, before, strict=True):
        dtypes = {leaves[s.leaf].dtype for s in piece.segments}
        if len(dtypes) == 1:  # once for all of them
            dtype = dtypes.pop()
            x, old = quantize.saturated(x, dtype), old.astype(dtype)
        kept.append(jnp.where(away, old, x))
    found = layout.apart(kept, pieces)
    for i, x in found.items():
        found[i] = quantize.saturated(_real_only(x, worker.counts[i]), leaves[i].dtype)
    return [found.get(i, x) for i, x in enumerate(leaves)]


def exchange(
    plan: Plan,
    worker: Worker,
    buckets: Sequence[Bucket],
    values: Sequence[tuple[jax.Array, jax.Array | None]],
    owners: Sequence[Flat],
    abstain: Any,
) -> list[Ballot]:
    """Values to codes, up the wire, the owners' decisions and back.

    Of the values of all buckets' pieces in rows, ``float32[rows, 128]``, and what they are without the
    error of before, where an error alone is not sent.
    """
    forms, encoded, ballots = [], [], []
    rest, slices = iter(values), buckets if plan.owner.needs_values else ()
    layout.check_order(owners, slices)
    with jax.named_scope("lioncub.pack"):
        for bucket in buckets:
            forms.append(Format.of(plan.up, plan.owner, plan.down, bucket))
            counts = layout.counts(bucket, worker.counts, plan.up.has_zero)
            own = list(itertools.islice(rest, len(bucket.pieces)))
            encoded.append((_encode(plan, worker, forms[-1], own, counts), counts))
        each = [codes for codes, _ in encoded]
        if plan.bucket_size is None:
            flags = [_abstains(plan, list(itertools.chain(*each)), abstain)] * len(each)
        else:
            # A bucket that waited for the flags of all others could not travel before the last is there.
            flags = [_abstains(plan, codes, abstain) for codes in each]
    for k, (form, (codes, counts), abstains) in enumerate(zip(forms, encoded, flags, strict=True)):
        state = owners[k].value if owners else ()
        replies, state = _decide(plan, worker, form, codes, counts, abstains, state)
        ballots.append(Ballot(form, codes, abstains, replies, state))
    return ballots


def _abstains(plan: Plan, messages: list[Message], abstain: Any) -> jax.Array:
    """Whether a worker is asked to abstain, or has a value that is not finite on any of its devices."""
    abstains = jnp.zeros((), bool) if abstain is None else abstain
    if not messages:
        return wires.any_over_shards(abstains, plan.axis)
    # Never true, but known only when all codes are made: momentum is then overwritten in place, where it
    # would be copied for the codes that are still to be made of it.
    codes = [lax.population_count(x.planes[0][0]) > BLOCK for x in messages]
    # Reduced with what was asked, so that it is found once and not anew for the momentum of each leaf: of
    # one message alone XLA would drop the reduction.
    flags = [jnp.stack([*codes, abstains]), ~jnp.stack([*[x.finite for x in messages], ~abstains])]
    made, strange = lax.reduce(flags, [jnp.zeros((), bool)] * 2, bits.or_each, (0,))
    return wires.any_over_shards(made | strange, plan.axis)


def _encode(
    plan: Plan, worker: Worker, form: Format, values: list[Any], counts: jax.Array | None
) -> list[Message]:
    """The codes of each piece of a bucket, of its rows and of who speaks on them."""
    rows = [x for x, _ in values]
    bucket, pieces = form.bucket, form.bucket.pieces
    totals: list[Any] = [None] * len(pieces)
    shard, shards = wires.shard(rows[0], plan.axis)
    if plan.up.measure is not None:
        measured = list(map(plan.up.measure, rows, pieces))
        # All leaves in one sum, and none at all where nothing is cut.
        sums = wires.sum_over_shards(jnp.concatenate(measured), plan.axis)
        totals = jnp.split(sums, np.cumsum([len(m) for m in measured])[:-1])
    before = [(bucket.first_row + piece.first_row) * WORDS_PER_ROW for piece in pieces]
    firsts, codes = layout.at_run_time(before, worker.step), []
    who = worker.step, worker.index, worker.workers
    drawn = bits.draw(*who)
    if plan.bucket_size is not None:
        # Of a number that is never set, but known only with this bucket's gradients: XLA makes one kernel
        # of several that take the same, and then the first bucket would wait for the last.
        first_number = lax.bitcast_convert_type(rows[0][0, 0], jnp.uint32)
        never = (lax.population_count(first_number) > BLOCK).astype(jnp.uint32)
        drawn = bits.Draw(*[x ^ never for x in drawn])
    for (x, without), piece, total, first in zip(values, pieces, totals, firsts, strict=True):
        own = None if counts is None else counts[piece.first_row :][: piece.rows]
        first += shard * bucket.total_rows * WORDS_PER_ROW
        place = Place(
            bucket, piece, first, *who, drawn, own, form.sends_steps, shard, shards, total, without
        )
        message = plan.up.encode(x, place)
        if without is not None and message.steps is not None:
            speaks = jnp.any(without != 0, axis=1) if message.speaks is None else message.speaks
            message = message._replace(steps=jnp.where(speaks, message.steps, 0), speaks=None)
        codes.append(message)
    return codes


def _decide(
    plan: Plan,
    worker: Worker,
    form: Format,
    codes: list[Message],
    counts: jax.Array | None,
    abstains: jax.Array,
    state: Any,
) -> tuple[jax.Array, Any]:
    """Up the wire, the owner's decision, and back: replies ``uint32[W, words]``, and the owner's state."""
    assert plan.axis is not None  # without one there is one worker
    bucket, chunks = form.bucket, 1 if plan.wire.owns_slice else worker.workers
    with jax.named_scope("lioncub.pack"):
        message = _joined(form, codes, abstains)
    with jax.named_scope("lioncub.up"), wires.voting(plan.axis):
        received = plan.wire.collect(message, ~abstains, form, plan.axis)
    with jax.named_scope("lioncub.decide"):
        first = worker.index.astype(jnp.uint32) * bucket.chunk if plan.wire.owns_slice else 0
        if counts is not None:
            counts = lax.dynamic_slice_in_dim(counts, first, chunks * bucket.chunk)
        where = Slice(
            chunks, bucket.chunk, worker.workers, plan.up, bucket.dtype, counts, worker.step
        )
        result, state = plan.owner.decide(received, where, state)
        row = bucket.first_row + first
        row += wires.shard(codes[0].planes[0], plan.axis)[0] * bucket.total_rows
        words = bucket.chunk * WORDS_PER_ROW
        coin = bits.coin(row * WORDS_PER_ROW, chunks * words, worker.step)
        reply = plan.down.encode(result, coin.reshape(chunks, words))
        replies = form.pack_reply(reply, received.present)
    with jax.named_scope("lioncub.down"):
        return plan.wire.publish(replies, plan.axis), state


def _joined(form: Format, codes: list[Message], abstains: jax.Array) -> Message:
    """The message about a whole bucket, padded to its chunks; without votes if the worker abstains."""
    planes, voted, steps = [], None, None
    mask: Any = True
    if form.sends_votes:
        words = form.workers * bits.row_words(form.rows)
        voted = jnp.where(abstains, 0, _padded([x.voted for x in codes], words))
        mask = bits.over_rows(voted.reshape(form.workers, -1), form.rows).reshape(-1)
    zero = form.up.top(form.workers) // 2 if form.up.has_zero else 0
    for k in range(form.message_planes):
        plane = _padded([x.planes[k] for x in codes], form.workers * form.plane_words)
        if form.up.has_zero:
            plane = jnp.where(abstains, jnp.uint32(0xFFFFFFFF * (zero >> k & 1)), plane)
        planes.append(plane & mask if form.sends_votes else plane)
    if form.sends_steps:
        steps = jnp.where(abstains, 0, _padded([x.steps for x in codes], form.workers * form.rows))
    return Message(planes, voted, steps, ~abstains)


def _padded(parts: Sequence[Any], size: int) -> jax.Array:
    """The parts one after the other, then zeros."""
    return layout.pad_rows(jnp.concatenate(parts) if len(parts) > 1 else parts[0], size)


def open_replies(
    plan: Plan, worker: Worker, form: Format, replies: jax.Array
) -> tuple[list[jax.Array], Any]:
    """Rows ``[slices, rows, 128]`` of each piece, and ties and who took part.

    Of replies ``uint32[slices, W, words]``.
    """
    with jax.named_scope("lioncub.unpack"):
        slices, bucket = len(replies), form.bucket
        reply, present = form.unpack_reply(replies.reshape(-1, replies.shape[-1]))
        where = Slice(1, form.rows, form.workers, plan.up, bucket.dtype, None)
        found, rows = (reply.ties, present), []
        if not bucket.large:  # one piece
            whole = plan.down.decode(reply.planes, reply.rows, where)
            return [whole.reshape(slices, -1, ROW)], found
        in_blocks = lambda x: x.reshape(slices, bucket.rows // BLOCK, -1)  # noqa: E731
        words = jax.tree.map(in_blocks, (reply.planes, reply.rows))
        # Each piece by itself: large leaves of one shape share a kernel.
        starts = layout.at_run_time([p.first_row // BLOCK for p in bucket.pieces], worker.step)
        for start, piece in zip(starts, bucket.pieces, strict=True):
            cut = partial(_cut, start=start, blocks=piece.rows // BLOCK)
            planes, numbers = jax.tree.map(cut, words)
            rows.append(plan.down.decode(planes, numbers, where._replace(rows=piece.rows)))
        return rows, found


def _cut(words: jax.Array, start: jax.Array, blocks: int) -> jax.Array:
    """Of words by blocks, ``uint32[slices, all blocks, words]``, some blocks: ``uint32[slices, words]``."""
    return lax.dynamic_slice_in_dim(words, start, blocks, 1).reshape(len(words), -1)


def uncoded(
    plan: Plan, worker: Worker, ballots: list[Ballot], sent: Sequence[jax.Array]
) -> list[jax.Array]:
    """The quantisation error of each piece, like ``sent``; in padding it means nothing."""
    missed: list[jax.Array] = []
    for ballot in ballots:
        bucket = ballot.form.bucket
        for message, piece in zip(ballot.codes, bucket.pieces, strict=True):
            assert message.steps is not None
            steps = bucket.by_chunk(message.steps)
            planes = [x.reshape(len(steps), -1) for x in message.planes]
            rows = plan.up.values(planes, steps, steps.shape[1], worker.workers, once=True)
            rows = rotation.turned_back(rows, worker.step) if plan.up.turns else rows
            error = sent[len(missed)] - layout.undo_rows(rows, piece)
            missed.append(error if plan.up.keep == 1 else plan.up.keep * error)
    return missed


def _real_only(rows: jax.Array, count: jax.Array | None) -> jax.Array:
    """``[rows, 128]`` of a slice with zeros in the padding, if any: codes cannot say zero there."""
    return rows if count is None else jnp.where(jnp.arange(ROW) < count[:, None], rows, 0)


def alone(
    plan: Plan, worker: Worker, grads: list[jax.Array], kept: Kept, owners: Any, abstain: Any
) -> tuple[list[jax.Array], Any, list[Any], Kept]:
    """One worker's step: nothing travels, so nothing is quantised, and nothing is left out or owed."""
    messages = [plan.memory.message(g, mu) for g, mu in zip(grads, kept.mu, strict=True)]
    messages = list(map(_with_error, messages, kept.error))
    values = list(messages)
    abstains = jnp.zeros((), bool) if abstain is None else abstain
    for x in values:
        abstains |= ~jnp.all(jnp.isfinite(x))
    abstains = wires.any_over_shards(abstains, plan.axis)
    present, states = 1 - abstains.astype(jnp.uint32), [flat.value for flat in owners]
    buckets = plan.buckets(grads, 1) if plan.owner.needs_values else ()
    layout.check_order(owners, buckets)
    for k, bucket in enumerate(buckets):
        where = Slice(1, bucket.chunk, 1, quantize.dense(), bucket.dtype, None)
        received = Sums(layout.join_all(messages, bucket), None, present)
        result, states[k] = plan.owner.decide(received, where, states[k])
        rows = result.values.reshape(-1, ROW)
        for i, x in layout.apart_all(rows, bucket.pieces).items():
            values[i] = x
    mu = [
        _unless(abstains, plan.memory.remember(g, m), m)
        for g, m in zip(grads, kept.mu, strict=True)
    ]
    updates = [jnp.where(abstains, 0, plan.down.exact(x)) for x in values]
    *updates, present = [wires.same_everywhere(x, plan.axis) for x in (*updates, present)]
    error = [e if e is None else jnp.where(abstains, e, 0) for e in kept.error]
    return updates, (jnp.zeros(1, jnp.uint32), present), states, Kept(mu, error)


def _with_error(message: jax.Array, error: Any) -> jax.Array:
    """What is encoded: this step's message and the error of earlier codes."""
    return message if error is None else message.astype(jnp.float32) + error.astype(jnp.float32)


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
    tree: Any
    grads, tree = jax.tree.flatten(updates)
    assert plan.group is not None
    cuts, device = plan.cuts(grads), wires.worker_index(plan.group)
    slices = [wires.mean_slice(layout.join_all(grads, cut), plan.group) for cut in cuts]
    worker = worker._replace(counts=[slice_counts(plan, cut, device) for cut in cuts])
    layout.check_order([*state.mu, *state.error], [*cuts, *cuts])
    kept = Kept([x.value for x in state.mu], [x.value for x in state.error])
    if worker.workers == 1:
        each, found, owners, kept = alone(plan, worker, slices, kept, state.owner, abstain)
        whole, numbers = [wires.from_group(x, plan.group) for x in each], [found]
    else:
        buckets = plan.buckets(slices, worker.workers)
        pieces = layout.pieces(buckets, worker.step)
        ballots, kept = vote(plan, worker, buckets, pieces, slices, kept, state.owner, abstain)
        owners = [ballot.owner for ballot in ballots]
        whole, numbers = list(slices), []
        for ballot in ballots:
            replies = wires.from_group(ballot.replies, plan.group)
            each, found = open_replies(plan, worker, ballot.form, replies)
            numbers.append(found)
            for rows, piece in zip(each, ballot.form.bucket.pieces, strict=True):
                for s in piece.segments:
                    first = s.first_row - piece.first_row
                    whole[s.leaf] = rows[:, first : first + cuts[s.leaf].chunk]
    updates = [jnp.zeros(g.shape, g.dtype) for g in grads]
    for cut, rows in zip(cuts, whole, strict=True):
        pieces = layout.pieces([cut], worker.step)
        for i, x in layout.apart_all(rows.reshape(-1, ROW), pieces).items():
            updates[i] = x.astype(grads[i].dtype)
    mu, error = (tuple(map(Flat, x, cuts)) for x in kept)
    new = _next_state(plan, worker, state, grads, mu, error, owners, numbers)
    return tree.unflatten(updates), new


def slice_counts(plan: Plan, cut: Bucket, device: jax.Array) -> jax.Array | None:
    """Elements of each row of a device's slice that are no padding; None where none is mistaken."""
    counts = layout.counts(cut, zeros=plan.up.has_zero)
    if counts is None:
        return None
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
    numbers: list[Any],
) -> CommunicateState:
    """With ties and presence over a worker's shards, in one sum if it has any."""
    ties, abstained, abstentions = jnp.zeros((), jnp.float32), state.abstained, state.abstentions
    everyone = (*wires.names(plan.axis), *wires.names(plan.group))
    size = sum(math.prod(x.shape) * wires.shard(x, everyone)[1] for x in grads)
    voted: Any = []
    if numbers:
        # In units of 2, 4, ... for more than 2**32 parameters, whose ties a word does not hold.
        power = max(size.bit_length() - 32, 0)
        tied = [jnp.sum(each >> power, dtype=jnp.uint32) for each, _ in numbers]
        # Without a limit on buckets all have the same voters.
        voters = [present for _, present in numbers[: 1 if plan.bucket_size is None else None]]
        found = wires.total_over_shards(tied, voters, plan.axis)
        ties, voted = found[0].astype(jnp.float32) * 2**power, found[1:].astype(jnp.int32)
        abstained = worker.workers - jnp.min(voted)
        abstentions += abstained

    def counted(voters: Any, new: jax.Array, old: jax.Array) -> jax.Array:
        # Counters of a transform are the same on all workers by type, so what all know must stop them.
        return new if new.ndim else jnp.where(voters > 0, new, old)

    kept = []
    for k, (new, flat) in enumerate(zip(owners if state.owner else (), state.owner, strict=True)):
        voters = voted[min(k, len(voted) - 1)]
        kept.append(Flat(jax.tree.map(partial(counted, voters), new, flat.value), flat.bucket))
    count = optax.safe_increment(state.count)
    statistics = ties, jnp.float32(size), abstained, abstentions
    return CommunicateState(count, mu, error, tuple(kept), *statistics)


def _init_slices(plan: Plan, params: optax.Params) -> tuple[Any, Any, tuple[Flat, ...]]:
    """Momentum and errors of a group's slices, and owners' states, where every axis is manual."""
    cuts, slices = plan.cuts(jax.tree.leaves(params)), []
    for cut in cuts:
        zeros = jnp.zeros((cut.chunk, ROW), cut.dtype)
        slices.append(wires.varying(zeros, (*cut.axes, *wires.names(plan.group))))
    mu, error = plan.memory.init(slices), _no_errors(slices, plan.up.feedback)
    return tuple(map(Flat, mu, cuts)), tuple(map(Flat, error, cuts)), init_owners(plan, slices)


def init_owners(plan: Plan, leaves: list[jax.Array]) -> tuple[Flat, ...]:
    """Each bucket's slice state; only a transform that keeps one needs to know the workers."""
    if not plan.owner.needs_values:
        return ()
    workers = wires.workers_on(plan.axis)
    own = wires.names(plan.axis) if plan.wire.owns_slice or workers == 1 else ()
    states = []
    for bucket in plan.buckets(leaves, workers):
        rows = bucket.chunk if plan.wire.owns_slice else bucket.rows
        tree: Any
        arrays, tree = jax.tree.flatten(plan.owner.init(jnp.zeros((rows, ROW), bucket.dtype)))
        axes = (*own, *[n for n in bucket.axes if n not in wires.names(plan.axis)])
        # Arrays of a slice are the owner's own; counters stay the same on every worker.
        arrays = [wires.varying(x, axes) if x.ndim else x for x in arrays]
        states.append(Flat(tree.unflatten(arrays), bucket))
    return tuple(states)


def _no_errors(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda p: None if dtype is None else jnp.zeros_like(p, dtype=dtype), tree)
