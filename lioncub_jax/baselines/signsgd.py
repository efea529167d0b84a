"""signSGD and SIGNUM: majority votes of gradients, and of momenta."""

import optax
from jax.typing import ArrayLike

from lioncub_jax.exchange.checks import check_betas
from lioncub_jax.exchange.momentum import blend, nothing
from lioncub_jax.exchange.transform import communicate
from lioncub_jax.mesh.axes import AxisName
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.optimizers import Mask, descending


def signsgd(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask = None,
    *,
    workers: AxisName | Workers,
) -> optax.GradientTransformationExtraArgs:
    """Majority vote of signs, signSGD: ``u = sign(sum_i sign(g_i))``, 1 bit up and 1 down.

    Args:
      learning_rate: a number or an optax schedule.
      weight_decay: decoupled, multiplied with the learning rate.
      mask: the leaves that decay, a tree of bools or a function of the parameters.
      workers: the workers: a `Workers`, or the name of their mesh axis; a tuple of several names is one
        group of workers.

    Returns:
      A transform; its ``update`` must run where the workers' axis is bound.

    Raises:
      ValueError: as `communicate`.
      TypeError: for a mask that is not of bools.

    Example:
      >>> from lioncub_jax import baselines
      >>> tx = baselines.signsgd(1e-4, workers="data")

    References:
      Bernstein et al. (arXiv 1802.04434), algorithm 3. Zeros and ties are `communicate`'s.
    """
    vote = communicate(workers=workers, momentum=nothing())
    return descending(vote, learning_rate, weight_decay, mask)


def signum(
    learning_rate: optax.ScalarOrSchedule,
    momentum: ArrayLike = 0.9,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask = None,
    *,
    workers: AxisName | Workers,
) -> optax.GradientTransformationExtraArgs:
    """SIGNUM: each worker votes with its momentum after its update.

    ``mu_i = m mu_i + (1 - m) g_i``, ``u = sign(sum_i sign(mu_i))``: Lion Cub with equal betas.

    Arguments that are not named here are those of `signsgd`.

    Args:
      momentum: ``m``, in [0, 1).

    Raises:
      ValueError: as `communicate`; also for a momentum outside [0, 1).

    Example:
      >>> from lioncub_jax import baselines
      >>> tx = baselines.signum(1e-4, weight_decay=0.1, workers="data")

    References:
      Bernstein et al. (arXiv 1810.05291), algorithm 1.
    """
    check_betas(momentum=momentum)
    vote = communicate(workers=workers, momentum=blend(momentum, momentum))
    return descending(vote, learning_rate, weight_decay, mask)
