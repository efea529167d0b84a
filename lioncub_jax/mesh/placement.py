"""Workers of a mesh, and the two ways into the places where they communicate.

A mesh has the axes of the workers and any *inner axes* (fsdp, tensor, expert) over which one worker's
arrays are cut. Gradients and optax transforms run where the workers' axes are manual and the inner axes
are the compiler's (`Workers.map`). The vote runs where every axis is manual, on each device's own shard
(`on_shards`), because a compiler that packs a sharded leaf gathers it in full precision first. Inside,
inner axes are *explicit*: the type of every array says how it is cut.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, auto_axes, explicit_axes
from jax.sharding import PartitionSpec as P

from lioncub_jax.mesh import axes as mesh_axes
from lioncub_jax.mesh.axes import Axes, AxisName
from lioncub_jax.mesh.specs import (
    Specs,
    axes_of,
    by_type,
    checked,
    declared,
    product,
    restrict,
    shortened,
    specs_of,
)

# A mesh axis of one device, over which a ``shard_map`` has types; see `training.map_step`.
FREE = "lioncub_types"


def two_level_mesh(group_size: int | None = None) -> Mesh:
    """A mesh of workers that are groups of devices: ``[groups, group_size]``, axes "node" and "device".

    Of all devices; those of a process are neighbors in the mesh.

    Args:
      group_size: devices of one worker, joined by fast links; by default those of one process.

    Raises:
      ValueError: if the group size does not divide the devices, or would cut through processes.

    Example:
      >>> import lioncub_jax as lc
      >>> dict(lc.mesh.two_level_mesh(1).shape)["device"]
      1
    """
    ordered = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    local = sum(d.process_index == ordered[0].process_index for d in ordered)
    size = local if group_size is None else group_size
    fits = isinstance(size, int) and size > 0 and not len(ordered) % size
    if not fits or (local % size and size % local):
        raise ValueError(
            f"group_size={group_size!r}: there are {len(ordered)} devices, {local} in each process: give a "
            f"whole number that divides {len(ordered)} and is a divisor or a multiple of {local}, so that "
            "no group holds a part of a process"
        )
    array = np.array(ordered).reshape(-1, size)
    return Mesh(array, ("node", "device"), axis_types=(AxisType.Auto,) * 2)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """A pytree node without arrays: a part of a result's structure, as the keys of a dict are.

    A traced function returns it beside arrays, or by itself where ``jax.eval_shape`` calls it.

    Attributes:
      value: anything that is known when a function is traced; it is not compared.
    """

    value: Any


@dataclasses.dataclass(frozen=True)
class Workers:
    """The workers of a mesh, given to the optimizer, the state, the step and the checkpoints.

    A worker votes with one gradient. It is a device, or with inner axes (fsdp, tensor, expert) the
    devices that share its parameters, or in two levels a group of devices with fast links.

    Attributes:
      mesh: the devices, axes Auto or Explicit.
      axis: mesh axis of the workers, or several as a tuple: one group of voters.
      group: mesh axis of the devices of one worker, in two levels; else None.
      axes: those over which gradients differ: the workers', then those of a worker's devices.
      inner: the other axes of the mesh, over which one worker's arrays are cut.
      num_gradients: how many differ: one for each worker, or for each device of a group.

    Raises:
      TypeError: for a mesh that is none.
      ValueError: for a mesh without one of the axes, or an axis that is named twice.

    Example:
      >>> import jax, jax.numpy as jnp, lioncub_jax as lc
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> workers = lc.Workers(mesh, "data")
      >>> tx = lc.lion_cub(1e-3, workers=workers)
      >>> state = lc.init_state(tx, {"w": jnp.ones(3)}, workers)
      >>> workers.num_gradients
      1
    """

    mesh: Mesh
    axis: AxisName
    group: AxisName | None = None

    def __post_init__(self) -> None:
        mesh, given = self.mesh, {"axis": self.axis, "group": self.group}
        if not isinstance(mesh, Mesh | AbstractMesh):
            raise TypeError(
                f"{mesh!r} is no mesh: give a jax.sharding.Mesh, such as jax.make_mesh((8,), ('data',))"
            )
        names: list[Any] = []
        for part in given.values():
            names += part if isinstance(part, tuple) else [part] if part else []
        if not self.axis or not all(names.count(n) == 1 and n in mesh.axis_names for n in names):
            raise ValueError(
                f"axis={self.axis!r}, group={self.group!r}: the mesh has axes {mesh.axis_names}; give "
                "names of them, each once. A worker is one index of axis, such as 'data', and its devices "
                "are those of group and of the inner axes"
            )
        for name, part in given.items():  # one spelling of what means the same
            object.__setattr__(self, name, mesh_axes.spelled(mesh_axes.names(part)))

    @classmethod
    def one_per_device(cls) -> "Workers":
        """Workers that are one device each: all devices of all processes, on the mesh axis "data".

        Example:
          >>> import jax, lioncub_jax as lc
          >>> lc.Workers.one_per_device().num_gradients == jax.device_count()
          True
        """
        return cls(jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,)), "data")

    @functools.cached_property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which gradients differ."""
        return (*mesh_axes.names(self.axis), *mesh_axes.names(self.group))

    @functools.cached_property
    def inner(self) -> tuple[str, ...]:
        """The mesh axes over which one worker's arrays are cut."""
        return tuple(n for n in self.mesh.axis_names if n not in self.axes)

    @functools.cached_property
    def num_gradients(self) -> int:
        """How many gradients differ: one for each worker, or for each device of a group."""
        return product(self.mesh.shape, self.axes)

    def __str__(self) -> str:
        """The axes, as they are written in a call."""
        group = "" if self.group is None else f", group={self.group!r}"
        return f"axis={self.axis!r}{group}"

    def param_specs(self, params: optax.Params, specs: Specs) -> Specs:
        """Specs of parameters over the inner axes: as given, or as the parameters say themselves."""
        check_arrays(params)
        if specs is None and self._hidden(params):
            raise ValueError(
                f"how parameters are cut over the Auto axes {self._hidden(params)} cannot be seen "
                "inside jax.jit: call init of the optimizer outside of it, on the parameters"
            )
        specs = specs_of(params) if specs is None else specs
        return checked(specs, params, self.mesh, self.axes)

    def _hidden(self, params: optax.Params) -> list[str]:
        """Auto inner axes over which traced parameters may be cut unseen."""
        mesh = self.mesh
        hidden = [n for n in self.inner if n in mesh.auto_axes and mesh.shape[n] > 1]
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(params))
        return hidden if traced and not any(jax.tree.leaves(declared(params))) else []

    def map(
        self,
        fn: Callable[..., Any],
        in_specs: Specs,
        out_specs: Specs,
        *,
        typed: bool,
    ) -> Callable[..., Any]:
        """Maps ``fn`` over the workers' axes; inside, arrays are a worker's own, whole in the inner axes.

        Args:
          fn: takes and returns trees of arrays.
          in_specs: a tree (prefix) like the arguments, of specs over all axes, inner ones included.
          out_specs: the same for the results.
          typed: whether types tell what varies over the workers, and how arrays are cut over all inner
            axes, or over those only that are explicit on the mesh. Where types tell, a model with a
            ``scan``, ``cond`` or Pallas kernel must cast by hand whatever it starts from: a transform is
            typed, and a loss is not.

        Returns:
          A function of global arrays, to be called under ``jax.jit``.
        """
        shows = self.mesh.explicit_axes
        shown = set(self.inner) if typed else set(self.inner).intersection(shows)
        hidden = set(self.inner) - shown
        if shown:
            fn = explicit_axes(fn, axes=tuple(shown), in_sharding=restrict(in_specs, shown))
        if hidden:
            fn = _constrained(fn, restrict(out_specs, hidden))
        of_args, of_results = restrict((in_specs, out_specs), self.axes)
        mapped = jax.shard_map(
            fn,
            mesh=None if shows else self.mesh,
            in_specs=of_args,
            out_specs=of_results,
            axis_names=set(self.axes),
            check_vma=typed,
        )
        if self.inner or not typed:
            # JAX 0.10.2 cannot run a partly manual one eagerly.
            mapped = jax.jit(mapped, inline=True)
        if not shows:
            return mapped
        # JAX 0.10.2 gathers what is cut over explicit axes at the border of a partly manual region. So they
        # are the compiler's at the border, and constrained on both sides of it.
        return auto_axes(mapped, axes=shows, out_sharding=self.shardings(out_specs))

    def shardings(self, specs: Specs) -> Any:
        """Specs as shardings on the mesh."""
        return jax.tree.map(partial(NamedSharding, self.mesh), specs)

    def shape(self, spec: P, x: Any, *lead: int) -> Any:
        """An array as a shape that lies so, with leading dimensions before its own."""
        sharding = NamedSharding(self.mesh, spec)
        return jax.ShapeDtypeStruct((*lead, *jnp.shape(x)), x.dtype, sharding=sharding)

    def stack(self, tree: Any, specs: Specs, *, undo: bool = False) -> Any:
        """Adds the leading axis of what differs between workers, by its specs; or removes it."""
        arrays, structure = jax.tree.flatten(tree)
        for i, spec in enumerate(jax.tree.leaves(specs)):
            if self.stacks(spec):
                arrays[i] = arrays[i][0] if undo else arrays[i][None]
        return jax.tree.unflatten(structure, arrays)

    def stacks(self, spec: P) -> bool:
        """True for the spec of an array with a leading axis of workers."""
        return len(spec) > 0 and not set(self.axes).isdisjoint(axes_of(spec[0]))


def check_workers(workers: object) -> None:
    """Raises ``TypeError`` for anything but `Workers`, where a mesh is needed."""
    if not isinstance(workers, Workers):
        raise TypeError(
            f"workers={workers!r}: give the workers of a mesh, such as lioncub_jax.Workers(mesh, 'data')"
        )


def check_real(workers: Any) -> None:
    """Raises as `check_workers`, and ``ValueError`` for a mesh without devices."""
    check_workers(workers)
    if not isinstance(workers.mesh, Mesh):
        raise ValueError(
            "the workers' mesh is an AbstractMesh, without devices for arrays and steps: give Workers of "
            "a jax.sharding.Mesh. Shapes alone are made by training.abstract_state"
        )


def worker_axes(workers: AxisName | Workers | None) -> tuple[Axes, Axes]:
    """Mesh axes of the workers, and those of the devices of one worker in two levels.

    Raises:
      ValueError: for anything but `Workers`, the name of a mesh axis, a tuple of names, or None.
    """
    if isinstance(workers, Workers):
        return mesh_axes.names(workers.axis), mesh_axes.names(workers.group)
    names = workers if isinstance(workers, tuple) else (workers,)
    known = names and all(isinstance(n, str) for n in names) and len(set(names)) == len(names)
    if workers is not None and not known:
        raise ValueError(
            f"workers={workers!r}: give lioncub_jax.Workers(mesh, 'data'), or where your own shard_map or "
            "pmap binds it the name of a mesh axis, a string, a tuple of names, or None for one device "
            "without a mesh"
        )
    return mesh_axes.names(workers), ()


def check_arrays(params: optax.Params, *others: type, name: str = "params") -> None:
    """Raises ``TypeError`` for leaves that are no arrays, nor of the other types."""
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        shaped = hasattr(x, "shape") and hasattr(x, "dtype")
        wrapped = hasattr(x, "__jax_array__")  # which JAX does not take any more
        if not isinstance(x, (jax.Array, *others)) and (wrapped or not shaped):
            raise TypeError(
                f"{name}{jax.tree_util.keystr(path)} is {x!r}, a {type(x).__name__}: parameters are "
                "arrays; give jnp.asarray(...), of a Variable of keras its value. "
                "Split an equinox module, params, static = eqx.partition(model, eqx.is_array), and join it "
                "in the loss, eqx.combine(params, static)"
            )
    check_alive(name, params)


def check_alive(name: str, tree: Any) -> None:
    """Raises ``ValueError`` for an array that was donated to a step, where JAX would end the process."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted():
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} was given to an earlier step, which took over its "
                "memory (donated): go on with the state that the step returned, state, metrics = "
                "step(state, batch), or give the step a copy, jax.tree.map(jnp.copy, state)"
            )


def device_ids(mesh: Mesh | AbstractMesh) -> list[int]:
    """The numbers of the devices of a mesh, in its order."""
    return [device.id for device in mesh.devices.flat]


def check_devices(tree: Any, workers: Workers, name: str) -> None:
    """Raises ``ValueError`` for arrays on a mesh of other devices than the workers'."""
    own = device_ids(workers.mesh)
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        mesh = getattr(getattr(x, "sharding", None), "mesh", None)
        if isinstance(mesh, Mesh) and mesh is not workers.mesh and device_ids(mesh) != own:
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} is on a mesh of devices {device_ids(mesh)}, and the "
                f"workers are on one of {own}: make one mesh, and give lioncub_jax.Workers of it to the "
                "optimizer, init_state and make_train_step; what lies elsewhere moves by jax.device_put"
            )


def _constrained(fn: Callable[..., Any], specs: Specs) -> Callable[..., Any]:
    """``fn``, whose results the compiler cuts as ``specs`` say."""

    def constrain(spec: P, part: Any) -> Any:
        return jax.lax.with_sharding_constraint(part, spec) if any(spec) else part

    def constrained(*args: Any) -> Any:
        return jax.tree.map(constrain, specs, fn(*args))

    return constrained


def on_shards(
    fn: Callable[..., Any], args: Any, like: Any = None, specs: Specs | None = None
) -> Any:
    """Calls ``fn(*args)`` where every axis is manual, on each device's own shards.

    What is no array, such as a name or a function of a component, comes as it is and is no operand of the
    program.

    Args:
      fn: takes and returns trees of arrays.
      args: a tuple of trees of anything; how each array is cut is read from its type.
      like: a tree (prefix) of arrays that the results are to lie as; by default they are stacked along
        their first dimension over the inner axes that their type varies over.
      specs: where types do not tell how arrays are cut, nor what is each worker's own, their specs, with
        the workers' axes in front of what is; a tree (prefix) like ``args``.

    Raises:
      ValueError: where inner axes are left to the compiler, which then would not say how leaves are cut.
    """
    structure: Any
    given, structure = jax.tree.flatten(args)
    places = [i for i, x in enumerate(given) if isinstance(x, jax.Array)]
    arrays = [given[i] for i in places]

    def of_arrays(*arrays: jax.Array) -> Any:
        both = list(given)
        for i, x in zip(places, arrays, strict=True):
            both[i] = x
        return fn(*structure.unflatten(both))

    mesh = jax.sharding.get_abstract_mesh()
    free = tuple(n for n in mesh.axis_names if n not in mesh.manual_axes)
    asked = any(mesh.shape[n] > 1 or n == FREE for n in free)
    if specs is not None and asked and not mesh_axes.tracked(mesh.manual_axes):
        each = jax.tree.leaves(jax.tree.broadcast(specs, args))
        return _on_typed_shards(of_arrays, arrays, like, [each[i] for i in places], free)
    inner = mesh.explicit_axes
    hidden = [n for n in mesh.auto_axes if mesh.shape[n] > 1]
    if hidden:
        raise ValueError(
            f"axes {hidden} of the mesh are left to the compiler here, which would gather every leaf "
            "that is cut over them before it is packed: give the optimizer lioncub_jax.Workers, and run it "
            "in map_step or make_train_step; or make all axes of your shard_map manual"
        )
    if not inner:
        return fn(*args)
    in_specs = tuple(restrict(jax.typeof(x).sharding.spec, inner) for x in arrays)
    over = partial(jax.shard_map, in_specs=in_specs, axis_names=set(inner))
    if like is None:
        probe = over(lambda *arrays: Static(by_type(of_arrays(*arrays), inner)), out_specs=P())
        out_specs = jax.eval_shape(probe, *arrays).value
    else:
        out_specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, like)
    return over(of_arrays, out_specs=out_specs)(*arrays)


def _on_typed_shards(
    fn: Callable[..., Any],
    arrays: Sequence[jax.Array],
    like: Any,
    specs: Sequence[P],
    axes: tuple[str, ...],
) -> Any:
    """`on_shards` in a ``shard_map`` without types, in one with types over the other axes.

    Types of what comes from outside say nothing about the workers, so it is cast as the specs say; results
    that vary over the workers leave without a type.
    """
    taken = jax.sharding.get_abstract_mesh().manual_axes
    in_specs, own = [], []
    for spec in specs:
        first = axes_of(spec[0]) if len(spec) else ()
        own.append(tuple(n for n in first if n in taken))
        in_specs.append(shortened(P(*spec[1:]) if own[-1] else spec, axes))

    def of_cast(*arrays: jax.Array) -> Any:
        return fn(*map(mesh_axes.varying, arrays, own))

    by_array = {id(x): spec for x, spec in zip(arrays, in_specs, strict=True)}
    out_specs = jax.tree.map(lambda x: by_array[id(x)], like)
    over = partial(jax.shard_map, in_specs=tuple(in_specs), axis_names=set(axes))
    return jax.tree.map(_untyped, over(of_cast, out_specs=out_specs)(*arrays))


def _untyped(x: jax.Array) -> jax.Array:
    """The same without a type of the workers, of which the arrays around know nothing, as in a scan.

    In a ``shard_map`` without types the result of any operation has none; XLA drops these two.
    """
    return jax.lax.squeeze(jax.lax.expand_dims(x, (0,)), (0,)) if mesh_axes.varying_axes(x) else x
