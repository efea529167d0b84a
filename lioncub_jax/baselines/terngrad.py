"""TernGrad: -1, 0 or +1 at random, in units of one scale per leaf that all workers share."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from lioncub_jax.baselines import compression
from lioncub_jax.exchange import bits, quantize, wires
from lioncub_jax.exchange.checks import check_betas, check_number
from lioncub_jax.exchange.decide import itself
from lioncub_jax.exchange.momentum import nothing
from lioncub_jax.exchange.quantize import Context
from lioncub_jax.exchange.transform import communicate
from lioncub_jax.exchange.votes import Decision, Planes, ReplyCodec, Tally, vote
from lioncub_jax.exchange.wires import Format
from lioncub_jax.mesh import axes
from lioncub_jax.mesh.axes import AxisName
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.optimizers import Mask, descending


def total() -> Decision:
    """``u = sum_i v_i / 2``, in whole numbers of codes: the planes of the sum.

    For codes with a zero: workers that abstain add nothing, and the number of votes need not travel.
    `terngrad` divides by it. A single worker has the value itself, which the sum has on average.
    """

    def encode(counted: Tally, context: Context) -> tuple[Planes, None]:
        return counted.planes, None

    def decode(
        planes: Planes, row_data: jax.Array | None, num_rows: int, fmt: Format
    ) -> tuple[jax.Array, None]:
        return bits.unpack_short(planes, num_rows), None

    def value(sums: jax.Array, scales: None, fmt: Format) -> jax.Array:
        """``sum - W max_code / 2``."""
        return jnp.minimum(sums.astype(jnp.int32), fmt.max_sum) - fmt.max_sum // 2

    def reply_format(fmt: Format) -> Format:
        return fmt.reply(fmt.max_sum.bit_length(), 0)

    codec = ReplyCodec("total", encode, decode, reply_format, itself, value)
    return vote(codec, zero=True, divides_by_present=True)


def terngrad(
    learning_rate: optax.ScalarOrSchedule,
    momentum: ArrayLike = 0.0,
    clip: float | None = 2.5,
    seed: int = 0,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask = None,
    *,
    workers: AxisName | Workers,
) -> optax.GradientTransformationExtraArgs:
    """TernGrad: -1, 0 or +1 at random, in units of one scale per leaf that all workers share.

    Worker i clips each leaf at ``clip`` standard deviations of its own; ``s = max_i max|g_i|`` of the
    leaf; it sends ``sign(g_i)`` with probability ``|g_i| / s`` and else 0; the update is ``s`` times the
    mean of these, right on average but for what was clipped. 2 bits up, the planes of the sum down
    (ceil(log2(2W + 1)) bits), and one float32 for each leaf in one all-reduce. The gradients of a single
    worker pass as they are.

    Arguments that are not named here are those of `signsgd`.

    Args:
      momentum: decay of a momentum of the mean, in [0, 1), the same on every worker; 0 keeps none.
      clip: in standard deviations about zero (about the mean, a leaf of one element would be clipped to
        nothing), of all shards of a leaf together; None for no clipping.
      seed: of the random codes.

    Raises:
      ValueError: for a momentum outside [0, 1), a ``clip`` that is not above 0, or workers in two levels.

    Example:
      >>> from lioncub_jax import baselines
      >>> tx = baselines.terngrad(0.1, momentum=0.9, workers="data")

    References:
      Wen et al. (arXiv 1705.07878), with gradient clipping, layer-wise and shared scalers.
    """
    check_betas(momentum=momentum)
    if clip is not None:
        wanted = "give standard deviations above 0, such as 2.5, or None"
        check_number(f"clip={clip!r}", clip, lambda x: x > 0, wanted, float)
    axis = compression.one_level("terngrad", workers)
    quantizer = quantize.ternary(rounding=quantize.stochastic(seed))
    codes = communicate(workers=axis, momentum=nothing(), quantizer=quantizer, decision=total())

    def step(
        updates: optax.Updates, state: Any, abstain: jax.Array
    ) -> tuple[optax.Updates, optax.OptState]:
        num_workers = axes.workers_on(axis)
        if num_workers == 1:
            return codes.update(updates, state, abstain=abstain)
        tree: Any
        values, tree = jax.tree.flatten(optax.tree.cast(updates, jnp.float32))
        here = compression.takes_part(axis, abstain, values)
        if clip is not None:
            # Within so many root mean squares of all shards of a leaf.
            for i, g in enumerate(values):
                square = axes.sum_over_shards(jnp.sum(g * g), axis)
                size = float(max(g.size * axes.shard(g, axis)[1], 1))
                limit = clip * jnp.sqrt(square / size)
                values[i] = jnp.clip(g, -limit, limit)
        largest = [axes.max_over_shards(jnp.max(jnp.abs(g), initial=0.0), axis) for g in values]
        scales = wires.max_over_workers(jnp.where(here, jnp.array(largest), 0), axis)
        divisors = jnp.where(scales > 0, scales, 1)
        shares = [g / divisor for g, divisor in zip(values, divisors, strict=True)]
        sums, state = codes.update(tree.unflatten(shares), state, abstain=~here)
        scales /= jnp.maximum(num_workers - state.votes.abstained, 1).astype(jnp.float32)
        means = optax.tree.mul(sums, tree.unflatten(scales))
        return optax.tree.cast_like(means, updates), state

    mean = compression.on_devices(workers, codes.init, step)
    mean = compression.behind(mean, compression.sgd_momentum(momentum), axis)
    return descending(mean, learning_rate, weight_decay, mask)
