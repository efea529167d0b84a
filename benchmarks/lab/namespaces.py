"""The hub of the lab, inside its namespaces: it makes the workers' networks and starts them.

Started by `lab.network` as a program and never imported; standard library only, so that it starts
at once. The hub is process 1 of a process namespace. When it ends, however it ends, the kernel kills
every process of that namespace, and with the last one go the network namespaces, their links and the
mounts: cleaning up does not depend on any code here.

The lab writes to the hub's input one line of JSON, the plan, then single bytes: numbers of signals
for the workers. The end of that input, which a killed lab brings about too, ends the hub. The hub
writes lines of JSON: ``line`` for each line of output, then ``workers``. Any other line is an error for the
user, by which it ends as ``SystemExit``.
"""

import contextlib
import ctypes
import io
import json
import os
import queue
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lab.group import Group, News, Output

Plan = dict[str, Any]
Spaces = tuple[int, int]  # descriptors of a network namespace and of one of host names

STOP_SECONDS = 5.0  # between asking workers to end and killing them
NOT_IN_KERNEL = ("Unknown device type", "qdisc kind is unknown", "Operation not supported")
CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000  # os.unshare and os.setns: from Python 3.12
LIBC = ctypes.CDLL(None, use_errno=True)


def tool(plan: Plan, name: str, *arguments: str, lines: list[str] | None = None) -> None:
    """Runs a tool, on a batch of lines if there are any."""
    batch = "".join(f"{line}\n" for line in lines or [])
    arguments = ("-batch", "-") if lines else arguments
    command = [plan["tools"][name], *arguments]
    done = subprocess.run(
        command, input=batch, capture_output=True, text=True, check=False, close_fds=False
    )
    if done.returncode == 0:
        return
    problem = f"{' '.join([name, *arguments])}: {' '.join(done.stderr.split())}"
    for kind, text in plan["missing"].items():
        if kind in batch and any(words in done.stderr for words in NOT_IN_KERNEL):
            raise SystemExit(f"{text} ({problem})")
    raise SystemExit(f"The lab's network cannot be set up: {problem}")


def hub() -> None:
    """Builds the network, starts the workers, and watches over them until they or the lab end."""
    # A program's own folder is the first on the path: this is `lab.group`.
    from group import Group, Output  # type: ignore[import-not-found]

    control = io.FileIO(0)
    # Process 1 is spared the default action of a signal, but not what Python does at Ctrl-C.
    signal.signal(signal.SIGINT, lambda *_: None)
    plan = json.loads(control.readline())
    news: News = queue.SimpleQueue()
    output = Output(lambda line: say(line=line), failed=lambda: os._exit(1))
    threading.Thread(target=listen, args=(control, news, output), daemon=True).start()
    name_hosts(plan)
    places = make_network(plan)
    group = Group(news, output)
    try:
        begin = time.monotonic()
        start_workers(plan, places, group)
        codes, exit_code = watch(plan, group)
        seconds = time.monotonic() - begin
        rows = [(codes[place], *sent) for place, sent in enumerate(counters(len(places)))]
    finally:
        # What workers leave running still holds their output.
        with contextlib.suppress(ProcessLookupError):
            if os.getpid() == 1:  # all of the namespace, and never of a machine
                os.kill(-1, signal.SIGKILL)
        group.end()
        output.close()
    say(workers=rows, seconds=seconds, exit_code=exit_code)


def say(**message: Any) -> None:
    """One line to the lab, which may be gone."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(message).encode() + b"\n")


def listen(control: io.FileIO, news: "News", output: "Output") -> None:
    """Passes on the lab's signals until it closes the pipe, or is killed: then nothing here lives on."""
    while number := control.read(1):
        news.put(number[0])
        output.hurry()
    os._exit(1)


def name_hosts(plan: Plan) -> None:
    """Puts the workers' names over /etc/hosts, in this mount namespace only."""
    if not os.path.exists("/etc/hosts"):
        raise SystemExit("There is no /etc/hosts to put the workers' names over: make an empty one")
    names = {"localhost": "127.0.0.1"} | {one["name"]: one["address"] for one in plan["workers"]}
    # A file system in memory, seen only until its one file lies over /etc/hosts.
    scratch = tempfile.gettempdir()
    tool(plan, "mount", "-t", "tmpfs", "lab", scratch)
    with open(f"{scratch}/hosts", "w") as file:
        file.writelines(f"{address} {name}\n" for name, address in names.items())
    tool(plan, "mount", "--bind", f"{scratch}/hosts", "/etc/hosts")
    tool(plan, "umount", scratch)


# --- The network


def here() -> Spaces:
    """The namespaces of this thread; these descriptors keep them."""
    network, names = (
        os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts")
    )
    os.set_inheritable(network, True)  # for `ip`, its arguments name it
    return network, names


def called(function: Any, *arguments: int) -> None:
    """Calls a function of libc, for this thread and the processes that it starts."""
    if function(*arguments):
        raise SystemExit(f"The lab's network cannot be set up: {os.strerror(ctypes.get_errno())}")


@contextlib.contextmanager
def inside(places: Spaces, home: Spaces) -> Iterator[None]:
    """Moves this thread into these namespaces, and home at the end of the context."""
    try:
        for space in places:
            called(LIBC.setns, space, 0)
        yield
    finally:
        for space in home:
            called(LIBC.setns, space, 0)


def make_network(plan: Plan) -> list[Spaces]:
    """A bridge, and for each worker namespaces with a link to it, shaped at both ends."""
    # No IPv6 on the bridge and its links: looking for neighbors would be counted as traffic. Where
    # a container forbids the setting, that is some hundred bytes.
    with contextlib.suppress(OSError):
        set_kernel("net/ipv6/conf/default/disable_ipv6", "1")
    bridge = ["link add br0 type bridge mcast_snooping 0", "link set br0 addrgenmode none up"]
    tool(plan, "ip", lines=bridge)
    home, places = here(), list[Spaces]()
    for index, worker in enumerate(plan["workers"]):
        called(LIBC.unshare, CLONE_NEWNET | CLONE_NEWUTS)
        places.append(here())
        with inside(places[-1], home):
            make_host(plan, worker, f"port{index} netns /proc/self/fd/{home[0]}")
        tool(plan, "ip", lines=[f"link set port{index} master br0 addrgenmode none up"])
        shape(plan, f"port{index}")
    return places


def make_host(plan: Plan, worker: Plan, peer: str) -> None:
    """Name and address of a worker, and its end of a link."""
    socket.sethostname(worker["name"])
    # TCP as Linux has it by default, or as every Linux permits it, whatever the machine was set to.
    for algorithm in ("cubic", "reno"):
        with contextlib.suppress(PermissionError):
            set_kernel("net/ipv4/tcp_congestion_control", algorithm)
            break
    lines = [
        "link set lo up",
        f"link add eth0 {plan['packet']} type veth peer name {peer} {plan['packet']}",
        "link set eth0 addrgenmode none up",
        f"addr add {worker['address']}/{plan['prefix']} dev eth0",
    ]
    tool(plan, "ip", lines=lines)
    shape(plan, "eth0")


def shape(plan: Plan, device: str) -> None:
    """Limits what one end of a link sends."""
    if plan["shape"]:
        tool(plan, "tc", lines=[f"qdisc add dev {device} root {plan['shape']}"])


def set_kernel(name: str, value: str) -> None:
    """A setting of this network namespace's own."""
    with open(f"/proc/sys/{name}", "w") as file:
        file.write(value)


def counters(num_workers: int) -> list[tuple[int, int]]:
    """``(sent, received)`` bytes of each worker, as the bridge's end of its link has counted them."""
    with open("/proc/thread-self/net/dev") as file:
        rows = {name: row for name, *row in map(str.split, file)}
    ports = [rows[f"port{index}:"] for index in range(num_workers)]
    return [(int(port[0]), int(port[8])) for port in ports]


# --- The workers


def start_workers(plan: Plan, places: list[Spaces], group: "Group") -> None:
    """Starts the command in each worker's namespaces, on its share of the machine's cores."""
    command, home, cores = plan["command"], here(), os.sched_getaffinity(0)
    for index, worker in enumerate(plan["workers"]):
        with inside(places[index], home):
            os.sched_setaffinity(0, worker["cores"])
            try:
                group.start(index, command, env=os.environ | worker["environment"])
            except OSError as error:
                raise SystemExit(f"{command[0]}: {error.strerror}") from None
    os.sched_setaffinity(0, cores)


def watch(plan: Plan, group: "Group") -> tuple[dict[int, int], int]:
    """Waits until all workers have ended: the exit code of each, as shells give it, and that of the run."""
    codes: dict[int, int] = {}
    exit_code = 0
    while len(codes) < len(group.members):
        news = group.next()
        if isinstance(news, int):  # Ctrl-C or SIGTERM; the second time there is no more waiting
            stop(group, 0.0, 0.0 if exit_code == 128 + news else STOP_SECONDS)
            exit_code = 128 + news
        elif news:
            code = news.process.returncode
            codes[news.place] = code = code if code >= 0 else 128 - code
            if code and not exit_code:
                exit_code = code
                stop(group, plan["grace"], STOP_SECONDS)
    return codes, exit_code


def stop(group: "Group", seconds: float, patience: float) -> None:
    """Asks workers to end after some seconds, and kills them if they have not; does not wait."""
    for wait, number in ((seconds, signal.SIGTERM), (seconds + patience, signal.SIGKILL)):
        timer = threading.Timer(wait, group.kill, (number,))
        timer.daemon = True
        timer.start()


if __name__ == "__main__":
    hub()
