"""The gather of replies: what all workers say, to all of them, in one all-gather or in two."""

import jax
import numpy as np
import pytest
from conftest import mesh_on
from jax.sharding import AbstractDevice, AbstractMesh
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax.exchange import wires
from lioncub_jax.mesh import axes

WORDS = np.random.default_rng(0).integers(0, 2**32, (8, 12_877), np.uint32)  # so many are padded


@pytest.fixture(params=[1, 2, 4])
def row(request, monkeypatch):
    """Workers of a row; 1 is one all-gather."""
    monkeypatch.setattr(wires, "_grid_row", lambda words, workers: request.param)
    return request.param


@pytest.mark.parametrize(
    ("sizes", "axis", "check_vma"),
    [("a=8", "a", True), ("a=2 b=4", ("b", "a"), False), ("a=2 b=2 c=2", ("c", "a", "b"), True)],
)
def test_words_are_in_the_order_of_the_workers_and_the_same_on_all(row, sizes, axis, check_vma):
    mesh = mesh_on(sizes)

    def gather(words):
        every = wires.gather_words(words[0], axis)
        assert axes.varying_axes(every) == frozenset()
        return every

    run = jax.shard_map(gather, mesh=mesh, in_specs=P(axis), out_specs=P(), check_vma=check_vma)
    compiled = jax.jit(run).lower(WORDS).compile()
    assert all((np.asarray(one.data) == WORDS).all() for one in compiled(WORDS).addressable_shards)
    sent = [c for c in lc.audit.collectives(compiled, mesh) if c.sent_bytes]
    assert sum(c.sent_bytes for c in sent) == 4 * 7 * 12_928  # padded to whole vectors
    assert {c.op for c in sent} == {"all-gather"}
    assert [c.group_size for c in sent] == ([8] if row == 1 else [8 // row, row])


def test_words_under_pmap_and_among_a_part_of_the_mesh(row):
    found = jax.pmap(lambda words: wires.gather_words(words, "a"), axis_name="a")(WORDS)
    assert (found == WORDS).all()
    if row < 4:
        run = jax.shard_map(
            lambda words: wires.gather_words(words[0, 0], "a")[None],
            mesh=mesh_on("a=4 tp=2"), in_specs=P("a", "tp"), out_specs=P("tp"),
        )  # fmt: skip
        words = WORDS.reshape(4, 2, -1)
        assert (jax.jit(run)(words) == words.swapaxes(0, 1)).all()


@pytest.mark.parametrize(
    ("kind", "workers", "parts", "words", "row"),
    [
        ("TPU v5 lite", 256, 1, 2**14, 16),  # a result of 16 MiB
        ("TPU v5 lite", 256, 1, 2**14 + 128, 1),
        ("TPU v5 lite", 128, 1, 1040, 8),
        ("TPU v6 lite", 64, 1, 1040, 8),
        ("TPU v6 lite", 32, 1, 1040, 1),
        ("TPU v5", 1024, 1, 2**20, 32),
        ("TPU v5", 67, 1, 1040, 1),  # a prime has no rows
        ("TPU v5", 512, 2, 1040, 1),  # not all chips
        ("NVIDIA H100 80GB HBM3", 256, 1, 1040, 1),
        (None, 256, 1, 1040, 1),
    ],
)
def test_in_two_only_where_a_tpu_would_reduce(kind, workers, parts, words, row):
    platform = "tpu" if "TPU" in (kind or "") else "gpu"
    device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform) if kind else None
    mesh = AbstractMesh((workers, parts), ("data", "tp"), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert wires._grid_row(words, workers) == row
