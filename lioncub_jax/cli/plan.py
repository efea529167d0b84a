"""``lioncub plan``: will voting help me?"""

import argparse
import dataclasses

from lioncub_jax import planner, units
from lioncub_jax.cli import output, targets
from lioncub_jax.cli.options import COUNT, FLAG, RATE, SECONDS, Row, reads

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
      --compute 20ms --bandwidth 1gbit --platform cpu"""

INSIDE_LATENCY = 5e-6

RATES = reads(lambda text: [units.rate(part) for part in text.split(",")])

OPTIONS: list[Row] = [
    ("--params", COUNT, "number of parameters, such as 7B"),
    (
        "--model", {},
        "or count those of a model: MODULE:NAME or FILE.py:NAME, a function without arguments that returns "
        "an nnx.Module, linen variables or a tree of arrays; only shapes are made",
    ),
    (
        "--cluster", {},
        "machines by name, such as v5e-8, h100-64, p4d-64 or 8x4090-10g; an unknown name lists all",
    ),
    ("--workers", COUNT, "number of data-parallel workers"),
    ("--compute", SECONDS, "time of a step without the network, such as 144ms"),
    ("--bandwidth", RATES, "of each worker's link, such as 1gbit, or several with commas"),
    ("--latency", SECONDS, "from one worker to another (50us)"),
    (
        "--devices-per-worker", COUNT,
        "devices that share a worker's link and average their gradients first (1)",
    ),
    ("--inside-bandwidth", RATE, "of the link of each of those devices"),
    (
        "--memory-bandwidth", RATE,
        "of a device, for the time of packing bits (100gbyte, a server's processor)",
    ),
    (
        "--platform", {"choices": ("cpu", "gpu", "tpu")},
        "where it will run; on cpu JAX all-reduces bfloat16 as float32, and of each two workers only one "
        "sends to the other at a time (gpu)",
    ),
    (
        "--data", {"choices": planner.DATA, "default": planner.DATA[0]},
        "what the workers see: the same kind, or classes or texts of their own (alike)",
    ),
    ("--json", FLAG, "print numbers instead of tables"),
]  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
      ValueError: for options that do not go together, and as `planner.plan` and targets.
    """
    if (args.params is None) == (args.model is None):
        raise ValueError("give --params 7B, or --model FILE.py:NAME to count them, and not both")
    if args.compute is None:
        raise ValueError(
            "no compute time: without it every speedup would look better than it is; give --compute "
            "144ms, what a step takes on one worker"
        )
    named = planner.cluster_named(args.cluster) if args.cluster else None
    cluster = _cluster(args, named)
    params = targets.shapes(args.model) if args.model else args.params
    plans = [
        planner.plan(params, cluster.at(rate), args.compute, args.data)
        for rate in args.bandwidth or [cluster.link.bandwidth]
    ]
    size = plans[0].parameters
    if args.json:
        about = named and {"name": args.cluster, "about": named.about, "source": named.source}
        found = {"parameters": size, "plans": list(map(planner.as_json, plans)), "cluster": about}
        output.write(output.as_text(found))
        return 0
    output.show(
        *([_in_words(args.cluster, named)] if named else []),
        f"{size:,} parameters; compute {units.seconds_text(args.compute)} a step; latency "
        f"{units.seconds_text(cluster.link.latency)}; packing at "
        f"{units.bytes_text(cluster.memory_bandwidth / 8)}/s of memory; nothing overlaps.",
        *(part for one in plans for part in ("", planner.table(one), "", planner.advice(one))),
        f"\nIn a program, by names of lioncub_jax:\n{planner.legend()}",
    )
    return 0


def _cluster(args: argparse.Namespace, named: planner.NamedCluster | None) -> planner.Cluster:
    """What the name says, or defaults, with what is given in its place."""
    if not named and not (args.workers and args.bandwidth):
        raise ValueError(
            "give --workers and --bandwidth, or machines by name, such as --cluster v5e-8"
        )
    at = named.cluster if named else planner.Cluster(args.workers, planner.Link(args.bandwidth[0]))
    inside = at.inside
    if args.inside_bandwidth:
        inside = planner.Link(args.inside_bandwidth, inside.latency if inside else INSIDE_LATENCY)
    cluster = dataclasses.replace(
        at,
        workers=args.workers or at.workers,
        link=planner.Link(at.link.bandwidth, args.latency or at.link.latency),
        group_size=args.devices_per_worker or at.group_size,
        inside=inside,
        on_cpu=args.platform == "cpu",
        memory_bandwidth=args.memory_bandwidth or at.memory_bandwidth,
    )
    if args.inside_bandwidth and cluster.group_size == 1:
        raise ValueError(
            "--inside-bandwidth: it has no effect without --devices-per-worker above 1; leave it out"
        )
    return cluster


def _in_words(name: str, named: planner.NamedCluster) -> str:
    share = named.cluster.all_to_all_share
    narrow = f" An all-to-all gets {share:.0%} of a link." if share < 1 else ""
    return f"{name}: {named.about}.{narrow}\nSource: {named.source} Latencies are assumed.\n"
