"""One worker of `goal/lab.py` in the network lab: all contenders take turns."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from goal import turns
from goal.contenders import timed
from goal.lab import NOTHING, Entry
from goal.trainer import Trainer, mesh_of


def main() -> None:
    folder = Path(sys.argv[1])
    jax.distributed.initialize()
    blocks = take_turns(json.loads((folder / "job.json").read_text()))
    (folder / f"worker{jax.process_index()}.json").write_text(json.dumps(blocks))


def take_turns(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Blocks of steps of all entries."""
    racing: dict[str, Callable[[], Any]] = {}
    for entry in (Entry(*entry) for entry in job["entries"]):
        no_exchange = entry.contender == NOTHING
        contender = timed("adamw" if no_exchange else entry.contender, entry.stage)
        mesh = mesh_of(jax.local_devices() if no_exchange else jax.devices())
        racing[entry.key] = Trainer(mesh, contender, entry.tokens).step
    return turns.take_turns(racing, largest, turns=job["turns"], seconds=job["seconds"])


def largest(x: float) -> float:
    """A maximum over all workers: they wait for each other there."""
    return float(np.max(multihost_utils.process_allgather(np.float32(x))))


if __name__ == "__main__":
    main()
