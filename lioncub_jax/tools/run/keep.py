"""Starts the workers of this machine, watches them, and keeps the run going.

A collective without one of its workers never ends. So when one dies the others are ended at once, and all
start again: the command goes on from its newest state. That takes seconds: no process waits for a
heartbeat, and compiled programs are kept. A place with a worker that dies again and again is left out,
down to a least number of workers; SIGUSR1 gives all places another chance. When this process is killed,
`lioncub_jax.tools.run.watcher` ends the workers.

This module and its function `keep` share a name: ``lioncub_jax.tools.run.keep`` is the function.
"""

import contextlib
import dataclasses
import errno
import json
import os
import queue
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from lioncub_jax.tools.lab.group import Group, Member, News, Output, caught
from lioncub_jax.tools.lab.run import program_of, wiring
from lioncub_jax.tools.run.progress import STEPPED

MOST = 1022  # workers, as in the lab
STRIKES = 3  # starts in a row that fail until a worker is left out, or the run ends
SETTLED_SECONDS = 60.0  # a start that ends within them has failed, whatever it did
STOP_SECONDS = 30.0  # between asking workers to end, which then save, and killing them
MEMORY = "LIONCUB_MEMORY"
LOCK = "keep.lock"  # in that folder; held for as long as the run lives
WATCHER = [sys.executable, "-I", "-S", str(Path(__file__).with_name("watcher.py"))]


class Outcome(NamedTuple):
    """The end of a run.

    Attributes:
      exit_code: 0; that of the worker that failed last; 128 and the number of a signal to `keep`.
      starts: how often the workers were started.
      num_workers: how many there were at the end.

    Example:
      See `keep`.
    """

    exit_code: int
    starts: int
    num_workers: int


def keep(
    command: Sequence[str],
    num_workers: int,
    *,
    least: int | None = None,
    events: Path | None = None,
    write: Callable[[str], object] = print,
) -> Outcome:
    """Runs a command as so many workers to its end, whoever dies on the way.

    Workers find each other by ``jax.distributed.initialize()`` without arguments, as in the lab. The
    command must go on from where it was when it is started again, as ``train_gpt.py --checkpoint DIR
    --resume`` does, with fewer workers too. SIGINT is passed on and ends the run; SIGTERM, SIGQUIT and
    SIGHUP end it too and reach workers as SIGTERM; who asks twice does not wait, but for SIGHUP, which a
    closed terminal sends twice. SIGUSR1 asks the workers to end, by SIGTERM, and starts all places anew.
    Workers do not outlive this process, even where it is killed.

    After three starts in a row that failed the place that died first is left out, or, where it must not be,
    the run ends with its last output. A start has failed that ended within a minute, or before its first
    step, however long it took: `stepped` says that there was one.

    Args:
      command: the program and its arguments.
      num_workers: how many to start.
      least: with fewer it does not go on; None for all.
      events: a file to which every change is added, one JSON object a line; its folder must exist.
      write: takes a line: output of the workers behind their numbers, and what is done; called by a
        thread. Workers wait 5 s for one that does not return, then lines are dropped and counted. What it
        raises ends the run as SIGTERM does, and is raised then.

    Raises:
      ValueError: for numbers that cannot be, for no command, or one that is not there, and where others may
        rename what is in ``/dev/shm`` and in ``TMPDIR``.

    Example:
      >>> from lioncub_jax.tools import run
      >>> run.keep(["true"], 2, write=lambda line: None)
      Outcome(exit_code=0, starts=1, num_workers=2)

    Source: this library; started anew like torchrun's elastic agents.
    """
    least = num_workers if least is None else least
    if not 1 <= least <= num_workers <= MOST:
        raise ValueError(
            f"min={least}, workers={num_workers}: give whole numbers from 1 to {MOST}, min at most workers"
        )
    program_of(command, os.environ.get("PATH", os.defpath))
    news: News = queue.SimpleQueue()
    output = Output(write, failed=lambda: news.put(signal.SIGPIPE))

    def take(number: int) -> None:
        news.put(number)
        if number != signal.SIGUSR1:
            output.hurry()

    ending = signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP
    with caught(take, *ending, signal.SIGUSR1):
        with (
            open(events or os.devnull, "ab", buffering=0, opener=_without_waiting) as file,
            _memory() as kept,
            _watcher(kept) as watcher,
        ):
            log, group = Log(output.line, file), Group(news, output)
            run = Run(
                command=[*command],
                num_places=num_workers,
                places=[*range(num_workers)],
                least=least,
                kept=kept,
                watcher=watcher,
                log=log,
                group=group,
            )
            while (code := run.start()) is None:
                pass
        output.close()
    return Outcome(code, log.start, len(run.places))


def _without_waiting(name: str, flags: int) -> int:
    """Opens a file; a pipe without a reader is an error."""
    return os.open(name, flags | os.O_NONBLOCK, 0o666)


@dataclasses.dataclass
class Log:
    """Events as lines for people and JSON objects for programs."""

    line: Callable[[str], object]
    file: FileIO
    start: int = 0
    rest: bytes = b""  # not taken by the disk yet
    warned: bool = False

    def event(self, event: str, line: str, **fields: Any) -> None:
        """Adds an event; a disk that takes none ends no training."""
        self.line(f"lioncub: {line}")
        about = {"time": time.time(), "event": event, "start": self.start}
        self.rest += json.dumps(about | fields).encode() + b"\n"
        try:
            while self.rest:
                taken = self.file.write(self.rest)
                if taken is None:  # a pipe that is full
                    raise BlockingIOError(errno.EAGAIN, "nobody reads it")
                self.rest = self.rest[taken:]
        except OSError as error:
            if not self.warned:
                self.line(f"lioncub: warning: {self.file.name} takes no events ({error.strerror})")
            self.warned = True


@dataclasses.dataclass
class Run:
    """The starts of a run, one after the other; see `keep` for what is given."""

    command: list[str]
    num_places: int
    places: list[int]  # those that are not left out
    least: int
    kept: str  # a folder in memory
    watcher: int  # the pipe to it
    log: Log
    group: Group
    failed: list[int] = dataclasses.field(default_factory=list)  # places that died first, in a row

    def start(self) -> int | None:
        """One start of all workers, until they have ended; the exit code, or None to start again."""
        began = time.monotonic()
        with socket.create_server(("127.0.0.1", 0)) as free:
            coordinator = "{}:{}".format(*free.getsockname())
        self.log.start += 1
        try:
            for index, place in enumerate(self.places):
                self.group.start(
                    place,
                    [*WATCHER, str(self.watcher), *self.command],
                    env=self._environment(index, coordinator),
                    pass_fds=[self.watcher],
                )
            pids = [worker.process.pid for worker in self.group.members]
            line = f"start {self.log.start}: {len(pids)} workers"
            self.log.event("started", line, places=self.places, pids=pids)
            end = self._wait()
            seconds = time.monotonic() - began
        finally:  # none outlives its start
            self.group.end()
            os.write(self.watcher, b"\n")
        if isinstance(end, Member):
            return self._handle_death(end, seconds)
        if end == signal.SIGUSR1:
            self.places, self.failed = [*range(self.num_places)], []
            self.log.event("all_again", f"all {self.num_places} places again")
            return None
        if end:
            self.log.event("stopped", f"ended by {signal.Signals(end).name}")
            return 128 + end
        self.log.event("ended", "all workers ended")
        return 0

    def _wait(self) -> int | Member:
        """Waits until all have ended or one has died: the one, or the signal that ended them, or 0."""
        alive, stopped, until = len(self.places), 0, None
        while alive:
            news = self.group.next(until)
            if isinstance(news, Member):
                alive -= 1
                if news.process.returncode and not stopped:
                    return news
                continue
            if stopped not in (0, signal.SIGUSR1) and news in (signal.SIGHUP, signal.SIGPIPE):
                continue  # a closed terminal says so more than once
            if news is None or news == stopped:
                break  # asked twice, or they did not end in time
            stopped, until = news, time.monotonic() + STOP_SECONDS
            for worker in self.group.members:
                number = signal.SIGINT if news == signal.SIGINT else signal.SIGTERM
                worker.process.send_signal(number)
        return stopped

    def _handle_death(self, first: Member, seconds: float) -> int | None:
        """Logs the death of a worker; the exit code of the run, or None to start again."""
        place, code = first.place, first.process.returncode
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        self.log.event(
            "died", f"worker {place} died {how} after {seconds:.1f} s; the others are ended",
            place=place, code=code,
        )  # fmt: skip
        strike = seconds < SETTLED_SECONDS or not self._stepped().exists()
        self.failed = [*self.failed, place] if strike else []
        if len(self.failed) < STRIKES:
            return None
        if len(set(self.failed)) == 1 and len(self.places) > self.least:
            self.places.remove(place)
            self.failed = []
            self.log.event(
                "left_out",
                f"place {place} died {STRIKES} times in a row and is left out: "
                f"{len(self.places)} workers go on; SIGUSR1 starts all again",
                place=place, places=self.places,
            )  # fmt: skip
            return None
        self.log.event(
            "gave_up",
            f"{STRIKES} starts in a row ended within {SETTLED_SECONDS:g} s or before a step "
            "(lioncub_jax.tools.run.stepped() after a step says that one is done), and "
            f"min is {self.least}: giving up. The last output of worker {place}:",
            place=place, code=code,
        )  # fmt: skip
        for line in first.last:
            self.log.line(f"    {line}")
        return code if code > 0 else 128 - code

    def _environment(self, index: int, coordinator: str) -> dict[str, str]:
        # Unless the user has set them. JAX leaves out what compiles fast, and there are many of these.
        kept = {
            MEMORY: self.kept,
            "JAX_COMPILATION_CACHE_DIR": f"{self.kept}/jax",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        own = wiring(coordinator, len(self.places), index, "lo")
        start = {"LIONCUB_START": str(self.log.start), STEPPED: str(self._stepped())}
        return kept | dict(os.environ) | own | start

    def _stepped(self) -> Path:
        """The file that a worker makes when a step of this start is done."""
        return Path(self.kept, f"stepped-{self.log.start}")


def memory_folder() -> Path | None:
    """A folder in this machine's memory that stays from start to start of a run and ends with it.

    For ``Snapshots``, which look at it at each use: it must be private to this user. `keep` and ``lioncub
    run`` make it; under another launcher set ``LIONCUB_MEMORY`` to a folder of the run's own that is not
    there yet: ``/dev/shm/lioncub-$SLURM_JOB_ID``, say.

    Returns:
      The folder, or None where there is none.

    Example:
      >>> from lioncub_jax.tools.run import memory_folder
      >>> memory_folder() is None
      True

    Source: this library.
    """
    folder = os.environ.get(MEMORY)
    return Path(folder) if folder else None


@contextlib.contextmanager
def _memory() -> Iterator[str]:
    """A folder for the run; removes those of this user's runs that were killed with their watcher."""
    import fcntl  # not on Windows, where `memory` is of use

    in_memory = _shared()
    for path in Path(in_memory).glob(f"lioncub-*/{LOCK}"):  # folders of launchers have none
        with contextlib.suppress(OSError):  # it lives, or ends just now
            if path.parent.lstat().st_uid == os.geteuid():
                with path.open("r+") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path.parent)
    with tempfile.TemporaryDirectory(prefix="lioncub-", dir=in_memory) as own:
        new = Path(own, "new")
        with new.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            new.rename(Path(own, LOCK))  # with this name it is locked for as long as this lives
            yield own


def _shared() -> str:
    """A folder where others cannot rename what is this user's; in memory, as Linux has it, if it can be."""
    folders = "/dev/shm", tempfile.gettempdir()
    for folder in folders:
        mode = os.stat(folder).st_mode if os.access(folder, os.W_OK) else 0o777
        if mode & stat.S_ISVTX or not mode & 0o022:
            return folder
    raise ValueError(
        f"no folder for the memory of the run: others may rename what is in {' and '.join(folders)}. Set "
        "TMPDIR to a folder of your own, or the sticky bit (chmod +t)"
    )


@contextlib.contextmanager
def _watcher(folder: str) -> Iterator[int]:
    """The pipe to a watcher, which a worker gets on its way."""
    read, write = os.pipe()  # `read` stays open, so that a killed watcher breaks no pipe
    watcher = subprocess.Popen([*WATCHER, folder], stdin=read, start_new_session=True)
    try:
        yield write
    finally:
        os.close(write)
        watcher.wait()
        os.close(read)
