"""Where arrays lie on a mesh of several axes, and the ways into the places where workers talk.

A mesh has the axes of the workers and any *inner axes* (fsdp, tensor, expert) over which one worker's
arrays are cut. Gradients and optax transforms run where the workers' axes are manual and the inner axes
are the compiler's (`over_workers`); the vote runs where every axis is manual, on each device's own shard
(`on_shards`), because a compiler that packs a sharded leaf gathers it in full precision first. Inside,
inner axes are *explicit*: the type of every array says how it is cut, so nothing has to be guessed.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.sharding import AxisType, Mesh, NamedSharding, auto_axes, explicit_axes
from jax.sharding import PartitionSpec as P

from lioncub_jax import wires
from lioncub_jax.layout import varying_axes
from lioncub_jax.wires import AxisName


def specs_of(params: Any) -> Any:
    """How parameters are cut, as they say it themselves.

    Args:
      params: a tree of arrays or ``jax.ShapeDtypeStruct`` with a ``NamedSharding`` (any other is taken
        as replicated), of ``flax.linen.Partitioned`` boxes, or an ``nnx.State`` with sharding metadata.

    Returns:
      A tree of ``PartitionSpec`` like the parameters (unboxed).

    Example:
      >>> import jax, lioncub_jax as lc
      >>> from flax import linen as nn
      >>> layer = nn.Dense(4, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "fsdp")))
      >>> params = layer.init(jax.random.key(0), jax.numpy.ones((1, 2)))["params"]
      >>> lc.specs_of(params)["kernel"] == jax.P(None, "fsdp")
      True
    """
    declared: Any = None
    if isinstance(params, nnx.State) and not _placed(params):
        declared = nnx.get_partition_spec(params)
    elif _boxed(params):
        declared = linen.get_partition_spec(params)
    if declared is None:
        return jax.tree.map(spec_of, params)
    return jax.tree.map(lambda s: P() if s is None else s, declared, is_leaf=_is_spec_or_none)


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
      >>> dict(lc.two_level_mesh(1).shape)["device"]
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


def spec_of(x: Any) -> P:
    """The ``PartitionSpec`` of one array; ``P()`` where it has no ``NamedSharding``."""
    if isinstance(x, jax.core.Tracer):
        return shortened(jax.typeof(x).sharding.spec)
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or x.size == 0:
        return P()
    # An axis of one device cuts nothing, and XLA forgets it.
    return restrict(sharding.spec, [n for n, size in sharding.mesh.shape.items() if size > 1])


def shortened(spec: P) -> P:
    """One spelling for specs that mean the same, so that nothing is compiled twice."""
    entries = [_entry(entry) for entry in spec]
    while entries and not entries[-1]:
        entries.pop()
    return P(*[e[0] if len(e) == 1 else e or None for e in entries])


def _placed(params: Any) -> bool:
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(params)]
    return any(isinstance(s, NamedSharding) for s in shardings)


def _boxed(params: Any) -> bool:
    boxes = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, linen.Partitioned))
    return any(isinstance(x, linen.Partitioned) for x in boxes)


def _is_spec_or_none(x: Any) -> bool:
    return x is None or isinstance(x, P)


def is_spec(x: Any) -> bool:
    """For ``is_leaf``: a ``PartitionSpec`` is a tuple, and no tree."""
    return isinstance(x, P)


class Workers(NamedTuple):
    """Where the workers sit on a mesh."""

    mesh: Mesh
    axis_name: AxisName
    group_axis: AxisName | None

    @classmethod
    def on(cls, mesh: Mesh, axis_name: AxisName, group_axis: AxisName | None = None) -> "Workers":
        """Raises ``ValueError`` for a mesh without one of the axes."""
        check_mesh(mesh, axis_name, group_axis)
        return cls(mesh, axis_name, group_axis)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which gradients differ: the workers', then those of a worker's devices."""
        return (*wires.names(self.axis_name), *wires.names(self.group_axis or ()))

    def vary(self, tree: Any) -> Any:
        """Gives arrays the type of what differs between workers."""
        return wires.varying(tree, self.axes)

    def cut(self, params: Any, specs: Any) -> Any:
        """How parameters are cut over the inner axes: as told, or as they know themselves."""
        if specs is None:
            self._check_known(params)
            specs = specs_of(params)
        check_specs(specs, params, self.mesh, self.axes)
        cutting = [n for n in self.mesh.axis_names if self.mesh.shape[n] > 1]
        flat = jax.tree.leaves(restrict(specs, cutting), is_leaf=is_spec)
        # XLA replicates what is empty, whatever it is told.
        held = [s if x.size else P() for s, x in zip(flat, jax.tree.leaves(params), strict=True)]
        return jax.tree.unflatten(jax.tree.structure(params), held)

    def _check_known(self, params: Any) -> None:
        mesh = self.mesh
        auto = [
            n for n, kind in _kinds(mesh).items() if kind == AxisType.Auto and mesh.shape[n] > 1
        ]
        hidden = [n for n in auto if n not in self.axes]
        if hidden and any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(params)):
            raise ValueError(
                f"how parameters are cut over the Auto axes {hidden} cannot be seen inside jax.jit: give "
                "on_mesh(..., specs=lioncub_jax.specs_of(params))"
            )

    def map(
        self, fn: Callable[..., Any], in_specs: Any, out_specs: Any, *, explicit: bool
    ) -> Callable[..., Any]:
        """See `over_workers`."""
        return over_workers(fn, self.mesh, self.axes, in_specs, out_specs, explicit=explicit)

    def hold(self, tree: Any, specs: Any) -> Any:
        """Keeps global arrays as their specs say."""
        return constrained(tree, specs, self.mesh)

    def shardings(self, specs: Any) -> Any:
        """Specs as shardings on the mesh."""
        return jax.tree.map(lambda s: NamedSharding(self.mesh, s), specs, is_leaf=is_spec)

    def stack(self, tree: Any, specs: Any) -> Any:
        """Adds the leading axis of what differs between workers, by its specs."""
        return self._where_stacked(lambda x: x[None], tree, specs)

    def unstack(self, tree: Any, specs: Any) -> Any:
        """Undoes ``stack``."""
        return self._where_stacked(lambda x: x[0], tree, specs)

    def stacks(self, spec: P) -> bool:
        """Whether an array of this spec has a leading axis of workers."""
        return len(spec) > 0 and bool(set(_entry(spec[0])) & set(self.axes))

    def _where_stacked(
        self, change: Callable[[jax.Array], jax.Array], tree: Any, specs: Any
    ) -> Any:
        def leaf(spec: P, x: jax.Array) -> jax.Array:
            return change(x) if self.stacks(spec) else x

        return jax.tree.map(leaf, specs, tree, is_leaf=is_spec)


def check_mesh(mesh: Mesh, axis_name: AxisName, group_axis: AxisName | None = None) -> None:
    """Raises ``ValueError`` for a mesh without an axis that is named, or an axis named twice."""
    given = [("axis_name", n) for n in wires.names(axis_name)]
    given += [("group_axis", n) for n in wires.names(group_axis or ())]
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


def check_specs(specs: Any, params: Any, mesh: Mesh, workers: Sequence[str]) -> None:
    """Raises ``ValueError`` for parameters that cannot lie on the mesh as their specs say."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    flat = jax.tree.leaves(specs, is_leaf=is_spec)
    if len(flat) != len(leaves) or not all(isinstance(s, P) for s in flat):
        raise ValueError(
            f"specs has {len(flat)} leaves and the parameters have {len(leaves)}: give a PartitionSpec "
            "for each parameter, in a tree like theirs, such as lioncub_jax.specs_of(params)"
        )
    for (path, leaf), spec in zip(leaves, flat, strict=True):
        _check_spec(jax.tree_util.keystr(path) or "(root)", jnp.shape(leaf), spec, mesh, workers)


def _check_spec(
    path: str, shape: tuple[int, ...], spec: P, mesh: Mesh, workers: Sequence[str]
) -> None:
    if len(spec) > len(shape):
        raise ValueError(f"{path} has shape {shape}, but its spec {spec} has {len(spec)} entries")
    for dim, axes in enumerate(map(_entry, spec)):
        for axis in axes:
            if axis not in mesh.axis_names:
                raise ValueError(
                    f"{path}: the mesh has axes {mesh.axis_names}, {spec} has {axis!r}"
                )
            if axis in workers:
                raise ValueError(
                    f"{path} has spec {spec}, but {axis!r} is an axis of the workers: each worker holds "
                    "all parameters, cut over inner axes only. Put the workers on another axis, or "
                    "shard parameters over an axis that is not in axis_name"
                )
        parts = _size(mesh, axes)
        if shape[dim] % parts:
            raise ValueError(
                f"{path} has shape {shape} and spec {spec}: dimension {dim} is cut into {parts} parts, "
                f"which do not divide {shape[dim]}; replicate it, or pad it"
            )


def _entry(entry: Any) -> tuple[str, ...]:
    """One entry of a spec, as the axes that cut a dimension."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _size(mesh: Any, axes: Sequence[str]) -> int:
    size = 1
    for axis in axes:
        size *= mesh.shape[axis]
    return size


def check_batch_spec(spec: P, mesh: Mesh, workers: Sequence[str]) -> None:
    """Raises ``ValueError`` unless a batch's first dimension is cut over the workers before all else."""
    first = _entry(spec[0]) if len(spec) else ()
    unknown = [n for entry in spec for n in _entry(entry) if n not in mesh.axis_names]
    elsewhere = [n for entry in spec[1:] for n in _entry(entry) if n in workers]
    if unknown or elsewhere or first[: len(workers)] != tuple(workers):
        example = P((*workers, *[n for n in mesh.axis_names if n not in workers]))
        raise ValueError(
            f"batch_spec={spec}: the first dimension of a batch is cut over the workers' axes "
            f"{tuple(workers)}, in this order, and then over any of the mesh's other axes "
            f"{mesh.axis_names}, such as {example}"
        )


def parts(spec: P, mesh: Mesh) -> int:
    """Into how many parts a spec cuts the first dimension."""
    return _size(mesh, _entry(spec[0])) if len(spec) else 1


def stacked(specs: Any, axes: Sequence[str]) -> Any:
    """Specs of arrays with one more, leading dimension, cut over ``axes``."""
    return jax.tree.map(lambda spec: shortened(P(tuple(axes), *spec)), specs, is_leaf=is_spec)


def restrict(specs: Any, axes: Sequence[str]) -> Any:
    """Specs with only the axes named."""

    def keep(spec: P) -> P:
        return shortened(P(*[tuple(a for a in _entry(e) if a in axes) or None for e in spec]))

    return jax.tree.map(keep, specs, is_leaf=is_spec)


def over_workers(
    fn: Callable[..., Any],
    mesh: Mesh,
    workers: Sequence[str],
    in_specs: Any,
    out_specs: Any,
    *,
    explicit: bool,
) -> Callable[..., Any]:
    """Maps ``fn`` over the workers' axes; inside, arrays are a worker's own, whole in the inner axes.

    Args:
      fn: takes and returns trees of arrays.
      mesh: the devices, its axes Auto or Explicit.
      workers: axes that are manual inside.
      in_specs: a tree (prefix) like the arguments, of specs over all axes, inner ones included.
      out_specs: the same for the results.
      explicit: whether all inner axes are explicit inside, or only those that are so on the mesh.

    Returns:
      A function of global arrays, to be called under ``jax.jit``.
    """
    typed = tuple(n for n, kind in _kinds(mesh).items() if kind == AxisType.Explicit)
    inner = [n for n in mesh.axis_names if n not in workers]
    shown = tuple(n for n in inner if explicit or n in typed)
    hidden = [n for n in inner if n not in shown]

    def inside(*args: Any) -> Any:
        cut = restrict(in_specs, shown)
        run = explicit_axes(fn, axes=shown, in_sharding=cut) if shown else fn
        return _constrained(run(*args), restrict(out_specs, hidden)) if hidden else run(*args)

    mapped = jax.shard_map(
        inside,
        mesh=None if typed else mesh,
        in_specs=restrict(in_specs, workers),
        out_specs=restrict(out_specs, workers),
        axis_names=set(workers),
    )
    if not typed:
        return mapped
    # JAX 0.10.2 gathers what is cut over explicit axes at the border of a partly manual region. So they
    # are the compiler's at the border, and constrained on both sides of it.
    placed = jax.tree.map(lambda s: NamedSharding(mesh, s), out_specs, is_leaf=is_spec)
    return auto_axes(mapped, axes=typed, out_sharding=placed)


def _kinds(mesh: Any) -> dict[str, AxisType]:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def _constrained(tree: Any, specs: Any) -> Any:
    """Tells the compiler how arrays are cut, where they are."""

    def constrain(spec: P, part: Any) -> Any:
        return jax.lax.with_sharding_constraint(part, spec) if any(spec) else part

    return jax.tree.map(constrain, specs, tree, is_leaf=is_spec)


def constrained(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Global arrays, held to their specs in whatever kind of axes the mesh has."""
    if AxisType.Auto not in mesh.axis_types:
        return tree  # their types hold them
    placed = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=is_spec)
    return jax.lax.with_sharding_constraint(tree, placed)


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
    inner = tuple(n for n, kind in _kinds(mesh).items() if kind == AxisType.Explicit)
    hidden = [n for n, k in _kinds(mesh).items() if k == AxisType.Auto and mesh.shape[n] > 1]
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
    found: list[Any] = []

    def over(x: jax.Array) -> P:
        axes = tuple(n for n in inner if n in varying_axes(x))
        return P(axes) if axes else P()

    def probe(*args: Any) -> jax.Array:
        found.append(jax.tree.map(over, fn(*args)))
        return jnp.zeros(())

    jax.eval_shape(
        jax.shard_map(probe, in_specs=in_specs, out_specs=P(), axis_names=set(inner)), *args
    )
    return found[0]


def cut_of(tree: Any) -> Any:
    """How arrays are cut over explicit axes, by their types."""
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)
