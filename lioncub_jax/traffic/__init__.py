"""Bytes of a step: predicted from shapes, and read from the compiled program."""

from lioncub_jax.traffic.compiled import collectives, sent_bytes
from lioncub_jax.traffic.predicted import (
    Sent,
    Traffic,
    compiled_bytes,
    float32_all_reduce_bytes,
    of,
    predict,
    predict_mean,
    sync_traffic,
    table,
)

__all__ = [
    "Sent",
    "Traffic",
    "collectives",
    "compiled_bytes",
    "float32_all_reduce_bytes",
    "of",
    "predict",
    "predict_mean",
    "sent_bytes",
    "sync_traffic",
    "table",
]
