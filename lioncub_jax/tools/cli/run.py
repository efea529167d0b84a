"""``lioncub run``: a command as so many workers of this machine, kept going when one dies."""

import argparse
from pathlib import Path

from lioncub_jax.tools.cli import output
from lioncub_jax.tools.cli.options import COUNT, Row

SUMMARY = "run a command as several workers, and keep it going when one dies"

DESCRIPTION = """\
Starts a command once for each worker on this machine and watches them. When one
dies all others are ended and all start again, from the state that the command
goes on from. LIONCUB_MEMORY is a folder in memory for that, as long as the run
lasts: for snapshots. A worker that dies again and again
is left out, down to --min. Workers find each other by
jax.distributed.initialize() without arguments. docs/how_to/faults.md in the
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


OPTIONS: list[Row] = [
    ("--workers", COUNT, "how many are started"),
    ("--min", COUNT, "with fewer it does not go on (as many as --workers)"),
    (
        "--events",
        {"type": Path},
        "a file: add every start, death and end there, a JSON object a line",
    ),
]


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code.

    Raises:
      ValueError: for options that cannot be.
    """
    from lioncub_jax.tools import run as elastic  # not needed for a plan

    kept = elastic.keep(
        args.words, args.workers, least=args.min, events=args.events, write=output.write_line
    )
    return kept.exit_code
