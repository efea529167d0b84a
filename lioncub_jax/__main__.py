"""``python -m lioncub_jax`` is the command ``lioncub``."""

from lioncub_jax.tools.cli import main

if __name__ == "__main__":
    main()
