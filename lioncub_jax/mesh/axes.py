"""The axes over which arrays differ: who the workers are, and which devices share one of them.

Types say it. Inside ``shard_map`` the type of an array names the mesh axes over which it varies: those
of the workers, which vote, and inner axes (fsdp, tensor, expert), over which a worker's arrays are cut.
Sums and maxima here are over the devices of one worker; what travels between workers is in `wires`.
"""

from collections.abc import Collection, Sequence
from functools import reduce
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh

# As users name the workers: one mesh axis, or several.
AxisName: TypeAlias = str | tuple[str, ...]
# Mesh axes that are one group of workers, or of devices; () for none.
Axes: TypeAlias = tuple[str, ...]


def names(axis: AxisName | None) -> Axes:
    """The mesh axes that a user has named; () for none."""
    return (axis,) if isinstance(axis, str) else axis or ()


def spelled(axis: Axes) -> AxisName | None:
    """The axes as users write them: one name, several, or None."""
    return axis if len(axis) > 1 else next(iter(axis), None)


def platform(mesh: Mesh | AbstractMesh) -> str | None:
    """The platform of a mesh's devices, such as ``"tpu"``; None where devices are unknown or differ."""
    device = mesh.abstract_mesh.abstract_device
    return device and device.platform


def varying_axes(x: jax.Array) -> frozenset:
    """The mesh axes over which the type of ``x`` varies; none outside ``shard_map``."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def workers_on(axis: Axes) -> int:
    """The number of workers on mesh axes together; 1 without any.

    Raises:
      ValueError: where one is not bound.
    """
    try:
        return lax.axis_size(axis)
    except NameError as error:
        bound = jax.sharding.get_abstract_mesh().manual_axes
        unknown = spelled(tuple(n for n in axis if n not in bound))
        if bound:
            raise ValueError(
                f"workers={unknown!r} is not an axis of the workers here, where the mapped axes are "
                f"{bound}: the optimizer and the step around it name different axes; give both the same "
                "one, such as one lioncub_jax.Workers"
            ) from error
        raise ValueError(
            f"workers={unknown!r} is not a mesh axis here: update (and, for state that is sharded "
            "over the workers, init) must run inside jax.shard_map or jax.pmap with that axis; "
            "lioncub_jax.map_step, init_state and make_train_step do so"
        ) from error


def check_bound(axis: Axes, group: Axes = ()) -> None:
    """Raises ``ValueError`` where collectives of these workers would fail, or silently be left out.

    Sums over the devices of a worker take their axes from the types of arrays.

    Args:
      axis: mesh axes of the workers; () for a single device, which sends nothing.
      group: mesh axes of the devices of one worker in two levels.
    """
    workers_on((*axis, *group))
    manual = jax.sharding.get_abstract_mesh().manual_axes
    of_one_worker = {n for n in (*manual, *group) if n not in axis and lax.axis_size(n) > 1}
    inner = tuple(sorted(of_one_worker))
    if axis and inner and not tracked(inner):
        sizes = {n: lax.axis_size(n) for n in inner}
        raise ValueError(
            f"each of workers={spelled(axis)!r} has several devices, on the mesh axes {sizes}, and here (a "
            "shard_map with check_vma=False, or a pmap) types do not tell what varies over these axes: "
            "scales and NaN of one device would be unknown to the others of its worker. Run the optimizer "
            "in lioncub_jax.map_step or make_train_step, or give jax.shard_map(..., check_vma=True)"
        )


def worker_index(axis: Axes) -> jax.Array:
    """``int32[]``: which worker this is; varies over ``axis``."""
    return lax.axis_index(axis) if axis else jnp.zeros((), jnp.int32)


def tracked(axis: Axes) -> bool:
    """True where types tell what varies over ``axis``: in ``shard_map`` with ``check_vma=True``."""
    return bool(axis) and varying_axes(lax.axis_index(axis)).issuperset(axis)


def varying(tree: Any, axis: Axes) -> Any:
    """Gives every leaf the type of a value that varies over ``axis``."""
    leaves, structure = jax.tree.flatten(tree)
    for i, x in enumerate(leaves):
        if missing := tuple(sorted(set(axis) - varying_axes(x))):
            leaves[i] = lax.pcast(x, missing, to="varying")
    return jax.tree.unflatten(structure, leaves)


def same_everywhere(x: jax.Array, axis: Axes) -> jax.Array:
    """Gives a value of a single worker the type of a value that does not vary over its axis."""
    differs = tuple(sorted(varying_axes(x).intersection(axis)))
    return lax.psum(x, differs) if differs else x


def shared(leaves: Sequence[jax.Array], axis: Axes) -> int | None:
    """Index of the first leaf whose type does not vary over all of ``axis``; or None."""
    for i, x in enumerate(leaves) if tracked(axis) else ():
        if not varying_axes(x).issuperset(axis):
            return i
    return None


def shard(x: jax.Array, axis: Axes) -> tuple[Any, int]:
    """Index of this device's shard of an array of one worker, ``uint32[]``, and the number of shards.

    The array's type tells both; they are 0 and 1 for a whole array.
    """
    return shard_of(varying_axes(x), axis)


def shard_of(varying: Collection[str], axis: Axes) -> tuple[Any, int]:
    """`shard` of an array that varies over these mesh axes."""
    others = tuple(sorted(set(varying).difference(axis)))
    return (lax.axis_index(others).astype(jnp.uint32), lax.axis_size(others)) if others else (0, 1)


def sum_over_shards(x: jax.Array, axis: Axes) -> jax.Array:
    """Adds numbers over the devices that share one worker; not over ``axis`` itself."""
    return lax.psum(x, _others(x, axis))


def total_over_shards(
    numbers: Sequence[jax.Array], copies: Sequence[jax.Array], axis: Axes
) -> jax.Array:
    """``[*total, *copies]`` in one psum: ``numbers`` added over a worker's devices, ``copies`` unchanged.

    Of ``numbers``, arrays ``[n]`` of one shape, ``total`` is the sum.

    An array that is replicated over an axis is added by the device with index 0 only. Dividing by the
    number of devices instead would round.
    """
    over = frozenset(n for x in (*numbers, *copies) for n in _others(x, axis))

    def once(x: jax.Array, of: frozenset) -> jax.Array:
        return jnp.where(lax.axis_index(tuple(sorted(of))) == 0, x, 0) if of else x

    total = reduce(jnp.add, [once(x, over - varying_axes(x)) for x in numbers])
    return sum_over_shards(jnp.stack([*total, *[once(x, over) for x in copies]]), axis)


def any_over_shards(flag: jax.Array, axis: Axes) -> jax.Array:
    """True where a flag is set on any of the devices that share one worker."""
    others = _others(flag, axis)
    return lax.pmax(flag.astype(jnp.uint32), others) > 0 if others else flag


def all_finite(tree: Any) -> jax.Array:
    """``bool[]``: whether all numbers are finite, of all that this device or the compiler has of them.

    A maximum does not tell: where XLA cuts an array, on CPU, the largest number and a NaN is the number.
    """
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)], bool))


def _others(x: jax.Array, axis: Axes) -> Axes:
    return tuple(sorted(varying_axes(x).difference(axis)))
