"""Values that JSON gives back, checked by their types: a file or another process may give anything."""

import enum
import types
import typing
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

LARGEST = 2**48  # an exclusive bound of numbers


def parse(kind: Any, x: Any) -> Any:
    """Makes a value of a type of what JSON gave.

    Args:
      kind: a NamedTuple, a tuple or sequence of such types, an enum, a dtype, text, a flag, a number of at
        least 0, None and one of them, or ``Any`` for what stays as it is.
      x: the value.

    Raises:
      TypeError or ValueError: for a value of another type.
    """
    origin, kinds = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return x
    if origin is types.UnionType:
        return None if x is None else parse(kinds[0], x)
    if hasattr(kind, "_fields"):
        kinds = tuple(typing.get_type_hints(kind).values())
        return kind(*parse(types.GenericAlias(tuple, kinds), x))
    if isinstance(x, list) and origin in (tuple, Sequence):
        if origin is Sequence:
            kinds = int, ...
        if kinds[-1] is ...:
            kinds = kinds[:1] * len(x)
        return tuple(parse(k, y) for k, y in zip(kinds, x, strict=True))
    if origin is np.dtype and isinstance(x, str):
        return jnp.dtype(x)
    if isinstance(kind, enum.EnumType):
        return kind(x)
    if type(x) is not kind or (kind is int and not 0 <= x < LARGEST):
        raise TypeError(f"a {type(x).__name__} is no {getattr(kind, '__name__', kind)} here")
    return x
