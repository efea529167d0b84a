"""That the benchmark for GPUs measures, counts and refuses as it says; on a CPU, at sizes of no time."""

import json
import re
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
        ([], "finds no GPU.*jax.cuda12.*--sizes 1M,4M"),
        (["--sizes", "16"], "'16' is no size"),
        (["--sizes", "16M,4G"], "'4G' is no size"),
        (["--sizes", "0M"], "'0M' is no size"),
        (["--sizes", "2B"], "'2B' is no size.*below 2B"),
        (["--sizes", "1M", "--rounds", "0"], "--rounds 0: give at least 1"),
        (["--sizes", "1M", "--budget", "0"], "--budget 0: give a number of seconds above 0"),
        (["--sizes", "1M", "--budget", "nan"], "--budget nan: give a number"),
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
