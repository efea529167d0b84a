"""Milliseconds of a step in the network lab, and runs to the goal there."""

import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from race.session import hold

from goal.contenders import Choice
from lioncub_jax import lab, units

UNSHAPED = "unshaped"
RATES = (UNSHAPED, "1gbit", "300mbit", "100mbit")
TURNS, SECONDS = 5, 1.0  # of each contender; of one of its turns, about
HERE = Path(__file__).parent


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
    """A row for each, all in turns in one session."""
    job = {"entries": entries, "turns": TURNS, "seconds": SECONDS}
    found = held("time", job, rate, workers)
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
            "interface_bytes": sent / alone, "predicted_bytes": predicted / alone,
        }  # fmt: skip


def confirmed(
    contender: str, choice: Choice, goal: Goal, rate: str, workers: int
) -> dict[str, Any]:
    """A row of a run to the goal: its steps, and its seconds by the clock but for looking at the loss."""
    job = {"contender": contender, "choice": choice, "goal": goal}
    found = held("confirm", job, rate, workers)
    slowest = max(found, key=lambda one: one["seconds"])
    about = {"contender": contender, **choice._asdict(), "network": rate, "workers": workers}
    return {"part": "confirm", **about, **goal._asdict(), **slowest}


def held(kind: str, job: Mapping[str, Any], rate: str, workers: int) -> list[dict[str, Any]]:
    """What each worker of a session wrote."""
    bits = None if rate == UNSHAPED else units.rate(rate)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        environment = {
            "JAX_COMPILATION_CACHE_DIR": str(Path(tempfile.gettempdir()) / "lioncub-goal")
        }
        program = HERE / "worker.py"
        options = ["--kind", kind, "--job", str(path)]
        hold(program, lab.Network(workers, bits), folder, *options, environment=environment)
        return [json.loads((Path(folder) / f"worker{i}.json").read_text()) for i in range(workers)]
