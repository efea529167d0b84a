"""A network lab on one machine: a command for every worker, joined by links of a chosen speed.

Each worker has a network namespace of its own with one link to a bridge; both ends of the link are
shaped by the kernel. Everything lives inside one process namespace that the kernel clears away with
its first process, so nothing of the lab is ever in the machine's own network, file system or process
list for longer than the run, whatever happens to it. `lab.namespaces` is the inside.
"""

import functools
import ipaddress
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lab.group import Output, caught

# Its own folder is the first on the path, and nothing there is the user's.
INSIDE = [sys.executable, "-E", "-s", "-S", str(Path(__file__).with_name("namespaces.py"))]
SLOWEST = 1e3  # bits per second
SUBNET = ipaddress.ip_network("10.77.0.0/22")  # as many addresses as a bridge has ports
PORT = 1234  # of the coordinator; in its namespace no other program can be using it

# The first that is permitted is taken. Root does without a user namespace, in which files of other
# users would be out of reach; a container may forbid a fresh /proc, which workers can do without.
NAMESPACES = ["--mount", "--net", "--uts", "--pid", "--fork", "--kill-child"]
NOT_PERMITTED = """\
This machine does not let you make network namespaces. One of these helps:
  - run as root;
  - let users make them: sysctl kernel.unprivileged_userns_clone=1 (older Debian), or
    sysctl kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu 24.04 and later);
  - in a container: start it with --privileged, or with --cap-add SYS_ADMIN --cap-add NET_ADMIN
    --security-opt seccomp=unconfined --security-opt apparmor=unconfined.
What was tried:"""

# By the words that stand in a command which fails for want of the module.
MISSING = {
    words: f"This kernel has no {words}. On the machine itself (not in a container), as root: modprobe "
    f"{module}. Where there is no such module, take another kernel."
    for words, module in {"tbf": "sch_tbf", "type bridge": "bridge", "type veth": "veth"}.items()
}

TOOLS = {
    "unshare": "util-linux", "mount": "util-linux", "umount": "util-linux",
    "ip": "iproute2", "tc": "iproute2 (iproute-tc on Fedora)",
}  # fmt: skip

# There is no way out of the lab, and gRPC would look for the proxy first.
PROXIES = {"http_proxy", "https_proxy", "grpc_proxy", "all_proxy"}


class LabError(RuntimeError):
    """The machine does not let the lab run: a tool, a permission or a part of the kernel is missing."""


class Network(NamedTuple):
    """Workers on one switch, all with the same link.

    Attributes:
      num_workers: at least one.
      rate: bits per second of each link, each way; None: as fast as it goes.
    """

    num_workers: int
    rate: float | None = None


class WorkerReport(NamedTuple):
    """The exit code and the bytes of one worker.

    Attributes:
      exit_code: as shells give it: 128 and its number for a signal.
      sent_bytes: over its link, headers included.
      received_bytes: likewise.
    """

    exit_code: int
    sent_bytes: int
    received_bytes: int


class Report(NamedTuple):
    """The result of a run.

    Attributes:
      workers: the report of each.
      seconds: from the start of the commands to the end of the last.
      exit_code: 0, or that of the first worker that failed; 130 or 143: stopped.
    """

    workers: tuple[WorkerReport, ...]
    seconds: float
    exit_code: int


_print = functools.partial(print, flush=True)


def run(
    network: Network,
    command: Sequence[str],
    *,
    grace: float = 10.0,
    environment: Mapping[str, str] | None = None,
    write: Callable[[str], object] = _print,
) -> Report:
    """Runs a command once for every worker, each in a network namespace of its own.

    Workers find each other by `lioncub_jax.mesh.join` without arguments, by torch's
    ``env://``, or by their names ``worker0``, ``worker1``, ... Ctrl-C and SIGTERM, where this is
    called from the main thread, end the workers and then the run.

    Args:
      network: number of workers and shape of their links.
      command: program and arguments, the same for every worker.
      grace: seconds that the others get when one worker has failed.
      environment: variables for the workers, over those of this process and of the lab.
      write: takes a line of output, ``"0 | text"`` with the worker's index; prints it by default.

    Returns:
      Exit codes, and the bytes that went over each worker's link.

    Raises:
      ValueError: for arguments out of range, or a command that is not there.
      LabError: where a tool, a permission or a part of the kernel is missing.
    """
    num_workers, rate = network
    most = SUBNET.num_addresses - 2
    _check("num_workers", num_workers, 1 <= num_workers <= most, f"from 1 to {most}")
    _check(
        "rate", rate, rate is None or SLOWEST <= rate < math.inf,
        "bits per second of at least 1000, such as 1e8, or None for links that are not limited",
    )  # fmt: skip
    _check("grace", grace, 0 <= grace < math.inf, "seconds of at least 0")
    own = dict(environment or {})
    outside = {k: v for k, v in os.environ.items() if k.lower() not in PROXIES}
    program = program_of(command, (outside | own).get("PATH", os.defpath))
    tools = _tools()
    plan = {
        **_shape(rate),
        "tools": tools,
        "missing": MISSING,
        "command": [program, *command[1:]],
        "grace": grace,
        "prefix": SUBNET.prefixlen,
        "workers": [
            {
                "name": f"worker{i}",
                "address": str(SUBNET[i + 1]),
                "cores": cores,
                "environment": wiring(num_workers, i) | own,
            }
            for i, cores in enumerate(_cores(num_workers))
        ],
    }
    report = _followed([*_permitted(tools), *INSIDE], plan, outside, write)
    return Report(tuple(WorkerReport(*one) for one in report.pop("workers")), **report)


def _followed(
    start: list[str],
    plan: dict[str, Any],
    environment: Mapping[str, str],
    write: Callable[[str], object],
) -> dict[str, Any]:
    """Runs the hub to its end, and passes lines and signals on; its report."""
    report, errors = dict[str, Any](), list[str]()
    # In the end its input is closed, which ends it and everything inside, and it is waited for.
    with subprocess.Popen(
        start,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        bufsize=0,
        start_new_session=True,  # Ctrl-C at a terminal is for the lab to pass on
    ) as hub:
        control, output = hub.stdin, hub.stdout
        assert control and output

        def tell(data: bytes) -> None:
            with suppress(BrokenPipeError):  # it has ended, and its last line says why
                while data:
                    data = data[os.write(control.fileno(), data) :]

        def pass_on(number: int) -> None:
            tell(bytes([number]))
            shown.hurry()

        shown = Output(write, failed=hub.kill)
        tell(json.dumps(plan).encode() + b"\n")
        with (
            caught(pass_on, signal.SIGINT, signal.SIGTERM),
            open(output.fileno(), "rb", closefd=False) as lines,
        ):
            for line in lines:
                if not line.startswith(b"{"):  # words of `unshare`, or of a hub that failed
                    errors.append(line.decode().rstrip())
                elif "line" in (message := json.loads(line)):
                    shown.offer("", message["line"])
                else:
                    report = message
            shown.close()
    if not report:
        killed = "The lab's inner process was killed, and with it all workers"
        raise LabError("\n".join(errors) or killed)
    return report


# --- Arguments


def _check(name: str, value: object, allowed: bool, what: str) -> None:
    if not allowed:
        raise ValueError(f"{name} is {value!r}: give {what}")


def program_of(command: Sequence[str], path: str) -> str:
    """The file of a command's program."""
    if isinstance(command, str) or not command:
        raise ValueError(f"command is {command!r}: give a program and its arguments, as a list")
    program = shutil.which(command[0], path=path)
    if program is None:
        raise ValueError(
            f"command {command[0]!r} is not a program here: give one that is on PATH, or the path "
            "of a file that may be executed (a script without #! needs its interpreter in front)"
        )
    return program


def _tools() -> dict[str, str]:
    if sys.platform != "linux":
        raise LabError(f"The lab needs Linux's network namespaces; this is {sys.platform}")
    # Where users other than root often do not look.
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    tools = {name: where for name in TOOLS if (where := shutil.which(name, path=path))}
    if missing := [name for name in TOOLS if name not in tools]:
        packages = " and ".join(sorted({TOOLS[name] for name in missing}))
        raise LabError(f"The lab needs {', '.join(missing)}: install {packages}")
    return tools


def _permitted(tools: dict[str, str]) -> list[str]:
    """The first way to start the hub that this machine permits."""
    user = ["--user", "--map-root-user"]
    bases = [[], user] if os.geteuid() == 0 else [user]
    refused = []
    for flags in [[*base, *NAMESPACES, *proc] for base in bases for proc in (["--mount-proc"], [])]:
        way = [tools["unshare"], *flags]
        tried = subprocess.run([*way, tools["ip"], "link"], capture_output=True, text=True)
        if tried.returncode == 0:
            return way
        refused.append(f"unshare {' '.join(flags)}: {' '.join(tried.stderr.split())}")
    raise LabError("\n  ".join([NOT_PERMITTED, *refused]))


# --- The network


def _shape(rate: float | None) -> dict[str, str]:
    """Arguments of `ip` and `tc` for each end of a link: the largest packet, and its rate.

    A bucket lets through its burst at once, which flatters whoever sends little: it is kept at what
    1 ms brings, or two packets where that is more. Hence packets are kept small on slow links.
    """
    if not rate:
        return {"packet": "", "shape": ""}
    per_second = rate / 8
    packet = int(min(16384, max(3000, per_second / 2000)))
    burst = int(min(4e6, max(2 * packet, per_second / 1000)))
    # 50 ms of data, as a switch might hold; TCP collapses with much less.
    limit = int(min(64e6, max(262144, per_second / 20)))
    return {
        "packet": f"gso_max_size {packet}",
        "shape": f"tbf rate {rate:.0f}bit burst {burst} limit {limit}",
    }


def _cores(num_workers: int) -> list[list[int]]:
    """The cores of each worker: a share of its own where they divide evenly, else all of them.

    Without shares the threads of many workers push each other from core to core, and a worker's pace
    depends on what the others do.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) % num_workers and num_workers % len(cores):
        return [cores] * num_workers
    share = max(1, len(cores) // num_workers)
    return [cores[i * share % len(cores) :][:share] for i in range(num_workers)]


def wiring(num_workers: int, index: int) -> dict[str, str]:
    """The variables of torchrun, by which `lioncub_jax.mesh.join` and torch find their place."""
    world, rank = str(num_workers), str(index)
    return {
        "MASTER_ADDR": str(SUBNET[1]),
        "MASTER_PORT": str(PORT),
        "WORLD_SIZE": world,
        "RANK": rank,
        "LOCAL_WORLD_SIZE": world,  # of one machine, whose GPUs they share
        "LOCAL_RANK": rank,
        "GLOO_SOCKET_IFNAME": "eth0",
    }
