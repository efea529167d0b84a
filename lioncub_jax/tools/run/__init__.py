"""A run that goes on when a worker does not: one process a worker, started again from the newest state."""

from lioncub_jax.tools.run.keep import Outcome, keep, memory_folder
from lioncub_jax.tools.run.progress import stepped
from lioncub_jax.tools.run.recovery import WorkerStateLost
from lioncub_jax.tools.run.snapshots import Snapshots

__all__ = ["Outcome", "Snapshots", "WorkerStateLost", "keep", "memory_folder", "stepped"]
