"""Every algorithm on one page: the workers are a leading array axis, and nothing is packed.

This is the oracle of the tests, and a simulator of many workers on one device. It shares no code with
the rest of the package. The rules, for workers ``i = 0 .. W-1`` and the step after ``t`` others:

* **Buffer.** A row is 128 consecutive elements of a leaf, the last row of a leaf is padded, and a block
  is 32 rows. First come the big leaves (more than 512 rows), each padded to whole blocks; then all
  others. A leaf without elements has no row. Each worker owns ``C`` rows of the buffer: ``rows / W``,
  rounded up to whole blocks, or to half blocks if no leaf is big.
* **Word and bit.** Row ``r`` of the chunk of worker ``w`` lies in block ``b = r // 32``. Its lane ``j`` is
  bit ``r % 32`` of word ``4 C w + 128 b + j``. In a last half block it is bit ``r % 16 + 16 (j // 64)``
  of word ``4 C w + 128 b + j % 64``.
* **Coins.** ``mix`` is the finaliser of MurmurHash3. The coin of a tie is this bit of
  ``mix(word ^ mix(t + 0x9E3779B9))``. The side of a zero is this bit of ``mix(word ^ mix(t +
  0x85EBCA77))``, the other way round on workers of odd rank; the rank of a worker is its place in the
  order of ``mix(i ^ mix(t + 0xC2B2AE3D))``. So zeros cancel in pairs, which are drawn anew each step.
* **Codes.** ``q`` in ``0..top`` stands for ``(q - top/2) step``. Mid-rise (``top`` odd) has no code for
  zero: an exact zero takes one of the two inner codes, the upper one if its side is 1. Mid-tread (``top``
  even) has one. The step of a mid-rise row is the best one for a Gaussian, from the mean magnitude of
  its real elements; integers are in units of the mean magnitude of their leaf. Padding is zeros and is
  coded as they are. No square is taken: values times a power of two give the same codes. Where the sum of
  a row overflows (from 2**121 on) its largest magnitude stands for the mean; the sum of a leaf is then
  taken of values times 2**-64.
* **Rotated codes** are those of ``y = x R`` of each row, padding included. ``R = diag(s) H`` with the
  Hadamard matrix ``H[i, j] = (-1)**(bits of i & j)``; ``s`` of lane ``j`` is -1 where the last bit of
  ``mix(j ^ mix(t + 0x27D4EB2F))`` is 1. What is decoded, or its mean, is turned back by ``R^T / 128``.
* **Who votes.** A worker with a value that is not finite abstains from the step, and so does one that
  is asked to; its momentum and error stay. With mid-rise codes a worker does not vote on a row whose
  values are all exactly zero. With mid-tread codes everybody votes, and an abstainer sends zero.
* **Who is late** sends its message as all do, and its momentum and error move on; but the message misses
  the step, and counts in the next one, as one more of the ``N``.
* **Decision.** With ``S`` the sum of the codes of the ``N`` workers that vote on a row, the update is
  ``sign(2S - N top)``; a tie takes the coin (``majority``) or is 0 (``ternary_sum``); ``average`` is
  ``(2S - N top) / (N top)``. Where nobody votes it is 0. Updates have the dtype of the gradient.
* **Local momentum.** Worker i encodes ``b1 mu_i + (1-b1) g_i`` and keeps ``b2 mu_i + (1-b2) g_i``.
* **Momentum at the owner.** Worker i encodes ``g_i``, with error feedback ``x_i = g_i + e_i``, and keeps
  ``e_i = x_i - decoded``, or a share of that. The mean of what is decoded, over those who take part, goes
  into one Lion for all. Its sign is the update; a zero takes the coin, unless the row is all zeros,
  padding included. No step counts for more than ``dominance`` times the median of those above 0 on its
  row, the lower one of two; by default a quarter of the workers, at least 2. Unless ``dominance`` is
  infinite, the step of a row without a gradient is 0, whatever the error is. With ``trim`` the mean of
  an element is without the ``trim`` largest and smallest of the N decoded values, or ``(N - 1) // 2`` if
  that is less; alike ones are told apart by the number of the worker. With nobody there, nothing
  changes; an element whose mean is not finite keeps its momentum, and its update is that of a zero.
* **What is stored** saturates: it is clipped to the range of its dtype.
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

ROW = 128
BLOCK = 32  # rows
BIG = 512  # rows, at most, of leaves that are not

# Best uniform steps for a Gaussian (Max 1960), in units of the mean magnitude.
GAUSSIAN_STEP = {
    1: 2.0, 2: 1.2479, 3: 0.7344, 4: 0.4199, 5: 0.2357, 6: 0.1305, 7: 0.0713, 8: 0.0386,
}  # fmt: skip

TIE, SIDE, RANK, TURN = 0x9E3779B9, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F  # for each use of the hash


class Buffer(NamedTuple):
    """All leaves in rows of 128."""

    shapes: tuple[tuple[int, ...], ...]  # of the leaves
    rows: tuple[int, ...]  # of each leaf, padding included
    order: tuple[int, ...]  # the leaves as they lie in the buffer
    real: np.ndarray  # bool[rows, 128], False for padding
    word: jax.Array  # uint32[rows, 128]: where the coin of each element lies
    bit: jax.Array  # uint32[rows, 128]

    def join(self, leaves: list[jax.Array]) -> jax.Array:
        """Leaves ``[W, ...]`` to ``float32[W, rows, 128]``, zeros in the padding."""
        flat = [x.reshape(x.shape[0], math.prod(x.shape[1:])).astype(jnp.float32) for x in leaves]
        short = [rows * ROW - x.shape[1] for rows, x in zip(self.rows, flat, strict=True)]
        flat = [jnp.pad(x, ((0, 0), (0, n))) for x, n in zip(flat, short, strict=True)]
        joined = jnp.concatenate([flat[leaf] for leaf in self.order], axis=1)
        return joined.reshape(joined.shape[0], len(self.real), ROW)

    def split(self, x: jax.Array, dtypes: list[Any]) -> list[jax.Array]:
        """``[..., rows, 128]`` to leaves ``[..., *shape]``."""
        ends = np.cumsum([self.rows[leaf] for leaf in self.order])
        parts = dict(zip(self.order, jnp.split(x, ends[:-1], axis=-2), strict=True))
        lead = x.shape[:-2]
        return [
            parts[leaf].reshape(*lead, rows * ROW)[..., : math.prod(shape)]
            .reshape(*lead, *shape).astype(dtype)
            for leaf, (shape, rows, dtype) in enumerate(
                zip(self.shapes, self.rows, dtypes, strict=True)
            )
        ]  # fmt: skip


def _as_it_is(x: jax.Array, buffer: Buffer, t: Any) -> jax.Array:
    return x


class Codes(NamedTuple):
    """A quantiser; ``encode(x float32[W, rows, 128], Buffer, t)`` gives what the workers send."""

    top: Callable[[int], int]  # W -> largest code; even if a code means zero
    encode: Callable[[jax.Array, Buffer, Any], "Message"]
    back: Callable[[jax.Array, Buffer, Any], jax.Array] = _as_it_is  # of what is decoded


class Message(NamedTuple):
    """Codes ``[W, rows, 128]`` and the steps they are in, ``float32[W, rows, 1]``."""

    q: jax.Array
    step: jax.Array


class State(NamedTuple):
    """What is remembered."""

    t: jax.Array  # int32[]: steps taken
    mu: Any  # local momentum, leaves [W, ...]; or the owner's, one buffer [rows, 128]
    error: Any  # error feedback, leaves [W, ...]; or None
    ties: jax.Array  # float32[]: parameters whose votes cancelled in the last step
    abstained: jax.Array  # int32[]: workers that abstained from the last step
    abstentions: jax.Array  # int32[]: their sum over all steps
    missed: Any = None  # `Votes` that missed the last step, where workers may be late


class Votes(NamedTuple):
    """Messages, and whose they are."""

    message: Message
    # bool[W, rows, 1], who votes on a row; for the owner bool[W, 1, 1], who takes part.
    here: jax.Array


class Simulator(NamedTuple):
    """All workers at once; updates are what they agreed on, shaped like the parameters."""

    init: Callable[..., State]  # (params, W, late=False)
    # (grads [W, ...], state, params=None, abstain bool[W]=None, late=None)
    update: Callable[..., Any]
    late: bool = False  # whether there is a rule for who is late; without it neither takes ``late``


# --- The buffer and its coins


Places = Callable[[int, int, int], Any]  # as `words` without its options


def words(rows: int, workers: int, unit: int, first_word: Any = 0) -> tuple[jax.Array, jax.Array]:
    """The word and the bit of each element of a buffer, ``uint32[rows, 128]`` each.

    Args:
      rows: of the buffer.
      workers: how many own a chunk.
      unit: chunks are a multiple of so many rows, 32 or 16.
      first_word: where the buffer begins, ``uint32[]``.
    """
    chunk = _round_up(-(-rows // workers), unit)
    owner, r = np.divmod(np.arange(rows)[:, None], max(chunk, 1))
    block, lane = r // BLOCK, np.arange(ROW)
    half = BLOCK * (block + 1) > chunk
    before = (4 * chunk * owner + ROW * block).astype(np.uint32)
    word = before + np.where(half, lane % 64, lane).astype(np.uint32)
    bit = np.where(half, r % 16 + 16 * (lane // 64), r % BLOCK).astype(np.uint32)
    return jnp.asarray(first_word, jnp.uint32) + word, jnp.asarray(bit)


def buffer_of(shapes: list[tuple[int, ...]], workers: int, places: Places = words) -> Buffer:
    """Puts leaves behind each other: the big ones, each in whole blocks, and then the others."""
    sizes = [math.prod(shape) for shape in shapes]
    rows = [-(-size // ROW) for size in sizes]
    big = [n > BIG for n in rows]
    rows = [_round_up(n, BLOCK) if b else n for n, b in zip(rows, big, strict=True)]
    order = sorted(range(len(rows)), key=lambda leaf: not big[leaf])
    real = [np.arange(rows[leaf] * ROW) < sizes[leaf] for leaf in order]
    word, bit = places(sum(rows), workers, BLOCK if any(big) else BLOCK // 2)
    elements = np.concatenate(real).reshape(-1, ROW)
    return Buffer(tuple(shapes), tuple(rows), tuple(order), elements, word, bit)


def coin(buffer: Buffer, t: Any, use: int = TIE) -> jax.Array:
    """``int32[rows, 128]`` of zeros and ones."""
    mixed = _mix(buffer.word ^ _mix(_step_number(t) + jnp.uint32(use)))
    return ((mixed >> buffer.bit) & 1).astype(jnp.int32)


def zero_side(buffer: Buffer, t: Any, workers: int) -> jax.Array:
    """``int32[W, rows, 128]``: whether an exact zero takes the upper of the two inner codes."""
    drawn = _mix(jnp.arange(workers, dtype=jnp.uint32) ^ _mix(_step_number(t) + jnp.uint32(RANK)))
    rank = jnp.sum(drawn[None, :] < drawn[:, None], axis=1, dtype=jnp.int32)
    return coin(buffer, t, SIDE) ^ (rank & 1)[:, None, None]


def _step_number(t: Any) -> jax.Array:
    return jnp.asarray(t).astype(jnp.uint32)


def _mix(h: jax.Array) -> jax.Array:
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


# --- Values to codes


def sign() -> Codes:
    """One bit."""
    return midrise(1)


def midrise(p: int, *, seed: int | None = None) -> Codes:
    """``q = floor(x / step) + 2**(p-1)``, clipped; with a seed, rounded at random."""
    half, top = 2 ** (p - 1), 2**p - 1

    def encode(x: jax.Array, buffer: Buffer, t: Any) -> Message:
        step = to_bfloat16(GAUSSIAN_STEP[p] * row_mean(x, buffer))  # it travels as bfloat16
        in_steps = quotient(x, step)
        if seed is None:  # magnitude and side apart, so that -x gets the mirrored code of x
            inward = jnp.minimum(jnp.floor(jnp.abs(in_steps)), half - 1).astype(jnp.int32)
            q = jnp.where(x > 0, half + inward, half - 1 - inward)
        else:
            level = jnp.floor(in_steps + (half - 0.5) + noise(buffer, x.shape[0], t, seed))
            q = jnp.clip(level, 0, top).astype(jnp.int32)
        q = jnp.where(x == 0, half - 1 + zero_side(buffer, t, x.shape[0]), q)
        return Message(q, step)

    return Codes(lambda workers: top, encode)


def integer(p: int = 8, *, seed: int | None = None) -> Codes:
    """Lion Cub's: ``clip(round(x / mean|x| s/2), -s, s)``, whose sum over W workers fits in p bits."""

    def top(workers: int) -> int:
        return 2 * ((2 ** (p - 1) - 1) // workers)

    def encode(x: jax.Array, buffer: Buffer, t: Any) -> Message:
        s = top(x.shape[0]) // 2
        mean = leaf_mean(x, buffer)
        level = quotient(x, mean) * (s / 2)
        if seed is not None:
            level = jnp.floor(level + noise(buffer, x.shape[0], t, seed))
        q = (jnp.clip(jnp.round(level), -s, s) + s).astype(jnp.int32)
        return Message(q, mean)

    return Codes(top, encode)


def ternary() -> Codes:
    """The exact sign: -1, 0 or +1."""

    def encode(x: jax.Array, buffer: Buffer, t: Any) -> Message:
        q = (jnp.sign(x) + 1).astype(jnp.int32)
        return Message(q, jnp.ones_like(x[..., :1]))

    return Codes(lambda workers: 2, encode)


def dense(dtype: Any = jnp.float32) -> Codes:
    """No quantisation: values are their own codes, ``top`` is 0 and the step 1."""

    def encode(x: jax.Array, buffer: Buffer, t: Any) -> Message:
        return Message(saturate(x, dtype).astype(jnp.float32), jnp.ones_like(x[..., :1]))

    return Codes(lambda workers: 0, encode)


def rotation(t: Any) -> jax.Array:
    """``R`` of a step, ``float32[128, 128]``."""
    lane = np.arange(ROW, dtype=np.uint32)
    hadamard = 1 - 2 * (np.bitwise_count(lane[:, None] & lane[None, :]) % 2).astype(np.float32)
    drawn = _mix(jnp.asarray(lane) ^ _mix(_step_number(t) + jnp.uint32(TURN))) & 1
    return (1 - 2 * drawn.astype(jnp.float32))[:, None] * hadamard


def rotated(codes: Codes) -> Codes:
    """Codes of turned rows."""

    def times(x: jax.Array, matrix: jax.Array) -> jax.Array:
        return jnp.matmul(x, matrix, precision=lax.Precision.HIGHEST)

    def encode(x: jax.Array, buffer: Buffer, t: Any) -> Message:
        whole = buffer._replace(real=np.ones_like(buffer.real))
        return codes.encode(times(x, rotation(t)), whole, t)

    def back(y: jax.Array, buffer: Buffer, t: Any) -> jax.Array:
        return times(y, rotation(t).T) / ROW * buffer.real

    return Codes(codes.top, encode, back)


def decode(message: Message, top: int) -> jax.Array:
    """``(q - top/2) step``; exact, a short integer times a bfloat16."""
    return (message.q.astype(jnp.float32) - top / 2) * message.step


def row_mean(x: jax.Array, buffer: Buffer) -> jax.Array:
    """Mean magnitude of each row's real elements, ``[..., rows, 128]`` to ``float32[..., rows, 1]``."""
    real = np.maximum(buffer.real.sum(axis=1, keepdims=True), 1).astype(np.float32)
    total = jnp.sum(jnp.abs(x), axis=-1, keepdims=True)
    most = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    return jnp.where(jnp.isfinite(total), total / real, most)


def leaf_mean(x: jax.Array, buffer: Buffer) -> jax.Array:
    """Mean magnitude of each leaf, the same on all its rows: ``float32[W, rows, 1]``."""
    rows = np.array([buffer.rows[leaf] for leaf in buffer.order])
    sizes = np.array([math.prod(buffer.shapes[leaf]) for leaf in buffer.order])

    def total(x: jax.Array) -> jax.Array:
        parts = jnp.split(jnp.sum(x, axis=-1), np.cumsum(rows)[:-1], axis=-1)
        return jnp.stack([jnp.sum(part, axis=-1) for part in parts], axis=-1)

    n = np.maximum(sizes, 1).astype(np.float32)
    low, high = total(jnp.abs(x)), total(jnp.abs(x) * 2.0**-64)
    of_leaf = jnp.where(jnp.isfinite(low), low / n, high / n * 2.0**64)
    return jnp.repeat(of_leaf, rows, axis=-1, total_repeat_length=len(buffer.real))[..., None]


def to_bfloat16(x: jax.Array) -> jax.Array:
    """To the nearest finite bfloat16, as float32; ``x`` is not negative."""
    return lax.reduce_precision(jnp.minimum(x, float(jnp.finfo(jnp.bfloat16).max)), 8, 7)


def quotient(x: jax.Array, unit: jax.Array) -> jax.Array:
    """``x / unit`` by an inverse, and 0 where the unit is 0; units above 2**126 have no normal inverse."""
    inverse = jnp.where(unit > 0, 1 / jnp.where(unit > 0, jnp.minimum(unit, 2.0**126), 1), 0)
    return x * inverse


def noise(buffer: Buffer, workers: int, t: Any, seed: int) -> jax.Array:
    """Uniform in [0, 1), from a key for each step, worker and leaf: ``float32[W, rows, 128]``."""

    def of_worker(i: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), t), i)
        drawn = [
            jax.random.uniform(jax.random.fold_in(key, leaf), (buffer.rows[leaf], ROW), jnp.float32)
            for leaf in buffer.order
        ]
        return jnp.concatenate(drawn)

    return jax.vmap(of_worker)(jnp.arange(workers, dtype=jnp.int32))


def takes_part(x: jax.Array, abstain: Any) -> jax.Array:
    """``bool[W, 1, 1]``: workers that are not asked to abstain and whose values are finite."""
    present = jnp.all(jnp.isfinite(x), axis=(1, 2), keepdims=True)
    return present if abstain is None else present & ~abstain[:, None, None]


def none_late(codes: Codes, buffer: Buffer, workers: int, rows: int) -> Votes:
    """Room for messages that miss a step, and nobody's there; ``rows`` of ``here``, all or 1."""
    if codes.back is not _as_it_is:
        raise ValueError(
            "late=True: codes are rotated anew in each step, so those of two steps have no common mean; "
            "give codes that are not rotated"
        )
    x = jnp.zeros((workers, *buffer.real.shape))
    like = jax.eval_shape(lambda x: codes.encode(x, buffer, 0), x)
    message = jax.tree.map(lambda m: jnp.zeros(m.shape, m.dtype), like)
    return Votes(message, jnp.zeros((workers, rows, 1), bool))


def with_late(now: Votes, missed: Votes | None, late: Any) -> tuple[Votes, Votes | None]:
    """What a step counts, ``[2W, ...]`` with what was late in the one before, and what misses it."""
    if missed is None:
        if late is not None:
            raise ValueError("late: there is no room for what misses a step; start with late=True")
        return now, None
    away = jnp.zeros_like(now.here) if late is None else late[:, None, None]
    on_time = now._replace(here=now.here & ~away)
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), on_time, missed)
    return both, now._replace(here=now.here & away)


# --- The decision: of integers, or of floats, where `reach` says whether the row moves at all


def count(q: jax.Array, here: jax.Array, top: int, workers: int) -> tuple[jax.Array, jax.Array]:
    """``2S - N top`` of each element, ``[rows, 128]``, and ``N top`` of each row, ``int32[rows, 1]``.

    Args:
      q: codes ``[M, rows, 128]``, of all workers first and then late ones.
      here: ``bool[M, rows, 1]``, whose count.
      top: the largest code.
      workers: how many; with mid-tread codes all of them vote.
    """
    if top % 2 == 0:
        q = jnp.where(here, q, top // 2)
        here = here | (jnp.arange(len(q)) < workers)[:, None, None]
    reach = top * jnp.sum(here, axis=0, dtype=jnp.int32)
    return 2 * jnp.sum(jnp.where(here, q, 0), axis=0, dtype=q.dtype) - reach, reach


def majority(margin: jax.Array, reach: jax.Array, coins: jax.Array) -> jax.Array:
    """The sign; a tie takes the coin. Distributed Lion "MaVo", Lion Cub."""
    return jnp.where(margin == 0, 2 * coins - 1, jnp.sign(margin)) * (reach > 0)


def ternary_sum(margin: jax.Array, reach: jax.Array, coins: jax.Array) -> jax.Array:
    """The sign; a tie is 0."""
    return jnp.sign(margin)


def average(margin: jax.Array, reach: jax.Array, coins: jax.Array) -> jax.Array:
    """The mean vote, in [-1, 1]. Distributed Lion "Avg"."""
    return margin.astype(jnp.float32) / jnp.maximum(reach, 1).astype(jnp.float32)


def bounded_mean(
    message: Message, present: jax.Array, top: int, dominance: float, trim: int = 0
) -> jax.Array:
    """The mean of what is decoded, over the workers that take part: ``float32[rows, 128]``."""
    step = jnp.where(present, message.step, 0)
    number = jnp.sum(step > 0, axis=0, keepdims=True, dtype=jnp.int32)
    ordered = jnp.sort(jnp.where(step > 0, step, jnp.inf), axis=0)
    middle = jnp.maximum(number - 1, 0) // 2
    median = jnp.where(number > 0, jnp.take_along_axis(ordered, middle, axis=0), 0)
    limit = jnp.where(median > 0, dominance * median, jnp.inf)
    decoded = decode(Message(message.q, jnp.minimum(step, limit)), top)
    number, decoded = jnp.sum(present, dtype=jnp.int32), jnp.where(present, decoded, 0)
    if trim:
        cut = jnp.minimum(trim, jnp.maximum(number - 1, 0) // 2)
        rank = ranks(decoded, present)
        # In their order, so that a sum does not depend on who sent what.
        place = jnp.argsort(rank, axis=0)
        decoded = jnp.take_along_axis(
            jnp.where((rank >= cut) & (rank < number - cut), decoded, 0), place, 0
        )
        number -= 2 * cut
    total = lax.fori_loop(1, len(step), lambda i, total: total + decoded[i], decoded[0])
    return total * (1 / jnp.maximum(number, 1).astype(jnp.float32))


def ranks(x: jax.Array, present: jax.Array) -> jax.Array:
    """``int32[W, ...]``: how many come before each, smaller or alike and earlier; absent ones last."""
    first = jnp.arange(len(x))[:, None] < jnp.arange(len(x))[None, :]
    first = first.reshape(*first.shape, *[1] * (x.ndim - 1))
    here = jnp.broadcast_to(present, x.shape)
    before = (x[:, None] < x[None]) | ((x[:, None] == x[None]) & first)
    before = jnp.where(here[:, None] == here[None], before, here[:, None])
    return jnp.sum(before, axis=0, dtype=jnp.int32)


# --- One step of all workers


def local_momentum(
    b1: float = 0.9,
    b2: float = 0.99,
    mu_dtype: Any = None,
    codes: Codes | None = None,
    decide: Callable[..., jax.Array] | None = None,
    places: Places = words,
) -> Simulator:
    """Every worker votes with its own blend and has its own momentum: Distributed Lion, Lion Cub."""
    chosen = codes or sign()
    rule = decide or (ternary_sum if chosen.top(1) % 2 == 0 else majority)

    def init(params: Any, workers: int, late: bool = False) -> State:
        state = _state(per_worker(params, workers, mu_dtype), None)
        if not late:
            return state
        buffer = buffer_of([p.shape for p in jax.tree.leaves(params)], workers)
        codes = chosen if workers > 1 else dense()
        return state._replace(missed=none_late(codes, buffer, workers, len(buffer.real)))

    def update(
        grads: Any, state: State, params: Any = None, abstain: Any = None, late: Any = None
    ) -> Any:
        g, tree = jax.tree.flatten(grads)
        mu, t, workers = jax.tree.leaves(state.mu), state.t, g[0].shape[0]
        codes, decide = (chosen, rule) if workers > 1 else (dense(), ternary_sum)
        buffer = buffer_of([leaf.shape[1:] for leaf in g], workers, places)
        if workers > 1:
            x = (1 - b1) * buffer.join(g) + b1 * buffer.join(mu)
        else:  # nothing is coded: the optimizer's own arithmetic
            x = buffer.join([(1 - b1) * leaf + b1 * m for leaf, m in zip(g, mu, strict=True)])
        message = codes.encode(x, buffer, t)
        present = takes_part(x, abstain)
        votes = jnp.any(x != 0, axis=-1, keepdims=True) & present
        sent, missed = with_late(Votes(message, votes), state.missed, late)
        margin, reach = count(sent.message.q, sent.here, codes.top(workers), workers)
        u = buffer.split(decide(margin, reach, coin(buffer, t)), _dtypes(g))
        kept = [saturate((1 - b2) * leaf + b2 * m, m.dtype) for leaf, m in zip(g, mu, strict=True)]
        mu = jax.tree.unflatten(tree, unless_absent(present, kept, mu))
        cancelled = (margin == 0) & (reach > 0) & buffer.real
        state = _after(state, mu, state.error, cancelled, present, missed)
        return jax.tree.unflatten(tree, u), state

    return Simulator(init, update, late=True)


def momentum_at_owner(
    b1: float = 0.9,
    b2: float = 0.99,
    mu_dtype: Any = None,
    codes: Codes | None = None,
    feedback: Any = None,
    dominance: float | None = None,
    decide: Callable[..., jax.Array] = majority,
    places: Places = words,
    keep: float = 1.0,
    trim: int = 0,
) -> Simulator:
    """Workers send gradients to one Lion; ``feedback`` is the dtype of errors, ``keep`` what is kept."""
    chosen = codes or midrise(3)

    def init(params: Any, workers: int, late: bool = False) -> State:
        leaves = jax.tree.leaves(params)
        buffer = buffer_of([p.shape for p in leaves], workers)
        mu = jnp.zeros(buffer.real.shape, mu_dtype or widest(leaves))
        state = _state(mu, per_worker(params, workers, feedback) if feedback else None)
        codes = chosen if workers > 1 else dense()
        return state._replace(missed=none_late(codes, buffer, workers, 1)) if late else state

    def update(
        grads: Any, state: State, params: Any = None, abstain: Any = None, late: Any = None
    ) -> Any:
        g, tree = jax.tree.flatten(grads)
        mu, t, workers = state.mu, state.t, g[0].shape[0]
        codes, rule = (chosen, decide) if workers > 1 else (dense(), ternary_sum)
        buffer = buffer_of([leaf.shape[1:] for leaf in g], workers, places)
        top = codes.top(workers)
        errors = jax.tree.leaves(state.error)
        x = buffer.join(g) + (buffer.join(errors) if feedback else 0)
        message = codes.encode(x, buffer, t)
        most = max(2.0, workers / 4) if dominance is None else dominance
        if feedback and most < np.inf:
            speaks = jnp.any(buffer.join(g) != 0, axis=-1, keepdims=True)
            message = message._replace(step=jnp.where(speaks, message.step, 0))
        present = takes_part(x, abstain)
        sent, missed = with_late(Votes(message, present), state.missed, late)
        mean = codes.back(bounded_mean(sent.message, sent.here, top, most, trim), buffer, t)
        known = jnp.any(sent.here) & jnp.isfinite(mean)
        mean = saturate(jnp.where(known, mean, 0), widest(g))
        c = jnp.where(known, (1 - b1) * mean + b1 * mu, 0)
        moves = jnp.any(c != 0, axis=-1, keepdims=True)
        u = rule(c, moves, coin(buffer, t))
        mu = jnp.where(known, saturate((1 - b2) * mean + b2 * mu, mu.dtype), mu)
        error = state.error
        if feedback:
            rest = buffer.split(
                x - codes.back(decode(message, top), buffer, t), [jnp.float32] * len(g)
            )
            kept = [saturate(keep * r, e.dtype) for r, e in zip(rest, errors, strict=True)]
            error = jax.tree.unflatten(tree, unless_absent(present, kept, errors))
        cancelled = (c == 0) & moves & buffer.real & (workers > 1)
        updates = jax.tree.unflatten(tree, buffer.split(u, _dtypes(g)))
        state = _after(state, mu, error, cancelled, present, missed)
        return updates, state

    return Simulator(init, update, late=True)


def _state(mu: Any, error: Any) -> State:
    return State(jnp.int32(0), mu, error, jnp.float32(0), jnp.int32(0), jnp.int32(0))


def _after(
    state: State, mu: Any, error: Any, cancelled: jax.Array, present: jax.Array, missed: Any = None
) -> State:
    away = jnp.sum(~present, dtype=jnp.int32)
    ties = jnp.sum(cancelled, dtype=jnp.float32)
    return State(state.t + 1, mu, error, ties, away, state.abstentions + away, missed)


def per_worker(params: Any, workers: int, dtype: Any) -> Any:
    """Zeros, leaves ``[W, ...]``."""
    return jax.tree.map(lambda p: jnp.zeros((workers, *p.shape), dtype or p.dtype), params)


def unless_absent(present: jax.Array, new: list[Any], old: list[Any]) -> list[Any]:
    """Leaves ``[W, ...]``: new ones of workers that take part, old ones of the others."""
    here = [present.reshape(-1, *[1] * (leaf.ndim - 1)) for leaf in new]
    return [jnp.where(h, n, o) for h, n, o in zip(here, new, old, strict=True)]


def saturate(x: jax.Array, dtype: Any) -> jax.Array:
    """A cast that stays finite."""
    most = min(float(jnp.finfo(dtype).max), float(jnp.finfo(x.dtype).max))
    return jnp.clip(x, -most, most).astype(dtype)


def widest(leaves: list[jax.Array]) -> Any:
    """The dtype of one buffer for all leaves."""
    filled = [leaf for leaf in leaves if leaf.size] or leaves
    return jnp.result_type(*(leaf.dtype for leaf in filled))


def _dtypes(leaves: list[jax.Array]) -> list[Any]:
    return [leaf.dtype for leaf in leaves]


# --- How far momenta are apart; and at last, the optimizers


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
) -> Simulator:
    """Makes of votes ``u`` the updates ``-lr (u + wd p)``.

    Args:
      simulator: `local_momentum` or `momentum_at_owner`.
      learning_rate: a number, or a function of the steps taken before.
      weight_decay: decoupled, as in Lion.
      mask: a tree of bools, the leaves that decay; None for all.
    """

    def update(grads: Any, state: State, params: Any, abstain: Any = None, **late: Any) -> Any:
        lr = learning_rate(state.t) if callable(learning_rate) else learning_rate
        votes, state = simulator.update(grads, state, params, abstain, **late)
        decays = jax.tree.map(lambda p: True, params) if mask is None else mask
        decay = jax.tree.map(lambda p, yes: weight_decay * p if yes else 0, params, decays)
        return jax.tree.map(lambda u, d: (-lr * (u + d)).astype(u.dtype), votes, decay), state

    return Simulator(simulator.init, update, simulator.late)
