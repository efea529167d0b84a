"""One worker of `benchmarks/time_to_loss.py` in the network lab: all contenders take turns."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from goal import turns
from goal.contenders import timed
from goal.lab import NOTHING, Entry
from goal.trainer import Trainer, mesh_of


def main() -> None:
    folder = Path(sys.argv[1])
    jax.distributed.initialize()
    job, mesh = json.loads((folder / "job.json").read_text()), mesh_of(jax.devices())
    blocks = take_turns(job, mesh)
    (folder / f"worker{jax.process_index()}.json").write_text(json.dumps(blocks))


def take_turns(job: dict[str, Any], mesh: Mesh) -> list[dict[str, Any]]:
    """Blocks of steps of all entries."""
    racing: dict[str, Callable[[], Any]] = {}
    for entry in (Entry(*entry) for entry in job["entries"]):
        no_exchange = entry.contender == NOTHING
        recipe = timed("adamw" if no_exchange else entry.contender, entry.stage, "data")
        where = mesh_of(jax.local_devices()) if no_exchange else mesh
        racing[entry.key] = Trainer(where, recipe, entry.tokens).step
    return turns.take_turns(racing, largest(mesh), turns=job["turns"], seconds=job["seconds"])


def largest(mesh: Mesh) -> Callable[[float], float]:
    """A maximum over all workers, a device each: they wait for each other there."""
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    compare = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))

    def most(x: float) -> float:
        mine = np.array([x], np.float32)
        return float(compare(jax.make_array_from_process_local_data(sharding, mine)))

    return most


if __name__ == "__main__":
    main()
