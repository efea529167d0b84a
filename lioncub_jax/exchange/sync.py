"""Selective momentum sync: at steps of a `Schedule` the momenta of all workers become their mean.

They do so in one all-reduce in full precision, and their drift before it is kept.
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

from lioncub_jax.exchange import checks, wires
from lioncub_jax.exchange.bits import add_count, common_dtype
from lioncub_jax.exchange.checks import check_count
from lioncub_jax.exchange.layout import Flat
from lioncub_jax.exchange.mapped import Holder, on_workers
from lioncub_jax.mesh import axes, placement
from lioncub_jax.mesh.axes import Axes, AxisName
from lioncub_jax.mesh.boxes import find_nodes
from lioncub_jax.mesh.placement import Workers, worker_axes
from lioncub_jax.mesh.specs import StateSpecs, specs_in_step

__all__ = ["Schedule", "every", "first", "sync_momentum", "thinning"]


class Schedule(NamedTuple):
    """Steps at which a sync is due; they count from 1.

    A named tuple and not a bare function, because ``optax.inject_hyperparams`` would call a function.

    Attributes:
      name: for errors and reports.
      due: ``int32[] -> bool[]``.
    """

    name: str
    due: Callable[[jax.Array], jax.Array]


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
    return Schedule(name, lambda step: (step <= steps) & inner.due(step))


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


def check_schedule(given: Any) -> None:
    """Raises ``TypeError`` for anything but a ``Schedule``."""
    if not isinstance(given, Schedule):
        raise TypeError(f"{given!r} is not a schedule: give every(T), first(M) or thinning(k)")


class SyncState(NamedTuple):
    """State of `sync_momentum`; same on every worker, but for ``inner``.

    Attributes:
      inner: the wrapped transform's state.
      count: ``int32[]``, steps taken.
      syncs: ``int32[]``, syncs done.
      drift: tree of ``float32[]``, one for each leaf of the momentum: the share of its mean square that
        is variance between workers, ``1 - |mean_i mu_i|^2 / mean_i |mu_i|^2``, as it was just before
        the last sync; -1 before the first, and of leaves that are left out.
      specs: how the parameters and this state lie on the mesh, where that is known; no array.
    """

    inner: optax.OptState
    count: jax.Array  # type: ignore[assignment]
    syncs: jax.Array
    drift: optax.Updates
    specs: StateSpecs | tuple[()] = ()

    @staticmethod
    def holders() -> dict[str, Holder]:
        """Holders of the fields, for checkpoints."""
        return {"count": Holder.ALL, "syncs": Holder.ALL, "drift": Holder.MEASURED}


def sync_momentum(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    where: optax.Params | Callable[[optax.Params], optax.Params] | None = None,
    *,
    workers: AxisName | Workers | None,
) -> optax.GradientTransformationExtraArgs:
    """Averages the momentum of ``inner`` over the workers, at times.

    ``mu_i = mean_i mu_i`` after every step at which ``schedule`` is due, for the leaves in ``where``.
    Momentum is what ``inner`` keeps in state fields named ``mu``, as optax's and this library's transforms
    do. All leaves travel together, and at other steps nothing does. A single worker has nothing to average.

    Args:
      inner: the transform to wrap.
      schedule: ``every(T)``, ``first(M)`` or ``thinning(k)``.
      where: a tree of bools like the parameters, or a function from the momentum's tree to one; None
        for all leaves.
      workers: as in the `communicate` that is wrapped.

    Returns:
      A transform with state `SyncState`.

    Raises:
      ValueError: if the mask does not match the tree, or ``inner`` keeps no momentum (both at init).
      TypeError: if ``schedule`` is not a `Schedule`, or the mask is not of bools.

    Example:
      >>> import lioncub_jax as lc
      >>> vote = lc.communicate(workers="data", momentum=lc.momentum.blend())
      >>> tx = lc.sync_momentum(vote, lc.sync.every(100), workers="data")

    Source: Lion Cub (arXiv 2411.16462), selective momentum synchronization.
    """
    check_schedule(schedule)
    axis, group = worker_axes(workers)
    where = checks.as_mask("where", where)
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> SyncState:
        state = inner.init(params)
        mu = _momentum_of(state) if jax.tree.leaves(params) else params
        picks(mu, where)  # refuses what does not match
        drift = jax.tree.map(lambda _: jnp.full((), -1, jnp.float32), mu)
        count, syncs = jnp.zeros(2, jnp.int32)
        return SyncState(state, count, syncs, drift)

    def update(
        updates: optax.Updates, state: SyncState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, SyncState]:
        axes.check_bound((*axis, *group))
        updates, inner_state = inner.update(updates, state.inner, params, **extra)
        count = optax.safe_increment(state.count)
        state = state._replace(inner=inner_state, count=count)
        if not jax.tree.leaves(updates):
            return updates, state
        due, drift = jnp.asarray(schedule.due(count)), state.drift
        mu = axes.varying(_momentum_of(inner_state), axis)
        mask = picks(mu, where)
        if group and not axes.tracked(axis):  # the sums of a group's parts need types
            specs = specs_in_step((*axis, *group), updates, state)
            lie = specs and (P(), _momentum_of(specs[1].inner), P(), P())
            mean, given = partial(_mean_if, axis=axis), (due, mu, drift, mask)
            # Results lie as what they replace.
            mu, drift = placement.on_shards(mean, given, (mu, drift), lie)
        else:
            mu, drift = _mean_if(due, mu, drift, mask, axis)
        inner_state = optax.tree.set(inner_state, _of_a_worker, mu=mu)
        syncs = add_count(state.syncs, due.astype(jnp.int32))
        return updates, state._replace(inner=inner_state, syncs=syncs, drift=drift)

    return on_workers(optax.GradientTransformationExtraArgs(init, update), workers)


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


# --- The momentum


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
    if find_nodes(mu, Flat):  # which a group shares
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
