"""What a TPU wants otherwise gives the same bits: the kernel, run as plain JAX; and the order of rows."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax import bits, kernels, layout
from lioncub_jax.bits import BLOCK, ROW


@pytest.fixture
def interpreted():
    before = kernels.mode("interpret")
    yield
    kernels.mode(before)


def codes_of(rows, p, seed=0):
    drawn = np.random.default_rng(seed).integers(0, 2**p, (rows, ROW))
    return jnp.asarray(drawn, jnp.uint32)


# Blocks that a kernel holds at a time: 32. Fewer, as many, and some that are left over.
@pytest.mark.parametrize("blocks", [1, 3, 32, 33, 70])
@pytest.mark.parametrize("p", [1, 3, 4, 8, 9])
def test_packed_by_the_kernel_codes_are_the_same_words(blocks, p):
    codes = codes_of(blocks * BLOCK, p)
    got, want = kernels.pack(codes, p, interpret=True), bits.pack(codes, p)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("lead", [(), (3,), (2, 2)])
@pytest.mark.parametrize("p", [1, 2, 5, 9])
def test_codes_come_back_in_two_steps(lead, p):
    codes = codes_of(math.prod(lead) * 2 * BLOCK, p).reshape(*lead, -1, ROW)
    planes = bits.pack(codes, p)
    np.testing.assert_array_equal(kernels.unpack(planes), codes)
    np.testing.assert_array_equal(bits.unpack(planes, codes.shape[-2]), codes)


def test_half_blocks_and_zeros_take_the_same_way(interpreted):
    fields = codes_of(3 * BLOCK // 2, 2) | (codes_of(3 * BLOCK // 2, 1, seed=1) << 2)
    zeros = bits.coin(0, 4 * len(fields), 5)
    got = bits.pack(fields, 3, zeros), bits.pack(fields[:BLOCK], 3, zeros[: 4 * BLOCK])
    kernels.mode("off")
    want = bits.pack(fields, 3, zeros), bits.pack(fields[:BLOCK], 3, zeros[: 4 * BLOCK])
    jax.tree.map(np.testing.assert_array_equal, got, want)


STEPS, WORKERS = 3, 5
SHAPES = {"tiles": (24, 384), "big": (2, 264, 256), "row": (1000,), "ragged": (7, 130), "one": ()}
METHODS = {
    "1 bit": (lc.lion_cub, {}),
    "2 bits": (lc.lion_cub, {"quantizer": lc.quantize.midrise(2)}),
    "integers": (lc.lion_cub, {"quantizer": lc.quantize.integer(8)}),
    "average": (lc.distributed_lion, {"average": True}),
    "owner": (lc.owner_lion, {}),
}


def run(mesh, tx, dtype):
    """Updates and momenta of some steps; two workers once have a NaN.

    Without ties and zeros, whose coins depend on the place of a row: voters and values are odd.
    """
    rng = np.random.default_rng(3)
    params = {k: jnp.zeros(shape, dtype) for k, shape in SHAPES.items()}
    grads = {k: rng.choice([-3, -1, 1, 3], (STEPS, WORKERS, *s)) for k, s in SHAPES.items()}
    grads = {k: jnp.asarray(g, dtype) for k, g in grads.items()}
    grads["row"] = grads["row"].at[1, [2, 3], 5].set(jnp.nan)

    def worker(grads):
        state, updates = tx.init(params), []
        for t in range(STEPS):
            own = {k: g[t, 0] for k, g in grads.items()}
            update, state = tx.update(own, state, params)
            updates.append(update)
        kept = state[0].mu, state[0].error
        return updates, jax.tree.map(lambda x: x[None], kept)

    # Interpreted kernels lose the types of what varies, which check_vma asks for.
    over = jax.shard_map(
        worker, mesh=mesh, in_specs=P(None, "data"), out_specs=(P(), P("data")), check_vma=False
    )
    return jax.jit(over)(grads)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_as_a_tpu_takes_it_is_the_step(mesh_of, method, dtype):
    make, parts = METHODS[method]
    mesh = mesh_of(WORKERS)
    want = run(mesh, make(0.5, axis_name="data", **parts), dtype)
    before = kernels.mode("interpret")
    try:
        got = run(mesh, make(0.5, axis_name="data", **parts), dtype)
    finally:
        kernels.mode(before)
    # A sum of decoded values may be zero, and then takes the coin of its place: of 137,000 a few.
    coins = 64 if method == "owner" else 0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and np.sum(np.asarray(a) != np.asarray(b)) <= coins
    assert all(jnp.any(x) for x in jax.tree.leaves(want[0][-1]))


def test_only_meshes_of_tpus_have_their_kernels(mesh_of, interpreted):
    assert kernels.for_tpu() and kernels.for_tpu(mesh_of(2))
    kernels.mode("auto")
    assert not kernels.for_tpu() and not kernels.for_tpu(mesh_of(2))
    device = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((2,), ("data",), abstract_device=device)
    assert kernels.for_tpu(mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        assert kernels.for_tpu()
        kernels.mode("off")
        assert not kernels.for_tpu()


def test_another_mode_is_refused():
    with pytest.raises(
        ValueError, match=r"kernels.mode\('on'\): give 'auto', 'off' or 'interpret'"
    ):
        kernels.mode("on")


def row_of(at, shape):
    """In which row of a leaf an element lies, and where in it, by counting."""
    *lead, r, c = at
    before = 0
    for k, n in zip(lead, shape, strict=False):
        before = before * n + k
    tiles = before * (shape[-2] // 8) + r // 8
    return 8 * (tiles * (shape[-1] // 128) + c // 128) + r % 8, c % 128


def segment_of(shape, tiles):
    return layout.Segment(0, shape, math.prod(shape), 0, -(-math.prod(shape) // ROW), tiles)


@pytest.mark.parametrize("shape", [(8, 256), (16, 384), (3, 16, 256), (2, 2, 8, 256)])
def test_rows_of_a_leaf_of_tiles_lie_tile_by_tile(shape):
    assert layout.made_of_tiles(shape)
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    rows = layout.in_row_order(jnp.asarray(x), segment_of(shape, True))
    rows, rng = np.asarray(rows).reshape(-1, ROW), np.random.default_rng(1)
    for _ in range(200):
        at = tuple(int(rng.integers(n)) for n in shape)
        assert rows[row_of(at, shape)] == x[at]


@pytest.mark.parametrize("shape", [(8, 256), (3, 16, 256), (12, 256), (16, 128), (16, 200), (70,)])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_rows_come_back_in_the_shape_of_their_leaf(shape, lead):
    x = jnp.arange(math.prod(lead) * math.prod(shape)).reshape(*lead, *shape)
    for tiles in {False, layout.made_of_tiles(shape)}:
        segment = segment_of(shape, tiles)
        rows = layout.in_row_order(x, segment)
        assert rows.shape == (*lead, math.prod(shape))
        np.testing.assert_array_equal(layout.in_shape(rows, segment), x)
        assert tiles or (rows == x.reshape(rows.shape)).all()


def test_tiles_are_for_tpus_only(interpreted):
    leaves = [jnp.zeros((24, 384)), jnp.zeros((600, 256)), jnp.zeros((12, 256)), jnp.zeros(256)]
    made_for = {}
    for mode in ("interpret", "off"):
        kernels.mode(mode)
        [bucket] = layout.buckets(leaves, 2)
        made_for[mode] = {s.leaf: s.tiles for s in bucket.segments}
    assert made_for["interpret"] == {0: True, 1: True, 2: False, 3: False}
    assert not any(made_for["off"].values())


def test_a_state_in_another_order_is_refused(interpreted, mesh_of):
    """By hand; `on_mesh` and the training step refuse what is not their optimizer's state anyway."""
    tx = lc.owner_lion(0.5, axis_name="data")

    def worker(grads):
        state = tx.init({"w": jnp.zeros((24, 384))})
        kernels.mode("auto")
        return tx.update(grads, state)[0]

    over = jax.shard_map(
        worker, mesh=mesh_of(2), in_specs=P("data"), out_specs=P(), check_vma=False
    )
    with pytest.raises(ValueError, match=r"another order .*kernels.mode, .* restore it from"):
        jax.jit(over)({"w": jnp.ones((2 * 24, 384))})


def test_a_slice_in_the_order_of_tiles_moves_to_one_in_that_of_leaves(
    interpreted, tmp_path, mesh_of
):
    """A checkpoint says in which order rows lie, and is restored in the order of the mesh that asks."""
    params = {"w": jnp.zeros((24, 384)), "b": jnp.zeros(70)}

    def owned(workers, mode):
        kernels.mode(mode)
        tx = lc.owner_lion(0.5, axis_name=workers)
        state = lc.init_state(tx, params, workers)
        return tx, state

    two = lc.Workers(mesh_of(2), "data")
    _, state = owned(two, "interpret")
    flat = state.opt_state[0].owner[0]
    numbers = jnp.arange(flat.value.mu.size, dtype=jnp.float32).reshape(flat.value.mu.shape)
    numbers = jax.device_put(numbers, flat.value.mu.sharding)
    leaf = layout.apart_all(numbers.reshape(-1, ROW), flat.bucket.pieces)
    flat = dataclasses.replace(flat, value=flat.value._replace(mu=numbers))
    inner = (state.opt_state[0]._replace(owner=(flat,)), *state.opt_state[1:])
    with lc.Checkpoints(tmp_path, axis_name=two) as saved:
        saved.save(state._replace(opt_state=inner), data=None)
    three = lc.Workers(mesh_of(3), "data")
    _, like = owned(three, "off")
    with lc.Checkpoints(tmp_path, axis_name=three) as saved:
        found = saved.restore(like).state.opt_state[0].owner[0]
    assert not any(s.tiles for s in found.bucket.segments)
    rows = found.value.mu.reshape(-1, ROW)
    for i, x in layout.apart_all(rows, found.bucket.pieces).items():
        np.testing.assert_array_equal(x, leaf[i])
