"""Bytes of a step, predicted and compiled; programs that send more than votes; replicas that differ."""

from lioncub_jax.audit.predicted import Traffic, float32_all_reduce_bytes, of
from lioncub_jax.audit.replicas import Difference, ReplicaHealed, Replicas, ReplicasDiffer
from lioncub_jax.programs.compilations import mode
from lioncub_jax.programs.compiled import collectives, sent_bytes
from lioncub_jax.programs.watch import check_votes, declared

__all__ = [
    "Difference",
    "ReplicaHealed",
    "Replicas",
    "ReplicasDiffer",
    "Traffic",
    "check_votes",
    "collectives",
    "declared",
    "float32_all_reduce_bytes",
    "mode",
    "of",
    "sent_bytes",
]
