"""``lioncub plan``: will voting help me?"""

import argparse
from typing import Any

from lioncub_jax import units
from lioncub_jax.cli import options, output

SUMMARY = "will voting help me? the time to the loss by every method, before training"

DESCRIPTION = """\
Says how long a training step would take with every method of this library,
with what others use on slow networks and with an all-reduce of gradients, how
many steps each takes to the loss of float32 Lion, and which method to use, or
that none is worth it. Bytes are exact; times are a model in which nothing
overlaps: where a framework hides the all-reduce behind the backward pass, less
is gained. Steps are measured, on small models; it is said where that ends.
docs/planner.md in the repository has the model and what it leaves out."""

EPILOG = """\
The table has for each method what a worker sends in a step, the time in
collectives, the time of packing and unpacking bits, that of the whole step, how
many times float32 Lion's steps it takes to the loss where Lion stands after 80
percent of its run ("not reached": a run as long as Lion's does not get there),
and the time to that loss, Lion's being 1.
With --json bandwidths are in bits per second, times in seconds; null stands for
a bound that is not there and for a number that is not finite.

A machine by name sets workers, links and memory, with rates from its
vendor's pages; an option that is given overrides the name.

examples:
  lioncub plan --params 124M --workers 8 --bandwidth 100mbit,1gbit,100gbit \\
      --compute 144ms
  lioncub plan --params 7B --workers 64 --devices-per-worker 8 \\
      --bandwidth 100gbit --inside-bandwidth 900gbit --compute 1.2s \\
      --memory-bandwidth 3tbyte --json
  lioncub plan --params 7B --cluster a3-mega-64 --compute 1.2s
  lioncub plan --model lioncub_jax.cli.examples:model --workers 4 \\
      --measure lioncub_jax.cli.examples:one_step --bandwidth 1gbit \\
      --platform cpu"""

DATA = ("alike", "different")  # the planner's; it is imported later
INSIDE_LATENCY = 5e-6


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser."""
    _add_job(command)
    _add_network(command)
    command.add_argument(
        "--platform", choices=("cpu", "gpu", "tpu"), default="gpu",
        help="where it will run; on cpu JAX all-reduces bfloat16 as float32, and of each two workers only "
        "one sends to the other at a time (gpu)",
    )  # fmt: skip
    command.add_argument(
        "--data", choices=DATA, default=DATA[0],
        help="what the workers see: the same kind, or classes or texts of their own (alike)",
    )  # fmt: skip
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
        "--cluster", metavar="NAME",
        help="machines by name, such as v5e-8, h100-64, p4d-64 or 8x4090-10g; an unknown name lists all",
    )  # fmt: skip
    command.add_argument(
        "--workers", type=count, metavar="W", help="number of data-parallel workers"
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
        "--bandwidth", type=options.reads(_rates), metavar="RATE",
        help="of each worker's link, such as 1gbit, or several with commas",
    )  # fmt: skip
    command.add_argument(
        "--latency", type=seconds, metavar="TIME", help="from one worker to another (50us)"
    )
    command.add_argument(
        "--devices-per-worker", type=count, metavar="G",
        help="devices that share a worker's link and average their gradients first (1)",
    )  # fmt: skip
    command.add_argument(
        "--inside-bandwidth", type=rate, metavar="RATE", help="of the link of each of those devices"
    )
    command.add_argument(
        "--memory-bandwidth", type=rate, metavar="RATE",
        help="of a device, for the time of packing bits (100gbyte, a server's processor)",
    )  # fmt: skip
    command.add_argument(
        "--late", type=options.reads(units.late), metavar="SHARE:TIME",
        help="how often a worker is late and by how much, such as 1%%:2s; all wait for it (never)",
    )  # fmt: skip


def _rates(text: str) -> list[float]:
    return [units.rate(part) for part in text.split(",")]


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
      ValueError: for options that do not go together, and as `planner.plan` and targets.
    """
    from lioncub_jax import planner  # brings jax

    named = planner.cluster_named(args.cluster) if args.cluster else None
    cluster, rates = _cluster(args, named)
    memory = args.memory_bandwidth or (named or planner.Host).memory_bandwidth
    if args.compute is None and args.measure is None:
        raise ValueError(
            "no compute time: without it every speedup would look better than it is; give --compute "
            "144ms, or --measure FILE.py:NAME to time a step here"
        )
    params, compute = _job(args)
    host, size = planner.Host(memory), planner.parameters_in(params)
    plans = [planner.plan(params, cluster.at(rate), compute, host, args.data) for rate in rates]
    if args.json:
        found = {"parameters": size, "plans": [planner.as_json(one) for one in plans]}
        about = (
            {"name": args.cluster, "about": named.about, "source": named.source} if named else None
        )
        output.show_json(found | {"cluster": about})
        return 0
    how = "measured here" if args.measure else "given"
    output.show(
        *([_in_words(args.cluster, named)] if named else []),
        f"{size:,} parameters; compute {units.seconds_text(compute)} a step ({how}); latency "
        f"{units.seconds_text(cluster.link.latency)}; packing at "
        f"{units.bytes_text(memory / 8)}/s of memory; nothing overlaps.",
        *([_waiting(cluster)] if args.late else []),
        *(part for one in plans for part in ("", planner.table(one), "", planner.advice(one))),
        f"\nIn a program, by names of lioncub_jax:\n{planner.legend()}",
    )
    return 0


def _cluster(args: argparse.Namespace, named: Any) -> tuple[Any, list[float]]:
    """What the name says, or defaults, with what is given in its place; and the rates to plan for."""
    from lioncub_jax import planner

    if not named:
        missing = [f"--{name}" for name in ("workers", "bandwidth") if getattr(args, name) is None]
        if missing:
            raise ValueError(
                f"no {' and no '.join(missing)}: give it, or machines by name, such as --cluster v5e-8"
            )
    at = named.cluster if named else planner.Cluster(args.workers, planner.Link(args.bandwidth[0]))
    rates, size = args.bandwidth or [at.link.bandwidth], args.devices_per_worker or at.group_size
    inside = at.inside
    if args.inside_bandwidth:
        inside = planner.Link(args.inside_bandwidth, inside.latency if inside else INSIDE_LATENCY)
    if size == 1:
        why = "it has no effect without --devices-per-worker above 1"
        options.refuse(args, ["inside_bandwidth"], why)
    elif inside is None:
        raise ValueError(
            f"--devices-per-worker {size} without --inside-bandwidth: give the rate of a device's link to "
            "the others, such as 900gbit"
        )
    cluster = planner.Cluster(
        args.workers or at.workers, planner.Link(rates[0], args.latency or at.link.latency), size,
        inside if size > 1 else None, args.platform == "cpu", at.all_to_all_share,
        planner.Late(*args.late) if args.late else at.late,
    )  # fmt: skip
    return cluster, rates


def _in_words(name: str, named: Any) -> str:
    share = named.cluster.all_to_all_share
    narrow = f" An all-to-all gets {share:.0%} of a link." if share < 1 else ""
    return f"{name}: {named.about}.{narrow}\nSource: {named.source} Latencies are assumed.\n"


def _waiting(cluster: Any) -> str:
    late = cluster.late
    time, waits = map(units.seconds_text, (late.seconds, late.waiting(cluster.workers)))
    return (
        f"Late by {time} in {100 * late.share:.3g}% of a worker's steps: all wait, {waits} a step, "
        "less with steps alone. Without waiting so many votes are late: docs/faults.md has what that costs."
    )


def _job(args: argparse.Namespace) -> tuple[Any, float]:
    """Parameters and the seconds of computing; targets are run last, for they take long."""
    from lioncub_jax.cli import targets

    params = targets.shapes(args.model) if args.model else args.params
    return params, targets.measure(args.measure) if args.measure else args.compute
