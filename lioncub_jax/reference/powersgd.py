"""PowerSGD on one page: the workers are a leading array axis, and nothing is joined.

The oracle of the tests of `powersgd`, and a simulator of many workers on one device, in the form of
`reference`; it shares no code with what it is compared with. For workers ``i = 0 .. W-1``:

* **Matrices.** A leaf of shape ``(d_1, .., d_k)`` is the matrix ``d_1 .. d_j x d_{j+1} .. d_k`` with the
  smallest ``m + n``, of equal ones that with the smallest ``j``. It is compressed if ``r (m + n) < m n``.
* **Power iteration.** ``M_i = g_i + e_i``; ``P = mean_i M_i Q``; ``P`` becomes the orthonormal factor of
  its reduced QR; ``Q = mean_i M_i^T P``; every worker applies ``M' = P Q^T``, in the leaf's dtype, and
  keeps ``e_i = M_i - M'``, saturated in its own.
* **Warm start.** ``Q`` is where the next step begins; a column that came out as zeros stays what it was.
  The first one of leaf ``l`` is normal, of the key ``fold_in(key(seed), l)``.
* **All other leaves** are averaged as they are and keep no error.
* **Who takes part.** A worker with a value that is not finite in ``M_i Q`` or in a leaf that is not
  compressed abstains, and so does one that is asked to: it counts for nothing in the means, and its
  error stays. With nobody there the mean is zeros. A leaf whose ``M'`` is not finite gets zeros in its
  place, and its ``Q`` stays.
* **One worker** sends nothing: ``M' = M_0``.

Source: Vogels et al. (arXiv 1905.13727). The rules for columns of zeros, for abstention and for one
worker are ours.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lioncub_jax.reference.lion import Simulator, saturate


class State(NamedTuple):
    """What is remembered."""

    t: jax.Array  # int32[]: steps taken
    q: list[Any]  # of each leaf float32[n, r], one for all; None where it is not compressed
    error: list[Any]  # of each leaf [W, ...]; or None
    inner: Any  # of the transform, one for all
    abstained: jax.Array  # int32[]: workers that abstained from the last step
    abstentions: jax.Array  # int32[]: their sum over all steps


def powersgd(
    tx: optax.GradientTransformation, rank: int = 4, seed: int = 0, error_dtype: Any = jnp.float32
) -> Simulator:
    """A transform of the low-rank mean gradient, all workers at once.

    Args:
      tx: any optax transform, with its learning rate.
      rank: ``r``.
      seed: of the first ``Q``.
      error_dtype: of what is kept for the next step.
    """
    tx = optax.with_extra_args_support(tx)

    def init(params: Any, workers: int) -> Any:
        leaves = jax.tree.leaves(params)
        q = [first_q(p.shape, rank, seed, i) for i, p in enumerate(leaves)]
        error = [
            None if x is None else jnp.zeros((workers, *p.shape), error_dtype)
            for x, p in zip(q, leaves, strict=True)
        ]
        return State(jnp.int32(0), q, error, tx.init(params), jnp.int32(0), jnp.int32(0))

    def update(grads: Any, state: State, params: Any = None, abstain: Any = None) -> Any:
        leaves, tree = jax.tree.flatten(grads)
        owed = [
            x.astype(jnp.float32) if e is None else x.astype(jnp.float32) + e.astype(jnp.float32)
            for x, e in zip(leaves, state.error, strict=True)
        ]
        here, done = exchanged(owed, state.q, rank, abstain)
        q, error, applied = [], [], []
        for x, leaf, (mean, new), old, e in zip(
            owed, leaves, done, state.q, state.error, strict=True
        ):
            known = jnp.all(jnp.isfinite(mean))
            mean = saturate(jnp.where(known | (e is None), mean, 0), leaf.dtype)
            applied.append(mean)
            if e is None:
                q.append(None)
                error.append(None)
                continue
            q.append(jnp.where(known & jnp.any(new != 0, axis=0), new, old))
            left = saturate(x - mean.astype(jnp.float32), e.dtype)
            error.append(jnp.where(here.reshape(-1, *[1] * (e.ndim - 1)), left, e))
        updates, inner = tx.update(jax.tree.unflatten(tree, applied), state.inner, params)
        away = jnp.sum(~here, dtype=jnp.int32)
        return updates, State(state.t + 1, q, error, inner, away, state.abstentions + away)

    return Simulator(init, update)


def exchanged(
    owed: list[jax.Array], q: list[Any], rank: int, abstain: Any
) -> tuple[jax.Array, list[tuple[jax.Array, Any]]]:
    """Who takes part, ``bool[W]``, and of each leaf what is applied and the new ``Q``."""
    workers = len(owed[0])
    rows = [x.reshape(workers, *matrix(x.shape[1:])) for x in owed]
    sent = [
        x if b is None or workers == 1 else product("wmn,nr->wmr", x, b)
        for x, b in zip(rows, q, strict=True)
    ]
    finite = [jnp.all(jnp.isfinite(x), axis=(1, 2)) for x in sent]
    here = jnp.all(jnp.stack(finite), axis=0)
    here = here if abstain is None else here & ~abstain
    done: list[tuple[jax.Array, Any]] = []
    for leaf, x, p, b in zip(owed, rows, sent, q, strict=True):
        mean, new = average(p, here), b
        if b is not None and workers > 1:
            side = jnp.linalg.qr(mean)[0]
            new = average(product("wmn,mr->wnr", x, side), here)
            mean = product("mr,nr->mn", side, new)
        done.append((mean.reshape(leaf.shape[1:]), new))
    return here, done


def matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a leaf; a vector is one row."""
    splits = [(math.prod(shape[:j]), math.prod(shape[j:])) for j in range(1, len(shape))]
    return min(splits, key=sum) if splits else (1, math.prod(shape))


def first_q(shape: tuple[int, ...], rank: int, seed: int, leaf: int) -> Any:
    """``float32[n, r]``; None for a leaf that is not compressed."""
    m, n = matrix(shape)
    if rank * (m + n) >= m * n:
        return None
    return jax.random.normal(jax.random.fold_in(jax.random.key(seed), leaf), (n, rank), jnp.float32)


def average(x: jax.Array, here: jax.Array) -> jax.Array:
    """``[W, m, n]`` to ``[m, n]``, over those who are there; zeros without any."""
    some = jnp.maximum(jnp.sum(here, dtype=jnp.int32), 1).astype(jnp.float32)
    return jnp.sum(jnp.where(here[:, None, None], x, 0), axis=0) / some


def product(how: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """In full float32, on chips too that round before they multiply."""
    return jnp.einsum(how, a, b, precision=jax.lax.Precision.HIGHEST)
