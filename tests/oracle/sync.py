"""Selective momentum sync on one page, in the manner of `lion`: workers are a leading array axis.

After step ``t`` (from 1) at which a sync is due, for the leaves in ``where``: ``mu_i = sum_j mu_j / W``.
"""

import jax
import jax.numpy as jnp
from jax import lax

from oracle.lion import Simulator, State


def synced(simulator, due, where=None):
    """Makes the momenta of a simulator alike at times; its state tells ``syncs``.

    Args:
      simulator: with local momentum ``mu`` in its state, such as ``lion.local_momentum()``.
      due: whether there is a sync after a step, which counts from 1.
      where: a tree of bools like the parameters, the leaves that are synced; None for all.
    """

    def init(params, workers):
        return State(simulator.init(params, workers), syncs=jnp.int32(0))

    def update(grads, state, params=None, abstain=None):
        updates, state = simulator.update(grads, state, params, abstain)
        return updates, lax.cond(due(state.t), sync, lambda state: state, state)

    def sync(state):
        picked = jax.tree.map(lambda _: True, state.mu) if where is None else where
        mu = jax.tree.map(lambda m, pick: mean(m) if pick else m, state.mu, picked)
        return State(state, mu=mu, syncs=state.syncs + 1)

    def mean(m):
        return jnp.broadcast_to(jnp.mean(m.astype(jnp.float32), axis=0).astype(m.dtype), m.shape)

    return Simulator(init, update)
