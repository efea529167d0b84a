"""``lioncub lab``: a command for each worker of a slow network."""

import argparse
import sys

from lioncub_jax.tools.cli import output
from lioncub_jax.tools.cli.options import COUNT, RATE, SECONDS, Row

SUMMARY = "run a command once for each worker, on a network of a chosen speed"

DESCRIPTION = """\
Starts a command once for each worker on this machine, each in a Linux network
namespace of its own with a link of the given speed. Workers find each other by
jax.distributed.initialize() without arguments. At the end it shows the exit
code of each worker and how many bytes it sent and received. It needs Linux, and
no root where users may make namespaces; nothing is left behind. docs/how_to/lab.md in
the repository says what the workers see, and what the lab cannot show."""

EPILOG = """\
The exit code is 0 or that of the first worker that failed.

examples:
  lioncub lab --workers 2 -- true
  lioncub lab --workers 2 --rate 100mbit -- hostname
  lioncub lab --workers 2 -- sh -c 'echo worker $RANK > $RANK.log'"""

OPTIONS: list[Row] = [
    ("--workers", COUNT, "how many times the command is started"),
    ("--rate", RATE, "of each link, such as 100mbit (not limited)"),
    (
        "--grace", SECONDS | {"default": 10.0},
        "that the others get to end when one worker has failed (10s)",
    ),
]  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
      ValueError: as `lab.run`.
    """
    from lioncub_jax.tools import lab  # not needed for a plan

    network = lab.Network(args.workers, args.rate)
    try:
        report = lab.run(network, args.words, grace=args.grace, write=output.write_line)
    except lab.LabError as error:  # several lines: what to install or permit
        print(f"error: {error}", file=sys.stderr)
        return 2
    output.show(lab.table(report))
    return report.exit_code
