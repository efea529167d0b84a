"""A run that goes on when a worker does not: one process a worker, started again from the newest state."""

from lioncub_jax.elastic.keep import Outcome, keep, memory

__all__ = ["Outcome", "keep", "memory"]
