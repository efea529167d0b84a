"""That the benchmarks still measure what they say, at sizes that take no time."""

import re

import calls
import compile_time
import gpu
import jax.numpy as jnp
import local_step
import numpy as np
import pytest
import time_to_loss
from aot import programs
from conftest import in_order, normal
from report import append, read

STEPS = "optax.lion", "1-bit vote", "optax.adamw"


def test_the_local_step_moves_every_parameter_by_the_learning_rate():
    """What is sent comes back as it is, so signs mean nothing, but all the work of a step is done."""
    drawn = normal(2, 2**15)
    for name, made in local_step.candidates({"w": jnp.asarray(drawn[0])}).items():
        params, grads = ({"w": jnp.asarray(x)} for x in drawn)
        new, *_ = made.step(params, made.state, grads)
        moved = np.abs(np.asarray(new["w"]) - drawn[0])
        off = 5e-5 if name == "owner_adamw" else 1e-5  # its updates come back in 2 bits
        assert (np.abs(moved - 1e-4) < off).mean() > 0.95, name


@pytest.mark.parametrize("method", [compile_time.LION, compile_time.JOINED, "vote"])
def test_every_part_of_a_compilation_is_timed(method):
    seconds = compile_time.one(method, 12, 8)
    assert set(seconds) == set(compile_time.PARTS) and min(seconds.values()) > 0


def test_calls_of_plain_trees_and_of_modules_are_timed():
    found = calls.measured(3)
    assert min(found[x] for x in ("plain", "jit", "nnx", "empty_nnx_jit")) > 0


# --- One GPU, and several


def test_each_step_of_a_gpu_is_measured_and_kept(monkeypatch, tmp_path):
    """Of three of the local steps, with samples that take no time."""
    every = local_step.candidates
    monkeypatch.setattr(local_step, "candidates", lambda x: {n: every(x)[n] for n in STEPS})
    monkeypatch.setattr(local_step, "SAMPLE_SECONDS", 1e-5)
    small = programs.Model(*programs.gpt(1, 32, 2, 512, 16), (1, 17))
    monkeypatch.setitem(programs.MODELS, "gpt-124m", lambda: small)
    kept = tmp_path / "rows"
    gpu.main(f"--sizes 65536 --rounds 2 --save {kept}".split())
    rows = read(kept)
    parts = [(row["part"], row["dtype"], row["step"]) for row in rows]
    local = [("local", dtype, step) for dtype in ("float32", "bfloat16") for step in STEPS]
    assert parts == [*local, *(("gpt", "bfloat16", step) for step in STEPS)]
    for row in rows:
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"] and row["compile_seconds"] > 0
        assert (row["over_floor"] is not None) == (row["part"] == "local")
        assert (row["over_lion"] == 1.0) == (row["step"] == STEPS[0])
    for name, one in gpu.exchange(small).items():
        assert local_step.seconds(one, 1)[1] > 0, name


# --- Words that end a benchmark before anything runs

REFUSED = [
    (gpu, "", "finds no GPU ... jax[cuda12] ... --sizes 65536"),
    (time_to_loss, "--save {other}", "line 1: no row of this benchmark"),
]


@pytest.mark.parametrize(("module", "words", "said"), REFUSED)
def test_what_cannot_be_run_is_refused(capsys, tmp_path, module, words, said):
    append(tmp_path / "other", [{"part": "tuning"}])
    with pytest.raises(SystemExit):
        module.main(words.format(other=tmp_path / "other").split())
    assert re.search(in_order(said), " ".join(capsys.readouterr().err.split()))
