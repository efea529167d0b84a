"""Schedules of a sync: at which steps they are due."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lioncub_jax.exchange import sync

DUE = [
    (sync.every(4), [4, 8]),
    (sync.first(3), [1, 2, 3]),
    (sync.first(7, sync.every(3)), [3, 6]),
    (sync.first(5, sync.thinning(2)), [1, 2, 4]),
    (sync.thinning(3), [1, 2, 3, 5, 7]),
]


@pytest.mark.parametrize(("schedule", "due"), DUE, ids=lambda x: getattr(x, "name", ""))
def test_steps_at_which_a_schedule_is_due(schedule, due):
    flags = jax.vmap(schedule.due)(jnp.arange(10))
    assert (np.flatnonzero(flags[1:]) + 1).tolist() == due and flags.dtype == bool


def test_thinning_goes_on_for_as_long_as_steps_are_counted():
    last = 2**31 - 1
    assert sync.thinning(1).due(jnp.int32(last))  # 2**n - 1
    assert not sync.thinning(1).due(jnp.int32(last - 1))
    times = np.flatnonzero(jax.vmap(sync.thinning(4).due)(jnp.arange(1, 1000)))
    assert np.diff(times).tolist() == [int(2 ** (j / 4)) for j in range(1, len(times))]


def test_a_schedule_that_thins_slowly_is_a_short_program():
    k = 10**6
    due = sync.thinning(k).due
    # The gap is 1 until k syncs are done, then 2, and 3 behind k log2(3) of them.
    third = k + 2 * (math.ceil(k * math.log2(3)) - k)
    steps = {1: 1, 2: 1, k: 1, k + 1: 0, k + 2: 1, third: 1, third + 2: 0, third + 3: 1}
    assert [int(due(jnp.int32(step))) for step in steps] == [*steps.values()]
    assert sum(np.size(x) for x in jax.make_jaxpr(due)(1).consts) < 5000
