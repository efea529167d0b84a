"""What `convergence.py` is made of: data, models, methods, runs, and what is said about them."""

import sys
from pathlib import Path

# The models are those of the examples.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
