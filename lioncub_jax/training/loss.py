"""A loss as users write it: its call inside a worker, its results, and each worker's own gradient of it.

``jax.grad`` with respect to replicated parameters returns the gradient already summed over the workers in
full precision: training works, and nothing is saved. In a mapped step no types tell what varies, so
gradients are local; in a ``shard_map`` of the caller's parameters are cast to *varying* first.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from lioncub_jax.mesh import axes
from lioncub_jax.mesh.axes import AxisName
from lioncub_jax.mesh.placement import Workers, worker_axes
from lioncub_jax.mesh.specs import flax_in_use, without

Loss: TypeAlias = Callable[..., Any]  # of users, with arguments that they choose

_TAKEN = (
    "lioncub_jax: the step runs for one worker, where the axes {} of the mesh are taken. Put what the "
    "model says of the mesh into lioncub_jax.mesh.inner, which takes a NamedSharding too: "
    "jax.lax.with_sharding_constraint(x, inner(P(...))), jax.shard_map(f, mesh=inner(mesh), "
    "in_specs=inner(P(...)), out_specs=inner(P(...))); give logical rules around the step, not in it. An "
    "array on the mesh that the step closes over is to be an argument"
)


def local_value_and_grad(
    loss_fn: Loss, has_aux: bool = False, *, workers: AxisName | Workers | None
) -> Callable[..., Any]:
    """Like ``jax.value_and_grad`` for the first argument, with each worker's own gradient.

    ``jax.grad`` with respect to replicated parameters inside ``shard_map`` returns the gradient
    already summed over the workers in full precision. Casting the parameters to varying first keeps
    it local.

    Args:
      loss_fn: ``(params, ...) -> loss`` or, with ``has_aux``, ``(loss, aux)``.
      has_aux: as in ``jax.value_and_grad``.
      workers: a `Workers`, or the name of the axis that your own ``shard_map`` or ``pmap`` binds; None for
        a single device.

    Returns:
      A function with the arguments of ``loss_fn`` that returns ``(value, grads)``; both vary over
      the workers. For use where their axis is bound.

    Example:
      >>> import jax.numpy as jnp, lioncub_jax as lc
      >>> grad_fn = lc.local_value_and_grad(lambda w, x: jnp.sum(w * x), workers="data")
    """
    axis, group = worker_axes(workers)

    @functools.wraps(loss_fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        out = loss_fn(*args, **kwargs)
        returned(out, *(("loss", "aux") if has_aux else ("loss",)))
        return out

    value_and_grad = jax.value_and_grad(checked, has_aux=has_aux)

    def local(params: optax.Params, *args: Any, **kwargs: Any) -> Any:
        return value_and_grad(axes.varying(params, (*axis, *group)), *args, **kwargs)

    return in_worker(local)


def in_worker(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A step or a loss for one worker: its model may follow flax's logical rules, and errors have a note.

    There the workers' axes are taken: a constraint, a rule or a ``shard_map`` of the model can name the
    inner axes (fsdp, tensor, expert) only.
    """

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        taken = jax.sharding.get_abstract_mesh().manual_axes
        with _rules_without(taken):
            try:
                return fn(*args, **kwargs)
            except Exception as error:
                # As JAX and flax say that an axis is taken.
                if any(word in str(error) for word in ("anual", "ontext mesh", "Auto axes")):
                    error.add_note(_TAKEN.format(taken))
                raise

    return called


def _rules_without(taken: tuple[str, ...]) -> contextlib.AbstractContextManager[Any]:
    """The active logical rules of flax, without the axes that are taken."""
    if not flax_in_use():
        return contextlib.nullcontext()
    from flax import linen

    rules = []
    for name, cut in linen.get_logical_axis_rules():
        rules.append((name, next(iter(without(P(cut), taken)), None)))
    return linen.logical_axis_rules(rules)  # type: ignore[no-any-return]


def call(loss_fn: Loss, **given: Any) -> Any:
    """Calls a loss by position; ``TypeError`` names the arguments where it takes others."""
    takes = inspect.signature(loss_fn)
    try:
        takes.bind(*given.values())
    except TypeError as error:
        raise TypeError(
            f"the loss takes {takes} and is called with ({', '.join(given)}): give it these arguments. "
            "Several arrays of a batch are one tree, such as a tuple; a loss that draws nothing leaves rng "
            "unused"
        ) from error
    return loss_fn(*given.values())


def returned(out: Any, *names: str, **defaults: Any) -> tuple[Any, ...]:
    """Values of these names out of a loss's result, the last ones by default.

    Raises:
      TypeError: for more or fewer values, or a loss that is no floating number.
    """
    values = out if isinstance(out, tuple) else (out,)
    if not len(names) <= len(values) <= len(names) + len(defaults):
        wanted = ", ".join([*names, *defaults])
        raise TypeError(
            f"the loss returned {len(values) if len(values) > 1 else 'one'} value(s), and ({wanted}) is "
            f"wanted{' or the loss alone' if defaults else ''}: give other values as entries of aux, a "
            "dict such as {'accuracy': x}, and to local_value_and_grad has_aux=True with it"
        )
    loss = values[0]
    number = isinstance(loss, (jax.Array, np.ndarray, np.generic, float)) and not jnp.ndim(loss)
    if not number or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        given = f"{loss.dtype}{list(loss.shape)}" if hasattr(loss, "shape") else type(loss).__name__
        raise TypeError(
            f"the loss is {given}, and one floating number is wanted: give the mean over the rows, "
            "loss.mean(), and other values as aux, (loss, aux)"
        )
    return (*values, *[*defaults.values()][len(values) - len(names) :])


def like_given(model_state: Any, after: Any) -> Any:
    """The model state that a loss returns, in containers of those that it was given, such as FrozenDict.

    Raises:
      ValueError: for other leaves than the loss was given.
    """
    before, now = _types_of(model_state), _types_of(after)
    for path in {**before, **now}:
        if before.get(path) != now.get(path):
            raise ValueError(
                f"model_state{path} was {before.get(path, 'nothing')} and comes back from the loss as "
                f"{now.get(path, 'nothing')}: return what was given, of the same shapes and dtypes. What "
                "sow keeps is not model state: take it out in the loss, nnx.pop(model, nnx.Intermediate), "
                "or of linen leave 'intermediates' out of what is returned, and return it in aux"
            )
    leaves = dict(zip(now, jax.tree.leaves(after), strict=True))
    return jax.tree.unflatten(jax.tree.structure(model_state), [leaves[path] for path in before])


def _types_of(tree: Any) -> dict[str, str]:
    """The dtype and shape of each leaf, by its path."""
    types = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        dtype = getattr(x, "dtype", None) or jnp.result_type(x)
        types[jax.tree_util.keystr(path)] = f"{dtype}{[*jnp.shape(x)]}"
    return types
