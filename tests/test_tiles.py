"""The order of rows on TPUs, tile by tile, gives the same bits."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import AXIS, assert_same, mesh_on, run_workers, workers_on
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax.exchange import layout, xla
from lioncub_jax.exchange.bits import ROW


@pytest.fixture
def as_tpu(monkeypatch):
    """``as_tpu(True)``: programs are traced as for a TPU."""
    return lambda yes: monkeypatch.setattr(xla, "for_tpu", lambda: yes)


STEPS, WORKERS = 2, 5
SHAPES = {"tiles": (24, 384), "big": (2, 136, 256), "row": (1000,), "ragged": (7, 130), "one": ()}
METHODS = {
    "vote": (lc.lion_cub, {"quantizer": lc.quantize.midrise(2)}, jnp.bfloat16),
    "owner": (lc.owner_lion, {}, jnp.float32),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_step_as_a_tpu_takes_it_is_the_step(as_tpu, method):
    """Two workers once have a NaN.

    Without ties and zeros, whose coins depend on the place of a row: voters and values are odd.
    """
    make, parts, dtype = METHODS[method]
    rng, txs = np.random.default_rng(3), {method: make(0.5, workers=AXIS, **parts)}
    params = {k: jnp.zeros(shape, dtype) for k, shape in SHAPES.items()}
    grads = {k: rng.choice([-3, -1, 1, 3], (STEPS, WORKERS, *s)) for k, s in SHAPES.items()}
    grads = {k: jnp.asarray(g, dtype) for k, g in grads.items()}
    grads["row"] = grads["row"].at[1, [2, 3], 5].set(jnp.nan)
    found = []
    for yes in (True, False):
        as_tpu(yes)
        done = run_workers(txs, params, grads)
        updates, (state, *_) = done[method]
        found.append((updates, state.mu, state.error))
    got, want = found
    # A sum of decoded values may be zero, and then takes the coin of its place: of 80,000 a few.
    coins = 64 if make is lc.owner_lion else 0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and np.sum(a != b) <= coins
    assert all(np.any(x[-1]) for x in jax.tree.leaves(want[0]))


def test_only_meshes_of_tpus_have_their_order():
    with jax.sharding.use_abstract_mesh(mesh_on("data=2").abstract_mesh):
        assert not xla.for_tpu()
    device = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((2,), ("data",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert xla.for_tpu()


# Where in its rows an element lies, of a leaf of whole tiles.
@pytest.mark.parametrize(
    ("shape", "at", "found"),
    [
        ((16, 384), (9, 130), (33, 2)),
        ((2, 2, 8, 256), (1, 0, 7, 255), (47, 127)),
        ((12, 256), None, None),
        ((16, 128), None, None),
        ((16, 200), None, None),
        ((70,), None, None),
    ],
)
def test_rows_of_a_leaf_of_tiles_lie_tile_by_tile_and_come_back(shape, at, found):
    size, made = math.prod(shape), layout.made_of_tiles(shape)
    assert made == (at is not None)
    x = np.arange(2 * size, dtype=np.float32).reshape(2, *shape)
    for tiles in sorted({False, made}):
        segment = layout.Segment(0, shape, size, 0, -(-size // ROW), tiles)
        piece = layout.Piece((segment,), 0, segment.rows, (0,))
        rows = np.stack([layout.piece_to_rows(own, piece).reshape(-1)[:size] for own in x])
        back = [layout.rows_to_leaf(own, segment) for own in jnp.asarray(rows)]
        np.testing.assert_array_equal(np.stack(back), x)
        assert tiles or (rows == x.reshape(2, size)).all()
    if at:
        assert rows[1].reshape(-1, ROW)[found] == x[1][at]


def test_a_state_in_another_order_is_refused(as_tpu):
    """By hand; the training step refuses what is not its optimizer's state anyway."""
    tx = lc.owner_lion(0.5, workers=AXIS)

    def worker(grads):
        as_tpu(True)
        state = tx.init({"w": jnp.zeros((24, 384))})
        as_tpu(False)
        return tx.update(grads, state)[0]

    over = jax.shard_map(
        worker, mesh=mesh_on("data=2"), in_specs=P(AXIS), out_specs=P(), check_vma=False
    )
    with pytest.raises(ValueError, match=r"another order .*another platform, .* restore it from"):
        jax.eval_shape(over, {"w": jnp.ones((2 * 24, 384))})


def test_a_chunk_in_the_order_of_tiles_moves_to_one_in_that_of_leaves(as_tpu, tmp_path):
    """A checkpoint says in which order rows lie, and is restored in the order of the mesh that asks."""
    params = {"w": jnp.zeros((24, 384)), "b": jnp.zeros(70)}

    def leaves_of(flat):
        return flat.bucket.split(flat.value.inner.mu.reshape(-1, ROW))

    def owned(workers, yes):
        as_tpu(yes)
        tx = lc.owner_lion(0.5, workers=workers)
        return lc.init_state(tx, params, workers)

    two, three = (workers_on(f"data={n}") for n in (2, 3))

    def numbered(x):
        return jax.device_put(np.arange(1, x.size + 1, dtype=x.dtype).reshape(x.shape), x.sharding)

    state = owned(two, True)
    state = state._replace(opt_state=jax.tree.map(numbered, state.opt_state))
    flat = state.opt_state[0].owner[0]
    assert any(segment.tiles for segment in flat.bucket.segments)
    with lc.Checkpoints(tmp_path, workers=two) as saved:
        saved.save(state, data=None)
    like = owned(three, False)
    with lc.Checkpoints(tmp_path, workers=three) as saved:
        found = saved.restore(like).state.opt_state[0].owner[0]
    assert not any(s.tiles for s in found.bucket.segments)
    got, want = leaves_of(found), leaves_of(flat)
    assert len(got) == 2
    assert_same(got, want)
