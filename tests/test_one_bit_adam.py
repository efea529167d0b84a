"""1-bit Adam and 0/1 Adam: the oracle against Adam, and steps in full precision."""

import jax
import numpy as np
import optax
from conftest import AXIS, assert_same, run_workers
from oracle import baselines as oracles
from oracle import one_bit_adam as oracle
from test_against_reference import integers, nobody_abstains, simulate, zeros

from lioncub_jax import baselines

BETAS = {"b1": 0.5, "b2": 0.75}


def test_the_oracle_is_adam_of_the_mean_until_the_variance_freezes():
    params, steps = zeros({"a": (5, 13), "b": (7,), "scalar": ()}), 5
    story = nobody_abstains(integers(params, steps, 3))
    simulators = {
        "1-bit": oracle.one_bit_adam(**BETAS, warmup=4),
        "0/1": oracle.zero_one_adam(**BETAS, kappa=3, freeze_after=9),
    }
    adam = {"adam": oracles.averaged(optax.scale_by_adam(**BETAS))}
    done = simulate(simulators | adam, params, story)
    want, _ = done.pop("adam")
    for got, states in done.values():
        for name, u in got.items():
            np.testing.assert_allclose(u[:4], want[name][:4], rtol=2e-6, atol=1e-7)
        assert states.updates.tolist() == [1, 2, 3, 4, 4]
        assert (got["a"][4] != want["a"][4]).any()
        assert_same(*(jax.tree.map(lambda v, n=n: v[n], states.nu) for n in (3, 4)))


def test_the_gaps_between_updates_of_the_variance_double_after_kappa_of_them():
    """In the oracle and in the library; also where they never double."""
    wanted = {
        (4, 30): [0, 1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28],
        (1, 1000): [0, 1, 3, 7, 15, 31],
        (2**31 - 1, 7): [0, 1, 2, 3, 4, 5, 6],
    }
    params = zeros({"w": (3,)})
    story = nobody_abstains(integers(params, 40, 2))
    how = {key: {"kappa": key[0], "freeze_after": key[1]} for key in wanted}
    txs = {key: baselines.zero_one_adam(1.0, **how[key], workers=AXIS) for key in wanted}
    simulators = {key: oracle.zero_one_adam(**how[key]) for key in wanted}
    done, simulated = run_workers(txs, params, *story), simulate(simulators, params, story)
    for key, steps in wanted.items():
        for updates in (done[key][1][0].updates[:, 0], simulated[key][1].updates):
            assert np.flatnonzero(np.diff(updates, prepend=0)).tolist() == steps
