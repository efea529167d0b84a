"""What to use, in one small table: from the evidence alone, and the same that `plan` says.

Networks are told by one number: the time of a float32 mean of gradients over that of computing a step.
There is no latency and no packing in it, and the model is a number of parameters.
"""

import dataclasses
import math
import textwrap
from typing import NamedTuple

from lioncub_jax.planner import evidence
from lioncub_jax.planner.evidence import DATA
from lioncub_jax.planner.model import FLOAT32, Cluster, Link, step_time
from lioncub_jax.planner.report import Plan, plan

NETWORKS = (0.1, 1, 10, 100)
TOKENS = (32, 256, 2048)  # that a worker sees in a step
WORKERS = 8  # or the nearest that was measured
SIZE = 10_000_000  # parameters


class Use(NamedTuple):
    """A row: what to use at one noise, on networks next to each other.

    Attributes:
      tokens: that a worker sees in a step.
      data: one of ``DATA``.
      plans: by the network; of none where nobody measured.
    """

    tokens: int
    data: str
    plans: dict[float, Plan]

    def networks(self) -> str:
        """In words."""
        return _from_to([f"{network:g}" for network in self.plans])

    def method(self) -> str:
        """The name of the scheme to use."""
        return next((one.use() for one in self.plans.values()), "not measured")


def cluster_at(network: float, workers: int) -> Cluster:
    """Where a float32 mean of gradients takes so many times as long as a second of computing.

    Args:
      network: that ratio.
      workers: how many.

    Example:
      >>> cluster_at(10, 8).workers
      8
    """
    free = Cluster(workers, Link(math.inf, 0.0), memory_bandwidth=math.inf)
    sent = step_time(FLOAT32, SIZE, free, 1.0).link_bits
    return dataclasses.replace(free, link=Link(sent / network, 0.0))


def what_to_use() -> list[Use]:
    """The method to use by data, noise and network; networks that have the same answer are one row.

    Example:
      >>> sorted({row.data for row in what_to_use()})
      ['alike', 'different']
    """
    rows: list[Use] = []
    for data in DATA:
        for tokens in TOKENS:
            workers = _workers(tokens, data)
            rows.append(Use(tokens, data, {}))
            for network in NETWORKS if workers else ():
                at = cluster_at(network, workers)
                one = plan(SIZE, at, 1.0, tokens=tokens, data=data)
                if rows[-1].plans and rows[-1].method() != one.use():
                    rows.append(Use(tokens, data, {}))
                rows[-1].plans[network] = one
    return rows


def _workers(tokens: int, data: str) -> int:
    """With how many it was measured: 8, or the nearest; 0 if nobody did."""
    cells = [one for one in evidence.packaged().cells if (one.tokens, one.data) == (tokens, data)]
    return min((one.workers for one in cells), key=lambda n: abs(math.log(n / WORKERS)), default=0)


def what_to_use_text() -> str:
    """The table and what its columns are, as both stand in documents.

    Returns:
      Lines of Markdown. Numbers that differ among the networks of a row are shown as the first to the last.
    """
    study = evidence.packaged().study
    head = "network", "tokens", "data", "use", "bits", "steps", "sooner", "rate", "betas", "decay"
    lines = [head, ["---"] * len(head), *map(_cells, what_to_use())]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        f"{table}\n\n*network*: the time of a float32 mean of gradients over that of computing a step. "
        "*tokens*: that one worker sees\nin a step. *bits*: that it sends for a parameter in a step. "
        "*steps*: to the loss, over those of the better float32\noptimizer. *sooner*: times as soon as the "
        f"best peer that gets there. *rate* and so on: to begin with, in a run of {study['steps']}\nsteps. "
        f"Measured with a {study['model']} of {study['parameters']:,} parameters, not on a GPU.\n"
    )


def _cells(row: Use) -> list[str]:
    if not row.plans:
        return ["any", f"{row.tokens:,}", row.data, row.method(), *[""] * 6]
    plans = list(row.plans.values())
    scheme, estimate, how = used = plans[0].rows[row.method()]
    assert how
    best = min(plans[0].rows[name].steps() for name in ("lion", "adamw"))
    return [
        row.networks(),
        f"{row.tokens:,}",
        row.data,
        f"`{scheme.code}`",
        f"{8 * estimate.sent_bytes / SIZE:.3g}",
        f"{used.steps() / best:.2f}",
        _from_to([f"{one.gain(one.first('mean', 'peer')):.2f}" for one in plans]),
        f"{how.rate:g}",
        f"{how.b1:g}, {how.b2:g}",
        f"{how.decay:g}",
    ]


def answer_text() -> str:
    """The same in Markdown for a first page: a line for each network, a column for each noise."""
    rows = [row for row in what_to_use() if row.plans]
    noises = list(dict.fromkeys((row.tokens, row.data) for row in rows))
    heads = (f"{n:,} tokens{'' if data == DATA[0] else f', data {data}'}" for n, data in noises)
    at = {(row.tokens, row.data, x): plan for row in rows for x, plan in row.plans.items()}
    lines = [("network", *heads), ["---"] * (len(noises) + 1)]
    lines += [(f"{x:g}", *(_answer(at[n, data, x]) for n, data in noises)) for x in NETWORKS]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _answer(plan: Plan) -> str:
    scheme = plan.rows[plan.use()].scheme
    if scheme.kind == "mean":
        return f"a mean of gradients{' in bfloat16' if scheme.learns != scheme.name else ''}"
    others = map(plan.first, ("mean", "peer"))
    mean, peer = (f"{plan.gain(name):.2g}" if name else "–" for name in others)
    return f"`{scheme.code}`, {mean} and {peer}"


def _from_to(numbers: list[str]) -> str:
    first, last = numbers[0], numbers[-1]
    return first if first == last else f"{first} to {last}"


def what_to_use_short() -> str:
    """What was measured of it, in short: by the names of methods, as at the head of the library."""
    lines: dict[str, list[str]] = {}
    for row in what_to_use():
        if row.plans:
            noise = f"{row.tokens:,} tokens, data {row.data}"
            lines.setdefault(noise, []).append(f"{row.method()} at {row.networks()}")
    text = (f"{noise}: {', '.join(said)}" for noise, said in lines.items())
    return "\n".join(textwrap.fill(line, 98, subsequent_indent="  ") for line in text)
