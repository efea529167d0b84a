"""Bytes of a step: predicted from shapes, and read from the compiled program."""

from lioncub_jax.traffic.compiled import collectives, sent_bytes
from lioncub_jax.traffic.predicted import Traffic, float32_all_reduce_bytes, of

__all__ = [
    "Traffic",
    "collectives",
    "float32_all_reduce_bytes",
    "of",
    "sent_bytes",
]
