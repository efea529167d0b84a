"""Parts that simulated runs share: a GPT as functions of its parameters, and the schedule of the rate."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from gpt.model import GPT, next_byte_loss


def functional(model: Callable[[Any], GPT]) -> tuple[Callable[..., Any], Callable[..., jax.Array]]:
    """Returns ``key -> params`` and ``(params, windows) -> nats`` of ``key -> GPT``."""
    shaped = nnx.eval_shape(lambda: model(jax.random.key(0)))
    for _, module in nnx.iter_modules(shaped):
        if isinstance(module, nnx.Linear | nnx.LinearGeneral):
            module.dot_general = dot_general
    graph, shapes, rest = nnx.split(shaped, nnx.Param, ...)

    def init(key: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.split(model(key), nnx.Param, ...)[1])

    def loss(params: Any, windows: jax.Array, rng: Any = None) -> jax.Array:
        state = nnx.clone(shapes)
        nnx.replace_by_pure_dict(state, params)
        return next_byte_loss(nnx.merge(graph, state, rest), windows, deterministic=True)

    return init, loss


def dot_general(x: jax.Array, w: jax.Array, dimensions: Any, **_: Any) -> jax.Array:
    """``lax.dot_general`` over the last dimension of x and the first of w, by `product`."""
    return product(x, w.reshape(len(w), -1)).reshape(*x.shape[:-1], *w.shape[1:])


@jax.custom_vjp
def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """``x[..., i] w[i, o]``; for the gradient XLA transposes, which takes longer than this on a CPU."""
    return jnp.einsum("...i,io->...o", x, w)


def _forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    return product(x, w), (x, w)


def _backward(kept: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = kept
    x, dy = jax.lax.optimization_barrier((x, dy))
    dw = jnp.einsum("ni,no->io", x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]))
    return jnp.einsum("...o,io->...i", dy, w), dw


product.defvjp(_forward, _backward)


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
