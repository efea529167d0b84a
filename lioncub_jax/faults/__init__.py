"""What goes wrong with a worker, made on purpose and found: those that lie, and replicas that differ."""

from lioncub_jax.faults.liars import (
    Attack,
    collusion,
    liars,
    not_finite,
    random_votes,
    scaled,
    sign_flip,
)
from lioncub_jax.faults.replicas import Difference, ReplicaHealed, Replicas, ReplicasDiffer

__all__ = [
    "Attack",
    "Difference",
    "ReplicaHealed",
    "Replicas",
    "ReplicasDiffer",
    "collusion",
    "liars",
    "not_finite",
    "random_votes",
    "scaled",
    "sign_flip",
]
