"""The loss of each contender, step by step: the real training step, on forced CPU devices.

Validation text is looked at often enough to say at which step a loss was reached. All contenders see the
same windows at the same step of a worker, whoever takes steps alone.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from gpt import corpus
from gpt.model import GPT, next_byte_loss
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from study.runs import schedule

import lioncub_jax as lc
from goal import turns
from goal.contenders import AXIS, Contender, Recipe, contender_named
from goal.model import BATCH, CONTEXT, MODEL

POINTS = 16  # of a curve
WINDOWS = 64  # of validation text


class Run(NamedTuple):
    """What is run; rows are found by it.

    Attributes:
      part: "tuning" or "curve".
      contender: its name.
      rate: the highest learning rate.
      option: a rank, or steps taken alone; 0 for neither.
      workers: how many.
      steps: of each worker.
      seed: of the parameters and the data.
    """

    part: str
    contender: str
    rate: float
    option: int
    workers: int
    steps: int
    seed: int


def key_of(row: dict[str, Any]) -> Run | None:
    """The training run that a row is of; None for a row of another kind.

    Raises:
      ValueError: for a row of another benchmark, or of a contender that is no longer there.
    """
    contender_named(row["contender"])
    if row["part"] in ("tuning", "curve"):
        return Run(*(row[name] for name in Run._fields))
    if row["part"] not in ("time", "confirm"):
        raise ValueError(f"part {row['part']!r}")
    return None


def model_of(seed: int) -> GPT:
    """As every run begins."""
    return GPT(**MODEL, rngs=nnx.Rngs(seed))


def shapes() -> Any:
    """Of the parameters."""
    return nnx.state(nnx.eval_shape(lambda: model_of(0)), nnx.Param)


def mesh_of(devices: Sequence[Any]) -> Mesh:
    """A worker for each device."""
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


class Trainer:
    """A recipe on a mesh, one worker for each device.

    Attributes:
      local_steps: steps of a worker in one call.
      taken: steps of a worker so far.
    """

    def __init__(self, mesh: Mesh, recipe: Recipe, seed: int):
        model = model_of(seed)
        loss, params, model_state = lc.from_nnx(model, next_byte_loss)
        tx, local, workers = recipe.tx, recipe.local, lc.Workers(mesh, AXIS)
        self._begin = partial(
            lc.init_state, tx, params, workers, model_state=model_state, local=local
        )
        self._step = lc.make_train_step(
            loss, tx, workers, local_steps=recipe.local_steps, local=local
        )
        self._tx, self._workers = tx, workers
        self._cut = NamedSharding(mesh, P(AXIS))
        self._mine = [
            i for i, d in enumerate(mesh.devices.flat) if d.process_index == jax.process_index()
        ]
        self.local_steps, self._seed = recipe.local_steps, seed
        text = corpus.standard_library()
        self._text = text.train
        windows = corpus.spread(text.validation, WINDOWS, CONTEXT)
        self._windows = self._placed(windows[: len(windows) // mesh.size * mesh.size])
        graph, _, rest = nnx.split(model, nnx.Param, ...)
        self._loss = jax.jit(partial(_bits_per_byte, graph, rest))
        self.begin()

    def begin(self) -> None:
        """From the first step on, once more if it is that; what was compiled stays."""
        self._state, self.taken = self._begin(), 0

    def step(self) -> None:
        """One call of the training step: ``local_steps`` steps of each worker."""
        steps = range(self.taken, self.taken + self.local_steps)
        draws = [
            corpus.draw(self._text, BATCH, CONTEXT, (self._seed, i, t))
            for i in self._mine
            for t in steps
        ]
        batch = jax.make_array_from_process_local_data(self._cut, np.concatenate(draws))
        self._state, _ = self._step(self._state, batch)
        self.taken += self.local_steps

    def wait(self) -> None:
        """Until all steps are done."""
        jax.block_until_ready(self._state)

    def predicted_bytes(self, *, most: bool) -> float:
        """What a worker should send in a call, on a CPU; the most, as in a warm-up, or the least."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._state.params)
        stages = lc.traffic.of(self._tx, shapes, self._workers).stages
        return max(stages) if most else min(stages)

    def loss(self) -> float:
        """Bits per byte of the validation windows."""
        return float(self._loss(self._state.params, self._windows))

    def _placed(self, windows: np.ndarray) -> jax.Array:
        each = np.split(windows, self._cut.mesh.size)
        return jax.make_array_from_process_local_data(
            self._cut, np.concatenate([each[i] for i in self._mine])
        )


def _bits_per_byte(graph: Any, rest: Any, params: Any, windows: jax.Array) -> jax.Array:
    model = nnx.merge(graph, params, rest)
    return next_byte_loss(model, windows, deterministic=True) / math.log(2)


def ends_of(steps: int, alone: int) -> list[int]:
    """After how many steps of a run the loss is looked at."""
    calls = steps // alone
    return [
        alone * n for n in sorted({round(calls * (n + 1) / POINTS) for n in range(POINTS)} - {0})
    ]


def train(mesh: Mesh, contender: Contender, run: Run) -> dict[str, Any]:
    """Trains, and returns what a row says about it."""
    recipe = contender.make(schedule(run.rate, run.steps), run.steps, run.option)
    trainer = Trainer(mesh, recipe, run.seed)
    return row_of(run, turns.train(trainer, ends_of(run.steps, trainer.local_steps)))


def row_of(run: Run, found: dict[str, Any]) -> dict[str, Any]:
    """Of what `turns.train` found: the loss at some points."""
    taken, losses = zip(*found["curve"], strict=True)
    seconds = round(found["seconds"], 1)
    return {**run._asdict(), "taken": list(taken), "loss": list(losses), "seconds": seconds}
