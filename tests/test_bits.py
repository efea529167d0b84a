"""Packing and counting on words, bit for bit against numpy.

The adders are operators on words: given numpy's words they run in numpy, without a compiler.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lioncub_jax.exchange import bits, transform
from lioncub_jax.exchange.wires import Reply


def key_words(x):
    """``bool[..., rows, 128]`` to ``uint32[..., 4 rows]``, by numpy; a short block folds its lanes."""
    whole = x.shape[-2] - x.shape[-2] % 32
    parts = [x[..., r : r + 32, :] for r in range(0, whole, 32)]
    if n := x.shape[-2] - whole:
        parts.append(np.concatenate(np.split(x[..., whole:, :], 32 // n, -1), -2))
    return np.concatenate([row_words_of(np.swapaxes(part, -1, -2))[..., 0] for part in parts], -1)


def row_words_of(x):
    """``bool[..., rows]`` to ``uint32[..., blocks]``, by numpy."""
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 32)])
    return np.packbits(x, axis=-1, bitorder="little").copy().view("<u4").astype(np.uint32)


def planes_of(numbers, p):
    """``[..., n]`` to ``uint32[p, ..., words]``: 32 numbers to a word, by numpy."""
    return np.stack([row_words_of(numbers >> k & 1 == 1) for k in range(p)])


def numbers_of(planes, n):
    """Undoes ``planes_of``."""
    planes = np.stack([np.asarray(plane) for plane in planes])
    lanes = np.unpackbits(planes.view(np.uint8), axis=-1, bitorder="little")[..., :n]
    return np.tensordot(1 << np.arange(len(planes)), lanes.astype(np.int64), 1)


# --- Bits of elements, and of rows

ROWS = [2, 16, 32, 36, 72]  # short blocks, a block, and both


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("p", "lead"), [(1, ()), (4, (3,)), (5, (1, 2)), (9, (2,))])
def test_a_word_of_a_lane_has_a_bit_of_each_row_and_codes_come_back(rows, p, lead):
    codes = np.random.default_rng(rows).integers(0, 2**p, (*lead, rows, 128), np.uint32)
    packed = jax.jit(bits.pack, static_argnums=1)(codes, p)
    np.testing.assert_array_equal(packed, [key_words(codes >> k & 1 == 1) for k in range(p)])
    for undo, kind in ((bits.unpack, "uint32"), (bits.unpack_short, f"uint{8 * -(-p // 8)}")):
        found = jax.jit(undo)(packed)
        np.testing.assert_array_equal(found, codes)
        assert packed[0].dtype == jnp.uint32 and found.dtype == kind


@pytest.mark.parametrize("rows", ROWS)
def test_row_words_hold_a_bit_of_each_row(rows):
    rng = np.random.default_rng(rows)
    x = rng.random((3, rows, 128)) < rng.choice([0, 0.01, 1], (3, rows, 1))
    some, words = x.any(-1), key_words(x)
    found, back, marked, over = jax.jit(
        lambda some, words: (
            packed := bits.pack_rows(some),
            bits.unpack_rows(packed, rows),
            bits.any_in_rows(words),
            bits.over_rows(packed, rows),
        )
    )(some, words)
    assert found.shape == (3, bits.row_words(rows))
    np.testing.assert_array_equal(found, row_words_of(some))
    np.testing.assert_array_equal(back, some)
    np.testing.assert_array_equal(marked, found)
    np.testing.assert_array_equal(over, key_words(np.broadcast_to(some[..., None], x.shape)))


# --- Counting


@pytest.mark.parametrize("p", [1, 2, 3, 8])
def test_tally_adds_the_codes_of_all_workers(p):
    """Above 255 workers in groups."""
    rng = np.random.default_rng(p)
    for workers in [*range(1, 41), 100, 255, 256, 300, 511, 600]:
        codes = rng.integers(0, 2**p, (workers, 64))
        codes[:, 0], codes[:, 1] = 0, 2**p - 1
        total = bits.add_codes(planes_of(codes, p))
        assert len(total) == bits.sum_bits(workers, p)
        assert 2 ** (len(total) - 1) <= workers * (2**p - 1) < 2 ** len(total)
        np.testing.assert_array_equal(numbers_of(total, 64), codes.sum(0))


@pytest.mark.parametrize("seed", range(25))
def test_numbers_in_planes_are_multiplied_and_compared(seed):
    rng = np.random.default_rng(seed)
    p, q = rng.integers(1, 13, 2)
    a, b = rng.integers(0, 2**p, 96), rng.integers(0, 2**q, 96)
    b[::2] = np.clip(a + rng.integers(-1, 2, 96), 0, 2**q - 1)[::2]
    x, y = list(planes_of(a, p)), list(planes_of(b, q))
    width, factor = int(rng.integers(4, 9)), int(rng.integers(0, 151)) * 2 + 1
    np.testing.assert_array_equal(
        numbers_of(bits.times(x, factor, width), 96), a * factor % 2**width
    )
    greater, equal = bits.compare(x, y)
    np.testing.assert_array_equal(greater, row_words_of(a > b))
    np.testing.assert_array_equal(equal, row_words_of(a == b))


def test_sums_beyond_a_word_are_rounded_in_the_last_places():
    """As of 7e9 parameters and 256 workers, with every second pair unlike."""
    rng = np.random.default_rng(0)
    for most, count in ((2**32 - 1, 1000), (2**31, 7), (2**20, 2**13 + 1), (3, 5)):
        x = rng.integers(0, most, (2, count), np.uint32, endpoint=True)
        x[1] = most
        found = jax.jit(bits.add_numbers, static_argnums=1)(x, most)
        np.testing.assert_allclose(found, x.sum(1, dtype=np.uint64), rtol=2**-20)
    size, workers = 7 * 10**9, 256
    pairs = size * workers * (workers - 1) / 2
    unit = transform.unit_of(size * workers**2)
    each = [jnp.full(workers, x / workers, jnp.float32) for x in (pairs / 2, pairs)]
    ties = jnp.full(workers, size // workers, jnp.uint32)
    reply = Reply([], None, ties, each, jnp.uint32(1))
    found = transform.in_units(reply, transform.unit_of(size), unit)
    np.testing.assert_allclose(found[1:] * 2.0**unit, [pairs / 2, pairs], 2**-20)
