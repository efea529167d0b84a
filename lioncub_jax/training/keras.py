"""Optimizers of optax in Keras's ``fit``, with the JAX backend; Keras is imported by this file alone."""

from collections.abc import Callable
from typing import Any

import jax
import keras
import optax

from lioncub_jax.mesh.placement import Workers
from lioncub_jax.training.map_step import map_step

_COUNTS = 2  # variables that Keras makes itself, of the iteration and of the learning rate


class _Kept(list[Any]):
    """Keras's own numbers; Keras passes the state of optax on with them, and does not look at it."""

    def __init__(self, counts: Any, state: Any):
        super().__init__(counts)
        self.state = state


@keras.saving.register_keras_serializable("lioncub_jax")  # type: ignore[untyped-decorator]
class OptaxOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """A Keras optimizer that holds the state of an optax transform as Keras variables.

    Its ``learning_rate``, 1 at first, multiplies the updates, for callbacks that change it; the rate is
    that of the transform.

    Args:
      tx: an optax transform, such as ``lioncub_jax.owner_adamw(1e-3, workers=workers)``.

    Raises:
      ValueError: for a backend of Keras other than JAX; when a saved model is loaded with its optimizer,
        which is made anew: ``load_model(path, compile=False)``, and `compile`.

    Example:
      >>> import keras, lioncub_jax as lc
      >>> from lioncub_jax.training.keras import OptaxOptimizer
      >>> workers = lc.Workers.one_per_device()
      >>> class Model(keras.Sequential):
      ...     def train_step(self, state, data):
      ...         return self.optimizer.mapped(super().train_step, workers)(state, data)
      >>> model = Model([keras.Input((4,)), keras.layers.Dense(1)])
      >>> model.compile(OptaxOptimizer(lc.owner_adamw(1e-3, workers=workers)), loss="mse")

    Source: this library.
    """

    def __init__(self, tx: optax.GradientTransformation):
        if keras.backend.backend() != "jax":
            raise ValueError(
                f"Keras runs on {keras.backend.backend()!r}, and optax on JAX: set KERAS_BACKEND=jax in "
                "the environment before keras is imported"
            )
        super().__init__(learning_rate=1.0, name="optax")
        self._tx_init, self._tx_update = tx.init, tx.update
        self._structure: Any = None

    def build(self, variables: Any) -> None:
        """Makes the variables of the state."""
        super().build(variables)
        leaves, self._structure = jax.tree.flatten(self._tx_init([v.value for v in variables]))
        for x in leaves:
            self.add_variable(x.shape, dtype=str(x.dtype), name="state").assign(x)

    def _kept(self, variables: Any) -> _Kept:
        state = jax.tree.unflatten(self._structure, variables[_COUNTS:])
        return _Kept(variables[:_COUNTS], state)

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> tuple[list[Any], Any]:
        """New values of the trainable variables and of the optimizer's, as Keras asks for."""
        inside = isinstance(optimizer_variables, _Kept)
        kept = optimizer_variables if inside else self._kept(optimizer_variables)
        iteration, rate = kept
        params = list(trainable_variables)
        updates, state = self._tx_update(list(grads), kept.state, params)
        params = optax.apply_updates(params, jax.tree.map(lambda u: u * rate, updates))
        counts = [iteration + 1, rate]
        return params, _Kept(counts, state) if inside else [*counts, *jax.tree.leaves(state)]

    def mapped(self, step: Callable[..., Any], workers: Workers) -> Callable[..., Any]:
        """Maps the ``train_step`` of a model of Keras over the workers.

        Variables that are not trained, those of metrics, and the logs are averaged over the workers.

        Args:
          step: ``step(state, data) -> (logs, state)``, as ``super().train_step``.
          workers: a `Workers`, those of the transform.

        Returns:
          A step like it, of all rows. Each worker gets its part of ``data``.

        Raises:
          ValueError: as `lioncub_jax.map_step`, when called.

        Example:
          See the class.
        """

        def on_worker(state: dict[str, Any], data: Any) -> Any:
            kept = _Kept(state["counts"], state["optimizer"])
            given = state["trained"], state["others"], kept, state["metrics"]
            logs, (trained, others, kept, metrics) = step(given, data)
            parts = {"counts": [*kept], "optimizer": kept.state}
            return logs, {"trained": trained, "others": others, "metrics": metrics, **parts}

        over_workers = map_step(on_worker, workers, averaged=("others", "metrics"))

        def train_step(state: Any, data: Any) -> Any:
            trained, others, variables, metrics = state
            kept = self._kept(variables)
            given = {"trained": trained, "others": others, "metrics": metrics}
            logs, new = over_workers(given | {"counts": [*kept], "optimizer": kept.state}, data)
            variables = [*new["counts"], *jax.tree.leaves(new["optimizer"])]
            return logs, (new["trained"], new["others"], variables, new["metrics"])

        return train_step

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "OptaxOptimizer":
        """Raises: a file of Keras cannot hold a transform of optax."""
        raise ValueError(
            "a saved model does not hold its transform of optax: keras.models.load_model(path, "
            "compile=False), then model.compile(OptaxOptimizer(tx), ...)"
        )
