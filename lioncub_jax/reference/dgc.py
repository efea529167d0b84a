"""Deep Gradient Compression on one page: the workers are a leading array axis, and nothing is packed.

The oracle of the tests of `dgc`, and a simulator of many workers on one device, in the form of
`reference`; it shares no code with what it is compared with. For workers ``i = 0 .. W-1`` and the step
after ``t`` others:

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

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lioncub_jax.reference.lion import Simulator


class State(NamedTuple):
    """What is remembered."""

    t: jax.Array  # int32[]: steps taken
    velocity: Any  # u, float32 leaves [W, ...]
    residual: Any  # v, float32 leaves [W, ...]
    abstained: jax.Array  # int32[]: workers that abstained from the last step
    abstentions: jax.Array  # int32[]: their sum over all steps


def dgc(momentum: float = 0.9, density: float = 0.001, warmup: int = 0) -> Simulator:
    """All workers at once; give it to ``reference.optimizer`` for learning rate and decay.

    Args:
      momentum: ``m``.
      density: the share of each leaf that is sent.
      warmup: steps in which the density comes down.
    """

    def init(params: Any, workers: int) -> Any:
        leaves, tree = jax.tree.flatten(params)
        zeros = [jnp.zeros((workers, *p.shape), jnp.float32) for p in leaves]
        u, v = jax.tree.unflatten(tree, zeros), jax.tree.unflatten(tree, zeros)
        return State(jnp.int32(0), u, v, jnp.int32(0), jnp.int32(0))

    def update(grads: Any, state: State, params: Any = None, abstain: Any = None) -> Any:
        leaves, tree = jax.tree.flatten(grads)
        workers = leaves[0].shape[0]
        g = [x.reshape(workers, math.prod(x.shape[1:])).astype(jnp.float32) for x in leaves]
        old_u = [
            x.reshape(y.shape) for x, y in zip(jax.tree.leaves(state.velocity), g, strict=True)
        ]
        old_v = [
            x.reshape(y.shape) for x, y in zip(jax.tree.leaves(state.residual), g, strict=True)
        ]
        u = [momentum * before + x for before, x in zip(old_u, g, strict=True)]
        v = [before + x for before, x in zip(old_v, u, strict=True)]
        here = jnp.all(jnp.isfinite(jnp.concatenate(v, axis=1)), axis=1, keepdims=True)
        here = here if abstain is None else here & ~abstain[:, None]
        if workers == 1:
            means, v = [jnp.where(here, x, 0)[0] for x in u], old_v
        else:
            sent = [largest(x, density, warmup, state.t) for x in v]
            means = [mean(jnp.where(s & here, x, 0), here) for s, x in zip(sent, v, strict=True)]
            v = [jnp.where(s, 0, x) for s, x in zip(sent, v, strict=True)]
            u = [jnp.where(s, 0, x) for s, x in zip(sent, u, strict=True)]
        u = [jnp.where(here, new, old) for new, old in zip(u, old_u, strict=True)]
        v = [jnp.where(here, new, old) for new, old in zip(v, old_v, strict=True)]
        shaped = [x.reshape(leaf.shape) for x, leaf in zip(u + v, leaves + leaves, strict=True)]
        updates = [
            x.reshape(leaf.shape[1:]).astype(leaf.dtype)
            for x, leaf in zip(means, leaves, strict=True)
        ]
        away = jnp.sum(~here, dtype=jnp.int32)
        u, v = (
            jax.tree.unflatten(tree, shaped[: len(u)]),
            jax.tree.unflatten(tree, shaped[len(u) :]),
        )
        after = State(state.t + 1, u, v, away, state.abstentions + away)
        return jax.tree.unflatten(tree, updates), after

    return Simulator(init, update)


def largest(v: jax.Array, density: float, warmup: int, t: Any) -> jax.Array:
    """``bool[W, n]``: what each worker sends after ``t`` steps."""
    shares = [density]
    if warmup:
        shares = [4.0**-s for s in range(1, 32) if 4.0**-s > density] + shares
    last = len(shares) - 1
    begins = [math.ceil(s * warmup / last) for s in range(1, last)] + [warmup] * (last > 0)
    counts = np.array([max(1, math.ceil(share * v.shape[1])) for share in shares])

    def of(count: int) -> Any:
        def picked(v: jax.Array) -> jax.Array:
            _, at = lax.top_k(jnp.abs(v), min(count, v.shape[1]))  # empty leaves have none
            return jnp.zeros(v.shape, bool).at[jnp.arange(len(v))[:, None], at].set(True)

        return picked

    stage = jnp.sum(t >= np.array(begins, np.int32), dtype=jnp.int32)
    return lax.switch(stage, [of(int(count)) for count in counts], v)


def mean(sent: jax.Array, here: jax.Array) -> jax.Array:
    """``[W, n]`` to ``[n]``, over those who are there."""
    total = lax.fori_loop(1, len(sent), lambda i, total: total + sent[i], sent[0])
    return total * (1 / jnp.maximum(jnp.sum(here, dtype=jnp.int32), 1).astype(jnp.float32))
