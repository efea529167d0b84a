"""What is done to a run: workers killed or stopped, a link pulled out, a disk full or read-only.

All of it is real: signals; a port of the lab's bridge that is set down; a file system in memory that is
filled to its last byte, or made read-only, as ext4 makes itself when its disk errs. What does not last
for ever lasts until ``over()``.
"""

import contextlib
import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

DISK = "64m"  # of which a run needs a few
BLOCK = bytes(1 << 16)
TICK, PATIENCE = 0.05, 20.0  # seconds

Over = Callable[[], bool]


def wait(over: Over) -> None:
    """Returns when it is over."""
    while not over():
        time.sleep(TICK)


def kill(pids: list[int]) -> None:
    """SIGKILL."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def stop(pids: list[int], over: Over) -> None:
    """SIGSTOP, and then SIGCONT."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    wait(over)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def unplug(lab: int, places: list[int], over: Over) -> None:
    """The links of workers of a lab, of which the process is given, go down, and up again.

    The bridge's end is set down, so the worker's has no carrier: as if somebody pulled out the cable.
    """
    (unshare,) = children(lab)
    (hub,) = children(unshare)
    ports(hub, places, "down")
    wait(over)
    if os.path.exists(f"/proc/{hub}"):  # or the lab has ended, and its links with it
        ports(hub, places, "up")


def children(pid: int) -> list[int]:
    """The processes that a process has started and that still run."""
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ports(hub: int, places: list[int], state: str) -> None:
    """Sets the bridge's ends of links up or down."""
    for place in places:
        link = ["ip", "link", "set", f"port{place}", state]
        subprocess.run(["nsenter", "--net", "--target", str(hub), *link], check=True)


@contextlib.contextmanager
def disk_of(folder: Path) -> Iterator[None]:
    """A small file system in memory at a folder."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "faults", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def fill(disk: Path, over: Over) -> None:
    """Not a byte more fits on the disk; nor where something is deleted meanwhile."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        while not over():
            try:
                file.write(BLOCK)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                time.sleep(TICK)
    filler.unlink()


def forbid(disk: Path, over: Over) -> None:
    """Nothing can be opened for writing, made or renamed on the disk.

    The kernel refuses while files are open for writing, so it is asked until there is a moment without.
    """
    until = time.monotonic() + PATIENCE
    while remounted(disk, "ro").returncode:
        if time.monotonic() > until:
            raise OSError(f"{disk} has had files open for writing for {PATIENCE:g} s")
    wait(over)
    remounted(disk, "rw").check_returncode()


def remounted(disk: Path, how: str) -> "subprocess.CompletedProcess[bytes]":
    """Asks the kernel for it."""
    return subprocess.run(["mount", "-o", f"remount,{how}", disk], capture_output=True)
