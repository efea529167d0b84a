"""The command line: ``lioncub plan | bytes | lab``.

A command ends with 0, or with 2 and a line that says what was given, what is allowed and what to
do; ``lab`` ends with the exit code of the command that it ran.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from rich.console import Console

from lioncub_jax import lab, planner, units
from lioncub_jax.cli import targets
from lioncub_jax.planner import report as planner_report
from lioncub_jax.traffic import compiled
from lioncub_jax.traffic import predicted as accounting

_HOPS = {"tree": planner.tree, "ring": planner.ring}

_PLAN_EXAMPLE = """examples:
  lioncub plan --params 124M --workers 8 --bandwidth 100mbit,1gbit,100gbit --compute 144ms
  lioncub plan --model models.py:make --workers 64 --devices-per-worker 8 --bandwidth 100gbit \\
      --inside-bandwidth 900gbit --compute 1.2s --memory-bandwidth 3tbyte --plot plan.png
  lioncub plan --params 1M --workers 4 --bandwidth 1gbit --measure step.py:one_step --platform cpu

What the model leaves out is in docs/planner.md: above all, that a framework may hide an all-reduce
behind the backward pass. Then voting gains less than is said here."""

_BYTES_EXAMPLE = """examples:
  lioncub bytes train.py:lowered --devices 8 --params 434816
  lioncub bytes step.hlo --mesh data=4,tp=2

A target is a function without arguments that returns (compiled or lowered, mesh), such as
`step.lower(state, batch), mesh`. A file holds what `compiled.as_text()` returned."""

_LAB_EXAMPLE = """examples:
  lioncub lab --check
  lioncub lab --workers 4 --rate 100mbit --delay 5ms --report run.json -- python train.py"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} ({self.prog} --help has examples)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: arguments without the program's name; those of the process if None.

    Returns:
      The exit code.

    Raises:
      SystemExit: with code 2 for arguments that cannot be, and with 0 for ``--help``.

    Example:
      >>> main(["plan", "--params", "1M", "--workers", "4", "--bandwidth", "1gbit"])
      Traceback (most recent call last):
      SystemExit: 2
    """
    given = list(sys.argv[1:] if argv is None else argv)
    cut = given.index("--") if "--" in given else len(given)
    args = _parser().parse_args(given[:cut])
    args.words = given[cut + 1 :]  # argparse itself would mix up the options of the lab's command
    command: _Parser = args.parser
    if args.words and args.run is not _lab:
        command.error(f"-- {' '.join(args.words)}: only lab takes a command; leave it out")
    try:
        return int(args.run(args))
    except (ValueError, ImportError) as wrong:
        message = " ".join(str(wrong).split())
    command.error(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lioncub", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(title="commands", required=True, metavar="plan | bytes | lab")
    for name, run, options, about, example in (
        ("plan", _plan, _plan_options, "will voting help me? step times before training", _PLAN_EXAMPLE),
        ("bytes", _bytes, _bytes_options, "what a compiled step really sends", _BYTES_EXAMPLE),
        ("lab", _lab, _lab_options, "run a command on workers with a slow network", _LAB_EXAMPLE),
    ):  # fmt: skip
        command = commands.add_parser(
            name, help=about, description=about, epilog=example,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        options(command)
        command.set_defaults(run=run, parser=command)
    return parser


def _reads(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argparse type whose own message is shown."""

    def value(text: str) -> Any:
        try:
            return read(text)
        except ValueError as wrong:
            raise argparse.ArgumentTypeError(str(wrong)) from wrong

    return value


def _rates(text: str) -> list[float]:
    return [units.rate(part) for part in text.split(",")]


def _plan_options(command: argparse.ArgumentParser) -> None:
    rate, seconds, count = map(_reads, (units.rate, units.seconds, units.count))
    size = command.add_mutually_exclusive_group(required=True)
    size.add_argument("--params", type=count, metavar="N", help="parameters, such as 7B")
    size.add_argument(
        "--model", metavar="TARGET",
        help="MODULE:NAME or FILE.py:NAME, a function without arguments that returns an nnx.Module, "
        "linen variables or a tree of arrays; only shapes are made",
    )  # fmt: skip
    command.add_argument("--workers", type=count, required=True, metavar="W")
    command.add_argument(
        "--bandwidth", type=_reads(_rates), action="append", required=True, metavar="RATE",
        help="of a worker's link; several with commas or by giving it again",
    )  # fmt: skip
    command.add_argument(
        "--latency",
        type=seconds,
        default=planner.Link.latency,
        metavar="TIME",
        help="of a message (50us)",
    )
    command.add_argument("--algorithm", choices=_HOPS, default="tree", help="hops to all (tree)")
    command.add_argument(
        "--one-way-pairs", action="store_true",
        help="of two workers one sends at a time, as under Gloo in JAX",
    )  # fmt: skip
    work = command.add_mutually_exclusive_group()
    work.add_argument("--compute", type=seconds, metavar="TIME", help="of a step without network")
    work.add_argument(
        "--measure", metavar="TARGET",
        help="like --model: does one step of one worker and returns its arrays; timed here",
    )  # fmt: skip
    command.add_argument("--devices-per-worker", type=count, default=1, metavar="G")
    command.add_argument("--inside-bandwidth", type=rate, metavar="RATE", help="between those")
    command.add_argument(
        "--inside-latency", type=seconds, default=5e-6, metavar="TIME", help="between those (5us)"
    )
    command.add_argument(
        "--memory-bandwidth", type=rate, default=planner.Host.memory_bandwidth, metavar="RATE",
        help="of a device, for the cost of packing (100gbyte, a server's processor)",
    )  # fmt: skip
    command.add_argument(
        "--platform", choices=("cpu", "gpu", "tpu"), default="gpu",
        help="XLA on cpu all-reduces bfloat16 as float32 (gpu)",
    )  # fmt: skip
    command.add_argument("--plot", type=Path, metavar="FILE.png", help="step time over bandwidth")
    command.add_argument("--json", action="store_true", help="numbers instead of tables")


def _plan(args: argparse.Namespace) -> int:
    if args.compute is None and args.measure is None:
        raise ValueError(
            "no compute time: without it every speedup would look better than it is; give --compute "
            "144ms, or --measure FILE.py:NAME to time a step here"
        )
    inside = None
    if args.devices_per_worker > 1:
        if args.inside_bandwidth is None:
            raise ValueError(
                f"--devices-per-worker {args.devices_per_worker} without --inside-bandwidth: give the "
                "rate of a device's link to the others, such as 900gbit"
            )
        inside = planner.Link(args.inside_bandwidth, args.inside_latency)
    rates = [rate for given in args.bandwidth for rate in given]
    at = planner.Cluster(
        args.workers, planner.Link(rates[0], args.latency), args.devices_per_worker, inside,
        _HOPS[args.algorithm], args.one_way_pairs,
    )  # fmt: skip
    params = targets.shapes(args.model) if args.model else args.params
    compute = targets.measure(args.measure) if args.measure else args.compute
    host = planner.Host(args.memory_bandwidth, widens_bfloat16=args.platform == "cpu")
    plans = [planner_report.plan(params, at.at(rate), compute, host) for rate in rates]
    if args.plot:
        planner_report.plot(args.plot, params, at, compute, host)
    if args.json:
        _print_json({"parameters": planner.parameters_in(params), "plans": [
            planner_report.as_json(one) for one in plans
        ]})  # fmt: skip
        return 0
    console = _console()
    console.print(_assumed(args, params, compute), soft_wrap=True)
    for one in plans:
        console.print()
        console.print(planner_report.table(one))
        console.print(planner_report.advice(one), soft_wrap=True, style="bold")
    if args.plot:
        console.print(f"\ndrawn: {args.plot}", soft_wrap=True)
    return 0


def _assumed(args: argparse.Namespace, params: Any, compute: float) -> str:
    how = "measured here" if args.measure else "given"
    return (
        f"{planner.parameters_in(params):,} parameters; compute {units.seconds_text(compute)} a step "
        f"({how}); latency {units.seconds_text(args.latency)}, {args.algorithm}; packing at "
        f"{units.bytes_text(args.memory_bandwidth / 8)}/s of memory; nothing overlaps."
    )


def _bytes_options(command: argparse.ArgumentParser) -> None:
    count = _reads(units.count)
    command.add_argument(
        "target", metavar="TARGET", help="MODULE:NAME, FILE.py:NAME or a text file"
    )
    command.add_argument(
        "--mesh", type=_reads(_mesh), metavar="NAME=SIZE,...", help="of a text file, in its order"
    )
    command.add_argument(
        "--devices", type=count, metavar="N", help="CPU devices to make for a target"
    )
    command.add_argument(
        "--params", type=count, metavar="N", help="parameters: compare with a float32 all-reduce"
    )
    command.add_argument(
        "--axis", metavar="NAME", help="mesh axis of the workers, for --params (the first)"
    )
    command.add_argument("--json", action="store_true", help="numbers instead of a table")


def _mesh(text: str) -> jax.sharding.AbstractMesh:
    parts = [part.partition("=") for part in text.split(",")]
    names = tuple(name.strip() for name, _, _ in parts)
    sizes = tuple(int(size) if size.strip().isdecimal() else 0 for _, _, size in parts)
    if not all(names) or not all(sizes) or len(set(names)) < len(names):
        raise ValueError(
            f"mesh {text!r}: give names and sizes, each name once, such as data=4,tp=2"
        )
    return jax.sharding.AbstractMesh(sizes, names)


def _bytes(args: argparse.Namespace) -> int:
    program, mesh = _program(args)
    found = compiled.collectives(program, mesh)
    dense = _float32_bytes(args, dict(mesh.shape))
    every, gated = (compiled.sent_bytes(found, gated=flag) for flag in (False, True))
    if args.json:
        _print_json({
            "mesh": dict(mesh.shape),
            "collectives": [{**_plain(one), "sent_bytes": one.sent_bytes} for one in found],
            "every_step": {_axes(axes): sent for axes, sent in every.items()},
            "in_branches": {_axes(axes): sent for axes, sent in gated.items()},
            "float32_all_reduce": dense,
        })  # fmt: skip
        return 0
    console = _console()
    console.print(compiled.table(found))
    if not found:
        console.print("no collective: the devices send nothing to each other")
    if dense:
        console.print(_beside(args, found, dense), soft_wrap=True)
    return 0


def _axes(axes: tuple[str, ...] | None) -> str:
    return "unknown" if axes is None else ",".join(axes)


def _program(args: argparse.Namespace) -> tuple[Any, Any]:
    path = Path(args.target)
    if path.suffix != ".py" and (path.is_file() or ":" not in args.target):
        if not path.is_file():
            raise ValueError(f"{path}: no such file; give compiled.as_text(), or MODULE:NAME")
        if args.mesh is None:
            raise ValueError(f"{path} does not say which mesh it is for: give --mesh data=4,tp=2")
        if args.devices is not None:
            raise ValueError(f"--devices {args.devices}: {path} is compiled; leave it out")
        return path.read_text(), args.mesh
    if args.mesh is not None:
        raise ValueError(f"--mesh is for a text file; {args.target} returns its own: leave it out")
    if args.devices is not None:
        _force_devices(args.devices)
    made = targets.call(args.target)
    wanted = f"{args.target} returned {type(made).__name__}: return (step.lower(...), mesh)"
    if not (isinstance(made, tuple) and len(made) == 2 and hasattr(made[1], "shape")):
        raise ValueError(wanted)
    program, mesh = made
    program = program.compile() if isinstance(program, jax.stages.Lowered) else program
    if not isinstance(program, jax.stages.Compiled | str):
        raise ValueError(f"{wanted}, not ({type(program).__name__}, ...)")
    return program, mesh


def _force_devices(devices: int) -> None:
    try:
        jax.config.update("jax_num_cpu_devices", devices)  # fails if it is too late
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError as started:
        raise ValueError(f"--devices {devices}: jax has started already: {started}") from started


def _float32_bytes(args: argparse.Namespace, mesh: Mapping[str, int]) -> float | None:
    if args.params is None:
        return None
    args.axis = args.axis or next(iter(mesh))
    if args.axis not in mesh:
        raise ValueError(f"--axis {args.axis}: the mesh has {', '.join(mesh)}")
    return accounting.float32_all_reduce_bytes(args.params, mesh[args.axis])


def _beside(args: argparse.Namespace, found: Sequence[compiled.Collective], dense: float) -> str:
    sent = sum(compiled.sent_bytes(found).values())
    least = "at least " if any(one.looped for one in found) else ""
    return (
        f"A float32 all-reduce of {args.params:,} parameters over {args.axis} sends "
        f"{units.bytes_text(dense)} from each worker; this program sends {least}"
        f"{units.bytes_text(sent)} from each device in every step, {sent / dense:.4f} of that."
    )


def _lab_options(command: argparse.ArgumentParser) -> None:
    command.usage = "lioncub lab [options] -- COMMAND..."
    count, seconds = _reads(units.count), _reads(units.seconds)
    command.add_argument(
        "--workers", type=count, metavar="W", help="processes, each on a host of its own"
    )
    command.add_argument("--rate", type=_reads(units.rate), metavar="RATE", help="of each link")
    command.add_argument("--delay", type=seconds, metavar="TIME", help="of each link, one way")
    command.add_argument("--subnet", default="10.77.0.0/24", help="of the hosts (10.77.0.0/24)")
    command.add_argument("--logs", type=Path, metavar="DIR", help="folder for what workers print")
    command.add_argument(
        "--timeout", type=seconds, metavar="TIME", help="stop after it, such as 90s"
    )
    command.add_argument("--port", type=count, default=1234, help="of the coordinator (1234)")
    command.add_argument(
        "--grace", type=seconds, default=10.0, metavar="TIME", help="to end by themselves (10s)"
    )
    command.add_argument("--report", type=Path, metavar="FILE.json", help="write the numbers there")
    command.add_argument(
        "--check", action="store_true", help="say whether this machine can, and end"
    )


def _lab(args: argparse.Namespace) -> int:
    try:
        if args.check:
            lab.check()
            _console().print("this machine can run the lab")
            return 0
        if args.workers is None or not args.words:
            raise ValueError(
                "give --workers, and the command behind --: lab --workers 4 -- COMMAND"
            )
        if args.report and not args.report.parent.is_dir():
            raise ValueError(f"{args.report}: there is no folder {args.report.parent}; make it")
        network = lab.Network(args.workers, args.rate, args.delay, args.subnet)
        report = lab.run(
            network, args.words, logs=args.logs, timeout=args.timeout, port=args.port,
            grace=args.grace,
        )  # fmt: skip
    except lab.LabError as missing:  # several lines: what to install or permit
        args.parser.exit(2, f"error: {missing}\n")
    _console().print(lab.table(report))
    if args.report:
        args.report.write_text(json.dumps(_plain(report), indent=2) + "\n")
    return int(report.exit_code)


def _plain(value: Any) -> Any:
    """NamedTuples as dicts all the way down, for ``json``."""
    if hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def _console() -> Console:
    """A pipe has no width of its own, and 80 columns would fold the tables."""
    return Console() if sys.stdout.isatty() else Console(width=140)


def _print_json(found: Mapping[str, Any]) -> None:
    print(json.dumps(found, indent=2, allow_nan=False))
