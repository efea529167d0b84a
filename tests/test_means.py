"""Means that a few cannot move: the network that sorts, and what is left out."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from lioncub_jax import means


def sorted_by_network(columns):
    """Columns of ``[count, columns]``, by the comparators alone."""
    x = columns.copy()
    for i, j in means._comparators(len(x)):
        x[i], x[j] = np.minimum(x[i], x[j]), np.maximum(x[i], x[j])
    return x


@pytest.mark.parametrize("count", range(1, 13))
def test_the_network_sorts_all_zeros_and_ones_and_so_everything(count):
    every = np.array(list(itertools.product((0, 1), repeat=count))).T
    np.testing.assert_array_equal(sorted_by_network(every), np.sort(every, axis=0))


@pytest.mark.parametrize("count", [13, 24, 31, 32, 33, 63, 64])
def test_the_network_sorts_many(count):
    drawn = np.random.default_rng(count).integers(0, 2, (count, 5000))
    np.testing.assert_array_equal(sorted_by_network(drawn), np.sort(drawn, axis=0))


def trimmed_by_hand(values, here, trim):
    each = np.sort(values[here], axis=0)
    cut = min(trim, max(len(each) - 1, 0) // 2)
    return each[cut : len(each) - cut].mean(0) if len(each) else np.zeros(values.shape[1:])


@pytest.mark.parametrize("workers", [3, 8, 20, 32, 33])
@pytest.mark.parametrize("share", [1.0, 0.6, 0.0])
def test_the_outermost_of_those_that_take_part_are_left_out(workers, share):
    rng = np.random.default_rng(workers)
    values = rng.normal(size=(workers, 2, 3, 128)).astype(np.float32)
    here = rng.random(workers) < share
    for trim in {1, workers // 4, (workers - 1) // 2} - {0}:
        found = means.trimmed(jnp.asarray(values), jnp.asarray(here)[:, None, None, None], trim)
        wanted = trimmed_by_hand(values, here, trim)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("workers", [8, 33])
@pytest.mark.parametrize("said", [np.nan, np.inf, -np.inf, 3e38])
def test_what_a_liar_says_is_left_out_whatever_it_is(workers, said):
    honest = np.random.default_rng(0).normal(size=(workers, 1, 1, 128)).astype(np.float32)
    lied = honest.copy()
    lied[2] = said
    here = jnp.ones((workers, 1, 1, 1), bool)
    found = np.asarray(means.trimmed(jnp.asarray(lied), here, 1))
    others = np.delete(honest, 2, axis=0)
    assert (found >= others.min(0)).all() and (found <= others.max(0)).all()


def test_a_step_is_cut_to_what_the_median_allows():
    rng = np.random.default_rng(1)
    steps = np.exp(3 * rng.normal(size=(9, 1, 400))).astype(jnp.bfloat16).astype(np.float32)
    steps[rng.random(steps.shape) < 0.4] = 0
    steps[:, :, :5] = 0  # nobody has a gradient there
    steps[0, 0, 5], steps[1:, 0, 5] = 7.0, 0  # one alone
    found = np.asarray(means.bounded(jnp.asarray(steps), 2.0))
    for row in range(400):
        some = np.sort(steps[:, 0, row][steps[:, 0, row] > 0])
        most = 2 * some[(len(some) - 1) // 2] if len(some) else np.inf
        np.testing.assert_array_equal(found[:, 0, row], np.minimum(steps[:, 0, row], most))


@pytest.mark.parametrize("said", [np.nan, np.inf, -np.inf, -1e30, 1e-39])
def test_a_step_that_no_code_has_is_none(said):
    steps = jnp.ones((8, 1, 4), jnp.float32).at[:3, 0, 1].set(said).at[:, 0, 2].set(said)
    found = np.asarray(means.bounded(steps, 2.0))
    np.testing.assert_array_equal(found[:, 0, 1], [0, 0, 0, 1, 1, 1, 1, 1])
    np.testing.assert_array_equal(found[:, 0, 2], 0)


@pytest.mark.parametrize("workers", [2**16 - 1, 2**16, 2**16 + 1])
def test_as_many_workers_as_there_may_be(workers):
    steps = jnp.ones((workers, 1, 2), jnp.float32).at[0].set(1e9)
    found = np.asarray(means.bounded(steps, 2.0))
    assert found[0].max() == 2.0 and (found[1:] == 1.0).all()
