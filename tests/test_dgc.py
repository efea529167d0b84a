"""Deep Gradient Compression: which values are sent, the warm-up, and leaves that int32 does not count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import blank, update_of, workers_on
from jax.sharding import PartitionSpec as P
from oracle import dgc as oracle
from test_against_reference import nobody_abstains, simulate
from test_baselines import refused

import lioncub_jax as lc
from lioncub_jax import baselines
from lioncub_jax.baselines.dgc import dgc, stages


def test_the_largest_magnitudes_are_sent_and_of_equal_ones_the_first():
    grads = {"w": np.array([[[1, -2, 3, 2, -3, 2, 0, 1]] * 2], np.float32)}
    three_of_eight = oracle.dgc(0.9, density=0.375)
    updates, state = simulate({0: three_of_eight}, blank(grads), nobody_abstains(grads))[0]
    assert updates["w"].tolist() == [[0, -2, 3, 0, -3, 0, 0, 0]]
    assert state.residual["w"][0, 0].tolist() == [1, 0, 0, 2, 0, 2, 0, 1]
    np.testing.assert_array_equal(state.velocity["w"], state.residual["w"])


# --- Warm-up


@pytest.mark.parametrize(
    ("density", "warmup", "want"),
    [
        (0.001, 8, [(0, 0.25), (2, 0.0625), (4, 0.015625), (6, 0.00390625), (8, 0.001)]),
        (0.001, 6, [(0, 0.25), (2, 0.0625), (3, 0.015625), (5, 0.00390625), (6, 0.001)]),
        (0.001, 2, [(0, 0.25), (1, 0.015625), (2, 0.001)]),
        (0.0625, 5, [(0, 0.25), (5, 0.0625)]),
        (0.2, 1, [(0, 0.25), (1, 0.2)]),
    ],
)
def test_densities_of_a_warm_up(density, warmup, want):
    assert list(stages(density, warmup).items()) == want


WARM = {"density": 0.01, "warmup": 6}


def test_each_stage_of_a_warm_up_has_an_all_gather_of_its_own():
    workers = workers_on("data=8")
    tx = dgc(0.1, **WARM, workers=workers)
    params = {"a": jnp.zeros((7, 19)), "b": jnp.zeros(65), "empty": jnp.zeros((0, 4))}
    grads = {n: jax.ShapeDtypeStruct((8, *p.shape), p.dtype) for n, p in params.items()}
    run = update_of(tx, workers).lower(grads, tx.init(params), params).compile()
    found = lc.audit.collectives(run, workers.mesh)
    assert all(one.gated and one.op == "all-gather" for one in found)
    assert [one.sent_bytes for one in found] == [*lc.audit.of(tx, params, workers).stages]


# --- Leaves that int32 does not count


def traced(make, size, cut=1):
    """The shapes that an update of one leaf returns."""
    workers = workers_on(f"data=2 tensor={cut}")
    tx, lies = make(1.0, workers=workers), workers.shardings(P("tensor" if cut == 2 else None))
    params = {"w": jax.ShapeDtypeStruct((size,), jnp.float32, sharding=lies)}
    grads = {"w": jax.ShapeDtypeStruct((2, size), jnp.float32)}
    state = lc.training.abstract_state(tx, params, workers).opt_state
    made = update_of(tx, workers).lower(grads, state, params).out_info
    return {x.shape for x in jax.tree.leaves(made)}


def test_leaves_that_no_index_reaches_are_refused():
    with refused("shape (2147483648,)", "fewer than 2**31", "inner mesh axes"):
        traced(dgc, 2**31)
    assert (2**31,) in traced(dgc, 2**31, 2)
    # One that counts the elements of a whole leaf.
    assert (2**32,) in traced(baselines.terngrad, 2**32, 2)
