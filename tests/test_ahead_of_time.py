"""The benchmark that compiles for machines that are not there: what it reads, and what it refuses."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import ahead_of_time
import jax
import jax.numpy as jnp
import pytest
from aot import machines, programs, reading

import lioncub_jax as lc
from lioncub_jax import planner

MESH = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def text_of(f, *args):
    return jax.jit(f).lower(*args).compile().as_text()


def test_a_kernel_moves_what_it_reads_and_writes():
    x = jnp.ones(4096)
    assert sum(k.bytes for k in reading.kernels(text_of(lambda x: 2 * x + 1, x))) == 2 * 4 * 4096


def test_of_what_is_only_cut_the_cut_counts():
    x = jnp.ones(4096)

    def cut(x, at):
        return 2 * jax.lax.dynamic_slice_in_dim(x, at, 64) + 1

    moved = sum(k.bytes for k in reading.kernels(text_of(cut, x, 5)))
    assert 2 * 4 * 64 <= moved < 4 * 4096


PROGRAM = """HloModule step, is_scheduled=true

%fused (p: f32[256]) -> f32[256] {
  %p = f32[256]{0} parameter(0)
  ROOT %n = f32[256]{0} negate(%p)
}

ENTRY %main (x: f32[256], w: u32[8,16]) -> f32[256] {
  %x = f32[256]{0} parameter(0)
  %w = u32[8,16]{1,0} parameter(1)
  %up = ((u32[8,16]{1,0}), u32[8,16]{1,0}) all-to-all-start(%w), metadata={op_name="jit(f)/lioncub.up/a"}
  %a = f32[256]{0} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/jvp(loss)/neg"}
  %done = u32[8,16]{1,0} all-to-all-done(%up)
  %b = f32[256]{0:S(1)} fusion(%a), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/lioncub.unpack/neg"}
  ROOT %c = f32[256]{0} fusion(%b), kind=kLoop, calls=%fused
}
"""


def test_work_between_the_start_and_the_end_of_a_collective_is_hidden():
    found = reading.kernels(PROGRAM)
    assert [k.collective for k in found if k.collective] == ["all-to-all"]
    parts = reading.by_part(found)
    # What lies in on-chip memory is not moved: of %b the input, of %c the output.
    assert (parts["model"], parts["unpack"], parts["other"]) == (2048, 1024, 1024)
    total = sum(k.bytes for k in found)
    assert reading.overlapped(found) == 2048 / total
    waits = PROGRAM.replace(
        "all-to-all-start(%w)", 'all-to-all-start(%w), backend_config={"is_sync":true}'
    )
    assert reading.overlapped(reading.kernels(waits)) is None


def test_an_array_of_two_names_is_read_once():
    """A kernel that has it behind a barrier too moves no more: 1024 bytes in, 1024 out."""
    twice = """HloModule step, is_scheduled=true

%fused (p: f32[256], q: s32[256]) -> f32[256] {
  %p = f32[256]{0} parameter(0)
  %q = s32[256]{0} parameter(1)
  ROOT %n = f32[256]{0} negate(%p)
}

ENTRY %main (x: f32[256], y: f32[256]) -> f32[256] {
  %x = f32[256]{0} parameter(0)
  %y = f32[256]{0} parameter(1)
  %barrier = (f32[256]{0}, f32[256]{0}) tuple(%y, %x)
  %behind = f32[256]{0} get-tuple-element(%barrier), index=1
  %bits = s32[256]{0} bitcast(%behind)
  ROOT %f = f32[256]{0} fusion(%x, %bits), kind=kLoop, calls=%fused
}
"""
    [kernel] = reading.kernels(twice)
    assert kernel.bytes == 2048
    [kernel] = reading.kernels(twice.replace("index=1", "index=0"))
    assert kernel.bytes == 3072


def test_a_copy_moves_what_it_reads_or_writes_in_main_memory():
    """To on-chip memory, ``S(1)``: what is read; of slices no more than their size."""
    text = """HloModule step, is_scheduled=true

ENTRY %main (x: f32[256]) -> f32[256] {
  %x = f32[256]{0} parameter(0)
  %s = ((f32[256]{0}), f32[64]{0:S(1)}, s32[]{:S(2)}) slice-start(%x), slice={[0:64]}
  %t = f32[64]{0:S(1)} slice-done(%s)
  %c = (f32[256]{0:S(1)}, f32[256]{0}, u32[]{:S(2)}) copy-start(%x)
  %d = f32[256]{0:S(1)} copy-done(%c)
  ROOT %r = f32[256]{0} custom-call(%d), custom_call_target="ConcatBitcast"
}
"""
    moved = {k.name: k.bytes for k in reading.kernels(text)}
    assert moved == {"s": 256, "t": 0, "c": 1024, "d": 0, "r": 0}


def test_only_compiled_text_is_read():
    with pytest.raises(ValueError, match="has no schedule"):
        reading.kernels(PROGRAM.replace(", is_scheduled=true", ""))
    with pytest.raises(ValueError, match="not the text of a compiled program"):
        reading.kernels("module @jit_f {}")


@pytest.mark.parametrize("name", ["v4-8", ""])
def test_unknown_machines_are_refused(name):
    with pytest.raises(ValueError, match=r"give one of v5e-8, .*h100-64"):
        machines.named(name)


def test_a_mesh_takes_all_devices_of_a_machine():
    with pytest.raises(ValueError, match="4 devices, and v5e-8 has 8"):
        machines.mesh_of("v5e-8", {"data": 4})


@pytest.mark.parametrize("name", machines.MACHINES)
def test_machines_are_the_planners_and_send_what_it_says(name):
    """Each device a worker, or two; where the planner's worker is a node only the devices agree."""
    found, machine = planner.cluster_named(name), machines.named(name)
    assert (found.devices, found.platform.replace("gpu", "cuda")) == (
        machine.devices,
        machine.platform,
    )
    model, link = programs.named("matrix"), found.cluster.link
    assert model.size == 8_388_608
    one = planner.Cluster(machine.devices, link)
    if found.cluster.group_size == 1:
        one = found.cluster
    two = planner.Cluster(machine.devices // 2, link, 2, link)
    results = pathlib.Path(ahead_of_time.__file__).parent / "results" / "ahead_of_time.jsonl"
    rows = [
        row for row in map(json.loads, results.read_text().splitlines()) if row["model"] == "matrix"
    ]
    compiled = {
        r["method"]: r["predicted_bytes"]
        for r in rows
        if r["machine"] == name and "predicted_bytes" in r
    }
    vote = planner.scheme_named("1-bit vote")
    for cluster, method in ((one, "vote, 1 bit"), (two, ahead_of_time.TWO_LEVELS)):
        sent = planner.step_time(vote, model.params, cluster, 0.1).sent_bytes
        assert sent / cluster.group_size == compiled[method]


@pytest.mark.parametrize(("name", "extra"), [("v5e-8", "tpu"), ("h100-8", "cuda")])
def test_without_its_compiler_a_machine_says_how_to_get_it(monkeypatch, name, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install -e '\.\[{extra}\]'"):
        machines.mesh_of(name, {"data": 8})


def test_models_have_the_sizes_of_their_names():
    sizes = {name: programs.named(name) for name in programs.MODELS}
    assert len(jax.tree.leaves(sizes["gpt-124m"].params)) == 148
    for name, millions in [
        ("gpt-2m", 1.74),
        ("gpt-124m", 124),
        ("gpt-1.3b", 1313),
        ("gpt-7b, fsdp 8", 6657),
    ]:
        assert sizes[name].size / 1e6 == pytest.approx(millions, rel=0.02), name
    with pytest.raises(ValueError, match="give one of matrix"):
        programs.named("gpt")
    with pytest.raises(ValueError, match="no two workers of 8"):
        programs.sizes(sizes["gpt-7b, fsdp 8"], 8)


@pytest.mark.parametrize("method", programs.METHODS)
def test_a_step_of_each_method_sends_what_is_predicted(method):
    params, loss = programs.gpt(1, 32, 2, 64, 16)
    model, mesh = programs.Model(params, loss, (1, 17)), MESH
    lowered, tx = programs.lowered(model, method, mesh)
    compiled = lowered.compile()
    lc.check_votes(compiled)
    loss_mean = 7.0  # an all-reduce of one float
    want = ahead_of_time.predicted(tx, model, mesh, 1) + loss_mean
    assert lc.traffic.compiled_bytes(compiled, mesh) == pytest.approx(want)


def test_float32_lion_is_ordinary_data_parallelism():
    model, mesh = programs.named("matrix"), MESH
    text = programs.lowered(model, programs.LION, mesh)[0].compile().as_text()
    [mean] = lc.traffic.collectives(text, mesh)
    assert mean.op == "all-reduce" and mean.payload_bytes == 4 * model.size


def test_rows_of_a_file_are_not_compiled_again(tmp_path, monkeypatch, capsys):
    def compiled(machine, model, method):
        calls.append(method)
        row = {"machine": machine, "model": model, "method": method, "compile_s": 2.0}
        row |= {
            "temporaries": 1.0,
            "accessed": 4.0,
            "kernels": 3,
            "sent_bytes": 1e6,
            "overlapped": 0.5,
        }
        return row | {
            "collectives": [["all-gather", "u32", 1e6, False]],
            "asynchronous": ["all-gather"],
            "exchanges": [["all-gather", 1e6, 1.0]],
        }

    calls, file = [], tmp_path / "rows.jsonl"
    monkeypatch.setattr(ahead_of_time, "in_a_process", compiled)
    monkeypatch.setattr("sys.argv", ["x", "--machines", "v5e-8", "--save", str(file)])
    for _ in range(2):
        ahead_of_time.main()
    assert len(calls) == len(file.read_text().splitlines()) == 6
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["accessed_over_lion_owner"], last["overlapped_share"]) == (1.0, 0.875)
    monkeypatch.setattr("sys.argv", ["x", "--machines", "v4-8"])
    with pytest.raises(SystemExit):
        ahead_of_time.main()
    assert "give one of v5e-8" in capsys.readouterr().err


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
        assert floats <= 64, method
        assert row["sent_bytes"] - floats == row["predicted_bytes"], method


@pytest.mark.tpu
def test_a_tpu_packs_with_a_kernel_that_can_be_turned_off():
    program = (
        "from aot import machines, programs; import lioncub_jax as lc; "
        "lc.kernels.mode({mode!r}); mesh = machines.mesh_of('v5e-8', {{'data': 8}}); "
        "lowered, _ = programs.lowered(programs.named('matrix'), 'vote, 1 bit', mesh); "
        "print('lioncub_pack' in lowered.compile().as_text())"
    )
    environment = os.environ | machines.environment(machines.named("v5e-8"))
    for mode, kernel in (("auto", "True"), ("off", "False")):
        asked = [sys.executable, "-c", program.format(mode=mode)]
        where = pathlib.Path(ahead_of_time.__file__).parent
        done = subprocess.run(asked, env=environment, cwd=where, capture_output=True, text=True)
        assert done.stdout.split() == [kernel], done.stderr


@pytest.mark.tpu
def test_on_a_tpu_the_first_bucket_travels_under_the_backward_pass():
    row = ahead_of_time.in_a_process("v5e-8", "gpt-2m", programs.BUCKETS)
    assert {op for op, *_ in row["exchanges"]} == {"all-to-all"}
    assert row["exchanges"][0][2] > 0  # seconds of matrix work
    assert row["sent_bytes"] == pytest.approx(row["predicted_bytes"], abs=64)


def test_what_travels_is_counted_with_the_matrix_work_meanwhile():
    contracted = '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}'
    product = (
        '  %d = f32[64,128]{1,0} custom-call(%l, %r), custom_call_target="gemm", '
        f'metadata={{op_name="jit(f)/dot_general"}}, backend_config={contracted}\n'
    )
    given = """  %l = f32[64,32]{1,0} parameter(2)
  %r = f32[32,128]{1,0} parameter(3)
"""
    text = PROGRAM.replace("  %up =", given + product.replace("%d", "%before") + "  %up =")
    text = text.replace("  %done =", product + "  %done =")
    [one] = reading.exchanges(reading.kernels(text))
    assert one == ("all-to-all", 4 * 8 * 16, 2 * 64 * 128 * 32)


def test_a_share_of_the_bytes_is_covered_where_the_matrix_work_takes_longer_than_the_wire():
    wire = 8 * 700 / planner.cluster_named("h100-8").cluster.link.bandwidth
    row = {"machine": "h100-8", "sent_bytes": 2800.0}
    row["exchanges"] = [["all-to-all", 800, wire], ["all-gather", 800, 0.9 * wire]]
    assert ahead_of_time.covered(row) == pytest.approx(700 / 2800)
    assert ahead_of_time.covered(row | {"machine": "h100-64"}) == 0.0  # a worker is a node there
