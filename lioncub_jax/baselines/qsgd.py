"""QSGD: levels of the norm of a row, rounded at random, from every worker to every worker."""

import optax
from jax.typing import ArrayLike

from lioncub_jax.baselines.compression import sgd_momentum
from lioncub_jax.exchange import decide, quantize, wires
from lioncub_jax.exchange.checks import check_betas
from lioncub_jax.mesh.axes import AxisName
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.optimizers import Mask, descending, owner


def qsgd(
    learning_rate: optax.ScalarOrSchedule,
    bits: int = 4,
    momentum: ArrayLike = 0.0,
    seed: int = 0,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask = None,
    *,
    workers: AxisName | Workers,
) -> optax.GradientTransformationExtraArgs:
    """QSGD: a sign and ``s = 2**(bits-1) - 1`` levels of the norm of each row of 128, rounded at random.

    The norm is the largest magnitude, the paper's practice. The mean of all codes is right on
    average. Every worker sends its codes to every other, as in the paper: (W-1) (bits + 1/8) bits per
    parameter.

    Arguments that are not named here are those of `signsgd`.

    Args:
      bits: of a code, sign included, 2 to 8.
      momentum: decay of a momentum of the mean, in [0, 1); 0 keeps none.
      seed: of the random codes.

    Raises:
      ValueError: as `communicate`; also for bits or a momentum out of range.

    Example:
      >>> from lioncub_jax import baselines
      >>> tx = baselines.qsgd(0.1, bits=4, momentum=0.9, workers="data")

    References:
      Alistarh et al. (arXiv 1610.02132). Codes have a fixed width (the paper's Elias codes do
      not), norms travel as bfloat16 rounded up.
    """
    check_betas(momentum=momentum)
    quantizer = quantize.levels(bits, rounding=quantize.stochastic(seed))
    direction = owner(
        sgd_momentum(momentum), workers=workers, quantizer=quantizer, reply=decide.values(),
        wire=wires.gathered(),
    )  # fmt: skip
    return descending(direction, learning_rate, weight_decay, mask)
