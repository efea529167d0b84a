"""A training step on a mesh: each worker's own gradient, and one agreed update."""

from lioncub_jax.training.gradients import (
    StatefulLoss,
    from_nnx,
    local_value_and_grad,
    worker_value_and_grad,
)
from lioncub_jax.training.step import (
    TrainState,
    TrainStep,
    abstract_state,
    init_state,
    make_train_step,
    on_mesh,
)

__all__ = [
    "StatefulLoss",
    "TrainState",
    "TrainStep",
    "abstract_state",
    "from_nnx",
    "init_state",
    "local_value_and_grad",
    "make_train_step",
    "on_mesh",
    "worker_value_and_grad",
]
