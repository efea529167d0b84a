"""Milliseconds of a step in the network lab, and runs to the goal there; all runs of PyTorch's."""

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from study.runs import schedule

from goal import curves
from goal.contenders import ADAM_BETAS, CONTENDERS, DECAY, Choice
from goal.model import MODEL
from lioncub_jax import lab, units

UNSHAPED = "unshaped"
RATES = (UNSHAPED, "1gbit", "300mbit", "100mbit")
TURNS, SECONDS = 5, 1.0  # of each contender; of one of its turns, about
HERE = Path(__file__).parent
PROGRAMS = {"jax": HERE / "worker.py", "torch": HERE / "ddp_worker.py"}


class Entry(NamedTuple):
    """What is timed.

    Attributes:
      contender: its name.
      stage: of it, see `Contender.stages`.
      option: that its choice has.
    """

    contender: str
    stage: str
    option: int

    @property
    def key(self) -> str:
        """By which a worker names it."""
        return json.dumps(self)


class Goal(NamedTuple):
    """Where a run in the lab ends.

    Attributes:
      share: of float32 Lion's run, for the row.
      loss: bits per byte, to be reached.
      steps: of the run whose schedule it has.
      seed: of its parameters and data.
    """

    share: float
    loss: float
    steps: int
    seed: int


def timed(entries: list[Entry], rate: str, workers: int) -> Iterator[dict[str, Any]]:
    """A row for each, in turns: a session for each framework."""
    for framework in PROGRAMS:
        some = [entry for entry in entries if CONTENDERS[entry.contender].framework == framework]
        if some:
            yield from timed_together(some, framework, rate, workers)


def timed_together(
    entries: list[Entry], framework: str, rate: str, workers: int
) -> Iterator[dict[str, Any]]:
    """All in one session."""
    job = {"entries": entries, "turns": TURNS, "seconds": SECONDS}
    found = held(job, rate, workers, framework)
    for entry in entries:
        blocks = [b for one in found for b in one["blocks"] if b["method"] == entry.key]
        turns = sorted({block["turn"] for block in blocks})
        of_turn = [[block for block in blocks if block["turn"] == turn] for turn in turns]
        alone, predicted = found[0]["about"][entry.key]
        # A turn is as long as its slowest worker took; a call is several steps for those who go alone.
        seconds = [max(b["seconds"] for b in some) / alone for some in of_turn]
        sent = statistics.median(max(b["sent_bytes"] for b in some) for some in of_turn)
        yield {
            "part": "time", **entry._asdict(), "network": rate, "workers": workers,
            "seconds": statistics.median(seconds), "fastest": min(seconds), "slowest": max(seconds),
            "interface_bytes": sent / alone, "predicted_bytes": predicted and predicted / alone,
        }  # fmt: skip


def confirmed(
    contender: str, choice: Choice, goal: Goal, rate: str, workers: int
) -> dict[str, Any]:
    """A row of a run to the goal: its steps, and its seconds by the clock but for looking at the loss."""
    about = {"contender": contender, **choice._asdict(), "network": rate, "workers": workers}
    found = run_to(goal, contender, choice, rate, workers)
    del found["curve"]
    return {"part": "confirm", **about, **goal._asdict(), **found}


def trained(run: curves.Run) -> dict[str, Any]:
    """As `curves.train`, by real processes; for contenders of another framework."""
    goal = Goal(1.0, -1.0, run.steps, run.seed)  # no loss is there: to the end
    choice = Choice(run.rate, run.option)
    return curves.row_of(run, run_to(goal, run.contender, choice, UNSHAPED, run.workers))


def run_to(goal: Goal, contender: str, choice: Choice, rate: str, workers: int) -> dict[str, Any]:
    """What the slowest worker found."""
    job: dict[str, Any] = {"contender": contender, "choice": choice, "goal": goal}
    framework = CONTENDERS[contender].framework
    if framework == "torch":
        at = schedule(choice.rate, goal.steps)
        job["ends"] = curves.ends_of(goal.steps, 1)
        job["rates"] = [float(at(t)) for t in range(goal.steps)]
    found = held(job, rate, workers, framework)
    return max(found, key=lambda one: one["seconds"])


def held(job: Mapping[str, Any], rate: str, workers: int, framework: str) -> list[dict[str, Any]]:
    """What each worker of a session wrote; the output of one that fails is shown."""
    bits = None if rate == UNSHAPED else units.rate(rate)
    with tempfile.TemporaryDirectory() as name:
        folder, job = Path(name), dict(job)
        if framework == "torch":
            job |= of_torch(folder, job["goal"].seed if "goal" in job else 0)
        (folder / "job.json").write_text(json.dumps(job))
        cache = {"JAX_COMPILATION_CACHE_DIR": str(Path(tempfile.gettempdir()) / "lioncub-goal")}
        command = [sys.executable, str(PROGRAMS[framework]), name]
        said: list[str] = []
        done = lab.run(lab.Network(workers, bits), command, write=said.append, environment=cache)
        if done.exit_code:
            sys.exit("\n".join([*said, f"a worker of {framework} failed: {done.exit_code}"]))
        return [json.loads((folder / f"worker{i}.json").read_text()) for i in range(workers)]


def of_torch(folder: Path, seed: int) -> dict[str, Any]:
    """What `ddp_worker.py` cannot import without JAX: the parameters to begin with, and constants."""
    path = folder / "parameters.npz"
    np.savez(path, allow_pickle=False, **as_in_torch(curves.model_of(seed), MODEL["layers"]))
    return {
        "parameters": str(path), "seed": seed, "betas": ADAM_BETAS, "decay": DECAY,
        "windows": curves.WINDOWS,
    }  # fmt: skip


def as_in_torch(model: Any, layers: int) -> dict[str, np.ndarray]:
    """The parameters of `examples/gpt/model.py` by the names of `ddp_worker.py`: matrices turned."""

    def turned(kernel: Any) -> np.ndarray:
        return np.asarray(kernel).reshape(kernel.shape[0], -1).T.copy()

    arrays = {
        "read.weight": np.asarray(model.read.embedding[...]),
        "positions.weight": np.asarray(model.positions.embedding[...]),
        "norm.weight": np.asarray(model.norm.scale[...]),
        "write.weight": turned(model.write.kernel[...]),
    }
    for i in range(layers):
        block = model.blocks[i]
        arrays |= {
            f"blocks.{i}.norm1.weight": np.asarray(block.norm1.scale[...]),
            f"blocks.{i}.norm2.weight": np.asarray(block.norm2.scale[...]),
            f"blocks.{i}.qkv.weight": turned(block.attention.qkv.kernel[...]),
            f"blocks.{i}.out.weight": turned(block.attention.out.kernel[...]),
            f"blocks.{i}.up.weight": turned(block.mlp.up.kernel[...]),
            f"blocks.{i}.down.weight": turned(block.mlp.down.kernel[...]),
        }
    return arrays
