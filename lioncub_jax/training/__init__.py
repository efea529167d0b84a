"""A training step on a mesh: each worker's own gradient, and one agreed update."""

from lioncub_jax.training.gradients import local_value_and_grad, worker_value_and_grad
from lioncub_jax.training.kinds import Kind
from lioncub_jax.training.map_step import MappedStep, map_step
from lioncub_jax.training.mapped import on_mesh
from lioncub_jax.training.modules import from_nnx
from lioncub_jax.training.overlap import overlap_options
from lioncub_jax.training.own import mean_over_workers, own, sum_over_workers
from lioncub_jax.training.state import StepState, abstract_state, init_state, own_state, place
from lioncub_jax.training.stats import Meter, for_evaluation, mean_model_state, metrics
from lioncub_jax.training.step import TrainStep, make_train_step

__all__ = [
    "Kind",
    "MappedStep",
    "Meter",
    "StepState",
    "TrainStep",
    "abstract_state",
    "for_evaluation",
    "from_nnx",
    "init_state",
    "local_value_and_grad",
    "make_train_step",
    "map_step",
    "mean_model_state",
    "mean_over_workers",
    "metrics",
    "on_mesh",
    "overlap_options",
    "own",
    "own_state",
    "place",
    "sum_over_workers",
    "worker_value_and_grad",
]
