"""Will it help me? Step time of every method on a cluster, before anything is trained."""

from lioncub_jax.planner.model import (
    ADVISED,
    SCHEMES,
    Cluster,
    Estimate,
    Host,
    Link,
    Pays,
    Scheme,
    calibrated,
    parameters_in,
    pays,
    ring,
    scheme_named,
    step_time,
    tree,
)

__all__ = [
    "ADVISED",
    "SCHEMES",
    "Cluster",
    "Estimate",
    "Host",
    "Link",
    "Pays",
    "Scheme",
    "calibrated",
    "parameters_in",
    "pays",
    "ring",
    "scheme_named",
    "step_time",
    "tree",
]
