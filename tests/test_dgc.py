"""Deep Gradient Compression of `benchmarks/papers.py`: which values are sent."""

import numpy as np
from conftest import blank
from oracle import dgc as oracle
from test_against_reference import nobody_abstains, simulate


def test_the_largest_magnitudes_are_sent_and_of_equal_ones_the_first():
    grads = {"w": np.array([[[1, -2, 3, 2, -3, 2, 0, 1]] * 2], np.float32)}
    three_of_eight = oracle.dgc(0.9, density=0.375)
    updates, state = simulate({0: three_of_eight}, blank(grads), nobody_abstains(grads))[0]
    assert updates["w"].tolist() == [[0, -2, 3, 0, -3, 0, 0, 0]]
    assert state.residual["w"][0, 0].tolist() == [1, 0, 0, 2, 0, 2, 0, 1]
    np.testing.assert_array_equal(state.velocity["w"], state.residual["w"])
