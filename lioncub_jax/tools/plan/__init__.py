"""Will it help me, and what do I use? The time to a loss of every method on a cluster, before training."""

from lioncub_jax.tools.plan.clusters import NamedCluster, cluster_named, clusters
from lioncub_jax.tools.plan.evidence import DATA, cell_for
from lioncub_jax.tools.plan.methods import FLOAT32, SCHEMES, Scheme, scheme_named
from lioncub_jax.tools.plan.model import (
    Cluster,
    Estimate,
    Link,
    Measured,
    kinds,
    parameters_in,
    step_time,
)
from lioncub_jax.tools.plan.report import Plan, advice, plan

__all__ = [
    "DATA",
    "FLOAT32",
    "SCHEMES",
    "Cluster",
    "Estimate",
    "Link",
    "Measured",
    "NamedCluster",
    "Plan",
    "Scheme",
    "advice",
    "cell_for",
    "cluster_named",
    "clusters",
    "kinds",
    "parameters_in",
    "plan",
    "scheme_named",
    "step_time",
]
