"""Saving a training state, and going on from it on the same devices or with other workers."""

from lioncub_jax.checkpoint.manager import Checkpoints, Damaged, Restored, stop_on_sigterm
from lioncub_jax.checkpoint.recovery import WorkerStateLost
from lioncub_jax.checkpoint.snapshots import Snapshots

__all__ = [
    "Checkpoints",
    "Damaged",
    "Restored",
    "Snapshots",
    "WorkerStateLost",
    "stop_on_sigterm",
]
