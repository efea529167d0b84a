"""A run that goes on when a worker does not: one process a worker, started again from the newest state."""

from lioncub_jax.elastic.keep import Outcome, keep, memory
from lioncub_jax.progress import stepped

__all__ = ["Outcome", "keep", "memory", "stepped"]
