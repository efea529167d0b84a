"""What Lion by votes is compared with, behind the same interface."""

from lioncub_jax.baselines.dgc import dgc
from lioncub_jax.baselines.methods import (
    diloco,
    ef_signsgd,
    qsgd,
    signsgd,
    signum,
)
from lioncub_jax.baselines.one_bit_adam import one_bit_adam, zero_one_adam
from lioncub_jax.baselines.powersgd import powersgd
from lioncub_jax.baselines.terngrad import terngrad

__all__ = [
    "dgc",
    "diloco",
    "ef_signsgd",
    "one_bit_adam",
    "powersgd",
    "qsgd",
    "signsgd",
    "signum",
    "terngrad",
    "zero_one_adam",
]
