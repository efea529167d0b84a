"""First states of training: parameters, model and optimizer state placed on the mesh."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange.mapped import Holder, jitted_init, state_specs
from lioncub_jax.mesh import boxes
from lioncub_jax.mesh.hosts import check_same, is_key, is_raw_key, put
from lioncub_jax.mesh.placement import Workers, check_real, check_workers
from lioncub_jax.mesh.specs import Specs, spec_of, specs_of
from lioncub_jax.training.modules import check_split
from lioncub_jax.training.own import copied_to_each, strong
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
    rng = jax.random.wrap_key_data(rng) if is_raw_key(rng) else rng
    if not is_key(rng) or jnp.shape(rng):
        raise TypeError(
            f"rng is {type(rng).__name__} of shape {jnp.shape(rng)}: give one key, jax.random.key(seed)"
        )
    everywhere = workers.shardings(P())
    given = {"params": params, "rng": rng, "model_state": model_state}
    check_same("init_state", given, workers.mesh)
    # A copy, because the training step donates its state and the caller may still hold the arrays.
    params = jax.tree.map(
        lambda to, x: strong(jnp.copy(put(x, to))), workers.shardings(param_specs), params
    )
    states = [jitted_init(one, workers, params, param_specs)(params) for one in both]
    opt_state, local_state = (*states, ())[:2]
    return StepState(
        step=put(np.zeros((), np.int32), everywhere),
        params=params,
        model_state=copied_to_each("model_state", model_state, workers),
        opt_state=opt_state,
        rng=jnp.copy(put(rng, everywhere)),
        local_state=local_state,
    )


def _mapped(
    tx: Any, params: optax.Params, workers: Workers, specs: Specs, local: Any
) -> tuple[Any, Any, list[Any]]:
    """Parameters out of their boxes, their specs, and one or two optimizers."""
    check_workers(workers)
    check_local_steps(local, 1, workers)
    check_split(params)
    # Boxes say it too, so they are asked before they are opened.
    specs = specs_of(params) if specs is None else specs
    params = boxes.opened(params)
    both = [optax.with_extra_args_support(tx)]
    if local is not None:
        both.append(per_worker_state(local, workers))
    return params, workers.param_specs(params, specs), both


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
    inits = [jitted_init(one, workers, params, param_specs) for one in both]
    states = [init.eval_shape(params) for init in inits]
    opt_state, local_state = (*states, ())[:2]
    return StepState(
        step=workers.shape(P(), np.int32(0)),
        params=params,
        model_state=jax.tree.map(
            lambda x: workers.shape(P(workers.axes), x, workers.num_gradients), model_state
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
    """Raises ``ValueError`` for the state of another optimizer, of local steps too."""
    specs = workers.param_specs(state.params, jax.tree.map(spec_of, state.params))
    both = {"opt_state": tx}
    if local is not None:
        both["local_state"] = per_worker_state(local, workers)
    layouts = {name: state_specs(one, workers, state.params, specs) for name, one in both.items()}
    for name in ("opt_state", "local_state"):
        structure: Any = jax.tree.structure(layouts.get(name, ()))
        try:
            structure.flatten_up_to(getattr(state, name))
        except ValueError as error:
            raise ValueError(
                f"the {name} is not one of this optimizer: make the state by init_state or init of this "
                "optimizer, with the same parameters and workers, and the same local optimizer or none; "
                "moments of another go on by lioncub_jax.checkpoint.carry_over"
            ) from error
