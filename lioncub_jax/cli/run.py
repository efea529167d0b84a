"""``lioncub run``: a command as so many workers of this machine, kept going when one dies."""

import argparse
from pathlib import Path

from lioncub_jax import elastic, units
from lioncub_jax.cli import options, output

SUMMARY = "run a command as several workers, and keep it going when one dies"

DESCRIPTION = """\
Starts a command once for each worker on this machine and watches them. When one
dies all others are ended and all start again, from the state that the command
goes on from. LIONCUB_MEMORY is a folder in memory for that, as long as the run
lasts: for snapshots and compiled programs. A worker that dies again and again
is left out, down to --min. Workers find each other by
jax.distributed.initialize() without arguments. docs/faults.md in the
repository says what survives what."""

EPILOG = """\
The exit code is 0; that of the worker that failed, when there is no going on; or
128 and the number of the signal that ended the run. SIGTERM, SIGQUIT and SIGHUP, as
of a closed terminal, ask the workers to save and end (by SIGTERM); SIGUSR1 too, and
starts all of them again. Workers do not outlive the run, even where it is killed.

examples:
  lioncub run --workers 2 -- hostname
  lioncub run --workers 4 --min 3 --events run.jsonl -- python examples/train_gpt.py \\
    --distributed --checkpoint gpt --save-every 20 --resume --out results"""


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser."""
    command.usage = "lioncub run [options] -- COMMAND..."
    count = options.reads(units.count)
    command.add_argument("--workers", type=count, metavar="W", help="how many are started")
    command.add_argument(
        "--min", type=count, metavar="M", help="with fewer it does not go on (as many as --workers)"
    )
    command.add_argument(
        "--strikes", type=count, metavar="N", default=3,
        help="starts in a row that fail until a worker is left out, or the run ends (3)",
    )  # fmt: skip
    command.add_argument(
        "--settled", type=options.reads(units.seconds), metavar="TIME", default=60.0,
        help="a start fails that ends within it, or before its first step (60s)",
    )  # fmt: skip
    command.add_argument(
        "--events", type=Path, metavar="FILE.jsonl",
        help="add every start, death and end there, a JSON object a line",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code.

    Raises:
      ValueError: for options that cannot be.
    """
    if args.workers is None or not args.words:
        raise ValueError("give --workers, and the command behind --: run --workers 4 -- COMMAND")
    if args.events:
        output.check_writable(args.events)
    kept = elastic.keep(
        args.words, args.workers, least=args.min, strikes=args.strikes, settled=args.settled,
        events=args.events, write=lambda line: output.write(f"{line}\n"),
    )  # fmt: skip
    return kept.exit_code
