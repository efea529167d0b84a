"""Losses of a run whose workers are killed, at random moments, on real processes.

    python benchmarks/faults.py    # rows that are in the file are not run again

Three workers, processes that talk by Gloo, train a small GPT by `owner_lion` under ``lioncub run``, with a
snapshot in memory every 5 steps and a save every 20. A run is harmed once, after a step that is drawn and a
part of the next, which falls into computing or a collective as their lengths have it; or in a save, a part
of its time after it began. Workers are killed (SIGKILL). Rows of links and disks are of commit 08b0ba2, and
those of stopped workers of ff2cb28, which have their programs.

Counted are the seconds to the next step, from the death on, the steps that are done again, the loss of the
last step beside that of an unbroken run with the same seed, and what is left: processes, temporary files,
halves of checkpoints. The table of docs/reports/faults.md is written anew.
"""

import os
import random
import signal
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Timer
from typing import Any, NamedTuple

import report
from harm.followed import Followed
from harm.worker import EVERY, SNAPSHOTS, STEPS
from report import Rows

ROOT = Path(__file__).parents[1]
ROWS = Path(__file__).parent / "results" / "faults.jsonl"
DOCUMENT = ROOT / "docs" / "reports" / "faults.md"
WORKERS = 3
SAVE_SECONDS = 0.5  # of which a part goes by until a save is harmed
ALL = (0, 1, 2)


class Fault(NamedTuple):
    """A harm that is done to a run.

    Attributes:
      says: for people.
      runs: how many.
      places: how many workers are killed, of those that may be: drawn.
      among: the workers.
      saving: whether it comes in a save.
    """

    says: str
    runs: int
    places: int = 0
    among: tuple[int, ...] = ALL
    saving: bool = False


FAULTS = {
    "unbroken": Fault("nothing", 1),
    "worker": Fault("kill -9 of a worker", 20, 1, (1, 2)),
    "coordinator": Fault("kill -9 of process 0", 10, 1, (0,)),
    "two": Fault("kill -9 of two at once", 10, 2),
    "saving": Fault("kill -9 of one in a save", 10, 1, saving=True),
}
TITLES = {name: fault.says for name, fault in FAULTS.items()} | {
    "stopped 5 s": "one stopped for 5 s",
    "stopped 30 s": "one stopped for 30 s",
    "link 5 s": "one link down for 5 s",
    "link 30 s": "one link down for 30 s",
    "disk full": "disk full in a save",
    "disk errs": "disk read-only for 1 s in a save",
}


def main() -> None:
    args = report.parser(__doc__, ROWS).parse_args()
    done = {(row["kind"], row["run"]) for row in report.read(args.save)}
    for kind, fault in FAULTS.items():
        for number in range(fault.runs):
            if (kind, number) not in done:
                report.append(args.save, [harmed(kind, number) | report.provenance()])
    DOCUMENT.write_text(documented(DOCUMENT.read_text(), report.read(args.save)))


class Harm:
    """One fault of one run, drawn: it waits for its moment and then happens.

    Attributes:
      at: the step after which, or whose save.
      part: of the next step, or of a save.
      places: the workers.
      when: seconds since the epoch, once it is done; 0 before.
      during: "step" or "save", of which the checkpoint was not whole at that moment.
    """

    def __init__(self, kind: str, number: int, run: Followed):
        self._fault, drawn = FAULTS[kind], random.Random(f"{kind} {number}")
        saves = range(EVERY, STEPS, EVERY)
        self.at = drawn.choice(saves) if self._fault.saving else drawn.randrange(1, STEPS - 1)
        self.part = drawn.random()
        self.places = sorted(drawn.sample(self._fault.among, self._fault.places))
        self.when, self.during, self._run, self._waits = 0.0, "", run, bool(self.places)

    def notify(self, what: str, step: int) -> None:
        """Notes a step or a save, and begins at its moment."""
        if self._waits and (what, step) == ("save" if self._fault.saving else "step", self.at):
            self._waits = False
            times = [when for when, _, _ in self._run.steps[-2:]]
            length = min(times[-1] - times[0], 1.0) if len(times) > 1 else 0.1
            Timer(self.part * (SAVE_SECONDS if self._fault.saving else length), self._kill).start()

    def _kill(self) -> None:
        pids = self._run.events("started")[-1]["pids"]
        self.during, self.when = "save" if self._run.saving() else "step", time.time()
        for place in self.places:
            os.kill(pids[place], signal.SIGKILL)


def harmed(kind: str, number: int) -> dict[str, Any]:
    """One run, from its start to its end."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        run = Followed(Path(folder), WORKERS)
        harm = Harm(kind, number, run)
        code = run.follow(harm.notify)
        seconds = time.time() - began
        left = run.left()
        deaths, starts = (
            [event["time"] for event in run.events(what)] for what in ("died", "started")
        )
    for what in left:
        print(f"left: {what}", file=sys.stderr)
    return {
        "kind": kind, "run": number, "at": harm.at, "part": round(harm.part, 3),
        "places": harm.places, "exit_code": code, "starts": len(starts),
        "during": harm.during or None, **lost(harm.when, run.steps, starts, deaths),
        "loss": run.steps[-1][2] if run.steps else None,
        "last_step": run.steps[-1][1] if run.steps else None,
        "left": len(left), "seconds": round(seconds, 1),
        "workers": WORKERS, "steps": STEPS, "every": EVERY, "snapshots": SNAPSHOTS,
    }  # fmt: skip


def lost(
    when: float, steps: list[tuple[float, int, float]], starts: list[float], deaths: list[float]
) -> dict[str, Any]:
    """Seconds to the next step, and steps that are done again; None for a run without a fault."""
    # What was under way when a worker died is still said, and the next step is one of the next start.
    over = starts[1] if len(starts) > 1 else when
    before = [step for step in steps if step[0] <= over]
    after = [step for step in steps if step[0] > over]
    if not when or not after:
        return {"seconds_to_next_step": None, "steps_again": None}
    since = max(min([when, *deaths]), before[-1][0])
    again = max(a[1] - b[1] + 1 for a, b in pairwise([before[-1], *after]))
    return {"seconds_to_next_step": round(after[0][0] - since, 2), "steps_again": again}


def wait_of(row: dict[str, Any]) -> float | None:
    """Seconds to the next step; infinite where there was none, and None where none was to be done."""
    wait: float | None = row["seconds_to_next_step"]
    if wait is None and row["last_step"] != row["steps"]:
        return float("inf")
    return wait


def whole(row: dict[str, Any], rows: Rows) -> bool:
    """True for a run that ended as the unbroken one, to the last digit of its loss, and left nothing."""
    (unbroken,) = (other for other in rows if other["kind"] == "unbroken")
    same = row["loss"] == unbroken["loss"] and row["last_step"] == unbroken["last_step"]
    return same and row["exit_code"] == 0 and row["left"] == 0


HEAD = [
    "fault", "runs", "in a save", "as unbroken", "seconds to the next step: median", "most",
    "steps done again: most",
]  # fmt: skip


def lines_of(rows: Rows) -> list[list[str]]:
    lines = []
    for kind, title in TITLES.items():
        own = report.rows_of(rows, kind=kind)
        waits = [wait for wait in map(wait_of, own) if wait is not None]
        fell = [row["during"] == "save" for row in own if row.get("during")]
        again = [row["steps_again"] for row in own if row["steps_again"] is not None]
        if own:
            lines.append([
                title, str(len(own)), str(sum(fell)) if fell else "",
                str(sum(whole(row, rows) for row in own)),
                f"{median(waits):.1f}" if waits else "", f"{max(waits):.1f}" if waits else "",
                str(max(again)) if again else "",
            ])  # fmt: skip
    return lines


def documented(document: str, rows: Rows) -> str:
    """The document with the table of these rows."""
    return report.written(document, {"faults": report.markdown(HEAD, lines_of(rows))})


if __name__ == "__main__":
    main()
