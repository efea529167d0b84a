"""Every algorithm on one page: the workers are a leading array axis, and nothing is packed.

This is the oracle of the tests, and a simulator of many workers on one device. It shares no code with
the rest of the package. The rules, for workers ``i = 0 .. W-1`` and the step after ``t`` others:

* **Buffer.** Each leaf is cut into rows of 64 elements, the last one padded; the rows of all leaves, in
  the order of the tree, are one buffer. A leaf takes whole blocks where blocks share a step.
* **Coin.** Element ``e`` of the buffer has a fair bit, the same for all: bit ``e % 32`` of
  ``mix(e // 32 ^ mix(t + 0x9E3779B9))``, where ``mix`` is the finaliser of MurmurHash3.
* **Codes.** ``q`` in ``0..top`` stands for ``(q - top/2) step``. Mid-rise (``top`` odd) has no code for
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
    """Where a leaf lies: its index in the tree, first row in the buffer, rows, and real elements."""

    leaf: int
    first_row: int
    rows: int
    size: int


class Codes(NamedTuple):
    """A quantiser; ``encode(x float32[W, rows, 64], Place, t)`` gives codes and ``step [W, rows, 1]``."""

    top: Callable[[int], int]  # W -> largest code; even if a code means zero
    block: int | None  # elements that share a step which the owner knows
    encode: Callable[[jax.Array, Place, Any], tuple[jax.Array, jax.Array]]


class Said(NamedTuple):
    """What the workers say about one leaf."""

    q: jax.Array  # [W, rows, 64]
    step: jax.Array  # float32[W, rows, 1]
    votes: jax.Array  # bool[W, rows, 1]


class State(NamedTuple):
    """What is remembered."""

    t: jax.Array  # int32[]: steps taken
    mu: Any  # local momentum, leaves [W, ...]; or the owner's, leaves in rows [rows, 64]
    error: Any  # error feedback, leaves [W, ...]; or None
    ties: jax.Array  # float32[]: parameters whose votes cancelled in the last step
    abstained: jax.Array  # int32[]: workers that sat out the last step
    abstentions: jax.Array  # int32[]: their sum over all steps


class Simulator(NamedTuple):
    """All workers at once; updates are what they agreed on, shaped like the parameters."""

    init: Callable[[Any, int], State]  # (params, W)
    update: Callable[..., Any]  # (grads [W, ...], state, params=None, abstain bool[W]=None)


# --- The buffer and its coins


def places(sizes: list[int], block: int | None) -> list[Place]:
    """Places leaves of these sizes behind each other, each padded to whole blocks."""
    span, found, first_row = block or ROW, [], 0
    for leaf, size in enumerate(sizes):
        found.append(Place(leaf, first_row, -(-size // span) * (span // ROW), size))
        first_row += found[-1].rows
    return found


def to_rows(x: jax.Array, place: Place) -> jax.Array:
    """``[W, ...]`` to ``float32[W, rows, 64]``, zeros behind the end."""
    flat = x.reshape(x.shape[0], place.size).astype(jnp.float32)
    flat = jnp.pad(flat, ((0, 0), (0, place.rows * ROW - place.size)))
    return flat.reshape(x.shape[0], place.rows, ROW)


def from_rows(rows: jax.Array, place: Place, shape: tuple[int, ...]) -> jax.Array:
    """``[..., rows, 64]`` to ``[..., *shape]``."""
    flat = rows.reshape(*rows.shape[:-2], place.rows * ROW)
    return flat[..., : place.size].reshape(*rows.shape[:-2], *shape)


def real(place: Place) -> jax.Array:
    """``bool[rows, 64]``, False for padding."""
    return jnp.arange(place.rows * ROW).reshape(place.rows, ROW) < place.size


def coin(place: Place, t: Any) -> jax.Array:
    """``int32[rows, 64]`` of zeros and ones."""
    element = jnp.arange(place.rows * ROW, dtype=jnp.uint32) + jnp.uint32(place.first_row * ROW)
    word = _mix(element // 32 ^ _mix(jnp.asarray(t, jnp.uint32) + jnp.uint32(0x9E3779B9)))
    return ((word >> (element % 32)) & 1).astype(jnp.int32).reshape(place.rows, ROW)


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
        step = GAUSSIAN_STEP[p] * scale(x, place, block, magnitude=p == 1)
        step = lax.reduce_precision(step, exponent_bits=8, mantissa_bits=7)  # travels as bfloat16
        in_steps = x * _inverse(step)
        if seed is None:  # magnitude and side apart, so that -x gets the mirrored code of x
            inward = jnp.minimum(jnp.abs(in_steps), half - 1).astype(jnp.int32)
            q = jnp.where(x > 0, half + inward, half - 1 - inward)
        else:
            level = jnp.floor(in_steps + (half - 0.5) + _noise(x, place, t, seed))
            q = jnp.clip(level, 0, top).astype(jnp.int32)
        odd_worker = jnp.arange(x.shape[0])[:, None, None] % 2
        q = jnp.where(x == 0, half - 1 + (coin(place, t) ^ odd_worker), q)
        return jnp.where(real(place), q, top), step

    return Codes(lambda workers: top, block, encode)


def integer(p: int = 8, seed: int | None = None) -> Codes:
    """Lion Cub's: ``clip(round(x / mean|x| s/2), -s, s)``, whose sum over W workers fits in p bits."""

    def top(workers: int) -> int:
        return 2 * ((2 ** (p - 1) - 1) // workers)

    def encode(x: jax.Array, place: Place, t: Any) -> tuple[jax.Array, jax.Array]:
        s = top(x.shape[0]) // 2
        mean = scale(x, place, None, magnitude=True)
        level = x * (_inverse(mean) * (s / 2))
        if seed is not None:
            level = jnp.floor(level + _noise(x, place, t, seed))
        q = (jnp.clip(jnp.round(level), -s, s) + s).astype(jnp.int32)
        return jnp.where(real(place), q, 2 * s), mean

    return Codes(top, None, encode)


def ternary() -> Codes:
    """The exact sign: -1, 0 or +1."""

    def encode(x: jax.Array, place: Place, t: Any) -> tuple[jax.Array, jax.Array]:
        q = jnp.where(real(place), jnp.sign(x) + 1, 2).astype(jnp.int32)
        return q, jnp.ones_like(x[..., :1])

    return Codes(lambda workers: 2, None, encode)


def dense(dtype: Any = jnp.float32) -> Codes:
    """No quantisation: values are their own codes, ``top`` is 0 and the step 1."""

    def encode(x: jax.Array, place: Place, t: Any) -> tuple[jax.Array, jax.Array]:
        return x.astype(dtype).astype(jnp.float32), jnp.ones_like(x[..., :1])

    return Codes(lambda workers: 0, None, encode)


def decode(said: Said, top: int) -> jax.Array:
    """``(q - top/2) step``; exact, a short integer times a bfloat16."""
    return (said.q.astype(jnp.float32) - top / 2) * said.step


def scale(x: jax.Array, place: Place, block: int | None, magnitude: bool) -> jax.Array:
    """Mean magnitude or root mean square of each block or of the leaf: ``float32[W, rows, 1]``."""
    span = block or place.rows * ROW or ROW
    x = jnp.abs(x) if magnitude else x * x
    blocks = x.reshape(x.shape[0], place.rows * ROW // span, span)
    elements = jnp.clip(place.size - span * jnp.arange(blocks.shape[1]), 1, span)
    mean = jnp.sum(blocks, axis=-1) / elements.astype(jnp.float32)
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


def speak(
    codes: Codes, spots: list[Place], messages: list[jax.Array], t: Any, abstain: Any
) -> tuple[list[Said], jax.Array]:
    """What all workers say about each leaf, and who takes part, ``bool[W, 1, 1]``."""
    all_said, takes_part = [], jnp.ones((messages[0].shape[0],), bool)
    for place, message in zip(spots, messages, strict=True):
        x = to_rows(message, place)
        q, step = codes.encode(x, place, t)
        all_said.append(Said(q, step, jnp.any(x != 0, axis=-1, keepdims=True)))
        takes_part &= jnp.all(jnp.isfinite(x), axis=(1, 2))
        if codes.block:
            takes_part &= jnp.all(jnp.isfinite(step), axis=(1, 2))
    takes_part = takes_part if abstain is None else takes_part & ~abstain
    return all_said, takes_part[:, None, None]


# --- The decision, for one leaf: of integers, or of floats with `reach` whether the row moves


def count(said: Said, takes_part: jax.Array, top: int) -> tuple[jax.Array, jax.Array]:
    """``2S - N top`` of each element, ``[rows, 64]``, and ``N top`` of each row, ``int32[rows, 1]``."""
    has_zero = top % 2 == 0
    votes = jnp.ones_like(said.votes) if has_zero else said.votes & takes_part
    q = jnp.where(takes_part, said.q, top // 2) if has_zero else said.q
    reach = top * jnp.sum(votes, axis=0, dtype=jnp.int32)
    return 2 * jnp.sum(jnp.where(votes, q, 0), axis=0) - reach, reach


def majority(margin: jax.Array, reach: jax.Array, coins: jax.Array) -> jax.Array:
    """The sign; a tie takes the coin. Distributed Lion "MaVo", Lion Cub."""
    return jnp.where(margin == 0, 2 * coins - 1, jnp.sign(margin)) * (reach > 0)


def ternary_sum(margin: jax.Array, reach: jax.Array, coins: jax.Array) -> jax.Array:
    """The sign; a tie is 0."""
    return jnp.sign(margin)


def average(margin: jax.Array, reach: jax.Array, coins: jax.Array) -> jax.Array:
    """The mean vote, in [-1, 1]. Distributed Lion "Avg"."""
    return margin / jnp.maximum(reach, 1).astype(jnp.float32)


def bounded_mean(said: Said, takes_part: jax.Array, top: int, dominance: float) -> jax.Array:
    """The mean of what is decoded, over the workers that take part: ``float32[rows, 64]``."""
    step = jnp.where(takes_part, said.step, 0)
    next_largest = jnp.sort(step, axis=0)[-2:][0]
    limit = jnp.where(next_largest > 0, dominance * next_largest, jnp.inf)
    decoded = decode(said._replace(step=jnp.minimum(step, limit)), top)
    decoded = jnp.where(takes_part, decoded, 0)
    total = lax.fori_loop(1, len(step), lambda i, total: total + decoded[i], decoded[0])
    return total / jnp.maximum(jnp.sum(takes_part), 1).astype(jnp.float32)


# --- One step of all workers


def local_momentum(
    b1: float = 0.9,
    b2: float = 0.99,
    mu_dtype: Any = None,
    codes: Codes | None = None,
    decide: Callable[..., jax.Array] | None = None,
) -> Simulator:
    """Every worker votes with its own blend and has its own momentum: Distributed Lion, Lion Cub."""
    chosen = codes or sign()
    rule = decide or (ternary_sum if chosen.top(1) % 2 == 0 else majority)

    def init(params: Any, workers: int) -> State:
        return _state(_per_worker(params, workers, mu_dtype), None)

    def update(grads: Any, state: State, params: Any = None, abstain: Any = None) -> Any:
        g, tree = jax.tree.flatten(grads)
        mu, t, workers = jax.tree.leaves(state.mu), state.t, g[0].shape[0]
        codes, decide = (chosen, rule) if workers > 1 else (_exact(chosen), ternary_sum)
        spots = places([x[0].size for x in g], codes.block)
        messages = [(1 - b1) * x + b1 * m for x, m in zip(g, mu, strict=True)]
        said, takes_part = speak(codes, spots, messages, t, abstain)
        updates, ties = [], jnp.float32(0)
        for place, words, message in zip(spots, said, messages, strict=True):
            margin, reach = count(words, takes_part, codes.top(workers))
            u = from_rows(decide(margin, reach, coin(place, t)), place, message.shape[1:])
            updates.append(u.astype(message.dtype))
            ties += jnp.sum((margin == 0) & (reach > 0) & real(place))
        kept = [((1 - b2) * x + b2 * m).astype(m.dtype) for x, m in zip(g, mu, strict=True)]
        mu = _unless_absent(takes_part, kept, mu)
        state = _after(state, ties, takes_part)._replace(mu=jax.tree.unflatten(tree, mu))
        return jax.tree.unflatten(tree, updates), state

    return Simulator(init, update)


def momentum_at_owner(
    b1: float = 0.9,
    b2: float = 0.99,
    mu_dtype: Any = None,
    codes: Codes | None = None,
    feedback: Any = None,
    dominance: float = 16.0,
    decide: Callable[..., jax.Array] = majority,
) -> Simulator:
    """Workers send gradients to one Lion; ``feedback`` is the dtype of the errors they keep."""
    chosen = codes or midrise(3, block=128)

    def init(params: Any, workers: int) -> State:
        leaves, tree = jax.tree.flatten(params)
        dtype = mu_dtype or jnp.result_type(*(p.dtype for p in leaves if p.size))
        spots = places([p.size for p in leaves], chosen.block)
        mu = [jnp.zeros((place.rows, ROW), dtype) for place in spots]
        error = _per_worker(params, workers, feedback) if feedback else None
        return _state(jax.tree.unflatten(tree, mu), error)

    def update(grads: Any, state: State, params: Any = None, abstain: Any = None) -> Any:
        g, tree = jax.tree.flatten(grads)
        mus, t, workers = jax.tree.leaves(state.mu), state.t, g[0].shape[0]
        codes, rule = (chosen, decide) if workers > 1 else (_exact(chosen), ternary_sum)
        top, spots = codes.top(workers), places([x[0].size for x in g], codes.block)
        dtype = jnp.result_type(*(x.dtype for x in g if x.size))
        x = [leaf.astype(jnp.float32) for leaf in g]
        if feedback:
            errors = jax.tree.leaves(state.error)
            x = [xi + e.astype(jnp.float32) for xi, e in zip(x, errors, strict=True)]
        said, takes_part = speak(codes, spots, x, t, abstain)
        updates, new_mus, ties, anybody = [], [], jnp.float32(0), jnp.any(takes_part)
        for place, words, mu, leaf in zip(spots, said, mus, g, strict=True):
            mean = bounded_mean(words, takes_part, top, dominance).astype(dtype)
            c = jnp.where(anybody, (1 - b1) * mean + b1 * mu, 0)
            new_mu = ((1 - b2) * mean + b2 * mu).astype(mu.dtype)
            new_mus.append(jnp.where(anybody, new_mu, mu))
            moves = jnp.any(c != 0, axis=-1, keepdims=True)
            u = from_rows(rule(c, moves, coin(place, t)), place, leaf.shape[1:])
            updates.append(u.astype(leaf.dtype))
            ties += jnp.sum((c == 0) & moves & real(place)) * (workers > 1)
        state = _after(state, ties, takes_part)._replace(mu=jax.tree.unflatten(tree, new_mus))
        if feedback:
            heard = [decode(words, top) for words in said]
            heard = [from_rows(h, s, y.shape[1:]) for h, s, y in zip(heard, spots, x, strict=True)]
            missed = [(y - h).astype(feedback) for y, h in zip(x, heard, strict=True)]
            missed = _unless_absent(takes_part, missed, errors)
            state = state._replace(error=jax.tree.unflatten(tree, missed))
        return jax.tree.unflatten(tree, updates), state

    return Simulator(init, update)


def _state(mu: Any, error: Any) -> State:
    return State(jnp.int32(0), mu, error, jnp.float32(0), jnp.int32(0), jnp.int32(0))


def _per_worker(params: Any, workers: int, dtype: Any) -> Any:
    return jax.tree.map(lambda p: jnp.zeros((workers, *p.shape), dtype or p.dtype), params)


def _exact(codes: Codes) -> Codes:
    """What one worker alone says: its values, laid out as its codes would be."""
    return dense()._replace(block=codes.block)


def _unless_absent(takes_part: jax.Array, new: list[Any], old: list[Any]) -> list[Any]:
    here = [takes_part.reshape(-1, *[1] * (x.ndim - 1)) for x in new]
    return [jnp.where(h, n, o) for h, n, o in zip(here, new, old, strict=True)]


def _after(state: State, ties: jax.Array, takes_part: jax.Array) -> State:
    away = jnp.sum(~takes_part, dtype=jnp.int32)
    return State(state.t + 1, state.mu, state.error, ties, away, state.abstentions + away)


# --- Now and then: momentum in full precision; and at last, the optimizers


def sync(mu: Any) -> Any:
    """Momenta ``[W, ...]``, each the mean of all."""

    def leaf(m: jax.Array) -> jax.Array:
        mean = jnp.mean(m.astype(jnp.float32), axis=0).astype(m.dtype)
        return jnp.broadcast_to(mean, m.shape)

    return jax.tree.map(leaf, mu)


def drift(mu: Any) -> Any:
    """The share of each leaf's mean square that is variance between workers, in [0, 1]."""

    def leaf(m: jax.Array) -> jax.Array:
        m = m.astype(jnp.float32)
        common, total = jnp.sum(jnp.mean(m, axis=0) ** 2), jnp.sum(m**2) / len(m)
        return jnp.where(total > 0, 1 - common / jnp.where(total > 0, total, 1), 0)

    return jax.tree.map(leaf, mu)


def optimizer(
    simulator: Simulator,
    learning_rate: Any,
    weight_decay: float = 1e-3,
    mask: Any = None,
    sync_due: Callable[[jax.Array], jax.Array] | None = None,
) -> Simulator:
    """Makes of votes ``u`` the updates ``-lr (u + wd p)``, and averages momenta where due.

    Args:
      simulator: `local_momentum` or `momentum_at_owner`.
      learning_rate: a number, or a function of the steps taken before.
      weight_decay: decoupled, as in Lion.
      mask: a tree of bools, the leaves that decay; None for all.
      sync_due: whether momenta are averaged at a step, which counts from 1; None for never.
    """

    def update(grads: Any, state: State, params: Any, abstain: Any = None) -> Any:
        lr = learning_rate(state.t) if callable(learning_rate) else learning_rate
        votes, state = simulator.update(grads, state, params, abstain)
        if sync_due is not None:
            mu = lax.cond(sync_due(state.t), sync, lambda mu: mu, state.mu)
            state = state._replace(mu=mu)
        decays = jax.tree.map(lambda p: True, params) if mask is None else mask
        decay = jax.tree.map(lambda p, yes: weight_decay * p if yes else 0, params, decays)
        return jax.tree.map(lambda u, d: (-lr * (u + d)).astype(u.dtype), votes, decay), state

    return Simulator(simulator.init, update)
