"""PowerSGD on one page, in the manner of `lion`: workers are a leading array axis.

* **Matrices.** A leaf of shape ``(d_1, .., d_k)`` is the matrix ``d_1 .. d_j x d_{j+1} .. d_k`` with the
  smallest ``m + n``, of equal ones that with the smallest ``j``. It is compressed if ``r (m + n) < m n``.
* **Power iteration.** ``M_i = g_i + e_i``; ``P = mean_i M_i Q``; ``P`` becomes the orthonormal factor of
  its reduced QR; ``Q = mean_i M_i^T P``; every worker applies ``M' = P Q^T``, rounded to the leaf's dtype
  and clipped to its range, and keeps ``e_i = M_i - M'``, likewise in its own.
* **Warm start.** ``Q`` is where the next step begins, its columns scaled to a largest magnitude of 1, for
  only directions count; a column of zeros stays what it was. The first one of leaf ``l`` is normal, of
  the key ``fold_in(key(seed), l)``.
* **All other leaves** are averaged as they are and keep no error.
* **Who takes part.** A worker with a value that is not finite in ``M_i Q`` or in a leaf that is not
  compressed abstains, and so does one that is asked to: it counts for nothing in the means, and its
  error stays. With nobody there the mean is zeros. Where a ``Q`` is not less than ``2**127 / r``
  everywhere, ``M'`` is zeros and the ``Q`` before stays.
* **One worker** sends nothing: ``M' = M_0``.

Source: Vogels et al. (arXiv 1905.13727). The rules for columns of zeros, for abstention and for one worker
are ours.
"""

import math

import jax
import jax.numpy as jnp

from oracle.coding import product
from oracle.lion import in_float32, simulator


def powersgd(tx, rank=4, seed=0):
    """A transform of the low-rank mean gradient, all workers at once.

    Args:
      tx: any optax transform, with its learning rate.
      rank: ``r``.
      seed: of the first ``Q``.
    """
    tx = in_float32(tx)

    def memory(params, workers):
        leaves = jax.tree.leaves(params)
        q = [first_q(p.shape, rank, seed, i) for i, p in enumerate(leaves)]
        error = [
            None if x is None else jnp.zeros((workers, *p.shape), jnp.float32)
            for x, p in zip(q, leaves, strict=True)
        ]
        return {"q": q, "error": error, "inner": tx.init(params)}

    def step(g, state, params, abstain):
        leaves, tree = jax.tree.flatten(g)
        owed = [
            x.astype(jnp.float32) + (0 if e is None else e)
            for x, e in zip(leaves, state.error, strict=True)
        ]
        matrices = [x.reshape(len(x), *matrix(x.shape[1:])) for x in owed]
        present, means, q = iterated(matrices, state.q, abstain)
        applied, error = [], []
        for mean, x, own, e in zip(means, leaves, owed, state.error, strict=True):
            mean = fitting(mean.reshape(x.shape[1:]), x.dtype)
            here = present.reshape(-1, *[1] * (x.ndim - 1))
            applied.append(mean.astype(x.dtype))
            error.append(None if e is None else jnp.where(here, fitting(own - mean, e.dtype), e))
        updates, inner = tx.update(jax.tree.unflatten(tree, applied), state.inner, params)
        return updates, present, {"q": q, "error": error, "inner": inner}

    return simulator(memory, step)


def iterated(matrices, q, abstain):
    """Who takes part, ``bool[W]``, and of each ``[W, m, n]`` what is applied and the new ``Q``."""
    low = [i for i, old in enumerate(q) if old is not None and len(abstain) > 1]
    sent, q = list(matrices), list(q)
    for i in low:
        sent[i] = product("wmn,nr->wrm", sent[i], q[i])
    present = ~abstain
    for x in sent:
        present &= jnp.all(jnp.isfinite(x), axis=(1, 2))
    means = averages(sent, present)
    sides = [jnp.linalg.qr(scaled(means[i].T, means[i].T))[0] for i in low]
    others = [product("wmn,mr->wrn", matrices[i], side) for i, side in zip(low, sides, strict=True)]
    for i, side, new in zip(low, sides, averages(others, present), strict=True):
        known = jnp.all(jnp.abs(new) < 2.0**127 / len(new))
        means[i] = jnp.where(known, product("mr,rn->mn", side, new), 0)
        q[i] = jnp.where(known, scaled(new.T, q[i]), q[i])
    return present, means, q


def averages(arrays, present):
    """Each ``[W, m, n]`` to ``[m, n]``, over those who are there; zeros without any."""
    present = present[:, None, None]
    some = jnp.maximum(jnp.sum(present, dtype=jnp.int32), 1).astype(jnp.float32)
    return [jnp.sum(jnp.where(present, x, 0), axis=0) / some for x in arrays]


def matrix(shape):
    """Rows and columns of a leaf; a vector is one row."""
    splits = [(math.prod(shape[:j]), math.prod(shape[j:])) for j in range(1, len(shape))]
    return min(splits, key=sum) if splits else (1, math.prod(shape))


def first_q(shape, rank, seed, leaf):
    """``float32[n, r]``; None for a leaf that is not compressed."""
    m, n = matrix(shape)
    if rank * (m + n) >= m * n:
        return None
    return jax.random.normal(jax.random.fold_in(jax.random.key(seed), leaf), (n, rank), jnp.float32)


def scaled(x, otherwise):
    """Columns with a largest magnitude of 1; of zeros those of another array."""
    largest = jnp.max(jnp.abs(x), axis=0)
    return jnp.where(largest > 0, x / jnp.where(largest > 0, largest, 1), otherwise)


def fitting(x, dtype):
    """Float32 that a dtype holds; a compiler may leave out a cast there and back."""
    kind = jnp.finfo(dtype)
    most = min(float(kind.max), float(jnp.finfo(jnp.float32).max))
    return jax.lax.reduce_precision(
        jnp.clip(x, -most, most), min(kind.nexp, 8), min(kind.nmant, 23)
    )
