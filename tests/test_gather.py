"""The gather of replies: what all workers say, to all of them, in one all-gather or in two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import AXIS
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from test_accounting import MIXED, sent_by_program

import lioncub_jax as lc
from lioncub_jax import wires
from lioncub_jax.traffic import predict

WORDS = np.random.default_rng(0).integers(0, 2**32, (8, 77), np.uint32)
MESHES = {
    "one axis": ({"a": 8}, "a"),
    "two axes": ({"a": 2, "b": 4}, ("a", "b")),
    "turned": ({"a": 2, "b": 4}, ("b", "a")),
    "three axes": ({"a": 2, "b": 2, "c": 2}, ("c", "a", "b")),
}


@pytest.fixture(params=[1, 2, 4])
def row(request, monkeypatch):
    """Workers of a row; 1 is one all-gather."""
    monkeypatch.setattr(wires, "_row", lambda words, workers: request.param)
    return request.param


def mesh_with(sizes):
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", MESHES)
def test_words_are_in_the_order_of_the_workers_and_the_same_on_all(row, name, check_vma):
    sizes, axis = MESHES[name]
    mesh = mesh_with(sizes)

    def gather(words):
        every = wires.gather_words(words[0], axis)
        assert wires.varying_axes(every) == frozenset()
        return every

    run = jax.shard_map(gather, mesh=mesh, in_specs=P(axis), out_specs=P(), check_vma=check_vma)
    found = jax.jit(run)(WORDS)
    assert all((np.asarray(one.data) == WORDS).all() for one in found.addressable_shards)
    compiled = jax.jit(run).lower(WORDS).compile()
    assert lc.traffic.compiled_bytes(compiled, mesh) == wires.words_bytes(77, 8)
    found = [(c.op, c.group_size) for c in lc.traffic.collectives(compiled, mesh) if c.sent_bytes]
    assert found == [("all-gather", size) for size in ([8] if row == 1 else [8 // row, row])]


def test_words_among_a_part_of_the_mesh(row):
    mesh = mesh_with({"a": 4, "tp": 2})

    def gather(words):
        return wires.gather_words(words[0, 0], "a")[None]

    specs = {"in_specs": P("a", "tp"), "out_specs": P("tp")}
    if row < 4:
        found = jax.jit(jax.shard_map(gather, mesh=mesh, **specs))(WORDS.reshape(4, 2, -1))
        assert (found == WORDS.reshape(4, 2, -1).swapaxes(0, 1)).all()


def test_words_under_pmap(row):
    found = jax.pmap(lambda words: wires.gather_words(words, "a"), axis_name="a")(WORDS)
    assert (found == WORDS).all()


@pytest.mark.parametrize("scheme", [{}, {"wire": wires.gathered()}])
def test_a_step_sends_what_is_predicted(row, scheme):
    assert sent_by_program(scheme, 8) == predict(MIXED, 8, platform="cpu", **scheme).sent_bytes


def test_a_step_is_the_same_step(monkeypatch, mesh_of):
    tx, found = lc.lion_cub(1e-2, axis_name=AXIS), []
    for row in (1, 4):
        monkeypatch.setattr(wires, "_row", lambda words, workers, row=row: row)

        def update(grads):
            return tx.update(grads, tx.init(grads), jnp.zeros(300))[0]

        run = jax.shard_map(update, mesh=mesh_of(8), in_specs=P(AXIS), out_specs=P())
        found.append(jax.jit(run)(jnp.sin(jnp.arange(8 * 300.0))))
    assert (found[0] == found[1]).all() and len(set(found[0].tolist())) > 1


@pytest.mark.parametrize(
    ("kind", "workers", "parts", "words", "row"),
    [
        ("TPU v5 lite", 256, 1, 1040, 16),
        ("TPU v5 lite", 256, 1, 2**14, 16),  # a result of 16 MiB
        ("TPU v5 lite", 256, 1, 2**14 + 128, 1),
        ("TPU v5 lite", 128, 1, 1040, 8),
        ("TPU v6 lite", 64, 1, 1040, 8),
        ("TPU v6 lite", 32, 1, 1040, 1),
        ("TPU v5", 1024, 1, 2**20, 32),
        ("TPU v5", 512, 1, 1040, 16),
        ("TPU v5", 96, 1, 1040, 8),
        ("TPU v5", 67, 1, 1040, 1),  # a prime has no rows
        ("TPU v5", 512, 2, 1040, 1),  # not all chips
        ("NVIDIA H100 80GB HBM3", 256, 1, 1040, 1),
        ("cpu", 256, 1, 1040, 1),
        (None, 256, 1, 1040, 1),
    ],
)
def test_in_two_only_where_a_tpu_would_reduce(kind, workers, parts, words, row):
    platform = {"T": "tpu", "N": "gpu", "c": "cpu"}.get((kind or "")[:1])
    device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform) if kind else None
    mesh = AbstractMesh((workers, parts), ("data", "tp"), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert wires._row(words, workers) == row
