"""What can be read out of a training state."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange import CommunicateState
from lioncub_jax.mesh.keys import is_key
from lioncub_jax.sync import SyncState
from lioncub_jax.training.typed import states_of


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
    found = states_of(opt_state, CommunicateState)
    if not found:
        return None
    ties, parameters = sum(s.ties for s in found), sum(s.parameters for s in found)
    return VoteStats(
        ties / jnp.maximum(parameters, 1),
        jnp.max(jnp.stack([s.abstained for s in found])),
        jnp.max(jnp.stack([s.abstentions for s in found])),
    )


class DriftStats(NamedTuple):
    """How far the workers' momenta were apart at the last sync; same on every worker.

    Attributes:
      drift: ``float32[]``, the mean of ``by_leaf`` over the leaves that were measured.
      by_leaf: for each leaf of the momentum ``float32[]``, the share of its mean square that is variance
        between workers: 0 where all are alike, (W-1)/W where they are independent. 0 of leaves that
        were not measured.
      syncs: ``int32[]``, syncs done.

    Example:
      See `drift_stats`.
    """

    drift: jax.Array
    by_leaf: Any
    syncs: jax.Array


def drift_stats(opt_state: Any) -> DriftStats | None:
    """Reads how far momenta drift apart out of the state of any chain of transforms.

    Args:
      opt_state: the state of a transform that holds a ``sync_momentum``, such as
        ``lion_cub(..., sync=...)``. Syncs in codes do not measure the drift.

    Returns:
      ``DriftStats``; of several ``sync_momentum`` with a tuple of their trees ``by_leaf``. None if nothing
      is synced. Of per-worker state stacked by ``jax.pmap`` take one worker's copy first.

    Example:
      >>> import jax.numpy as jnp, lioncub_jax as lc
      >>> tx = lc.lion_cub(1e-4, axis_name="data", sync=lc.sync.every(100))
      >>> float(lc.drift_stats(tx.init({"w": jnp.ones(3)})).by_leaf["w"])
      0.0

    Source: Lion Cub (arXiv 2411.16462), cross-worker variance of the momentum.
    """
    found = states_of(opt_state, SyncState)
    if not found:
        return None
    each = jnp.stack([jnp.float32(-1), *jax.tree.leaves([s.drift for s in found])])
    measured = each >= 0
    mean = jnp.sum(each, where=measured) / jnp.maximum(jnp.sum(measured), 1)
    trees = [jax.tree.map(partial(jnp.maximum, 0), s.drift) for s in found]
    syncs = jnp.max(jnp.stack([s.syncs for s in found]))
    return DriftStats(mean, trees[0] if len(trees) == 1 else tuple(trees), syncs)


def mean_model_state(state: Any) -> Any:
    """The model state of all workers as one, for evaluation: batch statistics averaged.

    Args:
      state: a `TrainState`, or a ``model_state`` alone, leaves ``[workers, ...]``.

    Returns:
      The model state without the leading axis, the same on all devices: floating leaves averaged over
      the workers (in float32), of whole numbers and bools the largest, of random keys the first worker's.

    Raises:
      ValueError: for leaves without a leading axis.

    Example:
      >>> import jax.numpy as jnp, lioncub_jax as lc
      >>> lc.training.mean_model_state({"mean": jnp.array([1.0, 3.0]), "calls": jnp.array([4, 4])})
      {'calls': Array(4, dtype=int32), 'mean': Array(2., dtype=float32)}

    Source: this library.
    """
    tree = getattr(state, "model_state", state)
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if not jnp.ndim(x):
            raise ValueError(
                f"model_state{jax.tree_util.keystr(path)} is a number, without the leading [workers] axis: "
                "give a TrainState, or the model_state that is in one"
            )
    return jax.tree.map(_of_all_workers, tree)


def _of_all_workers(x: jax.Array) -> jax.Array:
    sharding = getattr(x, "sharding", None)
    return _mean(sharding.mesh if isinstance(sharding, NamedSharding) else None, x)


@partial(jax.jit, static_argnums=0)
def _mean(mesh: Mesh | None, x: jax.Array) -> jax.Array:
    if is_key(x):
        one = x[0]
    elif jnp.issubdtype(x.dtype, jnp.floating):
        one = jnp.mean(x.astype(jnp.promote_types(x.dtype, jnp.float32)), axis=0).astype(x.dtype)
    else:
        one = jnp.max(x, axis=0)
    if mesh is None or AxisType.Auto not in mesh.axis_types:
        return one
    return jax.lax.with_sharding_constraint(one, NamedSharding(mesh, P()))
