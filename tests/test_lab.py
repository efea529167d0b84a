"""Workers in real network namespaces: what they see, how fast they are, and that nothing is left.

Where the machine does not let the lab run at all (some containers), the tests that need it are
skipped, with what the lab says is missing.
"""

import contextlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import pytest

import lioncub_jax as lc
from lioncub_jax import lab
from lioncub_jax.lab.run import _tools

ROOT = Path(lc.__file__).parents[1]
PYTHON = [sys.executable, "-I", "-S", "-c"]
TWO = lab.Network(2)


@pytest.fixture(scope="module")
def machine():
    """Skips where the lab cannot run, and says why."""
    try:
        lab.check()
    except lab.LabError as missing:
        pytest.skip(f"the lab cannot run here: {missing}")


@pytest.fixture
def run(machine):
    """``run(network, command, ...) -> (report, lines of output)``; nothing may be left of it."""

    def checked(network, command, **options):
        lines = []
        before = traces()
        report = lab.run(network, command, write=lines.append, timeout=90, **options)
        assert_nothing_is_left(before)
        return report, lines

    return checked


# --- What is left of a run


@pytest.fixture(autouse=True)
def mark(monkeypatch):
    """A variable by which a test's processes are known from those of other labs on the machine."""
    monkeypatch.setenv("LIONCUB_LAB_TEST", uuid.uuid4().hex)


def marked_processes():
    marker = os.environ["LIONCUB_LAB_TEST"].encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if marker in (process / "environ").read_bytes():
                yield process.name, os.readlink(process / "ns/net")


def traces():
    """Everything that a lab could leave on the machine: processes, with their networks, and more."""
    links = [line.split(":")[0] for line in Path("/proc/net/dev").read_text().splitlines()]
    named = Path("/run/netns")
    return {
        "processes": list(marked_processes()),
        "links": sorted(links),
        "named namespaces": sorted(named.iterdir()) if named.exists() else None,
        "mounts": Path("/proc/self/mounts").read_text(),
        "hosts": Path("/etc/hosts").read_bytes(),
        "name": socket.gethostname(),
    }


def assert_nothing_is_left(before, seconds=10):
    """The kernel may take a moment for the last of it."""
    deadline = time.monotonic() + seconds
    while (after := traces()) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert after == before


def test_what_is_left_would_be_seen():
    before = traces()
    process = subprocess.Popen(["sleep", "83"])
    deadline = time.monotonic() + 10
    while not traces()["processes"] and time.monotonic() < deadline:
        time.sleep(0.01)  # a process that has just begun may not show its variables yet
    assert [pid for pid, _ in traces()["processes"]] == [str(process.pid)]
    process.kill()
    process.wait()
    assert_nothing_is_left(before)


# --- Arguments


BAD = {
    "no workers": ({"workers": 0}, {}, "workers is 0"),
    "more workers than addresses": ({"workers": 3, "subnet": "10.0.0.0/30"}, {}, "from 1 to 2"),
    "a subnet for nobody": ({"subnet": "10.0.0.0/31"}, {}, "larger subnet"),
    "a subnet that is none": ({"subnet": "10.77.0.1/24"}, {}, "subnet '10.77.0.1/24'"),
    "a subnet of IPv6": ({"subnet": "fd00::/64"}, {}, "subnet 'fd00::/64'"),
    "no rate": ({"rate": 0}, {}, "rate is 0"),
    "a negative rate": ({"rate": -1e6}, {}, "rate is -1000000.0"),
    "an endless rate": ({"rate": float("inf")}, {}, "rate is inf"),
    "a delay of zero": ({"delay": 0.0}, {}, "delay is 0.0"),
    "no port": ({}, {"port": 0}, "port is 0"),
    "a port too high": ({}, {"port": 65536}, "1 to 65535"),
    "no time": ({}, {"timeout": 0}, "timeout is 0"),
    "negative grace": ({}, {"grace": -1}, "grace is -1"),
    "an empty command": ({}, {"command": []}, "command is []"),
    "a command as one string": ({}, {"command": "ls -l"}, "as a list"),
    "no such command": ({}, {"command": ["lioncub-no-such"]}, "'lioncub-no-such' is not a program"),
    "a folder": ({}, {"command": ["/tmp"]}, "'/tmp' is not a program"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named_before_anything_starts(case, monkeypatch):
    network, options, message = BAD[case]
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ValueError) as error:
        lab.run(lab.Network(**{"workers": 2, **network}), **{"command": ["true"], **options})
    assert message in str(error.value)


def test_the_command_is_looked_for_where_the_workers_will(tmp_path, run):
    program = tmp_path / "only-here"
    program.write_text("#!/bin/sh\necho $0\n")
    program.chmod(0o755)
    with pytest.raises(ValueError, match="only-here"):
        lab.run(TWO, ["only-here"])
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    report, lines = run(lab.Network(1), ["only-here"], environment={"PATH": path})
    assert report.exit_code == 0 and lines == [f"0 | {program}"]


@pytest.mark.parametrize("tool", ["ip", "tc", "unshare"])
def test_a_missing_tool_is_named_with_its_package(tool, monkeypatch):
    found = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **at: None if name == tool else found("sh"))
    with pytest.raises(lab.LabError, match=f"needs {tool}: install {lab.TOOLS[tool].split()[0]}"):
        lab.run(TWO, ["true"])


def test_other_systems_are_told_that_it_needs_linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(lab.LabError, match="Linux"):
        lab.check()


def test_a_machine_that_forbids_namespaces_is_told_what_to_do(monkeypatch, tmp_path):
    refusing = tmp_path / "unshare"
    refusing.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(lab.LabError) as error:
        lab.run(TWO, ["true"])
    for words in ("run as root", "sysctl", "--privileged", "Operation not permitted"):
        assert words in str(error.value)


@pytest.mark.parametrize("kind", lab.MISSING)
def test_a_kernel_without_a_part_is_told_which(kind, machine, monkeypatch, tmp_path):
    """A tool that answers as on such a kernel; for netem this machine's own may answer as well."""
    for name in ("ip", "tc"):
        stub = tmp_path / name
        stub.write_text(
            f"#!/bin/sh\n[ $1 = link ] && exit\ninput=$(cat)\ncase $input in *'{kind}'*)"
            " echo 'Error: Unknown device type.' >&2; exit 2;; esac\n"
            f'echo "$input" | exec {_tools()[name]} -batch -\n'
        )
        stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    before, lines = traces(), []
    with pytest.raises(lab.LabError) as error:
        lab.run(lab.Network(2, rate=1e8, delay=1e-3), ["true"], write=lines.append)
    assert lines == []
    assert "modprobe" in str(error.value)
    if kind != "tbf":  # on a kernel without netem that is missed first
        assert lab.MISSING[kind] in str(error.value)
    assert_nothing_is_left(before)


# --- What workers see


def test_workers_find_each_other_by_name_and_variables(run):
    look = (
        "import os, socket; names = 'JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID MASTER_ADDR "
        "MASTER_PORT RANK WORLD_SIZE LOCAL_RANK GLOO_SOCKET_IFNAME http_proxy'.split();"
        "print(socket.gethostname(), socket.gethostbyname('worker2'), *map(os.environ.get, names))"
    )
    network = lab.Network(3, subnet="192.168.7.0/29")
    own = {"MASTER_PORT": "99"}  # what the user sets stands over the lab's
    report, lines = run(network, [*PYTHON, look], port=77, environment=own)
    assert report.exit_code == 0
    assert sorted(lines) == [
        f"{i} | worker{i} 192.168.7.3 192.168.7.1:77 3 {i} 192.168.7.1 99 {i} 3 {i} eth0 None"
        for i in range(3)
    ]


def test_workers_have_a_share_of_the_cores_and_tcp_as_linux_has_it(run):
    look = (
        "import os; control = open('/proc/sys/net/ipv4/tcp_congestion_control').read().strip();"
        "print(sorted(os.sched_getaffinity(0)), control in ('cubic', 'reno'))"
    )
    cores = sorted(os.sched_getaffinity(0))
    twice = 2 * len(cores)
    _, lines = run(lab.Network(twice), [*PYTHON, look])
    assert sorted(lines) == sorted(f"{i} | [{cores[i % len(cores)]}] True" for i in range(twice))
    _, lines = run(lab.Network(1), [*PYTHON, look])
    assert lines == [f"0 | {cores} True"]
    _, lines = run(lab.Network(len(cores) + 1), [*PYTHON, look])  # cannot be shared evenly
    even = len(cores) == 1
    assert {line.split(" | ")[1] for line in lines} == {f"{cores[:1] if even else cores} True"}


def test_silent_workers_send_nothing(run):
    report, _ = run(lab.Network(2, rate=1e8), ["sleep", "0.3"])
    assert [worker.sent_bytes for worker in report.workers] == [0, 0]


def test_output_of_any_kind_arrives_in_lines(run):
    script = "import os; os.write(1, b'a\\xff\\nb'); os.write(2, b'c\\r\\n\\nlast')"
    _, lines = run(lab.Network(1), [*PYTHON, script])
    assert lines == ["0 | a\N{REPLACEMENT CHARACTER}", "0 | bc\r", "0 | ", "0 | last"]


def test_logs_keep_everything_and_the_terminal_shows_worker_0(run, tmp_path):
    logs = tmp_path / "new" / "logs"
    _, lines = run(TWO, ["sh", "-c", "echo out $RANK; echo err $RANK >&2"], logs=logs)
    assert lines == ["0 | out 0", "0 | err 0"]
    texts = {path.name: path.read_text() for path in logs.iterdir()}
    assert texts == {f"worker{i}.log": f"out {i}\nerr {i}\n" for i in range(2)}
    with pytest.raises(ValueError, match=r"worker0\.log.*new folder"):
        lab.run(TWO, ["true"], logs=logs)
    assert (logs / "worker1.log").read_text() == "out 1\nerr 1\n"


def test_a_folder_that_cannot_hold_logs_is_named_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    file = tmp_path / "file"
    file.touch()
    for logs in (file, file / "logs", Path("/proc/no-such-folder")):
        with pytest.raises(ValueError, match="name a folder in which files can be made") as error:
            lab.run(TWO, ["true"], logs=logs)
        assert str(logs) in str(error.value)


def test_the_function_run_and_its_module_share_a_name():
    """Whatever is imported first, ``lioncub_jax.lab.run`` is the function."""
    look = (
        "import lioncub_jax.lab.run, lioncub_jax.lab; from lioncub_jax.lab.run import Network;"
        "print(callable(lioncub_jax.lab.run), lioncub_jax.lab.run.__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "True lioncub_jax.lab.run\n"


SEND = """
import os, socket, sys, time
size, index, port = int(sys.argv[1]), int(os.environ["RANK"]), 5000
if index == 0:
    with socket.create_server(("", port)) as server, server.accept()[0] as peer:
        begin, got = time.monotonic(), 0
        while data := peer.recv(1 << 16):
            got += len(data)
    print(got, time.monotonic() - begin)
else:
    while True:
        try:
            peer = socket.create_connection(("worker0", port))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    peer.sendall(bytes(size))
    peer.close()
"""


def seconds_to_send(run, size, rate):
    report, lines = run(lab.Network(2, rate=rate), [*PYTHON, SEND, str(size)])
    assert report.exit_code == 0, lines
    got, seconds = lines[0].removeprefix("0 | ").split()
    assert int(got) == size
    sent, received = report.workers[1].sent_bytes, report.workers[0].received_bytes
    assert size < sent < 1.1 * size and size < received <= sent
    assert report.workers[0].sent_bytes < 0.1 * size  # acknowledgements
    return float(seconds)


def test_links_are_no_faster_than_their_rate(run):
    slow = seconds_to_send(run, 2_000_000, 10e6)
    fast = seconds_to_send(run, 2_000_000, 100e6)
    assert slow > 1.6 - 0.01  # 16 Mbit at 10 Mbit/s, less the burst of 5 ms
    assert fast > 0.16 - 0.002
    assert fast < slow


def test_a_port_in_use_outside_is_free_inside(run):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        listen = f"import socket; socket.create_server(('', {port})); print('free')"
        _, lines = run(TWO, [*PYTHON, listen])
    assert sorted(lines) == ["0 | free", "1 | free"]


SUM = """
import jax, jax.numpy as jnp, numpy as np
jax.distributed.initialize()
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


def test_jax_finds_its_place_without_arguments_and_its_sum_costs_what_it_should(run):
    environment = {"JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    environment |= {"XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, "-c", SUM]
    report, lines = run(lab.Network(2, rate=1e9), command, environment=environment)
    assert report.exit_code == 0, "\n".join(lines)
    assert {"0 | sum 2 0 1", "1 | sum 2 1 1"} <= set(lines)
    payload = 4 * 250_000  # 2 (W - 1) / W times that is sent by each of W = 2
    for worker in report.workers:
        assert payload < worker.sent_bytes < 1.2 * payload


# --- How runs end


def test_the_first_failure_ends_the_others_and_is_the_exit_code(run):
    script = "trap '' TERM; [ $RANK = 1 ] && exit 7; while :; do sleep 0.1; done"
    report, _ = run(lab.Network(3), ["sh", "-c", script], grace=0.2)
    assert report.exit_code == 7
    killed = 128 + signal.SIGKILL  # they had closed their ears to SIGTERM
    assert [worker.exit_code for worker in report.workers] == [killed, 7, killed]


def test_a_crash_is_told_by_its_signal_and_others_may_end_in_peace(run):
    report, _ = run(TWO, ["sh", "-c", "[ $RANK = 0 ] && kill -SEGV $$; sleep 0.5"])
    assert [worker.exit_code for worker in report.workers] == [128 + signal.SIGSEGV, 0]
    assert report.exit_code == 128 + signal.SIGSEGV


def test_a_file_that_cannot_be_executed_is_an_exit_code(run, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    report, lines = run(lab.Network(1), [str(broken)])
    assert report.exit_code == 1 and "No such file" in lines[0]


def test_the_time_is_up(machine):
    before = traces()
    report = lab.run(TWO, ["sleep", "77"], timeout=0.3, write=print)
    assert report.exit_code == 124 and report.seconds < 60
    assert [worker.exit_code for worker in report.workers] == [128 + signal.SIGTERM] * 2
    assert_nothing_is_left(before)


def test_what_workers_leave_running_ends_with_the_run(run):
    begin = time.monotonic()
    report, _ = run(TWO, ["sh", "-c", "setsid sleep 78 & echo started"])
    assert report.exit_code == 0 and time.monotonic() - begin < 60


def test_an_error_while_writing_ends_the_run(machine):
    before = traces()

    def refuse(line):
        raise BrokenPipeError(line)

    with pytest.raises(BrokenPipeError):
        lab.run(TWO, ["sh", "-c", "echo; sleep 79"], write=refuse)
    assert_nothing_is_left(before)


def test_it_runs_in_a_thread_and_leaves_signal_handlers_alone(run):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    found = []
    thread = threading.Thread(target=lambda: found.append(run(TWO, ["true"])[0]))
    thread.start()
    thread.join()
    assert found[0].exit_code == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all"]


@pytest.fixture
def readable_copy():
    """The lab's files where every user may read them, as a package that brings no jax."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        package = Path(folder) / "lioncub_jax"
        package.mkdir()
        (package / "__init__.py").touch()
        shutil.copy(ROOT / "lioncub_jax" / "units.py", package)
        shutil.copytree(
            ROOT / "lioncub_jax" / "lab", package / "lab", ignore=shutil.ignore_patterns("__pyc*")
        )
        yield folder


def python_for_nobody():
    """A Python that other users may run, once `env` has no rights left: root's may lie in root's home."""
    right = "import sys; sys.exit(sys.version_info < (3, 11))"
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        done = subprocess.run([*NOBODY, "env", python, "-c", right], capture_output=True, cwd="/")
        if done.returncode == 0:
            return python
    pytest.skip("no Python of at least 3.11 that users other than root may run")


def test_root_is_not_needed(machine, readable_copy):
    if os.geteuid() != 0:
        return  # every other test has just shown it
    script = (
        "import os; from lioncub_jax import lab; print(os.geteuid(), flush=True);"
        "lab.run(lab.Network(2, rate=1e8), ['hostname'])"
    )
    done = subprocess.run(
        [*NOBODY, python_for_nobody(), "-c", script], cwd=readable_copy,
        env={**os.environ, "PYTHONPATH": readable_copy}, capture_output=True, text=True,
    )  # fmt: skip
    if "does not let you make network namespaces" in done.stderr:
        pytest.skip("this machine lets only root make network namespaces")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0] == "65534" and sorted(lines[1:]) == ["0 | worker0", "1 | worker1"]


# --- Labs that are killed


def outer_environment():
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def start_lab(folder):
    """A lab in a process and a group of its own, with workers that stay and leave others behind."""
    script = (
        # Under nohup a hang-up is ignored, and Ctrl-C in the background of a script: here too unless
        # told otherwise.
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL);"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from lioncub_jax import lab; print('imported', flush=True);"
        "command = ['sh', '-c', 'setsid sleep 80 & sleep 81'];"
        "report = lab.run(lab.Network(3, rate=1e8), command);"
        "sys.exit(report.exit_code)"
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script],
        env=outer_environment() | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE, start_new_session=True, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "imported\n"
    return process


def kill_lab(process, number):
    process.send_signal(number)


def kill_group(process, number):
    os.killpg(process.pid, number)


# A lab that has not yet taken over the signals ends by them, as any program.
STOPS = {
    "kill": (kill_lab, signal.SIGKILL, {-signal.SIGKILL}),
    "kill the group": (kill_group, signal.SIGKILL, {-signal.SIGKILL}),
    "terminate": (kill_lab, signal.SIGTERM, {143, -signal.SIGTERM}),
    "Ctrl-C": (kill_group, signal.SIGINT, {130, -signal.SIGINT}),
    "hang up": (kill_group, signal.SIGHUP, {-signal.SIGHUP}),
}


WHEN = "while it starts", "while it runs"
QUICK = ("Ctrl-C", WHEN[0]), ("kill", WHEN[1])


@pytest.mark.parametrize(
    ("stop", "when"),
    [
        pytest.param(*pair, marks=[] if pair in QUICK else pytest.mark.slow)
        for pair in itertools.product(STOPS, WHEN)
    ],
)
def test_nothing_is_left_of_a_lab_that_is_stopped(stop, when, machine, tmp_path):
    way, number, codes = STOPS[stop]
    before = traces()
    process = start_lab(tmp_path)
    # The lab is up within 0.2 s on an idle machine; the tempo of this one decides what is hit.
    low, high = (0.01, 0.25) if when == "while it starts" else (0.6, 1.0)
    time.sleep(random.uniform(low, high))
    assert process.poll() is None
    way(process, number)
    process.communicate(timeout=60)
    assert process.returncode in codes
    assert_nothing_is_left(before)
    assert list(tmp_path.iterdir()) == []


def test_a_lab_whose_inside_is_killed_says_so(machine):
    before = traces()
    killed = []

    def kill_inside(line):
        """Called when the first worker speaks: the lab is up then."""
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        found = [c for c in children if b"unshare" in Path(f"/proc/{c}/cmdline").read_bytes()]
        if not killed:
            killed.extend(map(int, found))
            os.kill(killed[0], signal.SIGKILL)

    with pytest.raises(lab.LabError, match="killed"):
        lab.run(TWO, ["sh", "-c", "echo up; sleep 82"], write=kill_inside)
    assert len(killed) == 1
    assert_nothing_is_left(before)
