"""A training step on a mesh: local gradients, each worker's own state, one agreed update.

What differs between workers is known from types and never guessed: inside ``shard_map`` parameters are
cast to *varying* over the worker axes, so gradients are local, and state that a transform makes from
them is each worker's own. Outside, such state has a leading ``[workers]`` axis sharded over the mesh;
everything else is the same on all workers. Over the inner axes of a mesh arrays are cut as the
parameters are.
"""

import math
import os
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from lioncub_jax import checks, wires
from lioncub_jax.layout import Holder
from lioncub_jax.mesh import boxes
from lioncub_jax.mesh.placement import Workers, workers_of
from lioncub_jax.mesh.specs import (
    axes_of,
    check_batch_spec,
    spec_of,
    stacked,
)
from lioncub_jax.progress import stepped
from lioncub_jax.training import gradients
from lioncub_jax.training.batches import Batches
from lioncub_jax.training.local import (
    check_local,
    check_made,
    finite,
    local_differences,
    of_each,
)
from lioncub_jax.training.modules import StatefulLoss
from lioncub_jax.training.programs import Programs
from lioncub_jax.training.typed import agreed, check_agreed, specs_here, state_specs
from lioncub_jax.wires import AxisName


class TrainState(NamedTuple):
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
    params: Any
    model_state: Any
    opt_state: Any
    rng: jax.Array
    local_state: Any = ()

    @staticmethod
    def holders() -> dict[str, Holder]:
        """Whose the fields are, for checkpoints."""
        return {"model_state": Holder.WORKER, "local_state": Holder.WORKER}


def on_mesh(
    tx: optax.GradientTransformation,
    workers: Workers | Mesh,
    *,
    axis_name: AxisName | None = None,
    group_axis: AxisName | None = None,
    specs: Any = None,
) -> "OnMesh":
    """Runs a transform of this library on global arrays, so that it drops into a trainer under ``jax.jit``.

    Parameters, state and updates are ordinary global arrays with ``NamedSharding``s. Only gradients have
    a leading axis, one entry for each worker, as `worker_value_and_grad` returns them.

    Args:
      tx: such as ``lion_cub(1e-4, axis_name="data")``, alone or in a chain. Transforms in the chain see
        one worker's whole gradients, however they are cut: ``optax.clip_by_global_norm`` is right. In a
        chain around `on_mesh` it would see those of all workers as one, and a warning says so.
      workers: a `Workers`; or a mesh, axes Auto or Explicit, with ``axis_name``.
      axis_name: beside a mesh, the axis of the workers, or several as a tuple.
      group_axis: beside a mesh, the axis of the devices of one worker, if ``tx`` has one (two levels).
      specs: a tree of ``PartitionSpec`` like the parameters, such as ``specs_of(params)``; None reads
        them off the parameters: concrete arrays and Explicit axes know them.

    Returns:
      A transform. ``init(params)`` returns state whose leaves are ``[workers, ...]`` where workers
      differ; flax's boxes around them, such as ``nn.Partitioned`` and those of ``nnx.Optimizer``, have
      the workers' axis in front of the names of the parameters. ``update(updates, state, params,
      abstain=None)`` takes gradients ``[workers, ...]`` and ``abstain`` ``bool[workers]``; parameters
      are required. ``shardings(params)`` says where the state lies, for a step with ``in_shardings`` or
      ``out_shardings``. Inside a ``shard_map`` over the workers ``update`` takes what is there: this
      worker's gradients, and its entry ``[1, ...]`` of the state.

    Raises:
      TypeError: for a mesh that is none.
      ValueError: for a mesh without the axes, specs that cut parameters over the workers or do not
        divide them, gradients or ``abstain`` without the leading axis, the state of another optimizer, an
        update that differs between workers, and Auto axes without ``specs`` in a trace.

    Example:
      >>> import jax, jax.numpy as jnp, lioncub_jax as lc
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> tx = lc.on_mesh(lc.lion_cub(1e-4, axis_name="data"), mesh, axis_name="data")
      >>> state = tx.init({"w": jnp.ones((2, 3))})
      >>> state[0].mu["w"].shape
      (1, 2, 3)
    """
    workers = workers_of(workers, axis_name, group_axis)
    tx = optax.with_extra_args_support(tx)

    def init(params: optax.Params) -> Any:
        made, held = first_opt_state(tx, workers, params, workers.cut(params, specs))
        return boxes.named(made, held, params, workers.axes)

    def update(
        updates: Any, state: Any, params: Any = None, *, abstain: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("on_mesh(tx).update needs params: give update(grads, state, params)")
        if set(workers.axes) <= set(jax.sharding.get_abstract_mesh().manual_axes):
            return _update_here(tx, workers, updates, state, params, abstain, **extra)
        cut = workers.cut(params, specs)
        _check_gradients(updates, params, workers)
        _check_abstain(abstain, workers)
        checks.warn_if_chained()
        if not boxes.boxes_of(params):
            return _update(tx, workers, cut, updates, state, params, abstain, **extra)
        held = state_specs(tx, workers, params, cut)
        state = boxes.boxed_like(held, state)
        updates, state = _update(tx, workers, cut, updates, state, params, abstain, **extra)
        return updates, boxes.named(state, held, params, workers.axes)

    def lies(params: optax.Params) -> Any:
        held = state_specs(tx, workers, params, workers.cut(params, specs))
        made, structure = jax.tree.flatten(
            jax.eval_shape(init, params)
        )  # in boxes with their names
        return jax.tree.unflatten(structure, workers.laid(jax.tree.leaves(held), made))

    on = OnMesh(init, update)
    on.specs, on.shardings = lies, lambda params: workers.shardings(lies(params))
    return on


class OnMesh(optax.GradientTransformationExtraArgs):
    """A transform on global arrays; see `on_mesh`.

    Attributes:
      shardings: ``params -> state`` of ``NamedSharding``s instead of arrays: where the state lies. For the
        ``in_shardings`` and ``out_shardings`` of a step; shapes will do for the parameters.
      specs: the same of ``PartitionSpec``s, for ``in_specs`` and ``out_specs``.

    Example:
      >>> import jax, lioncub_jax as lc
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> tx = lc.on_mesh(lc.lion_cub(1e-4, axis_name="data"), lc.Workers(mesh, "data"))
      >>> tx.shardings({"w": jax.ShapeDtypeStruct((2, 3), "float32")})[0].mu["w"].spec == jax.P("data")
      True

    Source: this library.
    """

    shardings: Callable[[optax.Params], Any]
    specs: Callable[[optax.Params], Any]


def first_opt_state(tx: Any, workers: Workers, params: Any, cut: Any) -> tuple[Any, Any]:
    """The state of `on_mesh`, of parameters that lie as ``cut`` says, in their boxes; and how it lies."""
    held = state_specs(tx, workers, params, cut)
    if not jax.tree.leaves(held):
        return held, held  # without an array: JAX would look in vain for one that tells the mesh

    def place(params: Any) -> Any:
        return workers.stack(tx.init(params), held)

    run = workers.map(place, (cut,), held, explicit=True)
    # Zeros need no input, and without one only this tells where they go.
    lie = workers.laid(held, jax.eval_shape(run, params))
    return jax.jit(run, out_shardings=workers.shardings(lie))(params), held


def _update(
    tx: Any,
    workers: Workers,
    cut: Any,
    updates: Any,
    state: Any,
    params: Any,
    abstain: Any,
    /,
    **extra: Any,
) -> tuple[Any, Any]:
    """The update of `on_mesh`, of parameters that lie as ``cut`` says."""
    lead, held = stacked(cut, workers.axes), state_specs(tx, workers, params, cut)
    _check_state(state, held, workers)
    arrays = {name: x for name, x in extra.items() if _are_arrays(x)}

    def worker(updates: Any, state: Any, params: Any, abstain: Any, arrays: Any) -> Any:
        grads = workers.stack(updates, lead, undo=True)
        abstain = None if abstain is None else abstain[0]
        return _update_of_worker(tx, workers, held, grads, state, params, abstain, extra | arrays)

    in_specs = lead, held, cut, P(workers.axes), P()
    run = workers.map(worker, in_specs, (cut, held), explicit=True)
    return workers.hold(run(updates, state, params, abstain, arrays), (cut, held))


def _update_here(
    tx: Any,
    workers: Workers,
    grads: Any,
    state: Any,
    params: Any,
    abstain: Any,
    /,
    **extra: Any,
) -> tuple[Any, Any]:
    """The update of `on_mesh` within a ``shard_map`` over the workers: gradients are this worker's own."""
    held = specs_here(tx, workers, params)
    _check_state(state, held, workers, here=True)
    return _update_of_worker(tx, workers, held, grads, state, params, abstain, extra)


def _update_of_worker(
    tx: Any,
    workers: Workers,
    held: Any,
    grads: Any,
    state: Any,
    params: Any,
    abstain: Any,
    extra: dict[str, Any],
) -> tuple[Any, Any]:
    """What one worker makes of its gradients, and of its entries ``[1, ...]`` of the state."""
    before = workers.stack(state, held, undo=True)
    extra |= {} if abstain is None else {"abstain": abstain}
    updates, after = tx.update(grads, before, params, **extra)
    updates = agreed(tx, workers, updates, grads, before, params)
    check_agreed(updates, workers)
    return updates, workers.stack(after, held)


def _are_arrays(tree: Any) -> bool:
    return all(isinstance(x, (jax.Array, np.ndarray, int, float)) for x in jax.tree.leaves(tree))


class TrainStep:
    """A compiled training step; see `make_train_step`.

    Attributes:
      traces: how often the step was traced; more than once means that shapes or types changed.

    Source: this library; see `make_train_step` for an example.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        workers: Workers,
        batch_spec: P,
        accumulate: int,
        donate: bool = True,
        options: dict[str, Any] | None = None,
        local_steps: int = 1,
        programs: str | os.PathLike[str] | None = None,
    ):
        def traced(state: TrainState, batch: Any, cut: Any) -> Any:
            self.traces += 1
            return step(state, batch, jax.tree.unflatten(*cut))

        self.traces = 0
        donated = 0 if donate else ()
        self._jitted = jax.jit(
            traced, donate_argnums=donated, static_argnums=2, compiler_options=options
        )
        self._programs = programs and Programs(self._jitted, workers.mesh, options, programs)
        self._batches = Batches(workers, batch_spec, local_steps, accumulate)
        self._bounded = workers.mesh.devices.flat[0].platform == "cpu"
        self._in_flight: deque[jax.Array] = deque(maxlen=8)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Runs one step; the arrays of ``state`` are donated and must not be used again.

        Raises:
          ValueError: for a batch that does not divide, rows of processes that do not fit, or a state that
            an earlier step was given.
        """
        _check_alive(state)
        self._batches.check(batch)
        state, batch, cut = self._arguments(state, batch)
        if self._programs:
            state, metrics = self._programs(state, batch, static=cut)
        else:
            state, metrics = self._jitted(state, batch, cut)
        if not self._in_flight:  # the first
            stepped(metrics["loss"])
        # XLA's CPU collectives deadlock where dozens of steps are in flight; eight cost nothing.
        self._in_flight.append(metrics["loss"])
        if self._bounded and len(self._in_flight) == self._in_flight.maxlen:
            self._in_flight[0].block_until_ready()
        return state, {"loss": metrics.pop("loss"), **metrics}  # jit has sorted them by name

    def lower(self, state: TrainState, batch: Any) -> jax.stages.Lowered:
        """As ``jax.jit(...).lower``: for reading the compiled program. Shapes will do."""
        return self._jitted.lower(*self._arguments(state, batch))

    def compile(self, state: TrainState, batch: Any) -> jax.stages.Compiled:
        """As ``lower(state, batch).compile()``, or read from the ``programs`` of `make_train_step`."""
        lowered = self.lower(state, batch)
        return self._programs.compiled(lowered) if self._programs else lowered.compile()

    def _arguments(self, state: TrainState, batch: Any) -> tuple[TrainState, Any, Any]:
        """The state, the batch on the mesh, and how the parameters lie, as something to compile for."""
        batch = jax.tree_util.tree_map_with_path(self._batches.place, batch)
        params, tree = jax.tree.flatten(state.params)
        return state, batch, (tree, tuple(map(spec_of, params)))


def _check_alive(state: TrainState) -> None:
    """Raises where JAX would end the process."""
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(x, jax.Array) and x.is_deleted():
            raise ValueError(
                f"state{jax.tree_util.keystr(path)} was given to an earlier step, which took over its "
                "memory (donated): go on with the state that the step returned, state, metrics = "
                "step(state, batch), or give make_train_step(..., donate=False) to keep old states"
            )


def make_train_step(
    loss_fn: Callable[..., Any] | StatefulLoss,
    tx: optax.GradientTransformation,
    workers: Workers | Mesh,
    *,
    axis_name: AxisName | None = None,
    group_axis: AxisName | None = None,
    batch_spec: P | None = None,
    accumulate: int = 1,
    local_steps: int = 1,
    local: optax.GradientTransformation | None = None,
    donate: bool = True,
    compiler_options: dict[str, Any] | None = None,
    programs: str | os.PathLike[str] | None = None,
) -> TrainStep:
    """Builds the jitted training step of workers on a mesh.

    Each worker takes the gradient of its part of the batch, ``tx`` turns the local gradients into one
    agreed update, and every worker applies it. A worker whose loss is not finite abstains and
    keeps its model state (under `global_gradients` nobody can: a mean takes in everything). Inside a
    worker the compiler shards the model over the inner axes, as the parameters lie.

    With ``local`` each worker first takes ``local_steps`` steps of its own from the common parameters, and
    hands ``tx`` its parameters before minus those after in place of a gradient, once in a call: so
    ``global_gradients(optax.sgd(1.0), axis_name)`` is averaging of models, and ``baselines.diloco(...)``
    is DiLoCo. A worker whose loss or difference is not finite keeps its local state too.

    Args:
      loss_fn: ``(params, batch, rng) -> loss`` or ``(loss, aux)``, for plain trees and flax linen; or
        a ``StatefulLoss``, such as `from_nnx` returns. The loss is the mean over its part of the batch.
      tx: the optimizer; the one given to `init_state`.
      workers: a `Workers`; or a mesh, axes Auto or Explicit, with ``axis_name``.
      axis_name: beside a mesh, the axis of the workers, or several as a tuple.
      group_axis: beside a mesh, the axis of the devices of one worker, if ``tx`` has one (two levels).
      batch_spec: how the batch is cut, such as ``P(("data", "fsdp"))``; by default over the workers (and
        the group) only. The workers' axes come first in its first entry.
      accumulate: parts into which a worker cuts its batch; their gradients are averaged before the
        exchange.
      local_steps: into how many parts a worker cuts its batch first, each for a step of its own.
      local: the optimizer of these steps, any optax transform in which workers do not talk; the one
        given to `init_state`. Its state is each worker's own and stays from call to call, so schedules in
        it count local steps. In two levels there is none.
      donate: whether a step may write the new state over the old one, which then cannot be used again;
        False keeps old states, and needs memory for two.
      compiler_options: for XLA, as ``jax.jit`` takes them, such as those of `overlap_options`.
      programs: a folder in which each process keeps its compiled steps, so that a run that is started
        again on this machine compiles none; yours alone, for what is read from it is run. None: JAX's
        compilation cache, which process 0 alone writes, and on CPUs finds again.

    Returns:
      ``step(state, batch) -> (state, metrics)``, a `TrainStep`. The batch is a tree of arrays whose first
      dimension is a multiple of what ``batch_spec`` cuts it into, times ``local_steps`` and ``accumulate``.
      In several processes an array of NumPy, or on a process' own devices, is the rows that its devices
      take: each reads its own, as many in each step, and in the first call they compare how many, and
      whether some are the same. A global ``jax.Array`` is as it is, and shapes are global.

      ``metrics`` is a plain dict, ``"loss"`` first, then the entries of an ``aux`` dict by name; an
      ``aux`` that is no dict is the entry ``"aux"``. Numbers are arrays of shape ``[]`` that are the same
      everywhere, for a progress bar or a log: floating ones the mean over the workers, whole ones and
      bools their sum. The loss is not finite if that of one worker is. Arrays come back as they are
      with a leading ``[workers]`` axis, ``[workers, accumulate]`` if the batch is cut, with ``local``
      ``[workers, local_steps, ...]``. In two levels each device of a group counts here, not each worker.

    Raises:
      TypeError: for a mesh that is none, a loss that cannot be called, or a ``local`` that is no transform.
      ValueError: for a mesh without the axis, ``accumulate`` or ``local_steps`` below 1, ``local_steps``
        without ``local``, a ``local`` in which workers talk, or ``programs`` that are a file; when
        called, for a batch that does not divide, rows of processes that do not fit, a state that was given
        to an earlier step or is another optimizer's, or an optimizer whose update differs between workers.

    Example:
      >>> import jax, jax.numpy as jnp, lioncub_jax as lc
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> workers = lc.Workers(mesh, "data")
      >>> tx = lc.lion_cub(1e-3, axis_name=workers)
      >>> loss = lambda params, batch, rng: jnp.mean((batch @ params["w"]) ** 2)
      >>> state = lc.init_state(tx, {"w": jnp.ones((3, 1))}, workers)
      >>> step = lc.make_train_step(loss, tx, workers)
      >>> state, metrics = step(state, jnp.ones((8, 3)))
      >>> float(metrics["loss"])
      9.0

    Source: this library.
    """
    workers = workers_of(workers, axis_name, group_axis)
    checks.check_count(f"accumulate={accumulate!r}", accumulate)
    check_local(local, local_steps, workers)
    batch_spec = P(workers.axes) if batch_spec is None else batch_spec
    check_batch_spec(batch_spec, workers.mesh, workers.axes)
    if not callable(loss_fn) and not isinstance(loss_fn, StatefulLoss):
        raise TypeError(
            f"the loss is {loss_fn!r}: give a function (params, batch, rng) -> loss, or a StatefulLoss; "
            "from_nnx returns one as the first of three"
        )
    of_worker = gradients.local_gradients(loss_fn, workers.axes, accumulate)
    of_worker = local_differences(of_worker, local, workers.axes, local_steps)
    own = P(workers.axes)

    def worker(params: Any, kept: Any, batch: Any, rng: Any, count: Any) -> Any:
        rng = jax.random.fold_in(jax.random.fold_in(rng, count), wires.worker_index(workers.axes))
        before = jax.tree.map(lambda x: x[0], kept)
        (loss, (aux, after)), grads = of_worker(params, before, batch, rng)
        abstains = ~jnp.isfinite(loss)
        if local is not None:
            abstains |= ~finite(grads)
        after = jax.tree.map(partial(jnp.where, abstains), before, after)
        each = wires.varying((grads, after, abstains), workers.axes)
        metrics = gradients.reduce_metrics(loss, aux, workers.axes)
        return *jax.tree.map(lambda x: x[None], each), *metrics

    def step(state: TrainState, batch: Any, cut: Any) -> tuple[TrainState, dict[str, Any]]:
        cut = workers.cut(state.params, cut)
        params, opt_state = state.params, state.opt_state
        held, kept = _kept(state, local, workers, cut)
        in_specs = cut, held, batch_spec, P(), P()
        out_specs = stacked(cut, workers.axes), held, own, own, P(), P()
        run = workers.map(worker, in_specs, out_specs, explicit=False, typed=False)
        grads, kept, abstains, *metrics = run(params, kept, batch, state.rng, state.step)
        with checks.during(checks.asked, False):
            updates, opt_state = _update(tx, workers, cut, grads, opt_state, params, abstains)
        params = workers.hold(optax.apply_updates(params, updates), cut)
        new = TrainState(state.step + 1, params, kept[0], opt_state, state.rng, kept[1])
        return new, gradients.joined(*metrics)

    return TrainStep(
        step, workers, batch_spec, accumulate, donate, compiler_options, local_steps, programs
    )


def _kept(state: TrainState, local: Any, workers: Workers, cut: Any) -> tuple[Any, Any]:
    """What workers keep from step to step, the model's state and the local one; and how it lies."""
    check_made(state.local_state, local)
    own, held = P(workers.axes), ()
    if local is not None:
        held = state_specs(of_each(local, workers), workers, state.params, cut)
        _check_state(state.local_state, held, workers, name="local_state")
    return (own, held), (state.model_state, state.local_state)


def _check_gradients(updates: Any, params: Any, workers: Workers) -> None:
    """Raises ``ValueError`` unless there is a gradient of each parameter for each worker."""
    lines = (
        "take gradients with lioncub_jax.worker_value_and_grad(loss, workers), which returns one for each "
        "worker, and hand them to update as they are"
    )
    given: Any = jax.tree.structure(updates)
    wanted: Any = jax.tree.structure(params)
    if given != wanted:
        raise ValueError(f"the gradients are {given}, but the parameters {wanted}: {lines}")
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    for (path, g), p in zip(leaves, jax.tree.leaves(params), strict=True):
        shape = (workers.count, *jnp.shape(p))
        if jnp.shape(g) != shape:
            raise ValueError(
                f"the gradient of {jax.tree_util.keystr(path) or 'the parameters'} has shape "
                f"{jnp.shape(g)}, and not {shape}, one of {jnp.shape(p)} for each of {workers.count} "
                f"workers: {lines}. Of other transforms on_mesh is the outermost: chains, clipping and "
                "optax.MultiSteps go inside"
            )


def _check_state(
    state: Any, specs: Any, workers: Workers, here: bool = False, name: str = "state"
) -> None:
    """Raises ``ValueError`` for a state that another optimizer made, or for other workers."""
    advice = "make the state by init_state or init of this optimizer, with the same parameters and workers"
    flat = jax.tree.leaves(specs)
    structure: Any = jax.tree.structure(specs)
    try:
        parts = structure.flatten_up_to(state)
    except ValueError as error:
        raise ValueError(f"the {name} is not one of this optimizer: {advice}") from error
    for spec, part in zip(flat, parts, strict=True):
        if not workers.stacks(spec):
            continue
        # A slice that all owners have alike differs over the devices of a group alone.
        holders = math.prod(map(workers.mesh.shape.__getitem__, axes_of(spec[0])))
        holders = 1 if here else holders
        for x in jax.tree.leaves(part):
            if jnp.shape(x)[:1] != (holders,):
                raise ValueError(
                    f"the {name} has an array of shape {jnp.shape(x)} where {holders} workers have "
                    f"one each: {advice}"
                )


def _check_abstain(abstain: Any, workers: Workers) -> None:
    if abstain is not None and jnp.shape(abstain) != (workers.count,):
        raise ValueError(
            f"abstain has shape {jnp.shape(abstain)}: give bool[{workers.count}], a flag for each worker"
        )
