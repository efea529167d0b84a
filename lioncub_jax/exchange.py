"""The seam: the one transform in which workers talk.

A step of a worker reads as a sentence: make a message from gradient and memory, turn it into codes,
send them up the wire, let the owner of each slice decide, read the answer, remember.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from lioncub_jax import agreement, bits, checks, decide, layout, momentum, quantize, wires
from lioncub_jax.agreement import Agreed, Plan, Voter
from lioncub_jax.ballots import Ballot, Quantizer
from lioncub_jax.decide import Down, Owner
from lioncub_jax.layout import Bucket, Cut, Flat, Holder
from lioncub_jax.mesh import placement
from lioncub_jax.mesh.specs import cut_of
from lioncub_jax.momentum import Memory
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

    @staticmethod
    def holders() -> dict[str, Holder]:
        """Whose the fields are, for checkpoints."""
        return {"mu": Holder.WORKER, "error": Holder.FEEDBACK, "owner": Holder.OWNER}


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
    group_axis: AxisName | None = None,
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
      ...     lc.communicate(axis_name="data", memory=lc.momentum.blend(0.9, 0.99), up=lc.quantize.midrise(2)),
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
        counts = [jnp.zeros((), jnp.int32) for _ in range(3)]
        ties, parameters = jnp.zeros(()), jnp.zeros(())
        mu = error = None
        owners: tuple[Flat, ...] = ()
        if owner.needs_values or group_axis is not None:
            mu, error, owners = placement.on_shards(partial(_init_slices, plan), (params,))
        if group_axis is None:
            mu = memory.init(params)
            error = jax.tree.map(lambda p: _zeros_of(p, up.feedback), params)
        return CommunicateState(
            counts[0], mu, error, owners, ties, parameters, counts[1], counts[2]
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
        checks.check_local(updates, axis_name, group_axis)
        told = None if abstain is None else checks.as_flag(abstain)

        def on_device(updates: Any, state: CommunicateState, told: Any) -> Any:
            voter = Voter(wires.worker_index(axis_name), workers, state.count)
            return worker_step(plan, voter, updates, state, told)

        # Results lie as what they replace.
        cut = cut_of((updates, state))
        return placement.on_shards(on_device, (updates, state, told), cut)

    return optax.GradientTransformationExtraArgs(init, update)


def worker_step(
    plan: Plan, voter: Voter, updates: Any, state: CommunicateState, told_to_abstain: Any
) -> tuple[Any, CommunicateState]:
    """What one worker does in a step, on each of its devices; workers meet only in ``plan.wire``."""
    workers = voter.workers
    grads, tree = _flatten(updates)
    split = _Split.of(plan, grads)
    pieces = split.pieces(grads)
    mus, errors = split.read(state.mu, tree), split.read(state.error, tree)
    sent = [plan.memory.message(g, mu) for g, mu in zip(pieces, mus, strict=True)]
    said = _with_errors(sent, errors)
    buckets = plan.buckets(pieces, workers)
    with jax.named_scope("lioncub.pack"):
        ballots = [_speak(plan, voter, bucket, said, split.cuts) for bucket in buckets]
    abstains = agreement.abstains_now(plan.axis, told_to_abstain, ballots)
    slices = [flat.value for flat in state.owner] if state.owner else [()] * len(buckets)
    agreed = [
        _agree(plan, voter, bucket, cast, abstains, slice_state, split.cuts)
        for bucket, cast, slice_state in zip(buckets, ballots, slices, strict=True)
    ]
    if workers > 1:
        # Made anew from the same inputs: kept, it would cost an array as large as the gradient.
        anew = [lax.optimization_barrier(pair) for pair in zip(sent, errors, strict=True)]
        said_again = _with_errors([c for c, _ in anew], [e for _, e in anew])
        missed = agreement.missed(plan, buckets, ballots, said_again, workers)
        errors = _withheld(abstains, [missed.get(i) for i in range(len(errors))], errors)
    with jax.named_scope("lioncub.remember"):
        kept = [plan.memory.remember(g, mu) for g, mu in zip(pieces, mus, strict=True)]
    owners = zip(agreed, buckets, strict=True) if plan.owner.needs_values else ()
    new_state = CommunicateState(
        optax.safe_increment(state.count),
        split.write(_withheld(abstains, kept, mus), tree),
        split.write(errors, tree),
        tuple(Flat(a.owner, bucket) for a, bucket in owners),
        *_statistics(plan, grads, agreed, state, workers),
    )
    return tree.unflatten(split.leaves(buckets, agreed, grads, sent)), new_state


class _Split(NamedTuple):
    """What a device of a worker votes on: leaves, or its slices of buckets that a group shares."""

    group: AxisName | None
    cuts: list[Cut | None]

    @classmethod
    def of(cls, plan: Plan, leaves: list[jax.Array]) -> "_Split":
        if plan.group is None:
            return cls(None, [None] * len(leaves))
        index = wires.worker_index(plan.group)
        return cls(plan.group, [Cut(b, layout.filled(b, index)) for b in plan.cuts(leaves)])

    def pieces(self, grads: list[jax.Array]) -> list[jax.Array]:
        """Leaves as they are; or slices, averaged over the group in full precision."""
        if self.group is None:
            return grads
        parts = wires.workers_on(self.group)
        joined = [layout.join(grads, cut.bucket, parts) for cut in self.cuts if cut]
        return [wires.mean_slice(rows, self.group) for rows in joined]

    def read(self, kept: Any, tree: Any) -> list[Any]:
        """State of each piece as a list."""
        return tree.flatten_up_to(kept) if self.group is None else [flat.value for flat in kept]

    def write(self, kept: list[Any], tree: Any) -> Any:
        """Undoes ``read``."""
        if self.group is None:
            return tree.unflatten(kept)
        return tuple(Flat(x, cut.bucket) for x, cut in zip(kept, self.cuts, strict=True) if cut)

    def leaves(
        self,
        buckets: tuple[Bucket, ...],
        agreed: list[Agreed],
        grads: list[jax.Array],
        sent: list[jax.Array],
    ) -> list[jax.Array]:
        """What was agreed on, as leaves; empty ones stay."""
        like = sent if self.group is None else grads
        leaves = [jnp.zeros(x.shape, x.dtype) for x in like]
        for bucket, answer in zip(buckets, agreed, strict=True):
            for s in bucket.segments:
                rows = answer.rows[:, s.first_row : s.first_row + s.rows].reshape(-1, bits.ROW)
                cut = self.cuts[s.leaf]
                for part in (s,) if cut is None else cut.bucket.segments:
                    own = rows if cut is None else rows[part.first_row : part.first_row + part.rows]
                    leaves[part.leaf] = layout.from_rows(own, part).astype(like[part.leaf].dtype)
        return leaves


def _flatten(tree: Any) -> tuple[list[jax.Array], Any]:
    return jax.tree.flatten(tree)


def _speak(
    plan: Plan, voter: Voter, bucket: Bucket, said: list[jax.Array], cuts: list[Cut | None]
) -> list[Ballot]:
    if voter.workers == 1:
        return agreement.values_kept(bucket, said)
    return agreement.quantized(plan, voter, bucket, said, cuts)


def _agree(
    plan: Plan,
    voter: Voter,
    bucket: Bucket,
    cast: list[Ballot],
    abstains: jax.Array,
    slice_state: Any,
    cuts: list[Cut | None],
) -> Agreed:
    if voter.workers == 1:
        return agreement.decided_alone(plan, bucket, cast, abstains, slice_state)
    return agreement.exchanged(plan, voter, bucket, cast, abstains, slice_state, cuts)


def _with_errors(sent: list[jax.Array], errors: list[Any]) -> list[jax.Array]:
    """What is to be said: this step's message and what earlier codes missed."""
    return [
        c if e is None else c.astype(jnp.float32) + e.astype(jnp.float32)
        for c, e in zip(sent, errors, strict=True)
    ]


def _withheld(abstains: jax.Array, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    """The new state of this worker, or the old one if it abstains; None where there is none."""
    return [
        o if n is None else jnp.where(abstains, o, n.astype(o.dtype))
        for n, o in zip(new, old, strict=True)
    ]


def _statistics(
    plan: Plan, grads: list[jax.Array], agreed: list[Agreed], state: CommunicateState, workers: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Ties and presence over a worker's shards, in one sum if it has any."""
    everyone = (*wires.names(plan.axis), *wires.names(plan.group or ()))
    parameters = jnp.float32(sum(g.size * wires.shards_of(g, everyone) for g in grads))
    if not agreed:
        return jnp.zeros(()), parameters, state.abstained, state.abstentions
    # The sum runs over all axes that cut any bucket; a bucket of which there are copies counts once.
    ties = sum((a.ties * wires.shards_of(a.ties, plan.axis) for a in agreed), jnp.zeros(()))
    present = agreed[0].present.astype(jnp.float32)
    both = jnp.stack([ties, present])
    both = wires.sum_over_shards(both / wires.shards_of(both, plan.axis), plan.axis)
    abstained = workers - both[1].astype(jnp.int32)
    return both[0], parameters, abstained, state.abstentions + abstained


def _init_slices(plan: Plan, params: optax.Params) -> tuple[Any, Any, Any]:
    """Momentum and errors of a group's slices, and owners' states, where every axis is manual."""
    leaves = jax.tree.leaves(params)
    mu, error, pieces = None, None, leaves
    if plan.group is not None:
        cuts = plan.cuts(leaves)
        pieces = [
            _zeros_over(b.chunk, bits.ROW, b.dtype, (*b.axes, *wires.names(plan.group)))
            for b in cuts
        ]
        mu = tuple(map(Flat, plan.memory.init(pieces), cuts))
        error = tuple(
            Flat(_zeros_of(x, plan.up.feedback), cut) for x, cut in zip(pieces, cuts, strict=True)
        )
    return mu, error, _init_owner(plan, pieces)


def _init_owner(plan: Plan, pieces: list[jax.Array]) -> tuple[Flat, ...]:
    """Each bucket's slice state; only a transform that keeps one needs to know the workers."""
    if not plan.owner.needs_values:
        return ()
    workers = wires.workers_on(plan.axis)
    own = wires.names(plan.axis) if plan.wire.owns_slice or workers == 1 else ()
    states = []
    for bucket in plan.buckets(pieces, workers):
        words = plan.wire.owned_rows(bucket, workers) * bits.WORDS_PER_ROW
        state = plan.owner.init(jnp.zeros((words, bits.WORD), bucket.dtype))
        axes = [n for n in bucket.axes if n not in wires.names(plan.axis)]
        states.append(Flat(_vary_arrays(state, (*own, *axes)), bucket))
    return tuple(states)


def _vary_arrays(state: Any, axes: tuple[str, ...]) -> Any:
    """Types the arrays of a slice as the owner's own; counters stay the same on every worker."""
    return jax.tree.map(lambda x: wires.varying(x, axes) if x.ndim else x, state)


def _zeros_over(rows: int, columns: int, dtype: Any, axes: tuple[str, ...]) -> jax.Array:
    return wires.varying(jnp.zeros((rows, columns), dtype), axes)


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
