"""Flax's boxes around arrays that have gained an axis of workers.

``nn.Partitioned`` and ``nnx.Variable`` say how an array is cut, a name for each dimension. Transforms make
momentum of boxed parameters, boxes included; on a mesh it is ``[workers, ...]``, and its first name is
the workers' axes. Inside a transform boxes stay those of the parameters.
"""

from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

from lioncub_jax.mesh.placement import Workers
from lioncub_jax.mesh.specs import Specs, has_flax, is_of_flax


def is_box(x: object) -> bool:
    """True for a box of flax, which has a name for each dimension, or room for it."""
    if not is_of_flax(x):
        return False
    from flax import linen, nnx

    return isinstance(x, (linen.Partitioned, nnx.Variable))


def find_boxes(tree: Any) -> list[Any]:
    """The boxes in a tree."""
    return [x for x in jax.tree.leaves(tree, is_leaf=is_box) if is_box(x)]


def find_nodes(tree: Any, *kinds: type) -> list[Any]:
    """The nodes of some kinds in a tree, such as states of transforms; the outermost ones."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    return [x for x in leaves if isinstance(x, kinds)]


def is_linen_box(x: object) -> bool:
    """True for a box of flax linen, which always has names."""
    if not is_of_flax(x):
        return False
    from flax import linen

    return isinstance(x, linen.Partitioned)


def opened(tree: Any) -> Any:
    """The arrays in boxes, where they lie; ``unbox`` of flax would lay them elsewhere."""
    if not has_flax(tree):
        return tree
    return jax.tree.map(lambda x: _inside(x) if is_box(x) else x, tree, is_leaf=is_box)


def _inside(box: Any) -> Any:
    return box.value if is_linen_box(box) else box.get_value()


def named(
    state: optax.OptState, specs: Specs, params: optax.Params, workers: Workers
) -> optax.OptState:
    """Writes the workers' axes on the boxes of what is each worker's own; boxes what has none.

    Args:
      state: global arrays, in the boxes of the parameters that they were made from.
      specs: how each lies.
      params: parameters of which some are boxed.
      workers: a `Workers`.
    """
    box = _partitioned if any(map(is_linen_box, find_boxes(params))) else _variable

    def name(x: Any, spec: Any) -> Any:
        entries = jax.tree.leaves(spec)
        if not entries:
            # A box around nothing, such as optax's MaskedNode, would have a spec and no array that lies so.
            return _inside(x)
        return box(x, entries[0]) if workers.stacks(entries[0]) else x

    return jax.tree.map(name, state, specs, is_leaf=is_box)


def _partitioned(x: Any, spec: P) -> Any:
    from flax import linen

    if isinstance(x, linen.Partitioned):
        return x.add_axis(0, {linen.PARTITION_NAME: spec[0]})
    return linen.Partitioned(x, tuple(spec))


def _variable(x: Any, spec: P) -> Any:
    from flax import nnx

    variable = x if isinstance(x, nnx.Variable) else nnx.Variable(x)
    metadata = variable.get_metadata()
    metadata.pop("optimizer_sharding", None)  # it lies as the parameters are cut
    names = metadata.get("out_sharding")
    names = (spec[0], *getattr(names, "spec", names)) if names else tuple(spec)
    (value,) = jax.tree.leaves(x)
    # Not eager: it lies there already, and nnx would ask for a mesh in the context to lay it there again.
    made = nnx.Variable(nnx.with_partitioning(lambda: value, names)(), eager_sharding=False)
    metadata |= made.get_metadata()
    for of_the_parameter in ("sharding_names", "sharding"):  # which nnx would prefer
        metadata.pop(of_the_parameter, None)
    return type(variable).from_metadata(value, metadata)
