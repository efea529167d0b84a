"""That the benchmarks still measure what they say, at sizes that take no time."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lioncub_jax as lc

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def local_step(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import local_step

    return local_step


def test_the_local_step_moves_every_parameter_by_the_learning_rate(local_step):
    """What is sent comes back as it is, so signs mean nothing, but all the work of a step is done."""
    rng = np.random.default_rng(0)
    params, grads = ({"w": rng.normal(size=4096).astype(np.float32)} for _ in range(2))
    candidates = local_step.candidates(jax.tree.map(jnp.asarray, params))
    for name, candidate in candidates.items():
        given = jax.tree.map(jnp.asarray, params), candidate.state, jax.tree.map(jnp.asarray, grads)
        new, *_ = candidate.step(*given)
        moved = np.abs(np.asarray(new["w"]) - params["w"])
        assert (np.abs(moved - 1e-4) < 1e-5).mean() > 0.95, name
    assert len(candidates) == 5


def test_every_scheme_of_the_byte_table_is_predicted(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import wire_bytes

    schemes = wire_bytes.schemes()
    params = {name: jnp.zeros(shape) for name, shape in wire_bytes.SHAPES.items()}
    names = {lc.accounting.predict(params, 4, **scheme).scheme for scheme in schemes}
    assert len(names) == len(schemes)
