"""Losses of flax's nnx modules."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from lioncub_jax.mesh.boxes import find_nodes
from lioncub_jax.mesh.hosts import is_key
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.mesh.specs import flax_in_use
from lioncub_jax.training import loss as losses
from lioncub_jax.training.kinds import Kind, Kinds, Loss, classify_outputs

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
                    f"model has {shape}: evaluate lioncub_jax.training.for_evaluation(model, workers, "
                    "state), or give mean_model_state(state)"
                )
        # nnx lets a variable be written only at the trace level where it was made.
        replica = nnx.merge(graph, params, model_state, copy=True)
        loss, aux = losses.returned(loss_fn(replica, batch), "loss", aux={})
        _, _, model_state = nnx.split(replica, nnx.Param, ...)  # type: ignore[misc]
        return loss, aux, model_state

    return fn, params, rest


def check_split(params: optax.Params) -> None:
    """Raises ``TypeError`` for a module of flax where a tree of parameters is wanted."""
    if not flax_in_use():
        return
    from flax import linen, nnx

    if isinstance(params, nnx.Module):
        raise TypeError(
            f"params is a module, {type(params).__name__}: give what is trained of it, and the rest as "
            "model_state: loss, params, model_state = lioncub_jax.from_nnx(model, loss), then "
            "init_state(tx, params, workers, model_state=model_state) and make_train_step(loss, ...). In a "
            "loop of your own the parameters are nnx.state(model, nnx.Param)"
        )
    if isinstance(params, linen.Module):
        raise TypeError(
            f"params is a module, {type(params).__name__}, which holds no arrays: give "
            "module.init(key, x)['params']"
        )


def is_module(x: object) -> bool:
    """True for an ``nnx.Module``."""
    if not flax_in_use():
        return False
    from flax import nnx

    return isinstance(x, nnx.Module)


def split_module(model: "nnx.Module") -> Any:
    """``(graph, parameters, random streams, the rest)`` of a module."""
    from flax import nnx

    return nnx.split(model, nnx.Param, nnx.RngState, ...)  # type: ignore[misc]


def update_module(model: "nnx.Module", change: Callable[..., Any]) -> "nnx.Module":
    """Writes ``change(parameters, random streams, the rest)`` into a module; returns it."""
    from flax import nnx

    nnx.update(model, *change(*split_module(model)[1:]))
    return model


def find_stream_counts(tree: Any) -> list[Any]:
    """The variables of a tree in which nnx counts how often its random streams were drawn from."""
    if not flax_in_use():
        return []
    from flax import nnx

    return find_nodes(tree, nnx.RngCount)


def value_and_grad(
    of_params: Callable[..., Any],
    loss_fn: Loss,
    args: tuple[Any, ...],
    *,
    in_kinds: Kinds,
    aux_kinds: Kinds,
    has_aux: bool,
    workers: Workers,
) -> tuple[Any, Any]:
    """`worker_value_and_grad` of a module, the first of ``args``, by ``of_params``, that of parameters.

    What the module keeps besides parameters goes on in it, as under ``nnx.value_and_grad``.
    """
    from flax import nnx

    model, *args = args  # type: ignore[assignment]
    graph, params, streams, rest = split_module(model)
    for path, x in jax.tree_util.tree_leaves_with_path(rest):
        if x.shape[:1] != (workers.count,):
            raise ValueError(
                f"the module keeps state of its own: {jax.tree_util.keystr(path)} of shape {x.shape}, and "
                "each worker has its own of it, [workers, ...]: before the optimizer is made call "
                "lioncub_jax.training.place(model, workers), and evaluate "
                "lioncub_jax.training.for_evaluation(model, workers); or give make_train_step what "
                "from_nnx(model, loss_fn) returns"
            )

    def of_parts(params: optax.Params, *args: Any) -> Any:
        *given, streams, rest = args
        structure: Any
        before, structure = jax.tree.flatten(rest)  # nnx writes into what it merges
        replica = nnx.merge(graph, params, streams, rest)
        loss, aux = losses.loss_and_aux(loss_fn(replica, *given), has_aux)
        classify_outputs(aux, aux_kinds)  # an error names what the loss returned
        after = split_module(replica)[3]
        losses.like_given(structure.unflatten(before), after)
        both = zip(before, jax.tree.leaves(after), strict=True)
        kept = [jnp.where(jnp.isfinite(loss), new, old) for old, new in both]
        return loss, (aux, structure.unflatten(kept))

    of_parts.__signature__ = inspect.signature(loss_fn)  # type: ignore[attr-defined]
    each = jax.tree.map(lambda x: Kind.FOLDED_KEY if is_key(x) else Kind.SHARED, streams)
    run = of_params(
        of_parts,
        in_kinds=(*in_kinds, each, Kind.PER_WORKER),
        aux_kinds=(aux_kinds, Kind.PER_WORKER),
        has_aux=True,
    )
    (loss, (aux, rest)), grads = run(params, *args, streams, rest)
    nnx.update(model, rest)
    return ((loss, aux) if has_aux else loss), grads
