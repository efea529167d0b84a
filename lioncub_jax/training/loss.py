"""A loss as users write it: its call inside a worker, and checks of its closure and of its results."""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from lioncub_jax.mesh.hosts import is_key
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.mesh.specs import axes_in, flax_in_use, spec_of, without
from lioncub_jax.training import advice
from lioncub_jax.training.kinds import Loss, is_raw_key


def in_worker(loss_fn: Loss) -> Callable[..., Any]:
    """A loss for one worker: its model may follow flax's logical rules, and errors about meshes have notes.

    There the workers' axes are taken: a constraint, a rule or a ``shard_map`` of the model can name the
    inner axes (fsdp, tensor, expert) only.
    """

    @functools.wraps(loss_fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        with _rules_without(mesh.manual_axes):
            try:
                return loss_fn(*args, **kwargs)
            except Exception as error:
                advice.add_notes(error, mesh, args[0])
                raise

    return called


def _rules_without(taken: tuple[str, ...]) -> contextlib.AbstractContextManager[Any]:
    """The active logical rules of flax, without the axes that are taken."""
    if not flax_in_use():
        return contextlib.nullcontext()
    from flax import linen

    rules = []
    for name, axes in linen.get_logical_axis_rules():
        rules.append((name, next(iter(without(P(axes), taken)), None)))
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
            "dict such as {'accuracy': x}, and to worker_value_and_grad has_aux=True with it"
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


def loss_and_aux(out: Any, has_aux: bool) -> tuple[jax.Array, Any]:
    """``(loss, aux)`` of a loss's result."""
    if has_aux:
        return returned(out, "loss", "aux")  # type: ignore[return-value]
    return returned(out, "loss")[0], ()


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


def check_closure(loss_fn: Loss, workers: Workers) -> None:
    """Checks the arrays that a loss has from around it: all workers would have the whole of each.

    Raises:
      ValueError: for an array that is cut over the workers, or lies on Explicit axes.

    Warns:
      UserWarning: for a random key.
    """
    for name, value in _closed_over(loss_fn).items():
        plain = isinstance(value, (jax.Array, np.ndarray, dict, list, tuple))
        for x in jax.tree.leaves(value) if plain else ():
            if not isinstance(x, (jax.Array, np.ndarray)):
                continue
            if is_key(x) or is_raw_key(x):
                warnings.warn(
                    f"the loss closes over the random key {name!r}, so all workers draw the same, such as "
                    "one dropout mask: give it as an argument of the loss, into which each worker folds "
                    "its number",
                    stacklevel=3,
                )
            elif isinstance(x, jax.Array) and (
                jax.typeof(x).sharding.mesh.explicit_axes
                or set(axes_in(spec_of(x))).intersection(workers.axes)
            ):
                raise ValueError(
                    f"the loss closes over {name!r}, an array of shape {x.shape} that lies on the mesh: "
                    "give it as an argument of the loss, or as a part of the batch, and its kind in "
                    "in_kinds: lioncub_jax.Kind.SPLIT for rows of each worker, "
                    "SHARED for what all need whole"
                )


def _closed_over(loss_fn: Any, within: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Variables around a function, and around those that it closes over, by name."""
    if isinstance(loss_fn, functools.partial):
        given = {f"argument {i}": x for i, x in enumerate(loss_fn.args)} | loss_fn.keywords
        return given | _closed_over(loss_fn.func)
    # No function, or a variable that is assigned later.
    with contextlib.suppress(TypeError, ValueError):
        has = inspect.getclosurevars(inspect.unwrap(loss_fn))
        around = {**has.globals, **has.nonlocals}
        for one in has.nonlocals.values():
            if inspect.isfunction(one) and one not in within:
                around = _closed_over(one, (*within, loss_fn)) | around
        return around
    return {}
