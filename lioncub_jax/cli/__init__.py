"""The command ``lioncub``."""

from lioncub_jax.cli.main import main

__all__ = ["main"]
