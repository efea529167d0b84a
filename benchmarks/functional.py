"""Parts that simulated runs share: a GPT as functions of its parameters, and the schedule of the rate."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from gpt.model import GPT, next_byte_loss


def functional(model: Callable[[Any], GPT]) -> tuple[Callable[..., Any], Callable[..., jax.Array]]:
    """Returns ``key -> params`` and ``(params, windows) -> nats`` of ``key -> GPT``."""
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


class Schedule(NamedTuple):
    """A learning rate that climbs for a twentieth of the steps, then falls to zero along a cosine.

    Attributes:
      rate: the highest; a number, or a traced array.
      steps: of the run.
    """

    rate: Any
    steps: int

    def __call__(self, t: Any) -> Any:
        """The rate after ``t`` steps."""
        warmup = max(1, self.steps // 20)
        falling = 0.5 * (1 + jnp.cos(jnp.pi * t / self.steps))
        return self.rate * jnp.minimum(1.0, (t + 1) / warmup) * falling
