"""``lioncub plan``: will voting help me?"""

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from lioncub_jax.audit import units
from lioncub_jax.tools import plan as planner
from lioncub_jax.tools.cli import output, targets
from lioncub_jax.tools.cli.options import COUNT, FLAG, RATE, SECONDS, SIZE, Row, reads
from lioncub_jax.tools.plan import report

SUMMARY = "will it help me? what to use and what it gains, before training"

DESCRIPTION = """\
Says for each bandwidth which method to use, how many times as fast it reaches a
loss, from least to most, and where that was measured; or that none is worth it; or
which number to measure first. Links are taken to reach a published share of their
rate, unless lioncub probe measured them. Steps to the loss are measured, on a small
model. docs/explain/planner.md in the repository has the model and what it leaves
out."""

EPILOG = """\
With --explain all methods stand in a table: what a worker sends in a step, the
time of an exchange in collectives, the time of packing bits, that of a step without
overlap, the bytes of the optimizer's state on a device, the tokens to the loss over
those of AdamW, and the time to it over that of the best all-reduce of gradients. With
--json bandwidths are in bits per second, times in seconds; null stands for a number
that is not finite. --help --explain shows more options.

examples:
  lioncub plan --model 124M --workers 8 --bandwidth 100mbit,1gbit,100gbit \\
      --compute 2s --tokens-per-worker 8192
  lioncub plan --model 7B --cluster a3-mega-64 --compute 1.2s --tokens-per-worker 65536
  lioncub plan --model lioncub_jax.tools.cli.examples:model --workers 4 \\
      --compute 20ms --bandwidth 1gbit --tokens-per-worker 256 --explain"""

INSIDE_LATENCY = 5e-6
SAME = 1.5  # times as many parameters, for which a step that was probed stands

RATES = reads(lambda text: [units.rate(part) for part in text.split(",")])


OPTIONS: list[Row] = [
    (
        "--model", {},
        "a number of parameters, such as 7B; or MODULE:NAME or FILE.py:NAME, a function without arguments "
        "that returns an nnx.Module, linen variables or a tree of arrays; only shapes are made",
    ),
    (
        "--workers", COUNT,
        "number of data-parallel workers; of several nodes each is one worker (--devices-per-worker)",
    ),
    (
        "--bandwidth", RATES,
        "of each worker's link, the slower of up and down, such as 1gbit, or several with commas",
    ),
    ("--compute", SECONDS, "time of a step without the network, such as 144ms"),
    (
        "--tokens-per-worker", COUNT,
        "that ONE worker, with all of its devices, sees in a step: its batch times the length; more of "
        "them are less noise, which decides more than the network does",
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
    ("--measured", {"type": Path}, "the JSON of lioncub probe on these machines, for links and memory"),
    ("--memory", SIZE, "of a device, such as 24GB: methods that do not fit are refused"),
    ("--explain", FLAG, "all methods in a table"),
    ("--json", FLAG, "print numbers, of all methods"),
    (
        "--network", {"choices": planner.kinds(), "default": None},
        "kind of the link between workers, which decides the share of its rate that it reaches (tcp)",
    ),
    ("--latency", SECONDS, "from one worker to another, one way: half of what ping says (50us)"),
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
DETAILS = {option for option, _, _ in OPTIONS[-6:]}  # that help shows with --explain alone


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
      ValueError: for options that do not go together, and as `planner.plan` and targets.
    """
    if args.model is None:
        raise ValueError(
            "give --model: a number of parameters such as 7B, or FILE.py:NAME to count them"
        )
    measured = _measured(args.measured) if args.measured else None
    params = targets.shapes(args.model) if ":" in args.model else units.count(args.model)
    compute = args.compute or (measured and _compute(measured, planner.parameters_in(params)))
    named = planner.cluster_named(args.cluster) if args.cluster else None
    cluster = _cluster(args, named, measured)
    missing = []
    if compute is None:
        missing.append(
            "no compute time: without it every speedup would look better than it is; give --compute "
            "144ms, what a step takes on one worker; before there is a program, about 6 * parameters * "
            "tokens per worker / the FLOP/s that all devices of a worker reach"
        )
    if args.tokens_per_worker is None:
        missing.append(
            "give --tokens-per-worker, what ONE worker sees in a step, its batch times the length or the "
            "patches of an image: the noise of its gradient decides more than the network does"
        )
    if compute is None or missing:
        raise ValueError("; and ".join(missing))
    plans = [
        planner.plan(
            params, cluster.at(rate), compute,
            tokens=args.tokens_per_worker, data=args.data, memory=args.memory or math.inf,
        )
        for rate in args.bandwidth or [cluster.link.bandwidth]
    ]  # fmt: skip
    size = plans[0].parameters
    if args.json:
        about = named and {"name": args.cluster, "about": named.about, "source": named.source}
        answer = {"parameters": size, "plans": [as_json(one) for one in plans], "cluster": about}
        output.write(output.as_text(answer))
        return 0
    if not args.explain:
        output.show("\n\n".join(planner.advice(one) for one in plans))
        return 0
    jumps = " and ".join(map(units.rate_text, cluster.link.limits()[:-1]))
    lower = f"Above {jumps} {cluster.link.kind} links reach lower shares, so ranges jump there."
    codes = (f"{scheme.name:<18}  {scheme.code}" for scheme in planner.SCHEMES)
    output.show(
        *([_in_words(args.cluster, named)] if named else []),
        f"{size:,} parameters; compute {units.seconds_text(compute)} a step; latency "
        f"{'measured' if measured else units.seconds_text(cluster.link.latency)}; packing at "
        f"{units.bytes_text((measured.memory_bandwidth if measured else cluster.memory) / 8)}/s of memory.",
        *([lower] if jumps else []),
        *(f"\n{table(one)}\n\n{planner.advice(one)}" for one in plans),
        "\nIn a program, by names of lioncub_jax:",
        *codes,
    )
    return 0


def _measured(path: Path) -> planner.Measured:
    try:
        return planner.Measured(**json.loads(path.read_text()))
    except (TypeError, ValueError):
        raise ValueError(
            f"{path}: this is no file of lioncub probe --out; write it again"
        ) from None


def _compute(measured: planner.Measured, size: int) -> float | None:
    """The time of the step that was probed, if the model is of about that size."""
    probed = measured.parameters
    if probed and not 1 / SAME <= size / probed <= SAME:
        raise ValueError(
            f"--model has {size:,} parameters, and the step that was probed has {probed:,}: give "
            "--compute, or probe a step of this model"
        )
    return measured.compute


def _cluster(
    args: argparse.Namespace,
    named: planner.NamedCluster | None,
    measured: planner.Measured | None,
) -> planner.Cluster:
    """The named or measured machines, or defaults, with what is given in its place."""
    if measured and not named:
        at = planner.Cluster(measured.num_workers, planner.Link(math.inf, kind="exact"))
    elif named:
        at = named.cluster
    elif args.workers and args.bandwidth:
        at = planner.Cluster(args.workers, planner.Link(args.bandwidth[0]))
    else:
        raise ValueError(
            "give --workers and --bandwidth, machines by name, such as --cluster v5e-8, or --measured"
        )
    inside = at.inside
    if args.inside_bandwidth:
        inside = planner.Link(
            args.inside_bandwidth, inside.latency if inside else INSIDE_LATENCY, "nvlink"
        )
    cluster = dataclasses.replace(
        at,
        num_workers=args.workers or at.num_workers,
        link=planner.Link(
            at.link.bandwidth, args.latency or at.link.latency, args.network or at.link.kind
        ),
        group_size=args.devices_per_worker or at.group_size,
        inside=inside,
        on_cpu=args.platform == "cpu",
        memory_bandwidth=args.memory_bandwidth or at.memory_bandwidth,
        measured=measured,
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


def table(plan: planner.Plan) -> str:
    """Shows the plan for people: a line for each method that works, and below why others do not.

    Args:
      plan: what `plan` returned.

    Returns:
      Lines. "sent" is what a worker, all of its devices together, sends in a step; "network" is the time
      of an exchange in collectives, "packing" that of packing, counting and unpacking; "step" is the time
      of a step without overlap; "state" the optimizer's bytes on a device; "tokens" those to the loss over
      AdamW's, with the standard error; "time" that to the loss over the best all-reduce's. Local steps
      that were not measured share a line.

    Example:
      >>> at = planner.Cluster(8, planner.Link(1e9))
      >>> table(planner.plan(10**8, at, 0.1, tokens=32)).splitlines()[0]
      '8 workers at 1 Gbit/s'
    """
    lines = [["method", "sent", "network", "packing", "step", "state", "tokens", "time"]]
    share = plan.corners()[0][0]
    local = [n for n, row in plan.rows.items() if row.scheme.every > 1 and not row.learned]
    for name, row in plan.rows.items():
        if name in local:
            continue
        of, tokens, time = row.estimate, report.NOT_MEASURED, ""
        seconds = (
            of.communication(share),
            of.local,
            of.step(plan.compute, share, 0, row.accumulate),
        )
        if row.learned:
            tokens = "not reached"
        if row.learned and row.ratio() < math.inf:
            tokens = f"{row.learned.ratio:.2f} ± {row.learned.error:.2f}"
            low, high = plan.range_over_means(name)
            time = f"{report.digits(1 / high)} to {report.digits(1 / low)}"
        state = units.bytes_text(of.state_bytes)
        sent = units.bytes_text(of.sent_bytes / row.accumulate)
        lines.append([name, sent, *map(units.seconds_text, seconds), state, tokens, time])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    rate = units.rate_text(plan.cluster.link.bandwidth)
    where = "as measured" if plan.cluster.measured else f"at {rate}"
    title = f"{plan.cluster.num_workers:,} workers {where}"
    notes = [
        *([f"{', '.join(local)}: {report.NOT_MEASURED}"] if local else []),
        *(f"{name}: {why}" for name, why in plan.refused.items()),
        *(_network(plan) if "adamw" in plan.rows else []),
        '"network" and "packing" are of an exchange. "sent" and "step" are of a step: local steps and '
        "micro-steps share an exchange.",
    ]
    return "\n".join([title, *shown, *notes])


def _network(plan: planner.Plan) -> list[str]:
    """A line with the row of the README's table."""
    times = report.digits(plan.exchange(plan.rows["adamw"]) / plan.compute)
    return [
        f"A float32 all-reduce takes {times} times as long as computing: a row of README's table."
    ]


def as_json(plan: planner.Plan) -> dict[str, Any]:
    """Returns the plan as plain numbers: bits per second, bytes and seconds.

    Args:
      plan: what `plan` returned.

    Returns:
      A dict of the fields of `Plan`; ``"use"``, the method to use, or "not measured"; ``"ranges"``, how
      many times as fast as the best all-reduce each is, at least and at most; and ``"advice"``.

    Example:
      >>> at = planner.Cluster(8, planner.Link(1e9))
      >>> as_json(planner.plan(10**6, at, 0.1, tokens=32))["use"]
      'adamw-bfloat16'
    """
    ranges = {name: plan.range_over_means(name) for name in plan.times()}
    cluster = dataclasses.asdict(plan.cluster)
    answer = {"use": plan.use(), "ranges": ranges, "advice": planner.advice(plan)}
    return plan._asdict() | {"cluster": cluster} | answer
