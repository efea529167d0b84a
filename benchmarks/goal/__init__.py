"""Parts of `time_to_loss.py`: contenders, their curves, their milliseconds, and the sums."""

import sys
from pathlib import Path

# The model and the text are those of the examples, and the simulated workers those of the tests.
sys.path[:0] = [str(Path(__file__).parents[2] / folder) for folder in ("examples", "tests")]
