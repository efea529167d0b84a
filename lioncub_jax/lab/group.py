"""Processes that end together, and one queue of what happens: lines of output, ends, signals.

For `lioncub_jax.elastic.keep` and for the lab's hub, a program of its own: the standard library alone.
"""

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

LONGEST_LINE = 65536  # of output, in bytes; longer ones are cut
ORPHANS_SECONDS = (
    1.0  # for what a member started in a session of its own, and still holds its output
)


class Member(NamedTuple):
    """A process, first of a session of its own: what it starts is in it."""

    place: int
    process: subprocess.Popen[bytes]


# The number of a signal; or a member and its next line, or None where it has ended.
News = queue.SimpleQueue[int | tuple[Member, str | None]]


class Group:
    """Processes that end together.

    Args:
      news: what happens; who catches signals puts their numbers there.
      show: takes every line of output.
    """

    def __init__(self, news: News, show: Callable[[Member, str], object]):
        self.members: list[Member] = []
        self._news, self._show = news, show
        self._readers: list[threading.Thread] = []

    def start(self, place: int, command: list[str], **how: Any) -> None:
        """Starts a process and reads what it says."""
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, **how,
        )  # fmt: skip
        member = Member(place, process)
        self.members.append(member)
        _begun(self._wait, member)
        self._readers.append(_begun(self._read, member))

    def next(self, until: float | None = None) -> int | Member | None:
        """The next signal, or member that has ended, or None at that time; shows lines on the way."""
        while True:
            try:
                left = None if until is None else max(0.0, until - time.monotonic())
                news = self._news.get(timeout=left)
            except queue.Empty:
                return None
            if isinstance(news, int):
                return news
            member, line = news
            if line is not None:
                self._show(member, line)
            elif member in self.members:
                return member

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to all members and to what they have started."""
        for member in self.members:
            with contextlib.suppress(ProcessLookupError):  # the whole session, or none is left
                os.killpg(member.process.pid, number)

    def end(self) -> None:
        """Kills all, and shows what was still said; a signal is left for whoever asks next."""
        self.kill()
        for member in self.members:
            member.process.wait()
        for reader in self._readers:
            reader.join(ORPHANS_SECONDS)
        while isinstance(news := self.next(until=0.0), Member):
            pass
        if news:
            self._news.put(news)
        self.members, self._readers = [], []

    def _wait(self, member: Member) -> None:
        member.process.wait()
        self._news.put((member, None))

    def _read(self, member: Member) -> None:
        assert member.process.stdout
        with member.process.stdout as output:
            while raw := output.readline(LONGEST_LINE):
                self._news.put((member, raw.decode(errors="replace").removesuffix("\n")))


def _begun(task: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=task, args=arguments, daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def caught(take: Callable[[int], object], *numbers: int) -> Iterator[None]:
    """Signals that are taken instead of obeyed; in the main thread alone, as Python has it."""
    is_main = threading.current_thread() is threading.main_thread()
    with contextlib.ExitStack() as after:
        for number in numbers if is_main else ():
            # A signal that is ignored, as by nohup, stays so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                before = signal.signal(number, lambda n, _: take(n))
                after.callback(signal.signal, number, before)
        yield
