"""1-bit Adam: Adam whose momentum travels in one bit once its variance is frozen.

In step t, of those in which any worker takes part::

    in full precision:   g   = mean_i g_i
                         m   = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g**2
    in one bit:          m_i = b1 m + (1 - b1) g_i
                         m   = Q(mean_i Q(m_i + e_i) + e);   v stays
    always:              p   = p - lr (m / (1 - b1**t) / (sqrt(v / (1 - b2**k)) + eps) + wd p)

``Q`` is a sign and a scale, ``e_i`` the error of the codes of worker i, and ``e`` that of the owner of a
chunk. The first ``warmup`` steps are in full precision.

Where this differs from the paper and from what DeepSpeed ships:

1. A scale belongs to a row of 128 elements, as everywhere in this library: 1 + 1/8 bits each way. There
   it belongs to a whole tensor or a worker's chunk of one. Rows whose values are all zero do not vote.
2. Moments are corrected for their bias, as in ``optax.adamw``, so that in full precision this is
   AdamW. DeepSpeed corrects nothing, which makes early steps several times as large; and a variance that
   was frozen after a short warm-up would be too small for ever. k is t, and ``warmup`` at most, so what is
   frozen stays corrected.
3. An element whose v is 0 has had no gradient so far, and is not moved: one bit cannot say zero, and
   what it says instead would be divided by ``eps``. DeepSpeed asks users for a mask of such elements.
4. Weight decay is decoupled. Workers that abstain, and a single worker, see `one_bit_adam`.

Source: Tang et al., "1-bit Adam" (arXiv 2102.02888).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from lioncub_jax.baselines import compression
from lioncub_jax.exchange import checks, decide, quantize, wires
from lioncub_jax.exchange.checks import check_betas, check_count, check_eps
from lioncub_jax.exchange.transform import CommunicateState
from lioncub_jax.mesh import axes
from lioncub_jax.mesh.axes import AxisName
from lioncub_jax.mesh.placement import Workers, worker_axes
from lioncub_jax.mesh.specs import StateSpecs
from lioncub_jax.optimizers import Mask, descending, owner
from lioncub_jax.programs import scopes

_wide = partial(optax.tree.cast, dtype=jnp.float32)


class OneBitAdamState(NamedTuple):
    """State of `one_bit_adam`, the first of its chain.

    Attributes:
      count: ``int32[]``, steps in which any worker took part; same on every worker.
      mu: ``m``, float32, shaped like the parameters, same on every worker.
      nu: ``v``, float32, shaped like the parameters, same on every worker.
      exchange: errors of each worker and of the owners, and who abstained.
      specs: how the parameters and this state lie on the mesh, where that is known; no array.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: optax.Updates
    nu: optax.Updates
    exchange: CommunicateState
    specs: StateSpecs | tuple[()] = ()


def one_bit_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask = None,
    *,
    warmup: int,
    workers: AxisName | Workers,
) -> optax.GradientTransformationExtraArgs:
    """1-bit Adam: AdamW on the mean gradient at first, then momentum in one bit under a frozen variance.

    For ``warmup`` steps gradients are averaged in float32. From then on v stays, and each worker sends
    the sign and scales of ``m_i + e_i``, ``m_i = b1 m + (1 - b1) g_i``; the owner of each chunk averages
    them, adds its own error, and sends signs and scales back: the new m, the same for all.

    A worker with a NaN or infinity in any gradient, or asked to by ``abstain``, abstains in both stages.
    A single worker sends nothing and codes nothing: its v freezes all the same.

    Args:
      learning_rate: a number or an optax schedule.
      b1: decay of the momentum, in [0, 1).
      b2: decay of the variance, in [0, 1).
      eps: added to the root, above 0.
      weight_decay: decoupled, multiplied with the learning rate.
      mask: the leaves that decay, a tree of bools or a function of the parameters.
      warmup: steps in full precision, at least 1: until the variance is steady.
      workers: a `Workers`, in two levels too, or the name of their mesh axis, or several.

    Returns:
      A chain; its first state is a `OneBitAdamState`. ``update(updates, state, params, abstain=None)``
      takes gradients that vary over the workers, floating leaves of any shape, and returns updates of the
      same shapes and dtypes that are the same on all.

    Raises:
      ValueError: for betas outside [0, 1), an ``eps`` that is not above 0, a ``warmup`` below 1; when
        traced, as `communicate`.
      TypeError: for a mask that is not of bools; when traced, for integer or complex leaves.

    Example:
      >>> from lioncub_jax import baselines
      >>> tx = baselines.one_bit_adam(1e-3, weight_decay=0.01, warmup=2000, workers="data")

    References:
      Tang et al., "1-bit Adam" (arXiv 2102.02888).
    """
    wanted = "a whole number of steps of at least 1: they find the variance that is frozen then"
    check_count(f"warmup={warmup!r}", warmup, wanted)
    check_betas(b1=b1, b2=b2)
    check_eps(eps)
    last = min(warmup, np.iinfo(np.int32).max)  # of the updates of the variance
    codes, axis = compression.coded_mean(1, workers), worker_axes(workers)[0]
    floats = owner(
        optax.identity(), workers=workers, quantizer=quantize.dense(), reply=decide.values(),
        wire=wires.all_reduce(),
    )  # fmt: skip

    def init(params: optax.Params) -> OneBitAdamState:
        params = checks.check_leaves(params)
        agreed = wires.agreed(params, sum(worker_axes(workers), ()))
        mu, nu = (optax.tree.zeros_like(agreed, dtype=jnp.float32) for _ in range(2))
        return OneBitAdamState(jnp.int32(0), mu, nu, codes.init(_wide(params)))

    def update(
        grads: optax.Updates, state: OneBitAdamState, abstain: jax.Array,
        b1: ArrayLike, b2: ArrayLike, eps: ArrayLike,
    ) -> tuple[optax.Updates, OneBitAdamState]:  # fmt: skip
        checks.check_state(grads, state.mu)
        is_full = state.count < last

        def in_floats(grads: optax.Updates, old: OneBitAdamState) -> OneBitAdamState:
            """The mean gradient goes into both moments; errors wait."""
            kept, dense = old.exchange, floats.init(grads)
            exchange = kept._replace(error=dense.error, owner=dense.owner, specs=dense.specs)
            mean, exchange = floats.update(grads, exchange, abstain=abstain)
            exchange = exchange._replace(error=kept.error, owner=kept.owner, specs=kept.specs)
            mu = optax.tree.update_moment(mean, old.mu, b1, 1)
            nu = optax.tree.update_moment(mean, old.nu, b2, 2)
            return old._replace(mu=mu, nu=nu, exchange=exchange)

        def in_codes(grads: optax.Updates, old: OneBitAdamState) -> OneBitAdamState:
            """Codes of the workers' momenta go up; those of the mean come back, the new momentum."""
            mu_i = _wide(optax.tree.update_moment(grads, old.mu, b1, 1))
            mu, exchange = codes.update(mu_i, old.exchange, abstain=abstain)
            return old._replace(mu=mu, exchange=exchange)

        def step(
            moments: Callable[..., OneBitAdamState], grads: optax.Updates, old: OneBitAdamState
        ) -> tuple[jax.Array, OneBitAdamState]:
            new = moments(grads, old)._replace(count=optax.safe_increment(old.count))
            # If no worker took part, the state stays, but for the statistics of the exchange.
            some = new.exchange.votes.abstained < axes.workers_on(axis)
            old = old._replace(exchange=new.exchange)
            # Betas may be of a wider dtype.
            return some, optax.tree.where(some, optax.tree.cast_like(new, old), old)

        # A branch for each, with collectives of its own; all workers take the same one, as they count
        # the same steps.
        branches = partial(step, in_floats), partial(step, in_codes)
        with scopes.by_count():
            some, state = jax.lax.cond(is_full, *branches, _wide(grads), state)
        with jax.numpy_dtype_promotion("standard"):  # optax takes a number to the power of a count
            mu = optax.tree.bias_correction(state.mu, b1, jnp.maximum(state.count, 1))
            nu = optax.tree.bias_correction(state.nu, b2, jnp.clip(state.count, 1, last))

        def direction(g: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.where(some & (v > 0), m / (jnp.sqrt(v) + eps), 0).astype(g.dtype)

        return jax.tree.map(direction, grads, mu, nu), state

    direction = compression.on_devices(workers, init, update, b1, b2, eps)
    return descending(direction, learning_rate, weight_decay, mask)
