"""Time to the loss against the network, a panel for each noise: the first picture of the README."""

from pathlib import Path
from typing import Any

import numpy as np

from lioncub_jax import planner
from lioncub_jax.planner import evidence
from lioncub_jax.planner.choice import SIZE

NETWORKS = np.geomspace(0.03, 100, 60)
# Of each kind the best is drawn.
LINES = {"mean": "0.45", "peer": "tab:orange", "ours": "tab:blue"}


def draw(path: Path) -> None:
    """Times over that of the better optimizer in float32 without a network."""
    import matplotlib.pyplot as plt

    cells = [cell for cell in evidence.packaged().cells if cell.data == "alike"]
    noises = sorted({cell.tokens for cell in cells})
    figure, axes = plt.subplots(
        1, len(noises), figsize=(4.3 * len(noises), 4), sharey=True, squeeze=False
    )
    for axis, tokens in zip(axes[0], noises, strict=True):
        workers = max(cell.workers for cell in cells if cell.tokens == tokens and cell.workers <= 8)
        plans = [
            planner.plan(SIZE, planner.cluster_at(x, workers), 1.0, tokens=tokens) for x in NETWORKS
        ]
        panel(axis, plans)
        axis.set_title(f"{tokens:,} tokens a worker and step, {workers} workers", fontsize=10)
    axes[0][0].set_ylabel("time to the loss (1: no network)")
    figure.supxlabel("time of a float32 mean of gradients, over that of computing", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def panel(axis: Any, plans: list[planner.Plan]) -> None:
    free = min(plans[0].rows[name].steps() for name in ("lion", "adamw"))
    for kind, color in LINES.items():
        firsts = [plan.first(kind) for plan in plans]
        if not all(firsts):
            continue
        # One method for a line: the one that is first where the network is slowest.
        name = "adamw" if kind == "mean" else firsts[-1]
        times = [plan.rows[name].time() / free for plan in plans]
        axis.plot(NETWORKS, times, color=color, lw=2)
        said = "adamw, float32 mean" if kind == "mean" else name
        axis.annotate(
            said, (NETWORKS[-1], times[-1]), xytext=(-4, 4), textcoords="offset points",
            ha="right", color=color, fontsize=9,
        )  # fmt: skip
    # Where nothing is worth it.
    no = [
        x
        for x, plan in zip(NETWORKS, plans, strict=True)
        if plan.rows[plan.use()].scheme.kind == "mean"
    ]
    if no:
        axis.axvspan(NETWORKS[0], no[-1], color="0.92")
        axis.text(NETWORKS[0] * 1.1, 100, "do not\nuse this", fontsize=9, color="0.4", va="top")
    axis.set(xscale="log", yscale="log", xlim=(NETWORKS[0], NETWORKS[-1]))
    axis.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    axis.set_yticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)
