"""Codes to words and back, and counting codes without leaving the words.

A *row* is 64 consecutive elements of a leaf. A *word* is a uint32 that holds one bit of each of 32
elements (bit ``i`` belongs to element ``i``), so a row of one-bit codes is two words. Codes of ``p``
bits are ``p`` *planes*: plane ``k`` holds bit ``k`` of every code.

Votes are counted on the words themselves. A full adder on words, ``s = a ^ b ^ c`` and
``carry = ab | (a ^ b)c``, adds 32 one-bit numbers in five instructions; the planes of ``W`` workers
reduce to the planes of their sum, and "more than half" is a comparison that walks those planes once.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

ROW = 64
WORD = 32
WORDS_PER_ROW = ROW // WORD

# The adders of up to this many workers are unrolled into one fused loop. More workers are added in
# groups of this size, then the groups' sums, so that the program stays small.
_GROUP = 255


class Packed(NamedTuple):
    """Codes of one leaf in words, with what packing saw on the way.

    Attributes:
      planes: ``uint32[p, words]``, two words a row; plane ``k`` holds bit ``k`` of every code.
      marks: ``uint32[words]``; the elements that were marked.
      flagged: ``bool[]``; whether any element was flagged.
    """

    planes: jax.Array
    marks: jax.Array
    flagged: jax.Array


def pack(
    codes: jax.Array, p: int, marks: jax.Array, flags: jax.Array, unmarked: Sequence[Any]
) -> Packed:
    """Packs codes of ``p`` bits, one mark per element and one flag for all, in a single reduction.

    Eight neighbours share a few uint32 accumulators: byte ``k`` collects bit ``k`` of their codes, the
    next byte their marks, one more their flag. The compiler fuses into that reduction whatever
    computes the codes, so gradient and momentum are read once.

    Args:
      codes: ``uint32[rows, 64]`` in ``[0, 2**p)``.
      p: bits per code, 1 to 8.
      marks: ``bool[rows, 64]``.
      flags: ``bool[rows, 64]``.
      unmarked: the codes of elements without a mark, as ``p`` planes: ``uint32[words]`` each, or 0.

    Returns:
      ``Packed``.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax import bits
      >>> codes = jnp.zeros((1, 64), jnp.uint32).at[0, 33].set(1)
      >>> bits.pack(codes, 1, codes > 0, codes > 1, [0]).planes.tolist()
      [[0, 2]]
    """
    seen = [(codes >> k) & 1 for k in range(p)] + [x.astype(jnp.uint32) for x in (marks, flags)]
    *octets, marked, flagged = _gather_lanes([x.reshape(-1, 8) for x in seen])
    planes = [
        _join_octets((octet & marked) | (_octets(fill, octet.size) & ~marked))
        for octet, fill in zip(octets, unmarked, strict=True)
    ]
    return Packed(jnp.stack(planes), _join_octets(marked), jnp.any(flagged > 0))


def _gather_lanes(seen: Sequence[jax.Array]) -> list[jax.Array]:
    """Bits ``uint32[n, 8]`` to bytes ``uint32[n]``, four of them to an accumulator.

    The bits of an accumulator are joined before the lanes part them, with one shift: XLA for GPU does
    not fuse what computes the codes into a reduction that uses it once for each byte.
    """
    lane = jnp.arange(8, dtype=jnp.uint32)
    groups = [seen[i : i + 4] for i in range(0, len(seen), 4)]
    joined = [[x << (8 * k) for k, x in enumerate(group)] for group in groups]
    accumulators = [functools.reduce(operator.or_, group) << lane for group in joined]
    zeros = [jnp.uint32(0)] * len(accumulators)
    octets = lax.reduce(
        accumulators, zeros, lambda a, b: [x | y for x, y in zip(a, b, strict=True)], (1,)
    )
    return [(octets[k // 4] >> (8 * (k % 4))) & 0xFF for k in range(len(seen))]


def _octets(words: Any, n: int) -> jax.Array:
    """``uint32[n / 4]`` words, or a constant, to ``uint32[n]`` bytes."""
    words = jnp.broadcast_to(jnp.asarray(words, jnp.uint32), (n // 4,))
    return ((words[:, None] >> (8 * jnp.arange(4, dtype=jnp.uint32))) & 0xFF).reshape(-1)


def _join_octets(octets: jax.Array) -> jax.Array:
    quads = (octets & 0xFF).reshape(-1, 4)
    return jnp.sum(quads << (8 * jnp.arange(4, dtype=jnp.uint32)), -1, dtype=jnp.uint32)


def pack_bits(bits: jax.Array) -> jax.Array:
    """Packs booleans along the last axis, zeros behind the last one.

    Args:
      bits: ``bool[..., n]``.

    Returns:
      ``uint32[..., ceil(n / 32)]``.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax import bits
      >>> bits.pack_bits(jnp.array([True, False, True])).tolist()
      [5]
    """
    short = -bits.shape[-1] % WORD
    bits = jnp.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, short)])
    lanes = bits.reshape(*bits.shape[:-1], -1, WORD).astype(jnp.uint32)
    return jnp.sum(lanes << jnp.arange(WORD, dtype=jnp.uint32), -1, dtype=jnp.uint32)


def unpack_bits(words: jax.Array, n: int) -> jax.Array:
    """Undoes ``pack_bits``: ``uint32[..., w]`` to ``uint32[..., n]`` of zeros and ones.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax import bits
      >>> bits.unpack_bits(jnp.array([5], jnp.uint32), 3).tolist()
      [1, 0, 1]
    """
    lanes = (words[..., None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1
    return lanes.reshape(*words.shape[:-1], -1)[..., :n]


def unpack(planes: jax.Array | Sequence[jax.Array]) -> jax.Array:
    """Turns planes back into codes.

    Args:
      planes: ``uint32[p, ..., words]``, or a list of ``p`` planes.

    Returns:
      ``uint32[..., words, 32]``, codes in ``[0, 2**p)``. The lanes of a word keep an axis of their own:
      it lets the compiler read a word once for its 32 elements.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax import bits
      >>> bits.unpack(jnp.array([[1], [3]], jnp.uint32))[0, :3].tolist()
      [3, 2, 0]
    """
    lane = jnp.arange(WORD, dtype=jnp.uint32)
    codes = [((plane[..., None] >> lane) & 1) << k for k, plane in enumerate(planes)]
    return functools.reduce(operator.or_, codes)


def planes_of(codes: jax.Array, p: int) -> list[jax.Array]:
    """Packs codes of any width: ``uint32[n]`` below ``2**p`` to ``p`` planes ``uint32[ceil(n / 32)]``."""
    return [pack_bits((codes >> k) & 1 > 0) for k in range(p)]


def tally(planes: jax.Array) -> list[jax.Array]:
    """Adds the codes of all workers, on packed words, with carry-save adders.

    Args:
      planes: ``uint32[W, p, ...]``: the planes of each worker's codes.

    Returns:
      The planes of the sum, least significant first, ``uint32[...]`` each; as many as the largest
      possible sum ``W (2**p - 1)`` needs.

    Example:
      Three workers vote 1, 1, 0 on the element of bit 0; the sum is 2:

      >>> import jax.numpy as jnp
      >>> from lioncub_jax import bits
      >>> votes = jnp.array([[[1]], [[1]], [[0]]], jnp.uint32)
      >>> [plane.tolist() for plane in bits.tally(votes)]
      [[0], [1]]
    """
    workers, p = planes.shape[:2]
    if workers <= _GROUP:
        columns = [[planes[w, k] for w in range(workers)] for k in range(p)]
        return _carry_save(columns, sum_bits(workers, p))
    whole = workers - workers % _GROUP
    grouped = planes[:whole].reshape(-1, _GROUP, *planes.shape[1:])
    total = tally(jnp.stack(tally(jnp.moveaxis(grouped, 0, 2)), axis=1))
    if whole < workers:
        total = add(total, tally(planes[whole:]), max(len(total), sum_bits(workers, p)))
    return total[: sum_bits(workers, p)]


def sum_bits(workers: int, p: int) -> int:
    """Planes that the sum of ``workers`` codes of ``p`` bits needs."""
    return (workers * (2**p - 1)).bit_length()


def _carry_save(columns: list[list[jax.Array]], width: int) -> list[jax.Array]:
    """Reduces ``columns[k]``, words of weight ``2**k``, to one word for each of ``width`` weights."""
    zero = columns[0][0] & 0
    columns = columns + [[] for _ in range(width - len(columns))]
    sums = []
    # Taken from the end, so that a sum is used up at once: few words are alive at a time.
    for k, column in enumerate(columns):
        while len(column) > 1:
            a, b = column.pop(), column.pop()
            s, carry = full_adder(a, b, column.pop()) if column else (a ^ b, a & b)
            column.append(s)
            if k + 1 < width:
                columns[k + 1].append(carry)
        sums.append(column[0] if column else zero)
    return sums


def full_adder(a: jax.Array, b: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds three one-bit numbers in every bit of a word: ``(sum, carry)``."""
    half = a ^ b
    return half ^ c, (a & b) | (half & c)


def add(a: Sequence[jax.Array], b: Sequence[jax.Array], width: int) -> list[jax.Array]:
    """Adds two numbers given as planes, least significant first, and keeps ``width`` planes."""
    zero = a[0] & 0
    a = [*a, *[zero] * (width - len(a))]
    b = [*b, *[zero] * (width - len(b))]
    carry, sums = zero, []
    for x, y in zip(a, b, strict=True):
        s, carry = full_adder(x, y, carry)
        sums.append(s)
    return sums


def compare(planes: Sequence[jax.Array], threshold: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compares numbers given as planes with thresholds, most significant plane first.

    Args:
      planes: the numbers, least significant plane first, ``uint32[words]`` each.
      threshold: ``uint32[words]``, one threshold for the 32 elements of a word.

    Returns:
      ``(greater, equal)``, ``uint32[words]`` masks.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax import bits
      >>> planes = [jnp.array([0b0110], jnp.uint32), jnp.array([0b1100], jnp.uint32)]
      >>> greater, equal = bits.compare(planes, jnp.array([1], jnp.uint32))
      >>> [bin(int(word[0]) & 0b1111) for word in (greater, equal)]
      ['0b1100', '0b10']
    """
    greater, equal = jnp.zeros_like(planes[0]), ~jnp.zeros_like(planes[0])
    for k, plane in reversed(list(enumerate(planes))):
        wanted = as_mask((threshold >> k) & 1)
        greater |= equal & plane & ~wanted
        equal &= ~(plane ^ wanted)
    return greater, equal


def as_mask(bit: jax.Array) -> jax.Array:
    """Spreads a zero or one over a whole word: 0 stays 0, 1 becomes 0xFFFFFFFF."""
    return jnp.uint32(0) - bit.astype(jnp.uint32)


def first_ones(filled: jax.Array) -> jax.Array:
    """Masks of rows whose first elements count.

    Args:
      filled: ``int32[rows]`` in 0 to 64.

    Returns:
      ``uint32[2 rows]``, ones for the first ``filled`` elements of each row.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax import bits
      >>> [f"{w:08x}" for w in bits.first_ones(jnp.array([36, 64]))]
      ['ffffffff', '0000000f', 'ffffffff', 'ffffffff']
    """
    in_word = jnp.clip(filled[:, None] - jnp.array([0, WORD]), 0, WORD).astype(jnp.uint32)
    shifted = jnp.uint32(1) << jnp.minimum(in_word, WORD - 1)
    return jnp.where(in_word == WORD, jnp.uint32(0xFFFFFFFF), shifted - 1).reshape(-1)


def coin(first_word: jax.Array | int, words: int, step: jax.Array | int) -> jax.Array:
    """Fair bits that every worker computes alike, from the element's place and the step.

    A tie needs a rule that favours neither sign and is the same everywhere. These bits are a hash
    (MurmurHash3's finaliser) of the word's index and the step, so no key travels and a run repeats.

    Args:
      first_word: ``uint32[]`` or int, the word of the flat buffer where these bits begin.
      words: how many words.
      step: ``int32[]``, the step.

    Returns:
      ``uint32[words]``.

    Example:
      >>> from lioncub_jax import bits
      >>> bool((bits.coin(0, 4, 7)[2:] == bits.coin(2, 2, 7)).all())
      True
    """
    index = jnp.arange(words, dtype=jnp.uint32) + jnp.asarray(first_word, jnp.uint32)
    return _mix(index ^ _mix(jnp.asarray(step, jnp.uint32) + jnp.uint32(0x9E3779B9)))


def _mix(h: jax.Array) -> jax.Array:
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def count_ones(words: jax.Array) -> jax.Array:
    """Set bits in all words together, ``float32[]`` (exact up to 2**24, then rounded)."""
    return jnp.sum(lax.population_count(words).astype(jnp.float32))
