"""Syncs of momentum against numpy and the reference: what they make alike, lose, measure and cost."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_against_reference import Story, assert_equal, integers, simulate, zeros
from test_checkpoint import assert_same, carried, place_of, trained, values

import lioncub_jax as lc
from lioncub_jax import reference, wires
from lioncub_jax.checkpoint import reshard as relayout
from lioncub_jax.mesh.placement import Workers
from lioncub_jax.reference.sync import synced
from lioncub_jax.traffic.compiled import collectives

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
    return lc.communicate(axis_name=AXIS, memory=lc.momentum.blend(0.5, 0.5))


# --- what a sync does -------------------------------------------------------------------------------


def only_w(tree):
    return {k: k == "w" for k in tree}


@pytest.mark.parametrize(
    ("schedule", "where", "due"),
    [
        (lc.sync.every(3), None, [3, 6, 9]),
        (lc.sync.first(2), {"b": True, "w": False}, [1, 2]),
        (lc.sync.thinning(2), only_w, [1, 2, 4, 6]),
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
    got = run(cub(sync=lc.sync.every(1), mu_dtype=jnp.bfloat16), {"b": g}, {"b": PARAMS["b"]})
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
    got = run(lc.sync_momentum(tx, AXIS, lc.sync.every(4)), grads)
    for k, g in grads.items():
        np.testing.assert_array_equal(got.state.inner[1].mu[k], momenta(2 * g, (4, 8)))


def test_groups_of_leaves_sync_when_theirs_is_due():
    groups = {"a": cub(sync=lc.sync.every(2)), "b": cub(sync=lc.sync.first(1)), "c": cub()}
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

    around = run(lc.sync_momentum(accumulated(vote()), AXIS, lc.sync.every(4)), grads)
    check(around.state.inner.inner_opt_state.mu, (2, 4))
    assert around.state.syncs[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    inside = run(accumulated(lc.sync_momentum(vote(), AXIS, lc.sync.every(3))), grads)
    check(inside.state.inner_opt_state.inner.mu, (3,))
    assert inside.state.inner_opt_state.syncs[:, 0].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]


# --- drift ------------------------------------------------------------------------------------------


def drift_of(mu):
    """``1 - |mean_i mu_i|^2 / mean_i |mu_i|^2`` of ``[workers, ...]``."""
    mean_square = (mu**2).sum() / WORKERS
    return 1 - (mu.mean(0) ** 2).sum() / mean_square


def test_drift_is_the_share_of_variance_between_workers_before_the_sync():
    grads, due, looks = whole_gradients(), (3, 6, 9), (2, 3, 4, 6, 8, 9)
    tx = lc.sync_momentum(
        vote(), AXIS, lc.sync.every(3), {"b": True, "w": False}, watch=lc.sync.every(2)
    )
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
    got = run(
        lc.sync_momentum(vote(), AXIS, lc.sync.never(), watch=lc.sync.every(2)), grads, params
    )
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


def test_without_a_schedule_no_floats_travel_at_all():
    votes, floats = update_collectives(cub(sync=lc.sync.never()))
    assert sorted(c.op for c in votes) == ["all-gather", "all-to-all"]
    assert floats == []


@pytest.mark.parametrize(
    ("schedule", "watch", "where", "elements"),
    [
        (lc.sync.never(), lc.sync.every(100), None, sum(range(100, 106)) + 6),
        (lc.sync.thinning(2), lc.sync.every(7), lambda mu: {k: k == "leaf3" for k in mu}, 103 + 1),
    ],
    ids=["watch", "both, one leaf"],
)
def test_a_sync_is_one_all_reduce_behind_a_condition(schedule, watch, where, elements):
    """Of the chosen leaves, and a mean square for each."""
    votes, floats = update_collectives(lc.sync_momentum(vote(), AXIS, schedule, where, watch))
    assert sorted(c.op for c in votes) == ["all-gather", "all-to-all"]
    assert not any(c.gated for c in votes)
    (mean,) = floats
    assert (mean.op, mean.axes, mean.gated, mean.times) == ("all-reduce", (AXIS,), True, 1)
    assert mean.payload_bytes == 4 * elements


# --- in codes ---------------------------------------------------------------------------------------

EVEN = [lc.sync.every(2), lambda t: t % 2 == 0]
THIRD = [lc.sync.every(3), lambda t: t % 3 == 0]


def coded_vote(schedule, where=None, mu_dtype=None, watch=None, axis=AXIS):
    vote = lc.communicate(axis_name=axis, memory=lc.momentum.blend(0.75, 0.5, mu_dtype))
    return lc.sync_momentum(vote, axis, schedule, where, watch)


def some_gradients(workers, steps=6, seed=3):
    """Of leaves around the edges of rows and blocks, rows of zeros too."""
    params = zeros({"a": (70,), "b": (5, 43), "c": (300,), "none": (0,)})
    grads = integers(params, steps, workers, seed=seed)
    grads["c"][:, :, 128:256] = 0
    return params, grads, np.zeros((steps, workers), bool)


def owners_errors(state):
    """``[steps, W, rows, 128]`` of the one bucket as a buffer ``[steps, rows, 128]``."""
    (flat,) = state.owner
    return np.asarray(flat.value.error).reshape(len(flat.value.error), -1, 128)


def by_reference(simulator, params, grads, abstain):
    """Updates and states ``[steps, ...]``."""
    return simulate({0: simulator}, params, Story(grads, abstain))[0]


@pytest.fixture(scope="module")
def eight(run_workers):
    """Eight workers that sync in codes after every second step."""
    params, *story = some_gradients(8)
    return run_workers({0: coded_vote(lc.sync.coded(lc.sync.every(2)))}, params, *story)[0]


@pytest.mark.parametrize(
    ("workers", "schedule", "bits", "where"),
    [
        (8, EVEN, 1, None),
        (5, THIRD, 2, {"a": True, "b": False, "c": True, "none": True}),
        (1, EVEN, 1, None),
    ],
    ids=["8 workers", "5, two bits, some leaves", "one alone"],
)
def test_a_sync_in_codes_is_that_of_the_reference(
    run_workers, eight, workers, schedule, bits, where
):
    params, *story = some_gradients(workers)
    every, due = schedule
    tx = coded_vote(lc.sync.coded(every, bits=bits), where)
    simulator = reference.local_momentum(0.75, 0.5)
    coded = synced(simulator, due, where, coded=bits)
    updates, want = by_reference(coded, params, *story)
    got, state = eight if workers == 8 else run_workers({0: tx}, params, *story)[0]
    assert_equal(got, updates)
    assert_equal(state.inner.mu, want.mu)
    assert_equal(state.syncs[:, 0], want.syncs)
    errors, rows = owners_errors(state), want.owner.shape[1]
    assert_equal(errors[:, :rows], want.owner)
    assert not errors[:, rows:].any()
    assert not any(np.any(d) for d in state.drift.values())  # codes do not tell it
    # It is a change, of what was chosen only.
    _, apart = by_reference(simulator, params, *story)
    for name in params:
        chosen = where is None or where[name]
        changed = workers > 1 and chosen and params[name].size > 0
        assert np.any(state.inner.mu[name] != apart.mu[name]) == changed
    assert errors.any() == (workers > 1)


def test_a_worker_whose_momentum_is_not_finite_abstains_from_a_sync_in_codes(run_workers):
    """Only a state that came so: what is stored saturates."""
    params, grads, abstain = some_gradients(4, steps=3)
    tx = coded_vote(lc.sync.coded(lc.sync.every(1)))
    simulator = reference.local_momentum(0.75, 0.5)
    coded = synced(simulator, lambda t: t > 0, coded=True)

    def strange(params):
        state = tx.init(params)
        mu = state.inner.mu
        b = mu["b"].at[2, 2].set(jnp.where(jax.lax.axis_index(AXIS) == 1, jnp.inf, 0))
        return state._replace(inner=state.inner._replace(mu={**mu, "b": b}))

    def strange_too(params, workers):
        state = coded.init(params, workers)
        mu = {**state.mu, "b": state.mu["b"].at[1, 2, 2].set(jnp.inf)}
        return state._replace(inner=state.inner._replace(mu=mu))

    updates, want = by_reference(coded._replace(init=strange_too), params, grads, abstain)
    got, state = run_workers({0: tx._replace(init=strange)}, params, grads, abstain)[0]
    assert_equal(got, updates)
    mu = state.inner.mu["b"]
    assert np.argwhere(~np.isfinite(mu)).tolist() == [[t, 1, 2, 2] for t in range(3)]
    for name in params:
        np.testing.assert_array_equal(state.inner.mu[name], want.mu[name])
    assert not np.any(state.inner.mu["a"][:, 1])  # it keeps its own
    # The others' mean and the owner's error are what they were.
    before, after = 0.5 * grads["a"][0], state.inner.mu["a"][0]
    there = [0, 2, 3]
    owed = owners_errors(state)[0, 0, :70]
    np.testing.assert_allclose(after[there].mean(0) + owed, before[there].mean(0), atol=1e-6)


def test_momentum_that_its_dtype_cannot_hold_takes_part_as_the_largest_that_it_can(run_workers):
    params, grads, abstain = some_gradients(4, steps=3)
    grads["b"][0, 1, 2, 2] = 2**18
    tx = coded_vote(lc.sync.coded(lc.sync.every(1)), mu_dtype=jnp.float16)
    simulator = reference.local_momentum(0.75, 0.5, jnp.float16)
    coded = synced(simulator, lambda t: t > 0, coded=True)
    updates, want = by_reference(coded, params, grads, abstain)
    got, state = run_workers({0: tx}, params, grads, abstain)[0]
    assert_equal(got, updates)
    assert_equal(state.inner.mu, want.mu)


def test_what_codes_miss_is_said_later_and_never_lost(eight):
    """The mean over the workers and the owners' errors together are not changed by a sync."""
    params, grads, _ = some_gradients(8)
    _, state = eight
    errors, first = owners_errors(state), 0
    for name in ("a", "b", "c"):
        mu, size = state.inner.mu[name], params[name].size
        rows = -(-size // 128)
        owed = errors[:, first : first + rows].reshape(len(mu), -1)[:, :size]
        first += rows
        before = 0.5 * np.concatenate([np.zeros_like(mu[:1]), mu[:-1]]) + 0.5 * grads[name]
        means = [x.mean(1).reshape(len(mu), -1) for x in (before, mu)]
        late = np.concatenate([np.zeros_like(owed[:1]), owed[:-1]])
        # Of numbers below 4 in float32, added in another order.
        np.testing.assert_allclose(means[1] + owed, means[0] + late, atol=1e-6)
        assert np.abs(means[1] - means[0]).max() > 0.1  # alone the momenta lose


def test_syncs_in_codes_bring_momenta_together_and_watching_sees_it(run_workers):
    params, grads, abstain = some_gradients(4, steps=12)
    for g in grads.values():
        g[1:] = 0  # from here on momenta shrink alike, and only syncs change their drift
    txs = {
        "synced": coded_vote(lc.sync.coded(lc.sync.every(1)), watch=lc.sync.every(2)),
        "apart": coded_vote(lc.sync.never(), watch=lc.sync.every(2)),
    }
    done = {name: state for name, (_, state) in run_workers(txs, params, grads, abstain).items()}
    for name in ("a", "b", "c"):
        coded, apart = (done[k].drift[name][:, 0] for k in ("synced", "apart"))
        assert apart[1] > 0.6 and np.allclose(apart[1:], apart[1])
        assert coded[0] == 0 and coded[1] < apart[1] and coded[-1] < 0.2
        looks = coded[1::2]
        assert (coded[2::2] == looks[:-1]).all() and (np.diff(looks) < 0.02).all()
    simulator = reference.local_momentum(0.75, 0.5)
    coded = synced(simulator, lambda t: t > 0, coded=True)
    _, want = by_reference(coded, params, grads, abstain)
    first = [jax.tree.map(lambda x: x[:4], mu) for mu in (done["synced"].inner.mu, want.mu)]
    assert_equal(*first)  # later ones have more bits than sums of them can hold


# --- a gap that follows the drift -------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("against each other", marks=pytest.mark.slow),
        "first alike, then against each other",
    ],
)
def test_an_adaptive_gap_follows_the_drift(run_workers, kind):
    shortest, longest, threshold = 2, 5, 0.5
    params = zeros({"a": (70,), "left out": (5,)})
    steps = 24
    common = integers(params, steps, 1, values=(-2, -1, 1, 2))
    side = np.array([1, -1, 1, -1])
    grads = {}
    for name, g in common.items():
        apart = g * side[None, :, None]
        alike = np.broadcast_to(g, apart.shape)
        early = np.arange(steps)[:, None, None] < 12
        mixed = apart if kind == "against each other" else np.where(early, alike, apart)
        grads[name] = mixed.astype(np.float32)
    where = {"a": True, "left out": False}
    abstain = np.zeros((steps, 4), bool)
    tx = coded_vote(lc.sync.adaptive(shortest, longest, threshold), where)
    _, state = run_workers({0: tx}, params, grads, abstain)[0]
    simulator = synced(
        reference.local_momentum(0.75, 0.5), where=where, adaptive=(shortest, longest, threshold)
    )
    _, want = by_reference(simulator, params, grads, abstain)
    assert_equal(state.inner.mu["left out"], want.mu["left out"])
    for got, wanted in [
        (state.pace.gap, want.gap), (state.pace.next, want.next), (state.syncs, want.syncs)
    ]:  # fmt: skip
        assert (got == got[:, :1]).all() and got.dtype == np.int32
        assert_equal(got[:, 0], wanted)
    due = np.flatnonzero(np.diff(state.syncs[:, 0], prepend=0)) + 1
    assert due.tolist() == {
        "against each other": [*range(2, 25, 2)],
        "first alike, then against each other": [2, 6, 11, 16, 18, 20, 22, 24],
    }.get(kind)


# --- what syncs cost --------------------------------------------------------------------------------


@functools.cache
def unsynced_bytes():
    return gated_bytes(vote())


def gated_bytes(tx):
    """Of one update on 8 workers: ``({op: bytes}`` in a branch, ``{op: bytes}`` of every step``)``."""
    votes, floats = update_collectives(tx)
    sums = [{}, {}]
    for c in [*votes, *floats]:
        of = sums[0 if c.gated else 1]
        of[c.op] = of.get(c.op, 0) + c.sent_bytes
    return sums


ONE = {f"leaf{i}": i == 3 for i in range(6)}


@pytest.mark.parametrize(
    ("schedule", "where"),
    [
        (lc.sync.coded(), None),
        (lc.sync.coded(lc.sync.every(5), bits=2), ONE),
        (lc.sync.every(100), None),
        (lc.sync.adaptive(), ONE),
    ],
    ids=["codes", "two bits, one leaf", "in full precision", "adaptive, one leaf"],
)
def test_a_sync_sends_what_is_predicted_and_only_when_it_is_due(schedule, where):
    gated, always = gated_bytes(lc.sync_momentum(vote(), AXIS, schedule, where))
    assert unsynced_bytes() == [{}, always]
    predicted = lc.traffic.sync_traffic(LEAVES, 8, schedule, where)
    assert {one.op: one.sent_bytes for one in predicted.collectives} == gated
    assert predicted.sent_bytes == sum(gated.values())
    ops = ["all-gather", "all-to-all"] if schedule.up else ["all-reduce"]
    assert sorted(gated) == ops
    assert predicted.parameters == (103 if where else sum(range(100, 106)))


def test_codes_are_a_28th_of_full_precision():
    params = {"w": jnp.zeros((1024, 1024))}
    codes, full = (
        lc.traffic.sync_traffic(params, 8, s) for s in (lc.sync.coded(), lc.sync.every(1))
    )
    assert 28 < full.sent_bytes / codes.sent_bytes < 28.5
    assert round(codes.bits_per_parameter * 8 / 7, 2) == 2.25
    for schedule in (lc.sync.coded(), lc.sync.every(1), lc.sync.never()):
        assert lc.traffic.sync_traffic(params, 1, schedule).sent_bytes == 0
    assert lc.traffic.sync_traffic(params, 8, lc.sync.never()).sent_bytes == 0


# --- on meshes of several axes ----------------------------------------------------------------------

# What is cut over an axis is cut between rows; two devices of a group have rows; no gradient is 0.
GRID = {"b": (2, 128), "r": (200,), "w": (16, 256)}
WEIGHTS = np.float32([0.375, 0.625, 1.125, 1.375])


def grid_constants():
    rng = np.random.default_rng(5)
    return {k: rng.integers(1, 8, s).astype(np.float32) for k, s in GRID.items()}


def grid_gradient(c, weight, step):
    """Of whole numbers; workers of other weights have other signs. No momentum of two steps is 0."""
    return c * jnp.sign(c - 4 * weight) * (1 + step / 32)


def grid_run(sizes, names, specs, axes, weights, steps=2):
    """A training step in which each worker's gradient is that of its weight; its collectives."""
    devices = jax.devices()[: int(np.prod(sizes))]
    assert len(devices) == np.prod(sizes)
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)

    def loss(params, batch, rng):
        weight, step = batch[0]
        gradients = {k: grid_gradient(c, weight, step) for k, c in grid_constants().items()}
        return sum(jnp.sum(params[k] * g) for k, g in gradients.items())

    tx = lc.distributed_lion(0.01, 0.75, 0.5, sync=lc.sync.coded(lc.sync.every(1)), **axes)
    params = {k: jnp.zeros(s) for k, s in GRID.items()}
    state = lc.init_state(tx, params, mesh, specs=specs, **axes)
    step = lc.make_train_step(loss, tx, mesh, **axes)
    batches = [np.stack([weights, np.full_like(weights, t)], 1) for t in range(steps)]
    found = collectives(step.lower(state, batches[0]).compile(), mesh)
    for batch in batches:
        state, _ = step(state, batch)
    return state, found


def grid_reference(weights, steps=2):
    each = [[(w, t) for w in weights] for t in range(steps)]
    grads = {
        k: np.array([[grid_gradient(c, *at) for at in now] for now in each], np.float32)
        for k, c in grid_constants().items()
    }
    params = {k: jnp.zeros(s) for k, s in GRID.items()}
    votes = reference.local_momentum(0.75, 0.5)
    simulator = synced(votes, lambda t: t > 0, coded=True)
    return by_reference(simulator, params, grads, np.zeros((steps, len(weights)), bool))[1]


@pytest.mark.parametrize(
    ("sizes", "names", "axis"),
    [
        pytest.param((4, 2), ("data", "tp"), "data", marks=pytest.mark.slow),
        ((2, 2, 2), ("pod", "data", "tp"), ("pod", "data")),
    ],
    ids=["4 x 2", "2 x 2 x 2, two axes of workers"],
)
def test_in_codes_each_device_syncs_its_own_shards(sizes, names, axis):
    specs = {"w": P("tp"), "b": P("tp"), "r": P()}
    state, found = grid_run(sizes, names, specs, {"axis_name": axis}, WEIGHTS)
    want = grid_reference(WEIGHTS)
    sync = state.opt_state[0]
    for name in GRID:
        np.testing.assert_array_equal(sync.inner.mu[name], want.mu[name][-1])
    assert np.ptp(np.asarray(sync.inner.mu["w"]), 0).any()
    gated = [c for c in found if c.gated]
    across = [c for c in gated if set(c.axes) & set(wires.names(axis))]
    assert {c.op for c in across} == {"all-to-all", "all-gather"}
    assert all(o.dtype == "u32" for c in across for o in c.operands)
    within = [c for c in gated if c not in across]
    assert all(c.axes == ("tp",) and c.payload_bytes <= 8 for c in within)  # who abstains


def test_in_two_levels_devices_sync_their_slices():
    axes = {"axis_name": "data", "group_axis": "dev"}
    weights = np.repeat(WEIGHTS, 2)
    state, found = grid_run((4, 2), ("data", "dev"), None, axes, weights)
    sync, want = state.opt_state[0], grid_reference(WEIGHTS)
    (flat,) = sync.inner.mu
    rows = np.asarray(flat.value).reshape(4, -1, 128)
    for s, name in zip(flat.bucket.segments, sorted(GRID), strict=True):
        own = rows[:, s.first_row : s.first_row + s.rows].reshape(4, -1)
        assert not own[:, s.size :].any()  # codes say no zeros, but padding stays
        np.testing.assert_array_equal(own[:, : s.size], want.mu[name][-1].reshape(4, -1))
        assert np.ptp(own[:, : s.size], 0).any()
    gated = [c for c in found if c.gated and c.payload_bytes > 8]
    assert sorted(c.op for c in gated) == ["all-gather", "all-to-all"]
    assert all(c.axes == ("data",) for c in gated)


def test_in_two_levels_a_sync_in_codes_must_know_the_group():
    mesh = jax.make_mesh((4, 2), ("data", "dev"), axis_types=(AxisType.Auto,) * 2)
    axes = {"axis_name": "data", "group_axis": "dev"}
    params = {"w": jnp.zeros(300)}
    inner = lc.communicate(memory=lc.momentum.blend(), **axes)
    tx = lc.sync_momentum(inner, "data", lc.sync.coded())
    with pytest.raises(ValueError, match=r"group_axis=None.*in slices that a group shares"):
        lc.init_state(tx, params, mesh, **axes)
    whole = lc.communicate(memory=lc.momentum.blend(), axis_name="data")
    with pytest.raises(ValueError, match=r"group_axis='dev'.*whole by each worker"):
        tx = lc.sync_momentum(whole, "data", lc.sync.coded(), group_axis="dev")
        lc.init_state(tx, params, mesh, axis_name="data")


# --- checkpoints ------------------------------------------------------------------------------------


def coded_run(place):
    sync = lc.sync.coded(lc.sync.every(2))
    return lc.lion_cub(0.01, 0.5, 0.5, weight_decay=0.0, sync=sync, **place.axes)


def noisy(i, place):
    return np.random.default_rng(i).normal(size=2 * place.devices).astype(np.float32)


@pytest.fixture(scope="module")
def saved_run():
    """After three steps of eight workers, with a sync in the second; and the step."""
    place = place_of("8")
    state, step, _ = trained(coded_run, place, np.float32([1]), steps=1)
    for i in range(2):
        state, _ = step(state, noisy(i, place))
    return state, step


def test_a_run_that_syncs_in_codes_goes_on_to_the_bit(saved_run, tmp_path):
    place, (state, step) = place_of("8"), saved_run
    again = carried(tmp_path, state, place, place, coded_run)
    assert_same(again, state)
    assert any(".owner" in path and x.any() for path, x in values(again).items())
    state = jax.tree.map(jnp.copy, state)
    for i in range(3):
        state, _ = step(state, noisy(i, place))
        again, _ = step(again, noisy(i, place))
    assert_same(again, state)


def owed(state, place):
    """The owners' errors as whole leaves, by name."""
    workers = Workers(place.mesh, **place.axes)
    layout = relayout.layout_of(state, workers)
    whole = relayout.opened(layout, relayout.paths_of(state))
    return {
        path.rpartition("[")[2]: np.asarray(x)
        for path, x in whole.items()
        if path.startswith(".opt_state[0].owner.error")
    }


@pytest.mark.parametrize(
    "names",
    [("4",), pytest.param(("2 of 2, tp 2", "1"), marks=pytest.mark.slow)],
    ids=" and then ".join,
)
def test_what_owners_owe_is_cut_anew(saved_run, names, tmp_path):
    place, (state, _) = place_of("8"), saved_run
    before = owed(state, place)
    assert sorted(before) == ["'b']", "'s']", "'v']", "'w']"] and before["'w']"].all()
    for name in names:
        old, place = place, place_of(name)
        state = carried(tmp_path / name, state, old, place, coded_run)
        after = owed(state, place)
        assert sorted(after) == sorted(before)
        for leaf, x in before.items():
            np.testing.assert_array_equal(after[leaf], x, err_msg=leaf)


# --- nothing to sync, and 64 bits ---------------------------------------------------------------------


def test_an_empty_tree_has_nothing_to_sync(run_workers):
    """As a group of leaves that no leaf belongs to is for optax.partition."""
    schedules = lc.sync.every(1), lc.sync.coded(lc.sync.every(1)), lc.sync.adaptive(1)
    txs = {schedule.name: cub(sync=schedule) for schedule in schedules}
    for updates, (sync, *_) in run_workers(txs, {}, {}, np.zeros((2, 2), bool)).values():
        assert updates == {} and sync.drift == {} and sync.owner == ()
        assert sync.count[:, 0].tolist() == [1, 2] and not sync.syncs.any()


def test_64_bits_change_no_dtype_and_no_number(run_workers):
    params, grads, abstain = some_gradients(2, steps=3)
    schedules = lc.sync.every(2), lc.sync.coded(lc.sync.every(2)), lc.sync.adaptive(1)
    txs = {schedule.name: coded_vote(schedule, watch=lc.sync.every(3)) for schedule in schedules}
    want = run_workers(txs, params, grads, abstain)
    with jax.enable_x64(True):
        got = run_workers(txs, params, grads, abstain)  # the scan fails where a dtype changes
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        assert x.dtype == y.dtype, path
        np.testing.assert_array_equal(x, y, err_msg=str(path))


# --- bad input --------------------------------------------------------------------------------------

S = lc.sync


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: S.coded(S.never()), ValueError, r"coded\(never\(\)\): give a sch.*every\(3\)"),
        (lambda: S.coded(S.adaptive()), ValueError, r"only to full precision; give coded"),
        (lambda: S.coded(3), TypeError, r"3 is not a schedule: give never\(\).*adaptive"),
        (lambda: S.coded(bits=0), ValueError, r"midrise\(0\)"),
        (lambda: S.coded(bits=9), ValueError, r"midrise\(9\)"),
        (lambda: S.first(9, S.adaptive()), ValueError, r"first\(9, adaptive.*known before"),
        (lambda: S.adaptive(0), ValueError, r"shortest=0.*at least 1"),
        (lambda: S.adaptive(4, 2.5), ValueError, r"longest=2.5.*at least 1"),
        (lambda: S.adaptive(8, 4), ValueError, r"below the shortest; give shortest <= longest"),
        (lambda: S.adaptive(threshold=0), ValueError, r"threshold=0.*above 0"),
        (lambda: S.adaptive(threshold="x"), ValueError, r"threshold='x'.*above 0"),
        (lambda: coded_vote(S.every(2), watch=S.coded()), ValueError, r"watch=coded\(every\(3"),
        (lambda: coded_vote(S.every(2), watch=S.adaptive()), ValueError, r"watch=adaptive"),
        (lambda: coded_vote(S.coded()).init(PARAMS), ValueError, r"axis_name='data'.*shard_map"),
        (lambda: lc.traffic.sync_traffic(PARAMS, 8, 3), TypeError, r"3 is not a schedule"),
        (lambda: lc.traffic.sync_traffic(PARAMS, 0, S.coded()), ValueError, r"workers=0"),
        (lambda: lc.traffic.sync_traffic(PARAMS, 8, S.coded(), [True]), ValueError,
         r"where has 1 leaves and the parameters have 2"),
        (lambda: lc.traffic.sync_traffic(PARAMS, 8, S.coded(), ["no", True]), TypeError,
         r"where\[0\] is 'no': a mask has a bool for each leaf"),
    ],
)  # fmt: skip
def test_what_is_refused(make, error, said):
    with pytest.raises(error, match=said):
        make()
