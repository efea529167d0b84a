"""``lioncub lab``: a command for each worker of a slow network."""

import argparse
from pathlib import Path
from typing import Any

from lioncub_jax import lab, units
from lioncub_jax.cli import options, output

SUMMARY = "run a command once for each worker, on a network of a chosen speed"

DESCRIPTION = """\
Starts a command once for each worker on this machine, each in a Linux network
namespace of its own with a link of the given speed. Workers find each other by
jax.distributed.initialize() without arguments. At the end it shows the exit
code of each worker and how many bytes it sent and received. It needs Linux, and
no root where users may make namespaces; nothing is left behind. docs/lab.md in
the repository says what the workers see, and what the lab cannot show."""

EPILOG = """\
The exit code is 0 or that of the first worker that failed; 124 after --timeout.

examples:
  lioncub lab --check
  lioncub lab --workers 2 --rate 100mbit --report run.json -- hostname
  lioncub lab --workers 2 --logs out --timeout 90s -- sh -c 'echo worker $RANK'"""

_NETWORK = ("workers", "rate", "delay")
_RUN = ("logs", "timeout", "grace")


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser."""
    command.usage = "lioncub lab [options] -- COMMAND..."
    count, seconds = options.reads(units.count), options.reads(units.seconds)
    rate = options.reads(units.rate)
    command.add_argument(
        "--workers", type=count, metavar="W", help="how many times the command is started"
    )
    command.add_argument(
        "--rate", type=rate, metavar="RATE", help="of each link, such as 100mbit (not limited)"
    )
    command.add_argument(
        "--delay", type=seconds, metavar="TIME",
        help="from any worker to any other, one way, such as 5ms; needs netem in the kernel (none)",
    )  # fmt: skip
    command.add_argument(
        "--logs", type=Path, metavar="DIR", help="folder for the output of each worker (none)"
    )
    command.add_argument(
        "--timeout",
        type=seconds,
        metavar="TIME",
        help="end all workers after it, such as 90s (none)",
    )
    command.add_argument(
        "--grace", type=seconds, metavar="TIME",
        help="that the others get to end when one worker has failed (10s)",
    )  # fmt: skip
    command.add_argument(
        "--report", type=Path, metavar="FILE.json", help="write exit codes and bytes there as well"
    )
    command.add_argument(
        "--check", action="store_true",
        help="only try whether this machine can run the lab, with the network that is given",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
      ValueError: for options that do not go together, and as `lab.run`.
    """
    command: argparse.ArgumentParser = args.parser
    try:
        return _check(args) if args.check else _run(args)
    except lab.LabError as error:  # several lines: what to install or permit
        missing = str(error)
    command.exit(2, f"error: {missing}\n")


def _check(args: argparse.Namespace) -> int:
    options.refuse(args, (*_RUN, "report"), "it has no effect with --check")
    if args.words:
        raise ValueError(f"-- {' '.join(args.words)}: --check starts no command; leave it out")
    given = _given(args, _NETWORK)
    lab.check(lab.Network(**{"workers": 2, **given}) if given else None)
    output.write("this machine can run the lab\n")
    return 0


def _run(args: argparse.Namespace) -> int:
    if args.workers is None or not args.words:
        raise ValueError("give --workers, and the command behind --: lab --workers 4 -- COMMAND")
    if args.report:
        output.check_writable(args.report)
    network = lab.Network(**_given(args, _NETWORK))
    report = lab.run(network, args.words, write=_line, **_given(args, _RUN))
    lost = _save(args.report, report) if args.report else ""
    output.show(lab.table(report))
    if lost:
        output.show_json(report._asdict())
        raise ValueError(lost)
    return int(report.exit_code)


def _given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _line(text: str) -> None:
    output.write(f"{text}\n")


def _save(path: Path, report: lab.Report) -> str:
    """Writes a report; what kept it from that, after a run that must not be lost."""
    try:
        path.write_text(output.as_text(report))
    except OSError as error:
        return f"{path}: {error.strerror}; the report is printed instead"
    return ""
