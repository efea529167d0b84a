"""Ends what a killed `keep` leaves behind; a program, never imported: the standard library starts at once.

`keep` starts it once a run, as ``watcher.py FOLDER``, and through it each worker, as ``watcher.py PIPE
COMMAND...``: that one tells the watcher its number and then becomes the command. Only `keep`, and workers
that have not told yet, hold the pipe. So its end means that `keep` has ended, even by SIGKILL, and that
all workers are known: the watcher kills each with all of its session, and removes the folder. Linux's
PR_SET_PDEATHSIG would reach workers but not what they started, and end with a thread, not a process.
"""

import contextlib
import os
import shutil
import signal
import sys
import time

REMOVALS = 100  # one each 0.1 s: what was killed may be inside a long write


def watch(folder: str) -> None:
    """Reads the numbers of workers; an empty line says that those before it have ended."""
    for session in sys.stdin.read().rpartition("\n\n")[2].split():
        with contextlib.suppress(OSError):  # it has ended
            os.killpg(int(session), signal.SIGKILL)
    for _ in range(REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            break
        time.sleep(0.1)


def become(pipe: int, command: list[str]) -> None:
    """Tells the watcher of this process, which then is the command."""
    os.write(pipe, b"%d\n" % os.getpid())
    os.close(pipe)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; the command may not
        signal.signal(number, signal.SIG_DFL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:]) if sys.argv[2:] else watch(sys.argv[1])
