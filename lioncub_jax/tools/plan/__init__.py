"""Will it help me, and what do I use? The time to a loss of every method on a cluster, before training."""

from lioncub_jax.tools.plan.evidence import DATA as DATA
from lioncub_jax.tools.plan.methods import SCHEMES as SCHEMES
from lioncub_jax.tools.plan.model import CLUSTERS as CLUSTERS
from lioncub_jax.tools.plan.model import KINDS as KINDS
from lioncub_jax.tools.plan.model import Cluster, Link, Measured
from lioncub_jax.tools.plan.model import step_time as step_time
from lioncub_jax.tools.plan.table import shown
from lioncub_jax.tools.plan.verdict import Plan, plan

__all__ = [
    "Cluster",
    "Link",
    "Measured",
    "Plan",
    "plan",
    "shown",
]
