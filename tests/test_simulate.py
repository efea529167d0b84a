"""Simulated workers against eight devices: the same keys, batches and rules, and the same parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS
from study import splits

import lioncub_jax as lc
from lioncub_jax import baselines, reference
from lioncub_jax.reference import baselines as reference_baselines
from lioncub_jax.reference import simulate

WORKERS, STEPS = 8, 6
# Powers of two, and gradients that are small integers: every sum and product is exact.
RATE, DECAY, B1, B2 = 2.0**-4, 0.0, 0.75, 0.5
SHAPES = {"matrix": (5, 27), "scalar": (), "row": (129,)}

EXACT = {
    "1-bit vote": (
        lc.lion_cub(RATE, B1, B2, weight_decay=DECAY, axis_name=AXIS),
        reference.local_momentum(B1, B2),
    ),
    "2-bit vote": (
        lc.lion_cub(RATE, B1, B2, weight_decay=DECAY, axis_name=AXIS, quantizer=lc.quantize.midrise(2)),
        reference.local_momentum(B1, B2, codes=reference.midrise(2)),
    ),
    "ternary": (
        lc.lion_cub(RATE, B1, B2, weight_decay=DECAY, axis_name=AXIS, quantizer=lc.quantize.ternary()),
        reference.local_momentum(B1, B2, codes=reference.ternary()),
    ),
    "owner, dense": (
        lc.owner_lion(RATE, 0.5, 0.5, weight_decay=DECAY, axis_name=AXIS, quantizer=lc.quantize.dense()),
        reference.momentum_at_owner(0.5, 0.5, codes=reference.dense()),
    ),
    "owner, 3 bits": (
        lc.owner_lion(
            RATE, 0.5, 0.5, weight_decay=DECAY, axis_name=AXIS, quantizer=lc.quantize.midrise(3)
        ),
        reference.momentum_at_owner(0.5, 0.5, codes=reference.midrise(3)),
    ),
    "SIGNUM": (
        baselines.signum(RATE, 0.5, axis_name=AXIS),
        reference.local_momentum(0.5, 0.5),
    ),
    "float32 SGD": (
        baselines.sgd(RATE, 0.5, axis_name=AXIS),
        reference_baselines.averaged(optax.trace(0.5)),
    ),
}  # fmt: skip


def zeros():
    return {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def pulled(params, batch, rng):
    """Its gradient is the sum of a worker's examples, whatever the parameters are."""
    parts = jax.tree.map(lambda p, x: jnp.sum(p * jnp.sum(x, axis=0)), params, batch)
    return sum(jax.tree.leaves(parts))


def examples(rng, count):
    return {name: rng.integers(-2, 3, (count, *s)).astype(np.float32) for name, s in SHAPES.items()}


def batches_by_split(rows=4):
    """Batches ``[W * rows, ...]`` of data that each worker has for itself, by classes."""
    rng = np.random.default_rng(0)
    data, labels = examples(rng, 400), rng.integers(0, 10, 400)
    parts = splits.by_class(labels, WORKERS)
    for _ in range(STEPS):
        own = np.concatenate([rng.choice(part, rows) for part in parts])
        yield jax.tree.map(lambda x, own=own: x[own], data)


def by_worker(batch):
    return jax.tree.map(lambda x: jnp.asarray(x).reshape(WORKERS, -1, *x.shape[1:]), batch)


def simulated(simulator, loss, batches, rng=None):
    run = simulate.start(simulator, zeros(), WORKERS, rng)
    step = jax.jit(lambda run, batch: simulate.step(loss, simulator, run, batch))
    losses = []
    for batch in batches:
        run, of_workers = step(run, by_worker(batch))
        losses.append(of_workers)
    return run, np.array(losses)


def on_devices(tx, loss, batches, mesh, rng=None):
    state = lc.init_state(tx, zeros(), mesh, axis_name=AXIS, rng=rng)
    step = lc.make_train_step(loss, tx, mesh, axis_name=AXIS)
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return state, np.array(losses)


def assert_same(got, want):
    assert np.abs(want["row"]).max() > 0
    for name in SHAPES:
        a, b = np.asarray(got[name]), np.asarray(want[name])
        np.testing.assert_array_equal(a, b, err_msg=name)


SLOW = {"ternary", "owner, dense", "SIGNUM"}  # of kinds that others stand for


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[pytest.mark.slow] * (m in SLOW)) for m in EXACT]
)
def test_the_parameters_are_those_of_eight_devices_bit_for_bit(mesh_of, method):
    tx, votes = EXACT[method]
    batches = list(batches_by_split())
    run, losses = simulated(reference.optimizer(votes, RATE, DECAY), pulled, batches)
    state, means = on_devices(tx, pulled, batches, mesh_of(WORKERS))
    assert_same(run.params, state.params)
    assert int(run.step) == int(state.step) == STEPS
    np.testing.assert_allclose(losses.mean(axis=1), means, rtol=1e-5, atol=1e-3)


def test_each_worker_has_the_key_that_its_device_has(mesh_of):
    def noisy(params, batch, rng):
        signs = {n: jax.random.rademacher(rng, s).astype(jnp.float32) for n, s in SHAPES.items()}
        return sum(jnp.sum(params[n] * signs[n]) for n in SHAPES) + 0 * batch["scalar"].sum()

    tx, votes = EXACT["1-bit vote"]
    batches = list(batches_by_split())
    rng = jax.random.key(5)
    run, _ = simulated(reference.optimizer(votes, RATE, DECAY), noisy, batches, rng)
    state, _ = on_devices(tx, noisy, batches, mesh_of(WORKERS), rng)
    assert_same(run.params, state.params)
    other, _ = simulated(reference.optimizer(votes, RATE, DECAY), noisy, batches, jax.random.key(6))
    assert not np.array_equal(other.params["row"], run.params["row"])


def test_a_worker_whose_loss_is_not_finite_sits_the_step_out(mesh_of):
    def poisoned(params, batch, rng):
        return pulled(params, batch, rng) + jnp.where(jnp.any(batch["scalar"] > 50), jnp.inf, 0)

    tx, votes = EXACT["1-bit vote"]
    batches = list(batches_by_split())
    batches[2]["scalar"][5] = 100.0  # the second worker's, of four each
    run, losses = simulated(reference.optimizer(votes, RATE, DECAY), poisoned, batches)
    state, _ = on_devices(tx, poisoned, batches, mesh_of(WORKERS))
    assert np.flatnonzero(~np.isfinite(losses)).tolist() == [2 * WORKERS + 1]
    assert int(run.opt_state.abstentions) == 1
    assert_same(run.params, state.params)


def test_a_step_is_a_pure_function_that_scans():
    votes = EXACT["1-bit vote"][1]
    simulator = reference.optimizer(votes, RATE, DECAY)
    batches = list(batches_by_split())
    one_by_one, losses = simulated(simulator, pulled, batches)

    @jax.jit
    def scanned(run, stacked):
        return jax.lax.scan(lambda r, b: simulate.step(pulled, simulator, r, b), run, stacked)

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *map(by_worker, batches))
    run, scanned_losses = scanned(simulate.start(simulator, zeros(), WORKERS), stacked)
    assert_same(run.params, one_by_one.params)
    np.testing.assert_array_equal(scanned_losses, losses)


@pytest.mark.parametrize("workers", [0, -1, 1.5, True])
def test_fewer_than_one_worker_are_refused(workers):
    with pytest.raises(ValueError, match=r"workers="):
        simulate.start(reference.local_momentum(), zeros(), workers)


def test_leaves_that_cannot_vote_are_refused():
    with pytest.raises(TypeError, match=r"'n'.*int32"):
        simulate.start(reference.local_momentum(), {"n": jnp.arange(3)}, 2)
