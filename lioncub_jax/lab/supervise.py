"""The lab's side of a run: starts the hub, passes output and signals on, and says how it ended.

`lioncub_jax.lab.run` has the arguments and the network, `lioncub_jax.lab.namespaces` is what runs inside.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

STOP_SECONDS = 5.0  # between asking workers to end and killing them
TIMED_OUT = 124
LONGEST_LINE = 65536  # of output, in bytes; longer ones are cut


class Outcome(NamedTuple):
    """How a run has ended."""

    codes: list[int]  # exit code of each worker
    links: list[tuple[int, int]]  # bytes that each worker sent and received
    seconds: float
    exit_code: int  # of the run
    error: str  # what kept it from running, or ""


def supervise(
    start: list[str],
    plan: dict[str, Any],
    environment: dict[str, str],
    *,
    logs: Path | None,
    timeout: float | None,
    grace: float,
    write: Callable[[str], object],
) -> Outcome:
    """Runs a plan to its end; see `lioncub_jax.lab.run` for the arguments.

    Args:
      start: the command that starts the hub.
      plan: what the hub is told.
      environment: of the hub, and of workers under their own variables.
      logs: a folder for logs, or None.
      timeout: seconds, or None.
      grace: seconds for the others when a worker has failed.
      write: takes a line of output.
    """
    workers = len(plan["workers"])
    ending = Ending(workers, timeout, grace)
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(interrupts_of())
        sinks = sinks_of(stack, workers, logs, write)
        follow(Hub(stack, start, plan, environment), interrupts, sinks, ending)
    return ending.outcome()


class Ending:
    """Which workers have ended, when the others are to be signalled, and how the run ends."""

    def __init__(self, workers: int, timeout: float | None, grace: float):
        self.codes = [0] * workers
        self.links: list[tuple[int, int]] = []  # sent, received
        self.seconds = 0.0
        self.exit_code = 0
        self._timeout, self._grace = timeout, grace
        self._errors: list[str] = []
        self._due: list[tuple[float, int, int]] = []  # when, signal, exit code it stands for

    def tell(self, line: str) -> None:
        """Takes a message of the hub, or what `unshare` says in its place."""
        message: dict[str, Any] = json.loads(line) if line.startswith("{") else {"error": line}
        if "error" in message:
            self._errors.append(message["error"])
        if "started" in message and self._timeout:
            self._stop_in(self._timeout, TIMED_OUT)
        if "exit" in message:
            index, code = message["exit"]
            self.codes[index] = code
            if code and not self.exit_code:
                self.exit_code = code
                self._stop_in(self._grace, code)
        if "end" in message:
            self.links, self.seconds = message["end"], message["seconds"]
            self._due = []

    def interrupted(self, number: int) -> None:
        """Ctrl-C or SIGTERM came; the second time there is no more waiting."""
        if self.links:
            return  # all have ended
        again = self.exit_code == 128 + number
        self.exit_code = 128 + number
        self._stop_in(0, self.exit_code, patience=0 if again else STOP_SECONDS)

    def _stop_in(self, seconds: float, code: int, patience: float = STOP_SECONDS) -> None:
        start = time.monotonic() + seconds
        first, second = (start, signal.SIGTERM, code), (start + patience, signal.SIGKILL, code)
        # What is due earlier stays: a timeout must not put off a stop, nor a failure a timeout.
        self._due = sorted([*self._due, first, second])

    def wait(self) -> float | None:
        """Seconds until the next signal is due; None: there is none."""
        return max(0.0, self._due[0][0] - time.monotonic()) if self._due else None

    def due(self) -> Iterator[int]:
        """Signals to send now."""
        while self._due and self._due[0][0] <= time.monotonic():
            _, number, code = self._due.pop(0)
            self.exit_code = self.exit_code or code
            yield number

    def outcome(self) -> Outcome:
        """How the run has ended."""
        killed = "" if self.links else "The lab's inner process was killed, and with it all workers"
        error = "\n".join(self._errors) or killed
        return Outcome(self.codes, self.links, self.seconds, self.exit_code, error)


class Hub:
    """The process inside, with pipes to it and from every worker."""

    def __init__(
        self, stack: contextlib.ExitStack, start: list[str], plan: dict[str, Any],
        environment: dict[str, str],
    ):  # fmt: skip
        pipes = [os.pipe() for _ in plan["workers"]]
        self.outputs = [read for read, _ in pipes]
        for read in self.outputs:
            stack.callback(os.close, read)
        writes = [write for _, write in pipes]
        self._process = subprocess.Popen(
            start,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=writes,
            start_new_session=True,  # Ctrl-C at a terminal is for the lab to pass on
        )
        assert self._process.stdout
        stack.enter_context(self._process.stdout)
        stack.callback(self.end)
        for write in writes:
            os.close(write)
        self.messages = self._process.stdout.fileno()
        self.send(json.dumps(plan | {"outputs": writes}).encode() + b"\n")

    def send(self, data: bytes) -> None:
        """Writes to a hub that may be gone: then its messages end, which is noticed there."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def end(self) -> None:
        """Closes the hub's input, which ends it and everything inside; waits until that is done."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


class Lines:
    """Cuts what arrives into lines, for ``take``; the end is an arrival of nothing."""

    def __init__(self, take: Callable[[str], object]):
        self._take, self._rest = take, b""

    def __call__(self, data: bytes) -> None:
        """Takes what has arrived."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > LONGEST_LINE):
            whole, self._rest = [*whole, self._rest], b""
        for line in whole:
            self._take(line.decode(errors="replace"))


def sinks_of(
    stack: contextlib.ExitStack, workers: int, logs: Path | None, write: Callable[[str], object]
) -> list[Callable[[bytes], object]]:
    """Where the output of each worker goes."""

    def shown(index: int) -> Lines:
        return Lines(lambda line: write(f"{index} | {line}"))

    if logs is None:
        return [shown(index) for index in range(workers)]
    logs.mkdir(parents=True, exist_ok=True)
    files = [stack.enter_context(path.open("xb", buffering=0)) for path in log_files(logs, workers)]
    first, log = shown(0), files[0]

    def both(data: bytes) -> None:
        log.write(data)
        first(data)

    return [both, *(file.write for file in files[1:])]


def log_files(logs: Path, workers: int) -> list[Path]:
    """The file of each worker in the folder."""
    return [logs / f"worker{index}.log" for index in range(workers)]


@contextlib.contextmanager
def interrupts_of() -> Iterator[int]:
    """A descriptor from which the numbers of SIGINT and SIGTERM are read instead of obeyed."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        with caught(lambda n: os.write(write, bytes([n])), signal.SIGINT, signal.SIGTERM):
            yield read
    finally:
        os.close(read)
        os.close(write)


@contextlib.contextmanager
def caught(take: Callable[[int], object], *numbers: int) -> Iterator[None]:
    """Signals that are taken instead of obeyed; in the main thread alone, as Python has it."""
    before = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                # A signal that is ignored, as by nohup, stays so.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, lambda n, _: take(n))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def follow(
    hub: Hub, interrupts: int, sinks: Sequence[Callable[[bytes], object]], ending: Ending
) -> None:
    """Passes everything on until the hub and all output have ended."""

    def interrupted(numbers: bytes) -> None:
        for number in numbers:
            ending.interrupted(number)

    with selectors.DefaultSelector() as selector:
        selector.register(hub.messages, selectors.EVENT_READ, Lines(ending.tell))
        for output, sink in zip(hub.outputs, sinks, strict=True):
            selector.register(output, selectors.EVENT_READ, sink)
        selector.register(interrupts, selectors.EVENT_READ, interrupted)
        while len(selector.get_map()) > 1:
            for key, _ in selector.select(ending.wait()):
                data = os.read(key.fd, 65536)
                key.data(data)
                if not data:
                    selector.unregister(key.fd)
            for number in ending.due():
                hub.send(bytes([number]))
            if ending.links:
                hub.end()
