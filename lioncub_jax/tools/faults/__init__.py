"""Replicas that differ from what they should hold: detected, named and healed."""

from lioncub_jax.tools.faults.replicas import Difference, ReplicaHealed, Replicas, ReplicasDiffer

__all__ = ["Difference", "ReplicaHealed", "Replicas", "ReplicasDiffer"]
