"""That the benchmark for GPUs measures, counts and refuses as it says; on a CPU, at sizes of no time."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
STEPS = ["optax.lion", "1-bit vote", "2-bit vote", "3-bit vote"]
OPS = [*STEPS, "owner, 3 bits + feedback", "pack", "tally", "unpack"]
SIZE = 2**16
BYTES = 4 * SIZE


@pytest.fixture(scope="module")
def gpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import gpu

        yield gpu


@pytest.fixture
def small(gpu, monkeypatch):
    """The benchmark with samples and a copy that take no time."""
    monkeypatch.setattr(gpu, "SAMPLE_MS", 0.01)
    monkeypatch.setattr(gpu, "COPIED", {False: 2**16})
    return gpu


def keep(gpu, monkeypatch, *names):
    """Leaves these of the local steps, because each takes a second to compile."""
    every = gpu.local_step.candidates

    def chosen(params):
        return {name: step for name, step in every(params).items() if name in names}

    monkeypatch.setattr(gpu.local_step, "candidates", chosen)


@pytest.fixture
def smaller(small, monkeypatch):
    """With one local step."""
    keep(small, monkeypatch, "optax.lion")
    return small


def result(gpu, capsys, *argv):
    gpu.main(["--sizes", "64K", "--rounds", "2", "--skip-demo", *argv])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_each_op_is_measured(small, capsys, monkeypatch):
    monkeypatch.setattr(small, "DTYPES", (jnp.bfloat16,))
    keep(small, monkeypatch, "optax.lion", "1-bit vote")
    found = result(small, capsys)
    assert [row["op"] for row in found["rows"]] == [*STEPS[:2], *OPS[-3:]]
    for row in found["rows"]:
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"], row
        assert row["floor_ms"] == row["floor_bytes"] / 1e6 / found["copy"]["gb_per_s"]
        assert row["x_floor"] == row["ms"] / row["floor_ms"]
        assert row["kernels"] > 0 and row["rounds"] == 2
        assert (row["parameters"], row["dtype"]) == ("64K", "bfloat16")
    assert found["rows"][0]["x_optax_lion"] == 1.0
    assert (found["platform"], found["device"], found["skipped"]) == ("cpu", "cpu", [])


def test_rows_and_traces_are_kept(smaller, capsys, tmp_path):
    traces = tmp_path / "traces"
    found = result(smaller, capsys, "--save", str(tmp_path / "rows"), "--profile", str(traces))
    assert json.loads((tmp_path / "rows").read_text()) == found
    assert {folder.name for folder in traces.iterdir()} == {"64K-float32", "64K-bfloat16"}


def test_the_floor_is_every_array_once(gpu):
    steps, shapes = gpu.steps(SIZE, jnp.float32)
    pieces, more = gpu.pieces(SIZE, jnp.float32)
    floors = {name: op.floor for name, op in (steps | pieces).items()}
    assert list(floors) == OPS
    # Parameters and momentum both ways, gradients once; and a counter.
    assert floors["optax.lion"] == 5 * BYTES + 2 * 4
    blocks = SIZE // 4096
    # A bit of each element and one of each row, to all owners and from all of them: written by one
    # side and read by the other. And a word of who takes part; ties and presence.
    words = 4 * (128 + 1) * blocks
    sent = 2 * (words + 4 * 8) + (1 + 1 / 8) * (words + 4 * 2 * 8)
    counters = 2 * gpu.size_of(shapes["state of 1-bit vote"]) - 2 * BYTES
    assert floors["1-bit vote"] == 5 * BYTES + sent + counters
    assert floors["pack"] == BYTES + words + 1  # and whether all are finite
    assert floors["tally"] == (1 + 1 / 8) * words
    assert floors["unpack"] == BYTES + words + 4 * 2 * 8
    assert set(more) & set(shapes) == set()


def test_unpacking_gives_the_signs_that_were_packed(gpu):
    """The replies of eight owners, with the words that one worker packs: its own signs come back."""
    ops, shapes = gpu.pieces(SIZE, jnp.float32)
    values = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    [message] = ops["pack"].fn({"w": jnp.asarray(values)}, empty["message"])
    planes = np.asarray(message.planes[0]).reshape(8, -1)
    rows = np.full((8, SIZE // 4096 // 8), 2**32 - 1, np.uint32)
    replies = np.concatenate([planes, np.zeros((8, 2), np.uint32), rows], axis=1)
    short = shapes["replies"].shape[1] - replies.shape[1]
    replies = np.pad(replies, ((0, 0), (0, short)))
    [updates] = ops["unpack"].fn(jnp.asarray(replies), empty["updates"])
    np.testing.assert_array_equal(updates, np.sign(values))


def test_sizes_are_left_out_from_the_largest_when_time_runs_out(small, capsys, monkeypatch):
    seconds = {"1K": 100, "2K": 200}
    now = [0.0]
    monkeypatch.setattr(small, "DTYPES", (jnp.float32,))
    monkeypatch.setattr(small.time, "monotonic", lambda: now[0])

    def measure(size, *others):
        now[0] += seconds[small.label(size)]
        return []

    monkeypatch.setattr(small, "measure", measure)
    monkeypatch.setattr(small, "show", lambda found: None)
    found = result(small, capsys, "--sizes", "4K,2K,1K", "--budget", "480")
    why = "time: 180 of 480 s were left, and the size before took 200 s"
    assert found["skipped"] == [{"parameters": "4K", "dtype": "float32", "why": why}]


def test_rounds_end_when_time_runs_out(small):
    programs = {"nothing": lambda store: ()}
    assert small.timed(programs, {}, 5, small.Clock(-1)).ms.keys() == {"nothing"}
    assert len(small.timed(programs, {}, 5, small.Clock(-1)).ms["nothing"]) == 1
    assert len(small.timed(programs, {}, 5, small.Clock(60)).ms["nothing"]) == 5


def test_what_does_not_fit_in_memory_is_left_out(smaller, capsys, monkeypatch):
    class Device:
        platform, device_kind = "cpu", "cpu"

        def memory_stats(self):
            return {"bytes_limit": 1_600_000, "bytes_in_use": 1_000_000}

    monkeypatch.setattr(smaller.jax, "devices", lambda: [Device()])
    found = result(smaller, capsys)
    assert found["rows"] == []
    assert [one["dtype"] for one in found["skipped"]] == ["float32", "bfloat16"]
    assert all("GB, 0.0 GB are free" in one["why"] for one in found["skipped"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "finds no GPU.*jax.cuda12.*--sizes 1M,4M.*--predict"),
        (["--sizes", "16"], "'16' is no size"),
        (["--sizes", "16M,4G"], "'4G' is no size"),
        (["--sizes", "0M"], "'0M' is no size"),
        (["--sizes", "2B"], "'2B' is no size.*below 2B"),
        (["--sizes", "1M", "--rounds", "0"], "--rounds 0: give at least 1"),
        (["--sizes", "1M", "--budget", "0"], "--budget 0: give a number of seconds above 0"),
        (["--sizes", "1M", "--budget", "nan"], "--budget nan: give a number"),
        (["--predict", "v5e-8"], "invalid choice: 'v5e-8'.*'h100-8', 'h100-64'"),
    ],
)
def test_what_cannot_be_measured_is_refused(gpu, capsys, argv, message):
    with pytest.raises(SystemExit) as stopped:
        gpu.main(argv)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert re.search(message, said, re.DOTALL), said


def test_the_training_step_of_the_example(small, monkeypatch):
    monkeypatch.syspath_prepend(str(small.EXAMPLES))
    from gpt import corpus

    text = np.arange(40_000, dtype=np.uint32).astype(np.uint8)
    monkeypatch.setattr(corpus, "standard_library", lambda: corpus.Corpus("bytes", text, text))
    tiny = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "8", "--batch", "1"]
    once, asked = small.prepared([*tiny, "--optimizer", "lion-cub"]), []

    def prepared(argv):
        asked.append(argv[-2:])
        return once._replace(state=jax.tree.map(lambda x: x.copy(), once.state))

    monkeypatch.setattr(small, "prepared", prepared)
    found = small.demo(tiny, 2, small.Clock(60), None)
    assert asked == [["--optimizer", "lion-cub"], ["--optimizer", "lion"]]
    assert list(found["steps"]) == ["lion_cub", "optax.lion"]
    assert found["tokens"] == 8
    assert all(row["ms"] > 0 and row["floor_bytes"] is None for row in found["steps"].values())


def test_kernels_are_counted_where_they_are_started(gpu):
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


def test_each_op_is_predicted_for_a_gpu_that_is_not_there(tmp_path):
    """In a process of its own, which JAX enters with the described GPU's flags."""
    file, program = tmp_path / "rows", str(BENCHMARKS / "gpu.py")
    asked = [sys.executable, program, "--predict", "--sizes", "64K", "--save", str(file)]
    done = subprocess.run(asked, capture_output=True, text=True)
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        assert done.returncode == 2
        assert "jax_cuda12_plugin is not installed" in done.stderr
        assert "pip install -e '.[cuda]'" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["op"] for row in rows] == 2 * OPS
    assert {(row["machine"], row["parameters"]) for row in rows} == {("h100-8", "64K")}
    assert all(row["kernels"] and row["accessed_bytes"] > 0 for row in rows)
    assert [row["x_floor"] for row in rows[:: len(OPS)]] == pytest.approx([1, 1], rel=1e-3)
    worst = json.loads(done.stdout.splitlines()[-1])["x_floor_at_most"]
    assert worst == {op: max(r["x_floor"] for r in rows if r["op"] == op) for op in OPS}


def test_predicted_is_the_time_of_the_bytes(gpu, monkeypatch):
    keep(gpu, monkeypatch, "optax.lion", "1-bit vote")
    monkeypatch.setattr(gpu.machines, "device_of", lambda name: jax.devices()[0])
    rows = gpu.predicted("h100-8", SIZE, jnp.float32)
    assert [row["op"] for row in rows] == [*STEPS[:2], *OPS[-3:]]
    for row in rows:
        assert row["ms"] == 1e3 * row["accessed_bytes"] / 3_352_320_000_000
        assert row["x_floor"] == row["accessed_bytes"] / row["floor_bytes"]
        assert row["x_optax_lion"] == row["accessed_bytes"] / rows[0]["accessed_bytes"]
        assert 0 < sum(row["largest"].values()) <= row["accessed_bytes"] / SIZE


def test_rows_stand_beside_their_predictions(smaller, capsys, tmp_path):
    found = result(smaller, capsys)
    assert all(row["predicted"] is row["x_predicted"] is None for row in found["rows"])  # a CPU
    one = {"parameters": "64K", "dtype": "float32", "op": "optax.lion", "machine": "h100-8"}
    one |= {"jax": "0.10.2", "x_floor": 2.0, "x_optax_lion": 1.0, "kernels": 2}
    lines = [one | {"x_floor": 9.0}, one, one | {"op": "pack"}, one | {"parameters": "1M"}]
    (tmp_path / "rows").write_text("".join(json.dumps(line) + "\n" for line in lines))
    known = smaller.kept(tmp_path / "rows")
    lion, pack, *others = (row | {"x_floor": 2.5} for row in found["rows"])
    lion, pack = (row | smaller.compared(row, known) for row in (lion, pack | {"x_floor": 2.51}))
    assert lion["predicted"]["x_floor"] == 2.0  # the last of several
    assert (lion["x_predicted"], pack["x_predicted"]) == (1.25, 2.51 / 2)
    smaller.show(found | {"rows": [lion, pack, *others]})
    said = " ".join(capsys.readouterr().out.split())
    assert "2.500 (2.000)" in said and "2.510 (2.000)" in said
    assert said.count("2.500 (none)") == len(others) == 6
    assert "1 of 2 predicted ratios to the floor hold, up to a factor of 1.25" in said
    assert "6 rows have no prediction" in said


def test_all_that_is_measured_on_a_gpu_is_predicted(gpu):
    """The committed rows."""
    known = gpu.kept(gpu.PREDICTED)
    dtypes = [jnp.dtype(dtype).name for dtype in gpu.DTYPES]
    wanted = {(size, dtype, op) for size in gpu.SIZES.split(",") for dtype in dtypes for op in OPS}
    assert known.keys() == wanted
    for (size, dtype, op), row in known.items():
        assert row["floor_bytes"] == gpu.every(gpu.size_from(size), dtype)[0][op].floor, row
