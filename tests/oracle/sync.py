"""Selective momentum sync on one page, in the manner of `lion`: workers are a leading array axis.

After step ``t`` (from 1) at which a sync is due, for the leaves in ``where``:

* **In full precision** ``mu_i = sum_j mu_j / W``.
* **In codes** worker i sends ``Q(mu_i)``; the owner answers ``u`` in one bit, and ``mu_i = u + (mu_i -
  Q(mu_i))``, saturated in their dtypes. A worker that does not take part, for a momentum that is not
  finite, keeps it. One worker alone does nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from oracle.coding import both_ways, buffer_of, midrise
from oracle.lion import Simulator, State, kept, takes_part


def synced(simulator, due, where=None, coded=0):
    """Makes the momenta of a simulator alike at times; its state tells ``syncs``, and the owners' errors.

    Args:
      simulator: with local momentum ``mu`` in its state, such as ``lion.local_momentum()``.
      due: whether there is a sync after a step, which counts from 1.
      where: a tree of bools like the parameters, the leaves that are synced; None for all.
      coded: 0 for full precision, or how many bits a code has.
    """

    def chosen(mu):
        """The leaves in ``where``; None stands for all others."""
        return mu if where is None else jax.tree.map(lambda m, pick: m if pick else None, mu, where)

    def init(params, workers):
        state = simulator.init(params, workers)
        owner = jnp.zeros(buffer_of(chosen(state.mu)).real.shape) if coded else None
        return State(state, syncs=jnp.int32(0), owner=owner)

    def update(grads, state, params=None, abstain=None):
        updates, state = simulator.update(grads, state, params, abstain)
        return updates, lax.cond(due(state.t), sync, lambda state: state, state)

    def sync(state):
        alike, owner = (in_codes if coded else in_full)(chosen(state.mu), state)
        mu = jax.tree.map(lambda m, new: m if new is None else new, state.mu, alike)
        return State(state, mu=mu, syncs=state.syncs + 1, owner=owner)

    def in_full(mu, state):
        def mean(m):
            return jnp.broadcast_to(
                jnp.mean(m.astype(jnp.float32), axis=0).astype(m.dtype), m.shape
            )

        return jax.tree.map(mean, mu), None

    def in_codes(mu, state):
        buffer = buffer_of(mu)
        x = buffer.join(mu)
        present = takes_part(x, np.zeros(len(x), bool))
        u, rest, owner = both_ways(midrise(coded), 1, buffer, x, present, state.owner, state.t)
        return kept(present, buffer.split(u + rest, mu), mu), owner

    return Simulator(init, update)
