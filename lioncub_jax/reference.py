"""Every algorithm on one page: the workers are a leading array axis, and nothing is packed.

This is the oracle of the tests, and a simulator of many workers on one device. It shares no code with
the rest of the package. The rules, for workers ``i = 0 .. W-1`` and the step after ``t`` others:

* **Buffer.** Each leaf is cut into rows of 64 elements, the last one padded; the rows of all leaves, in
  the order of the tree, are one buffer. A leaf takes whole blocks where blocks share a step.
* **Coin.** Element ``e`` of the buffer has a fair bit, the same for all: bit ``e % 32`` of
  ``mix(e // 32 ^ mix(t + 0x9E3779B9))``, where ``mix`` is the finaliser of MurmurHash3.
* **Codes.** ``q`` in ``0..top`` stands for ``(2q - top) step/2``. Mid-rise (``top`` odd) has no code for
  zero: an exact zero takes one of the two inner codes, the upper if its coin is 1, the other way round
  on odd workers. Mid-tread (``top`` even) has. Padding says ``top``.
* **Who votes.** A worker with a value that is not finite abstains from the step, and so does one that
  is told to; its momentum and error stay. With mid-rise codes a worker does not vote on a row whose
  values are all exactly zero. With mid-tread codes everybody votes, and an abstainer says zero.
* **Decision.** With ``S`` the sum of the codes of the ``N`` workers that vote on a row, the update is
  ``sign(2S - N top)``; a tie takes the coin (``majority``) or is 0 (``ternary_sum``); ``average`` is
  ``(2S - N top) / (N top)``. Where nobody votes it is 0.
* **Local momentum.** Worker i encodes ``b1 mu_i + (1-b1) g_i`` and keeps ``b2 mu_i + (1-b2) g_i``.
* **Momentum at the owner.** Worker i encodes ``g_i``, with error feedback ``x_i = g_i + e_i``, and keeps
  ``e_i = x_i - decoded``. The mean of what is decoded, over those who take part, goes into one Lion for
  all. Its sign is the update; a zero takes the coin, unless the whole row is zero. No step counts for
  more than ``dominance`` times the next largest on its block. With nobody there, nothing changes.
* **One worker** sends nothing: its update is the exact sign, and nothing is quantised.

Sources: Lion (arXiv 2302.06675), Distributed Lion (2404.00438), Lion Cub (2411.16462). The rules for
zeros, ties and abstention, mid-rise codes of more than one bit, and momentum at the owner are ours.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

ROW = 64

# Best uniform steps for a Gaussian (Max 1960) in units of the root mean square; p = 1: mean magnitude.
GAUSSIAN_STEP = {
    1: 2.0, 2: 0.9957, 3: 0.586, 4: 0.335, 5: 0.1881, 6: 0.1041, 7: 0.0569, 8: 0.0308,
}  # fmt: skip


class Place(NamedTuple):
    """Where a leaf lies: its index in the tree, first element in the buffer, size, and rows."""

    leaf: int
    first: int
    size: int
    rows: int


class Codes(NamedTuple):
    """A quantiser: ``top(W)``, elements that share a known step (or None), and ``encode``.

    ``encode(float32[W, rows, 64], Place, t) -> (codes [W, rows, 64], step float32[W, rows, 1])``.
    """

    top: Callable[[int], int]
    block: int | None
    encode: Callable[[jax.Array, Place, Any], tuple[jax.Array, jax.Array]]


class Ballots(NamedTuple):
    """What all workers say: codes ``[W, rows, 64]``, steps ``[W, rows, 1]``, votes ``bool[W, rows, 1]``."""

    codes: jax.Array
    steps: jax.Array
    votes: jax.Array
    finite: jax.Array  # bool[W]


class State(NamedTuple):
    """What is remembered; the leaves of ``mu`` and ``error`` begin with ``[W]``.

    Momentum at the owner is one buffer ``[rows, 64]``.
    """

    count: jax.Array
    mu: Any
    error: Any
    ties: jax.Array  # float32[]: parameters whose votes cancelled in the last step, where any moved
    abstained: jax.Array
    abstentions: jax.Array


class Simulator(NamedTuple):
    """``init(params, W) -> State``; ``update(grads [W, ...], state, params, abstain bool[W])``.

    ``update`` returns what all workers agreed on, shaped like the parameters, and the new state.
    """

    init: Callable[[Any, int], State]
    update: Callable[..., tuple[Any, State]]


# --- The buffer and the coin


def places(sizes: list[int], block: int | None) -> list[Place]:
    """Places leaves of these sizes behind each other, each padded to whole blocks."""
    span, first, found = block or ROW, 0, []
    for leaf, size in enumerate(sizes):
        rows = -(-size // span) * (span // ROW)
        found.append(Place(leaf, first, size, rows))
        first += rows * ROW
    return [place for place in found if place.size]


def to_rows(x: jax.Array, place: Place) -> jax.Array:
    """``[W, ...]`` to ``float32[W, rows, 64]``, zeros behind the end."""
    flat = x.reshape(x.shape[0], -1).astype(jnp.float32)
    flat = jnp.pad(flat, ((0, 0), (0, place.rows * ROW - place.size)))
    return flat.reshape(-1, place.rows, ROW)


def is_real(place: Place) -> jax.Array:
    """``bool[rows, 64]``, False for padding."""
    return jnp.arange(place.rows * ROW).reshape(-1, ROW) < place.size


def coin(first: int, rows: int, t: Any) -> jax.Array:
    """``int32[rows, 64]`` of zeros and ones for the elements from ``first`` on."""
    element = jnp.arange(rows * ROW, dtype=jnp.uint32).reshape(rows, ROW) + jnp.uint32(first)
    word = _mix(element // 32 ^ _mix(jnp.asarray(t, jnp.uint32) + jnp.uint32(0x9E3779B9)))
    return ((word >> (element % 32)) & 1).astype(jnp.int32)


def _mix(h: jax.Array) -> jax.Array:
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


# --- Values to codes


def sign() -> Codes:
    """One bit."""
    return midrise(1)


def midrise(p: int, block: int | None = None, seed: int | None = None) -> Codes:
    """``q = floor(x / step) + 2**(p-1)``, clipped; with a seed, rounded at random."""
    half, top = 2 ** (p - 1), 2**p - 1

    def encode(x: jax.Array, place: Place, t: Any) -> tuple[jax.Array, jax.Array]:
        width = GAUSSIAN_STEP[p] * scale(x, place.size, block, magnitude=p == 1)
        width = lax.reduce_precision(width, exponent_bits=8, mantissa_bits=7)  # as bfloat16 travels
        in_steps = x * _inverse(width)
        if seed is None:
            inward = jnp.minimum(jnp.abs(in_steps), half - 1).astype(jnp.int32)
            codes = jnp.where(x > 0, half + inward, half - 1 - inward)
        else:
            level = jnp.floor(in_steps + (half - 0.5) + _noise(x, place, t, seed))
            codes = jnp.clip(level, 0, top).astype(jnp.int32)
        odd_worker = jnp.arange(x.shape[0])[:, None, None] % 2
        upper = coin(place.first, place.rows, t) ^ odd_worker
        codes = jnp.where(x == 0, half - 1 + upper, codes)
        return jnp.where(is_real(place), codes, top), width

    return Codes(lambda workers: top, block, encode)


def integer(p: int = 8, seed: int | None = None) -> Codes:
    """Lion Cub's: ``clip(round(x / mean|x| s/2), -s, s)``, whose sum over W workers fits in p bits."""

    def s_of(workers: int) -> int:
        return (2 ** (p - 1) - 1) // workers

    def encode(x: jax.Array, place: Place, t: Any) -> tuple[jax.Array, jax.Array]:
        s = s_of(x.shape[0])
        width = scale(x, place.size, None, magnitude=True)
        level = x * (_inverse(width) * (s / 2))
        if seed is not None:
            level = jnp.floor(level + _noise(x, place, t, seed))
        codes = (jnp.clip(jnp.round(level), -s, s) + s).astype(jnp.int32)
        return jnp.where(is_real(place), codes, 2 * s), width

    return Codes(lambda workers: 2 * s_of(workers), None, encode)


def ternary() -> Codes:
    """The exact sign: -1, 0 or +1."""

    def encode(x: jax.Array, place: Place, t: Any) -> tuple[jax.Array, jax.Array]:
        codes = jnp.sign(x).astype(jnp.int32) + 1
        return jnp.where(is_real(place), codes, 2), jnp.ones_like(x[..., :1])

    return Codes(lambda workers: 2, None, encode)


def dense(dtype: Any = jnp.float32) -> Codes:
    """No quantisation: values are their own codes, ``top`` is 0 and the step 1."""

    def encode(x: jax.Array, place: Place, t: Any) -> tuple[jax.Array, jax.Array]:
        return x.astype(dtype).astype(jnp.float32), jnp.ones_like(x[..., :1])

    return Codes(lambda workers: 0, None, encode)


def decode(codes: jax.Array, step: jax.Array, top: int) -> jax.Array:
    """``(2q - top) step/2``."""
    return (2 * codes - top).astype(jnp.float32) * (step / 2)


def scale(x: jax.Array, size: int, block: int | None, magnitude: bool) -> jax.Array:
    """Mean magnitude or root mean square of each block or of the leaf: ``float32[W, rows, 1]``."""
    span = block or x[0].size
    blocks = (jnp.abs(x) if magnitude else x * x).reshape(x.shape[0], -1, span)
    real = jnp.clip(size - span * jnp.arange(blocks.shape[1]), 1, span)
    mean = jnp.sum(blocks, axis=-1) / real.astype(jnp.float32)
    return jnp.repeat(mean if magnitude else jnp.sqrt(mean), span // ROW, axis=1)[..., None]


def _inverse(x: jax.Array) -> jax.Array:
    return jnp.where(x > 0, 1 / jnp.where(x > 0, x, 1), 0)


def _noise(x: jax.Array, place: Place, t: Any, seed: int) -> jax.Array:
    def of_worker(i: jax.Array) -> jax.Array:
        key = jax.random.key(seed)
        for part in (t, i, place.leaf):
            key = jax.random.fold_in(key, part)
        return jax.random.uniform(key, x.shape[1:])

    return jax.vmap(of_worker)(jnp.arange(x.shape[0]))


def ballots(codes: Codes, messages: list[jax.Array], t: Any) -> Ballots:
    """All leaves ``[W, ...]`` in codes, behind each other in one buffer."""
    parts = []
    for place in places([m[0].size for m in messages], codes.block):
        x = to_rows(messages[place.leaf], place)
        q, step = codes.encode(x, place, t)
        votes = jnp.any(x != 0, axis=-1, keepdims=True)
        usable = jnp.isfinite(step) if codes.block else True
        parts.append(Ballots(q, step, votes, jnp.all(jnp.isfinite(x) & usable, axis=(1, 2))))
    q, step, votes = (jnp.concatenate(x, axis=1) for x in list(zip(*parts, strict=True))[:3])
    return Ballots(q, step, votes, jnp.all(jnp.stack([part.finite for part in parts]), axis=0))


# --- The decision, on `int32[rows, 64]` codes of all workers


def count(cast: Ballots, takes_part: jax.Array, top: int) -> tuple[jax.Array, jax.Array]:
    """``2S - N top``, and ``N top`` for each row: ``int32[rows, 64]`` and ``int32[rows, 1]``."""
    present = takes_part[:, None, None]
    if top % 2 == 0:
        codes, reach = jnp.where(present, cast.codes, top // 2), takes_part.size * top
        return 2 * jnp.sum(codes, axis=0) - reach, jnp.full(cast.votes.shape[1:], reach)
    votes = cast.votes & present
    reach = top * jnp.sum(votes, axis=0, dtype=jnp.int32)
    return 2 * jnp.sum(jnp.where(votes, cast.codes, 0), axis=0) - reach, reach


def majority(margin: jax.Array, reach: jax.Array, coins: jax.Array) -> jax.Array:
    """The sign; a tie takes the coin. Distributed Lion "MaVo", Lion Cub."""
    return jnp.where(margin == 0, 2 * coins - 1, jnp.sign(margin)) * (reach > 0)


def ternary_sum(margin: jax.Array, reach: jax.Array, coins: jax.Array) -> jax.Array:
    """The sign; a tie is 0."""
    return jnp.sign(margin)


def average(margin: jax.Array, reach: jax.Array, coins: jax.Array) -> jax.Array:
    """The mean vote, in [-1, 1]. Distributed Lion "Avg"."""
    return margin / jnp.maximum(reach, 1).astype(jnp.float32)


def bounded_mean(cast: Ballots, takes_part: jax.Array, top: int, dominance: float) -> jax.Array:
    """The mean of what is decoded, over the workers that take part: ``float32[rows, 64]``."""
    present = takes_part[:, None, None]
    steps = jnp.where(present, cast.steps, 0)
    next_largest = jnp.sort(steps, axis=0)[-2]
    limit = jnp.where(next_largest > 0, dominance * next_largest, jnp.inf)
    steps, codes = jnp.minimum(steps, limit), jnp.where(present, cast.codes, 0)
    decoded = lambda i: decode(codes[i], steps[i], top)  # noqa: E731
    total = lax.fori_loop(1, len(steps), lambda i, total: total + decoded(i), decoded(0))
    return total / jnp.maximum(jnp.sum(takes_part), 1).astype(jnp.float32)


# --- One step of everybody


def local_momentum(
    b1: float = 0.9,
    b2: float = 0.99,
    mu_dtype: Any = None,
    codes: Codes | None = None,
    decide: Callable[..., jax.Array] | None = None,
) -> Simulator:
    """Every worker has its own momentum and votes with its own blend."""
    codes = codes or sign()
    decide = decide or (ternary_sum if codes.top(1) % 2 == 0 else majority)

    def init(params: Any, workers: int) -> State:
        return _state(_per_worker(params, workers, mu_dtype), None)

    def update(grads: Any, state: State, params: Any = None, abstain: Any = None) -> Any:
        g, tree = jax.tree.flatten(grads)
        mu = jax.tree.leaves(state.mu)
        workers = g[0].shape[0]
        messages = [(1 - b1) * gi + b1 * mi for gi, mi in zip(g, mu, strict=True)]
        cast = ballots(codes, messages, state.count)
        takes_part = cast.finite & ~_told(abstain, workers)
        margin, reach = count(cast, takes_part, codes.top(workers))
        rows = decide(margin, reach, coin(0, len(margin), state.count))
        ties = _real_count((margin == 0) & (reach > 0), g, codes)
        if workers == 1:
            rows, ties = _exact_sign(messages, takes_part, codes), jnp.float32(0)
        kept = [((1 - b2) * gi + b2 * mi).astype(mi.dtype) for gi, mi in zip(g, mu, strict=True)]
        mu = tree.unflatten(_keep_unless(takes_part, kept, mu))
        return tree.unflatten(_leaves(rows, messages, codes)), _next(
            state, mu, None, ties, takes_part
        )

    return Simulator(init, update)
