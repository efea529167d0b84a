"""What `benchmarks/faults.py` does to a run, and the run that it is done to."""
