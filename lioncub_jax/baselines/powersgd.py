"""PowerSGD: two thin factors of each matrix of the mean gradient travel in its place.

For a leaf that is a matrix of m x n, on worker i, with factors of rank r::

    M_i = g_i + e_i
    P   = orthonormal(mean_i M_i Q)   # m x r, the first all-reduce
    Q   = mean_i M_i^T P              # n x r, the second; where the next step begins
    M'  = P Q^T                       # what the optimizer sees, the same on every worker
    e_i = M_i - M'

Where this differs from the paper:

1. P is made orthonormal by Householder's QR, and not by Gram and Schmidt, of columns scaled to a largest
   magnitude of 1. So columns of zeros, or of very small numbers, give no NaN.
2. Of Q, too, only the directions are kept: columns are scaled so. One that came out as zeros, as where a
   gradient has a lower rank, stays what it was: it would be zeros for ever.
3. A leaf of more than two dimensions is the matrix of leading x trailing dimensions with the smallest
   m + n. A leaf with factors that would be no smaller than it is averaged whole, as vectors are.
4. The optimizer is any transform, and not SGD with momentum only, after the decompression (algorithm 2).
5. Workers that abstain, and a single worker, see `powersgd`: both are ours.

Source: Vogels et al., "PowerSGD" (arXiv 1905.13727).
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.typing import DTypeLike

from lioncub_jax.baselines import compression
from lioncub_jax.exchange import checks, wires
from lioncub_jax.exchange.bits import add_count
from lioncub_jax.exchange.checks import check_count, check_kinds
from lioncub_jax.exchange.mapped import Holder
from lioncub_jax.mesh import axes, placement
from lioncub_jax.mesh.axes import Axes, AxisName
from lioncub_jax.mesh.placement import Workers, worker_axes
from lioncub_jax.mesh.specs import StateSpecs


class PowerSGDState(NamedTuple):
    """State of `powersgd`, the first of its chain.

    Attributes:
      count: ``int32[]``, steps taken; same on every worker.
      q: for each leaf ``Q``, ``float32[n, r]``, same on every worker, or None where it is not compressed.
        Of a leaf that is cut over inner axes those of all shards, ``[shards n, r]``.
      error: ``e``, shaped like the parameters, each worker's own; zeros where a leaf is not compressed.
      abstained: ``int32[]``, workers that abstained from the last step; same on every worker.
      abstentions: ``int32[]``, their sum over all steps; same on every worker.
      specs: how the parameters and this state lie on the mesh, where that is known; no array.
    """

    count: jax.Array  # type: ignore[assignment]
    q: optax.Updates
    error: optax.Updates
    abstained: jax.Array
    abstentions: jax.Array
    specs: StateSpecs | tuple[()] = ()

    @property
    def exchanges(self) -> bool:
        """True: workers communicate in the transform of this state."""
        return True

    @staticmethod
    def holders() -> dict[str, Holder]:
        """Names the holders of the fields, for checkpoints."""
        return {"error": Holder.WORKER}


def powersgd(
    tx: optax.GradientTransformation,
    rank: int = 4,
    *,
    workers: AxisName | Workers,
) -> optax.GradientTransformationExtraArgs:
    """PowerSGD: any optax transform, of an approximation of the mean gradient by matrices of low rank.

    A leaf of ``m x n`` travels as ``rank (m + n)`` float32 where that is less than ``m n``; all others as
    they are. A step has two all-reduces, of all ``P`` and of all ``Q``, and begins with the ``Q`` of the
    one before. What the approximation leaves out a worker adds to its next gradient.

    A worker with a NaN or infinity in any gradient, or asked to by ``abstain``, abstains. A single worker
    sends and compresses nothing.

    Args:
      tx: such as ``optax.sgd(0.1, momentum=0.9)`` or ``optax.adamw(3e-3)``.
      rank: of the approximation, at least 1. The paper has 1, 2 and 4.
      workers: a `Workers` in one level, or the name of their mesh axis, or several.

    Returns:
      A chain of a `PowerSGDState` and that of ``tx``. ``update(updates, state, params, abstain=None)``
      takes gradients that vary over ``workers``, floating leaves of any shape, and returns updates of the
      same shapes that are the same on every worker. Leaves that are cut over other mesh axes are
      compressed shard by shard.

    Raises:
      ValueError: for a rank below 1, or workers in two levels; from ``init``, where nothing would be
        compressed; when traced, for gradients that were already reduced.
      TypeError: for a ``tx`` that is no transform; from ``init``, for integer or complex leaves.

    Example:
      >>> import optax
      >>> from lioncub_jax import baselines
      >>> tx = baselines.powersgd(optax.sgd(0.1, momentum=0.9), rank=2, workers="data")

    References:
      Vogels et al., "PowerSGD" (arXiv 1905.13727), algorithms 1 and 2.
    """
    axis, group = worker_axes(workers)
    if group:
        raise ValueError(
            f"powersgd has no two levels, but the workers have {workers}: it would have to send what a "
            "group has in common. Give Workers without a group; with the names of both axes in "
            "their axis each device is a worker"
        )
    check_kinds(tx=(tx, optax.GradientTransformation))
    check_count(f"rank={rank!r}", rank)

    def init(params: optax.Params) -> PowerSGDState:
        params = checks.check_leaves(params)
        q = placement.on_shards(partial(_first_q, axis, rank), (params,))
        error = optax.tree.zeros_like(params, dtype=jnp.float32)
        count, abstained, abstentions = jnp.zeros(3, jnp.int32)
        return PowerSGDState(count, q, error, abstained, abstentions)

    def step(
        updates: optax.Updates, state: PowerSGDState, abstain: jax.Array
    ) -> tuple[optax.Updates, PowerSGDState]:
        checks.check_state(updates, state.error)
        tree: Any
        grads, tree = jax.tree.flatten(updates)
        q, error = tree.flatten_up_to(state.q), tree.flatten_up_to(state.error)
        inexact = [i for i, x in enumerate(q) if x is not None]
        compressed = inexact if axes.workers_on(axis) > 1 else []
        m = optax.tree.add(optax.tree.cast(grads, jnp.float32), error)
        matrices = {i: m[i].reshape(-1, len(q[i])) for i in compressed}
        sent = list(m)
        for i in compressed:
            # Without a barrier the transposition is done by the product: six times as slow on a CPU.
            sent[i] = lax.optimization_barrier(_product(matrices[i], q[i])).T
        # A value that is not finite shows in the products with Q.
        here = ~axes.any_over_shards(abstain | ~axes.all_finite(sent), axis)
        counted = [jnp.where(here, x, 0) for x in (*sent, jnp.float32(1))]
        *sums, present = _summed(counted, axis)
        some = jnp.maximum(present, 1)
        means = [x / some for x in sums]
        p = {i: jnp.linalg.qr(_scaled(means[i].T, means[i].T))[0] for i in compressed}
        products = [jnp.where(here, _product(p[i].T, matrices[i]), 0) for i in compressed]
        for i, x in zip(compressed, _summed(products, axis), strict=True):
            x = x / some
            # A product that is not finite, or would overflow in the next one, is not learned from.
            finite = jnp.all(jnp.abs(x) < 2.0**127 / rank)
            q[i] = jnp.where(finite, _scaled(x.T, q[i]), q[i])
            means[i] = jnp.where(finite, _product(p[i], x), 0).reshape(m[i].shape)
        means = [_fitting(mean, g.dtype) for mean, g in zip(means, grads, strict=True)]
        for i in inexact:
            error[i] = jnp.where(here, _fitting(m[i] - means[i], jnp.float32), error[i])
        abstained = axes.workers_on(axis) - present.astype(jnp.int32)
        return tree.unflatten(optax.tree.cast_like(means, grads)), PowerSGDState(
            count=optax.safe_increment(state.count),
            q=tree.unflatten(q),
            error=tree.unflatten(error),
            abstained=abstained,
            abstentions=add_count(state.abstentions, abstained),
            specs=state.specs,
        )

    return compression.behind(compression.on_devices(workers, init, step), tx, axis)


def _summed(arrays: list[jax.Array], axis: Axes) -> list[jax.Array]:
    """Adds float32 arrays over the workers, in one message for all that vary over the same mesh axes."""
    groups: dict[frozenset[str], list[int]] = {}
    for i, x in enumerate(arrays):
        groups.setdefault(axes.varying_axes(x), []).append(i)
    sums = list(arrays)
    for over in sorted(groups, key=sorted):
        message, split = ravel_pytree([arrays[i] for i in groups[over]])
        for i, x in zip(groups[over], split(wires.sum_of_floats(message, axis)), strict=True):
            sums[i] = x
    return sums


def _first_q(axis: Axes, rank: int, params: optax.Params) -> optax.Updates:
    """The first ``Q``, normal and the same on all workers; None of leaves that are not compressed.

    Those with factors smaller than themselves are: ``rank (m + n) < m n``.

    Raises:
      ValueError: where none would be compressed.
    """
    leaves, tree = jax.tree.flatten(params)
    q: list[jax.Array | None] = [None] * len(leaves)
    most = 0  # the highest rank of any leaf
    for i, x in enumerate(leaves):
        # A vector has one row.
        cuts = range(1, max(x.ndim, 2))
        splits = [(math.prod(x.shape[:k]), math.prod(x.shape[k:])) for k in cuts]
        m, n = min(splits, key=sum)
        highest = max(m * n - 1, 0) // max(m + n, 1)
        most = max(most, highest)
        if rank <= highest:
            key = jax.random.fold_in(jax.random.key(0), i)
            normal = jax.random.normal(key, (n, rank), jnp.float32)
            # All shards begin with the same, and come to differ.
            q[i] = axes.varying(normal, tuple(axes.varying_axes(x) - set(axis)))
    if rank > most:
        raise ValueError(
            f"rank={rank}: none of the {len(leaves)} leaves would be compressed, as for that rank "
            f"(m + n) must be less than m n. The highest rank here is {most}; "
            "lioncub_jax.global_gradients(tx) averages leaves as they are"
        )
    return jax.tree.unflatten(tree, q)


# In full float32, on chips too that round before they multiply.
_product = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def _scaled(x: jax.Array, otherwise: jax.Array) -> jax.Array:
    """Columns scaled to a largest magnitude of 1; in place of zeros those of another array."""
    largest = jnp.max(jnp.abs(x), axis=0)
    moves = largest > 0
    return jnp.where(moves[None], x / jnp.where(moves, largest, 1)[None], otherwise)


def _fitting(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Float32 that a dtype holds exactly: rounded, and clipped to its range."""
    kind = jnp.finfo(jnp.float32 if dtype == jnp.float64 else dtype)
    # A cast there and back is "excess precision" that the compiler may remove.
    most = float(kind.max)
    return lax.reduce_precision(jnp.clip(x, -most, most), kind.nexp, kind.nmant)
