"""That the benchmarks still measure what they say, at sizes that take no time."""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
    params, grads = ({"w": rng.normal(size=2**15).astype(np.float32)} for _ in range(2))
    made = [
        make(jax.tree.map(jnp.asarray, params))
        for make in (local_step.candidates, local_step.owners)
    ]
    candidates = made[0] | made[1]
    for name, candidate in candidates.items():
        given = jax.tree.map(jnp.asarray, params), candidate.state, jax.tree.map(jnp.asarray, grads)
        new, *_ = candidate.step(*given)
        moved = np.abs(np.asarray(new["w"]) - params["w"])
        assert (np.abs(moved - 1e-4) < 1e-5).mean() > 0.95, name
    assert len(candidates) == 8


def test_every_scheme_of_the_byte_table_is_predicted(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import wire_bytes

    schemes = wire_bytes.schemes()
    params = {name: jnp.zeros(shape) for name, shape in wire_bytes.SHAPES.items()}
    names = {lc.traffic.predict(params, 4, **scheme).scheme for scheme in schemes}
    assert len(names) == len(schemes)


def test_the_step_that_is_compiled_has_as_many_arrays_as_it_says(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import compile_time

    for arrays in (100, 300):
        assert len(jax.tree.leaves(compile_time.shapes(arrays, 64))) == arrays
    params = jax.tree.map(lambda x: jnp.full(x.shape, 0.01), compile_time.shapes(12, 8))
    windows = jnp.zeros((2, compile_time.CONTEXT + 1), jnp.int32)
    assert np.isfinite(compile_time.loss(params, windows))
    for method in (compile_time.LION, *compile_time.METHODS):
        seconds = compile_time.one(method, 12, 8)
        assert set(seconds) == set(compile_time.PARTS) and min(seconds.values()) > 0


@pytest.fixture
def race(monkeypatch):
    for folder in (BENCHMARKS / "race", BENCHMARKS):
        monkeypatch.syspath_prepend(str(folder))
    import step_time

    return step_time


def test_the_race_is_run_by_every_scheme_of_the_planner(race):
    from race import methods

    assert set(methods.METHODS) == {scheme.name for scheme in lc.planner.SCHEMES}
    for build in methods.METHODS.values():
        assert isinstance(build(), optax.GradientTransformation)


def test_a_turn_of_the_race_is_as_long_as_its_slowest_worker_took(race, tmp_path):
    for worker in range(2):
        blocks = [
            {"method": "vote", "turn": turn, "seconds": turn + worker, "sent_bytes": 10 * worker}
            for turn in (1, 2, 6)
        ]
        about = {"vote": {"compiled_bytes": 9.0, "predicted_bytes": 9.0}}
        (tmp_path / f"worker{worker}.json").write_text(
            json.dumps({"methods": about, "blocks": blocks})
        )
    one = race.results.read(tmp_path, "jax", 2, None)["vote"]
    assert (one.seconds, one.fastest, one.slowest) == (3.0, 2.0, 7.0)
    assert (one.interface_bytes, one.predicted_bytes) == (10, 9.0)


def test_the_race_is_summed_up_by_ratios(race):
    """On a network that is as the planner models it, the planner is right and the ratios are known."""
    from race.results import Result

    names = [scheme.name for scheme in lc.planner.SCHEMES]
    cluster = lc.planner.Cluster(4, lc.planner.Link(float("inf"), 0.0), one_way_pairs=True)

    def session(rate):
        at = cluster if rate == "unshaped" else cluster.at(race.units.rate(rate))
        host = lc.planner.Host(local_seconds=dict.fromkeys(names, 0.01), widens_bfloat16=True)
        found = {}
        for name in names:
            scheme = lc.planner.scheme_named(name)
            known = lc.planner.step_time(scheme, race.shapes(), at, 0.1, host)
            step = 0.1 if name == race.ALONE else known.step
            sent = known.sent_bytes
            found[name] = Result("jax", 4, None, name, step, step, step, 1.01 * sent, sent, sent)
        return found

    rates = ["unshaped", "1gbit", "100mbit"]
    sessions = {("jax", 4, rate): session(rate) for rate in rates}
    args = argparse.Namespace(workers=[4], rates=rates, turns=1, figures=None)
    found = race.summarized(sessions, args)
    assert found["planner_worst_error"] < 1e-9
    assert found["nic_vs_predicted"] == pytest.approx(1.01)
    vote, dense = (sessions["jax", 4, "1gbit"][name].seconds for name in (race.VOTE, race.DENSE))
    assert found["overhead_1gbit"] == pytest.approx(vote / 0.1)
    assert found["speedup_vs_lion_1gbit"] == pytest.approx(dense / vote)
    assert found["ranking"]["100mbit"][0][0] == "jax: 1-bit vote"
    assert found["ranking"]["100mbit"][-1][0] in ("jax: float32 Lion", "jax: bfloat16 Lion")
