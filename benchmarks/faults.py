"""Losses of a run whose workers, links and disks fail, at random moments, on real processes.

    python benchmarks/faults.py [--kind worker]    # rows that are in the file are not run again

Three workers, processes that talk by Gloo, train a small GPT by `owner_lion` under ``lioncub run``, with a
snapshot in memory every 5 steps and a save every 20. A run is harmed once, after a step that is drawn and a
part of the next, which falls into computing or a collective as their lengths have it; or in a save, a part
of its time after it began. Workers are killed (SIGKILL), or one is stopped (SIGSTOP, SIGCONT). Rows of
links and disks are of commit 08b0ba2, which has their program.

Counted are the seconds to the next step, from the end of the fault or the last step after it, the steps
that are done again, the loss of the last step beside that of an unbroken run with the same seed, and what
is left: processes, temporary files, halves of checkpoints. The table of docs/reports/faults.md is
written anew.
"""

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import report
from harm.followed import Followed
from report import Rows

ROOT = Path(__file__).parents[1]
ROWS = Path(__file__).parent / "results" / "faults.jsonl"
DOCUMENT = ROOT / "docs" / "reports" / "faults.md"
WORKERS, STEPS, EVERY, SNAPSHOTS = 3, 120, 20, 5
SAVE_SECONDS = 0.5  # of which a part goes by until a save is harmed
ALL = (0, 1, 2)
BEFORE = "08b0ba2"  # the commit of faults that are run no more


class Fault(NamedTuple):
    """A harm that is done to a run.

    Attributes:
      says: for people.
      does: "kill" or "stop"; "" for nothing.
      runs: how many.
      places: how many workers, of those that may be: drawn.
      among: the workers.
      lasts: seconds.
      saving: whether it comes in a save.
    """

    says: str
    does: str
    runs: int
    places: int = 0
    among: tuple[int, ...] = ALL
    lasts: float = 0.0
    saving: bool = False


FAULTS = {
    "unbroken": Fault("nothing", "", 1),
    "worker": Fault("kill -9 of a worker", "kill", 20, 1, (1, 2)),
    "coordinator": Fault("kill -9 of process 0", "kill", 10, 1, (0,)),
    "two": Fault("kill -9 of two at once", "kill", 10, 2),
    "saving": Fault("kill -9 of one in a save", "kill", 10, 1, saving=True),
    "stopped 5 s": Fault("one stopped for 5 s", "stop", 5, 1, lasts=5.0),
    "stopped 30 s": Fault("one stopped for 30 s", "stop", 3, 1, lasts=30.0),
    "link 5 s": Fault("one link down for 5 s", BEFORE, 0),
    "link 30 s": Fault("one link down for 30 s", BEFORE, 0),
    "disk full": Fault("disk full in a save", BEFORE, 0),
    "disk errs": Fault("disk read-only for 1 s in a save", BEFORE, 0),
}


def main(argv: list[str] | None = None) -> None:
    parser = report.rows_parser(__doc__, ROWS)
    parser.add_argument("--kind", nargs="*", choices=list(FAULTS), default=list(FAULTS))
    args = parser.parse_args(argv)
    rows = read(args.save)
    done = {(row["kind"], row["run"]) for row in rows}
    wanted = [(kind, n) for kind in args.kind for n in range(FAULTS[kind].runs)]
    wanted = [run for run in wanted if run not in done]
    for run in wanted:
        rows.append(harmed(*run) | report.provenance())
        report.append(args.save, rows[-1:])
    print(report.markdown(HEAD, lines_of(rows)))
    DOCUMENT.write_text(documented(DOCUMENT.read_text(), rows))


def read(path: Path) -> Rows:
    """The rows of a file, or none if there is no file."""
    return report.read(path, lambda row: (row["kind"], row["run"]))


class Harm:
    """One fault of one run, drawn: it waits for its moment and then happens, in a thread of its own.

    Attributes:
      at: the step after which, or whose save.
      part: of the next step, or of a save.
      places: the workers.
      began, ended: seconds since the epoch, once it is done.
      during: "step" or "save", of which the checkpoint was not whole at that moment.
    """

    def __init__(self, kind: str, number: int, run: Followed, pool: ThreadPoolExecutor):
        self.fault, drawn = FAULTS[kind], random.Random(f"{kind} {number}")
        saves = range(EVERY, STEPS, EVERY)
        self.at = drawn.choice(saves) if self.fault.saving else drawn.randrange(1, STEPS - 1)
        self.part = drawn.random()
        self.places = sorted(drawn.sample(self.fault.among, self.fault.places))
        self.began, self.ended, self.during = 0.0, 0.0, ""
        self.done: Future[None] | None = None
        self._run, self._pool = run, pool

    def notify(self, what: str, step: int) -> None:
        """Notes a step or a save, and begins at its moment."""
        mine = self.fault.does and step == self.at and not self.done
        if mine and what == ("save" if self.fault.saving else "step"):
            times = [when for when, _, _ in self._run.steps[-2:]]
            length = min(times[-1] - times[0], 1.0) if len(times) > 1 else 0.1
            wait = self.part * (SAVE_SECONDS if self.fault.saving else length)
            self.done = self._pool.submit(self._happen, wait)

    def _happen(self, seconds: float) -> None:
        time.sleep(seconds)
        started = self._run.events("started")[-1]["pids"]
        pids = [started[place] for place in self.places]
        self.during, self.began = "save" if self._run.saving() else "step", time.time()
        for pid in pids:
            os.kill(pid, signal.SIGKILL if self.fault.does == "kill" else signal.SIGSTOP)
        if self.fault.does == "stop":
            time.sleep(self.fault.lasts)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        self.ended = time.time()


def harmed(kind: str, number: int) -> dict[str, Any]:
    """One run, from its start to its end."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        began = time.time()
        run = Followed(folder, WORKERS, STEPS, EVERY, SNAPSHOTS)
        stack.callback(run.end)
        harm = Harm(kind, number, run, pool)
        code = run.follow(harm.notify)
        seconds = time.time() - began
        if harm.done:
            harm.done.result()
        left = run.left()
        deaths = run.events("died")
        starts = [event["time"] for event in run.events("started")]
    for what in left:
        print(f"left: {what}", file=sys.stderr)
    return {
        "kind": kind, "run": number, "at": harm.at, "part": round(harm.part, 3),
        "places": harm.places, "exit_code": code, "starts": len(starts),
        **lost(harm, run.steps, starts, deaths),
        "loss": run.steps[-1][2] if run.steps else None,
        "last_step": run.steps[-1][1] if run.steps else None,
        "left": len(left), "seconds": round(seconds, 1),
        "workers": WORKERS, "steps": STEPS, "every": EVERY, "snapshots": SNAPSHOTS,
    }  # fmt: skip


def lost(
    harm: Harm, steps: list[tuple[float, int, float]], starts: list[float], deaths: list[Any]
) -> dict[str, Any]:
    """Seconds to the next step, steps that are done again, and what the fault fell into."""
    none = {"seconds_to_next_step": None, "steps_again": None, "during": harm.during or None}
    if not harm.done:
        return none
    ended = min([harm.ended, *(event["time"] for event in deaths)])
    # What was under way when a worker died is still said, and the next step is one of the next start. Who
    # waits for a process says nothing meanwhile, and some go on before they die of it.
    over = starts[1] if len(starts) > 1 and harm.fault.does == "kill" else ended
    before = [step for step in steps if step[0] <= over]
    after = [step for step in steps if step[0] > over]
    if not after:
        return none
    since = max(ended, before[-1][0])
    again = max(a[1] - b[1] + 1 for a, b in pairwise([before[-1], *after]))
    return none | {"seconds_to_next_step": round(after[0][0] - since, 2), "steps_again": again}


def wait_of(row: dict[str, Any]) -> float | None:
    """Seconds to the next step; infinite where there was none, and None where none was to be done."""
    wait: float | None = row["seconds_to_next_step"]
    if wait is None and row["last_step"] != row["steps"]:
        return float("inf")
    return wait


def waits_of(rows: Rows) -> list[float]:
    """The seconds of all rows that had a step left to do."""
    return [wait for wait in map(wait_of, rows) if wait is not None]


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
    for kind, fault in FAULTS.items():
        own = [row for row in rows if row["kind"] == kind]
        waits = waits_of(own) if fault.does else []
        fell = [row["during"] == "save" for row in own if row.get("during")]
        again = [row["steps_again"] for row in own if row["steps_again"] is not None]
        if own:
            lines.append([
                fault.says, str(len(own)), str(sum(fell)) if fell else "",
                str(sum(whole(row, rows) for row in own)),
                f"{median(waits):.1f}" if waits else "", f"{max(waits):.1f}" if waits else "",
                str(max(again)) if again else "",
            ])  # fmt: skip
    return lines


def documented(document: str, rows: Rows) -> str:
    """The document with the table of these rows."""
    return report.written(document, "faults", report.markdown(HEAD, lines_of(rows)))


if __name__ == "__main__":
    main()
