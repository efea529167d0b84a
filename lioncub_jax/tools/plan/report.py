"""What the planner says: every method side by side, and which to use.

Methods are ranked by the time until a loss is reached: a step's time, and how many steps a method was seen
to take where a worker's gradient is about as noisy (`evidence`).
"""

import math
from typing import Any, NamedTuple

from lioncub_jax.audit.units import bytes_text, rate_text, seconds_text
from lioncub_jax.exchange.arguments import check_number
from lioncub_jax.tools.plan import evidence
from lioncub_jax.tools.plan.evidence import Found, Learned
from lioncub_jax.tools.plan.model import (
    SCHEMES,
    Cluster,
    Estimate,
    Scheme,
    parameters_in,
    pays,
    step_time,
)

WIDTHS = 8, 8, 8, 8, 12, 8  # of the columns of a table
TIES = "vote", "average"  # where both of two workers must agree, or nothing moves
NOT_MEASURED = "not measured"
WORTHWHILE_SPEEDUP = 1.05  # less is not enough to change how a model is trained


class Row(NamedTuple):
    """A method that works on a cluster.

    Attributes:
      scheme: what it is.
      estimate: of a step.
      learned: how it learns; None for what was not measured.
    """

    scheme: Scheme
    estimate: Estimate
    learned: Learned | None

    def steps(self) -> float:
        """To the loss; infinite for what was not measured, or not seen to get there."""
        return (self.learned and self.learned.steps[evidence.RANKED]) or math.inf

    def time(self) -> float:
        """Seconds of as many steps, which are those of a small model: only their ratios say anything."""
        return self.steps() * self.estimate.step


class Plan(NamedTuple):
    """Every method on one cluster.

    Attributes:
      cluster: workers and links.
      compute: seconds, as given.
      tokens: that a worker sees in a step, as given.
      agreement: of votes, as given.
      data: what workers see, as given.
      parameters: of the model.
      found: the cell whose steps these are.
      rows: by the name of the scheme, those that work.
      refused: why the others do not work, by name.
    """

    cluster: Cluster
    compute: float
    tokens: int | None
    agreement: float | None
    data: str
    parameters: int
    found: Found
    rows: dict[str, Row]
    refused: dict[str, str]

    def times(self, *kinds: str) -> dict[str, float]:
        """Times to the loss of all that were seen to get there, or of such kinds; the shortest first."""
        found = {
            name: row.time()
            for name, row in self.rows.items()
            if row.steps() < math.inf and (not kinds or row.scheme.kind in kinds)
        }
        return dict(sorted(found.items(), key=lambda one: one[1]))

    def first(self, *kinds: str) -> str:
        """Who is at the loss first, of all or of such kinds; nobody is ""."""
        return next(iter(self.times(*kinds)), "")

    def use(self) -> str:
        """The method to use: the fastest, or the best mean if nearly as fast; or "not measured"."""
        mean, times = self.first("mean"), self.times()
        if not times:
            return NOT_MEASURED
        return self.first() if times[mean] >= WORTHWHILE_SPEEDUP * min(times.values()) else mean

    def gain(self, over: str) -> float:
        """How many times faster than another the method to use reaches the loss."""
        times = self.times()
        return times[over] / times[self.use()]

    def gain_over_hidden(self) -> float:
        """The gain over a mean of gradients that overlaps fully with computing, which nothing else does."""
        means = (row for row in self.rows.values() if row.scheme.kind == "mean")
        hidden = (row.steps() * max(self.compute, row.estimate.communication) for row in means)
        return min(hidden) / self.rows[self.use()].time()

    def worthwhile(self) -> float:
        """The bandwidth below which a method reaches the loss 1.05 times faster than means of gradients."""

        def below(name: str, mean: str) -> float:
            ours, theirs = self.rows[name], self.rows[mean]
            speedup = WORTHWHILE_SPEEDUP * ours.steps() / theirs.steps()
            return pays(ours.estimate, theirs.estimate, speedup)

        means, others = self.times("mean"), self.times("ours", "peer")
        return max((min(below(name, mean) for mean in means) for name in others), default=0.0)


def plan(
    params: Any,
    cluster: Cluster,
    compute: float,
    *,
    tokens: int | None = None,
    agreement: float | None = None,
    data: str = evidence.DATA[0],
) -> Plan:
    """Every method on a cluster, by the evidence of the nearest cell.

    Steps are not measured if that cell is far away, and not for votes of two workers: there each
    disagreement is a tie.

    Args:
      params: a tree of arrays or ``jax.ShapeDtypeStruct``, or how many parameters there are.
      cluster: workers, links and memory.
      compute: seconds of a device's own forward and backward pass and update, above zero.
      tokens: that one worker sees in a step; or
      agreement: ``votes/agreement`` of a job that runs, as `cell_for`.
      data: what workers see, "alike" or "different".

    Returns:
      A `Plan`.

    Raises:
      ValueError: as `cell_for`; for no parameters, and a compute time that is not above zero.

    Example:
      >>> from lioncub_jax.tools.plan import Link
      >>> slow = plan(124_000_000, Cluster(8, Link(1e9, 50e-6)), 0.144, tokens=32)
      >>> round(slow.rows["vote"].estimate.step, 3), slow.found.away
      (0.364, 'here')
    """
    check_number(
        f"compute={compute!r}", compute, lambda time: 0 < time < math.inf,
        "give seconds, above zero; speedups depend on it",
    )  # fmt: skip
    size = parameters_in(params)
    found = evidence.cell_for(cluster.workers, tokens, agreement, data)
    rows, refused = {}, {}
    for scheme in SCHEMES:
        try:
            estimate = step_time(scheme, params, cluster, compute)
        except ValueError as reason:
            refused[scheme.name] = str(reason)
            continue
        unknown = found.away == evidence.FAR or (cluster.workers == 2 and scheme.name in TIES)
        learned = None if unknown else found.cell.methods.get(scheme.learns)
        rows[scheme.name] = Row(scheme, estimate, learned)
    return Plan(cluster, compute, tokens, agreement, data, size, found, rows, refused)


def advice(plan: Plan) -> str:
    """What to use there, what it gains, and where that was measured.

    Args:
      plan: what `plan` returned.

    Returns:
      Sentences about the method that reaches the loss first, of this library or not. They begin with
      "Do not use this" where nothing is ``WORTHWHILE_SPEEDUP`` times faster than a mean of gradients, and
      then name the best mean; with "Measure first" where that depends on how much a mean overlaps; with
      "Not measured" where the nearest cell is far away, and then name no method.

    Example:
      >>> from lioncub_jax.tools.plan import Link
      >>> advice(plan(10**8, Cluster(1, Link(1e9)), 0.1, tokens=32))[:31]
      'Do not use this: one worker has'
    """
    if plan.cluster.workers == 1:
        return "Do not use this: one worker has no others to exchange with; use optax.adamw or optax.lion."
    if plan.use() == NOT_MEASURED:
        return (
            f"Not measured: nobody ran {_asked(plan)}. The nearest runs had {_cell(plan.found.cell)}. "
            "Measure some hundred steps of yours before you choose."
        )
    rate = rate_text(plan.cluster.link.bandwidth)
    scheme, _, how = plan.rows[plan.use()]
    assert how
    begin = f"{scheme.code}. {_tuned(plan, how)} {_compared(plan)}."
    hidden, overlapped = plan.gain_over_hidden(), "mean that overlaps fully with computing"
    if scheme.kind == "mean":
        said = (
            f"Do not use this: at {rate} nothing reaches the loss {WORTHWHILE_SPEEDUP} times faster than a "
            f"mean of gradients, {begin}"
        )
    elif hidden < WORTHWHILE_SPEEDUP:
        said = (
            f"Measure first: at {rate} a {overlapped} takes {hidden:.3g} times the time of the best other "
            f"method. If yours overlaps less, use {begin}"
        )
    else:
        said = f"At {rate} use {begin} It is {hidden:.3g} times as fast as a {overlapped}."
    return f"{said} {_measured(plan, how)}"


def _tuned(plan: Plan, how: Learned) -> str:
    """Ratios to AdamW that tuning chose, and in which runs."""
    cell = plan.found.cell
    ratios = how.rate_over_adamw, how.decay_over_adamw
    rate, decay = ("" if ratio == 1 else f"{ratio:.2g} times " for ratio in ratios)
    return (
        f"Begin with {rate}the learning rate and {decay}the weight decay of your AdamW, and tune: that was "
        f"best in runs of {cell.steps} steps of a model of {cell.parameters:,} parameters, with "
        f"betas of {how.b1:g} and {how.b2:g}."
    )


def _compared(plan: Plan) -> str:
    """The method to use beside the best of each other kind that reaches the loss."""
    best = {
        "the best mean of gradients": plan.first("mean"),
        "the best other method": plan.first("peer"),
        "the best of this library": plan.first("ours"),
    }
    kind, others = plan.rows[plan.use()].scheme.kind, list[str]()
    for what, name in best.items():
        one = plan.rows[name].scheme if name else None
        if one and one.kind != kind:
            long = f"{one.code}, {what}, takes {plan.gain(name):.3g} times as long"
            faster = f"{plan.gain(name):.3g} times faster than {what}, {one.code}"
            others.append(long if kind == "mean" else faster)
    if not others:
        return "This method alone was seen to reach the loss"
    return ("" if kind == "mean" else "This method reaches the loss ") + ", and ".join(others)


def _asked(plan: Plan) -> str:
    noise = f"{plan.tokens:,} tokens" if plan.tokens else f"an agreement of {plan.agreement:g}"
    if plan.agreement == 0.5:
        noise += " (coin flips: noise only)"
    return f"{noise}, {plan.cluster.workers:,} workers and data {plan.data}"


def _cell(cell: evidence.Cell) -> str:
    of = "" if cell.agreement is None else f" (an agreement of {cell.agreement:.4g})"
    return (
        f"{cell.tokens:,} tokens a worker and step{of}, {cell.workers} workers and data {cell.data}"
    )


def _measured(plan: Plan, how: Learned) -> str:
    """Where, and how far that is from what was asked."""
    (cell, away), study = plan.found, evidence.packaged().study
    runs = how.runs[evidence.RANKED]
    said = "with" if away == evidence.HERE else f"near {_asked(plan)}: with"
    kind = plan.use().split("-")
    taken = "; bfloat16 is assumed to learn like float32" if kind[-1] == "bfloat16" else ""
    if kind[0] == "powersgd":
        taken = "; the rank is the same share of the width, and no smaller share was measured"
    if plan.tokens and plan.tokens > cell.tokens:
        taken += "; with more tokens votes and codes took more steps, so expect less"
    if plan.cluster.workers == 2:
        taken += "; votes of two workers, where each disagreement is a tie, were not measured"
    return (
        f"Measured {said} {_cell(cell)}, a {study['model']} (your model has {plan.parameters:,} "
        f"parameters) on {study['dataset']}, {runs} seed{'s' * (runs > 1)}, not on a GPU{taken}."
    )


def details(plan: Plan) -> str:
    """Which methods are nearly as fast, and below which rate sending less is worth it; "" if not measured.

    Example:
      >>> from lioncub_jax.tools.plan import Link
      >>> details(plan(10**8, Cluster(8, Link(1e9)), 0.1, tokens=32))[:23]
      'Within 5 % of it, or fa'
    """
    times = plan.times()
    if not times:
        return ""
    close = [name for name in times if times[name] <= WORTHWHILE_SPEEDUP * times[plan.use()]]
    rate = plan.worthwhile()
    below = {0.0: "at no rate", math.inf: "at any rate"}.get(rate, f"below {rate_text(rate)}")
    return (
        f"Within 5 % of it, or faster: {'; '.join(close)}. Some method reaches the loss "
        f"{WORTHWHILE_SPEEDUP} times faster than every mean of gradients {below}."
    )


def table(plan: Plan) -> str:
    """The plan for people, at most 80 columns wide: a line for each scheme, those of this library first.

    The reasons why some schemes do not work there stand below.

    Args:
      plan: what `plan` returned.

    Returns:
      Lines. "sent" is what a worker, all of its devices together, sends in a step; "network" is the time in
      collectives, "packing" that of packing, counting and unpacking, and "step" the time of the whole step.
      "steps" is how many it takes to the loss, with the standard error over seeds, and "time" how long
      that is, that of the best mean of gradients being 1. Bytes are in decimal units.

    Example:
      >>> from lioncub_jax.tools.plan import Link
      >>> table(plan(10**8, Cluster(8, Link(1e9)), 0.1, tokens=32)).splitlines()[0]
      '8 workers at 1 Gbit/s'
    """
    mean = min(plan.times("mean").values(), default=math.inf)
    lines = [["method", "sent", "network", "packing", "step", "steps", "time"]]
    for name, row in plan.rows.items():
        step = row.estimate
        seconds = map(seconds_text, (step.communication, step.local, step.step))
        time = f"{row.time() / mean:.3g}" if row.steps() < math.inf else ""
        lines.append([name, bytes_text(step.sent_bytes), *seconds, _steps_text(row.learned), time])
    shown = (
        f"{name:<18} {' '.join(f'{cell:>{width}}' for cell, width in zip(cells, WIDTHS, strict=True))}"
        for name, *cells in lines
    )
    title = f"{plan.cluster.workers:,} workers at {rate_text(plan.cluster.link.bandwidth)}"
    refused = (f"{name}: {reason}" for name, reason in plan.refused.items())
    return "\n".join([title, *shown, *refused])


def _steps_text(found: Learned | None) -> str:
    if not found or not found.runs[evidence.RANKED]:
        return NOT_MEASURED
    steps, error = found.steps[evidence.RANKED], found.error[evidence.RANKED]
    if steps is None:
        return "not reached"
    return f"{steps:.0f}" + (f" ± {error:.0f}" if error else "")


def legend() -> str:
    """How each scheme is written in a program, a line each.

    Example:
      >>> print(legend().splitlines()[0])
      vote                lion_cub(...)
    """
    return "\n".join(f"{one.name:<18}  {one.code}" for one in SCHEMES)


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain numbers: bits per second, bytes and seconds; a rate without limit is infinite.

    Args:
      plan: what `plan` returned.

    Returns:
      A dict. ``"use"`` is the method to use, or "not measured", and ``"worthwhile"`` the bandwidth below
      which a method is worth it, 0 where none is known. ``"measured"`` is the nearest cell. Each scheme
      has an ``"estimate"``, ``"learned"`` with its steps, and a ``"time_to_loss"``, infinite for what was
      not measured or does not get there.

    Example:
      >>> from lioncub_jax.tools.plan import Link
      >>> as_json(plan(10**6, Cluster(8, Link(1e9, 50e-6)), 0.1, tokens=32))["latency"]
      5e-05
    """
    cell, away = plan.found
    measured = cell._asdict() | {"away": away}
    del measured["methods"]  # with the schemes
    return {
        "workers": plan.cluster.workers,
        "devices_per_worker": plan.cluster.group_size,
        "bandwidth": plan.cluster.link.bandwidth,
        "latency": plan.cluster.link.latency,
        **{
            name: getattr(plan, name)
            for name in ("compute", "tokens", "agreement", "data", "refused")
        },
        "measured": measured,
        "schemes": [
            {
                "scheme": name,
                "code": row.scheme.code,
                "estimate": row.estimate,
                "learned": row.learned,
                "time_to_loss": row.time(),
            }
            for name, row in plan.rows.items()
        ],
        "use": plan.use(),
        "worthwhile": plan.worthwhile(),
        "advice": advice(plan),
    }
