"""What `faults.py` and `liars.py` do to a run, and the runs that it is done to."""

import sys
from pathlib import Path

# The models are those of the examples, and the simulated workers those of the tests.
sys.path[:0] = [str(Path(__file__).parents[2] / folder) for folder in ("examples", "tests")]
