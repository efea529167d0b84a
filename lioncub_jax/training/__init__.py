"""A training step on a mesh: each worker's own gradient, and one agreed update."""

from typing import Any

from lioncub_jax.training.loss import local_value_and_grad
from lioncub_jax.training.map_step import MappedStep, map_step
from lioncub_jax.training.modules import from_nnx
from lioncub_jax.training.own import mean_over_workers, own, sum_over_workers
from lioncub_jax.training.state import StepState, abstract_state, init_state
from lioncub_jax.training.stats import Meter, mean_model_state, metrics
from lioncub_jax.training.train_step import TrainStep, make_train_step

__all__ = [
    "MappedStep",
    "Meter",
    "StepState",
    "TrainStep",
    "abstract_state",
    "from_nnx",
    "init_state",
    "local_value_and_grad",
    "make_train_step",
    "map_step",
    "mean_model_state",
    "mean_over_workers",
    "metrics",
    "own",
    "sum_over_workers",
]

# Names of 0.4 that are gone, and what to write in their place.
GONE = {
    "Kind": "in map_step(step, workers, rows=...) rows are the arguments that it names, numbers and all "
    "other arrays go whole to each worker, and training.own(x, workers) is each worker's own",
    "for_evaluation": "map_step averages batch statistics in each step, so evaluate the model as it is; a "
    "StepState's by nnx.update(model, state.params, training.mean_model_state(state))",
    "on_mesh": "map the whole step, map_step(step, workers), and give the optimizer the Workers: its init "
    "makes the state of all of them",
    "overlap_options": "give the compiler the options of docs/reports/accelerators.md, "
    "make_train_step(...).compiled({...})",
    "own_state": "map_step averages statistics; what is each worker's own goes in a box, "
    "training.own(x, workers)",
    "place": "map_step takes the module as it is, and averages its statistics; parameters go to "
    "jax.device_put(params, workers.shardings(mesh.specs_of(params)))",
    "worker_value_and_grad": "take jax.value_and_grad in a step, and map that, map_step(step, workers); in "
    "a shard_map or pmap of your own local_value_and_grad",
}


def __getattr__(name: str) -> Any:
    if name in GONE:
        raise AttributeError(f"lioncub_jax 0.5 has no {name}: {GONE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
