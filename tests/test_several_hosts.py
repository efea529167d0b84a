"""The script for several hosts, on hosts of the lab: two CPU devices and a link for each."""

import os
import re
import runpy
import socket
import subprocess
import sys
import textwrap

import lab
import pytest
from conftest import run_python
from pages import ROOT, block, blocks, run_commands

PAGE = "how_to/several_hosts.md"
SCRIPT = ROOT / "examples/several_hosts.py"
TWO_CPUS = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(ROOT)}
AT = "--address worker0:1234 --hosts $WORLD_SIZE --index $RANK"


def test_the_page_shows_the_twelve_lines_that_run():
    parts = re.findall(r"# \[several hosts\]\n(.*?) *# \[/several", SCRIPT.read_text(), re.S)
    shown = "".join(map(textwrap.dedent, parts))
    assert block(PAGE, "several hosts") == shown and shown.count("\n") == 12


def in_the_lab(hosts, script):
    """What each host said, and its exit code."""
    said = []
    report = lab.run(
        lab.Network(hosts, rate=1e8), ["sh", "-c", script], environment=TWO_CPUS, write=said.append
    )
    return "\n".join(said), [host.exit_code for host in report.workers]


@pytest.mark.parametrize("four", [False, pytest.param(True, marks=pytest.mark.long)])
def test_two_hosts_save_and_go_on_and_four_go_on_with_devices_as_workers(four, machine, tmp_path):
    """The four have interfaces of other names, and one starts late."""
    folder, script = tmp_path / "runs/hosts", tmp_path / "flat.py"
    said = list(run_commands(block(PAGE, "run: lab"), tmp_path))
    script.write_text(SCRIPT.read_text().replace("two_level_mesh()", "two_level_mesh(1)"))
    other = "PATH=$PATH:/usr/sbin:/sbin; ip link set eth0 down name net$RANK up; [ $RANK = 3 ] && sleep 5"
    start = f"{other}; exec {sys.executable} {script} {AT} --folder {folder} --steps 150"
    if four:
        third, codes = in_the_lab(4, start)
        assert codes == [0] * 4, third
        said = [*said, third]
    losses = []
    for hosts, steps, lines in zip([2, 2, 4], [50, 100, 150], said, strict=False):
        told = re.findall(r"step (\d+) of \d+: loss ([\d.]+)", lines)
        assert told == [(str(steps), told[0][1])] * hosts  # of that step alone: it went on
        losses.append(float(told[0][1]))
    assert losses == sorted(losses, reverse=True)


def test_a_host_that_is_asked_to_stop_saves_first(tmp_path):
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    alone = f"--address localhost:{port} --hosts 1 --index 0 --steps 1000000"
    command = [sys.executable, str(SCRIPT), *alone.split(), "--folder", str(tmp_path)]
    with subprocess.Popen(
        command, env=os.environ | TWO_CPUS, stdout=subprocess.PIPE, text=True
    ) as run:
        assert any(line.startswith("step 50 of ") for line in run.stdout)
        run.terminate()
        *_, last = run.stdout
    step = re.fullmatch(r"asked to stop: saved step (\d+)\n", last)[1]
    assert run.returncode == 0 and (tmp_path / step).is_dir()


def test_a_host_with_a_wrong_address_and_one_that_waits_for_it_say_so(machine, tmp_path):
    start = f"exec {sys.executable} {SCRIPT} --folder {tmp_path} --wait 4"
    wrong = AT.replace("worker0", "10.77.0.9")
    said, codes = in_the_lab(2, f"[ $RANK = 1 ] && {start} {wrong}; {start} {AT}")
    assert codes == [1, 1]
    assert (
        "0 | error: process 0, after 4 s: worker0:1234 answers, but not all 2 processes came"
        in said
    )
    assert "1 | error: process 1, after 4 s: 10.77.0.9:1234 does not answer" in said


def test_commands_of_the_page_have_options_that_go_together(monkeypatch):
    options = runpy.run_path(str(SCRIPT))["options"]
    shown = [one.code for one in blocks(PAGE) if one.language == "bash" and SCRIPT.name in one.code]
    assert len(shown) == 4
    for code in shown:
        subprocess.run(["bash", "-n"], input=code, text=True, check=True)
        said = code.replace("\\\n", " ").partition(SCRIPT.name)[2]
        said = re.sub(r'"?\$\w+"?', "1", said).replace('"', "\n").splitlines()[0]
        monkeypatch.setattr(sys, "argv", ["", *said.split()])
        assert options().folder.endswith("/run")


def test_where_nobody_knows_of_other_hosts_it_says_what_to_give():
    done = run_python(SCRIPT, "--folder", "x", **TWO_CPUS)
    assert done.returncode == 1 and "error: nobody says which processes there are" in done.stderr
