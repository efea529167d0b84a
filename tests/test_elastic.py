"""Runs that go on when a worker dies: real processes, killed, restarted, left out and stopped."""

import contextlib
import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import pytest
from conftest import soon, within
from pages import ROOT

from lioncub_jax.tools import run as elastic
from lioncub_jax.tools.lab import group


def program(text):
    return [sys.executable, "-c", text]


def kept(command, workers, tmp_path, **options):
    """The outcome, the lines, and the events."""
    lines, events = [], tmp_path / "events.jsonl"
    options = {"write": lines.append} | options
    outcome = elastic.keep(command, workers, events=events, **options)
    return outcome, lines, [json.loads(line) for line in events.read_text().splitlines()]


def names(events):
    return [event["event"] for event in events]


WHO = "import os; start, rank = int(os.environ['LIONCUB_START']), int(os.environ['RANK']); "


def test_workers_find_each_other_and_end(tmp_path):
    said = WHO + "print(os.environ['JAX_COORDINATOR_ADDRESS'], rank, os.environ['WORLD_SIZE'])"
    outcome, lines, events = kept(program(said), 3, tmp_path)
    assert outcome == (0, 1, 3) and names(events) == ["started", "ended"]
    ours = [line for line in lines if line.startswith("lioncub: ")]
    found = [line for line in lines if line not in ours]  # a worker may be faster than the first
    (address,) = {line.split()[2] for line in found}
    assert re.fullmatch(r"127.0.0.1:\d+", address)
    assert sorted(found) == [f"{place} | {address} {place} 3" for place in range(3)]
    assert (
        ours == ["lioncub: start 1: 3 workers", "lioncub: all workers ended"]
        and lines[-1] == ours[-1]
    )


def test_when_one_is_killed_all_start_again(tmp_path):
    """The others wait for it for ever, as a collective does."""
    text = WHO + "import signal, time; print('up', flush=True); time.sleep(0.3)\nif start == 1:\n  "
    text += "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(999)"
    outcome, lines, events = kept(program(text), 3, tmp_path)
    assert outcome == (0, 2, 3) and names(events) == ["started", "died", "started", "ended"]
    died = events[1]
    assert (died["place"], died["code"], died["start"]) == (1, -signal.SIGKILL, 1)
    assert any(
        re.fullmatch(r"lioncub: worker 1 died by SIGKILL after \d+\.\d s; the others are ended", x)
        for x in lines
    )


def test_a_command_that_cannot_run_is_not_started_for_ever(tmp_path):
    text = "import sys; [print('line', i, flush=True) for i in range(30)]; sys.exit('no such data')"
    outcome, lines, events = kept(program(text), 2, tmp_path)
    assert outcome == (1, 3, 2)
    assert names(events) == ["started", "died"] * 3 + ["gave_up"]
    said = "3 starts in a row ended within 60 s .*, and min is 2: giving up. The last output of"
    (at,) = [i for i, line in enumerate(lines) if re.search(said, line)]
    assert lines[-1] == "    no such data" and "    line 20" in lines[at:]
    assert "    line 3" not in lines[at:]


def test_a_place_that_dies_again_and_again_is_left_out(tmp_path):
    """Three workers; the third place is broken for as long as there are three."""
    text = WHO + "import sys, time\nif os.environ['WORLD_SIZE'] == '3':\n  "
    text += "sys.exit(7) if rank == 2 else time.sleep(999)"
    outcome, lines, events = kept(program(text), 3, tmp_path, least=2)
    assert outcome == (0, 4, 2)
    assert names(events) == ["started", "died"] * 3 + ["left_out", "started", "ended"]
    assert events[6]["place"] == 2 and events[7]["places"] == [0, 1]
    assert any("place 2 died 3 times in a row and is left out: 2 workers go on" in x for x in lines)


def test_other_places_that_die_are_not_left_out(tmp_path):
    """Not the place is broken, so taking one away would not help."""
    text = WHO + "import sys, time\nsys.exit(5) if rank == start % 2 else time.sleep(999)"
    outcome, _, events = kept(program(text), 2, tmp_path, least=1)
    assert outcome == (5, 3, 2) and names(events)[-1] == "gave_up"


def test_only_a_start_that_stepped_and_lasted_is_no_strike(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["lioncub_jax.tools.run.keep"], "SETTLED_SECONDS", 0.3)
    text = WHO + "import sys, time\nif start != 2:\n  time.sleep(0.4)\n"
    text += "if start in (1, 2, 4):\n  open(os.environ['LIONCUB_STEPPED'], 'w')\nsys.exit(9)"
    outcome, lines, events = kept(program(text), 1, tmp_path)
    # 2 was short and 3 made no step; 4 did both, so that three more have to fail.
    assert outcome == (9, 7, 1) and names(events)[-1] == "gave_up"
    assert any("3 starts in a row ended within 0.3 s or before a step" in line for line in lines)


def events_of(folder):
    path = folder / "events"
    return names(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def peak_memory(pid):
    """In kB."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


def gone(*pids, folder=Path("none")):
    def alive(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    return not soon(lambda: folder.exists() or any(map(alive, pids)), False)


# The first process of a terminal; under nohup and in the background of a script signals are ignored.
AT_A_TERMINAL = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
from lioncub_jax.tools.cli import main
sys.exit(main(["run", "--workers", "2", "--events", "events", "--", *sys.argv[1:]]))
"""
SAVES = (
    WHO
    + """
import signal, subprocess, sys, time
def save(number, frame):
    time.sleep(0.4)
    open(f'saved {start} {rank}', 'w')
    sys.exit(75 if start == 1 else 0)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, save)
child = subprocess.Popen(['sleep', '999'])
print('up', os.getpid(), child.pid, os.environ['LIONCUB_MEMORY'], flush=True)
open('up', 'w')
while True:
    time.sleep(0.1)  # a signal just before a sleep is heard after it
"""
)


class Terminal:
    """`lioncub run` at a terminal: its process, its workers and theirs, its folder in memory."""

    def __init__(self, tmp_path):
        screen, terminal = os.openpty()
        self.screen, self.pids = os.fdopen(screen, "r+b", buffering=0), []
        self.run = subprocess.Popen(
            [sys.executable, "-c", AT_A_TERMINAL, *program(SAVES)], start_new_session=True, cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=terminal, stdout=terminal, stderr=terminal,
        )  # fmt: skip
        os.close(terminal)

    def __enter__(self):
        self.wait_for_workers()
        return self

    def wait_for_workers(self):
        count = len(self.pids) + 4
        while len(self.pids) < count:
            line = self.screen.readline().decode().split()
            if line[2:3] == ["up"]:
                self.pids += map(int, line[3:5])
                self.folder = Path(line[5])

    def __exit__(self, *error):
        self.screen.close()
        for pid in [self.run.pid, *self.pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.run.wait()


def hang_up(at):
    """The kernel says it, and the shell."""
    at.run.send_signal(signal.SIGHUP)
    time.sleep(0.1)
    at.run.send_signal(signal.SIGHUP)


# What is done, the exit code, who saves. Who sees a closed terminal reads no exit code.
STOPS = {
    "hang up": (hang_up, 129, 2),
    "kill": (lambda at: at.run.kill(), -signal.SIGKILL, 0),
    "Ctrl-C": (lambda at: at.screen.write(b"\x03"), 130, 2),
    "Ctrl-backslash": (lambda at: at.screen.write(b"\x1c"), 131, 2),
    "close the terminal": (lambda at: at.screen.close(), None, 2),
}


@pytest.mark.parametrize("stop", STOPS)
def test_nothing_outlives_a_run_that_is_stopped(stop, tmp_path):
    way, code, saved = STOPS[stop]
    with Terminal(tmp_path) as at:
        assert at.folder.is_dir()
        way(at)
        assert at.run.wait(60) == code or code is None
        assert gone(*at.pids, folder=at.folder)
    assert len(list(tmp_path.glob("saved *"))) == saved


def test_sigusr1_saves_and_starts_all_places_again_and_sigterm_ends_them(tmp_path):
    with Terminal(tmp_path) as at:
        at.run.send_signal(signal.SIGUSR1)
        at.wait_for_workers()
        assert gone(*at.pids[:4])  # with what they had started
        at.run.terminate()
        assert at.run.wait(60) == 128 + signal.SIGTERM
    assert events_of(tmp_path) == ["started", "all_again", "started", "stopped"]
    assert len(list(tmp_path.glob("saved *"))) == 4


def test_what_a_run_left_that_was_killed_with_its_watcher_goes_at_the_next_start(tmp_path):
    """And nothing else: not the folder of a run that lives, nor one that a launcher has made."""
    with Terminal(tmp_path) as at:
        kept(["true"], 1, tmp_path)
        assert at.folder.exists()
        children = Path(f"/proc/{at.run.pid}/task/{at.run.pid}/children").read_text().split()
        at.run.send_signal(signal.SIGSTOP)
        for pid in children:  # among them the watcher
            os.kill(int(pid), signal.SIGKILL)
        at.run.kill()
        at.run.wait()
        assert at.folder.exists()
    with tempfile.TemporaryDirectory(prefix="lioncub-", dir=at.folder.parent) as other:
        kept(["true"], 1, tmp_path)
        assert not at.folder.exists() and Path(other).exists()


def test_the_coordinator_of_a_machine_is_reached_from_this_machine_alone(tmp_path):
    """What connects from outside could take a place: jax listens on all interfaces by default."""
    text = "import jax, os, socket; jax.distributed.initialize(); port = int(os.environ['MASTER_PORT'])\n"
    text += (
        "for at in ('127.0.0.1', '127.0.0.2'):\n  print(at, socket.socket().connect_ex((at, port)))"
    )
    _, lines, _ = kept(program(text), 1, tmp_path)
    assert {"0 | 127.0.0.1 0", f"0 | 127.0.0.2 {errno.ECONNREFUSED}"} < set(lines)


# The first start dies behind 200 MB of output, the second saves when it is asked to.
FLOODS = """
import os, sys, time
if os.environ['LIONCUB_START'] == '1':
    while not os.path.exists('go'):
        time.sleep(0.01)
    for _ in range(2000):
        os.write(1, b'x' * 99_999 + b'\\n')
    sys.exit(3)
"""


def test_a_reader_that_stops_blinds_nobody(tmp_path):
    """As a paused pager does: deaths and signals are noticed, and memory has an end."""
    patience = "from lioncub_jax.tools.lab import group; group.PATIENCE = 0.2; "
    patience += "from lioncub_jax.tools.cli import main; "
    run = "import sys; sys.exit(main(['run', '--workers', '1', '--events', 'events', '--', *sys.argv[1:]]))"
    with subprocess.Popen(
        [*program(patience + run), *program(FLOODS + SAVES)], stdout=subprocess.PIPE, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as child:  # fmt: skip
        try:
            assert soon(lambda: events_of(tmp_path), ["started"]) == ["started"]
            before = peak_memory(child.pid)
            (tmp_path / "go").touch()
            events = ["started", "died", "started"]
            assert soon(lambda: events_of(tmp_path), events) == events
            assert peak_memory(child.pid) - before < 50_000
            assert soon((tmp_path / "up").exists, True)
            child.terminate()
            assert child.wait(20) == 128 + signal.SIGTERM
        finally:
            child.kill()
    assert (tmp_path / "saved 2 0").exists()


def test_a_slow_reader_is_told_how_much_it_missed(tmp_path, monkeypatch):
    for name, value in {"PATIENCE": 0.1, "WAITING": 1000}.items():
        monkeypatch.setattr(group, name, value)
    text = "import pathlib; [print(i, flush=True) for i in range(50_000)]; pathlib.Path('done').touch()"
    monkeypatch.chdir(tmp_path)
    lines = []

    def write(line):
        lines.append(line)
        assert soon(Path("done").exists, True)

    kept(program(text), 1, tmp_path, write=write)
    missing = [
        int(found[1]) for x in lines if (found := re.search(r"\((\d+) lines are missing", x))
    ]
    assert missing and len(lines) - 2 - len(missing) + sum(missing) == 50_000


def test_events_that_nobody_takes_end_nothing(tmp_path):
    """A full disk, and a pipe whose reader has stopped; without a reader it is none."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with within(20):
        with pytest.raises(OSError, match="No such device"):
            elastic.keep(["true"], 1, events=pipe)
        with pipe.open("r+b", buffering=0) as reader:
            reader.write(bytes(fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ)))
            for events, why in (
                (pipe, "nobody reads it"),
                ("/dev/full", "No space left on device"),
            ):
                lines = []
                assert elastic.keep(["true"], 1, events=events, write=lines.append) == (0, 1, 1)
                assert lines.count(f"lioncub: warning: {events} takes no events ({why})") == 1
                assert lines[-1] == "lioncub: all workers ended"


def test_a_hang_up_that_is_ignored_stays_so(tmp_path):
    """As `nohup` has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        outcome, _, _ = kept(["sh", "-c", "kill -HUP $PPID; sleep 0.2"], 1, tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert outcome == (0, 1, 1)


def test_where_nobody_takes_the_output_workers_save(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def refuse(line):
        if "| up" in line:
            raise BrokenPipeError(line)

    with pytest.raises(BrokenPipeError):
        elastic.keep(program(SAVES), 1, write=refuse)
    assert Path("saved 1 0").exists()


def test_a_program_says_that_it_has_done_a_step_and_then_waits_for_none(tmp_path, monkeypatch):
    path = tmp_path / "stepped"
    monkeypatch.setenv("LIONCUB_STEPPED", str(path))
    elastic.stepped(jnp.ones(3))
    written = path.stat().st_mtime_ns
    elastic.stepped(())
    assert path.stat().st_mtime_ns == written
