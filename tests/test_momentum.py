"""Momentum against numpy: schedules, masks, what a sync makes equal and what it costs."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax.compiled import collectives

AXIS = "data"
WORKERS, STEPS = 4, 9
PARAMS = {"b": np.zeros((70,), np.float32), "w": np.zeros((5, 3), np.float32)}

# With betas of 1/2, whole gradients and 4 workers nothing is ever rounded: momenta are compared exactly.
HALVES = {"b1": 0.5, "b2": 0.5, "weight_decay": 0.0}


class Trace(NamedTuple):
    """What each worker holds after each step: every leaf ``[steps, workers, ...]``."""

    updates: Any
    state: Any


def make_mesh(workers):
    devices = jax.devices()
    assert len(devices) >= workers
    return jax.make_mesh(
        (workers,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices[:workers]
    )


def run(tx, grads, params=PARAMS):
    """Runs ``tx`` on gradients ``[steps, workers, ...]`` with checked types."""

    def worker(params, grads):
        def step(state, g):
            updates, state = tx.update(jax.tree.map(lambda x: x[0], g), state, params)
            return state, jax.tree.map(lambda x: x[None], Trace(updates, state))

        local = jax.tree.map(lambda p: jax.lax.pcast(p, AXIS, to="varying"), params)
        return jax.lax.scan(step, tx.init(local), grads)[1]

    mesh = make_mesh(jax.tree.leaves(grads)[0].shape[1])
    by_worker = P(None, AXIS)
    body = jax.shard_map(worker, mesh=mesh, in_specs=(P(), by_worker), out_specs=by_worker)
    return jax.tree.map(np.asarray, jax.jit(body)(params, grads))


@functools.cache
def whole_gradients(seed=0):
    rng = np.random.default_rng(seed)
    return {
        k: rng.integers(-8, 9, (STEPS, WORKERS, *p.shape)).astype(np.float32)
        for k, p in PARAMS.items()
    }


def momenta(grads, synced=()):
    """Momentum of each worker after each step, averaged after the steps in ``synced`` (from 1)."""
    mu, out = np.zeros(grads.shape[1:]), []
    for step, g in enumerate(grads, 1):
        mu = 0.5 * mu + 0.5 * g
        if step in synced:
            mu = np.broadcast_to(mu.mean(0), mu.shape)
        out.append(mu)
    return np.stack(out)


def cub(**options):
    return lc.lion_cub(0.01, **HALVES, axis_name=AXIS, **options)


def vote():
    return lc.communicate(axis_name=AXIS, memory=lc.blend(0.5, 0.5))


# --- what is remembered -----------------------------------------------------------------------------


def test_blend_sends_one_mixture_and_keeps_another():
    memory = lc.blend(0.75, 0.5)
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
    memory = lc.blend(mu_dtype=mu_dtype)
    params = {"w": jnp.ones((2, 3), param), "none": None}
    mu = memory.init(params)
    assert mu["none"] is None and not mu["w"].any()
    assert (mu["w"].dtype, mu["w"].shape) == (kept, (2, 3))
    assert memory.remember(params["w"], mu["w"]).dtype == kept


def test_a_memory_of_nothing_sends_the_gradient_itself():
    memory = lc.nothing()
    g = jnp.ones(3)
    assert memory.init({"w": g}) == {"w": None}
    assert memory.message(g, None) is g
    assert memory.remember(g, None) is None


# --- when it is averaged ----------------------------------------------------------------------------

DUE = [
    (lc.every(1), [1, 2, 3, 4, 5, 6, 7, 8, 9]),
    (lc.every(4), [4, 8]),
    (lc.every(10), []),
    (lc.first(3), [1, 2, 3]),
    (lc.first(7, lc.every(3)), [3, 6]),
    (lc.first(3, lc.every(4)), []),
    (lc.first(5, lc.thinning(2)), [1, 2, 4]),
    (lc.thinning(1), [1, 3, 7]),
    (lc.thinning(2), [1, 2, 4, 6]),
    (lc.thinning(3), [1, 2, 3, 5, 7]),
]


@pytest.mark.parametrize(("schedule", "due"), DUE, ids=lambda x: getattr(x, "name", ""))
def test_steps_at_which_a_schedule_is_due(schedule, due):
    assert [step for step in range(1, 10) if schedule.due(step)] == due
    flags = jax.vmap(schedule.due)(jnp.arange(10))
    assert (np.flatnonzero(flags[1:]) + 1).tolist() == due and flags.dtype == bool


def test_thinning_goes_on_for_as_long_as_steps_are_counted():
    last = 2**31 - 1
    assert lc.thinning(1).due(jnp.int32(last))  # 2**n - 1
    assert not lc.thinning(1).due(jnp.int32(last - 1))
    times = [t for t in range(1, 1000) if lc.thinning(4).due(t)]
    gaps = np.diff(times)
    assert gaps.tolist() == [int(2 ** (j / 4)) for j in range(1, len(times))]


def test_never_is_no_schedule_at_all():
    assert lc.never().due is None
    state = cub(sync=lc.never()).init(PARAMS)
    assert jax.tree.structure(state) == jax.tree.structure(cub().init(PARAMS))


# --- what a sync does -------------------------------------------------------------------------------


def only_w(tree):
    return {k: k == "w" for k in tree}


@pytest.mark.parametrize(
    ("schedule", "where", "due"),
    [
        (lc.every(3), None, [3, 6, 9]),
        (lc.first(2), {"b": True, "w": False}, [1, 2]),
        (lc.thinning(2), only_w, [1, 2, 4, 6]),
    ],
    ids=["every", "first, tree", "thinning, function"],
)
def test_a_sync_averages_the_chosen_leaves_when_it_is_due_and_at_no_other_time(
    schedule, where, due
):
    grads = whole_gradients()
    got = run(cub(sync=schedule, sync_where=where), grads)
    sync = got.state[0]
    chosen = (
        {"b": True, "w": True} if where is None else where(PARAMS) if callable(where) else where
    )
    for k, g in grads.items():
        want = momenta(g, due if chosen[k] else ())
        mu = sync.inner.mu[k]
        np.testing.assert_array_equal(mu, want)
        same = (mu == mu[:, :1]).all(tuple(range(1, mu.ndim)))
        assert (np.flatnonzero(same) + 1).tolist() == (due if chosen[k] else [])
        # The vote of a step is taken before its sync, with the momentum that the worker had.
        before = np.concatenate([np.zeros((1, *want.shape[1:])), want[:-1]])
        c = 0.5 * before + 0.5 * g
        votes, clear = np.sign(c).sum(1), (c != 0).all(1)
        clear &= votes != 0
        assert clear.mean() > 0.3
        np.testing.assert_array_equal(
            got.updates[k][:, 0][clear], -np.float32(0.01) * np.sign(votes)[clear]
        )
    for w in range(WORKERS):
        assert sync.count[:, w].tolist() == list(range(1, STEPS + 1))
        assert sync.syncs[:, w].tolist() == [sum(d <= t for d in due) for t in range(1, STEPS + 1)]


def test_momentum_in_bfloat16_is_averaged_in_float32():
    """Rounded once, when the mean of three is known, not when their sum is."""
    g = np.random.default_rng(1).integers(-255, 256, (1, 3, 70)).astype(np.float32)
    got = run(cub(sync=lc.every(1), mu_dtype=jnp.bfloat16), {"b": g}, {"b": PARAMS["b"]})
    mu = got.state[0].inner.mu["b"]
    local = (0.5 * g).astype(jnp.bfloat16).astype(np.float32)
    want = (local.sum(1) / np.float32(3)).astype(jnp.bfloat16)
    rounded_twice = (local.sum(1).astype(jnp.bfloat16) / 3).astype(jnp.bfloat16)
    assert mu.dtype == jnp.bfloat16 and (want != rounded_twice).any()
    for w in range(3):
        np.testing.assert_array_equal(mu[:, w], want)


def test_sync_finds_the_momentum_in_a_chain():
    tx = optax.chain(optax.scale(2.0), vote(), optax.scale(-0.01))
    grads = whole_gradients()
    got = run(lc.sync_momentum(tx, AXIS, lc.every(4)), grads)
    for k, g in grads.items():
        np.testing.assert_array_equal(got.state.inner[1].mu[k], momenta(2 * g, (4, 8)))


def test_groups_of_leaves_sync_when_theirs_is_due():
    groups = {"a": cub(sync=lc.every(2)), "b": cub(sync=lc.first(1)), "c": cub()}
    grads = {"x": whole_gradients()["b"], "y": whole_gradients()["w"], "z": whole_gradients(1)["w"]}
    params = {k: np.zeros(g.shape[2:], np.float32) for k, g in grads.items()}
    got = run(optax.partition(groups, dict(zip("xyz", "abc", strict=True))), grads, params)
    inner = {k: masked.inner_state[0] for k, masked in got.state.inner_states.items()}
    np.testing.assert_array_equal(inner["a"].inner.mu["x"], momenta(grads["x"], (2, 4, 6, 8)))
    np.testing.assert_array_equal(inner["b"].inner.mu["y"], momenta(grads["y"], (1,)))
    np.testing.assert_array_equal(inner["c"].mu["z"], momenta(grads["z"]))


def test_sync_around_and_inside_gradient_accumulation():
    """Around it a step is a call; inside it a step is one that votes."""
    grads = whole_gradients(seed=2)
    halves = [np.repeat(g[:8].reshape(4, 2, *g.shape[1:]).mean(1), 2, 0) for g in grads.values()]

    def accumulated(tx):
        return optax.MultiSteps(tx, 2).gradient_transformation()

    def check(mu, synced_votes):
        for k, g in zip(grads, halves, strict=True):
            want = momenta(g[::2], synced_votes)
            np.testing.assert_array_equal(mu[k][1::2][:4], want)

    around = run(lc.sync_momentum(accumulated(vote()), AXIS, lc.every(4)), grads)
    check(around.state.inner.inner_opt_state.mu, (2, 4))
    assert around.state.syncs[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    inside = run(accumulated(lc.sync_momentum(vote(), AXIS, lc.every(3))), grads)
    check(inside.state.inner_opt_state.inner.mu, (3,))
    assert inside.state.inner_opt_state.syncs[:, 0].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]


# --- drift ------------------------------------------------------------------------------------------


def drift_of(mu):
    """``1 - |mean_i mu_i|^2 / mean_i |mu_i|^2`` of ``[workers, ...]``."""
    mean_square = (mu**2).sum() / WORKERS
    return 1 - (mu.mean(0) ** 2).sum() / mean_square


def test_drift_is_the_share_of_variance_between_workers_before_the_sync():
    grads, due, looks = whole_gradients(), (3, 6, 9), (2, 3, 4, 6, 8, 9)
    tx = lc.sync_momentum(vote(), AXIS, lc.every(3), {"b": True, "w": False}, watch=lc.every(2))
    got = run(tx, grads)
    want, latest = [], 0.0
    synced = momenta(grads["b"], due)
    before = np.concatenate([np.zeros((1, *synced.shape[1:])), synced[:-1]])
    for step in range(1, STEPS + 1):
        if step in looks:
            latest = drift_of(0.5 * before[step - 1] + 0.5 * grads["b"][step - 1])
        want.append(latest)
    assert want[1] > 0.5 and len(set(want)) == 7
    # Sums of exact float32 are exact here, the quotient is rounded.
    np.testing.assert_allclose(got.state.drift["b"][:, 0], want, rtol=1e-6)
    assert (got.state.drift["b"] == got.state.drift["b"][:, :1]).all()
    assert (got.state.drift["w"] == 0).all()  # not looked at
    np.testing.assert_array_equal(got.state.inner.mu["b"], synced)


def test_watching_measures_and_changes_nothing():
    grads = {**whole_gradients(), **{k: np.zeros((STEPS, WORKERS, 3), np.float32) for k in "sof"}}
    grads["s"][:] = 3  # all workers the same
    grads["o"][:] = np.array([[5], [-5], [1], [-1]])  # they cancel
    params = {k: np.zeros(g.shape[2:], np.float32) for k, g in grads.items()}
    got = run(lc.sync_momentum(vote(), AXIS, lc.never(), watch=lc.every(2)), grads, params)
    unwatched = run(vote(), grads, params)
    for x, y in zip(
        jax.tree.leaves(got.state.inner), jax.tree.leaves(unwatched.state), strict=True
    ):
        np.testing.assert_array_equal(x, y)
    for k in params:
        np.testing.assert_array_equal(got.updates[k], unwatched.updates[k])
        np.testing.assert_array_equal(got.state.inner.mu[k], momenta(grads[k]))
    drift = {k: d[:, 0].tolist() for k, d in got.state.drift.items()}
    assert drift["s"] == drift["f"] == [0.0] * STEPS
    assert drift["o"] == [0.0] + [1.0] * (STEPS - 1)
    assert drift["b"][0] == 0 and drift["b"][1] > 0 and drift["b"][2] == drift["b"][1]
    assert not got.state.syncs.any()


# --- what it costs ----------------------------------------------------------------------------------

LEAVES = {f"leaf{i}": jnp.zeros((100 + i,)) for i in range(6)}


def update_collectives(tx):
    """Those of one update on 8 workers: ``(the others, float all-reduces)``."""
    mesh = make_mesh(8)

    def update(g):
        g = jax.tree.map(lambda p: jax.lax.pcast(p, AXIS, to="varying"), g)
        updates, state = tx.update(g, tx.init(g), g)
        return updates, jax.tree.map(lambda x: x[None], state)

    body = jax.shard_map(update, mesh=mesh, in_specs=P(), out_specs=(P(), P(AXIS)))
    found = collectives(jax.jit(body).lower(LEAVES).compile(), mesh)
    floats = [c for c in found if any(o.dtype[0] not in "us" for o in c.operands)]
    return [c for c in found if c not in floats], floats


@pytest.mark.parametrize("sync", [None, lc.never()], ids=["default", "never"])
def test_without_a_schedule_no_floats_travel_at_all(sync):
    votes, floats = update_collectives(cub(sync=sync))
    assert sorted(c.op for c in votes) == ["all-gather", "all-to-all"]
    assert floats == []


@pytest.mark.parametrize(
    ("schedule", "watch", "where", "elements"),
    [
        (lc.every(100), None, None, sum(range(100, 106)) + 6),
        (lc.never(), lc.every(100), None, sum(range(100, 106)) + 6),
        (lc.thinning(2), lc.every(7), lambda mu: {k: k == "leaf3" for k in mu}, 103 + 1),
    ],
    ids=["sync", "watch", "both, one leaf"],
)
def test_a_sync_is_one_all_reduce_behind_a_condition(schedule, watch, where, elements):
    """Of the chosen leaves, and a mean square for each."""
    votes, floats = update_collectives(lc.sync_momentum(vote(), AXIS, schedule, where, watch))
    assert sorted(c.op for c in votes) == ["all-gather", "all-to-all"]
    assert not any(c.gated for c in votes)
    (mean,) = floats
    assert (mean.op, mean.axes, mean.gated, mean.times) == ("all-reduce", (AXIS,), True, 1)
    assert mean.payload_bytes == 4 * elements
