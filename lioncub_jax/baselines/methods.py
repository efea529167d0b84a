"""What Lion by votes is compared with: the baselines of the two papers, behind the same interface.

| baseline | worker sends | travels back | source |
|---|---|---|---|
| `global_gradients(tx)` | its gradient, float32 | (all-reduce) the mean | optax, on the mean |
| `signsgd` | 1 bit of its gradient | the majority, 1 bit | Bernstein et al., arXiv 1802.04434 |
| `signum` | 1 bit of its momentum | the majority, 1 bit | Bernstein et al., arXiv 1810.05291 |
| `ef_signsgd` | 1 bit and a scale for each row of 128, with feedback | the same | 1901.09847, 1905.10936 |
| `one_bit_adam`, `zero_one_adam` | as above its momentum, or floats | the same | 2102.02888, 2202.06009 |
| `terngrad` | -1, 0 or +1 at random: 2 bits | the planes of the sum | Wen et al., arXiv 1705.07878 |
| `qsgd` | p bits at random and a norm for each row of 128 | (all-gather) | 1610.02132 |
| `powersgd` | two factors of each matrix: float32, or p bits | their means, the same | 1905.13727 |
| `diloco` | how far it came in H steps: float32, or p bits and feedback | the mean, the same | 2311.08105 |

Weight decay is decoupled in all of them, ``p -= lr (u + wd p)``, as in Lion, so that a comparison
changes one thing; in `powersgd` it is that of the transform. The decay of SGD with momentum m in other
libraries is often coupled (``g + wd p``), and then ``1 / (1 - m)`` times as strong: multiply it by that
here.

Workers may be in two levels, `Workers` with a ``group``: gradients are averaged inside a group, which
sends as one worker. `terngrad`, `dgc` and `powersgd` have no two levels.

Where workers compress, one that has a value that is not finite, or is asked to ``abstain``, abstains
from the step, as in `communicate`; under `global_gradients` nobody can. One worker alone compresses
nothing.

``lioncub_jax.audit.of(tx, params, workers)`` says what each sends.
"""

import math
from typing import Any

import jax
import optax

from lioncub_jax.baselines import compression
from lioncub_jax.exchange import checks, decide, quantize, wires
from lioncub_jax.exchange.arguments import check_betas, check_rates
from lioncub_jax.exchange.momentum import blend, nothing
from lioncub_jax.exchange.step import communicate
from lioncub_jax.mesh.axes import AxisName
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.optimizers import descending, global_gradients, owner


def signsgd(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: Any = 0.0,
    mask: Any = None,
    *,
    workers: AxisName | Workers,
) -> optax.GradientTransformationExtraArgs:
    """Majority vote of gradients, signSGD: ``u = sign(sum_i sign(g_i))``, 1 bit up and 1 down.

    Args:
      learning_rate: a number or an optax schedule.
      weight_decay: decoupled, multiplied with the learning rate.
      mask: which leaves decay, a tree of bools or a function of the parameters.
      workers: the workers: a `Workers`, or the name of their mesh axis; a tuple of several names is one
        group of workers.

    Returns:
      A transform whose ``update`` must run where the workers' axis is bound.

    Raises:
      ValueError: as `communicate`.
      TypeError: for a mask that is not of bools.

    Example:
      >>> from lioncub_jax import baselines
      >>> tx = baselines.signsgd(1e-4, workers="data")

    Source: Bernstein et al. (arXiv 1802.04434), algorithm 3. Zeros and ties are `communicate`'s.
    """
    vote = communicate(workers=workers, memory=nothing())
    return descending(vote, learning_rate, weight_decay, mask)


def signum(
    learning_rate: optax.ScalarOrSchedule,
    momentum: Any = 0.9,
    weight_decay: Any = 0.0,
    mask: Any = None,
    *,
    workers: AxisName | Workers,
) -> optax.GradientTransformationExtraArgs:
    """SIGNUM: each worker votes with its momentum, ``mu_i = m mu_i + (1 - m) g_i``, after its update.

    Arguments that are not named here are those of `signsgd`.

    Args:
      momentum: in [0, 1).

    Raises:
      ValueError: as `communicate`; also for a momentum outside [0, 1).

    Example:
      >>> from lioncub_jax import baselines
      >>> tx = baselines.signum(1e-4, weight_decay=0.1, workers="data")

    Source: Bernstein et al. (arXiv 1810.05291), algorithm 1. Lion Cub with equal betas.
    """
    check_betas(momentum=momentum)
    vote = communicate(workers=workers, memory=blend(momentum, momentum))
    return descending(vote, learning_rate, weight_decay, mask)


def ef_signsgd(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: Any = 0.0,
    mask: Any = None,
    *,
    workers: AxisName | Workers,
) -> optax.GradientTransformationExtraArgs:
    """Error feedback for signSGD, both ways: the error of a sign and a scale comes later.

    ``x_i = lr g_i + e_i``; worker i sends ``d_i = sign(x_i) mean|x_i|`` of each row of 128 and keeps
    ``e_i = x_i - d_i``. The owner of a slice does the same with ``x = mean_i d_i + e``, a scale for each
    row, and what it sends back is the update. Scales travel as bfloat16: 1 + 1/8 bits up
    and down. The learning rate is part of what is fed back, so a change of it changes no error.

    Arguments that are not named here are those of `signsgd`.

    Args:
      weight_decay: as `signsgd`; it is agreed on anyway and passes no quantizer.

    Example:
      >>> from lioncub_jax import baselines
      >>> tx = baselines.ef_signsgd(0.1, workers="data")

    Source: Karimireddy et al. (arXiv 1901.09847), algorithm 1; two ways as dist-EF-blockSGD, Zheng et
    al. (arXiv 1905.10936), without its momentum. Padding is left out of every scale.
    """
    check_rates(learning_rate=learning_rate, weight_decay=weight_decay)
    feedback = compression.coded_mean(1, workers)
    factors = learning_rate, weight_decay

    def decay(count: jax.Array | int) -> Any:
        return -math.prod(x(count) if callable(x) else x for x in factors)

    share = decay if any(map(callable, factors)) else decay(0)
    return optax.chain(
        optax.scale_by_learning_rate(learning_rate),
        feedback,
        optax.add_decayed_weights(share, checks.decay_mask(mask)),
    )


def qsgd(
    learning_rate: optax.ScalarOrSchedule,
    bits: int = 4,
    momentum: Any = 0.0,
    seed: int = 0,
    weight_decay: Any = 0.0,
    mask: Any = None,
    *,
    workers: AxisName | Workers,
) -> optax.GradientTransformationExtraArgs:
    """QSGD: a sign and ``s = 2**(bits-1) - 1`` levels of the norm of each row of 128, rounded at random.

    The norm is the largest magnitude, the paper's practice. The mean of what all workers say is right on
    average. Everybody sends its codes to everybody, as in the paper: (W-1) (bits + 1/8) bits per parameter.

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

    Source: Alistarh et al. (arXiv 1610.02132). Codes have a fixed width (the paper's Elias codes do
    not), norms travel as bfloat16 rounded up.
    """
    check_betas(momentum=momentum)
    codes = quantize.levels(bits, rounding=quantize.stochastic(seed))
    mean = owner(
        trace(momentum),
        workers=workers,
        quantizer=codes,
        reply=decide.values(),
        wire=wires.gathered(),
    )
    return descending(mean, learning_rate, weight_decay, mask)


def diloco(
    learning_rate: optax.ScalarOrSchedule = 0.7,
    momentum: Any = 0.9,
    bits: int | None = None,
    *,
    workers: AxisName | Workers,
) -> optax.GradientTransformationExtraArgs:
    """The outer optimizer of DiLoCo: Nesterov SGD on the mean of how far the workers came.

    Each worker takes H steps with an optimizer of its own, ``make_train_step(..., local_steps=H,
    local=optax.adamw(...))``, and hands over ``d_i``, its parameters before minus those after. Here
    ``d = mean_i d_i``, ``v = m v + d``, ``p -= lr (d + m v)``. It travels once in H steps.

    With ``bits`` codes travel, up and down, with a scale for each row of 128: bits + 1/8 a parameter each
    way. Worker i sends those of ``d_i + e_i`` and keeps what they miss in ``e_i``; the owner of a slice
    does the same with the mean, so that nothing is lost, only late.

    Args:
      learning_rate: of the mean difference, a number or an optax schedule of the calls; 1 with momentum
        0 is averaging of models.
      momentum: in [0, 1); 0 keeps none. The same on every worker.
      bits: of a code, 1 to 8, both up and down; None for a mean in float32.
      workers: the workers: a `Workers`, or the name of their mesh axis; a tuple of several names is one
        group of workers.

    Returns:
      A transform whose ``update`` must run where the workers' axis is bound.

    Raises:
      ValueError: for a momentum outside [0, 1), or bits out of range.

    Example:
      Four steps of AdamW on each worker, and then four bits each way:

      >>> import jax, jax.numpy as jnp, lioncub_jax as lc, optax
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> workers = lc.Workers(mesh, "data")
      >>> tx = lc.baselines.diloco(bits=4, workers=workers)
      >>> local = optax.adamw(1e-2)
      >>> loss = lambda params, batch, rng: jnp.mean((batch @ params["w"]) ** 2)
      >>> state = lc.init_state(tx, {"w": jnp.ones((3, 1))}, workers, local=local)
      >>> step = lc.make_train_step(loss, tx, workers, local_steps=4, local=local)
      >>> state, metrics = step(state, jnp.ones((4 * 8, 3)))  # 8 rows for each local step
      >>> int(state.step), state.local_state[0].count.tolist()
      (1, [4])

    Source: Douillard et al. (arXiv 2311.08105), algorithm 1, whose values the defaults are; codes with
    feedback both ways as dist-EF-blockSGD (1905.10936), of one bit or more.
    """
    check_betas(momentum=momentum)
    check_rates(learning_rate=learning_rate)
    outer = optax.chain(trace(momentum, True), optax.scale_by_learning_rate(learning_rate))
    if bits is None:
        return global_gradients(outer, workers=workers)
    return compression.behind(compression.coded_mean(bits, workers), outer, workers)


def trace(momentum: Any, nesterov: bool = False) -> optax.GradientTransformation:
    """Momentum, of which 0 keeps none."""
    none = isinstance(momentum, (int, float)) and momentum == 0
    return optax.identity() if none else optax.trace(momentum, nesterov)
