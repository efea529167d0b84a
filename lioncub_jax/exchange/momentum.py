"""Momentum rules of a worker: ``c_i = b1 mu_i + (1 - b1) g_i`` and ``mu_i = b2 mu_i + (1 - b2) g_i``.

Workers send a blend of their own gradient and their own momentum, so momenta drift apart where workers see
different data; `sync` averages them at times.
"""

from typing import Any

import jax
import optax
from jax.typing import ArrayLike, DTypeLike

from lioncub_jax.exchange.bits import at_least_float32
from lioncub_jax.exchange.checks import check_betas, check_decay, component

__all__ = ["MomentumRule", "blend", "nothing"]


class MomentumRule:
    """The direction that a worker sends, and the momentum that it keeps: the contract of both.

    `interpolate` and `update` are two methods, because a worker that abstains must not update its momentum,
    and because momentum is overwritten in place only after the direction was computed from it.

    Example:
      >>> import jax.numpy as jnp
      >>> rule = blend(b1=0.5, b2=0.75)
      >>> gradient, mu = jnp.ones(2), jnp.zeros(2)
      >>> rule.interpolate(gradient, mu).tolist(), rule.update(gradient, mu).tolist()
      ([0.5, 0.5], [0.25, 0.25])
    """

    def init(self, params: optax.Params) -> optax.Params:
        """``mu`` of each parameter before the first step; None for each if nothing is kept."""
        raise NotImplementedError

    def interpolate(self, g: jax.Array, mu: jax.Array) -> jax.Array:
        """The direction ``c`` of one leaf; ``mu`` is None where nothing is kept."""
        raise NotImplementedError

    def update(self, g: jax.Array, mu: jax.Array) -> jax.Array:
        """The next ``mu`` of one leaf, before it is rounded to the dtype of ``mu``."""
        raise NotImplementedError


@component
class NoMomentum(MomentumRule):
    """``c = g``, see `nothing`."""

    def init(self, params: optax.Params) -> optax.Params:
        """None for each parameter."""
        return jax.tree.map(lambda p: None, params)

    def interpolate(self, g: jax.Array, mu: jax.Array) -> jax.Array:
        """``g``."""
        return g

    def update(self, g: jax.Array, mu: jax.Array) -> jax.Array:
        """``mu``, as before."""
        return mu


@component
class Blend(MomentumRule):
    """Lion's rule, see `blend`."""

    b1: ArrayLike
    b2: ArrayLike
    mu_dtype: DTypeLike | None

    def init(self, params: optax.Params) -> optax.Params:
        """Zeros like the parameters; ``ValueError`` for a dtype of theirs that cannot keep ``b2``."""
        for x in jax.tree.leaves(params) if self.mu_dtype is None else ():
            check_decay(self.b2, x.dtype)
        return optax.tree.zeros_like(params, dtype=self.mu_dtype)

    def interpolate(self, g: jax.Array, mu: jax.Array) -> jax.Array:
        """``b1 mu + (1 - b1) g``."""
        return _mixed(self.b1, mu, g)

    def update(self, g: jax.Array, mu: jax.Array) -> jax.Array:
        """``b2 mu + (1 - b2) g``."""
        return _mixed(self.b2, mu, g)


def _mixed(b: Any, mu: jax.Array, g: jax.Array) -> jax.Array:
    """``b mu + (1 - b) g``, in float32 at least: in bfloat16 the beta would be rounded with them."""
    with jax.numpy_dtype_promotion("standard"):
        return (1 - b) * at_least_float32(g) + b * at_least_float32(mu)


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
    return Blend(b1, b2, mu_dtype)


def nothing() -> MomentumRule:
    """Sends the gradient as it is and keeps nothing: for momentum that lives at the owner.

    Example:
      >>> import lioncub_jax as lc
      >>> tx = lc.communicate(workers="data", momentum=lc.momentum.nothing())  # signSGD with majority vote
    """
    return NoMomentum()
