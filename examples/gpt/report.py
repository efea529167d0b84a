"""What a run shows and leaves behind: progress, metrics.jsonl, loss.png, sample.txt and a last table."""

import datetime
import importlib.metadata
import json
import math
import platform
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from matplotlib.figure import Figure
from rich.console import Console, Group
from rich.filesize import decimal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

import lioncub_jax as lc
from gpt.meshes import Layout
from gpt.training import Row, Run

METRICS = "metrics.jsonl"


def claim(folder: Path, overwrite: bool, resume: bool) -> None:
    """Makes the output folder, and sees to it that nobody's results are lost unasked."""
    kept = folder / METRICS
    if kept.is_file() and kept.stat().st_size and not overwrite and not resume:
        raise ValueError(f"--out {folder} holds results: give another folder, or --overwrite")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kept.open("a" if resume else "w").close()
    except OSError as error:
        raise ValueError(f"--out {folder}: {error.strerror}; give a folder to write in") from None


class MetricsFile:
    """One JSON object a line: the run, a row for each logged step, the results."""

    def __init__(self, folder: Path, writes: bool):
        self.path, self.writes = folder / METRICS, writes

    def begin(self, run: Run, about: dict[str, Any]) -> list[Row]:
        """Keeps the rows up to the step from which the run goes on, and says how it does."""
        done, rows = int(run.state.step), []
        if self.writes:
            before = [json.loads(line) for line in self.path.read_text().splitlines()]
            kept = [
                row for row in before if row["kind"] == "run" or row.get("step", done + 1) <= done
            ]
            self.path.write_text("".join(json.dumps(row) + "\n" for row in kept if done))
            rows = [Row(*[row[name] for name in Row._fields]) for row in kept if "step" in row]
        self.write("run", {**about, "steps_before": done})
        return rows if done else []

    def write(self, kind: str, values: dict[str, Any]) -> None:
        if not self.writes:
            return
        # JSON has no NaN, which is what the loss of a run that diverged is.
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }
        with self.path.open("a") as file:
            file.write(json.dumps({"kind": kind, **finite}) + "\n")


def environment(layout: Layout) -> dict[str, Any]:
    versions = {
        name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")
    }
    return {
        "versions": {"python": platform.python_version(), **versions},
        "device_kind": device_kind(layout.mesh),
        "workers": layout.workers,
        "mesh": dict(layout.mesh.shape),
        "processes": jax.process_count(),
    }


def device_kind(mesh: Mesh) -> str:
    return mesh.devices.flat[0].device_kind


def introduce(console: Console, run: Run) -> None:
    text, parameters = run.text, sum(x.size for x in jax.tree.leaves(run.state.params))
    console.print(
        f"{text.name}: {text.train.size:,} bytes to train on, {text.validation.size:,} held out; "
        f"{parameters:,} parameters; what the compiled step sends:",
        soft_wrap=True,
    )
    console.print(lc.audit.compiled.table(run.collectives))


class Screen:
    """A block of numbers that stays in place on a terminal; a line now and then elsewhere."""

    def __init__(self, console: Console, steps: int, run: Run):
        self.console, self.steps, self.run = console, steps, run
        self.validation: float | None = None
        self.live = None
        if console.is_terminal and not console.is_dumb_terminal:
            self.live = Live("compiled; training begins", console=console)

    def __enter__(self) -> "Screen":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.live:
            self.live.stop()

    def show(self, row: Row) -> None:
        self.validation = self.validation if row.validation is None else row.validation
        if self.live:
            self.live.update(self._block(row))
        elif row.validation is not None:
            line = f"{self._progress(row)}; {self._losses(row)}; {self._speed(row)}"
            self.console.print(line, soft_wrap=True)

    def _block(self, row: Row) -> Group:
        bar = Table.grid(padding=(0, 2))
        bar.add_row(ProgressBar(self.steps, row.step, width=40), self._progress(row))
        losses = f"{self._losses(row)} (bigram {self.run.counted.bigram:.3f})"
        sent = f"{decimal(round(self.run.sent.every_step))} sent a step"
        return Group(bar, Text(losses, style="bold"), Text(f"{sent}, {self._speed(row)}"))

    def _progress(self, row: Row) -> str:
        left = row.seconds / row.step * (self.steps - row.step)
        return f"step {row.step}/{self.steps}, {datetime.timedelta(seconds=round(left))} left"

    def _losses(self, row: Row) -> str:
        held_out = "" if self.validation is None else f", validation {self.validation:.3f}"
        return f"bits per byte: train {row.loss:.3f}{held_out}"

    def _speed(self, row: Row) -> str:
        speed = f"{row.tokens_per_second:,.0f} tokens/s"
        if row.tie_rate is None:
            return speed
        ties = f"{row.tie_rate:.1%} tied"
        return f"{speed}, {ties}, {row.abstained} abstained ({row.abstentions} so far)"


def results(run: Run, last: Row, wall_seconds: float) -> dict[str, Any]:
    """The last row of metrics.jsonl."""
    tokens = last.step * run.rows * run.model.context
    return {
        "validation_bits_per_byte": last.validation,
        "bigram_bits_per_byte": run.counted.bigram,
        "unigram_bits_per_byte": run.counted.unigram,
        "sent_bytes_per_step": run.sent.every_step,
        "sent_bytes_of_a_sync": run.sent.sync,
        "sent_bytes_inside_a_worker": run.sent.inside,
        "float32_bytes_per_step": run.sent.float32,
        "tokens": tokens,
        "tokens_per_second": tokens / last.seconds,
        "train_seconds": last.seconds,
        "wall_seconds": wall_seconds,
        "abstentions": last.abstentions,
    }


def conclude(console: Console, final: dict, sample: tuple[str, str], folder: Path) -> None:
    """Shows and keeps the text that the model wrote, and shows the results."""
    opening, continuation = sample
    (folder / "sample.txt").write_text(opening + continuation, encoding="utf-8")
    console.print("\nThe opening of the validation text, and how the model goes on:\n")
    console.print(Text.assemble((opening, "dim"), continuation), "\n", soft_wrap=True)
    console.print(summary(final))
    if not math.isfinite(final["validation_bits_per_byte"]):
        console.print("the loss is not finite: the run diverged; try a smaller --lr")
    console.print(f"{folder}: metrics.jsonl, loss.png, sample.txt", soft_wrap=True)


def summary(final: dict[str, Any]) -> Table:
    sent, dense = final["sent_bytes_per_step"], final["float32_bytes_per_step"]
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row(
        "validation, bits per byte", f"{final['validation_bits_per_byte']:.3f}", style="bold"
    )
    table.add_row("  bigram counts", f"{final['bigram_bits_per_byte']:.3f}")
    table.add_row("  unigram counts", f"{final['unigram_bits_per_byte']:.3f}")
    table.add_section()
    inside = final["sent_bytes_inside_a_worker"]
    each = "device" if inside else "worker"
    table.add_row(f"sent by each {each} and step, compiled", decimal(round(sent)), style="bold")
    if final["sent_bytes_of_a_sync"]:
        table.add_row(
            "  more when momenta are averaged", decimal(round(final["sent_bytes_of_a_sync"]))
        )
    if inside:
        table.add_row("  more to devices of its worker", decimal(round(inside)))
    table.add_row("  float32 all-reduce, computed", decimal(round(dense)))
    table.add_row("  ratio", f"{dense / sent:.1f}" if sent else "-")
    table.add_section()
    table.add_row("tokens", f"{final['tokens']:,}")
    table.add_row("tokens per second", f"{final['tokens_per_second']:,.0f}")
    table.add_row("seconds of training", f"{final['train_seconds']:.1f}")
    table.add_row("seconds in all", f"{final['wall_seconds']:.1f}")
    return table


def plot(rows: list[Row], final: dict[str, Any], title: str, path: Path) -> None:
    figure = Figure(figsize=(8, 4.8), dpi=160, layout="constrained")
    axes = figure.subplots()
    measured = [row for row in rows if row.validation is not None]
    axes.plot(
        [r.step for r in rows], [r.loss for r in rows], color="#8fb3d9", lw=1.2, label="training"
    )
    axes.plot(
        [r.step for r in measured], [r.validation for r in measured],
        color="#1f4e8c", lw=2, marker="o", ms=4, label="validation",
    )  # fmt: skip
    end = measured[-1]
    axes.annotate(
        f"{end.validation:.2f}", (end.step, end.validation), (6, 0), textcoords="offset points",
        color="#1f4e8c", weight="bold", va="center", annotation_clip=False,
    )  # fmt: skip
    for name in ("bigram", "unigram"):
        value = final[f"{name}_bits_per_byte"]
        axes.axhline(value, color="#999999", lw=1, ls=(0, (4, 3)), zorder=0)
        axes.annotate(
            f"{name} counts {value:.2f}", (1, value), (-2, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", color="#666666", size=8.5, ha="right",
        )  # fmt: skip
    _dress(axes, final, title)
    figure.savefig(path)


def _dress(axes: Any, final: dict[str, Any], title: str) -> None:
    sent, dense = (
        decimal(round(final[f"{which}_bytes_per_step"])) for which in ("sent", "float32")
    )
    each = "device sends other workers" if final["sent_bytes_inside_a_worker"] else "worker sends"
    sentence = f"each {each} {sent} a step; a float32 all-reduce would send {dense}"
    axes.set_title(title, loc="left", weight="bold", pad=24)
    axes.text(0, 1.03, sentence, transform=axes.transAxes, color="#555555", size=9)
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    ends = (final["unigram_bits_per_byte"], final["validation_bits_per_byte"])
    axes.set_ylim(top=max(filter(math.isfinite, ends)) + 0.7)
    axes.set_xlim(left=0)
    axes.grid(axis="y", color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
