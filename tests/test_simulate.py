"""Simulated workers against eight devices: the same keys, batches and rules, and the same parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS, assert_same, workers_on
from oracle import baselines as oracles
from oracle import lion, simulate
from test_against_reference import zeros

import lioncub_jax as lc
from lioncub_jax import baselines

WORKERS, STEPS, ROWS = 8, 4, 6
RATE = 2.0**-4  # with gradients that are small integers every sum and product is exact
SHAPES = {"matrix": (5, 27), "scalar": (), "row": (129,)}
LOCAL = optax.sgd(RATE, 0.5)
EXACT = {  # the transform, its simulator, and local steps
    "vote": (
        lc.lion_cub(RATE, 0.75, 0.5, weight_decay=0.0, workers=AXIS),
        lion.optimizer(lion.local_momentum(0.75, 0.5), RATE, 0.0), 1, None,
    ),
    "local steps": (
        baselines.diloco(0.5, 0.5, 4, workers=AXIS), oracles.diloco(0.5, 0.5, 4), 3, LOCAL,
    ),
}  # fmt: skip


def loss(params, batch, rng):
    """Its gradient is a sum of examples and of signs from the worker's key; of poison there is none."""
    signs = {name: jax.random.rademacher(rng, p.shape, p.dtype) for name, p in params.items()}
    given = jax.tree.map(lambda x, s: jnp.sum(x, axis=0) + s, batch, signs)
    pulled = sum(jax.tree.leaves(jax.tree.map(lambda p, g: jnp.sum(p * g), params, given)))
    return pulled + jnp.where(jnp.any(batch["scalar"] > 50), jnp.inf, 0)


def batches():
    """``[W * rows, ...]``, the first of which are the first worker's."""
    rng = np.random.default_rng(0)
    found = [
        {k: rng.integers(-2, 3, (ROWS * WORKERS, *s)).astype(np.float32) for k, s in SHAPES.items()}
        for _ in range(STEPS)
    ]
    found[2]["scalar"][ROWS + 1] = 100.0  # the second worker's
    return found


@pytest.mark.parametrize("method", EXACT)
def test_the_parameters_are_those_of_eight_devices_bit_for_bit(method):
    """A worker whose loss is not finite sits the step out, and keeps its own state."""
    (tx, simulator, local_steps, local), key = EXACT[method], jax.random.key(5)
    params = zeros(SHAPES)
    run, losses = simulate.start(simulator, params, WORKERS, key, local), []
    simulated = jax.jit(lambda run, x: simulate.step(loss, simulator, run, x, local_steps, local))
    workers = workers_on(f"data={WORKERS}")
    state, means = lc.init_state(tx, params, workers, rng=key, local=local), []
    step = lc.make_train_step(loss, tx, workers, local_steps=local_steps, local=local)
    for batch in batches():
        state, metrics = step(state, batch)
        means.append(metrics["loss"])
        parts = jax.tree.map(lambda x: x.reshape(WORKERS, -1, *x.shape[1:]), batch)
        run, each = simulated(run, parts)
        losses.append(each)
    assert np.any(state.params["row"])
    got, want = (run.params, run.local_state), (state.params, state.local_state)
    assert_same(got, want)
    assert int(run.step) == int(state.step) == STEPS
    losses = np.stack(losses)
    assert np.flatnonzero(~np.isfinite(losses)).tolist() == [2 * WORKERS + 1]
    assert int(run.opt_state.abstentions) == 1
    np.testing.assert_allclose(losses[:2].mean(axis=1), means[:2], rtol=1e-5, atol=1e-3)
