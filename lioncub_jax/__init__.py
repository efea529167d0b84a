"""Data-parallel Lion whose workers exchange votes of about one bit per parameter.

The package in the order of the papers: `quantize` (values to codes), `bits` (codes to words, and
counting), `decide` (what the owner of a slice does), `wires` (how workers agree), `momentum` (what they
remember), `optimizer` (the seam and the optimizers), `training` (a step on a mesh), `accounting` and
`compiled` (bytes, predicted and compiled). `reference` is all of it on one page.
"""

from lioncub_jax import accounting, compiled
from lioncub_jax.decide import (
    average,
    count,
    floats,
    majority,
    momentum_at_owner,
    ternary_sum,
)
from lioncub_jax.momentum import (
    blend,
    every,
    first,
    never,
    nothing,
    sync_momentum,
    thinning,
)
from lioncub_jax.optimizer import (
    communicate,
    distributed_lion,
    global_gradients,
    lion_cub,
    owner_lion,
    vote_stats,
)
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
from lioncub_jax.training import (
    StatefulLoss,
    TrainState,
    from_nnx,
    init_state,
    local_value_and_grad,
    make_train_step,
)
from lioncub_jax.wires import all_reduce, counts, gathered, lanes, two_phase
