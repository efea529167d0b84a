"""Clusters on one machine, for `benchmarks/launchers.py`."""
