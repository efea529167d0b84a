"""The figures of docs/convergence_tables.md, from the rows of the study."""

import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from study import analysis, labels
from study.analysis import METRICS, Mean, Rows
from study.labels import Label
from study.methods import METHODS
from study.plan import ABLATION, MAIN, SYNCS, rows_of

DPI = 130
FONT = 8
TITLES = {"images": "images", "text": "text"}


class Style(NamedTuple):
    """How a method looks in every figure."""

    color: str
    line: str = "-"
    marker: str = "o"


# Okabe and Ito's colours and a wine red, for colour-blind people too; lines and markers differ as well.
STYLES = {
    "lion": Style("black"),
    "adamw": Style("0.55", "--", "s"),
    "signum": Style("0.55", ":", "v"),
    "vote": Style("#0072B2", "-", "o"),
    "average": Style("#56B4E9", "--", "^"),
    "int8": Style("#E69F00", "-", "s"),
    "vote-4": Style("#009E73", "-.", "D"),
    "owner-1": Style("#CC79A7", "--", "v"),
    "owner-3": Style("#D55E00", "-", "P"),
    "owner-1-faded": Style("#D55E00", ":", "*"),
    "vote-coded-3": Style("#882255", "-.", "X"),
}
CURVES = ("lion", "adamw", "vote", "average", "int8", "vote-4", "owner-3", "signum")
BY_WORKERS = ("vote", "average", "int8", "vote-4", "owner-1", "owner-3")
OVER_TRAINING = ("vote", "vote-coded-3", "int8", "vote-4", "owner-1", "owner-3")
JOINED = (  # by how often there is a sync, or by bits
    ("vote", "vote-sync-100", "vote-sync-64", "vote-sync-10"),
    ("vote", "vote-coded-12", "vote-coded-6", "vote-coded-3", "vote-coded-2"),
    ("vote-4", "vote-4-coded-3"),
    ("owner-1", "owner-3", "owner-4"),
)
MANY = 32
SHIPPED = ("owner-1-faded",)  # of the candidates


def draw(rows: Rows, folder: Path) -> None:
    """Writes every figure as ``folder/convergence_NAME.png``; what has no rows yet is left out."""
    if not rows:
        raise ValueError(
            "there are no rows to draw: run python benchmarks/convergence.py first, or name their "
            "file by --save"
        )
    analysis.checked(rows)
    for name, make in FIGURES.items():
        make(rows).savefig(folder / f"convergence_{name}.png", dpi=DPI)


# --- What figures have in common


def shown(x: float, task: str) -> float:
    return 100 * x if task == "images" else x


def axis_of(task: str) -> str:
    return "accuracy, %" if task == "images" else "bits per byte"


def style_of(method: str) -> Style:
    return STYLES.get(method, Style("0.45", "-", "o"))


def canvas(height: float, rows: int, columns: int, **options: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for panel in axes.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=FONT)
        panel.grid(axis="y", color="0.92", lw=0.6)
        panel.set_axisbelow(True)
    return figure, axes


def empty(panel: Axes) -> None:
    middle = {"transform": panel.transAxes, "ha": "center"}
    panel.text(0.5, 0.5, "no rows yet", color="0.5", size=FONT, **middle)


def legend(figure: Figure, panels: Iterable[Axes], columns: int) -> None:
    """One for all panels, above them."""
    found: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    if found:
        figure.legend(
            found.values(), found.keys(), loc="outside upper center", ncols=columns,
            frameon=False, fontsize=FONT, handlelength=2.6,
        )  # fmt: skip


def label(method: str) -> str:
    return METHODS[method].label


def plain(panel: Axes, ticks: Iterable[int] | None = None) -> None:
    """Ticks of a logarithmic axis as 2, 10, 50 in place of powers."""
    panel.xaxis.set_major_locator(
        LogLocator(subs=(1, 2, 5)) if ticks is None else FixedLocator(ticks)
    )
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    panel.xaxis.set_minor_locator(NullLocator())


# --- The metric over steps, bytes and time


def curves(rows: Rows) -> Figure:
    """Training at 32 workers: a row for each thing that it costs, a column for each task."""
    seconds = [f"seconds at {bandwidth}" for bandwidth in analysis.BANDWIDTHS]
    costs = ["steps", "MB sent by each worker", *seconds]
    figure, axes = canvas(11.5, len(costs), 2, sharey="col")
    for column, task in enumerate(METRICS):
        at = rows_of(rows, part="main", task=task, workers=MANY)
        compute = analysis.compute_seconds(rows, task, MANY, at[0]["batch"]) if at else None
        for line, name in enumerate(costs):
            panel = axes[line, column]
            panel.set_xlabel(name, size=FONT)
            panel.set_ylabel(axis_of(task), size=FONT)
            if line:
                panel.set_xscale("log")
                plain(panel)
            if not at or compute is None:
                empty(panel)
        axes[0, column].set_title(f"{TITLES[task]}, {MANY} workers", size=FONT + 1)
        if at and compute is not None:
            for name in (name for name in CURVES if rows_of(at, method=name)):
                draw_curve(axes[:, column], rows_of(at, method=name), compute)
            axes[0, column].set_ylim(*focus(at))
            for panel in axes[1:, column]:
                panel.set_xlim(left=2 * panel.dataLim.x0)  # the second of the points
    legend(figure, axes.flat, 4)
    return figure


def draw_curve(panels: Any, rows: Rows, compute: float) -> None:
    """One method in a column of panels."""
    row, task = rows[0], rows[0]["task"]
    found = curve_of(rows)
    ends = [k + 1 for k, point in enumerate(found) if point.mean is not None]
    middle = [shown(p.mean, task) for p in found if p.mean is not None]
    around = [shown(p.std or 0.0, task) for p in found if p.mean is not None]
    totals = [row["steps"], row["sent_bytes"] / 1e6]
    totals += [analysis.run_seconds(row, compute, x) for x in analysis.BANDWIDTHS.values()]
    style = style_of(row["method"])
    for panel, total in zip(panels, totals, strict=True):
        x = [total * k / len(found) for k in ends]
        low, high = zip(*((m - s, m + s) for m, s in zip(middle, around, strict=True)), strict=True)
        panel.fill_between(x, low, high, color=style.color, alpha=0.12, lw=0)
        panel.plot(x, middle, style.line, color=style.color, lw=1.3, label=label(row["method"]))


def curve_of(rows: Rows) -> list[Mean]:
    """The mean of each point of the curves over seeds."""
    metric = METRICS[rows[0]["task"]][0]
    return [
        analysis.mean(values)
        for values in zip(*(row["curve"][metric] for row in rows), strict=True)
    ]


def focus(rows: Rows) -> tuple[float, float]:
    """From where Lion is after an eighth of the run to a little past the best."""
    task = rows[0]["task"]
    named = [curve_of(rows_of(rows, method=m)) for m in CURVES if rows_of(rows, method=m)]
    start = named[0][len(named[0]) // 8].mean
    points = [p.mean for curve in named for p in curve if p.mean is not None]
    best = max(points) if METRICS[task][1] else min(points)
    start = shown(best if start is None else start, task)
    margin = 0.06 * (shown(best, task) - start)
    return tuple(sorted((start, shown(best, task) + margin)))  # type: ignore[return-value]


# --- The difference to Lion over workers


def workers(rows: Rows) -> Figure:
    """Differences in pairs; bars are their standard deviations, the band is Lion's own."""
    figure, axes = canvas(3.6, 1, 2)
    for panel, task in zip(axes.flat, METRICS, strict=True):
        of_task = rows_of(rows, part="main", task=task)
        counts = sorted({row["workers"] for row in of_task})
        if not counts:
            empty(panel)
        panel.axhline(0, color="black", lw=1.2)
        band(panel, of_task, counts)
        for place, method in enumerate(BY_WORKERS):
            draw_differences(panel, of_task, counts, method, 0.022 * (place - 2.5))
        worse = "lower" if METRICS[task][1] else "higher"
        panel.set_title(f"{TITLES[task]} ({worse} is worse)", size=FONT + 1)
        panel.set_xscale("log")
        plain(panel, counts or [8])
        panel.set_xlabel("workers, sharing one batch", size=FONT)
        panel.set_ylabel(f"{axis_of(task)}, minus Lion's", size=FONT)
    legend(figure, axes.flat, 4)
    return figure


def band(panel: Axes, rows: Rows, counts: list[int]) -> None:
    """Lion's own standard deviation over seeds."""
    found = [
        (count, shown(std, rows[0]["task"]))
        for count in counts
        if (std := analysis.mean(
            analysis.by_seed(rows_of(rows, method="lion", workers=count)).values()
        ).std) is not None
    ]  # fmt: skip
    if found:
        x, std = zip(*found, strict=True)
        panel.fill_between(
            x, [-s for s in std], std, color="0.9", lw=0, label="Lion, ± 1 std over seeds", zorder=0
        )


def draw_differences(panel: Axes, rows: Rows, counts: list[int], method: str, shift: float) -> None:
    """One method; its points are moved a little aside so that bars do not hide each other."""
    found = []
    for count in counts:
        at = rows_of(rows, workers=count)
        gap = analysis.difference(rows_of(at, method=method), rows_of(at, method="lion"))
        if gap.mean is not None:
            found.append((count * 2**shift, gap.mean, gap.std or 0.0))
    if found:
        x, mean, std = zip(*found, strict=True)
        style, task = style_of(method), rows[0]["task"]
        panel.errorbar(
            x, [shown(m, task) for m in mean], [shown(s, task) for s in std],
            color=style.color, ls=style.line, marker=style.marker, ms=4, lw=1.2, elinewidth=0.8,
            label=label(method),
        )  # fmt: skip


# --- The metric over bits


def bits(rows: Rows) -> Figure:
    """Every method at 32 workers; those that nothing beats at their bits are joined.

    Ablations are small, and their names are there where they fit.
    """
    figure, axes = canvas(8.4, 2, 1)
    named = []
    for panel, task in zip(axes.flat, METRICS, strict=True):
        found = points_at_many(rows, task)
        panel.set_xscale("log")
        panel.set_title(f"{TITLES[task]}, {MANY} workers", size=FONT + 1)
        panel.set_xlabel(
            "bits that a worker sends for each parameter in a step, large model", size=FONT
        )
        panel.set_ylabel(axis_of(task), size=FONT)
        if not found:
            empty(panel)
            continue
        named.append((panel, draw_points(panel, task, found)))
    for panel, points in named:
        labels.write_apart(panel, points)
    return figure


def points_at_many(rows: Rows, task: str) -> dict[str, tuple[float, Mean]]:
    """Bits and metric of each method at 32 workers on data that do not differ."""
    found = {}
    parts = ("main", MAIN), ("ablation", (*ABLATION, *SYNCS)), ("candidates", SHIPPED)
    for part, methods in parts:
        at = rows_of(rows, part=part, task=task, workers=MANY, split="iid")
        for method in methods:
            if own := rows_of(at, method=method):
                reached = analysis.mean(analysis.by_seed(own).values())
                if reached.mean is not None:
                    found[method] = bits_if_large(own), reached
    return found


def bits_if_large(rows: Rows) -> float:
    """Bits of a large model by today's layout; those of rows are of small ones, and of two layouts."""
    return statistics.fmean(analysis.large_bits(row) for row in rows)


def draw_points(panel: Axes, task: str, found: dict[str, tuple[float, Mean]]) -> list[Label]:
    """Points with their spread, the front, and what is to be written beside them."""
    sign, values = analysis.goodness(task), [reached.mean for _, reached in found.values()]
    edge = cut(values, sign)
    written = []
    for method, (x, reached) in found.items():
        style, said, main = style_of(method), label(method), method in (*MAIN, *SHIPPED)
        far = sign * reached.mean < sign * edge
        y = shown(edge if far else reached.mean, task)
        if far:
            said += f": {shown(reached.mean, task):.3g}"
        else:
            around = shown(reached.std or 0.0, task)
            panel.errorbar(x, y, around, color=style.color, elinewidth=0.8, alpha=0.35)
        mark = {"color": style.color, "ms": 6 if main else 3.5, "zorder": 4 if main else 3}
        panel.plot(x, y, "x" if far else style.marker, **mark)
        written.append(Label(x, y, said, style.color, needed=main))
    front = on_front({m: (x, reached.mean) for m, (x, reached) in found.items()}, sign)
    panel.plot(
        [found[m][0] for m in front], [shown(found[m][1].mean, task) for m in front],
        color="0.8", lw=4, zorder=0, solid_capstyle="round",
    )  # fmt: skip
    roomy(panel, [x for x, _ in found.values()])
    return written


def roomy(panel: Axes, widths: list[float]) -> None:
    """Bits as powers of two, with room for names."""
    plain(panel, [1, 2, 4, 8, 16, 32, 64])
    panel.set_xlim(0.6 * min(widths), 1.8 * max(widths))
    panel.margins(y=0.08)


def cut(values: list[float], sign: int) -> float:
    """Worse points are drawn here: 2.5 times as far from the best as two thirds of all are at most."""
    ranked = sorted(values, key=lambda v: -sign * v)
    reach = ranked[0] - ranked[math.ceil(2 * len(ranked) / 3) - 1]
    return ranked[0] - 2.5 * reach if len(ranked) > 3 else ranked[-1]


def on_front(points: dict[str, tuple[float, float]], sign: int) -> list[str]:
    """The methods that none with as few bits beats."""
    front: list[str] = []
    for method in sorted(points, key=lambda m: (points[m][0], -sign * points[m][1])):
        if not front or sign * points[method][1] > sign * points[front[-1]][1]:
            front.append(method)
    return front


# --- Data that differ


def noniid(rows: Rows) -> Figure:
    """Images, each worker with classes of its own: syncs of votes, and what needs none."""
    figure, axes = canvas(4.8, 1, 1)
    panel, at = axes[0, 0], rows_of(rows, part="noniid", task="images", split="class")
    found = {}
    for method in METHODS:
        own = rows_of(at, method=method)
        reached = analysis.mean(analysis.by_seed(own).values())
        if reached.mean is not None:
            found[method] = analysis.bits_of(own), reached
    panel.set_xscale("log")
    panel.set_title("images, 8 workers, each with its own classes", size=FONT + 1)
    panel.set_xlabel("bits sent for each parameter in a step, syncs included", size=FONT)
    panel.set_ylabel(axis_of("images"), size=FONT)
    if not found:
        empty(panel)
        return figure
    level = None
    if "lion" in found:
        level = 100 * found["lion"][1].mean
        draw_level(panel, found.pop("lion")[1])
    if not found:
        return figure
    written = []
    for line in ([m for m in line if m in found] for line in JOINED):
        panel.plot(
            [found[m][0] for m in line], [100 * found[m][1].mean for m in line],
            color=color_of(line[-1]) if line else None, lw=1.2, zorder=1,
        )  # fmt: skip
    for method, (x, reached) in found.items():
        y, around, color = 100 * reached.mean, 100 * (reached.std or 0.0), color_of(method)
        panel.errorbar(x, y, around, color=color, elinewidth=0.8, alpha=0.35)
        panel.plot(x, y, style_of(method).marker, color=color, ms=5)
        written.append(Label(x, y, label(method), color))
    roomy(panel, [x for x, _ in found.values()])
    labels.write_apart(panel, written, level)
    return figure


def color_of(method: str) -> str:
    """Syncs have the colour of what they are of: full precision the vote's, codes their own."""
    if "coded" in method:
        return STYLES["vote-coded-3"].color
    return STYLES["vote"].color if method in SYNCS else style_of(method).color


def draw_level(panel: Axes, lion: Mean) -> None:
    """Lion as a line with the spread of its seeds, for it sends more than fits."""
    level, around = 100 * lion.mean, 100 * (lion.std or 0.0)
    panel.axhline(level, color="black", lw=1.2)
    panel.axhspan(level - around, level + around, color="0.92", lw=0, zorder=0)
    panel.annotate(
        "Lion in full precision, ± 1 std", (0.005, level), (0, 4), size=FONT - 1,
        xycoords=panel.get_yaxis_transform(), textcoords="offset points",
    )  # fmt: skip


# --- Signs kept


def signs(rows: Rows) -> Figure:
    """Over training, and by layer, at 32 workers."""
    figure, axes = canvas(6.6, 2, 2, height_ratios=[1, 1.15])
    for column, task in enumerate(METRICS):
        at = rows_of(rows, part="signs", task=task, workers=MANY, split="iid")
        above, below = axes[:, column]
        for panel in (above, below):
            if not at:
                empty(panel)
        for method in OVER_TRAINING:
            for row in rows_of(at, method=method):
                draw_kept(above, row)
        above.set_title(f"{TITLES[task]}, {MANY} workers", size=FONT + 1)
        above.set_xlabel("steps", size=FONT)
        above.set_ylabel("signs kept, %", size=FONT)
        for method, shift in (("vote", -0.12), ("owner-3", 0.12)):
            for row in rows_of(at, method=method):
                draw_layers(below, row, shift)
        below.set_xlabel("signs kept in the last half, % (a mark for each leaf)", size=FONT)
        below.grid(axis="x", color="0.92", lw=0.6)
    legend(figure, axes.flat, 3)
    return figure


def draw_kept(panel: Axes, row: dict[str, Any]) -> None:
    values, style = row["kept_overall"], style_of(row["method"])
    ends = [(k + 1) * row["steps"] / len(values) for k in range(len(values))]
    panel.plot(
        ends, [100 * x for x in values], style.line, color=style.color, marker=style.marker, ms=4,
        lw=1.2, label=label(row["method"]),
    )  # fmt: skip


def draw_layers(panel: Axes, row: dict[str, Any], shift: float) -> None:
    """Every leaf in the line of its kind of layer."""
    layers, style = analysis.by_layer(row["kept"]), style_of(row["method"])
    names = sorted(layers, reverse=True)
    for line, name in enumerate(names):
        panel.plot(
            [100 * x for x in layers[name]], [line + shift] * len(layers[name]), ls="",
            marker=style.marker, ms=4, color=style.color, alpha=0.8,
        )  # fmt: skip
    panel.set_yticks(range(len(names)), names)


FIGURES: dict[str, Callable[[Rows], Figure]] = {
    "curves": curves, "workers": workers, "bits": bits, "noniid": noniid, "signs": signs,
}  # fmt: skip
