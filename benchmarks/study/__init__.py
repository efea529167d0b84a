"""What `convergence.py` is made of: data, models, methods, runs, and what is said about them."""

import sys
from pathlib import Path

# The models are those of the examples, and the simulated workers those of the tests.
sys.path[:0] = [str(Path(__file__).parents[2] / folder) for folder in ("examples", "tests")]
