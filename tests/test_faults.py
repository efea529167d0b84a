"""Workers that lie, replicas that go wrong, votes that are missing: what is found, healed and survived."""

import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax import elastic, faults, reference
from lioncub_jax.reference import baselines as reference_baselines
from lioncub_jax.reference import simulate

WORKERS, STEPS, RATE = 8, 5, 2.0**-4
SHAPES = {"matrix": (5, 27), "row": (129,), "scalar": ()}


def zeros():
    return {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def pulled(params, batch, rng):
    """Its gradient is the sum of a worker's examples, whatever the parameters are."""
    parts = jax.tree.map(lambda p, x: jnp.sum(p * jnp.sum(x, axis=0)), params, batch)
    return sum(jax.tree.leaves(parts))


def batches(seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(STEPS):
        yield {
            n: rng.integers(-2, 3, (2 * WORKERS, *s)).astype(np.float32) for n, s in SHAPES.items()
        }


def by_worker(batch):
    return jax.tree.map(lambda x: jnp.asarray(x).reshape(WORKERS, -1, *x.shape[1:]), batch)


def simulated(votes, tamper=None, absent=None):
    run = simulate.start(reference.optimizer(votes, RATE, 0.0), zeros(), WORKERS)
    step = jax.jit(
        lambda run, batch, absent: simulate.step(
            pulled, reference.optimizer(votes, RATE, 0.0), run, batch, tamper=tamper, absent=absent
        )
    )
    for t, batch in enumerate(batches()):
        run, _ = step(run, by_worker(batch), None if absent is None else absent[t])
    return run


def on_devices(tx, mesh):
    state = lc.init_state(tx, zeros(), mesh, axis_name=AXIS)
    step = lc.make_train_step(pulled, tx, mesh, axis_name=AXIS)
    for batch in batches():
        state, _ = step(state, batch)
    return state


def same(a, b):
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool(np.array_equal(x, y)), a, b)))


# --- Workers that lie

HALF = {"b1": 0.5, "b2": 0.5, "weight_decay": 0.0, "axis_name": AXIS}
VOTE = lc.lion_cub(RATE, **HALF), reference.local_momentum(0.5, 0.5)
MEDIAN = (
    lc.owner_lion(RATE, **HALF, quantizer=lc.quantize.midrise(3), trim=3),
    reference.momentum_at_owner(0.5, 0.5, codes=reference.midrise(3), trim=3),
)
BOUNDED = (
    lc.owner_lion(RATE, **HALF),
    reference.momentum_at_owner(0.5, 0.5, feedback=jnp.bfloat16),
)
ATTACKS = {
    "flip": faults.sign_flip(),
    "random": faults.random_votes(),
    "loud": faults.scaled(-(2.0**20)),
    "NaN": faults.not_finite(),
    "leaf": faults.collusion(),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("method", [VOTE, MEDIAN, BOUNDED], ids=["vote", "median", "owner"])
def test_liars_on_devices_do_what_simulated_ones_do(mesh_of, method, attack):
    tx, votes = method
    who = [1, 4, 6]
    chain = optax.chain(faults.liars(ATTACKS[attack], who, axis_name=AXIS, seed=3), tx)
    state = on_devices(chain, mesh_of(WORKERS))
    run = simulated(votes, faults.tampered(ATTACKS[attack], who, seed=3))
    assert same(state.params, run.params)
    assert not same(run.params, simulated(votes).params), "nobody lied"


def test_a_loud_liar_changes_nothing_for_votes_but_everything_for_a_mean():
    """Votes are signs: 1e6 times a gradient votes as the gradient does."""
    vote, exact = VOTE[1], reference.momentum_at_owner(0.5, 0.5, codes=reference.dense())
    loud = faults.tampered(faults.scaled(2.0**20), 1)
    assert same(simulated(vote, loud).params, simulated(vote).params)
    assert not same(simulated(exact, loud).params, simulated(exact).params)


def test_turned_rows_are_bounded_only_if_asked_for(mesh_of):
    def ended(**how):
        loud = faults.liars(faults.scaled(-(2.0**10)), [0], axis_name=AXIS)
        tx = lc.owner_lion(RATE, **HALF, quantizer=lc.quantize.rotated_sign(), **how)
        return on_devices(optax.chain(loud, tx), mesh_of(WORKERS)).params

    assert same(ended(), ended(dominance=jnp.inf))
    assert not same(ended(), ended(dominance=2.0))


def test_a_liar_that_sends_nan_is_as_one_that_is_not_there():
    absent = jnp.broadcast_to(jnp.arange(WORKERS) == 2, (STEPS, WORKERS))
    for _, votes in (VOTE, MEDIAN):
        lied = simulated(votes, faults.tampered(faults.not_finite(), [2]))
        missed = simulated(votes, absent=absent)
        assert same(lied.params, missed.params)
        assert int(lied.opt_state.abstentions) == int(missed.opt_state.abstentions) == STEPS


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_median_stays_within_what_honest_workers_sent(attack):
    """Whatever 3 of 8 send: each element of the mean is between two honest values of it."""
    rng = np.random.default_rng(1)
    grads = {"w": jnp.asarray(rng.normal(size=(WORKERS, 300)).astype(np.float32))}
    lied = faults.tampered(ATTACKS[attack], 3)(grads, 0)
    votes = reference.momentum_at_owner(0.0, 0.0, codes=reference.dense(), trim=3)
    state = votes.init({"w": jnp.zeros(300)}, WORKERS)
    mean = np.asarray(votes.update(lied, state)[1].mu).reshape(-1)[:300]
    honest = np.asarray(grads["w"])[3:]
    assert (honest.min(0) <= mean).all() and (mean <= honest.max(0)).all()
    assert not np.allclose(mean, honest.mean(0))


@pytest.mark.parametrize("how", [{"trim": 2}, {}, {"dominance": 1.0}], ids=["trim", "2", "1"])
def test_permuting_liars_and_honest_workers_changes_nothing(how):
    """Of whole rows: padding is zeros, whose codes go by the number of a worker."""
    grads = normal((WORKERS, 256))
    order = np.random.default_rng(2).permutation(WORKERS)
    lied = faults.tampered(faults.scaled(-1e6), 2)(grads, 0)
    np.testing.assert_array_equal(mean_of(lied, **how), mean_of(lied[order], **how))


def normal(shape, seed=2):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def mean_of(grads, **how):
    """What the owner takes for the mean gradient, ``[rows, 128]``."""
    votes = reference.momentum_at_owner(0.0, 0.0, codes=reference.midrise(3), **how)
    state = votes.init(jnp.zeros(grads.shape[1:]), WORKERS)
    return np.asarray(votes.update(grads, state)[1].mu)


def test_how_loud_a_liar_is_does_not_matter():
    """Times a power of two, by which codes stay: all from 2**10 on do the same."""
    grads = normal((WORKERS, 256))
    means = [mean_of(grads.at[3].multiply(-(2.0**power))) for power in (10, 20, 60)]
    np.testing.assert_array_equal(means[0], means[1])
    np.testing.assert_array_equal(means[0], means[2])
    assert (means[0] != mean_of(grads)).any()


Q = lc.quantize


@pytest.mark.parametrize(
    "codes", [Q.midrise(3), Q.levels(4), Q.rotated(Q.midrise(1))], ids=lambda q: q.name
)
@pytest.mark.parametrize("bound", [2.0, np.inf])
def test_under_a_bound_an_error_waits_for_a_gradient(mesh_of, codes, bound):
    tx = lc.communicate(
        axis_name=AXIS, memory=lc.momentum.nothing(), up=Q.error_feedback(codes, jnp.float32),
        owner=lc.decide.momentum_at_owner(optax.identity(), dominance=bound), down=lc.decide.floats(),
    )  # fmt: skip
    workers = lc.Workers(mesh_of(WORKERS), AXIS)
    on_mesh, params = lc.on_mesh(tx, workers), {"w": jnp.zeros((2, 128))}
    update = jax.jit(on_mesh.update)
    drawn = np.random.default_rng(0).normal(size=(WORKERS, 2, 128)).astype(np.float32)
    state = on_mesh.init(params)
    _, state = update({"w": jnp.asarray(drawn)}, state, params)
    drawn[:, 1] = 0  # on the second row nobody has one
    owed = np.asarray(state.error["w"])
    updates, state = update({"w": jnp.asarray(drawn)}, state, params)
    assert np.asarray(updates["w"][0]).any() and owed[:, 1].any()
    waits = not np.asarray(updates["w"][1]).any()
    assert waits == (bound < np.inf)
    assert np.array_equal(np.asarray(state.error["w"])[:, 1], owed[:, 1]) == waits


class Heard:
    """What an owner is handed; keeps which bound it is asked for."""

    present = jnp.int32(1)

    def mean(self, where, dominance, trim=0):
        self.dominance = dominance
        return jnp.ones((where.chunks * where.rows, 128))


@pytest.mark.parametrize(
    ("workers", "given", "wanted"),
    [
        (2, None, 2.0),
        (8, None, 2.0),
        (16, None, 4.0),
        (256, None, 64.0),
        (64, 3.0, 3.0),
        (64, np.inf, None),
    ],
)
def test_by_default_a_step_may_be_a_quarter_of_the_workers_times_the_median(workers, given, wanted):
    owner, heard = lc.decide.momentum_at_owner(optax.identity(), dominance=given), Heard()
    place = lc.decide.Slice(1, 1, workers, lc.quantize.midrise(3), jnp.float32, None)
    owner.decide(heard, place, owner.init(jnp.ones((1, 128))))
    assert heard.dominance == wanted


@pytest.mark.parametrize("dominance", [1.0, 4.0])
@pytest.mark.parametrize("factor", [-1e6, 1e-6], ids=["loud", "silent"])
@pytest.mark.parametrize("liars", [1, 2, 3])
def test_a_minority_neither_outshouts_nor_silences_the_others(liars, factor, dominance):
    """Every value is within ``dominance`` times the largest honest step, and the honest are heard."""
    grads = normal((WORKERS, 256))
    lied = faults.tampered(faults.scaled(factor), liars)(grads, 0)
    mean = np.abs(mean_of(lied, dominance=dominance))[:2]
    steps = (
        reference.midrise(3)
        .encode(grads.reshape(WORKERS, 2, 128), reference.buffer_of([(256,)], 1), 0)
        .step[liars:, :, 0]
    )
    most = dominance * np.max(steps, axis=0) * 7 / 2
    assert (mean <= most[:, None]).all()
    assert (mean.mean(1) > np.min(steps, axis=0) / 8).all()


def test_a_row_that_one_worker_sees_still_trains():
    """Errors of the others, which saw it before, wait: sent, they would be its median."""
    votes = reference.momentum_at_owner(0.9, 0.99, feedback=jnp.bfloat16)
    state = votes.init(jnp.zeros((2, 128)), WORKERS)
    update, signs = jax.jit(votes.update), np.where(np.arange(128) % 2, 1.0, -1.0)
    for _ in range(4):
        _, state = update(normal((WORKERS, 2, 128)), state)
    before = np.asarray(state.error[:5, 1])
    for _ in range(40):
        grads = normal((WORKERS, 2, 128)).at[:, 1].set(0).at[5, 1].set(signs)
        updates, state = update(grads, state)
    np.testing.assert_array_equal(updates[1], signs)
    np.testing.assert_array_equal(state.error[:5, 1], before)
    assert before.any()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: faults.scaled(0), "give a finite factor, such as 1e6"),
        (lambda: faults.scaled(np.inf), "give a finite factor"),
        (lambda: faults.liars(faults.sign_flip(), [1, 1], axis_name=AXIS), "each once"),
        (lambda: faults.liars(faults.sign_flip(), -1, axis_name=AXIS), "who=-1: give how many"),
        (lambda: faults.tampered(faults.sign_flip(), True), "who=True: give how many"),
        (lambda: faults.tampered(faults.sign_flip(), 9)(jnp.ones((8, 2)), 0),
         "worker 8 cannot lie: there are 8 workers, 0 to 7"),
        (lambda: faults.collusion(5).gradients([jnp.ones(2)], jax.random.key(0)),
         "collusion(leaf=5): there are leaves 0 to 0"),
        (lambda: lc.owner_lion(1.0, axis_name=AXIS, trim=-1), "trim=-1: the number of workers"),
        (lambda: lc.owner_lion(1.0, axis_name=AXIS, trim=1.5), "trim=1.5: the number of workers"),
        (lambda: lc.owner_lion(1.0, axis_name=AXIS, trim=1, quantizer=lc.quantize.dense(),
                               wire=lc.wires.all_reduce()),
         "momentum at the owner, trim 1 sorts what each worker sent, and the all-reduce wire only adds"),
    ],
)  # fmt: skip
def test_liars_and_trims_that_cannot_be(make, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        make()


def test_an_attack_is_asked_for():
    with pytest.raises(TypeError, match="attack"):
        faults.liars("flip", 1, axis_name=AXIS)


def test_a_trim_that_leaves_nobody_is_an_error(mesh_of):
    tx = lc.owner_lion(RATE, axis_name=AXIS, trim=4)
    with pytest.raises(
        ValueError,
        match="trim=4 leaves nobody of 8 workers: so many are left out on each side; give at most 3",
    ):
        on_devices(tx, mesh_of(WORKERS))


def test_a_trim_that_is_injected_is_an_error(mesh_of):
    injected = optax.inject_hyperparams(lc.owner_lion, static_args=("axis_name",))
    with pytest.raises(ValueError, match="trim is an array here, as optax"):
        on_devices(injected(RATE, axis_name=AXIS, trim=2), mesh_of(WORKERS))


# --- Votes that are late

LATE = {
    "vote": reference.local_momentum(0.5, 0.5),
    "int8": reference.local_momentum(
        0.5, 0.5, codes=reference.integer(8), decide=reference.average
    ),
    "owner": reference.momentum_at_owner(0.5, 0.5, feedback=jnp.bfloat16),
    "median": reference.momentum_at_owner(0.5, 0.5, feedback=jnp.bfloat16, trim=3),
}
NOBODY, EVERYBODY = jnp.zeros(WORKERS, bool), jnp.ones(WORKERS, bool)
SOME = jnp.arange(WORKERS) % 3 == 1


def whole_rows(seed):
    """Gradients of whole rows: no padding, and no zero whose code goes by the number of a worker."""
    rng = np.random.default_rng(seed)
    return {"w": jnp.asarray(rng.normal(size=(WORKERS, 256)).astype(np.float32))}


@functools.cache
def compiled(votes, decay):
    """Of one set of arguments, so that one program serves all tests of a method."""
    tx = reference.optimizer(votes, RATE, decay)
    return tx.init, jax.jit(lambda g, state, params, absent, late: tx.update(
        g, state, params, absent, late=late
    ))  # fmt: skip


def run_late(votes, grads, lates, absents=None, decay=0.5):
    """Parameters and states after each step of these gradients."""
    init, update = compiled(votes, decay)
    params = {"w": jnp.ones(256)}
    state, found = init(params, WORKERS, late=True), []
    for g, late, absent in zip(grads, lates, absents or [NOBODY] * len(lates), strict=True):
        updates, state = update(g, state, params, absent, late)
        params = optax.apply_updates(params, updates)
        found.append((params, state))
    return found


@pytest.mark.parametrize("method", LATE)
def test_with_nobody_late_a_step_is_as_ever(method):
    grads, tx = [whole_rows(t) for t in range(3)], reference.optimizer(LATE[method], RATE, 0.5)
    params = {"w": jnp.ones(256)}
    state, update = tx.init(params, WORKERS), jax.jit(tx.update)
    for g, (same_params, same_state) in zip(
        grads, run_late(LATE[method], grads, [NOBODY] * 3), strict=True
    ):
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
        assert same(params, same_params) and same(state, same_state._replace(missed=None))
        assert not same_state.missed.here.any()


@pytest.mark.parametrize("method", LATE)
def test_a_late_message_counts_in_the_next_step_and_not_before(method):
    first, second = whole_rows(0), whole_rows(1)
    other = {"w": jnp.where(SOME[:, None], -first["w"], first["w"])}
    one, two = (
        run_late(LATE[method], [g, second, second], [SOME, NOBODY, NOBODY]) for g in (first, other)
    )
    gone = run_late(LATE[method], [first], [NOBODY], absents=[SOME])
    assert same(one[0][0], two[0][0]) and same(one[0][0], gone[0][0]), "not in that step"
    assert not same(one[1][0], two[1][0]), "in the next"
    assert not one[1][1].missed.here.any(), "and once"


@pytest.mark.parametrize("method", LATE)
def test_a_late_workers_own_state_moves_as_if_it_were_on_time(method):
    grads = [whole_rows(0)]
    (late,), (on_time,) = (run_late(LATE[method], grads, [who]) for who in (SOME, NOBODY))
    (gone,) = run_late(LATE[method], grads, [NOBODY], absents=[SOME])
    for name in ("error",) if method in ("owner", "median") else ("mu",):
        kept = [getattr(state, name) for _, state in (late, on_time, gone)]
        assert same(kept[0], kept[1]) and not same(kept[0], kept[2])
    assert int(late[1].abstained) == 0 and int(gone[1].abstained) == int(SOME.sum())


@pytest.mark.parametrize("method", LATE)
def test_the_number_of_a_worker_says_nothing_late_or_not(method):
    order = np.random.default_rng(3).permutation(WORKERS)
    grads, lates = [whole_rows(t) for t in range(3)], [SOME, ~SOME, SOME]
    moved = [{"w": g["w"][order]} for g in grads], [late[order] for late in lates]
    one, two = (run_late(LATE[method], *each)[-1][0]["w"] for each in ((grads, lates), moved))
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("method", LATE)
def test_where_all_are_late_only_weights_decay(method):
    late = run_late(LATE[method], [whole_rows(0), whole_rows(1)], [EVERYBODY, EVERYBODY])
    kept = np.full(256, 1 - RATE * 0.5, np.float32)
    np.testing.assert_array_equal(late[0][0]["w"], kept)
    assert (np.asarray(late[1][0]["w"]) != kept * kept).any(), "then those of before count"


def test_a_step_counts_its_own_votes_and_those_of_before():
    """By hand: +1 of 5 late ones in one step, then -1 of all 8, of which 6 are late: 5 against 2."""
    grads = [{"w": jnp.full((WORKERS, 256), x)} for x in (1.0, -4.0, -4.0)]
    lates = [jnp.arange(WORKERS) < 5, jnp.arange(WORKERS) < 6, NOBODY]
    votes = reference.local_momentum(0.5, 0.5, decide=reference.average)
    means = run_late(votes, grads, lates, decay=0.0)
    steps = -np.diff([1.0, *(float(params["w"][0]) for params, _ in means)]) / RATE
    np.testing.assert_allclose(steps, [1.0, (5 - 2) / 7, -1.0], rtol=1e-6)


def test_ternary_votes_that_are_late_are_more_than_all():
    """Mid-tread codes: all 8 vote, zero if late, and 8 late ones too."""
    votes = reference.local_momentum(0, 0, codes=reference.ternary(), decide=reference.average)
    grads = [{"w": jnp.full((WORKERS, 256), x)} for x in (1.0, -1.0, -1.0)]
    means = run_late(votes, grads, [EVERYBODY, SOME, NOBODY], decay=0.0)
    steps = -np.diff([1.0, *(float(params["w"][0]) for params, _ in means)]) / RATE
    late = int(SOME.sum())
    np.testing.assert_allclose(steps, [0, (8 - (8 - late)) / 16, -1.0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("method", LATE)
def test_who_is_absent_or_has_no_number_has_nothing_to_send_late(method):
    bad = {"w": whole_rows(0)["w"].at[1].set(jnp.nan)}
    grads = [whole_rows(0), bad, whole_rows(2)]
    (_, absent), (_, strange), _ = run_late(
        LATE[method], grads, [SOME, SOME, NOBODY], absents=[SOME, NOBODY, NOBODY]
    )
    assert not absent.missed.here.any()
    here = np.asarray(strange.missed.here).any(axis=(1, 2))
    assert here.tolist() == (SOME & (jnp.arange(WORKERS) != 1)).tolist()


def test_a_simulated_step_hands_over_who_is_late():
    tx = reference.optimizer(LATE["vote"], RATE, 0.0)
    (batch, *_) = map(by_worker, batches())
    run = simulate.start(tx, zeros(), WORKERS, late=True)
    whole, _ = simulate.step(pulled, tx, run, batch)
    late, _ = simulate.step(pulled, tx, run, batch, late=SOME)
    gone, _ = simulate.step(pulled, tx, run, batch, absent=SOME)
    assert same(late.params, gone.params) and not same(late.params, whole.params)
    assert same(late.opt_state.mu, whole.opt_state.mu)


@pytest.mark.parametrize(
    ("late", "said"),
    [
        (jnp.zeros(WORKERS - 1, bool), "late is bool[7]: give bool[8]"),
        (jnp.zeros((WORKERS, 1), bool), "late is bool[8, 1]: give bool[8]"),
        (True, "late is bool[]: give bool[8]"),
        (jnp.zeros(WORKERS), "late is float32[8]: give bool[8], True for each worker that is late"),
    ],
)
def test_a_mask_that_says_not_who_is_late_is_an_error(late, said):
    tx = reference.optimizer(LATE["vote"], RATE)
    run = simulate.start(tx, zeros(), WORKERS, late=True)
    with pytest.raises(ValueError, match=re.escape(said)):
        simulate.step(pulled, tx, run, by_worker(next(batches())), late=late)


@pytest.mark.parametrize("method", LATE)
def test_a_run_that_has_no_room_for_late_messages_says_so(method):
    tx = reference.optimizer(LATE[method], RATE)
    run = simulate.start(tx, zeros(), WORKERS)
    with pytest.raises(ValueError, match="no room for what misses a step; start with late=True"):
        simulate.step(pulled, tx, run, by_worker(next(batches())), late=NOBODY)


def test_methods_without_a_rule_for_late_messages_say_so():
    tx = reference_baselines.averaged(optax.sgd(RATE))
    said = "late: this method has no rule for a message that misses its step; give local_momentum"
    with pytest.raises(ValueError, match=said):
        simulate.start(tx, zeros(), WORKERS, late=True)
    with pytest.raises(ValueError, match=said):
        run = simulate.start(tx, zeros(), WORKERS)
        simulate.step(pulled, tx, run, by_worker(next(batches())), late=NOBODY)
    turned = reference.momentum_at_owner(codes=reference.rotated(reference.midrise(1)))
    with pytest.raises(ValueError, match="late=True: codes are rotated anew in each step"):
        simulate.start(turned, zeros(), WORKERS, late=True)


# --- Replicas that go wrong


def damaged(x, device, at=0, flip=1 << 30):
    """The array, labelled as before, with one bit flipped of what one device holds."""
    parts = []
    for shard in sorted(x.addressable_shards, key=lambda s: s.device.id):
        part = np.array(shard.data)
        if shard.device.id == device:
            words = part.reshape(-1).view(np.uint32)
            words[at] ^= flip
        parts.append(jax.device_put(part, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


def copies_of(x):
    return [np.asarray(shard.data) for shard in x.addressable_shards]


KINDS = {
    "data": ((8,), (AXIS,), P(), AXIS),
    "tensor": ((4, 2), (AXIS, "tp"), P(None, "tp"), AXIS),
    "pods": ((2, 4), ("pod", AXIS), P(), ("pod", AXIS)),
}


@pytest.mark.parametrize("auto", [True, False], ids=["auto", "explicit"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_named_and_healed(kind, auto):
    shape, names, spec, axis = KINDS[kind]
    types = (AxisType.Auto if auto else AxisType.Explicit,) * len(shape)
    mesh = jax.make_mesh(shape, names, axis_types=types)
    w = jax.device_put(np.arange(24, dtype=np.float32).reshape(3, 8), NamedSharding(mesh, spec))
    b = jax.device_put(np.arange(4, dtype=np.int32), NamedSharding(mesh, P()))
    key = jax.device_put(jax.random.key(1), NamedSharding(mesh, P()))
    state = {"b": damaged(b, 3, at=2), "key": key, "w": damaged(w, 5, at=1)}
    replicas = faults.Replicas(mesh, axis_name=axis, every=2)
    assert replicas(state) is state and not replicas.found, "the first call of two compares nothing"
    with pytest.warns(faults.ReplicaHealed, match="has the majority's copy now") as warned:
        healed = replicas(state)
    inner = 2 if kind == "tensor" else 1
    assert [(d.leaf, d.worker, d.device) for d in replicas.found] == [
        ("['b']", 3 // inner, 3), ("['w']", 5 // inner, 5),
    ]  # fmt: skip
    assert f"['w'] on worker {5 // inner} (device 5) after step 2" in str(warned[1].message)
    for name, want in {"b": b, "w": w}.items():
        for got, right in zip(copies_of(healed[name]), copies_of(want), strict=True):
            np.testing.assert_array_equal(got, right)
        assert healed[name].sharding == want.sharding
    assert replicas.check(healed) is not None and len(replicas.found) == 2


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "int8", "uint8", "bool", "float32", "complex64"]
)
def test_every_dtype_is_healed_to_the_bit(mesh_of, dtype):
    mesh = mesh_of(4)
    x = np.random.default_rng(0).integers(0, 2, 64).astype(jnp.dtype(dtype))
    x = jax.device_put(x, NamedSharding(mesh, P()))
    replicas = faults.Replicas(mesh, axis_name=AXIS, every=1)
    with pytest.warns(faults.ReplicaHealed):
        healed = replicas({"x": damaged(x, 2, flip=1)})
    assert all(
        np.array_equal(a, b) for a, b in zip(copies_of(healed["x"]), copies_of(x), strict=True)
    )


def test_a_key_is_healed(mesh_of):
    mesh = mesh_of(4)
    key = jax.device_put(jax.random.key(7), NamedSharding(mesh, P()))
    words = damaged(jax.random.key_data(key), 1, flip=1)
    state = {"rng": jax.random.wrap_key_data(words)}
    with pytest.warns(faults.ReplicaHealed, match=re.escape("['rng'] on worker 1")):
        healed = faults.Replicas(mesh, axis_name=AXIS, every=1)(state)
    assert all(
        np.array_equal(copy, np.array([0, 7]))
        for copy in copies_of(jax.random.key_data(healed["rng"]))
    )


PROCESS = """
import warnings
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize()
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import lioncub_jax as lc

mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
whole = NamedSharding(mesh, P())
parts = []
for device in jax.local_devices():
    part = np.arange(6, dtype=np.float32)
    part[4] += device == mesh.devices[2]
    parts.append(jax.device_put(part, device))
x = jax.make_array_from_single_device_arrays((6,), whole, parts)
replicas = lc.faults.Replicas(mesh, axis_name="data", every=1)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    healed = replicas({"x": x})["x"]
held = [np.asarray(shard.data).tolist() for shard in healed.addressable_shards]
print("found", [(d.leaf, d.worker) for d in replicas.found], held == [[0, 1, 2, 3, 4, 5]] * 2)
"""


def test_a_replica_in_another_process_is_healed(tmp_path):
    """Both processes learn who was wrong, and the one that was has the others' copy."""
    lines = []
    outcome = elastic.keep([sys.executable, "-c", PROCESS], 2, strikes=1, write=lines.append)
    assert outcome.exit_code == 0, lines
    said = sorted(line for line in lines if "| found" in line)
    assert said == [f"{i} | found [(\"['x']\", 2)] True" for i in range(2)]


def test_without_a_majority_the_run_stops(mesh_of):
    mesh = mesh_of(2)
    x = jax.device_put(np.ones(4, np.float32), NamedSharding(mesh, P()))
    replicas = faults.Replicas(mesh, axis_name=AXIS, every=1)
    said = "which is right: after step 1 ['x'] has one value on worker 0; another on worker 1."
    with pytest.raises(faults.ReplicasDiffer, match=re.escape(said)) as raised:
        replicas({"x": damaged(x, 1)})
    assert "go back to a checkpoint of before" in str(raised.value)
    assert replicas.found == []


def test_what_is_each_workers_own_is_not_compared(mesh_of):
    mesh = mesh_of(4)
    own = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P(AXIS)))
    replicas = faults.Replicas(mesh, axis_name=AXIS, every=1)
    replicas({"mu": damaged(own, 1)})
    assert replicas.found == []


@pytest.mark.parametrize("method", ["vote", "owner"])
def test_a_run_whose_replica_is_healed_at_once_ends_as_an_unbroken_one(mesh_of, method):
    mesh, tx = mesh_of(WORKERS), {"vote": VOTE, "owner": MEDIAN}[method][0]
    whole = on_devices(tx, mesh)
    state = lc.init_state(tx, zeros(), mesh, axis_name=AXIS)
    step = lc.make_train_step(pulled, tx, mesh, axis_name=AXIS)
    replicas = faults.Replicas(mesh, axis_name=AXIS, every=1)
    for t, batch in enumerate(batches()):
        if t == 3:
            state = state._replace(params=state.params | {"row": damaged(state.params["row"], 6)})
            with pytest.warns(faults.ReplicaHealed, match=re.escape(".params['row'] on worker 6")):
                state = replicas(state)
        state, _ = step(replicas(state), batch)
    assert [d.step for d in replicas.found] == [3]
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
        if not jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
            assert all(
                np.array_equal(a, b) for a, b in zip(copies_of(got), copies_of(want), strict=True)
            )


def test_a_run_that_goes_back_to_a_snapshot_ends_as_an_unbroken_one(mesh_of, tmp_path):
    """With K steps between compares: the wrong votes since the last one are undone, not healed."""
    mesh, tx, every = mesh_of(WORKERS), VOTE[0], 2
    whole = on_devices(tx, mesh)
    state = lc.init_state(tx, zeros(), mesh, axis_name=AXIS)
    step = lc.make_train_step(pulled, tx, mesh, axis_name=AXIS)
    replicas = faults.Replicas(mesh, axis_name=AXIS, every=every, heal=False)
    given, flipped, done = list(batches()), False, []
    with (
        lc.Checkpoints(tmp_path / "disk", axis_name=AXIS) as saved,
        lc.checkpoint.Snapshots(saved, tmp_path / "memory", every=every) as snapshots,
    ):
        snapshots.save(state)
        while int(state.step) < len(given):
            if int(state.step) == every + 1 and not flipped:
                flipped = True
                state = state._replace(
                    params=state.params | {"row": damaged(state.params["row"], 6)}
                )
            state, _ = step(state, given[int(state.step)])
            done.append(int(state.step))
            try:
                snapshots(replicas(state))
            except faults.ReplicasDiffer as wrong:
                found = str(wrong)
                state = snapshots.restore(state).state
    assert re.search(
        r"a replica is wrong: \.params\['row'\] on worker 6 .* and heal=False.*state of before",
        found,
    )
    assert done[: 2 * every + 1] == [1, 2, 3, 4, 3]  # at most K steps again
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
        if not jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(got, want)


def test_a_bit_of_an_owners_momentum_changes_its_coordinate_alone_and_no_replica(mesh_of):
    """All get the same reply, so nothing differs; and a sign bounds what it does."""
    mesh, tx = mesh_of(WORKERS), lc.owner_lion(RATE, axis_name=AXIS)
    state = lc.init_state(tx, zeros(), mesh, axis_name=AXIS)
    step = lc.make_train_step(pulled, tx, mesh, axis_name=AXIS)
    whole, given = on_devices(tx, mesh), list(batches())
    replicas = faults.Replicas(mesh, axis_name=AXIS, every=1)
    for t, batch in enumerate(given):
        if t == 1:
            path, mu = next(
                (path, x)
                for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state)
                if "owner" in jax.tree_util.keystr(path) and x.ndim > 1
            )
            bad = damaged(
                mu, 0, flip=1 << 31
            )  # the sign of the first coordinate of the first slice
            leaves, tree = jax.tree_util.tree_flatten_with_path(state.opt_state)
            leaves = [bad if where == path else x for where, x in leaves]
            state = state._replace(opt_state=jax.tree.unflatten(tree, leaves))
        state, _ = step(replicas(state), batch)
    assert replicas.found == []
    apart = 0
    for name, x in state.params.items():
        off = np.abs(np.asarray(x) - np.asarray(whole.params[name]))
        assert off.max(initial=0) <= 2 * RATE * len(given) * (1 + 1e-3)
        apart += int((off > 0).sum())
    assert apart == 1


def test_one_step_compiles_once_with_and_without_a_check(mesh_of):
    """What comes back lies as what went in, so that nothing is compiled anew."""
    mesh = mesh_of(4)
    tx = lc.lion_cub(RATE, axis_name=AXIS)
    state = lc.init_state(tx, zeros(), mesh, axis_name=AXIS)
    step = lc.make_train_step(pulled, tx, mesh, axis_name=AXIS)
    replicas = faults.Replicas(mesh, axis_name=AXIS, every=1)
    for batch in batches():
        state = state._replace(params=state.params | {"row": damaged(state.params["row"], 2)})
        with pytest.warns(faults.ReplicaHealed):
            state, _ = step(replicas(state), batch)
    assert step.traces == 1


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda mesh: faults.Replicas(mesh(4), axis_name=AXIS, every=0), "every=0"),
        (lambda mesh: faults.Replicas(mesh(1), axis_name=AXIS), "compares workers, and there is one"),
        (lambda mesh: faults.Replicas(mesh(4), axis_name=AXIS).check({"w": jnp.ones(3)}),
         "['w'] is not on the mesh of the workers"),
    ],
)  # fmt: skip
def test_replicas_that_cannot_be_compared(mesh_of, make, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        make(mesh_of)


def test_to_heal_or_not_is_said_by_a_bool(mesh_of):
    with pytest.raises(TypeError, match="heal='no': give True to go on, or False to stop"):
        faults.Replicas(mesh_of(4), axis_name=AXIS, heal="no")
