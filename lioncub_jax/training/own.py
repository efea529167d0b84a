"""What each worker has for itself, and what all have together, of the arrays of a step."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange import wires
from lioncub_jax.exchange.mapped import Holder, exchanging_state, find_holders
from lioncub_jax.mesh import hosts
from lioncub_jax.mesh.axes import worker_index
from lioncub_jax.mesh.hosts import is_key
from lioncub_jax.mesh.placement import Workers, check_arrays, check_workers
from lioncub_jax.mesh.specs import axes_in, shortened, spec_of, stacked
from lioncub_jax.training import graphs
from lioncub_jax.training.arguments import Own, is_of_optax


def own(tree: Any, workers: Workers) -> Own:
    """Gives each worker its own copy of a tree, such as the sums of a loop in front of the optimizer.

    Args:
      tree: of arrays and numbers, the same on every process.
      workers: a `Workers`.

    Returns:
      A box, a pytree with leaves ``[workers, ...]``, for an argument of a mapped step, in which there is no
      box; the step returns it so. Typed random keys are each worker's own. A worker whose arrays in a box
      are not finite after a step keeps those from before it.

    Raises:
      TypeError: for what is no array, such as a ``Variable`` of keras: give its ``value``.
      ValueError: for arrays that are ``[workers, ...]`` on the mesh already.

    Example:
      >>> import jax.numpy as jnp, lioncub_jax as lc
      >>> workers = lc.Workers.one_per_device()
      >>> lc.training.own({"sum": jnp.zeros(3)}, workers).value["sum"].shape == (workers.num_gradients, 3)
      True

    Source: this library.
    """
    check_workers(workers)
    return Own(copied_to_each("tree", tree, workers))


def copied_to_each(name: str, tree: Any, workers: Workers) -> Any:
    """Arrays ``[workers, ...]``: a copy for each worker, with random keys of its own."""
    check_arrays(tree, int, float, name=name)
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if not set(workers.axes).isdisjoint(axes_in(spec_of(x))):
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)}, of shape {jnp.shape(x)}, lies over the workers "
                "already: give each worker its own of it once"
            )
    if not jax.tree.leaves(tree):  # JAX would look in vain for an array that tells the mesh
        return tree
    specs = jax.tree.map(lambda x: shortened(spec_of(x), workers.inner), tree)
    if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree)):
        tree = jax.tree.map(hosts.put, tree, workers.shardings(specs))

    def of_one(tree: Any) -> Any:
        return jax.tree.map(lambda x: (fold(workers, x) if is_key(x) else strong(x))[None], tree)

    run = workers.map(of_one, (specs,), stacked(specs, workers.axes), typed=False)
    return jax.jit(run)(tree)


def fold(workers: Workers, x: jax.Array) -> jax.Array:
    """Gives each worker random keys of its own; a raw one stays raw."""
    fold_in = jnp.vectorize(jax.random.fold_in) if is_key(x) else jax.random.fold_in
    return fold_in(x, worker_index(workers.axes))


def strong(x: jax.Array) -> jax.Array:
    """The same without a weak type, which a step does not return: it would be compiled twice."""
    return lax.convert_element_type(x, x.dtype)


def prepared(state: Any, workers: Workers) -> Any:
    """A state on the mesh, with what stands in front of an exchange in boxes; see `MappedStep.prepare`."""
    if not graphs.is_graph(state):
        return _prepared(state, workers)
    for variable, holder in graphs.variables(state):
        held = _held(workers, holder, variable.get_value())
        if isinstance(held, Own):
            graphs.box(variable, held.value)
        else:
            variable.set_value(held)
    return state


def _prepared(state: Any, workers: Workers) -> Any:
    def is_whole(x: Any) -> bool:
        return isinstance(x, Own) or (is_of_optax(x) and exchanging_state(x) is not None)

    def of_part(x: Any) -> Any:
        if isinstance(x, Own):
            return x
        return jax.tree.map(partial(_held, workers), find_holders(x), x)

    return jax.tree.map(of_part, state, is_leaf=is_whole)


def _held(workers: Workers, holder: Holder, x: Any) -> Any:
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return x
    if holder is Holder.FRONT:
        return own(x, workers)
    if isinstance(x.sharding, NamedSharding) and x.sharding.mesh == workers.mesh:
        return x
    return hosts.put(x, workers.shardings(P()))


def mean_over_workers(tree: Any, workers: Workers) -> Any:
    """The mean over the workers of what each has in a step: a denominator, a norm, a loss.

    ``x = sum_i x_i / W``. A loss that a worker divides by ``mean_over_workers`` of its count of tokens is,
    as a mean over the workers, the sum of all losses divided by all tokens.

    Args:
      tree: of floating arrays; they travel as they are, so give few.
      workers: a `Workers`.

    Returns:
      The same tree; outside of a mapped step, as on one device, what was given.

    Example:
      >>> import jax.numpy as jnp, lioncub_jax as lc
      >>> float(lc.mean_over_workers(jnp.float32(3), lc.Workers.one_per_device()))
      3.0

    Source: this library.
    """
    check_workers(workers)
    return wires.mean_over_workers(tree, workers.axes) if in_step(workers) else tree


def sum_over_workers(tree: Any, workers: Workers) -> Any:
    """The sum over the workers of what each has in a step, such as a count of tokens.

    ``x = sum_i x_i``; arguments and what is returned are those of `mean_over_workers`.

    Example:
      >>> import jax.numpy as jnp, lioncub_jax as lc
      >>> int(lc.training.sum_over_workers(jnp.int32(3), lc.Workers.one_per_device()))
      3

    Source: this library.
    """
    check_workers(workers)
    return wires.sum_of_floats(tree, workers.axes) if in_step(workers) else tree


def in_step(workers: Workers) -> bool:
    """True inside of a mapped step, or of a ``shard_map`` over the workers."""
    return set(workers.axes) <= set(jax.sharding.get_abstract_mesh().manual_axes)
