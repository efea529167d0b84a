"""The command line: ``lioncub plan | probe | bytes``.

A command ends with 0, or with 2 and a line that says what was given, what is allowed and what to
do. Ctrl-C ends with 130, and a reader that closed the pipe with 141, as it would end a program in C.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import lioncub_jax
from lioncub_jax.tools.cli import bytes as bytes_command
from lioncub_jax.tools.cli import output
from lioncub_jax.tools.cli import plan as plan_command
from lioncub_jax.tools.cli import probe as probe_command

INTERRUPTED = 130  # 128 and the number of SIGINT
PIPE_CLOSED = 141  # 128 and the number of SIGPIPE
LONGEST_MESSAGE = 900  # XLA's may have thousands of lines

_DESCRIPTION = """\
Data-parallel Lion for JAX whose workers exchange about one bit per parameter:
what it would gain, what your machines reach, and what a compiled step sends."""

_EPILOG = """\
exit codes:
  0, or 2 and a line that says what was wrong; 130 after Ctrl-C

examples:
  lioncub plan --model 124M --workers 8 --bandwidth 1gbit --compute 144ms \\
      --tokens-per-worker 8192
  lioncub bytes lioncub_jax.tools.cli.examples:lowered --devices 8"""

_COMMANDS = {
    "plan": plan_command,
    "probe": probe_command,
    "bytes": bytes_command,
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and does not hide that help could not be printed."""

    def print_help(self, file: Any = None) -> None:
        output.write(self.format_help())

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {_shortened(message)} ({self.prog} --help has examples)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: arguments without the program's name; those of the process if None.

    Returns:
      The exit code.

    Raises:
      SystemExit: with code 2 for arguments that cannot be, and with 0 for ``--help``.

    Example:
      >>> main(["plan", "--model", "1M", "--workers", "4", "--bandwidth", "1gbit"])
      Traceback (most recent call last):
      SystemExit: 2
    """
    try:
        return _command(list(sys.argv[1:] if argv is None else argv))
    except BrokenPipeError:
        return PIPE_CLOSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _command(given: list[str]) -> int:
    command = _parser("--explain" in given)
    try:
        args = command.parse_args(given)
        command = args.parser
        return int(_COMMANDS[args.name].run(args))
    except (ValueError, ImportError) as error:
        message = str(error)
    except BrokenPipeError:
        raise
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    command.error(message)


def _parser(explain: bool) -> _Parser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="lioncub", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=raw,
        allow_abbrev=False,
    )  # fmt: skip
    version = f"lioncub_jax {lioncub_jax.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="plan | probe | bytes"
    )
    for name, module in _COMMANDS.items():
        command = commands.add_parser(
            name, help=module.SUMMARY, description=module.DESCRIPTION, epilog=module.EPILOG,
            formatter_class=raw, allow_abbrev=False,
        )  # fmt: skip
        for option, how, words in module.OPTIONS:
            hidden = module is plan_command and option in plan_command.DETAILS and not explain
            command.add_argument(option, help=argparse.SUPPRESS if hidden else words, **how)
        command.set_defaults(name=name, parser=command)
    return parser


def _shortened(message: str) -> str:
    """One line; of a long one the beginning, which names what is wrong, and the end, with the advice."""
    line = " ".join(message.split())
    if len(line) <= LONGEST_MESSAGE:
        return line
    return f"{line[: LONGEST_MESSAGE * 2 // 3]} [...] {line[-LONGEST_MESSAGE // 3 :]}"
