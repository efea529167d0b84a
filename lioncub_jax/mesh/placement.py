"""Where arrays lie on a mesh of several axes, and the ways into the places where workers talk.

A mesh has the axes of the workers and any *inner axes* (fsdp, tensor, expert) over which one worker's
arrays are cut. Gradients and optax transforms run where the workers' axes are manual and the inner axes
are the compiler's (`Workers.map`); the vote runs where every axis is manual, on each device's own shard
(`on_shards`), because a compiler that packs a sharded leaf gathers it in full precision first. Inside,
inner axes are *explicit*: the type of every array says how it is cut, so nothing has to be guessed.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, auto_axes, explicit_axes
from jax.sharding import PartitionSpec as P

from lioncub_jax import kernels, wires
from lioncub_jax.mesh import border
from lioncub_jax.mesh.inner import constraints_checked
from lioncub_jax.mesh.specs import (
    checked,
    declared,
    product,
    restrict,
    shortened,
    spec_of,
    specs_of,
)
from lioncub_jax.wires import AxisName


def two_level_mesh(
    group_size: int | None = None,
    *,
    axis_names: tuple[str, str] = ("node", "device"),
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh of workers that are groups of devices: ``[groups, group_size]``.

    Args:
      group_size: devices of one worker, joined by fast links; by default those of one process.
      axis_names: for ``axis_name`` and ``group_axis``.
      devices: all of ``jax.devices()`` by default; those of a process are neighbours in the mesh.

    Raises:
      ValueError: if the group size does not divide the devices, or would cut through processes.

    Example:
      >>> import lioncub_jax as lc
      >>> dict(lc.mesh.two_level_mesh(1).shape)["device"]
      1
    """
    devices = jax.devices() if devices is None else devices
    ordered = sorted(devices, key=lambda d: (d.process_index, d.id))
    local = sum(d.process_index == ordered[0].process_index for d in ordered)
    size = local if group_size is None else group_size
    if not isinstance(size, int) or size < 1 or len(ordered) % size:
        raise ValueError(
            f"group_size={group_size!r}: {len(ordered)} devices cannot be cut into groups of that many; "
            f"give a whole number that divides {len(ordered)}"
        )
    if local % size and size % local:
        raise ValueError(
            f"group_size={group_size!r}: a process has {local} devices, so a group would hold a part of "
            f"a process; give a divisor or a multiple of {local}"
        )
    array = np.array(ordered).reshape(-1, size)
    return Mesh(array, axis_names, axis_types=(AxisType.Auto,) * 2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Static:
    """Something known when a function is traced, on its way out through ``shard_map`` and ``jit``.

    Attributes:
      value: anything that can be hashed.
    """

    value: Any = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Workers:
    """The workers of a mesh, named once: for the optimizer, the state, the step and the checkpoints.

    A worker votes with one gradient. It is a device, or with inner axes (fsdp, tensor, expert) the
    devices that share its parameters, or in two levels a group of devices with fast links.

    Attributes:
      mesh: the devices, axes Auto or Explicit.
      axis_name: mesh axis of the workers, or several as a tuple: one group of voters.
      group_axis: mesh axis of the devices of one worker, in two levels; else None.
      axes: those over which gradients differ: the workers', then those of a worker's devices.
      count: how many gradients there are: one for each worker, or for each device of a group.

    Raises:
      TypeError: for a mesh that is none.
      ValueError: for a mesh without one of the axes, or an axis that is named twice.

    Example:
      >>> import jax, jax.numpy as jnp, lioncub_jax as lc
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> workers = lc.Workers(mesh, "data")
      >>> tx = lc.lion_cub(1e-3, axis_name=workers)
      >>> state = lc.init_state(tx, {"w": jnp.ones(3)}, workers)
      >>> workers.count
      1
    """

    mesh: Mesh
    axis_name: AxisName
    group_axis: AxisName | None = None
    axes: tuple[str, ...] = dataclasses.field(init=False, repr=False, compare=False)
    count: int = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_mesh(self.mesh, self.axis_name, self.group_axis)
        axes = (*wires.names(self.axis_name), *wires.names(self.group_axis or ()))
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "count", product(self.mesh.shape, axes))

    def __str__(self) -> str:
        """The axes, as they are written in a call."""
        group = "" if self.group_axis is None else f", group_axis={self.group_axis!r}"
        return f"axis_name={self.axis_name!r}{group}"

    def cut(self, params: Any, specs: Any, *, needed: bool = True) -> Any:
        """How parameters are cut over the inner axes: as given, or as they know themselves.

        Where nobody can know, it is an error if it is needed, and else left to the compiler.
        """
        check_arrays(params)
        if specs is None and self._hidden(params):
            if needed:
                raise ValueError(
                    f"how parameters are cut over the Auto axes {self._hidden(params)} cannot be seen "
                    "inside jax.jit: give on_mesh(..., specs=lioncub_jax.mesh.specs_of(params))"
                )
            specs = jax.tree.map(spec_of, params)
        specs = specs_of(params) if specs is None else specs
        return checked(specs, params, self.mesh, self.axes)

    def _hidden(self, params: Any) -> list[str]:
        """Inner axes over which parameters may be cut, and nothing here says how."""
        mesh = self.mesh
        hidden = [n for n in mesh.auto_axes if n not in self.axes and mesh.shape[n] > 1]
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(params))
        return hidden if traced and not declared(params) else []

    def map(
        self,
        fn: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        *,
        explicit: bool,
        typed: bool = True,
    ) -> Callable[..., Any]:
        """Maps ``fn`` over the workers' axes; inside, arrays are a worker's own, whole in the inner axes.

        Args:
          fn: takes and returns trees of arrays.
          in_specs: a tree (prefix) like the arguments, of specs over all axes, inner ones included.
          out_specs: the same for the results.
          explicit: whether all inner axes are explicit inside, or only those that are so on the mesh.
          typed: whether types tell what varies over the workers. Where they do, a model with a ``scan``,
            ``cond`` or Pallas kernel must cast by hand whatever it starts from; votes are always typed.

        Returns:
          A function of global arrays, to be called under ``jax.jit``.
        """
        shows = self.mesh.explicit_axes
        inner = [n for n in self.mesh.axis_names if n not in self.axes]
        shown = [n for n in inner if explicit or n in shows]
        hidden = [n for n in inner if n not in shown]
        if shown:
            fn = explicit_axes(fn, axes=tuple(shown), in_sharding=restrict(in_specs, shown))
        if hidden:
            fn = _constrained(fn, restrict(out_specs, hidden))
        over = partial(
            jax.shard_map,
            mesh=None if shows else self.mesh,
            out_specs=restrict(out_specs, self.axes),
            axis_names=set(self.axes),
            check_vma=typed,
        )
        in_specs = restrict(in_specs, self.axes)
        # XLA for TPU makes bfloat16 of what is joined, and then there is a joint to be kept.
        apart = inner or kernels.for_tpu(self.mesh)
        mapped = over(fn, in_specs=in_specs) if apart else border.crossed(over, fn, in_specs)
        if not typed:
            # JAX 0.10.2 cannot run a partly manual one eagerly without types.
            mapped = constraints_checked(jax.jit(mapped), self.axes)
        if not shows:
            return mapped
        # JAX 0.10.2 gathers what is cut over explicit axes at the border of a partly manual region. So they
        # are the compiler's at the border, and constrained on both sides of it.
        return auto_axes(mapped, axes=shows, out_sharding=self.shardings(out_specs))

    def hold(self, tree: Any, specs: Any) -> Any:
        """Keeps global arrays as their specs say."""
        if set(self.mesh.auto_axes) <= set(self.axes):
            return tree  # their types hold them, or `map` that they come from
        return jax.lax.with_sharding_constraint(tree, self.shardings(specs))

    def laid(self, specs: Any, arrays: Any) -> Any:
        """How global arrays of these specs come out of a compiled program."""
        if not self.mesh.auto_axes:
            return specs  # their types hold them
        # XLA replicates what is empty, whatever it is told.
        return jax.tree.map(lambda spec, x: spec if x.size else P(), specs, arrays)

    def shardings(self, specs: Any) -> Any:
        """Specs as shardings on the mesh."""
        return jax.tree.map(partial(NamedSharding, self.mesh), specs)

    def stack(self, tree: Any, specs: Any, *, undo: bool = False) -> Any:
        """Adds the leading axis of what differs between workers, by its specs; or takes it away."""
        arrays, structure = jax.tree.flatten(tree)
        for i, spec in enumerate(jax.tree.leaves(jax.tree.broadcast(specs, tree))):
            if self.stacks(spec):
                arrays[i] = arrays[i][0] if undo else arrays[i][None]
        return jax.tree.unflatten(structure, arrays)

    def stacks(self, spec: P) -> bool:
        """Whether an array of this spec has a leading axis of workers."""
        return bool(shortened(P(*spec[:1]), self.axes))


def workers_of(
    given: "Workers | Mesh", axis_name: AxisName | None, group_axis: AxisName | None
) -> "Workers":
    """The workers that a caller means: the object itself, or a mesh and the names of its axes.

    Raises:
      TypeError: for anything else.
      ValueError: for workers and names at once, or a mesh without a name.
    """
    if isinstance(given, Workers):
        if axis_name is not None or group_axis is not None:
            raise ValueError(
                f"given are workers of {given}, and beside them axis_name={axis_name!r}, "
                f"group_axis={group_axis!r}: the workers say their axes, so leave the names out"
            )
        return given
    check_is_mesh(given, "or workers, such as lioncub_jax.Workers(mesh, 'data')")
    if axis_name is None:
        raise ValueError(
            f"given is a mesh with axes {given.axis_names}, and not which of them is the workers': give "
            f"lioncub_jax.Workers(mesh, {given.axis_names[0]!r}), or axis_name= beside the mesh"
        )
    return Workers(given, axis_name, group_axis)


def names_of(
    axis_name: "AxisName | Workers | None", group_axis: AxisName | None = None
) -> tuple[Any, AxisName | None]:
    """``(axis_name, group_axis)`` of an optimizer, which may be given as `Workers`.

    Raises:
      ValueError: for another group axis than that of the workers.
    """
    if not isinstance(axis_name, Workers):
        return axis_name, group_axis
    if group_axis not in (None, axis_name.group_axis):
        raise ValueError(
            f"group_axis={group_axis!r}, but the workers have {axis_name}: they say their group_axis, so "
            "leave it out"
        )
    return axis_name.axis_name, axis_name.group_axis


def check_arrays(params: Any, *others: type, name: str = "params") -> None:
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


def check_is_mesh(mesh: Any, otherwise: str = "") -> None:
    """Raises ``TypeError`` for anything but a mesh of devices."""
    if not isinstance(mesh, Mesh):
        wanted = ", ".join(filter(None, ["such as jax.make_mesh((8,), ('data',))", otherwise]))
        raise TypeError(f"{mesh!r} is no mesh: give a jax.sharding.Mesh, {wanted}")


def check_mesh(mesh: Mesh, axis_name: AxisName, group_axis: AxisName | None = None) -> None:
    """Raises for what is no mesh, a mesh without an axis that is named, or an axis named twice."""
    check_is_mesh(mesh)
    given = [("axis_name", n) for n in _names("axis_name", axis_name)]
    given += [("group_axis", n) for n in _names("group_axis", group_axis or ())]
    if not wires.names(axis_name):
        raise ValueError(f"axis_name={axis_name!r}: give the axis of the workers, such as 'data'")
    for argument, name in given:
        if name not in mesh.axis_names:
            raise ValueError(
                f"the mesh has axes {mesh.axis_names}; {argument}={name!r} is none of them"
            )
    if len({name for _, name in given}) < len(given):
        raise ValueError(
            f"axis_name={axis_name!r} and group_axis={group_axis!r} name an axis twice: a worker is one "
            "index of axis_name, its devices are those of group_axis and of the inner axes"
        )


def _names(argument: str, axis: Any) -> tuple[str, ...]:
    names = axis if isinstance(axis, tuple) else (axis,)
    if not all(isinstance(n, str) for n in names):
        raise TypeError(f"{argument}={axis!r}: give the name of a mesh axis, or a tuple of names")
    return names


def _constrained(fn: Callable[..., Any], specs: Any) -> Callable[..., Any]:
    """Tells the compiler how results are cut, where they are."""

    def constrain(spec: P, part: Any) -> Any:
        return jax.lax.with_sharding_constraint(part, spec) if any(spec) else part

    return lambda *args: jax.tree.map(constrain, specs, fn(*args))


def on_shards(fn: Callable[..., Any], args: Any, out_specs: Any = None) -> Any:
    """Calls ``fn(*args)`` where every axis is manual, on each device's own shards.

    Args:
      fn: takes and returns trees of arrays.
      args: a tuple of trees; how each array is cut is read from its type.
      out_specs: a tree (prefix) of specs of the results over the inner axes; by default arrays are
        stacked along their first dimension over the inner axes that their type varies over.

    Raises:
      ValueError: where inner axes are left to the compiler, which then would not say how leaves are cut.
    """
    mesh = jax.sharding.get_abstract_mesh()
    inner = mesh.explicit_axes
    hidden = [n for n in mesh.auto_axes if mesh.shape[n] > 1]
    if hidden:
        raise ValueError(
            f"axes {hidden} of the mesh are left to the compiler here, which would gather every leaf "
            "that is cut over them before it is packed: run the optimizer through lioncub_jax.on_mesh "
            "or make_train_step, or make all axes of your shard_map manual"
        )
    if not inner:
        return fn(*args)
    in_specs = jax.tree.map(lambda x: restrict(jax.typeof(x).sharding.spec, inner), args)
    if out_specs is None:
        out_specs = _stacked_specs(fn, args, in_specs, inner)
    run = jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names=set(inner))
    return run(*args)


def _stacked_specs(fn: Callable[..., Any], args: Any, in_specs: Any, inner: Sequence[str]) -> Any:
    def probe(*args: Any) -> Static:
        leaves, structure = jax.tree.flatten(fn(*args))
        varies = [tuple(n for n in inner if n in wires.varying_axes(x)) for x in leaves]
        return Static((structure, tuple(P(axes) if axes else P() for axes in varies)))

    run = jax.shard_map(probe, in_specs=in_specs, out_specs=P(), axis_names=set(inner))
    structure, specs = jax.eval_shape(run, *args).value
    return jax.tree.unflatten(structure, specs)
