"""What workers send of their numbers and what comes of it, in plain arrays: rows, coins, codes, means.

The part that all methods of the oracle share; workers are the leading axis of arrays, and nothing is
packed. The rules, for workers ``i = 0 .. W-1`` and the step after ``t`` others:

* **Buffer.** A row is 128 consecutive elements of a leaf, the last row of a leaf is padded, and a block
  is 32 rows. First come the big leaves (more than 512 rows), each padded to whole blocks; then all
  others. A leaf without elements has no row. Each worker owns ``C`` rows of the buffer: ``rows / W``,
  rounded up to whole blocks; if no leaf is big the last block may have n = 2, 4, 8 or 16 rows only.
* **Word and bit.** Row ``r`` of the chunk of worker ``w`` lies in block ``b = r // 32``. Its lane ``j``
  is bit ``r % 32`` of word ``4 C w + 128 b + j``. In a last block of n rows it is bit
  ``r % n + n (j // 4n)`` of word ``4 C w + 128 b + j % 4n``.
* **Coins.** ``mix`` is the finalizer of MurmurHash3. The coin of a tie is this bit of
  ``mix(word ^ mix(t + 0x9E3779B9))``. The side of a zero is this bit of
  ``mix(word ^ mix(t + 0x85EBCA77))``, the other way round on workers of odd rank; the rank of a worker
  is its place in the order of ``mix(i ^ mix(t + 0xC2B2AE3D))``. So zeros cancel in pairs, which are
  drawn anew each step.
* **Codes.** A code ``q`` in ``0..top`` is written here as its level ``q - top/2``, which stands for
  ``level * step``. Mid-rise levels are halves (1/2, 3/2, ..): none means zero, and an exact zero takes
  -1/2 or, if its side is 1, +1/2. Mid-tread levels are whole. The step of a mid-rise row is the best
  one for a Gaussian, from the mean magnitude of its real elements; integers are in units of the mean
  magnitude of their leaf. Padding is zeros and is coded as they are. No square is taken: values times a
  power of two give the same levels. Where the sum of a row overflows (from 2**121 on) its largest
  magnitude stands for the mean; the sum of a leaf is then taken of values times 2**-64.
* **Mean** of what is decoded, over those who take part.
* **Codes both ways.** The owner of a row adds its own error to that mean, answers ``u`` and keeps the
  rest. Levels of the answer are odd multiples of half a mid-rise step, a zero is positive, padding is
  in no mean, and half a step travels as bfloat16, not so large that the outermost level is none. An
  element whose mean is not finite counts as 0, and the owner's error stays there. With nobody there the
  answer is 0 and the error stays. One worker quantizes nothing.
* **What is stored** saturates: it is clipped to the range of its dtype.
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
BFLOAT16_MAX = float(jnp.finfo(jnp.bfloat16).max)

# Best uniform steps for a Gaussian (Max 1960), in units of the mean magnitude.
GAUSSIAN_STEP = {
    1: 2.0, 2: 1.2479, 3: 0.7344, 4: 0.4199, 5: 0.2357, 6: 0.1305, 7: 0.0713, 8: 0.0386,
}  # fmt: skip

TIE, SIDE, RANK = 0x9E3779B9, 0x85EBCA77, 0xC2B2AE3D  # for each use of the hash


class Buffer(NamedTuple):
    """All leaves in rows of 128."""

    rows: list[int]  # of each leaf, padding included
    order: list[int]  # the leaves as they lie in the buffer
    shapes: list[tuple[int, ...]]  # of the leaves
    real: np.ndarray  # bool[rows, 128], False for padding
    word: jax.Array  # uint32[rows, 128]: where the coin of each element lies
    bit: jax.Array  # uint32[rows, 128]

    def join(self, tree):
        """Leaves ``[W, ...]`` to ``float32[W, rows, 128]``, zeros in the padding."""
        leaves, parts = jax.tree.leaves(tree), []
        for leaf in self.order:
            x, size = leaves[leaf], math.prod(self.shapes[leaf])
            flat = x.reshape(len(x), size).astype(jnp.float32)
            parts.append(jnp.pad(flat, ((0, 0), (0, self.rows[leaf] * ROW - size))))
        return jnp.concatenate(parts, axis=1).reshape(len(parts[0]), *self.real.shape)

    def cut(self, x, axis=-2):
        """``x`` by leaf, as they lie in the buffer; ``axis`` is that of the rows."""
        ends = np.cumsum([self.rows[leaf] for leaf in self.order])
        return zip(self.order, jnp.split(x, ends[:-1], axis), strict=True)

    def split(self, x, like):
        """``[..., rows, 128]`` to a tree like another, in its dtypes."""
        leaves, tree = jax.tree.flatten(like)
        for leaf, part in self.cut(x):
            shape, flat = self.shapes[leaf], part.reshape(*x.shape[:-2], self.rows[leaf] * ROW)
            flat = flat[..., : math.prod(shape)].reshape(*x.shape[:-2], *shape)
            leaves[leaf] = saturate(flat, leaves[leaf].dtype)
        return jax.tree.unflatten(tree, leaves)


def chunk_rows(rows, workers, big):
    """How many rows of a buffer each worker owns; whether one of its leaves is ``big``."""
    least = -(-rows // workers)
    last = least % BLOCK
    fitting = [n for n in (0, 2, 4, 8, 16, BLOCK) if n >= last and (not big or n in (0, BLOCK))]
    return least - last + fitting[0]


def words(rows, workers, big, first_word=0):
    """The word and the bit of each element of a buffer, ``uint32[rows, 128]`` each.

    Args:
      rows: of the buffer.
      workers: how many own a chunk.
      big: whether a leaf in it is big.
      first_word: where the buffer begins, ``uint32[]``.
    """
    chunk = chunk_rows(rows, workers, big)
    owner, r = np.divmod(np.arange(rows)[:, None], max(chunk, 1))
    block, lane = r // BLOCK, np.arange(ROW)
    n = np.minimum(chunk - BLOCK * block, BLOCK)  # rows of the block
    word = 4 * chunk * owner + ROW * block + lane % (4 * n)
    bit = (r % BLOCK + n * (lane // (4 * n))).astype(np.uint32)
    return jnp.asarray(first_word, jnp.uint32) + word.astype(np.uint32), jnp.asarray(bit)


def buffer_of(tree, places=words):
    """Of leaves ``[W, ...]``: the big ones, each in whole blocks, and behind them the others."""
    leaves = jax.tree.leaves(tree)
    shapes = [x.shape[1:] for x in leaves]
    rows = [-(-math.prod(shape) // ROW) for shape in shapes]
    big = [n > BIG for n in rows]
    rows = [round_up(n, BLOCK if b else 1) for n, b in zip(rows, big, strict=True)]
    order = sorted(range(len(rows)), key=lambda leaf: not big[leaf])
    real = [np.arange(rows[leaf] * ROW) < math.prod(shapes[leaf]) for leaf in order]
    word, bit = places(sum(rows), len(leaves[0]), any(big))
    return Buffer(rows, order, shapes, np.concatenate(real).reshape(-1, ROW), word, bit)


def coin(buffer, t, use=TIE):
    """``int32[rows, 128]`` of zeros and ones."""
    return ((mixed(buffer.word, t, use) >> buffer.bit) & 1).astype(jnp.int32)


def zero_side(buffer, t, workers):
    """``int32[W, rows, 128]``: whether an exact zero takes the upper of the two inner codes."""
    drawn = mixed(jnp.arange(workers), t, RANK)
    rank = jnp.sum(drawn[None, :] < drawn[:, None], axis=1, dtype=jnp.int32)
    return coin(buffer, t, SIDE) ^ (rank & 1)[:, None, None]


def mixed(h, t, use):
    """``mix(h ^ mix(t + use))``."""

    def mix(h):
        h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
        h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
        return h ^ (h >> 16)

    return mix(jnp.uint32(h) ^ mix(jnp.uint32(t) + jnp.uint32(use)))


def round_up(n, unit):
    return -(-n // unit) * unit


# --- Values to codes


class Codes(NamedTuple):
    """A quantizer."""

    most: Callable[[int], float]  # W -> largest level; whole if a level means zero
    encode: Callable[..., Any]  # (x float32[W, rows, 128], Buffer, t) -> levels and steps
    feedback: Any = None  # the dtype of errors


def sign():
    """One bit."""
    return midrise(1)


def midrise(p):
    """``q = floor(x / step) + 2**(p-1)``, clipped."""
    most = (2**p - 1) / 2

    def encode(x, buffer, t):
        step = to_bfloat16(GAUSSIAN_STEP[p] * row_mean(x, buffer))  # it travels as bfloat16
        in_steps = quotient(x, step)
        # Magnitude and side apart, so that -x gets the mirrored code of x.
        inward = jnp.minimum(jnp.floor(jnp.abs(in_steps)) + 0.5, most)
        level = jnp.where(x > 0, inward, -inward)
        return jnp.where(x == 0, zero_side(buffer, t, len(x)) - 0.5, level), step

    return Codes(lambda workers: most, encode)


def integer(p=8):
    """Lion Cub's: ``clip(round(x / mean|x| s/2), -s, s)``, whose sum over W workers fits in p bits."""

    def most(workers):
        return (2 ** (p - 1) - 1) // workers

    def encode(x, buffer, t):
        s, mean = most(len(x)), leaf_mean(x, buffer)
        level = jnp.round(quotient(x, mean) * (s / 2))
        return jnp.clip(level, -s, s), mean

    return Codes(most, encode)


def ternary():
    """The exact sign: -1, 0 or +1."""
    return Codes(lambda workers: 1, lambda x, buffer, t: (jnp.sign(x), jnp.ones_like(x[..., :1])))


def dense(dtype=jnp.float32):
    """No quantization: values are their own levels."""

    def encode(x, buffer, t):
        return saturate(x, dtype).astype(jnp.float32), jnp.ones_like(x[..., :1])

    return Codes(lambda workers: 0, encode)


def product(how, a, b):
    """In full float32, on chips too that round before they multiply."""
    return jnp.einsum(how, a, b, precision=lax.Precision.HIGHEST)


def error_feedback(codes, dtype=jnp.bfloat16):
    """Codes of a worker that keeps what they miss."""
    return codes._replace(feedback=dtype)


# --- Means of magnitudes, and roundings


def row_mean(x, buffer):
    """Mean magnitude of each row's real elements, ``[..., rows, 128]`` to ``float32[..., rows, 1]``."""
    real = np.maximum(buffer.real.sum(axis=1, keepdims=True), 1).astype(np.float32)
    total = jnp.sum(jnp.abs(x), axis=-1, keepdims=True)
    most = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    return jnp.where(jnp.isfinite(total), total / real, most)


def leaf_mean(x, buffer):
    """Mean magnitude of each leaf, the same on all its rows: ``float32[W, rows, 1]``."""
    sums = [jnp.sum(jnp.abs(x) * scale, axis=-1) for scale in (1, 2.0**-64)]
    means = []
    for (leaf, low), (_, high) in zip(*(buffer.cut(total, -1) for total in sums), strict=True):
        n = np.float32(max(math.prod(buffer.shapes[leaf]), 1))
        low, high = (jnp.sum(part, axis=-1, keepdims=True) for part in (low, high))
        mean = jnp.where(jnp.isfinite(low), low / n, high / n * 2.0**64)
        means.append(jnp.repeat(mean, buffer.rows[leaf], axis=-1))
    return jnp.concatenate(means, axis=-1)[..., None]


def to_bfloat16(x):
    """To the nearest finite bfloat16, as float32; ``x`` is not negative."""
    return lax.reduce_precision(jnp.minimum(x, BFLOAT16_MAX), 8, 7)


def quotient(x, unit):
    """``x / unit`` by an inverse, and 0 where the unit is 0; units above 2**126 have no normal inverse."""
    inverse = jnp.where(unit > 0, 1 / jnp.where(unit > 0, jnp.minimum(unit, 2.0**126), 1), 0)
    return x * inverse


def saturate(x, dtype):
    """A cast that stays finite."""
    most = min(float(jnp.finfo(dtype).max), float(jnp.finfo(x.dtype).max))
    return jnp.clip(x, -most, most).astype(dtype)


# --- What comes of them


class Votes(NamedTuple):
    """What workers sent, and whose counts."""

    level: jax.Array  # float32[W, rows, 128]
    step: jax.Array  # float32[W, rows, 1]
    here: jax.Array  # bool[W, rows, 1]


def decoded_mean(votes):
    """The mean of what is decoded, over the workers that take part: ``float32[rows, 128]``."""
    decoded = jnp.where(votes.here, votes.level * votes.step, 0)
    return mean(decoded, jnp.sum(votes.here, axis=0, dtype=jnp.int32))


def mean(x, number):
    """Of ``[W, ...]``, the first worker first, over so many workers."""
    return total(x) * (1 / jnp.maximum(number, 1).astype(jnp.float32))


def total(x):
    """The sum of ``[W, ...]``, the first worker first: XLA's own takes a hundred times as long on a CPU."""
    return lax.fori_loop(1, len(x), lambda i, total: total + x[i], x[0])


def both_ways(p, buffer, x, present, owner, t):
    """Codes of ``p`` bits both ways: the answer, what the codes miss, and the owners' errors."""
    if len(x) == 1:
        return jnp.where(present, x, 0)[0], jnp.zeros_like(x), owner
    level, step = midrise(p).encode(x, buffer, t)
    u, error = answer(decoded_mean(Votes(level, step, present)), owner, buffer, p)
    some = jnp.any(present)
    return jnp.where(some, u, 0), x - level * step, jnp.where(some, error, owner)


def answer(mean, error, buffer, p):
    """What the owners send back of a mean and their error, and the error that they keep."""
    known, most = buffer.real & jnp.isfinite(mean), 2**p - 1
    x = jnp.where(known, mean + error, 0)
    half = to_bfloat16(GAUSSIAN_STEP[p] / 2 * row_mean(x, buffer))
    half = jnp.minimum(half, 255 // most * 2.0**120)
    level = jnp.minimum(2 * jnp.floor(jnp.abs(quotient(x, 2 * half))) + 1, most)
    u = jnp.where(x >= 0, level, -level) * half
    return u, jnp.where(known, saturate(x - u, error.dtype), error)
