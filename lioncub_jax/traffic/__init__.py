"""Bytes of a step: predicted from shapes, and read from the compiled program."""

from lioncub_jax.traffic.compiled import collectives, sent_bytes
from lioncub_jax.traffic.predicted import Sent, Traffic, float32_all_reduce_bytes, of, sync_traffic

__all__ = [
    "Sent",
    "Traffic",
    "collectives",
    "float32_all_reduce_bytes",
    "of",
    "sent_bytes",
    "sync_traffic",
]
