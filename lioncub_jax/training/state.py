"""The first state of a training step: what lies on the mesh before there is a step."""

import zlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lioncub_jax import wires
from lioncub_jax.mesh.keys import is_key, of_words, words_of
from lioncub_jax.mesh.placement import Workers, workers_of
from lioncub_jax.mesh.specs import specs_of, unboxed
from lioncub_jax.training import kinds
from lioncub_jax.training.local import check_local, of_each
from lioncub_jax.training.step import TrainState, first_opt_state
from lioncub_jax.training.typed import state_specs
from lioncub_jax.wires import AxisName


def init_state(
    tx: optax.GradientTransformation,
    params: Any,
    workers: Workers | Mesh,
    *,
    axis_name: AxisName | None = None,
    group_axis: AxisName | None = None,
    specs: Any = None,
    model_state: Any = (),
    rng: jax.Array | None = None,
    local: optax.GradientTransformation | None = None,
) -> TrainState:
    """Places parameters, model state and optimizer state on the mesh.

    Args:
      tx: any optax transform, with or without transforms of this library in it.
      params: tree of floating arrays; boxes of ``flax.linen.Partitioned`` are opened.
      workers: a `Workers`; or a mesh, axes Auto or Explicit, with ``axis_name``.
      axis_name: beside a mesh, the axis of the workers, or several as a tuple.
      group_axis: beside a mesh, the axis of the devices of one worker, if ``tx`` has one (two levels).
      specs: a tree of ``PartitionSpec`` over the inner axes, like the parameters; by default
        ``specs_of(params)``: as they lie already, or as their metadata says.
      model_state: see `TrainState`; every worker gets a copy, with random keys of its own.
      rng: a key, ``jax.random.key(seed)``, or a raw one, which is made typed; seed 0 by default.
      local: the optimizer of local steps, the one given to `make_train_step`; None without.

    Returns:
      A ``TrainState``.

    Raises:
      TypeError: for a mesh that is none, parameters that are no arrays, an ``rng`` that is no key, or a
        ``local`` that is no transform.
      ValueError: if the mesh lacks an axis, parameters cannot be cut as the specs say, or processes give
        different ones (found by a checksum of each array that a process has whole); for a ``local`` in
        which workers talk, and for one of workers in two levels.

    Example:
      >>> import jax, jax.numpy as jnp, lioncub_jax as lc
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> workers = lc.Workers(mesh, "data")
      >>> tx = lc.lion_cub(1e-3, axis_name=workers)
      >>> state = lc.init_state(tx, {"w": jnp.ones((2, 3))}, workers)
      >>> state.opt_state[0].mu["w"].shape
      (1, 2, 3)

    Source: this library.
    """
    workers = workers_of(workers, axis_name, group_axis)
    check_local(local, 1, workers)
    params, cut = _opened(params, specs, workers)
    rng = _typed_key(jax.random.key(0) if rng is None else rng)
    _check_same_on_processes({"params": params, "model_state": model_state, "rng": rng})
    # A copy, because the training step donates its state and the caller may still hold the arrays.
    params = jax.tree.map(
        lambda spec, x: jnp.copy(_on_all(x, NamedSharding(workers.mesh, spec))),
        cut, params,
    )  # fmt: skip
    everywhere = NamedSharding(workers.mesh, P())
    rng = _on_all(rng, everywhere)
    opt_state, _ = first_opt_state(optax.with_extra_args_support(tx), workers, params, cut)
    step = _on_all(np.zeros((), np.int32), everywhere)
    own, local_state = own_state(model_state, workers), ()
    if local is not None:
        local_state, _ = first_opt_state(of_each(local, workers), workers, params, cut)
    return TrainState(step, params, own, opt_state, jnp.copy(rng), local_state)


def own_state(model_state: Any, workers: Workers) -> Any:
    """A copy of the model state for each worker, for a trainer of one's own; `init_state` makes it itself.

    Args:
      model_state: a tree of arrays, such as batch statistics, the same on every process.
      workers: whose.

    Returns:
      The tree with leaves ``[workers, ...]`` on the mesh; typed random keys are each worker's own.

    Example:
      >>> import jax, jax.numpy as jnp, lioncub_jax as lc
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> lc.training.own_state({"mean": jnp.ones(3)}, lc.Workers(mesh, "data"))["mean"].shape
      (1, 3)

    Source: this library.
    """

    def own(model_state: Any) -> Any:
        model_state = wires.varying(model_state, workers.axes)
        return jax.tree.map(lambda x: kinds.fold_own(workers, x)[None], model_state)

    everywhere = NamedSharding(workers.mesh, P())
    placed = jax.tree.map(lambda x: _on_all(x, everywhere), model_state)
    return jax.jit(workers.map(own, (P(),), P(workers.axes), explicit=False))(placed)


def _opened(params: Any, specs: Any, workers: Workers) -> tuple[Any, Any]:
    """Parameters out of their boxes, and how they are cut."""
    # Boxes say it too, so they are asked before they are opened.
    specs = specs_of(params) if specs is None else specs
    params = unboxed(params)
    return params, workers.cut(params, specs)


def _typed_key(rng: Any) -> jax.Array:
    if kinds.is_raw_key(rng):
        return jax.random.wrap_key_data(rng)
    if not is_key(rng) or jnp.shape(rng):
        raise TypeError(
            f"rng is {type(rng).__name__} of shape {jnp.shape(rng)}: give one key, jax.random.key(seed)"
        )
    return rng


def _check_same_on_processes(state: dict[str, Any]) -> None:
    """Raises ``ValueError`` for arrays that differ between processes, by a checksum of each."""
    if jax.process_count() == 1:
        return
    named = [
        (path, x)
        for path, x in jax.tree_util.tree_leaves_with_path(state)
        if not isinstance(x, jax.Array) or x.is_fully_addressable
    ]
    from jax.experimental import multihost_utils  # not loaded for a single process

    # The number of arrays goes first: a process that has others would wait for ever.
    count = multihost_utils.process_allgather(np.array([len(named)], np.uint32))
    check_same_sums([()], np.asarray(count).reshape(-1, 1))
    sums = multihost_utils.process_allgather(np.array([_checksum(x) for _, x in named], np.uint32))
    check_same_sums([path for path, _ in named], np.asarray(sums).reshape(-1, len(named)))


def check_same_sums(paths: list[Any], sums: np.ndarray) -> None:
    """Raises ``ValueError`` for checksums ``[processes, leaves]`` that differ between processes."""
    for path, each in zip(paths, sums.T, strict=True):
        if (each != each[0]).any():
            name = jax.tree_util.keystr(path) or "the number of arrays"
            other = int(np.argmax(each != each[0]))
            raise ValueError(
                f"init_state: {name} differs between processes 0 and {other}: all workers start from the "
                "same; give each process the same seed, or read the same checkpoint"
            )


def _checksum(x: Any) -> int:
    data = words_of(x)
    return zlib.crc32(np.ascontiguousarray(data).tobytes())


def abstract_state(
    tx: optax.GradientTransformation,
    params: Any,
    workers: Workers | Mesh,
    *,
    axis_name: AxisName | None = None,
    group_axis: AxisName | None = None,
    specs: Any = None,
    model_state: Any = (),
    local: optax.GradientTransformation | None = None,
) -> TrainState:
    """What `init_state` would return, as shapes with shardings: nothing is allocated.

    For ``TrainStep.lower``, to read a program before there is a machine to run it, and for
    ``Checkpoints.restore``, to read a state without making one first.

    Args:
      tx: as `init_state`, like all arguments.
      params: arrays or ``jax.ShapeDtypeStruct``.
      workers: as `init_state`.
      axis_name: as `init_state`.
      group_axis: as `init_state`.
      specs: as `init_state`.
      model_state: as `init_state`; shapes will do.
      local: as `init_state`.

    Returns:
      A ``TrainState`` of ``jax.ShapeDtypeStruct``.

    Raises:
      ValueError: as `init_state`.

    Example:
      >>> import jax, jax.numpy as jnp, lioncub_jax as lc
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> tx = lc.lion_cub(1e-3, axis_name="data")
      >>> shapes = {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
      >>> lc.training.abstract_state(tx, shapes, lc.Workers(mesh, "data")).opt_state[0].mu["w"].shape
      (1, 2, 3)
    """
    workers = workers_of(workers, axis_name, group_axis)
    check_local(local, 1, workers)
    params, cut = _opened(params, specs, workers)

    def on(spec: P, x: Any, *lead: int) -> jax.ShapeDtypeStruct:
        shape = (*lead, *jnp.shape(x))
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(workers.mesh, spec))

    shaped = partial(jax.tree.map, on)
    params = shaped(cut, params)

    def first(tx: Any) -> Any:
        made = jax.eval_shape(lambda params: first_opt_state(tx, workers, params, cut)[0], params)
        return shaped(workers.laid(state_specs(tx, workers, params, cut), made), made)

    opt_state = first(optax.with_extra_args_support(tx))
    local_state = () if local is None else first(of_each(local, workers))
    own = jax.tree.map(lambda x: on(P(workers.axes), x, workers.count), model_state)
    step, rng = jax.eval_shape(lambda: (jnp.zeros((), jnp.int32), jax.random.key(0)))
    of_shapes: Any = TrainState
    return of_shapes(on(P(), step), params, own, opt_state, on(P(), rng), local_state)


def _on_all(x: Any, sharding: NamedSharding) -> jax.Array:
    """Puts an array on every device, those of other processes too; each must give the same."""
    x = jnp.asarray(x)
    if is_key(x):  # device_put knows keys in one process only
        return of_words(_on_all(words_of(x), sharding), x)
    if not sharding.is_fully_addressable and x.is_fully_addressable:
        return jax.device_put(np.asarray(x), sharding)
    return jax.device_put(x, sharding)
