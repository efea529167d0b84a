"""A training step on a mesh: local gradients, each worker's own state, one agreed update.

What differs between workers is told by types and never guessed: inside ``shard_map`` parameters are
cast to *varying* over the worker axes, so gradients are local, and state that a transform makes from
them is each worker's own. Outside, such state has a leading ``[workers]`` axis sharded over the mesh;
everything else is the same on all workers. Over the inner axes of a mesh arrays are cut as the
parameters are.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lioncub_jax import checks, wires
from lioncub_jax.layout import Holder, varying_axes
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.mesh.specs import (
    check_batch_spec,
    is_spec,
    parts,
    shardings,
    shortened,
    spec_of,
    specs_of,
    stacked,
)
from lioncub_jax.training import gradients
from lioncub_jax.training.gradients import StatefulLoss
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

    Source: this library; see `init_state` for an example.
    """

    step: jax.Array
    params: Any
    model_state: Any
    opt_state: Any
    rng: jax.Array

    @staticmethod
    def holders() -> dict[str, Holder]:
        """Whose the fields are, for checkpoints."""
        return {"model_state": Holder.WORKER}


def on_mesh(
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis_name: AxisName,
    group_axis: AxisName | None = None,
    specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Runs a transform of this library on global arrays, so that it drops into a trainer under ``jax.jit``.

    Parameters, state and updates are ordinary global arrays with ``NamedSharding``s. Only gradients have
    a leading axis, one entry for each worker, as `worker_value_and_grad` returns them.

    Args:
      tx: such as ``lion_cub(1e-4, axis_name="data")``, alone or in a chain. Transforms in the chain see
        one worker's whole gradients, however they are cut: ``optax.clip_by_global_norm`` is right.
      mesh: the devices, axes Auto or Explicit.
      axis_name: mesh axis of the workers, or several as a tuple.
      group_axis: mesh axis of the devices of one worker, if ``tx`` has one (two levels).
      specs: a tree of ``PartitionSpec`` like the parameters, such as ``specs_of(params)``; None reads
        them off the parameters: concrete arrays and Explicit axes know them.

    Returns:
      A transform. ``init(params)`` returns state whose leaves are ``[workers, ...]`` where workers
      differ. ``update(updates, state, params, abstain=None)`` takes gradients ``[workers, ...]`` and
      ``abstain`` ``bool[workers]``; parameters are required.

    Raises:
      ValueError: for a mesh without the axes, specs that cut parameters over the workers or do not
        divide them, an update that differs between workers, and Auto axes without ``specs`` in a trace.

    Example:
      >>> import jax, jax.numpy as jnp, lioncub_jax as lc
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> tx = lc.on_mesh(lc.lion_cub(1e-4, axis_name="data"), mesh, axis_name="data")
      >>> state = tx.init({"w": jnp.ones((2, 3))})
      >>> state[0].mu["w"].shape
      (1, 2, 3)
    """
    workers = Workers.on(mesh, axis_name, group_axis)
    tx = optax.with_extra_args_support(tx)

    def init(params: optax.Params) -> Any:
        cut = workers.cut(params, specs)
        state_specs = _state_specs(tx, workers, params, cut)

        def place(params: Any) -> Any:
            return workers.stack(tx.init(workers.vary(params)), state_specs)

        run = workers.map(place, (cut,), state_specs, explicit=True)
        # Zeros need no input, and without one only this tells where they go.
        return jax.jit(run, out_shardings=shardings(state_specs, mesh))(params)

    def update(
        updates: Any, state: Any, params: Any = None, *, abstain: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("on_mesh(tx).update needs params: give update(grads, state, params)")
        cut = workers.cut(params, specs)
        state_specs = _state_specs(tx, workers, params, cut)
        arrays = {name: x for name, x in extra.items() if _are_arrays(x)}
        others = {name: x for name, x in extra.items() if name not in arrays}

        def worker(updates: Any, state: Any, params: Any, abstain: Any, arrays: Any) -> Any:
            own, told = jax.tree.map(lambda x: x[0], (updates, abstain))
            state = workers.unstack(state, state_specs)
            extra = {**arrays, **others} if told is None else {**arrays, **others, "abstain": told}
            updates, state = tx.update(own, state, params, **extra)
            _check_agreed(updates, workers)
            return updates, workers.stack(state, state_specs)

        in_specs = stacked(cut, workers.axes), state_specs, cut, P(workers.axes), P()
        run = workers.map(worker, in_specs, (cut, state_specs), explicit=True)
        updates, state = run(updates, state, params, abstain, arrays)
        return workers.hold(updates, cut), workers.hold(state, state_specs)

    return optax.GradientTransformationExtraArgs(init, update)


def _are_arrays(tree: Any) -> bool:
    return all(isinstance(x, (jax.Array, np.ndarray, int, float)) for x in jax.tree.leaves(tree))


def init_state(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: Mesh,
    *,
    axis_name: AxisName,
    group_axis: AxisName | None = None,
    specs: Any = None,
    model_state: Any = (),
    rng: jax.Array | None = None,
) -> TrainState:
    """Places parameters, model state and optimizer state on the mesh.

    Args:
      tx: any optax transform, with or without transforms of this library in it.
      params: tree of floating arrays; boxes of ``flax.linen.Partitioned`` are opened.
      mesh: the devices.
      axis_name: mesh axis of the workers, or several as a tuple.
      group_axis: mesh axis of the devices of one worker, if ``tx`` has one (two levels).
      specs: a tree of ``PartitionSpec`` over the inner axes, like the parameters; by default
        ``specs_of(params)``: as they lie already, or as their metadata says.
      model_state: see ``TrainState``; every worker gets a copy, with random keys of its own.
      rng: a typed key, ``jax.random.key(seed)``; seed 0 by default.

    Returns:
      A ``TrainState``.

    Raises:
      ValueError: if the mesh lacks an axis, or parameters cannot be cut as the specs say.

    Example:
      >>> import jax, jax.numpy as jnp, lioncub_jax as lc
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> tx = lc.lion_cub(1e-3, axis_name="data")
      >>> state = lc.init_state(tx, {"w": jnp.ones((2, 3))}, mesh, axis_name="data")
      >>> state.opt_state[0].mu["w"].shape
      (1, 2, 3)
    """
    workers = Workers.on(mesh, axis_name, group_axis)
    params, cut = _opened(params, specs, workers)
    rng = jax.random.key(0) if rng is None else rng
    # A copy, because the training step donates its state and the caller may still hold the arrays.
    params = jax.tree.map(
        lambda spec, x: jnp.copy(_on_all(x, NamedSharding(mesh, spec))),
        cut, params, is_leaf=is_spec,
    )  # fmt: skip
    everywhere = NamedSharding(mesh, P())
    rng, model_state = jax.tree.map(lambda x: _on_all(x, everywhere), (rng, model_state))
    tx = on_mesh(tx, mesh, axis_name=axis_name, group_axis=group_axis, specs=cut)

    def own(model_state: Any) -> Any:
        mine = jax.tree.map(partial(gradients.own_key, workers), workers.vary(model_state))
        return jax.tree.map(lambda x: x[None], mine)

    copies = workers.map(own, (P(),), P(workers.axes), explicit=False)
    step = jax.device_put(jnp.zeros((), jnp.int32), everywhere)
    return TrainState(step, params, jax.jit(copies)(model_state), tx.init(params), jnp.copy(rng))


def _opened(params: Any, specs: Any, workers: Workers) -> tuple[Any, Any]:
    """Parameters out of their boxes, and how they are cut."""
    # Boxes say it too, so they are asked before they are opened.
    specs = specs_of(params) if specs is None else specs
    params = linen.meta.unbox(params)
    return params, workers.cut(params, specs)


def abstract_state(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: Mesh,
    *,
    axis_name: AxisName,
    group_axis: AxisName | None = None,
    specs: Any = None,
    model_state: Any = (),
) -> TrainState:
    """What `init_state` would return, as shapes with shardings: nothing is allocated.

    For ``TrainStep.lower``, to read a program before there is a machine to run it, and for
    ``Checkpoints.restore``, to read a state without making one first.

    Args:
      tx: as `init_state`, like all arguments.
      params: arrays or ``jax.ShapeDtypeStruct``.
      mesh: as `init_state`.
      axis_name: as `init_state`.
      group_axis: as `init_state`.
      specs: as `init_state`.
      model_state: as `init_state`; shapes will do.

    Returns:
      A ``TrainState`` of ``jax.ShapeDtypeStruct``.

    Raises:
      ValueError: as `init_state`.

    Example:
      >>> import jax, jax.numpy as jnp, lioncub_jax as lc
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> tx = lc.lion_cub(1e-3, axis_name="data")
      >>> shapes = {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
      >>> lc.abstract_state(tx, shapes, mesh, axis_name="data").opt_state[0].mu["w"].shape
      (1, 2, 3)
    """
    workers = Workers.on(mesh, axis_name, group_axis)
    params, cut = _opened(params, specs, workers)

    def on(spec: P, x: Any, *lead: int) -> jax.ShapeDtypeStruct:
        shape = (*lead, *jnp.shape(x))
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(mesh, spec))

    shaped = partial(jax.tree.map, on, is_leaf=is_spec)
    params = shaped(cut, params)
    mine = on_mesh(tx, mesh, axis_name=axis_name, group_axis=group_axis, specs=cut)
    tx = optax.with_extra_args_support(tx)
    opt_state = shaped(_state_specs(tx, workers, params, cut), jax.eval_shape(mine.init, params))
    count = parts(P(workers.axes), mesh)
    own = jax.tree.map(lambda x: on(P(workers.axes), x, count), model_state)
    step, rng = jax.eval_shape(lambda: (jnp.zeros((), jnp.int32), jax.random.key(0)))
    of_shapes: Any = TrainState
    return of_shapes(on(P(), step), params, own, opt_state, on(P(), rng))


class TrainStep:
    """A compiled training step; see ``make_train_step``.

    Attributes:
      traces: how often the step was traced; more than once means that shapes or types changed.
    """

    def __init__(self, step: Callable[..., Any], workers: Workers, batch_spec: P, accumulate: int):
        def traced(state: TrainState, batch: Any, cut: Any) -> Any:
            self.traces += 1
            return step(state, batch, jax.tree.unflatten(cut[0], cut[1]))

        self.traces = 0
        self._jitted = jax.jit(traced, donate_argnums=0, static_argnums=2)
        self._sharding = NamedSharding(workers.mesh, batch_spec)
        count = parts(P(workers.axes), workers.mesh)
        pieces = parts(batch_spec, workers.mesh)
        self._divisor = pieces * accumulate
        self._why = f"{count} workers, {accumulate} gradient accumulation steps"
        if pieces > count:
            self._why += f", and {pieces // count} parts of each worker's by {batch_spec}"
        self._bounded = workers.mesh.devices.flat[0].platform == "cpu"
        self._in_flight: deque[jax.Array] = deque(maxlen=8)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Runs one step; the arrays of ``state`` are donated and must not be used again."""
        state, metrics = self._jitted(state, self._place(batch), _cut_of(state))
        # XLA's CPU collectives deadlock where dozens of steps are in flight; eight cost nothing.
        self._in_flight.append(metrics["loss"])
        if self._bounded and len(self._in_flight) == self._in_flight.maxlen:
            self._in_flight[0].block_until_ready()
        return state, metrics

    def lower(self, state: TrainState, batch: Any) -> jax.stages.Lowered:
        """As ``jax.jit(...).lower``: for reading the compiled program. Shapes will do."""
        return self._jitted.lower(state, self._place(batch), _cut_of(state))

    def _place(self, batch: Any) -> Any:
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            rows = jnp.shape(leaf)[0] if jnp.ndim(leaf) else 0
            if rows == 0 or rows % self._divisor:
                raise ValueError(
                    f"batch{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}: its first dimension "
                    f"must be a positive multiple of {self._divisor} ({self._why})"
                )
        return jax.tree.map(self._place_leaf, batch)

    def _place_leaf(self, x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding)
        return jax.device_put(x, self._sharding)


def _cut_of(state: TrainState) -> tuple[Any, tuple[P, ...]]:
    """How the parameters lie, as something to compile for."""
    leaves, tree = jax.tree.flatten(state.params)
    return tree, tuple(map(spec_of, leaves))


def make_train_step(
    loss_fn: Callable[..., Any] | StatefulLoss,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis_name: AxisName,
    group_axis: AxisName | None = None,
    batch_spec: P | None = None,
    accumulate: int = 1,
) -> TrainStep:
    """Builds the jitted training step of workers on a mesh.

    Each worker takes the gradient of its part of the batch, ``tx`` turns the local gradients into one
    agreed update, and every worker applies it. A worker whose loss is not finite sits the step out and
    keeps its model state (under `global_gradients` nobody can: a mean takes in everything). Inside a
    worker the compiler shards the model over the inner axes, as the parameters lie.

    Args:
      loss_fn: ``(params, batch, rng) -> loss`` or ``(loss, aux)``, for plain trees and flax linen; or
        a ``StatefulLoss``, such as `from_nnx` returns. The loss is the mean over its part of the batch.
      tx: the optimizer; the one given to `init_state`.
      mesh: the devices, axes Auto or Explicit.
      axis_name: mesh axis of the workers, or several as a tuple.
      group_axis: mesh axis of the devices of one worker, if ``tx`` has one (two levels).
      batch_spec: how the batch is cut, such as ``P(("data", "fsdp"))``; by default over the workers (and
        the group) only. The workers' axes come first in its first entry.
      accumulate: parts into which a worker cuts its batch; their gradients are averaged before the
        exchange.

    Returns:
      ``step(state, batch) -> (state, metrics)``. The batch is a tree of arrays whose first dimension is
      a multiple of what ``batch_spec`` cuts it into, times ``accumulate``. ``metrics["loss"]`` is
      ``float32[]``, the mean over the workers, and not finite if one of them is; so is every floating
      scalar of an ``aux`` dict; anything else in it comes back as it is with a leading ``[workers]``
      axis, ``[workers, accumulate]`` if the batch is cut. An ``aux`` that is no dict comes back as
      ``metrics["aux"]``. In two levels each device of a group counts here, not each worker.

    Raises:
      ValueError: for a mesh without the axis or ``accumulate`` below 1; when called, for a batch that
        does not divide, or an optimizer whose update differs between workers.

    Example:
      >>> import jax, jax.numpy as jnp, lioncub_jax as lc
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> tx = lc.lion_cub(1e-3, axis_name="data")
      >>> loss = lambda params, batch, rng: jnp.mean((batch @ params["w"]) ** 2)
      >>> state = lc.init_state(tx, {"w": jnp.ones((3, 1))}, mesh, axis_name="data")
      >>> step = lc.make_train_step(loss, tx, mesh, axis_name="data")
      >>> state, metrics = step(state, jnp.ones((8, 3)))
      >>> float(metrics["loss"])
      9.0
    """
    workers = Workers.on(mesh, axis_name, group_axis)
    checks.check_count(f"accumulate={accumulate!r}", accumulate)
    batch_spec = P(workers.axes) if batch_spec is None else batch_spec
    check_batch_spec(batch_spec, mesh, workers.axes)
    stateful = loss_fn if isinstance(loss_fn, StatefulLoss) else gradients.stateless(loss_fn)
    of_worker = gradients.local_gradients(stateful, workers.axes, accumulate)

    def step(state: TrainState, batch: Any, cut: Any) -> tuple[TrainState, dict[str, Any]]:
        merge: list[Callable[..., Any]] = []

        def worker(params: Any, model_state: Any, batch: Any, rng: Any, count: Any) -> Any:
            rng = gradients.fold(rng, count, wires.worker_index(workers.axes))
            before = jax.tree.map(lambda x: x[0], model_state)
            loss, aux, after, grads = of_worker(params, before, batch, rng)
            sits_out = ~jnp.isfinite(loss)
            after = jax.tree.map(partial(jnp.where, sits_out), before, after)
            means, own, rebuild = gradients.reduce_metrics(loss, aux, workers.axes)
            merge.append(rebuild)
            each = jax.tree.map(lambda x: x[None], workers.vary((grads, after, sits_out)))
            return *each, means, own

        own = P(workers.axes)
        in_specs = cut, own, batch_spec, P(), P()
        out_specs = stacked(cut, workers.axes), own, own, P(), own
        run = workers.map(worker, in_specs, out_specs, explicit=False)
        grads, model_state, sits_out, means, each = run(
            state.params, state.model_state, batch, state.rng, state.step
        )
        mine = on_mesh(tx, mesh, axis_name=axis_name, group_axis=group_axis, specs=cut)
        updates, opt_state = mine.update(grads, state.opt_state, state.params, abstain=sits_out)
        params = workers.hold(optax.apply_updates(state.params, updates), cut)
        new = TrainState(state.step + 1, params, model_state, opt_state, state.rng)
        return new, merge[-1](means, each)

    return TrainStep(step, workers, batch_spec, accumulate)


def _state_specs(tx: Any, workers: Workers, params: Any, cut: Any) -> Any:
    """A spec for each leaf of the optimizer state: over the workers' axes, where theirs differ."""
    found: list[Any] = []

    def spec(x: jax.Array) -> P:
        inner = jax.typeof(x).sharding.spec
        axes = tuple(n for n in workers.axes if n in varying_axes(x))
        return shortened(P(axes, *inner) if axes else inner)

    def probe(params: Any) -> jax.Array:
        found.append(jax.tree.map(spec, tx.init(workers.vary(params))))
        return jnp.zeros(())

    jax.eval_shape(workers.map(probe, (cut,), P(), explicit=True), params)
    return found[0]


def _on_all(x: Any, sharding: NamedSharding) -> jax.Array:
    """Puts an array on every device, those of other processes too; each must give the same."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # device_put knows keys in one process only
        data = _on_all(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if not sharding.is_fully_addressable and x.is_fully_addressable:
        return jax.device_put(np.asarray(x), sharding)
    return jax.device_put(x, sharding)


def _check_agreed(updates: Any, workers: Workers) -> None:
    if any(set(workers.axes) & varying_axes(u) for u in jax.tree.leaves(updates)):
        raise ValueError(
            "the optimizer's update differs between workers, so their parameters would drift apart: put "
            "a transform that communicates in the chain, such as lion_cub(..., axis_name="
            f"{workers.axis_name!r}), or wrap yours in global_gradients(tx, {workers.axis_name!r}); a "
            "group_axis must be given to both the optimizer and the training step"
        )
