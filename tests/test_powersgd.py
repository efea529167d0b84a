"""PowerSGD against its reference, and the reference against the best approximation there is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS
from test_against_reference import simulate
from test_baselines import nobody_abstains, refused

import lioncub_jax as lc
from lioncub_jax.baselines import powersgd
from lioncub_jax.reference import powersgd as oracle

# A matrix, one of three dimensions (18 x 20), vectors, nothing at all, and dtypes that are not the state's.
SHAPES = {
    "a": (7, 19), "b": (5,), "bf16": (16, 12), "conv": (2, 9, 20), "empty": (0, 4), "long": (65,),
    "one": (1, 9), "scalar": (),
}  # fmt: skip
LOW = ("a", "bf16", "conv")  # of rank 1 and 2; "one" is no smaller by its factors
STEPS = 5


def zeros(shapes):
    short = ("bf16", "long")
    return {n: jnp.zeros(s, jnp.bfloat16 if n in short else None) for n, s in shapes.items()}


def normal(params, workers, seed=0, steps=STEPS):
    """Gradients ``[steps, W, ...]``."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=(steps, workers, *p.shape)).astype(p.dtype)
        for name, p in params.items()
    }


def eventful(params, workers):
    """Who is told to abstain; and steps in which one worker, and then everybody, is not finite."""
    story = nobody_abstains(normal(params, workers, seed=workers))
    story.abstain[1, 0] = True
    story.grads["a"][2, -1, 3, 3] = np.inf
    story.grads["long"][3] = np.nan
    story.grads["conv"][0] = 0
    return story


def run_one(run_workers, tx, grads):
    return run_workers({0: tx}, {n: jnp.zeros(g.shape[2:], g.dtype) for n, g in grads.items()},
                       *nobody_abstains(grads))[0]  # fmt: skip


def assert_close(got, want, near):
    """Leaves in bfloat16 but for that rounding."""
    assert got.keys() == want.keys()
    for name, a in got.items():
        b = want[name]
        assert a.shape == b.shape and a.dtype == b.dtype, name
        off = max(near, 2e-2) if name in ("bf16", "long") else near
        np.testing.assert_allclose(*map(np.float32, (a, b)), rtol=off, atol=off, err_msg=name)


# --- Against the reference

TXS = {
    "sgd": optax.sgd(0.5, momentum=0.5, accumulator_dtype=jnp.float32),
    "adamw": optax.adamw(0.5, eps=0.1),
}
CASES = {  # by the number of workers: the optimizer, options, and how near, by the roundings on the way
    3: {
        "rank 2": ("sgd", {"rank": 2}, 2e-4),
        "rank 1": ("adamw", {"rank": 1, "seed": 3}, 2e-4),
        "4 bits": ("sgd", {"rank": 2, "bits": 4}, 2e-4),
        # Errors in bfloat16 differ by its last digit where what is rounded differs by one of float32.
    },
    1: {"rank 2": ("sgd", {"rank": 2}, 1e-6), "2 bits": ("adamw", {"rank": 2, "bits": 2}, 1e-6)},
}


@pytest.mark.parametrize("workers", CASES)
def test_it_equals_the_reference(workers, run_workers):
    params, cases = zeros(SHAPES), CASES[workers]
    story = eventful(params, workers)
    txs = {n: powersgd(TXS[tx], axis_name=AXIS, **how) for n, (tx, how, _) in cases.items()}
    simulators = {n: oracle.powersgd(TXS[tx], **how) for n, (tx, how, _) in cases.items()}
    done, simulated = run_workers(txs, params, *story), simulate(simulators, params, story)
    for name, (_, how, near) in cases.items():
        (updates, state), (want, wanted) = done[name], simulated[name]
        assert_close(updates, want, near)
        assert all(np.abs(np.float32(u)).max() > 0 for u in updates.values() if u.size)
        # One Q for all; a column has no sign.
        everywhere = [None if q is None else np.abs(np.stack([q] * workers, 1)) for q in wanted.q]
        for got, kept, of in (
            (state.error, wanted.error, SHAPES if "bits" in how else LOW),
            (jax.tree.map(np.abs, state.q), everywhere, LOW),
        ):
            kept = {n: x for n, x in zip(params, kept, strict=True) if x is not None}
            got = {n: x for n, x in got.items() if x is not None}
            assert list(got) == list(of)
            assert_close(got, kept, 5 * near)
        for mine, theirs in (("count", "t"), ("abstained",) * 2, ("abstentions",) * 2):
            for worker in getattr(state, mine).T:
                np.testing.assert_array_equal(worker, getattr(wanted, theirs))
        assert state.abstentions[-1, 0] == 2 + workers


def test_the_reference_is_a_power_iteration():
    """In NumPy, as the paper has it."""
    params, rank = {"b": jnp.zeros(3), "w": jnp.zeros((2, 9, 20))}, 2
    grads = normal(params, 4, steps=3)
    simulator = oracle.powersgd(optax.sgd(1.0), rank)
    updates, _ = simulate({0: simulator}, params, nobody_abstains(grads))[0]
    q = np.asarray(simulator.init(params, 4).q[1], np.float64)
    error = np.zeros((4, 18, 20))
    for step in range(3):
        owed = grads["w"][step].reshape(4, 18, 20) + error
        p = np.linalg.qr((owed @ q).mean(0))[0]
        q = (owed.swapaxes(1, 2) @ p).mean(0)
        error = owed - p @ q.T
        np.testing.assert_allclose(-updates["w"][step].reshape(18, 20), p @ q.T, atol=1e-5)
        np.testing.assert_allclose(-updates["b"][step], grads["b"][step].mean(0), atol=1e-6)


# --- What the approximation is, of the reference


# --- What is not ordinary


def test_the_rounding_of_a_short_dtype_is_fed_back(run_workers):
    """In compiled programs a cast there and back may be left out."""
    grads = normal(zeros({"bf16": (16, 12)}), 2, steps=1)
    updates, state = run_one(run_workers, powersgd(optax.identity(), 1, axis_name=AXIS), grads)
    own, seen = grads["bf16"][0].astype(np.float32), updates["bf16"][0].astype(np.float32)
    np.testing.assert_array_equal(state.error["bf16"][0], own - seen)
    assert updates["bf16"].dtype == jnp.bfloat16 and np.linalg.matrix_rank(seen) > 1


def test_what_is_zeros_teaches_nothing_and_forgets_nothing(run_workers):
    """A gradient of lower rank, and none, leave no column of Q at zero for ever, whatever their size."""
    rng = np.random.default_rng(0)
    grads = rng.normal(size=(5, 4, 20, 30)).astype(np.float32)
    grads[0] = 0
    grads[1] = rng.normal(size=(20, 1)) @ rng.normal(size=(1, 30))
    grads[1:, :, :3] = 0  # where unit vectors would look
    scales = {"w": 1, "small": np.float32(1e-15), "large": np.float32(1e12)}
    tx = powersgd(optax.sgd(1.0), 2, axis_name=AXIS)
    updates, state = run_one(run_workers, tx, {n: grads * by for n, by in scales.items()})
    for name, by in scales.items():
        plain = updates[name] / by
        assert [np.linalg.matrix_rank(u, tol=1e-3) for u in plain] == [0, 1, 2, 2, 2]
        np.testing.assert_allclose(-plain[1], grads[1, 0], atol=1e-4)
        assert np.isfinite(state.error[name]).all()
        np.testing.assert_allclose(np.abs(state.q[name][1:]).max(2), 1, rtol=1e-6)


def test_sums_that_overflow_leave_no_trace(run_workers):
    """A worker whose product overflows abstains; where only the sum of all does, it is zeros."""
    grads = normal({"w": jnp.zeros((20, 30)), "b": jnp.zeros(4)}, 4, steps=4)
    grads["w"][1, 2] = 3e38
    grads["w"][2] = np.sign(grads["w"][2, 0]) * 3e37
    updates, state = run_one(run_workers, powersgd(optax.sgd(1.0), 2, axis_name=AXIS), grads)
    assert state.abstained[:, 0].tolist()[:2] == [0, 1]
    for x in jax.tree.leaves((updates, state)):
        assert np.isfinite(x).all()


# --- Which matrices


@pytest.mark.parametrize(
    ("shape", "sides"),
    [
        ((3, 3, 64, 128), (576, 128)),
        ((64, 8, 16), (64, 128)),
        ((8, 16, 64), (128, 64)),
    ],
)
def test_more_dimensions_are_a_matrix_with_the_fewest_rows_and_columns(shape, sides):
    """A leaf travels as ``rank (m + n)`` numbers, with the number of those who are there."""
    tx = powersgd(optax.sgd(0.1), 2, axis_name=AXIS)
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    told = lc.traffic.of(tx, params, 2)
    assert [one.sent_bytes for one in told.collectives] == [
        4 * (2 * sides[0] + 1), 4 * 2 * sides[1],
    ]  # fmt: skip
    assert told.scheme == "powersgd(2), all-reduce, mean"
    state = jax.eval_shape(tx.init, params)
    assert state.q["w"].shape == (sides[1], 2) and state.error["w"].shape == shape


def test_a_leaf_whose_factors_are_no_smaller_is_averaged_whole():
    """So a full rank loses nothing: ``r (m + n)`` is as much as ``m n`` there."""
    tx = powersgd(TXS["adamw"], 4, axis_name=AXIS)
    state = jax.eval_shape(tx.init, zeros({"w": (6, 12), "v": (20, 20)}))  # 4 x 18 = 72
    assert state.q["w"] is None and state.error["w"] is None and state.q["v"].shape == (20, 4)


def test_codes_of_a_large_model_cost_their_bits_and_a_scale():
    params, workers = {"w": jax.ShapeDtypeStruct((2**18, 2**17), jnp.float32)}, 64
    sent = lc.traffic.of(powersgd(TXS["sgd"], 16, 4, axis_name=AXIS), params, workers).sent_bytes
    numbers = 16 * (2**18 + 2**17)
    assert sent == pytest.approx(2 * 63 / 64 * numbers * (4 + 1 / 8) / 8, rel=0.02)


@pytest.mark.parametrize(
    ("shapes", "rank", "words"),
    [
        ({"w": (12, 16), "v": (4, 400)}, 9, ["['w'],", "is 12 x 16", "side of 12", "at most 6"]),
        ({"w": (24, 2), "b": (5,)}, 2, ["rank=2", "is 24 x 2", "side of 2", "rank of at most 1"]),
        ({"w": (1, 16)}, 1, ["rank=1: no leaf", "is 1 x 16", "give global_gradients"]),
        ({"b": (5,), "s": ()}, 1, ["compresses", "none of the 2 leaves", "global_gradients(tx, "]),
        ({"w": (0, 4)}, 1, ["compresses", "none of the 1 leaves"]),
        ({}, 1, ["compresses", "none of the 0 leaves"]),
    ],
)
def test_leaves_of_which_none_would_be_compressed(shapes, rank, words):
    tx = powersgd(TXS["sgd"], rank, axis_name=AXIS)
    with refused(*words):
        tx.init(zeros(shapes))
    with refused(*words[1:]):
        lc.traffic.of(tx, zeros(shapes), 4)


def test_what_is_no_transform():
    with refused("tx=0.1 is not a GradientTransformation", kind=TypeError):
        powersgd(0.1, axis_name=AXIS)
