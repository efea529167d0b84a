"""The command ``lioncub``, which ``python -m lioncub_jax`` is as well."""

from lioncub_jax.tools.cli.main import main

__all__ = ["main"]
