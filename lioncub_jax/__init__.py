"""Data-parallel Lion whose workers exchange votes of about one bit per parameter."""

from lioncub_jax import (
    baselines,
    checkpoint,
    decide,
    lab,
    mesh,
    momentum,
    planner,
    quantize,
    reference,
    sync,
    traffic,
    training,
    wires,
)
from lioncub_jax.checkpoint import Checkpoints, Restored, stop_on_sigterm
from lioncub_jax.exchange import VoteStats, communicate, vote_stats
from lioncub_jax.optimizer import distributed_lion, global_gradients, lion_cub, owner_lion
from lioncub_jax.sync import sync_momentum
from lioncub_jax.training import (
    StatefulLoss,
    TrainState,
    TrainStep,
    abstract_state,
    from_nnx,
    init_state,
    local_value_and_grad,
    make_train_step,
    on_mesh,
    worker_value_and_grad,
)

__all__ = [
    "Checkpoints",
    "Restored",
    "StatefulLoss",
    "TrainState",
    "TrainStep",
    "VoteStats",
    "abstract_state",
    "baselines",
    "checkpoint",
    "communicate",
    "decide",
    "distributed_lion",
    "from_nnx",
    "global_gradients",
    "init_state",
    "lab",
    "lion_cub",
    "local_value_and_grad",
    "make_train_step",
    "mesh",
    "momentum",
    "on_mesh",
    "owner_lion",
    "planner",
    "quantize",
    "reference",
    "stop_on_sigterm",
    "sync",
    "sync_momentum",
    "traffic",
    "training",
    "vote_stats",
    "wires",
    "worker_value_and_grad",
]

__version__: str  # of the installed package; looked up when it is asked for


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version(__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
