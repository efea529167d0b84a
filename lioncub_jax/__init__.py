"""Data-parallel Lion whose workers exchange votes of about one bit per parameter.

The package in the order of the papers: `quantize` (values to codes), `bits` (codes to words, and
counting them), `decide` (what the owner of a slice does), `messages` and `wires` (what travels, and
how workers agree), `placement` (where arrays lie on a mesh), `momentum` (what workers remember),
`agreement` and `exchange` (the seam, `communicate`), `sync` (momenta made alike), `optimizer` (the
methods), `baselines` and `dgc` (what they are compared with), `gradients` and `training` (a step on a
mesh), `checkpoint`, `accounting` and `compiled` (bytes: predicted, and read from the compiled program),
`planner` (step time on a cluster) and `lab` (a network on one machine). `reference` is every algorithm
on one page, `simulate` trains by it with many workers on one device, and `splits` shares data out to
them. `cli` is the command ``lioncub``.
"""

from lioncub_jax import (
    accounting,
    baselines,
    compiled,
    dgc,
    lab,
    planner,
    simulate,
    splits,
)
from lioncub_jax.checkpoint import Checkpoints, Restored, stop_on_sigterm
from lioncub_jax.decide import (
    average,
    count,
    floats,
    majority,
    momentum_at_owner,
    ternary_sum,
)
from lioncub_jax.exchange import VoteStats, communicate, vote_stats
from lioncub_jax.gradients import (
    StatefulLoss,
    from_nnx,
    local_value_and_grad,
    worker_value_and_grad,
)
from lioncub_jax.momentum import (
    adaptive,
    blend,
    coded,
    every,
    first,
    never,
    nothing,
    thinning,
)
from lioncub_jax.optimizer import (
    distributed_lion,
    global_gradients,
    lion_cub,
    owner_lion,
)
from lioncub_jax.placement import two_level_mesh
from lioncub_jax.quantize import (
    dense,
    error_feedback,
    integer,
    midrise,
    nearest,
    sign,
    stochastic,
    ternary,
)
from lioncub_jax.specs import specs_of
from lioncub_jax.sync import sync_momentum
from lioncub_jax.training import (
    TrainState,
    abstract_state,
    init_state,
    make_train_step,
    on_mesh,
)
from lioncub_jax.wires import all_reduce, counts, gathered, lanes, two_phase

__all__ = [
    "Checkpoints",
    "Restored",
    "StatefulLoss",
    "TrainState",
    "VoteStats",
    "abstract_state",
    "accounting",
    "adaptive",
    "all_reduce",
    "average",
    "baselines",
    "blend",
    "coded",
    "communicate",
    "compiled",
    "count",
    "counts",
    "dense",
    "dgc",
    "distributed_lion",
    "error_feedback",
    "every",
    "first",
    "floats",
    "from_nnx",
    "gathered",
    "global_gradients",
    "init_state",
    "integer",
    "lab",
    "lanes",
    "lion_cub",
    "local_value_and_grad",
    "majority",
    "make_train_step",
    "midrise",
    "momentum_at_owner",
    "nearest",
    "never",
    "nothing",
    "on_mesh",
    "owner_lion",
    "planner",
    "sign",
    "simulate",
    "specs_of",
    "splits",
    "stochastic",
    "stop_on_sigterm",
    "sync_momentum",
    "ternary",
    "ternary_sum",
    "thinning",
    "two_level_mesh",
    "two_phase",
    "vote_stats",
    "worker_value_and_grad",
]
