"""A training step on a mesh: each worker's own gradient, and one agreed update."""

from lioncub_jax.training.gradients import local_value_and_grad, worker_value_and_grad
from lioncub_jax.training.kinds import Kind, batch, folded, own, same
from lioncub_jax.training.modules import StatefulLoss, from_nnx
from lioncub_jax.training.overlap import overlap_options
from lioncub_jax.training.state import abstract_state, init_state, own_state
from lioncub_jax.training.stats import (
    DriftStats,
    VoteStats,
    drift_stats,
    mean_model_state,
    vote_stats,
)
from lioncub_jax.training.step import TrainState, TrainStep, make_train_step, on_mesh

__all__ = [
    "DriftStats",
    "Kind",
    "StatefulLoss",
    "TrainState",
    "TrainStep",
    "VoteStats",
    "abstract_state",
    "batch",
    "drift_stats",
    "folded",
    "from_nnx",
    "init_state",
    "local_value_and_grad",
    "make_train_step",
    "mean_model_state",
    "on_mesh",
    "overlap_options",
    "own",
    "own_state",
    "same",
    "vote_stats",
    "worker_value_and_grad",
]
