"""Selective momentum sync: workers make their momenta alike at times, in full precision or in codes.

A `Schedule` says when. In full precision all of them become their mean, in one all-reduce, and the drift
that was found is kept. In codes (``coded(...)``) they come near it for a 28th of the bytes, by the way
that votes take: codes up, an owner for each slice, one bit and a scale for each row down.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from lioncub_jax.exchange import bits, checks, decide, layout, momentum, quantize, wires
from lioncub_jax.exchange.arguments import check_count
from lioncub_jax.exchange.layout import Flat, Holder
from lioncub_jax.exchange.means import common_dtype
from lioncub_jax.exchange.quantize import Quantizer
from lioncub_jax.exchange.step import Plan, Worker
from lioncub_jax.mesh import axes, placement
from lioncub_jax.mesh.axes import Axes, AxisName
from lioncub_jax.mesh.placement import Workers, names_of

__all__ = ["Schedule", "SyncState", "coded", "every", "first", "sync_momentum", "thinning"]


class Schedule(NamedTuple):
    """At which steps something is due; steps count from 1.

    A named tuple and not a bare function, because ``optax.inject_hyperparams`` would call a function.

    Attributes:
      name: for people.
      due: ``int32[] -> bool[]``.
      up: the codes in which momenta travel to their owners, or None for full precision.
    """

    name: str
    due: Callable[[jax.Array], jax.Array]
    up: Quantizer | None = None


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
    """Ever more rarely: after ``j`` syncs the next one is ``2**(j / k)`` steps away, rounded down.

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
    """Syncs in codes, often, each for a 28th of the bytes of full precision.

    Every worker sends ``Q(mu_i)``, codes with a step for each row of 128; the owner of a slice adds to
    the mean of what it decodes the error ``e`` that it kept from the last sync, and answers with ``u``,
    signs and one bfloat16 for each row: ``bits + 1/8`` bits up and 1 + 1/8 down, times (W-1)/W.

        ``u = C(mean_i Q(mu_i) + e)``, ``e = mean_i Q(mu_i) + e - u``, ``mu_i = u + (mu_i - Q(mu_i))``

    The error of a code stays in the worker's own momentum and that of a reply stays with the owner,
    so ``mean_i mu_i + e`` is what it was: nothing is lost, only late.

    Args:
      schedule: when; ``every(3)`` by default. Often and coarse beats seldom and exact.
      bits: of the codes, ``midrise(bits)``; the answer has one.

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
    up = quantize.error_feedback(quantize.midrise(bits), jnp.float32)
    extra = "" if bits == 1 else f", bits={bits}"
    return inner._replace(name=f"coded({inner.name}{extra})", up=up)


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
      owner: of syncs in codes, for each bucket the error of the replies, of the slice that this worker
        owns, ``float32[rows, 128]``; else empty.
    """

    inner: Any
    count: jax.Array  # type: ignore[assignment]
    syncs: jax.Array
    drift: Any
    owner: tuple[Flat, ...]

    @staticmethod
    def holders() -> dict[str, Holder]:
        """Whose the fields are, for checkpoints."""
        all_hold = dict.fromkeys(("count", "syncs"), Holder.ALL)
        return {**all_hold, "drift": Holder.MEASURED, "owner": Holder.OWNER}


def sync_momentum(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    where: Callable[[Any], Any] | Any = None,
    *,
    workers: AxisName | Workers | None,
) -> optax.GradientTransformationExtraArgs:
    """Averages the momentum of ``inner`` over the workers, at times.

    ``mu_i = mean_i mu_i`` after every step at which ``schedule`` is due, for the leaves in ``where``; with
    a `coded` schedule ``mu_i = u + (mu_i - Q(mu_i))``. Momentum is what ``inner`` keeps in state fields
    named ``mu``, as optax's and this library's transforms do. All leaves travel together, and at other
    steps nothing does. One worker alone has nothing to make alike, and adds what owners still owe to it.

    In codes, a worker whose momentum is not finite anywhere abstains: it sends nothing, the others count
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
      >>> vote = lc.communicate(workers="data", memory=lc.momentum.blend())
      >>> tx = lc.sync_momentum(vote, lc.sync.every(100), workers="data")

    Source: Lion Cub (arXiv 2411.16462), selective momentum synchronization; codes are ours.
    """
    check_schedule(schedule)
    axis, group = names_of(workers)
    where = checks.as_mask("where", where)
    plan = None if schedule.up is None else plan_of_codes(schedule, axis)
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> SyncState:
        state = inner.init(params)
        mu = _momentum_of(state) if jax.tree.leaves(params) else params
        mask = picks(mu, where)
        drift = jax.tree.map(lambda _: jnp.full((), -1, jnp.float32), mu)
        owner: Any = ()
        if plan is not None and checks.stands_in(params):
            owner = 0
        elif plan is not None:
            axes.workers_on(axis)  # bound here, or nobody knows whose slices these are
            _check_levels(mu, group)
            fresh = lambda mu: _worker(plan, group, mu, mask, jnp.int32(0)).init_owners()  # noqa: E731
            owner = placement.on_shards(fresh, (axes.varying(mu, axis),))
        count, syncs = jnp.zeros(2, jnp.int32)
        return SyncState(state, count, syncs, drift, owner)

    def update(updates: Any, state: SyncState, params: Any = None, **extra: Any) -> Any:
        axes.workers_on(axis)
        updates, inner_state = inner.update(updates, state.inner, params, **extra)
        count = optax.safe_increment(state.count)
        state = state._replace(inner=inner_state, count=count)
        if not jax.tree.leaves(updates):
            return updates, state
        due, drift, owner = jnp.asarray(schedule.due(count)), state.drift, state.owner
        mu = axes.varying(_momentum_of(inner_state), axis)
        mask = picks(mu, where)
        if plan is None:
            mu, drift = _mean_if(due, mu, drift, mask, axis)
        else:
            args = due, mu, owner, mask, plan, group, count
            # Results lie as what they replace.
            mu, owner = placement.on_shards(_coded_mean_if, args, (mu, owner))
        inner_state = optax.tree.set(inner_state, _of_a_worker, mu=mu)
        return updates, SyncState(
            inner_state, count, bits.add_count(state.syncs, due.astype(jnp.int32)), drift, owner
        )

    return optax.GradientTransformationExtraArgs(init, update)


# --- In full precision


def _mean_if(due: jax.Array, mu: Any, drift: Any, mask: Any, axis: Axes) -> Any:
    """The mean of the momenta, and their drift before."""

    def mean(mu: Any, drift: Any) -> Any:
        del drift
        square = partial(_square, axis=axis)
        means, squares = wires.mean_over_workers((mu, jax.tree.map(square, mu)), axis)
        shares = jax.tree.map(_variance_share, jax.tree.map(square, means), squares)
        return axes.varying(means, axis), shares

    both = mu, drift  # None stands for those that are left out
    picked = jax.tree.map(lambda x, pick: x if pick else None, both, (mask, mask))
    new = lax.cond(due, mean, lambda *same: same, *picked)
    return jax.tree.map(lambda x, y: x if y is None else y, both, new)


def _square(x: jax.Array, axis: Axes) -> jax.Array:
    """Of a whole leaf: each device of a worker has its own part."""
    x = jnp.abs(x.astype(common_dtype(x, jnp.float32)))
    return axes.sum_over_shards(jnp.sum(jnp.square(x)), axis)


def _variance_share(of_mean: jax.Array, mean: jax.Array) -> jax.Array:
    """What of a mean square is variance between workers, from the square of the mean."""
    return jnp.clip((mean - of_mean) / jnp.where(mean > 0, mean, 1), 0, 1).astype(jnp.float32)


# --- In codes


def plan_of_codes(schedule: Schedule, axis: Axes) -> Plan:
    """The parts of a `communicate` whose gradient is the momentum."""
    assert schedule.up is not None
    mean, wire = decide.at_owner(optax.identity(), decide.codes(1)), wires.two_phase()
    return Plan(axis, (), momentum.nothing(), schedule.up, mean, wire)


def _worker(plan: Plan, group: Axes, mu: Any, mask: Any, count: jax.Array) -> Worker:
    """The worker here, whose momentum votes; in two levels on the device's slices."""
    # Those that are left out without elements, so that no bucket takes them.
    chosen = jax.tree.map(lambda x, pick: x if pick else x.ravel()[:0], mu, mask)
    worker = Worker.of(plan, jax.tree.leaves(chosen), count)
    if not group:
        return worker
    device = axes.worker_index(group)
    return worker._replace(counts=[layout.counts_of_slice(x.bucket, device) for x in _slices(mu)])


def _coded_mean_if(
    due: jax.Array, mu: Any, owner: Any, mask: Any, plan: Plan, group: Any, count: jax.Array
) -> Any:
    """Momenta and the owners' errors after a sync in codes."""
    tree: Any
    leaves, tree = jax.tree.flatten(mu)
    mean = _worker(plan, group, mu, mask, count).coded_mean
    leaves, owner = lax.cond(due, mean, lambda *same: same, leaves, owner)
    return tree.unflatten(leaves), owner


# --- Of what


def _slices(mu: Any) -> list[Flat]:
    """The momentum of buckets that a group shares; nothing where each worker has whole leaves."""
    parts = jax.tree.leaves(mu, is_leaf=lambda x: isinstance(x, Flat))
    return [x for x in parts if isinstance(x, Flat)]


def _momentum_of(state: Any) -> Any:
    found = optax.tree.get_all_with_path(state, "mu", _of_a_worker)
    if not found:
        raise ValueError(
            "sync_momentum: the wrapped transform keeps no momentum of each worker (no state field named "
            "mu with arrays in it); momentum at the owner is one for all workers and needs no sync"
        )
    if len(found) > 1:
        wanted = "wrap each transform that keeps one, not all of them together"
        raise ValueError(
            f"sync_momentum: the wrapped transform keeps {len(found)} momenta; {wanted}"
        )
    return found[0][1]


def _of_a_worker(path: Any, value: Any) -> bool:
    """Not a field without arrays, nor the momentum of an owner's slice."""
    at_owner = any(getattr(key, "name", None) == "owner" for key in path)
    return not at_owner and bool(jax.tree.leaves(value))


def picks(mu: Any, where: Any) -> Any:
    """The mask as a tree of one bool for each leaf of the momentum."""
    if where is None:
        return jax.tree.map(lambda _: True, mu)
    if _slices(mu):
        raise ValueError(
            "sync_where is given, and in two levels the momentum is in slices of many leaves at once: "
            "leave it out, or give Workers without a group"
        )
    mask = where(mu) if callable(where) else where
    given, tree = jax.tree.structure(mask), jax.tree.structure(mu)
    if str(given) != str(tree):
        wanted = f"one bool for each leaf of {tree}"
        raise ValueError(
            f"where: the mask does not match the momentum's tree; given {given}, wanted {wanted}"
        )
    return jax.tree.unflatten(tree, map(bool, jax.tree.leaves(mask)))


def _check_levels(mu: Any, group: Axes) -> None:
    in_slices = bool(_slices(mu))
    if in_slices != bool(group):
        kept = "in slices that a group shares" if in_slices else "whole by each worker"
        raise ValueError(
            f"the momentum is kept {kept}, and the workers of sync_momentum have "
            f"group={axes.spelled(group)!r}: to sync it in codes give the Workers of the communicate that "
            "is wrapped"
        )
