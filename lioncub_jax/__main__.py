"""``python -m lioncub_jax`` is the command ``lioncub``."""

import sys

from lioncub_jax.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
