"""Every algorithm on one page: the workers are a leading array axis, and nothing is packed.

This is the oracle of the tests, and a simulator of many workers on one device. It shares no code with
the rest of the package. The rules, for workers ``i = 0 .. W-1`` and the step after ``t`` others:

* **Buffer.** Each leaf is cut into rows of 64 elements, the last one padded; the rows of all leaves, in
  the order of the tree, are one buffer. A leaf takes whole blocks where blocks share a step.
* **Coin.** Element ``e`` of the buffer has a fair bit, the same for all: bit ``e % 32`` of
  ``mix(e // 32 ^ mix(t + 0x9E3779B9))``, where ``mix`` is the finaliser of MurmurHash3. Where a worker
  is several devices, each votes on its own shard or slice, and ``places`` says where its coins lie.
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
  all. Its sign is the update; a zero takes the coin, unless the row is all zeros, padding included. No
  step counts for more than ``dominance`` times the next largest on its block. With nobody there,
  nothing changes.
* **One worker** sends nothing: its update is the exact sign, and nothing is quantised.

Sources: Lion (arXiv 2302.06675), Distributed Lion (2404.00438), Lion Cub (2411.16462). The rules for
zeros, ties and abstention, mid-rise codes of more than one bit, and momentum at the owner are ours.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROW = 64

# Best uniform steps for a Gaussian (Max 1960) in units of the root mean square; p = 1: mean magnitude.
GAUSSIAN_STEP = {
    1: 2.0, 2: 0.9957, 3: 0.586, 4: 0.335, 5: 0.1881, 6: 0.1041, 7: 0.0569, 8: 0.0308,
}  # fmt: skip


class Buffer(NamedTuple):
    """All leaves in rows of 64."""

    shapes: tuple[tuple[int, ...], ...]  # of the leaves
    rows: tuple[int, ...]  # of each leaf, padding included
    real: np.ndarray  # bool[rows, 64], False for padding
    sharing: np.ndarray  # int[rows]: rows of equal number share a step
    place: np.ndarray  # int[rows]: where the coins of each row lie, in rows

    def join(self, leaves: list[jax.Array]) -> jax.Array:
        """Leaves ``[W, ...]`` to ``float32[W, rows, 64]``, zeros in the padding."""
        flat = [x.reshape(x.shape[0], math.prod(x.shape[1:])).astype(jnp.float32) for x in leaves]
        short = [rows * ROW - x.shape[1] for rows, x in zip(self.rows, flat, strict=True)]
        flat = [jnp.pad(x, ((0, 0), (0, n))) for x, n in zip(flat, short, strict=True)]
        return jnp.concatenate(flat, axis=1).reshape(flat[0].shape[0], -1, ROW)

    def split(self, x: jax.Array, dtypes: list[Any]) -> list[jax.Array]:
        """``[..., rows, 64]`` to leaves ``[..., *shape]``."""
        parts = jnp.split(x, np.cumsum(self.rows)[:-1], axis=-2)
        flat = [part.reshape(*part.shape[:-2], part.shape[-2] * ROW) for part in parts]
        return [
            part[..., : math.prod(shape)].reshape(*part.shape[:-1], *shape).astype(dtype)
            for part, shape, dtype in zip(flat, self.shapes, dtypes, strict=True)
        ]


class Codes(NamedTuple):
    """A quantiser; ``encode(x float32[W, rows, 64], Buffer, t)`` gives what the workers say."""

    top: Callable[[int], int]  # W -> largest code; even if a code means zero
    block: int | None  # elements that share a step which the owner knows
    encode: Callable[[jax.Array, Buffer, Any], "Said"]


class Said(NamedTuple):
    """Codes ``[W, rows, 64]`` and the steps they are in, ``float32[W, rows, 1]``."""

    q: jax.Array
    step: jax.Array


class State(NamedTuple):
    """What is remembered."""

    t: jax.Array  # int32[]: steps taken
    mu: Any  # local momentum, leaves [W, ...]; or the owner's, one buffer [rows, 64]
    error: Any  # error feedback, leaves [W, ...]; or None
    ties: jax.Array  # float32[]: parameters whose votes cancelled in the last step
    abstained: jax.Array  # int32[]: workers that sat out the last step
    abstentions: jax.Array  # int32[]: their sum over all steps


class Simulator(NamedTuple):
    """All workers at once; updates are what they agreed on, shaped like the parameters."""

    init: Callable[[Any, int], State]  # (params, W)
    update: Callable[..., Any]  # (grads [W, ...], state, params=None, abstain bool[W]=None)


# --- The buffer and its coins


Places = Callable[[int], np.ndarray]  # rows -> int[rows], where their coins lie


def buffer_of(
    shapes: list[tuple[int, ...]], block: int | None, places: Places = np.arange
) -> Buffer:
    """Puts leaves behind each other, each padded to whole blocks."""
    span, sizes = block or ROW, [math.prod(shape) for shape in shapes]
    rows = [-(-size // span) * (span // ROW) for size in sizes]
    real = [np.arange(n * ROW) < size for n, size in zip(rows, sizes, strict=True)]
    leaf = np.repeat(np.arange(len(rows)), rows)
    sharing = np.arange(sum(rows)) * ROW // block if block else leaf
    elements = np.concatenate(real).reshape(-1, ROW)
    return Buffer(tuple(shapes), tuple(rows), elements, sharing, places(len(elements)))


def coin(place: np.ndarray, t: Any) -> jax.Array:
    """``int32[rows, 64]`` of zeros and ones."""
    element = place.astype(np.uint32)[:, None] * ROW + np.arange(ROW, dtype=np.uint32)
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

    def encode(x: jax.Array, buffer: Buffer, t: Any) -> Said:
        mean = _mean(jnp.abs(x), buffer) if p == 1 else jnp.sqrt(_mean(x * x, buffer))
        step = lax.reduce_precision(GAUSSIAN_STEP[p] * mean, 8, 7)  # it travels as bfloat16
        in_steps = x * _inverse(step)
        if seed is None:  # magnitude and side apart, so that -x gets the mirrored code of x
            inward = jnp.minimum(jnp.abs(in_steps), half - 1).astype(jnp.int32)
            q = jnp.where(x > 0, half + inward, half - 1 - inward)
        else:
            level = jnp.floor(in_steps + (half - 0.5) + _noise(x, buffer, t, seed))
            q = jnp.clip(level, 0, top).astype(jnp.int32)
        odd_worker = jnp.arange(x.shape[0])[:, None, None] % 2
        q = jnp.where(x == 0, half - 1 + (coin(buffer.place, t) ^ odd_worker), q)
        return Said(jnp.where(buffer.real, q, top), step)

    return Codes(lambda workers: top, block, encode)


def integer(p: int = 8, seed: int | None = None) -> Codes:
    """Lion Cub's: ``clip(round(x / mean|x| s/2), -s, s)``, whose sum over W workers fits in p bits."""

    def top(workers: int) -> int:
        return 2 * ((2 ** (p - 1) - 1) // workers)

    def encode(x: jax.Array, buffer: Buffer, t: Any) -> Said:
        s = top(x.shape[0]) // 2
        mean = _mean(jnp.abs(x), buffer)
        level = x * (_inverse(mean) * (s / 2))
        if seed is not None:
            level = jnp.floor(level + _noise(x, buffer, t, seed))
        q = (jnp.clip(jnp.round(level), -s, s) + s).astype(jnp.int32)
        return Said(jnp.where(buffer.real, q, 2 * s), mean)

    return Codes(top, None, encode)


def ternary() -> Codes:
    """The exact sign: -1, 0 or +1."""

    def encode(x: jax.Array, buffer: Buffer, t: Any) -> Said:
        q = jnp.where(buffer.real, jnp.sign(x) + 1, 2).astype(jnp.int32)
        return Said(q, jnp.ones_like(x[..., :1]))

    return Codes(lambda workers: 2, None, encode)


def dense(dtype: Any = jnp.float32) -> Codes:
    """No quantisation: values are their own codes, ``top`` is 0 and the step 1."""

    def encode(x: jax.Array, buffer: Buffer, t: Any) -> Said:
        return Said(x.astype(dtype).astype(jnp.float32), jnp.ones_like(x[..., :1]))

    return Codes(lambda workers: 0, None, encode)


def decode(said: Said, top: int) -> jax.Array:
    """``(q - top/2) step``; exact, a short integer times a bfloat16."""
    return (said.q.astype(jnp.float32) - top / 2) * said.step


def _mean(x: jax.Array, buffer: Buffer) -> jax.Array:
    """Means over the real elements that share a step, ``float32[W, rows, 1]``."""
    groups = buffer.sharing.max(initial=0) + 1
    real = np.bincount(buffer.sharing, buffer.real.sum(axis=1), groups)
    sums = jnp.zeros((x.shape[0], groups)).at[:, buffer.sharing].add(jnp.sum(x, axis=-1))
    return (sums / np.maximum(real, 1).astype(np.float32))[:, buffer.sharing, None]


def _inverse(x: jax.Array) -> jax.Array:
    return jnp.where(x > 0, 1 / jnp.where(x > 0, x, 1), 0)


def _noise(x: jax.Array, buffer: Buffer, t: Any, seed: int) -> jax.Array:
    """Uniform in [0, 1), from a key for each step, worker and leaf."""

    def of_worker(i: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), t), i)
        keys = [jax.random.fold_in(key, leaf) for leaf in range(len(buffer.rows))]
        drawn = [jax.random.uniform(k, (n, ROW)) for k, n in zip(keys, buffer.rows, strict=True)]
        return jnp.concatenate(drawn)

    return jax.vmap(of_worker)(jnp.arange(x.shape[0]))


def takes_part(codes: Codes, x: jax.Array, said: Said, abstain: Any) -> jax.Array:
    """``bool[W, 1, 1]``: workers that are not told to abstain and whose values are finite."""
    finite = jnp.isfinite(x) & jnp.isfinite(said.step) if codes.block else jnp.isfinite(x)
    present = jnp.all(finite, axis=(1, 2), keepdims=True)
    return present if abstain is None else present & ~abstain[:, None, None]


# --- The decision: of integers, or of floats, where `reach` says whether the row moves at all


def count(q: jax.Array, x: jax.Array, present: jax.Array, top: int) -> tuple[jax.Array, jax.Array]:
    """``2S - N top`` of each element, ``[rows, 64]``, and ``N top`` of each row, ``int32[rows, 1]``."""
    votes = jnp.any(x != 0, axis=-1, keepdims=True) & present
    if top % 2 == 0:
        q, votes = jnp.where(present, q, top // 2), jnp.ones_like(votes)
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


def bounded_mean(said: Said, present: jax.Array, top: int, dominance: float) -> jax.Array:
    """The mean of what is decoded, over the workers that take part: ``float32[rows, 64]``."""
    step = jnp.where(present, said.step, 0)
    next_largest = jnp.sort(step, axis=0)[-2:][0]
    limit = jnp.where(next_largest > 0, dominance * next_largest, jnp.inf)
    decoded = decode(Said(said.q, jnp.minimum(step, limit)), top)
    decoded = jnp.where(present, decoded, 0)
    total = lax.fori_loop(1, len(step), lambda i, total: total + decoded[i], decoded[0])
    return total / jnp.maximum(jnp.sum(present), 1).astype(jnp.float32)


# --- One step of all workers


def local_momentum(
    b1: float = 0.9,
    b2: float = 0.99,
    mu_dtype: Any = None,
    codes: Codes | None = None,
    decide: Callable[..., jax.Array] | None = None,
    places: Places = np.arange,
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
        buffer = buffer_of([leaf.shape[1:] for leaf in g], codes.block, places)
        messages = [(1 - b1) * leaf + b1 * m for leaf, m in zip(g, mu, strict=True)]
        x = buffer.join(messages)
        said = codes.encode(x, buffer, t)
        present = takes_part(codes, x, said, abstain)
        margin, reach = count(said.q, x, present, codes.top(workers))
        u = buffer.split(decide(margin, reach, coin(buffer.place, t)), _dtypes(messages))
        kept = [((1 - b2) * leaf + b2 * m).astype(m.dtype) for leaf, m in zip(g, mu, strict=True)]
        mu = jax.tree.unflatten(tree, _unless_absent(present, kept, mu))
        cancelled = (margin == 0) & (reach > 0) & buffer.real
        return jax.tree.unflatten(tree, u), _after(state, mu, state.error, cancelled, present)

    return Simulator(init, update)


def momentum_at_owner(
    b1: float = 0.9,
    b2: float = 0.99,
    mu_dtype: Any = None,
    codes: Codes | None = None,
    feedback: Any = None,
    dominance: float = 16.0,
    decide: Callable[..., jax.Array] = majority,
    places: Places = np.arange,
) -> Simulator:
    """Workers send gradients to one Lion; ``feedback`` is the dtype of the errors they keep."""
    chosen = codes or midrise(3, block=128)

    def init(params: Any, workers: int) -> State:
        leaves = jax.tree.leaves(params)
        buffer = buffer_of([p.shape for p in leaves], chosen.block)
        mu = jnp.zeros(buffer.real.shape, mu_dtype or _widest(leaves))
        return _state(mu, _per_worker(params, workers, feedback) if feedback else None)

    def update(grads: Any, state: State, params: Any = None, abstain: Any = None) -> Any:
        g, tree = jax.tree.flatten(grads)
        mu, t, workers = state.mu, state.t, g[0].shape[0]
        codes, rule = (chosen, decide) if workers > 1 else (_exact(chosen), ternary_sum)
        buffer = buffer_of([leaf.shape[1:] for leaf in g], codes.block, places)
        top = codes.top(workers)
        errors = jax.tree.leaves(state.error)
        x = buffer.join(g) + (buffer.join(errors) if feedback else 0)
        said = codes.encode(x, buffer, t)
        present = takes_part(codes, x, said, abstain)
        mean = bounded_mean(said, present, top, dominance).astype(_widest(g))
        c = jnp.where(jnp.any(present), (1 - b1) * mean + b1 * mu, 0)
        moves = jnp.any(c != 0, axis=-1, keepdims=True)
        u = buffer.split(rule(c, moves, coin(buffer.place, t)), _dtypes(g))
        kept = ((1 - b2) * mean + b2 * mu).astype(mu.dtype)
        mu = jnp.where(jnp.any(present), kept, mu)
        error = state.error
        if feedback:
            missed = buffer.split(x - decode(said, top), _dtypes(errors))
            error = jax.tree.unflatten(tree, _unless_absent(present, missed, errors))
        cancelled = (c == 0) & moves & buffer.real & (workers > 1)
        return jax.tree.unflatten(tree, u), _after(state, mu, error, cancelled, present)

    return Simulator(init, update)


def _state(mu: Any, error: Any) -> State:
    return State(jnp.int32(0), mu, error, jnp.float32(0), jnp.int32(0), jnp.int32(0))


def _after(state: State, mu: Any, error: Any, cancelled: jax.Array, present: jax.Array) -> State:
    away = jnp.sum(~present, dtype=jnp.int32)
    ties = jnp.sum(cancelled, dtype=jnp.float32)
    return State(state.t + 1, mu, error, ties, away, state.abstentions + away)


def _per_worker(params: Any, workers: int, dtype: Any) -> Any:
    return jax.tree.map(lambda p: jnp.zeros((workers, *p.shape), dtype or p.dtype), params)


def _exact(codes: Codes) -> Codes:
    """What one worker alone says: its values, laid out as its codes would be."""
    return dense()._replace(block=codes.block)


def _unless_absent(present: jax.Array, new: list[Any], old: list[Any]) -> list[Any]:
    here = [present.reshape(-1, *[1] * (leaf.ndim - 1)) for leaf in new]
    return [jnp.where(h, n, o) for h, n, o in zip(here, new, old, strict=True)]


def _dtypes(leaves: list[jax.Array]) -> list[Any]:
    return [leaf.dtype for leaf in leaves]


def _widest(leaves: list[jax.Array]) -> Any:
    return jnp.result_type(*(leaf.dtype for leaf in leaves if leaf.size))


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
