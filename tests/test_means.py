"""Means that a few cannot move: the network that sorts, and what is left out."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from lioncub_jax import means


@pytest.mark.parametrize("count", [*range(1, 11), 24, 31, 32, 33])
def test_the_network_sorts_zeros_and_ones_and_so_everything(count):
    if count <= 10:
        columns = np.array(list(itertools.product((0, 1), repeat=count))).T
    else:
        columns = np.random.default_rng(count).integers(0, 2, (count, 5000))
    want = np.sort(columns, axis=0)
    for i, j in means._comparators(count):
        columns[i], columns[j] = np.minimum(columns[i], columns[j]), np.maximum(*columns[[i, j]])
    np.testing.assert_array_equal(columns, want)


@pytest.mark.parametrize("workers", [3, 8, 32, 33])
def test_the_outermost_of_those_that_take_part_are_left_out(workers):
    rng = np.random.default_rng(workers)
    honest = rng.normal(size=(workers, 2, 3, 128)).astype(np.float32)
    counts = (0, 2, workers // 2 + 1, workers)
    for trim, count in itertools.product({1, (workers - 1) // 2}, counts):
        here = rng.permutation(workers) < count
        found = means.trimmed(honest, here[:, None, None, None], trim)
        each = np.sort(honest[here], axis=0)
        cut = min(trim, max(len(each) - 1, 0) // 2)
        kept = each[cut : len(each) - cut]
        want = kept.mean(0) if len(kept) else np.zeros(honest.shape[1:])
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
    for said in (np.nan, np.inf, -np.inf, 3e38):  # whatever a liar says
        lied = np.concatenate([honest[:2], np.full_like(honest[:1], said), honest[3:]])
        found = np.asarray(means.trimmed(lied, np.ones((workers, 1, 1, 1), bool), 1))
        others = np.delete(honest, 2, axis=0)
        assert (found >= others.min(0)).all() and (found <= others.max(0)).all()


def test_a_step_is_cut_to_what_the_median_allows_and_one_that_no_code_has_is_none():
    rng = np.random.default_rng(1)
    steps = np.exp(3 * rng.normal(size=(9, 1, 400))).astype(jnp.bfloat16).astype(np.float32)
    steps[rng.random(steps.shape) < 0.4] = 0
    steps[:, :, :5] = 0  # nobody has a gradient there
    steps[0, 0, 5], steps[1:, 0, 5] = 7.0, 0  # one alone
    said = steps.copy()
    for row, strange in enumerate((np.nan, np.inf, -np.inf, -1e30, 1e-39), 100):
        said[:3, 0, row], steps[:3, 0, row] = strange, 0
        said[:, 0, row - 100] = strange
    found = np.asarray(means.bounded(jnp.asarray(said), 2.0))
    for row in range(400):
        some = np.sort(steps[:, 0, row][steps[:, 0, row] > 0])
        most = 2 * some[(len(some) - 1) // 2] if len(some) else np.inf
        np.testing.assert_array_equal(found[:, 0, row], np.minimum(steps[:, 0, row], most))


def test_more_workers_than_16_bits_count():
    steps = jnp.ones((2**16, 1, 2), jnp.float32).at[0].set(1e9)
    found = np.asarray(means.bounded(steps, 2.0))
    assert found[0].max() == 2.0 and (found[1:] == 1.0).all()
