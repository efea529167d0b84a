"""Going on from a checkpoint with as many workers, half of them, and twice as many.

    python benchmarks/resume.py

A small byte-level GPT learns Python's standard library by the votes of 8 workers, is saved, and goes on
with 8, 4 and 16 workers on the same global batches, by both rules for the workers' momentum. The jump
is the mean loss of the first 20 steps after the restore less that of the unbroken run at the same
steps, in standard deviations of the unbroken run's loss from step to step, around its trend.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import report
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from flax import nnx
from gpt import corpus
from gpt.model import GPT, next_byte_loss

import lioncub_jax as lc
from lioncub_jax.checkpoint import Checkpoints

AXIS, BATCH, CONTEXT = "data", 32, 32
FIGURE = Path(__file__).parents[1] / "docs" / "resume.png"
CASES = [(8, "mean"), (4, "mean"), (4, "keep"), (16, "mean"), (16, "keep")]


class Trainer(NamedTuple):
    """One number of workers: their mesh, first state and step."""

    mesh: Any
    state: lc.TrainState
    step: Any
    text: np.ndarray

    @classmethod
    def of(cls, workers: int, text: np.ndarray) -> "Trainer":
        devices = jax.devices()[:workers]
        mesh = jax.make_mesh((workers,), (AXIS,), devices=devices, axis_types=(AxisType.Auto,))
        model = GPT(layers=1, width=64, heads=2, context=CONTEXT, rngs=nnx.Rngs(0))
        tx = lc.lion_cub(1e-3, axis_name=AXIS)
        loss, params, model_state = lc.from_nnx(model, next_byte_loss)
        state = lc.init_state(tx, params, mesh, axis_name=AXIS, model_state=model_state)
        return cls(mesh, state, lc.make_train_step(loss, tx, mesh, axis_name=AXIS), text)

    def train(
        self, state: lc.TrainState, first: int, last: int
    ) -> tuple[lc.TrainState, np.ndarray]:
        """Steps ``first`` to ``last - 1`` and their losses in bits per byte."""
        losses = []
        for i in range(first, last):
            windows = corpus.draw(self.text, BATCH, CONTEXT, (0, i))
            batch = jax.device_put(windows, NamedSharding(self.mesh, P(AXIS)))
            state, metrics = self.step(state, batch)
            losses.append(metrics["loss"])
        return state, np.array([float(x) for x in losses]) / np.log(2)


def measure(steps: int, after: int, folder: Path) -> tuple[np.ndarray, dict[tuple[int, str], Any]]:
    """Losses of the unbroken run, and of each case from the restore on."""
    text = corpus.standard_library().train
    trainers = {workers: Trainer.of(workers, text) for workers in (8, 4, 16)}
    with Checkpoints(folder, axis_name=AXIS) as checkpoints:
        state, before = trainers[8].train(trainers[8].state, 0, steps)
        checkpoints.save(state, {"next_batch": steps}, wait=True)
        _, rest = trainers[8].train(state, steps, steps + after)
        found = {}
        for workers, rule in CASES:
            trainer = trainers[workers]
            like = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trainer.state
            )
            restored = checkpoints.restore(like, workers=rule)
            first = restored.data["next_batch"]
            found[workers, rule] = trainer.train(restored.state, first, first + after)[1]
    return np.concatenate([before, rest]), found


def spread(losses: np.ndarray) -> float:
    """Standard deviation of the losses around a straight line."""
    steps = np.arange(len(losses))
    return float(np.std(losses - np.polyval(np.polyfit(steps, losses, 1), steps), ddof=2))


def smooth(losses: np.ndarray, width: int = 10) -> np.ndarray:
    """A mean over the last few steps, of fewer at the beginning."""
    sums = np.cumsum(np.insert(losses, 0, 0.0))
    ends = np.arange(1, len(losses) + 1)
    starts = np.maximum(ends - width, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def plot(unbroken: np.ndarray, found: dict[tuple[int, str], Any], steps: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (axes, below) = plt.subplots(
        2, 1, figsize=(8, 5.4), dpi=130, sharex=True, height_ratios=[2, 1]
    )
    shown = smooth(unbroken)
    first = steps // 2
    axes.plot(
        range(first, len(shown)), shown[first:], color="0.6", lw=4, label="8 workers, unbroken"
    )
    colors = {8: "black", 4: "tab:orange", 16: "tab:blue"}
    for (workers, rule), losses in found.items():
        # The window of the mean reaches back over the restore, into the run that was saved.
        joined = smooth(np.concatenate([unbroken[:steps], losses]))[steps:]
        style = {"color": colors[workers], "ls": "-" if rule == "mean" else "--"}
        said = f"{workers} workers" + (f', "{rule}"' if workers != 8 else "")
        x = range(steps, steps + len(losses))
        axes.plot(x, joined, lw=1.3, label=said, **style)
        below.plot(x, joined - shown[steps:], lw=1.3, **style)
    below.axhline(0, color="0.6", lw=1)
    for panel in (axes, below):
        panel.axvline(steps, color="0.3", lw=0.8, ls=":")
        panel.spines[["top", "right"]].set_visible(False)
    top = axes.get_ylim()[1]
    axes.annotate("saved, restored", (steps, top), (4, -12), textcoords="offset points", fontsize=9)
    axes.set(ylabel="training loss, bits per byte")
    below.set(xlabel="step (means of 10 steps)", ylabel="less that of\nthe unbroken run")
    axes.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--steps", type=int, default=600, help="before the checkpoint")
    parser.add_argument("--after", type=int, default=200, help="and after it")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 16)
    with tempfile.TemporaryDirectory() as folder:
        unbroken, found = measure(args.steps, args.after, Path(folder))
    rest = unbroken[args.steps :]
    sigma = spread(rest)
    table = Table("workers", "rule", "loss of 20 steps", "unbroken", "jump, sigmas", "equal losses")
    jumps = {}
    for (workers, rule), losses in found.items():
        mean, wanted = losses[:20].mean(), rest[:20].mean()
        jumps[f"{workers}, {rule}"] = float((mean - wanted) / sigma)
        row = [
            str(workers),
            rule,
            f"{mean:.4f}",
            f"{wanted:.4f}",
            f"{(mean - wanted) / sigma:+.3f}",
        ]
        table.add_row(*row, str(int(np.sum(losses == rest))))
    Console(width=110).print(table)
    plot(unbroken, found, args.steps, FIGURE)
    summary = {"benchmark": "resume", "steps": args.steps, "after": args.after, "sigma": sigma}
    report.finish(summary | {"jump_in_sigmas": jumps}, args.save)


if __name__ == "__main__":
    main()
