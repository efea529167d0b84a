"""Processes that end together: their ends and signals in one queue, and their output in another.

For the lab's hub, a program of its own: only the standard library.
Whoever watches never writes: a reader that stops, such as a paused pager, delays no end.
"""

import contextlib
import os
import queue
import signal
import subprocess
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

LONGEST_LINE = 65536  # of output, in bytes; longer ones are cut
WAITING = 1 << 22  # characters of output that are kept for a reader who is slow
PATIENCE = 5.0  # seconds until a reader who takes nothing has stopped
ORPHANS_SECONDS = (
    1.0  # for what a member started in a session of its own, and still holds its output
)


class Member(NamedTuple):
    """A process, first of a session of its own: what it starts is in it.

    Attributes:
      place: its number.
      process: it.
    """

    place: int
    process: subprocess.Popen[bytes]


# The number of a signal, or a member that has ended.
News = queue.SimpleQueue[int | Member]


class Output:
    """Lines on their way to a reader, written by a thread of their own.

    Args:
      write: takes a line.
      failed: called where `write` has raised; what comes later is dropped.
    """

    def __init__(self, write: Callable[[str], object], failed: Callable[[], object]):
        self._write, self._failed = write, failed
        self._lines, self._size = deque[str | None](), 0
        self._missing = Counter[str]()
        self._changed = threading.Condition()
        self._hurried = self._stopped = False  # stopped: the reader takes nothing
        self.error: Exception | None = None
        _begun(self._run)

    def line(self, text: str) -> None:
        """A line that is not dropped; does not wait."""
        with self._changed:
            self._lines.append(text)
            self._size += len(text) + 1
            self._changed.notify_all()

    def offer(self, source: str, text: str) -> None:
        """A line behind its source; waits for room, and drops it where the reader has stopped."""
        with self._changed:
            patience = 0.0 if self._stopped or self._hurried else PATIENCE
            self._stopped = not self._changed.wait_for(lambda: self._size < WAITING, patience)
            if self._stopped:
                self._missing[source] += 1
                return
            self._say_missing(source)
            self.line(source + text)

    def hurry(self) -> None:
        """Bounds all waits for the reader from now on; may be called by a handler of signals."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def close(self) -> None:
        """Waits until all is written; after `hurry` some seconds at most.

        Raises:
          Exception: what `write` raised.
        """
        with self._changed:
            for source in list(self._missing):
                self._say_missing(source)
            self._changed.wait_for(lambda: self._hurried or not self._size)
            self._changed.wait_for(lambda: not self._size, PATIENCE)
            self._lines.append(None)
            self._changed.notify_all()
        if self.error:
            raise self.error

    def _say_missing(self, source: str) -> None:
        if lines := self._missing.pop(source, 0):
            self.line(f"{source}({lines} lines are missing: nobody took them for {PATIENCE:g} s)")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                text = self._lines.popleft()
            if text is None:
                return
            try:
                if not self.error:
                    self._write(text)
            except Exception as error:
                self.error = error
                self._failed()
            with self._changed:
                self._size -= len(text) + 1
                self._changed.notify_all()


class Group:
    """Processes that end together.

    Args:
      news: members that have ended; whoever catches signals puts their numbers there.
      output: takes every line, behind the number of its place.
    """

    def __init__(self, news: News, output: Output):
        self.members: list[Member] = []
        self._news, self._output = news, output
        self._readers: list[threading.Thread] = []

    def start(self, place: int, command: list[str], **how: Any) -> None:
        """Starts a process and reads its output."""
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, **how,
        )  # fmt: skip
        member = Member(place, process)
        self.members.append(member)
        _begun(self._wait, member)
        self._readers.append(_begun(self._read, member))

    def next(self) -> int | Member:
        """The next signal, or member that has ended."""
        return self._news.get()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to all members and to what they have started."""
        for member in self.members:
            with contextlib.suppress(ProcessLookupError):  # the whole session, or none is left
                os.killpg(member.process.pid, number)

    def end(self) -> None:
        """Kills all, and reads the rest of their output."""
        self.kill()
        for member in self.members:
            member.process.wait()
        for reader in self._readers:
            reader.join(ORPHANS_SECONDS)
        self.members, self._readers = [], []

    def _wait(self, member: Member) -> None:
        member.process.wait()
        self._news.put(member)

    def _read(self, member: Member) -> None:
        assert member.process.stdout
        with member.process.stdout as output:
            while raw := output.readline(LONGEST_LINE):
                line = raw.decode(errors="replace").removesuffix("\n")
                self._output.offer(f"{member.place} | ", line)


def _begun(task: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=task, args=arguments, daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def caught(take: Callable[[int], object], *numbers: int) -> Iterator[None]:
    """Takes signals instead of obeying them; in the main thread only, as Python has it."""
    is_main = threading.current_thread() is threading.main_thread()
    with contextlib.ExitStack() as after:
        for number in numbers if is_main else ():
            # A signal that is ignored, as by nohup, stays so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                before = signal.signal(number, lambda n, _: take(n))
                after.callback(signal.signal, number, before)
        yield
