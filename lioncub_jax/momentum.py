"""What a worker remembers.

Workers vote with a blend of their own gradient and their own momentum, so momenta drift apart where
workers see different data; `sync` makes them alike at times.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import optax

from lioncub_jax import checks, quantize


class Memory(NamedTuple):
    """What a worker blends into its message and what it keeps, as pure functions of one leaf.

    The two halves are apart because a worker that abstains sends nothing and must not remember either,
    and because momentum is then overwritten in place only after the message was made from it.

    Attributes:
      init: ``params -> mu``.
      message: ``(g, mu) -> c``, what the worker votes with.
      remember: ``(g, mu) -> mu``.
      numbers: betas and the like; arrays where ``optax.inject_hyperparams`` gives them.
      with_numbers: the same memory with other numbers.
    """

    init: Callable[[optax.Params], Any]
    message: Callable[[jax.Array, Any], jax.Array]
    remember: Callable[[jax.Array, Any], Any]
    numbers: tuple[Any, ...] = ()
    with_numbers: "Callable[..., Memory] | None" = None


def blend(b1: Any = 0.9, b2: Any = 0.99, mu_dtype: Any = None) -> Memory:
    """Lion's memory: ``c = b1 mu + (1 - b1) g`` is sent, ``mu = b2 mu + (1 - b2) g`` is kept.

    Args:
      b1: weight of the momentum in the message, in [0, 1).
      b2: decay of the momentum, in [0, 1).
      mu_dtype: dtype of the momentum; None for that of the parameters.

    Raises:
      ValueError: if a beta is outside [0, 1), or ``mu_dtype`` is not floating.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675).
    """
    checks.check_betas(b1=b1, b2=b2)
    checks.check_mu_dtype(mu_dtype)

    def message(g: jax.Array, mu: jax.Array) -> jax.Array:
        return (1.0 - b1) * g + b1 * mu

    def remember(g: jax.Array, mu: jax.Array) -> jax.Array:
        return quantize.saturated((1 - b2) * g + b2 * mu, mu.dtype)

    init = partial(optax.tree.zeros_like, dtype=mu_dtype)
    return Memory(init, message, remember, (b1, b2), partial(blend, mu_dtype=mu_dtype))


def nothing() -> Memory:
    """Sends the gradient as it is and keeps nothing: for momentum that lives at the owner.

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.communicate(axis_name="data", memory=lc.momentum.nothing())  # signSGD with majority vote
    """
    return Memory(
        lambda params: jax.tree.map(lambda p: None, params), lambda g, mu: g, lambda g, mu: mu
    )
