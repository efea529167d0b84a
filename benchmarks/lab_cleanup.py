"""What is left on the machine after network labs that end well and labs that are killed.

    python benchmarks/lab_cleanup.py

Twenty labs in a row, of which five are killed or stopped at random moments while they start or run:
the lab's process, its whole group and the `unshare` below it by SIGKILL, the lab by SIGTERM and by
SIGINT. Every worker leaves a process behind that has a session of its own. Counted before and after:
processes of the labs, known by a variable that all of them inherit, and the network namespaces that
these are in; the machine's links, mounts and named namespaces; and files in the labs' temporary folder.
"""

import argparse
import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import report
from rich.console import Console
from rich.table import Table

WORKERS = 3
SETTLE_SECONDS = 10  # the kernel takes a namespace apart after its last process has gone
MARKER = f"lioncub-lab-cleanup-{os.getpid()}"
LAB = """
import sys
from lioncub_jax import lab
print("imported", flush=True)
command = ["sh", "-c", "setsid sleep 600 & sleep " + sys.argv[1]]
sys.exit(lab.run(lab.Network(int(sys.argv[2]), rate=1e8), command).exit_code)
"""


def on_the_machine(folder: str) -> dict[str, int]:
    """How many there are of everything that a lab could leave."""
    namespaces, processes = set(), 0
    here = os.readlink("/proc/self/ns/net")
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if MARKER.encode() in (process / "environ").read_bytes():
                processes += 1
                namespaces |= {os.readlink(process / "ns/net")} - {here}
    named = pathlib.Path("/run/netns")
    return {
        "namespaces": len(namespaces),
        "links": len(os.listdir("/sys/class/net")),
        "processes": processes,
        "mounts": len(pathlib.Path("/proc/self/mounts").read_text().splitlines()),
        "files": len(os.listdir(folder)),
        "named_namespaces": len(os.listdir(named)) if named.exists() else 0,
    }


def kill_unshare(lab: subprocess.Popen[str], number: int) -> None:
    """Kills the process between the lab and its inside."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        children = pathlib.Path(f"/proc/{lab.pid}/task/{lab.pid}/children").read_text().split()
        for child in children:
            with contextlib.suppress(OSError):
                if b"namespaces.py" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes():
                    return os.kill(int(child), number)
        time.sleep(0.001)
    raise TimeoutError("the lab has started nothing")


STOPS = {
    "SIGKILL to the lab": lambda lab: lab.send_signal(signal.SIGKILL),
    "SIGKILL to its group": lambda lab: os.killpg(lab.pid, signal.SIGKILL),
    "SIGKILL to unshare": lambda lab: kill_unshare(lab, signal.SIGKILL),
    "SIGTERM to the lab": lambda lab: lab.send_signal(signal.SIGTERM),
    "SIGINT to the lab": lambda lab: lab.send_signal(signal.SIGINT),
}


def one_lab(stop: str | None, after: float, folder: str) -> int:
    """Runs a lab, stopped ``after`` seconds from its start or left to end; its exit code."""
    lab = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", LAB, "600" if stop else "0.1", str(WORKERS)],
        env=os.environ | {"TMPDIR": folder, "LIONCUB_LAB_CLEANUP": MARKER},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, text=True,
    )  # fmt: skip
    assert lab.stdout and lab.stdout.readline() == "imported\n"
    if stop:
        time.sleep(after)
        STOPS[stop](lab)
    lab.communicate(timeout=120)
    return lab.returncode


def settled(before: dict[str, int], folder: str) -> dict[str, int]:
    """The counts, once they are as before or the time for that is up."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (found := on_the_machine(folder)) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(args, folder)


def measure(args: argparse.Namespace, folder: str) -> None:
    """All runs, a table of them, and the summary."""
    draw = random.Random(args.seed)
    stops: list[str | None] = [*STOPS, *[None] * (args.runs - len(STOPS))]
    draw.shuffle(stops)
    before = on_the_machine(folder)
    table = Table("run", "stopped by", "after s", "exit code", "settled s", "left")
    kept = dict.fromkeys(before, 0)
    codes = []
    for index, stop in enumerate(stops):
        after = draw.uniform(0.02, 0.8)
        codes.append(one_lab(stop, after, folder))
        ended = time.monotonic()
        left = {name: n - before[name] for name, n in settled(before, folder).items()}
        kept = {name: max(n, left[name], key=abs) for name, n in kept.items()}
        took = f"{time.monotonic() - ended:.2f}"
        said = str({name: n for name, n in left.items() if n} or "nothing")
        table.add_row(
            str(index), stop or "", f"{after:.2f}" if stop else "", str(codes[-1]), took, said
        )
    Console(width=110).print(table)
    finished = [code for stop, code in zip(stops, codes, strict=True) if stop is None]
    after_all = settled(before, folder)
    summary: dict[str, Any] = {
        "benchmark": "lab_cleanup",
        "runs": len(stops),
        "stopped": len(STOPS),
    }
    summary |= {"by_sigkill": sum("SIGKILL" in stop for stop in STOPS), "seed": args.seed}
    summary |= {"finished_with_0": finished.count(0), "workers": WORKERS}
    summary |= {f"{name}_before": n for name, n in before.items()}
    summary |= {f"{name}_after": n for name, n in after_all.items()}
    summary |= {f"{name}_left_at_most": n for name, n in kept.items()}
    report.finish(summary, args.save)


if __name__ == "__main__":
    main()
