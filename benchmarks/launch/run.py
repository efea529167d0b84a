"""One start of a launch file: its output, its two workers, and what they have done."""

import itertools
import json
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from lioncub_jax.mesh.start import LAUNCHERS

ROOT = Path(__file__).parents[2]
FILES = ROOT / "examples/launch"
MARK = "LIONCUB_LAUNCH"  # in the environment of every process of a start
SECONDS = 1800.0  # until something hangs
EVERY = 50  # steps from one checkpoint to the next
STEPS = 10 * EVERY
OPTIONS = f"""--layers 1 --width 32 --heads 2 --context 32 --batch 2 --mesh data=2
--steps {STEPS} --save-every {EVERY}""".split()
RANKS = ["--process", *(names[0] for names in LAUNCHERS.values()), "SLURM_PROCID"]


class Run:
    """A start of a launch file; whoever leaves the context ends what is left of it.

    Args:
      commands: started at once, such as one for each host.
      folder: of the run, whose checkpoints and results may be there.
      environment: more variables.

    Attributes:
      processes: of the commands.
      output: the file of what they say.
      environment: the variables of the run.
    """

    def __init__(
        self, commands: Sequence[Sequence[str]], folder: Path, environment: Mapping[str, str]
    ):
        self.folder, self.output, self._mark = folder, folder / "output", uuid.uuid4().hex
        folder.mkdir(exist_ok=True)
        own = {"PROJECT": str(ROOT), "RUN": str(folder), "JAX_PLATFORMS": "cpu", MARK: self._mark}
        self.environment = own | environment
        with self.output.open("w") as output:
            self.processes = [
                subprocess.Popen(
                    command, cwd=ROOT, env=os.environ | self.environment, stdin=subprocess.DEVNULL,
                    stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                )
                for command in commands
            ]  # fmt: skip

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        for pid, _, _ in marked(self._mark):
            os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.kill()
            process.wait()

    def said(self) -> str:
        """The output so far."""
        return self.output.read_text(errors="replace")

    def ended(self) -> bool:
        """True when all commands have ended."""
        return all(process.poll() is not None for process in self.processes)

    def workers(self) -> dict[int, int]:
        """The processes that train, by their rank."""
        found = {}
        for pid, command, environment in marked(self._mark):
            if command[0].endswith("python") and "examples/train_gpt.py" in command[:2]:
                told = dict(itertools.pairwise(command)) | environment
                found[next(int(told[x]) for x in RANKS if x in told)] = pid
        return found

    def lives(self, pid: int) -> bool:
        """True for a process that has not ended."""
        try:
            return bool(Path(f"/proc/{pid}/environ").read_bytes())  # of one that ended it is empty
        except (FileNotFoundError, ProcessLookupError):
            return False

    def wait(self, done: Callable[[], bool]) -> float:
        """Waits until something is done; the seconds that it took.

        Raises:
          RuntimeError: with the end of the output, where the commands end before, or it hangs.
        """
        began = time.monotonic()
        while not done():
            if (self.ended() and not done()) or time.monotonic() - began > SECONDS:
                raise RuntimeError(f"it ended, or hangs:\n{self.said()[-3000:]}")
            time.sleep(0.05)
        return time.monotonic() - began

    def saved(self, step: int) -> bool:
        """True when the checkpoint of a step is whole."""
        return (self.folder / f"checkpoints/{step}").exists()

    def stopped(self) -> int | None:
        """The step after which it says that it stopped and saved."""
        found = re.search(r"stopped after step (\d+) and saved", self.said())
        return int(found[1]) if found else None

    def losses(self) -> list[tuple[int, float]]:
        """Steps and losses of the whole run."""
        lines = (self.folder / "results/metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if row["kind"] == "step"]
        return [(row["step"], row["loss"]) for row in rows]


def marked(mark: str) -> Iterator[tuple[int, list[str], dict[str, str]]]:
    """Processes that have a mark in their environment: number, command and environment."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "environ").read_bytes().decode(errors="replace").split("\0")
            environment = dict(word.split("=", 1) for word in words if "=" in word)
            command = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue  # it has ended, or is somebody else's
        if environment.get(MARK) == mark:
            yield int(path.name), command, environment
