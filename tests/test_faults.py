"""Workers that lie, replicas that go wrong, votes that are missing: what is found, healed and survived."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS, mesh_on, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import coding, simulate
from oracle import lion as reference

import lioncub_jax as lc
from lioncub_jax import faults, means

Q = lc.quantize
WORKERS, RATE = 8, 2.0**-4


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda *xy: np.array_equal(*xy, equal_nan=True), a, b))


# --- Workers that lie

ATTACKS = {
    "flip": (faults.sign_flip, lambda k, g: -g),
    "loud": (faults.scaled(-(2.0**20)), lambda k, g: -(2.0**20) * g),
    "NaN": (faults.not_finite, lambda k, g: np.full_like(g, np.nan)),
    "leaf": (faults.collusion, lambda k, g: np.full_like(g, abs(g).max()) if k == "w" else g),
    "random": (faults.random_votes, None),
}


def test_liars_do_what_they_say(mesh_of):
    """Of each attack two steps, three of the workers; small whole numbers, whose sums are exact."""
    who, rng, drawn = [1, 4, 6], np.random.default_rng(1), []
    shapes = {"b": (WORKERS, 60), "w": (WORKERS, 5, 27)}
    grads = {k: rng.integers(-2, 3, shape).astype(np.float32) for k, shape in shapes.items()}

    def lied(grads):
        own, found = jax.tree.map(lambda g: g[0], grads), []
        for attack, _ in ATTACKS.values():
            tx = faults.liars(attack, who, workers=AXIS, seed=3)
            first, state = tx.update(own, tx.init(own))
            found.append((first, tx.update(own, state)[0]))
        return jax.tree.map(lambda x: x[None], found)

    lied = jax.shard_map(lied, mesh=mesh_of(WORKERS), in_specs=P(AXIS), out_specs=P(AXIS))
    found = jax.jit(lied)(grads)
    for (_, says), steps in zip(ATTACKS.values(), found, strict=True):
        for k, g in grads.items():
            for i in range(WORKERS):
                told = [np.asarray(step[k][i]) for step in steps]
                if i in who and not says:
                    drawn += [x.flat[0] for x in told]
                    assert np.std(told) == pytest.approx(np.std(g[i]), rel=0.3)
                else:
                    np.testing.assert_array_equal(told, [says(k, g[i]) if i in who else g[i]] * 2)
    # Anew in each step, by each worker, for each leaf.
    assert len({*map(float, drawn)}) == 2 * len(who) * len(grads)


def test_a_row_that_one_worker_sees_still_trains():
    """Errors of the others, which saw it before, wait: sent, they would be its median."""
    codes = coding.error_feedback(coding.midrise(3))
    votes = reference.momentum_at_owner(0.9, 0.99, codes, dominance=2.0)
    state = votes.init(jnp.zeros((2, 128)), WORKERS)
    update, signs = jax.jit(votes.update), np.where(np.arange(128) % 2, 1.0, -1.0)
    grads = normal(WORKERS, 2, 128)
    for _ in range(4):
        _, state = update(grads, state)
    before = np.asarray(state.error[:5, 1])
    grads[:, 1], grads[5, 1] = 0, signs
    for _ in range(40):
        updates, state = update(grads, state)
    np.testing.assert_array_equal(updates[1], signs)
    np.testing.assert_array_equal(state.error[:5, 1], before)
    assert before.any()


# --- Votes that are late

LATE = {
    "vote": reference.local_momentum(0.5, 0.5),
    "int8": reference.local_momentum(0.5, 0.5, codes=coding.integer(8), decide=reference.average),
    "median": reference.momentum_at_owner(
        0.5, 0.5, coding.error_feedback(coding.midrise(3)), dominance=2.0, trim=3
    ),
    "owner, Adam": reference.at_owner(
        optax.scale_by_adam(), coding.error_feedback(coding.midrise(3)), 2
    ),
}
EACH = pytest.mark.parametrize("method", LATE)
NOBODY, EVERYBODY = np.zeros(WORKERS, bool), np.ones(WORKERS, bool)
SOME = np.arange(WORKERS) % 3 == 1
# Of whole rows: no padding, and no zero whose code goes by the number of a worker.
GRADS = [normal(WORKERS, 256, seed=seed) for seed in range(3)]


@functools.cache
def compiled(votes, decay):
    """Of one set of arguments, so that one program serves all tests of a method."""
    tx = reference.optimizer(votes, RATE, decay)

    def update(grads, state, params, absent, late):
        updates, state = tx.update(grads, state, params, absent, late=late)
        return optax.apply_updates(params, updates), state

    return tx.init, jax.jit(update)


def run_late(votes, grads, lates, absents=(NOBODY,) * 3, decay=0.5):
    """Parameters and states after each step of these gradients."""
    init, update = compiled(votes, decay)
    params, found = jnp.ones(256), []
    state = init(params, WORKERS, late=True)
    for g, late, absent in zip(grads, lates, absents, strict=False):
        params, state = update(g, state, params, absent, late)
        found.append((params, state))
    return found


@EACH
def test_a_late_message_counts_in_the_next_step_and_once_and_its_worker_goes_on(method):
    run = functools.partial(run_late, LATE[method])
    first, second, _ = GRADS
    other = np.where(SOME[:, None], -first, first)
    lates = [SOME, NOBODY, NOBODY]
    one, two = (run([g, second, second], lates) for g in (first, other))
    (gone,), (on_time,) = run([first], [NOBODY], [SOME]), run([first], [NOBODY])
    assert same(one[0][0], two[0][0]) and same(one[0][0], gone[0]), "not in that step"
    assert not same(one[1][0], two[1][0]), "in the next"
    assert not one[1][1].missed.here.any(), "and once"
    # Its own state moves as if it were on time.
    own = "mu" if method in ("vote", "int8") else "error"
    late, timely, left = (getattr(state, own) for _, state in (one[0], on_time, gone))
    assert same(late, timely) and not same(late, left)
    assert int(one[0][1].abstained) == 0 and int(gone[1].abstained) == SOME.sum()


def test_a_step_counts_its_own_votes_and_those_of_before():
    """By hand: +1 of 5 late ones in one step, then -1 of all 8, of which 6 are late: 5 against 2."""
    five, six = (np.arange(WORKERS) < n for n in (5, 6))
    codes = {"codes": coding.ternary(), "decide": reference.average}
    for votes, values, lates, wanted in [
        (reference.local_momentum(0.5, 0.5, decide=reference.average), (1, -4, -4), (five, six, NOBODY),
         [1, (5 - 2) / 7, -1]),
        # Mid-tread codes: all 8 vote, zero if late, and 8 late ones too.
        (reference.local_momentum(0, 0, **codes), (1, -1, -1), (EVERYBODY, SOME, NOBODY),
         [0, SOME.sum() / 16, -1]),
    ]:  # fmt: skip
        found = run_late(
            votes, [np.full((WORKERS, 256), x, np.float32) for x in values], lates, decay=0.0
        )
        steps = -np.diff([1.0, *(float(params[0]) for params, _ in found)]) / RATE
        np.testing.assert_allclose(steps, wanted, rtol=1e-6, atol=1e-7)


def pulled(params, batch, rng):
    """Its gradient is the sum of a worker's examples, whatever the parameters are."""
    return jnp.sum(params * jnp.sum(batch, axis=0))


def simulated(votes, **how):
    tx = reference.optimizer(votes, RATE, 0.0)
    run = simulate.start(tx, jnp.zeros(256), WORKERS, late=True)
    return simulate.step(pulled, tx, run, GRADS[0][:, None], harm=simulate.Harm(**how))[0]


def test_a_simulated_step_hands_over_who_is_late():
    vote = LATE["vote"]
    whole, late, gone = simulated(vote), simulated(vote, late=SOME), simulated(vote, absent=SOME)
    assert same(late.params, gone.params) and not same(late.params, whole.params)
    assert same(late.opt_state.mu, whole.opt_state.mu)


# --- Replicas that go wrong


def damaged(x, device, at=0, flip=1 << 30):
    """The array, labelled as before, with one bit flipped of what one device holds."""
    parts = []
    for shard in x.addressable_shards:
        part = np.array(shard.data)
        if shard.device.id == device:
            part.reshape(-1).view(np.uint32)[at] ^= flip
        parts.append(jax.device_put(part, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


def assert_copies(found, wanted):
    assert found.sharding == wanted.sharding
    for got, want in zip(found.addressable_shards, wanted.addressable_shards, strict=True):
        np.testing.assert_array_equal(got.data, want.data)


DTYPES = "bfloat16", "bool", "complex64", "float16", "float32", "int8", "uint8"


@pytest.mark.parametrize(
    ("sizes", "kind", "spec", "axis"),
    [
        ("data=8", AxisType.Auto, P(), AXIS),
        ("data=4 tp=2", AxisType.Explicit, P(None, "tp"), AXIS),
        ("pod=2 data=4", AxisType.Auto, P(), ("pod", AXIS)),
    ],
)
def test_a_flipped_bit_is_named_and_healed(sizes, kind, spec, axis):
    mesh = mesh_on(sizes, kind)
    lies = {"own": P(AXIS), "w": spec}
    bits = np.random.default_rng(0).integers(0, 2, 64)
    whole = {k: bits.astype(jnp.dtype(k)) for k in DTYPES} | {
        "own": normal(8, 2),
        "w": normal(3, 8),
    }
    whole = {k: jax.device_put(x, NamedSharding(mesh, lies.get(k, P()))) for k, x in whole.items()}
    # What is a worker's own may differ.
    state = {k: damaged(x, 3, flip=1) for k, x in whole.items()}
    state["w"] = damaged(whole["w"], 5, at=1)
    key = jax.device_put(jax.random.key(7), NamedSharding(mesh, P()))
    whole["key"] = jax.random.key_data(key)
    state["key"] = jax.random.wrap_key_data(damaged(whole["key"], 0))
    replicas = faults.Replicas(lc.Workers(mesh, axis), every=2)
    assert replicas(state) is state and not replicas.found, "the first call of two compares nothing"
    with pytest.warns(faults.ReplicaHealed, match="has the majority's copy now") as warned:
        healed = replicas(state)
    inner = mesh.shape.get("tp", 1)
    wrong = [(f"['{k}']", 3 // inner, 3) for k in DTYPES]
    found = [(d.leaf, d.worker, d.device) for d in replicas.found]
    assert found == sorted([*wrong, ("['key']", 0, 0), ("['w']", 5 // inner, 5)])
    assert f"['w'] on worker {5 // inner} (device 5) after step 2" in str(warned[-1].message)
    healed["key"] = jax.random.key_data(healed["key"])
    for name in whole.keys() - {"own"}:
        assert_copies(healed[name], whole[name])
    replicas.check(healed)
    assert len(replicas.found) == len(found)
    told = r"a replica is wrong: .* on worker .* and heal=False.*checkpoint of before"
    with pytest.raises(faults.ReplicasDiffer, match=told):
        faults.Replicas(lc.Workers(mesh, axis), every=1, heal=False)(state)


def test_without_a_majority_the_run_stops(mesh_of):
    x = jax.device_put(np.ones(4, np.float32), NamedSharding(mesh_of(2), P()))
    replicas = faults.Replicas(lc.Workers(mesh_of(2), AXIS), every=1)
    said = (
        r"which is right: after step 1 \['x'\] is the same on the workers of each list of \[\[0\], \[1\]\]"
        r"\. .*go back to a state or a checkpoint of before"
    )
    with pytest.raises(faults.ReplicasDiffer, match=said):
        replicas({"x": damaged(x, 1)})
    assert replicas.found == []


def test_a_run_whose_replica_is_healed_at_once_ends_as_an_unbroken_one(mesh_of):
    """And what comes back lies as what went in, so that nothing is compiled anew."""
    workers = lc.Workers(mesh_of(WORKERS), AXIS)
    tx = lc.lion_cub(RATE, workers=workers)
    step, ends = lc.make_train_step(pulled, tx, workers), []
    replicas = faults.Replicas(workers, every=1)
    for broken in (False, True):
        state = lc.init_state(tx, jnp.zeros(256), workers)
        for t, batch in enumerate(GRADS):
            if broken and t == 1:
                state = state._replace(params=damaged(state.params, 6))
                with pytest.warns(faults.ReplicaHealed, match=".params on worker 6"):
                    state = replicas(state)
            state, _ = step(replicas(state), batch)
        ends.append(state)
    assert [d.step for d in replicas.found] == [1] and step.traces == 1
    assert_copies(ends[1].params, ends[0].params)
    assert_copies(ends[1].opt_state[0].mu, ends[0].opt_state[0].mu)


# --- Bad input


def test_what_cannot_be_is_refused(mesh_of):
    four = lc.Workers(mesh_of(4), AXIS)

    def lies(who):
        tx = faults.liars(faults.sign_flip, who, workers=AXIS)
        return jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name=AXIS)(jnp.ones((8, 2)))

    for said, call in [
        ("who=[8]: there are 8 workers, 0 to 7", lambda: lies([8])),
        ("who=[-1]: there are 8 workers", lambda: lies([-1])),
        ("trim=4 leaves nobody of 8 workers: so many are left out on each side; give at most 3",
         lambda: means.trimmed(jnp.ones((8, 1)), jnp.ones((8, 1), bool), 4)),
        ("every=0", lambda: faults.Replicas(four, every=0)),
        ("compares workers, and there is one",
         lambda: faults.Replicas(lc.Workers(mesh_of(1), AXIS))),
        ("['w'] is not on the mesh of the workers",
         lambda: faults.Replicas(four).check({"w": jnp.ones(3)})),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(said)):
            call()
