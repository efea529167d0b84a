"""Deep Gradient Compression on one page, in the manner of `lion`: workers are a leading array axis.

* **Momentum correction.** ``u_i = m u_i + g_i``, ``v_i = v_i + u_i``.
* **What is sent.** Of each leaf the ``k = max(1, ceil(density n))`` elements of ``v_i`` with the largest
  magnitudes; of equal ones those with the lower index. There ``v_i`` becomes 0, and so does ``u_i``
  (momentum factor masking).
* **Warm-up.** The density is 1/4, 1/16, 1/64, ... as long as that is above the last one; stage ``s`` of
  ``S`` begins after ``ceil(s warmup / S)`` steps.
* **Update.** The sum of what was sent, worker 0 first, over the number of workers that take part. A
  worker with a value that is not finite, or that is asked to, abstains: it sends zeros and its state
  stays.
* **One worker** sends nothing: its update is ``u_0``, and ``v_0`` stays 0.

Source: Lin et al. (arXiv 1712.01887). The rules for abstention and for one worker are ours.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from oracle.coding import buffer_of, mean
from oracle.lion import kept, per_worker, simulator, takes_part


def dgc(momentum=0.9, density=0.001, warmup=0):
    """All workers at once; give it to ``lion.optimizer`` for learning rate and decay.

    Args:
      momentum: ``m``.
      density: the share of each leaf that is sent.
      warmup: steps in which the density comes down.
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
            chosen = jax.tree.map(lambda v: largest(v, density, warmup, state.t), v)
            sent = jax.tree.map(lambda v, c: jnp.where(c, v, 0), v, chosen)
            u, v = (jax.tree.map(lambda x, c: jnp.where(c, 0, x), x, chosen) for x in (u, v))
        number = jnp.sum(present, dtype=jnp.int32)
        sent = kept(present, sent, jax.tree.map(jnp.zeros_like, sent))
        updates = jax.tree.map(lambda x, g: mean(x, number).astype(g.dtype), sent, g)
        u, v = kept(present, (u, v), (state.velocity, state.residual))
        return updates, present, {"velocity": u, "residual": v}

    return simulator(memory, step)


def largest(v, density, warmup, t):
    """``bool[W, ...]``: what each worker sends of a leaf after ``t`` steps."""
    shares = [4.0**-s for s in range(1, 32) if 4.0**-s > density] if warmup else []
    begins = [math.ceil((s + 1) * warmup / len(shares)) for s in range(len(shares))]
    flat = v.reshape(len(v), v[0].size)
    size = flat.shape[1]

    def picked(share, flat):
        count = min(max(1, math.ceil(share * size)), size)  # empty leaves have none
        _, at = lax.top_k(jnp.abs(flat), count)
        return jnp.zeros(flat.shape, bool).at[jnp.arange(len(flat))[:, None], at].set(True)

    stage = jnp.sum(t >= np.array(begins, np.int32), dtype=jnp.int32)
    ways = [functools.partial(picked, share) for share in (*shares, density)]
    return lax.switch(stage, ways, flat).reshape(v.shape)
