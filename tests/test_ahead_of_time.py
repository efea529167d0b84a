"""The benchmark that compiles for machines that are not there: what it reads, and what it refuses."""

import importlib.util
import json
from pathlib import Path

import ahead_of_time
import jax
import jax.numpy as jnp
import pytest
from aot import machines, programs, reading

from lioncub_jax import planner

RESULTS = Path(ahead_of_time.__file__).parent / "results" / "ahead_of_time.jsonl"


def moved(f, *args):
    text = jax.jit(f).lower(*args).compile().as_text()
    return sum(kernel.bytes for kernel in reading.kernels(text))


def test_a_kernel_moves_what_it_reads_and_writes_and_of_what_is_cut_the_cut():
    x = jnp.ones(4096)
    assert moved(lambda x: 2 * x + 1, x) == 2 * 4 * 4096
    cut = moved(lambda x, at: 2 * jax.lax.dynamic_slice_in_dim(x, at, 64) + 1, x, 5)
    assert 2 * 4 * 64 <= cut < 4 * 4096


FUSED = """HloModule step, is_scheduled=true

%fused (p: f32[256], q: s32[256]) -> f32[256] {
  %p = f32[256]{0} parameter(0)
  %q = s32[256]{0} parameter(1)
  ROOT %n = f32[256]{0} negate(%p)
}

ENTRY %main (x: f32[256], w: u32[8,16]) -> f32[256] {
  %x = f32[256]{0} parameter(0)
  %w = u32[8,16]{1,0} parameter(1)
"""
PROGRAM = """  %l = f32[64,32]{1,0} parameter(2)
  %r = f32[32,128]{1,0} parameter(3)
  %before = f32[64,128]{1,0} custom-call(%l, %r), custom_call_target="gemm", PRODUCT
  %up = ((u32[8,16]{1,0}), u32[8,16]{1,0}) all-to-all-start(%w), metadata={op_name="jit(f)/lioncub.up/a"}
  %a = f32[256]{0} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/jvp(loss)/neg"}
  %d = f32[64,128]{1,0} custom-call(%l, %r), custom_call_target="gemm", PRODUCT
  %done = u32[8,16]{1,0} all-to-all-done(%up)
  %b = f32[256]{0:S(1)} fusion(%a), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/lioncub.unpack/neg"}
  ROOT %c = f32[256]{0} fusion(%b), kind=kLoop, calls=%fused
}
""".replace("PRODUCT", 'metadata={op_name="jit(f)/dot_general"}, '
            'backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}')  # fmt: skip
# An array by two names, one behind a barrier: 1024 bytes in, 1024 out.
TWICE = """  %y = f32[256]{0} parameter(2)
  %barrier = (f32[256]{0}, f32[256]{0}) tuple(%y, %x)
  %behind = f32[256]{0} get-tuple-element(%barrier), index=1
  %bits = s32[256]{0} bitcast(%behind)
  ROOT %f = f32[256]{0} fusion(%x, %bits), kind=kLoop, calls=%fused
}
"""
# To on-chip memory, S(1): what is read; of slices no more than their size.
COPIES = """  %s = ((f32[256]{0}), f32[64]{0:S(1)}, s32[]{:S(2)}) slice-start(%x), slice={[0:64]}
  %t = f32[64]{0:S(1)} slice-done(%s)
  %c = (f32[256]{0:S(1)}, f32[256]{0}, u32[]{:S(2)}) copy-start(%x)
  %d = f32[256]{0:S(1)} copy-done(%c)
  ROOT %r = f32[256]{0} custom-call(%d), custom_call_target="ConcatBitcast"
}
"""


def test_work_between_the_start_and_the_end_of_a_collective_is_hidden():
    found = reading.kernels(FUSED + PROGRAM)
    product = 4 * (64 * 32 + 32 * 128 + 64 * 128)
    # What lies in on-chip memory is not moved: of %b the input, of %c the output.
    parts = {"model": 2048, "unpack": 1024, "up": 1536, "other": 1024 + 2 * product}
    assert reading.by_part(found) == parts
    assert reading.overlapped(found) == (2048 + product) / sum(parts.values())
    assert reading.exchanges(found) == [("all-to-all", 4 * 8 * 16, 2 * 64 * 128 * 32)]
    waits = PROGRAM.replace("start(%w)", 'start(%w), backend_config={"is_sync":true}')
    assert reading.overlapped(reading.kernels(FUSED + waits)) is None


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (TWICE, {"f": 2048}),
        (TWICE.replace("index=1", "index=0"), {"f": 3072}),
        (COPIES, {"s": 256, "t": 0, "c": 1024, "d": 0, "r": 0}),
    ],
)
def test_what_a_kernel_has_by_two_names_or_copies_is_moved_once(text, wanted):
    assert {k.name: k.bytes for k in reading.kernels(FUSED + text)} == wanted


def test_a_share_of_the_bytes_is_covered_where_the_matrix_work_takes_longer_than_the_wire():
    wire = 8 * 700 / planner.cluster_named("h100-8").cluster.link.bandwidth
    row = {"machine": "h100-8", "sent_bytes": 2800.0}
    row["exchanges"] = [["all-to-all", 800, wire], ["all-gather", 800, 0.9 * wire]]
    assert ahead_of_time.covered(row) == pytest.approx(700 / 2800)
    assert ahead_of_time.covered(row | {"machine": "h100-64"}) == 0.0  # a worker is a node there


@pytest.mark.parametrize("name", machines.MACHINES)
def test_machines_are_the_planners_and_committed_rows_send_what_it_says(name):
    """Each device a worker, or two; where the planner's worker is a node only the devices agree."""
    found, devices = planner.cluster_named(name), machines.named(name).devices
    assert found.devices == devices
    sent = {
        row["method"]: row.get("predicted_bytes")
        for row in map(json.loads, RESULTS.read_text().splitlines())
        if (row["machine"], row["model"]) == (name, "matrix")
    }
    one, link = found.cluster, found.cluster.link
    if one.group_size > 1:
        one = planner.Cluster(devices, link)
    vote, params = planner.scheme_named("1-bit vote"), programs.named("matrix").params
    two = planner.Cluster(devices // 2, link, 2, link)
    for cluster, method in ((one, "vote, 1 bit"), (two, ahead_of_time.TWO_LEVELS)):
        of_worker = planner.step_time(vote, params, cluster, 0.1).sent_bytes
        assert of_worker / cluster.group_size == sent[method]


def test_rows_say_what_a_compiled_step_sends_and_are_kept(monkeypatch, tmp_path):
    small, file = programs.Model(*programs.gpt(1, 32, 2, 64, 16), (1, 17)), tmp_path / "rows.jsonl"
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    monkeypatch.setattr(programs, "named", lambda name: small)
    monkeypatch.setattr(machines, "mesh_of", lambda name, sizes: mesh)
    methods = [programs.LION, "vote, 1 bit", "owner, 3 bits"]
    monkeypatch.setattr(ahead_of_time, "methods", lambda machine, model: methods)
    monkeypatch.setattr("sys.argv", ["x", "--machines", "v5e-8", "--save", str(file)])
    for compiles in (ahead_of_time.one, None):  # rows that are there are not compiled again
        monkeypatch.setattr(ahead_of_time, "in_a_process", compiles)
        ahead_of_time.main()
    lion, *ours = map(json.loads, file.read_text().splitlines())
    loss_mean = 7.0  # an all-reduce of one float
    assert [row["sent_bytes"] - row["predicted_bytes"] for row in ours] == [loss_mean] * 2
    assert lion["sent_bytes"] > 2 * 7 / 8 * 4 * small.size
    over = ahead_of_time.summary([lion, *ours])["accessed_over_lion_vote"]
    assert over == ours[0]["accessed"] / lion["accessed"]


REFUSED = [
    (lambda: reading.kernels(FUSED.replace(", is_scheduled=true", "")), "has no schedule"),
    (lambda: machines.named("v4-8"), "give one of v5e-8, .*h100-64"),
    (lambda: machines.mesh_of("v5e-8", {"data": 4}), "4 devices, and v5e-8 has 8"),
    (lambda: machines.mesh_of("v5e-8", {"data": 8}), r"pip install -e '\.\[tpu\]'"),
    (lambda: programs.named("gpt"), "give one of matrix"),
    (lambda: programs.sizes(programs.named("gpt-7b, fsdp 8"), 8), "no two workers of 8"),
]


@pytest.mark.parametrize(("call", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_be_read_or_compiled_is_refused(monkeypatch, call, said):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises((ValueError, ModuleNotFoundError), match=said):
        call()


# --- By the compiler of TPUs

# Bytes a parameter of temporaries over float32 Lion's, and how often its bytes accessed.
BOUNDS = {"vote, 1 bit": (0.5, 1.7), "vote, 2 bits": (1.0, 2.2), "owner, 3 bits": (1.0, 2.2)}


# Of the small GPT, in which float32 Lion has all on chip, a third of the arrays are small and joined.
@pytest.mark.tpu
@pytest.mark.parametrize(("model", "joined"), [("matrix", 0), ("gpt-2m", 4.5)])
def test_a_tpu_lays_nothing_out_anew(model, joined):
    lion = ahead_of_time.in_a_process("v5e-8", model, programs.LION)
    for method, (temporaries, accessed) in BOUNDS.items():
        row = ahead_of_time.in_a_process("v5e-8", model, method)
        assert row["temporaries"] - lion["temporaries"] <= temporaries + joined, method
        assert row["accessed"] <= accessed * lion["accessed"], method
        floats = sum(sent for _, dtype, sent, _ in row["collectives"] if dtype != "u32")
        assert floats <= 64 and row["sent_bytes"] - floats == row["predicted_bytes"], method


@pytest.mark.tpu
def test_on_a_tpu_the_first_bucket_travels_under_the_backward_pass():
    row = ahead_of_time.in_a_process("v5e-8", "gpt-2m", programs.BUCKETS)
    assert {op for op, *_ in row["exchanges"]} == {"all-to-all"}
    assert row["exchanges"][0][2] > 0  # seconds of matrix work
    assert row["sent_bytes"] == pytest.approx(row["predicted_bytes"], abs=64)
