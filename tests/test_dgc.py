"""Deep Gradient Compression against its reference, bit for bit, and what it sends.

Gradients are small integers and momenta powers of two, so that what is gathered, and what is added over
the workers, is exact however a compiler contracts or reorders it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import AXIS
from jax.sharding import PartitionSpec as P
from test_against_reference import assert_equal, integers, same_everywhere, simulate
from test_baselines import nobody_abstains, refused, workers_of

import lioncub_jax as lc
from lioncub_jax import baselines, reference
from lioncub_jax.baselines.dgc import dgc, stages
from lioncub_jax.reference import dgc as oracle

# Sizes that no density divides, a scalar, nothing at all, and a dtype that is not the state's.
PARAMS = {
    "a": jnp.zeros((7, 19)), "bf16": jnp.zeros(65, jnp.bfloat16), "empty": jnp.zeros((0, 4)),
    "one": jnp.zeros(1), "scalar": jnp.zeros(()),
}  # fmt: skip
STEPS = 6


def eventful(workers):
    """Who is told to abstain; and steps in which one worker, and then everybody, is not finite."""
    story = nobody_abstains(integers(PARAMS, STEPS, workers, seed=workers))
    story.abstain[1, 0] = True
    story.grads["a"][2, -1, 3, 3] = np.inf
    story.grads["bf16"][3] = np.nan
    story.grads["a"][4] = 0
    return story


def check_against_reference(run_workers, params, story, cases, rate=0.5):
    """The states of all."""
    txs = {i: dgc(rate, axis_name=AXIS, **how) for i, how in enumerate(cases)}
    simulators = {
        i: reference.optimizer(oracle.dgc(**how), rate, 0.0) for i, how in enumerate(cases)
    }
    done, simulated = run_workers(txs, params, *story), simulate(simulators, params, story)
    for i, (updates, (state, *_)) in done.items():
        want, wanted = simulated[i]
        assert_equal(updates, want, of=i)
        assert_equal(state.velocity, wanted.velocity, of=i)
        assert_equal(state.residual, wanted.residual, of=i)
        for name, counted in (("count", "t"), ("abstained",) * 2, ("abstentions",) * 2):
            assert_equal(same_everywhere(getattr(state, name)), getattr(wanted, counted), of=i)
        assert all(u.any() for u in updates.values() if u.size)
    return [state for _, (state, *_) in done.values()]


CASES = {  # by the number of workers
    8: ({"density": 0.1}, {"density": 1.0}, {"density": 0.02, "warmup": 4}),
    3: ({"density": 0.02},),
    1: ({"density": 0.1},),
}


@pytest.mark.parametrize("workers", CASES)
def test_it_equals_the_reference(run_workers, workers):
    cases = [{"momentum": 0.5, **how} for how in CASES[workers]]
    for state in check_against_reference(run_workers, PARAMS, eventful(workers), cases):
        assert state.abstentions[-1, 0] == 2 + workers


def test_the_largest_magnitudes_are_sent_and_of_equal_ones_the_first():
    grads = {"w": np.array([[[1, -2, 3, 2, -3, 2, 0, 1]] * 2], np.float32)}
    three_of_eight = oracle.dgc(0.9, density=0.375)
    done = simulate({0: three_of_eight}, {"w": jnp.zeros(8)}, nobody_abstains(grads))
    updates, state = done[0]
    assert updates["w"].tolist() == [[0, -2, 3, 0, -3, 0, 0, 0]]
    assert state.residual["w"][0, 0].tolist() == [1, 0, 0, 2, 0, 2, 0, 1]
    np.testing.assert_array_equal(state.velocity["w"], state.residual["w"])


# --- Warm-up


@pytest.mark.parametrize(
    ("density", "warmup", "want"),
    [
        (0.001, 0, [(0, 0.001)]),
        (0.001, 8, [(0, 0.25), (2, 0.0625), (4, 0.015625), (6, 0.00390625), (8, 0.001)]),
        (0.001, 6, [(0, 0.25), (2, 0.0625), (3, 0.015625), (5, 0.00390625), (6, 0.001)]),
        (0.001, 2, [(0, 0.25), (1, 0.015625), (2, 0.001)]),
        (0.0625, 5, [(0, 0.25), (5, 0.0625)]),
        (0.2, 1, [(0, 0.25), (1, 0.2)]),
    ],
)
def test_densities_of_a_warm_up(density, warmup, want):
    assert [tuple(stage) for stage in stages(density, warmup)] == want


WARM = {"density": 0.01, "warmup": 6}


def test_a_warm_up_changes_what_is_sent_at_the_steps_it_says(run_workers):
    """Nothing gathered is ever zero here, so the zeros of the residual are what was sent."""
    params, rng = {"long": jnp.zeros(1000), "short": jnp.zeros(10)}, np.random.default_rng(0)
    grads = {
        n: rng.integers(1, 100, (8, 4, *p.shape)).astype(np.float32) for n, p in params.items()
    }
    tx = dgc(1.0, momentum=0.0, **WARM, axis_name=AXIS)
    _, (state, *_) = run_workers({0: tx}, params, *nobody_abstains(grads))[0]
    want = {"long": [250, 250, 63, 63, 16, 16, 10, 10], "short": [3, 3, 1, 1, 1, 1, 1, 1]}
    for name, counts in want.items():
        sent = (state.residual[name] == 0).sum(-1)
        assert sent.tolist() == [[n] * 4 for n in counts], name
    for step in range(8):
        entries = want["long"][step] + want["short"][step]
        told = lc.traffic.of(tx, params, 4, step=step)
        assert told.sent_bytes == 3 * (8 * entries + 4)
    assert told == lc.traffic.of(tx, params, 4)
    assert told.scheme == "dgc(0.01)"


def test_each_stage_of_a_warm_up_has_an_all_gather_of_its_own():
    workers = workers_of({AXIS: 8})
    tx = dgc(0.1, **WARM, axis_name=AXIS)
    on = lc.on_mesh(tx, workers)
    grads = {n: jax.ShapeDtypeStruct((8, *p.shape), p.dtype) for n, p in PARAMS.items()}
    run = jax.jit(on.update).lower(grads, jax.eval_shape(on.init, PARAMS), PARAMS).compile()
    found = lc.traffic.collectives(run, workers.mesh)
    assert all(one.gated and one.op == "all-gather" for one in found)
    want = [lc.traffic.of(tx, PARAMS, 8, step=step).sent_bytes for step in (0, 2, 4, 6)]
    assert sorted(one.sent_bytes for one in found) == sorted(want)


# --- Leaves that int32 does not count


def traced(tx, size, cut=1):
    """The update of one leaf, by shape only."""
    workers = workers_of({AXIS: 2, "tensor": cut})
    on = lc.on_mesh(tx, workers, specs={"w": P("tensor") if cut == 2 else P()})
    params = {"w": jax.ShapeDtypeStruct((size,), jnp.float32)}
    grads = {"w": jax.ShapeDtypeStruct((2, size), jnp.float32)}
    return jax.eval_shape(on.update, grads, jax.eval_shape(on.init, params), params)[0]["w"]


@pytest.mark.parametrize("cut", [1, 2])
def test_leaves_of_more_elements_than_int32_counts_are_traced(cut):
    """Of all baselines that count elements but dgc."""
    size = 2**31 + 2**9
    for make in (baselines.terngrad, baselines.qsgd, baselines.ef_signsgd, baselines.signum):
        assert traced(make(1.0, axis_name=AXIS), size, cut).shape == (size,)


def test_leaves_that_no_index_reaches_are_refused():
    with refused("['w'] of 2147483648 elements", "fewer than 2**31", "inner mesh axes"):
        traced(dgc(1.0, axis_name=AXIS), 2**31)
    assert traced(dgc(1.0, axis_name=AXIS), 2**31, 2).shape == (2**31,)
