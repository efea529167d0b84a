"""Workers that lie, replicas that go wrong, votes that are missing: what is found, healed and survived."""

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
