"""Packing and counting on words, bit for bit against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lioncub_jax import bits

# Shapes come from short lists: each new one compiles anew.
few = settings(max_examples=25, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)
code_bits = st.integers(1, 8)


def words_of(x):
    """``bool[..., n]`` to ``uint32[..., ceil(n / 32)]``, by numpy."""
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 32)])
    return np.packbits(x, axis=-1, bitorder="little").view("<u4").astype(np.uint32)


def planes_of(codes, p):
    """``[..., n]`` to ``uint32[p, ..., words]``, by numpy."""
    return np.stack([words_of(codes >> k & 1 == 1) for k in range(p)])


def numbers_of(planes, n):
    """Undoes ``planes_of``."""
    planes = np.stack([np.asarray(plane) for plane in planes])
    lanes = np.unpackbits(planes.view(np.uint8), axis=-1, bitorder="little")[..., :n]
    return np.tensordot(1 << np.arange(len(planes)), lanes.astype(np.int64), 1)


pack = jax.jit(bits.pack, static_argnums=1)


@few
@given(rng=seeds, p=code_bits)
def test_pack_puts_marked_codes_in_planes_and_the_fill_elsewhere(rng, p):
    codes = rng.integers(0, 2**p, (3, 64)).astype(np.uint32)
    marks = rng.random((3, 64)) < rng.choice([0, 0.5, 1])
    fill = rng.integers(0, 2**32, (p, 6), dtype=np.uint32)
    packed = pack(codes, p, marks, np.zeros_like(marks), list(fill))
    marked = words_of(marks.reshape(-1))
    want = (planes_of(codes.reshape(-1), p) & marked) | (fill & ~marked)
    np.testing.assert_array_equal(packed.planes, want)
    np.testing.assert_array_equal(packed.marks, marked)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("flag", [None, 0, 77, 127])
def test_pack_tells_whether_any_element_is_flagged(p, flag):
    flags = np.arange(128).reshape(2, 64) == flag
    nothing = jnp.zeros((2, 64), jnp.uint32)
    packed = pack(nothing, p, nothing > 0, flags, [0] * p)
    assert bool(packed.flagged) == (flag is not None)
    assert not packed.planes.any() and not packed.marks.any()


@few
@given(rng=seeds, p=code_bits)
def test_unpack_undoes_pack(rng, p):
    codes = rng.integers(0, 2**p, (3, 64)).astype(np.uint32)
    planes = pack(codes, p, np.ones_like(codes, bool), codes > 2**p, [0] * p).planes
    np.testing.assert_array_equal(jax.jit(bits.unpack)(planes).reshape(3, 64), codes)


@few
@given(rng=seeds, shape=st.sampled_from([(1,), (31,), (32,), (33,), (3, 65), (2, 2, 100)]))
def test_unpack_bits_undoes_pack_bits(rng, shape):
    x = rng.random(shape) < 0.5
    words = bits.pack_bits(jnp.asarray(x))
    np.testing.assert_array_equal(words, words_of(x))
    np.testing.assert_array_equal(bits.unpack_bits(words, shape[-1]), x)


@few
@given(rng=seeds, p=st.integers(1, 16), n=st.sampled_from([1, 32, 100]))
def test_planes_of_packs_numbers_of_any_width(rng, p, n):
    numbers = rng.integers(0, 2**p, n).astype(np.uint32)
    np.testing.assert_array_equal(bits.planes_of(jnp.asarray(numbers), p), planes_of(numbers, p))


def check_tally(codes, p):
    workers, n = codes.shape
    planes = np.moveaxis(planes_of(codes, p), 0, 1)
    total = bits.tally(jnp.asarray(planes))
    assert len(total) == bits.sum_bits(workers, p)
    np.testing.assert_array_equal(numbers_of(total, n), codes.sum(0, dtype=np.int64))


@few
@given(rng=seeds, p=code_bits, workers=st.integers(1, 40), extreme=st.booleans())
def test_tally_adds_the_codes_of_all_workers(rng, p, workers, extreme):
    codes = rng.integers(0, 2**p, (workers, 64))
    check_tally(np.where(codes < 2**p // 2, 0, 2**p - 1) if extreme else codes, p)


@pytest.mark.parametrize("workers", [255, 256, 300, 509, 510, 511, 600])
@pytest.mark.parametrize("p", [1, 3])
def test_tally_adds_many_workers_in_groups(workers, p):
    rng = np.random.default_rng(workers)
    codes = rng.integers(0, 2**p, (workers, 32))
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
@given(rng=seeds, p=st.integers(1, 12))
def test_compare_is_exact_with_a_threshold_for_each_word(rng, p):
    threshold = rng.integers(0, 2**p, 3).astype(np.uint32)
    spread = np.repeat(threshold, 32).astype(np.int64)
    near = np.clip(spread + rng.integers(-1, 2, 96), 0, 2**p - 1)
    numbers = np.where(rng.random(96) < 0.5, near, rng.integers(0, 2**p, 96))
    greater, equal = bits.compare([jnp.asarray(x) for x in planes_of(numbers, p)], threshold)
    np.testing.assert_array_equal(greater, words_of(numbers > spread))
    np.testing.assert_array_equal(equal, words_of(numbers == spread))


def test_as_mask_fills_words():
    mask = bits.as_mask(jnp.array([False, True]))
    assert mask.tolist() == [0, 2**32 - 1] and mask.dtype == jnp.uint32


def test_count_ones_counts_over_all_words():
    words = np.random.default_rng(0).integers(0, 2**32, 1000, dtype=np.uint32)
    assert int(bits.count_ones(jnp.asarray(words))) == np.unpackbits(words.view(np.uint8)).sum()


def murmur_finaliser(h):
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


@pytest.mark.parametrize("step", [0, 1, 2**31 - 1])
def test_coin_is_the_hash_of_the_word_and_the_step(step):
    salt = murmur_finaliser((step + 0x9E3779B9) % 2**32)
    want = [murmur_finaliser(word ^ salt) for word in range(100, 110)]
    assert bits.coin(100, 10, step).tolist() == want


@few
@given(first=st.integers(0, 2**31), step=st.integers(0, 2**31 - 1), start=st.integers(0, 6))
def test_coin_of_a_slice_is_the_slice_of_the_coin(first, step, start):
    whole = bits.coin(first, 8, step)
    np.testing.assert_array_equal(bits.coin(first + start, 2, jnp.int32(step)), whole[start:][:2])


def tosses(words, step):
    """``[words, 32]``."""
    return np.asarray(bits.unpack_bits(bits.coin(0, words, step), 32 * words)).reshape(-1, 32)


# A fair coin deviates by more than 5 sigma once in 1.7 million times; the bits are fixed, so a test
# that passes once passes always.
def assert_fair(x, axis=None):
    n = x.size if axis is None else x.shape[axis]
    assert np.abs(x.mean(axis) - 0.5).max() < 5 * 0.5 / np.sqrt(n)


@pytest.mark.parametrize("step", [0, 1, 2, 1000])
def test_coin_is_fair_as_a_whole_and_in_every_lane(step):
    x = tosses(2**16, step)
    assert_fair(x)
    assert_fair(x, axis=0)


def test_coin_of_a_word_is_fair_over_the_steps():
    words = jax.vmap(lambda t: bits.coin(0, 16, t))(jnp.arange(4096))
    assert_fair(np.asarray(bits.unpack_bits(words, 512)), axis=0)


@pytest.mark.parametrize("other", ["the next step", "the next word", "the next lane"])
def test_coin_does_not_repeat_itself(other):
    x = tosses(2**16, 5)
    y = {
        "the next step": tosses(2**16, 6),
        "the next word": np.roll(x, 1, axis=0),
        "the next lane": np.roll(x, 1, axis=1),
    }[other]
    assert_fair(x == y)
