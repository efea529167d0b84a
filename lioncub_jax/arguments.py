"""One argument: the numbers and dtypes that are refused when a part or a transform is built."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def check_number(
    given: str, x: Any, fits: Callable[[Any], bool], said: str, static: type | None = None
) -> None:
    """Raises ``ValueError`` for what is no number, or for one that does not fit.

    Args:
      given: how it came, such as "b1=2".
      x: a number, or an array of one.
      fits: whether it will do; not asked where only a run knows.
      said: what is allowed, and what to do.
      static: of a number that says what is compiled, and so is no array: int or float.
    """
    if static and isinstance(x, jax.Array):
        raise ValueError(
            f"{given}: this says what is compiled, and optax.inject_hyperparams made an array of it; name "
            'the argument in its static_args, as "axis_name" is'
        )
    if isinstance(x, jax.core.Tracer):
        return
    kinds = (int, np.integer) if static is int else (int, float, np.number)
    number = isinstance(x, kinds if static else (*kinds, np.ndarray, jax.Array))
    if isinstance(x, bool) or not number or np.shape(x) or not fits(x):
        raise ValueError(f"{given}: {said}")


def check_rates(**rates: Any) -> None:
    """Raises ``ValueError`` for a rate that is neither a finite number nor a schedule."""
    for name, rate in rates.items():
        if not callable(rate):
            said = "give a finite number, such as 1e-3, or an optax schedule"
            check_number(f"{name}={rate!r}", rate, np.isfinite, said)


def check_floating(argument: str, dtype: Any) -> None:
    """Raises ``ValueError`` for a dtype that is not floating."""
    if isinstance(dtype, jax.Array):
        raise ValueError(
            f"{argument} is an array: optax.inject_hyperparams takes a dtype that can be called for a "
            'schedule; give its name, such as "float32"'
        )
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        name = None if dtype is None else jnp.dtype(dtype).name
        raise ValueError(f"{argument}={name}: give a floating dtype, such as float32 or bfloat16")
