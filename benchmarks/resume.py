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
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from flax import nnx
from gpt import corpus, meshes
from gpt.model import GPT, next_byte_loss

import lioncub_jax as lc
from lioncub_jax.checkpoint import Checkpoints

BATCH, CONTEXT = 32, 32
CASES = [(8, "mean"), (4, "mean"), (4, "keep"), (16, "mean"), (16, "keep")]


class Trainer(NamedTuple):
    """One number of workers: their mesh, first state and step."""

    layout: meshes.Layout
    state: lc.StepState
    step: Any
    text: np.ndarray

    @classmethod
    def of(cls, workers: int, text: np.ndarray) -> "Trainer":
        layout = meshes.build({"data": workers})
        model = GPT(layers=1, width=64, heads=2, context=CONTEXT, rngs=nnx.Rngs(0))
        voters = layout.voters
        tx = lc.lion_cub(1e-3, workers=voters)
        loss, params, model_state = lc.from_nnx(model, next_byte_loss)
        state = lc.init_state(tx, params, voters, model_state=model_state)
        return cls(layout, state, lc.make_train_step(loss, tx, voters), text)

    def train(self, state: lc.StepState, first: int, last: int) -> tuple[lc.StepState, np.ndarray]:
        """Steps ``first`` to ``last - 1`` and their losses in bits per byte."""
        losses = []
        for i in range(first, last):
            windows = corpus.draw(self.text, BATCH, CONTEXT, (0, i))
            state, metrics = self.step(state, self.layout.place(windows))
            losses.append(metrics["loss"])
        return state, np.array([float(x) for x in losses]) / np.log(2)


def measure(steps: int, after: int, folder: Path) -> tuple[np.ndarray, dict[tuple[int, str], Any]]:
    """Losses of the unbroken run, and of each case from the restore on."""
    text = corpus.standard_library().train
    trainers = {workers: Trainer.of(workers, text) for workers in (8, 4, 16)}
    with Checkpoints(folder, workers="data") as checkpoints:
        state, before = trainers[8].train(trainers[8].state, 0, steps)
        checkpoints.save(state, {"next_batch": steps}, wait=True)
        _, rest = trainers[8].train(state, steps, steps + after)
        found = {}
        for workers, rule in CASES:
            trainer = trainers[workers]
            like = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trainer.state
            )
            restored = checkpoints.restore(like, on_resize=rule)
            first = restored.data["next_batch"]
            found[workers, rule] = trainer.train(restored.state, first, first + after)[1]
    return np.concatenate([before, rest]), found


def spread(losses: np.ndarray) -> float:
    """Standard deviation of the losses around a straight line."""
    steps = np.arange(len(losses))
    return float(np.std(losses - np.polyval(np.polyfit(steps, losses, 1), steps), ddof=2))


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
    head = ["workers", "rule", "loss of 20 steps", "unbroken", "jump, sigmas", "equal losses"]
    lines, jumps = [], {}
    for (workers, rule), losses in found.items():
        mean, wanted = losses[:20].mean(), rest[:20].mean()
        jump = jumps[f"{workers}, {rule}"] = float((mean - wanted) / sigma)
        equal = str(int(np.sum(losses == rest)))
        lines.append([str(workers), rule, f"{mean:.4f}", f"{wanted:.4f}", f"{jump:+.3f}", equal])
    Console(width=110).print(report.table("after a restore", head, lines))
    summary = {"benchmark": "resume", "steps": args.steps, "after": args.after, "sigma": sigma}
    report.finish(summary | {"jump_in_sigmas": jumps}, args.save)


if __name__ == "__main__":
    main()
