"""What each quantiser says: codes, votes, steps, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lioncub_jax as lc
from lioncub_jax import ballots, bits, quantize, reference

few = settings(max_examples=25, deadline=None, derandomize=True)
RANDOM = lc.quantize.stochastic(0)


@functools.partial(jax.jit, static_argnames=("quantizer", "size", "workers"))
def encode(quantizer, x, size, workers, leaf, step, worker):
    total = quantizer.measure(x) if quantizer.measure else None
    place = ballots.Place(0, size, leaf, step, worker, workers, total=total)
    ballot = quantizer.encode(x, place)
    decodes = quantizer.block or quantizer.dense
    values = quantizer.values(ballot.payload, ballot.steps, workers) if decodes else None
    codes = None if quantizer.dense else bits.unpack(ballot.payload)
    return ballot, codes, values


class Said:
    """A ballot, unpacked with numpy in mind."""

    def __init__(self, quantizer, x, size=None, *, leaf=0, step=0, worker=0, workers=4):
        x = jnp.asarray(x, jnp.float32).reshape(-1, 64)
        ballot, codes, values = encode(quantizer, x, size or x.size, workers, leaf, step, worker)
        self.codes = None if codes is None else np.asarray(codes).reshape(x.shape).astype(int)
        self.values = None if values is None else np.asarray(values).reshape(x.shape)
        self.steps = None if ballot.steps is None else np.asarray(ballot.steps, np.float32)
        self.voted = ballot.voted.tolist()
        self.flagged = bool(ballot.flagged)
        self.payload = ballot.payload


def said(quantizer, *args, **options):
    return Said(quantizer, *args, **options)


def row(*values):
    """A row of 64 that repeats a few values."""
    return np.resize(np.array(values, np.float32), 64)


# --- Codes by hand

# Of a row of 3 and -1 the mean magnitude is 2 and the root mean square 2.2361. Steps are rounded to 8
# bits of mantissa: the best Gaussian step 0.586 for 3 bits becomes 1.3103, and then 1.3125.
BY_HAND = [  # p, step, codes of 3 and -1
    (1, 4.0, 1, 0),
    (2, 2.21875, 3, 1),
    (3, 1.3125, 6, 3),
    (4, 0.75, 12, 6),
    (5, 0.419921875, 23, 13),
    (6, 0.232421875, 44, 27),
    (7, 0.126953125, 87, 56),
    (8, 0.06884765625, 171, 113),
]


@pytest.mark.parametrize(("p", "step", "of_3", "of_minus_1"), BY_HAND)
@pytest.mark.parametrize("block", [None, 128])
def test_midrise_codes_by_hand(p, step, of_3, of_minus_1, block):
    heard = said(lc.quantize.midrise(p, block=block), np.stack([row(3, -1)] * 2))
    np.testing.assert_array_equal(heard.codes, [row(of_3, of_minus_1)] * 2)
    if block:
        assert heard.steps.tolist() == [step] * (128 // block)
        centre = (2**p - 1) / 2
        want = (row(of_3, of_minus_1) - centre) * step
        np.testing.assert_array_equal(heard.values, [want] * 2)


# s = floor((2**(p-1) - 1) / W), and 3 and -1 are 1.5 and -0.5 means: q = s + round(s x / 2 mean).
@pytest.mark.parametrize(
    ("p", "workers", "of_3", "of_minus_1"),
    [
        (8, 1, 127 + 95, 127 - 32),
        (8, 4, 31 + 23, 31 - 8),
        (8, 127, 1 + 1, 1 + 0),
        (5, 3, 5 + 4, 5 - 1),
        (2, 1, 1 + 1, 1 + 0),
    ],
)
def test_integer_codes_by_hand(p, workers, of_3, of_minus_1):
    heard = said(lc.quantize.integer(p), row(3, -1), workers=workers)
    np.testing.assert_array_equal(heard.codes, [row(of_3, of_minus_1)])


def test_integer_rounds_halves_to_even():
    # The mean is 1 and s = 1, so values are halved: 0.5, 1.5 and 2.5 become 0, 2 and 2, cut to 1.
    heard = said(lc.quantize.integer(8), row(1, -1), workers=127)
    np.testing.assert_array_equal(heard.codes, [row(1, 1)])


def test_integer_cuts_what_is_far_out():
    heard = said(lc.quantize.integer(8), [1000, -1000] + [1] * 62, workers=8)
    assert heard.codes[0, :2].tolist() == [30, 0]  # s = 127 // 8 = 15


def test_ternary_codes_are_the_exact_sign():
    tiny = np.finfo(np.float32).tiny
    heard = said(lc.quantize.ternary(), row(-5, 0, tiny, -tiny))
    np.testing.assert_array_equal(heard.codes, [row(0, 1, 2, 0)])


def test_the_sign_of_the_smallest_numbers_is_kept():
    tiny = np.finfo(np.float32).tiny
    np.testing.assert_array_equal(
        said(lc.quantize.sign(), row(1e30, -tiny, tiny)).codes, [row(1, 0, 1)]
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_dense_values_travel_as_they_are(dtype):
    x = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    x[1] = 0
    heard = said(lc.quantize.dense(dtype), x)
    np.testing.assert_array_equal(heard.values, x.astype(dtype).astype(np.float32))


# --- Codes as in the reference

PAIRS = {
    "sign": (lc.quantize.sign(), reference.sign()),
    "midrise(2)": (lc.quantize.midrise(2), reference.midrise(2)),
    "midrise(5)": (lc.quantize.midrise(5), reference.midrise(5, 64)),
    "midrise(3)": (lc.quantize.midrise(3), reference.midrise(3, 128)),
    "midrise(1)": (lc.quantize.midrise(1), reference.midrise(1, 128)),
    "midrise(3, block=128, stochastic)": (
        lc.quantize.midrise(3, block=128, rounding=RANDOM),
        reference.midrise(3, 128, seed=0),
    ),
    "integer(8)": (lc.quantize.integer(8), reference.integer(8)),
    "integer(6, stochastic)": (
        lc.quantize.integer(6, rounding=RANDOM),
        reference.integer(6, seed=0),
    ),
    "ternary": (lc.quantize.ternary(), reference.ternary()),
}


@pytest.mark.parametrize("size", [63, 200])
@pytest.mark.parametrize(("quantizer", "codes"), PAIRS.values(), ids=PAIRS)
def test_codes_of_every_worker_are_those_of_the_reference(quantizer, codes, size):
    # Small integers: sums of squares are exact in any order.
    x = np.random.default_rng(size).integers(-4, 5, (3, size)).astype(np.float32)
    buffer = reference.buffer_of([(size,)], codes.block)
    rows = buffer.join([jnp.asarray(x)])
    want = jax.jit(lambda rows: codes.encode(rows, buffer, 11))(rows)
    for worker in range(3):
        heard = said(quantizer, rows[worker], size, step=11, worker=worker, workers=3)
        np.testing.assert_array_equal(heard.codes, want.q[worker])
        if quantizer.block:
            steps = np.repeat(heard.steps, quantizer.rows_per_step)
            np.testing.assert_array_equal(steps, want.step[worker, :, 0])


# --- Zeros, padding and values that are not finite

CODED = [
    lc.quantize.sign(),
    lc.quantize.midrise(2),
    lc.quantize.midrise(8),
    lc.quantize.midrise(3),
    lc.quantize.midrise(2, block=128, rounding=RANDOM),
    lc.quantize.integer(8),
    lc.quantize.integer(4),
    lc.quantize.integer(8, rounding=RANDOM),
    lc.quantize.ternary(),
]
MIDRISE = [q for q in CODED if not q.has_zero]
MIDTREAD = [q for q in CODED if q.has_zero]


def by_name(quantizers):
    return pytest.mark.parametrize("quantizer", quantizers, ids=lambda q: q.name)


@by_name(
    [
        lc.quantize.midrise(3),
        lc.quantize.midrise(2, block=128, rounding=RANDOM),
        lc.quantize.integer(8),
        lc.quantize.ternary(),
    ]
)
@pytest.mark.parametrize("size", [1, 32, 33, 63, 127])
def test_padding_says_the_top_code(quantizer, size):
    x = np.where(np.arange(128) < size, 1.0, 0)
    codes = said(quantizer, x, size).codes.reshape(-1)
    assert (codes[size:] == quantizer.top(4)).all()


@by_name([lc.quantize.midrise(2), lc.quantize.midrise(8), lc.quantize.integer(8)])
def test_padding_does_not_dilute_the_scale(quantizer):
    x = np.resize([3.0, -1.0], 128)
    alone = np.where(np.arange(128) < 32, x, 0)
    np.testing.assert_array_equal(
        said(quantizer, alone, 32).codes[0, :32], said(quantizer, x).codes[0, :32]
    )


@by_name(MIDRISE)
def test_zeros_take_the_inner_codes_by_the_coin_the_other_way_on_odd_workers(quantizer):
    x = np.where(np.arange(128) % 3 == 0, 0.0, 5)
    upper = np.asarray(bits.unpack_bits(bits.coin(0, 4, 9), 128)).reshape(2, 64)
    half = 2 ** (quantizer.bits - 1)
    zero = x.reshape(2, 64) == 0
    for worker in range(4):
        codes = said(quantizer, x, step=9, worker=worker).codes
        np.testing.assert_array_equal(codes[zero], (half - 1 + (upper ^ worker % 2))[zero])


@by_name(MIDTREAD)
def test_zeros_are_zeros_where_a_code_means_zero(quantizer):
    heard = said(quantizer, np.zeros(128))
    assert (heard.codes == quantizer.top(4) // 2).all()
    assert heard.voted == [True, True]


@by_name(MIDRISE)
def test_a_row_of_zeros_is_not_voted_on(quantizer):
    x = np.zeros((6, 64))
    x[1, 63] = x[4, 0] = 1e-30
    heard = said(quantizer, x)
    assert heard.voted == [False, True, False, False, True, False]
    assert not heard.flagged


def test_a_block_of_zeros_has_step_zero_and_is_decoded_as_zeros():
    heard = said(lc.quantize.midrise(3), np.repeat([0.0, 1.0], 128))
    assert heard.steps[0] == 0 and heard.steps[1] > 0
    assert not heard.values[:2].any() and heard.values[2:].all()


@by_name([*CODED, lc.quantize.dense(), lc.quantize.dense(jnp.bfloat16)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_raises_the_flag(quantizer, bad):
    x = np.ones(256)
    assert not said(quantizer, x).flagged
    x[200] = bad
    assert said(quantizer, x).flagged


def test_a_step_that_overflows_raises_the_flag():
    assert said(lc.quantize.midrise(3), np.full(64, 1e30)).flagged


# --- Precision

BLOCKS_OF_64 = {p: lc.quantize.midrise(p) for p in range(1, 9)}
numbers = st.lists(
    st.floats(-(2.0**20), 2.0**20, width=32, allow_subnormal=False), min_size=64, max_size=64
).map(np.float32)


@few
@given(x=numbers, p=st.integers(1, 8))
def test_midrise_misses_by_at_most_half_a_step_within_its_range(x, p):
    heard = said(BLOCKS_OF_64[p], x)
    step = heard.steps[0]
    inside = (np.abs(x) <= step * 2 ** (p - 1)) & (x != 0)
    # The quotient is rounded, so the edge between two codes is off by at most 2**-22 of itself.
    slack = 1e-6 * np.abs(x[inside])
    assert (np.abs(x - heard.values[0])[inside] <= step / 2 + slack).all()
    outermost = np.abs(x) > 1.0001 * step * (2 ** (p - 1) - 1)
    assert (np.abs(heard.codes[0] - (2**p - 1) / 2)[outermost] == (2**p - 1) / 2).all()


@few
@given(x=numbers, p=st.integers(1, 8))
def test_midrise_codes_of_minus_x_are_mirrored(x, p):
    quantizer = BLOCKS_OF_64[p]
    there, back = said(quantizer, x), said(quantizer, -x)
    moved = x != 0
    np.testing.assert_array_equal(there.codes[0, moved], (2**p - 1) - back.codes[0, moved])


@pytest.mark.parametrize("p", range(2, 9))
def test_steps_are_the_best_for_a_gaussian(p):
    x = np.linspace(0, 8, 400_001)
    density = np.exp(-(x**2) / 2)

    def loss(step):
        level = np.minimum(np.floor(x / step), 2 ** (p - 1) - 1) + 0.5
        return np.sum(density * (x - level * step) ** 2)

    best = loss(quantize.STEP[p])
    assert best < loss(1.01 * quantize.STEP[p]) and best < loss(0.99 * quantize.STEP[p])


@pytest.mark.parametrize("p", range(2, 9))
def test_the_sum_of_integer_codes_never_overflows_its_bits(p):
    most = 2 ** (p - 1) - 1
    for workers in range(1, 128):
        if workers <= most:
            s = lc.quantize.integer(p).top(workers) // 2
            assert s >= 1 and workers * s <= most < workers * (s + 1)
        else:
            with pytest.raises(ValueError, match=rf"{workers} workers.* at most {most} workers"):
                lc.quantize.integer(p).top(workers)


# --- Stochastic rounding


@pytest.mark.parametrize(
    "quantizer",
    [lc.quantize.midrise(p, block=64, rounding=RANDOM) for p in (1, 2, 4)],
    ids=lambda q: q.name,
)
def test_stochastic_midrise_is_right_on_average(quantizer):
    rows, values = 4000, row(*np.linspace(-1, 1, 16))
    heard = said(quantizer, np.tile(values, (rows, 1)))
    step = heard.steps[0]
    inside = np.abs(values) <= step * (2**quantizer.bits - 1) / 2
    assert inside.sum() >= 28
    # One code is off by less than a step, with a deviation of at most half a step; 5 sigma.
    off = np.abs(heard.values.mean(axis=0) - values)[inside]
    assert off.max() < 5 * step / 2 / np.sqrt(rows)


def test_stochastic_integers_are_right_on_average():
    rows, values = 4000, row(*np.linspace(-1, 1, 16))
    quantizer, s = lc.quantize.integer(5, rounding=RANDOM), 3
    codes = said(quantizer, np.tile(values, (rows, 1))).codes - s
    want = values / np.abs(values).mean() * s / 2
    inside = np.abs(want) <= s
    assert inside.all()
    assert np.abs(codes.mean(axis=0) - want).max() < 5 * 0.5 / np.sqrt(rows)


SOME = np.random.default_rng(0).normal(size=512).astype(np.float32)


@by_name([q for q in CODED if "stochastic" in q.name])
def test_stochastic_codes_repeat_exactly(quantizer):
    there, again = (said(quantizer, SOME, step=3, worker=2, leaf=1) for _ in range(2))
    np.testing.assert_array_equal(there.payload, again.payload)


@functools.cache
def random_codes(make, seed):
    return make(4, rounding=lc.quantize.stochastic(seed))


@pytest.mark.parametrize("change", [{"step": 4}, {"worker": 1}, {"leaf": 2}, {"seed": 1}], ids=str)
@pytest.mark.parametrize(
    "make", [lc.quantize.midrise, lc.quantize.integer], ids=["midrise", "integer"]
)
def test_stochastic_codes_differ_by_step_worker_leaf_and_seed(make, change):
    where = {"step": 3, "worker": 0, "leaf": 1, "seed": 0}

    def codes(seed, **place):
        return said(random_codes(make, seed), SOME, **place).codes

    share = np.mean(codes(**where) != codes(**(where | change)))
    assert share > 0.1


@by_name([q for q in CODED if "stochastic" not in q.name])
def test_nearest_codes_depend_on_nothing_but_the_values(quantizer):
    there = said(quantizer, SOME, step=3, worker=0, leaf=1)
    again = said(quantizer, SOME, step=4, worker=1, leaf=2)
    np.testing.assert_array_equal(there.codes, again.codes)


# --- Names, sizes and refusals


@pytest.mark.parametrize(
    ("quantizer", "name", "code_bits", "top", "planes"),
    [
        (lc.quantize.sign(), "sign", 1, 1, 1),
        (lc.quantize.midrise(2), "midrise(2)", 2, 3, 2),
        (lc.quantize.midrise(3), "midrise(3)", 3, 7, 3),
        (
            lc.quantize.midrise(4, block=64, rounding=RANDOM),
            "midrise(4, block=64, stochastic)",
            4, 15, 4,
        ),
        (lc.quantize.midrise(8, rounding=lc.quantize.nearest()), "midrise(8)", 8, 255, 8),
        (lc.quantize.integer(), "integer(8)", 8, 62, 6),
        (lc.quantize.integer(5, rounding=RANDOM), "integer(5, stochastic)", 5, 6, 3),
        (lc.quantize.ternary(), "ternary", 2, 2, 2),
        (lc.quantize.dense(), "dense(float32)", 32, 0, 1),
        (lc.quantize.dense(jnp.bfloat16), "dense(bfloat16)", 16, 0, 1),
        (
            lc.quantize.error_feedback(lc.quantize.midrise(1)),
            "midrise(1) + error feedback",
            1, 1, 1,
        ),
    ],
)  # fmt: skip
def test_names_and_sizes_for_four_workers(quantizer, name, code_bits, top, planes):
    assert quantizer.name == name
    assert (quantizer.bits, quantizer.top(4), quantizer.planes(4)) == (code_bits, top, planes)


@pytest.mark.parametrize(
    ("quantizer", "rows_per_step", "words_per_row"),
    [
        (lc.quantize.sign(), 1, 2),
        (lc.quantize.midrise(2), 1, 2),
        (lc.quantize.midrise(2), 2, 2),
        (lc.quantize.dense(), 1, 64),
        (lc.quantize.dense(jnp.bfloat16), 1, 32),
    ],
)
def test_layout_of_a_payload(quantizer, rows_per_step, words_per_row):
    assert quantizer.rows_per_step == rows_per_step
    assert quantizer.words_per_row == words_per_row
    assert said(quantizer, np.ones(256)).payload.shape[1] == 4 * words_per_row


@pytest.mark.parametrize("p", [0, 9, -1, 2.0, "2", None, True])
@pytest.mark.parametrize(
    "make", [lc.quantize.midrise, lc.quantize.integer], ids=["midrise", "integer"]
)
def test_bits_out_of_range_are_refused(make, p):
    with pytest.raises(ValueError, match=rf"{make.__name__}\({p!r}\).* to 8 bits; give an int"):
        make(p)


def test_integer_of_one_bit_is_refused():
    with pytest.raises(ValueError, match=r"integer\(1\): a code has 2 to 8 bits"):
        lc.quantize.integer(1)


@pytest.mark.parametrize("block", [0, 1, 32, 63, 64.0, 129, 256, "64", True])
def test_blocks_other_than_64_and_128_are_refused(block):
    with pytest.raises(ValueError, match=rf"block={block!r}.*64 or 128 elements"):
        lc.quantize.midrise(2, block=block)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "uint32", "complex64"])
def test_dense_values_of_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=rf"dense\({dtype}\).*float32 or bfloat16"):
        lc.quantize.dense(dtype)


@by_name([q for q in [*CODED, lc.quantize.dense()] if q.block is None])
def test_error_feedback_needs_steps_that_travel(quantizer):
    with pytest.raises(ValueError, match=r"steps must travel; use midrise\(p, block=64\)"):
        lc.quantize.error_feedback(quantizer)


@pytest.mark.parametrize("dtype", ["int8", "uint32", "bool", "complex64"])
def test_error_feedback_in_a_dtype_that_is_not_floating_is_refused(dtype):
    with pytest.raises(ValueError, match=f"{dtype}.*give a floating dtype"):
        lc.quantize.error_feedback(lc.quantize.midrise(3), dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_error_feedback_keeps_the_codes_and_names_the_dtype(dtype):
    plain = lc.quantize.midrise(3)
    fed_back = lc.quantize.error_feedback(plain, dtype)
    assert fed_back.feedback == jnp.dtype(dtype) and plain.feedback is None
    np.testing.assert_array_equal(said(plain, SOME).codes, said(fed_back, SOME).codes)
