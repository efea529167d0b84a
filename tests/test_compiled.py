"""Collectives of programs compiled here, and of text that XLA printed for GPUs and TPUs."""

import io
import itertools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from lioncub_jax.programs.compiled import Collective, Operand, collectives, sent_bytes, table

BLOCK = Operand("f32", (8, 8))  # what each of 8 devices holds of f32[64, 8]: 256 bytes
DATA = AbstractMesh((8,), ("data",))
DATA_TP = AbstractMesh((4, 2), ("data", "tp"))
CUBE = AbstractMesh((2, 2, 2), ("a", "b", "c"))

# --- Programs compiled here


def read(body):
    """Collectives of ``body``, on a mesh whose devices are not in the order of their numbers."""
    devices = np.array(jax.devices())[[3, 1, 4, 0, 5, 7, 2, 6]].reshape(4, 2)
    mesh = Mesh(devices, ("data", "tp"))
    spec = P(("data", "tp"))
    array = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=NamedSharding(mesh, spec))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return collectives(jax.jit(mapped).lower(array).compile(), mesh)


OPS = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"


def test_each_collective_over_each_combination_of_axes():
    groups = {("data",): 4, ("data", "tp"): 8}

    def body(x):
        sums = []
        for axes, size in groups.items():
            sums += [
                jax.lax.psum(x, axes),
                jax.lax.all_gather(x, axes),
                jax.lax.psum_scatter(x, axes, tiled=True),
                jax.lax.all_to_all(x, axes, 0, 0, tiled=True),
                jax.lax.ppermute(x, axes, [(i, (i + 1) % size) for i in range(size)]),
            ]
        return [array.sum() + x for array in sums]

    found = read(body)
    assert sorted((one.op, one.axes, one.group_size) for one in found) == sorted(
        (op, axes, size) for op, (axes, size) in itertools.product(OPS, groups.items())
    )
    assert {(one.payload_bytes, *one[-3:]) for one in found} == {(256, 1, False, False)}
    # By hand from the ring algorithms, in the order of OPS; of each alone in a program for GPUs.
    of_four, of_eight = 384 + 768 + 192 + 192 + 256, 448 + 1792 + 224 + 224 + 256
    assert sent_bytes(found) == {("data",): of_four, ("data", "tp"): of_eight}


def test_loops_multiply_and_branches_are_apart():
    def sometimes(y):
        return jax.lax.cond(y[0, 0] > 0, lambda y: jax.lax.psum(y, "tp") / 2, lambda y: y, y)

    def body(x):
        seven = lambda c, _: (jax.lax.fori_loop(0, 7, lambda _, c: sometimes(c), c) + 1, None)  # noqa: E731
        return jax.lax.scan(seven, x, length=3)[0]

    found = read(body)
    assert found == [Collective("all-reduce", (BLOCK,), ("tp",), 2, times=21, gated=True)]
    assert sent_bytes(found) == {}
    assert sent_bytes(found, gated=True) == {("tp",): 21 * 256}


def test_a_permute_without_pairs_sends_nothing():
    """As of a pipeline with one stage; groups without members are all devices."""
    (found,) = read(lambda x: jax.lax.ppermute(x, "tp", []))
    assert (found.op, found.axes, found.sent_bytes) == ("collective-permute", (), 0)


# --- Text as XLA prints it: from ahead-of-time compilation for 8 H100 (jax 0.10.2) and 8 TPU v5e
# (jax 0.12.0.1), with long metadata and configurations cut.

GPU = """
HloModule jit_step, is_scheduled=true, num_partitions=8

%region_1.3_spmd (arg: (f32[8,8])) -> (f32[8,8]) {
  %arg = (f32[8,8]{1,0}) parameter(0)
  %get = f32[8,8]{1,0} get-tuple-element(%arg), index=0
  %start.8 = f32[8,8]{1,0} all-reduce-start(%get), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%region_2.2
  %done.8 = f32[8,8]{1,0} all-reduce-done(%start.8)
  ROOT %tuple = (f32[8,8]{1,0}) tuple(%done.8)
}

%region_2.2 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %sum = f32[] add(%a, %a)
}

%region_3.4_spmd (arg.1: (f32[8,8])) -> (f32[8,8]) {
  ROOT %arg.1 = (f32[8,8]{1,0}) parameter(0)
}

ENTRY %main.0_spmd (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %s = f32[] parameter(1)
  %i = s64[4]{0} parameter(2)
  %start.1 = f32[8,8]{1,0} all-reduce-start(%x), channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}, use_global_device_ids=true, to_apply=%region_2.2, metadata={op_name="jit(step)/x" scheduling_name="a, b=(c), replica_groups={{0,1}}, calls=%gone"}, backend_config={"collective_backend_config":{"is_sync":true,"backend":"DEFAULT"}}
  %done.1 = f32[8,8]{1,0} all-reduce-done(%start.1), backend_config={"is_sync":true}
  %start.2 = (f32[8,8]{1,0}, f32[32,8]{1,0}) all-gather-start(%x), channel_id=2, replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}, use_global_device_ids=true
  %done.2 = f32[32,8]{1,0} all-gather-done(%start.2)
  %start.3 = ((f32[8,8]{1,0}, f32[]), (f32[32,8]{1,0}, f32[4]{0})) all-gather-start(%x, %s), channel_id=3, replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}, use_global_device_ids=true
  %done.3 = (f32[32,8]{1,0}, f32[4]{0}) all-gather-done(%start.3)
  %start.4 = ((f32[8,8]{1,0}), f32[2,8]{1,0}) reduce-scatter-start(%x), channel_id=4, replica_groups={{0,2,4,6},{1,3,5,7}}, use_global_device_ids=true, dimensions={0}, to_apply=%region_2.2
  %done.4 = f32[2,8]{1,0} reduce-scatter-done(%start.4)
  %start.5 = ((f32[8,8]{1,0}), f32[8,8]{1,0}) all-to-all-start(%x), channel_id=5, replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}
  %done.5 = f32[8,8]{1,0} all-to-all-done(%start.5)
  %start.6 = (f32[8,8]{1,0}, f32[8,8]{1,0}) collective-permute-start(%x), channel_id=6, source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}
  %done.6 = f32[8,8]{1,0} collective-permute-done(%start.6)
  %start.7 = ((f32[8,8]{1,0}, f32[8,8]{1,0}, s64[4]{0}, s64[4]{0}, s64[4]{0}, /*index=5*/s64[4]{0}), f32[8,8]{1,0}) ragged-all-to-all-start(%x, %x, %i, %i, %i, /*index=5*/%i), channel_id=7, replica_groups={{0,2,4,6},{1,3,5,7}}
  %done.7 = f32[8,8]{1,0} ragged-all-to-all-done(%start.7)
  %y = (f32[8,8], u32[], token[]) send(%x, %t), channel_id=8, is_host_transfer=true
  %tuple.9.0 = (f32[8,8]{1,0}) tuple(%x)
  %p = pred[] parameter(3)
  ROOT %conditional = (f32[8,8]{1,0}) conditional(%p, %tuple.9.0, %tuple.9.0), true_computation=%region_1.3_spmd, false_computation=%region_3.4_spmd
}
"""  # noqa: E501


def test_gpu_start_and_done_are_one_and_branches_are_gated():
    found = collectives(GPU, DATA_TP)
    assert [(one.op, one.operands, one.sent_bytes) for one in found] == [
        ("all-reduce", (BLOCK,), 384),
        ("all-gather", (BLOCK,), 768),
        ("all-gather", (BLOCK, Operand("f32", ())), 780),
        ("reduce-scatter", (BLOCK,), 192),
        ("all-to-all", (BLOCK,), 192),
        ("collective-permute", (BLOCK,), 256),
        ("ragged-all-to-all", (BLOCK,), 192),
        ("all-reduce", (BLOCK,), 448),
    ]
    assert {(one.axes, one.group_size, one.gated) for one in found[:-1]} == {(("data",), 4, False)}
    assert (found[-1].axes, found[-1].gated) == (("data", "tp"), True)


TPU = """
HloModule jit_step, is_scheduled=true, num_partitions=8

%fused_computation.3 (p: f32[8,8]) -> (f32[8,8], f32[64,8]) {
  %p = f32[8,8]{1,0:T(8,128)S(1)} parameter(0)
  %all-gather.5 = f32[64,8]{1,0:T(8,128)} all-gather(%p), channel_id=1, replica_groups=mesh['data'=8] {'data'}, dimensions={0}, use_global_device_ids=true, frontend_attributes={chain_id="0"}, backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  ROOT %custom-call.1 = (f32[8,8]{1,0}, f32[64,8]{1,0}) custom-call(%all-gather.5), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.10 (p: f32[8,8]) -> f32[64,8] {
  %p = f32[8,8]{1,0:T(8,128)S(1)} parameter(0)
  ROOT %all-gather.7 = f32[64,8]{1,0:T(8,128)S(1)} all-gather(%p), channel_id=1, replica_groups=mesh['data'=8] {'data'}, dimensions={0}, use_global_device_ids=true, frontend_attributes={chain_id="0"}, backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
}

%fused_computation.6 (p: f32[8,8]) -> f32[64,8] {
  %p = f32[8,8]{1,0:T(8,128)S(1)} parameter(0)
  %all-gather.11 = f32[64,8]{1,0:T(8,128)} all-gather(%p), channel_id=1, replica_groups=mesh['data'=8] {'data'}, dimensions={0}, use_global_device_ids=true, frontend_attributes={chain_id="0"}, backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  ROOT %custom-call.3 = f32[64,8]{1,0} custom-call(%p, %all-gather.11), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.1 (input: f32[8,8]) -> f32[8,2] {
  %input = f32[8,8]{1,0:T(8,128)S(1)} parameter(0)
  %all-reduce.4 = f32[8,8]{1,0:T(8,128)} all-reduce(%input), channel_id=8, replica_groups={{0,2,4,6},{1,3,5,7}}, use_global_device_ids=true, to_apply=%add.clone
  ROOT %dynamic-slice.24 = f32[8,2]{1,0} dynamic-slice(%all-reduce.4, %c, %m), dynamic_slice_sizes={8,2}
}

%add.clone (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
}

ENTRY %main.0_spmd (x: bf16[8,8]) -> f32[8,8] {
  %x = bf16[8,8]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %reduce_sum.9 = f32[]{:T(128)} parameter(1)
  %all-reduce = (bf16[8,8]{1,0:T(8,128)(2,1)S(1)}, f32[]{:T(128)}) all-reduce(%x, %reduce_sum.9), channel_id=2, replica_groups=mesh['data'=4,'tp'=2] {'tp'}, use_global_device_ids=true, to_apply=%add.clone, backend_config={"collective_algorithm_config":{"debug":"\\nRing{replica_groups={{0}}"}}
  %permute = (bf16[8,8]{1,0:T(8,128)(2,1)}, bf16[8,8]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=3, source_target_pairs={{0,1},{1,0}}
  %async-collective-start = (f32[8,8], f32[64,8]) fusion(%x), kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, calls=%fused_computation.3
  %fusion.10 = f32[64,8] fusion(%x), kind=kOutput, calls=%async_collective_fusion.10
  %done = f32[64,8] fusion(%x), kind=kCustom, calls=%fused_computation.6
  ROOT %fusion = f32[8,2]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
}
"""  # noqa: E501


def test_tpu_tilings_and_what_fusions_hide():
    """A gather that is spread over three fusions, and a reduce-scatter as all-reduce and slice."""
    half, number = Operand("bf16", (8, 8)), Operand("f32", ())
    assert collectives(TPU, DATA_TP) == [
        Collective("all-reduce", (half, number), ("tp",), 2),
        Collective("collective-permute", (half,), ("tp",), 2),
        Collective("all-gather", (BLOCK,), ("data", "tp"), 8),
        Collective("reduce-scatter", (BLOCK,), ("data",), 4),
    ]


IN_WORDS = """
HloModule jit_step, is_scheduled=true, num_partitions=8

%region.clone (a: u32[], b: u32[]) -> u32[] {
  %a = u32[]{:T(128)} parameter(0)
  %convert = u16[]{:T(256)S(6)} convert(%a)
  %bitcast-convert = f16[]{:T(256)S(6)} bitcast-convert(%convert)
  %sum = f16[]{:T(256)S(6)} add(%bitcast-convert, %bitcast-convert)
  %bitcast-convert.1 = u16[]{:T(256)S(6)} bitcast-convert(%sum)
  ROOT %or = u32[]{:T(128)} convert(%bitcast-convert.1)
}

ENTRY %main.0_spmd (x: f16[2048]) -> f16[2048] {
  %x = f16[2048]{0:T(1024)(128)(2,1)} parameter(0)
  %bitcast.2 = u32[8,1,128]{2,1,0:T(1,128)} bitcast(%x)
  %psum.7 = u32[8,1,128]{2,1,0:T(1,128)} all-reduce(%bitcast.2), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%region.clone
  ROOT %bitcast.1 = f16[2048]{0:T(1024)(128)(2,1)} bitcast(%psum.7)
}
"""  # noqa: E501


def test_short_floats_that_a_tpu_adds_in_words_are_floats():
    [one] = collectives(IN_WORDS, DATA)
    assert one.operands == (Operand("f16", (8, 1, 256)),) and one.payload_bytes == 2 * 2048
    whole = IN_WORDS.replace("f16[]", "s16[]")
    assert [x.operands[0].is_float for x in collectives(whole, DATA)] == [False]


# --- Several slices of TPUs: the text is of one slice, and what goes between them is sent to the host

BETWEEN = 'channel_id=3, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target=TARGET,_xla_megascale_transfer_type="TYPE"}'  # noqa: E501


def of_slices(kind, target, dtype="u32", within="{{0,1,2,3}}", note=""):
    """The text of four devices a slice: something between slices, and a gather in each."""
    sent = BETWEEN.replace("TARGET", target).replace("TYPE", kind)
    array = f"{dtype}[8,8]{{1,0}}"
    return f"""HloModule jit_step, num_partitions=4

ENTRY %main (x: {dtype}[8,8]) -> {dtype}[32,8] {{
  %x = {array} parameter(0){note}
  %after-all = token[] after-all()
  %send = ({array}, u32[], token[]) send(%x, %after-all), {sent}
  %send-done = token[] send-done(%send), channel_id=3, is_host_transfer=true
  %callback = ({array}, u32[], token[]) send(%x, %after-all), channel_id=9, is_host_transfer=true, frontend_attributes={{_xla_host_transfer_handler_name="tpu_driver"}}
  ROOT %y = {dtype}[32,8]{{1,0}} all-gather(%x), channel_id=1, replica_groups={within}, dimensions={{0}}
}}"""  # noqa: E501


ALL_EIGHT = "{{100000,100001,100002,100003,200000,200001,200002,200003}}"
SLICES = [  # what XLA wrote, and what it is: operation, devices, bytes
    ("ALL_REDUCE", '"{1,2}x{0:3}"', "all-reduce", 2, 256),
    ("ALL_GATHER", '"{1,2}x{0:3}"', "all-gather", 2, 256),
    ("REDUCE_SCATTER", '"{1,2}x{0:3}"', "reduce-scatter", 2, 128),
    ("ALL_TO_ALL", ALL_EIGHT, "all-to-all", 8, 224),
    ("ONE_TO_ONE", "{{100003->200000},{200003->100000}}", "collective-permute", 8, 256),
]


@pytest.mark.parametrize(("kind", "target", "op", "size", "sent"), SLICES)
def test_what_travels_between_slices_is_counted(kind, target, op, size, sent):
    between, inside = collectives(of_slices(kind, target), DATA)
    assert between == Collective(op, (Operand("u32", (8, 8)),), ("data",), size)
    assert between.sent_bytes == sent
    assert (inside.op, inside.axes, inside.group_size) == ("all-gather", ("data",), 4)


LABEL = ', metadata={op_name="lioncub.up/workers(data)of(%s)/x"}'


def test_votes_tell_along_which_axis_the_slices_are():
    """Workers are slices; or each is two devices, of two slices."""
    across = of_slices(
        "ALL_TO_ALL", "{{100000,200000},{100001,200001},{100002,200002},{100003,200003}}"
    )
    for sizes, text, axes in [
        ({"data": 2, "fsdp": 4}, across, [("data",), ("fsdp",)]),
        ({"fsdp": 4, "data": 2}, across, [("data",), ("fsdp",)]),
        ({"fsdp": 4, "data": 2}, of_slices("ALL_GATHER", '"{1,2}x{0:3}"'), [("data",), ("fsdp",)]),
        ({"data": 4, "fsdp": 2}, of_slices("ALL_GATHER", '"{1,2}x{0:3}"'), [("fsdp",), ("data",)]),
    ]:
        note = LABEL % ",".join(f"{n}:{k}" for n, k in sizes.items())
        mesh = jax.sharding.AbstractMesh((*sizes.values(),), (*sizes,))
        text = text.replace("parameter(0)", "parameter(0)" + note)
        assert [one.axes for one in collectives(text, mesh)] == axes, sizes


@pytest.mark.parametrize(
    ("kind", "target"),
    [("ALL_SORTS", ALL_EIGHT), ("ALL_TO_ALL", "{all}"), ("ALL_TO_ALL", "{{100000}}")],
)
def test_what_is_sent_between_slices_in_an_unknown_way_is_an_error(kind, target):
    with pytest.raises(ValueError, match=r"cannot read .*send"):
        collectives(of_slices(kind, target), DATA)


CALLS = """
HloModule jit_step, is_scheduled=true, num_partitions=8

%wrapped (p: f32[8,8]) -> f32[64,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %gather = f32[64,8]{1,0} all-gather(%p), channel_id=3, replica_groups=[1,8]<=[8], dimensions={0}
}

%body.1 (p: (f32[8,8])) -> (f32[8,8]) {
  %p = (f32[8,8]{1,0}) parameter(0)
  %get = f32[8,8]{1,0} get-tuple-element(%p), index=0
  %permute = f32[8,8]{1,0} collective-permute(%get), channel_id=1, source_target_pairs={{0,1},{1,0}}
  ROOT %out = (f32[8,8]{1,0}) tuple(%permute)
}

%cond.1 (q: (f32[8,8])) -> pred[] {
  %q = (f32[8,8]{1,0}) parameter(0)
  %got = f32[8,8]{1,0} get-tuple-element(%q), index=0
  %reduce = f32[8,8]{1,0} all-reduce(%got), channel_id=2, replica_groups={}
  ROOT %less = pred[] custom-call(%reduce), custom_call_target="less"
}

ENTRY %main.0_spmd (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %t = (f32[8,8]{1,0}) tuple(%x)
  %async-start = ((f32[8,8]{1,0}), f32[64,8]{1,0}, u32[]) async-start(%x), calls=%wrapped
  %async-update = ((f32[8,8]{1,0}), f32[64,8]{1,0}, u32[]) async-update(%async-start), calls=%wrapped
  %done = f32[64,8]{1,0} async-done(%async-update), calls=%wrapped
  %y = f32[64,8]{1,0} call(%x), to_apply=%wrapped
  ROOT %w = (f32[8,8]{1,0}) while(%t), condition=%cond.1, body=%body.1, backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"init":"0"}}
}
"""  # noqa: E501


def test_how_often_a_computation_is_called():
    """At its start and not again at its end, at each call, and the condition once more than the loop."""
    gather = Collective("all-gather", (BLOCK,), ("data",), 8)
    permute = Collective("collective-permute", (BLOCK,), ("data",), 8)
    reduce = Collective("all-reduce", (BLOCK,), ("data",), 8)
    in_loop = Counter({permute._replace(times=5): 1, reduce._replace(times=6): 1})
    assert Counter(collectives(CALLS, DATA)) == in_loop + Counter({gather: 2})
    as_for_tpu = CALLS.replace("known_trip_count", "metadata")
    looped = Counter({one._replace(looped=True): 1 for one in (permute, reduce)})
    assert Counter(collectives(as_for_tpu, DATA)) == looped + Counter({gather: 2})


def program(line, of="f32[8,8]{1,0}"):
    """A program of one instruction, on an array of that type."""
    head = "HloModule step, num_partitions=8"
    return f"{head}\n\nENTRY %main () -> f32[] {{\n  %x = {of} parameter(0)\n  {line}\n}}\n"


def all_reduce(groups):
    return (
        f"%y = f32[8,8]{{1,0}} all-reduce(%x), channel_id=1, replica_groups={groups}, to_apply=%add"
    )


EVERY_WAY = [
    ("{}", "abc", 8),
    ("{{0,4},{1,5},{2,6},{3,7}}", "a", 2),
    ("{{0},{1},{2},{3},{4},{5},{6},{7}}", "", 1),
    ("{{0,3},{1,2},{4,7},{5,6}}", "bc", 2),
    ("[4,2]<=[8]", "c", 2),
    ("[2,4]<=[4,2]T(1,0)", "ab", 4),
    ("[2,4]<=[2,2,2]T(1,0,2)", "ac", 4),
    ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", "bc", 4),
    ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_0'}", "ab", 4),
    ("mesh['c'=2,'a'=2,'b'=2] {'b','c'}", "ac", 4),
    ("mesh['x'=8] {'x':(1)2}", "a", 2),
    ("mesh['x'=8] {'x':(1)2,'x':(4)2}", "ac", 4),
    ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x'}", "c", 2),
    ("mesh['x'=2,'y'=4], device_ids=(0,1,4,5,2,3,6,7) {'x'}", "b", 2),
    ("mesh['<x, y>'=2,'it\\'s'=4] {'it\\'s'}", "bc", 4),
]


def test_every_way_to_write_groups():
    for groups, axes, size in EVERY_WAY:
        [one] = collectives(program(all_reduce(groups)), CUBE)
        assert (one.axes, one.group_size) == (tuple(axes), size), groups
        assert bool(sent_bytes([one])) == (size > 1), groups
    [uneven] = collectives(program(all_reduce("{{0,1,2},{3,4,5,6,7}}")), CUBE)
    assert (uneven.axes, uneven.group_size) == (None, 5)
    [part] = collectives(program(all_reduce("[2,4]<=[8]")), DATA)
    assert (part.axes, part.group_size) == (("data",), 4)
    [one] = collectives(program(all_reduce("{}")), AbstractMesh((8, 1), ("data", "tp")))
    assert (one.axes, one.group_size) == (("data",), 8)  # an axis of size one is left out


GOOD = all_reduce("{}")
BYTES = {
    "pred[3,5]": 15, "s4[3,5]{1,0:E(4)}": 8, "u1[17]": 3, "f8e4m3b11fnuz[7]": 7, "c128[2]": 32,
    "f64[0,4]": 0, "u8[<=16,2]": 32, "u64[]": 8, "bf16[3]": 6,
}  # fmt: skip


def test_bytes_of_a_dtype():
    for of, count in BYTES.items():
        [one] = collectives(program(GOOD, of), DATA)
        assert one.payload_bytes == count, of


BAD_GROUPS = [
    "@mesh", "{{0,1},{2,3}}", "{{0,1,2,3},{4,5,6,6}}", "[8]<=[8]", "[2,4]<=[16]", "[2,4]<=[4,2]T(1,2)",
    "mesh['x'=4] {'x'}", "mesh['x'=8] {'y'}", "mesh['x'=8] {'x':(3)2}", "mesh['x'=8] {x}",
    "mesh['x'=8] {}",
]  # fmt: skip
BAD_LINES = [
    *((all_reduce(groups), "groups or pairs of 8") for groups in BAD_GROUPS),
    (GOOD.replace(", replica_groups={}", ""), "what the collective|groups or pairs of 8"),
    (GOOD.replace("all-reduce(", "collective-reduce("), "'collective-reduce'"),
    (GOOD.replace("%x", "%z"), "what the collective takes"),
    ("%y : f32[8,8] = all-reduce(%x), replica_groups={}", "a collective"),
    ("%y = f32[8,8] collective-permute(%x), channel_id=1", "groups or pairs of 8"),
    ("%y = f32[8,8] collective-permute(%x), source_target_pairs={{0,8}}", "groups or pairs of 8"),
    (
        "%y = f32[8,8] collective-permute(%x), source_target_pairs={{0,1}}, slice_sizes={{1,8}}",
        "what the collective takes",
    ),
    ("%y = (f32[8,8], u32[], token[]) send(%x, %t), channel_id=1", "'send'"),
    ("%y = f32[64,8] fusion(%x), kind=kLoop, calls=%gone", "where gone is"),
    (GOOD, r"the operand type token\[\]", "token[]"),
    (GOOD, r"the operand type f7\[8\]", "f7[8]"),
    (GOOD, r"the operand type f32\[\?,8\]", "f32[?,8]"),
]


@pytest.mark.parametrize("row", BAD_LINES)
def test_a_line_that_cannot_be_read_is_an_error_that_shows_it(row):
    line, words, *of = row
    with pytest.raises(ValueError, match=words) as error:
        collectives(program(line, *of), DATA)
    assert line in str(error.value)


NO_PROGRAMS = [
    ("", "not the text of a compiled program"),
    ("module @jit_f attributes {mhlo.num_partitions = 1 : i32} {", "To StableHLO, .* still adds"),
    ("HloModule step, num_partitions=8", "expected one compiled HLO module"),
    (CALLS.replace("call(%x), to_apply", "new-op(%x), runs").replace("calls=", "runs="),
     "how the program gets to .*%gather = "),
    (program(GOOD).replace(", num_partitions=8", ""), "on 1 devices and .*'data': 8} has 8"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), NO_PROGRAMS)
def test_text_that_is_no_program_of_this_mesh(text, words):
    with pytest.raises(ValueError, match=words):
        collectives(text, DATA)


ROWS = """\
all-to-all|data|2 × u8[64]|8|116 B|every step
||f32[]|||
all-reduce|data, tp|f32[1000, 1000]|2|20 MB|every step, 5 times, per loop turn
all-gather|unknown|f32[8, 8]|4|768 B|in a branch
all-reduce|none|f32[8, 8]|1|0 B|every step
total|data|||116 B|every step
total|data, tp|||20 MB|every step, at least
total|unknown|||768 B|all branches
"""


def test_the_table_names_everything():
    words = (Operand("u8", (64,)),) * 2 + (Operand("f32", ()),)
    found = [
        Collective("all-to-all", words, ("data",), 8),
        Collective("all-reduce", (Operand("f32", (1000, 1000)),), ("data", "tp"), 2, 5, True),
        Collective("all-gather", (BLOCK,), None, 4, gated=True),
        Collective("all-reduce", (BLOCK,), (), 1),
    ]
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(table(found))
    lines = [line for line in console.export_text().splitlines() if line.startswith("│")]
    assert [re.sub(" *│ *", "|", line)[1:-1] for line in lines] == ROWS.splitlines()
