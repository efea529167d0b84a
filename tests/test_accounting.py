"""Predicted bytes against the compiled program's, against the papers' formulas, and at scale."""

import io
import json
import os
import pathlib
import runpy
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import lioncub_jax as lc
from lioncub_jax.traffic import predict

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Sizes that neither rows, blocks nor workers divide; a scalar; nothing at all; two dtypes.
MIXED = {
    "kernel": jnp.ones((33, 130)),
    "bias": jnp.ones(65, jnp.bfloat16),
    "scalar": jnp.ones(()),
    "empty": jnp.ones((0, 4)),
}
SIZE = 33 * 130 + 65 + 1

AT_OWNER = {"owner": lc.decide.momentum_at_owner(optax.scale_by_lion())}
Q, D, WIRES = lc.quantize, lc.decide, lc.wires
SCHEMES = {
    "sign": {},
    "sign, in buckets": {"bucket_size": 300},
    "sign, average": {"down": D.average()},
    "2 bits": {"up": Q.midrise(2)},
    "3 bits, average": {"up": Q.midrise(3), "down": D.average()},
    "stochastic": {"up": Q.midrise(3, rounding=Q.stochastic())},
    "ternary": {"up": Q.ternary()},
    "ternary, total": {"up": Q.ternary(), "down": D.total()},
    "integer, two-phase": {"up": Q.integer(8)},
    "sign, gathered": {"wire": WIRES.gathered()},
    "3 bits, gathered": {"up": Q.midrise(3), "wire": WIRES.gathered()},
    "sign, int8 counts": {"wire": WIRES.counts()},
    "integer, int8 counts": {"up": Q.integer(8), "wire": WIRES.counts()},
    "4 bits, int16 counts": {"up": Q.midrise(4), "wire": WIRES.counts(jnp.int16)},
    "sign, int32 counts": {"wire": WIRES.counts(jnp.int32)},
    "sign, lanes": {"wire": WIRES.lanes()},
    "integer, lanes": {"up": Q.integer(5), "wire": WIRES.lanes()},
    "owner, 1 bit": {"up": Q.error_feedback(Q.midrise(1)), **AT_OWNER},
    "owner, 3 bits": {"up": Q.error_feedback(Q.midrise(3)), **AT_OWNER},
    "owner, 4 bits": {"up": Q.midrise(4), **AT_OWNER},
    "owner, levels": {"up": Q.levels(4), "down": D.floats(), **AT_OWNER},
    "owner, gathered": {"up": Q.midrise(2), "wire": WIRES.gathered(), **AT_OWNER},
    "owner, ternary down": {"up": Q.midrise(2), "down": D.ternary_sum(), **AT_OWNER},
    "owner, dense float32": {"up": Q.dense(), **AT_OWNER},
    "owner, dense bfloat16": {"up": Q.dense(jnp.bfloat16), **AT_OWNER},
    "owner, floats down": {"up": Q.dense(), "down": D.floats(), **AT_OWNER},
    "owner, all-reduce": {"up": Q.dense(), "wire": WIRES.all_reduce(), **AT_OWNER},
    "owner, bfloat16 all-reduce": {
        "up": Q.dense(jnp.bfloat16),
        "wire": WIRES.all_reduce(),
        **AT_OWNER,
    },
    "feedback both ways": {
        "up": Q.error_feedback(Q.midrise(1)),
        "owner": D.feedback_at_owner(),
        "down": D.scaled_signs(),
    },
    "feedback both ways, 4 bits": {
        "up": Q.error_feedback(Q.midrise(4)),
        "owner": D.feedback_at_owner(p=4),
        "down": D.scaled(4),
    },
}


def gpt(**sizes):
    """The shapes of the example's model."""
    model = runpy.run_path(str(ROOT / "examples/gpt/model.py"))["GPT"]
    return nnx.state(nnx.eval_shape(lambda: model(**sizes, rngs=nnx.Rngs(0))), nnx.Param)


def sent_by_program(parts, workers, tree=MIXED):
    """Bytes that one worker sends in one update of `communicate`, by the compiled program."""
    return sent_by(
        lc.communicate(axis_name=AXIS, memory=lc.momentum.nothing(), **parts), workers, tree
    )


def sent_by(tx, workers, tree):
    """Bytes that one worker sends in one update, by the compiled program."""
    devices = jax.devices()
    assert len(devices) >= workers
    mesh = jax.make_mesh(
        (workers,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices[:workers]
    )

    def update(grads):
        local = jax.tree.map(lambda g: g[0], grads)
        return tx.update(local, tx.init(local))[0]

    stacked = jax.tree.map(lambda g: jax.ShapeDtypeStruct((workers, *g.shape), g.dtype), tree)
    run = jax.shard_map(update, mesh=mesh, in_specs=P(AXIS), out_specs=P())
    return lc.traffic.compiled_bytes(jax.jit(run).lower(stacked).compile(), mesh)


def shapes(size):
    return {"w": jax.ShapeDtypeStruct((size,), jnp.float32)}


def up_to(workers):
    """The share of what it holds that a worker sends in one phase."""
    return (workers - 1) / workers


# Each way of sending with an odd number of workers or an even one; what sends like another is slow.
LIKE_ANOTHER = {
    "stochastic", "2 bits", "integer, two-phase", "3 bits, gathered", "sign, int32 counts",
    "sign, lanes", "owner, 1 bit", "owner, 4 bits", "owner, ternary down", "owner, all-reduce",
    "owner, dense float32", "ternary, total", "integer, int8 counts",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in LIKE_ANOTHER)) for n in SCHEMES],
)
def test_the_prediction_is_what_the_compiled_program_sends(name):
    parts, workers = SCHEMES[name], (3, 8, 2, 5)[list(SCHEMES).index(name) % 4]
    # XLA for CPU all-reduces bfloat16 as float32, which is said by name and never looked up.
    traffic = predict(MIXED, workers, platform="cpu", **parts)
    assert traffic.sent_bytes == sent_by_program(parts, workers)
    assert (traffic.parameters, traffic.workers) == (SIZE, workers)


def test_the_mean_in_bfloat16_is_float32_on_cpu_only():
    tree, tx = {"w": jnp.ones(1000)}, lc.global_gradients(optax.sgd(1.0), AXIS, jnp.bfloat16)
    of = {kind: lc.traffic.predict_mean(tree, 4, jnp.bfloat16, kind) for kind in ("cpu", None)}
    assert of["cpu"].sent_bytes == 2 * of[None].sent_bytes == sent_by(tx, 4, tree)


def test_a_prediction_asks_no_device():
    """The bytes must not depend on the machine that plans: here is one whose backend cannot start."""
    program = """
import json, sys, jax, jax.numpy as jnp, optax, lioncub_jax as lc
at_owner = lc.decide.momentum_at_owner(optax.scale_by_lion())
up, wire = lc.quantize.dense(jnp.bfloat16), lc.wires.all_reduce()
tree = {"w": jax.ShapeDtypeStruct((1000, 30), jnp.float32)}
found = []
for platform in (None, "cpu"):
    predict = lambda **parts: lc.traffic.predict(tree, 8, platform=platform, **parts).sent_bytes
    found += [predict(), predict(up=up, wire=wire, owner=at_owner)]
    found += [predict(up=lc.quantize.integer(8), wire=lc.wires.counts())]
try:
    jax.devices()
except RuntimeError:
    print(json.dumps(found))
"""
    env = {**os.environ, "JAX_PLATFORMS": "tpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    votes, reduced, counted, *on_cpu = json.loads(done.stdout)
    assert on_cpu[::2] == [votes, counted] and on_cpu[1] > 1.9 * reduced
    tree = {"w": jax.ShapeDtypeStruct((1000, 30), jnp.float32)}
    assert votes == predict(tree, 8).sent_bytes


ON_MESHES = {
    "tensor": ({"data": 4, "tp": 2}, None, {"kernel": P(None, "tp"), "bias": P()}),
    "both": ({"data": 2, "fsdp": 2, "tp": 2}, None, {"kernel": P("fsdp", "tp"), "bias": P("tp")}),
    "one dimension": ({"data": 2, "fsdp": 2, "tp": 2}, None, {"kernel": P(None, ("fsdp", "tp"))}),
    "two levels": ({"data": 2, "gpu": 4}, "gpu", {}),
    "two levels, tensor": ({"data": 2, "gpu": 2, "tp": 2}, "gpu", {"kernel": P("tp")}),
    "two levels, one worker": ({"data": 1, "gpu": 4}, "gpu", {}),
}


ON_MESHES_BY = ["sign", "owner, 3 bits", "sign, in buckets", "sign, gathered"]
QUICK = {
    ("tensor", "sign, in buckets"), ("both", "owner, 3 bits"), ("one dimension", "sign"),
    ("two levels", "sign, gathered"), ("two levels, tensor", "owner, 3 bits"),
    ("two levels, one worker", "sign"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        pytest.param(name, scheme, marks=[pytest.mark.slow] * ((name, scheme) not in QUICK))
        for name in ON_MESHES for scheme in ON_MESHES_BY
    ],
)  # fmt: skip
def test_the_prediction_for_a_device_is_what_it_sends_by_axis(name, scheme):
    sizes, group, given = ON_MESHES[name]
    parts = SCHEMES[scheme]
    tree = {"kernel": jnp.ones((34, 132)), "bias": jnp.ones(66), "scalar": jnp.ones(())}
    specs = {leaf: given.get(leaf, P()) for leaf in tree}
    devices = jax.devices()[: np.prod(list(sizes.values()))]
    kinds = (AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)
    where = {"axis_name": AXIS, "group_axis": group}
    tx = lc.on_mesh(
        lc.communicate(**where, memory=lc.momentum.nothing(), **parts), mesh, specs=specs, **where
    )
    params = jax.tree.map(
        lambda s, x: jax.device_put(x, NamedSharding(mesh, s)),
        specs, tree, is_leaf=lambda x: isinstance(x, P),
    )  # fmt: skip
    lead = sizes[AXIS] * (sizes[group] if group else 1)
    grads = jax.tree.map(lambda x: jnp.ones((lead, *x.shape)), tree)
    program = jax.jit(tx.update).lower(grads, tx.init(params), params).compile()
    inner = {n: sizes[n] for n in sizes if n not in (AXIS, group)}
    traffic = predict(
        tree, sizes[AXIS], group_size=sizes.get(group, 1), specs=specs, inner_axes=inner, **parts
    )
    # The flag and the statistics: ties, and who is there, of each bucket that is voted on by itself.
    apart = (
        sum(one.op == "all-to-all" for one in traffic.collectives) if "bucket_size" in parts else 1
    )
    voted = [
        one for one in lc.traffic.collectives(program, mesh)
        if not (one.op == "all-reduce" and one.payload_bytes <= 4 * (1 + apart))
    ]  # fmt: skip
    sent = lc.traffic.sent_bytes(voted)
    assert traffic.sent_bytes == sent.get((AXIS,), 0)
    assert traffic.group_bytes == sent.get((group,), 0)
    assert set(sent) <= {(AXIS,), (group,)}


def test_long_messages_and_replies_are_padded_and_counted_so():
    tree = {"w": jnp.ones(900_001)}
    traffic = predict(tree, 2)
    assert traffic.sent_bytes == sent_by_program({}, 2, tree)
    rows = 3520  # of 7032, at each owner; its row words and whether the worker takes part
    assert 4 * rows + 110 + 1 == 14_191
    assert traffic.sent_bytes == 4 * 14_208 + 4 * 14_208  # 444 * 32 words, and 111 * 128 back


@pytest.mark.parametrize("name", ["integer, int8 counts", "owner, 3 bits"])
def test_one_worker_sends_nothing(name):
    parts = SCHEMES[name]
    traffic = predict(MIXED, 1, **parts)
    assert traffic.sent_bytes == sent_by_program(parts, 1) == 0
    assert traffic.bits_per_parameter == traffic.share_of_float32 == 0


def test_only_shapes_matter():
    described = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), MIXED)
    numpy = jax.tree.map(np.asarray, MIXED)
    for name, parts in SCHEMES.items():
        wanted = predict(MIXED, 4, **parts)
        assert predict(described, 4, **parts) == wanted, name
        assert predict(numpy, 4, **parts) == wanted, name


def test_schemes_have_names_of_their_own_and_say_what_they_do():
    named = {predict(MIXED, 4, **parts).scheme for parts in SCHEMES.values()}
    assert len(named) == len(SCHEMES) - 1  # the first two differ in buckets alone
    assert predict(MIXED, 4).scheme == "sign, two-phase, majority"


def test_bits_and_share_follow_from_the_bytes():
    traffic = lc.traffic.Traffic("by hand", 4, 1000, 250.0)
    assert traffic.bits_per_parameter == 2
    assert traffic.share_of_float32 == 250 / (2 * 3 / 4 * 4 * 1000)
    assert lc.traffic.float32_all_reduce_bytes(1000, 4) == 6000
    assert lc.traffic.Traffic("nothing", 4, 0, 0.0).bits_per_parameter == 0


def test_the_default_sends_two_bits_for_a_million_parameters():
    for workers in (2, 3, 5, 8, 32, 64):
        bits = predict(shapes(2**20), workers).bits_per_parameter
        assert 2 * up_to(workers) < bits <= 1.025 * 2 * up_to(workers), workers


def test_owner_lion_of_three_bits_sends_little_more_than_four():
    bits = predict(shapes(2**20), 8, **SCHEMES["owner, 3 bits"]).bits_per_parameter
    assert 4 * up_to(8) < bits <= 4.16 * up_to(8)


@pytest.mark.parametrize(
    ("sizes", "millions", "most"),
    [
        ({"layers": 2, "width": 128, "heads": 4, "context": 64}, 0.4, 1.06),  # of `make demo`
        ({"layers": 6, "width": 384, "heads": 6, "context": 256}, 10, 1.015),
        ({"layers": 14, "width": 768, "heads": 12, "context": 1024}, 100, 1.01),
    ],
    ids=["0.4M", "10M", "100M"],
)
def test_a_step_of_a_model_sends_little_more_than_its_bare_bits(sizes, millions, most):
    traffic = predict(gpt(**sizes), 8)
    assert traffic.parameters == pytest.approx(millions * 1e6, rel=0.1)
    assert 2 * up_to(8) < traffic.bits_per_parameter <= most * 2 * up_to(8)


# Bits up and down for each parameter, in a buffer so large that padding does not show.
FORMULAS = {
    "sign": lambda w: up_to(w) * (2 + 2 / 128),
    "sign, average": lambda w: up_to(w) * (1 + 1 / 128) * (1 + w.bit_length()),
    "2 bits": lambda w: up_to(w) * (3 + 2 / 128),
    "ternary": lambda w: up_to(w) * 4,
    "sign, gathered": lambda w: (w - 1) * (1 + 1 / 128),
    "sign, int8 counts": lambda w: 2 * up_to(w) * 8 * (1 + 1 / 128),
    "owner, 3 bits": lambda w: up_to(w) * (4 + 1 / 128 + 16 / 128),
    "owner, 4 bits": lambda w: up_to(w) * (5 + 1 / 128 + 16 / 128),
    "owner, dense float32": lambda w: up_to(w) * (33 + 1 / 128),
    "owner, floats down": lambda w: up_to(w) * 64,
    "owner, all-reduce": lambda w: 2 * up_to(w) * 32,
    "feedback both ways": lambda w: up_to(w) * (2 + 32 / 128),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_large_models_cost_what_the_formula_says(name):
    for workers in (3, 7, 64):
        bits = predict(shapes(2**30), workers, **SCHEMES[name]).bits_per_parameter
        assert bits == pytest.approx(FORMULAS[name](workers), rel=1e-3), workers


def test_two_phase_traffic_does_not_grow_with_thousands_of_workers():
    tree = shapes(2**30)
    for workers in (2, 64, 1024, 4096):
        bits = predict(tree, workers).bits_per_parameter
        assert bits == pytest.approx(up_to(workers) * (2 + 2 / 128), rel=5e-3)
    gathered = predict(tree, 4096, wire=lc.wires.gathered())
    assert gathered.share_of_float32 > 60  # where a baseline would be cheaper by far


def test_small_models_of_many_workers_pay_for_padding():
    traffic = predict(shapes(10), 4096)
    # Half a block, its row word, presence, and down the ties as well, for each other worker.
    assert traffic.sent_bytes == 4095 * 4 * ((64 + 1 + 1) + (64 + 1 + 2))


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
    console.print(lc.traffic.table([vote, owner], {vote: 123456.0}))
    lines = console.export_text().splitlines()
    for traffic, compiled in ((vote, "123,456 B"), (owner, None)):
        (row,) = (line for line in lines if traffic.scheme in line)
        assert f"{traffic.sent_bytes:,.0f} B" in row
        assert f"{traffic.bits_per_parameter:.3f}" in row
        assert f"{traffic.share_of_float32:.4f}" in row
        assert (compiled in row) if compiled else row.count(" B") == 1
