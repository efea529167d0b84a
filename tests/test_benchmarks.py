"""That the benchmarks still measure what they say, at sizes that take no time."""

import argparse
import importlib.util
import json
import re

import compile_time
import gpu
import jax
import jax.numpy as jnp
import local_step
import numpy as np
import pytest
import step_time
from gpt import corpus
from race import methods
from race.results import Result

import lioncub_jax as lc

STEPS = ["optax.lion", "1-bit vote", "2-bit vote", "3-bit vote", "owner, 3 bits + feedback"]
PIECES = ["pack", "tally", "unpack"]
SIZE = 2**16


@pytest.mark.parametrize("which", [local_step.candidates, local_step.owners])
def test_the_local_step_moves_every_parameter_by_the_learning_rate(which):
    """What is sent comes back as it is, so signs mean nothing, but all the work of a step is done."""
    drawn = np.random.default_rng(0).normal(size=(2, 2**15)).astype(np.float32)
    for name, made in which({"w": jnp.asarray(drawn[0])}).items():
        params, grads = ({"w": jnp.asarray(x)} for x in drawn)
        new, *_ = made.step(params, made.state, grads)
        moved = np.abs(np.asarray(new["w"]) - drawn[0])
        assert (np.abs(moved - 1e-4) < 1e-5).mean() > 0.95, name


@pytest.mark.parametrize("method", [compile_time.LION, "vote"])
def test_the_step_that_is_compiled_has_as_many_arrays_as_it_says(method):
    assert len(jax.tree.leaves(compile_time.shapes(300, 64))) == 300
    seconds = compile_time.one(method, 12, 8)
    assert set(seconds) == set(compile_time.PARTS) and min(seconds.values()) > 0


# --- The race


def test_a_turn_of_the_race_is_as_long_as_its_slowest_worker_took(tmp_path):
    for worker in range(2):
        blocks = [{"method": "vote", "turn": t, "seconds": t + worker, "sent_bytes": worker}
                  for t in (1, 2, 6)]  # fmt: skip
        path = tmp_path / f"worker{worker}.json"
        path.write_text(json.dumps({"methods": {"vote": {}}, "blocks": blocks}))
    one = step_time.results.read(tmp_path, "jax", 2, None)["vote"]
    assert (one.seconds, one.fastest, one.slowest, one.interface_bytes) == (3.0, 2.0, 7.0, 1)


def test_the_race_is_summed_up_by_ratios():
    """On a network that is as the planner models it, the planner is right and the ratios are known."""
    names = [scheme.name for scheme in lc.planner.SCHEMES]
    assert set(methods.METHODS) == set(names)
    cluster = lc.planner.Cluster(4, lc.planner.Link(float("inf"), 0.0), one_way_pairs=True)
    host = lc.planner.Host(local_seconds=dict.fromkeys(names, 0.01), widens_bfloat16=True)

    def session(at):
        for name in names:
            step = step_time.predicted(name, at, 0.1, host) if name != step_time.ALONE else 0.1
            yield name, Result("jax", 4, None, name, step, step, step, 101.0, 100.0, 100.0)

    rates = {"unshaped": cluster, "1gbit": cluster.at(1e9), "100mbit": cluster.at(1e8)}
    sessions = {("jax", 4, rate): dict(session(at)) for rate, at in rates.items()}
    args = argparse.Namespace(workers=[4], rates=rates, turns=1, figures=None)
    found = step_time.summarized(sessions, args)
    assert found["planner_worst_error"] < 1e-9 and found["nic_vs_predicted"] == 1.01
    own = sessions["jax", 4, "1gbit"]
    vote, dense = own[step_time.VOTE].seconds, own[step_time.DENSE].seconds
    assert found["overhead_1gbit"] == pytest.approx(vote / 0.1)
    assert found["speedup_vs_lion_1gbit"] == pytest.approx(dense / vote)


# --- One GPU


@pytest.fixture
def small(monkeypatch):
    """Two of the local steps, and samples and a copy that take no time."""
    every = local_step.candidates
    monkeypatch.setattr(local_step, "candidates", lambda x: {n: every(x)[n] for n in STEPS[:2]})
    monkeypatch.setattr(gpu, "SAMPLE_MS", 0.01)
    monkeypatch.setattr(gpu, "COPIED", {False: 2**16})
    monkeypatch.setattr(gpu, "DTYPES", (jnp.bfloat16,))


def test_each_op_is_measured_and_kept(small, tmp_path):
    kept, traces = tmp_path / "rows", tmp_path / "traces"
    gpu.main(f"--sizes 64K --rounds 2 --skip-demo --save {kept} --profile {traces}".split())
    found = json.loads(kept.read_text())
    assert [folder.name for folder in traces.iterdir()] == ["64K-bfloat16"]
    assert [row["op"] for row in found["rows"]] == [*STEPS[:2], *PIECES]
    for row in found["rows"]:
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"], row
        assert row["floor_ms"] == row["floor_bytes"] / 1e6 / found["copy"]["gb_per_s"]
        assert row["x_floor"] == row["ms"] / row["floor_ms"]
        assert row["kernels"] > 0 and row["rounds"] == 2
    assert found["rows"][0]["x_optax_lion"] == 1.0


def test_the_floor_is_every_array_once():
    steps, shapes = gpu.steps(SIZE, jnp.float32)
    pieces, whole = gpu.pieces(SIZE, jnp.float32)[0], 4 * SIZE
    # Parameters and momentum both ways, gradients once; and a counter.
    assert steps["optax.lion"].floor == 5 * whole + 2 * 4
    # A bit of each element and one of each row, to all owners and from all of them: written by one
    # side and read by the other. And a word of who takes part; ties and presence.
    words = 4 * (128 + 1) * SIZE // 4096
    sent = 2 * (words + 4 * 8) + (1 + 1 / 8) * (words + 4 * 2 * 8)
    state = gpu.size_of(shapes["state of 1-bit vote"])
    assert steps["1-bit vote"].floor == 3 * whole + sent + 2 * state
    assert pieces["pack"].floor == whole + words + 1  # and whether all are finite
    assert pieces["tally"].floor == (1 + 1 / 8) * words
    assert pieces["unpack"].floor == whole + words + 4 * 2 * 8


def test_the_training_step_of_the_example(small, monkeypatch):
    text = np.arange(40_000, dtype=np.uint32).astype(np.uint8)
    monkeypatch.setattr(corpus, "standard_library", lambda: corpus.Corpus("bytes", text, text))
    tiny = "--layers 1 --width 16 --heads 2 --context 8 --batch 1"
    found = gpu.demo(tiny.split(), 2, gpu.Clock(-1), None)
    assert list(found["steps"]) == ["lion_cub", "optax.lion"] and found["tokens"] == 8
    assert all(row["ms"] > 0 and row["rounds"] == 1 for row in found["steps"].values())


def test_kernels_are_counted_where_they_are_started():
    text = """HloModule step
%fused_add (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %c = f32[8]{0} copy(%p)
}

%body (t: (f32[8])) -> (f32[8]) {
  %f.1 = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused_add
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %f = (f32[8]{0}, u32[]) fusion(%x, /*index=1*/%x), kind=kLoop, calls=%fused_add
  %copy.1 = f32[8]{0} copy(%f)
  ROOT %g = f32[8]{0} custom-call(%copy.1), custom_call_target="gemm"
}"""
    assert gpu.kernels(text) == 4


def test_predicted_is_the_time_of_the_bytes(small, monkeypatch):
    monkeypatch.setattr(gpu.machines, "device_of", lambda name: jax.devices()[0])
    lion, *others = gpu.predicted("h100-8", SIZE, jnp.float32)
    for row in (lion, *others):
        assert row["ms"] == 1e3 * row["accessed_bytes"] / 3_352_320_000_000
        assert row["x_floor"] == row["accessed_bytes"] / row["floor_bytes"]
        assert row["x_optax_lion"] == row["accessed_bytes"] / lion["accessed_bytes"]


def test_all_that_is_measured_on_a_gpu_is_predicted_by_the_committed_rows():
    known = gpu.kept(gpu.PREDICTED)
    for size in gpu.SIZES.split(","):
        for dtype in gpu.DTYPES:
            ops, _ = gpu.every(gpu.size_from(size), dtype)
            rows = {op: known.pop((size, jnp.dtype(dtype).name, op)) for op in [*STEPS, *PIECES]}
            assert {op: row["floor_bytes"] for op, row in rows.items()} == {
                op: ops[op].floor for op in ops
            }
    assert not known


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "finds no GPU.*jax.cuda12.*--sizes 1M,4M.*--predict"),
        ("--sizes 16", "'16' is no size"),
        ("--sizes 2B", "'2B' is no size.*below 2B"),
        ("--sizes 1M --rounds 0", "--rounds 0: give at least 1"),
        ("--sizes 1M --budget nan", "--budget nan: give a number of seconds above 0"),
        (
            "--predict --sizes 64K",
            r"jax_cuda12_plugin is not installed.*pip install -e '.\[cuda\]'",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(monkeypatch, capsys, words, said):
    monkeypatch.setattr(gpu.machines, "environment", lambda machine: {})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        gpu.main(words.split())
    assert re.search(said, capsys.readouterr().err, re.DOTALL)
