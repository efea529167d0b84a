"""PowerSGD: its oracle against the paper in NumPy, what is not ordinary, and which matrices it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS, absent, blank, normal, run_workers
from oracle import powersgd as oracle
from test_against_reference import nobody_abstains, simulate
from test_baselines import refused

import lioncub_jax as lc
from lioncub_jax.baselines import powersgd


def ran(tx, grads):
    txs = {0: powersgd(*tx, workers=AXIS)}
    updates, (state, _) = run_workers(txs, blank(grads), grads)[0]
    return updates, state


def test_the_oracle_is_a_power_iteration():
    """In NumPy, as the paper has it."""
    simulator, grads = (
        oracle.powersgd(optax.sgd(1.0), 2),
        {"b": normal(3, 4, 3), "w": normal(3, 4, 2, 9, 20)},
    )
    updates, _ = simulate({0: simulator}, blank(grads), nobody_abstains(grads))[0]
    q = np.asarray(simulator.init(blank(grads), 4).q[1], np.float64)
    error = np.zeros((4, 18, 20))
    for step in range(3):
        owed = grads["w"][step].reshape(4, 18, 20) + error
        p = np.linalg.qr((owed @ q).mean(0))[0]
        q = (owed.swapaxes(1, 2) @ p).mean(0)
        error = owed - p @ q.T
        np.testing.assert_allclose(-updates["w"][step].reshape(18, 20), p @ q.T, atol=1e-5)
        np.testing.assert_allclose(-updates["b"][step], grads["b"][step].mean(0), atol=1e-6)


# --- What is not ordinary


def test_the_rounding_of_a_short_dtype_is_fed_back():
    """In compiled programs a cast there and back may be left out."""
    grads = {"w": normal(1, 2, 16, 12).astype(jnp.bfloat16)}
    updates, state = ran((optax.identity(), 1), grads)
    own, seen = grads["w"][0].astype(np.float32), updates["w"][0].astype(np.float32)
    np.testing.assert_array_equal(state.error["w"][0], own - seen)
    assert updates["w"].dtype == jnp.bfloat16 and np.linalg.matrix_rank(seen) > 1


def test_what_is_zeros_teaches_nothing_and_forgets_nothing():
    """A gradient of lower rank, and none, leave no column of Q at zero for ever, whatever their size."""
    rng = np.random.default_rng(0)
    grads = rng.normal(size=(5, 4, 20, 30)).astype(np.float32)
    grads[0] = 0
    grads[1] = rng.normal(size=(20, 1)) @ rng.normal(size=(1, 30))
    grads[1:, :, :3] = 0  # where unit vectors would look
    scales = {"w": 1, "small": np.float32(1e-15), "large": np.float32(1e12)}
    each = {n: grads * by for n, by in scales.items()}
    updates, state = ran((optax.sgd(1.0), 2), each)
    for name, by in scales.items():
        plain = updates[name] / by
        assert [np.linalg.matrix_rank(u, tol=1e-3) for u in plain] == [0, 1, 2, 2, 2]
        np.testing.assert_allclose(-plain[1], grads[1, 0], atol=1e-4)
        assert np.isfinite(state.error[name]).all()
        np.testing.assert_allclose(np.abs(state.q[name][1:]).max(2), 1, rtol=1e-6)


def test_sums_that_overflow_leave_no_trace():
    """A worker whose product overflows abstains; where only the sum of all does, it is zeros."""
    grads = {"w": normal(4, 4, 20, 30), "b": normal(4, 4, 4)}
    grads["w"][1, 2] = 3e38
    grads["w"][2] = np.sign(grads["w"][2, 0]) * 3e37
    updates, state = ran((optax.sgd(1.0), 2), grads)
    assert state.abstained[:, 0].tolist()[:2] == [0, 1]
    for x in jax.tree.leaves((updates, state)):
        assert np.isfinite(x).all()


# --- Which matrices


@pytest.mark.parametrize(
    ("shape", "rank", "sides"),
    [
        ((3, 3, 64, 128), 2, (576, 128)),
        ((64, 8, 16), 2, (64, 128)),
        ((8, 16, 64), 2, (128, 64)),
        ((20, 20), 4, (20, 20)),
    ],
)
def test_more_dimensions_are_a_matrix_with_the_fewest_rows_and_columns(shape, rank, sides):
    """A leaf travels as ``rank (m + n)`` numbers, the first with the number of those who are there.

    One whose factors are no smaller is averaged whole, so a full rank loses nothing.
    """
    tx = powersgd(optax.sgd(0.1), rank, workers=AXIS)
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32), "whole": jnp.zeros((2 * rank,) * 2)}
    told = lc.audit.of(tx, params, absent(2))
    first = rank * sides[0] + 4 * rank**2 + 1
    assert [one.sent_bytes for one in told.collectives] == [4 * first, 4 * rank * sides[1]]
    state, _ = jax.eval_shape(tx.init, params)
    assert state.q["whole"] is None and state.q["w"].shape == (sides[1], rank)
    assert state.error["w"].shape == shape


@pytest.mark.parametrize(
    ("shapes", "rank", "most"),
    [
        ({"w": (12, 16), "v": (4, 400)}, 9, 6),
        ({"w": (24, 2), "b": (5,)}, 2, 1),
        ({"w": (1, 16), "s": (), "e": (0, 4)}, 1, 0),
        ({}, 1, 0),
    ],
)
def test_leaves_of_which_none_would_be_compressed(shapes, rank, most):
    tx = powersgd(optax.sgd(1.0), rank, workers=AXIS)
    params = {n: jnp.zeros(s) for n, s in shapes.items()}
    said = f"rank={rank}: none of the {len(shapes)} leaves", f"is {most}; ", "global_gradients(tx)"
    with refused(*said):
        tx.init(params)
    with refused(*said):
        lc.audit.of(tx, params, absent(4))
