"""Times of steps that others published, beside what the planner calculates for them.

The shares of links in the plan come from other sources than these times, but who chose them knew the times.
So each source is also predicted blindly: with the mean share of all *other* sources for such a link, of
these times and of `shares.json`, and with nothing that was assumed.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
from report import Rows

from lioncub_jax.programs import units
from lioncub_jax.tools import plan as planner
from lioncub_jax.tools.plan.model import SHARES, Row

RESULTS = Path(__file__).parents[1] / "results"
ROWS, MEASURED = RESULTS / "published_times.jsonl", RESULTS / "measured.jsonl"
ASSUMED = "assumed"


def rows() -> Rows:
    """Every published time."""
    return report.read(ROWS)


def estimate(row: dict[str, Any]) -> tuple[Row, planner.Link]:
    """The exchange of a row, and the link of its workers."""
    link = planner.Link(row["rate"], kind=row["kind"])
    scheme = planner.SCHEMES["lion"]._replace(mean=row["bits"])
    return planner.step_time(scheme, row["parameters"], planner.Cluster(row["workers"], link)), link


def predicted(row: dict[str, Any], share: float | None = None) -> float:
    """Seconds of a step, by the middle of what the planner takes; or by a share of the rate."""
    exchange, link = estimate(row)
    known = link.shares()
    middle = math.sqrt(min(known) * max(known))
    return float(exchange.step(row["compute"], share or middle, row["overlaps"] / 2))


def by_nominal(row: dict[str, Any]) -> float:
    """Seconds of a step on a link that reaches its rate, whose mean does not overlap."""
    return predicted({**row, "rate": row["nominal"] or row["rate"], "overlaps": False}, 1.0)


def blindly(row: dict[str, Any]) -> float:
    """Seconds of a step by the shares of all other sources."""
    return predicted(row, statistics.geometric_mean(shares_of_others(row)))


def shares_of_others(row: dict[str, Any]) -> list[float]:
    """A share for each other source of such links: what its means without overlap imply, or its own."""
    known = defaultdict(list)
    _, link = estimate(row)
    for share in known_of(link):
        if source_of(share) != ASSUMED:
            known[source_of(share)].append(share["share"])
    for other in rows():
        exchange, its = estimate(other)
        if other["counted"] and not other["overlaps"] and known_of(its) == known_of(link):
            takes = other["seconds"] - other["compute"] - exchange.fixed
            known[source_of(other)].append(min(exchange.link_seconds / takes, 1.0))
    return [
        statistics.geometric_mean(some)
        for source, some in known.items()
        if source != source_of(row)
    ]


def known_of(link: planner.Link) -> list[dict[str, Any]]:
    """The published shares of such links, with their sources."""
    limits = SHARES[link.kind]
    return next(x["known"] for x in limits if link.bandwidth <= (x["up_to"] or math.inf))


def source_of(row: dict[str, Any]) -> str:
    return row["source"].split(": ")[0]


def errors(predict: Callable[[dict[str, Any]], float]) -> tuple[float, float]:
    """How far predictions are from what was published."""
    return factors([row | {"predicted": predict(row)} for row in rows() if row["counted"]])


def factors(some: Rows) -> tuple[float, float]:
    """How far the predictions of rows are from their seconds: the median and the largest factor."""
    each = [max(x := row["predicted"] / row["seconds"], 1 / x) for row in some]
    return statistics.median(each), max(each)


def shares() -> str:
    """The shares of nominal rates, by kind of network, with the issues of NCCL that have them."""
    lines = []
    for kind, limits in SHARES.items():
        for one in limits:
            limit = units.rate_text(one["up_to"]) if one["up_to"] else ""
            known = sorted(x["share"] for x in one["known"])
            sources = dict.fromkeys(source_of(x) for x in one["known"])
            links = [
                f"[{x.partition('NVIDIA/')[2].replace('/issues/', '#')}]({x})" if "://" in x else x
                for x in sources
            ]
            lines.append([kind, limit, f"{known[0]:.0%} to {known[-1]:.0%}", ", ".join(links)])
    return report.markdown(["network", "up to", "share", "source"], lines)


def measured() -> str:
    """A line for each method in the lab, as the plan has it from a probe there, and the errors."""
    some = {(row["rate"], row["workers"], row["method"]): row for row in report.read(MEASURED)}
    links = dict.fromkeys(at[:2] for at in some)
    lines = []
    for method in dict.fromkeys(at[2] for at in some):
        rows = [some[(*link, method)] for link in links]
        times = [[f"{1e3 * row[x]:,.0f}" for x in ("seconds", "predicted")] for row in rows]
        lines.append([f"`{method}`", *(", ".join(both) for both in times)])
    middle, most = factors(list(some.values()))
    head = ["measured and predicted, ms", *(f"{n} workers, {rate}" for rate, n in links)]
    said = f"The median error is {middle:.2f} times, the largest {most:.2f} times.\n"
    return f"{report.markdown(head, lines)}\n{said}"


def table() -> str:
    """A line for each kind of network, and one for all: median and largest errors."""
    counted = [row for row in rows() if row["counted"]]
    kinds = {kind: [row for row in counted if row["kind"] == kind] for kind in SHARES}
    lines = []
    for kind, some in (*kinds.items(), ("all", counted)):
        if some:
            found = [
                factors([row | {"predicted": predict(row)} for row in some])
                for predict in (predicted, blindly, by_nominal)
            ]
            texts = [f"{middle:.2f}, {most:.2f}" for middle, most in found]
            lines.append([kind, f"{len(some)}", *texts])
    head = ["network", "published times", "predicted", "blindly", "by the nominal rate"]
    return report.markdown(head, lines)
