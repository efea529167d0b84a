"""Syncs of momentum against numpy and the reference: what they make alike, lose, measure and cost."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS, absent, assert_same, blank, mesh_on, run_workers
from jax.sharding import PartitionSpec as P
from oracle.lion import local_momentum
from oracle.sync import synced
from test_against_reference import integers, nobody_abstains, simulate, zeros

import lioncub_jax as lc

S = lc.sync
STEPS, WORKERS = 9, 4


def gradients(shapes):
    return integers(zeros(shapes), STEPS, WORKERS, range(-8, 9))


def ran(txs, grads):
    return run_workers(txs, blank(grads), grads)


# With betas of 1/2, whole gradients and 4 workers nothing is ever rounded.

SHAPES = {"b": (70,), "w": (5, 3)}


def cub(**options):
    return lc.lion_cub(0.01, 0.5, 0.5, weight_decay=0.0, workers=AXIS, **options)


def vote():
    return lc.communicate(momentum=lc.momentum.blend(0.5, 0.5), workers=AXIS)


def momenta(grads, due=()):
    """Momentum of each worker after each step, averaged after the steps in ``due`` (from 1)."""
    mu, out = np.zeros(grads.shape[1:], np.float32), []
    for step, g in enumerate(grads, 1):
        mu = 0.5 * mu + 0.5 * g
        if step in due:
            mu = np.broadcast_to(mu.mean(0), mu.shape)
        out.append(mu)
    return np.stack(out)


def only_w(tree):
    return {k: k == "w" for k in tree}


def test_a_sync_averages_the_chosen_leaves_when_it_is_due_and_at_no_other_time():
    cases = {
        "all": (None, "bw"),
        "mapping": ({"b": True, "w": False}, "b"),
        "function": (only_w, "w"),
    }
    txs = {k: cub(sync=S.every(3), sync_where=where) for k, (where, _) in cases.items()}
    grads = gradients(SHAPES)
    for of, (_, (state, *_)) in ran(txs, grads).items():
        for k, g in grads.items():
            due = [3, 6, 9] if k in cases[of][1] else ()
            assert_same(state.inner.mu[k], momenta(g, due), of=of)
        assert state.syncs.tolist() == [[t // 3] * WORKERS for t in range(1, STEPS + 1)]


def test_momentum_in_bfloat16_is_averaged_in_float32():
    """Rounded once, when the mean of three is known, not when their sum is."""
    g = np.random.default_rng(1).integers(-255, 256, (1, 3, 70)).astype(np.float32)
    _, (state, *_) = ran({0: cub(sync=S.every(1), mu_dtype=jnp.bfloat16)}, {"b": g})[0]
    local = (0.5 * g).astype(jnp.bfloat16).astype(np.float32)
    want = (local.sum(1) / np.float32(3)).astype(jnp.bfloat16)
    for w in range(3):
        assert_same(state.inner.mu["b"][:, w], want)


def test_drift_is_the_share_of_variance_between_workers_before_a_sync():
    grads = gradients({**SHAPES, "cancel": (3,), "none": (3,)})
    grads["none"][:] = 0
    grads["cancel"][:] = np.array([[5], [-5], [1], [-1]])
    where, due = {k: k != "w" for k in grads}, [3, 6, 9]
    # The momentum is found in a chain, too.
    chain = optax.chain(optax.scale(1.0), vote(), optax.scale(-0.01))
    _, state = ran({0: lc.sync_momentum(chain, S.every(3), where, workers=AXIS)}, grads)[0]
    for k, g in grads.items():
        mu = momenta(g, due if where[k] else ())
        assert_same(state.inner[1].mu[k], mu)
        want, latest = [], -1.0
        before = np.concatenate([np.zeros_like(mu[:1]), mu[:-1]])
        for step, own in enumerate(np.float64(0.5 * before + 0.5 * g), 1):
            square = (own**2).sum() / WORKERS
            if where[k] and step in due:
                latest = 1 - (own.mean(0) ** 2).sum() / square if square else 0
            want.append([latest] * WORKERS)
        np.testing.assert_allclose(state.drift[k], want, rtol=1e-6, atol=1e-9, err_msg=k)
    first, last = (lc.metrics(jax.tree.map(lambda x, t=t: x[t, 0], state)) for t in (1, -1))
    each = {f"sync/drift/{k}": state.drift[k][-1, 0] for k in grads}
    assert each.pop("sync/drift/w") == -1 and last["sync/drift/w"] == first["sync/drift"] == 0
    wanted = each | {"sync/drift": np.mean([*each.values()]), "sync/syncs": 3}
    assert {name: float(last[name]) for name in wanted} == pytest.approx(wanted)


# --- What it costs

LEAVES = {f"leaf{i}": jnp.zeros((100 + i,)) for i in range(6)}
ONE = {k: k == "leaf3" for k in LEAVES}


@pytest.mark.parametrize(
    ("schedule", "where", "sent"),
    [
        (S.every(100), None, 2 * 7 / 8 * 4 * (sum(range(100, 106)) + 6)),
        (S.thinning(2), lambda _: ONE, 2 * 7 / 8 * 4 * (103 + 1)),
    ],
    ids=["all", "one leaf"],
)
def test_a_sync_sends_the_chosen_leaves_with_a_mean_square_for_each(schedule, where, sent):
    """That programs send this behind a condition is the contract's."""
    tx = lc.sync_momentum(vote(), schedule, where, workers=AXIS)
    without, with_sync = lc.audit.of(tx, LEAVES, absent(8)).stages
    assert with_sync - without == sent


def test_an_empty_tree_has_nothing_to_sync():
    """As a group of leaves that no leaf belongs to is for optax.partition."""
    txs = {"synced": cub(sync=S.every(1)), "owner": lc.owner_lion(0.1, workers=AXIS)}
    done = ran(txs, {})
    assert done["owner"][0] == {}
    updates, (sync, *_) = done["synced"]
    assert updates == {} and sync.drift == {}
    assert sync.count[:, 0].tolist() == [1, 2] and not sync.syncs.any()


# --- On meshes of several axes

# What is cut over an axis is cut between rows; two devices of a group have rows; no gradient is 0.
GRID = {"b": (2, 128), "r": (200,), "w": (16, 256)}
WEIGHTS = np.float32([0.375, 0.625, 1.125, 1.375])


def grid_gradient(weight, step):
    """Of whole numbers; workers of other weights have other signs. No momentum of two steps is 0."""
    rng = np.random.default_rng(5)
    each = {k: rng.integers(1, 8, s).astype(np.float32) for k, s in GRID.items()}
    return {k: c * jnp.sign(c - 4 * weight) * (1 + step / 32) for k, c in each.items()}


@pytest.mark.parametrize(
    ("sizes", "specs", "names"),
    [
        (
            "pod=2 data=2 tp=2",
            {"w": P("tp"), "b": P("tp"), "r": P()},
            [("pod", "data")],
        ),
        ("data=4 dev=2", None, ["data", "dev"]),
    ],
    ids=["cut parameters", "two levels"],
)
def test_each_device_syncs_its_own_shards_or_parts(sizes, specs, names):
    workers = lc.Workers(mesh_on(sizes), *names)
    weights = WEIGHTS if specs else np.repeat(WEIGHTS, 2)
    batches = [np.stack([weights, np.full_like(weights, t)], 1) for t in range(2)]

    def loss(params, batch, rng):
        return sum(jnp.sum(params[k] * g) for k, g in grid_gradient(*batch[0]).items())

    tx = lc.distributed_lion(0.01, 0.75, 0.5, sync=S.first(1), workers=workers)
    params = {k: jnp.zeros(s) for k, s in GRID.items()}
    state = lc.init_state(tx, params, workers, specs=specs)
    step = lc.make_train_step(loss, tx, workers)
    for batch in batches:
        state, _ = step(state, batch)
    of_workers = [[grid_gradient(w, t) for w in WEIGHTS] for t in range(2)]
    grads = {k: np.array([[g[k] for g in now] for now in of_workers], np.float32) for k in GRID}
    oracle = synced(local_momentum(0.75, 0.5), lambda t: t == 1)
    _, want = simulate({0: oracle}, blank(grads), nobody_abstains(grads))[0]
    mu = state.opt_state[0].inner.mu
    if not specs:
        (flat,) = mu
        each = [flat.bucket.split(rows.reshape(-1, 128)) for rows in flat.value.reshape(4, -1)]
        mu = {k: np.stack([own[i] for own in each]) for i, k in enumerate(sorted(GRID))}
    assert_same(mu, {k: x[-1] for k, x in want.mu.items()})
    assert np.ptp(mu["w"], 0).any()


def test_a_mask_of_something_else_is_refused():
    with pytest.raises(TypeError, match=r"where\[0\] is 'no': a mask has a bool for each leaf"):
        lc.sync_momentum(vote(), S.every(2), ["no"], workers=AXIS)
