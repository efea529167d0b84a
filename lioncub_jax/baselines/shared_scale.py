"""Codes in units of one scale per leaf that all workers share: what TernGrad does around an exchange."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from lioncub_jax import checks, wires
from lioncub_jax.exchange import Asked, Sending
from lioncub_jax.mesh import placement
from lioncub_jax.wires import AxisName, Sent


def in_shared_units(exchange: Sending, axis_name: AxisName, clip: float | None) -> Sending:
    """Makes of a sum of workers' codes a mean of their gradients: TernGrad.

    Each worker clips each leaf, ``s = max_i max|g_i|`` over the workers that take part, ``exchange`` adds
    codes of ``g_i / s``, and the update is ``s`` times their sum over the workers that took part.

    Args:
      exchange: a `communicate` of codes of values in [-1, 1], with ``down=total()``.
      axis_name: mesh axis of the workers.
      clip: in root mean squares of the leaf, all of its shards together; None for no clipping.

    Returns:
      A transform with the state of the exchange. One worker's gradients pass through it as they are.

    Source: Wen et al. (arXiv 1705.07878), scaler sharing and gradient clipping.
    """

    def update(
        updates: Any, state: Any, params: Any = None, *, abstain: Any = None, **extra: Any
    ) -> Any:
        del params, extra
        workers = wires.workers_on(axis_name)
        checks.check_leaves(updates)
        checks.check_local(updates, axis_name)
        leaves, tree = jax.tree.flatten(updates)
        if workers == 1 or not leaves:
            return exchange.update(updates, state, abstain=abstain)
        measure = partial(_measured, axis_name, clip)
        limits, scales, absent = placement.on_shards(measure, (leaves, abstain), P())
        shares = [
            _share_of_scale(g, limit, scale)
            for g, limit, scale in zip(leaves, limits, scales, strict=True)
        ]
        sums, state = exchange.update(jax.tree.unflatten(tree, shares), state, abstain=absent)
        units = scales / jnp.maximum(workers - state.abstained, 1).astype(jnp.float32)
        means = [
            (u * unit).astype(g.dtype)
            for u, unit, g in zip(jax.tree.leaves(sums), units, leaves, strict=True)
        ]
        return jax.tree.unflatten(tree, means), state

    def sends(asked: Asked) -> tuple[Sent, ...]:
        codes = exchange.sends(asked)
        if asked.workers == 1 or not asked.leaves:
            return codes
        scales = wires.max_bytes(len(asked.leaves), asked.workers)
        return Sent("all-reduce", False, scales), *codes

    tx = optax.GradientTransformationExtraArgs(exchange.init, update)
    return Sending.like(tx, exchange.scheme, sends)


def _measured(
    axis_name: AxisName, clip: float | None, leaves: list[jax.Array], told: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where each leaf is clipped, the scale that all workers share, and whether this one abstains."""
    values = [g.astype(jnp.float32) for g in leaves]
    largest = jnp.stack([jnp.max(jnp.abs(g), initial=0.0) for g in values])
    largest = wires.same_over_shards(largest, axis_name)
    # Looked for apart, because the largest of numbers and a NaN may be a number on CPU.
    strange = jnp.stack([~jnp.all(jnp.isfinite(g)) for g in values]).astype(jnp.uint32)
    absent = jnp.any(wires.same_over_shards(strange, axis_name) > 0)
    absent = absent if told is None else absent | told
    limits = jnp.full(largest.shape, jnp.inf, jnp.float32)
    if clip is not None:
        limits = jnp.float32(clip) * jnp.stack([_deviation(g, axis_name) for g in values])
    scales = jnp.where(absent, 0, jnp.minimum(largest, limits))
    return limits, wires.max_over_workers(scales, axis_name), absent


def _deviation(g: jax.Array, axis_name: AxisName) -> jax.Array:
    """Root mean square of a leaf over all of its shards."""
    square = wires.sum_over_shards(jnp.sum(g * g), axis_name)
    return jnp.sqrt(square / float(max(g.size * wires.shard(g, axis_name)[1], 1)))


def _share_of_scale(g: jax.Array, limit: jax.Array, scale: jax.Array) -> jax.Array:
    clipped = jnp.clip(g.astype(jnp.float32), -limit, limit)
    return clipped / jnp.where(scale > 0, scale, 1)
