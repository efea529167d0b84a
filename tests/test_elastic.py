"""Runs that go on when a worker dies: real processes, killed, restarted, left out and stopped."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lioncub_jax import elastic

ROOT = Path(__file__).parents[1]


def program(text):
    return [sys.executable, "-c", text]


def kept(command, workers, tmp_path, **options):
    """The outcome, the lines, and the events."""
    lines, events = [], tmp_path / "events.jsonl"
    outcome = elastic.keep(command, workers, events=events, write=lines.append, **options)
    return outcome, lines, [json.loads(line) for line in events.read_text().splitlines()]


def names(events):
    return [event["event"] for event in events]


WHO = "import os; start, rank = int(os.environ['LIONCUB_START']), int(os.environ['RANK']); "


def test_workers_find_each_other_and_end(tmp_path):
    said = WHO + "print(os.environ['JAX_COORDINATOR_ADDRESS'], rank, os.environ['WORLD_SIZE'])"
    outcome, lines, events = kept(program(said), 3, tmp_path)
    assert outcome == (0, 1, 3) and names(events) == ["started", "ended"]
    found = [re.fullmatch(r"(\d) \| (127.0.0.1:\d+) (\d) 3", line) for line in lines]
    found = [m.groups() for m in found if m]
    assert sorted((place, rank) for place, _, rank in found) == [("0", "0"), ("1", "1"), ("2", "2")]
    assert len({address for _, address, _ in found}) == 1
    assert lines[0] == "lioncub: start 1: 3 workers" and lines[-1] == "lioncub: all workers ended"


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
    text = "import sys; [print('line', i) for i in range(30)]; sys.exit('no such data')"
    outcome, lines, events = kept(program(text), 2, tmp_path)
    assert outcome == (1, 3, 2)
    assert names(events) == ["started", "died"] * 3 + ["gave_up"]
    (at,) = [i for i, line in enumerate(lines) if "giving up" in line]
    assert re.search(
        "3 starts in a row ended within 60 s .*, and min is 2: giving up. The last output of",
        lines[at],
    )
    assert (
        lines[-1] == "    no such data"
        and "    line 20" in lines[at:]
        and "    line 3" not in lines[at:]
    )
    assert events[-1]["last"][-1] == "no such data"


def test_a_place_that_dies_again_and_again_is_left_out(tmp_path):
    """Three workers; the third place is broken for as long as there are three."""
    text = WHO + "import sys, time\nif os.environ['WORLD_SIZE'] == '3':\n  "
    text += "sys.exit(7) if rank == 2 else time.sleep(999)"
    outcome, lines, events = kept(program(text), 3, tmp_path, least=2, strikes=2)
    assert outcome == (0, 3, 2)
    assert names(events) == ["started", "died", "started", "died", "left_out", "started", "ended"]
    assert events[4]["place"] == 2 and events[5]["places"] == [0, 1]
    assert any("place 2 died 2 times in a row and is left out: 2 workers go on" in x for x in lines)


def test_other_places_that_die_are_not_left_out(tmp_path):
    """Not the place is broken, so taking one away would not help."""
    text = WHO + "import sys, time\nsys.exit(5) if rank == start % 2 else time.sleep(999)"
    outcome, _, events = kept(program(text), 2, tmp_path, least=1)
    assert outcome == (5, 3, 2) and names(events)[-1] == "gave_up"


def test_only_a_start_that_stepped_and_lasted_is_no_strike(tmp_path):
    text = WHO + "import sys, time\nif start != 2:\n  time.sleep(0.4)\n"
    text += "if start in (1, 2, 4):\n  open(os.environ['LIONCUB_STEPPED'], 'w')\nsys.exit(9)"
    outcome, lines, events = kept(program(text), 1, tmp_path, strikes=3, settled=0.3)
    # 2 was short and 3 made no step; 4 did both, so that three more have to fail.
    assert outcome == (9, 7, 1) and names(events)[-1] == "gave_up"
    said = (
        "3 starts in a row ended within 0.3 s or before a step (lioncub_jax.elastic.stepped() says"
    )
    assert any(said in line for line in lines)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_nothing_is_left_behind(tmp_path):
    """Neither the others nor what they started."""
    text = WHO + "import subprocess, sys, time\n"
    text += f"child = subprocess.Popen(['sleep', '999']); open(f'{tmp_path}/{{child.pid}}', 'w')\n"
    text += "time.sleep(0.5); sys.exit(rank) if rank else time.sleep(999)"
    outcome, _, _ = kept(program(text), 2, tmp_path, strikes=2)
    assert outcome.exit_code == 1
    pids = [int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal()]
    assert len(pids) == 4
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


STAYS = (
    WHO
    + """
import signal, sys, time
def save(number, frame):
    print('saved', flush=True)
    sys.exit(75 if start == 1 else 0)
signal.signal(signal.SIGTERM, save)
print('ready', flush=True)
time.sleep(999)
"""
)


def signalled(tmp_path, numbers):
    """`lioncub run` in a process of its own; a signal each time that all workers are ready."""
    events = tmp_path / "events.jsonl"
    command = [sys.executable, "-m", "lioncub_jax", "run", "--workers", "2"]
    command += ["--events", str(events), "--", *program(STAYS)]
    lines, ready = [], 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as running:
        watchdog = threading.Timer(60, running.kill)
        watchdog.start()
        for line in running.stdout:
            lines.append(line.rstrip("\n"))
            ready += line.endswith("| ready\n")
            if ready == 2 and numbers:
                ready = 0
                running.send_signal(numbers.pop(0))
        watchdog.cancel()
    return running.returncode, lines, [json.loads(x) for x in events.read_text().splitlines()]


def test_sigusr1_saves_and_starts_all_places_again_and_sigterm_ends_them(tmp_path):
    code, lines, events = signalled(tmp_path, [signal.SIGUSR1, signal.SIGTERM])
    assert code == 128 + signal.SIGTERM
    assert names(events) == ["started", "all_again", "started", "stopped"]
    assert lines.count("0 | saved") == lines.count("1 | saved") == 2
    assert {"lioncub: all 2 places again", "lioncub: ended by SIGTERM"} < set(lines)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"workers": 0}, "workers=0: give a whole number of 1 or more"),
        ({"workers": 2, "least": 0}, "min=0: give a whole number"),
        ({"workers": 2, "strikes": 0}, "strikes=0: give a whole number"),
        ({"workers": 2, "settled": 0}, "settled=0: give a time above zero"),
        ({"workers": 2, "command": []}, "there is no command to run"),
    ],
)
def test_runs_that_cannot_be(given, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        elastic.keep(**{"command": ["true"]} | given)
