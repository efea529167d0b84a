"""1-bit Adam and 0/1 Adam against their reference, bit for bit, and the reference against Adam.

As in ``test_against_reference``, gradients are small integers and betas powers of two, so that momenta,
magnitudes and sums over workers are exact. Roots and quotients may be fused with what follows, or not:
updates have a tolerance of a few roundings.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS
from test_against_reference import (
    EVENTS,
    TREES,
    assert_equal,
    eventful,
    in_rows,
    integers,
    same_everywhere,
    simulate,
    zeros,
)
from test_baselines import nobody_abstains

import lioncub_jax as lc
from lioncub_jax import baselines, reference
from lioncub_jax.reference import one_bit_adam as oracle

BETAS = {"b1": 0.5, "b2": 0.75}

# --- The reference itself


def test_the_reference_is_adam_of_the_mean_until_the_variance_freezes():
    params, steps = zeros({"a": (5, 13), "b": (7,), "scalar": ()}), 5
    story = nobody_abstains(integers(params, steps, 3))
    simulators = {
        "1-bit": oracle.one_bit_adam(**BETAS, warmup=4),
        "0/1": oracle.zero_one_adam(**BETAS, kappa=3, freeze_after=9),
    }
    tx, want = optax.scale_by_adam(**BETAS), []
    state = tx.init(params)
    for step in range(steps):
        mean = {name: g[step].mean(0) for name, g in story.grads.items()}
        update, state = tx.update(mean, state)
        want.append(update)
    want = jax.tree.map(lambda *x: np.stack(x), *want)
    for got, states in simulate(simulators, params, story).values():
        for name, u in got.items():
            np.testing.assert_allclose(u[:4], want[name][:4], rtol=2e-6, atol=1e-7)
        assert states.updates.tolist() == [1, 2, 3, 4, 4]
        assert (got["a"][4] != want["a"][4]).any()
        assert_equal(*(jax.tree.map(lambda v, n=n: v[n], states.nu) for n in (3, 4)))


# --- Against the reference

# In full precision after 0, 1 and 3 steps: at the fourth nobody is there, so at the fifth.
ZERO_ONE = ("zero_one_adam", {"kappa": 1, "freeze_after": 100})
METHODS = {
    1: {"0/1": ZERO_ONE},
    8: {
        "1-bit": ("one_bit_adam", {"warmup": 2, "eps": 2.0**-6}),
        "0/1": ZERO_ONE,
    },
}


def assert_state(state, want, of):
    """All that is kept after each step."""
    for name in ("count", "updates"):
        assert_equal(same_everywhere(getattr(state, name), of), getattr(want, name), of=of)
    for name in ("abstained", "abstentions"):
        assert_equal(same_everywhere(getattr(state.exchange, name), of), getattr(want, name))
    for name in ("mu", "nu"):
        own = jax.tree.map(same_everywhere, getattr(state, name))
        assert_equal(own, getattr(want, name), of=(of, name))
    assert_equal(state.exchange.error, want.error, of=of)
    owner = in_rows(state.exchange.owner[0].value.error, lc.wires.two_phase())
    rows = want.owner.shape[1]
    assert_equal(owner[:, :rows], want.owner, of=of)
    assert not owner[:, rows:].any()


@pytest.mark.parametrize("workers", METHODS)
def test_with_workers_that_abstain_it_is_the_reference_bit_for_bit(run_workers, workers):
    kinds = {"65": jnp.bfloat16, "127": jnp.float16}  # moments and errors are float32
    params = {n: p.astype(kinds.get(n, p.dtype)) for n, p in zeros(TREES[workers]).items()}
    story = eventful(params, workers, seed=workers)
    for g in story.grads.values():
        g *= workers - 1 or 1  # the mean of seven is exact, too, if they are multiples of it
    # No gradient before the freeze: one bit says something of it all the same, and a variance of 0
    # would make it huge.
    story.grads["1000"].reshape(len(EVENTS), workers, 1000)[:, :, 300] = 0
    txs, simulators = {}, {}
    for name, (make, how) in METHODS[workers].items():
        txs[name] = getattr(baselines, make)(0.25, **BETAS, **how, axis_name=AXIS)
        simulators[name] = reference.optimizer(getattr(oracle, make)(**BETAS, **how), 0.25, 0.0)
    done, simulated = run_workers(txs, params, *story), simulate(simulators, params, story)
    for name, (got, (state, *_)) in done.items():
        updates, want = simulated[name]
        assert_state(state, want, name)
        for leaf, u in got.items():
            assert u.dtype == updates[leaf].dtype == params[leaf].dtype
            rtol = max(2e-6, float(jnp.finfo(u.dtype).eps))  # of short dtypes one rounding more
            np.testing.assert_allclose(*map(np.float32, (u, updates[leaf])), rtol=rtol)
            assert not u[EVENTS.index("nobody there")].any()
        assert not got["1000"].reshape(len(EVENTS), 1000)[:, 300].any()
        assert got["1000"][5].any()
        assert want.count[-1] == (3 if workers == 1 else 5)
        assert any(e[-1].any() for e in state.exchange.error.values()) == (workers > 1)


def test_the_gaps_between_updates_of_the_variance_double_after_kappa_of_them(run_workers):
    """In the reference, in the library and in what is predicted; also where they never double."""
    wanted = {
        (4, 30): [0, 1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28],
        (1, 1000): [0, 1, 3, 7, 15, 31],
        (2**31 - 1, 7): [0, 1, 2, 3, 4, 5, 6],
    }
    params = zeros({"w": (3,)})
    story = nobody_abstains(integers(params, 40, 2))
    how = {key: {"kappa": key[0], "freeze_after": key[1]} for key in wanted}
    txs = {key: baselines.zero_one_adam(1.0, **how[key], axis_name=AXIS) for key in wanted}
    simulators = {key: oracle.zero_one_adam(**how[key]) for key in wanted}
    done, simulated = run_workers(txs, params, *story), simulate(simulators, params, story)
    large = {"w": jax.ShapeDtypeStruct((2**20,), jnp.float32)}
    for key, steps in wanted.items():
        for updates in (done[key][1][0].updates[:, 0], simulated[key][1].updates):
            assert np.flatnonzero(np.diff(updates, prepend=0)).tolist() == steps
        sent = [lc.traffic.of(txs[key], large, 2, step=n).bits_per_parameter for n in range(40)]
        assert np.flatnonzero(np.array(sent) > 3).tolist() == steps
    assert txs[4, 30].scheme == "0/1 Adam(kappa=4)"


def test_the_warm_up_sends_floats():
    shapes = {"w": jax.ShapeDtypeStruct((2**28,), jnp.float32)}
    tx = baselines.one_bit_adam(1e-3, warmup=100, axis_name=AXIS)
    for step, per_parameter in ((0, 64), (99, 64), (100, 2.25), (None, 2.25)):
        sent = lc.traffic.of(tx, shapes, 64, step=step)
        assert sent.bits_per_parameter == pytest.approx(63 / 64 * per_parameter, rel=1e-3)


# --- What is watched


def compiled(tx, *, averaged=False):
    """The step of a trainer of one's own."""

    def step(params, opt_state, batch):
        grads = jax.tree.map(lambda p: p * jnp.sum(batch), params)
        grads = jax.lax.pmean(grads, AXIS) if averaged else grads
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    devices = jax.devices()[:2]
    params = {"w": jnp.ones((2, 64, 130))}
    state = jax.pmap(tx.init, AXIS, devices=devices)(params)
    return jax.pmap(step, AXIS, devices=devices).lower(params, state, jnp.ones((2, 3))).compile()


def test_branches_by_the_count_are_no_reason_to_warn_and_others_are():
    tx = baselines.one_bit_adam(0.1, warmup=2, axis_name=AXIS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lc.check_votes(compiled(tx))
    with pytest.warns(UserWarning, match="apply_if_finite does that.*abstains by itself"):
        compiled(optax.apply_if_finite(tx, 3))


def test_the_floats_of_the_warm_up_excuse_no_others():
    tx = baselines.one_bit_adam(0.1, warmup=2, axis_name=AXIS)
    with pytest.raises(ValueError, match=r"(?s)also .* of floats.*gradients are averaged before"):
        compiled(tx, averaged=True)
