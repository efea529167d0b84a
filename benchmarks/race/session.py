"""Starts a program in the network lab, once for each worker."""

import sys
from pathlib import Path

from lioncub_jax import lab


def hold(
    program: Path, network: lab.Network, folder: str, *options: str, environment: dict[str, str]
) -> None:
    """Runs until all workers have written to the folder; shows the output of one that fails."""
    command = [sys.executable, str(program), "--out", folder, *options]
    said: list[str] = []
    done = lab.run(network, command, write=said.append, environment=environment)
    if done.exit_code:
        sys.exit("\n".join([*said, f"a worker of {program.name} failed: {done.exit_code}"]))
