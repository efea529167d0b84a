"""Objects of flax's nnx among the arguments of a step, which changes them in place."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax

from lioncub_jax.exchange.mapped import Holder, find_holders
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.mesh.specs import StateSpecs, has_flax, is_of_flax

_TAG = "lioncub_jax.map_step"
_BOX = "lioncub_jax_own"  # in the metadata of a variable
_GRAPHS: dict[Any, bool] = {}  # by the structure of an argument


def is_graph(x: Any) -> bool:
    """True for what holds modules, optimizers, streams, metrics or variables.

    Not for an ``nnx.State``, nor for the state of a transform of ours that was made of one.
    """
    if is_of_flax(x):
        from flax import nnx

        if isinstance(x, (nnx.Pytree, nnx.Variable, nnx.State)):
            return not isinstance(x, nnx.State)
    structure = jax.tree.structure(x)  # it has the classes of all nodes, and is made without Python
    if structure not in _GRAPHS:
        _GRAPHS[structure] = has_flax(x) and _has_graph(x)
    return _GRAPHS[structure]


def _has_graph(tree: Any) -> bool:
    from flax import nnx

    kinds = nnx.Pytree, nnx.Variable, nnx.State

    def is_leaf(x: Any) -> bool:
        return isinstance(x, kinds) or isinstance(getattr(x, "specs", None), StateSpecs)

    return any(isinstance(x, kinds[:2]) for x in jax.tree.leaves(tree, is_leaf=is_leaf))


def updating(nodes: Any) -> contextlib.AbstractContextManager[Any]:
    """The context of a call, in which nnx knows objects of the arguments again in what is returned."""
    if not nodes:
        return contextlib.nullcontext()
    from flax import nnx

    return nnx.update_context(_TAG)


def split(nodes: Any) -> tuple[Any, list[Any]]:
    """``(definition, values)`` of objects, ``(None, [])`` of none: bare values, as nnx.jit takes them."""
    if not nodes:
        return None, []
    from flax import nnx

    with nnx.split_context(_TAG) as context:
        return context.flatten(nodes, with_paths=False)  # type: ignore[no-any-return]


def merged(definition: Any, values: Any, inner: bool = True) -> Any:
    """Undoes `split`: with new objects in a step, ``inner``, with those of the arguments around it."""
    if definition is None:
        return []
    from flax import nnx

    with nnx.merge_context(_TAG, inner=inner) as context:
        return context.unflatten(definition, values)


def places(nodes: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """The path of each value of `split`, and the variable that holds it, or the value."""
    if not nodes:
        return []
    from flax import nnx

    _, flat = nnx.flatten(nodes, graph=True)
    return [*zip(flat.paths, flat.leaves, strict=True)]


def keys(path: Sequence[Any]) -> tuple[Any, ...]:
    """A path of nnx as one of JAX."""
    return tuple([jax.tree_util.DictKey(key) for key in path])


def box(variable: Any, x: jax.Array) -> None:
    """Gives a variable an array of which each worker has its own, and marks it so."""
    variable.set_value(x)
    variable.set_metadata(**{_BOX: True})


def variables(node: Any) -> list[tuple[Any, Holder]]:
    """The variables of objects, each with the holder of its array, of optimizers by its place."""
    from flax import nnx

    front, found = set[int](), []
    objects = [x for _, x in nnx.iter_graph(node)]
    for x in objects:
        if isinstance(x, nnx.Optimizer):
            pairs = zip(
                jax.tree.leaves(x.opt_state),
                jax.tree.leaves(find_holders(x.opt_state)),
                strict=True,
            )
            front |= {id(array) for array, holder in pairs if holder is Holder.FRONT}
    for x in objects:
        if isinstance(x, nnx.Variable):
            found.append((x, Holder.FRONT if id(x.get_value()) in front else Holder.ALL))
    return found


def is_boxed(x: Any) -> bool:
    """True for a variable of which each worker was given its own, as in a box."""
    return is_of_flax(x) and hasattr(x, "get_metadata") and _BOX in x.get_metadata()


def is_own(variable: Any, workers: Workers) -> bool:
    """True for a variable whose first dimension is that of the workers, by its names."""
    names: Any = variable.get_metadata().get("out_sharding") or ()
    return workers.stacks(getattr(names, "spec", names))


def kind_of(x: Any) -> str:
    """The kind of a variable; "" of what is none."""
    if not is_of_flax(x):
        return ""
    from flax import nnx

    if not isinstance(x, nnx.Variable):
        return ""
    known = nnx.Param, nnx.BatchStat, nnx.RngState, nnx.OptState, nnx.metrics.MetricState
    return next((k for k in known if isinstance(x, k)), type(x)).__name__
