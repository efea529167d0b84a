"""``lioncub probe``: what collectives and a step really take on these machines."""

import argparse
from pathlib import Path

import jax

from lioncub_jax.mesh.placement import Workers
from lioncub_jax.mesh.start import join
from lioncub_jax.tools.cli import output, targets
from lioncub_jax.tools.cli.options import COUNT, FLAG, RATE, Row

SUMMARY = "measure what collectives and a step take on these machines"

DESCRIPTION = """\
Times all-reduces (float32, bfloat16), all-to-alls and all-gathers between all
devices, by size, and the packing of codes. With --step it times a training step
with its exchange and without, and says how much of the exchange overlaps with
computing. It takes about a minute. Start it as the training would be: one process
on each host. lioncub plan --measured takes the file of --out."""

EPILOG = """\
The target of --step is a function of a lioncub_jax.Workers that returns
(step, state, batch), where step is what make_train_step returned, of an optimizer in
global_gradients, whose overlap the plan wants to know. It is called twice: for all
workers, and for one.

examples:
  lioncub probe --step lioncub_jax.tools.cli.examples:training --devices 2
  mpirun -np 2 lioncub probe --distributed --out probe.json"""

OPTIONS: list[Row] = [
    ("--step", {}, "MODULE:NAME or FILE.py:NAME of a function that makes a training step"),
    ("--bandwidth", RATE, "the nominal rate of a worker's link, such as 25gbit, to compare with"),
    ("--out", {"type": Path}, "write the numbers to this file, as JSON; the first process does"),
    ("--distributed", FLAG, "join the processes that the cluster or mpirun started"),
    ("--devices", COUNT, "run on so many devices of the CPU"),
]


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
      ValueError: as `probe.probe` and targets, and where there is no cluster to join.
    """
    from lioncub_jax.tools import probe  # not needed for a plan

    if args.distributed:
        join()
    if args.devices:
        targets.use_devices(args.devices)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    target = targets.load(args.step) if args.step else None
    measured = probe.probe(Workers(mesh, "data"), target, nominal=args.bandwidth)
    if jax.process_index() == 0:
        if args.out:
            args.out.write_text(output.as_text(measured))
        output.show(probe.table(measured))
    return 0
