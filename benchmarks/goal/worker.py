"""One worker of `benchmarks/time_to_loss.py` in the network lab: it takes turns, or runs to the goal."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from study.runs import schedule

from goal import turns
from goal.contenders import CONTENDERS, FULL, Choice
from goal.curves import Trainer, ends_of, mesh_of
from goal.lab import Entry, Goal


def main() -> None:
    folder = Path(sys.argv[1])
    jax.distributed.initialize()
    job, mesh = json.loads((folder / "job.json").read_text()), mesh_of(jax.devices())
    found = take_turns(job, mesh) if "entries" in job else run_to_goal(job, mesh)
    (folder / f"worker{jax.process_index()}.json").write_text(json.dumps(found))


def take_turns(job: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Blocks of steps of all entries, and of each its steps in a call and what a call should send."""
    racing: dict[str, Callable[[], Any]] = {}
    about = {}
    for entry in (Entry(*entry) for entry in job["entries"]):
        recipe = CONTENDERS[entry.contender].timed(entry.stage, entry.option)
        trainer = Trainer(mesh, recipe, seed=0)
        sent = trainer.predicted_bytes(most=entry.stage == FULL)
        racing[entry.key] = partial(step_and_wait, trainer)
        about[entry.key] = recipe.local_steps, sent
    blocks = turns.take_turns(racing, largest(mesh), turns=job["turns"], seconds=job["seconds"])
    return {"blocks": [block._asdict() for block in blocks], "about": about}


def step_and_wait(trainer: Trainer) -> None:
    trainer.step()
    trainer.wait()


def largest(mesh: Mesh) -> Callable[[float], float]:
    """A maximum over all workers, a device each: they wait for each other there."""
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    compare = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))

    def most(x: float) -> float:
        mine = np.array([x], np.float32)
        return float(compare(jax.make_array_from_process_local_data(sharding, mine)))

    return most


def run_to_goal(job: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Steps until the loss is there, as the curve looks for it."""
    goal, choice = Goal(*job["goal"]), Choice(*job["choice"])
    rate = schedule(choice.rate, goal.steps)
    recipe = CONTENDERS[job["contender"]].make(rate, goal.steps, choice.option)
    trainer = Trainer(mesh, recipe, goal.seed)
    step_and_wait(trainer)  # traces, compiles and connects
    trainer.begin()
    return turns.train(trainer, ends_of(goal.steps, trainer.local_steps), goal.loss)


if __name__ == "__main__":
    main()
