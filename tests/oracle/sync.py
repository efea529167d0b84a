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

    def chosen(tree):
        leaves = jax.tree.leaves(tree)
        picks = [True] * len(leaves) if where is None else jax.tree.leaves(where)
        return [i for i, pick in enumerate(picks) if pick]

    def init(params, workers):
        state = simulator.init(params, workers)
        mu = jax.tree.leaves(state.mu)
        owner = jnp.zeros(buffer_of([mu[i] for i in chosen(mu)]).real.shape) if coded else None
        return State(state, syncs=jnp.int32(0), owner=owner)

    def update(grads, state, params=None, abstain=None):
        updates, state = simulator.update(grads, state, params, abstain)
        return updates, lax.cond(due(state.t), sync, lambda state: state, state)

    def sync(state):
        mu, tree = jax.tree.flatten(state.mu)
        picks = chosen(mu)
        alike, owner = (in_codes if coded else in_full)([mu[i] for i in picks], state)
        for i, new in zip(picks, alike, strict=True):
            mu[i] = new
        mu = jax.tree.unflatten(tree, mu)
        return State(state, mu=mu, syncs=state.syncs + 1, owner=owner)

    def in_full(mu, state):
        means = [jnp.mean(m.astype(jnp.float32), axis=0).astype(m.dtype) for m in mu]
        return [jnp.broadcast_to(mean, m.shape) for mean, m in zip(means, mu, strict=True)], None

    def in_codes(mu, state):
        buffer = buffer_of(mu)
        x = buffer.join(mu)
        present = takes_part(x, np.zeros(len(x), bool))
        u, rest, owner = both_ways(midrise(coded), 1, buffer, x, present, state.owner, state.t)
        return kept(present, buffer.split(u + rest, mu), mu), owner

    return Simulator(init, update)
