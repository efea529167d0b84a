"""DiLoCo: local steps of each worker, and Nesterov momentum on the mean of their differences."""

import optax
from jax.typing import ArrayLike

from lioncub_jax.baselines.compression import behind, coded_mean
from lioncub_jax.exchange.checks import check_betas, check_rates
from lioncub_jax.mesh.axes import AxisName
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.optimizers import global_gradients


def diloco(
    learning_rate: optax.ScalarOrSchedule = 0.7,
    momentum: ArrayLike = 0.9,
    bits: int | None = None,
    *,
    workers: AxisName | Workers,
) -> optax.GradientTransformationExtraArgs:
    """The outer optimizer of DiLoCo: Nesterov SGD on the mean difference of H local steps.

    Each worker takes H steps with an optimizer of its own, ``make_train_step(..., local_steps=H,
    local=optax.adamw(...))``, and hands over ``d_i``, its parameters before minus those after. Here
    ``d = mean_i d_i``, ``v = m v + d``, ``p -= lr (d + m v)``. It travels once in H steps.

    With ``bits`` codes travel, up and down, with a scale for each row of 128. Worker i sends those of
    ``d_i + e_i`` and keeps their error ``e_i``; the owner of a chunk does the same with the mean.

    Args:
      learning_rate: of the mean difference, a number or an optax schedule of the calls; 1 with momentum
        0 is averaging of models.
      momentum: in [0, 1); 0 keeps none. The same on every worker.
      bits: of a code, 1 to 8, both up and down; None for a mean in float32.
      workers: a `Workers`, or the name of their mesh axis, or several.

    Returns:
      A transform; its ``update`` must run where the workers' axis is bound.

    Raises:
      ValueError: for a momentum outside [0, 1), or bits out of range.

    Example:
      >>> import jax, jax.numpy as jnp, lioncub_jax as lc, optax
      >>> workers = lc.Workers.one_per_device()
      >>> tx = lc.baselines.diloco(bits=4, workers=workers)
      >>> local = optax.adamw(1e-2)
      >>> loss = lambda params, batch, rng: jnp.mean((batch @ params["w"]) ** 2)
      >>> state = lc.init_state(tx, {"w": jnp.ones((3, 1))}, workers, local=local)
      >>> step = lc.make_train_step(loss, tx, workers, local_steps=4, local=local)
      >>> rows = jnp.ones((4 * 8 * workers.num_gradients, 3))  # 8 for each local step
      >>> state, metrics = step(state, rows)
      >>> int(state.step)
      1

    References:
      Douillard et al. (arXiv 2311.08105), algorithm 1, with its values as defaults; codes with
      feedback both ways as dist-EF-blockSGD (1905.10936), of one bit or more.
    """
    check_betas(momentum=momentum)
    check_rates(learning_rate=learning_rate)
    keeps_none = isinstance(momentum, (int, float)) and momentum == 0
    nesterov = optax.identity() if keeps_none else optax.trace(momentum, nesterov=True)
    outer = optax.chain(nesterov, optax.scale_by_learning_rate(learning_rate))
    if bits is None:
        return global_gradients(outer, workers=workers)
    return behind(coded_mean(bits, workers), outer, workers)
