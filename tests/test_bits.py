"""Packing and counting on words, bit for bit against numpy.

The adders are operators on words: given numpy's words they run in numpy, without a compiler.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lioncub_jax import bits

few = settings(max_examples=25, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)
code_bits = st.integers(1, 8)
# Rows of no block, a block, a half block, and both.
ROWS = [16, 32, 64, 80]


def joined(bits_of_words):
    """``bool[..., 32, lanes]`` to ``uint32[..., lanes]``, by numpy."""
    return np.sum(bits_of_words.astype(np.uint32) << np.arange(32)[:, None], -2, dtype=np.uint32)


def words_of(x):
    """``bool[..., rows, 128]`` to ``uint32[..., 4 rows]``, by numpy."""
    whole = x.shape[-2] - x.shape[-2] % 32
    parts = [joined(x[..., r : r + 32, :]) for r in range(0, whole, 32)]
    if whole < x.shape[-2]:
        parts.append(joined(np.concatenate([x[..., whole:, :64], x[..., whole:, 64:]], -2)))
    return np.concatenate(parts, -1)


def row_words_of(x):
    """``bool[..., rows]`` to ``uint32[..., blocks]``, by numpy."""
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 32)])
    return np.packbits(x, axis=-1, bitorder="little").view("<u4").astype(np.uint32)


def planes_of(numbers, p):
    """``[..., n]`` to ``uint32[p, ..., words]``: 32 numbers to a word, by numpy."""
    return np.stack([row_words_of(numbers >> k & 1 == 1) for k in range(p)])


def numbers_of(planes, n):
    """Undoes ``planes_of``."""
    planes = np.stack([np.asarray(plane) for plane in planes])
    lanes = np.unpackbits(planes.view(np.uint8), axis=-1, bitorder="little")[..., :n]
    return np.tensordot(1 << np.arange(len(planes)), lanes.astype(np.int64), 1)


# --- Bits of elements


@pytest.mark.parametrize("rows", ROWS)
def test_pack_puts_a_bit_of_each_row_in_the_word_of_its_lane(rows):
    rng = np.random.default_rng(rows)
    for p, lead in ((1, ()), (4, (3,)), (5, (3,)), (9, (2,))):
        codes = rng.integers(0, 2**p, (*lead, rows, 128), np.uint32)
        packed = jax.jit(bits.pack, static_argnums=1)(codes, p)
        planes = np.stack([codes >> k & 1 == 1 for k in range(p)])
        np.testing.assert_array_equal(np.stack(packed), words_of(planes))
        assert packed[0].dtype == jnp.uint32


def test_pack_takes_zeros_and_ones_of_any_integers():
    x = np.random.default_rng(0).integers(0, 2, (32, 128)).astype(np.uint32)
    np.testing.assert_array_equal(bits.pack(jnp.asarray(x))[0], words_of(x == 1))


def test_the_first_bits_of_a_block_and_of_a_half_block():
    x = np.zeros((48, 128), bool)
    x[3, 7] = x[32 + 3, 7] = x[32 + 5, 64 + 9] = True
    (words,) = bits.pack(jnp.asarray(x))
    found = np.flatnonzero(words)
    assert found.tolist() == [7, 128 + 7, 128 + 9]
    assert np.asarray(words)[found].tolist() == [1 << 3, 1 << 3, 1 << 16 + 5]


@pytest.mark.parametrize("rows", ROWS)
def test_unpack_undoes_pack(rows):
    codes = np.random.default_rng(rows).integers(0, 2**8, (2, rows, 128)).astype(np.uint32)
    for p in (1, 8):
        planes = [words_of((codes >> k) & 1 == 1) for k in range(p)]
        got = jax.jit(bits.unpack, static_argnums=1)(planes, rows)
        np.testing.assert_array_equal(got, codes % 2**p)


# --- Bits of rows


def test_row_words_hold_a_bit_of_each_row():
    rng = np.random.default_rng(0)
    for shape in [(16,), (32,), (2, 3, 80)]:
        x = rng.random(shape) < 0.5
        words = jax.jit(bits.pack_rows)(x)
        assert words.shape == (*shape[:-1], bits.row_words(shape[-1]))
        np.testing.assert_array_equal(words, row_words_of(x))
        unpacked = jax.jit(bits.unpack_rows, static_argnums=1)(words, shape[-1])
        np.testing.assert_array_equal(unpacked, x)


@pytest.mark.parametrize("rows", ROWS)
def test_any_in_rows_and_over_rows(rows):
    rng = np.random.default_rng(rows)
    x = rng.random((3, rows, 128)) < rng.choice([0, 0.01, 1], (3, rows, 1))
    found = jax.jit(bits.any_in_rows, static_argnums=1)(words_of(x), rows)
    np.testing.assert_array_equal(found, row_words_of(x.any(-1)))
    repeated = np.broadcast_to(x.any(-1, keepdims=True), x.shape)
    over_rows = jax.jit(bits.over_rows, static_argnums=1)(found, rows)
    np.testing.assert_array_equal(over_rows, words_of(repeated))


# --- Counting


def check_tally(codes, p):
    workers, n = codes.shape
    total = bits.tally(planes_of(codes, p))
    assert len(total) == bits.sum_bits(workers, p)
    np.testing.assert_array_equal(numbers_of(total, n), codes.sum(0, dtype=np.int64))


def test_tally_adds_the_codes_of_all_workers():
    rng = np.random.default_rng(0)
    for workers in [*range(1, 41), 100, 255]:
        for p in range(1, 9):
            codes = rng.integers(0, 2**p, (workers, 64))
            codes[:, 0], codes[:, 1] = 0, 2**p - 1
            check_tally(codes, p)


@pytest.mark.parametrize(("workers", "p"), [(256, 1), (300, 3), (511, 1), (600, 2)])
def test_tally_adds_many_workers_in_groups(workers, p):
    codes = np.random.default_rng(workers).integers(0, 2**p, (workers, 32))
    codes[:, 0], codes[:, 1] = 0, 2**p - 1
    check_tally(codes, p)


def test_sum_bits_are_enough_and_not_too_many():
    for workers in range(1, 601):
        for p in range(1, 9):
            largest, width = workers * (2**p - 1), bits.sum_bits(workers, p)
            assert 2 ** (width - 1) <= largest < 2**width


def test_full_adder_has_the_truth_table_of_addition():
    a, b, c = (np.array([w], np.uint32) for w in (0b11110000, 0b11001100, 0b10101010))
    s, carry = bits.full_adder(a, b, c)
    assert (int(s[0]), int(carry[0])) == (0b10010110, 0b11101000)


@few
@given(rng=seeds, p=code_bits, q=code_bits, width=st.integers(8, 10))
def test_add_is_addition_modulo_its_width(rng, p, q, width):
    a, b = rng.integers(0, 2**p, 32), rng.integers(0, 2**q, 32)
    total = bits.add(list(planes_of(a, p)), list(planes_of(b, q)), width)
    np.testing.assert_array_equal(numbers_of(total, 32), (a + b) % 2**width)


@few
@given(rng=seeds, p=code_bits, factor=st.integers(0, 300), width=st.integers(1, 17))
def test_times_is_multiplication_modulo_its_width(rng, p, factor, width):
    a = rng.integers(0, 2**p, 32)
    product = bits.times(list(planes_of(a, p)), factor, width)
    np.testing.assert_array_equal(numbers_of(product, 32), a * factor % 2**width)


@few
@given(rng=seeds, p=st.integers(1, 12), q=st.integers(1, 12))
def test_compare_is_exact_with_a_threshold_for_each_number(rng, p, q):
    numbers = rng.integers(0, 2**p, 96)
    near = np.clip(numbers + rng.integers(-1, 2, 96), 0, 2**q - 1)
    thresholds = np.where(rng.random(96) < 0.5, near, rng.integers(0, 2**q, 96))
    greater, equal = bits.compare(list(planes_of(numbers, p)), list(planes_of(thresholds, q)))
    np.testing.assert_array_equal(greater, row_words_of(numbers > thresholds))
    np.testing.assert_array_equal(equal, row_words_of(numbers == thresholds))


def test_as_mask_fills_words():
    mask = bits.as_mask(jnp.array([False, True]))
    assert mask.tolist() == [0, 2**32 - 1] and mask.dtype == jnp.uint32


# --- Fair bits


coin = jax.jit(bits.coin, static_argnums=1)


@partial(jax.jit, static_argnums=(1, 4))
def zero_side(first_word, words, step, worker, workers):
    return bits.zero_side(first_word, words, bits.draw(step, worker, workers))


def murmur_finaliser(h):
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


@pytest.mark.parametrize("step", [0, 1, 2**31 - 1])
def test_coin_is_the_hash_of_the_word_and_the_step(step):
    salt = murmur_finaliser((step + 0x9E3779B9) % 2**32)
    want = [murmur_finaliser(word ^ salt) for word in range(100, 110)]
    assert coin(100, 10, step).tolist() == want


@few
@given(first=st.integers(0, 2**31), step=st.integers(0, 2**31 - 1), start=st.integers(0, 6))
def test_fair_bits_of_a_slice_are_the_slice_of_the_fair_bits(first, step, start):
    part = slice(start, start + 2)
    whole = coin(first, 8, step)
    np.testing.assert_array_equal(coin(first + start, 2, jnp.int32(step)), whole[part])
    whole = zero_side(first, 8, step, 1, 3)
    sliced = zero_side(first + start, 2, jnp.int32(step), jnp.int32(1), 3)
    np.testing.assert_array_equal(sliced, whole[part])


def tossed(words):
    """``[..., words]`` to ``[..., words, 32]`` of zeros and ones."""
    return (np.asarray(words)[..., None] >> np.arange(32, dtype=np.uint32)) & 1


# A fair coin deviates by more than 5 sigma once in 1.7 million times; the bits are fixed, so a test
# that passes once passes always.
def assert_fair(x, axis=None):
    n = x.size if axis is None else x.shape[axis]
    assert np.abs(x.mean(axis) - 0.5).max() < 5 * 0.5 / np.sqrt(n)


@pytest.mark.parametrize("step", [0, 1, 1000])
def test_coin_is_fair_as_a_whole_and_in_every_bit(step):
    x = tossed(coin(0, 2**16, step))
    assert_fair(x)
    assert_fair(x, axis=0)


def test_fair_bits_of_a_word_are_fair_over_the_steps():
    steps = jnp.arange(4096)
    assert_fair(tossed(jax.vmap(lambda t: coin(0, 16, t))(steps)), axis=0)
    assert_fair(tossed(jax.vmap(lambda t: zero_side(0, 16, t, 2, 5))(steps)), axis=0)


def test_coin_does_not_repeat_itself():
    x, next_step = (tossed(coin(0, 2**16, step)) for step in (5, 6))
    for other in (next_step, np.roll(x, 1, axis=0), np.roll(x, 1, axis=1)):
        assert_fair(x == other)


def sides(workers, words, steps):
    """``[steps, W, words, 32]``."""
    of_step = jax.vmap(lambda w, t: zero_side(7, words, t, w, workers), (0, None))
    each = jax.jit(jax.vmap(of_step, (None, 0)))
    return tossed(each(jnp.arange(workers), jnp.arange(steps)))


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_zeros_of_the_workers_cancel_in_pairs(workers):
    upper = sides(workers, 4, 64).sum(1)
    assert set(np.unique(upper)) <= {workers // 2, (workers + 1) // 2}


def test_the_side_of_a_zero_is_the_hash_turned_by_the_rank_of_the_worker():
    workers, step, first = 5, 77, 12
    draw = murmur_finaliser(step + 0xC2B2AE3D)
    drawn = [murmur_finaliser(worker ^ draw) for worker in range(workers)]
    salt = murmur_finaliser(step + 0x85EBCA77)
    base = [murmur_finaliser(word ^ salt) for word in range(first, first + 3)]
    for worker in range(workers):
        odd = sorted(drawn).index(drawn[worker]) % 2
        want = [word ^ (0xFFFFFFFF * odd) for word in base]
        assert zero_side(first, 3, step, worker, workers).tolist() == want


def test_who_cancels_whom_is_a_fair_draw():
    parity = sides(8, 1, 4096)[:, :, 0, 0]  # of one element
    for i in range(8):
        for j in range(i):
            apart = (parity[:, i] != parity[:, j]).mean()
            assert abs(apart - 4 / 7) < 5 * 0.5 / np.sqrt(4096)


@pytest.mark.parametrize("workers", [2, 8])
def test_the_side_of_a_zero_says_nothing_of_the_coin(workers):
    coins = tossed(jax.vmap(lambda t: coin(7, 64, t))(jnp.arange(256)))
    for side in np.moveaxis(sides(workers, 64, 256), 1, 0):
        assert_fair(side == coins)
        assert_fair(side[:-1] == coins[1:])
