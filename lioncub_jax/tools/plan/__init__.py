"""Will it help me, and what do I use? The time to a loss of every method on a cluster, before training."""

from lioncub_jax.tools.plan.choice import (
    cluster_at,
    what_to_use,
)
from lioncub_jax.tools.plan.clusters import CLUSTERS, NamedCluster, cluster_named
from lioncub_jax.tools.plan.evidence import DATA, cell_for
from lioncub_jax.tools.plan.model import (
    FLOAT32,
    SCHEMES,
    Cluster,
    Estimate,
    Link,
    Scheme,
    parameters_in,
    pays,
    scheme_named,
    step_time,
)
from lioncub_jax.tools.plan.report import Plan, advice, as_json, details, legend, plan, table

__all__ = [
    "CLUSTERS",
    "DATA",
    "FLOAT32",
    "SCHEMES",
    "Cluster",
    "Estimate",
    "Link",
    "NamedCluster",
    "Plan",
    "Scheme",
    "advice",
    "as_json",
    "cell_for",
    "cluster_at",
    "cluster_named",
    "details",
    "legend",
    "parameters_in",
    "pays",
    "plan",
    "scheme_named",
    "step_time",
    "table",
    "what_to_use",
]
