"""What a worker remembers: Lion's momentum, when it is averaged, and how far it has drifted apart.

Workers vote with a blend of their own gradient and their own momentum, so momenta drift apart where
workers see different data. ``sync_momentum`` averages them in full precision, gated by a schedule and
a mask of leaves, and reports the drift it found.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from lioncub_jax import checks, wires
from lioncub_jax.wires import AxisName


class Memory(NamedTuple):
    """What a worker blends into its message and what it keeps, as pure functions of one leaf.

    The two halves are apart because a worker that abstains sends nothing and must not remember either,
    and because momentum is then overwritten in place only after the message was made from it.

    Attributes:
      init: ``params -> mu``.
      message: ``(g, mu) -> c``, what the worker votes with.
      remember: ``(g, mu) -> mu``.
    """

    init: Callable[[optax.Params], Any]
    message: Callable[[jax.Array, Any], jax.Array]
    remember: Callable[[jax.Array, Any], Any]


def blend(b1: Any = 0.9, b2: Any = 0.99, mu_dtype: Any = None) -> Memory:
    """Lion's memory: ``c = b1 mu + (1 - b1) g`` is sent, ``mu = b2 mu + (1 - b2) g`` is kept.

    Args:
      b1: weight of the momentum in the message, in [0, 1).
      b2: decay of the momentum, in [0, 1).
      mu_dtype: dtype of the momentum; None for that of the parameters.

    Raises:
      ValueError: if a beta is outside [0, 1).
      TypeError: if ``mu_dtype`` is not floating.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675).
    """
    checks.check_betas(b1, b2)
    checks.check_mu_dtype(mu_dtype)

    def message(g: jax.Array, mu: jax.Array) -> jax.Array:
        return (1.0 - b1) * g + b1 * mu

    def remember(g: jax.Array, mu: jax.Array) -> jax.Array:
        return ((1 - b2) * g + b2 * mu).astype(mu.dtype)

    return Memory(lambda p: optax.tree.zeros_like(p, dtype=mu_dtype), message, remember)


def nothing() -> Memory:
    """Sends the gradient as it is and keeps nothing: for momentum that lives at the owner.

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.communicate(axis_name="data", memory=lc.nothing())  # signSGD with majority vote
    """
    return Memory(
        lambda params: jax.tree.map(lambda p: None, params), lambda g, mu: g, lambda g, mu: mu
    )


class Schedule(NamedTuple):
    """At which steps something is due; steps count from 1.

    A named tuple and not a bare function, because ``optax.inject_hyperparams`` would call a function.

    Attributes:
      name: for people.
      due: ``int32[] -> bool[]``, or None for never, which compiles to nothing.
    """

    name: str
    due: Callable[[jax.Array], jax.Array] | None


def never() -> Schedule:
    """Never: plain Distributed Lion.

    Example:
      >>> import lioncub_jax as lc
      >>> lc.never().due is None
      True
    """
    return Schedule("never", None)


def every(period: int) -> Schedule:
    """Every ``period`` steps.

    Raises:
      ValueError: if ``period`` is below 1.

    Example:
      >>> import lioncub_jax as lc
      >>> [t for t in range(1, 10) if lc.every(4).due(t)]
      [4, 8]
    """
    checks.check_count(f"every({period!r})", period)
    return Schedule(f"every({period})", lambda step: step % period == 0)


def first(steps: int, schedule: Schedule | None = None) -> Schedule:
    """During the first ``steps`` steps only: at every one, or where ``schedule`` is due.

    Raises:
      ValueError: if ``steps`` is below 1 or ``schedule`` is never due.

    Example:
      >>> import lioncub_jax as lc
      >>> [t for t in range(1, 20) if lc.first(9, lc.every(4)).due(t)]
      [4, 8]
    """
    checks.check_count(f"first({steps!r})", steps)
    inner = schedule or every(1)
    if inner.due is None:
        raise ValueError(f"first({steps}, never()): give a schedule that is due at times")
    due = inner.due
    return Schedule(f"first({steps}, {inner.name})", lambda step: (step <= steps) & due(step))


def thinning(k: int) -> Schedule:
    """Ever more rarely: after ``j`` syncs the next one is ``2**(j / k)`` steps away, rounded down.

    Args:
      k: syncs until the gap has doubled, at least 1.

    Raises:
      ValueError: if ``k`` is below 1.

    Source: Lion Cub (arXiv 2411.16462), thinning schedule.

    Example:
      >>> import lioncub_jax as lc
      >>> [t for t in range(1, 40) if lc.thinning(2).due(t)]
      [1, 2, 4, 6, 10, 15, 23, 34]
    """
    checks.check_count(f"thinning({k!r})", k)
    times, j = [1], 1
    while times[-1] < 2**31:
        times.append(times[-1] + int(2 ** (j / k)))
        j += 1
    table = np.array(times[:-1], np.int32)
    return Schedule(f"thinning({k})", lambda step: jnp.any(step == table))


def check_schedule(given: Any) -> None:
    """Raises ``TypeError`` for anything but a ``Schedule``."""
    if not isinstance(given, Schedule):
        raise TypeError(
            f"{given!r} is not a schedule: give never(), every(T), first(M), thinning(k)"
        )


class SyncState(NamedTuple):
    """State of ``sync_momentum``.

    Attributes:
      inner: the wrapped transform's state.
      count: ``int32[]``, steps taken; same on every worker.
      syncs: ``int32[]``, syncs done; same on every worker.
      drift: tree of ``float32[]``, one for each leaf of the momentum: the share of its mean square that
        is variance between workers, ``1 - |mean_i mu_i|^2 / mean_i |mu_i|^2``, as it was just before
        the last sync or watch; 0 before the first. Same on every worker.
    """

    inner: Any
    count: jax.Array  # type: ignore[assignment]
    syncs: jax.Array
    drift: Any


def sync_momentum(
    inner: optax.GradientTransformation,
    axis_name: AxisName,
    schedule: Schedule,
    where: Callable[[Any], Any] | Any = None,
    watch: Schedule | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Averages the momentum of ``inner`` over the workers in full precision, at times.

    ``mu_i = mean_i mu_i`` after every step at which ``schedule`` is due, for the leaves in ``where``.
    Momentum is what ``inner`` keeps in state fields named ``mu``, as optax's and this library's
    transforms do. All leaves travel in one all-reduce, which does not run at other steps.

    Args:
      inner: the transform to wrap.
      axis_name: the mesh axis of the workers.
      schedule: ``never()``, ``every(T)``, ``first(M)`` or ``thinning(k)``.
      where: a tree of bools like the parameters, or a function from the momentum's tree to one; None
        for all leaves.
      watch: when to measure the drift without syncing; costs the same traffic as a sync.

    Returns:
      A transform with state ``SyncState``.

    Raises:
      ValueError: if the mask does not match the tree, or ``inner`` keeps no momentum (at init).
      TypeError: if ``schedule`` is not a ``Schedule``.

    Example:
      >>> import lioncub_jax as lc
      >>> vote = lc.communicate(axis_name="data", memory=lc.blend())
      >>> tx = lc.sync_momentum(vote, "data", lc.every(100))

    Source: Lion Cub (arXiv 2411.16462), selective momentum synchronisation.
    """
    watch = never() if watch is None else watch
    for given in (schedule, watch):
        check_schedule(given)
    checks.check_axis(axis_name)
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> SyncState:
        state = inner.init(params)
        drift = jax.tree.map(lambda _: jnp.zeros((), jnp.float32), _momentum_of(state))
        _chosen(_momentum_of(state), where)
        return SyncState(state, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), drift)

    def update(updates: Any, state: SyncState, params: Any = None, **extra: Any) -> Any:
        wires.workers_on(axis_name)
        updates, inner_state = inner.update(updates, state.inner, params, **extra)
        count = optax.safe_increment(state.count)
        state = state._replace(inner=inner_state, count=count)
        if schedule.due is None and watch.due is None:
            return updates, state
        syncs = schedule.due(count) if schedule.due else jnp.zeros((), bool)
        looks = syncs | watch.due(count) if watch.due else syncs
        mu = _momentum_of(inner_state)
        mu, drift = _gated_mean(mu, state.drift, _chosen(mu, where), syncs, looks, axis_name)
        inner_state = optax.tree.set(inner_state, _of_a_worker, mu=mu)
        return updates, SyncState(inner_state, count, state.syncs + syncs, drift)

    return optax.GradientTransformationExtraArgs(init, update)


def _gated_mean(
    mu: Any, drift: Any, chosen: list[bool], syncs: jax.Array, looks: jax.Array, axis: AxisName
) -> tuple[Any, Any]:
    """Means and drift if ``looks``; the means replace the momentum if ``syncs``."""
    leaves, tree = jax.tree.flatten(wires.varying(mu, axis))
    drifts = jax.tree.leaves(drift)

    def look(operands: Any) -> Any:
        leaves, drifts = operands
        picked = [x for x, pick in zip(leaves, chosen, strict=True) if pick]
        means, squares = wires.mean_over_workers((picked, [_square(x) for x in picked]), axis)
        # Of a leaf that is cut, each device has looked at its own part only.
        sums = [[_square(mean), square] for mean, square in zip(means, squares, strict=True)]
        sums = [[wires.sum_over_shards(x, axis) for x in pair] for pair in sums]
        found = iter([_variance_share(*pair) for pair in sums])
        synced = [wires.varying(mean, axis) for mean in means]
        new = iter([jnp.where(syncs, m, x) for m, x in zip(synced, picked, strict=True)])
        leaves = [next(new) if pick else x for x, pick in zip(leaves, chosen, strict=True)]
        return leaves, [next(found) if pick else d for d, pick in zip(drifts, chosen, strict=True)]

    leaves, drifts = lax.cond(looks, look, lambda operands: operands, (leaves, drifts))
    return jax.tree.unflatten(tree, leaves), jax.tree.unflatten(jax.tree.structure(drift), drifts)


def _square(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x.astype(jnp.float32)))


def _variance_share(of_mean: jax.Array, mean: jax.Array) -> jax.Array:
    """What of a mean square is variance between workers, from the square of the mean."""
    share = 1 - of_mean / jnp.where(mean > 0, mean, 1)
    return jnp.where(mean > 0, jnp.clip(share, 0, 1), 0)


def _momentum_of(state: Any) -> Any:
    found = optax.tree.get_all_with_path(state, "mu", _of_a_worker)
    if not found:
        raise ValueError(
            "sync_momentum: the wrapped transform keeps no momentum of each worker (no state field named "
            "mu with arrays in it); momentum at the owner is one for all workers and needs no sync"
        )
    if len(found) > 1:
        raise ValueError(
            f"sync_momentum: the wrapped transform keeps {len(found)} momenta; wrap each transform that "
            "keeps one, not all of them together"
        )
    return found[0][1]


def _of_a_worker(path: Any, value: Any) -> bool:
    """Not a field without arrays, nor the momentum of an owner's slice."""
    at_owner = any(getattr(key, "name", None) == "owner" for key in path)
    return not at_owner and bool(jax.tree.leaves(value))


def _chosen(mu: Any, where: Any) -> list[bool]:
    """The mask as one bool for each leaf of the momentum."""
    if where is None:
        return [True] * len(jax.tree.leaves(mu))
    mask = where(mu) if callable(where) else where
    given, wanted = str(jax.tree.structure(mask)), str(jax.tree.structure(mu))
    if given != wanted:
        raise ValueError(
            f"sync_momentum: the mask does not match the momentum's tree; given {given}, wanted one "
            f"bool for each leaf of {wanted}"
        )
    return [bool(pick) for pick in jax.tree.leaves(mask)]
