"""What Lion by votes is compared with, behind the same interface."""

from lioncub_jax.baselines.dgc import dgc
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
from lioncub_jax.baselines.powersgd import powersgd

__all__ = [
    "adamw",
    "dgc",
    "ef_signsgd",
    "lion",
    "powersgd",
    "qsgd",
    "sgd",
    "signsgd",
    "signum",
    "terngrad",
]
