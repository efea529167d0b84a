"""Simulated workers against eight devices: the same keys, batches and rules, and the same parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import AXIS
from oracle import coding, lion, simulate
from test_against_reference import zeros

import lioncub_jax as lc

WORKERS, STEPS = 8, 4
RATE = 2.0**-4  # with gradients that are small integers every sum and product is exact
SHAPES = {"matrix": (5, 27), "scalar": (), "row": (129,)}
HOW = {"weight_decay": 0.0, "workers": AXIS}
EXACT = {
    "vote": (lc.lion_cub(RATE, 0.75, 0.5, **HOW), lion.local_momentum(0.75, 0.5)),
    "owner": (
        lc.owner_lion(RATE, 0.5, 0.5, quantizer=lc.quantize.midrise(3), **HOW),
        lion.momentum_at_owner(0.5, 0.5, codes=coding.midrise(3)),
    ),
}


def loss(params, batch, rng):
    """Its gradient is a sum of examples and of signs from the worker's key; of poison there is none."""
    signs = {name: jax.random.rademacher(rng, p.shape, p.dtype) for name, p in params.items()}
    given = jax.tree.map(lambda x, s: jnp.sum(x, axis=0) + s, batch, signs)
    pulled = sum(jax.tree.leaves(jax.tree.map(lambda p, g: jnp.sum(p * g), params, given)))
    return pulled + jnp.where(jnp.any(batch["scalar"] > 50), jnp.inf, 0)


def batches():
    """``[W * rows, ...]``, the first of which are the first worker's."""
    rng = np.random.default_rng(0)
    shapes = SHAPES.items()
    found = [
        {k: rng.integers(-2, 3, (4 * WORKERS, *s)).astype(np.float32) for k, s in shapes}
        for _ in range(STEPS)
    ]
    found[2]["scalar"][5] = 100.0  # the second worker's, of four each
    return found


@pytest.mark.parametrize("method", EXACT)
def test_the_parameters_are_those_of_eight_devices_bit_for_bit(mesh_of, method):
    """A worker whose loss is not finite sits the step out."""
    (tx, votes), given, key = EXACT[method], batches(), jax.random.key(5)
    simulator, params = lion.optimizer(votes, RATE, 0.0), zeros(SHAPES)
    run, losses = simulate.start(simulator, params, WORKERS, key), []
    simulated = jax.jit(lambda run, batch: simulate.step(loss, simulator, run, batch))
    workers = lc.Workers(mesh_of(WORKERS), AXIS)
    state, means = lc.init_state(tx, params, workers, rng=key), []
    step = lc.make_train_step(loss, tx, workers)
    for batch in given:
        state, metrics = step(state, batch)
        means.append(metrics["loss"])
        parts = jax.tree.map(lambda x: x.reshape(WORKERS, -1, *x.shape[1:]), batch)
        run, each = simulated(run, parts)
        losses.append(each)
    for name, p in state.params.items():
        np.testing.assert_array_equal(run.params[name], p, err_msg=name)
        assert np.any(p)
    assert int(run.step) == int(state.step) == STEPS
    losses = np.stack(losses)
    assert np.flatnonzero(~np.isfinite(losses)).tolist() == [2 * WORKERS + 1]
    assert int(run.opt_state.abstentions) == 1
    np.testing.assert_allclose(losses[:2].mean(axis=1), means[:2], rtol=1e-5, atol=1e-3)
