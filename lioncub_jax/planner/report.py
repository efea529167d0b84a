"""What the planner prints: every method side by side, advice, a table and a figure.

The goal is the loss, and the methods are ranked by the time until it is reached: a step's time and how many
steps more than float32 Lion a method was seen to take (`evidence`). Or the goal is the step alone.

``rich`` and ``matplotlib`` are imported by the functions that need them.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lioncub_jax.planner import evidence
from lioncub_jax.planner.evidence import Learned
from lioncub_jax.planner.model import (
    ADVISED,
    BFLOAT16,
    FLOAT32,
    OTHERS,
    PEERS,
    SCHEMES,
    SILENT,
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

GOALS = ("loss", "step")
WORTHWHILE_SPEEDUP = 1.05  # less is not enough to change how a model is trained
# Of the methods whose steps take at most this many times the fastest, the one whose loss is closest
# to Lion's is advised.
CLOSE_ENOUGH = 1.10
LARGER = 10  # times the parameters of a model measured, or of this one: beyond it is another matter
DENSE = (FLOAT32.name, BFLOAT16.name, "float32 AdamW", "bfloat16 AdamW")  # means of gradients
DRAWN = (
    "float32 Lion", "bfloat16 Lion", "int8 counts", "gathered", "owner, 3 bits", "1-bit vote",
    "no communication",
)  # fmt: skip


class Plan(NamedTuple):
    """Every method on one cluster.

    Attributes:
      cluster: workers and links.
      compute: seconds, as given.
      estimates: by the name of the scheme, those that work.
      pays: the bandwidths at which each of them is faster than float32 Lion.
      worthwhile: those at which one that may be advised is ``WORTHWHILE_SPEEDUP`` times as fast as means
        of gradients: to the loss, or in the step, by the goal.
      refused: why the others do not work, by name.
      goal: "loss" or "step".
      data: what workers see, "alike" or "different".
      learned: with the goal "loss", how each of them learns, by name; those that were measured.
      parameters: of the model.
    """

    cluster: Cluster
    compute: float
    estimates: dict[str, Estimate]
    pays: dict[str, Pays]
    worthwhile: Pays
    refused: dict[str, str]
    goal: str
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
    *,
    goal: str = GOALS[0],
    data: str = evidence.DATA[0],
) -> Plan:
    """Models a step by every scheme, and the time to the loss.

    Args:
      params: a tree of arrays or ``jax.ShapeDtypeStruct``, or how many parameters there are.
      cluster: workers and links.
      compute: seconds of a device's own forward and backward pass and update.
      host: what a worker spends besides.
      goal: "loss", which ranks by the time to the loss where float32 Lion stands after 80 % of its run,
        ``OTHERS`` and ``PEERS`` among them; or "step", by the time of a step, of ``SCHEMES``.
      data: of the workers, "alike" or "different", such as other classes or texts; for the goal "loss".

    Returns:
      A ``Plan``; a scheme that does not work there is in ``refused``.

    Raises:
      ValueError: for a compute time that is not above zero, or an unknown goal or data.

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
    if goal not in GOALS:
        raise ValueError(f"goal={goal!r}: give one of {', '.join(GOALS)}")
    evidence.check_data(data)
    estimates, refused = {}, {}
    for scheme in _schemes(goal):
        try:
            estimates[scheme.name] = step_time(scheme, params, cluster, compute, host)
        except ValueError as reason:
            refused[scheme.name] = str(reason)
    if FLOAT32.name in refused:  # not the scheme's fault: the parameters or the cluster are wrong
        raise ValueError(refused[FLOAT32.name])
    ranges = {name: pays(scheme_named(name), params, cluster, host) for name in estimates}
    size = parameters_in(params)
    learned = _learned(estimates, cluster.workers, size, data) if goal == "loss" else {}
    factors = {name: one.factor for name, one in learned.items() if one.factor is not None}
    if goal == "step":
        factors = dict.fromkeys((n for n in (*ADVISED, *DENSE[:2]) if n in estimates), 1.0)
    worth = [
        _worthwhile(name, factors, params, cluster, compute, host)
        for name in factors
        if name not in DENSE
    ]
    some = [one for one in worth if one.above < one.below]
    widest = max(some, key=lambda one: (-one.above, one.below), default=Pays(0.0, 0.0))
    return Plan(
        cluster, compute, estimates, ranges, widest, refused, goal, data, learned, size,
    )  # fmt: skip


def _schemes(goal: str) -> tuple[Scheme, ...]:
    return (*SCHEMES, *OTHERS, *PEERS) if goal == "loss" else SCHEMES


def _learned(names: Iterable[str], workers: int, parameters: int, data: str) -> dict[str, Learned]:
    if workers == 1:  # which has no method but its own optimizer
        return {}
    found = {
        name: evidence.learned(method, workers, parameters, data)
        for name in names
        if (method := scheme_named(name).learns)
    }
    return {name: one for name, one in found.items() if one is not None}


def _worthwhile(
    name: str,
    factors: Mapping[str, float],
    params: Any,
    cluster: Cluster,
    compute: float,
    host: Host | None,
) -> Pays:
    """Where a scheme is worth it against every mean of gradients, for so many times the steps each."""
    found = [
        pays(
            scheme_named(name), params, cluster, host, than=scheme_named(than), compute=compute,
            speedup=WORTHWHILE_SPEEDUP * factors[name] / factors[than],
        )
        for than in DENSE
        if than in factors
    ]  # fmt: skip
    above, below = max(one.above for one in found), min(one.below for one in found)
    return Pays(above, below) if above < below else Pays(0.0, 0.0)


def advice(plan: Plan) -> str:
    """Which method to use there and why, or that none is worth it.

    Args:
      plan: what `plan` returned.

    Returns:
      For the goal "loss" the method that is first to the loss, whoever's it is, what that was measured on
      and where evidence ends; it begins with "Do not use this" where nothing gets there
      ``WORTHWHILE_SPEEDUP`` times as soon as by means of gradients. For the goal "step" one sentence: the
      method, of those whose steps take at most ``CLOSE_ENOUGH`` times the fastest vote's, that
      comes closest to Lion's own loss; or "Do not use this" where no vote makes a step
      ``WORTHWHILE_SPEEDUP`` times as fast as the better of float32 and bfloat16 gradients.
    """
    if plan.cluster.workers == 1:
        return "Do not use this: one worker has no others to exchange votes with; use optax.lion."
    return _by_loss(plan) if plan.goal == "loss" else _by_step(plan)


def _by_loss(plan: Plan) -> str:
    times = plan.times()
    first, dense = next(iter(times)), next(name for name in times if name in DENSE)
    used = first if times[dense] >= WORTHWHILE_SPEEDUP * times[first] else dense
    rate, code = rate_text(plan.cluster.link.bandwidth), scheme_named(used).code
    worth = f"sending less is worth it {pays_text(plan.worthwhile)}"
    if used == dense:
        found = [
            f"Do not use this: at {rate} nothing is to the loss {WORTHWHILE_SPEEDUP} times as soon as "
            f"{used}, {code}, {_in_its_time(plan, used)}; {worth}."
        ]
    else:
        lion, ours = plan.estimates[FLOAT32.name], plan.estimates[used]
        # The least that float32 Lion's step may take, against what it may take to be as soon there.
        least = max(plan.compute, lion.communication) + lion.waiting
        equal = times[used] * lion.step
        hidden = least < WORTHWHILE_SPEEDUP * equal
        nothing = "; where the float32 all-reduce hides behind the backward pass nothing is gained"
        found = [
            f"At {rate} use {code} ({used}): {_in_its_time(plan, used)}, by steps of "
            f"{seconds_text(ours.step)} instead of {seconds_text(lion.step)}, "
            f"{_factor_text(plan.learned[used])} times as many{nothing if hidden else ''}; {worth}."
        ]
    return " ".join([*found, *_beside(plan, used), _measured_on(plan, used), *_ends(plan, used)])


def _in_its_time(plan: Plan, name: str) -> str:
    return f"to float32 Lion's loss in {plan.times()[name]:.3g} of its time"


def _beside(plan: Plan, used: str) -> list[str]:
    """Others that are as soon there, and the first of this library's own where it is not the one."""
    times, found = plan.times(), []
    close = [n for n in times if n != used and times[n] <= WORTHWHILE_SPEEDUP * times[used]]
    if close:
        found.append(f"Within 5 % of that: {'; '.join(close)}.")
    own = next(n for n in times if n not in {one.name for one in PEERS})
    if own != used and own not in close and times[own] > times[used]:
        found.append(
            f"That is none of this library's own methods, of which {own} is the first, in "
            f"{times[own] / times[used]:.2f} times that time."
        )
    return found


def _measured_on(plan: Plan, used: str) -> str:
    one = plan.learned[used]
    about = {task.name: task for task in evidence.tasks()}
    of = " and ".join(
        f"{name} ({about[name].dataset}, {about[name].parameters:,} parameters, {workers} workers)"
        for name, workers in one.workers.items()
    )
    if scheme_named(used).learns == FLOAT32.learns:  # by which the others are measured
        taken = (
            " A bfloat16 mean is taken to learn like a float32 one." if used != FLOAT32.name else ""
        )
        return f"Others were measured against it on {of}, data {plan.data}.{taken}"
    worse = f"; {one.task} is the worse of them and counts" if len(one.workers) > 1 else ""
    taken = "; bfloat16 is taken to learn like float32" if used in DENSE[1::2] else ""
    return f"Measured on {of}, data {plan.data}, {one.seeds} seeds{worse}{taken}."


def _ends(plan: Plan, used: str) -> list[str]:
    """Where this is no more what was measured; with what the step alone says."""
    sizes = [task.parameters for task in evidence.tasks_near(plan.parameters, plan.data)]
    beyond = []
    if not min(sizes) / LARGER <= plan.parameters <= LARGER * max(sizes):
        than = "smaller" if plan.parameters > max(sizes) else "larger"
        beyond.append(
            f"steps are those of {than} models, and this one has {plan.parameters:,} parameters"
        )
    if plan.learned[used].far_from(plan.cluster.workers):
        beyond.append(f"these are {plan.cluster.workers:,} workers")
    if not beyond:
        return []
    alone = _closest_of_fast(plan)
    by_step = scheme_named(alone).code if alone else "the advice is not to use this"
    return [f"There evidence ends: {'; '.join(beyond)}. By bits and step time alone: {by_step}."]


def _closest_of_fast(plan: Plan) -> str | None:
    """The vote to use by the time of a step alone; None where none is worth it."""
    dense, half = plan.estimates[FLOAT32.name], plan.estimates[BFLOAT16.name]
    steps = {name: plan.estimates[name].step for name in ADVISED if name in plan.estimates}
    enough = min(
        CLOSE_ENOUGH * min(steps.values()), min(dense.step, half.step) / WORTHWHILE_SPEEDUP
    )
    return next((name for name in steps if steps[name] <= enough), None)


def _by_step(plan: Plan) -> str:
    rate = rate_text(plan.cluster.link.bandwidth)
    dense, half = plan.estimates[FLOAT32.name], plan.estimates[BFLOAT16.name]
    steps = {name: plan.estimates[name].step for name in ADVISED if name in plan.estimates}
    fastest = min(steps, key=lambda name: steps[name])
    worth = f"voting is worth it {pays_text(plan.worthwhile)}"
    if chosen := _closest_of_fast(plan):
        step, code = steps[chosen], scheme_named(chosen).code
        least = max(plan.compute, dense.communication) + dense.waiting
        hidden = least < WORTHWHILE_SPEEDUP * step
        nothing = "; where the float32 all-reduce hides behind the backward pass nothing is gained"
        return (
            f"At {rate} use {code}: {seconds_text(step)} a step instead of "
            f"{seconds_text(dense.step)} ({dense.step / step:.1f} times as fast; bfloat16 Lion "
            f"{dense.step / half.step:.1f}){nothing if hidden else ''}; {worth}."
        )
    if plan.speedup(fastest) >= WORTHWHILE_SPEEDUP:
        return (
            f"Do not use this: at {rate} bfloat16 Lion takes {seconds_text(half.step)} a step and the "
            f"fastest vote {seconds_text(steps[fastest])}, which is not {WORTHWHILE_SPEEDUP} times as "
            f"fast; all-reduce bfloat16 instead of float32; {worth}."
        )
    return (
        f"Do not use this: at {rate} the float32 all-reduce takes "
        f"{dense.communication / dense.step:.1%} of a step, and the fastest vote makes the step "
        f"{plan.speedup(fastest):.2f} times as fast, for a risk to the loss; {worth}."
    )


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
      "packing" that of packing, counting and unpacking, and "step" the time of the whole step. For the goal
      "step", "speedup" is that of a step over float32 Lion. For the goal "loss", "x steps" is how many
      times float32 Lion's steps a method takes to its loss, with the standard deviation over seeds, and
      "time to loss" how long that is, float32 Lion's being 1. Bytes are in decimal units.
    """
    from rich import box  # not needed for numbers alone
    from rich.table import Table

    grouped, by_loss = plan.cluster.group_size > 1, plan.goal == "loss"
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
    of_goal = ("x steps", "time\nto loss") if by_loss else ("speedup",)
    for header in ("sent", "inside", "network", "packing", "step", *of_goal):
        if header != "inside" or grouped:
            out.add_column(header, justify="right", no_wrap=True)
    if not by_loss:
        out.add_column("beats float32 Lion", overflow="fold", max_width=13)
    for scheme in _schemes(plan.goal):
        if scheme in (OTHERS[0], PEERS[0]):
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
    unknown = _not_measured(plan)
    if unknown:
        near = " and ".join(task.name for task in evidence.tasks_near(plan.parameters, plan.data))
        with_them = "" if plan.data == evidence.DATA[0] else f" with {plan.data} data"
        found.append(
            f"not measured{with_them} on {near}, the nearest in size, so not ranked: {'; '.join(unknown)}"
        )
    return found


def _not_measured(plan: Plan) -> list[str]:
    if plan.goal == "step" or plan.cluster.workers == 1:
        return []
    return [n for n in plan.estimates if n not in plan.learned and scheme_named(n) != SILENT]


def _numbers(plan: Plan, scheme: Scheme) -> list[str]:
    found = plan.estimates[scheme.name]
    inside = [bytes_text(found.inside_bytes)] if plan.cluster.group_size > 1 else []
    times = [seconds_text(t) for t in (found.communication, found.local, found.step)]
    row = [bytes_text(found.sent_bytes), *inside, *times]
    if plan.goal == "loss":
        learned, time = plan.learned.get(scheme.name), plan.times().get(scheme.name)
        return [*row, _factor_text(learned), "" if time is None else f"{time:.3g}"]
    when = "" if scheme in (FLOAT32, SILENT) else _short(plan.pays[scheme.name])
    return [*row, f"{plan.speedup(scheme.name):.2f}", when]


def _factor_text(found: Learned | None) -> str:
    if found is None:
        return ""
    if found.factor is None:
        return "not reached"
    return f"{found.factor:.2f}" + (f" ± {found.std:.2f}" if found.std else "")


def _short(found: Pays) -> str:
    """`pays_text` for a narrow column."""
    return pays_text(found).replace("below", "<").replace("above", ">").removeprefix("from ")


def legend(goal: str = GOALS[0]) -> str:
    """How each scheme is written in a program, a line each.

    Args:
      goal: of the plan: "loss", which has peers too, or "step".

    Example:
      >>> print(legend().splitlines()[0])
      1-bit vote            lion_cub(...)
    """
    return "\n".join(f"{one.name:<20}  {one.code}" for one in _schemes(goal))


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain numbers: bits per second, bytes and seconds.

    Args:
      plan: what `plan` returned.

    Returns:
      A dict that ``json`` writes by the standard, which has no infinity: a number that is not finite is
      None, such as the bandwidth of a link that never makes anybody wait. ``"pays"`` and
      ``"worthwhile"`` are ``{"above": bits per second, "below": bits per second}``, None for a bound
      that is not there, and None as a whole for what never pays. For the goal "loss" each scheme has
      ``"time_to_loss"`` over float32 Lion's, and ``"steps"``: a ``Learned``, whose ``"factor"`` is None for
      what does not get there; both are None for what was not measured.

    Example:
      >>> from lioncub_jax.planner import Link
      >>> found = as_json(plan(10**6, Cluster(8, Link(math.inf, 50e-6)), 0.1))
      >>> found["bandwidth"] is None, found["latency"]
      (True, 5e-05)
    """
    found = {
        "workers": plan.cluster.workers,
        "devices_per_worker": plan.cluster.group_size,
        "bandwidth": plan.cluster.link.bandwidth,
        "latency": plan.cluster.link.latency,
        "late": dataclasses.asdict(plan.cluster.late),
        "compute": plan.compute,
        "goal": plan.goal,
        **({"data": plan.data} if plan.goal == "loss" else {}),
        "schemes": [
            {
                **found._asdict(),
                "code": scheme_named(name).code,
                "speedup": plan.speedup(name),
                "pays": _range(plan.pays[name]),
                **_steps(plan, name),
            }
            for name, found in plan.estimates.items()
        ],
        "refused": plan.refused,
        "worthwhile": _range(plan.worthwhile),
        "advice": advice(plan),
    }
    return {name: _finite(value) for name, value in found.items()}


def _steps(plan: Plan, name: str) -> dict[str, Any]:
    if plan.goal == "step":
        return {}
    found = plan.learned.get(name)
    told = found and {**found._asdict(), "workers": dict(found.workers)}
    return {"steps": told, "time_to_loss": plan.times().get(name)}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _range(found: Pays) -> dict[str, float | None] | None:
    if not found.above < found.below:
        return None
    return {"above": found.above or None, "below": found.below}


def plot(
    path: str | Path,
    params: Any,
    cluster: Cluster,
    compute: float,
    host: Host | None = None,
    *,
    rates: Sequence[float] | None = None,
    schemes: Sequence[str] = DRAWN,
    measured: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    title: str | None = None,
) -> None:
    """Draws step time against bandwidth, one curve for each scheme, and measured points on them.

    Args:
      path: a file whose suffix matplotlib knows, such as ``plan.png`` or ``plan.svg``.
      params: as `plan`.
      cluster: as `plan`; its bandwidth does not matter.
      compute: as `plan`.
      host: as `plan`.
      rates: bandwidths in bits per second; 10 Mbit/s to 1 Tbit/s if None.
      schemes: names of what to draw; those that do not work there are left out.
      measured: ``{scheme: [(bits per second, seconds of a step), ...]}``.
      title: of the figure.

    Raises:
      ValueError: for a folder that is not there, a suffix that matplotlib does not know, or an unknown
        scheme.
      ImportError: without matplotlib.
    """
    check_plot(path)
    figure = _figure()
    refused = plan(params, cluster, compute, host).refused
    measured = measured or {}
    axes = figure.add_subplot()
    rates = rates or [10 ** (7 + n / 12) for n in range(61)]
    names = [*schemes, *(name for name in measured if name not in schemes)]
    for scheme in (scheme_named(name) for name in names if name not in refused):
        steps = [step_time(scheme, params, cluster.at(r), compute, host).step for r in rates]
        reference = scheme in (FLOAT32, BFLOAT16, SILENT)
        (line,) = axes.plot(rates, steps, "--" if reference else "-", label=scheme.name)
        if points := measured.get(scheme.name):
            axes.plot(*zip(*points, strict=True), "o", color=line.get_color())
    axes.set(
        xscale="log", yscale="log", xlabel="bandwidth between workers", ylabel="time of a step"
    )
    axes.xaxis.set_major_formatter(lambda rate, _: rate_text(rate))
    axes.yaxis.set_major_formatter(lambda time, _: seconds_text(time))
    axes.set_title(title or f"{parameters_in(params):,} parameters, {cluster.workers} workers")
    axes.grid(alpha=0.3)
    axes.legend(title="points: measured" if measured else None)
    figure.savefig(path, dpi=150)


def check_plot(path: str | Path) -> None:
    """Whether `plot` can draw to a file of that name; asks before anything is computed.

    Args:
      path: of the file.

    Raises:
      ValueError: for a folder that is not there, or a suffix that matplotlib does not know.
      ImportError: without matplotlib.

    Example:
      >>> check_plot("plan.xyz")
      Traceback (most recent call last):
      ValueError: plan.xyz: give a name that ends in one of ...
    """
    path = Path(path)
    suffixes = _figure().canvas.get_supported_filetypes()
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}; make it, or name another")
    if path.suffix[1:].lower() not in suffixes:
        raise ValueError(f"{path}: give a name that ends in one of {', '.join(sorted(suffixes))}")


def _figure() -> Any:
    try:
        # Not at the top: the extra `plots` may be missing, and all else works without it.
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ImportError(
            "a figure needs matplotlib: pip install 'lioncub_jax[plots]'"
        ) from missing
    return Figure(figsize=(9, 5.5), layout="constrained")
