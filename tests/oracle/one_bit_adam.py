"""1-bit Adam on one page, in the manner of `lion`: workers are a leading array axis.

With ``n`` steps before this one in which somebody took part:

* **In full precision**, in the first ``warmup`` steps: ``g = mean_i g_i`` in float32 over those who take
  part, ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g**2``.
* **In codes**, at all other steps: ``m`` is what comes back of the ``m_i = b1 m + (1 - b1) g_i`` of all
  in one bit each way, with the errors of both sides.
* **Update**: ``m' / (sqrt(v') + eps)`` with ``m' = m / (1 - b1**(n+1))`` and ``v' = v / (1 - b2**k)``
  after k updates of v; 0 where v is 0.
* With nobody there all of this stays, and the update is 0. One worker sends nothing: its ``m_0`` is ``m``.

Source: Tang et al. (arXiv 2102.02888). Scales of rows, bias correction, the
rule for a v of 0, for abstention and for one worker are ours.
"""

import jax
import jax.numpy as jnp
from jax import lax

from oracle.coding import Votes, buffer_of, decoded_mean
from oracle.lion import blend, errors, fed_back, simulator, takes_part


def one_bit_adam(b1=0.9, b2=0.999, eps=1e-8, *, warmup):
    """Fits ``lion.optimizer(simulator, learning_rate, weight_decay)``."""

    def memory(params, workers):
        zero, moment = jnp.int32(0), jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return {"count": zero, "mu": moment, "nu": moment} | errors(params, workers)

    def step(g, state, params, abstain):
        m, present, changed = lax.cond(state.count < warmup, in_floats, in_codes, g, state, abstain)
        some = jnp.any(present)
        m = jax.tree.map(lambda new, old: jnp.where(some, new, old), m, state.mu)
        changed |= {"mu": m, "count": state.count + some}
        n = jnp.maximum(changed["count"], 1)
        k = jnp.minimum(n, warmup)

        def update(m, v, g):
            x = (m / (1 - b1**n)) / (jnp.sqrt(v / (1 - b2**k)) + eps)
            return jnp.where((v > 0) & some, x, 0).astype(g.dtype)

        return jax.tree.map(update, m, changed["nu"], g), present, changed

    def in_floats(g, state, abstain):
        buffer = buffer_of(g)
        x = buffer.join(g)
        present = takes_part(x, abstain)
        mean = decoded_mean(Votes(x, jnp.ones_like(x[..., :1]), present))
        mean = buffer.split(jnp.where(jnp.isfinite(mean), mean, 0), state.mu)
        some = jnp.any(present)
        nu = blend(b2, jax.tree.map(jnp.square, mean), state.nu)
        return blend(b1, mean, state.mu), present, {
            "nu": jax.tree.map(lambda new, old: jnp.where(some, new, old), nu, state.nu),
            "error": state.error, "owner": state.owner,
        }  # fmt: skip

    def in_codes(g, state, abstain):
        buffer = buffer_of(g)
        own = blend(b1, jax.tree.map(lambda g: g.astype(jnp.float32), g), state.mu)
        u, present, changed = fed_back(1, buffer, buffer.join(own), state, abstain)
        return buffer.split(u, state.mu), present, changed | {"nu": state.nu}

    return simulator(memory, step)
