"""A network lab on one machine: a command for every worker, joined by links of a chosen speed.

Each worker has a network namespace of its own with one link to a bridge; both ends of the link are
shaped by the kernel. Everything lives inside one process namespace that the kernel clears away with
its first process, so nothing of the lab is ever in the machine's own network, file system or process
list for longer than the run, whatever happens to it. `lioncub_jax.lab.namespaces` is the inside.

This module and its function `run` share a name: ``lioncub_jax.lab.run`` is the function, and
``from lioncub_jax.lab.run import ...`` reads from the module.
"""

import ipaddress
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lioncub_jax import units
from lioncub_jax.lab import supervise

if TYPE_CHECKING:
    from rich.table import Table

INSIDE = Path(__file__).with_name("namespaces.py")
SLOWEST = 1e3  # bits per second
PORTS_OF_A_BRIDGE = 1023

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

NO_MODULE = (
    "This kernel has no {what}. On the machine itself (not in a container), as root: modprobe {module}. "
    "Where there is no such module, take another kernel{otherwise}."
)
# By the words that stand in a command which fails for want of the module.
MISSING = {
    "netem": NO_MODULE.format(
        what="netem, which --delay needs", module="sch_netem",
        otherwise="; --rate works without it, so leave --delay out",
    ),
    "tbf": NO_MODULE.format(
        what="tbf, which --rate needs", module="sch_tbf",
        otherwise="; without --rate links are as fast as the machine",
    ),
    "type bridge": NO_MODULE.format(what="bridge", module="bridge", otherwise=""),
    "type veth": NO_MODULE.format(what="veth", module="veth", otherwise=""),
}  # fmt: skip

TOOLS = {
    "unshare": "util-linux", "mount": "util-linux", "umount": "util-linux",
    "ip": "iproute2", "tc": "iproute2 (iproute-tc on Fedora)",
}  # fmt: skip

# There is no way out of the lab, and gRPC would look for the proxy first.
PROXIES = {"http_proxy", "https_proxy", "grpc_proxy", "all_proxy"}


class LabError(RuntimeError):
    """The machine does not let the lab run: a tool, a permission or a part of the kernel is missing.

    Example:
      >>> raise LabError("there is no `tc`: install iproute2")
      Traceback (most recent call last):
      lioncub_jax.lab.run.LabError: there is no `tc`: install iproute2
    """


class Network(NamedTuple):
    """Workers on one switch, all with the same link.

    Example:
      >>> Network(4, rate=units.rate("100mbit")).rate
      100000000.0
    """

    workers: int
    rate: float | None = None  # bits per second of each link, each way; None: as fast as it goes
    delay: float | None = None  # seconds, one way, from any worker to any other
    subnet: str = "10.77.0.0/24"


class WorkerReport(NamedTuple):
    """What one worker did.

    Example:
      >>> WorkerReport(exit_code=0, sent_bytes=1500, received_bytes=1500).sent_bytes
      1500
    """

    exit_code: int  # as shells give it: 128 + its number for a signal
    sent_bytes: int  # over its link, headers included
    received_bytes: int


class Report(NamedTuple):
    """What a run did.

    Example:
      >>> Report((WorkerReport(0, 10, 20),), seconds=1.0, exit_code=0).workers[0].received_bytes
      20
    """

    workers: tuple[WorkerReport, ...]
    seconds: float  # from the start of the commands to the end of the last
    exit_code: int  # 0, or that of the first worker that failed; 130, 143: stopped; 124: timeout


def run(
    network: Network,
    command: Sequence[str],
    *,
    logs: Path | None = None,
    timeout: float | None = None,
    port: int = 1234,
    grace: float = 10.0,
    environment: Mapping[str, str] | None = None,
    write: Callable[[str], object] | None = None,
) -> Report:
    """Runs a command once for every worker, each in a network namespace of its own.

    Workers find each other by ``jax.distributed.initialize()`` without arguments, by torch's
    ``env://``, or by their names ``worker0``, ``worker1``, ... Ctrl-C and SIGTERM, where this is
    called from the main thread, end the workers and then the run.

    Args:
      network: number of workers and shape of their links.
      command: program and arguments, the same for every worker.
      logs: a folder for the output of each worker, ``worker0.log`` and so on; None: no files. With
        it only worker 0's output is written to ``write`` as well.
      timeout: seconds after which workers are ended.
      port: of worker 0, for the coordinator. No program outside the lab can be using it.
      grace: seconds that the others get when one worker has failed.
      environment: variables for the workers, over those of this process and of the lab.
      write: takes a line of output, ``"0 | text"`` with the worker's index; None: print it.

    Returns:
      Exit codes, and the bytes that went over each worker's link.

    Raises:
      ValueError: for arguments out of range, a command that is not there, logs that are there, or
        a folder for logs in which no file can be made; nothing has been started then.
      LabError: where a tool, a permission or a part of the kernel is missing.

    Example:
      >>> run(Network(2, rate=100e6), ["hostname"])  # doctest: +SKIP
      0 | worker0
      1 | worker1
      Report(workers=(WorkerReport(exit_code=0, ...
    """
    addresses = _addresses(network)
    shape = _shape(network)
    own = dict(environment or {})
    outside = {k: v for k, v in os.environ.items() if k.lower() not in PROXIES}
    program = program_of(command, (outside | own).get("PATH", os.defpath))
    _check("port", port, 1 <= port <= 65535, "a number from 1 to 65535")
    _check(
        "timeout", timeout, timeout is None or 0 < timeout < math.inf, "seconds above 0, or None"
    )
    _check("grace", grace, 0 <= grace < math.inf, "seconds of at least 0")
    if logs:
        _check_logs(logs, network.workers)
    tools = _tools()
    plan = shape | {
        "tools": tools,
        "missing": MISSING,
        "command": [program, *command[1:]],
        "prefix": ipaddress.ip_network(network.subnet).prefixlen,
        "workers": [
            {"name": f"worker{i}", "address": address, "cores": cores}
            for i, (address, cores) in enumerate(
                zip(addresses, _cores(len(addresses)), strict=True)
            )
        ],
        "environments": [wiring(addresses, i, port) | own for i in range(network.workers)],
    }
    start = [*_permitted(tools), sys.executable, "-I", "-S", str(INSIDE), "hub"]
    outcome = supervise.supervise(
        start, plan, outside, logs=logs, timeout=timeout, grace=grace, write=write or _print
    )
    if outcome.error:
        raise LabError(outcome.error)
    rows = zip(outcome.codes, outcome.links, strict=True)
    workers = tuple(WorkerReport(code, *link) for code, link in rows)
    return Report(workers, outcome.seconds, outcome.exit_code)


def check(network: Network | None = None) -> None:
    """Proves that the lab can run here, by a run of two workers that do nothing.

    Args:
      network: to try instead, such as one with a delay.

    Raises:
      LabError: where it cannot, with what is missing and what to do.

    Example:
      >>> check()  # doctest: +SKIP
    """
    command = [sys.executable, "-I", "-S", "-c", "pass"]
    said: list[str] = []
    report = run(network or Network(2, rate=1e8), command, write=said.append)
    if report.exit_code:
        raise LabError("\n".join(["Workers start, but fail at doing nothing:", *said]))


def table(report: Report) -> "Table":
    """A run for people.

    Example:
      >>> table(Report((WorkerReport(0, 1_369_000, 20),), 1.0, 0)).row_count
      1
    """
    from rich.table import Table  # not needed for a run

    out = Table("worker", "exit code", "sent", "received", "sent bytes", "received bytes")
    for index, (code, sent, received) in enumerate(report.workers):
        texts = (units.bytes_text(sent), units.bytes_text(received), f"{sent:,}", f"{received:,}")
        out.add_row(str(index), str(code), *texts)
    return out


def _print(line: str) -> None:
    print(line, flush=True)


# --- Arguments


def _check(name: str, value: object, allowed: bool, what: str) -> None:
    if not allowed:
        raise ValueError(f"{name} is {value!r}: give {what}")


def _addresses(network: Network) -> list[str]:
    """One for each worker, worker 0's first."""
    workers, rate, delay, subnet = network
    try:
        hosts = ipaddress.IPv4Network(subnet)
    except ValueError as error:
        raise ValueError(f"subnet {subnet!r}: {error}; give one such as '10.77.0.0/24'") from error
    most = min(hosts.num_addresses - 2, PORTS_OF_A_BRIDGE)
    advice = (
        f"from 1 to {most}, as many as subnet {subnet} has addresses for"
        if most > 0
        else (f"a larger subnet than {subnet}, which has no addresses for workers")
    )
    _check("workers", workers, 1 <= workers <= most, advice)
    _check(
        "rate", rate, rate is None or SLOWEST <= rate < math.inf,
        "bits per second of at least 1000, such as 1e8, or None for links that are not limited",
    )  # fmt: skip
    _check(
        "delay", delay, delay is None or 0 < delay < 100, "seconds above 0 and below 100, or None"
    )
    return [str(hosts[i + 1]) for i in range(workers)]


def program_of(command: Sequence[str], path: str) -> str:
    """The file of a command's program."""
    if isinstance(command, str) or not command:
        raise ValueError(f"command is {command!r}: give a program and its arguments, as a list")
    found = shutil.which(command[0], path=path)
    if found is None:
        raise ValueError(
            f"command {command[0]!r} is not a program here: give one that is on PATH, or the path "
            "of a file that may be executed (a script without #! needs its interpreter in front)"
        )
    return found


def _tools() -> dict[str, str]:
    if sys.platform != "linux":
        raise LabError(f"The lab needs Linux's network namespaces; this is {sys.platform}")
    # Where users other than root often do not look.
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    found = {name: shutil.which(name, path=path) for name in TOOLS}
    missing = [name for name, where in found.items() if where is None]
    if missing:
        packages = " and ".join(sorted({TOOLS[name] for name in missing}))
        raise LabError(f"The lab needs {', '.join(missing)}: install {packages}")
    return {name: where for name, where in found.items() if where}


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


def _check_logs(logs: Path, workers: int) -> None:
    there = [str(path) for path in supervise.log_files(logs, workers) if path.exists()]
    if there:
        raise ValueError(f"logs of an earlier run are there: {', '.join(there)}; give a new folder")
    try:
        logs.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=logs).close()
    except OSError as error:
        raise ValueError(
            f"logs {logs}: {error.strerror}; name a folder in which files can be made"
        ) from None


# --- The network


def _shape(network: Network) -> dict[str, Any]:
    """Largest packet, and what `tc` is told about each direction of a link.

    A bucket lets through its burst at once, which flatters whoever sends little: it is kept at what
    1 ms brings, or two packets where that is more. Hence packets are kept small on slow links.
    """
    shape: dict[str, Any] = {"packet": 0, "from_worker": [], "towards_worker": []}
    queue = 100_000  # packets
    limited = ""
    if network.rate:
        per_second = network.rate / 8
        packet = int(min(16384, max(3000, per_second / 2000)))
        burst = int(min(4e6, max(2 * packet, per_second / 1000)))
        # 50 ms of data, as a switch might hold; TCP collapses with much less.
        limit = int(min(64e6, max(262144, per_second / 20)))
        limited = f"tbf rate {network.rate:.0f}bit burst {burst} limit {limit}"
        shape |= {"packet": packet, "from_worker": [f"qdisc add dev {{device}} root {limited}"]}
    towards = [f"qdisc add dev {{device}} root {limited}"] if limited else []
    if network.delay:
        late = f"netem delay {network.delay * 1e6:.0f}us limit {queue}"
        towards = [f"qdisc add dev {{device}} root handle 1: {late}"]
        if limited:
            towards.append(f"qdisc add dev {{device}} parent 1: handle 2: {limited}")
    return shape | {"towards_worker": towards}


def _cores(workers: int) -> list[list[int]]:
    """The cores of each worker: a share of its own where they divide evenly, else all of them.

    Without shares the threads of many workers push each other from core to core, and a worker's pace
    depends on what the others do.
    """
    cores = sorted(os.sched_getaffinity(0))
    if workers <= len(cores):
        share = len(cores) // workers
        return [cores[i * share : (i + 1) * share] for i in range(workers)]
    if workers % len(cores) == 0:
        return [[cores[i % len(cores)]] for i in range(workers)]
    return [cores] * workers


def wiring(
    addresses: list[str], index: int, port: int, *, interface: str = "eth0"
) -> dict[str, str]:
    """The variables by which jax and torch find their place."""
    first, world, rank = addresses[0], str(len(addresses)), str(index)
    return {
        "JAX_COORDINATOR_ADDRESS": f"{first}:{port}",
        "JAX_NUM_PROCESSES": world,
        "JAX_PROCESS_ID": rank,
        # jax reads the address above but no count and no rank: those it takes from Open MPI's.
        "OMPI_MCA_orte_hnp_uri": f"1.0;tcp://{first}:1",
        "OMPI_COMM_WORLD_SIZE": world,
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_LOCAL_RANK": rank,
        "MASTER_ADDR": first,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": world,
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GLOO_SOCKET_IFNAME": interface,
    }
