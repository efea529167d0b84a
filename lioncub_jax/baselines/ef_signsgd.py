"""EF-SignSGD: signs and scales with error feedback, on the way up and on the way down."""

import jax
import optax

from lioncub_jax.baselines.compression import coded_mean
from lioncub_jax.exchange import checks
from lioncub_jax.exchange.checks import check_rates
from lioncub_jax.mesh.axes import AxisName
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.optimizers import Mask


def ef_signsgd(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask = None,
    *,
    workers: AxisName | Workers,
) -> optax.GradientTransformationExtraArgs:
    """Error feedback for signSGD, both ways: the error of a sign and a scale comes later.

    ``x_i = lr g_i + e_i``; worker i sends ``d_i = sign(x_i) mean|x_i|`` of each row of 128 and keeps
    ``e_i = x_i - d_i``. The owner of a chunk does the same with ``x = mean_i d_i + e``, a scale for each
    row, and its codes are the update. Scales travel as bfloat16: 1 + 1/8 bits up
    and down. The learning rate is part of what is fed back, so a change of it changes no error.

    Arguments that are not named here are those of `signsgd`.

    Args:
      weight_decay: as `signsgd`; it is the same on all workers and passes no quantizer.

    Example:
      >>> from lioncub_jax import baselines
      >>> tx = baselines.ef_signsgd(0.1, workers="data")

    References:
      Karimireddy et al. (arXiv 1901.09847), algorithm 1; two ways as dist-EF-blockSGD, Zheng et
      al. (arXiv 1905.10936), without its momentum. Padding is left out of every scale.
    """
    check_rates(learning_rate=learning_rate, weight_decay=weight_decay)

    def decay(count: jax.Array | int) -> jax.Array | float:
        rate = learning_rate(count) if callable(learning_rate) else learning_rate
        return -rate * (weight_decay(count) if callable(weight_decay) else weight_decay)

    is_scheduled = callable(learning_rate) or callable(weight_decay)
    return optax.chain(
        optax.scale_by_learning_rate(learning_rate),
        coded_mean(1, workers),
        optax.add_decayed_weights(decay if is_scheduled else decay(0), checks.decay_mask(mask)),
    )
