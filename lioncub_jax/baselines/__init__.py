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

__all__ = [
    "adamw",
    "dgc",
    "diloco",
    "ef_signsgd",
    "lion",
    "qsgd",
    "sgd",
    "signsgd",
    "signum",
    "terngrad",
]
