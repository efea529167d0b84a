"""The picture of docs/faults.md: a run of each kind, a tick for each step, around its fault."""

from pathlib import Path
from typing import Any

DPI, FONT = 130, 8
BEFORE = 12  # seconds that are shown of what was before the fault
# Okabe and Ito's, for colour-blind people too; heights differ as well.
FIRST, AGAIN, FAULT, DEATH = "#0072B2", "#E69F00", "#D55E00", "black"


def split(row: dict[str, Any]) -> tuple[list[float], list[float]]:
    """When steps were done for the first time, and when again; seconds since the fault.

    Where there was none the run's middle step is at 0.
    """
    zero = row["fault"][0] if row["fault"] else row["times"][len(row["times"]) // 2][0]
    found: tuple[list[float], list[float]] = [], []
    highest = 0
    for second, step in row["times"]:
        found[step <= highest].append(second - zero)
        highest = max(highest, step)
    return found


def draw(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Writes the picture; a line of it for each row, under what was done to it.

    Raises:
      ValueError: for no rows.
    """
    if not rows:
        raise ValueError("no row has the times of its steps: run python benchmarks/faults.py first")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.1 + 0.42 * len(rows)), layout="constrained")
    panel = figure.subplots()
    for line, row in enumerate(rows.values()):
        draw_run(panel, -line, row)
    panel.axvline(0, color="0.3", lw=0.8, ls=":", zorder=0)
    panel.set_yticks([-line for line in range(len(rows))], list(rows), fontsize=FONT)
    ends = [row["times"][-1][0] - (row["fault"] or row["times"][-1])[0] for row in rows.values()]
    panel.set_xlim(-BEFORE, max(ends) + 2)
    panel.set_ylim(0.6 - len(rows), 0.6)
    panel.set_xlabel("seconds since the fault", fontsize=FONT)
    panel.tick_params(axis="x", labelsize=FONT)
    panel.tick_params(axis="y", length=0)
    panel.spines[["top", "right", "left"]].set_visible(False)
    handles, texts = panel.get_legend_handles_labels()
    once = dict(zip(texts, handles, strict=True))
    figure.legend(
        once.values(),
        once.keys(),
        loc="outside upper center",
        ncols=4,
        frameon=False,
        fontsize=FONT,
    )
    figure.savefig(path, dpi=DPI)


def draw_run(panel: Any, y: int, row: dict[str, Any]) -> None:
    """One line: its steps, its fault, and who died of it."""
    first, again = split(row)
    panel.hlines(y, first[0], first[-1], color="0.85", lw=1, zorder=0)
    panel.vlines(first, y - 0.3, y + 0.3, color=FIRST, lw=0.7, label="a step")
    if again:
        panel.vlines(again, y - 0.15, y + 0.3, color=AGAIN, lw=0.7, label="a step done again")
    if row["fault"]:
        began, ended = row["fault"]
        panel.plot(
            [0, ended - began], [y, y], color=FAULT, lw=4, solid_capstyle="butt", marker="D", ms=3.5,
            label="the fault",
        )  # fmt: skip
        deaths = [second - began for second in row["died"]]
        if deaths:
            panel.plot(deaths, [y] * len(deaths), "x", color=DEATH, ms=5, label="all are ended")
