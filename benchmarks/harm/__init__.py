"""Runs that `faults.py` harms; and the paths of the oracle, for `liars.py`."""

import sys
from pathlib import Path

# The models are those of the examples, and the simulated workers those of the tests.
sys.path[:0] = [str(Path(__file__).parents[2] / folder) for folder in ("examples", "tests")]
