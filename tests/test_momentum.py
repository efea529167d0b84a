"""Momentum: what is remembered, and at which steps a schedule is due."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lioncub_jax as lc

# --- what is remembered -----------------------------------------------------------------------------


def test_blend_sends_one_mixture_and_keeps_another():
    memory = lc.momentum.blend(0.75, 0.5)
    g, mu = jnp.array([4.0, -8.0, 0.0]), jnp.array([8.0, 0.0, -16.0])
    assert memory.message(g, mu).tolist() == [7.0, -2.0, -12.0]
    assert memory.remember(g, mu).tolist() == [6.0, -4.0, -8.0]


@pytest.mark.parametrize(
    ("mu_dtype", "param", "kept"),
    [
        (None, "float32", "float32"),
        (None, "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "bfloat16"),
    ],
)
def test_momentum_has_its_own_dtype_or_that_of_the_parameters(mu_dtype, param, kept):
    memory = lc.momentum.blend(mu_dtype=mu_dtype)
    params = {"w": jnp.ones((2, 3), param), "none": None}
    mu = memory.init(params)
    assert mu["none"] is None and not mu["w"].any()
    assert (mu["w"].dtype, mu["w"].shape) == (kept, (2, 3))
    assert memory.remember(params["w"], mu["w"]).dtype == kept


def test_a_memory_of_nothing_sends_the_gradient_itself():
    memory = lc.momentum.nothing()
    g = jnp.ones(3)
    assert memory.init({"w": g}) == {"w": None}
    assert memory.message(g, None) is g
    assert memory.remember(g, None) is None


# --- when it is averaged ----------------------------------------------------------------------------

DUE = [
    (lc.sync.every(1), [1, 2, 3, 4, 5, 6, 7, 8, 9]),
    (lc.sync.every(4), [4, 8]),
    (lc.sync.every(10), []),
    (lc.sync.first(3), [1, 2, 3]),
    (lc.sync.first(7, lc.sync.every(3)), [3, 6]),
    (lc.sync.first(3, lc.sync.every(4)), []),
    (lc.sync.first(5, lc.sync.thinning(2)), [1, 2, 4]),
    (lc.sync.thinning(1), [1, 3, 7]),
    (lc.sync.thinning(2), [1, 2, 4, 6]),
    (lc.sync.thinning(3), [1, 2, 3, 5, 7]),
    (lc.sync.coded(), [3, 6, 9]),
    (lc.sync.coded(lc.sync.every(4)), [4, 8]),
    (lc.sync.coded(lc.sync.first(3), bits=2), [1, 2, 3]),
    (lc.sync.first(7, lc.sync.coded(lc.sync.every(3))), [3, 6]),
]


@pytest.mark.parametrize(("schedule", "due"), DUE, ids=lambda x: getattr(x, "name", ""))
def test_steps_at_which_a_schedule_is_due(schedule, due):
    assert [step for step in range(1, 10) if schedule.due(step)] == due
    flags = jax.vmap(schedule.due)(jnp.arange(10))
    assert (np.flatnonzero(flags[1:]) + 1).tolist() == due and flags.dtype == bool


def test_thinning_goes_on_for_as_long_as_steps_are_counted():
    last = 2**31 - 1
    assert lc.sync.thinning(1).due(jnp.int32(last))  # 2**n - 1
    assert not lc.sync.thinning(1).due(jnp.int32(last - 1))
    times = [t for t in range(1, 1000) if lc.sync.thinning(4).due(t)]
    gaps = np.diff(times)
    assert gaps.tolist() == [int(2 ** (j / 4)) for j in range(1, len(times))]


def test_never_is_no_schedule_at_all():
    assert lc.sync.never().due is None
    params = {"w": jnp.zeros(3)}
    plain, never = (lc.lion_cub(0.1, axis_name="data", sync=s) for s in (None, lc.sync.never()))
    assert jax.tree.structure(never.init(params)) == jax.tree.structure(plain.init(params))


def test_a_schedule_in_codes_says_which():
    assert lc.sync.every(3).up is None
    up = lc.sync.coded(bits=2).up
    assert (up.bits, up.decodes, up.feedback) == (2, True, jnp.float32)
    assert lc.sync.first(7, lc.sync.coded()).up.bits == 1


def test_an_adaptive_schedule_does_not_know_its_steps_and_is_no_never():
    schedule = lc.sync.adaptive(2, 9, 0.25)
    assert schedule.due is None and schedule.ever and not lc.sync.never().ever
    assert tuple(schedule.gaps) == (2, 9, 0.25)
