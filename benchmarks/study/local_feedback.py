"""Error feedback beside momenta that stay with the workers: an ablation, which the library does not offer.

Worker i votes on ``x_i = b1 m_i + (1 - b1) g_i + e_i`` and keeps ``e_i = x_i - decode(encode(x_i))``, as it
would for an owner that adds up what is decoded; the votes here are counted, not added up.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lioncub_jax import reference
from lioncub_jax.reference.lion import Codes, Simulator, State


def local_momentum(b1: float, b2: float, codes: Codes) -> Simulator:
    """`reference.local_momentum` of these codes, with feedback in float32, the best case."""
    vote = reference.local_momentum(0.0, 0.0, codes=codes)  # on messages, which are made here

    def init(params: Any, workers: int) -> State:
        state = vote.init(params, workers)
        return state._replace(error=jax.tree.map(jnp.zeros_like, state.mu))

    def update(grads: Any, state: State, params: Any = None, abstain: Any = None) -> Any:
        x = jax.tree.map(lambda g, m, e: (1 - b1) * g + b1 * m + e, grads, state.mu, state.error)
        u, after = vote.update(x, state, params, abstain)
        mu = jax.tree.map(lambda g, m: (1 - b2) * g + b2 * m, grads, state.mu)
        return u, after._replace(mu=mu, error=unsent(x, codes, state.t))

    return Simulator(init, update)


def unsent(x: Any, codes: Codes, t: jax.Array) -> Any:
    """What the codes leave out of the messages, leaves ``[W, ...]``."""
    leaves, tree = jax.tree.flatten(x)
    buffer = reference.buffer_of([leaf.shape[1:] for leaf in leaves], len(leaves[0]))
    joined = buffer.join(leaves)
    message = codes.encode(joined, buffer, t)
    rest = joined - reference.decode(message, codes.top(len(joined)))
    return jax.tree.unflatten(tree, buffer.split(rest, [leaf.dtype for leaf in leaves]))
