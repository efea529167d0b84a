"""Will voting help me? The step time of every method on a cluster, before anything is trained."""

from lioncub_jax.planner.clusters import CLUSTERS, NamedCluster, cluster_named
from lioncub_jax.planner.evidence import DATA, Learned, Task, learned, tasks_near
from lioncub_jax.planner.model import (
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
from lioncub_jax.planner.report import Plan, Row, advice, as_json, legend, plan, table

__all__ = [
    "CLUSTERS",
    "DATA",
    "FLOAT32",
    "SCHEMES",
    "Cluster",
    "Estimate",
    "Learned",
    "Link",
    "NamedCluster",
    "Plan",
    "Row",
    "Scheme",
    "Task",
    "advice",
    "as_json",
    "cluster_named",
    "learned",
    "legend",
    "parameters_in",
    "pays",
    "plan",
    "scheme_named",
    "step_time",
    "table",
    "tasks_near",
]
