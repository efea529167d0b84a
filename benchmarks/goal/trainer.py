"""The real training step of a contender, on a mesh of devices: what the lab times."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from gpt import corpus
from gpt.model import next_byte_loss
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from goal.contenders import CONTENDERS, DECAYS, Contender, Hyper
from goal.curves import model_of
from goal.model import CONTEXT

AXIS = "data"
TOKENS = 256  # of a worker in the step that is probed
HYPER = Hyper(1e-4, 0.9, 0.99, DECAYS[0])  # of all, for only the time counts


def mesh_of(devices: Sequence[Any]) -> Mesh:
    """A worker for each device."""
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


def constant(count: Any) -> float:
    """A schedule of one rate."""
    return HYPER.rate


class Trainer:
    """A contender on a mesh, one worker for each device.

    Attributes:
      train_step: what `make_train_step` returned.
      state: the next one that it is given.
    """

    def __init__(self, mesh: Mesh, contender: Contender, tokens: int):
        loss, params, model_state = lc.from_nnx(model_of(0), next_byte_loss)
        workers, steps = lc.Workers(mesh, AXIS), contender.local_steps
        tx = contender.made(HYPER, constant, workers)
        local = contender.local and contender.local(HYPER, constant)
        self.state = lc.init_state(tx, params, workers, model_state=model_state, local=local)
        self.train_step = lc.make_train_step(loss, tx, workers, local_steps=steps, local=local)
        self._local_steps, self._taken = steps, 0
        self._cut = NamedSharding(mesh, P(AXIS))
        self._mine = [
            i for i, d in enumerate(mesh.devices.flat) if d.process_index == jax.process_index()
        ]
        self._count, self._text = tokens // CONTEXT, corpus.standard_library().train

    def batch(self) -> jax.Array:
        """The batch of the next call: of all local steps of each worker."""
        steps = range(self._taken, self._taken + self._local_steps)
        draws = [
            corpus.draw(self._text, self._count, CONTEXT, (i, t)) for i in self._mine for t in steps
        ]
        return jax.make_array_from_process_local_data(self._cut, np.concatenate(draws))

    def step(self) -> None:
        """One call of the training step, done when it returns."""
        self.state, _ = self.train_step(self.state, self.batch())
        jax.block_until_ready(self.state)
        self._taken += self._local_steps


def adamw_step(workers: lc.Workers) -> tuple[Any, lc.training.StepState, jax.Array]:
    """For ``lioncub probe --step``: the step of float32 AdamW, its first state and a batch."""
    one = Trainer(workers.mesh, CONTENDERS["adamw"], TOKENS)
    return one.train_step, one.state, one.batch()
