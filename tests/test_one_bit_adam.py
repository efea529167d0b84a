"""1-bit Adam: the oracle against Adam."""

import jax
import numpy as np
import optax
from conftest import assert_same
from oracle import baselines as oracles
from oracle import one_bit_adam as oracle
from test_against_reference import integers, nobody_abstains, simulate, zeros

BETAS = {"b1": 0.5, "b2": 0.75}


def test_the_oracle_is_adam_of_the_mean_until_the_variance_freezes():
    params, steps = zeros({"a": (5, 13), "b": (7,), "scalar": ()}), 5
    story = nobody_abstains(integers(params, steps, 3))
    simulators = {
        "1-bit": oracle.one_bit_adam(**BETAS, warmup=4),
        "adam": oracles.averaged(optax.scale_by_adam(**BETAS)),
    }
    (got, states), (want, _) = simulate(simulators, params, story).values()
    for name, u in got.items():
        np.testing.assert_allclose(u[:4], want[name][:4], rtol=2e-6, atol=1e-7)
    assert (got["a"][4] != want["a"][4]).any()
    assert_same(*(jax.tree.map(lambda v, n=n: v[n], states.nu) for n in (3, 4)))
