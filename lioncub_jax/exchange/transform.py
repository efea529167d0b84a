"""The transform `communicate`: its state, ``init`` and ``update`` around a step of each worker.

``init`` makes ``mu`` and ``e`` of the leaves, or of a device's part of them in a group, and ``s`` of
owned chunks. ``update`` runs `step.step` where every mesh axis is manual, then adds up statistics over the
devices.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange import bits, checks, decide, layout, quantize, wires
from lioncub_jax.exchange.bits import ROW
from lioncub_jax.exchange.checks import check_count, check_kinds
from lioncub_jax.exchange.layout import BucketLayout, Flat, register_with_flax
from lioncub_jax.exchange.mapped import Holder, on_workers
from lioncub_jax.exchange.matrices import Deal, on_rows
from lioncub_jax.exchange.momentum import MomentumRule
from lioncub_jax.exchange.plan import Exchange, Plan, bucket_leaves, deal_of, make_plan
from lioncub_jax.exchange.quantize import Codec, Quantizer
from lioncub_jax.exchange.step import StepResult, step
from lioncub_jax.exchange.votes import Decision
from lioncub_jax.exchange.wires import Reply, Wire
from lioncub_jax.mesh import axes, placement
from lioncub_jax.mesh.axes import AxisName
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.mesh.specs import StateSpecs, specs_in_step


class VoteCounts(NamedTuple):
    """Statistics of votes, the same on every worker; `metrics` gives them to a logger.

    Attributes:
      ties: ``float32[]``, parameters with votes that cancelled in the last step.
      parameters: ``float32[]``, parameters that were voted on.
      abstained: ``int32[]``, workers that abstained from the last step; with ``bucket_size`` from the
        bucket from which most abstained.
      abstentions: ``int32[]``, their sum over all steps.
      unlike: ``float32[]``, of ``pairs`` those with different votes; ``()`` but for votes of one bit.
      pairs: ``float32[]``, pairs of two workers' votes on one parameter in the last step; likewise.
    """

    ties: jax.Array
    parameters: jax.Array
    abstained: jax.Array
    abstentions: jax.Array
    unlike: jax.Array | tuple[()]
    pairs: jax.Array | tuple[()]


class CommunicateState(NamedTuple):
    """State of `communicate`.

    Attributes:
      count: ``int32[]``, steps taken; same on every worker.
      mu: momentum, shaped like the parameters, each worker's own (or None leaves).
      error: quantization error kept for the next step, shaped like the parameters, each worker's own
        (or None leaves).
      owner: for each bucket the owner's state for the chunk that this worker owns; for all rows if the
        wire is not ``sharded``.
      votes: statistics.
      specs: how the parameters and this state lie on the mesh, where that is known; no array.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: optax.Params
    error: optax.Params
    owner: tuple[Flat, ...]
    votes: VoteCounts
    specs: StateSpecs | tuple[()] = ()

    @property
    def exchanges(self) -> bool:
        """True: workers communicate in the transform of this state."""
        return True

    @staticmethod
    def holders() -> dict[str, Holder]:
        """Holders of the fields, for checkpoints."""
        return {"mu": Holder.WORKER, "error": Holder.WORKER, "owner": Holder.OWNER}


def communicate(
    *,
    workers: AxisName | Workers | None,
    momentum: MomentumRule,
    quantizer: Quantizer | None = None,
    decision: Decision | None = None,
    wire: Wire | None = None,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Exchanges codes between workers: their gradients in, one update out, the same on every worker.

    ``c_i = momentum.interpolate(g_i, mu_i)``, ``u = decide(Q(c_1 + e_1), ..., Q(c_W + e_W))``, ``mu_i =
    momentum.update(g_i, mu_i)``. The learning rate and weight decay stand behind it in a chain. Two
    listeners of ``jax.monitoring`` read each program that votes, once XLA has compiled it.

    A worker with a NaN or infinity in any leaf, or asked to by ``abstain``, abstains: it casts no vote,
    and its momentum and error stay.

    Args:
      workers: as `lion_cub`. With a ``group`` gradients are averaged in full precision inside the group,
        and each device keeps momentum and votes for its part of the parameters.
      momentum: the rule: ``blend(b1, b2)``, or ``nothing()``: signSGD, or momentum that lives at the
        owner.
      quantizer: from values to codes; default ``sign()``.
      decision: of the owner of a chunk: ``majority()`` (default), ``ternary()`` (default for
        codes with a zero), ``average()`` or ``at_owner(tx)``.
      wire: ``two_phase()`` (default), ``gathered()``, ``counts()`` or ``all_reduce()``.
      bucket_size: elements after which a new bucket begins; None for no limit.

    Returns:
      A transform. ``update(updates, state, params, abstain=None)`` takes gradients that vary over
      ``workers``, floating leaves of any shape, and returns updates of the same shapes and dtypes that
      are the same on every worker. ``abstain``: ``bool[]`` of this worker.

    Raises:
      ValueError: for components that do not fit together; when traced, for an axis that is not bound,
        gradients that were already reduced, a state of other parameters, or too many workers for a codec
        or wire.
      TypeError: without a momentum rule, or for a component of another kind; when traced, for integer or
        complex leaves, or a misspelled ``abstain``.

    Example:
      >>> import lioncub_jax as lc, optax
      >>> tx = optax.chain(
      ...     lc.communicate(workers="data", momentum=lc.momentum.blend()),
      ...     optax.scale_by_learning_rate(1e-4),
      ... )

    Source: Distributed Lion (arXiv 2404.00438), Lion Cub (arXiv 2411.16462).
    """
    quantizer = quantize.sign() if quantizer is None else quantizer
    check_kinds(quantizer=(quantizer, Quantizer))
    decision = decide.default_for(quantizer) if decision is None else decision
    wire = wires.two_phase() if wire is None else wire
    check_kinds(momentum=(momentum, MomentumRule), decision=(decision, Decision), wire=(wire, Wire))
    codec = decision.codec_of(quantizer)
    check_wire(decision, quantizer, codec, wire)
    axis, group = placement.worker_axes(workers)
    if group:
        check_group(quantizer, codec)
    if decision.matrices_of is not None and bucket_size is not None:
        raise ValueError(
            f"bucket_size={bucket_size!r}: whole matrices are dealt once, over all owners: leave it out"
        )
    if bucket_size is not None:
        wanted = "a number of elements, or None"
        check_count(f"bucket_size={bucket_size!r}", bucket_size, wanted)
    exchange = Exchange(
        axis, group, momentum_rule=momentum, message_codec=codec, decision=decision, wire=wire,
        bucket_size=bucket_size,
    )  # fmt: skip
    tx = optax.GradientTransformationExtraArgs(
        partial(first_state, exchange), partial(update_state, exchange)
    )
    return on_workers(tx, workers)


def check_wire(decision: Decision, quantizer: Quantizer, codec: Codec, wire: Wire) -> None:
    """Raises ``ValueError`` for a wire that adds what it is not given."""
    if wire.adds == "codes" and codec.decode is not None:
        raise ValueError(
            f"decision={decision.name}: the {wire.name} wire adds codes, which are not decoded then: give "
            "decision=majority(), or the two_phase wire"
        )
    if wire.adds == "values" and codec.dense is None:
        raise ValueError(
            f"decision={decision.name}: the {wire.name} wire adds values, and {quantizer.name} sends "
            "codes: give quantizer=dense() with decision=at_owner(tx), or the two_phase wire"
        )


def check_group(quantizer: Quantizer, codec: Codec) -> None:
    """Raises ``ValueError`` for codes that cannot serve two levels."""
    if codec.uses_leaf_mean:
        raise ValueError(
            f"{quantizer.name} has one scale for a whole leaf, and a device of a group has a part of many "
            "leaves: give sign(), ternary() or midrise(p)"
        )


# --- Init and update


def first_state(exchange: Exchange, params: optax.Params) -> CommunicateState:
    """The state before the first step."""
    kept, group, owner = checks.check_leaves(params), exchange.group, ()
    if checks.stands_in(kept):
        mu, error, owner = stand_ins(exchange, kept)
    else:
        if group or exchange.decision.init is not None:
            axes.check_bound(exchange.axis, group)  # chunks are those of workers
            exchange = with_matrices(exchange, kept)
            # As gradients vary, from which buckets are made.
            params = axes.varying(kept, (*exchange.axis, *group))
            parts, owner = placement.on_shards(init_on_device, (exchange, params))
            kept = parts if exchange.joins_leaves else kept
        mu, error = exchange.momentum_rule.init(kept), zero_errors(exchange.message_codec, kept)
    return CommunicateState(jnp.zeros((), jnp.int32), mu, error, owner, zero_counts(exchange))


def update_state(
    exchange: Exchange,
    updates: optax.Updates,
    state: CommunicateState,
    params: optax.Params | None = None,
    *,
    abstain: jax.Array | None = None,
    **extra: Any,
) -> tuple[optax.Updates, CommunicateState]:
    """Checks the arguments and takes a step: ``u`` of each leaf, and the next state."""
    axis, group = exchange.axis, exchange.group
    specs = state.specs.params if isinstance(state.specs, StateSpecs) else None
    kept = () if exchange.joins_leaves else (state.mu, state.error)
    abstain = checks.check_abstain(abstain, extra)
    updates = checks.check_update(updates, params, state.count, kept, axis, group)
    exchange = with_matrices(exchange, updates, specs)
    # Results have the sharding of what they replace. Of an exchange, which is a pytree, traced numbers go
    # along as replicated arrays.
    args = exchange, updates, state, abstain
    in_step = specs_in_step((*axis, *group), updates, state)
    like = updates, state
    return placement.on_shards(update_on_device, args, like, in_step and (P(), *in_step))


def with_matrices(
    exchange: Exchange, params: optax.Params, specs: Sequence[P] | None = None
) -> Exchange:
    """The exchange with the matrices of these leaves, where its decision is about whole ones."""
    matrices_of = exchange.decision.matrices_of
    if matrices_of is None:
        return exchange
    return exchange._replace(matrices=matrices_of(params, specs))


# --- State


def zero_counts(exchange: Exchange) -> VoteCounts:
    """Zeros before the first step, each an array of its own: a training step donates them all."""
    counts_pairs = exchange.message_codec.counts_pairs
    return VoteCounts(
        ties=jnp.zeros((), jnp.float32),
        parameters=jnp.zeros((), jnp.float32),
        abstained=jnp.zeros((), jnp.int32),
        abstentions=jnp.zeros((), jnp.int32),
        unlike=jnp.zeros((), jnp.float32) if counts_pairs else (),
        pairs=jnp.zeros((), jnp.float32) if counts_pairs else (),
    )


def stand_ins(exchange: Exchange, params: optax.Params) -> tuple[Any, Any, Any]:
    """``mu``, ``e`` and ``s`` where something stands in for parameters, see `checks.stands_in`.

    A tree of other arrays than the parameters' is one number, 0.
    """
    codec, decision = exchange.message_codec, exchange.decision
    keeps_mu = jax.tree.leaves(exchange.momentum_rule.init(jnp.zeros(1)))
    mu = params if keeps_mu and not exchange.joins_leaves else 0
    error = params if codec.error_dtype is not None and not exchange.joins_leaves else 0
    return mu, error, 0 if decision.init is not None else ()


def zero_errors(codec: Codec, params: optax.Params) -> optax.Params:
    """``e`` before the first step; None for each leaf without error feedback."""
    if codec.error_dtype is None:
        return jax.tree.map(lambda p: None, params)
    return jax.tree.map(lambda p: jnp.zeros_like(p, dtype=codec.error_dtype), params)


def init_on_device(
    exchange: Exchange, params: optax.Params
) -> tuple[tuple[Flat, ...], tuple[Flat, ...]]:
    """Zeros for this device's parts of the shared buckets, and ``s`` of the chunks that its worker owns.

    Either is () where there is none. Every mesh axis is manual.
    """
    num_workers, group_size = axes.workers_on(exchange.axis), axes.workers_on(exchange.group)
    leaves = jax.tree.leaves(params)
    shared, buckets = bucket_leaves(exchange, leaves, num_workers, group_size)
    parts, states, decision = [], [], exchange.decision
    for one in shared:
        zeros = jnp.zeros((one.rows_per_chunk, ROW), one.dtype)
        parts.append(axes.varying(zeros, (*one.axes, *exchange.group)))
    if decision.init is None:
        return flats(parts, shared), ()
    sharded = exchange.wire.sharded
    own = exchange.axis if sharded or num_workers == 1 else ()
    for bucket in buckets:
        over = (*own, *[n for n in bucket.axes if n not in exchange.axis])
        rows = bucket.rows_per_chunk if sharded else bucket.rows
        state = decision.init(jnp.zeros((rows, ROW), jnp.float32), deal_of(bucket, shared))
        # Arrays of an owned chunk vary over the workers; counters are the same on every worker.
        states.append(on_rows(partial(axes.varying, axis=over), state))
    return flats(parts, shared), flats(states, buckets)


def flats(values: Sequence[Any], buckets: Sequence[BucketLayout | Deal]) -> tuple[Flat, ...]:
    """Arrays that lie in rows as buckets do."""
    register_with_flax()
    return tuple([Flat(x, bucket) for x, bucket in zip(values, buckets, strict=True)])


# --- Update, where every mesh axis is manual


def update_on_device(
    exchange: Exchange, updates: optax.Updates, state: CommunicateState, abstain: jax.Array | None
) -> tuple[optax.Updates, CommunicateState]:
    """Takes a step of the worker of this device."""
    axis, group = exchange.axis, exchange.group
    axes.check_bound(axis, group)
    plan = make_plan(
        exchange,
        jax.tree.leaves(updates),
        num_workers=axes.workers_on(axis),
        group_size=axes.workers_on(group),
        worker=axes.worker_index(axis),
        device=axes.worker_index(group),
        num_steps=state.count,
    )
    return take_step(plan, updates, state, abstain)


def take_step(
    plan: Plan, updates: optax.Updates, state: CommunicateState, abstain: jax.Array | None
) -> tuple[optax.Updates, CommunicateState]:
    """Takes a step of a worker: gradients to updates, in a group by the parts of its devices."""
    tree: Any
    leaves, tree = jax.tree.flatten(updates)
    exchange, shared = plan.exchange, plan.shared
    grads, kept = leaves, (state.mu, state.error)
    if exchange.joins_leaves:
        layout.check_order([*state.mu, *state.error], [*shared, *shared])
        rows = [x.join(leaves) for x in shared]
        grads = [wires.mean_part(x, exchange.group) for x in rows] if exchange.group else rows
        mu, error = [[x.value for x in parts] for parts in kept]
    else:
        mu, error = [tree.flatten_up_to(x) for x in kept]
    layouts = [x.layout for x in plan.buckets]
    layout.check_order(state.owner, [] if exchange.decision.init is None else layouts)
    owner_states = [x.value for x in state.owner] or [()] * len(layouts)

    result = step(plan, grads, mu, error, owner_states, abstain)

    new = result.updates
    if exchange.joins_leaves:
        parts, new = new, {}
        for k, bucket in enumerate(shared):
            new |= bucket.split(parts[k].reshape(-1, ROW), plan.num_steps)
        state = state._replace(mu=flats(result.mu, shared), error=flats(result.error, shared))
    else:
        state = state._replace(mu=tree.unflatten(result.mu), error=tree.unflatten(result.error))
    state = next_state(plan, state, result, leaves)
    for i, g in enumerate(leaves):
        leaves[i] = new[i].astype(g.dtype) if i in new else jnp.zeros(g.shape, g.dtype)
    return tree.unflatten(leaves), state


def next_state(
    plan: Plan, state: CommunicateState, result: StepResult, grads: Sequence[jax.Array]
) -> CommunicateState:
    """The state with its count, statistics and owner states."""
    votes, num_present = next_counts(plan, state.votes, result.replies, grads)
    owner = []
    if state.owner:
        for n, s, old in zip(num_present, result.owner_states, state.owner, strict=True):
            owner.append(Flat(held_counters(n, s, old.value), old.bucket))
    count = optax.safe_increment(state.count)
    return state._replace(count=count, owner=tuple(owner), votes=votes)


def next_counts(
    plan: Plan, votes: VoteCounts, replies: Sequence[Reply], grads: Sequence[jax.Array]
) -> tuple[VoteCounts, list[jax.Array]]:
    """Statistics of a step, and for each bucket the number of workers present, by one sum over devices."""
    axis, per_bucket = plan.exchange.axis, plan.exchange.abstains_per_bucket
    every = (*axis, *plan.exchange.group)
    size = sum(math.prod(x.shape) * axes.shard(x, every)[1] for x in grads)
    if not replies:  # no leaf has elements
        return votes, []
    tie, pair = unit_of(size), unit_of(size * plan.num_workers**2)
    totals = [in_units(x, tie, pair) for x in replies]
    # Without bucket_size all buckets have the same voters.
    present = [x.present for x in replies]
    copies = present if per_bucket else present[:1]
    sums = axes.total_over_shards(totals, copies, axis)
    num_present = sums[-len(copies) :].astype(jnp.int32)
    ties, *pairs = sums[: -len(copies)]
    unlike, total = jax.tree.map(jnp.zeros_like, (votes.unlike, votes.pairs))
    if pairs:
        unlike, total = [x.astype(jnp.float32) * 2.0**pair for x in pairs]
    abstained = plan.num_workers - jnp.min(num_present)
    votes = VoteCounts(
        ties=jnp.minimum(ties.astype(jnp.float32) * 2**tie, jnp.float32(size)),
        parameters=jnp.float32(size),
        abstained=abstained,
        abstentions=bits.add_count(votes.abstentions, abstained),
        unlike=unlike,
        pairs=total,
    )
    return votes, [num_present[k if per_bucket else 0] for k in range(len(replies))]


def held_counters(present: jax.Array, new: optax.OptState, old: optax.OptState) -> optax.OptState:
    """An owner's state, with counters that move only if a worker participates.

    A counter has the type of a replicated value, and so has the number of workers present.
    """

    def leaf(n: jax.Array, o: jax.Array) -> jax.Array:
        return n if n.ndim else jnp.where(present > 0, n, o)

    return jax.tree.map(leaf, new, old)


def in_units(reply: Reply, tie: int, pair: int) -> jax.Array:
    """Ties, in units of ``2**tie``, and sums of pairs, in units of ``2**pair``: ``uint32[n]``."""
    ties = jnp.sum(reply.ties >> tie, dtype=jnp.uint32)
    pairs = [jnp.round(jnp.sum(x) * 2.0**-pair).astype(jnp.uint32) for x in reply.pairs]
    return jnp.stack([ties, *pairs])


def unit_of(largest: int) -> int:
    """The power of two in units of which a word holds sums up to ``largest``."""
    return max(largest.bit_length() - 32, 0)
