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
from goal.contenders import Recipe
from goal.curves import model_of
from goal.model import CONTEXT

AXIS = "data"


def mesh_of(devices: Sequence[Any]) -> Mesh:
    """A worker for each device."""
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


class Trainer:
    """A recipe on a mesh, one worker for each device."""

    def __init__(self, mesh: Mesh, recipe: Recipe, tokens: int):
        loss, params, model_state = lc.from_nnx(model_of(0), next_byte_loss)
        tx, local, workers = recipe.tx, recipe.local, lc.Workers(mesh, AXIS)
        self.state = lc.init_state(tx, params, workers, model_state=model_state, local=local)
        self._step = lc.make_train_step(
            loss, tx, workers, local_steps=recipe.local_steps, local=local
        )
        self._local_steps, self._taken = recipe.local_steps, 0
        self._cut = NamedSharding(mesh, P(AXIS))
        self._mine = [
            i for i, d in enumerate(mesh.devices.flat) if d.process_index == jax.process_index()
        ]
        self._count, self._text = tokens // CONTEXT, corpus.standard_library().train

    def step(self) -> None:
        """One call of the training step, done when it returns: all local steps of each worker."""
        steps = range(self._taken, self._taken + self._local_steps)
        draws = [
            corpus.draw(self._text, self._count, CONTEXT, (i, t)) for i in self._mine for t in steps
        ]
        batch = jax.make_array_from_process_local_data(self._cut, np.concatenate(draws))
        self.state, _ = self._step(self.state, batch)
        jax.block_until_ready(self.state)
        self._taken += self._local_steps
