"""Milliseconds of a step in the network lab: all contenders in turns, by real processes."""

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from goal import curves
from goal.contenders import CONTENDERS
from goal.model import MODEL
from lioncub_jax.audit import units
from lioncub_jax.tools import lab

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
    return [
        Entry(name, stage, tokens)
        for name in names
        for _, stage in (CONTENDERS[name].stages if name in CONTENDERS else ((0, ""),))
    ]


def timed(entries: list[Entry], rate: str) -> Iterator[dict[str, Any]]:
    """A row for each, in turns: a session for each framework."""
    for framework in PROGRAMS:
        some = [entry for entry in entries if (entry.contender in TORCH) == (framework == "torch")]
        if some:
            yield from timed_together(some, framework, rate)


def timed_together(entries: list[Entry], framework: str, rate: str) -> Iterator[dict[str, Any]]:
    """All in one session."""
    job = {"entries": entries, "turns": TURNS, "seconds": SECONDS}
    reports = held(job, rate, framework)
    for entry in entries:
        blocks = [b for one in reports for b in one["blocks"] if b["method"] == entry.key]
        turns = sorted({block["turn"] for block in blocks})
        of_turn = [[block for block in blocks if block["turn"] == turn] for turn in turns]
        local_steps, predicted = reports[0]["about"][entry.key]
        # A turn is as long as its slowest worker took; a call is several steps for those who go alone.
        seconds = [max(b["seconds"] for b in some) / local_steps for some in of_turn]
        sent = statistics.median(max(b["sent_bytes"] for b in some) for some in of_turn)
        yield {
            "part": "time", **entry._asdict(), "network": rate, "workers": WORKERS,
            "seconds": statistics.median(seconds), "fastest": min(seconds), "slowest": max(seconds),
            "interface_bytes": sent / local_steps, "predicted_bytes": predicted and predicted / local_steps,
        }  # fmt: skip


def held(job: Mapping[str, Any], rate: str, framework: str) -> list[dict[str, Any]]:
    """The report of each worker of a session; the output of one that fails is shown."""
    bits = None if rate == UNSHAPED else units.rate(rate)
    with tempfile.TemporaryDirectory() as name:
        folder, job = Path(name), dict(job)
        if framework == "torch":
            path = folder / "parameters.npz"
            np.savez(path, allow_pickle=False, **as_in_torch(curves.model_of(0), MODEL["layers"]))
            job["parameters"] = str(path)
        (folder / "job.json").write_text(json.dumps(job))
        cache = {"JAX_COMPILATION_CACHE_DIR": str(Path(tempfile.gettempdir()) / "lioncub-goal")}
        command = [sys.executable, str(PROGRAMS[framework]), name]
        output: list[str] = []
        done = lab.run(lab.Network(WORKERS, bits), command, write=output.append, environment=cache)
        if done.exit_code:
            sys.exit("\n".join([*output, f"a worker of {framework} failed: {done.exit_code}"]))
        return [json.loads((folder / f"worker{i}.json").read_text()) for i in range(WORKERS)]


def as_in_torch(model: Any, layers: int) -> dict[str, np.ndarray]:
    """The parameters of `examples/gpt/model.py` by the names of `ddp_worker.py`: matrices transposed."""

    def transposed(kernel: Any) -> np.ndarray:
        return np.asarray(kernel).reshape(kernel.shape[0], -1).T.copy()

    arrays = {
        "read.weight": np.asarray(model.read.embedding[...]),
        "positions.weight": np.asarray(model.positions.embedding[...]),
        "norm.weight": np.asarray(model.norm.scale[...]),
    }
    for i in range(layers):
        block = model.blocks[i]
        arrays |= {
            f"blocks.{i}.norm1.weight": np.asarray(block.norm1.scale[...]),
            f"blocks.{i}.norm2.weight": np.asarray(block.norm2.scale[...]),
            f"blocks.{i}.qkv.weight": transposed(block.attention.qkv.kernel[...]),
            f"blocks.{i}.out.weight": transposed(block.attention.out.kernel[...]),
            f"blocks.{i}.up.weight": transposed(block.mlp.up.kernel[...]),
            f"blocks.{i}.down.weight": transposed(block.mlp.down.kernel[...]),
        }
    return arrays
