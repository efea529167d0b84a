"""Deep Gradient Compression on one page, in the manner of `lion`: workers are a leading array axis.

* **Momentum correction.** ``u_i = m u_i + g_i``, ``v_i = v_i + u_i``.
* **What is sent.** Of each leaf the ``k = max(1, ceil(density n))`` elements of ``v_i`` with the largest
  magnitudes; of equal ones those with the lower index. There ``v_i`` becomes 0, and so does ``u_i``
  (momentum factor masking).
* **Update.** The sum of what was sent, worker 0 first, over the number of workers that take part. A
  worker with a value that is not finite, or that is asked to, abstains: it sends zeros and its state
  stays.
* **One worker** sends nothing: its update is ``u_0``, and ``v_0`` stays 0.

Source: Lin et al. (arXiv 1712.01887). The rules for abstention and for one worker are ours.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from oracle.coding import buffer_of, mean
from oracle.lion import kept, per_worker, simulator, takes_part


def dgc(momentum=0.9, density=0.001):
    """All workers at once; give it to ``lion.optimizer`` for learning rate and decay.

    Args:
      momentum: ``m``.
      density: the share of each leaf that is sent.
    """

    def memory(params, workers):
        zeros = per_worker(params, workers, jnp.float32)
        return {"velocity": zeros, "residual": zeros}

    def step(g, state, params, abstain):
        u = jax.tree.map(lambda u, g: momentum * u + g.astype(jnp.float32), state.velocity, g)
        v = jax.tree.map(jnp.add, state.residual, u)
        present = takes_part(buffer_of(v).join(v), abstain)
        if len(abstain) == 1:
            sent, v = u, state.residual
        else:
            chosen = jax.tree.map(lambda v: largest(v, density), v)
            sent = jax.tree.map(lambda v, c: jnp.where(c, v, 0), v, chosen)
            u, v = (jax.tree.map(lambda x, c: jnp.where(c, 0, x), x, chosen) for x in (u, v))
        number = jnp.sum(present, dtype=jnp.int32)
        sent = kept(present, sent, jax.tree.map(jnp.zeros_like, sent))
        updates = jax.tree.map(lambda x, g: mean(x, number).astype(g.dtype), sent, g)
        u, v = kept(present, (u, v), (state.velocity, state.residual))
        return updates, present, {"velocity": u, "residual": v}

    return simulator(memory, step)


def largest(v, density):
    """``bool[W, ...]``: what each worker sends of a leaf."""
    flat = v.reshape(len(v), v[0].size)
    count = min(max(1, math.ceil(density * flat.shape[1])), flat.shape[1])  # empty leaves have none
    _, at = lax.top_k(jnp.abs(flat), count)
    chosen = jnp.zeros(flat.shape, bool).at[jnp.arange(len(flat))[:, None], at].set(True)
    return chosen.reshape(v.shape)
