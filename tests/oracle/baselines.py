"""The baselines on one page, in the manner of `lion`: workers are a leading array axis.

* **Mean.** SGD, AdamW and Lion see ``sum_i g_i / W`` in float32; nobody abstains.
* **signSGD and SIGNUM** are ``lion.local_momentum(b, b)`` with ``b`` 0, or the momentum.
* **DiLoCo.** Nesterov SGD of the mean of what workers hand over: in float32; or in codes both ways.
* **TernGrad.** Each leaf is clipped at ``clip`` root mean squares, divided by the largest magnitude of
  all who take part, and rounded at random to -1, 0 or 1; the sum of these times the scale, over the
  workers that take part, comes back.
* **QSGD.** ``floor(x / step + noise)``, clipped at ``s = 2**(bits-1) - 1``, with the step ``max|x| / s`` of
  each row rounded up to bfloat16, 0 if below 2**-126, and at most the largest bfloat16. The mean of what
  is decoded goes into a trace; an element where it is not finite is as with nobody there.
* **One worker** quantizes nothing.

All but `diloco`, which needs the learning rate itself, fit
``lion.optimizer(simulator, learning_rate, weight_decay)``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from oracle.coding import (
    BFLOAT16_MAX,
    ROW,
    Codes,
    Votes,
    buffer_of,
    decoded_mean,
    quotient,
    saturate,
    total,
)
from oracle.lion import errors, fed_back, in_float32, simulator, takes_part


def averaged(tx):
    """Any optax transform of the mean gradient: ``optax.trace(0.9)``, ``optax.adamw(1e-3)``."""
    tx = optax.with_extra_args_support(tx)

    def memory(params, workers):
        return {"inner": tx.init(params)}

    def step(g, state, params, abstain):
        mean = jax.tree.map(lambda g: (total(_f32(g)) / len(g)).astype(g.dtype), g)
        updates, inner = tx.update(mean, state.inner, params)
        return updates, np.ones(len(abstain), bool), {"inner": inner}

    return simulator(memory, step)


def diloco(learning_rate=0.7, momentum=0.9, bits=None):
    """The outer optimizer of DiLoCo, of differences; updates have their learning rate."""
    outer = optax.sgd(learning_rate, momentum, nesterov=True)
    if bits is None:
        return averaged(outer)
    outer = in_float32(outer)

    def memory(params, workers):
        return errors(params, workers) | {"inner": outer.init(params)}

    def step(g, state, params, abstain):
        buffer = buffer_of(g)
        u, present, changed = fed_back(bits, buffer, buffer.join(g), state, abstain)
        updates, inner = outer.update(buffer.split(u, g), state.inner, params)
        return updates, present, changed | {"inner": inner}

    return simulator(memory, step)


def terngrad(clip=2.5, seed=0, momentum=0.0):
    """The mean of stochastic ternary codes in units that the workers share, and a trace of it."""

    def memory(params, workers):
        return {"mu": jax.tree.map(jnp.zeros_like, params)}

    def step(g, state, params, abstain):
        buffer = buffer_of(g)
        present = takes_part(buffer.join(g), abstain)[:, 0, 0]
        mean = jax.tree.map(lambda g: jnp.where(present[0], g[0], 0), g)
        if len(present) > 1:
            mean = ternary_mean(g, present, buffer, state.t)
        mean = jax.tree.map(lambda u, m: u + momentum * m, mean, state.mu)
        return mean, present, {"mu": mean}

    def ternary_mean(g, present, buffer, t):
        leaves, tree = jax.tree.flatten(g)
        shares, scales = zip(*(in_units(_f32(leaf), present) for leaf in leaves), strict=True)
        level = jnp.clip(whole(buffer.join(shares), buffer, t, seed), -1, 1)
        sums = jnp.sum(jnp.where(present[:, None, None], level, 0), axis=0)
        number = jnp.maximum(jnp.sum(present), 1).astype(jnp.float32)
        parts = zip(buffer.split(sums, shares), jnp.stack(scales) / number, leaves, strict=True)
        return jax.tree.unflatten(tree, [(x * unit).astype(g.dtype) for x, unit, g in parts])

    def in_units(leaf, present):
        """What each worker sends before it is rounded, and the unit that all share."""
        x = leaf.reshape(len(leaf), leaf[0].size)
        if clip is not None:
            limit = clip * jnp.sqrt(jnp.sum(x * x, axis=1, keepdims=True) / max(x.shape[1], 1))
            x = jnp.clip(x, -limit, limit)
        largest = jnp.max(jnp.abs(x), axis=1, initial=0.0)
        scale = jnp.max(jnp.where(present, largest, 0))
        return (x / jnp.where(scale > 0, scale, 1)).reshape(leaf.shape), scale

    return simulator(memory, step)


def qsgd(bits=4, seed=0, momentum=0.0):
    """The mean of stochastic levels of each row's norm, and a trace of it."""

    def memory(params, workers):
        rows = buffer_of(jax.tree.map(lambda p: p[None], params)).real.shape
        return {"mu": jnp.zeros(rows)}

    def step(g, state, params, abstain):
        buffer = buffer_of(g)
        x = buffer.join(g)
        present = takes_part(x, abstain)
        mean = x[0]
        if len(x) > 1:
            mean = decoded_mean(Votes(*levels(bits, seed).encode(x, buffer, state.t), present))
        known = jnp.any(present) & jnp.isfinite(mean)
        mean = saturate(jnp.where(known, mean, 0) + momentum * state.mu, jnp.float32)
        mu = jnp.where(known, mean, state.mu)
        return buffer.split(jnp.where(known, mean, 0), g), present, {"mu": mu}

    return simulator(memory, step)


# --- Levels and numbers at random


def levels(p, seed):
    """QSGD's: multiples of the largest magnitude of a row over s."""
    s = 2 ** (p - 1) - 1

    def encode(x, buffer, t):
        step = jnp.minimum(jnp.max(jnp.abs(x), axis=-1, keepdims=True) / s, BFLOAT16_MAX)
        step = rounded_up(step)
        step = jnp.where(step < 2.0**-126, 0, step)
        most = jnp.minimum(s, jnp.floor(BFLOAT16_MAX / jnp.where(step > 0, step, 1)))
        level = whole(quotient(x, step), buffer, t, seed)
        return jnp.clip(level, -most, most), step

    return Codes(lambda workers: s, encode)


def rounded_up(x):
    """To the next bfloat16 that is no smaller; ``x`` is not negative."""
    near = lax.reduce_precision(x, 8, 7)
    above = lax.bitcast_convert_type(near, jnp.uint32) + jnp.uint32(1 << 16)
    return jnp.where(near < x, lax.bitcast_convert_type(above, jnp.float32), near)


def whole(x, buffer, t, seed):
    """One of the two whole numbers around each, at random, right on average."""
    return jnp.floor(x + noise(buffer, len(x), t, seed))


def noise(buffer, workers, t, seed):
    """Uniform in [0, 1), from a key for each step, worker and leaf: ``float32[W, rows, 128]``."""

    def of_worker(i):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), t), i)
        drawn = [
            jax.random.uniform(jax.random.fold_in(key, leaf), (buffer.rows[leaf], ROW))
            for leaf in buffer.order
        ]
        return jnp.concatenate(drawn)

    return jax.vmap(of_worker)(jnp.arange(workers, dtype=jnp.int32))


def _f32(x):
    return x.astype(jnp.float32)
