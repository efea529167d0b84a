"""What to use, from the evidence alone, and the same that `plan` says: a whole table and a short one.

One number stands for a network: the time of a float32 mean of gradients over that of computing a step.
There is no latency and no packing in it, and the model is a number of parameters.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import report

from lioncub_jax.tools.plan import evidence
from lioncub_jax.tools.plan.evidence import DATA
from lioncub_jax.tools.plan.methods import SCHEMES
from lioncub_jax.tools.plan.model import Cluster, Link, Row, step_time
from lioncub_jax.tools.plan.verdict import HIDES, MEASURE, USE_MEAN, Plan, plan

NETWORKS = (0.1, 1, 10, 100)
TOKENS = (32, 256, 2048)  # that a worker sees in a step
WORKERS = 8  # or the nearest that was measured
SIZE = 10_000_000  # parameters
LONG_RUN = 1000  # steps; in shorter ones the order of methods was another


class Use(NamedTuple):
    """A line: what to use for one kind of data, on networks next to each other.

    Attributes:
      data: one of ``DATA``.
      plans: by tokens and network; all have this answer.
    """

    data: str
    plans: dict[tuple[int, float], Plan]

    @property
    def tokens(self) -> list[int]:
        """The tokens that a worker sees in a step; several where all have this answer."""
        return sorted({tokens for tokens, _ in self.plans})

    @property
    def networks(self) -> list[float]:
        return sorted({network for _, network in self.plans})

    def answer(self) -> tuple[str, Row | None]:
        """Returns the verdict, and the method to use."""
        return next(iter(self.plans.values())).answer()


def cluster_at(network: float, workers: int) -> Cluster:
    """Makes a cluster whose float32 mean of gradients takes so many times as long as a second of computing.

    Args:
      network: that ratio.
      workers: how many.

    Example:
      >>> cluster_at(10, 8).num_workers
      8
    """
    at = Cluster(workers, Link(1.0, 0.0, "exact"), memory_bandwidth=math.inf)
    rate = step_time(SCHEMES["lion"], SIZE, at).link_seconds / network
    return dataclasses.replace(at, link=Link(rate, 0.0, "exact"))


def what_to_use() -> list[Use]:
    """Finds the method to use by data, noise and network; what has the same answer is one line.

    Example:
      >>> sorted({row.data for row in what_to_use()})
      ['alike', 'different']
    """
    lines: dict[Any, Use] = {}
    for data, tokens in itertools.product(DATA, TOKENS):
        same: dict[Any, dict[tuple[int, float], Plan]] = {}
        for network, one in _by_network(data, tokens).items():
            verdict, row = one.answer()
            same.setdefault((verdict, row and row.scheme), {})[tokens, network] = one
        for (verdict, scheme), plans in same.items():
            # An all-reduce, or nothing, may be the answer for several numbers of tokens.
            joins = not scheme or scheme.kind == "mean"
            networks = tuple(network for _, network in plans)
            key = data, networks, verdict, scheme, None if joins else tokens
            lines.setdefault(key, Use(data, {})).plans.update(plans)
    return list(lines.values())


def _by_network(data: str, tokens: int) -> dict[float, Plan]:
    """Plans of 8 workers, or of the nearest number that was measured; none where nobody measured."""
    cells = [one for one in evidence.packaged() if (one.tokens, one.data) == (tokens, data)]
    if not cells:
        return {}
    workers = min((one.num_workers for one in cells), key=lambda n: abs(math.log(n / WORKERS)))
    return {
        network: plan(SIZE, cluster_at(network, workers), 1.0, tokens=tokens, data=data)
        for network in NETWORKS
    }


# --- The whole table


def what_to_use_text() -> str:
    """The table and what its columns are, as both stand in documents.

    Returns:
      Lines of Markdown. Numbers that differ in a line are shown as the least to the most.
    """
    cell = evidence.packaged()[0]
    head = (
        "network", "tokens", "data", "runs", "use", "bits", "cost", "as fast", "rate", "decay", "betas",
    )  # fmt: skip
    rows = what_to_use()
    return (
        f"{report.markdown(head, map(_cells, rows), '---')}\n"
        "* *network*: the time of a float32 all-reduce of gradients, divided by that of computing a step.\n"
        "* *tokens* that one worker sees in a step, and *bits* that it then sends for each parameter.\n"
        "* *runs*: steps of the longest runs of this method, since the order may change in longer ones.\n"
        "* *cost*: tokens to the loss, divided by those of float32 AdamW. Those of a method without "
        "long runs are multiplied by the largest increase that any method had in longer runs.\n"
        "* *as fast*: the speedup to the loss over the best all-reduce. Low end: that all-reduce overlaps "
        "with computing. High end: it does not. Two standard errors are included.\n"
        "* *rate* and *decay*: multiply those of your AdamW by these, and tune.\n\n"
        f"Measured with a byte GPT of {cell.parameters:,} parameters, not on a GPU. "
        f"{_runs(rows)}{_not_measured(rows)}\n"
    )


def _runs(rows: list[Use]) -> str:
    """The numbers of workers and seeds of the methods that the table names, by setting."""
    settings: dict[str, set[int]] = {}
    for row in rows:
        for (tokens, _), one in row.plans.items():
            if named := one.answer()[1]:
                cell, how = one.nearest.cell, named.learned
                assert how
                where = f"{tokens:,} tokens, {row.data}: {cell.num_workers} workers"
                settings.setdefault(where, set()).add(how.runs)
    seeds = {where: _from_to(runs) for where, runs in settings.items()}
    return " ".join(f"{where}, {n} seed{'s' * (n != '1')}." for where, n in seeds.items())


def _not_measured(rows: list[Use]) -> str:
    """What nobody ran."""
    missing = []
    for data in DATA:
        known = {tokens for row in rows if row.data == data for tokens in row.tokens}
        some = [f"{tokens:,}" for tokens in TOKENS if tokens not in known]
        missing += [f"{' and '.join(some)} tokens with data {data}"] if some else []
    return f" Not measured: {', '.join(missing)}." if missing else ""


def _cells(row: Use) -> list[str]:
    tokens = ", ".join(f"{n:,}" for n in row.tokens)
    networks = _from_to(row.networks, "g")
    verdict, first_named = row.answer()
    if not first_named:
        return [networks, tokens, row.data, "not measured", verdict, *[""] * 6]
    plans = list(row.plans.values())
    named = [one.rows[first_named.scheme.name] for one in plans]
    how = first_named.learned
    assert how
    ranges = [one.faster(method) for one, method in zip(plans, named, strict=True)]
    bits = [8 * one.sent_bytes / SIZE for one in named]
    first = "measure first: " if verdict == MEASURE else ""
    fast = f"{min(low for low, _ in ranges):.2g} to {max(high for _, high in ranges):.2g}"
    return [
        networks,
        tokens,
        row.data,
        _lengths(plans),
        f"{first}`{named[0].scheme.code}`",
        _from_to(bits, ".3g"),
        f"{first_named.ratio:.2g}",
        "1" if named[0].scheme.kind == "mean" else fast,
        f"{how.rate_over_adamw:.2g}",
        f"{how.decay_over_adamw:.2g}",
        f"{how.b1:g}, {how.b2:g}",
    ]


def _lengths(plans: list[Plan]) -> str:
    """Steps of the runs of the methods that plans name."""
    rows = [row for plan in plans if (row := plan.answer()[1])]
    steps = {row.learned.steps for row in rows if row.learned}
    return f"{'only ' * (max(steps) < LONG_RUN)}{_from_to(steps, ',')}" if steps else ""


# --- The short one, for a first page

FIRST = {"owner-adamw": "`owner_adamw`", "owner-muon": "`owner_muon`", "vote": "`lion_cub`"}
OTHERS = {
    "powersgd-16": "PowerSGD, rank width/8", "diloco-32-coded-6": "DiLoCo in 4 bits, 32 local steps",
}  # fmt: skip
SHORT = ("alike", 256)  # where runs are longest, and all of these ran
HEADS = {0.1: "1/10 of computing", 1: "as long", 10: "10 times", 100: "100 times"}


def answer_text() -> str:
    """A row a method, a column a network, in Markdown: how many times as fast as the best all-reduce."""
    plans = _by_network(*SHORT)
    lines = []
    for name, title in (FIRST | OTHERS).items():
        rows = [one.rows[name] for one in plans.values()]
        if rows[0].ratio < math.inf:
            bits = f"{8 * rows[0].sent_bytes / SIZE:.2g}"
            cells = map(_gain, plans.values(), rows)
            lines.append([title, bits, *cells])
    head = ["method", "bits", *(HEADS[network] for network in plans)]
    return report.markdown(head, lines)


def _gain(plan: Plan, row: Row) -> str:
    """The range of a method; bold if it is the method to use."""
    if plan.answer()[0] in (HIDES, USE_MEAN):
        return "no gain"
    low, high = plan.faster(row)
    fast = f"{low:.2g} to {high:.2g}"
    return f"**{fast}**" if row is plan.answer()[1] else fast


def _from_to(numbers: Collection[float], form: str = "") -> str:
    """The least and the most of numbers; one where they look the same."""
    first, last = (format(limit(numbers), form) for limit in (min, max))
    return first if first == last else f"{first} to {last}"
