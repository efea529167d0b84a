"""Local steps: each worker trains on its own for a while, and what travels is how far it came."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lioncub_jax import reference
from lioncub_jax.reference import baselines as reference_baselines
from lioncub_jax.reference import simulate

WORKERS, H = 4, 3
LOCAL = optax.adamw(2.0**-4)


def params_of(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = {"w": (8, 33), "b": (33,), "out": (33, 2)}
    return {n: jnp.asarray(rng.normal(size=s) / 4, dtype) for n, s in shapes.items()}


def loss(params, batch, rng):
    x = jnp.tanh(batch["x"] @ params["w"] + params["b"]) @ params["out"]
    return jnp.mean((x - batch["y"]) ** 2).astype(jnp.float32)


def batches(count, rows, workers=WORKERS, dtype=np.float32):
    rng = np.random.default_rng(1)
    for _ in range(count):
        x = rng.normal(size=(workers * rows, 8)).astype(dtype)
        yield {"x": x, "y": np.stack([np.sin(x[:, 0]), x[:, 1]], 1).astype(dtype)}


def by_worker(batch, workers=WORKERS):
    return jax.tree.map(lambda x: jnp.asarray(x).reshape(workers, -1, *x.shape[1:]), batch)


def simulated(simulator, given, local=LOCAL, local_steps=H, params=None, workers=WORKERS):
    params = params_of() if params is None else params
    run = simulate.start(simulator, params, workers, local=local)
    step = jax.jit(lambda r, b: simulate.step(loss, simulator, r, b, local_steps, local))
    losses = []
    for batch in given:
        run, of_workers = step(run, by_worker(batch, workers))
        losses.append(of_workers)
    return run, np.array(losses)


def assert_close(got, want, **tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), **tolerance)


AVERAGE = reference_baselines.averaged(optax.sgd(1.0))


def test_simulated_averaging_of_one_worker_is_plain_training():
    given = list(batches(3, 4 * H, workers=1))
    run, _ = simulated(AVERAGE, given, workers=1)
    params, state = params_of(), LOCAL.init(params_of())
    for batch in given:
        for part in range(H):
            own = jax.tree.map(lambda x, part=part: x[4 * part : 4 * part + 4], batch)
            grads = jax.grad(loss)(params, own, None)
            updates, state = LOCAL.update(grads, state, params)
            params = optax.apply_updates(params, updates)
    assert_close(run.params, params, rtol=1e-3, atol=1e-4)
    assert run.local_state[0].count.tolist() == [3 * H]


@pytest.mark.parametrize("bits", [None, 1, 4, 8])
def test_simulated_diloco_learns(bits):
    run, losses = simulated(reference_baselines.diloco(0.7, 0.5, bits), batches(30, 4 * H))
    assert losses[-3:].mean() < 0.7 * losses[:3].mean()
    assert run.local_state[0].mu["w"].shape == (WORKERS, 8, 33)


@pytest.mark.parametrize("bits", [1, 4])
def test_simulated_feedback_both_ways_conserves_sums(bits):
    tx = reference_baselines.diloco(1.0, 0.0, bits)  # what is applied is what is agreed on
    rng, zeros = np.random.default_rng(0), {"a": jnp.zeros((5, 77))}
    state, sent, applied = tx.init(zeros, WORKERS), 0.0, 0.0
    for _ in range(6):
        grads = {"a": jnp.asarray(rng.normal(size=(WORKERS, 5, 77)), jnp.float32)}
        updates, state = tx.update(grads, state, zeros)
        sent, applied = sent + np.mean(grads["a"], 0), applied - np.asarray(updates["a"])
    owner = np.asarray(state.owner).reshape(-1)[: 5 * 77].reshape(5, 77)
    left = np.mean(state.error["a"], 0) + owner
    np.testing.assert_allclose(applied + left, sent, atol=1e-5)


def test_simulated_more_bits_miss_less():
    rng, zeros, missed = np.random.default_rng(0), {"a": jnp.zeros(640)}, []
    grads = {"a": jnp.asarray(rng.normal(size=(WORKERS, 640)), jnp.float32)}
    for bits in range(1, 9):
        tx = reference_baselines.diloco(1.0, 0.0, bits)
        updates, _ = tx.update(grads, tx.init(zeros, WORKERS), zeros)
        missed.append(float(np.std(np.mean(grads["a"], 0) + updates["a"])))
    assert np.all(np.diff(missed) < 0), missed


def test_a_simulated_worker_with_a_loss_that_is_not_finite_keeps_its_own_state():
    given = list(batches(2, 4 * H))
    given[1]["x"][4 * H] = np.inf  # of the second worker
    given[1]["y"][4 * H] = np.nan
    run, losses = simulated(reference_baselines.diloco(0.7, 0.9, 1), given)
    assert np.flatnonzero(~np.isfinite(losses[1])).tolist() == [1]
    assert run.local_state[0].count.tolist() == [2 * H, H, 2 * H, 2 * H]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((run.params, run.local_state)))


def test_simulated_votes_on_differences():
    lion = reference.optimizer(reference.local_momentum(), 2.0**-7, 0.0)
    run, losses = simulated(lion, batches(20, 4 * H), optax.sgd(0.1))
    assert losses[-2:].mean() < losses[:2].mean()
