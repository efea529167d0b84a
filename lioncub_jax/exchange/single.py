"""The step of a single worker: no codes, and nothing to other workers.

Its devices still communicate: they agree on abstention, and a group gathers its updates. For votes leaves
keep their shapes and dtypes, so that ``u = sign(c)`` is ``optax.lion`` to the bit. The step in rows, with
collectives of one worker, is not bit-equal to ``optax.lion`` for bfloat16 leaves, and moves twice the
bytes. At an owner the leaves go through rows in float32.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from lioncub_jax.exchange import layout, quantize, wires
from lioncub_jax.exchange.decision import Place
from lioncub_jax.exchange.message import BucketStats
from lioncub_jax.exchange.pieces import WorkerPlan, WorkerState, plus_error
from lioncub_jax.exchange.step import Exchange, StepResult, step
from lioncub_jax.mesh import axes


def run_step(
    exchange: Exchange,
    plan: WorkerPlan,
    grads: Sequence[jax.Array],
    state: WorkerState,
    owner_states: Sequence[optax.OptState],
    abstain: jax.Array | None,
) -> StepResult:
    """Takes a step of this worker: `step.step`, or `single_worker_step` if it is the only one."""
    run = single_worker_step if plan.num_workers == 1 else step
    return run(exchange, plan, grads, state, owner_states, abstain)


def single_worker_step(
    exchange: Exchange,
    plan: WorkerPlan,
    grads: Sequence[jax.Array],
    state: WorkerState,
    owner_states: Sequence[optax.OptState],
    abstain: jax.Array | None,
) -> StepResult:
    """``u = sign(c)`` of votes; ``u, s = tx(c + e, s)`` at an owner, plus the error of its earlier replies.

    A worker with a value that is not finite abstains from all buckets.

    Args:
      exchange: the parts, as in `step.step`.
      plan: the places of its leaves.
      grads: ``g`` of each leaf.
      state: ``mu`` and ``e`` of each leaf; errors of earlier codes are added in full.
      owner_states: for each bucket the owner's state; () for decisions without state.
      abstain: ``bool[]``, True to abstain; or None.
    """
    rule, decision, axis = exchange.momentum_rule, exchange.decision, exchange.axis
    values, abstains = [], jnp.zeros((), bool) if abstain is None else abstain
    for g, mu, e in zip(grads, state.mu, state.error, strict=True):
        values.append(plus_error(rule.interpolate(g, mu), e))
    abstains = axes.any_over_shards(abstains | ~axes.all_finite(values), axis)
    present = 1 - abstains.astype(jnp.uint32)

    new_owner_states = list(owner_states)
    if decision.has_state:
        for k, bucket in enumerate(plan.buckets):
            rows = layout.join_bucket(values, bucket.layout)
            rows, new_owner_states[k] = decision.decide_locally(
                rows, present, bucket.row_sizes, Place(plan.worker, bucket.deal), owner_states[k]
            )
            for i, x in layout.split_bucket(rows, bucket.layout.pieces).items():
                values[i] = x

    updates, new_mu, new_error = {}, [], []
    for i, (g, mu, e) in enumerate(zip(grads, state.mu, state.error, strict=True)):
        u = jnp.where(abstains, 0, decision.local_update(values[i]))
        u = axes.same_everywhere(u, axis)
        updates[i] = wires.from_group(u, exchange.group) if exchange.group else u
        if mu is not None:
            new = values[i] if rule.synchronizes else rule.update(g, mu)
            mu = jnp.where(abstains, mu, quantize.saturated(new, mu.dtype))
        new_mu.append(mu)
        new_error.append(None if e is None else jnp.where(abstains, e, 0))

    present = axes.same_everywhere(present, axis)
    stats = BucketStats(jnp.zeros(1, jnp.uint32), (), present)
    num_buckets = len(plan.buckets)
    state = WorkerState(new_mu, new_error)
    return StepResult(
        updates, state, new_owner_states, [stats] * num_buckets, [~abstains] * num_buckets
    )
