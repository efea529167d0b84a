"""Losses of flax's nnx modules."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import optax

from lioncub_jax.mesh.specs import is_of_flax
from lioncub_jax.training import loss as losses

if TYPE_CHECKING:
    from flax import nnx


def from_nnx(
    model: "nnx.Module", loss_fn: Callable[[Any, Any], Any]
) -> tuple[Callable[..., Any], Any, Any]:
    """Splits a flax nnx model for ``init_state`` and ``make_train_step``.

    Args:
      model: any ``nnx.Module``. Its ``nnx.Param`` are trained; everything else (batch statistics,
        random streams) becomes each worker's own model state.
      loss_fn: ``(model, batch) -> loss`` or ``(loss, aux)``.

    Returns:
      ``(loss, params, model_state)``. ``nnx.update(model, state.params, mean_model_state(state))`` puts
      what was trained back, for evaluation.

    Raises:
      TypeError: for anything but an nnx module.

    Example:
      >>> from flax import nnx
      >>> import lioncub_jax as lc
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> loss, params, model_state = lc.from_nnx(model, lambda m, x: (m(x) ** 2).mean())
    """
    from flax import nnx  # not loaded for those who do not use it

    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"from_nnx is given a {type(model).__name__}: give a flax.nnx.Module; a tree of parameters "
            "needs no splitting: give it to init_state, and a loss (params, batch, rng) to make_train_step"
        )
    graph, params, rest = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
    shapes = [(jax.tree_util.keystr(p), x.shape) for p, x in jax.tree.leaves_with_path(rest)]

    def fn(
        params: optax.Params, model_state: Any, batch: Any, rng: jax.Array
    ) -> tuple[Any, Any, Any]:
        del rng  # the model holds its own random streams
        for x, (path, shape) in zip(jax.tree.leaves(model_state), shapes, strict=False):
            if x.shape[1:] == shape != x.shape:  # of all workers, outside of a step
                raise ValueError(
                    f"model_state{path} has shape {x.shape}, an entry for each worker, and that of the "
                    f"model has {shape}: evaluate with lioncub_jax.training.mean_model_state(state)"
                )
        # nnx lets a variable be written only at the trace level where it was made.
        replica = nnx.merge(graph, params, model_state, copy=True)
        loss, aux = losses.returned(loss_fn(replica, batch), "loss", aux={})
        _, _, model_state = nnx.split(replica, nnx.Param, ...)  # type: ignore[misc]
        return loss, aux, model_state

    return fn, params, rest


def check_split(params: optax.Params) -> None:
    """Raises ``TypeError`` for a module of flax where a tree of parameters is wanted."""
    if not is_of_flax(params):
        return
    from flax import linen, nnx

    if isinstance(params, nnx.Module):
        raise TypeError(
            f"params is a module, {type(params).__name__}: give what is trained of it, and the rest as "
            "model_state: loss, params, model_state = lioncub_jax.from_nnx(model, loss), then "
            "init_state(tx, params, workers, model_state=model_state) and make_train_step(loss, ...). A "
            "step of your own takes the module itself, lioncub_jax.map_step(step, workers); of it the "
            "parameters are nnx.state(model, nnx.Param)"
        )
    if isinstance(params, linen.Module):
        raise TypeError(
            f"params is a module, {type(params).__name__}, which holds no arrays: give "
            "module.init(key, x)['params']"
        )
