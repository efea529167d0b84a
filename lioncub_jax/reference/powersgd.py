"""PowerSGD on one page: the workers are a leading array axis, and nothing is joined.

The oracle of the tests of `powersgd`, and a simulator of many workers on one device, in the form of
`reference`; it shares no code with what it is compared with. For workers ``i = 0 .. W-1``:

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
* **In codes** both means are those of mid-rise codes of so many bits, up and down, of ``y = x R / 128``:
  rows ``x`` of 128 elements of the factor's columns, one after the other and padded with zeros, turned by
  the rotation ``R`` of step 0 and turned back; leaves that are not compressed are coded too, and keep an
  error.
* **One worker** sends nothing: ``M' = M_0``.

Source: Vogels et al. (arXiv 1905.13727). Codes, the rules for columns of zeros, for abstention and for
one worker are ours.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lioncub_jax.reference import lion
from lioncub_jax.reference.lion import ROW, Simulator
from lioncub_jax.reference.sync import answer


class State(NamedTuple):
    """What is remembered."""

    t: jax.Array  # int32[]: steps taken
    q: list[Any]  # of each leaf float32[n, r], one for all; None where it is not compressed
    error: list[Any]  # of each leaf [W, ...]; or None
    inner: Any  # of the transform, one for all
    abstained: jax.Array  # int32[]: workers that abstained from the last step
    abstentions: jax.Array  # int32[]: their sum over all steps


def powersgd(
    tx: optax.GradientTransformation,
    rank: int = 4,
    bits: int | None = None,
    seed: int = 0,
) -> Simulator:
    """A transform of the low-rank mean gradient, all workers at once.

    Args:
      tx: any optax transform, with its learning rate.
      rank: ``r``.
      bits: of a code; None for floats.
      seed: of the first ``Q``.
    """
    tx = optax.with_extra_args_support(tx)

    def init(params: Any, workers: int) -> Any:
        leaves = jax.tree.leaves(params)
        q = [first_q(p.shape, rank, seed, i) for i, p in enumerate(leaves)]
        error = [
            None if x is None and bits is None else jnp.zeros((workers, *p.shape), jnp.float32)
            for x, p in zip(q, leaves, strict=True)
        ]
        return State(jnp.int32(0), q, error, tx.init(params), jnp.int32(0), jnp.int32(0))

    def update(grads: Any, state: State, params: Any = None, abstain: Any = None) -> Any:
        leaves, tree = jax.tree.flatten(grads)
        owed = [
            x.astype(jnp.float32) if e is None else x.astype(jnp.float32) + e.astype(jnp.float32)
            for x, e in zip(leaves, state.error, strict=True)
        ]
        here, done = exchanged(owed, state.q, rank, bits, abstain)
        applied = [fitting(mean, x.dtype) for (mean, _), x in zip(done, leaves, strict=True)]
        error = [
            None
            if e is None
            else jnp.where(beside(here, e), fitting(x - mean, e.dtype).astype(e.dtype), e)
            for x, mean, e in zip(owed, applied, state.error, strict=True)
        ]
        seen = [mean.astype(x.dtype) for mean, x in zip(applied, leaves, strict=True)]
        updates, inner = tx.update(jax.tree.unflatten(tree, seen), state.inner, params)
        away = jnp.sum(~here, dtype=jnp.int32)
        q = [new for _, new in done]
        return updates, State(state.t + 1, q, error, inner, away, state.abstentions + away)

    return Simulator(init, update)


def exchanged(
    owed: list[jax.Array], q: list[Any], rank: int, bits: int | None, abstain: Any
) -> tuple[jax.Array, list[tuple[jax.Array, Any]]]:
    """Who takes part, ``bool[W]``, and of each leaf what is applied and the new ``Q``."""
    workers = len(owed[0])
    rows = [x.reshape(workers, *matrix(x.shape[1:])) for x in owed]
    sent = [
        x if b is None or workers == 1 else product("wmn,nr->wrm", x, b)
        for x, b in zip(rows, q, strict=True)
    ]
    finite = [jnp.all(jnp.isfinite(x), axis=(1, 2)) for x in sent]
    here = jnp.all(jnp.stack(finite), axis=0)
    here = here if abstain is None else here & ~abstain
    bits = None if workers == 1 else bits
    means = averages(sent, here, bits)
    low = [i for i, b in enumerate(q) if b is not None and workers > 1]
    sides = [jnp.linalg.qr(scaled(means[i].T, means[i].T))[0] for i in low]
    others = [product("wmn,mr->wrn", rows[i], side) for i, side in zip(low, sides, strict=True)]
    new = list(q)
    for i, side, q_now in zip(low, sides, averages(others, here, bits), strict=True):
        known = jnp.all(jnp.abs(q_now) < 2.0**127 / rank)
        new[i] = jnp.where(known, scaled(q_now.T, q[i]), q[i])
        means[i] = jnp.where(known, product("mr,rn->mn", side, q_now), 0)
    shaped = [mean.reshape(x.shape[1:]) for mean, x in zip(means, owed, strict=True)]
    return here, list(zip(shaped, new, strict=True))


def averages(arrays: list[jax.Array], here: jax.Array, bits: int | None) -> list[jax.Array]:
    """Each ``[W, m, n]`` to ``[m, n]``, over those who are there; zeros without any."""
    if bits is None:
        return [average(x, here) for x in arrays]
    codes = lion.midrise(bits)
    turn = lion.rotation(jnp.int32(0))
    shapes = [x.shape[1:] for x in arrays]
    rows: list[tuple[int, ...]] = [(-(-math.prod(shape) // ROW), ROW) for shape in shapes]
    cut = []
    for x, shape, (n, _) in zip(arrays, shapes, rows, strict=True):
        flat = x.reshape(len(here), math.prod(shape))
        flat = jnp.pad(flat, ((0, 0), (0, n * ROW - flat.shape[1])))
        cut.append(product("wnk,kl->wnl", flat.reshape(len(here), n, ROW), turn))
    buffer = lion.buffer_of(rows, len(here))
    message = codes.encode(buffer.join([x / ROW for x in cut]), buffer, jnp.int32(0))
    mean = lion.bounded_mean(message, here[:, None, None], codes.top(len(here)), jnp.inf)
    said, _ = answer(mean, jnp.zeros(buffer.real.shape), buffer, bits)
    back = buffer.split(jnp.where(here.any(), said, 0), [x.dtype for x in arrays])
    whole = [product("nk,lk->nl", x, turn).reshape(-1) for x in back]
    return [x[: math.prod(s)].reshape(s) for x, s in zip(whole, shapes, strict=True)]


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


def scaled(x: jax.Array, otherwise: jax.Array) -> jax.Array:
    """Columns with a largest magnitude of 1; of zeros those of another array."""
    largest = jnp.max(jnp.abs(x), axis=0)
    return jnp.where(largest > 0, x / jnp.where(largest > 0, largest, 1), otherwise)


def fitting(x: jax.Array, dtype: Any) -> jax.Array:
    """Float32 that a dtype holds; a compiler may leave out a cast there and back."""
    kind = jnp.finfo(dtype)
    most = min(float(kind.max), float(jnp.finfo(jnp.float32).max))
    return jax.lax.reduce_precision(
        jnp.clip(x, -most, most), min(kind.nexp, 8), min(kind.nmant, 23)
    )


def beside(here: jax.Array, leaf: jax.Array) -> jax.Array:
    """``bool[W]``, to broadcast with ``[W, ...]``."""
    return here.reshape(-1, *[1] * (leaf.ndim - 1))


def product(how: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """In full float32, on chips too that round before they multiply."""
    return jnp.einsum(how, a, b, precision=jax.lax.Precision.HIGHEST)
