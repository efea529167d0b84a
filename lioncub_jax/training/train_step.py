"""A training step on a mesh: local gradients, each worker's own state, one agreed update.

It is a plain step, written as for one device, that `map_step` maps over the workers. Each worker's own is
what `StepState` says; rows of several hosts are placed in front of it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from lioncub_jax.exchange.checks import check_count, refused_functions
from lioncub_jax.mesh import axes
from lioncub_jax.mesh.hosts import is_key
from lioncub_jax.mesh.placement import Workers, check_alive, check_devices, check_real
from lioncub_jax.mesh.specs import check_batch_spec
from lioncub_jax.training.arguments import Rows
from lioncub_jax.training.loss import Loss
from lioncub_jax.training.map_step import MappedStep
from lioncub_jax.training.state import StepState, check_state
from lioncub_jax.training.worker import (
    check_local_steps,
    make_difference,
    make_gradient,
    metrics_of_all,
)


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
        rows: Rows,
        check: Callable[[StepState], None],
    ):
        self.traces, self._step, self._workers = 0, step, workers
        self._rows, self._check_new, self._known = rows, check, set[Any]()
        self.compiled()

    def compiled(self, options: dict[str, Any] | None = None) -> "TrainStep":
        """Says how the step is compiled; returns it.

        Args:
          options: for XLA, as ``compiler_options`` of ``jax.jit``.
        """

        def train_step(state: StepState, batch: Any) -> Any:
            self.traces += 1
            return self._step(state, batch)

        self._mapped = MappedStep(
            train_step, self._workers, self._rows, donate="state", options=options
        )
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
        state, metrics = self._mapped(state, batch)
        return state, {"loss": metrics.pop("loss"), **metrics}  # jit has sorted them by name

    def lower(self, state: StepState, batch: Any) -> jax.stages.Lowered:
        """Lowers the step as ``jax.jit(...).lower``, to read its program. Shapes will do."""
        return self._mapped.lower(state, batch)

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
                "steps is a step of your own in lioncub_jax.map_step"
            )
        for path, x in jax.tree_util.tree_leaves_with_path(batch):
            _check_array(f"batch{jax.tree_util.keystr(path)}", x)
        structure = jax.tree.structure(state)
        if structure not in self._known:
            check_alive("state", state)
            check_devices(state, self._workers, "state")
            self._check_new(state)
            self._known.add(structure)


def _check_array(name: str, x: Any) -> None:
    """Raises ``TypeError`` for what is no array of numbers, such as a list's text or a tensor."""
    kinds = jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, int, float, complex
    dtype = getattr(x, "dtype", np.dtype(bool))
    is_number = jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_) or is_key(x)
    if not isinstance(x, kinds) or not is_number:
        of = f" of dtype {dtype}" if isinstance(x, kinds) else ""
        raise TypeError(
            f"{name} is {type(x).__module__}.{type(x).__qualname__}{of}: give an array of numbers, of "
            "tensors and columns of other libraries np.asarray(x)"
        )


def make_train_step(
    loss_fn: Loss,
    tx: optax.GradientTransformation,
    workers: Workers,
    *,
    batch_spec: P | None = None,
    accumulate: int = 1,
    local_steps: int = 1,
    local: optax.GradientTransformation | None = None,
) -> TrainStep:
    """Builds the jitted training step of workers on a mesh.

    Each worker takes the gradient of its part of the batch, and ``tx`` makes one update of all. With
    ``local`` each takes ``local_steps`` steps of its own, and hands ``tx`` its parameters before minus
    those after. A worker whose loss is not finite abstains.

    Args:
      loss_fn: ``(params, batch, rng) -> loss`` or ``(loss, aux)``; with a model state
        ``(params, model_state, batch, rng) -> (loss, aux, model_state)``. A mean over its part of the
        batch.
      tx: the optimizer of `init_state`. It is told the mean loss as ``value``.
      workers: a `Workers`.
      batch_spec: how the batch is cut, by default over the workers.
      accumulate: parts of a worker's batch, whose gradients are averaged before the exchange.
      local_steps: parts of a worker's batch, each for a step of its own.
      local: the optimizer of these steps; the one given to `init_state`.

    Returns:
      ``step(state, batch) -> (state, metrics)``, a `TrainStep`. In several processes a NumPy array is the
      rows of this one. ``metrics`` is a dict of ``"loss"`` and the entries of ``aux``: floating numbers
      are the mean over the workers, whole ones their sum, and arrays have a leading ``[workers]``.

    Raises:
      TypeError: for no `Workers`, or a loss that returns other values.
      ValueError: for numbers below 1, or ``local_steps`` without ``local``; when called, for a batch that
        does not divide, a state of another optimizer, or updates that differ between workers.

    Example:
      >>> import jax, jax.numpy as jnp, lioncub_jax as lc
      >>> workers = lc.Workers.one_per_device()
      >>> tx = lc.lion_cub(1e-3, workers=workers)
      >>> loss = lambda params, batch, rng: jnp.mean((batch @ params["w"]) ** 2)
      >>> state = lc.init_state(tx, {"w": jnp.ones((3, 1))}, workers)
      >>> step = lc.make_train_step(loss, tx, workers)
      >>> state, metrics = step(state, jnp.ones((8 * workers.num_gradients, 3)))
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
    tx = optax.with_extra_args_support(tx)
    gradient, refused = make_gradient(loss_fn, accumulate), refused_functions(tx)
    if local is not None:
        gradient = make_difference(gradient, local, local_steps)

    def step(state: StepState, batch: Any) -> tuple[StepState, dict[str, Any]]:
        rng = jax.random.fold_in(state.rng, state.step)
        rng = jax.random.fold_in(rng, axes.worker_index(workers.axes))
        before = state.model_state, state.local_state
        grads, after, (loss, aux) = gradient(state.params, before, batch, rng)
        abstains = ~jnp.isfinite(loss)
        if local is not None:
            abstains |= ~axes.all_finite(grads)
        model_state, local_state = jax.tree.map(partial(jnp.where, abstains), before, after)
        metrics = metrics_of_all(loss, aux, workers)
        told = {"value": metrics["loss"], "grad": grads, "diverged": abstains}
        updates, opt_state = tx.update(grads, state.opt_state, state.params, **told, **refused)
        after = StepState(
            step=optax.safe_increment(state.step),
            params=optax.apply_updates(state.params, updates),
            model_state=model_state,
            opt_state=opt_state,
            rng=state.rng,
            local_state=local_state,
        )
        return after, metrics

    rows = Rows("batch", batch_spec, local_steps, accumulate)
    return TrainStep(step, workers, rows, partial(check_state, tx, local, workers))
