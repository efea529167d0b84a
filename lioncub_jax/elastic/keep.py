"""Starts the workers of this machine, watches them, and keeps the run going.

A collective without one of its workers never ends, so when one dies the others are ended too, at once, and
all start again: the command goes on from its newest checkpoint. That is seconds, because nobody waits for
a heartbeat to be missed, and because what was compiled is kept. A place whose worker dies again and again
is left out, down to a least number of workers; SIGUSR1 gives all places another chance. What is left when
this process is killed, `lioncub_jax.elastic.watcher` ends.

This module and its function `keep` share a name: ``lioncub_jax.elastic.keep`` is the function.
"""

import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lioncub_jax.lab.run import program_of, wiring
from lioncub_jax.lab.supervise import caught
from lioncub_jax.progress import STEPPED

STOP_SECONDS = 30.0  # between asking workers to end, which then save, and killing them
CAUSE_SECONDS = 0.2  # in which others may die of the same cause; then who died first is known
ORPHANS_SECONDS = (
    1.0  # for what a worker started in a session of its own, and still holds its output
)
LAST_LINES = 15  # of output, shown when there is no going on
MEMORY = "LIONCUB_MEMORY"
LOCK = "keep.lock"  # in that folder; held for as long as the run lives
WATCHER = [sys.executable, "-I", "-S", str(Path(__file__).with_name("watcher.py"))]


class Outcome(NamedTuple):
    """How a run ended.

    Attributes:
      exit_code: 0; that of the worker that failed last; 128 and the number of a signal to `keep`.
      starts: how often the workers were started.
      workers: how many there were at the end.

    Example:
      See `keep`.
    """

    exit_code: int
    starts: int
    workers: int


class Worker(NamedTuple):
    """A process.

    Attributes:
      place: its number among all places; does not change when others are left out.
      process: the process, first of a session of its own.
      last: its last lines of output.
    """

    place: int
    process: subprocess.Popen[bytes]
    last: deque[str]


# The number of a signal; or a worker and its next line, or None where it has ended.
News = int | tuple[Worker, str | None]


def keep(
    command: Sequence[str],
    workers: int,
    *,
    least: int | None = None,
    strikes: int = 3,
    settled: float = 60.0,
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

    Args:
      command: the program and its arguments.
      workers: how many to start.
      least: with fewer it does not go on; None for all.
      strikes: after so many starts in a row that failed the place that died first is left out, or, where it
        must not be, the run ends with its last output. A start has failed that ended before its first
        step, however long it took: `stepped` says that there was one. A start before whose first
        step another program took its port is no strike; so many are forgiven in a run.
      settled: one that ended within so many seconds has failed too, whatever it did.
      events: a file to which every change is added, one JSON object a line; its folder must exist.
      write: takes a line: output of the workers behind their numbers, and what is done. What it raises
        ends the run as SIGTERM does, and is raised then.

    Raises:
      ValueError: for numbers that cannot be, and for no command, or one that is not there.

    Example:
      >>> from lioncub_jax import elastic
      >>> elastic.keep(["true"], 2, write=lambda line: None)
      Outcome(exit_code=0, starts=1, workers=2)

    Source: this library; started anew like torchrun's elastic agents.
    """
    least = workers if least is None else least
    _check(command, workers, least, strikes, settled)
    told: queue.SimpleQueue[News] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        ending = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)
        stack.enter_context(caught(told.put, *ending, signal.SIGUSR1))
        log = Log(stack, events, write, told)
        kept = stack.enter_context(_memory())
        watcher = stack.enter_context(_watcher(kept))
        run = Run(list(command), workers, least, strikes, settled, kept, watcher, told, log)
        outcome = run.to_its_end()
    if log.failed:
        raise log.failed
    return outcome


def _check(command: Sequence[str], workers: int, least: int, strikes: int, settled: float) -> None:
    for name, number in {"workers": workers, "min": least, "strikes": strikes}.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name}={number!r}: give a whole number of 1 or more")
    if least > workers:
        raise ValueError(
            f"min={least} is above workers={workers}: a run that starts with {workers} cannot go on with "
            f"{least}; give at most {workers}"
        )
    if not settled > 0:
        raise ValueError(f"settled={settled!r}: give a time above zero")
    program_of(command, os.environ.get("PATH", os.defpath))


class Log:
    """Says what happens: a line for people, and a JSON object for programs."""

    def __init__(
        self, stack: contextlib.ExitStack, events: Path | None, write: Callable[[str], object],
        told: "queue.SimpleQueue[News]",
    ):  # fmt: skip
        self._file = stack.enter_context(events.open("a", buffering=1)) if events else None
        self._write, self._told = write, told
        self.failed: Exception | None = None

    def line(self, text: str) -> None:
        """Shows it; where that fails, as on a closed terminal, workers are still given time to save."""
        try:
            if not self.failed:
                self._write(text)
        except Exception as error:
            self.failed = error
            self._told.put(signal.SIGPIPE)

    def event(self, event: str, line: str, **fields: Any) -> None:
        """Tells both; fields are for programs."""
        self.line(f"lioncub: {line}")
        if self._file:
            self._file.write(json.dumps({"event": event, "time": time.time(), **fields}) + "\n")


class Run:
    """The starts of a run, one after the other; see `keep` for the arguments."""

    def __init__(
        self, command: list[str], workers: int, least: int, strikes: int, settled: float,
        kept: str, watcher: int, told: "queue.SimpleQueue[News]", log: Log,
    ):  # fmt: skip
        self._command, self._workers, self._least = command, workers, least
        self._strikes, self._settled, self._kept = strikes, settled, kept
        self._watcher, self._told, self._log = watcher, told, log
        self._places = list(range(workers))
        self._starts = self._collisions = self._port = 0
        self._failed: list[int] = []  # places that died first, of the last starts in a row

    def to_its_end(self) -> Outcome:
        """Starts the workers until they end by themselves, or there is no going on."""
        while True:
            code = self._start()
            if code is not None:
                return Outcome(code, self._starts, len(self._places))

    def _start(self) -> int | None:
        """One start of all workers, until they have ended; the exit code, or None to start again."""
        began, self._starts = time.monotonic(), self._starts + 1
        with self._running() as running:
            self._log.event(
                "started", f"start {self._starts}: {len(running)} workers", start=self._starts,
                places=self._places, pids=[worker.process.pid for worker in running],
            )  # fmt: skip
            stopped, first = self._watched(running)
            seconds = time.monotonic() - began
        self._drain(0)
        if stopped == signal.SIGUSR1:
            self._places, self._failed = list(range(self._workers)), []
            self._log.event("all_again", f"all {self._workers} places again", start=self._starts)
            return None
        if stopped:
            self._log.event("stopped", f"ended by {signal.Signals(stopped).name}", signal=stopped)
            return 128 + stopped
        if first is None:
            self._log.event("ended", "all workers ended", start=self._starts)
            return 0
        return self._after(first, seconds)

    def _after(self, first: Worker, seconds: float) -> int | None:
        """What follows the death of a worker."""
        code = first.process.returncode
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        self._log.event(
            "died", f"worker {first.place} died {how} after {seconds:.1f} s; the others are ended",
            start=self._starts, place=first.place, code=code, seconds=round(seconds, 3),
        )  # fmt: skip
        stepped = self._stepped().exists()
        if not stepped and self._collisions < self._strikes and not _free_port(self._port):
            # All have ended, and it is in use. (Of jax's words none says that reliably.)
            self._collisions += 1
            self._log.event(
                "collided", f"another program has taken port {self._port}: on another, and no strike",
                start=self._starts, port=self._port,
            )  # fmt: skip
            return None
        strike = seconds < self._settled or not stepped
        self._failed = [*self._failed, first.place] if strike else []
        if len(self._failed) < self._strikes:
            return None
        if len(set(self._failed)) == 1 and len(self._places) > self._least:
            self._places.remove(first.place)
            self._log.event(
                "left_out",
                f"place {first.place} died {len(self._failed)} times in a row and is left out: "
                f"{len(self._places)} workers go on; SIGUSR1 starts all again",
                place=first.place, places=self._places,
            )  # fmt: skip
            self._failed = []
            return None
        self._log.event(
            "gave_up",
            f"{len(self._failed)} starts in a row ended within {self._settled:g} s or before a step "
            "(lioncub_jax.elastic.stepped() says that one is done; make_train_step calls it), and "
            f"min is {self._least}: giving up. The last output of worker {first.place}:",
            place=first.place, code=code, last=list(first.last),
        )  # fmt: skip
        for line in first.last:
            self._log.line(f"    {line}")
        return code if code > 0 else 128 - code

    @contextlib.contextmanager
    def _running(self) -> Iterator[list[Worker]]:
        """Processes, none of which outlives the block; nor do theirs."""
        running: list[Worker] = []
        readers = []
        self._port = _free_port()
        try:
            for index, place in enumerate(self._places):
                process = subprocess.Popen(
                    [*WATCHER, str(self._watcher), *self._command],
                    env=self._environment(index),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[self._watcher],
                    start_new_session=True,  # Ctrl-C is passed on, once
                )
                worker = Worker(place, process, deque(maxlen=LAST_LINES))
                running.append(worker)
                readers.append(
                    (worker, self._thread(self._read, worker), self._thread(self._wait, worker))
                )
            yield running
        finally:
            for worker in running:
                with contextlib.suppress(ProcessLookupError):  # the whole session, or none is left
                    os.killpg(worker.process.pid, signal.SIGKILL)
            for worker, reader, waiter in readers:
                waiter.join()
                reader.join(ORPHANS_SECONDS)
                if not reader.is_alive():
                    assert worker.process.stdout
                    worker.process.stdout.close()
            os.write(self._watcher, b"\n")

    def _environment(self, index: int) -> dict[str, str]:
        # Unless the user has set them. JAX leaves out what compiles fast, and there are many of these.
        kept = {
            MEMORY: self._kept,
            "JAX_COMPILATION_CACHE_DIR": f"{self._kept}/jax",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        own = wiring(["127.0.0.1"] * len(self._places), index, self._port, interface="lo")
        start = {"LIONCUB_START": str(self._starts), STEPPED: str(self._stepped())}
        return kept | dict(os.environ) | own | start

    def _stepped(self) -> Path:
        """What a worker makes when a step of this start is done."""
        return Path(self._kept, f"stepped-{self._starts}")

    def _thread(self, task: Callable[[Worker], None], worker: Worker) -> threading.Thread:
        started = threading.Thread(target=task, args=(worker,), daemon=True)
        started.start()
        return started

    def _read(self, worker: Worker) -> None:
        assert worker.process.stdout
        for raw in worker.process.stdout:
            self._told.put((worker, raw.decode(errors="replace").rstrip("\n")))

    def _wait(self, worker: Worker) -> None:
        worker.process.wait()
        self._told.put((worker, None))

    def _watched(self, running: list[Worker]) -> tuple[int, Worker | None]:
        """Until all have ended or one has died: the signal that ended them, or 0; and who died first."""
        alive, stopped, until = len(running), 0, None
        while alive:
            news = self._heard(until)
            if news is None:
                return stopped, None  # asked to end, and did not in time
            if isinstance(news, int):
                gone = news in (signal.SIGHUP, signal.SIGPIPE)
                if gone and stopped not in (0, signal.SIGUSR1):
                    continue  # a closed terminal says so more than once
                if stopped == news:
                    return stopped, None  # asked twice
                stopped, until = news, time.monotonic() + STOP_SECONDS
                for worker in running:
                    worker.process.send_signal(
                        signal.SIGINT if news == signal.SIGINT else signal.SIGTERM
                    )
            elif news in running:  # and not of an earlier start
                alive -= 1
                if news.process.returncode and not stopped:
                    self._drain(CAUSE_SECONDS)
                    return 0, news
        return stopped, None

    def _heard(self, until: float | None) -> Worker | int | None:
        """The next signal or worker that has ended, or None at that time; shows lines on the way."""
        while True:
            try:
                left = None if until is None else max(0.0, until - time.monotonic())
                news = self._told.get(timeout=left)
            except queue.Empty:
                return None
            if isinstance(news, int):
                return news
            worker, line = news
            if line is None:
                return worker
            worker.last.append(line)
            self._log.line(f"{worker.place} | {line}")

    def _drain(self, seconds: float) -> None:
        """Shows what is still said, and forgets who ends meanwhile."""
        until = time.monotonic() + seconds
        while isinstance(news := self._heard(until), Worker):
            pass
        if news is not None:
            self._told.put(news)  # a signal is for the next start


def memory() -> Path | None:
    """A folder in this machine's memory that stays from start to start of a run and ends with it.

    For ``Snapshots`` and ``make_train_step(programs=)``. `keep` and ``lioncub run`` make it; under another
    launcher set ``LIONCUB_MEMORY`` to a folder of the run's own, such as ``/dev/shm/$SLURM_JOB_ID``.

    Returns:
      The folder, or None where there is none.

    Raises:
      ValueError: for an empty ``LIONCUB_MEMORY``.

    Example:
      >>> from lioncub_jax import elastic
      >>> elastic.memory() is None
      True

    Source: this library.
    """
    folder = os.environ.get(MEMORY)
    if folder == "":
        raise ValueError(f"{MEMORY} is set and empty: give a folder, or unset it")
    return None if folder is None else Path(folder)


@contextlib.contextmanager
def _memory() -> Iterator[str]:
    """A folder for the run; removes those of this user's runs that were killed with their watcher."""
    import fcntl  # not on Windows, where `memory` is of use

    # Linux has it.
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
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
            new.rename(Path(own, LOCK))  # so nobody finds it free while this lives
            yield own


@contextlib.contextmanager
def _watcher(folder: str) -> Iterator[int]:
    """The pipe to a watcher, which a worker gets on its way."""
    read, write = os.pipe()  # `read` stays open, so that a killed watcher harms nobody
    watcher = subprocess.Popen([*WATCHER, folder], stdin=read, start_new_session=True)
    try:
        yield write
    finally:
        os.close(write)
        watcher.wait()
        os.close(read)


def _free_port(port: int = 0) -> int:
    """That port, or any; 0 where another program has it, on whatever address."""
    with socket.socket() as probe:
        # What is left of connections of the dead does not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind(("", port))
        return int(probe.getsockname()[1])
