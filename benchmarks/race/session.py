"""Starts a program of this folder in the network lab, once for each worker."""

import sys
from pathlib import Path

from lioncub_jax import lab


def hold(
    program: str, network: lab.Network, folder: str, *options: str, environment: dict[str, str]
) -> None:
    """Runs until all workers have written to the folder; shows the output of one that fails."""
    path = Path(__file__).with_name(program)
    command = [sys.executable, str(path), "--out", folder, *options]
    said: list[str] = []
    done = lab.run(network, command, write=said.append, environment=environment)
    if done.exit_code:
        sys.exit("\n".join([*said, f"a worker of {program} failed: {done.exit_code}"]))
