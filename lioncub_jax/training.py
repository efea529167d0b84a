"""A training step on a mesh: local gradients, each worker's own state, one agreed update.

What differs between workers is told by types and never guessed: inside ``shard_map`` parameters are
cast to *varying* over the worker axis (the one cast of the library), so gradients are local, and state
that a transform makes from them is each worker's own. Outside, such state has a leading ``[workers]``
axis sharded over the mesh axis; everything else is replicated.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lioncub_jax import checks, wires
from lioncub_jax.layout import varying_axes
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


class StatefulLoss(NamedTuple):
    """A loss of a model with state of its own.

    Attributes:
      fn: ``(params, model_state, batch, rng) -> (loss, aux, model_state)``.

    Example:
      A flax linen model with batch statistics:

      >>> import lioncub_jax as lc
      >>> def fn(params, model_state, batch, rng):
      ...     variables = {"params": params, **model_state}
      ...     out, new = model.apply(variables, batch, mutable=["batch_stats"], rngs={"dropout": rng})
      ...     return (out**2).mean(), {}, new
      >>> loss = lc.StatefulLoss(fn)
    """

    fn: Callable[[Any, Any, Any, jax.Array], tuple[jax.Array, Any, Any]]


def local_value_and_grad(
    loss_fn: Callable[..., Any], axis_name: AxisName, has_aux: bool = False
) -> Callable[..., Any]:
    """Like ``jax.value_and_grad`` for the first argument, with each worker's own gradient.

    ``jax.grad`` with respect to replicated parameters inside ``shard_map`` returns the gradient
    already summed over the workers in full precision. Casting the parameters to varying first keeps
    it local.

    Args:
      loss_fn: ``(params, ...) -> loss`` or, with ``has_aux``, ``(loss, aux)``.
      axis_name: mesh axis of the workers.
      has_aux: as in ``jax.value_and_grad``.

    Returns:
      A function with the arguments of ``loss_fn`` that returns ``(value, grads)``; both vary over
      ``axis_name``. For use where the axis is bound.

    Example:
      >>> import jax.numpy as jnp, lioncub_jax as lc
      >>> grad_fn = lc.local_value_and_grad(lambda w, x: jnp.sum(w * x), "data")
    """
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=has_aux)

    def local(params: Any, *args: Any, **kwargs: Any) -> Any:
        return value_and_grad(wires.varying(params, axis_name), *args, **kwargs)

    return local


def from_nnx(
    model: nnx.Module, loss_fn: Callable[[Any, Any], Any]
) -> tuple[StatefulLoss, Any, Any]:
    """Splits a flax nnx model for ``init_state`` and ``make_train_step``.

    Args:
      model: any ``nnx.Module``. Its ``nnx.Param`` are trained; everything else (batch statistics,
        random streams) becomes each worker's own model state.
      loss_fn: ``(model, batch) -> loss`` or ``(loss, aux)``.

    Returns:
      ``(loss, params, model_state)``. ``nnx.update(model, state.params)`` puts trained parameters back.

    Example:
      >>> from flax import nnx
      >>> import lioncub_jax as lc
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> loss, params, model_state = lc.from_nnx(model, lambda m, x: (m(x) ** 2).mean())
    """
    graph, params, rest = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]

    def fn(params: Any, model_state: Any, batch: Any, rng: jax.Array) -> tuple[Any, Any, Any]:
        del rng  # the model holds its own random streams
        # nnx lets a variable be written only at the trace level where it was made.
        own = jax.tree.map(lambda x: x, model_state)
        replica = nnx.merge(graph, params, own)
        loss, aux = _with_aux(loss_fn(replica, batch))
        _, _, model_state = nnx.split(replica, nnx.Param, ...)  # type: ignore[misc]
        return loss, aux, model_state

    return StatefulLoss(fn), params, rest


def init_state(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: Mesh,
    *,
    axis_name: AxisName,
    model_state: Any = (),
    rng: jax.Array | None = None,
) -> TrainState:
    """Places parameters, model state and optimizer state on the mesh.

    Args:
      tx: any optax transform, with or without transforms of this library in it.
      params: tree of floating arrays.
      mesh: the devices.
      axis_name: mesh axis of the workers.
      model_state: see ``TrainState``; every worker gets a copy, with random keys of its own.
      rng: a typed key, ``jax.random.key(seed)``; seed 0 by default.

    Returns:
      A ``TrainState``.

    Raises:
      ValueError: if the mesh has no axis ``axis_name``.

    Example:
      >>> import jax, jax.numpy as jnp, lioncub_jax as lc
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> tx = lc.lion_cub(1e-3, axis_name="data")
      >>> state = lc.init_state(tx, {"w": jnp.ones((2, 3))}, mesh, axis_name="data")
      >>> state.opt_state[0].mu["w"].shape
      (1, 2, 3)
    """
    _check_mesh(mesh, axis_name)
    replicated = NamedSharding(mesh, P())
    rng = jax.random.key(0) if rng is None else rng
    params, rng, model_state = jax.tree.map(
        lambda x: _on_all(x, replicated), (params, rng, model_state)
    )
    # A copy, because the training step donates its state and the caller may still hold the arrays.
    params, rng = jax.tree.map(jnp.copy, (params, rng))
    specs = _opt_specs(tx, params, mesh, axis_name)

    def place(params: Any, model_state: Any) -> tuple[Any, Any]:
        opt_state = tx.init(wires.varying(params, axis_name))
        own = jax.tree.map(lambda x: _own_key(wires.varying(x, axis_name), axis_name), model_state)
        return _stack(opt_state, specs), jax.tree.map(lambda x: x[None], own)

    placed = jax.shard_map(
        place,
        mesh=mesh,
        in_specs=(P(), P()),
        out_specs=(specs, P(axis_name)),
        axis_names={axis_name},
    )
    opt_state, model_state = jax.jit(placed)(params, model_state)
    step = jax.device_put(jnp.zeros((), jnp.int32), replicated)
    return TrainState(step, params, model_state, opt_state, rng)


class TrainStep:
    """A compiled training step; see ``make_train_step``.

    Attributes:
      traces: how often the step was traced; more than once means that shapes or types changed.
    """

    def __init__(self, step: Callable[..., Any], mesh: Mesh, axis_name: AxisName, parts: int):
        def traced(state: TrainState, batch: Any) -> Any:
            self.traces += 1
            return step(state, batch)

        self.traces = 0
        self._jitted = jax.jit(traced, donate_argnums=0)
        self._sharding = NamedSharding(mesh, P(axis_name))
        self._parts = parts
        self._bounded = mesh.devices.flat[0].platform == "cpu"
        self._in_flight: deque[jax.Array] = deque(maxlen=8)
        self._workers = mesh.shape[axis_name]

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Runs one step; the arrays of ``state`` are donated and must not be used again."""
        state, metrics = self._jitted(state, self._place(batch))
        # XLA's CPU collectives deadlock where dozens of steps are in flight; eight cost nothing.
        self._in_flight.append(metrics["loss"])
        if self._bounded and len(self._in_flight) == self._in_flight.maxlen:
            self._in_flight[0].block_until_ready()
        return state, metrics

    def lower(self, state: TrainState, batch: Any) -> jax.stages.Lowered:
        """As ``jax.jit(...).lower``: for reading the compiled program."""
        return self._jitted.lower(state, self._place(batch))

    def _place(self, batch: Any) -> Any:
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            rows = jnp.shape(leaf)[0] if jnp.ndim(leaf) else 0
            if rows == 0 or rows % self._parts:
                raise ValueError(
                    f"batch{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}: its first dimension "
                    f"must be a positive multiple of {self._parts} ({self._workers} workers, "
                    f"{self._parts // self._workers} gradient accumulation steps)"
                )
        return jax.device_put(batch, self._sharding)


def make_train_step(
    loss_fn: Callable[..., Any] | StatefulLoss,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis_name: AxisName,
    accumulate: int = 1,
) -> TrainStep:
    """Builds the jitted training step of data-parallel workers.

    Each worker takes the gradient of its part of the batch, ``tx`` turns the local gradients into one
    agreed update, and every worker applies it. A worker whose loss is not finite sits the step out and
    keeps its model state (under `global_gradients` nobody can: a mean takes in everything).

    Args:
      loss_fn: ``(params, batch, rng) -> loss`` or ``(loss, aux)``, for plain trees and flax linen; or
        a ``StatefulLoss``, such as `from_nnx` returns. The loss is the mean over its part of the batch.
      tx: the optimizer; the one given to `init_state`.
      mesh: the devices.
      axis_name: mesh axis of the workers.
      accumulate: parts into which a worker cuts its batch; their gradients are averaged before the
        exchange.

    Returns:
      ``step(state, batch) -> (state, metrics)``. The batch is a tree of arrays whose first dimension is
      a multiple of ``workers * accumulate``. ``metrics["loss"]`` is ``float32[]``, the mean over the
      workers, and not finite if one of them is; so is every floating scalar of an ``aux`` dict; anything
      else in it comes back as it is with a leading ``[workers]`` axis, ``[workers, accumulate]`` if the
      batch is cut. An ``aux`` that is no dict comes back as ``metrics["aux"]``.

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
    _check_mesh(mesh, axis_name)
    checks.check_count(f"accumulate={accumulate!r}", accumulate)
    stateful = loss_fn if isinstance(loss_fn, StatefulLoss) else _stateless(loss_fn)
    tx = optax.with_extra_args_support(tx)
    gradients = _local_gradients(stateful, axis_name, accumulate)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        opt_specs = _opt_specs(tx, state.params, mesh, axis_name)
        as_specs: Any = TrainState  # the same shape, with a spec for each part
        specs = as_specs(P(), P(), P(axis_name), opt_specs, P())
        merge: list[Callable[..., Any]] = []

        def worker(state: TrainState, batch: Any) -> Any:
            rng = _fold(state.rng, state.step, wires.worker_index(axis_name))
            before = jax.tree.map(lambda x: x[0], state.model_state)
            loss, aux, model_state, grads = gradients(state.params, before, batch, rng)
            sits_out = ~jnp.isfinite(loss)
            keep_old = partial(jnp.where, sits_out)
            model_state = jax.tree.map(keep_old, before, model_state)
            updates, opt_state = tx.update(
                grads, _unstack(state.opt_state, specs.opt_state), state.params,
                abstain=sits_out,
            )  # fmt: skip
            _check_agreed(updates, axis_name)
            params = optax.apply_updates(state.params, updates)
            means, own, rebuild = _reduce_metrics(loss, aux, axis_name)
            merge.append(rebuild)
            model_state = jax.tree.map(lambda x: wires.varying(x, axis_name)[None], model_state)
            opt_state = _stack(opt_state, specs.opt_state)
            new = TrainState(state.step + 1, params, model_state, opt_state, state.rng)
            return new, means, own

        run = jax.shard_map(
            worker, mesh=mesh, in_specs=(specs, P(axis_name)), out_specs=(specs, P(), P(axis_name)),
            axis_names={axis_name},
        )  # fmt: skip
        state, means, own = run(state, batch)
        return state, merge[-1](means, own)

    return TrainStep(step, mesh, axis_name, mesh.shape[axis_name] * accumulate)


def _local_gradients(stateful: StatefulLoss, axis: AxisName, accumulate: int) -> Callable[..., Any]:
    """``(params, model_state, batch, rng) -> (loss, aux, model_state, grads)`` of one worker."""

    def loss_of(params: Any, model_state: Any, batch: Any, rng: jax.Array) -> Any:
        loss, aux, model_state = stateful.fn(params, model_state, batch, rng)
        return loss, (aux, model_state)

    value_and_grad = local_value_and_grad(loss_of, axis, has_aux=True)

    def once(params: Any, model_state: Any, batch: Any, rng: jax.Array) -> Any:
        (loss, (aux, model_state)), grads = value_and_grad(params, model_state, batch, rng)
        return loss, aux, model_state, grads

    def in_parts(params: Any, model_state: Any, batch: Any, rng: jax.Array) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch)

        def add(carry: Any, part: Any) -> Any:
            total, model_state = carry
            index, batch = part
            loss, aux, model_state, grads = once(params, model_state, batch, _fold(rng, index))
            total = jax.tree.map(jnp.add, total, grads)
            return (total, wires.varying(model_state, axis)), (loss, aux)

        zeros = jax.tree.map(jnp.zeros_like, wires.varying(params, axis))
        carry = (zeros, wires.varying(model_state, axis))
        (total, model_state), (losses, auxes) = lax.scan(
            add, carry, (jnp.arange(accumulate), parts)
        )
        grads = jax.tree.map(lambda g: g / accumulate, total)
        aux = jax.tree.map(lambda x: jnp.mean(x) if _is_mean(x[0]) else x, auxes)
        return jnp.mean(losses), aux, model_state, grads

    return once if accumulate == 1 else in_parts


def _stateless(loss_fn: Callable[..., Any]) -> StatefulLoss:
    def fn(params: Any, model_state: Any, batch: Any, rng: jax.Array) -> tuple[Any, Any, Any]:
        loss, aux = _with_aux(loss_fn(params, batch, rng))
        return loss, aux, model_state

    return StatefulLoss(fn)


def _with_aux(out: Any) -> tuple[Any, Any]:
    return out if isinstance(out, tuple) else (out, {})


def _is_mean(x: jax.Array) -> bool:
    """Floating scalars are averaged over workers and parts; anything else is handed through."""
    return jnp.ndim(x) == 0 and jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)


def _reduce_metrics(
    loss: jax.Array, aux: Any, axis: AxisName
) -> tuple[list[jax.Array], list[jax.Array], Callable[..., dict[str, Any]]]:
    """All scalars in one all-reduce; the rest stacked; and how to put them together again."""
    named = {**aux} if isinstance(aux, dict) else {"aux": aux}
    if "loss" in named:
        raise ValueError("the aux dict has a key 'loss', which is taken; give it another name")
    leaves, tree = jax.tree.flatten({"loss": loss, **named})
    leaves = wires.varying([jnp.asarray(x) for x in leaves], axis)
    averaged = [_is_mean(x) for x in leaves]
    means = wires.mean_over_workers([x for x, m in zip(leaves, averaged, strict=True) if m], axis)
    own = [x[None] for x, m in zip(leaves, averaged, strict=True) if not m]

    def rebuild(means: list[jax.Array], own: list[jax.Array]) -> dict[str, Any]:
        left, right = iter(means), iter(own)
        return jax.tree.unflatten(tree, [next(left) if m else next(right) for m in averaged])

    return means, own, rebuild


def _opt_specs(tx: optax.GradientTransformation, params: Any, mesh: Mesh, axis: AxisName) -> Any:
    """A spec for each leaf of the optimizer state: ``P(axis)`` where the workers' differ, else ``P()``."""
    found: list[Any] = []

    def probe(params: Any) -> jax.Array:
        state = tx.init(wires.varying(params, axis))
        found.append(jax.tree.map(lambda x: P(axis) if axis in varying_axes(x) else P(), state))
        return jnp.zeros(())

    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.asarray(x).dtype), params
    )
    run = jax.shard_map(probe, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={axis})
    jax.eval_shape(run, shapes)
    return found[0]


def _on_all(x: Any, replicated: NamedSharding) -> jax.Array:
    """Puts an array on every device, those of other processes too; each must give the same."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # device_put knows keys in one process only
        data = _on_all(jax.random.key_data(x), replicated)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if not replicated.is_fully_addressable and x.is_fully_addressable:
        return jax.device_put(np.asarray(x), replicated)
    return jax.device_put(x, replicated)


def _stack(tree: Any, specs: Any) -> Any:
    return jax.tree.map(lambda x, spec: x[None] if len(spec) else x, tree, specs)


def _unstack(tree: Any, specs: Any) -> Any:
    return jax.tree.map(lambda x, spec: x[0] if len(spec) else x, tree, specs)


def _fold(key: jax.Array, *parts: jax.Array) -> jax.Array:
    for part in parts:
        key = jax.random.fold_in(key, part)
    return key


def _own_key(x: jax.Array, axis: AxisName) -> jax.Array:
    """Gives each worker random keys of its own, and leaves anything else alone."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    worker = wires.worker_index(axis)
    return jax.vmap(lambda k: jax.random.fold_in(k, worker))(x.reshape(-1)).reshape(x.shape)


def _check_agreed(updates: Any, axis: AxisName) -> None:
    if any(axis in varying_axes(u) for u in jax.tree.leaves(updates)):
        raise ValueError(
            "the optimizer's update differs between workers, so their parameters would drift apart: put "
            "a transform that communicates in the chain, such as lion_cub(..., axis_name="
            f"{axis!r}), or wrap yours in global_gradients(tx, {axis!r})"
        )


def _check_mesh(mesh: Mesh, axis: AxisName) -> None:
    if axis not in mesh.axis_names:
        raise ValueError(f"the mesh has axes {mesh.axis_names}; axis_name={axis!r} is none of them")
