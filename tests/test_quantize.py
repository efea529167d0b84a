"""What each quantiser makes of values: codes, votes, steps, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lioncub_jax as lc
from lioncub_jax import bits, layout, quantize, reference

few = settings(max_examples=25, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)
Q = lc.quantize
RANDOM = Q.stochastic(0)


@functools.partial(jax.jit, static_argnames=("quantizer", "steps", "leaf", "workers"))
def encode(quantizer, x, step, worker, *, steps, leaf, workers):
    leaves = [*[jnp.zeros((0,))] * leaf, x]
    (bucket,) = layout.buckets(leaves, workers)
    (piece,) = bucket.pieces
    rows = layout.in_rows(layout.joined(leaves, [piece])[0], piece)
    counts = layout.counts(bucket, [None] * len(leaves))
    counts = None if counts is None else counts[: piece.rows]
    total = quantizer.measure(rows, piece) if quantizer.measure else None
    who = step, worker, workers
    place = quantize.Place(bucket, piece, 0, *who, bits.draw(*who), counts, steps, 0, 1, total)
    message = quantizer.encode(rows, place)
    parts = bucket.by_chunk(rows)
    planes = [x.reshape(len(parts), -1) for x in message.planes]
    codes = None if quantizer.dense else bits.unpack(planes, parts.shape[1]).reshape(-1, 128)
    sent = None if message.steps is None else message.steps.reshape(parts.shape[:2])
    decoded = quantizer.dense or sent is not None
    values = quantizer.values(planes, sent, parts.shape[1], workers) if decoded else None
    voted = message.voted
    if voted is not None:
        voted = bits.unpack_rows(voted.reshape(len(parts), -1), parts.shape[1]).reshape(-1)
    return message, codes, None if values is None else values.reshape(-1, 128), voted


class Sent:
    """A message of one worker about one leaf, unpacked; rows as they lie in the buffer, padding too."""

    def __init__(self, quantizer, x, *, leaf=0, step=0, worker=0, workers=4, steps=None):
        x = jnp.asarray(x, jnp.float32).reshape(-1)
        steps = quantizer.decodes and not quantizer.dense if steps is None else steps
        how = {"steps": steps, "leaf": leaf, "workers": workers}
        message, codes, values, voted = encode(
            quantizer, x, jnp.int32(step), jnp.int32(worker), **how
        )
        self.message, self.size = message, x.size
        self.codes = None if codes is None else np.asarray(codes).astype(int)
        self.values = None if values is None else np.asarray(values)
        self.steps = None if message.steps is None else np.asarray(message.steps, np.float32)
        self.voted = None if voted is None else np.asarray(voted).astype(bool)
        self.finite = bool(message.finite)

    def of_elements(self, rows):
        """``[rows, 128]`` without what pads the leaf."""
        return rows.reshape(-1)[: self.size]


def codes_of(quantizer, x, **where):
    sent = Sent(quantizer, x, **where)
    return sent.of_elements(sent.codes)


def row(*values):
    """A row of 128 that repeats a few values."""
    return np.resize(np.array(values, np.float32), 128)


# --- Codes by hand

# Of a row of 3 and -1 the mean magnitude is 2. Steps are rounded to 8 bits of mantissa: the best
# Gaussian step of 3 bits, 0.7344 means, becomes 1.4688 and then 1.46875.
BY_HAND = [  # p, step, codes of 3 and -1
    (1, 4.0, 1, 0),
    (2, 2.5, 3, 1),
    (3, 1.46875, 6, 3),
    (4, 0.83984375, 11, 6),
    (5, 0.470703125, 22, 13),
    (6, 0.26171875, 43, 28),
    (7, 0.142578125, 85, 56),
    (8, 0.0771484375, 166, 115),
]


@pytest.mark.parametrize(("p", "step", "of_3", "of_minus_1"), BY_HAND)
def test_midrise_codes_by_hand(p, step, of_3, of_minus_1):
    x, want = np.stack([row(3, -1)] * 2), np.stack([row(of_3, of_minus_1)] * 2)
    sent = Sent(Q.midrise(p), x)
    np.testing.assert_array_equal(sent.codes[:2], want)
    assert sent.steps[:2].tolist() == [step] * 2
    np.testing.assert_array_equal(sent.values[:2], (want - (2**p - 1) / 2) * step)
    if p in (1, 3):
        silent = Sent(Q.midrise(p), x, steps=False)
        assert silent.steps is None
        np.testing.assert_array_equal(silent.codes[:2], want)


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
    got = codes_of(Q.integer(p), row(3, -1), workers=workers)
    np.testing.assert_array_equal(got, row(of_3, of_minus_1))


def test_integer_rounds_halves_to_even_and_cuts_what_is_far_out():
    # The mean is 1 and s = 1, so values are halved: 0.5 becomes 0.
    np.testing.assert_array_equal(codes_of(Q.integer(8), row(1, -1), workers=127), row(1, 1))
    far = codes_of(Q.integer(8), [1000, -1000] + [1] * 126, workers=8)
    assert far[:2].tolist() == [30, 0]  # s = 127 // 8 = 15


def test_signs_are_exact_to_the_smallest_number():
    tiny = np.finfo(np.float32).tiny
    np.testing.assert_array_equal(codes_of(Q.ternary(), row(-5, 0, tiny, -tiny)), row(0, 1, 2, 0))
    np.testing.assert_array_equal(codes_of(Q.sign(), row(1e30, -tiny, tiny)), row(1, 0, 1))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_dense_values_travel_as_they_are(dtype):
    x = np.random.default_rng(0).normal(size=(3, 128)).astype(np.float32)
    x[1] = 0
    sent = Sent(Q.dense(dtype), x)
    np.testing.assert_array_equal(sent.values[:3], x.astype(dtype).astype(np.float32))


def test_dense_bfloat16_saturates():
    most = np.finfo(np.float32).max
    sent = Sent(Q.dense(jnp.bfloat16), row(most, -most))
    want = float(jnp.finfo(jnp.bfloat16).max)
    np.testing.assert_array_equal(sent.values[0], row(want, -want))
    assert sent.finite


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_levels_clip_nothing(norm):
    x = np.random.default_rng(0).normal(size=(5, 128)).astype(np.float32)
    sent = Sent(Q.levels(4, norm=norm), x)
    of_row = np.abs(x).max(1) if norm == "max" else np.sqrt((x.astype(np.float64) ** 2).sum(1))
    assert (sent.steps[:5] * 7 >= of_row * (1 - 1e-6)).all()
    assert (sent.steps[:5] * 7 <= of_row * (1 + 2**-6)).all()
    assert (np.abs(sent.values[:5] - x) <= sent.steps[:5, None] * 0.50001).all()


# --- Codes as in the reference

PAIRS = {
    "sign": (Q.sign(), reference.sign()),
    "midrise(2)": (Q.midrise(2), reference.midrise(2)),
    "midrise(8)": (Q.midrise(8), reference.midrise(8)),
    "midrise(3, stochastic)": (Q.midrise(3, rounding=RANDOM), reference.midrise(3, seed=0)),
    "integer(8)": (Q.integer(8), reference.integer(8)),
    "integer(6, stochastic)": (Q.integer(6, rounding=RANDOM), reference.integer(6, seed=0)),
    "ternary": (Q.ternary(), reference.ternary()),
}


@pytest.mark.parametrize(("quantizer", "codes"), PAIRS.values(), ids=PAIRS)
def test_codes_of_every_worker_are_those_of_the_reference(quantizer, codes):
    # Small integers: sums of magnitudes are exact in any order.
    size = 5000  # 40 rows: each of three workers owns 16
    x = np.random.default_rng(0).integers(-4, 5, (3, size)).astype(np.float32)
    buffer = reference.buffer_of([(size,)], 3)
    rows = buffer.join([jnp.asarray(x)])
    want = jax.jit(lambda rows: codes.encode(rows, buffer, 11))(rows)
    for worker in range(3):
        sent = Sent(quantizer, x[worker], step=11, worker=worker, workers=3)
        np.testing.assert_array_equal(sent.codes[:40], want.q[worker])
        if sent.steps is not None:
            np.testing.assert_array_equal(sent.steps[:40], want.step[worker, :, 0])


# --- Zeros, padding and values that are not finite

MIDRISE = [
    Q.sign(),
    Q.midrise(1),
    Q.midrise(2),
    Q.midrise(8),
    Q.midrise(2, rounding=RANDOM),
]
MIDTREAD = [
    Q.integer(8),
    Q.integer(8, rounding=RANDOM),
    Q.ternary(),
    Q.ternary(rounding=RANDOM),
    Q.levels(3),
    Q.levels(4, norm="l2", rounding=RANDOM),
]
CODED = [*MIDRISE, *MIDTREAD]


def by_name(quantizers):
    return pytest.mark.parametrize("quantizer", quantizers, ids=lambda q: q.name)


@by_name([Q.midrise(3), Q.integer(8), Q.levels(3, norm="l2")])
def test_padding_does_not_dilute_the_scale(quantizer):
    x = row(3, -1)
    whole, short = (codes_of(quantizer, x[:n])[:2] for n in (128, 50))
    if "l2" not in quantizer.name:  # which is of a sum, and not of a mean
        np.testing.assert_array_equal(short, whole)
    behind = codes_of(quantizer, np.concatenate([x, x[:50]]))[128:]
    np.testing.assert_array_equal(behind[:2], short)


@by_name([Q.sign(), Q.midrise(3), Q.midrise(2, rounding=RANDOM)])
def test_zeros_take_the_inner_code_of_their_side(quantizer):
    x = np.where(np.arange(300) % 3 == 0, 0.0, 5)
    zero = np.ones(16 * 4 * 128, bool)
    zero[:300] = x == 0
    half = 2 ** (quantizer.bits - 1)
    for worker in range(3):
        words = bits.zero_side(0, 16 * 4 * 4, bits.draw(9, worker, 4)).reshape(1, 4, -1)
        upper = np.asarray(bits.unpack(words, 16)).reshape(-1).astype(int)
        codes = Sent(quantizer, x, step=9, worker=worker).codes.reshape(-1)
        np.testing.assert_array_equal(codes[zero], (half - 1 + upper)[zero])  # padding too


@by_name([Q.integer(8), Q.ternary(), Q.levels(3)])
def test_zeros_are_zeros_where_a_code_means_zero(quantizer):
    sent = Sent(quantizer, np.zeros(200))
    assert (sent.codes == quantizer.top(4) // 2).all()
    assert sent.voted is None and sent.finite


@by_name(MIDRISE)
def test_a_row_of_zeros_is_not_voted_on(quantizer):
    x = np.zeros((6, 128))
    x[1, 127] = x[4, 0] = 1e-30
    sent = Sent(quantizer, x)
    assert sent.voted[:6].tolist() == [False, True, False, False, True, False]
    assert not sent.voted[6:].any() and sent.finite
    if sent.steps is not None:
        assert (sent.steps[:6] > 0).tolist() == sent.voted[:6].tolist()
        assert sent.values[sent.voted].all() and not sent.values[~sent.voted].any()


def test_the_smallest_numbers_are_voted_on():
    tiny = np.full(128, np.finfo(np.float32).tiny, np.float32)
    for quantizer in (Q.sign(), Q.midrise(3)):
        for steps in (False, True):
            sent = Sent(quantizer, tiny, steps=steps)
            assert sent.voted[0] and (sent.codes[0] >= 2 ** (quantizer.bits - 1)).all()


@by_name([*CODED, Q.dense(), Q.dense(jnp.bfloat16)])
def test_a_value_that_is_not_finite_is_noticed(quantizer):
    x = np.ones(768)
    assert Sent(quantizer, x).finite
    for bad in (np.nan, np.inf, -np.inf):
        x[200] = bad
        assert not Sent(quantizer, x).finite


# --- The range of float32: nothing over- or underflows


@by_name(CODED)
def test_a_power_of_two_changes_no_code(quantizer):
    if quantizer.name == "ternary(stochastic)":
        pytest.skip("its values are in units of 1")
    rng = np.random.default_rng(1)
    x = (rng.choice([-1, 0, 1], 768) * rng.uniform(2**-5, 4, 768)).astype(np.float32)
    want = Sent(quantizer, x)
    assert len(np.unique(want.codes)) > 1
    for power in (-120, -64, -1, 1, 64, 120):
        got = Sent(quantizer, x * np.float32(2.0**power))
        np.testing.assert_array_equal(got.codes, want.codes, err_msg=str(power))
        assert got.finite
        if want.steps is not None:
            np.testing.assert_array_equal(got.steps, want.steps * np.float32(2.0**power))


@by_name([*CODED, Q.dense(), Q.dense(jnp.bfloat16)])
def test_huge_numbers_are_coded_and_decoded_as_finite_ones(quantizer):
    for largest in (1e38, np.finfo(np.float32).max):
        x = np.resize(np.float32([largest, -largest, largest]), 768)
        sent = Sent(quantizer, x)
        assert sent.finite
        if sent.values is not None and largest == 1e38:  # else the outer levels are beyond float32
            assert np.isfinite(sent.values).all()
        if sent.codes is not None:
            side = np.sign(2 * sent.of_elements(sent.codes) - quantizer.top(4))
            exact = "stochastic" not in quantizer.name
            assert (side == np.sign(x) if exact else side * x >= 0).all()


# --- Precision

BY_BITS = {p: Q.midrise(p) for p in range(1, 9)}


def some(rng):
    """Numbers of some magnitudes, and a few zeros."""
    x = rng.normal(size=128) * 2.0 ** rng.integers(-20, 20, 1 if rng.random() < 0.5 else 128)
    return np.where(rng.random(128) < 0.1, 0, x).astype(np.float32)


@few
@given(rng=seeds, p=st.integers(1, 8))
def test_midrise_misses_by_at_most_half_a_step_within_its_range(rng, p):
    x = some(rng)
    sent = Sent(BY_BITS[p], x)
    step = sent.steps[0]
    inside = (np.abs(x) <= step * 2 ** (p - 1)) & (x != 0)
    # The quotient is rounded, so the edge between two codes is off by at most 2**-22 of itself.
    slack = 1e-6 * np.abs(x[inside])
    assert (np.abs(x - sent.values[0])[inside] <= step / 2 + slack).all()
    outermost = np.abs(x) > 1.0001 * step * (2 ** (p - 1) - 1)
    assert (np.abs(sent.codes[0] - (2**p - 1) / 2)[outermost] == (2**p - 1) / 2).all()


@few
@given(rng=seeds, p=st.integers(1, 8))
def test_midrise_codes_of_minus_x_are_mirrored(rng, p):
    x = some(rng)
    there, back = Sent(BY_BITS[p], x), Sent(BY_BITS[p], -x)
    moved = x != 0
    np.testing.assert_array_equal(there.codes[0, moved], (2**p - 1) - back.codes[0, moved])


@pytest.mark.parametrize("p", range(2, 9))
def test_steps_are_the_best_for_a_gaussian(p):
    x = np.linspace(0, 8, 400_001)
    density = np.exp(-(x**2) / 2)

    def loss(in_means):
        step = in_means * np.sqrt(2 / np.pi)  # the mean magnitude of this Gaussian
        level = np.minimum(np.floor(x / step), 2 ** (p - 1) - 1) + 0.5
        return np.sum(density * (x - level * step) ** 2)

    best = loss(quantize.STEP[p])
    assert best < loss(1.01 * quantize.STEP[p]) and best < loss(0.99 * quantize.STEP[p])


@pytest.mark.parametrize("p", range(2, 9))
def test_the_sum_of_integer_codes_never_overflows_its_bits(p):
    most = 2 ** (p - 1) - 1
    for workers in range(1, 128):
        if workers <= most:
            s = Q.integer(p).top(workers) // 2
            assert s >= 1 and workers * s <= most < workers * (s + 1)
        else:
            with pytest.raises(ValueError, match=rf"{workers} workers.* at most {most} workers"):
                Q.integer(p).top(workers)


# --- Stochastic rounding


@pytest.mark.parametrize("p", [1, 2, 4])
def test_stochastic_midrise_is_right_on_average(p):
    rows, values = 1000, row(*np.linspace(-1, 1, 16))
    sent = Sent(Q.midrise(p, rounding=RANDOM), np.tile(values, rows))
    step = sent.steps[0]
    inside = np.abs(values) <= step * (2**p - 1) / 2
    assert inside.sum() >= 56
    # One code is off by less than a step, with a deviation of at most half a step; 5 sigma.
    off = np.abs(sent.values[:rows].mean(axis=0) - values)[inside]
    assert off.max() < 5 * step / 2 / np.sqrt(rows)


def test_stochastic_codes_with_a_zero_are_right_on_average():
    rows, values = 1000, row(*np.linspace(-1, 1, 16))
    for quantizer, scale in (
        (Q.integer(5, rounding=RANDOM), 3 / 2 / np.abs(values).mean()),  # s = 3
        (Q.ternary(rounding=RANDOM), 1.0),
        (Q.levels(3, rounding=RANDOM), None),
    ):
        sent = Sent(quantizer, np.tile(values, rows))
        codes = sent.codes[:rows] - quantizer.top(4) // 2
        want = values * scale if scale else values / sent.steps[0]
        assert (np.abs(want) <= quantizer.top(4) // 2).all()
        assert np.abs(codes.mean(axis=0) - want).max() < 5 * 0.5 / np.sqrt(rows), quantizer.name


SOME = np.random.default_rng(0).normal(size=768).astype(np.float32)


@functools.cache
def random_codes(make, seed):
    return getattr(Q, make)(4, rounding=Q.stochastic(seed))


@pytest.mark.parametrize("make", ["midrise", "integer"])
def test_stochastic_codes_repeat_and_differ_by_step_worker_leaf_and_seed(make):
    where = {"step": 3, "worker": 0, "leaf": 1, "seed": 0}

    def codes(seed, **place):
        return codes_of(random_codes(make, seed), SOME, **place)

    np.testing.assert_array_equal(codes(**where), codes(**where))
    for change in ({"step": 4}, {"worker": 1}, {"leaf": 2}, {"seed": 1}):
        assert np.mean(codes(**where) != codes(**(where | change))) > 0.1, change


@by_name([q for q in CODED if "stochastic" not in q.name])
def test_nearest_codes_depend_on_nothing_but_the_values(quantizer):
    there = codes_of(quantizer, SOME, step=3, worker=0)
    np.testing.assert_array_equal(there, codes_of(quantizer, SOME, step=4, worker=1))


# --- Names, sizes and refusals


@pytest.mark.parametrize(
    ("quantizer", "name", "code_bits", "top", "planes", "words_per_row"),
    [
        (Q.sign(), "sign", 1, 1, 1, 4),
        (Q.midrise(2), "midrise(2)", 2, 3, 2, 4),
        (Q.midrise(4, rounding=RANDOM), "midrise(4, stochastic)", 4, 15, 4, 4),
        (Q.midrise(8, rounding=Q.nearest()), "midrise(8)", 8, 255, 8, 4),
        (Q.integer(), "integer(8)", 8, 62, 6, 4),
        (Q.integer(5, rounding=RANDOM), "integer(5, stochastic)", 5, 6, 3, 4),
        (Q.ternary(), "ternary", 2, 2, 2, 4),
        (Q.levels(4), "levels(4, max)", 4, 14, 4, 4),
        (Q.levels(4, norm="l2", rounding=RANDOM), "levels(4, l2, stochastic)", 4, 14, 4, 4),
        (Q.dense(), "dense(float32)", 32, 0, 1, 128),
        (Q.dense(jnp.bfloat16), "dense(bfloat16)", 16, 0, 1, 64),
        (Q.error_feedback(Q.midrise(1)), "midrise(1) + error feedback", 1, 1, 1, 4),
    ],
)
def test_names_and_sizes_for_four_workers(quantizer, name, code_bits, top, planes, words_per_row):
    assert quantizer.name == name
    assert (quantizer.bits, quantizer.top(4)) == (code_bits, top)
    assert quantizer.words_per_row == words_per_row
    where = {"steps": False, "leaf": 0, "workers": 4}
    message, *_ = encode.eval_shape(quantizer, SOME, jnp.int32(0), jnp.int32(0), **where)
    assert [x.shape for x in message.planes] == [(64 * words_per_row,)] * planes


def test_bits_out_of_range_are_refused():
    for make in (Q.midrise, Q.integer, Q.levels):
        for p in (0, 9, -1, 2.0, "2", None, True):
            with pytest.raises(ValueError, match=rf"{make.__name__}\({p!r}\).* to 8 bits; give an"):
                make(p)
    for make in (Q.integer, Q.levels):
        with pytest.raises(ValueError, match=rf"{make.__name__}\(1\): a code has 2 to 8 bits"):
            make(1)


def test_values_and_errors_of_other_dtypes_are_refused():
    for dtype in ("float16", "float64", "int8", "uint32", "complex64"):
        with pytest.raises(ValueError, match=rf"dense\({dtype}\).*float32 or bfloat16"):
            Q.dense(dtype)
    for dtype in ("int8", "uint32", "bool", "complex64"):
        with pytest.raises(ValueError, match=f"{dtype}.*give a floating dtype"):
            Q.error_feedback(Q.midrise(3), dtype)


def test_error_feedback_needs_codes_that_are_decoded():
    for quantizer in (Q.integer(8), Q.ternary(), Q.dense()):
        with pytest.raises(ValueError, match=r"steps that travel; use midrise\(p\)"):
            Q.error_feedback(quantizer)


def test_error_feedback_keeps_the_codes_and_names_the_dtype():
    plain = Q.midrise(3)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn):
        fed_back = Q.error_feedback(plain, dtype)
        assert fed_back.feedback == jnp.dtype(dtype) and plain.feedback is None
    np.testing.assert_array_equal(codes_of(plain, SOME), codes_of(fed_back, SOME))


@pytest.mark.parametrize(
    ("down", "planes"),
    [
        (lc.decide.majority(), 1),
        (lc.decide.ternary_sum(), 2),
        (lc.decide.average(), 4),
        (lc.decide.total(), 4),
        (lc.decide.floats(), 1),
        (lc.decide.scaled_signs(), 1),
        (lc.decide.scaled(5), 5),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_a_reply_is_read_block_by_block_as_it_is_read_whole(down, planes):
    """A leaf of whole blocks is unpacked by itself, wherever it lies."""
    workers, blocks, up = 5, 6, lc.quantize.ternary() if down.needs_zero else lc.quantize.midrise(2)
    rng = np.random.default_rng(0)

    def words(each):
        drawn = rng.integers(0, 2**32, (1, blocks, each), dtype=np.uint32)
        return drawn & 0x3F803F80  # no NaN, whatever it is read as

    sent = [words(32 * down.words_per_row) for _ in range(planes)]
    numbers = words(down.row_words(32, workers)) if down.row_words else None

    def read(first, end):
        where = lc.decide.Slice(1, 32 * (end - first), workers, up, jnp.float32, None)
        mine = [jnp.asarray(x[:, first:end].reshape(1, -1)) for x in sent]
        rows = None if numbers is None else jnp.asarray(numbers[:, first:end].reshape(1, -1))
        return down.decode(mine, rows, where)

    whole = read(0, blocks)
    assert len(np.unique(whole)) > 1
    np.testing.assert_array_equal(jnp.concatenate([read(0, 1), read(1, 4), read(4, 6)], 1), whole)
