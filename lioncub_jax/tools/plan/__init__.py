"""Will it help me, and what do I use? The time to a loss of every method on a cluster, before training."""

from lioncub_jax.tools.plan.evidence import DATA
from lioncub_jax.tools.plan.methods import SCHEMES
from lioncub_jax.tools.plan.model import CLUSTERS, KINDS, Cluster, Link, Measured, step_time
from lioncub_jax.tools.plan.table import shown
from lioncub_jax.tools.plan.verdict import Plan, plan

__all__ = [
    "CLUSTERS",
    "DATA",
    "KINDS",
    "SCHEMES",
    "Cluster",
    "Link",
    "Measured",
    "Plan",
    "plan",
    "shown",
    "step_time",
]
