"""What Lion by votes is compared with, behind the same interface."""

from lioncub_jax.baselines.dgc import dgc
from lioncub_jax.baselines.diloco import diloco
from lioncub_jax.baselines.methods import (
    adamw,
    ef_signsgd,
    lion,
    qsgd,
    sgd,
    signsgd,
    signum,
    terngrad,
)
from lioncub_jax.baselines.one_bit_adam import one_bit_adam, zero_one_adam
from lioncub_jax.baselines.powersgd import powersgd

__all__ = [
    "adamw",
    "dgc",
    "diloco",
    "ef_signsgd",
    "lion",
    "one_bit_adam",
    "powersgd",
    "qsgd",
    "sgd",
    "signsgd",
    "signum",
    "terngrad",
    "zero_one_adam",
]
