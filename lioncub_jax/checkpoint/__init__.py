"""Saving a training state, and going on from it on the same devices or with other workers."""

from lioncub_jax.checkpoint.carry import carry_over
from lioncub_jax.checkpoint.convert import Damaged, portable
from lioncub_jax.checkpoint.files import restore
from lioncub_jax.checkpoint.manager import Checkpoints, Restored
from lioncub_jax.checkpoint.sigterm import stop_on_sigterm

__all__ = [
    "Checkpoints",
    "Damaged",
    "Restored",
    "carry_over",
    "portable",
    "restore",
    "stop_on_sigterm",
]
