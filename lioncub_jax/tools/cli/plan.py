"""``lioncub plan``: will voting help me?"""

import argparse
import dataclasses

from lioncub_jax.audit import units
from lioncub_jax.tools import plan as planner
from lioncub_jax.tools.cli import output, targets
from lioncub_jax.tools.cli.options import COUNT, FLAG, RATE, SECONDS, Row, reads

SUMMARY = "will it help me? what to use and what it gains, before training"

DESCRIPTION = """\
Says for each bandwidth which method to use, how many times faster it reaches a
loss than others, and where that was measured; or that none is worth it. Bytes are
exact; times are a model in which nothing overlaps. Steps to the loss are
measured, on a small model. docs/explain/planner.md in the repository has the model and
what it leaves out."""

EPILOG = """\
One of --tokens-per-worker and --agreement is needed: how noisy the gradient of
one worker is decides more than the network does.

With --explain all methods stand in a table: what a worker sends in a step, the
time in collectives, the time of packing bits, that of the whole step, the steps
to the loss, and the time to it, that of the best mean of gradients being 1.
With --json bandwidths are in bits per second, times in seconds; null stands for
a bound that is not there and for a number that is not finite.
--help --explain shows more options.

examples:
  lioncub plan --model 124M --workers 8 --bandwidth 100mbit,1gbit,100gbit \\
      --compute 144ms --tokens-per-worker 8192
  lioncub plan --model 7B --cluster a3-mega-64 --compute 1.2s --agreement 0.53
  lioncub plan --model lioncub_jax.tools.cli.examples:model --workers 4 \\
      --compute 20ms --bandwidth 1gbit --tokens-per-worker 256 --explain"""

INSIDE_LATENCY = 5e-6

RATES = reads(lambda text: [units.rate(part) for part in text.split(",")])


def _agreement(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"agreement {text!r}: give a number from 0.5 to 1, such as 0.53") from None


OPTIONS: list[Row] = [
    (
        "--model", {},
        "a number of parameters, such as 7B; or MODULE:NAME or FILE.py:NAME, a function without arguments "
        "that returns an nnx.Module, linen variables or a tree of arrays; only shapes are made",
    ),
    ("--workers", COUNT, "number of data-parallel workers"),
    ("--bandwidth", RATES, "of each worker's link, such as 1gbit, or several with commas"),
    ("--compute", SECONDS, "time of a step without the network, such as 144ms"),
    (
        "--tokens-per-worker", COUNT,
        "that ONE worker sees in a step: its batch times the length; more of them are less noise",
    ),
    (
        "--agreement", reads(_agreement),
        "in their place votes/agreement, which lioncub_jax.metrics says of a run by lion_cub",
    ),
    (
        "--data", {"choices": planner.DATA, "default": planner.DATA[0]},
        "what the workers see: the same kind, or classes or texts of their own (alike)",
    ),
    (
        "--cluster", {},
        "machines by name, such as v5e-8, h100-64, p4d-64 or 8x4090-10g, with rates from their vendors' "
        "pages; options that are given override it, and an unknown name lists all",
    ),
    ("--explain", FLAG, "all methods in a table, and where it breaks even"),
    ("--json", FLAG, "print numbers, of all methods"),
    ("--latency", SECONDS, "from one worker to another (50us)"),
    (
        "--devices-per-worker", COUNT,
        "devices that share a worker's link and average their gradients first (1)",
    ),
    ("--inside-bandwidth", RATE, "of the link of each of those devices"),
    (
        "--memory-bandwidth", RATE,
        "of a device, for the time of packing bits (800gbyte; on cpu 100gbyte)",
    ),
    (
        "--platform", {"choices": ("cpu", "gpu", "tpu")},
        "where it will run; on cpu JAX all-reduces bfloat16 as float32, and of each two workers only one "
        "sends to the other at a time (gpu)",
    ),
]  # fmt: skip
DETAILS = {option for option, _, _ in OPTIONS[-5:]}  # that help shows with --explain alone


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
      ValueError: for options that do not go together, and as `planner.plan` and targets.
    """
    if args.model is None:
        raise ValueError(
            "give --model: a number of parameters such as 7B, or FILE.py:NAME to count them"
        )
    if args.compute is None:
        raise ValueError(
            "no compute time: without it every speedup would look better than it is; give --compute "
            "144ms, what a step takes on one worker"
        )
    named = planner.cluster_named(args.cluster) if args.cluster else None
    cluster = _cluster(args, named)
    params = targets.shapes(args.model) if ":" in args.model else units.count(args.model)
    plans = [
        planner.plan(
            params, cluster.at(rate), args.compute,
            tokens=args.tokens_per_worker, agreement=args.agreement, data=args.data,
        )
        for rate in args.bandwidth or [cluster.link.bandwidth]
    ]  # fmt: skip
    size = plans[0].parameters
    if args.json:
        about = named and {"name": args.cluster, "about": named.about, "source": named.source}
        found = {"parameters": size, "plans": list(map(planner.as_json, plans)), "cluster": about}
        output.write(output.as_text(found))
        return 0
    if not args.explain:
        output.show("\n\n".join(map(planner.advice, plans)))
        return 0
    output.show(
        *([_in_words(args.cluster, named)] if named else []),
        f"{size:,} parameters; compute {units.seconds_text(args.compute)} a step; latency "
        f"{units.seconds_text(cluster.link.latency)}; packing at "
        f"{units.bytes_text(cluster.memory / 8)}/s of memory; nothing overlaps.",
        *(
            f"\n{planner.table(one)}\n\n{planner.advice(one)} {planner.details(one)}".rstrip()
            for one in plans
        ),
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
