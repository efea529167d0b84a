"""Checks of the state of any trainer: it has a step, lies on one mesh, and copies of an array are equal."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from lioncub_jax.checkpoint.layout import field_of, paths_of
from lioncub_jax.mesh import boxes
from lioncub_jax.mesh.axes import AxisName, spelled
from lioncub_jax.mesh.checksum import untyped
from lioncub_jax.mesh.hosts import from_key_words, is_key, key_words, put
from lioncub_jax.mesh.placement import Workers, worker_axes

NUMBERS = bool, int, float, complex, np.generic, np.ndarray


def step_of(state: Any, given: int | None) -> int:
    """The step that a state is saved under: the one given, or that of the state.

    Raises:
      TypeError: for a state without a step.
      ValueError: for a step that is no whole number of at least 0.
    """
    steps = jax.tree.leaves(field_of(state, "step")[1] if given is None else given)
    if not steps:
        raise TypeError(
            f"save(state) got a {type(state).__name__} without a step: give save(state, step=...), or a "
            "state with a field 'step', such as a StepState"
        )
    step = steps[0]
    kinds = jax.Array, np.ndarray, np.integer, int
    one = len(steps) == 1 and isinstance(step, kinds) and not isinstance(step, bool)
    if not one or jnp.shape(step) or not jnp.issubdtype(getattr(step, "dtype", int), jnp.integer):
        raise ValueError(
            f"the step of the state is {step!r}: give a whole number, save(state, step=...)"
        )
    if int(step) < 0:
        raise ValueError(f"step={int(step)}: give a whole number of at least 0")
    return int(step)


def on_workers(call: str, state: Any, workers: AxisName | Workers) -> tuple[Any, Workers]:
    """A state on one mesh, and workers with the same axes on that mesh.

    What lies on no mesh is placed on each device of that of the other arrays; linen's boxes are opened.

    Raises:
      TypeError: for what is no array.
      ValueError: for a state on no mesh or several, and numbers that an array does not hold.
    """
    state = boxes.opened(state)  # momentum has boxes where parameters may have none
    leaves = paths_of(state)
    for path, x in leaves.items():
        if not isinstance(x, (jax.Array, jax.ShapeDtypeStruct, *NUMBERS)):
            raise TypeError(
                f"{call}: state{path} is {x!r}, a {type(x).__name__}: a checkpoint holds arrays and "
                "numbers; leave it out of the state, or give it as data if JSON can hold it"
            )
    meshes = {x.sharding.mesh for x in leaves.values() if _lies_on_a_mesh(x)}
    if len(meshes) != 1:
        raise ValueError(
            f"{call}: the arrays of the state lie on {len(meshes)} meshes: give a state from init_state, "
            "or one whose arrays, or ShapeDtypeStructs, have NamedShardings on one mesh"
        )
    (mesh,) = meshes
    if not isinstance(mesh, Mesh):
        raise ValueError(f"{call}: the state lies on an abstract mesh: give shardings with devices")
    placed = [
        x if _lies_on_a_mesh(x) else _everywhere(f"{call}: state{path}", x, mesh)
        for path, x in leaves.items()
    ]
    axis, group = worker_axes(workers)
    on_mesh = Workers(mesh, spelled(axis), spelled(group))  # type: ignore[arg-type]
    return jax.tree.unflatten(jax.tree.structure(state), placed), on_mesh


def places_of(like: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes with the shardings to which arrays are read, by path: all on one mesh, be it of one device."""
    arrays = paths_of(boxes.opened(like))
    for path, x in arrays.items():
        if not isinstance(x, (jax.Array, jax.ShapeDtypeStruct, np.ndarray)):
            raise TypeError(f"restore_params(like): params{path} is {x!r}: give arrays")
    meshes = {x.sharding.mesh for x in arrays.values() if _lies_on_a_mesh(x)}
    if len(meshes) > 1:
        raise ValueError(
            f"restore_params(like): the parameters lie on {len(meshes)} meshes: give one"
        )
    mesh = untyped(meshes.pop() if meshes else Mesh(np.array(jax.local_devices()[:1]), ("device",)))

    def place(x: Any) -> jax.ShapeDtypeStruct:
        spec = x.sharding.spec if _lies_on_a_mesh(x) else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return {path: place(x) for path, x in arrays.items()}


def placed_like(like: Any, arrays: Mapping[str, jax.Array]) -> Any:
    """The tree, of arrays that were read to its `places_of`; those without elements are not saved."""
    first = SingleDeviceSharding(jax.local_devices()[0])

    placed = []
    for path, x in paths_of(boxes.opened(like)).items():
        array = arrays[path] if x.size else np.zeros(x.shape, x.dtype)
        placed.append(jax.device_put(array, getattr(x, "sharding", None) or first))
    return jax.tree.unflatten(jax.tree.structure(like), placed)


def _lies_on_a_mesh(x: object) -> bool:
    return isinstance(getattr(x, "sharding", None), NamedSharding)


def _everywhere(name: str, x: Any, mesh: Mesh) -> jax.Array:
    """One value on each device of the mesh, such as the step that a trainer counts in Python."""
    if isinstance(x, jax.ShapeDtypeStruct):
        raise ValueError(
            f"{name} is a ShapeDtypeStruct that does not lie on a mesh: give it a NamedSharding"
        )
    if is_key(x):
        return from_key_words(_everywhere(name, key_words(x), mesh), x)
    host = np.asarray(x)
    held = host.astype(jax.dtypes.canonicalize_dtype(host.dtype))
    if np.issubdtype(host.dtype, np.integer) and (held != host).any():
        raise ValueError(
            f"{name} is {host.dtype} and does not fit into {held.dtype}: give it as data, which JSON "
            "holds, or set jax.config.update('jax_enable_x64', True)"
        )
    return put(held, NamedSharding(mesh, P()))


def check_copies_equal(
    state: Any, unequal: Mapping[str, tuple[int, int]], workers: Workers
) -> None:
    """Raises ``ValueError`` where copies of an array differ, of which a checkpoint would keep one.

    Args:
      state: the state.
      unequal: by paths of such arrays the ids of two devices.
      workers: its workers.
    """
    if not unequal:
        return
    prefix, params = field_of(state, "params")
    of_params = {prefix + path for path in paths_of(params)}
    path = min(unequal, key=lambda path: (path not in of_params, path))
    one, other = unequal[path]
    name = f"state{path}" + (f" (and {len(unequal) - 1} more)" if len(unequal) > 1 else "")
    if path in of_params:
        raise ValueError(
            f"save(state): parameters differ between devices {one} and {other}, {name}, and a "
            "checkpoint would keep one copy of them. Workers that start from the same and take the agreed "
            "update never differ. If hosts began with other parameters, give them one seed or checkpoint; "
            "a shard_map of yours needs check_vma=True, which finds what differs. Go on from one copy, "
            "jax.device_put(np.asarray(x), x.sharding)"
        )
    raise ValueError(
        f"save(state): {name} is labelled one value and differs between devices {one} and "
        f"{other}: each worker has its own, and a checkpoint would keep that of one. Let it out of "
        f"jax.pmap with out_axes=0, or of jax.shard_map with out_specs={P(workers.axes)}, as "
        "[workers, ...]"
    )
