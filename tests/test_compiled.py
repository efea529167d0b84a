"""Collectives of programs compiled here, and of text that XLA printed for GPUs and TPUs."""

import io
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from lioncub_jax.traffic.compiled import Collective, Operand, collectives, sent_bytes, table

MESHES = {(8,): ("data",), (4, 2): ("data", "tp"), (2, 2, 2): ("a", "b", "c")}
SUBSETS = [
    (shape, axes)
    for shape, names in MESHES.items()
    for count in range(1, len(names) + 1)
    for axes in itertools.combinations(names, count)
]
BLOCK = Operand("f32", (8, 8))  # what each of 8 devices holds of f32[64, 8]: 256 bytes


def make_mesh(*shape, names=None, kind=AxisType.Auto):
    return jax.make_mesh(shape, names or MESHES[shape], axis_types=(kind,) * len(shape))


def compile_on(mesh, body, *, replicated=False, shape=(64, 8)):
    """Compiles `body`, which sees one device's block of the array."""
    spec = P() if replicated else P(mesh.axis_names)
    array = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped).lower(array).compile()


def read(mesh, body, **options):
    return collectives(compile_on(mesh, body, **options), mesh)


def ring(size):
    return [(i, (i + 1) % size) for i in range(size)]


# Bytes sent for 256 bytes of operands, by group size; worked out by hand from the ring algorithms.
SENT = {
    "all-reduce": {2: 256, 4: 384, 8: 448},
    "all-gather": {2: 256, 4: 768, 8: 1792},
    "all-to-all": {2: 128, 4: 192, 8: 224},
    "reduce-scatter": {2: 128, 4: 192, 8: 224},
    "collective-permute": {2: 256, 4: 256, 8: 256},
}


@pytest.mark.parametrize(("shape", "axes"), SUBSETS)
def test_each_collective_over_each_combination_of_axes(shape, axes):
    mesh = make_mesh(*shape)
    group = int(np.prod([mesh.shape[axis] for axis in axes]))

    def body(x):
        every = jax.lax.psum(x, axes), jax.lax.all_gather(x, axes)
        scattered = jax.lax.psum_scatter(x, axes, tiled=True)
        moved = jax.lax.all_to_all(x, axes, 0, 0, tiled=True)
        passed = jax.lax.ppermute(x, axes, ring(group))
        return [array.sum() + x for array in (*every, scattered, moved, passed)]

    found = read(mesh, body)
    assert {one.op: one.sent_bytes for one in found} == {op: SENT[op][group] for op in SENT}
    assert len(found) == 5
    assert {one.axes for one in found} == {axes}
    assert {one.group_size for one in found} == {group}
    assert {one.payload_bytes for one in found} == {256}
    assert {(one.times, one.looped, one.gated) for one in found} == {(1, False, False)}
    assert sent_bytes(found) == {axes: sum(SENT[op][group] for op in SENT)}


def test_a_two_phase_exchange_sends_what_the_formula_says():
    mesh = make_mesh(4, 2)

    def exchange(x):
        words = (x > 0).astype(jnp.uint8)
        chunks = jax.lax.all_to_all(words, "data", 0, 0, tiled=True)
        return jax.lax.all_gather(chunks.max(0).astype(jnp.uint8), "data").sum() + x

    found = read(mesh, exchange)
    assert [one.op for one in found] == ["all-to-all", "all-gather"]
    assert {operand.dtype for one in found for operand in one.operands} == {"u8"}
    assert [one.payload_bytes for one in found] == [64, 8]
    assert sent_bytes(found) == {("data",): 3 / 4 * 64 + 3 * 8}


def test_a_program_without_collectives():
    assert read(make_mesh(8), lambda x: x * 2) == []
    assert sent_bytes([]) == {}


@pytest.mark.parametrize(("shape", "names"), [((8, 1), ("data", "tp")), ((1, 8), ("tp", "data"))])
def test_axes_of_size_one_are_left_out(shape, names):
    mesh = make_mesh(*shape, names=names)
    [both] = read(mesh, lambda x: jax.lax.psum(x, ("data", "tp")))
    assert both == Collective("all-reduce", (BLOCK,), ("data",), 8)


def test_a_group_of_one_device_sends_nothing():
    mesh = make_mesh(8, 1, names=("data", "tp"))
    found = read(mesh, lambda x: jax.lax.psum(x, "tp"))
    assert {(one.axes, one.group_size, one.sent_bytes) for one in found} <= {((), 1, 0.0)}
    assert sent_bytes(found) == {}


def test_one_device():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    assert sent_bytes(read(mesh, lambda x: jax.lax.psum(x, "data"))) == {}


@pytest.mark.parametrize("axis", ["data", "tp"])
def test_devices_in_another_order(axis):
    devices = np.array(jax.devices())[[3, 1, 4, 0, 5, 7, 2, 6]].reshape(4, 2)
    [one] = read(Mesh(devices, ("data", "tp")), lambda x: jax.lax.psum(x, axis))
    assert one.axes == (axis,)


def test_groups_that_are_a_part_of_an_axis():
    halves = [[0, 1, 2, 3], [4, 5, 6, 7]]
    [one] = read(make_mesh(8), lambda x: jax.lax.psum(x, "data", axis_index_groups=halves))
    assert one == Collective("all-reduce", (BLOCK,), ("data",), 4)
    assert sent_bytes([one]) == {("data",): 384}


def test_a_permute_runs_over_the_axes_it_moves_along():
    rows = [(i, (i + 2) % 8) for i in range(8)]
    [one] = read(make_mesh(4, 2), lambda x: jax.lax.ppermute(x, ("data", "tp"), rows))
    assert (one.axes, one.group_size, one.sent_bytes) == (("data",), 4, 256)


def test_combined_operands_and_scalars():
    def body(x):
        total, part, scalar = jax.lax.psum((x, x[0], x.sum()), "tp")
        return total + part + scalar

    [one] = read(make_mesh(4, 2), body)
    assert set(one.operands) == {BLOCK, Operand("f32", (8,)), Operand("f32", ())}
    assert (len(one.operands), one.payload_bytes, one.sent_bytes) == (3, 292, 292)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(jnp.bool_, 1), (jnp.uint8, 1), (jnp.int16, 2), (jnp.uint32, 4), (jnp.complex64, 8)],
)
def test_dtypes(dtype, size):
    def body(x):
        return jax.lax.all_gather(x.astype(dtype), "data").real.astype(jnp.float32).sum() + x

    [one] = read(make_mesh(8), body)
    assert one.payload_bytes == 64 * size


def test_widening_by_the_compiler_is_seen():
    """XLA for CPU adds bfloat16 in float32, on the wire too."""
    [one] = read(make_mesh(8), lambda x: jax.lax.psum(x.astype(jnp.bfloat16), "data") + x)
    assert one.operands == (BLOCK,)


def test_a_branch_is_gated():
    def body(x):
        step = jax.lax.psum(x[:4], "tp").sum()
        return jax.lax.cond(step > 0, lambda y: jax.lax.pmean(y, "data"), lambda y: y, x)

    found = read(make_mesh(4, 2), body)
    assert [(one.axes, one.gated) for one in found] == [(("tp",), False), (("data",), True)]
    assert sent_bytes(found) == {("tp",): 128}
    assert sent_bytes(found, gated=True) == {("data",): 384}


def test_a_loop_multiplies():
    def body(x):
        return jax.lax.scan(lambda c, _: (jax.lax.psum(c, "data") / 8, None), x, length=5)[0]

    [one] = read(make_mesh(8), body)
    assert (one.times, one.looped, one.payload_bytes, one.sent_bytes) == (5, False, 256, 5 * 448)


def test_nested_loops_multiply_and_pass_a_branch_on():
    def inner(_, c):
        return jax.lax.cond(c[0, 0] > 0, lambda y: jax.lax.psum(y, "tp") / 2, lambda y: y, c)

    def body(x):
        return jax.lax.fori_loop(0, 3, lambda _, c: jax.lax.fori_loop(0, 7, inner, c) + 1, x)

    [one] = read(make_mesh(4, 2), body)
    assert (one.times, one.looped, one.gated, one.sent_bytes) == (21, False, True, 21 * 256)


def test_a_loop_of_unknown_length_is_flagged():
    def body(x):
        def more(c):
            return jax.lax.psum(c.sum(), "data") < 100

        return jax.lax.while_loop(more, lambda c: c + jax.lax.psum(c, "tp"), x)

    found = {one.axes: one for one in read(make_mesh(4, 2), body)}
    assert set(found) == {("data",), ("tp",)}
    assert all(one.times == 1 and one.looped for one in found.values())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_collectives_that_the_partitioner_adds(kind):
    """Their groups come with names such as 'axis_0' in place of the user's."""
    mesh = make_mesh(4, 2, kind=kind)
    with jax.set_mesh(mesh):
        array = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=NamedSharding(mesh, P("data")))
        found = collectives(jax.jit(lambda x: x.sum()).lower(array).compile(), mesh)
    assert found == [Collective("all-reduce", (Operand("f32", ()),), ("data",), 4)]


def test_the_silent_trap_is_seen():
    """A gradient with respect to replicated parameters has been all-reduced, in float32."""
    mesh = make_mesh(8)

    def grads(w, x):
        return jax.grad(lambda w: ((x @ w) ** 2).sum())(w)

    mapped = jax.shard_map(grads, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((32, 4), (8, 32)))
    [one] = collectives(jax.jit(mapped).lower(w, x).compile(), mesh)
    assert one == Collective("all-reduce", (Operand("f32", (32, 4)),), ("data",), 8)


# Below, text as XLA prints it. What is marked "printed" came from ahead-of-time compilation for 8
# H100 (jax 0.10.2) and 8 TPU v5e (jax 0.12.0.1), with long metadata and configurations cut.

DATA = AbstractMesh((8,), ("data",))
DATA_TP = AbstractMesh((4, 2), ("data", "tp"))
CUBE = AbstractMesh((2, 2, 2), ("a", "b", "c"))


def computation(head, *lines):
    return "\n".join([f"{head} {{", *(f"  {line}" for line in lines), "}"])


def module(*entry, before=(), partitions=8):
    header = f"HloModule jit_step, is_scheduled=true, num_partitions={partitions}"
    main = computation("ENTRY %main.0_spmd (x: f32[8,8]) -> f32[8,8]", *entry)
    return "\n\n".join([header, *before, main, ""])


X = "%x = f32[8,8]{1,0} parameter(0)"


def all_reduce(groups):
    tail = f"replica_groups={groups}, use_global_device_ids=true, to_apply=%add"
    return f"%y = f32[8,8]{{1,0}} all-reduce(%x), channel_id=1, {tail}"


@pytest.mark.parametrize(
    ("line", "op", "operands", "sent"),
    [
        pytest.param(
            "%all-reduce-start = f32[8,8]{1,0} all-reduce-start(%x), channel_id=1, "
            "replica_groups={{0,2,4,6},{1,3,5,7}}, use_global_device_ids=true, to_apply=%region",
            "all-reduce",
            [BLOCK],
            384,
            id="all-reduce",
        ),
        pytest.param(
            "%all-gather-start = (f32[8,8]{1,0}, f32[32,8]{1,0}) all-gather-start(%x), "
            "channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}, "
            "use_global_device_ids=true",
            "all-gather",
            [BLOCK],
            768,
            id="all-gather",
        ),
        pytest.param(
            "%all-gather-start = ((f32[8,8]{1,0}, f32[]), (f32[32,8]{1,0}, f32[4]{0})) "
            "all-gather-start(%x, %s), channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}, "
            "dimensions={0}, use_global_device_ids=true",
            "all-gather",
            [BLOCK, Operand("f32", ())],
            780,
            id="combined all-gather",
        ),
        pytest.param(
            "%reduce-scatter-start = ((f32[8,8]{1,0}), f32[2,8]{1,0}) reduce-scatter-start(%x), "
            "channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}, use_global_device_ids=true, "
            "dimensions={0}, to_apply=%region_0.0",
            "reduce-scatter",
            [BLOCK],
            192,
            id="reduce-scatter",
        ),
        pytest.param(
            "%all-to-all-start = ((f32[8,8]{1,0}), f32[8,8]{1,0}) all-to-all-start(%x), "
            "channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}",
            "all-to-all",
            [BLOCK],
            192,
            id="all-to-all",
        ),
        pytest.param(
            "%collective-permute-start = (f32[8,8]{1,0}, f32[8,8]{1,0}) "
            "collective-permute-start(%x), channel_id=1, "
            "source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}",
            "collective-permute",
            [BLOCK],
            256,
            id="permute",
        ),
        pytest.param(
            "%ragged-all-to-all-start = ((f32[8,8]{1,0}, f32[8,8]{1,0}, s64[4]{0}, s64[4]{0}, "
            "s64[4]{0}, /*index=5*/s64[4]{0}), f32[8,8]{1,0}) ragged-all-to-all-start(%x, %x, %i, "
            "%i, %i, /*index=5*/%i), channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}",
            "ragged-all-to-all",
            [BLOCK],
            192,
            id="ragged",
        ),
    ],
)
def test_gpu_start_and_done_are_one(line, op, operands, sent):
    """Printed."""
    config = 'backend_config={"collective_backend_config":{"is_sync":true,"backend":"DEFAULT"}}'
    text = module(
        X,
        "%s = f32[] parameter(1)",
        "%i = s64[4]{0} parameter(2)",
        f'{line}, metadata={{op_name="jit(step)/{op}" scheduling_name="a, b=(c)"}}, {config}',
        f"ROOT %done = f32[8,8]{{1,0}} {op}-done(%{op}-start), {config}",
    )
    [one] = collectives(text, DATA_TP)
    assert (one.op, one.operands, one.axes, one.sent_bytes) == (
        op,
        tuple(operands),
        ("data",),
        sent,
    )


def test_gpu_branches():
    """Printed."""
    before = [
        computation(
            "%region_1.3_spmd (arg: (f32[8,8])) -> (f32[8,8])",
            "%arg = (f32[8,8]{1,0}) parameter(0)",
            "%get = f32[8,8]{1,0} get-tuple-element(%arg), index=0",
            "%all-reduce-start = f32[8,8]{1,0} all-reduce-start(%get), channel_id=1, "
            "replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%region_2.2",
            "%all-reduce-done = f32[8,8]{1,0} all-reduce-done(%all-reduce-start)",
            "ROOT %tuple = (f32[8,8]{1,0}) tuple(%all-reduce-done)",
        ),
        computation(
            "%region_3.4_spmd (arg.1: (f32[8,8])) -> (f32[8,8])",
            "ROOT %arg.1 = (f32[8,8]{1,0}) parameter(0)",
        ),
    ]
    text = module(
        X,
        "%tuple.9.0 = (f32[8,8]{1,0}) tuple(%x)",
        "%p = pred[] parameter(1)",
        "%conditional = (f32[8,8]{1,0}) conditional(%p, %tuple.9.0, %tuple.9.0), "
        "true_computation=%region_1.3_spmd, false_computation=%region_3.4_spmd",
        before=before,
    )
    assert collectives(text, DATA) == [Collective("all-reduce", (BLOCK,), ("data",), 8, gated=True)]


GATHER = "replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true"
WRAPPED = computation(
    "%wrapped (p: f32[8,8]) -> f32[64,8]",
    "%p = f32[8,8]{1,0} parameter(0)",
    f"ROOT %gather = f32[64,8]{{1,0}} all-gather(%p), channel_id=3, {GATHER}",
)


def test_a_wrapped_collective_is_counted_at_its_start_only():
    shape = "((f32[8,8]{1,0}), f32[64,8]{1,0}, u32[])"
    text = module(
        X,
        f"%async-start = {shape} async-start(%x), calls=%wrapped",
        f"%async-update = {shape} async-update(%async-start), calls=%wrapped",
        "ROOT %done = f32[64,8]{1,0} async-done(%async-update), calls=%wrapped",
        before=[WRAPPED],
    )
    assert collectives(text, DATA) == [Collective("all-gather", (BLOCK,), ("data",), 8)]


def test_a_computation_called_twice_counts_twice():
    calls = [f"%y{i} = f32[64,8]{{1,0}} call(%x), to_apply=%wrapped" for i in range(2)]
    found = collectives(module(X, *calls, before=[WRAPPED]), DATA)
    assert sent_bytes(found) == {("data",): 2 * 1792}


def loop(config=""):
    while_ = "%w = (f32[8,8]{1,0}) while(%t), condition=%cond.1, body=%body.1"
    before = [
        computation(
            "%body.1 (p: (f32[8,8])) -> (f32[8,8])",
            "%p = (f32[8,8]{1,0}) parameter(0)",
            "%get = f32[8,8]{1,0} get-tuple-element(%p), index=0",
            "%permute = f32[8,8]{1,0} collective-permute(%get), channel_id=1, "
            "source_target_pairs={{0,1},{1,0}}",
            "ROOT %out = (f32[8,8]{1,0}) tuple(%permute)",
        ),
        computation(
            "%cond.1 (q: (f32[8,8])) -> pred[]",
            "%q = (f32[8,8]{1,0}) parameter(0)",
            "%got = f32[8,8]{1,0} get-tuple-element(%q), index=0",
            f"%gather = f32[64,8]{{1,0}} all-gather(%got), channel_id=2, {GATHER}",
            'ROOT %less = pred[] custom-call(%gather), custom_call_target="less"',
        ),
    ]
    return module(X, "%t = (f32[8,8]{1,0}) tuple(%x)", while_ + config, before=before)


def test_the_condition_of_a_loop_runs_once_more_than_its_body():
    config = ', backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"init":"0"}}'
    found = {one.op: one for one in collectives(loop(config), DATA)}
    assert (found["collective-permute"].times, found["all-gather"].times) == (5, 6)
    assert not any(one.looped for one in found.values())


def test_a_loop_as_printed_for_tpu_has_no_trip_count():
    found = collectives(loop(', metadata={op_name="jit(step)/while" stack_frame_id=9}'), DATA)
    assert [(one.times, one.looped) for one in found] == [(1, True), (1, True)]


def test_tpu_tilings_and_memory_spaces():
    """Printed."""
    text = module(
        "%x = bf16[8,8]{1,0:T(8,128)(2,1)S(1)} parameter(0)",
        "%reduce_sum.9 = f32[]{:T(128)} parameter(1)",
        "%all-reduce = (bf16[8,8]{1,0:T(8,128)(2,1)S(1)}, f32[]{:T(128)}) all-reduce(%x, "
        "%reduce_sum.9), channel_id=1, replica_groups=mesh['data'=4,'tp'=2] {'tp'}, "
        "use_global_device_ids=true, to_apply=%region_0.0, "
        'backend_config={"collective_algorithm_config":{"debug":"\\nRing{replica_groups={{0}}"}}',
        "%permute = (bf16[8,8]{1,0:T(8,128)(2,1)}, bf16[8,8]{1,0:T(8,128)(2,1)S(1)}, "
        "u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=2, "
        "source_target_pairs={{0,1},{1,0}}",
    )
    add, move = collectives(text, DATA_TP)
    assert add.operands == (Operand("bf16", (8, 8)), Operand("f32", ()))
    assert (add.axes, add.sent_bytes) == (("tp",), 132)
    assert (move.operands, move.axes) == ((Operand("bf16", (8, 8)),), ("tp",))


SPREAD = (
    "all-gather(%p), channel_id=1, replica_groups=mesh['data'=8] {'data'}, dimensions={0}, "
    'use_global_device_ids=true, frontend_attributes={chain_id="0"}, backend_config='
    '{"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}'
)
FUSED = [
    computation(
        "%fused_computation.3 (p: f32[8,8]) -> (f32[8,8], f32[64,8])",
        "%p = f32[8,8]{1,0:T(8,128)S(1)} parameter(0)",
        f"%all-gather.5 = f32[64,8]{{1,0:T(8,128)}} {SPREAD}",
        "ROOT %custom-call.1 = (f32[8,8]{1,0}, f32[64,8]{1,0}) custom-call(%all-gather.5), "
        'custom_call_target="AsyncCollectiveStart"',
    ),
    computation(
        "%async_collective_fusion.10 (p: f32[8,8]) -> f32[64,8]",
        "%p = f32[8,8]{1,0:T(8,128)S(1)} parameter(0)",
        f"ROOT %all-gather.7 = f32[64,8]{{1,0:T(8,128)S(1)}} {SPREAD}",
    ),
    computation(
        "%fused_computation.6 (p: f32[8,8]) -> f32[64,8]",
        "%p = f32[8,8]{1,0:T(8,128)S(1)} parameter(0)",
        f"%all-gather.11 = f32[64,8]{{1,0:T(8,128)}} {SPREAD}",
        "ROOT %custom-call.3 = f32[64,8]{1,0} custom-call(%p, %all-gather.11), "
        'custom_call_target="AsyncCollectiveDone"',
    ),
]
FUSIONS = [
    "%async-collective-start = (f32[8,8], f32[64,8]) fusion(%x), kind=kCustom, "
    "output_to_operand_aliasing={{0}: (0, {})}, calls=%fused_computation.3",
    "%fusion.10 = f32[64,8] fusion(%x), kind=kOutput, calls=%async_collective_fusion.10",
    "ROOT %done = f32[64,8] fusion(%x), kind=kCustom, calls=%fused_computation.6",
]


def test_a_tpu_collective_spread_over_fusions_is_one():
    """Printed; the fusions between, which multiply matrices meanwhile, are cut to their gather."""
    text = module(X, *FUSIONS, before=FUSED)
    assert collectives(text, DATA) == [Collective("all-gather", (BLOCK,), ("data",), 8)]


def test_a_tpu_collective_carried_on_but_never_started():
    with pytest.raises(ValueError, match=r"start of the collective.*%all-gather\.7"):
        collectives(module(X, *FUSIONS[1:], before=FUSED[1:]), DATA)


def test_a_tpu_reduce_scatter_written_as_all_reduce_and_slice():
    """Printed."""
    scatter = computation(
        "%all-reduce-scatter.1 (input: f32[8,8]) -> f32[8,2]",
        "%input = f32[8,8]{1,0:T(8,128)S(1)} parameter(0)",
        "%all-reduce.4 = f32[8,8]{1,0:T(8,128)} all-reduce(%input), channel_id=8, "
        "replica_groups={{0,2,4,6},{1,3,5,7}}, use_global_device_ids=true, to_apply=%add.clone",
        "ROOT %dynamic-slice.24 = f32[8,2]{1,0} dynamic-slice(%all-reduce.4, %c, %m), "
        "dynamic_slice_sizes={8,2}",
    )
    fusion = "ROOT %fusion = f32[8,2]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1"
    [one] = collectives(module(X, fusion, before=[scatter]), DATA_TP)
    assert one == Collective("reduce-scatter", (BLOCK,), ("data",), 4)


@pytest.mark.parametrize(
    ("mesh", "groups", "axes", "size"),
    [
        (CUBE, "{}", ("a", "b", "c"), 8),
        (CUBE, "{{0,4},{1,5},{2,6},{3,7}}", ("a",), 2),
        (CUBE, "{{5,1},{4,0},{3,7},{2,6}}", ("a",), 2),
        (CUBE, "{{0},{1},{2},{3},{4},{5},{6},{7}}", (), 1),
        (CUBE, "{{0,1,2},{3,4,5,6,7}}", None, 5),
        (CUBE, "[4,2]<=[8]", ("c",), 2),
        (DATA_TP, "[2,4]<=[4,2]T(1,0)", ("data",), 4),
        (CUBE, "[2,4]<=[2,2,2]T(1,0,2)", ("a", "c"), 4),
        (CUBE, "mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ("b", "c"), 4),
        (CUBE, "mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_0'}", ("a", "b"), 4),
        (CUBE, "mesh['c'=2,'a'=2,'b'=2] {'b','c'}", ("a", "c"), 4),
        (CUBE, "mesh['x'=8] {'x':(1)2}", ("a",), 2),
        (CUBE, "mesh['x'=8] {'x':(2)2}", ("b",), 2),
        (CUBE, "mesh['x'=8] {'x':(1)2,'x':(4)2}", ("a", "c"), 4),
        (CUBE, "mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x'}", ("c",), 2),
        (CUBE, "mesh['x'=2,'y'=4], device_ids=(0,1,4,5,2,3,6,7) {'x'}", ("b",), 2),
        (CUBE, "mesh['<x, y>'=2,'it\\'s'=4] {'it\\'s'}", ("b", "c"), 4),
        (DATA, "[2,4]<=[8]", ("data",), 4),
        (CUBE, "{{0,3},{1,2},{4,7},{5,6}}", ("b", "c"), 2),
    ],
)
def test_every_way_to_write_groups(mesh, groups, axes, size):
    [one] = collectives(module(X, all_reduce(groups)), mesh)
    assert (one.axes, one.group_size) == (axes, size)


@pytest.mark.parametrize(
    ("operand", "count"),
    [
        ("pred[3,5]", 15),
        ("s4[3,5]{1,0:E(4)}", 8),
        ("u1[17]", 3),
        ("f8e4m3b11fnuz[7]", 7),
        ("f4e2m1fn[7]", 4),
        ("c128[2]", 32),
        ("f64[0,4]", 0),
        ("u8[<=16,2]", 32),
        ("u64[]", 8),
    ],
)
def test_bytes_of_a_dtype(operand, count):
    [one] = collectives(module(f"%x = {operand} parameter(0)", all_reduce("{}")), DATA)
    assert one.payload_bytes == count


GOOD = all_reduce("{}")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([X, GOOD.replace("all-reduce(", "collective-reduce(")], "'collective-reduce'"),
        ([X, all_reduce("@mesh")], "groups of 8 devices"),
        ([X, GOOD.replace(", replica_groups={}", "")], "groups of 8 devices"),
        ([X, all_reduce("{{0,1},{2,3}}")], "groups of 8 devices"),
        ([X, all_reduce("{{0,1,2,3},{4,5,6,6}}")], "groups of 8 devices"),
        ([X, all_reduce("[8]<=[8]")], "groups of 8 devices"),
        ([X, all_reduce("[2,4]<=[16]")], "groups of 8 devices"),
        ([X, all_reduce("[2,4]<=[4,2]T(1,2)")], "groups of 8 devices"),
        ([X, all_reduce("mesh['x'=4] {'x'}")], "groups of 8 devices"),
        ([X, all_reduce("mesh['x'=8] {'y'}")], "groups of 8 devices"),
        ([X, all_reduce("mesh['x'=8] {'x':(3)2}")], "groups of 8 devices"),
        ([X, all_reduce("mesh['x'=8] {x}")], "groups of 8 devices"),
        ([X, all_reduce("mesh['x'=8] {}")], "groups of 8 devices"),
        ([GOOD], "what the collective takes"),
        (["%x = token[] parameter(0)", GOOD], r"the operand type token\[\]"),
        (["%x = f7[8] parameter(0)", GOOD], r"the operand type f7\[8\]"),
        (["%x = f32[?,8] parameter(0)", GOOD], r"the operand type f32\[\?,8\]"),
        ([X, "%y : f32[8,8] = all-reduce(%x), replica_groups={}"], "a collective"),
        ([X, "%y = f32[8,8] collective-permute(%x), channel_id=1"], "pairs of 8 devices"),
        (
            [X, "%y = f32[8,8] collective-permute(%x), source_target_pairs={{0,8}}"],
            "pairs of 8 devices",
        ),
        (
            [
                X,
                "%y = f32[8,8] collective-permute(%x, %x), source_target_pairs={{0,1}}, "
                "slice_sizes={{1,8}}",
            ],
            "what the collective takes",
        ),
        ([X, "%y = (f32[8,8], u32[], token[]) send(%x, %t), channel_id=1"], "'send'"),
    ],
)
def test_a_line_that_cannot_be_read_is_an_error_that_shows_it(lines, message):
    with pytest.raises(ValueError, match=message) as error:
        collectives(module(*lines), DATA)
    assert lines[-1] in str(error.value)


def test_a_collective_that_nothing_seems_to_run_is_an_error():
    with pytest.raises(ValueError, match=r"how the program gets to .*%gather = "):
        collectives(module(X, "%y = f32[64,8] new-op(%x), runs=%wrapped", before=[WRAPPED]), DATA)


def test_a_computation_that_is_not_in_the_text_is_an_error():
    with pytest.raises(ValueError, match=r"where gone is .*%y = "):
        collectives(module(X, "%y = f32[64,8] fusion(%x), kind=kLoop, calls=%gone"), DATA)


def test_what_metadata_quotes_is_not_read():
    quoted = 'metadata={op_name="f(x), replica_groups={{0,1}}, calls=%gone \\" all-gather(%x)"}'
    lines = f"%y = f32[8,8] add(%x, %x), {quoted}", all_reduce("{}") + f", {quoted}"
    assert collectives(module(X, *lines), DATA) == [
        Collective("all-reduce", (BLOCK,), ("data",), 8)
    ]


def test_sending_to_the_host_is_no_collective():
    send = "%y = (f32[8,8], u32[], token[]) send(%x, %t), channel_id=1, is_host_transfer=true"
    assert collectives(module(X, send), DATA) == []


@pytest.mark.parametrize("partitions", [4, 1])
def test_a_mesh_of_another_size(partitions):
    with pytest.raises(ValueError, match=rf"on {partitions} devices and .*'tp': 2}} has 8"):
        collectives(module(X, GOOD, partitions=partitions), DATA_TP)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no text to read"),
        ("func.func public @main()", "this is StableHLO, the program before it is compiled"),
        ("module @jit_f attributes {mhlo.num_partitions = 1 : i32} {", "this is StableHLO"),
        ("{ lambda ; a:f32[]. let b = add a 1.0 in (b,) }", "not the text of a compiled program"),
        ("HloModule step", "expected one compiled HLO module"),
    ],
)  # fmt: skip
def test_text_that_is_no_compiled_program(text, words):
    with pytest.raises(ValueError, match=words):
        collectives(text, AbstractMesh((1,), ("data",)))


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
    rows = [
        [cell.strip() for cell in line.strip("│┃").split("│")]
        for line in console.export_text().splitlines()
        if line.startswith("│")
    ]
    assert rows == [
        ["all-to-all", "data", "u8", "2 × [64]", "8", "115.5 B", "every step"],
        ["", "", "f32", "[]", "", "", ""],
        [
            *("all-reduce", "data, tp", "f32", "[1000, 1000]", "2", "20 MB"),
            "every step, 5 times, per loop turn",
        ],
        ["all-gather", "unknown", "f32", "[8, 8]", "4", "768 B", "in a branch"],
        ["all-reduce", "none", "f32", "[8, 8]", "1", "0 B", "every step"],
        ["total", "data", "", "", "", "115.5 B", "every step"],
        ["total", "data, tp", "", "", "", "20 MB", "every step, at least"],
        ["total", "unknown", "", "", "", "768 B", "all branches"],
    ]
