"""What the planner prints: every method side by side, one sentence of advice, a table and a figure.

``rich`` and ``matplotlib`` are imported by the functions that need them.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lioncub_jax.planner.model import (
    ADVISED,
    BFLOAT16,
    FLOAT32,
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

WORTHWHILE_SPEEDUP = 1.05  # less is not enough to change how a model is trained
# Of the methods whose steps take at most this many times the fastest, the one whose loss is closest
# to Lion's is advised.
CLOSE_ENOUGH = 1.10
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
      worthwhile: those at which one that is advised is ``WORTHWHILE_SPEEDUP`` times as fast as both
        float32 and bfloat16 gradients.
      refused: why the others do not work, by name.
    """

    cluster: Cluster
    compute: float
    estimates: dict[str, Estimate]
    pays: dict[str, Pays]
    worthwhile: Pays
    refused: dict[str, str]

    def speedup(self, name: str) -> float:
        """Over float32 Lion."""
        return self.estimates[FLOAT32.name].step / self.estimates[name].step


def plan(params: Any, cluster: Cluster, compute: float, host: Host | None = None) -> Plan:
    """Models a step by every scheme.

    Args:
      params: a tree of arrays or ``jax.ShapeDtypeStruct``, or how many parameters there are.
      cluster: workers and links.
      compute: seconds of a device's own forward and backward pass and update.
      host: what a worker spends besides.

    Returns:
      A ``Plan``; a scheme that does not work there is in ``refused``.

    Raises:
      ValueError: for a compute time that is not above zero.

    Example:
      >>> from lioncub_jax.planner import Link
      >>> slow = plan(124_000_000, Cluster(8, Link(1e9, 50e-6)), 0.144)
      >>> round(slow.speedup("1-bit vote"), 1)
      19.0
    """
    if not compute > 0:
        raise ValueError(f"compute={compute!r}: give seconds, above zero; speedups depend on it")
    estimates, refused = {}, {}
    for scheme in SCHEMES:
        try:
            estimates[scheme.name] = step_time(scheme, params, cluster, compute, host)
        except ValueError as reason:
            refused[scheme.name] = str(reason)
    if FLOAT32.name in refused:  # not the scheme's fault: the parameters or the cluster are wrong
        raise ValueError(refused[FLOAT32.name])
    ranges = {name: pays(scheme_named(name), params, cluster, host) for name in estimates}
    worth = [
        _worthwhile(scheme_named(name), params, cluster, compute, host)
        for name in ADVISED
        if name in estimates
    ]
    widest = max(worth, key=lambda one: one.below)
    return Plan(cluster, compute, estimates, ranges, widest, refused)


def _worthwhile(
    scheme: Scheme, params: Any, cluster: Cluster, compute: float, host: Host | None
) -> Pays:
    both = [
        pays(scheme, params, cluster, host, than=than, speedup=WORTHWHILE_SPEEDUP, compute=compute)
        for than in (FLOAT32, BFLOAT16)
    ]
    above, below = max(one.above for one in both), min(one.below for one in both)
    return Pays(above, below) if above < below else Pays(0.0, 0.0)


def advice(plan: Plan) -> str:
    """One sentence: which method to use there, or that none is worth it.

    Args:
      plan: what `plan` returned.

    Returns:
      It begins with "Do not use this" where no vote makes a step ``WORTHWHILE_SPEEDUP`` times as fast as
      the better of float32 and bfloat16 gradients. Otherwise it names, of the methods whose steps
      take at most ``CLOSE_ENOUGH`` times the fastest, the one that comes closest to Lion's own loss.
    """
    rate = rate_text(plan.cluster.link.bandwidth)
    dense, half = plan.estimates[FLOAT32.name], plan.estimates[BFLOAT16.name]
    if plan.cluster.workers == 1:
        return "Do not use this: one worker has no others to exchange votes with; use optax.lion."
    steps = {name: plan.estimates[name].step for name in ADVISED if name in plan.estimates}
    fastest = min(steps, key=lambda name: steps[name])
    enough = min(CLOSE_ENOUGH * steps[fastest], min(dense.step, half.step) / WORTHWHILE_SPEEDUP)
    chosen = [name for name in steps if steps[name] <= enough]
    worth = f"voting is worth it {pays_text(plan.worthwhile)}"
    if chosen:
        step, code = steps[chosen[0]], scheme_named(chosen[0]).code
        hidden = max(plan.compute, dense.communication) < WORTHWHILE_SPEEDUP * step
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
    """The plan for people, at most 79 columns wide: a row for each scheme.

    The reasons why some schemes do not work there stand below the table.

    Args:
      plan: what `plan` returned.

    Returns:
      A ``rich`` table. "sent" is what a worker, all of its devices together, sends in a step; "inside"
      is what each device sends to the others of its worker; "network" is the time in collectives,
      "packing" that of packing, counting and unpacking, "step" the time of the whole step, and
      "speedup" is over float32 Lion. Bytes are in decimal units.
    """
    from rich import box  # not needed for numbers alone
    from rich.table import Table

    grouped = plan.cluster.group_size > 1
    workers = "1 worker" if plan.cluster.workers == 1 else f"{plan.cluster.workers:,} workers"
    out = Table(
        title=f"{workers} at {rate_text(plan.cluster.link.bandwidth)}",
        title_justify="left",
        caption="\n".join(f"{name}: {reason}" for name, reason in plan.refused.items()),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 0) if grouped else (0, 0, 0, 1),
        pad_edge=False,
    )
    out.add_column("scheme", no_wrap=True)
    for header in ("sent", "inside", "network", "packing", "step", "speedup"):
        if header != "inside" or grouped:
            out.add_column(header, justify="right", no_wrap=True)
    out.add_column("beats float32 Lion", overflow="fold", max_width=13)
    for scheme in SCHEMES:
        if scheme.name in plan.estimates:
            out.add_row(scheme.name, *_numbers(plan, scheme))
        else:
            out.add_row(scheme.name, *[""] * (len(out.columns) - 2), "refused")
    return out


def _numbers(plan: Plan, scheme: Scheme) -> list[str]:
    found = plan.estimates[scheme.name]
    inside = [bytes_text(found.inside_bytes)] if plan.cluster.group_size > 1 else []
    times = [seconds_text(t) for t in (found.communication, found.local, found.step)]
    speedup = f"{plan.speedup(scheme.name):.2f}"
    when = "" if scheme in (FLOAT32, SILENT) else _short(plan.pays[scheme.name])
    return [bytes_text(found.sent_bytes), *inside, *times, speedup, when]


def _short(found: Pays) -> str:
    """`pays_text` for a narrow column."""
    return pays_text(found).replace("below", "<").replace("above", ">").removeprefix("from ")


def legend() -> str:
    """How each scheme is written in a program, a line each.

    Example:
      >>> print(legend().splitlines()[0])
      1-bit vote         lion_cub(...)
    """
    return "\n".join(f"{one.name:<17}  {one.code}" for one in SCHEMES)


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain numbers: bits per second, bytes and seconds.

    Args:
      plan: what `plan` returned.

    Returns:
      A dict that ``json`` writes by the standard, which has no infinity: a number that is not finite is
      None, such as the bandwidth of a link that never makes anybody wait. ``"pays"`` and
      ``"worthwhile"`` are ``{"above": bits per second, "below": bits per second}``, None for a bound
      that is not there, and None as a whole for what never pays.

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
        "compute": plan.compute,
        "schemes": [
            {
                **found._asdict(),
                "code": scheme_named(name).code,
                "speedup": plan.speedup(name),
                "pays": _range(plan.pays[name]),
            }
            for name, found in plan.estimates.items()
        ],
        "refused": plan.refused,
        "worthwhile": _range(plan.worthwhile),
        "advice": advice(plan),
    }
    return {name: _finite(value) for name, value in found.items()}


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
