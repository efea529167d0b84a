"""Workers in real network namespaces: what they see, how fast they are, and that nothing is left.

Where the machine does not let the lab run at all (some containers), the tests that need it are
skipped, with what the lab says is missing.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lab
import pytest
from conftest import soon
from lab import command
from pages import ROOT

PYTHON = [sys.executable, "-I", "-S", "-c"]
ONE, TWO = lab.Network(1), lab.Network(2)


@pytest.fixture
def run(clean):
    """``run(network, command, ...) -> (report, lines of output)``; nothing may be left of it."""

    def checked(network, command, **options):
        lines = []
        with clean():
            report = lab.run(network, command, **{"write": lines.append, **options})
        return report, lines

    return checked


# --- What is left of a run


@pytest.fixture
def left(monkeypatch):
    """Everything that a lab could leave on the machine: processes, with their networks, and more.

    Processes of this test, by a variable that those of other labs do not have.
    """
    marker = uuid.uuid4().hex
    monkeypatch.setenv("LIONCUB_LAB_TEST", marker)

    def traces():
        processes = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if marker.encode() in (process / "environ").read_bytes():
                    processes[process.name] = os.readlink(process / "ns/net")
        named, links = Path("/run/netns"), Path("/proc/net/dev").read_text().splitlines()
        return {
            "processes": processes,
            "links": sorted(line.split(":")[0] for line in links),
            "named namespaces": sorted(named.iterdir()) if named.exists() else None,
            "mounts": Path("/proc/self/mounts").read_text(),
            "hosts": Path("/etc/hosts").read_bytes(),
            "name": socket.gethostname(),
        }

    return traces


@pytest.fixture
def clean(machine, left):
    """A context after which nothing may be left."""

    @contextlib.contextmanager
    def checked():
        before = left()
        yield
        assert soon(left, before) == before

    return checked


def test_what_is_left_would_be_seen(left):
    with subprocess.Popen(["sleep", "83"]) as process:
        it = {str(process.pid)}
        assert soon(lambda: set(left()["processes"]), it) == it
        process.kill()


# --- What is refused before anything starts


BAD = [
    ({"num_workers": 0}, "num_workers is 0"),
    ({"num_workers": 1023}, "from 1 to 1022"),
    ({"rate": 0}, "rate is 0"),
    ({"rate": float("inf")}, "rate is inf"),
    ({"grace": -1}, "grace is -1"),
    ({"command": []}, "command is []"),
    ({"command": "ls -l"}, "as a list"),
    ({"command": ["lioncub-no-such"]}, "'lioncub-no-such' is not a program"),
]


@pytest.mark.parametrize(("given", "message"), BAD)
def test_bad_arguments_are_named_before_anything_starts(given, message, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    options = {"num_workers": 2, "command": ["true"], **given}
    network = {name: options.pop(name) for name in lab.Network._fields if name in options}
    with pytest.raises(ValueError, match=re.escape(message)):
        lab.run(lab.Network(**network), **options)


def make_program(path, *lines):
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return f"{path.parent}{os.pathsep}{os.environ['PATH']}"


def refused_by_the_machine(**network):
    with pytest.raises(lab.LabError) as error:
        lab.run(lab.Network(2, **network), ["true"])
    return str(error.value)


@pytest.mark.parametrize("tool", ["ip", "tc", "unshare"])
def test_a_missing_tool_is_named_with_its_package(tool, monkeypatch):
    found = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **at: None if name == tool else found("sh"))
    assert f"needs {tool}: install {lab.TOOLS[tool].split()[0]}" in refused_by_the_machine()


def test_other_systems_are_told_that_it_needs_linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "Linux" in refused_by_the_machine()


def test_a_machine_that_forbids_namespaces_is_told_what_to_do(monkeypatch, tmp_path):
    refusal = "echo 'unshare failed: Operation not permitted' >&2; exit 1"
    monkeypatch.setenv("PATH", make_program(tmp_path / "unshare", "#!/bin/sh", refusal))
    said = refused_by_the_machine()
    for words in ("run as root", "sysctl", "--privileged", "Operation not permitted"):
        assert words in said


@pytest.mark.parametrize("kind", lab.MISSING)
def test_a_kernel_without_a_part_is_told_which(kind, clean, monkeypatch, tmp_path):
    """A tool that answers as on such a kernel."""
    tools = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # which not every user has in PATH
    for name in ("ip", "tc"):
        path = make_program(
            tmp_path / name,
            "#!/bin/sh",
            "[ $1 = link ] && exit",
            f"input=$(cat); case $input in *'{kind}'*)",
            "echo 'Error: Unknown device type.' >&2; exit 2;; esac",
            f'echo "$input" | PATH=$PATH:/usr/sbin:/sbin exec {shutil.which(name, path=tools)} -batch -',
        )
    monkeypatch.setenv("PATH", path)
    with clean():
        said = refused_by_the_machine(rate=1e8)
    assert "modprobe" in said and lab.MISSING[kind] in said


# --- What workers see


SEES = """
import os, socket
names = "MASTER_ADDR MASTER_PORT RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GLOO_SOCKET_IFNAME http_proxy"
control = open('/proc/sys/net/ipv4/tcp_congestion_control').read().strip()
last = f"worker{int(os.environ['WORLD_SIZE']) - 1}"
print(socket.gethostname(), socket.gethostbyname(last), *map(os.environ.get, names.split()))
print(sorted(os.sched_getaffinity(0)), control in ('cubic', 'reno'))
"""


def test_workers_find_each_other_and_have_a_share_of_the_cores(run, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://nowhere")
    own = {"MASTER_PORT": "99"}  # what the user sets stands over the lab's
    cores = sorted(os.sched_getaffinity(0))
    twice = 2 * len(cores)
    for n, shares in {
        1: [cores],
        twice: [[core] for core in cores * 2],
        twice + 1: [cores] * 99,
    }.items():
        _, lines = run(lab.Network(n, rate=1e8), [*PYTHON, SEES], environment=own)
        for i in range(n):
            place = f"10.77.0.1 99 {i} {n} {i} {n} eth0 None"
            assert [line for line in lines if line.startswith(f"{i} | ")] == [
                f"{i} | worker{i} 10.77.0.{n} {place}",
                f"{i} | {shares[i]} True",
            ]


def test_the_command_is_looked_for_where_the_workers_will_and_says_all_that_it_says(run, tmp_path):
    path = make_program(
        tmp_path / "only-here", "#!/bin/sh", r"printf 'a\377\nb'; printf 'c\r\n\nlast' >&2"
    )
    with pytest.raises(ValueError, match="only-here"):
        lab.run(TWO, ["only-here"])
    report, lines = run(ONE, ["only-here"], environment={"PATH": path})
    assert report.exit_code == 0
    assert lines == ["0 | a\N{REPLACEMENT CHARACTER}", "0 | bc\r", "0 | ", "0 | last"]
    make_program(tmp_path / "only-here", "#!/no/such/interpreter")
    with pytest.raises(lab.LabError, match="only-here: No such file"):
        run(ONE, ["only-here"], environment={"PATH": path})


SEND = """
import os, socket, time
if os.environ["RANK"] == "0":
    with socket.create_server(("", 5000)) as server, server.accept()[0] as peer:
        begin, got = time.monotonic(), 0
        while data := peer.recv(1 << 16):
            got += len(data)
    print(got, time.monotonic() - begin)
else:
    while True:
        try:
            peer = socket.create_connection(("worker0", 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    peer.sendall(bytes(2_000_000))
    peer.close()
"""


def test_links_are_no_faster_than_their_rate_and_ports_are_free_inside(run):
    with contextlib.suppress(OSError), socket.create_server(("", 5000)):
        report, lines = run(lab.Network(2, rate=10e6), [*PYTHON, SEND])
    assert report.exit_code == 0, lines
    got, seconds = lines[0].removeprefix("0 | ").split()
    assert int(got) == 2_000_000
    assert float(seconds) > 1.6 - 0.01  # 16 Mbit at 10 Mbit/s, less the burst of 5 ms
    receiver, sender = report.workers
    assert 2_000_000 < receiver.received_bytes <= sender.sent_bytes < 2_200_000
    assert receiver.sent_bytes < 200_000  # acknowledgements


SUM = """
import jax, jax.numpy as jnp, numpy as np
import lioncub_jax as lc
lc.mesh.join()
from jax.sharding import AxisType, PartitionSpec as P
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
total = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
n, index = 250_000, jax.process_index()
own = jnp.arange(n, dtype=jnp.float32)[None] * (index + 1)
x = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, P("data")), own)
found = np.asarray(jax.jit(total)(x))[0]
np.testing.assert_array_equal(found, 3 * np.arange(n, dtype=np.float32))
print("sum", jax.process_count(), index, len(jax.local_devices()), flush=True)
jax.distributed.shutdown()
"""


def test_join_finds_its_place_without_arguments_and_its_sum_costs_what_it_should(run):
    environment = {"JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    environment |= {"XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, "-c", SUM]
    report, lines = run(lab.Network(2, rate=1e9), command, environment=environment)
    assert report.exit_code == 0, "\n".join(lines)
    assert {"0 | sum 2 0 1", "1 | sum 2 1 1"} <= set(lines)
    payload = 4 * 250_000  # 2 (W - 1) / W times that is sent by each of W = 2
    for worker in report.workers:
        assert payload < worker.sent_bytes < 1.2 * payload


def test_root_is_not_needed(run, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 65534)  # then it takes a user namespace
    _, lines = run(TWO, ["sh", "-c", "cat /proc/self/uid_map; hostname"])
    assert {"0 | worker0", "1 | worker1"} < set(lines)
    mapped = " ".join(lines[0].split())
    assert mapped == f"{lines[0][0]} | 0 {os.getuid()} 1"


# --- How runs end


KILLED, ENDED = 128 + signal.SIGKILL, 128 + signal.SIGTERM
ENDS = {
    # They had closed their ears to SIGTERM.
    "the first failure ends the others": (
        "trap '' TERM; [ $RANK = 1 ] && exit 7; while :; do sleep 0.1; done",
        {"grace": 0.2}, 7, [KILLED, 7],
    ),
    "others may end in peace": (
        "[ $RANK = 0 ] && kill -SEGV $$; sleep 0.5", {}, 128 + signal.SIGSEGV, [128 + signal.SIGSEGV, 0],
    ),
    "what workers leave running ends": ("setsid sleep 78 & echo started", {}, 0, [0, 0]),
}  # fmt: skip


@pytest.mark.parametrize("how", ENDS)
def test_how_runs_end(how, run):
    script, options, code, codes = ENDS[how]
    report, _ = run(TWO, ["sh", "-c", script], **options)
    assert (report.exit_code, [worker.exit_code for worker in report.workers]) == (code, codes)
    assert report.seconds < 60
    assert [worker.sent_bytes for worker in report.workers] == [0, 0]  # who is silent sends nothing


def test_an_error_while_writing_ends_the_run(run):
    def refuse(line):
        raise BrokenPipeError(line)

    with pytest.raises(BrokenPipeError):
        run(TWO, ["sh", "-c", "echo; sleep 79"], write=refuse)


def test_it_runs_in_a_thread_and_leaves_signal_handlers_alone(run):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with ThreadPoolExecutor() as threads:
        report, _ = threads.submit(run, TWO, ["true"]).result()
    assert report.exit_code == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


# Under nohup a hang-up is ignored, and Ctrl-C in the background of a script: not here.
STAYS = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
import lab
print("imported", flush=True)
report = lab.run(lab.Network(3, rate=1e8), ["sh", "-c", "echo up; setsid sleep 80 & sleep 81"])
sys.exit(report.exit_code)
"""
STOPS = {
    "kill": (os.kill, signal.SIGKILL, -signal.SIGKILL),
    "terminate": (os.kill, signal.SIGTERM, ENDED),
    "Ctrl-C": (os.killpg, signal.SIGINT, 130),
    "hang up": (os.killpg, signal.SIGHUP, -signal.SIGHUP),
}


QUICK = {"terminate", "kill"}


@pytest.mark.parametrize(
    "stop",
    [pytest.param(stop, marks=() if stop in QUICK else pytest.mark.long) for stop in STOPS],
)
def test_nothing_is_left_of_a_lab_that_is_stopped(stop, clean, tmp_path):
    way, number, code = STOPS[stop]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks"), "TMPDIR": str(tmp_path)}
    with clean():
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", STAYS], env=environment, stdout=subprocess.PIPE,
            start_new_session=True, text=True,
        )  # fmt: skip
        assert process.stdout.readline() == "imported\n"
        assert process.stdout.readline().endswith("| up\n")
        way(process.pid, number)
        process.communicate(timeout=60)
    assert process.returncode == code
    assert list(tmp_path.iterdir()) == []


def test_a_lab_whose_inside_is_killed_says_so(run):
    def kill_inside(line):
        """Called when the first worker speaks: the lab is up then."""
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        found = [c for c in children if b"unshare" in Path(f"/proc/{c}/cmdline").read_bytes()]
        for process in found[:1]:
            os.kill(int(process), signal.SIGKILL)

    with pytest.raises(lab.LabError, match="killed"):
        run(TWO, ["sh", "-c", "[ $RANK = 0 ] && echo up; sleep 82"], write=kill_inside)


# --- The command


@pytest.fixture
def fake_lab(monkeypatch):
    """What the lab was asked for; it reports one failed worker."""
    asked = {}

    def run(network, command, **options):
        options.pop("write")("0 | a line")
        asked.update(options, network=network, command=command)
        return lab.Report((lab.WorkerReport(7, 10, 20),), 1.5, 7)

    monkeypatch.setattr(lab.network, "run", run)
    return asked


def test_the_command_gives_all_options_and_ends_with_the_exit_code_of_a_worker(fake_lab, capfd):
    line = "--workers 4 --rate 100mbit --grace 2s -- python train.py --workers 3 -- x"
    assert command.main(line.split()) == 7
    words = ["python", "train.py", "--workers", "3", "--", "x"]
    assert fake_lab == {"network": lab.Network(4, 1e8), "command": words, "grace": 2.0}
    shown = capfd.readouterr().out
    assert shown == "0 | a line\nworker 0: exit code 7, sent 10 bytes, received 20\n"
    assert command.main(["--workers", "2", "--", "true"]) == 7
    assert fake_lab == {"network": lab.Network(2), "command": ["true"], "grace": 10.0}


def test_a_machine_that_cannot_run_the_lab_says_what_it_lacks(monkeypatch, capsys):
    said = "no permission; do one of these:\n  - run as root"

    def missing(*_, **__):
        raise lab.LabError(said)

    monkeypatch.setattr(lab.network, "run", missing)
    assert command.main(["--workers", "2", "--", "true"]) == 2
    assert capsys.readouterr().err == f"error: {said}\n"


@pytest.mark.parametrize(
    "line", ["--workers 4", "-- true", "--workers 0 -- true", "--workers 2 --rate fast -- true"]
)
def test_what_the_command_cannot_run_is_refused(fake_lab, capsys, line):
    with pytest.raises(SystemExit, match="2"):
        command.main(line.split())
    assert "usage: lab" in capsys.readouterr().err and not fake_lab


def test_the_page_and_the_help_show_commands_that_run(machine, tmp_path):
    """By a shell that stands in the clone."""
    lines = command.EPILOG.split("examples:\n")[1].splitlines()
    assert len(lines) == 3
    for line in lines:
        line = line.strip().replace("python benchmarks", f"{sys.executable} {ROOT}/benchmarks")
        done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0 and "worker 1: exit code 0" in done.stdout, done
    assert (tmp_path / "1.log").read_text() == "worker 1\n"
