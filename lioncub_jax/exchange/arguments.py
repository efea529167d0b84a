"""Checks of single arguments, and the decorator for classes of traced numbers."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

Part = TypeVar("Part")


@dataclass_transform(frozen_default=True)
def part(cls: type[Part]) -> type[Part]:
    """A class of parts: a frozen dataclass, and a pytree, so that numbers in it may be traced arrays."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, eq=False)(cls))


def check_number(
    given: str, x: Any, fits: Callable[[Any], bool], allowed: str, static: type | None = None
) -> None:
    """Raises ``ValueError`` for what is no number, or for one that does not fit.

    Args:
      given: how it came, such as "b1=2".
      x: a number, or an array of one.
      fits: ``x -> bool``, not called where only a run knows the number.
      allowed: what is allowed, and what to do.
      static: int or float, if the number must be known at compile time and so cannot be an array.
    """
    if static and isinstance(x, jax.Array):
        raise ValueError(
            f"{given}: this decides what is compiled, and optax.inject_hyperparams made an array of it; "
            'name the argument in its static_args, as "workers" is'
        )
    if isinstance(x, jax.core.Tracer):
        return
    if isinstance(x, jax.Array):
        x = np.asarray(x)  # what JAX compares inside of a trace is a tracer
    kinds = (int, np.integer) if static is int else (int, float, np.number)
    number = isinstance(x, kinds if static else (*kinds, np.ndarray))
    if isinstance(x, bool) or not number or np.shape(x) or not fits(x):
        raise ValueError(f"{given}: {allowed}")


def check_rates(**rates: Any) -> None:
    """Raises ``ValueError`` for a rate that is neither a finite number nor a schedule."""
    for name, rate in rates.items():
        if not callable(rate):
            allowed = "give a finite number, such as 1e-3, or an optax schedule"
            check_number(f"{name}={rate!r}", rate, np.isfinite, allowed)


def check_floating(argument: str, dtype: DTypeLike | None) -> None:
    """Raises ``ValueError`` for a dtype that is not floating."""
    if isinstance(dtype, jax.Array):
        raise ValueError(
            f"{argument} is an array: optax.inject_hyperparams takes a dtype that can be called for a "
            'schedule; give its name, such as "float32"'
        )
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        name = None if dtype is None else jnp.dtype(dtype).name
        raise ValueError(f"{argument}={name}: give a floating dtype, such as float32 or bfloat16")


def check_count(given: str, n: Any, wanted: str = "a whole number of at least 1") -> None:
    """Raises ``ValueError`` for anything but a whole number of at least 1; ``given`` is how it came."""
    check_number(given, n, lambda n: n >= 1, f"give {wanted}", int)


def check_betas(**betas: Any) -> None:
    """Raises ``ValueError`` for a beta or momentum outside [0, 1), where its value is known."""
    for name, beta in betas.items():
        allowed = "give a number in [0, 1), such as 0.9"
        check_number(f"{name}={beta!r}", beta, lambda beta: 0 <= beta < 1, allowed)


def check_decay(b2: Any, mu_dtype: DTypeLike | None) -> None:
    """Raises ``ValueError`` for a dtype of momentum that is not floating, or cannot keep its decay.

    ``b2 mu`` is no ``mu`` where ``1 - b2`` is at least half a unit in the last place of a number above 1.
    """
    if mu_dtype is None:
        return
    check_floating("mu_dtype", mu_dtype)
    dtype = jnp.dtype(mu_dtype).name
    most = 1 - float(jnp.finfo(dtype).eps) / 2
    allowed = (
        f"momentum in {dtype} would stay as it is and never decay, for b2 mu is rounded to mu: give b2 of "
        f'at most {most:.5g} or mu_dtype="float32"'
    )
    check_number(f"b2={b2!r}", b2, lambda b2: b2 <= most, allowed)


def check_kinds(**parts: tuple[Any, type]) -> None:
    """Raises ``TypeError`` for a part of another kind than its argument's."""
    for name, (given, kind) in parts.items():
        if not isinstance(given, kind):
            built = "what a function that builds one returns, called, such as quantize.sign() and not sign"
            raise TypeError(f"{name}={given!r} is not a {kind.__name__}: give {built}")
