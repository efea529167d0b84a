"""The lab as a program: ``python benchmarks/lab --workers 2 --rate 100mbit -- COMMAND``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from lab.command import main

sys.exit(main())
