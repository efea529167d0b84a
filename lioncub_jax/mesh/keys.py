"""Random keys are no numbers: what lies on devices, is summed up and is kept are their words."""

from typing import Any

import jax
import jax.numpy as jnp


def is_key(x: Any) -> bool:
    """Whether something is an array of typed random keys."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def words_of(x: Any) -> Any:
    """An array; of random keys their words, ``uint32[..., words]``."""
    return jax.random.key_data(x) if is_key(x) else x


def of_words(words: jax.Array, like: Any) -> jax.Array:
    """What `words_of` made of an array like that one."""
    return (
        jax.random.wrap_key_data(words, impl=jax.random.key_impl(like)) if is_key(like) else words
    )
