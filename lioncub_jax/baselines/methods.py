"""What Lion by votes is compared with: the baselines of the two papers, behind the same interface.

| baseline | worker sends | travels back | source |
|---|---|---|---|
| `sgd`, `adamw`, `lion` | its gradient, float32 | (all-reduce) the mean | optax, on the mean |
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

Workers may be in two levels, `Workers` with a ``group_axis``: gradients are averaged inside a group, which
sends as one worker. `terngrad`, `dgc` and `powersgd` have no two levels.

Where workers compress, one that has a value that is not finite, or is asked to ``abstain``, abstains
from the step, as in `communicate`; under the three means nobody can. One worker alone compresses nothing.

Each can be asked what it sends: ``lioncub_jax.traffic.of(tx, params, workers)``.
"""

from typing import Any

import jax.numpy as jnp
import optax

from lioncub_jax import checks, decide, quantize, wires
from lioncub_jax.arguments import check_number, check_rates
from lioncub_jax.baselines.levels import one_level
from lioncub_jax.baselines.shared_scale import in_shared_units
from lioncub_jax.exchange import Sending, communicate
from lioncub_jax.mesh.placement import Workers, names_of
from lioncub_jax.momentum import blend, nothing
from lioncub_jax.optimizer import alike, coded_mean, descending, global_gradients
from lioncub_jax.wires import AxisName


def sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: Any = 0.9,
    weight_decay: Any = 0.0,
    mask: Any = None,
    *,
    axis_name: AxisName | Workers,
    dtype: Any = "float32",
) -> Sending:
    """SGD with momentum on the mean gradient: ``v = m v + mean_i g_i``, ``p -= lr (v + wd p)``.

    Args:
      learning_rate: a number or an optax schedule.
      momentum: decay of the momentum, in [0, 1); 0 keeps none.
      weight_decay: decoupled, multiplied with the learning rate.
      mask: which leaves decay, a tree of bools or a function of the parameters.
      axis_name: the workers: a `Workers`, or the name of their mesh axis; a tuple of several names is one
        group of workers.
      dtype: of the all-reduce, ``float32`` or ``bfloat16``.

    Returns:
      A transform whose ``update`` must run where the workers' axis is bound.

    Raises:
      ValueError: for a momentum outside [0, 1), or a dtype that is not floating.
      TypeError: for a mask that is not of bools.

    Example:
      >>> from lioncub_jax import baselines
      >>> tx = baselines.sgd(0.1, weight_decay=5e-4, axis_name="data")
    """
    checks.check_betas(momentum=momentum)
    tx = descending(trace(momentum), learning_rate, weight_decay, mask)
    return global_gradients(tx, axis_name, dtype)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 1e-4,
    mask: Any = None,
    *,
    axis_name: AxisName | Workers,
    dtype: Any = "float32",
) -> Sending:
    """``optax.adamw`` on the mean gradient. With other arguments of it give ``global_gradients``.

    Arguments that are not named here are those of `sgd`.

    Args:
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added outside of the root.

    Raises:
      ValueError: for betas outside [0, 1), or a dtype that is not floating.

    Example:
      >>> from lioncub_jax import baselines
      >>> tx = baselines.adamw(3e-4, b2=0.99, weight_decay=0.1, axis_name="data")
    """
    checks.check_betas(b1=b1, b2=b2)
    check_rates(learning_rate=learning_rate, weight_decay=weight_decay)
    mask = checks.decay_mask(mask)
    tx = optax.adamw(learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=mask)
    return global_gradients(tx, axis_name, dtype)


def lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.99,
    weight_decay: Any = 1e-3,
    mask: Any = None,
    *,
    axis_name: AxisName | Workers,
    dtype: Any = "float32",
) -> Sending:
    """``optax.lion`` on the mean gradient: Lion without votes ("G-Lion").

    Arguments that are not named here are those of `sgd`.

    Args:
      b1: weight of the momentum in the update, in [0, 1).
      b2: decay of the momentum, in [0, 1).

    Raises:
      ValueError: for betas outside [0, 1), or a dtype that is not floating.

    Example:
      >>> from lioncub_jax import baselines
      >>> tx = baselines.lion(1e-4, weight_decay=0.1, axis_name="data")
    """
    checks.check_betas(b1=b1, b2=b2)
    check_rates(learning_rate=learning_rate, weight_decay=weight_decay)
    mask = checks.decay_mask(mask)
    tx = optax.lion(learning_rate, b1, b2, weight_decay=weight_decay, mask=mask)
    return global_gradients(tx, axis_name, dtype)


def signsgd(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: Any = 0.0,
    mask: Any = None,
    *,
    axis_name: AxisName | Workers,
) -> Sending:
    """Majority vote of gradients, signSGD: ``u = sign(sum_i sign(g_i))``, 1 bit up and 1 down.

    Arguments that are not named here are those of `sgd`.

    Raises:
      ValueError: as `communicate`.

    Example:
      >>> from lioncub_jax import baselines
      >>> tx = baselines.signsgd(1e-4, axis_name="data")

    Source: Bernstein et al. (arXiv 1802.04434), algorithm 3. Zeros and ties are `communicate`'s.
    """
    axis, group = names_of(axis_name)
    vote = communicate(axis_name=axis, group_axis=group, memory=nothing())
    return vote.around(descending(vote, learning_rate, weight_decay, mask))


def signum(
    learning_rate: optax.ScalarOrSchedule,
    momentum: Any = 0.9,
    mu_dtype: Any = None,
    weight_decay: Any = 0.0,
    mask: Any = None,
    *,
    axis_name: AxisName | Workers,
) -> Sending:
    """SIGNUM: each worker votes with its momentum, ``mu_i = m mu_i + (1 - m) g_i``, after its update.

    Arguments that are not named here are those of `sgd`.

    Args:
      momentum: in [0, 1).
      mu_dtype: dtype of the momentum, each worker's own; None for that of the parameters.

    Raises:
      ValueError: as `communicate`; also for a momentum outside [0, 1).

    Example:
      >>> from lioncub_jax import baselines
      >>> tx = baselines.signum(1e-4, weight_decay=0.1, axis_name="data")

    Source: Bernstein et al. (arXiv 1810.05291), algorithm 1. Lion Cub with equal betas.
    """
    checks.check_betas(momentum=momentum)
    memory = blend(momentum, momentum, mu_dtype)
    axis, group = names_of(axis_name)
    vote = communicate(axis_name=axis, group_axis=group, memory=memory)
    return vote.around(descending(vote, learning_rate, weight_decay, mask))


def ef_signsgd(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: Any = 0.0,
    mask: Any = None,
    *,
    axis_name: AxisName | Workers,
) -> Sending:
    """Error feedback for signSGD, both ways: the error of a sign and a scale comes later.

    ``x_i = lr g_i + e_i``; worker i sends ``d_i = sign(x_i) mean|x_i|`` of each row of 128 and keeps
    ``e_i = x_i - d_i``. The owner of a slice does the same with ``x = mean_i d_i + e``, a scale for each
    row, and what it sends back is the update. Scales travel as bfloat16: 1 + 1/8 bits up
    and down. The learning rate is part of what is fed back, so a change of it changes no error.

    Arguments that are not named here are those of `sgd`.

    Args:
      weight_decay: as `sgd`; it is agreed on anyway and passes no quantiser.

    Example:
      >>> from lioncub_jax import baselines
      >>> tx = baselines.ef_signsgd(0.1, axis_name="data")

    Source: Karimireddy et al. (arXiv 1901.09847), algorithm 1; two ways as dist-EF-blockSGD, Zheng et
    al. (arXiv 1905.10936), without its momentum. Padding is left out of every scale.
    """
    check_rates(learning_rate=learning_rate, weight_decay=weight_decay)
    axis, group = names_of(axis_name)
    feedback = coded_mean(1, axis, group, "float32", decide.scaled_signs())
    decay = _decay(learning_rate, weight_decay)
    chain = optax.chain(
        optax.scale_by_learning_rate(learning_rate),
        feedback,
        optax.add_decayed_weights(decay, checks.decay_mask(mask)),
    )
    return feedback.around(chain)


def terngrad(
    learning_rate: optax.ScalarOrSchedule,
    momentum: Any = 0.0,
    clip: float | None = 2.5,
    seed: int = 0,
    weight_decay: Any = 0.0,
    mask: Any = None,
    *,
    axis_name: AxisName | Workers,
) -> Sending:
    """TernGrad: -1, 0 or +1 at random, in units of one scale per leaf that all workers share.

    Worker i clips each leaf at ``clip`` standard deviations of its own; ``s = max_i max|g_i|`` of the
    leaf; it sends ``sign(g_i)`` with probability ``|g_i| / s`` and else 0; the update is ``s`` times the
    mean of these, right on average but for what was clipped. 2 bits up, the planes of the sum down
    (ceil(log2(2W + 1)) bits), and one float32 for each leaf in one all-reduce.

    Arguments that are not named here are those of `sgd`.

    Args:
      momentum: decay of a momentum of the mean, in [0, 1), the same on every worker; 0 keeps none.
      clip: in standard deviations about zero (about the mean, a leaf of one element would be clipped to
        nothing); None for no clipping.
      seed: of the random codes.

    Raises:
      ValueError: for a momentum outside [0, 1), a ``clip`` that is not above 0, or workers in two levels.

    Example:
      >>> from lioncub_jax import baselines
      >>> tx = baselines.terngrad(0.1, momentum=0.9, axis_name="data")

    Source: Wen et al. (arXiv 1705.07878), with gradient clipping, layer-wise and shared scalers.
    """
    checks.check_betas(momentum=momentum)
    if clip is not None:
        said = "give standard deviations above 0, such as 2.5, or None"
        check_number(f"clip={clip!r}", clip, lambda x: x > 0, said, float)
    axis = one_level("terngrad", axis_name)
    codes = quantize.ternary(rounding=quantize.stochastic(seed))
    mean = in_shared_units(
        communicate(axis_name=axis, memory=nothing(), up=codes, down=decide.total()), axis, clip
    )
    chain = optax.chain(mean, alike(trace(momentum), axis))
    return mean.around(descending(chain, learning_rate, weight_decay, mask))


def qsgd(
    learning_rate: optax.ScalarOrSchedule,
    bits: int = 4,
    momentum: Any = 0.0,
    seed: int = 0,
    weight_decay: Any = 0.0,
    mask: Any = None,
    *,
    axis_name: AxisName | Workers,
) -> Sending:
    """QSGD: a sign and ``s = 2**(bits-1) - 1`` levels of the norm of each row of 128, rounded at random.

    The norm is the largest magnitude, the paper's practice. The mean of what all workers say is right on
    average. Everybody sends its codes to everybody, as in the paper: (W-1) (bits + 1/8) bits per parameter.

    Arguments that are not named here are those of `sgd`.

    Args:
      bits: of a code, sign included, 2 to 8.
      momentum: decay of a momentum of the mean, in [0, 1); 0 keeps none.
      seed: of the random codes.

    Raises:
      ValueError: as `communicate`; also for bits or a momentum out of range.

    Example:
      >>> from lioncub_jax import baselines
      >>> tx = baselines.qsgd(0.1, bits=4, momentum=0.9, axis_name="data")

    Source: Alistarh et al. (arXiv 1610.02132). Codes have a fixed width (the paper's Elias codes do
    not), norms travel as bfloat16 rounded up.
    """
    checks.check_betas(momentum=momentum)
    rounding = quantize.stochastic(seed)
    axis, group = names_of(axis_name)
    mean = communicate(
        axis_name=axis,
        group_axis=group,
        memory=nothing(),
        up=quantize.levels(bits, rounding=rounding),
        owner=decide.momentum_at_owner(trace(momentum), dominance=jnp.inf),
        down=decide.floats(),
        wire=wires.gathered(),
    )
    return mean.around(descending(mean, learning_rate, weight_decay, mask))


def trace(momentum: Any, nesterov: bool = False) -> optax.GradientTransformation:
    """Momentum, of which 0 keeps none."""
    none = isinstance(momentum, (int, float)) and momentum == 0
    return optax.identity() if none else optax.trace(momentum, nesterov)


def _decay(learning_rate: optax.ScalarOrSchedule, weight_decay: Any) -> Any:
    """``-lr wd``, for what is added to an update that has its learning rate already."""
    if isinstance(weight_decay, (int, float)) and weight_decay == 0:
        return 0.0  # which optax leaves out
    lr = learning_rate if callable(learning_rate) else lambda count: learning_rate
    share = weight_decay if callable(weight_decay) else lambda count: weight_decay
    return lambda count: -lr(count) * share(count)
