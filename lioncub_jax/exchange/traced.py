"""What a traced program is made of, and whether a transform can run on a slice."""

import re
from itertools import chain
from typing import Any

import jax
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

# Operations whose results have the shape of what they take, and yet no element is made of its own alone.
_MIXING = re.compile(
    "cum|sort|rev$|transpose|dot|conv_|gather|scatter|dynamic_|reduce_window|fft|pad|concatenate|psum|pmax"
    "|pmin|ppermute|all_|triangular|cholesky|top_k|ffi_call|.*callback"
)


def programs_in(step: JaxprEqn) -> list[Jaxpr]:
    """The programs among the parameters of an operation."""
    kinds = Jaxpr | ClosedJaxpr
    found = jax.tree.leaves(step.params, is_leaf=lambda x: isinstance(x, kinds))
    return [x.jaxpr if isinstance(x, ClosedJaxpr) else x for x in found if isinstance(x, kinds)]


def check_elementwise(tx: optax.GradientTransformation, rows: jax.Array, state: Any) -> None:
    """Raises ``ValueError`` unless a transform makes each element of what its owner has of it.

    Args:
      tx: the transform.
      rows: a slice of updates.
      state: of that slice.
    """
    behind = (
        "and an owner has only a slice of each array. Give the owner what is elementwise, or nothing, and "
        "put the rest behind it: optax.chain(lioncub_jax.owner(optax.identity(), ...), tx)"
    )
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if x.shape not in ((), rows.shape):
            at = jax.tree_util.keystr(path)
            raise ValueError(
                f"at the owner: the state of tx has {at} of shape {x.shape}, which is neither a number nor "
                f"shaped like the updates {rows.shape}, {behind}"
            )
    # Parameters are given to the trace, to see whether they are used, be it for the first state.
    first = lambda rows, params: tx.update(rows, tx.init(params), params)  # noqa: E731
    program = jax.make_jaxpr(first)(rows, rows).jaxpr
    mixes = _mixes(program, rows.shape)
    if mixes is not None:
        raise ValueError(f"at the owner: tx mixes elements, by {mixes}, {behind}")
    used = chain(program.outvars, *(step.invars for step in program.eqns))
    if any(x is program.invars[-1] for x in used):
        raise ValueError(
            "at the owner: tx uses the parameters, which are not there. Weight decay goes behind the owner "
            "and before the learning rate: optax.chain(lioncub_jax.owner(...), "
            "optax.add_decayed_weights(...), optax.scale_by_learning_rate(...)); so does all else that "
            "needs parameters"
        )


def _mixes(program: Jaxpr, shape: tuple[int, ...]) -> str | None:
    """The operation by which elements of arrays of that shape are mixed, if any is."""
    for step in program.eqns:
        name, inner = step.primitive.name, programs_in(step)
        if shape not in map(_shape, step.invars):
            continue
        if not inner and (_MIXING.match(name) or {*map(_shape, step.outvars)} != {shape}):
            return name
        for one in inner:
            # A loop over the rows takes one of them at a time.
            apart = {*map(_shape, one.invars)} - {(), shape}
            found = name if apart else _mixes(one, shape)
            if found is not None:
                return found
    return None


def _shape(x: Any) -> tuple[int, ...]:
    return getattr(x.aval, "shape", ())
