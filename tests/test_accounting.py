"""Predicted bytes against the compiled program's, against the papers' formulas, and at scale."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import lioncub_jax as lc
from lioncub_jax.traffic import predicted as accounting
from lioncub_jax.traffic.predicted import predict

AXIS = "data"
# Sizes that neither rows, blocks nor workers divide; a scalar; nothing at all; two dtypes.
MIXED = {
    "kernel": jnp.ones((33, 130)),
    "bias": jnp.ones(65, jnp.bfloat16),
    "scalar": jnp.ones(()),
    "empty": jnp.ones((0, 4)),
}
SIZE = 33 * 130 + 65 + 1

AT_OWNER = lc.decide.momentum_at_owner(optax.scale_by_lion())
SCHEMES = {
    "sign": {},
    "sign, in buckets": {"bucket_size": 300},
    "sign, average": {"down": lc.decide.average()},
    "2 bits": {"up": lc.quantize.midrise(2)},
    "4 bits by block": {"up": lc.quantize.midrise(4, block=64)},
    "3 bits, average": {"up": lc.quantize.midrise(3), "down": lc.decide.average()},
    "stochastic": {"up": lc.quantize.midrise(3, rounding=lc.quantize.stochastic())},
    "ternary": {"up": lc.quantize.ternary()},
    "integer, two-phase": {"up": lc.quantize.integer(8)},
    "sign, gathered": {"wire": lc.wires.gathered()},
    "3 bits, gathered": {"up": lc.quantize.midrise(3), "wire": lc.wires.gathered()},
    "sign, int8 counts": {"wire": lc.wires.counts()},
    "integer, int8 counts": {"up": lc.quantize.integer(8), "wire": lc.wires.counts()},
    "4 bits, int16 counts": {"up": lc.quantize.midrise(4), "wire": lc.wires.counts(jnp.int16)},
    "sign, int32 counts": {"wire": lc.wires.counts(jnp.int32)},
    "sign, lanes": {"wire": lc.wires.lanes()},
    "integer, lanes": {"up": lc.quantize.integer(5), "wire": lc.wires.lanes()},
    "owner, 1 bit": {
        "up": lc.quantize.error_feedback(lc.quantize.midrise(1, block=128)),
        "owner": AT_OWNER,
    },
    "owner, 3 bits": {
        "up": lc.quantize.error_feedback(lc.quantize.midrise(3, block=128)),
        "owner": AT_OWNER,
    },
    "owner, 4 bits": {"up": lc.quantize.midrise(4, block=64), "owner": AT_OWNER},
    "owner, gathered": {
        "up": lc.quantize.midrise(2, block=64),
        "owner": AT_OWNER,
        "wire": lc.wires.gathered(),
    },
    "owner, ternary down": {
        "up": lc.quantize.midrise(2, block=64),
        "owner": AT_OWNER,
        "down": lc.decide.ternary_sum(),
    },
    "owner, dense float32": {"up": lc.quantize.dense(), "owner": AT_OWNER},
    "owner, dense bfloat16": {"up": lc.quantize.dense(jnp.bfloat16), "owner": AT_OWNER},
    "owner, floats down": {
        "up": lc.quantize.dense(),
        "owner": AT_OWNER,
        "down": lc.decide.floats(),
    },
    "owner, all-reduce": {
        "up": lc.quantize.dense(),
        "owner": AT_OWNER,
        "wire": lc.wires.all_reduce(),
    },
    "owner, bfloat16 all-reduce": {
        "up": lc.quantize.dense(jnp.bfloat16),
        "owner": AT_OWNER,
        "wire": lc.wires.all_reduce(),
    },
}


def sent_by_program(parts, workers, tree=MIXED):
    """Bytes that one worker sends in one update, by the compiled program."""
    devices = jax.devices()
    assert len(devices) >= workers
    mesh = jax.make_mesh(
        (workers,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices[:workers]
    )
    tx = lc.communicate(axis_name=AXIS, **parts)

    def update(grads):
        local = jax.tree.map(lambda g: g[0], grads)
        return tx.update(local, tx.init(local))[0]

    stacked = jax.tree.map(lambda g: jax.ShapeDtypeStruct((workers, *g.shape), g.dtype), tree)
    run = jax.shard_map(update, mesh=mesh, in_specs=P(AXIS), out_specs=P())
    return accounting.compiled_bytes(jax.jit(run).lower(stacked).compile(), mesh)


def shapes(size):
    return {"w": jax.ShapeDtypeStruct((size,), jnp.float32)}


def up_to(workers):
    """The share of what it holds that a worker sends in one phase."""
    return (workers - 1) / workers


# Half of the schemes with each odd number of workers, and some with an even one, for time's sake.
CASES = [(name, (3, 5)[i % 2]) for i, name in enumerate(SCHEMES)]
CASES += [("sign", 8), ("sign", 5), ("integer, lanes", 2)]


@pytest.mark.parametrize(("name", "workers"), CASES)
def test_the_prediction_is_what_the_compiled_program_sends(name, workers):
    parts = SCHEMES[name]
    traffic = predict(MIXED, workers, **parts)
    assert traffic.sent_bytes == sent_by_program(parts, workers)
    assert (traffic.parameters, traffic.workers) == (SIZE, workers)


ON_MESHES = {
    "tensor": ({"data": 4, "tp": 2}, None, {"kernel": P(None, "tp"), "bias": P()}),
    "both": ({"data": 2, "fsdp": 2, "tp": 2}, None, {"kernel": P("fsdp", "tp"), "bias": P("tp")}),
    "one dimension": ({"data": 2, "fsdp": 2, "tp": 2}, None, {"kernel": P(None, ("fsdp", "tp"))}),
    "two levels": ({"data": 2, "gpu": 4}, "gpu", {}),
    "two levels, tensor": ({"data": 2, "gpu": 2, "tp": 2}, "gpu", {"kernel": P("tp")}),
    "two levels, one worker": ({"data": 1, "gpu": 4}, "gpu", {}),
}


@pytest.mark.parametrize("scheme", ["sign", "sign, in buckets", "owner, 3 bits", "sign, gathered"])
@pytest.mark.parametrize("name", ON_MESHES)
def test_the_prediction_for_a_device_is_what_it_sends_by_axis(name, scheme):
    sizes, group, given = ON_MESHES[name]
    parts = SCHEMES[scheme]
    tree = {"kernel": jnp.ones((34, 132)), "bias": jnp.ones(66), "scalar": jnp.ones(())}
    specs = {leaf: given.get(leaf, P()) for leaf in tree}
    devices = jax.devices()[: np.prod(list(sizes.values()))]
    kinds = (AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)
    where = {"axis_name": AXIS, "group_axis": group}
    tx = lc.on_mesh(lc.communicate(**where, **parts), mesh, specs=specs, **where)
    params = jax.tree.map(
        lambda s, x: jax.device_put(x, NamedSharding(mesh, s)),
        specs, tree, is_leaf=lambda x: isinstance(x, P),
    )  # fmt: skip
    lead = sizes[AXIS] * (sizes[group] if group else 1)
    grads = jax.tree.map(lambda x: jnp.ones((lead, *x.shape)), tree)
    program = jax.jit(tx.update).lower(grads, tx.init(params), params).compile()
    voted = [
        one for one in lc.traffic.collectives(program, mesh)
        if not (one.op == "all-reduce" and one.payload_bytes <= 8)  # the flag and the statistics
    ]  # fmt: skip
    sent = lc.traffic.sent_bytes(voted)
    inner = {n: sizes[n] for n in sizes if n not in (AXIS, group)}
    traffic = predict(
        tree, sizes[AXIS], group_size=sizes.get(group, 1), specs=specs, inner_axes=inner, **parts
    )
    assert traffic.sent_bytes == sent.get((AXIS,), 0)
    assert traffic.group_bytes == sent.get((group,), 0)
    assert set(sent) <= {(AXIS,), (group,)}


def test_long_answers_are_padded_and_counted_so():
    tree = {"w": jnp.ones(900_001)}
    traffic = predict(tree, 2)
    assert traffic.sent_bytes == sent_by_program({}, 2, tree)
    rows = 7032  # of 14063, at each owner
    assert traffic.sent_bytes == 4 * (2 * rows + 220 + 1) + 4 * 14_336  # and 112 * 128 words back


@pytest.mark.parametrize("name", ["sign", "integer, int8 counts", "owner, 3 bits"])
def test_one_worker_sends_nothing(name):
    parts = SCHEMES[name]
    traffic = predict(MIXED, 1, **parts)
    assert traffic.sent_bytes == sent_by_program(parts, 1) == 0
    assert traffic.bits_per_parameter == traffic.share_of_float32 == 0


@pytest.mark.parametrize("name", SCHEMES)
def test_only_shapes_matter(name):
    described = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), MIXED)
    numpy = jax.tree.map(np.asarray, MIXED)
    wanted = predict(MIXED, 4, **SCHEMES[name])
    assert predict(described, 4, **SCHEMES[name]) == wanted
    assert predict(numpy, 4, **SCHEMES[name]) == wanted


def test_schemes_have_names_of_their_own_and_say_what_they_do():
    named = {predict(MIXED, 4, **parts).scheme for parts in SCHEMES.values()}
    assert len(named) == len(SCHEMES) - 1  # the first two differ in buckets alone
    assert predict(MIXED, 4).scheme == "sign, two-phase, majority"


def test_bits_and_share_follow_from_the_bytes():
    traffic = accounting.Traffic("by hand", 4, 1000, 250.0)
    assert traffic.bits_per_parameter == 2
    assert traffic.share_of_float32 == 250 / (2 * 3 / 4 * 4 * 1000)
    assert accounting.float32_all_reduce_bytes(1000, 4) == 6000
    assert accounting.Traffic("nothing", 4, 0, 0.0).bits_per_parameter == 0


@pytest.mark.parametrize("workers", [2, 3, 5, 8, 32, 64])
def test_the_default_sends_two_bits_for_a_million_parameters(workers):
    bits = predict(shapes(2**20), workers).bits_per_parameter
    assert 2 * up_to(workers) < bits <= 1.05 * 2 * up_to(workers)


def test_owner_lion_of_three_bits_sends_little_more_than_four():
    parts = SCHEMES["owner, 3 bits"]
    bits = predict(shapes(2**20), 8, **parts).bits_per_parameter
    assert 4 * up_to(8) < bits <= 4.2 * up_to(8)


# Bits up and down for each parameter, in a buffer so large that padding does not show.
FORMULAS = {
    "sign": lambda w: up_to(w) * (2 + 2 / 64),
    "sign, average": lambda w: up_to(w) * (1 + 1 / 64) * (1 + w.bit_length()),
    "2 bits": lambda w: up_to(w) * (3 + 2 / 64),
    "4 bits by block": lambda w: up_to(w) * (5 + 2 / 64),
    "ternary": lambda w: up_to(w) * 4,
    "sign, gathered": lambda w: (w - 1) * (1 + 1 / 64),
    "sign, int8 counts": lambda w: 2 * up_to(w) * 8 * (1 + 1 / 64),
    "owner, 3 bits": lambda w: up_to(w) * (4 + 1 / 64 + 16 / 128),
    "owner, 4 bits": lambda w: up_to(w) * (5 + 1 / 64 + 16 / 64),
    "owner, dense float32": lambda w: up_to(w) * (33 + 1 / 64),
    "owner, floats down": lambda w: up_to(w) * 64,
    "owner, all-reduce": lambda w: 2 * up_to(w) * 32,
}


@pytest.mark.parametrize("workers", [3, 7, 64])
@pytest.mark.parametrize("name", FORMULAS)
def test_large_models_cost_what_the_formula_says(name, workers):
    bits = predict(shapes(2**30), workers, **SCHEMES[name]).bits_per_parameter
    assert bits == pytest.approx(FORMULAS[name](workers), rel=1e-3)


def test_two_phase_traffic_does_not_grow_with_thousands_of_workers():
    tree = shapes(2**30)
    for workers in (2, 64, 1024, 4096):
        bits = predict(tree, workers).bits_per_parameter
        assert bits == pytest.approx(up_to(workers) * (2 + 2 / 64), rel=5e-3)
    gathered = predict(tree, 4096, wire=lc.wires.gathered())
    assert gathered.share_of_float32 > 60  # where a baseline would be cheaper by far


def test_small_models_of_many_workers_pay_for_padding():
    traffic = predict(shapes(10), 4096)
    # A row and a bit for rows up and down, and the words of presence and ties, for each other worker.
    assert traffic.sent_bytes == 4095 * 4 * ((2 + 1 + 1) + (2 + 1 + 2))


@pytest.mark.parametrize(
    ("workers", "parts", "message"),
    [
        (0, {}, "workers=0"),
        (128, {"up": lc.quantize.integer(8)}, "at most 127 workers"),
        (128, {"wire": lc.wires.counts()}, "counts to 127"),
        (2**16, {"wire": lc.wires.lanes()}, "counts to 65535"),
    ],
)
def test_what_cannot_be_counted_is_refused(workers, parts, message):
    with pytest.raises(ValueError, match=message):
        predict(shapes(100), workers, **parts)


def test_the_table_shows_prediction_and_measurement():
    vote = predict(shapes(2**20), 8)
    owner = predict(shapes(2**20), 8, **SCHEMES["owner, 3 bits"])
    console = Console(record=True, width=160, file=io.StringIO())
    console.print(accounting.table([vote, owner], {vote: 123456.0}))
    lines = console.export_text().splitlines()
    for traffic, compiled in ((vote, "123,456 B"), (owner, None)):
        (row,) = (line for line in lines if traffic.scheme in line)
        assert f"{traffic.sent_bytes:,.0f} B" in row
        assert f"{traffic.bits_per_parameter:.3f}" in row
        assert f"{traffic.share_of_float32:.4f}" in row
        assert (compiled in row) if compiled else row.count(" B") == 1
