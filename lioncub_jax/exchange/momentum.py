"""Momentum rules of a worker: ``c_i = b1 mu_i + (1 - b1) g_i`` and ``mu_i = b2 mu_i + (1 - b2) g_i``.

Workers send a blend of their own gradient and their own momentum, so momenta drift apart where workers see
different data; `sync` averages them at times.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.tree_util import Partial
from jax.typing import ArrayLike, DTypeLike

from lioncub_jax.exchange.bits import at_least_float32
from lioncub_jax.exchange.checks import check_betas, check_decay

__all__ = ["MomentumRule", "blend", "nothing"]


class MomentumRule(NamedTuple):
    """The direction that a worker sends, and the momentum that it keeps; built by `blend` and `nothing`.

    `interpolate` and `update` are two functions, because a worker that abstains must not update its
    momentum, and because momentum is overwritten in place only after the direction was computed from it.
    Both give zeros for zeros, because in a group of devices the rows of a part are padded by them. A number
    that may be traced is an argument of a ``jax.tree_util.Partial``, and so a leaf.

    Attributes:
      init: ``params -> mu`` of each before the first step; None for each if nothing is kept.
      interpolate: ``(g, mu) -> c`` of one leaf; ``mu`` is None where nothing is kept.
      update: ``(g, mu)`` to the next ``mu`` of one leaf, before it is rounded to the dtype of ``mu``.

    Example:
      >>> import jax.numpy as jnp
      >>> rule = blend(b1=0.5, b2=0.75)
      >>> gradient, mu = jnp.ones(2), jnp.zeros(2)
      >>> rule.interpolate(gradient, mu).tolist(), rule.update(gradient, mu).tolist()
      ([0.5, 0.5], [0.25, 0.25])
    """

    init: Callable[[optax.Params], optax.Params]
    interpolate: Callable[[jax.Array, Any], jax.Array]
    update: Callable[[jax.Array, Any], Any]


def blend(
    b1: ArrayLike = 0.9, b2: ArrayLike = 0.99, mu_dtype: DTypeLike | None = None
) -> MomentumRule:
    """Lion's rule: ``c = b1 mu + (1 - b1) g`` is sent, ``mu = b2 mu + (1 - b2) g`` is kept.

    Args:
      b1: weight of the momentum in the message, in [0, 1).
      b2: decay of the momentum, in [0, 1).
      mu_dtype: dtype of the momentum; None for that of the parameters.

    Raises:
      ValueError: if a beta is outside [0, 1), ``mu_dtype`` is not floating, or momentum in it (in
        ``init``: in the dtype of the parameters) would not decay by ``b2``.

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.communicate(workers="data", momentum=lc.momentum.blend(0.9, 0.99))

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675).
    """
    check_betas(b1=b1, b2=b2)
    check_decay(b2, mu_dtype)
    return MomentumRule(Partial(_zeros, b2, mu_dtype), Partial(_mixed, b1), Partial(_mixed, b2))


def _zeros(b2: Any, mu_dtype: DTypeLike | None, params: optax.Params) -> optax.Params:
    """Zeros like the parameters; ``ValueError`` for a dtype of theirs that cannot keep ``b2``."""
    for x in jax.tree.leaves(params) if mu_dtype is None else ():
        check_decay(b2, x.dtype)
    return optax.tree.zeros_like(params, dtype=mu_dtype)


def _mixed(b: Any, g: jax.Array, mu: jax.Array) -> jax.Array:
    """``b mu + (1 - b) g``, in float32 at least: in bfloat16 the beta would be rounded with them."""
    with jax.numpy_dtype_promotion("standard"):
        return (1 - b) * at_least_float32(g) + b * at_least_float32(mu)


def nothing() -> MomentumRule:
    """Sends the gradient as it is and keeps nothing: for momentum that lives at the owner.

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.communicate(workers="data", momentum=lc.momentum.nothing())  # signSGD with majority vote
    """

    def init(params: optax.Params) -> optax.Params:
        return jax.tree.map(lambda p: None, params)

    return MomentumRule(init, interpolate=lambda g, mu: g, update=lambda g, mu: mu)
