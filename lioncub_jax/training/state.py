"""First states of training: parameters, model and optimizer state placed on the mesh."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange.holder import Holder
from lioncub_jax.exchange.mapped import MappedTransform
from lioncub_jax.mesh import boxes
from lioncub_jax.mesh.hosts import check_same, is_key, put
from lioncub_jax.mesh.placement import Workers, check_arrays, check_real, check_workers
from lioncub_jax.mesh.specs import Specs, axes_in, axes_of, product, spec_of, specs_of
from lioncub_jax.training import kinds
from lioncub_jax.training.modules import check_split, is_module, update_module
from lioncub_jax.training.worker import check_local_steps, per_worker_state


class StepState(NamedTuple):
    """Everything a training step reads and writes.

    Attributes:
      step: ``int32[]``, steps done.
      params: the parameters, replicated over the workers.
      model_state: what the model keeps besides parameters (batch statistics, dropout counters), each
        worker's own: leaves ``[workers, ...]``.
      opt_state: the optimizer's state; leaves that differ between workers are ``[workers, ...]``.
      rng: a typed PRNG key, replicated; each step and worker folds its own from it.
      local_state: of the optimizer of local steps, each worker's own: leaves ``[workers, ...]``. Apart from
        ``opt_state``, whose transform does not know of it; ``()`` without, as in older checkpoints.

    Source: this library; see `init_state` for an example.
    """

    step: jax.Array
    params: optax.Params
    model_state: Any
    opt_state: optax.OptState
    rng: jax.Array
    local_state: Any = ()

    @staticmethod
    def holders() -> dict[str, Holder]:
        """Holders of the fields, for checkpoints."""
        return {"model_state": Holder.WORKER, "local_state": Holder.WORKER}


def init_state(
    tx: optax.GradientTransformation,
    params: optax.Params,
    workers: Workers,
    *,
    specs: Specs = None,
    model_state: Any = (),
    rng: jax.Array | None = None,
    local: optax.GradientTransformation | None = None,
) -> StepState:
    """Places parameters, model state and optimizer state on the mesh.

    Args:
      tx: any optax transform, with or without transforms of this library in it.
      params: tree of floating arrays; boxes of ``flax.linen.Partitioned`` are opened.
      workers: a `Workers`, on a mesh with Auto or Explicit axes.
      specs: a tree of ``PartitionSpec`` over the inner axes, like the parameters; by default
        ``specs_of(params)``: as they lie already, or as their metadata says.
      model_state: see `StepState`; every worker gets a copy, with random keys of its own.
      rng: a key, ``jax.random.key(seed)``, or a raw one, which is made typed; seed 0 by default.
      local: the optimizer of local steps, the one given to `make_train_step`; None without.

    Returns:
      A ``StepState``.

    Raises:
      TypeError: for a mesh that is none, parameters that are no arrays, a module of flax, an
        ``rng`` that is no key, or a ``local`` that is no transform.
      ValueError: if the mesh lacks an axis, parameters cannot be cut as the specs say, or processes give
        different ones (detected by a checksum of each array that a process has whole); for a ``local`` in
        which workers talk, and for one of workers in two levels.

    Example:
      >>> import jax, jax.numpy as jnp, lioncub_jax as lc
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> workers = lc.Workers(mesh, "data")
      >>> tx = lc.lion_cub(1e-3, workers=workers)
      >>> state = lc.init_state(tx, {"w": jnp.ones((2, 3))}, workers)
      >>> state.opt_state[0].mu["w"].shape
      (1, 2, 3)

    Source: this library.
    """
    check_real(workers)
    params, param_specs, both = _mapped(tx, params, workers, specs, local)
    rng = jax.random.key(jax.device_put(0)) if rng is None else rng
    rng = jax.random.wrap_key_data(rng) if kinds.is_raw_key(rng) else rng
    if not is_key(rng) or jnp.shape(rng):
        raise TypeError(
            f"rng is {type(rng).__name__} of shape {jnp.shape(rng)}: give one key, jax.random.key(seed)"
        )
    everywhere = workers.shardings(P())
    check_same("init_state", {"params": params, "rng": rng}, everywhere)
    # A copy, because the training step donates its state and the caller may still hold the arrays.
    params = jax.tree.map(
        lambda to, x: _strong(jnp.copy(put(x, to))), workers.shardings(param_specs), params
    )
    opt_state, local_state = (one.jitted_init(params, param_specs)(params) for one in both)
    return StepState(
        step=put(np.zeros((), np.int32), everywhere),
        params=params,
        model_state=own_state(model_state, workers),
        opt_state=opt_state,
        rng=jnp.copy(put(rng, everywhere)),
        local_state=local_state,
    )


def _mapped(
    tx: Any, params: optax.Params, workers: Workers, specs: Specs, local: Any
) -> tuple[Any, Any, list[MappedTransform]]:
    """Parameters out of their boxes, their specs, and the two optimizers mapped over the workers."""
    check_workers(workers)
    check_local_steps(local, 1, workers)
    check_split(params)
    # Boxes say it too, so they are asked before they are opened.
    specs = specs_of(params) if specs is None else specs
    params = boxes.opened(params)
    both = optax.with_extra_args_support(tx), per_worker_state(local, workers)
    return (
        params,
        workers.param_specs(params, specs),
        [MappedTransform(one, workers) for one in both],
    )


def _strong(x: jax.Array) -> jax.Array:
    """The same without a weak type, which a step does not return: it would be compiled twice."""
    return lax.convert_element_type(x, x.dtype)


def place(model: Any, workers: Workers) -> Any:
    """Places a model on the mesh, for a training loop of your own; call it before the optimizer is made.

    Parameters lie as they say themselves (sharding metadata), and else whole on each device. All other
    state, such as batch statistics, becomes ``[workers, ...]``, each worker's own, as by `own_state`.

    Args:
      model: an ``nnx.Module``, in which the arrays are replaced; or the variables of a flax linen module, a
        dict with ``"params"``.
      workers: a `Workers`, on a mesh with Auto or Explicit axes.

    Returns:
      The module, or new variables. `for_evaluation` is the way back.

    Raises:
      TypeError: for anything else.
      ValueError: for a model that was placed before, and as `init_state`.

    Example:
      >>> import jax, lioncub_jax as lc
      >>> from flax import nnx
      >>> model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
      >>> placed = lc.training.place(model, lc.Workers.one_per_device())
      >>> placed.mean.shape == (jax.device_count(), 3)
      True

    Source: this library.
    """
    check_real(workers)
    if is_module(model):
        return update_module(model, partial(_place_parts, workers))
    if not isinstance(model, Mapping) or "params" not in model:
        raise TypeError(
            f"place is given a {type(model).__name__}: give a flax.nnx.Module, or the variables of a flax "
            "linen module, model.init(key, x). A tree of parameters goes to jax.device_put, with "
            "workers.shardings(lioncub_jax.mesh.specs_of(params)), and other state to training.own_state"
        )
    rest = {name: part for name, part in model.items() if name != "params"}
    params, _, rest = _place_parts(workers, model["params"], (), rest)
    return {"params": params, **rest}


def _place_parts(
    workers: Workers, params: optax.Params, shared: Any, rest: Any
) -> tuple[Any, Any, Any]:
    """Parameters by their specs, what is whole on each device, and what is each worker's own."""
    bare, everywhere = boxes.opened(params), workers.shardings(P())
    shardings = workers.shardings(workers.param_specs(bare, specs_of(params)))
    check_same("place", (bare, shared), everywhere)
    leaves, structure = jax.tree.flatten(params)
    placed = [put(x, to) for x, to in zip(leaves, jax.tree.leaves(shardings), strict=True)]
    shared = jax.tree.map(lambda x: put(x, everywhere), shared)
    return jax.tree.unflatten(structure, placed), shared, own_state(rest, workers)


def own_state(model_state: Any, workers: Workers) -> Any:
    """Copies a model state for each worker, for a training loop of your own; `init_state` does it itself.

    Args:
      model_state: a tree of arrays, such as batch statistics, the same on every process.
      workers: a `Workers`.

    Returns:
      The tree with leaves ``[workers, ...]`` on the mesh; typed random keys are each worker's own.

    Raises:
      TypeError: for what is no array, such as a ``Variable`` of keras: give its ``value``.
      ValueError: for arrays that are ``[workers, ...]`` on the mesh already.

    Example:
      >>> import jax, jax.numpy as jnp, lioncub_jax as lc
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> lc.training.own_state({"mean": jnp.ones(3)}, lc.Workers(mesh, "data"))["mean"].shape
      (1, 3)

    Source: this library.
    """

    def own(model_state: Any) -> Any:
        return jax.tree.map(
            lambda x: (kinds.fold(workers, x) if is_key(x) else _strong(x))[None], model_state
        )

    check_arrays(model_state, int, float, name="model_state")
    for path, x in jax.tree_util.tree_leaves_with_path(model_state):
        if set(workers.axes).intersection(axes_in(spec_of(x))):
            raise ValueError(
                f"model_state{jax.tree_util.keystr(path)}, of shape {jnp.shape(x)}, lies over the workers "
                "already: place a model, or give its state to own_state, once"
            )
    everywhere = workers.shardings(P())
    check_same("own_state", model_state, everywhere)
    placed = jax.tree.map(lambda x: put(x, everywhere), model_state)
    run = workers.map(own, (P(),), P(workers.axes), typed=False)
    return jax.jit(run)(placed)


def abstract_state(
    tx: optax.GradientTransformation,
    params: optax.Params,
    workers: Workers,
    *,
    specs: Specs = None,
    model_state: Any = (),
    local: optax.GradientTransformation | None = None,
) -> StepState:
    """Shapes with shardings of what `init_state` would return: nothing is allocated.

    For ``TrainStep.lower``, to read a program before there is a machine to run it, and for
    ``Checkpoints.restore``, to read a state without making one first.

    Args:
      tx: as `init_state`, like all arguments.
      params: arrays or ``jax.ShapeDtypeStruct``.
      workers: as `init_state`.
      specs: as `init_state`.
      model_state: as `init_state`; shapes will do.
      local: as `init_state`.

    Returns:
      A ``StepState`` of ``jax.ShapeDtypeStruct``.

    Raises:
      ValueError: as `init_state`.

    Example:
      >>> import jax, jax.numpy as jnp, lioncub_jax as lc
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> tx = lc.lion_cub(1e-3, workers="data")
      >>> shapes = {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
      >>> lc.training.abstract_state(tx, shapes, lc.Workers(mesh, "data")).opt_state[0].mu["w"].shape
      (1, 2, 3)
    """
    params, param_specs, both = _mapped(tx, params, workers, specs, local)
    params = jax.tree.map(workers.shape, param_specs, params)
    opt_state, local_state = (
        one.jitted_init(params, param_specs).eval_shape(params) for one in both
    )
    return StepState(
        step=workers.shape(P(), np.int32(0)),
        params=params,
        model_state=jax.tree.map(
            lambda x: workers.shape(P(workers.axes), x, workers.count), model_state
        ),
        opt_state=opt_state,
        rng=workers.shape(P(), jax.eval_shape(jax.random.key, 0)),
        local_state=local_state,
    )


def check_state(
    tx: optax.GradientTransformationExtraArgs,
    local: optax.GradientTransformation | None,
    workers: Workers,
    state: StepState,
) -> None:
    """Raises ``ValueError`` for the state of another optimizer, of local steps too, or of other workers."""
    specs = workers.param_specs(state.params, jax.tree.map(spec_of, state.params))
    for name, one in (("opt_state", tx), ("local_state", per_worker_state(local, workers))):
        layout = MappedTransform(one, workers).layout(state.params, specs)
        check_layout(getattr(state, name), layout.specs, workers, name=name)


def check_layout(
    state: optax.OptState,
    specs: Specs,
    workers: Workers,
    *,
    name: str = "state",
    in_worker: bool = False,
) -> None:
    """Raises ``ValueError`` for the state of another optimizer, or of other workers."""
    advice = (
        "make the state by init_state or init of this optimizer, with the same parameters and workers, and "
        "the same local optimizer or none; moments of another go on by lioncub_jax.checkpoint.carry_over"
    )
    structure: Any = jax.tree.structure(specs)
    try:
        parts = structure.flatten_up_to(state)
    except ValueError as error:
        raise ValueError(f"the {name} is not one of this optimizer: {advice}") from error
    for spec, part in zip(jax.tree.leaves(specs), parts, strict=True):
        if not workers.stacks(spec):
            continue
        # A slice that is the same for all owners differs over the devices of a group only.
        holders = 1 if in_worker else product(workers.mesh.shape, axes_of(spec[0]))
        for x in jax.tree.leaves(part):
            if jnp.shape(x)[:1] != (holders,):
                raise ValueError(
                    f"the {name} has an array of shape {jnp.shape(x)} where {holders} workers have "
                    f"one each: {advice}"
                )
