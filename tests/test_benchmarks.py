"""That the benchmarks still measure what they say, at sizes that take no time."""

import json
import re

import compile_time
import gpu
import jax.numpy as jnp
import local_step
import numpy as np
import pytest
import time_to_loss
from conftest import in_order
from report import append

STEPS = ["optax.lion", "1-bit vote", "2-bit vote", "3-bit vote", "owner, 3 bits + feedback"]
PIECES = ["pack", "tally", "unpack"]


def test_the_local_step_moves_every_parameter_by_the_learning_rate():
    """What is sent comes back as it is, so signs mean nothing, but all the work of a step is done."""
    drawn = np.random.default_rng(0).normal(size=(2, 2**15)).astype(np.float32)
    for name, made in local_step.candidates({"w": jnp.asarray(drawn[0])}).items():
        params, grads = ({"w": jnp.asarray(x)} for x in drawn)
        new, *_ = made.step(params, made.state, grads)
        moved = np.abs(np.asarray(new["w"]) - drawn[0])
        assert (np.abs(moved - 1e-4) < 1e-5).mean() > 0.95, name


@pytest.mark.parametrize("method", [compile_time.LION, "vote"])
def test_every_part_of_a_compilation_is_timed(method):
    seconds = compile_time.one(method, 12, 8)
    assert set(seconds) == set(compile_time.PARTS) and min(seconds.values()) > 0


# --- One GPU


def test_each_op_is_measured_and_kept(monkeypatch, tmp_path):
    """Of two of the local steps, with samples and a copy that take no time."""
    every = local_step.candidates
    monkeypatch.setattr(local_step, "candidates", lambda x: {n: every(x)[n] for n in STEPS[:2]})
    monkeypatch.setattr(gpu, "SAMPLE_MS", 0.01)
    monkeypatch.setattr(gpu, "COPIED", {False: 2**16})
    monkeypatch.setattr(gpu, "DTYPES", (jnp.bfloat16,))
    kept = tmp_path / "rows"
    gpu.main(f"--sizes 64K --rounds 2 --skip-demo --save {kept}".split())
    found = json.loads(kept.read_text())
    assert [row["op"] for row in found["rows"]] == [*STEPS[:2], *PIECES]
    for row in found["rows"]:
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"], row
        assert row["floor_ms"] == row["floor_bytes"] / 1e6 / found["copy"]["gb_per_s"]
        assert row["x_floor"] == row["ms"] / row["floor_ms"]
        assert row["kernels"] > 0 and row["rounds"] == 2
    assert found["rows"][0]["x_optax_lion"] == 1.0


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


# --- Words that end a benchmark before anything runs

REFUSED = [
    (gpu, "", "finds no GPU ... jax[cuda12] ... --sizes 1M,4M ... --predict"),
    (gpu, "--sizes 16", "'16' is no size"),
    (time_to_loss, "--save {other}", "line 1: no row of this benchmark"),
]


@pytest.mark.parametrize(("module", "words", "said"), REFUSED)
def test_what_cannot_be_run_is_refused(capsys, tmp_path, module, words, said):
    append(tmp_path / "other", [{"part": "tuning"}])
    with pytest.raises(SystemExit):
        module.main(words.format(other=tmp_path / "other").split())
    assert re.search(in_order(said), " ".join(capsys.readouterr().err.split()))
