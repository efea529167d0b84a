"""One worker of `goal/lab.py` in the network lab: all contenders take turns."""

import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

import lioncub_jax as lc
from goal import turns
from goal.contenders import timed
from goal.lab import NOTHING
from goal.trainer import Trainer, mesh_of


def main() -> None:
    lc.mesh.join()
    turns.work(Path(sys.argv[1]), jax.process_index(), step_of, largest)


def step_of(name: str, stage: str, tokens: int) -> turns.Step:
    """The step of a contender; or of AdamW that sends nothing."""
    if name == NOTHING:
        return Trainer(mesh_of(jax.local_devices()), timed("adamw", ""), tokens).step
    return Trainer(mesh_of(jax.devices()), timed(name, stage), tokens).step


def largest(x: float) -> float:
    """A maximum over all workers: they wait for each other there."""
    return float(np.max(multihost_utils.process_allgather(np.float32(x))))


if __name__ == "__main__":
    main()
