"""Reports of a run: lines on the screen, metrics.jsonl, sample.txt and the results."""

import datetime
import json
import math
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from gpt.meshes import Layout
from gpt.training import Row, Run
from lioncub_jax.programs.compiled import table

METRICS = "metrics.jsonl"


def claim(folder: Path, overwrite: bool, resume: bool) -> None:
    """Makes the output folder; an error where it holds results that nobody said to replace."""
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

    def begin(self, run: Run, about: dict[str, Any]) -> float:
        """Keeps the rows up to the step from which the run goes on; returns the seconds that they took."""
        done, seconds = int(run.state.step), 0.0
        if self.writes:
            lines, kept = self.path.read_text().splitlines() if done else [], []
            for row in map(json.loads, lines):
                if row["kind"] == "run" or row.get("step", done + 1) <= done:
                    kept.append(json.dumps(row) + "\n")
                    seconds = row.get("seconds", seconds)
            self.path.write_text("".join(kept))
        self.write("run", {**about, "steps_before": done})
        return seconds

    def write(self, kind: str, values: dict[str, Any]) -> None:
        if not self.writes:
            return
        # JSON has no NaN, which is the loss of a run that diverged.
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }
        with self.path.open("a") as file:
            file.write(json.dumps({"kind": kind, **finite}) + "\n")


def environment(layout: Layout) -> dict[str, Any]:
    return {
        "jax": jax.__version__,
        "device_kind": layout.mesh.devices.flat[0].device_kind,
        "workers": layout.workers,
        "mesh": dict(layout.mesh.shape),
        "processes": jax.process_count(),
    }


def introduce(console: Console, run: Run) -> None:
    text, parameters = run.text, sum(x.size for x in jax.tree.leaves(run.state.params))
    console.print(
        f"{text.name}: {text.train.size:,} bytes to train on, {text.validation.size:,} held out; "
        f"{parameters:,} parameters; what the compiled step sends:",
        soft_wrap=True,
    )
    console.print(table(run.collectives))


def show(console: Console, row: Row, steps: int) -> None:
    """A line for each row with a validation loss."""
    if row.validation is None:
        return
    left = datetime.timedelta(seconds=round(row.seconds / row.step * (steps - row.step)))
    line = (
        f"step {row.step}/{steps}, {left} left; bits per byte: train {row.loss:.3f}, validation "
        f"{row.validation:.3f}; {row.tokens_per_second:,.0f} tokens/s"
    )
    if row.tie_rate is not None:
        line += f", {row.tie_rate:.1%} tied, {row.abstained} abstained"
    console.print(line, soft_wrap=True)


def results(run: Run, last: Row, wall_seconds: float) -> dict[str, Any]:
    """The last row of metrics.jsonl."""
    tokens = last.step * run.rows * run.model.context
    return {
        "validation_bits_per_byte": last.validation,
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
    """Shows the results and the text that the model wrote, and keeps the text."""
    opening, continuation = sample
    (folder / "sample.txt").write_text(opening + continuation, encoding="utf-8")
    console.print(
        f"\nThe opening of the validation text: {opening!r}\nand how the model goes on:\n"
    )
    console.print(continuation, "\n", soft_wrap=True)
    for name, value in final.items():
        if value is not None:
            console.print(f"{name.replace('_', ' ')}: {value:,.3f}".removesuffix(".000"))
    if not math.isfinite(final["validation_bits_per_byte"]):
        console.print("the loss is not finite: the run diverged; try a smaller --lr")
    console.print(f"{folder}: metrics.jsonl, sample.txt", soft_wrap=True)
