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
from lioncub_jax.tools.plan import verdict

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


# --- Time to the loss against the network

NETWORKS = np.geomspace(0.05, 100, 60)
TOKENS, WORKERS = 256, 8  # where runs are longest
APART = 1.25  # labels, at least, as a ratio of times
LINES = {
    "the fastest all-reduce": "0.45", "the best method of others": "C1",
    "owner_adamw": "C0", "owner_muon": "C3", "lion_cub": "C2",
}  # fmt: skip
ALL_REDUCE, OTHERS, *_ = LINES
NAMES = {"owner-adamw": "owner_adamw", "owner-muon": "owner_muon", "vote": "lion_cub"}
X = {0.1: "1/10\nas long", 1: "as long", 10: "10 times\nas long", 100: "100 times\nas long"}
Y = 1, 2, 5, 10, 20, 50


def by_network() -> dict[str, Any]:
    """Times over that of the better optimizer in float32 without a network, and where a mean is as good."""
    at = [cluster_at(x, WORKERS) for x in NETWORKS]
    plans = [planner.plan(SIZE, cluster, 1.0, tokens=TOKENS) for cluster in at]
    means = [plan.answer()[0] in (verdict.HIDES, verdict.USE_MEAN) for plan in plans]
    return {"lines": lines(plans), "mean until": NETWORKS[means.index(False)]}


def lines(plans: list[planner.Plan]) -> dict[str, list[float]]:
    """Times of the best all-reduce, of whichever other method is best, and of ours that were measured."""
    free = min(plans[0].rows[name].ratio for name in ("lion", "adamw"))
    drawn: dict[str, list[float]] = {title: [] for title in LINES}
    for plan in plans:
        # Over links that reach their rate, and nothing overlaps.
        times = {
            name: row.ratio * float(row.step(plan.compute))
            for name, row in plan.rows.items()
            if row.ratio < math.inf
        }
        kinds = {name: plan.rows[name].scheme.kind for name in times}
        best = {title: times[name] for name, title in NAMES.items() if name in times}
        for title, kind in ((ALL_REDUCE, "mean"), (OTHERS, "other")):
            best[title] = min(time for name, time in times.items() if kinds[name] == kind)
        for title, time in best.items():
            drawn[title].append(time / free)
    return {title: line for title, line in drawn.items() if line}


def draw(numbers: dict[str, Any]) -> Figure:
    """Lines with their names at the end; grey where a mean of gradients is as good."""
    figure = Figure(figsize=(7.6, 3.6))
    axis = figure.subplots()
    last = 0.0
    for name, times in sorted(numbers["lines"].items(), key=lambda one: one[1][-1]):
        axis.plot(NETWORKS, times, color=LINES[name])
        last = max(times[-1], APART * last)
        axis.annotate(
            f" {name}", (NETWORKS[-1], last), color=LINES[name], va="center", annotation_clip=False
        )
    until = numbers["mean until"]
    axis.axvspan(NETWORKS[0], until, color="0.92", lw=0)
    axis.text((NETWORKS[0] * until) ** 0.5, 20, "Here the network is\nfast enough:\ndo not use this.",
              color="0.35", ha="center", va="center")  # fmt: skip
    axis.set(xscale="log", yscale="log", xlim=(NETWORKS[0], NETWORKS[-1]), ylim=(0.6, 60))
    axis.set_xticks([*X], [*X.values()])
    axis.set_yticks(Y, [f"{y} time{'s' * (y > 1)}" for y in Y])
    axis.minorticks_off()
    axis.set_title(
        "Training time to the same loss (1 time: AdamW, and a network that costs nothing)",
        loc="left",
    )
    axis.set_xlabel(
        "On your network an all-reduce of float32 gradients takes ... as computing a step."
    )
    return figure


if __name__ == "__main__":
    main()
