"""What simulated runs share: a GPT as functions of its parameters, and the schedule of the rate."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from gpt.model import GPT, next_byte_loss


def functional(model: Callable[[Any], GPT]) -> tuple[Callable[..., Any], Callable[..., jax.Array]]:
    """Of ``key -> GPT``: ``key -> params``, and ``(params, windows) -> nats``."""
    graph, shapes, rest = nnx.split(
        nnx.eval_shape(lambda: model(jax.random.key(0))), nnx.Param, ...
    )

    def init(key: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.split(model(key), nnx.Param, ...)[1])

    def loss(params: Any, windows: jax.Array, rng: Any = None) -> jax.Array:
        state = nnx.clone(shapes)
        nnx.replace_by_pure_dict(state, params)
        return next_byte_loss(nnx.merge(graph, state, rest), windows, deterministic=True)

    return init, loss


def schedule(rate: Any, steps: int) -> Callable[[Any], Any]:
    """Up for a twentieth of the steps, then down to zero along a cosine."""
    warmup = max(1, steps // 20)

    def at(t: Any) -> Any:
        return rate * jnp.minimum(1.0, (t + 1) / warmup) * 0.5 * (1 + jnp.cos(jnp.pi * t / steps))

    return at
