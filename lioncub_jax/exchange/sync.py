"""Selective momentum sync: the momenta of all workers become their mean at times, exactly or in codes.

A `Schedule` has the steps. In full precision all momenta become their mean, in one all-reduce, and their
drift before it is kept. In codes (``coded(...)``, of one bit for a 28th of the bytes) they come near it:
such a sync is a `step` whose gradient is the momentum.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange import checks, decide, momentum, quantize, wires
from lioncub_jax.exchange.bits import add_count, common_dtype
from lioncub_jax.exchange.checks import check_count
from lioncub_jax.exchange.layout import Flat
from lioncub_jax.exchange.mapped import Holder, on_workers
from lioncub_jax.exchange.plan import Exchange, plan_of_step
from lioncub_jax.exchange.quantize import Codec
from lioncub_jax.exchange.step import step
from lioncub_jax.exchange.transform import init_owner_states
from lioncub_jax.mesh import axes, placement
from lioncub_jax.mesh.axes import Axes, AxisName
from lioncub_jax.mesh.placement import Workers, worker_axes
from lioncub_jax.mesh.specs import StateSpecs, specs_in_step

__all__ = ["Schedule", "coded", "every", "first", "sync_momentum", "thinning"]


class Schedule(NamedTuple):
    """Steps at which a sync is due, and the codec by which momenta travel then; steps count from 1.

    A named tuple and not a bare function, because ``optax.inject_hyperparams`` would call a function.

    Attributes:
      name: for errors and reports.
      due: ``int32[] -> bool[]``.
      codec: of momenta on their way to the owners, or None for full precision.
    """

    name: str
    due: Callable[[jax.Array], jax.Array]
    codec: Codec | None = None


def every(period: int) -> Schedule:
    """Every ``period`` steps; ``ValueError`` if ``period`` is below 1.

    Example:
      >>> import lioncub_jax as lc
      >>> [t for t in range(1, 10) if lc.sync.every(4).due(t)]
      [4, 8]
    """
    check_count(f"every({period!r})", period)
    return Schedule(f"every({period})", lambda step: step % period == 0)


def first(steps: int, schedule: Schedule | None = None) -> Schedule:
    """During the first ``steps`` steps only: at every one, or where ``schedule`` is due.

    Args:
      steps: at least 1.
      schedule: when among them; None for every one.

    Raises:
      ValueError: if ``steps`` is below 1.
      TypeError: if ``schedule`` is no schedule.

    Example:
      >>> import lioncub_jax as lc
      >>> [t for t in range(1, 20) if lc.sync.first(9, lc.sync.every(4)).due(t)]
      [4, 8]
    """
    check_count(f"first({steps!r})", steps)
    inner = every(1) if schedule is None else schedule
    check_schedule(inner)
    name = f"first({steps}, {inner.name})"
    return inner._replace(name=name, due=lambda step: (step <= steps) & inner.due(step))


def thinning(k: int) -> Schedule:
    """Ever more rarely: ``2**(j / k)`` steps, rounded down, lie between sync ``j`` and the next.

    So the gap has doubled after ``k`` syncs; ``ValueError`` if ``k`` is below 1.

    Example:
      >>> import lioncub_jax as lc
      >>> [t for t in range(1, 40) if lc.sync.thinning(2).due(t)]
      [1, 2, 4, 6, 10, 15, 23, 34]

    Source: Lion Cub (arXiv 2411.16462), thinning schedule.
    """
    check_count(f"thinning({k!r})", k)
    times, gaps, syncs = [1], [], 1  # at which a gap begins to hold, and after how many syncs
    while times[-1] < 2**31:
        gaps.append(int(2 ** (syncs / k)))
        ends = max(math.ceil(k * math.log2(gaps[-1] + 1)), syncs + 1)
        times.append(times[-1] + (ends - syncs) * gaps[-1])
        syncs = ends
    table = np.minimum([times[:-1], gaps], 2**31 - 1).astype(np.int32)

    def due(step: jax.Array) -> jax.Array:
        begin, gap = jnp.asarray(table)[:, jnp.sum(step >= table[0], dtype=jnp.int32) - 1]
        return (step - begin) % gap == 0

    return Schedule(f"thinning({k})", due)


def coded(schedule: Schedule | None = None, bits: int = 1) -> Schedule:
    """Syncs in codes, often: of one bit, each for a 28th of the bytes of full precision.

    Every worker sends ``Q(mu_i)``, codes with a scale for each row of 128; the owner of a chunk adds to
    the mean of what it decodes the error ``f`` that it kept from the last sync, and replies with ``R``,
    signs and one bfloat16 for each row: ``bits + 1/8`` bits up and 1 + 1/8 down, times (W-1)/W.

        ``u = R(mean_i Q(mu_i) + f)``, ``f = mean_i Q(mu_i) + f - u``, ``mu_i = u + (mu_i - Q(mu_i))``

    The error of a code stays in the worker's own momentum and that of a reply stays with the owner,
    so ``mean_i mu_i + f`` is what it was: nothing is lost, only late.

    Args:
      schedule: when; ``every(3)`` by default. Often and coarse beats seldom and exact.
      bits: of the codes, ``midrise(bits)``; the reply has one.

    Raises:
      ValueError: if ``bits`` is out of range.
      TypeError: if ``schedule`` is none.

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.distributed_lion(1e-4, workers="data", sync=lc.sync.coded(lc.sync.every(3)))

    Source: this library; error feedback on both sides is that of dist-EF-blockSGD (arXiv 1905.10936).
    """
    inner = every(3) if schedule is None else schedule
    check_schedule(inner)
    codec = quantize.error_feedback(quantize.midrise(bits), jnp.float32).value
    extra = "" if bits == 1 else f", bits={bits}"
    return inner._replace(name=f"coded({inner.name}{extra})", codec=codec)


def check_schedule(given: Any) -> None:
    """Raises ``TypeError`` for anything but a ``Schedule``."""
    if not isinstance(given, Schedule):
        wanted = "every(T), first(M), thinning(k) or coded(...)"
        raise TypeError(f"{given!r} is not a schedule: give {wanted}")


class SyncState(NamedTuple):
    """State of `sync_momentum`; same on every worker, but for ``inner`` and ``owner``.

    Attributes:
      inner: the wrapped transform's state.
      count: ``int32[]``, steps taken.
      syncs: ``int32[]``, syncs done.
      drift: tree of ``float32[]``, one for each leaf of the momentum: the share of its mean square that
        is variance between workers, ``1 - |mean_i mu_i|^2 / mean_i |mu_i|^2``, as it was just before
        the last sync in full precision; -1 before the first, and of leaves that are left out. A sync in
        codes does not measure it.
      owner: of syncs in codes, for each bucket the error of the replies, of the chunk that this worker
        owns, ``float32[rows, 128]``; else empty.
      specs: how the parameters and this state lie on the mesh, where that is known; no array.
    """

    inner: optax.OptState
    count: jax.Array  # type: ignore[assignment]
    syncs: jax.Array
    drift: optax.Updates
    owner: tuple[Flat, ...]
    specs: StateSpecs | tuple[()] = ()

    @staticmethod
    def holders() -> dict[str, Holder]:
        """Holders of the fields, for checkpoints."""
        all_hold = dict.fromkeys(("count", "syncs"), Holder.ALL)
        return {**all_hold, "drift": Holder.MEASURED, "owner": Holder.OWNER}


def sync_momentum(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    where: optax.Params | Callable[[optax.Params], optax.Params] | None = None,
    *,
    workers: AxisName | Workers | None,
) -> optax.GradientTransformationExtraArgs:
    """Averages the momentum of ``inner`` over the workers, at times.

    ``mu_i = mean_i mu_i`` after every step at which ``schedule`` is due, for the leaves in ``where``; with
    a `coded` schedule ``mu_i = u + (mu_i - Q(mu_i))``. Momentum is what ``inner`` keeps in state fields
    named ``mu``, as optax's and this library's transforms do. All leaves travel together, and at other
    steps nothing does. A single worker has nothing to average, and adds the errors of earlier replies.

    In codes, a worker with a NaN or infinity in any momentum abstains: it sends nothing, the others count
    without it, and its momentum stays. If all do, nothing changes. Momentum that is exactly zero
    everywhere gets values if others of its row of 128 are not zero.

    Args:
      inner: the transform to wrap.
      schedule: ``every(T)``, ``first(M)``, ``thinning(k)`` or ``coded(...)``.
      where: a tree of bools like the parameters, or a function from the momentum's tree to one; None
        for all leaves.
      workers: as in the `communicate` that is wrapped.

    Returns:
      A transform with state `SyncState`. With a `coded` schedule its ``init``, too, must run where
      their axis is bound.

    Raises:
      ValueError: if the mask does not match the tree, ``inner`` keeps no momentum, or ``workers`` are
        others than those of ``inner`` (all at init).
      TypeError: if ``schedule`` is not a `Schedule`, or the mask is not of bools.

    Example:
      >>> import lioncub_jax as lc
      >>> vote = lc.communicate(workers="data", momentum=lc.momentum.blend())
      >>> tx = lc.sync_momentum(vote, lc.sync.every(100), workers="data")

    Source: Lion Cub (arXiv 2411.16462), selective momentum synchronization; codes are ours.
    """
    check_schedule(schedule)
    axis, group = worker_axes(workers)
    where = checks.as_mask("where", where)
    exchange = None if schedule.codec is None else coded_exchange(schedule.codec, axis)
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> SyncState:
        state = inner.init(params)
        mu = _momentum_of(state) if jax.tree.leaves(params) else params
        mask = picks(mu, where)
        drift = jax.tree.map(lambda _: jnp.full((), -1, jnp.float32), mu)
        owner: Any = ()
        if exchange is not None and checks.stands_in(params):
            owner = 0
        elif exchange is not None:
            _check_levels(mu, group)
            axes.check_bound(axis, group)  # chunks are those of workers
            args = exchange, _picked(axes.varying(mu, axis), mask)
            owner = placement.on_shards(init_owner_states, args)
        count, syncs = jnp.zeros(2, jnp.int32)
        return SyncState(state, count, syncs, drift, owner)

    def update(
        updates: optax.Updates, state: SyncState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, SyncState]:
        axes.check_bound((*axis, *group))
        updates, inner_state = inner.update(updates, state.inner, params, **extra)
        count = optax.safe_increment(state.count)
        state = state._replace(inner=inner_state, count=count)
        if not jax.tree.leaves(updates):
            return updates, state
        due, drift, owner = jnp.asarray(schedule.due(count)), state.drift, state.owner
        mu = axes.varying(_momentum_of(inner_state), axis)
        mask = picks(mu, where)
        specs = specs_in_step((*axis, *group), updates, state)
        own = specs and (P(), _momentum_of(specs[1].inner), specs[1].owner, P(), P(), P(), P())
        # Results lie as what they replace.
        if exchange is not None:
            args = due, mu, owner, mask, exchange, group, count
            mu, owner = placement.on_shards(_coded_mean_if, args, (mu, owner), own)
        elif group and not axes.tracked(axis):  # the sums of a group's parts need types
            given, lie = (due, mu, drift, mask), own and (*own[:2], P(), P())
            mean = partial(_mean_if, axis=axis)
            mu, drift = placement.on_shards(mean, given, (mu, drift), lie)
        else:
            mu, drift = _mean_if(due, mu, drift, mask, axis)
        inner_state = optax.tree.set(inner_state, _of_a_worker, mu=mu)
        syncs = add_count(state.syncs, due.astype(jnp.int32))
        return updates, state._replace(inner=inner_state, syncs=syncs, drift=drift, owner=owner)

    return on_workers(optax.GradientTransformationExtraArgs(init, update), workers)


# --- In full precision


def _mean_if(
    due: jax.Array, mu: optax.Params, drift: optax.Updates, mask: optax.Params, axis: Axes
) -> tuple[optax.Params, optax.Updates]:
    """The mean of the momenta, and their drift before."""

    def mean(mu: optax.Params, drift: optax.Updates) -> tuple[optax.Params, optax.Updates]:
        del drift

        def square(x: jax.Array) -> jax.Array:
            """The sum of squares of a whole leaf, of which each device of a worker has a part."""
            x = jnp.abs(x.astype(common_dtype(x, jnp.float32)))
            return axes.sum_over_shards(jnp.sum(jnp.square(x)), axis)

        means, squares = wires.mean_over_workers((mu, jax.tree.map(square, mu)), axis)
        squares_of_means = jax.tree.map(square, means)
        shares = jax.tree.map(_variance_share, squares_of_means, squares)
        return axes.varying(means, axis), shares

    both = mu, drift  # None stands for those that are left out
    picked = jax.tree.map(lambda x, pick: x if pick else None, both, (mask, mask))
    new = lax.cond(due, mean, lambda *same: same, *picked)
    return jax.tree.map(lambda x, y: x if y is None else y, both, new)


def _variance_share(of_mean: jax.Array, mean: jax.Array) -> jax.Array:
    """The share of a mean square that is variance between workers, from the square of the mean."""
    return jnp.clip((mean - of_mean) / jnp.where(mean > 0, mean, 1), 0, 1).astype(jnp.float32)


# --- In codes


def coded_exchange(codec: Codec, axis: Axes) -> Exchange:
    """The exchange of a step whose gradient is the momentum."""
    mean = decide.at_owner(optax.identity(), decide.codes(1))
    rule, wire = momentum.NoMomentum(synchronizes=True), wires.two_phase()
    return Exchange(
        axis, group=(), momentum_rule=rule, message_codec=codec, decision=mean, wire=wire
    )


def _coded_mean_if(
    due: jax.Array,
    mu: optax.Params,
    owner: tuple[Flat, ...],
    mask: optax.Params,
    exchange: Exchange,
    group: Axes,
    count: jax.Array,
) -> tuple[optax.Params, tuple[Flat, ...]]:
    """``mu_i = u + (mu_i - Q(mu_i))`` if a sync is due, and the owners' states after it.

    A worker that abstains keeps its momentum, and leaves that are left out stay as they are.
    """
    old, tree = jax.tree.flatten(mu)
    row_sizes: list[jax.Array | None] = [None] * len(old)
    if group:
        device = axes.worker_index(group)
        row_sizes = [x.bucket.part_sizes(device) for x in _group_parts(mu)]
    plan = plan_of_step(exchange, jax.tree.leaves(_picked(mu, mask)), count, row_sizes)

    def sync(
        old: list[jax.Array], owner: tuple[Flat, ...]
    ) -> tuple[list[jax.Array], tuple[Flat, ...]]:
        picked = jax.tree.leaves(_picked(jax.tree.unflatten(tree, old), mask))
        no_error = [None] * len(old)
        owned = [x.value for x in owner]
        result = step(exchange, plan, picked, picked, no_error, owned, None)
        new = []
        for x, before in zip(result.mu, old, strict=True):
            new.append(axes.varying(x, exchange.axis) if x.size else before)
        states = zip(result.owner_states, owner, strict=True)
        return new, tuple([Flat(s, before.bucket) for s, before in states])

    new, owner = lax.cond(due, sync, lambda *same: same, old, owner)
    return jax.tree.unflatten(tree, new), owner


# --- The momentum


def _picked(mu: optax.Params, mask: optax.Params) -> optax.Params:
    """The momentum, with leaves that are left out empty, so that no bucket takes them."""
    return jax.tree.map(lambda x, pick: x if pick else x.ravel()[:0], mu, mask)


def _group_parts(mu: optax.Params) -> list[Flat]:
    """Parts of the momentum that a group shares; [] where each worker has whole leaves."""
    nodes = jax.tree.leaves(mu, is_leaf=lambda x: isinstance(x, Flat))
    return [x for x in nodes if isinstance(x, Flat)]


def _momentum_of(state: optax.OptState) -> optax.Params:
    momenta = optax.tree.get_all_with_path(state, "mu", _of_a_worker)
    if not momenta:
        raise ValueError(
            "sync_momentum: the wrapped transform keeps no momentum of each worker (no state field named "
            "mu with arrays in it); momentum at the owner is one for all workers and needs no sync"
        )
    if len(momenta) > 1:
        wanted = "wrap each transform that keeps one, not all of them together"
        raise ValueError(
            f"sync_momentum: the wrapped transform keeps {len(momenta)} momenta; {wanted}"
        )
    return momenta[0][1]


def _of_a_worker(path: Sequence[Any], value: optax.Params) -> bool:
    """True for a field with arrays that is no momentum of an owner's chunk."""
    at_owner = any(getattr(key, "name", None) == "owner" for key in path)
    return not at_owner and bool(jax.tree.leaves(value))


def picks(mu: optax.Params, where: Any) -> optax.Params:
    """The mask as a tree of one bool for each leaf of the momentum."""
    if where is None:
        return jax.tree.map(lambda _: True, mu)
    if _group_parts(mu):
        raise ValueError(
            "sync_where is given, and in two levels the momentum is in parts of many leaves at once: "
            "leave it out, or give Workers without a group"
        )
    mask = where(mu) if checks.is_function(where) else where
    given: Any = jax.tree.structure(mask)
    tree: Any = jax.tree.structure(mu)
    if given != tree:
        wanted = f"one bool for each leaf of {tree}"
        raise ValueError(
            f"where: the mask does not match the momentum's tree; given {given}, wanted {wanted}"
        )
    return jax.tree.unflatten(tree, map(bool, jax.tree.leaves(mask)))


def _check_levels(mu: optax.Params, group: Axes) -> None:
    in_parts = bool(_group_parts(mu))
    if in_parts != bool(group):
        kept = "in parts that a group shares" if in_parts else "whole by each worker"
        raise ValueError(
            f"the momentum is kept {kept}, and the workers of sync_momentum have "
            f"group={axes.spelled(group)!r}: to sync it in codes give the Workers of the communicate that "
            "is wrapped"
        )
