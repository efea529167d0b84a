"""The start of several processes: who this one is among them, where the first one is, and who is missing.

Launchers say it by environment variables, each by its own. MPIs and torchrun number the processes, Slurm
names their nodes too, and Kubernetes says no more than which pod this is.
"""

import contextlib
import importlib.util
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

# Variables of the number of a process, of how many there are, and of both among those of its node.
LAUNCHERS = {
    "Open MPI": [f"OMPI_COMM_WORLD_{x}" for x in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    "MPICH": ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
    "torchrun": ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
}
VISIBLE = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
FIRST_PORT, NUM_PORTS = 61440, 4096  # for jobs of Slurm, as in JAX
GIVE = "give coordinator_address, num_processes and process_id"


class Place(NamedTuple):
    """The place of a process among all, as `jax.distributed.initialize` takes it.

    Attributes:
      address: ``"host:port"`` of process 0; None: JAX finds it.
      num_processes: how many there are; None: JAX finds it.
      process_id: the number of this one, from 0; None: JAX finds it.
      devices: the GPUs of the node that are its own, all if that is empty; None: JAX finds them.
      method: how JAX finds what is None; "deactivate" where nothing is, None for any way.
    """

    address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    devices: list[int] | None = None
    method: str | None = None


def join(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    wait: float = 300.0,
    **options: Any,
) -> None:
    """Joins this process to the others of its run: `jax.distributed.initialize`, whoever started them.

    What is not given is taken from the first that says it:

    - the number of this process and of all: ``OMPI_COMM_WORLD_RANK`` and ``_SIZE`` (Open MPI), ``PMI_RANK``
      and ``PMI_SIZE`` (MPICH, Intel MPI), ``RANK`` and ``WORLD_SIZE`` (torchrun), ``srun`` of Slurm,
      ``JOB_COMPLETION_INDEX`` (Kubernetes, where ``num_processes`` is given), JAX's detection (TPU pods);
    - the address of process 0: ``JAX_COORDINATOR_ADDRESS``, ``MASTER_ADDR`` and ``MASTER_PORT``, Slurm,
      Open MPI 4, and for other MPIs the package mpi4py, where it is installed.

    Of processes that share a node each takes the GPU of its number there, unless the launcher shows it
    fewer GPUs than there are processes. A process that is alone on its node, or to which all three are
    given, takes all. Ray joins its workers itself: there a call without arguments does nothing.

    Args:
      coordinator_address: ``"host:port"`` of process 0; any port that is free there.
      num_processes: how many there are.
      process_id: the number of this one, from 0.
      wait: seconds until all must be there.
      options: others of `jax.distributed.initialize`, such as ``heartbeat_timeout_seconds``.

    Raises:
      ValueError: where nobody says what is missing, or two say different things; in a job of Slurm without
        ``srun``; in a worker of Ray that has not joined.
      TimeoutError: after ``wait``, where the name of process 0 is unknown here, nobody answers at its port,
        or, in process 0, another program has the port. Where process 0 answers and others are missing, this
        process says so and ends: it is inside of JAX, which would end it by a stack trace.

    Example:
      >>> import lioncub_jax as lc
      >>> lc.mesh.join("host0:1234", num_processes=4, process_id=3)  # doctest: +SKIP

    Source: this library.
    """
    given = coordinator_address, num_processes, process_id
    if jax.distributed.is_initialized():
        if given != (None, None, None):
            raise ValueError(
                f"join{given}: this process has joined already, by an earlier call or its launcher (Ray): "
                "leave the arguments out"
            )
        return
    place, until = find_place(*given, os.environ), time.monotonic() + wait
    who = "this process" if place.process_id is None else f"process {place.process_id}"
    bind = options.get("coordinator_bind_address") or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    while why := obstacle(place, bind):
        if time.monotonic() > until:
            raise TimeoutError(f"{who}, after {wait:g} s: {why}")
        time.sleep(0.1)
    if place.method == "mpi4py":
        _check_mpi4py(place)
    with _ends_at(until, f"{who}, after {wait:g} s: {_who_is_missing(place)}"):
        _initialize(place, {"initialization_timeout": int(wait) + 60} | options)


def _initialize(place: Place, options: dict[str, Any]) -> None:
    address, num_processes, process_id, devices, method = place
    try:
        jax.distributed.initialize(
            address, num_processes, process_id,
            **{"local_device_ids": devices} | options, cluster_detection_method=method,
        )  # fmt: skip
    except (
        Exception
    ) as error:  # each way of JAX has its own, such as kubernetes.config.ConfigException
        if method:
            raise
        raise ValueError(
            "nobody says which processes there are: OMPI_COMM_WORLD_RANK, PMI_RANK, RANK and SLURM_STEP_ID "
            f"are not set, and JAX's detection failed ({' '.join(str(error).split())}): {GIVE}"
        ) from error


def _ends_at(until: float, sentence: str) -> contextlib.AbstractContextManager[None]:
    """A context that ends this process with a sentence when it lasts longer."""

    def end() -> None:
        print(f"error: {sentence}", file=sys.stderr, flush=True)
        os._exit(1)  # the main thread is inside of JAX

    return after(max(0.0, until - time.monotonic()), end)


@contextlib.contextmanager
def after(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """A context that calls a function in a thread of its own when it lasts longer."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# --- Who this process is


def find_place(
    address: str | None, num_processes: int | None, process_id: int | None,
    environment: Mapping[str, str],
) -> Place:  # fmt: skip
    """Finds the place of this process by what the program gives and the launcher says, as `join` does."""
    address = address or _address(environment)
    if process_id is None and num_processes is not None and "JOB_COMPLETION_INDEX" in environment:
        process_id = _number(environment, "JOB_COMPLETION_INDEX")
    if (num_processes is None) != (process_id is None):
        raise ValueError(f"{num_processes=}, {process_id=}: give both, or neither")
    if num_processes is not None and process_id is not None:
        if not 0 <= process_id < num_processes:
            raise ValueError(
                f"{process_id=}: {num_processes} processes count from 0 to {num_processes - 1}"
            )
        if address is None:
            raise ValueError(f"nobody says where process 0 is: {GIVE}")
        return Place(address, num_processes, process_id, [], "deactivate")
    launcher = _launcher(environment)
    in_step = {"SLURM_STEP_ID", "SLURM_STEP_NODELIST"} <= {*environment}
    if in_step and launcher != "Open MPI":
        return _place_in_step(launcher, address, environment)
    if launcher:
        return _place_of(launcher, address, environment)
    if "SLURM_JOB_ID" in environment:
        raise ValueError(
            f"this process is in job {environment['SLURM_JOB_ID']} of Slurm, and srun did not start it: "
            f"start the program with srun, or {GIVE}"
        )
    if "RAY_JOB_ID" in environment:
        raise ValueError(
            "this worker of Ray has not joined the others: JaxTrainer joins them where its ScalingConfig "
            "asks for TPUs or GPUs, and on CPUs with jax_config=JaxConfig(use_gpu=True) and "
            f"JAX_PLATFORMS=cpu in their environment; or {GIVE}"
        )
    return Place(address)


def _address(environment: Mapping[str, str]) -> str | None:
    if "JAX_COORDINATOR_ADDRESS" in environment:
        return environment["JAX_COORDINATOR_ADDRESS"]
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if (host is None) != (port is None):
        raise ValueError(f"MASTER_ADDR={host}, MASTER_PORT={port}: set both, or neither")
    return host and f"{host}:{port}"


def _number(environment: Mapping[str, str], name: str) -> int:
    """A number of the environment; -1 where it is not there."""
    text = environment.get(name)
    if text is not None and not text.isdecimal():
        raise ValueError(f"{name}={text!r} is no whole number of at least 0")
    return -1 if text is None else int(text)


def _launcher(environment: Mapping[str, str]) -> str | None:
    """The launcher that has numbered this process.

    Raises:
      ValueError: where two number it differently, or count other processes than Slurm's job has tasks; but
        of Open MPI only the daemons are tasks, one on each node.
    """
    there = {
        launcher: [_number(environment, name) for name in names[:2]]
        for launcher, names in LAUNCHERS.items()
        if {*names[:2]} <= {*environment}
    }
    first = next(iter(there), None)
    tasks = _number(environment, "SLURM_NTASKS") if first and first != "Open MPI" else -1
    if any(x != there[first] or tasks not in (-1, x[1]) for x in there.values() if first):
        names = [*(name for launcher in there for name in LAUNCHERS[launcher][:2]), "SLURM_NTASKS"]
        said = ", ".join(f"{name}={environment[name]}" for name in names if name in environment)
        raise ValueError(
            f"{said} contradict each other: start the program by one launcher, or {GIVE}"
        )
    return first


def _place_of(launcher: str, address: str | None, environment: Mapping[str, str]) -> Place:
    rank, size, *local = (_number(environment, name) for name in LAUNCHERS[launcher])
    place = Place(address, size, rank, _devices(environment, *local), "deactivate")
    if address:
        return place
    if "OMPI_MCA_orte_hnp_uri" in environment:  # Open MPI 4
        return place._replace(method="ompi")
    if launcher != "torchrun" and importlib.util.find_spec("mpi4py"):
        return place._replace(method="mpi4py")
    raise ValueError(
        f"{launcher} says that this is process {rank} of {size}, and not where process 0 is: set "
        f"MASTER_ADDR and MASTER_PORT for all of them, or install mpi4py for the same MPI, or {GIVE}"
    )


def _place_in_step(
    launcher: str | None, address: str | None, environment: Mapping[str, str]
) -> Place:
    """Of a task of srun, which may number it for an MPI too, or of one that mpirun started by srun."""
    names = LAUNCHERS.get(launcher or "", ["SLURM_PROCID", "SLURM_NTASKS", "", ""])
    rank, size, *local = (_number(environment, name) for name in names)
    if -1 in local:
        tasks, nodes = (_number(environment, f"SLURM_STEP_NUM_{x}") for x in ("TASKS", "NODES"))
        local = [_number(environment, "SLURM_LOCALID"), 1 if tasks == nodes else tasks]
    if address is None:
        # "node1", "node1,other", "node[01-12,20]": the first has task 0.
        name, digits = re.findall(r"^([^,\[]*)(?:\[(\d+))?", environment["SLURM_STEP_NODELIST"])[0]
        job, step = (_number(environment, f"SLURM_{x}_ID") for x in ("JOB", "STEP"))
        # Steps of a job run side by side, as jobs do that share a node.
        port = environment.get("JAX_COORDINATOR_PORT", FIRST_PORT + (16 * job + step) % NUM_PORTS)
        address = f"{name}{digits}:{port}"
    return Place(address, size, rank, _devices(environment, *local), "deactivate")


def _devices(environment: Mapping[str, str], rank: int, count: int) -> list[int] | None:
    """The GPUs that process ``rank`` of so many on a node takes; all if that is empty."""
    if "JAX_LOCAL_DEVICE_IDS" in environment:
        return None
    shown = next((environment[name].split(",") for name in VISIBLE if name in environment), None)
    return [] if count <= 1 or (shown is not None and len(shown) < count) else [rank]


# --- Where process 0 is, and who is missing


def obstacle(place: Place, bind: str | None = None) -> str:
    """What keeps this process from the address of process 0 now; nothing if that is empty, or unknown."""
    if place.address is None or place.process_id is None:
        return ""
    host, _, port = place.address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(
            f"the address {place.address!r}: give host:port of process 0, such as node0:1234"
        )
    try:
        socket.getaddrinfo(host.strip("[]"), int(port))
    except socket.gaierror as error:
        return (
            f"this machine does not know the name {host!r} of process 0 ({error.strerror}): give an IP "
            "address, or add the name to DNS or /etc/hosts"
        )
    try:
        if place.process_id == 0:
            at = (bind or "").rpartition(":")[0].strip("[]")
            is_v6 = ":" in at
            family = socket.AF_INET6 if is_v6 else socket.AF_INET
            socket.create_server((at, int(port)), family=family).close()
        else:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        if place.process_id == 0:
            return f"port {port} of this machine is not free ({error}): give another"
        return (
            f"{place.address} does not answer ({error}): start process 0 there, and open port {port} in "
            "its firewall"
        )
    return ""


def _who_is_missing(place: Place) -> str:
    if place.method == "ompi":
        return (
            "not all processes came to the machine of mpirun, which JAX takes for that of process 0: give "
            "coordinator_address, or start mpirun where process 0 is"
        )
    if place.address is None or place.process_id is None:
        return f"JAX knows other processes, and not all of them came: start them, or {GIVE}"
    return (
        f"{place.address} answers, but not all {place.num_processes} processes came: start all within "
        "`wait` seconds, with one address and one number of processes"
    )


def _check_mpi4py(place: Place) -> None:
    """Raises ``ValueError`` where mpi4py is of another MPI than the launcher: it would be alone."""
    try:
        from mpi4py import MPI  # type: ignore[import-not-found]
    except (ImportError, RuntimeError) as error:
        raise ValueError(f"mpi4py finds no MPI here ({error}): {GIVE}") from error
    found = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    if found != (place.process_id, place.num_processes):
        raise ValueError(
            f"mpi4py says that this is process {found[0]} of {found[1]}, and the launcher that it is "
            f"{place.process_id} of {place.num_processes}: install mpi4py for the launcher's MPI, or {GIVE}"
        )
