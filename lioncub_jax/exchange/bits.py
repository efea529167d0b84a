"""Codes to words and back, and counting codes without leaving the words; at the end the dtypes of sums.

A *row* is 128 consecutive elements of a leaf, a *block* is 32 rows. A *word* is a uint32 that holds one
bit of each of the 32 rows of a block: word ``j`` holds element ``j`` of each row, bit ``k`` that of row
``k``. So shifts never cross the 128 lanes, which are the lanes of a TPU register, of a GPU warp and of a
CPU's vectors. Rows come in whole blocks, and behind them may come a *short block* of n = 2, 4, 8 or 16
rows, so that few numbers are few words: in ``4 n`` words, bits 0 to n - 1 are the first ``4 n`` elements of
the rows, the next n bits the next ``4 n``.

Codes of ``p`` bits are ``p`` *planes* of words: plane ``k`` holds bit ``k`` of every code. What is true of
a whole row is one bit of a *row word*, ``uint32[blocks]``, bit ``k`` for row ``k``.

Votes are counted on the words themselves. A full adder on words, ``s = a ^ b ^ c`` and
``carry = ab | (a ^ b)c``, adds 32 one-bit numbers in five instructions; the planes of ``W`` workers
reduce to the planes of their sum, and "more than half" is a comparison that walks those planes once.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from lioncub_jax.exchange import xla
from lioncub_jax.mesh.checksum import mix

ROW = 128  # elements
BLOCK = 32  # rows, one bit of a word each
WORDS_PER_ROW = ROW // BLOCK  # on average: a block of 32 rows takes 128 words

# The adders of up to this many workers are unrolled into one fused loop. More workers are added in
# groups of this size, then the groups' sums, so that the program stays small.
_GROUP = 255
# Packing has two stages: rows r, r + 4, .. r + 28 are joined to a word with eight nibbles that hold four
# bits of each of their codes, then every fourth bit of four such words, of neighboring rows, to one of a
# plane. So the first and costly stage runs over 512 neighboring elements, which a CPU does in vectors.
_APART = 4
_STRIPES = BLOCK // _APART
_EVERY_FOURTH = 0x11111111
Halves: TypeAlias = list[list[jax.Array]]  # see `half_packed`


def divide_up(n: int, by: int) -> int:
    """``n / by``, rounded up."""
    return -(-n // by)


def round_up(n: int, multiple: int) -> int:
    """The next multiple that is no smaller."""
    return divide_up(n, multiple) * multiple


def whole_rows(rows: int) -> int:
    """The least number of rows that is no smaller, of whole blocks and at most one short block.

    Example:
      >>> from lioncub_jax.exchange import bits
      >>> [bits.whole_rows(n) for n in (1, 3, 16, 17, 33)]
      [2, 4, 16, 32, 34]
    """
    whole, rest = divmod(rows, BLOCK)
    return whole * BLOCK + (max(2, 1 << (rest - 1).bit_length()) if rest else 0)


def row_words(rows: int) -> int:
    """Words that hold one bit of each row."""
    return divide_up(rows, BLOCK)


# --- Bits of elements


def pack(codes: jax.Array, p: int = 1) -> list[jax.Array]:
    """Packs codes of ``p`` bits; all of their planes in one pass over what computes them.

    One reduction, into which the compiler fuses whatever computes the codes, joins eight rows and up to
    four bits of a code in a word; those are few, and are joined again to the planes.

    Args:
      codes: bool, or uint32 below ``2**p``, ``[..., rows, 128]``; rows as of `whole_rows`.
      p: how many bits.

    Returns:
      ``p`` planes, ``uint32[..., 4 rows]`` each, the least significant first.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax.exchange import bits
      >>> x = jnp.zeros((32, 128), bool).at[3, 7].set(True)
      >>> bits.pack(x)[0][7].tolist()  # row 3 is bit 3
      8
    """
    return planes_of(half_packed(codes, p), p)


def sign_fields(x: jax.Array) -> jax.Array:
    """Codes of two bits, ``uint32[...]``: positive, and not zero."""
    return (x > 0).astype(jnp.uint32) | ((x != 0).astype(jnp.uint32) << 1)


def half_packed(codes: jax.Array, p: int) -> Halves:
    """The first stage of `pack`: words with four bits each of the codes of eight rows.

    A list for whole blocks, and one for a short block, with an array for every four bits of a code. Arrays
    of whole blocks may be joined along dimension -3, that of blocks.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax.exchange import bits
      >>> halves = bits.half_packed(jnp.full((32, 128), 5), 3)
      >>> halves[0][0].shape, hex(int(halves[0][0][0, 0, 0])), int(bits.half_unpacked(halves, 3)[0, 0])
      ((1, 4, 128), '0x55555555', 5)
    """
    return [_to_nibbles(x, p) for x in _rows_in_blocks(codes)]


def planes_of(halves: Halves, p: int) -> list[jax.Array]:
    """The second stage of `pack`: planes ``uint32[..., words]`` of what `half_packed` gives."""
    parts = [_apart(each, p) for each in halves]
    return [_joined(each, each[0].shape[:-2]) for each in zip(*parts, strict=True)]


def half_unpacked(halves: Halves, p: int) -> jax.Array:
    """Codes ``uint32[..., rows, 128]`` of ``p`` bits, with less work than from planes."""
    parts = []
    for each in halves:
        at = iota_along(_STRIPES, -3, each[0].ndim + 1, _APART)
        codes = []
        for k, words in enumerate(each[: divide_up(p, _APART)]):
            mask = 2 ** min(p - _APART * k, _APART) - 1
            codes.append(((words[..., None, :, :] >> at) & mask) << (_APART * k))
        code = functools.reduce(operator.or_, codes)
        parts.append(code.reshape(*code.shape[:-3], BLOCK, -1))
    return _in_rows(parts)


def half_with_zero_signs(halves: Halves, p: int, signs: jax.Array) -> Halves:
    """Mid-rise codes in which zeros have a random sign, of what `half_packed` gives.

    Args:
      halves: of ``p + 1`` bits: above a code its mark, 1 for an element that is not zero. A zero has the
        lower one of the two codes in the middle, ``011..``; where its bit in ``signs`` is 1 it gets the
        upper one, ``100..``.
      p: bits of a code.
      signs: ``uint32[..., words]``, as `random_signs`.

    Returns:
      As `half_packed`, of the codes alone.
    """
    signed = []
    for each, words in zip(halves, _in_blocks(signs), strict=True):
        words = words[..., None, :]
        marks = each[p // _APART] >> (p % _APART)
        aside = (words >> iota_along(_APART, -2, words.ndim)) & ~marks & _EVERY_FOURTH
        own = []
        for k in range(0, p, _APART):
            mask = 2 ** min(p - k, _APART) - 1  # all bits of the code are turned
            own.append((each[k // _APART] & np.uint32(mask * _EVERY_FOURTH)) ^ (aside * mask))
        signed.append(own)
    return signed


def iota_along(size: int, at: int, ndim: int, by: int = 1) -> jax.Array:
    """``0, by, 2 by, ...`` along dimension ``at``, a negative one, as ``uint32`` of rank ``ndim``.

    JAX can be set to refuse operands of unlike ranks.
    """
    others = [d for d in range(ndim) if d != ndim + at]
    return lax.expand_dims(by * jnp.arange(size, dtype=jnp.uint32), others)


def _to_nibbles(codes: jax.Array, p: int) -> list[jax.Array]:
    """``[..., 32, lanes]`` to ``uint32[..., 4, lanes]``, eight nibbles each, for every four bits."""
    lead, lanes = codes.shape[:-2], codes.shape[-1]
    striped = codes.astype(jnp.uint32).reshape(*lead, _STRIPES, _APART, lanes)
    at, nibbles = iota_along(_STRIPES, -3, striped.ndim, _APART), []
    for k in range(0, p, _APART):
        four = striped >> k if k else striped
        four = four & 0xF if p > _APART else four
        nibbles.append(lax.reduce_or(four << at, (len(lead),)))
    return nibbles


def _apart(nibbles: Sequence[jax.Array], p: int) -> list[jax.Array]:
    """``uint32[..., lanes]`` for each plane, of `_to_nibbles`."""
    row, stripes = iota_along(_APART, -2, nibbles[0].ndim), []
    for k in range(p):
        bit = k % _APART
        own = nibbles[k // _APART]
        stripes.append((own >> bit if bit else own) & _EVERY_FOURTH)
    # A reduction, because XLA stores its result; a sum of terms would be computed again for each use.
    return xla.reduced([operator.or_] * p, [x << row for x in stripes], nibbles[0].ndim - 2)


def _rows_in_blocks(x: jax.Array) -> list[jax.Array]:
    """``[..., rows, 128]`` as ``[..., blocks, 32, 128]``, then a short block as ``[..., 1, 32, 4 n]``."""
    *lead, rows, _ = x.shape
    whole, parts = rows - rows % BLOCK, []
    if whole:
        parts.append(x[..., :whole, :].reshape(*lead, -1, BLOCK, ROW))
    if rows > whole:
        n = rows - whole
        folds = x[..., whole:, :].reshape(*lead, n, BLOCK // n, -1)
        parts.append(jnp.moveaxis(folds, -2, -3).reshape(*lead, 1, BLOCK, -1))
    return parts


def _in_blocks(words: jax.Array) -> list[jax.Array]:
    """``[..., 4 rows]`` as ``[..., blocks, 128]``, then a short block as ``[..., 1, 4 n]``."""
    *lead, size = words.shape
    whole = size - size % ROW
    parts = [words[..., :whole].reshape(*lead, -1, ROW)] if whole else []
    return parts + ([words[..., None, whole:]] if size > whole else [])


def _joined(parts: Sequence[jax.Array], lead: Sequence[int]) -> jax.Array:
    """Undoes ``_in_blocks``."""
    return jnp.concatenate([x.reshape(*lead, -1) for x in parts], -1)


def unpack(planes: jax.Array | Sequence[jax.Array]) -> jax.Array:
    """Turns planes back into codes.

    Args:
      planes: ``uint32[p, ..., 4 rows]``, or a list of ``p`` planes; rows as of `whole_rows`.

    Returns:
      ``uint32[..., rows, 128]``, codes in ``[0, 2**p)``.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax.exchange import bits
      >>> words = jnp.zeros(128, jnp.uint32).at[7].set(8)
      >>> int(bits.unpack([words, words])[3, 7])
      3
    """
    return functools.reduce(operator.or_, [_bits(x) << k for k, x in enumerate(planes)])


def unpack_each(planes: Sequence[jax.Array]) -> Callable[[Any], jax.Array]:
    """Like `unpack`, of ``uint32[messages, ..., 4 rows]``: a function of a message's index, or ``...``.

    On a CPU the planes are joined first, to words of eight codes of 4 bits, or four of 8.
    """
    if not xla.for_cpu():
        return lambda at: unpack([x[at] for x in planes])
    size = 4 if len(planes) <= 4 else 8
    first = np.uint32(0x11111111 if size == 4 else 0x01010101)
    joined = []
    for each in zip(*[_in_blocks(x) for x in planes], strict=True):
        row = iota_along(size, -2, each[0].ndim + 1)
        codes = [((x[..., None, :] >> row) & first) << k for k, x in enumerate(each)]
        joined.append(xla.materialized(functools.reduce(operator.or_, codes)))

    def apart(at: Any) -> jax.Array:
        parts = []
        for x in joined:
            words = x[at][..., None, :, :]
            codes = (words >> iota_along(BLOCK // size, -3, words.ndim, size)) & (2**size - 1)
            parts.append(codes.reshape(*codes.shape[:-3], BLOCK, -1))
        return _in_rows(parts)

    return apart


def unpack_signs(positive: jax.Array, moved: jax.Array) -> jax.Array:
    """``int8[..., rows, 128]``: 1 or -1, and 0 in rows that do not move.

    Args:
      positive: ``uint32[..., 4 rows]``.
      moved: row words, ``uint32[..., blocks]``.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax.exchange import bits
      >>> positive = jnp.zeros(128, jnp.uint32).at[7].set(8)
      >>> bits.unpack_signs(positive, jnp.array([12], jnp.uint32))[1:4, 7].tolist()
      [0, -1, 1]
    """
    moved = over_rows(moved, positive.shape[-1] // WORDS_PER_ROW)
    # 1 is 00000001 and -1 is 11111111.
    upper = -unpack([moved & ~positive]) & np.uint32(0xFE)
    return (unpack([moved]) | upper).astype(jnp.int8)


def unpack_short(planes: Sequence[jax.Array]) -> jax.Array:
    """Like `unpack`, as the smallest integer type: ``uint8``, of more than 8 planes ``uint16``, ..."""
    return unpack(planes).astype(np.min_scalar_type(2 ** len(planes) - 1))


def _bits(words: jax.Array) -> jax.Array:
    blocks = _in_blocks(words)
    return _in_rows([(x[..., None, :] >> iota_along(BLOCK, -2, x.ndim + 1)) & 1 for x in blocks])


def _in_rows(parts: Sequence[jax.Array]) -> jax.Array:
    """Undoes `_rows_in_blocks`."""
    rows = []
    for x in parts:
        *lead, _, _, lanes = x.shape
        if lanes < ROW:
            x = jnp.moveaxis(x.reshape(*lead, -1, lanes // WORDS_PER_ROW, lanes), -3, -2)
        rows.append(x.reshape(*lead, -1, ROW))
    return jnp.concatenate(rows, -2)


# --- Bits of rows


def pack_rows(bits: jax.Array) -> jax.Array:
    """``bool[..., rows]`` to row words, ``uint32[..., blocks]``; zeros behind the last row.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax.exchange import bits
      >>> bits.pack_rows(jnp.array([True, False, True])).tolist()
      [5]
    """
    short = -bits.shape[-1] % BLOCK
    bits = jnp.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, short)])
    rows = bits.reshape(*bits.shape[:-1], -1, BLOCK).astype(jnp.uint32)
    return jnp.sum(rows << iota_along(BLOCK, -1, rows.ndim), -1, dtype=jnp.uint32)


def unpack_rows(words: jax.Array, rows: int) -> jax.Array:
    """Undoes ``pack_rows``: ``uint32[..., blocks]`` to ``uint32[..., rows]`` of zeros and ones.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax.exchange import bits
      >>> bits.unpack_rows(jnp.array([5], jnp.uint32), 3).tolist()
      [1, 0, 1]
    """
    bits = (words[..., None] >> iota_along(BLOCK, -1, words.ndim + 1)) & 1
    return bits.reshape(*words.shape[:-1], -1)[..., :rows]


def any_in_rows(words: jax.Array) -> jax.Array:
    """Row words of the rows with a bit in any element: ``uint32[..., 4 rows]`` to ``[..., blocks]``."""
    parts = []
    for x in _in_blocks(words):
        either = lax.reduce_or(x, (x.ndim - 1,))
        if x.shape[-1] < ROW:
            n, bit = x.shape[-1] // WORDS_PER_ROW, BLOCK // 2
            while bit >= n:
                either, bit = either | (either >> bit), bit // 2
            either &= 2**n - 1
        parts.append(either)
    return _joined(parts, words.shape[:-1])


def over_rows(words: jax.Array, rows: int) -> jax.Array:
    """Repeats the bit of each row for its elements: row words ``[..., blocks]`` to ``[..., 4 rows]``.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax.exchange import bits
      >>> bits.over_rows(jnp.array([8], jnp.uint32), 32)[5:7].tolist()
      [8, 8]
    """
    lead, (whole, n) = words.shape[:-1], divmod(rows, BLOCK)
    parts = [jnp.broadcast_to(words[..., :whole, None], (*lead, whole, ROW))]
    if n:
        mine = 2**n - 1
        folds = (words[..., -1:] & mine) * jnp.uint32(
            0xFFFFFFFF // mine
        )  # the n bits, again and again
        parts.append(jnp.broadcast_to(folds, (*lead, n * WORDS_PER_ROW)))
    return _joined(parts, lead)


# --- Counting


def add_codes(planes: Sequence[jax.Array]) -> list[jax.Array]:
    """Adds the codes of all workers, on packed words, with carry-save adders.

    Args:
      planes: of each worker's codes, least significant first, ``uint32[workers, ...]`` each.

    Returns:
      The planes of the sum, least significant first, ``uint32[...]`` each; as many as the largest
      possible sum ``W (2**p - 1)`` needs.

    Example:
      Three workers vote 1, 1, 0 on the element of bit 0; the sum is 2:

      >>> import jax.numpy as jnp
      >>> from lioncub_jax.exchange import bits
      >>> votes = jnp.array([[1], [1], [0]], jnp.uint32)
      >>> [plane.tolist() for plane in bits.add_codes([votes])]
      [[0], [1]]
    """
    num_workers = planes[0].shape[0]
    # The last workers are added to the sums of the whole groups before them.
    whole = (num_workers - 1) // _GROUP * _GROUP
    columns = [_terms(x[whole:]) for x in planes]
    if whole:
        groups = [x[:whole].reshape(-1, _GROUP, *x.shape[1:]) for x in planes]
        for k, plane in enumerate(add_codes([jnp.moveaxis(x, 1, 0) for x in groups])):
            if k == len(columns):
                columns.append([])
            columns[k] += _terms(plane)
    return [x[0] for x in _carry_save(columns, sum_bits(num_workers, len(planes)))]


def sum_bits(num_workers: int, p: int) -> int:
    """Planes of the sum of ``num_workers`` codes of ``p`` bits."""
    return (num_workers * (2**p - 1)).bit_length()


def _terms(plane: jax.Array) -> list[jax.Array]:
    """The words of each worker, which keep an axis of length 1.

    XLA moves a squeeze through one adder in each compiler pass, and runs all passes again: slow to compile.
    """
    return [plane[i : i + 1] for i in range(len(plane))]


def _carry_save(columns: Sequence[Sequence[jax.Array]], width: int) -> list[jax.Array]:
    """Reduces ``columns[k]``, words of weight ``2**k``, to one word for each of ``width`` weights."""
    zero, sums, carries = columns[0][0] & 0, list[jax.Array](), list[jax.Array]()
    for k in range(width):
        column, carries = [*(columns[k] if k < len(columns) else ()), *carries], []
        # Taken from the end, so that a sum is used up at once: few words are alive at a time.
        while len(column) > 1:
            a, b = column.pop(), column.pop()
            c = column.pop() if column else zero
            column.append(a ^ b ^ c)
            carries.append((a & b) | ((a ^ b) & c))
        sums += column or [zero]
    return sums


def times(planes: Sequence[jax.Array], factor: int, width: int) -> list[jax.Array]:
    """Multiplies numbers given as planes by an odd number, and keeps ``width`` planes."""
    shifts = [k for k in range(factor.bit_length()) if factor >> k & 1]
    columns = []
    for k in range(width):
        columns.append([planes[k - shift] for shift in shifts if 0 <= k - shift < len(planes)])
    return _carry_save(columns, width)


def difference(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
    """The planes of ``a - b``, of numbers given as so many planes each, where ``a`` is nowhere less."""
    columns = [[x, ~y] for x, y in zip(a, b, strict=True)]  # a + not(b) + 1
    columns[0].append(~(a[0] & 0))
    return _carry_save(columns, len(columns))


def products(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> jax.Array:
    """Sums ``a * b`` over the 32 elements of a word, of numbers given as planes: ``uint32[...]``.

    ``sum_jk 2**(j + k) popcount(a_j & b_k)``; the sum must be below ``2**32``.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax.exchange import bits
      >>> ones, threes = jnp.array([0b011], jnp.uint32), jnp.array([0b110], jnp.uint32)
      >>> bits.products([ones], [threes, threes]).tolist()  # 1 * 0 + 1 * 3 + 0 * 3
      [3]
    """
    terms = [
        lax.population_count(x & y) << (j + k) for j, x in enumerate(a) for k, y in enumerate(b)
    ]
    return functools.reduce(operator.add, terms)


def add_numbers(numbers: jax.Array, most: int) -> jax.Array:
    """Adds ``uint32[..., n]``, none of which is above ``most``: ``float32[...]``.

    Whole numbers are added as long as a word holds them, and what is then left in float32: sums beyond
    ``2**32`` are rounded a few times, not once for each number.
    """
    count = numbers.shape[-1]
    parts = divide_up(count, max((2**32 - 1) // most, 1))
    padded = jnp.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, -count % parts)])
    exact = jnp.sum(padded.reshape(*numbers.shape[:-1], parts, -1), -1, dtype=jnp.uint32)
    return jnp.sum(exact.astype(jnp.float32), -1)


def add_count(count: jax.Array, more: jax.Array | int) -> jax.Array:
    """A counter ``int32[]`` and what is counted: their sum, or the largest number, beyond which none goes.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax.exchange import bits
      >>> int(bits.add_count(jnp.int32(2**31 - 2), 8)) == 2**31 - 1
      True
    """
    return count + jnp.minimum(more, jnp.iinfo(count.dtype).max - count)


def constant(number: int, width: int, like: jax.Array) -> list[jax.Array]:
    """A number as so many planes, the same in all places of ``like``, ``uint32[...]``."""
    return [jnp.full_like(like, 0xFFFFFFFF if number >> k & 1 else 0) for k in range(width)]


def at_most(planes: Sequence[jax.Array], most: int) -> list[jax.Array]:
    """Numbers given as planes, with ``most`` in place of those that are above it.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax.exchange import bits
      >>> planes = [jnp.array([0b0110], jnp.uint32), jnp.array([0b1100], jnp.uint32)]  # 0, 1, 3, 2
      >>> [bin(int(x[0])) for x in bits.at_most(planes, 2)]
      ['0b10', '0b1100']
    """
    if most == 2 ** len(planes) - 1:
        return list(planes)
    largest = constant(most, len(planes), planes[0])
    above, _ = compare(planes, largest)
    return [(x & ~above) | (y & above) for x, y in zip(planes, largest, strict=True)]


def compare(
    planes: Sequence[jax.Array], threshold: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Compares numbers with thresholds, both given as planes, most significant plane first.

    Args:
      planes: the numbers, least significant plane first, ``uint32[...]`` each.
      threshold: the same for the thresholds; planes that one of the two lacks are zero.

    Returns:
      ``(greater, equal)``, ``uint32[...]`` masks.

    Example:
      >>> import jax.numpy as jnp
      >>> from lioncub_jax.exchange import bits
      >>> planes = [jnp.array([0b0110], jnp.uint32), jnp.array([0b1100], jnp.uint32)]
      >>> greater, equal = bits.compare(planes, [jnp.array([0xFFFFFFFF], jnp.uint32)])
      >>> [bin(int(word[0]) & 0b1111) for word in (greater, equal)]
      ['0b1100', '0b10']
    """
    zero = jnp.zeros_like(planes[0])
    greater, equal = zero, ~zero
    for plane, wanted in reversed([*zip_longest(planes, threshold, fillvalue=zero)]):
        greater |= equal & plane & ~wanted
        equal &= ~(plane ^ wanted)
    return greater, equal


# --- Fair bits

_TIES, _ZEROS, _ORDER = 0x9E3779B9, 0x85EBCA77, 0xC2B2AE3D


def tie_bits(first_word: jax.Array | int, words: int, num_steps: jax.Array | int) -> jax.Array:
    """Fair bits, the same on every worker, computed from the element's place and the step.

    A tie needs a rule that favors neither sign and is the same everywhere. These bits are a hash
    (MurmurHash3's finalizer) of the word's index and the step, so no key travels and a run repeats.

    Args:
      first_word: ``uint32[]`` or int, the word of all buckets where these bits begin.
      words: how many words.
      num_steps: ``int32[]``, steps taken before.

    Returns:
      ``uint32[words]``.

    Example:
      >>> from lioncub_jax.exchange import bits
      >>> bool((bits.tie_bits(0, 4, 7)[2:] == bits.tie_bits(2, 2, 7)).all())
      True
    """
    return _hashed(first_word, words, _seed(num_steps, _TIES))


def draw_signs(
    num_steps: jax.Array | int, worker: jax.Array | int, num_workers: int
) -> list[jax.Array]:
    """Draws random pairs of workers: two workers of a pair give a zero opposite signs.

    Two numbers ``uint32[]`` for `random_signs`: a seed, the same on every worker, and all ones for one
    worker of a pair, 0 for the other.

    Args:
      num_steps: ``int32[]``, steps taken before.
      worker: ``int32[]``, index of this worker.
      num_workers: W.
    """
    drawn = _seed(num_steps, _ORDER)
    mine = mix(jnp.asarray(worker, jnp.uint32) ^ drawn)
    all_ = mix(jnp.arange(num_workers, dtype=jnp.uint32) ^ drawn)
    rank = jnp.sum(all_ < mine, dtype=jnp.uint32)
    drawn = jnp.stack([_seed(num_steps, _ZEROS), jnp.uint32(0) - (rank & 1)])
    return list(xla.materialized(drawn))


def random_signs(
    first_word: jax.Array | int, words: int, seed: jax.Array, flip: jax.Array
) -> jax.Array:
    """Random signs of exact zeros in codes without a zero, for each element of one worker.

    The bit of a zero must be independent of the bit of a tie. Otherwise, when one worker votes and the
    other has a zero, the tie would always (or never) go to the voter. Workers take opposite signs in
    random pairs, drawn anew at each step, so that zeros cancel.

    Args:
      first_word: as `tie_bits`.
      words: as `tie_bits`.
      seed: as `draw_signs` has drawn it for this worker and step.
      flip: likewise.

    Returns:
      ``uint32[words]``.
    """
    return _hashed(first_word, words, seed) ^ flip


def _hashed(first_word: jax.Array | int, words: int, seed: jax.Array) -> jax.Array:
    index = jnp.arange(words, dtype=jnp.uint32) + jnp.asarray(first_word, jnp.uint32)
    return mix(index ^ seed)


def _seed(num_steps: jax.Array | int, salt: int) -> jax.Array:
    return mix(jnp.asarray(num_steps, jnp.uint32) + jnp.uint32(salt))


# --- Numbers: the dtypes in which they are added, and means over the workers


def common_dtype(*given: Any) -> np.dtype:
    """The dtype that holds what those of arrays or dtypes hold, whatever promotion JAX is set to."""
    # JAX promotes no float of 8 bits, and moments of an owner would be 0 in one.
    given = tuple(jnp.float32 if _is_float8(x) else x for x in given)
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*given)


def at_least_float32(x: jax.Array) -> jax.Array:
    """The same numbers, wide enough that results are rounded once, when they are stored."""
    return x.astype(common_dtype(x, jnp.float32))


def saturated(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """A cast that keeps finite values finite: those that the dtype cannot hold become its largest."""
    largest = float(jnp.finfo(dtype).max)
    if largest < float(jnp.finfo(x.dtype).max):
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)


def _is_float8(x: Any) -> bool:
    dtype = jnp.result_type(x)
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1


def high_and_low(x: jax.Array) -> jax.Array:
    """High and low bits of whole numbers, ``[..., 2]``, to add thousands of them; floats as they are."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    half = 4 * x.dtype.itemsize
    return jnp.stack([x >> half, x & (2**half - 1)], -1)


def of_high_and_low(sums: jax.Array, dtype: np.dtype) -> jax.Array:
    """Sums of `high_and_low` as numbers; one beyond its dtype is the largest, or the least, of that."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return sums
    half, kind = 4 * dtype.itemsize, jnp.iinfo(dtype)
    least, most = dtype.type(kind.min), dtype.type(kind.max)
    upper = sums[..., 0] + (sums[..., 1] >> half)
    total = (upper << half) | (sums[..., 1] & (2**half - 1))
    total = jnp.where(upper > most >> half, most, total)
    return jnp.where(upper < least >> half, least, total)


def merge_over_workers(x: jax.Array) -> jax.Array:
    """The mean of ``[workers, ...]``, in float32 at least; of whole numbers and bools the largest."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.max(x, axis=0)
    return jnp.mean(at_least_float32(x), axis=0)
