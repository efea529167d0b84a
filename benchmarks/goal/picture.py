"""Time to the loss against the network, a panel for each noise: the first picture of the README."""

from pathlib import Path
from typing import Any

import numpy as np

from lioncub_jax import planner
from lioncub_jax.planner import evidence
from lioncub_jax.planner.choice import SIZE

STYLE = Path(__file__).parents[1] / "pictures.mplstyle"
NETWORKS = np.geomspace(0.05, 100, 60)
TICKS = 1, 2, 5, 10, 20, 50, 100
APART = 1.22  # labels, at least, as a ratio of times
OURS = {"owner-adamw": "owner_adamw", "vote": "lion_cub"}
COLORS = {"float32 AdamW": "0.45", "best peer": "C1", "owner_adamw": "C0", "lion_cub": "C2"}


def draw(path: Path) -> None:
    """Times over that of the better optimizer in float32 without a network."""
    import matplotlib.pyplot as plt

    cells = [cell for cell in evidence.packaged().cells if cell.data == "alike"]
    noises = sorted({cell.tokens for cell in cells})
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(
            1, len(noises), figsize=(4.2 * len(noises), 3.6), sharey=True, squeeze=False
        )
        for axis, tokens in zip(axes[0], noises, strict=True):
            workers = max(one.workers for one in cells if one.tokens == tokens and one.workers <= 8)
            at = [planner.cluster_at(x, workers) for x in NETWORKS]
            panel(axis, [planner.plan(SIZE, cluster, 1.0, tokens=tokens) for cluster in at])
            axis.set_title(f"{tokens:,} tokens a worker and step, {workers} workers")
        axes[0][0].set_ylabel("time to the loss (1: no network)")
        figure.supxlabel(
            "time of a float32 mean of gradients, over that of computing a step", size=9
        )
        figure.tight_layout()
        figure.savefig(path, bbox_inches="tight")
        plt.close(figure)


def panel(axis: Any, plans: list[planner.Plan]) -> None:
    """Lines with their names at the end; grey where a mean of gradients is as good."""
    labels = {}
    for name, times in lines(plans).items():
        axis.plot(NETWORKS, times, color=COLORS[name])
        labels[name] = times[-1], COLORS[name]
    last = 0.0
    for name, (height, color) in sorted(labels.items(), key=lambda one: one[1][0]):
        last = max(height, APART * last)
        axis.annotate(
            f" {name}", (NETWORKS[-1], last), color=color, va="center", annotation_clip=False
        )
    means = [plan.rows[plan.use()].scheme.kind == "mean" for plan in plans]
    if any(means):
        axis.axvspan(NETWORKS[0], NETWORKS[means.index(False)], color="0.92", lw=0)
        axis.text(NETWORKS[0] * 1.1, TICKS[-1], "do not\nuse this", color="0.4", va="top")
    axis.set(xscale="log", yscale="log", xlim=(NETWORKS[0], NETWORKS[-1]), ylim=(0.9, 130))
    axis.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    axis.set_yticks(TICKS, map(str, TICKS))
    axis.minorticks_off()


def lines(plans: list[planner.Plan]) -> dict[str, list[float]]:
    """Times of AdamW by a float32 mean, of whichever peer is best, and of two of ours."""
    free = min(plans[0].rows[name].steps() for name in ("lion", "adamw"))
    drawn = {"float32 AdamW": [plan.rows["adamw"].time() / free for plan in plans]}
    if plans[0].first("peer"):
        drawn["best peer"] = [plan.times()[plan.first("peer")] / free for plan in plans]
    for name, said in OURS.items():
        if name in plans[0].times():
            drawn[said] = [plan.rows[name].time() / free for plan in plans]
    return drawn
