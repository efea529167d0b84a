"""What runs inside the lab's namespaces: the hub, and each worker until its command takes over.

Started by `lioncub_jax.lab` as a program and never imported; standard library only, so that it starts
at once. The hub is process 1 of a process namespace. When it ends, however it ends, the kernel kills
every process of that namespace, and with the last one go the network namespaces, their links and the
mounts: cleaning up does not depend on any code here.

The lab writes to the hub's input one line of JSON, the plan, then single bytes: numbers of signals
for the workers. The end of that input, which a killed lab brings about too, ends the hub. The hub
writes lines of JSON: ``started``, ``exit`` for each worker, ``end`` with the counters, or ``error``.
"""

import contextlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

Plan = dict[str, Any]

SET_UP_SECONDS = 60  # a worker that has not joined by then will not
NOT_IN_KERNEL = ("Unknown device type", "qdisc kind is unknown", "Operation not supported")


class Failure(Exception):
    """What could not be set up, in words for the user."""


class Worker(NamedTuple):
    """A started worker, as the hub knows it."""

    pid: int
    socket: socket.socket
    namespace: int  # a descriptor: keeps the link's counters when the worker's processes have ended


def tool(plan: Plan, name: str, *arguments: str, lines: list[str] | None = None) -> None:
    """Runs a tool, on a batch of lines if there are any."""
    batch = "".join(f"{line}\n" for line in lines or [])
    command = [plan["tools"][name], *arguments]
    done = subprocess.run(command, input=batch, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    problem = f"{' '.join([name, *arguments])}: {' '.join(done.stderr.split())}"
    if any(words in done.stderr for words in NOT_IN_KERNEL):
        missing = next((text for kind, text in plan["missing"].items() if kind in batch), "")
        raise Failure(f"{missing} ({problem})" if missing else problem)
    raise Failure(f"The lab's network cannot be set up: {problem}")


# --- The hub


def hub() -> None:
    """Builds the network, starts the workers, and watches over them until they or the lab end."""
    control = io.FileIO(0)
    # Process 1 is spared the default action of a signal, but not what Python does at Ctrl-C.
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
        plan = json.loads(control.readline())
        children_ended = watch_children()
        name_hosts(plan)
        workers = start_workers(plan)
        join_workers(plan, workers)
        begin = time.monotonic()
        say(started=True)
        watch(control, children_ended, {w.pid: index for index, w in enumerate(workers)})
        say(end=counters(len(workers)), seconds=time.monotonic() - begin)
        control.read(1)
    except Failure as failure:
        say(error=str(failure))
    except Exception as error:
        say(error=f"The lab's hub failed, which is a bug: {error!r}")
        raise


def say(**message: Any) -> None:
    """One line to the lab, which may be gone."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(message).encode() + b"\n")


def name_hosts(plan: Plan) -> None:
    """Puts the workers' names over /etc/hosts, in this mount namespace only."""
    if not os.path.exists("/etc/hosts"):
        raise Failure("There is no /etc/hosts to put the workers' names over: make an empty one")
    named = [(w["address"], w["name"]) for w in plan["workers"]]
    rows = "".join(f"{address} {name}\n" for address, name in [("127.0.0.1", "localhost"), *named])
    # A file system in memory, seen only until its one file lies over /etc/hosts.
    scratch = tempfile.gettempdir()
    tool(plan, "mount", "-t", "tmpfs", "lab", scratch)
    with open(f"{scratch}/hosts", "w") as file:
        file.write(rows)
    tool(plan, "mount", "--bind", f"{scratch}/hosts", "/etc/hosts")
    tool(plan, "umount", scratch)


def start_workers(plan: Plan) -> list[Worker]:
    """Starts a process for each worker, in a network namespace of its own."""
    started = []
    for environment, output in zip(plan["environments"], plan["outputs"], strict=True):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(SET_UP_SECONDS)
        me = [sys.executable, "-I", "-S", __file__, "worker", str(theirs.fileno())]
        child = subprocess.Popen(
            [plan["tools"]["unshare"], "--net", "--uts", *me],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a signal to its group reaches all that it starts
        )
        child.returncode = 0  # `watch` waits for it; Popen is not to
        theirs.close()
        os.close(output)
        started.append((child.pid, ours))
    return [Worker(pid, ours, namespace_of(ours)) for pid, ours in started]


def namespace_of(worker_socket: socket.socket) -> int:
    """The descriptor that a worker sends of its network namespace once it is there."""
    said, descriptors, _, _ = socket.recv_fds(worker_socket, 16, 1)
    if not said:
        raise Failure("A worker ended before its network was there; its output says why")
    return descriptors[0]


def join_workers(plan: Plan, workers: list[Worker]) -> None:
    """A bridge, and a link from it to every worker, shaped at both ends; then all may start."""
    ports = [f"port{index}" for index in range(len(workers))]
    size = f"gso_max_size {plan['packet']}" if plan["packet"] else ""
    # No IPv6 on the bridge and its links: looking for neighbours would be counted as traffic. Where
    # a container forbids the setting, that is some hundred bytes.
    with (
        contextlib.suppress(OSError),
        open("/proc/sys/net/ipv6/conf/default/disable_ipv6", "w") as file,
    ):
        file.write("1")
    tool(
        plan,
        "ip",
        "-batch",
        "-",
        lines=["link add br0 type bridge mcast_snooping 0", "link set br0 addrgenmode none up"],
    )
    links = []
    for port, worker in zip(ports, workers, strict=True):
        peer = f"peer name eth0 netns {worker.pid} {size}"
        links += [
            f"link add {port} {size} type veth {peer}",
            f"link set {port} master br0 addrgenmode none up",
        ]
    tool(plan, "ip", "-batch", "-", lines=links)
    for kind in plan["towards_worker"]:
        tool(plan, "tc", "-batch", "-", lines=[kind.format(device=port) for port in ports])
    for worker, settings in zip(workers, plan["workers"], strict=True):
        own = plan | {"workers": [settings], "environments": []}
        worker.socket.send(json.dumps(own).encode())
    for worker in workers:
        answer = worker.socket.recv(1 << 16).decode()
        if answer != "up":
            raise Failure(answer or "A worker ended before its network was up; its output says why")
    for worker in workers:
        worker.socket.send(b"go")


def watch_children() -> int:
    """A descriptor that can be read whenever a child has ended."""
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return ended


def watch(control: io.FileIO, children_ended: int, running: dict[int, int]) -> None:
    """Tells of every worker that ends and passes signals on, until all of ``running`` have ended."""
    while running:
        for pid, code in ended_children():
            if pid in running:  # as process 1 it also inherits what workers leave behind
                say(exit=[running.pop(pid), code])
        if not running:
            return
        readable, _, _ = select.select([control.fileno(), children_ended], [], [])
        if children_ended in readable:
            os.read(children_ended, 4096)
        if control.fileno() in readable:
            number = control.read(1)
            if not number:
                sys.exit()
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, number[0])


def ended_children() -> list[tuple[int, int]]:
    """``(pid, exit code as shells give it)`` of the children that have ended since the last call."""
    found: list[tuple[int, int]] = []
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1])
            found.append((ended[0], code if code >= 0 else 128 - code))
    return found


def counters(workers: int) -> list[list[int]]:
    """``[sent, received]`` bytes of each worker, as the bridge's end of its link has counted them."""
    found = {}
    with open("/proc/net/dev") as file:
        for line in file.readlines()[2:]:
            name, numbers = line.split(":")
            found[name.strip()] = [int(number) for number in numbers.split()]
    return [[found[f"port{i}"][0], found[f"port{i}"][8]] for i in range(workers)]


# --- A worker


def worker() -> None:
    """Sets up its own end of the link, waits for the others, and becomes the command."""
    hub_socket = socket.socket(fileno=int(sys.argv[2]))
    hub_socket.set_inheritable(False)
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    socket.send_fds(hub_socket, [b"here"], [own])
    os.close(own)
    told = hub_socket.recv(1 << 20)
    if not told:
        sys.exit(1)  # the hub has given up, and says why itself
    plan = json.loads(told)
    (settings,) = plan["workers"]
    try:
        configure(plan, settings)
    except Failure as failure:
        hub_socket.send(str(failure).encode())
        sys.exit(1)
    hub_socket.send(b"up")
    if hub_socket.recv(16) != b"go":
        sys.exit(1)
    command = plan["command"]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def configure(plan: Plan, settings: Plan) -> None:
    """Name, address and shape of this worker's link, and its share of the machine."""
    socket.sethostname(settings["name"])
    os.sched_setaffinity(0, settings["cores"])
    control_congestion()
    lines = [
        "link set lo up",
        "link set eth0 addrgenmode none up",
        f"addr add {settings['address']}/{plan['prefix']} dev eth0",
    ]
    tool(plan, "ip", "-batch", "-", lines=lines)
    for kind in plan["from_worker"]:
        tool(plan, "tc", "-batch", "-", lines=[kind.format(device="eth0")])


def control_congestion() -> None:
    """TCP as Linux has it by default, or as every Linux permits it, whatever the machine was set to.

    The setting is this network namespace's own.
    """
    for algorithm in ("cubic", "reno"):
        with (
            contextlib.suppress(PermissionError),
            open("/proc/sys/net/ipv4/tcp_congestion_control", "w") as file,
        ):
            file.write(algorithm)
            file.flush()
            return


if __name__ == "__main__":
    {"hub": hub, "worker": worker}[sys.argv[1]]()
