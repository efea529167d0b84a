"""What a run loses when its workers are killed or stopped, at random moments, on real processes.

    python benchmarks/faults.py [--kind worker] [--runs 20]
    python benchmarks/faults.py --again             # sums up the committed rows, runs nothing

Three workers, processes that talk by Gloo, train a small GPT by `owner_lion` under ``lioncub run`` and save
every 10 steps. A run is harmed once, after a step that is drawn and a part of the next: one worker that
is not the coordinator is killed by SIGKILL, or the coordinator, or two workers at once; or one is stopped
for 5 or 30 seconds (SIGSTOP, SIGCONT). Counted are the seconds until the next step, the steps that are done
again, and the loss of the last step beside that of an unbroken run with the same seed. Rows that are in
the file are not run again.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import report
from rich.console import Console
from study import store

ROOT = Path(__file__).parents[1]
ROWS = Path(__file__).parent / "results" / "faults.jsonl"
DOCUMENT = ROOT / "docs" / "faults.md"
WORKERS, STEPS, EVERY, SNAPSHOTS = 3, 120, 20, 5
WORKER = Path("benchmarks") / "harm" / "worker.py"


class Fault(NamedTuple):
    """What is done to a run.

    Attributes:
      says: for people.
      places: how many workers, of those that may be: drawn.
      among: the workers.
      stopped: seconds; 0 to kill.
      runs: how many.
    """

    says: str
    places: int
    among: tuple[int, ...]
    stopped: float
    runs: int


FAULTS = {
    "unbroken": Fault("nothing", 0, (), 0.0, 1),
    "worker": Fault("kill -9 of a worker", 1, (1, 2), 0.0, 20),
    "coordinator": Fault("kill -9 of process 0", 1, (0,), 0.0, 10),
    "two": Fault("kill -9 of two at once", 2, (0, 1, 2), 0.0, 10),
    "stopped 5 s": Fault("one stopped for 5 s", 1, (0, 1, 2), 5.0, 5),
    "stopped 30 s": Fault("one stopped for 30 s", 1, (0, 1, 2), 30.0, 3),
}


def main(argv: list[str] | None = None) -> None:
    args = parsed(argv)
    rows = read(args.save)
    for kind in () if args.again else args.kind:
        for number in range(args.runs or FAULTS[kind].runs):
            if not any((row["kind"], row["run"]) == (kind, number) for row in rows):
                row = harmed(kind, number) | report.provenance()
                store.append(args.save, [row])
                rows.append(row)
                print(json.dumps(row), flush=True)
    title = f"{WORKERS} workers, a save every {EVERY} steps"
    Console().print(report.table(title, HEAD, lines_of(rows)))
    if args.report:
        DOCUMENT.write_text(documented(DOCUMENT.read_text(), rows))
    report.finish({"benchmark": "faults", **keys(rows)}, None)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--runs", type=int, help="of each kind (20 where it is cheap)")
    parser.add_argument("--save", type=Path, default=ROWS, help="file of rows, read and added to")
    parser.add_argument("--again", action="store_true", help="run nothing: sum up the rows")
    parser.add_argument("--report", action="store_true", help="write the table of docs/faults.md")
    args = parser.parse_args(argv)
    if args.again and not read(args.save):
        parser.error(f"--again sums up the rows of {args.save}, and there are none")
    return args


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, or none if there is no file."""
    return store.read(path, lambda row: (row["kind"], row["run"]))


class Followed:
    """A run, and when it said what.

    Attributes:
      steps: (seconds since the epoch, step, loss), as they were said.
    """

    def __init__(self, folder: Path):
        self._events = folder / "events.jsonl"
        command = [sys.executable, "-m", "lioncub_jax", "run", "--workers", str(WORKERS)]
        command += [
            "--events",
            str(self._events),
            "--",
            sys.executable,
            str(WORKER),
            "--steps",
            str(STEPS),
        ]
        command += [
            "--snapshots",
            str(SNAPSHOTS),
            "--every",
            str(EVERY),
            "--checkpoint",
            str(folder / "checkpoints"),
        ]
        flags = os.environ | {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=flags,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.steps: list[tuple[float, int, float]] = []

    def follow(self, after_step: Callable[[int], None]) -> int:
        """To its end; the exit code."""
        assert self.process.stdout
        with self.process.stdout as said:
            for line in said:
                if line.startswith("0 | step "):
                    _, _, _, step, loss = line.split()
                    self.steps.append((time.time(), int(step), float(loss)))
                    after_step(int(step))
        return self.process.wait()

    def events(self) -> list[dict[str, Any]]:
        """What has happened so far."""
        return [json.loads(line) for line in self._events.read_text().splitlines()]


def harmed(kind: str, number: int) -> dict[str, Any]:
    """One run, from its start to its end."""
    fault, drawn = FAULTS[kind], random.Random(f"{kind} {number}")
    at, part = drawn.randrange(1, STEPS - 1), drawn.random()
    places = sorted(drawn.sample(fault.among, fault.places))
    done: list[float] = []  # when
    waits: list[threading.Thread] = []
    with tempfile.TemporaryDirectory() as folder:
        run = Followed(Path(folder))

        def harm(seconds: float) -> None:
            time.sleep(seconds)
            pids = run.events()[-1]["pids"]
            done.append(time.time())
            for place in places:
                os.kill(pids[place], signal.SIGSTOP if fault.stopped else signal.SIGKILL)
            if fault.stopped:
                time.sleep(fault.stopped)
                for place in places:
                    os.kill(pids[place], signal.SIGCONT)

        def after_step(step: int) -> None:
            if step == at and places and not waits:
                before = run.steps[-2][0] if len(run.steps) > 1 else run.steps[-1][0] - 0.1
                length = min(run.steps[-1][0] - before, 1.0)
                waits.append(threading.Thread(target=harm, args=(part * length,)))
                waits[0].start()

        began = time.time()
        code = run.follow(after_step)
        seconds = time.time() - began
        for thread in waits:
            thread.join()
        events = run.events()
    pids = [pid for event in events if event["event"] == "started" for pid in event["pids"]]
    # What was under way is still said: the next step is one of the next start, or after the stop.
    starts = [event["time"] for event in events if event["event"] == "started"]
    over = done[0] + fault.stopped if fault.stopped else (starts[1] if len(starts) > 1 else None)
    after = [step for step in run.steps if over is not None and step[0] > over]
    before_it = [step for step in run.steps if over is not None and step[0] <= over]
    return {
        "kind": kind, "run": number, "at": at, "part": round(part, 3), "places": places,
        "exit_code": code, "starts": len(starts),
        "seconds_to_next_step": round(after[0][0] - (done[0] + fault.stopped), 2) if after else None,
        "steps_again": before_it[-1][1] - after[0][1] + 1 if after else None,
        "loss": run.steps[-1][2] if run.steps else None, "last_step": run.steps[-1][1],
        "left": sum(os.path.exists(f"/proc/{pid}") for pid in pids), "seconds": round(seconds, 1),
        "workers": WORKERS, "steps": STEPS, "every": EVERY, "snapshots": SNAPSHOTS,
    }  # fmt: skip


def whole(row: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    """Whether a run ended as the unbroken one, to the last digit of its loss, and left nothing."""
    (unbroken,) = (other for other in rows if other["kind"] == "unbroken")
    same = row["loss"] == unbroken["loss"] and row["last_step"] == unbroken["last_step"]
    return same and row["exit_code"] == 0 and row["left"] == 0


HEAD = [
    "fault",
    "runs",
    "as unbroken",
    "seconds to the next step: median",
    "most",
    "steps done again: most",
]


def lines_of(rows: list[dict[str, Any]]) -> list[list[str]]:
    found = []
    for kind, fault in FAULTS.items():
        own = [row for row in rows if row["kind"] == kind]
        waits = [row["seconds_to_next_step"] for row in own]
        waits = [float("inf") if x is None else x for x in waits] if fault.places else []
        again = [row["steps_again"] for row in own if row["steps_again"] is not None]
        if own:
            found.append([
                fault.says, str(len(own)), str(sum(whole(row, rows) for row in own)),
                f"{median(waits):.1f}" if waits else "", f"{max(waits):.1f}" if waits else "",
                str(max(again)) if again else "",
            ])  # fmt: skip
    return found


def documented(document: str, rows: list[dict[str, Any]]) -> str:
    """The document with the table of these rows."""
    return report.written(document, "faults", report.markdown(HEAD, lines_of(rows)))


def keys(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is claimed: every killed run ends as the unbroken one; seconds and steps at most."""
    found: dict[str, Any] = {}
    for kind in ("worker", "coordinator", "two"):
        own = [row for row in rows if row["kind"] == kind]
        if own and any(row["kind"] == "unbroken" for row in rows):
            found[f"{kind}_survived"] = f"{sum(whole(row, rows) for row in own)} of {len(own)}"
            found[f"{kind}_seconds_most"] = max(
                row["seconds_to_next_step"] or float("inf") for row in own
            )
            found[f"{kind}_steps_again_most"] = max(row["steps_again"] or 0 for row in own)
    return found


if __name__ == "__main__":
    main()
