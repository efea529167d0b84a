"""1-bit Adam and 0/1 Adam against their reference, bit for bit, and their bytes in compiled programs.

As in ``test_against_reference``, gradients are small integers and betas powers of two, so that momenta,
magnitudes and sums over workers are exact. Roots and quotients may be fused with what follows, or not:
directions have a tolerance of a few roundings.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_against_reference import Story, assert_equal, integers, simulate, zeros

from lioncub_jax import reference
from lioncub_jax.reference import one_bit_adam as oracle

BETAS = {"b1": 0.5, "b2": 0.75}
SHAPES = {"a": (5, 13), "b": (7,), "long": (3, 130), "scalar": ()}


def close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), got, want)


# --- The reference itself


@pytest.mark.parametrize("workers", [1, 3])
def test_the_reference_is_adam_of_the_mean_until_the_variance_freezes(workers):
    params, steps = zeros(SHAPES), 5
    story = Story(integers(params, steps, workers), np.zeros((steps, workers), bool))
    simulators = {
        "1-bit": oracle.one_bit_adam(**BETAS, warmup=4),
        "0/1": oracle.zero_one_adam(**BETAS, kappa=3, freeze_after=9),
    }
    tx, want = optax.scale_by_adam(**BETAS), []
    state = tx.init(params)
    for step in range(steps):
        update, state = tx.update(
            jax.tree.map(lambda g, step=step: jnp.mean(g[step], 0), story.grads), state
        )
        want.append(update)
    want = jax.tree.map(lambda *x: np.stack(x), *want)
    for got, states in simulate(simulators, params, story).values():
        close(*(jax.tree.map(lambda x: x[:4], u) for u in (got, want)))
        assert states.updates.tolist() == [1, 2, 3, 4, 4]
        assert (got["a"][4] != want["a"][4]).any()
        assert_equal(*(jax.tree.map(lambda v, n=n: v[n], states.nu) for n in (3, 4)))


def test_the_gaps_of_the_reference_double_after_kappa_updates():
    params = zeros({"w": (3,)})
    story = Story(integers(params, 40, 2), np.zeros((40, 2), bool))
    _, states = simulate({0: oracle.zero_one_adam(kappa=4, freeze_after=30)}, params, story)[0]
    updated = np.flatnonzero(np.diff(states.updates, prepend=0))
    assert updated.tolist() == [0, 1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28]


def test_nothing_is_lost_by_the_reference():
    """Momenta, and what workers and owners still owe, are all that went in."""
    params = zeros({"w": (3, 130), "scalar": ()})
    story = Story(integers(params, 6, 3), np.zeros((6, 3), bool))
    simulator = oracle.one_bit_adam(b1=0.0, b2=0.75, warmup=1)
    _, states = simulate({0: simulator}, params, story)[0]
    buffer = reference.buffer_of([(), (3, 130)], 3)
    owed = buffer.split(states.owner[-1], [np.float32] * 2)
    for name, late in zip(["scalar", "w"], owed, strict=True):
        left = states.error[name][-1].mean(0) + late
        np.testing.assert_allclose(
            states.mu[name].sum(0) + left, story.grads[name].mean(1).sum(0), atol=1e-4
        )
        assert left.any() or name == "scalar"
