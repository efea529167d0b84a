"""Jaxprs of transforms: their parts, and a check that a transform can run on a chunk of the rows."""

import re
from collections.abc import Sequence
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from lioncub_jax.mesh import axes
from lioncub_jax.mesh.axes import Axes

# Operations with results of the shape of their operands that mix elements all the same.
_MIXING = re.compile(
    "cum|sort|rev$|transpose|dot|conv_|gather|scatter|dynamic_|reduce_window|fft|pad|concatenate|psum|pmax"
    "|pmin|ppermute|all_|triangular|cholesky|top_k|ffi_call|.*callback"
)


def jaxprs_in(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs among the parameters of an equation."""
    kinds = Jaxpr | ClosedJaxpr
    params = jax.tree.leaves(eqn.params, is_leaf=lambda x: isinstance(x, kinds))
    return [x.jaxpr if isinstance(x, ClosedJaxpr) else x for x in params if isinstance(x, kinds)]


def named_axes(eqn: JaxprEqn) -> Axes:
    """The mesh axes that an operation names."""
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(n for n in axes.names(named) if isinstance(n, str))


def check_elementwise(
    tx: optax.GradientTransformation, rows: jax.Array, state: Any, may_mix: bool = False
) -> None:
    """Raises ``ValueError`` for a transform that mixes elements, or needs more than a chunk of the rows.

    Args:
      tx: the transform.
      rows: a chunk of updates.
      state: of that chunk.
      may_mix: True for a transform of whole matrices.
    """
    behind = (
        "and an owner has only a chunk of each array. Give the owner what is elementwise, or nothing, and "
        "put the rest behind it: optax.chain(lioncub_jax.owner(optax.identity(), ...), tx)"
    )
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if x.shape not in ((), rows.shape):
            at = jax.tree_util.keystr(path)
            raise ValueError(
                f"at the owner: the state of tx has {at} of shape {x.shape}, which is neither a number nor "
                f"shaped like the updates {rows.shape}, {behind}"
            )
    tx = optax.with_extra_args_support(tx)

    # Parameters and the loss are given to the trace, to see whether they are used.
    def first_step(rows: jax.Array, params: jax.Array, value: jax.Array) -> Any:
        return tx.update(rows, tx.init(params), params, value=value)

    jaxpr = jax.make_jaxpr(first_step)(rows, rows, jnp.float32(0)).jaxpr
    used = {
        x for x in chain(jaxpr.outvars, *(eqn.invars for eqn in jaxpr.eqns)) if isinstance(x, Var)
    }
    _, params, value = jaxpr.invars
    if value in used:
        raise ValueError(
            "at the owner: tx asks for value, the loss, which an owner does not know: put it behind the "
            "owner, optax.chain(lioncub_jax.owner(...), optax.contrib.reduce_on_plateau())"
        )
    mixing = None if may_mix else _mixing_primitive(jaxpr, rows.shape)
    if mixing is not None:
        raise ValueError(f"at the owner: tx mixes elements, by {mixing}, {behind}")
    if params in used:
        raise ValueError(
            "at the owner: tx uses the parameters, which are not there. Weight decay goes behind the owner "
            "and before the learning rate: optax.chain(lioncub_jax.owner(...), "
            "optax.add_decayed_weights(...), optax.scale_by_learning_rate(...)); so does all else that "
            "needs parameters"
        )


def _mixing_primitive(jaxpr: Jaxpr, shape: tuple[int, ...]) -> str | None:
    """The primitive by which elements of arrays of that shape are mixed, if any is."""
    for eqn in jaxpr.eqns:
        name, inner = eqn.primitive.name, jaxprs_in(eqn)
        if shape not in _shapes(eqn.invars):
            continue
        if not inner and (_MIXING.match(name) or _shapes(eqn.outvars) != {shape}):
            return name
        for one in inner:
            # A loop over the rows takes one of them at a time.
            by_row = _shapes(one.invars) - {(), shape}
            mixing = name if by_row else _mixing_primitive(one, shape)
            if mixing is not None:
                return mixing
    return None


def _shapes(variables: Sequence[Any]) -> set[tuple[int, ...]]:
    return {getattr(x.aval, "shape", ()) for x in variables}
