"""A network on one machine: workers in namespaces of their own, joined by shaped links."""

from lab.network import MISSING, TOOLS, LabError, Network, Report, WorkerReport, run

__all__ = ["MISSING", "TOOLS", "LabError", "Network", "Report", "WorkerReport", "run"]
