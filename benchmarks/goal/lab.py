"""Milliseconds of a step in the network lab: all contenders in turns, by real processes."""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lab

from goal.contenders import CONTENDERS, Contender
from lioncub_jax.programs import units

UNSHAPED = "unshaped"
RATES = (UNSHAPED, "1gbit", "100mbit")
WORKERS = 4
TURNS, SECONDS = 5, 0.7  # of each contender; of one of its turns, about
NOTHING = "nothing"  # AdamW of each worker alone: a step without communication
# PyTorch's, and whose steps they take; XLA sends bfloat16 as float32 on a CPU, Gloo by PyTorch as it is.
TORCH = {
    "torch-adamw": "adamw", "torch-adamw-bfloat16": "adamw",
    "torch-powersgd-4": "powersgd-4", "torch-powersgd-16": "powersgd-16",
}  # fmt: skip
HERE = Path(__file__).parent
PROGRAMS = {"jax": HERE / "worker.py", "torch": HERE / "ddp_worker.py"}


class Entry(NamedTuple):
    """A step that is timed.

    Attributes:
      contender: its name, or ``NOTHING``, or one of ``TORCH``.
      stage: of it, see `Contender.stages`.
      tokens: that a worker sees in a step.
    """

    contender: str
    stage: str
    tokens: int

    @property
    def key(self) -> str:
        """By which a worker names it."""
        return json.dumps(self)


def entries(names: list[str], tokens: int) -> list[Entry]:
    """Every stage of these."""
    return [Entry(name, stage, tokens) for name in names for stage in contender(name).stages]


def contender(name: str) -> Contender:
    """That whose stages and local steps a step has; AdamW's where it is none of ours."""
    return CONTENDERS.get(name, CONTENDERS["adamw"])


def timed(
    entries: list[Entry], framework: str, rate: str, workers: int = WORKERS
) -> Iterator[dict[str, Any]]:
    """A row for each, in turns, in one session."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = {"entries": entries, "turns": TURNS, "seconds": SECONDS}
        (folder / "job.json").write_text(json.dumps(job))
        run([str(PROGRAMS[framework]), name], rate, workers)
        reports = [json.loads((folder / f"worker{i}.json").read_text()) for i in range(workers)]
    for entry in entries:
        blocks = [block for one in reports for block in one if block["method"] == entry.key]
        of_turn = [[block for block in blocks if block["turn"] == turn] for turn in range(TURNS)]
        local_steps = contender(entry.contender).local_steps
        # A turn is as long as its slowest worker took; a call is several steps for those who go alone.
        seconds = [max(b["seconds"] for b in some) / local_steps for some in of_turn]
        sent = statistics.median(max(b["sent_bytes"] for b in some) for some in of_turn)
        yield {
            "part": "time", **entry._asdict(), "network": rate, "workers": workers,
            "seconds": statistics.median(seconds), "fastest": min(seconds), "slowest": max(seconds),
            "interface_bytes": sent / local_steps,
        }  # fmt: skip


def run(program: list[str], rate: str, workers: int) -> None:
    """Runs Python with these words for each worker of a session; the output of one that fails is shown."""
    bits = None if rate == UNSHAPED else units.rate(rate)
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(Path(tempfile.gettempdir()) / "lioncub-goal"),
        "PYTHONPATH": os.pathsep.join(map(str, (HERE.parent, HERE.parents[1] / "examples"))),
    }
    output: list[str] = []
    network, command = lab.Network(workers, bits), [sys.executable, *program]
    done = lab.run(network, command, write=output.append, environment=environment)
    if done.exit_code:
        sys.exit("\n".join([*output, f"a worker of {program[0]} failed: {done.exit_code}"]))
