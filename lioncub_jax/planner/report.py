"""What the planner prints: every method side by side, and advice.

Methods are ranked by the time until a loss is reached: a step's time, and how many steps more than float32
Lion a method was seen to take (`evidence`). ``rich`` is imported by the function that needs it.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from lioncub_jax.planner import evidence
from lioncub_jax.planner.evidence import Learned
from lioncub_jax.planner.model import (
    FLOAT32,
    SCHEMES,
    Cluster,
    Estimate,
    Scheme,
    check_one_of,
    parameters_in,
    pays,
    step_time,
)
from lioncub_jax.units import bytes_text, rate_text, seconds_text

if TYPE_CHECKING:
    from rich.table import Table

WORTHWHILE_SPEEDUP = 1.05  # less is not enough to change how a model is trained
LARGER = 10  # times the parameters of a model measured, or of this one: beyond it is another matter
MEANS = tuple(one.name for one in SCHEMES if one.mean)  # of gradients


class Row(NamedTuple):
    """A method that works on a cluster.

    Attributes:
      scheme: what it is.
      estimate: of a step.
      learned: how many steps it takes; None for what was not measured.
      time_to_loss: over float32 Lion's; None for what was not measured, or was not seen to get there.
    """

    scheme: Scheme
    estimate: Estimate
    learned: Learned | None
    time_to_loss: float | None


class Plan(NamedTuple):
    """Every method on one cluster.

    Attributes:
      cluster: workers and links.
      compute: seconds, as given.
      data: what workers see, "alike" or "different".
      parameters: of the model.
      rows: by the name of the scheme, those that work.
      refused: why the others do not work, by name.
    """

    cluster: Cluster
    compute: float
    data: str
    parameters: int
    rows: dict[str, Row]
    refused: dict[str, str]

    def times(self) -> dict[str, float]:
        """Time to the loss, over float32 Lion's, of all that were seen to get there; the shortest first."""
        found = {
            name: row.time_to_loss
            for name, row in self.rows.items()
            if row.time_to_loss is not None
        }
        return dict(sorted(found.items(), key=lambda one: one[1]))

    def worthwhile(self) -> float:
        """The bandwidth below which a method is 1.05 times as soon at the loss as means of gradients."""
        factors = {
            name: row.learned.factor
            for name, row in self.rows.items()
            if row.learned and row.learned.factor
        }

        def below(name: str, mean: str) -> float:
            speedup = WORTHWHILE_SPEEDUP * factors[name] / factors[mean]
            return pays(self.rows[name].estimate, self.rows[mean].estimate, speedup)

        means = factors.keys() & set(MEANS)
        return max(
            (min(below(name, mean) for mean in means) for name in factors.keys() - means),
            default=0.0,
        )


def plan(params: Any, cluster: Cluster, compute: float, data: str = evidence.DATA[0]) -> Plan:
    """Models a step by every scheme, and the time to where float32 Lion stands after 80 % of its run.

    Args:
      params: a tree of arrays or ``jax.ShapeDtypeStruct``, or how many parameters there are.
      cluster: workers, links and memory.
      compute: seconds of a device's own forward and backward pass and update.
      data: of the workers, "alike" or "different", such as other classes or texts.

    Returns:
      A ``Plan``; a scheme that does not work there is in ``refused``.

    Raises:
      ValueError: for a compute time that is not above zero, or unknown data.

    Example:
      >>> from lioncub_jax.planner import Link
      >>> slow = plan(124_000_000, Cluster(8, Link(1e9, 50e-6)), 0.144)
      >>> round(slow.rows["1-bit vote"].estimate.step, 3)
      0.373
      >>> list(slow.rows["float32 AdamW"].learned.workers)  # the task that is nearest in size
      ['gpt']
    """
    if not compute > 0:
        raise ValueError(f"compute={compute!r}: give seconds, above zero; speedups depend on it")
    check_one_of("data", data, evidence.DATA)
    size = parameters_in(params)
    lion = step_time(FLOAT32, params, cluster, compute)
    rows, refused = {}, {}
    for scheme in SCHEMES:
        try:
            estimate = step_time(scheme, params, cluster, compute)
        except ValueError as reason:
            refused[scheme.name] = str(reason)
            continue
        known = time = None
        if cluster.workers > 1:  # one has no method but its own optimizer
            known = evidence.learned(scheme.learns, cluster.workers, size, data)
        if known and known.factor:
            time = known.factor * estimate.step / lion.step
        rows[scheme.name] = Row(scheme, estimate, known, time)
    return Plan(cluster, compute, data, size, rows, refused)


def advice(plan: Plan) -> str:
    """Which method to use there and why, or that none is worth it.

    Args:
      plan: what `plan` returned.

    Returns:
      The method that is first to the loss, whoever's it is, what that was measured on and where evidence
      ends. It begins with "Do not use this" where nothing gets there ``WORTHWHILE_SPEEDUP`` times as soon
      as by means of gradients.
    """
    if plan.cluster.workers == 1:
        return "Do not use this: one worker has no others to exchange votes with; use optax.lion."
    times, rate = plan.times(), rate_text(plan.cluster.link.bandwidth)
    first, mean = next(iter(times)), next(name for name in times if name in MEANS)
    used = first if times[mean] >= WORTHWHILE_SPEEDUP * times[first] else mean
    scheme, estimate, known, time = plan.rows[used]
    assert known
    if used == first and used not in MEANS:
        said = f"At {rate} use {scheme.code} ({used})"
    else:
        said = (
            f"Do not use this: at {rate} nothing is to the loss {WORTHWHILE_SPEEDUP} times as soon as "
            f"{used}, {scheme.code}"
        )
    lion = plan.rows[FLOAT32.name].estimate
    said += (
        f": to float32 Lion's loss in {time:.3g} of its time, by steps of "
        f"{seconds_text(estimate.step)} instead of {seconds_text(lion.step)}, {_factor_text(known)} "
        f"times as many; sending less is worth it {_below_text(plan.worthwhile())}."
    )
    close = [n for n in times if n != used and times[n] <= WORTHWHILE_SPEEDUP * times[used]]
    if close:
        said += f" Within 5 % of that: {'; '.join(close)}."
    return f"{said} {_measured_on(plan, used, known)}"


def _measured_on(plan: Plan, used: str, known: Learned) -> str:
    """On what, and where it is no more as it was measured."""
    tasks = {task.name: task for task in evidence.tasks_near(plan.parameters, plan.data)}
    of = " and ".join(
        f"{name} ({tasks[name].dataset}, {tasks[name].parameters:,} parameters, {workers} workers)"
        for name, workers in known.workers.items()
    )
    worse = f"; {known.task} is the worse of them and counts" if len(known.workers) > 1 else ""
    taken = "; bfloat16 is taken to learn like float32" if "bfloat16" in used else ""
    sizes = [task.parameters for task in tasks.values()]
    beyond = []
    if plan.parameters > LARGER * max(sizes) or LARGER * plan.parameters < min(sizes):
        beyond.append(f"this model has {plan.parameters:,} parameters")
    if known.far_from(plan.cluster.workers):
        beyond.append(f"these are {plan.cluster.workers:,} workers")
    ends = f" There evidence ends: {'; '.join(beyond)}." if beyond else ""
    return f"Measured on {of}, data {plan.data}, {known.seeds} seeds{worse}{taken}.{ends}"


def _below_text(rate: float) -> str:
    if not rate:
        return "at no rate"
    return "at any rate" if rate == math.inf else f"below {rate_text(rate)}"


def table(plan: Plan) -> "Table":
    """The plan for people, at most 80 columns wide: a row for each scheme, peers in a block of their own.

    The reasons why some schemes do not work there stand below the table, and which were not measured.

    Args:
      plan: what `plan` returned.

    Returns:
      A ``rich`` table. "sent" is what a worker, all of its devices together, sends in a step; "network" is
      the time in collectives, "packing" that of packing, counting and unpacking, and "step" the time of the
      whole step. "x steps" is how many times float32 Lion's steps a method takes to its loss, with the
      standard deviation over seeds, and "time to loss" how long that is, float32 Lion's being 1. Bytes are
      in decimal units.
    """
    from rich import box  # not needed for numbers alone
    from rich.table import Table

    workers = "1 worker" if plan.cluster.workers == 1 else f"{plan.cluster.workers:,} workers"
    out = Table(
        title=f"{workers} at {rate_text(plan.cluster.link.bandwidth)}",
        title_justify="left",
        caption="\n".join(_below(plan)),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )
    out.add_column("scheme", no_wrap=True)
    for header in ("sent", "network", "packing", "step", "x steps", "time\nto loss"):
        out.add_column(header, justify="right", no_wrap=True)
    for scheme in SCHEMES:
        if scheme is FLOAT32:  # the first of the peers
            out.add_section()
        row = plan.rows.get(scheme.name)
        out.add_row(scheme.name, *(_cells(row) if row else [*[""] * 5, "refused"]))
    return out


def _cells(row: Row) -> list[str]:
    step, time = row.estimate, row.time_to_loss
    return [
        bytes_text(step.sent_bytes),
        *map(seconds_text, (step.communication, step.local, step.step)),
        _factor_text(row.learned) if row.learned else "",
        "" if time is None else f"{time:.3g}",
    ]


def _below(plan: Plan) -> list[str]:
    """Reasons, and what evidence does not know."""
    reasons = dict(plan.refused)
    near = " and ".join(task.name for task in evidence.tasks_near(plan.parameters, plan.data))
    for name, row in plan.rows.items():
        if not row.learned and plan.cluster.workers > 1:
            reasons[name] = (
                f"not measured with {plan.data} data on {near}, the nearest in size, so not ranked"
            )
    return [
        f"{'; '.join(name for name in reasons if reasons[name] == reason)}: {reason}"
        for reason in dict.fromkeys(reasons.values())
    ]


def _factor_text(found: Learned) -> str:
    if found.factor is None:
        return "not reached"
    return f"{found.factor:.2f}" + (f" ± {found.std:.2f}" if found.std else "")


def legend() -> str:
    """How each scheme is written in a program, a line each.

    Example:
      >>> print(legend().splitlines()[0])
      1-bit vote            lion_cub(...)
    """
    return "\n".join(f"{one.name:<20}  {one.code}" for one in SCHEMES)


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain numbers: bits per second, bytes and seconds; a rate without limit is infinite.

    Args:
      plan: what `plan` returned.

    Returns:
      A dict. ``"worthwhile"`` is the bandwidth below which a method is worth it, 0 where none is. Each
      scheme has an ``"estimate"``, ``"time_to_loss"`` over float32 Lion's, and ``"learned"``, whose
      ``"factor"`` is None for what does not get there; both are None for what was not measured.

    Example:
      >>> from lioncub_jax.planner import Link
      >>> as_json(plan(10**6, Cluster(8, Link(1e9, 50e-6)), 0.1))["latency"]
      5e-05
    """
    return {
        "workers": plan.cluster.workers,
        "devices_per_worker": plan.cluster.group_size,
        "bandwidth": plan.cluster.link.bandwidth,
        "latency": plan.cluster.link.latency,
        "compute": plan.compute,
        "data": plan.data,
        "schemes": [
            {**row._asdict(), "scheme": name, "code": row.scheme.code}
            for name, row in plan.rows.items()
        ],
        "refused": plan.refused,
        "worthwhile": plan.worthwhile(),
        "advice": advice(plan),
    }
