"""Options of the lab, and what it prints."""

import argparse
import os
import sys
from collections.abc import Sequence

from lab import network
from lioncub_jax.programs import units

DESCRIPTION = """\
Starts a command once for each worker on this machine, each in a Linux network
namespace of its own with a link of the given speed. At the end it shows the exit
code of each worker and how many bytes it sent and received. It needs Linux, and
no root where users may make namespaces; nothing is left behind. docs/how_to/lab.md
says what the workers see, and what the lab cannot show."""

EPILOG = """\
The exit code is 0 or that of the first worker that failed.

examples:
  python benchmarks/lab --workers 2 -- true
  python benchmarks/lab --workers 2 --rate 100mbit -- hostname
  python benchmarks/lab --workers 2 -- sh -c 'echo worker $RANK > $RANK.log'"""

PIPE_CLOSED = 141  # 128 and the number of SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command of these arguments; returns its exit code."""
    parser = argparse.ArgumentParser(
        "lab", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--workers", type=units.count, required=True)
    parser.add_argument("--rate", type=units.rate, help="of each link, as 100mbit (not limited)")
    parser.add_argument(
        "--grace", type=units.seconds, default=10.0,
        help="that the others get to end when one worker has failed (10s)",
    )  # fmt: skip
    parser.add_argument("command", nargs="+", help="behind --")
    args = parser.parse_args(argv)
    links = network.Network(args.workers, args.rate)
    try:
        report = network.run(links, args.command, grace=args.grace, write=write_line)
    except ValueError as error:
        parser.error(str(error))
    except network.LabError as error:  # several lines: what to install or permit
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return PIPE_CLOSED
    for index, (code, sent, received) in enumerate(report.workers):
        write_line(f"worker {index}: exit code {code}, sent {sent:,} bytes, received {received:,}")
    return report.exit_code


def write_line(line: str) -> None:
    """A line of a worker, at once; a thread that waits here for a reader does not hold up the end.

    Raises:
      OSError: where standard output takes no more.
    """
    data = f"{line}\n".encode(errors="replace")
    while data:
        data = data[os.write(1, data) :]
