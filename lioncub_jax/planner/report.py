"""What the planner prints: every method side by side, and advice.

Methods are ranked by the time until a loss is reached: a step's time, and how many steps more than float32
Lion a method was seen to take (`evidence`). ``rich`` is imported by the function that needs it.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from lioncub_jax.planner import evidence
from lioncub_jax.planner.evidence import Learned
from lioncub_jax.planner.model import (
    FLOAT32,
    OURS,
    SCHEMES,
    Cluster,
    Estimate,
    Host,
    Pays,
    Scheme,
    parameters_in,
    pays,
    scheme_named,
    step_time,
)
from lioncub_jax.units import bytes_text, rate_text, seconds_text

if TYPE_CHECKING:
    from rich.table import Table

WORTHWHILE_SPEEDUP = 1.05  # less is not enough to change how a model is trained
LARGER = 10  # times the parameters of a model measured, or of this one: beyond it is another matter
MEANS = tuple(one.name for one in SCHEMES if one.mean)  # of gradients


class Plan(NamedTuple):
    """Every method on one cluster.

    Attributes:
      cluster: workers and links.
      compute: seconds, as given.
      estimates: by the name of the scheme, those that work.
      worthwhile: the bandwidths at which a method is ``WORTHWHILE_SPEEDUP`` times as soon at the loss as
        means of gradients.
      refused: why the others do not work, by name.
      data: what workers see, "alike" or "different".
      learned: how each of them learns, by name; those that were measured.
      parameters: of the model.
    """

    cluster: Cluster
    compute: float
    estimates: dict[str, Estimate]
    worthwhile: Pays
    refused: dict[str, str]
    data: str
    learned: dict[str, Learned]
    parameters: int

    def speedup(self, name: str) -> float:
        """Of a step, over float32 Lion."""
        return self.estimates[FLOAT32.name].step / self.estimates[name].step

    def times(self) -> dict[str, float]:
        """Time to the loss, over float32 Lion's, of all that were seen to get there; the shortest first."""
        found = {
            name: one.factor / self.speedup(name)
            for name, one in self.learned.items()
            if one.factor is not None
        }
        return dict(sorted(found.items(), key=lambda one: one[1]))


def plan(
    params: Any,
    cluster: Cluster,
    compute: float,
    host: Host | None = None,
    data: str = evidence.DATA[0],
) -> Plan:
    """Models a step by every scheme, and the time to where float32 Lion stands after 80 % of its run.

    Args:
      params: a tree of arrays or ``jax.ShapeDtypeStruct``, or how many parameters there are.
      cluster: workers and links.
      compute: seconds of a device's own forward and backward pass and update.
      host: what a worker spends besides.
      data: of the workers, "alike" or "different", such as other classes or texts.

    Returns:
      A ``Plan``; a scheme that does not work there is in ``refused``.

    Raises:
      ValueError: for a compute time that is not above zero, or unknown data.

    Example:
      >>> from lioncub_jax.planner import Link
      >>> slow = plan(124_000_000, Cluster(8, Link(1e9, 50e-6)), 0.144)
      >>> round(slow.speedup("1-bit vote"), 1)
      19.0
      >>> list(slow.learned["float32 AdamW"].workers)  # the task that is nearest in size
      ['gpt']
    """
    if not compute > 0:
        raise ValueError(f"compute={compute!r}: give seconds, above zero; speedups depend on it")
    evidence.check_data(data)
    size = parameters_in(params)
    estimates, refused, learned = {}, {}, {}
    for scheme in SCHEMES:
        name = scheme.name
        try:
            estimates[name] = step_time(scheme, params, cluster, compute, host)
        except ValueError as reason:
            refused[name] = str(reason)
            continue
        found = evidence.learned(scheme.learns, cluster.workers, size, data)
        if found and cluster.workers > 1:  # one has no method but its own optimizer
            learned[name] = found
    if FLOAT32.name in refused:  # not the scheme's fault: the parameters or the cluster are wrong
        raise ValueError(refused[FLOAT32.name])
    worthwhile = _worthwhile(estimates, learned)
    return Plan(cluster, compute, estimates, worthwhile, refused, data, learned, size)


def _worthwhile(estimates: Mapping[str, Estimate], learned: Mapping[str, Learned]) -> Pays:
    """Where the best of all is worth it against every mean, for so many times the steps each."""
    factors = {name: one.factor for name, one in learned.items() if one.factor is not None}
    widest = Pays(0.0, 0.0)
    for name in factors.keys() - set(MEANS):
        found = [
            pays(estimates[name], estimates[than], WORTHWHILE_SPEEDUP * factors[name] / factors[than])
            for than in MEANS
            if than in factors
        ]  # fmt: skip
        above, below = max(one.above for one in found), min(one.below for one in found)
        if above < below and (widest.below == 0 or (-above, below) > (-widest.above, widest.below)):
            widest = Pays(above, below)
    return widest


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
    times = plan.times()
    first, mean = next(iter(times)), next(name for name in times if name in MEANS)
    used = first if times[mean] >= WORTHWHILE_SPEEDUP * times[first] else mean
    close = [n for n in times if n != used and times[n] <= WORTHWHILE_SPEEDUP * times[used]]
    beside = [f"Within 5 % of that: {'; '.join(close)}."] if close else []
    return " ".join(
        [_use(plan, used, times), *beside, _measured_on(plan, used), *_ends(plan, used)]
    )


def _use(plan: Plan, used: str, times: Mapping[str, float]) -> str:
    rate, code = rate_text(plan.cluster.link.bandwidth), scheme_named(used).code
    reached = f"to float32 Lion's loss in {times[used]:.3g} of its time"
    worth = f"sending less is worth it {pays_text(plan.worthwhile)}"
    if used in MEANS:
        return (
            f"Do not use this: at {rate} nothing is to the loss {WORTHWHILE_SPEEDUP} times as soon as "
            f"{used}, {code}, {reached}; {worth}."
        )
    lion, ours = plan.estimates[FLOAT32.name], plan.estimates[used]
    # The least that float32 Lion's step may take, against what it may take to be as soon there.
    least = max(plan.compute, lion.communication) + lion.waiting
    hidden = least < WORTHWHILE_SPEEDUP * times[used] * lion.step
    nothing = "; where the float32 all-reduce hides behind the backward pass nothing is gained"
    return (
        f"At {rate} use {code} ({used}): {reached}, by steps of "
        f"{seconds_text(ours.step)} instead of {seconds_text(lion.step)}, "
        f"{_factor_text(plan.learned[used])} times as many{nothing if hidden else ''}; {worth}."
    )


def _measured_on(plan: Plan, used: str) -> str:
    one = plan.learned[used]
    about = {task.name: task for task in evidence.tasks()}
    of = " and ".join(
        f"{name} ({about[name].dataset}, {about[name].parameters:,} parameters, {workers} workers)"
        for name, workers in one.workers.items()
    )
    worse = f"; {one.task} is the worse of them and counts" if len(one.workers) > 1 else ""
    taken = "; bfloat16 is taken to learn like float32" if "bfloat16" in used else ""
    return f"Measured on {of}, data {plan.data}, {one.seeds} seeds{worse}{taken}."


def _ends(plan: Plan, used: str) -> list[str]:
    """Where this is no more what was measured."""
    sizes = [task.parameters for task in evidence.tasks_near(plan.parameters, plan.data)]
    beyond = []
    if not min(sizes) / LARGER <= plan.parameters <= LARGER * max(sizes):
        than = "smaller" if plan.parameters > max(sizes) else "larger"
        beyond.append(
            f"steps are those of {than} models, and this one has {plan.parameters:,} parameters"
        )
    if plan.learned[used].far_from(plan.cluster.workers):
        beyond.append(f"these are {plan.cluster.workers:,} workers")
    return [f"There evidence ends: {'; '.join(beyond)}."] if beyond else []


def pays_text(found: Pays) -> str:
    """A range of bandwidths for people.

    Example:
      >>> pays_text(Pays(0.0, 2.5e9)), pays_text(Pays(0.0, math.inf)), pays_text(Pays(0.0, 0.0))
      ('below 2.5 Gbit/s', 'at any rate', 'at no rate')
    """
    above, below = found
    if not above < below:
        return "at no rate"
    if above == 0:
        return "at any rate" if below == math.inf else f"below {rate_text(below)}"
    if below == math.inf:
        return f"above {rate_text(above)}"
    return f"from {rate_text(above)} to {rate_text(below)}"


def table(plan: Plan) -> "Table":
    """The plan for people, at most 80 columns wide: a row for each scheme, peers in a block of their own.

    The reasons why some schemes do not work there stand below the table, and which were not measured.

    Args:
      plan: what `plan` returned.

    Returns:
      A ``rich`` table. "sent" is what a worker, all of its devices together, sends in a step; "inside"
      is what each device sends to the others of its worker; "network" is the time in collectives,
      "packing" that of packing, counting and unpacking, and "step" the time of the whole step. "x steps" is
      how many times float32 Lion's steps a method takes to its loss, with the standard deviation over
      seeds, and "time to loss" how long that is, float32 Lion's being 1. Bytes are in decimal units.
    """
    from rich import box  # not needed for numbers alone
    from rich.table import Table

    grouped = plan.cluster.group_size > 1
    workers = "1 worker" if plan.cluster.workers == 1 else f"{plan.cluster.workers:,} workers"
    out = Table(
        title=f"{workers} at {rate_text(plan.cluster.link.bandwidth)}",
        title_justify="left",
        caption="\n".join(_below(plan)),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 0) if grouped else (0, 0, 0, 1),
        pad_edge=False,
    )
    out.add_column("scheme", no_wrap=True)
    for header in ("sent", "inside", "network", "packing", "step", "x steps", "time\nto loss"):
        if header != "inside" or grouped:
            out.add_column(header, justify="right", no_wrap=True)
    for scheme in SCHEMES:
        if scheme is SCHEMES[len(OURS)]:
            out.add_section()
        if scheme.name in plan.estimates:
            out.add_row(scheme.name, *_numbers(plan, scheme))
        else:
            out.add_row(scheme.name, *[""] * (len(out.columns) - 2), "refused")
    return out


def _below(plan: Plan) -> list[str]:
    """Reasons, and what evidence does not know."""
    whose: dict[str, list[str]] = {}
    for name, reason in plan.refused.items():
        whose.setdefault(reason, []).append(name)
    found = [f"{'; '.join(names)}: {reason}" for reason, names in whose.items()]
    unknown = [n for n in plan.estimates if n not in plan.learned and plan.cluster.workers > 1]
    if unknown:
        near = " and ".join(task.name for task in evidence.tasks_near(plan.parameters, plan.data))
        found.append(
            f"not measured with {plan.data} data on {near}, the nearest in size, so not ranked: "
            f"{'; '.join(unknown)}"
        )
    return found


def _numbers(plan: Plan, scheme: Scheme) -> list[str]:
    found, time = plan.estimates[scheme.name], plan.times().get(scheme.name)
    inside = [bytes_text(found.inside_bytes)] if plan.cluster.group_size > 1 else []
    times = [seconds_text(t) for t in (found.communication, found.local, found.step)]
    steps = _factor_text(plan.learned.get(scheme.name))
    return [
        bytes_text(found.sent_bytes),
        *inside,
        *times,
        steps,
        "" if time is None else f"{time:.3g}",
    ]


def _factor_text(found: Learned | None) -> str:
    if found is None:
        return ""
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
      A dict. ``"worthwhile"`` is the bandwidths ``{"above", "below"}`` between which a method is worth it,
      None where none is. Each scheme has ``"time_to_loss"`` over float32 Lion's, and ``"steps"``: a
      ``Learned``, whose ``"factor"`` is None for what does not get there; both are None for what was not
      measured.

    Example:
      >>> from lioncub_jax.planner import Link
      >>> as_json(plan(10**6, Cluster(8, Link(1e9, 50e-6)), 0.1))["latency"]
      5e-05
    """
    times = plan.times()
    return {
        "workers": plan.cluster.workers,
        "devices_per_worker": plan.cluster.group_size,
        "bandwidth": plan.cluster.link.bandwidth,
        "latency": plan.cluster.link.latency,
        "late": dataclasses.asdict(plan.cluster.late),
        "compute": plan.compute,
        "data": plan.data,
        "schemes": [
            {
                **found._asdict(),
                "code": scheme_named(name).code,
                "speedup": plan.speedup(name),
                "steps": plan.learned.get(name),
                "time_to_loss": times.get(name),
            }
            for name, found in plan.estimates.items()
        ],
        "refused": plan.refused,
        "worthwhile": plan.worthwhile if plan.worthwhile.below else None,
        "advice": advice(plan),
    }
