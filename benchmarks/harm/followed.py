"""A run under ``lioncub run``, when it said what, and what it has left behind."""

import contextlib
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

ROOT = Path(__file__).parents[2]
WORKER = Path("benchmarks") / "harm" / "worker.py"
MARK = "LIONCUB_FAULTS"  # in the environment of every process of a run
CLI = [sys.executable, "-m", "lioncub_jax"]


class Followed:
    """A run, and when it said what.

    Args:
      folder: an empty one; temporary files go there too.
      workers, steps, every, snapshots: how many; steps from save to save, and from snapshot to snapshot.

    Attributes:
      steps: (seconds since the epoch, step, loss), as they were said.
      saves: the steps that began to be saved.
      checkpoints: their folder.
    """

    def __init__(self, folder: Path, workers: int, steps: int, every: int, snapshots: int):
        self._events, self._scratch = folder / "events.jsonl", folder / "scratch"
        self._scratch.mkdir()
        self.checkpoints = folder / "checkpoints"
        self._mark = uuid.uuid4().hex
        one = [sys.executable, str(WORKER), "--steps", str(steps), "--every", str(every)]
        one += ["--snapshots", str(snapshots), "--checkpoint", str(self.checkpoints)]
        run = [*CLI, "run", "--workers", str(workers), "--events", str(self._events)]
        own = {
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
            "TMPDIR": str(self._scratch),
            MARK: self._mark,
        }
        self.process = subprocess.Popen(
            [*run, "--", *one],
            cwd=ROOT,
            env=os.environ | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.steps: list[tuple[float, int, float]] = []
        self.saves: list[int] = []

    def follow(self, notify: Callable[[str, int], None]) -> int:
        """To its end; tells of ``("step", step)`` and ``("save", step)``; the exit code."""
        assert self.process.stdout
        with self.process.stdout as output:
            for line in output:
                what, *numbers = line.rpartition(" | ")[2].split()[:3] or [""]
                if what == "step" and len(numbers) == 2:
                    self.steps.append((time.time(), int(numbers[0]), float(numbers[1])))
                    notify("step", int(numbers[0]))
                elif what == "save" and len(numbers) == 1:
                    self.saves.append(int(numbers[0]))
                    notify("save", int(numbers[0]))
        return self.process.wait()

    def end(self) -> None:
        """Ends it, if it has not ended: SIGTERM twice is for now."""
        while self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind so far."""
        result = [json.loads(line) for line in self._events.read_text().splitlines()]
        return [event for event in result if event["event"] == kind]

    def saving(self) -> bool:
        """True while a save has begun and its checkpoint is not whole."""
        return bool(self.saves) and not (self.checkpoints / str(self.saves[-1])).exists()

    def left(self) -> list[str]:
        """The rest of a run: processes, temporary files, halves of checkpoints."""
        result = [f"process {pid}" for pid in marked(self._mark)]
        result += [str(path) for path in self._scratch.iterdir()]
        if self.checkpoints.exists():
            others = (x for x in self.checkpoints.iterdir() if not x.name.isdigit())
            result += [str(x) for x in others if x.name != files.RUN]
        return result


def marked(mark: str) -> list[int]:
    """The processes of a run, whoever started them; with the last in it a namespace goes too."""
    wanted, result = f"{MARK}={mark}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                result.append(int(path.parent.name))
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            pass  # it has ended, or is somebody else's
    return result
