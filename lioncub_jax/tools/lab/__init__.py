"""A network on one machine: workers in namespaces of their own, joined by shaped links."""

from lioncub_jax.tools.lab.run import (
    MISSING,
    TOOLS,
    LabError,
    Network,
    Report,
    WorkerReport,
    run,
    table,
)

__all__ = [
    "MISSING",
    "TOOLS",
    "LabError",
    "Network",
    "Report",
    "WorkerReport",
    "run",
    "table",
]
