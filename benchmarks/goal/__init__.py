"""What `time_to_loss.py` is made of: contenders, their curves, their milliseconds, and the sums."""

import sys
from pathlib import Path

# The model and the text are those of the examples.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
