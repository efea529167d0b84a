"""PowerSGD against its reference, against the best approximation there is, and its bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lioncub_jax.reference import powersgd as reference_powersgd


def simulated(simulator, params, grads, abstain):
    """The reference, all steps: updates ``[steps, ...]`` and states ``[steps, ...]``."""

    @jax.jit
    def run(grads, abstain):
        def step(state, now):
            updates, state = simulator.update(now[0], state, params, now[1])
            return state, (updates, state)

        return jax.lax.scan(step, simulator.init(params, abstain.shape[1]), (grads, abstain))[1]

    return jax.tree.map(np.asarray, run(jax.tree.map(jnp.asarray, grads), jnp.asarray(abstain)))


# --- The reference by itself


def test_the_reference_is_a_power_iteration():
    """In NumPy, as the paper has it."""
    rng = np.random.default_rng(0)
    params, rank = {"b": jnp.zeros(3), "w": jnp.zeros((2, 9, 20))}, 2
    grads = {n: rng.normal(size=(3, 4, *p.shape)).astype(np.float32) for n, p in params.items()}
    simulator = reference_powersgd.powersgd(optax.sgd(1.0), rank)
    updates, _ = simulated(simulator, params, grads, np.zeros((3, 4), bool))
    q = np.asarray(simulator.init(params, 4).q[1], np.float64)
    error = np.zeros((4, 18, 20))
    for step in range(3):
        owed = grads["w"][step].reshape(4, 18, 20) + error
        p = np.linalg.qr((owed @ q).mean(0))[0]
        q = (owed.swapaxes(1, 2) @ p).mean(0)
        error = owed - p @ q.T
        np.testing.assert_allclose(-updates["w"][step].reshape(18, 20), p @ q.T, atol=1e-5)
        np.testing.assert_allclose(-updates["b"][step], grads["b"][step].mean(0), atol=1e-6)
