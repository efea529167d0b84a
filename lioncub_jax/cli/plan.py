"""``lioncub plan``: will voting help me?"""

import argparse
from pathlib import Path
from typing import Any

from lioncub_jax import units
from lioncub_jax.cli import options, output

SUMMARY = "will voting help me? the time of a step by every method, before training"

DESCRIPTION = """\
Says how long a training step would take with every method of this library and
with an all-reduce of gradients, and which method to use, or that voting is not
worth it. Bytes are exact; times are a model in which nothing overlaps: where a
framework hides the all-reduce behind the backward pass, voting gains less.
docs/planner.md in the repository has the model and what it leaves out."""

EPILOG = """\
The table has for each method what a worker sends in a step, the time in
collectives, the time of packing and unpacking bits, and that of the whole step.
With --json bandwidths are in bits per second, times in seconds; null stands for
a bound that is not there and for a number that is not finite.

examples:
  lioncub plan --params 124M --workers 8 --bandwidth 100mbit,1gbit,100gbit \\
      --compute 144ms
  lioncub plan --params 7B --workers 64 --devices-per-worker 8 \\
      --bandwidth 100gbit --inside-bandwidth 900gbit --compute 1.2s \\
      --memory-bandwidth 3tbyte --json
  lioncub plan --model lioncub_jax.cli.examples:model --workers 4 \\
      --measure lioncub_jax.cli.examples:one_step --bandwidth 1gbit \\
      --platform cpu --plot plan.png"""

ALGORITHMS = ("tree", "ring")  # names of the planner's functions
INSIDE_LATENCY = 5e-6


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser."""
    _add_job(command)
    _add_network(command)
    command.add_argument(
        "--platform", choices=("cpu", "gpu", "tpu"), default="gpu",
        help="where it will run; on cpu XLA all-reduces bfloat16 as float32 (gpu)",
    )  # fmt: skip
    command.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw step time over bandwidth; needs matplotlib",
    )
    command.add_argument("--json", action="store_true", help="print numbers instead of tables")


def _add_job(command: argparse.ArgumentParser) -> None:
    seconds, count = options.reads(units.seconds), options.reads(units.count)
    size = command.add_mutually_exclusive_group(required=True)
    size.add_argument("--params", type=count, metavar="N", help="number of parameters, such as 7B")
    size.add_argument(
        "--model", metavar="TARGET",
        help="count those of a model: MODULE:NAME or FILE.py:NAME, a function without arguments that "
        "returns an nnx.Module, linen variables or a tree of arrays; only shapes are made",
    )  # fmt: skip
    command.add_argument(
        "--workers", type=count, required=True, metavar="W", help="number of data-parallel workers"
    )
    work = command.add_mutually_exclusive_group()
    work.add_argument(
        "--compute",
        type=seconds,
        metavar="TIME",
        help="time of a step without the network, such as 144ms",
    )
    work.add_argument(
        "--measure", metavar="TARGET",
        help="measure that time here: a target like that of --model, which does one step of one worker "
        "and returns its arrays",
    )  # fmt: skip


def _add_network(command: argparse.ArgumentParser) -> None:
    rate, seconds, count = map(options.reads, (units.rate, units.seconds, units.count))
    command.add_argument(
        "--bandwidth", type=options.reads(_rates), action="append", required=True, metavar="RATE",
        help="of each worker's link, such as 1gbit; for several, commas or the option again",
    )  # fmt: skip
    command.add_argument(
        "--latency", type=seconds, metavar="TIME", help="from one worker to another (50us)"
    )
    command.add_argument(
        "--algorithm", choices=ALGORITHMS, default="tree",
        help="of reductions and gathers, which sets how many latencies they take (tree)",
    )  # fmt: skip
    command.add_argument(
        "--one-way-pairs", action="store_true",
        help="of each two workers only one sends to the other at a time, as with JAX on CPUs",
    )  # fmt: skip
    command.add_argument(
        "--devices-per-worker", type=count, default=1, metavar="G",
        help="devices that share a worker's link and average their gradients first (1)",
    )  # fmt: skip
    command.add_argument(
        "--inside-bandwidth", type=rate, metavar="RATE", help="of the link of each of those devices"
    )
    command.add_argument(
        "--inside-latency", type=seconds, metavar="TIME", help="between those devices (5us)"
    )
    command.add_argument(
        "--memory-bandwidth", type=rate, metavar="RATE",
        help="of a device, for the time of packing bits (100gbyte, a server's processor)",
    )  # fmt: skip


def _rates(text: str) -> list[float]:
    return [units.rate(part) for part in text.split(",")]


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
      ValueError: for options that do not go together, and as `planner.plan` and targets.
    """
    from lioncub_jax import planner  # brings jax

    _check(args)
    rates = [rate for given in args.bandwidth for rate in given]
    latency = planner.Link.latency if args.latency is None else args.latency
    cluster = planner.Cluster(
        args.workers, planner.Link(rates[0], latency), args.devices_per_worker, _inside(args),
        getattr(planner, args.algorithm), args.one_way_pairs,
    )  # fmt: skip
    params, compute = _job(args)
    memory = args.memory_bandwidth or planner.Host.memory_bandwidth
    host = planner.Host(memory, widens_bfloat16=args.platform == "cpu")
    plans = [planner.plan(params, cluster.at(rate), compute, host) for rate in rates]
    if args.plot:
        planner.plot(args.plot, params, cluster, compute, host)
    size = planner.parameters_in(params)
    if args.json:
        output.show_json({"parameters": size, "plans": [planner.as_json(one) for one in plans]})
        return 0
    how = "measured here" if args.measure else "given"
    output.show(
        f"{size:,} parameters; compute {units.seconds_text(compute)} a step ({how}); latency "
        f"{units.seconds_text(latency)}, {args.algorithm}; packing at {units.bytes_text(memory / 8)}/s "
        "of memory; nothing overlaps.",
        *(part for one in plans for part in ("", planner.table(one), "", planner.advice(one))),
        f"\nIn a program, by names of lioncub_jax:\n{planner.legend()}",
        *([f"\ndrawn: {args.plot}"] if args.plot else []),
    )
    return 0


def _check(args: argparse.Namespace) -> None:
    """Everything that can be found wrong before a target is run."""
    if args.compute is None and args.measure is None:
        raise ValueError(
            "no compute time: without it every speedup would look better than it is; give --compute "
            "144ms, or --measure FILE.py:NAME to time a step here"
        )
    if args.devices_per_worker == 1:
        names = ("inside_bandwidth", "inside_latency")
        options.refuse(args, names, "it has no effect without --devices-per-worker above 1")
    elif args.inside_bandwidth is None:
        raise ValueError(
            f"--devices-per-worker {args.devices_per_worker} without --inside-bandwidth: give the "
            "rate of a device's link to the others, such as 900gbit"
        )
    if args.plot:
        from lioncub_jax.planner import report

        report.check_plot(args.plot)
        output.check_writable(args.plot)


def _inside(args: argparse.Namespace) -> Any:
    from lioncub_jax import planner

    if args.devices_per_worker == 1:
        return None
    latency = INSIDE_LATENCY if args.inside_latency is None else args.inside_latency
    return planner.Link(args.inside_bandwidth, latency)


def _job(args: argparse.Namespace) -> tuple[Any, float]:
    """Parameters and the seconds of computing; targets are run last, for they take long."""
    from lioncub_jax.cli import targets

    params = targets.shapes(args.model) if args.model else args.params
    return params, targets.measure(args.measure) if args.measure else args.compute
