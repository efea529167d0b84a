"""The processes of a run: one by itself, or several, which options or their launcher number."""

import argparse
import math

import jax

import lioncub_jax as lc


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
    if args.distributed or {args.coordinator, args.processes, args.process} != {None}:
        lc.mesh.join(
            args.coordinator, args.processes, args.process,
            # Seconds to wait for a process that says nothing, and to end after an error.
            heartbeat_timeout_seconds=args.heartbeat, shutdown_timeout_seconds=args.heartbeat,
        )  # fmt: skip


def is_first() -> bool:
    """True in the process that writes the files and prints."""
    return jax.process_index() == 0
