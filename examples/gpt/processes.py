"""The processes of a run: one by itself, several that know each other by options, or a cluster's."""

import argparse
import math

import jax


def check(args: argparse.Namespace) -> None:
    """Raises ``ValueError`` unless the options name the processes in one whole way."""
    given = {f"--{name}": getattr(args, name) for name in ("coordinator", "processes", "process")}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return
    if missing:
        raise ValueError(f"{', '.join(given)} go together: {' and '.join(missing)} not given")
    if args.distributed:
        raise ValueError("--distributed asks the cluster, --coordinator tells: give one of them")
    if args.process >= args.processes:
        raise ValueError(
            f"--process {args.process}: {args.processes} processes count from 0 to {args.processes - 1}"
        )
    host, _, port = args.coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(
            f"--coordinator {args.coordinator}: give HOST:PORT, such as node0:1234, of process 0"
        )


def start(args: argparse.Namespace, sizes: dict[str, int] | None) -> None:
    """Joins the processes together; a CPU stands in for as many devices as the mesh has."""
    processes = args.processes or 1
    devices = math.prod(sizes.values()) if sizes else max(8, processes)
    if sizes and devices % processes:
        raise ValueError(
            f"--processes {processes} do not share the {devices} devices of --mesh evenly: give a mesh "
            "whose size is a multiple"
        )
    if not args.distributed:
        jax.config.update("jax_num_cpu_devices", devices // processes)
    if args.coordinator:
        jax.distributed.initialize(
            args.coordinator, args.processes, args.process, **patience(args.heartbeat)
        )
    elif args.distributed:
        _ask_the_cluster(args.heartbeat)


def _ask_the_cluster(heartbeat: int) -> None:
    try:
        jax.distributed.initialize(**patience(heartbeat))
    except ValueError as error:
        raise ValueError(
            f"--distributed: JAX recognises no cluster here ({error}): tell each process with "
            "--coordinator HOST:PORT --processes N --process I"
        ) from None


def patience(seconds: int) -> dict[str, int]:
    """Seconds to wait for a process that says nothing, and to end after an error."""
    return {"heartbeat_timeout_seconds": seconds, "shutdown_timeout_seconds": seconds}


def is_first() -> bool:
    """True in the process that writes the files and prints."""
    return jax.process_index() == 0
