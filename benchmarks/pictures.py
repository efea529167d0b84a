"""Draws the picture of the pages that shows measurements, from the committed rows.

    python benchmarks/pictures.py

The file also holds the numbers that it shows, as JSON. So a test finds a picture that is older than its
rows.
"""

import json
import math
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from goal.answer import SIZE, cluster_at
from matplotlib.figure import Figure
from PIL import Image

from lioncub_jax.tools import plan as planner
from lioncub_jax.tools.plan import evidence, verdict

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
NAME = "time_to_loss.png"
STYLE = Path(__file__).parent / "pictures.mplstyle"
NUMBERS = "Description"  # the field of a PNG file that holds them


def main() -> None:
    save(FOLDER / NAME)


def save(path: Path) -> None:
    """Draws the picture, with its numbers to five digits, which are the same on all machines."""
    text = json.dumps(by_network())
    numbers = json.loads(text, parse_float=lambda text: float(f"{float(text):.5g}"))
    with matplotlib.style.context(STYLE):
        draw(numbers).savefig(path, metadata={NUMBERS: json.dumps(numbers)})


def numbers_in(path: Path) -> Any:
    """The numbers of a picture's file."""
    with Image.open(path) as image:
        return json.loads(image.info[NUMBERS])


# --- Time to the loss against the network, a panel for each noise

NETWORKS = np.geomspace(0.05, 100, 60)
MOST = 130  # times that of a network without cost
APART = 1.3  # labels, at least, as a ratio of times
LINES = {"float32 AdamW": "0.45", "best of others": "C1", "owner_adamw": "C0", "lion_cub": "C2"}


def by_network() -> dict[str, Any]:
    """Times over that of the better optimizer in float32 without a network."""
    cells = [cell for cell in evidence.packaged() if cell.data == "alike"]
    panels = {}
    for tokens in sorted({cell.tokens for cell in cells}):
        workers = max(
            one.num_workers for one in cells if one.tokens == tokens and one.num_workers <= 8
        )
        at = [cluster_at(x, workers) for x in NETWORKS]
        plans = [planner.plan(SIZE, cluster, 1.0, tokens=tokens) for cluster in at]
        means = [plan.answer()[0] in (verdict.HIDES, verdict.USE_MEAN) for plan in plans]
        title = f"{tokens:,} tokens a worker\nand step, {workers} workers"
        panels[title] = {"lines": lines(plans), "mean until": NETWORKS[means.index(False)]}
    return panels


def lines(plans: list[planner.Plan]) -> dict[str, list[float]]:
    """Times of AdamW by a float32 mean, of whichever other method is best, and of two of ours."""
    free = min(plans[0].rows[name].ratio for name in ("lion", "adamw"))
    drawn: dict[str, list[float]] = {title: [] for title in LINES}
    for plan in plans:
        # Over links that reach their rate, and nothing overlaps.
        times = {
            name: row.ratio * float(row.step(plan.compute))
            for name, row in plan.rows.items()
            if row.ratio < math.inf
        }
        others = [time for name, time in times.items() if plan.rows[name].scheme.kind == "other"]
        best = {"float32 AdamW": times["adamw"], "best of others": min(others, default=None)}
        best |= {"owner_adamw": times.get("owner-adamw"), "lion_cub": times.get("vote")}
        for title, time in best.items():
            drawn[title] += [time / free] if time else []
    return {title: line for title, line in drawn.items() if line}


def draw(panels: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(2.9 * len(panels), 3.4))
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (title, panel) in zip(axes, panels.items(), strict=True):
        axis.set_title(title)
        draw_lines(axis, panel["lines"], panel["mean until"])
    axes[0].set_ylabel("time to the loss (1: no network)")
    figure.supxlabel(
        "time of a float32 all-reduce of gradients, over that of computing a step", size=9
    )
    return figure


def draw_lines(axis: Any, lines: dict[str, list[float]], mean_until: float) -> None:
    """Lines with their names at the end; grey where a mean of gradients is as good."""
    last = 0.0
    for name, times in sorted(lines.items(), key=lambda one: one[1][-1]):
        axis.plot(NETWORKS, times, color=LINES[name])
        last = max(times[-1], APART * last)
        axis.annotate(
            f" {name}", (NETWORKS[-1], last), color=LINES[name], va="center", annotation_clip=False
        )
    if mean_until > NETWORKS[0]:
        axis.axvspan(NETWORKS[0], mean_until, color="0.92", lw=0)
        axis.text(0.07, 100, "do not use this", color="0.4", va="top", rotation="vertical")
    axis.set(xscale="log", yscale="log", xlim=(NETWORKS[0], NETWORKS[-1]), ylim=(0.9, MOST))
    axis.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    ticks = 1, 2, 5, 10, 20, 50, 100
    axis.set_yticks(ticks, [str(x) for x in ticks])
    axis.minorticks_off()


if __name__ == "__main__":
    main()
