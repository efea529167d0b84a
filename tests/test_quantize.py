"""What each quantizer makes of values: codes, votes, steps, and what it refuses."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import coding
from test_against_reference import both

import lioncub_jax as lc
from lioncub_jax.exchange import bits, layout, plan
from lioncub_jax.exchange.step import encode as encode_bucket

Q = lc.quantize
TINY, MOST = np.finfo(np.float32).tiny, np.finfo(np.float32).max


def codec_of(quantizer):
    """Its values, or votes where it has no others; ``sign`` stands for votes."""
    return (
        quantizer.vote if quantizer.value is None or quantizer.name == "sign" else quantizer.value
    )


@functools.partial(jax.jit, static_argnames=("quantizer", "workers"))
def encode(quantizer, x, step, worker, *, workers):
    codec, (bucket,) = codec_of(quantizer), layout.buckets([x], workers)
    (piece,) = bucket.pieces
    rows = layout.piece_to_rows(layout.join_piece([x], piece), piece)
    exchange = plan.Exchange(
        axis=(), group=(), momentum_rule=lc.momentum.nothing(), message_codec=codec,
        decision=lc.decide.majority(), wire=lc.wires.two_phase(),
    )  # fmt: skip
    own = plan.make_plan(exchange, [x], workers, 1, worker, jnp.int32(0), step)
    message = encode_bucket(own, own.buckets[0], [rows])
    parts = rows.reshape(bucket.packed_chunks, -1, 128)
    planes = [x.reshape(len(parts), -1) for x in message.planes]
    codes = None
    if not codec.dense:
        codes = bits.unpack(planes).reshape(-1, 128).astype(jnp.int32)
    sent = None if message.scales is None else message.scales.reshape(parts.shape[:2])
    values = None
    if codec.decode is not None:
        values = codec.decode(codec.unpack_each(planes, parts.shape[1])(...), sent).reshape(-1, 128)
    voted = message.voted
    if voted is not None:
        voted = bits.unpack_rows(voted.reshape(len(parts), -1), parts.shape[1]).reshape(-1)
    found = {"codes": codes, "values": values, "steps": message.scales, "voted": voted}
    return found | {"finite": message.finite}


def sent_by(quantizer, x, *, step=0, worker=0, workers=4):
    """A message about one leaf, unpacked; rows as they lie in the buffer, padding too."""
    x = jnp.asarray(x, jnp.float32).reshape(-1)
    sent = encode(quantizer, x, jnp.int32(step), jnp.int32(worker), workers=workers)
    return SimpleNamespace(**jax.tree.map(np.asarray, sent))


def row(*values, size=128):
    """A row that repeats a few values."""
    return np.resize(np.array(values, np.float32), size)


PAIR = row(3, -1)  # of which the mean magnitude is 2
SHORT = row(3, -1, size=50)  # padding does not dilute it
# Steps are rounded to 8 bits of mantissa: the best Gaussian one of 3 bits, 0.7344 means, becomes 1.4688 and
# then 1.46875. Integers: s = floor((2**(p-1) - 1) / W) and q = s + round(s x / 2 mean), halves to even.
BY_HAND = [  # quantizer, workers, values, the first codes, and the step
    (Q.sign(), 4, row(1e30, -TINY, TINY), (1, 0, 1), None),
    (Q.midrise(1), 4, PAIR, (1, 0), 4.0),
    (Q.midrise(3), 4, SHORT, (6, 3), 1.46875),
    (Q.midrise(8), 4, PAIR, (166, 115), 0.0771484375),
    (Q.integer(8), 4, SHORT, (31 + 23, 31 - 8), None),
    (Q.integer(8), 8, [1000, -1000, *[1] * 126], (30, 0), None),
    (Q.ternary(), 4, row(-5, 0, TINY, -TINY), (0, 1, 2, 0), None),
]


@pytest.mark.parametrize(("quantizer", "workers", "x", "codes", "step"), BY_HAND)
def test_codes_by_hand(quantizer, workers, x, codes, step):
    sent = sent_by(quantizer, x, workers=workers)
    assert sent.codes[0, : len(codes)].tolist() == list(codes)
    if step is not None:
        values = (np.array(codes) - codec_of(quantizer).max_code(workers) / 2) * step
        assert sent.steps[0] == step and sent.values[0, : len(codes)].tolist() == values.tolist()


# --- As in the reference, from the smallest to the largest numbers

CODED = {
    words: both(words)
    for words in [
        "sign()",
        *(f"midrise({p})" for p in range(1, 9)),
        "integer(8)",
        "integer(6)",
        "ternary()",
    ]
}


@pytest.mark.parametrize("words", CODED)
def test_codes_of_every_worker_are_those_of_the_reference_at_any_scale(words):
    # Whole numbers: sums of magnitudes are exact in any order. Of 40 rows each worker owns 16.
    rng, (quantizer, codes) = np.random.default_rng(0), CODED[words]
    x = rng.integers(-1000, 1001, (3, 5000)).astype(np.float32)
    x[:, 256:384], x[:, 500:600] = 0, 0
    buffer = coding.buffer_of([x])
    rows = np.asarray(buffer.join([x]))
    levels, steps = jax.jit(lambda rows: codes.encode(rows, buffer, 11))(rows)
    for worker in range(3):
        plain = sent_by(quantizer, x[worker], step=11, worker=worker, workers=3)
        np.testing.assert_array_equal(
            plain.codes[:40] - codec_of(quantizer).max_code(3) / 2, levels[worker]
        )
        if plain.steps is not None:
            np.testing.assert_array_equal(plain.steps[:40], steps[worker, :, 0])
        if plain.voted is not None:  # a row of zeros is not voted on
            assert plain.voted[:40].tolist() == rows[worker].any(1).tolist()
            assert not plain.voted[40:].any()
        assert (plain.voted is None) == codec_of(quantizer).midtread
        for power in (-120, 105):
            sent = sent_by(quantizer, np.ldexp(x[worker], power), step=11, worker=worker, workers=3)
            np.testing.assert_array_equal(sent.codes, plain.codes)
            assert sent.finite
            if plain.steps is not None:
                np.testing.assert_array_equal(sent.steps, np.ldexp(plain.steps, power))


EVERY = [quantizer for quantizer, _ in CODED.values()]
EVERY += [Q.dense(), Q.dense(jnp.bfloat16)]


@pytest.mark.parametrize("quantizer", EVERY, ids=lambda q: q.name)
def test_numbers_at_the_ends_of_their_range(quantizer):
    for largest in (TINY, 1e38, MOST):
        x = row(largest, -largest, largest, size=700)
        sent = sent_by(quantizer, x)
        assert sent.finite and (sent.voted is None or sent.voted[:6].all())
        if codec_of(quantizer).dense:
            kind = "bfloat16" if "bfloat16" in quantizer.name else "float32"
            want = coding.saturate(x, kind).astype(jnp.float32)
            np.testing.assert_array_equal(sent.values.reshape(-1)[:700], want)
        elif sent.values is not None and largest < MOST:  # else outer levels are beyond float32
            assert np.isfinite(sent.values).all()
        if sent.codes is not None:
            side = np.sign(2 * sent.codes.reshape(-1)[:700] - codec_of(quantizer).max_code(4))
            assert (side == np.sign(x)).all()
    for bad in (np.nan, np.inf, -np.inf):
        x[200] = bad
        assert not sent_by(quantizer, x).finite


# --- Precision


@pytest.mark.parametrize("p", range(2, 9))
def test_the_sum_of_integer_codes_never_overflows_its_bits(p):
    most = 2 ** (p - 1) - 1
    for workers in range(1, 128):
        if workers <= most:
            s = Q.integer(p).vote.max_code(workers) // 2
            assert s >= 1 and workers * s <= most < workers * (s + 1)
        else:
            with pytest.raises(ValueError, match=rf"{workers} workers.* at most {most} workers"):
                Q.integer(p).vote.max_code(workers)


# --- What is refused


@pytest.mark.parametrize(
    ("make", "given", "said"),
    [
        *[(make, (p,), rf"{make.__name__}\({p!r}\).* to 8 bits; give an")
          for make in (Q.midrise, Q.integer) for p in (0, 9, 2.0, "2", None, True)],
        (Q.integer, (1,), r"integer\(1\): a code has 2 to 8 bits"),
        *[(Q.dense, (dtype,), rf"dense\({dtype}\).*float32 or bfloat16")
          for dtype in ("float16", "float64", "int8", "complex64")],
        *[(Q.error_feedback, (Q.midrise(3), dtype), f"{dtype}.*give a floating dtype")
          for dtype in ("int8", "bool", "complex64")],
        *[(Q.error_feedback, (q,), r"error_feedback\(.*scales that travel; use midrise\(p\)")
          for q in (Q.integer(8), Q.ternary(), Q.dense())],
    ],
)  # fmt: skip
def test_what_is_refused(make, given, said):
    with pytest.raises(ValueError, match=said):
        make(*given)
