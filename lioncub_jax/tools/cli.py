"""The command ``lioncub plan | probe | bytes``, which ``python -m lioncub_jax`` is as well.

A command ends with 0, or with 2 and a line that says what was given, what is allowed and what to do.
"""

import argparse
import json
import math
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import lioncub_jax as lc
from lioncub_jax.programs import compiled, units, watch
from lioncub_jax.tools import plan as planner
from lioncub_jax.tools import probe as prober
from lioncub_jax.tools.plan import CLUSTERS, Cluster, Link, Measured, picture

PIPE_WIDTH = 200  # a pipe has no width of its own; the 80 of rich would fold lines

MAIN = """\
Data-parallel training for JAX whose workers send 2 to 5 bits for each parameter:
what it would gain, what your machines reach, and what a compiled step sends.
lioncub COMMAND --help has examples."""

PLAN = """\
Shows for each bandwidth a table of methods, the first at the loss above, and what to
use; or that none is worth it, or which number to measure first. Links are taken to
reach a published share of their rate, unless lioncub probe measured them. Steps to the
loss are measured, on a small model. docs/explain/planner.md in the repository has the
model and what it leaves out.

examples:
  lioncub plan --model 124M --workers 8 --bandwidth 100mbit,1gbit,100gbit \\
      --compute 2s --tokens-per-worker 8192
  lioncub plan --model 7B --cluster a3-mega-64 --compute 1.2s --tokens-per-worker 65536"""

PROBE = """\
Times all-reduces (float32, bfloat16), all-to-alls and all-gathers between all
devices, by size, and the packing of codes. With --step it times a training step
with its exchange and without, and says how much of the exchange overlaps with
computing. It takes about a minute. Start it as the training would be: one process
on each host. lioncub plan --measured takes the file of --out.

examples, in a clone:
  JAX_NUM_CPU_DEVICES=2 lioncub probe --step examples.targets:training
  srun --ntasks-per-node=1 lioncub probe --distributed --out probe.json"""

BYTES = """\
Lists every collective of a compiled JAX program with the mesh axes that it runs
over, and the bytes that each device sends in a step. Of a program that votes it says
what travels between the workers, and what inside a worker.

example, in a clone:
  JAX_NUM_CPU_DEVICES=8 lioncub bytes examples.targets:lowered"""


WORKERS = "data-parallel workers; of several nodes each is one worker (--devices-per-worker)"
BANDWIDTH = "of each worker's link, the slower of up and down, such as 1gbit; several with commas"
COMPUTE = """time of a step without the network, such as 144ms; before there is a program, about 6 *
parameters * tokens per worker / the FLOP/s that all devices of a worker reach"""
TOKENS = """that ONE worker, with all of its devices, sees in a step: its batch times the length, or the
patches of an image; more of them are less noise, which decides more than the network does"""
DATA = "what the workers see: the same kind, or classes or texts of their own (alike)"
NETWORK = "kind of the links, which decides the share of their rate that they reach (tcp)"
PLOT = "a picture to draw: the time to the loss against the bandwidth, such as plan.png"
STEP = """MODULE:NAME of a function of a lioncub_jax.Workers that returns (step, state, batch), where step
is of make_train_step and an optimizer in global_gradients; called for all workers, and for one"""
TARGET = """MODULE:NAME of a function without arguments that returns (program, mesh): a step that is
lowered or compiled"""
DEVICES = "that share the link of a worker, and average their gradients first (1)"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command.

    Args:
      argv: arguments without the program's name; those of the process if None.

    Raises:
      SystemExit: with code 2 for arguments that cannot be, and with 0 for ``--help``.

    Example:
      >>> main(["plan", "--model", "1M", "--workers", "4", "--bandwidth", "1gbit"])
      Traceback (most recent call last):
      SystemExit: 2
    """
    parser = argparse.ArgumentParser("lioncub", description=MAIN)
    parser.add_argument("--version", action="version", version=f"lioncub_jax {lc.__version__}")
    commands = parser.add_subparsers(required=True)
    of_plan = _command(commands, "plan", _plan, PLAN)
    of_plan("--model", type=units.count, required=True, help="number of parameters, such as 7B")
    of_plan("--workers", type=units.count, dest="num_workers", help=WORKERS)
    of_plan("--bandwidth", type=_rates, dest="rates", help=BANDWIDTH)
    of_plan("--compute", type=units.seconds, required=True, help=COMPUTE)
    of_plan("--tokens-per-worker", type=units.count, dest="tokens", required=True, help=TOKENS)
    of_plan("--data", choices=planner.DATA, help=DATA)
    of_plan("--cluster", choices=CLUSTERS, help="machines by name; other options override theirs")
    of_plan("--measured", type=_measured, help="the file of lioncub probe on these machines")
    of_plan("--memory", type=units.size, help="of a device, such as 24GB")
    of_plan("--network", choices=planner.KINDS, dest="kind", help=NETWORK)
    of_plan("--latency", type=units.seconds, help="one way: half of what ping says (50us)")
    of_plan("--devices-per-worker", type=units.count, dest="group_size", help=DEVICES)
    of_plan("--on-cpu", action="store_true", help="JAX on CPUs")
    of_plan("--plot", type=Path, metavar="FILE", help=PLOT)
    of_plan("--json", action="store_true", help="print numbers; null is what is not known")
    of_probe = _command(commands, "probe", _probe, PROBE)
    of_probe("--step", help=STEP)
    of_probe("--out", type=Path, help="a file for the numbers, of the first process, as JSON")
    of_probe("--distributed", action="store_true", help="join the processes that were started")
    _command(commands, "bytes", _bytes, BYTES)("target", help=TARGET)
    try:
        args = parser.parse_args(argv)
        args.run(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def _command(commands: Any, name: str, run: Any, words: str) -> Callable[..., Any]:
    command = commands.add_parser(
        name, description=words, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.set_defaults(run=run)
    return command.add_argument  # type: ignore[no-any-return]


def _rates(text: str) -> list[float]:
    return [units.rate(part) for part in text.split(",")]


def _measured(name: str) -> Measured:
    return Measured(**json.loads(Path(name).read_text()))


def _plan(args: argparse.Namespace) -> None:
    def given(*names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(args, name))}

    if not (args.cluster or args.measured or args.rates):
        raise ValueError("give --bandwidth and --workers, --cluster, or --measured and --workers")
    at = CLUSTERS[args.cluster] if args.cluster else Cluster(args.num_workers, Link(math.inf))
    at = replace(at, **given("num_workers", "group_size", "on_cpu", "measured"))
    link, how = replace(at.link, **given("latency", "kind")), given("tokens", "data", "memory")
    links = [replace(link, bandwidth=rate) for rate in args.rates or [link.bandwidth]]
    plans = [planner.plan(args.model, replace(at, link=x), args.compute, **how) for x in links]
    if args.plot:
        picture.draw(plans, args.plot)
    if args.json:
        print(json.dumps([one.numbers() for one in plans], indent=2))
    else:
        _show(*map(planner.shown, plans))


def _probe(args: argparse.Namespace) -> None:
    if args.distributed:
        lc.mesh.join()
    target = args.step and partial(called, args.step)
    measured = prober.probe(lc.Workers.one_per_device(), target)
    if jax.process_index() == 0:
        if args.out:
            args.out.write_text(json.dumps(measured._asdict(), indent=2))
        _show(prober.table(measured))


def _bytes(args: argparse.Namespace) -> None:
    program, mesh = called(args.target)
    text = getattr(program, "compile", lambda: program)().as_text()
    votes = watch.read(text)
    _show(compiled.table(lc.audit.collectives(text, mesh)), watch.report(votes) if votes else "")


def called(target: str, *args: Any) -> Any:
    """Calls the function that ``MODULE:NAME`` names, also of a module in the working directory.

    Raises:
      ValueError: for no such name.
      RuntimeError: from an error of the function.
    """
    sys.path.insert(0, "")
    try:
        function = pkgutil.resolve_name(target)
    except (ValueError, ImportError, AttributeError) as error:
        raise ValueError(f"{target!r}: give MODULE:NAME; {error}") from error
    try:
        return function(*args)
    except Exception as error:  # of the user, and so with its traceback
        raise RuntimeError(f"{target} failed") from error


def _show(*parts: Any) -> None:
    """Prints texts and tables, in a terminal by its width, and in a pipe without style."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    Console(width=width, markup=False, emoji=False, highlight=False).print(*parts)
