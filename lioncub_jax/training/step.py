"""A training step on a mesh: local gradients, each worker's own state, one agreed update.

What differs between workers is known from types and never guessed: inside ``shard_map`` parameters are
cast to *varying* over the worker axes, so gradients are local. Which state is each worker's own is
declared, see `holders`. Outside, such state has a leading ``[workers]`` axis sharded over the mesh;
everything else is the same on all workers. Over the inner axes of a mesh arrays are cut as the parameters
are.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange.arguments import check_count
from lioncub_jax.exchange.holder import Holder
from lioncub_jax.mesh import axes
from lioncub_jax.mesh.hosts import Batches, Waits, check_same_program, check_same_scalars, together
from lioncub_jax.mesh.placement import (
    Workers,
    check_alive,
    check_devices,
    check_real,
)
from lioncub_jax.mesh.specs import check_batch_spec, spec_of, stacked
from lioncub_jax.training import kinds
from lioncub_jax.training.kinds import Kind, Kinds, Loss
from lioncub_jax.training.loss import check_closure
from lioncub_jax.training.mapped import MappedUpdate, check_layout
from lioncub_jax.training.worker import (
    check_local_steps,
    join_results,
    make_difference,
    make_gradient,
    per_worker_state,
    reduce_results,
)


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


class TrainStep:
    """A compiled training step; see `make_train_step`.

    Attributes:
      traces: how often the step was traced; more than once means that shapes or types changed.

    Source: this library; see `make_train_step` for an example.
    """

    def __init__(
        self, step: Callable[..., Any], workers: Workers, batches: Batches, in_kinds: Kinds
    ):
        self.traces, self._step, self._workers, self._calls = 0, step, workers, 0
        self._batches, self._in_kinds = batches, in_kinds
        self._bounded = workers.mesh.devices.flat[0].platform == "cpu"
        self._in_flight: deque[jax.Array] = deque(maxlen=8)
        self._waits: Waits | None = None
        self.compiled()

    def compiled(self, options: dict[str, Any] | None = None) -> "TrainStep":
        """Says how the step is compiled; returns it.

        Args:
          options: for XLA, as ``compiler_options`` of ``jax.jit``, such as those of `overlap_options`.
        """

        def traced(state: StepState, batch: Any, static: tuple[Any, ...]) -> Any:
            self.traces += 1
            return self._step(state, batch, *static)

        self._jitted = jax.jit(traced, donate_argnums=0, static_argnums=2, compiler_options=options)
        return self

    def __call__(self, state: StepState, batch: Any) -> tuple[StepState, dict[str, Any]]:
        """Runs one step; the arrays of ``state`` are donated and must not be used again.

        Raises:
          TypeError: inside ``jit``, ``scan``, ``vmap`` or ``grad``, and for a batch of what is no array.
          ValueError: for a batch that does not divide or whose leaves have unlike rows, rows of processes
            that do not fit, a state that an earlier step was given or that lies on another mesh, and
            processes whose steps differ, in the first call, or whose numbers do, in calls 1, 2, 4 and so on
            to 128, and in each 128th.
        """
        self._check(state, batch)
        if self._batches.shared:
            leaves = kinds.classify_batch(batch, self._in_kinds)
            self._batches.check([(x.name, x.array, x.kind is Kind.SPLIT) for x in leaves])
        arguments = self._arguments(state, batch)
        if not self._in_flight and self._batches.shared:
            traced = together("the step was not traced", partial(self._jitted.lower, *arguments))
            check_same_program(traced, {"state": state, "batch": arguments[1]})
            self._waits = Waits()
        elif self._batches.shared:
            check_same_scalars(self._calls, {"state": state, "batch": arguments[1]})
        self._calls += 1
        state, metrics = self._jitted(*arguments)
        # XLA's CPU collectives deadlock where dozens of steps are in flight; eight cost nothing.
        self._in_flight.append(metrics["loss"])
        if self._waits:
            self._waits.latest = metrics["loss"]
        if self._bounded and len(self._in_flight) == self._in_flight.maxlen:
            self._in_flight[0].block_until_ready()
        return state, {"loss": metrics.pop("loss"), **metrics}  # jit has sorted them by name

    def _check(self, state: StepState, batch: Any) -> None:
        """Raises for a state or a call that JAX would refuse in words of its own, or not at all."""
        if not isinstance(state, StepState):
            raise TypeError(
                f"the state is a {type(state).__name__}, and the StepState of init_state is wanted: "
                "state, metrics = step(state, batch); of parts that were saved, state._replace(params=...)"
            )
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((state.step, batch))):
            raise TypeError(
                "a TrainStep is called inside jit, scan, vmap or grad, and it compiles itself: call it as "
                "it is, in a loop of Python, and read it by step.lower(state, batch). A program of several "
                "steps is written with worker_value_and_grad and on_mesh"
            )
        check_alive("state", state)
        if not self._in_flight:  # the first
            check_devices(self._workers, state=state)

    def lower(self, state: StepState, batch: Any) -> jax.stages.Lowered:
        """Lowers the step as ``jax.jit(...).lower``, to read its program. Shapes will do."""
        return self._jitted.lower(*self._arguments(state, batch))

    def _arguments(self, state: StepState, batch: Any) -> tuple[StepState, Any, Any]:
        """The state, the batch on the mesh, and what a step is compiled for.

        That is the kinds of the leaves of the batch, and the specs of the parameters.
        """
        placed, rows = [], []
        leaves = kinds.classify_batch(batch, self._in_kinds)
        for name, x, kind, entry in leaves:
            count = None
            if kind is Kind.SPLIT:
                count = self._batches.rows_of_all(name, x)
                rows.append((name, count, entry))
            placed.append(self._batches.place(x, count))
        kinds.check_rows(rows)
        batch = jax.tree.unflatten(jax.tree.structure(batch), placed)
        specs = tuple(map(spec_of, jax.tree.leaves(state.params)))
        return state, batch, (tuple([leaf.kind for leaf in leaves]), specs)


def make_train_step(
    loss_fn: Loss,
    tx: optax.GradientTransformation,
    workers: Workers,
    *,
    batch_spec: P | None = None,
    in_kinds: Kinds = None,
    accumulate: int = 1,
    local_steps: int = 1,
    local: optax.GradientTransformation | None = None,
) -> TrainStep:
    """Builds the jitted training step of workers on a mesh.

    Each worker takes the gradient of its part of the batch, ``tx`` turns the local gradients into one
    agreed update, and every worker applies it. A worker whose loss is not finite abstains and
    keeps its model state (under `global_gradients` none can: a mean takes in everything). Inside a
    worker the compiler shards the model over the inner axes, as the parameters lie.

    With ``local`` each worker first takes ``local_steps`` steps of its own from the common parameters, and
    hands ``tx`` its parameters before minus those after in place of a gradient, once in a call: so
    ``global_gradients(optax.sgd(1.0), workers=...)`` is averaging of models, and ``baselines.diloco(...)``
    is DiLoCo. A worker whose loss or difference is not finite keeps its local state too.

    Args:
      loss_fn: ``(params, batch, rng) -> loss`` or ``(loss, aux)``; where `init_state` was given a model
        state, ``(params, model_state, batch, rng) -> (loss, aux, model_state)``, such as `from_nnx`
        returns. The loss is the mean over its part of the batch.
      tx: the optimizer; the one given to `init_state`. Transforms that ask for the ``value`` of the loss,
        such as ``optax.contrib.reduce_on_plateau``, get that of the metrics: the mean over the workers and
        over the parts of ``accumulate``, not finite if that of one worker is not. A transform that takes
        ``diverged`` gets this worker's flag, ``bool[]``: its loss is not finite, and it should abstain.
      workers: a `Workers`, on a mesh with Auto or Explicit axes.
      batch_spec: how the batch is cut, such as ``P(("data", "fsdp"))``; by default over the workers (and
        the group) only. The workers' axes come first in its first entry.
      in_kinds: what the leaves of a batch are to the workers, a tree like it or of its parts: by default
        arrays are ``Kind.SPLIT`` (cut along the first dimension over the workers) and numbers
        ``Kind.SHARED`` (whole to each worker), which arrays such as class weights must be given:
        ``{"x": Kind.SPLIT, "weights": Kind.SHARED}``. Of a random key see `worker_value_and_grad`.
      accumulate: parts into which a worker cuts its batch; their gradients are averaged, in float32 at
        least, before the exchange.
      local_steps: into how many parts a worker cuts its batch first, each for a step of its own.
      local: the optimizer of these steps, any optax transform in which workers do not talk; the one
        given to `init_state`. Its state is each worker's own and stays from call to call, so schedules in
        it count local steps. In two levels there is none.

    Returns:
      ``step(state, batch) -> (state, metrics)``, a `TrainStep`, whose ``compiled`` takes options for
      XLA. The batch is a tree of arrays whose first dimension is a multiple of what
      ``batch_spec`` cuts it into, times ``local_steps`` and ``accumulate``.
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
      TypeError: for no `Workers`, a loss that cannot be called, or a ``local`` that is no transform; when
        called, for a loss that returns other values.
      ValueError: for ``accumulate`` or ``local_steps`` below 1, ``local_steps``
        without ``local``, a ``local`` in which workers talk, a ``tx`` that calls the loss itself, or a loss
        that closes over an array on the mesh; when
        called, for a batch that does not divide, rows of processes that do not fit, a state that was given
        to an earlier step or is another optimizer's, or an optimizer whose update differs between workers.

    Example:
      >>> import jax, jax.numpy as jnp, lioncub_jax as lc
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> workers = lc.Workers(mesh, "data")
      >>> tx = lc.lion_cub(1e-3, workers=workers)
      >>> loss = lambda params, batch, rng: jnp.mean((batch @ params["w"]) ** 2)
      >>> state = lc.init_state(tx, {"w": jnp.ones((3, 1))}, workers)
      >>> step = lc.make_train_step(loss, tx, workers)
      >>> state, metrics = step(state, jnp.ones((8, 3)))
      >>> float(metrics["loss"])
      9.0

    Source: this library.
    """
    check_real(workers)
    check_count(f"accumulate={accumulate!r}", accumulate)
    check_local_steps(local, local_steps, workers)
    batch_spec = P(workers.axes) if batch_spec is None else batch_spec
    check_batch_spec(batch_spec, workers.mesh, workers.axes)
    if not callable(loss_fn):
        raise TypeError(
            f"the loss is {loss_fn!r}: give a function (params, batch, rng) -> loss, or with a model state "
            "(params, model_state, batch, rng) -> (loss, aux, model_state); from_nnx returns one as the "
            "first of three"
        )
    check_closure(loss_fn, workers)
    mapped = MappedUpdate(optax.with_extra_args_support(tx), workers)
    local_states = MappedUpdate(per_worker_state(local, workers), workers)

    def worker(
        leaf_kinds: Sequence[Kind],
        params: optax.Params,
        states: optax.OptState,
        batch: Any,
        rng: jax.Array,
        count: jax.Array,
    ) -> Any:
        rows, join = kinds.split_batch(batch, leaf_kinds, workers)
        gradient = make_gradient(loss_fn, accumulate, join)
        if local is not None:
            gradient = make_difference(gradient, local, local_steps)
        rng = jax.random.fold_in(jax.random.fold_in(rng, count), axes.worker_index(workers.axes))
        before = jax.tree.map(lambda x: x[0], states)
        grads, after, (loss, aux) = gradient(params, before, rows, rng)
        abstains = ~jnp.isfinite(loss)
        if local is not None:
            abstains |= ~axes.all_finite(grads)
        after = jax.tree.map(partial(jnp.where, abstains), before, after)
        stacked_here = jax.tree.map(lambda x: x[None], (grads, after, abstains))
        return *stacked_here, *_metrics(loss, aux, workers)

    def step(
        state: StepState, batch: Any, leaf_kinds: Sequence[Kind], specs: Sequence[P]
    ) -> tuple[StepState, dict[str, Any]]:
        given = jax.tree.unflatten(jax.tree.structure(state.params), specs)
        param_specs, one_each = workers.param_specs(state.params, given), P(workers.axes)
        local_specs = () if local is None else local_states.layout(state.params, param_specs).specs
        check_layout(state.local_state, local_specs, workers, name="local_state")
        states, state_specs = (state.model_state, state.local_state), (one_each, local_specs)
        leaf_specs = [batch_spec if kind is Kind.SPLIT else P() for kind in leaf_kinds]
        batch_specs = jax.tree.unflatten(jax.tree.structure(batch), leaf_specs)
        in_specs = param_specs, state_specs, batch_specs, P(), P()
        grad_specs = stacked(param_specs, workers.axes)
        out_specs = grad_specs, state_specs, one_each, one_each, P(), P()
        run = workers.map(partial(worker, leaf_kinds), in_specs, out_specs, typed=False)
        grads, states, abstains, *metrics = run(state.params, states, batch, state.rng, state.step)
        outputs = join_results(*metrics)
        updates, opt_state = mapped.update(
            param_specs, grads, state.opt_state, state.params,
            per_worker={"diverged": abstains}, extra={"value": outputs["loss"]},
        )  # fmt: skip
        params = optax.apply_updates(state.params, updates)
        after = state._replace(
            step=optax.safe_increment(state.step),
            params=workers.constrain(params, param_specs),
            model_state=states[0],
            opt_state=opt_state,
            local_state=states[1],
        )
        return after, outputs

    batches = Batches(workers, batch_spec, local_steps, accumulate)
    return TrainStep(step, workers, batches, in_kinds)


def _metrics(loss: jax.Array, aux: Any, workers: Workers) -> Any:
    """The loss and what is in ``aux`` by name, as `reduce_results`, arrays of each worker."""
    named = aux if isinstance(aux, dict) else {"aux": aux}
    if "loss" in named:
        raise ValueError("the aux dict has a key 'loss', which is taken; give it another name")
    metrics = {"loss": loss, **named}
    each = [Kind.PER_WORKER if jnp.ndim(x) else Kind.SHARED for x in jax.tree.leaves(metrics)]
    return reduce_results(metrics, each, workers.axes)
