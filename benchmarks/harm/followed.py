"""A run under ``lioncub run``, when it said what, and what it has left behind."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lioncub_jax.checkpoint import files

WORKER = Path(__file__).parent / "worker.py"
MARK = "LIONCUB_FAULTS"  # in the environment of every process of a run


class Followed:
    """A run, and when it said what.

    Args:
      folder: an empty one; temporary files go there too.
      workers: how many.

    Attributes:
      steps: (seconds since the epoch, step, loss), as they were said.
      saves: the steps that began to be saved.
    """

    def __init__(self, folder: Path, workers: int):
        self._events, self._scratch = folder / "events.jsonl", folder / "scratch"
        self._checkpoints, self._mark = folder / "checkpoints", uuid.uuid4().hex
        self._scratch.mkdir()
        self.steps: list[tuple[float, int, float]] = []
        self.saves: list[int] = []
        run = [sys.executable, "-m", "lioncub_jax", "run", "--workers", str(workers)]
        run += ["--events", str(self._events), "--", sys.executable, str(WORKER)]
        own = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "TMPDIR": str(self._scratch)}
        self._process = subprocess.Popen(
            [*run, str(self._checkpoints)], env=os.environ | own | {MARK: self._mark},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def follow(self, notify: Callable[[str, int], None]) -> int:
        """To its end; tells of ``("step", step)`` and ``("save", step)``; the exit code."""
        assert self._process.stdout
        with self._process.stdout as output:
            for line in output:
                what, *numbers = line.rpartition(" | ")[2].split()[:3] or [""]
                if what == "step" and len(numbers) == 2:
                    self.steps.append((time.time(), int(numbers[0]), float(numbers[1])))
                    notify("step", int(numbers[0]))
                elif what == "save" and len(numbers) == 1:
                    self.saves.append(int(numbers[0]))
                    notify("save", int(numbers[0]))
        return self._process.wait()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind so far."""
        result = [json.loads(line) for line in self._events.read_text().splitlines()]
        return [event for event in result if event["event"] == kind]

    def saving(self) -> bool:
        """True while a save has begun and its checkpoint is not whole."""
        return bool(self.saves) and not (self._checkpoints / str(self.saves[-1])).exists()

    def left(self) -> list[str]:
        """The rest of a run: processes, temporary files, halves of checkpoints."""
        saved = self._checkpoints.iterdir() if self._checkpoints.exists() else ()
        halves = [x for x in saved if not x.name.isdigit() and x.name != files.RUN]
        return [f"process {pid}" for pid in marked(self._mark)] + [
            str(path) for path in (*self._scratch.iterdir(), *halves)
        ]


def marked(mark: str) -> list[int]:
    """The processes of a run, whoever started them."""
    wanted, result = f"{MARK}={mark}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                result.append(int(path.parent.name))
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            pass  # it has ended, or is somebody else's
    return result
