"""The optimizers: Distributed Lion, Lion Cub, Lion with momentum at the owner, and the baseline.

Every method is one sentence about `communicate`:

| optimizer | worker sends | owner | travels back |
|---|---|---|---|
| `distributed_lion` | sign of its own blend | counts | the majority, or the counts |
| `lion_cub` | 1 or p bits of its own blend | counts | the majority |
| `lion_cub(integer(p))` | the paper's integer codes | (all-reduce) | nothing: the sum is everywhere |
| `owner_lion` | p bits of its gradient | one global momentum, Lion | Lion's sign, exactly |
| `global_gradients(tx)` | its gradient, float32 | (all-reduce) | nothing: the mean is everywhere |
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from lioncub_jax import checks, decide, momentum, quantize, wires
from lioncub_jax.exchange import communicate
from lioncub_jax.quantize import Quantizer
from lioncub_jax.sync import Schedule, check_schedule, never, sync_momentum
from lioncub_jax.wires import AxisName, Wire


def lion_cub(
    learning_rate: optax.ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.99,
    mu_dtype: Any = None,
    weight_decay: Any = 1e-3,
    mask: Any = None,
    *,
    axis_name: AxisName,
    quantizer: Quantizer | None = None,
    wire: Wire | None = None,
    sync: Schedule | None = None,
    sync_where: Any = None,
    group_axis: AxisName | None = None,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Lion Cub: workers vote with 1 or p bits of their own blend of gradient and momentum.

    ``c_i = b1 mu_i + (1 - b1) g_i``, ``u = sign(sum_i code(c_i))``, ``p -= lr (u + wd p)``,
    ``mu_i = b2 mu_i + (1 - b2) g_i``; every sync ``mu_i = mean_i mu_i``, see `sync_momentum`.

    Args:
      learning_rate: a number or an optax schedule.
      b1: weight of the momentum in the vote, in [0, 1).
      b2: decay of the momentum, in [0, 1).
      mu_dtype: dtype of the momentum; None for that of the parameters.
      weight_decay: decoupled, multiplied with the learning rate.
      mask: which leaves decay, a tree of bools or a function of the parameters.
      axis_name: mesh axis of the workers; a tuple of several is one group of voters.
      quantizer: ``sign()`` (default: 1 bit up, 1 down), ``midrise(p)`` (p up, 1 down: precision does
        not depend on the number of workers), ``integer(p)`` (the paper's p-bit integer sum, for the
        ``counts`` and ``lanes`` wires) or ``ternary()`` (exact zeros, 2 up, 2 down).
      wire: ``two_phase()`` by default.
      sync: when to average momentum: ``every(T)``, ``first(M)``, ``thinning(k)`` or ``adaptive()`` in full
        precision, ``coded(...)`` in codes; ``never()`` by default.
      sync_where: which leaves of the momentum to average.
      group_axis: see `communicate`.
      bucket_size: see `communicate`.

    Returns:
      A transform whose ``update`` must run where ``axis_name`` is bound.

    Raises:
      ValueError: as `communicate`; also for betas outside [0, 1).

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.lion_cub(1e-4, weight_decay=0.1, axis_name="data", sync=lc.sync.every(1000))

    Source: Lion Cub (arXiv 2411.16462).
    """
    vote = communicate(
        axis_name=axis_name,
        memory=momentum.blend(b1, b2, mu_dtype),
        up=quantizer,
        wire=wire,
        group_axis=group_axis,
        bucket_size=bucket_size,
    )
    how = axis_name, sync, sync_where, group_axis
    return _finish(vote, learning_rate, weight_decay, mask, *how)


def distributed_lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.99,
    mu_dtype: Any = None,
    weight_decay: Any = 1e-3,
    mask: Any = None,
    *,
    axis_name: AxisName,
    average: bool = False,
    wire: Wire | None = None,
    sync: Schedule | None = None,
    sync_where: Any = None,
    group_axis: AxisName | None = None,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Distributed Lion: workers send signs; the update is their majority or their average.

    Args:
      learning_rate: as `lion_cub`, like all arguments that are not named here.
      b1: as `lion_cub`.
      b2: as `lion_cub`.
      mu_dtype: as `lion_cub`.
      weight_decay: as `lion_cub`.
      mask: as `lion_cub`.
      axis_name: mesh axis of the workers.
      average: False for the majority ("MaVo", 1 bit back), True for the mean of the signs over the
        votes cast ("Avg", the planes of the count back).
      wire: ``two_phase()`` by default.
      sync: as `lion_cub`; the paper never syncs.
      sync_where: as `lion_cub`.
      group_axis: see `communicate`.
      bucket_size: see `communicate`.

    Returns:
      A transform whose ``update`` must run where ``axis_name`` is bound.

    Raises:
      ValueError: as `communicate`; also for betas outside [0, 1).

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.distributed_lion(1e-4, axis_name="data", average=True)

    Source: Distributed Lion (arXiv 2404.00438).
    """
    vote = communicate(
        axis_name=axis_name,
        memory=momentum.blend(b1, b2, mu_dtype),
        down=decide.average() if average else decide.majority(),
        wire=wire,
        group_axis=group_axis,
        bucket_size=bucket_size,
    )
    how = axis_name, sync, sync_where, group_axis
    return _finish(vote, learning_rate, weight_decay, mask, *how)


def owner_lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.99,
    mu_dtype: Any = None,
    weight_decay: Any = 1e-3,
    mask: Any = None,
    *,
    axis_name: AxisName,
    quantizer: Quantizer | None = None,
    wire: Wire | None = None,
    dominance: float = 16.0,
    group_axis: AxisName | None = None,
    bucket_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Lion with one momentum for all, each slice of it at one worker: no drift, no sync, d/W memory.

    Workers send codes of their gradients; the owner of a slice decodes, averages, runs Lion on its
    slice of the one momentum and sends back the sign, which is Lion's whole update: one exact bit.

    Args:
      learning_rate: as `lion_cub`, like all arguments that are not named here.
      b1: as `lion_cub`.
      b2: as `lion_cub`.
      mu_dtype: dtype of the momentum; None for that of the parameters.
      weight_decay: as `lion_cub`.
      mask: as `lion_cub`.
      axis_name: mesh axis of the workers.
      quantizer: of gradients; default ``error_feedback(midrise(3))``; ``dense()`` for the
        exact mean.
      wire: ``two_phase()`` by default.
      dominance: see ``momentum_at_owner``.
      group_axis: see `communicate`.
      bucket_size: see `communicate`.

    Returns:
      A transform whose ``init`` and ``update`` must run where ``axis_name`` is bound.

    Raises:
      ValueError: as `communicate`; also for betas outside [0, 1).

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.owner_lion(1e-4, axis_name="data", quantizer=lc.quantize.midrise(4))

    Source: this library; the optimizer is Lion (arXiv 2302.06675).
    """
    checks.check_betas(b1, b2)
    checks.check_mu_dtype(mu_dtype)
    lion = optax.scale_by_lion(b1=b1, b2=b2, mu_dtype=mu_dtype)
    vote = communicate(
        axis_name=axis_name,
        up=quantize.error_feedback(quantize.midrise(3)) if quantizer is None else quantizer,
        owner=decide.momentum_at_owner(lion, dominance=dominance),
        wire=wire,
        group_axis=group_axis,
        bucket_size=bucket_size,
    )
    return _finish(vote, learning_rate, weight_decay, mask, axis_name)


def _finish(
    vote: optax.GradientTransformationExtraArgs,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: Any,
    mask: Any,
    axis_name: AxisName,
    sync: Schedule | None = None,
    sync_where: Any = None,
    group_axis: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    sync = never() if sync is None else sync
    check_schedule(sync)
    if sync_where is not None and not sync.ever:
        raise ValueError(
            "sync_where is given but sync is never(): give a schedule, such as every(100)"
        )
    if sync.ever:
        vote = sync_momentum(vote, axis_name, sync, sync_where, group_axis=group_axis)
    return optax.chain(
        vote,
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


class GlobalState(NamedTuple):
    """State of a transform that sees averaged gradients; the same on every worker."""

    inner: Any


def global_gradients(
    tx: optax.GradientTransformation, axis_name: AxisName, dtype: Any = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """Runs any optax transform on averaged gradients: the baseline.

    Args:
      tx: such as ``optax.lion(1e-4)`` or ``optax.adamw(1e-3)``.
      axis_name: mesh axis of the workers.
      dtype: of the all-reduce, ``float32`` or ``bfloat16`` (which XLA widens to float32 on CPU).

    Returns:
      A transform with state ``GlobalState``.

    Raises:
      ValueError: for a dtype that is not floating.

    Example:
      >>> import lioncub_jax as lc, optax
      >>> tx = lc.global_gradients(optax.adamw(1e-3), axis_name="data")
    """
    checks.check_axis(axis_name)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"global_gradients(dtype={dtype!r}): give float32 or bfloat16")
    tx = optax.with_extra_args_support(tx)

    def init(params: optax.Params) -> GlobalState:
        return GlobalState(tx.init(wires.agreed(params, axis_name)))

    def update(updates: Any, state: GlobalState, params: Any = None, **extra: Any) -> Any:
        wires.workers_on(axis_name)
        checks.check_local(updates, axis_name)
        extra.pop("abstain", None)
        mean = wires.mean_over_workers(updates, axis_name, dtype)
        updates, inner = tx.update(mean, state.inner, params, **extra)
        return updates, GlobalState(inner)

    return optax.GradientTransformationExtraArgs(init, update)
