"""Runs that `faults.py` harms."""
