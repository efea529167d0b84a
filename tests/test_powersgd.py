"""PowerSGD against its reference, against the best approximation there is, and its bytes."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_dgc import refused, simulated

import lioncub_jax as lc
from lioncub_jax.baselines import powersgd
from lioncub_jax.checkpoint import Checkpoints
from lioncub_jax.reference import powersgd as reference_powersgd
from lioncub_jax.traffic import compiled

# A matrix, one of three dimensions (18 x 20), vectors, nothing at all, and dtypes that are not the state's.
SHAPES = {
    "a": (7, 19), "b": (5,), "bf16": (16, 12), "conv": (2, 9, 20), "empty": (0, 4), "long": (65,),
    "one": (1, 9), "scalar": (),
}  # fmt: skip
LOW = ("a", "bf16", "conv")  # of rank 1 and 2; "one" is no smaller by its factors
STEPS = 6


def dtype_of(name):
    return jnp.bfloat16 if name in ("bf16", "long") else jnp.float32


def zeros(shapes=None):
    shapes = SHAPES if shapes is None else shapes
    return {name: jnp.zeros(shape, dtype_of(name)) for name, shape in shapes.items()}


def normal(params, workers, seed=0, steps=STEPS):
    """Gradients ``[steps, W, ...]``."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=(steps, workers, *p.shape)).astype(p.dtype)
        for name, p in params.items()
    }


def eventful(params, workers, seed=0):
    """Who is told to abstain; and steps in which one worker, and then everybody, is not finite."""
    grads, abstain = normal(params, workers, seed), np.zeros((STEPS, workers), bool)
    abstain[1, 0] = True
    grads["a"][2, -1, 3, 3] = np.inf
    grads["long"][3] = np.nan
    grads["conv"][4] = 0
    return grads, abstain


def assert_close(got, want, atol=2e-5, short=2e-2):
    """But for the rounding, of leaves in bfloat16 to that."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        assert a.shape == b.shape and a.dtype == b.dtype, (path, a.shape, b.shape, a.dtype, b.dtype)
        assert np.isfinite(a.astype(np.float32)).all(), path
        near = short if dtype_of(getattr(path[-1], "key", "")) == jnp.bfloat16 else atol
        np.testing.assert_allclose(
            a.astype(np.float32), b.astype(np.float32), rtol=near, atol=near, err_msg=str(path)
        )


def best(x, rank):
    """The best approximation of a matrix, by its singular values."""
    u, s, v = np.linalg.svd(x, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v[:rank]


# --- The reference by itself


def test_the_reference_is_a_power_iteration():
    """In NumPy, as the paper has it."""
    params, rank = {"b": jnp.zeros(3), "w": jnp.zeros((2, 9, 20))}, 2
    grads = normal(params, 4, steps=3)
    simulator = reference_powersgd.powersgd(optax.sgd(1.0), rank)
    updates, _ = simulated(simulator, params, grads, np.zeros((3, 4), bool))
    q = np.asarray(simulator.init(params, 4).q[1], np.float64)
    error = np.zeros((4, 18, 20))
    for step in range(3):
        owed = grads["w"][step].reshape(4, 18, 20) + error
        p = np.linalg.qr((owed @ q).mean(0))[0]
        q = (owed.swapaxes(1, 2) @ p).mean(0)
        error = owed - p @ q.T
        np.testing.assert_allclose(-updates["w"][step].reshape(18, 20), p @ q.T, atol=1e-5)
        np.testing.assert_allclose(-updates["b"][step], grads["b"][step].mean(0), atol=1e-6)


# --- Against the reference

TXS = {
    "sgd": optax.sgd(0.5, momentum=0.5, accumulator_dtype=jnp.float32),
    "adamw": optax.adamw(0.5, eps=0.1),
}
CASES = {  # by the number of workers
    8: [("sgd", {"rank": 2}), ("adamw", {"rank": 1, "seed": 3})],
    4: [("sgd", {"rank": 2, "bits": 4}), ("adamw", {"rank": 1, "bits": 8})],
    3: [("sgd", {"rank": 2, "error_dtype": jnp.bfloat16})],
    1: [("sgd", {"rank": 2}), ("sgd", {"rank": 2, "bits": 2})],
}


@pytest.mark.parametrize("workers", CASES)
def test_it_equals_the_reference(workers, run_workers):
    params = zeros()
    grads, abstain = eventful(params, workers, seed=workers)
    txs = {
        i: powersgd(TXS[name], axis_name=AXIS, **options)
        for i, (name, options) in enumerate(CASES[workers])
    }
    for i, (updates, state) in run_workers(txs, params, grads, abstain).items():
        name, options = CASES[workers][i]
        oracle = reference_powersgd.powersgd(TXS[name], **options)
        want, wanted = simulated(oracle, params, grads, abstain)
        # Errors in bfloat16 differ by its last digit where what is rounded differs by one of float32.
        near = 2e-2 if "error_dtype" in options else 2e-4
        assert_close(updates, want, atol=near)
        for got, kept in ((state.error, wanted.error), (state.q, wanted.q)):
            all_err = "bits" in options and got is state.error  # of leaves in codes too
            assert [n for n, x in got.items() if x is not None] == list(SHAPES if all_err else LOW)
            kept = {n: x for n, x in zip(params, kept, strict=True) if x is not None}
            if got is state.q:  # one for all; a column has no sign
                got, kept = (
                    {n: np.abs(x) for n, x in t.items() if x is not None} for t in (got, kept)
                )
                kept = {n: np.stack([x] * workers, 1) for n, x in kept.items()}
            got = {n: x for n, x in got.items() if x is not None}
            assert_close(got, kept, atol=5 * near, short=0.1)
        for mine, theirs in (("count", "t"), ("abstained",) * 2, ("abstentions",) * 2):
            on_all = getattr(state, mine)
            np.testing.assert_array_equal(on_all, np.stack([getattr(wanted, theirs)] * workers, 1))
        assert state.abstentions[-1, 0] == 2 + workers
        assert min(np.abs(u.astype(np.float32)).max() for u in updates.values() if u.size) > 0


def test_nobody_there_is_a_mean_of_zeros(run_workers):
    """As an optimizer takes one: momentum goes on, and nothing that a worker keeps changes."""
    params = zeros()
    grads, abstain = normal(params, 4, steps=3), np.zeros((3, 4), bool)
    abstain[1] = True
    grads["b"][2] = np.nan
    tx = powersgd(TXS["sgd"], 2, axis_name=AXIS)
    updates, state = run_workers({"low": tx}, params, grads, abstain)["low"]
    for step in (1, 2):
        for name in ("a", "b", "conv"):
            np.testing.assert_array_equal(updates[name][step], updates[name][step - 1] / 2)
        for x in jax.tree.leaves((state.q, state.error)):
            np.testing.assert_array_equal(x[step], x[0])
    assert all(np.any(x[0]) for x in jax.tree.leaves(state.error))
    assert state.abstained[:, 0].tolist() == [0, 4, 4]
    assert state.abstentions[:, 0].tolist() == [0, 4, 8]


def test_one_worker_alone_is_its_transform(run_workers):
    params, abstain = zeros(), np.zeros((STEPS, 1), bool)
    grads = normal(params, 1)
    txs = {
        "low": powersgd(TXS["adamw"], 2, axis_name=AXIS),
        "adamw": lc.global_gradients(TXS["adamw"], AXIS),
    }
    done = run_workers(txs, params, grads, abstain)
    assert_close(done["low"][0], done["adamw"][0], atol=1e-6)
    assert not any(np.any(x) for x in jax.tree.leaves(done["low"][1].error))


# --- What the approximation is


def test_a_mean_of_that_rank_is_exact(run_workers):
    """Or of a lower one, or of none; gradients of each worker are of any rank. Steps share their rows."""
    params = zeros({"w": (24, 20), "v": (3, 10, 12), "none": (8, 16), "b": (6,)})
    rng, steps, workers = np.random.default_rng(0), 4, 4
    grads = normal(params, workers, steps=steps)
    for name, shape, rank in (("w", (24, 20), 3), ("v", (30, 12), 1), ("none", (8, 16), 0)):
        apart = rng.normal(size=(steps, workers, *shape))
        rows = rng.normal(size=(rank, shape[1]))
        mean = rng.normal(size=(steps, 1, shape[0], rank)) @ rows
        each = apart - apart.mean(1, keepdims=True) + mean
        grads[name] = each.reshape(grads[name].shape).astype(np.float32)
    grads["none"][:] = 0
    txs = {
        "low": powersgd(TXS["sgd"], 3, axis_name=AXIS),
        "sgd": lc.global_gradients(TXS["sgd"], AXIS),
    }
    done = run_workers(txs, params, grads, np.zeros((steps, workers), bool))
    assert_close(done["low"][0], done["sgd"][0], atol=1e-3)
    assert all(x is not None for n, x in done["low"][1].q.items() if n != "b")


def test_a_leaf_whose_factors_are_no_smaller_is_averaged_whole(run_workers):
    """So a full rank loses nothing: ``r (m + n)`` is more than ``m n`` there."""
    params = zeros({"w": (6, 12), "v": (20, 20)})  # 4 x 18 = 72
    grads, abstain = normal(params, 4), np.zeros((STEPS, 4), bool)
    txs = {
        "low": powersgd(TXS["adamw"], 4, axis_name=AXIS),
        "adamw": lc.global_gradients(TXS["adamw"], AXIS),
    }
    (low, state), (want, _) = run_workers(txs, params, grads, abstain).values()
    assert_close({"w": low["w"]}, {"w": want["w"]}, atol=1e-6)
    assert state.q["w"] is None and state.error["w"] is None and state.q["v"].shape[2:] == (20, 4)


def test_of_a_gradient_that_stays_it_becomes_the_best_of_that_rank():
    """Warm start: subspace iteration. Without feedback, which would add up what is left out."""
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.normal(size=(n, 24)))[0] for n in (40, 24))
    whole = ((u * 0.7 ** np.arange(24)) @ v.T).astype(np.float32)
    least = np.linalg.norm(whole - best(whole, 3))
    mesh = jax.make_mesh((4,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    tx = lc.on_mesh(powersgd(optax.sgd(1.0), 3, axis_name=AXIS), mesh, axis_name=AXIS)
    params = {"w": jnp.zeros((40, 24))}
    state, apart = tx.init(params), rng.normal(size=(4, 40, 24))
    grads = {"w": jnp.asarray(whole + apart - apart.mean(0), jnp.float32)}
    update, distances = jax.jit(tx.update), []
    for _ in range(12):
        updates, state = update(grads, state, params)
        distances.append(np.linalg.norm(whole + np.asarray(updates["w"])))
        state = state._replace(error=jax.tree.map(jnp.zeros_like, state.error))
    assert all(b <= a * (1 + 1e-5) for a, b in itertools.pairwise(distances))
    assert distances[0] > 1.05 * least
    assert distances[-1] == pytest.approx(least, rel=1e-3)


@pytest.mark.parametrize("bits", [None, 1, 4])
def test_nothing_is_lost(bits, run_workers):
    """What was applied and the mean of what is left add up to the means of all gradients."""
    params, workers = zeros(), 4
    grads, abstain = normal(params, workers), np.zeros((STEPS, workers), bool)
    tx = powersgd(optax.sgd(1.0), 1, bits, axis_name=AXIS)
    updates, state = run_workers({"low": tx}, params, grads, abstain)["low"]
    for name, g in grads.items():
        left = 0 if state.error[name] is None else state.error[name][-1].mean(0)
        applied = -updates[name].astype(np.float32).sum(0)
        rounded = 0.05 if name == "long" else 1e-4  # a vector in bfloat16 has no feedback
        want = g.astype(np.float32).mean(1).sum(0)
        np.testing.assert_allclose(applied + left, want, atol=rounded, err_msg=name)
    assert all(np.abs(state.error[n][-1]).max() > 0.1 for n in LOW)


def test_who_is_who_does_not_count(run_workers):
    params = zeros()
    grads, abstain = eventful(params, 8)
    order = np.random.default_rng(1).permutation(8)
    tx = powersgd(TXS["sgd"], 2, axis_name=AXIS)
    want, before = run_workers({"low": tx}, params, grads, abstain)["low"]
    mixed = {name: g[:, order] for name, g in grads.items()}
    got, after = run_workers({"low": tx}, params, mixed, abstain[:, order])["low"]
    assert_close(got, want, atol=2e-4)
    assert_close(after.error, jax.tree.map(lambda e: e[:, order], before.error), atol=2e-3)


def test_the_rounding_of_a_short_dtype_is_fed_back(run_workers):
    """In compiled programs a cast there and back may be left out."""
    params = {"bf16": jnp.zeros((16, 12), jnp.bfloat16)}
    grads, abstain = normal(params, 2, steps=1), np.zeros((1, 2), bool)
    tx = powersgd(optax.identity(), 1, axis_name=AXIS)
    updates, state = run_workers({"low": tx}, params, grads, abstain)["low"]
    own, seen = grads["bf16"][0].astype(np.float32), updates["bf16"][0].astype(np.float32)
    np.testing.assert_array_equal(state.error["bf16"][0], own - seen)
    assert updates["bf16"].dtype == jnp.bfloat16 and np.linalg.matrix_rank(seen) > 1


# --- What is not ordinary


def test_what_is_zeros_teaches_nothing_and_forgets_nothing(run_workers):
    """A gradient of lower rank, and none, leave no column of Q at zero for ever, and no NaN."""
    params, rng = {"w": jnp.zeros((20, 30))}, np.random.default_rng(0)
    grads = rng.normal(size=(5, 4, 20, 30)).astype(np.float32)
    grads[0] = 0
    grads[1] = rng.normal(size=(20, 1)) @ rng.normal(size=(1, 30))
    grads[1:, :, :3] = 0  # where unit vectors would look
    tx = powersgd(optax.sgd(1.0), 2, axis_name=AXIS)
    updates, state = run_workers({"low": tx}, params, {"w": grads}, np.zeros((5, 4), bool))["low"]
    ranks = [np.linalg.matrix_rank(u, tol=1e-3) for u in updates["w"]]
    assert ranks == [0, 1, 2, 2, 2]
    np.testing.assert_allclose(-updates["w"][1], grads[1, 0], atol=1e-4)
    assert np.isfinite(state.error["w"]).all()
    np.testing.assert_allclose(np.abs(state.q["w"][1:]).max(2), 1, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-15, 1e-6, 1e12])
def test_the_size_of_gradients_does_not_count(scale, run_workers):
    params = {"w": jnp.zeros((20, 30)), "b": jnp.zeros(4)}
    grads, abstain = normal(params, 4, steps=3), np.zeros((3, 4), bool)
    tx = powersgd(optax.sgd(1.0), 2, axis_name=AXIS)
    want, _ = run_workers({"low": tx}, params, grads, abstain)["low"]
    large = {n: (g * np.float32(scale)) for n, g in grads.items()}
    got, _ = run_workers({"low": tx}, params, large, abstain)["low"]
    assert_close({n: (u / scale).astype(np.float32) for n, u in got.items()}, want, atol=1e-4)


def test_sums_that_overflow_leave_no_trace(run_workers):
    """A worker whose product overflows abstains; where only the sum of all does, it is zeros."""
    params = {"w": jnp.zeros((20, 30)), "b": jnp.zeros(4)}
    grads, abstain = normal(params, 4, steps=4), np.zeros((4, 4), bool)
    grads["w"][1, 2] = 3e38
    grads["w"][2] = np.sign(grads["w"][2, 0]) * 3e37
    tx = powersgd(optax.sgd(1.0), 2, axis_name=AXIS)
    updates, state = run_workers({"low": tx}, params, grads, abstain)["low"]
    assert state.abstained[:, 0].tolist()[:2] == [0, 1]
    for x in jax.tree.leaves((updates, state)):
        assert np.isfinite(x).all()


def test_64_bits_change_no_dtype(run_workers):
    params = {"w": jnp.zeros((7, 19)), "b": jnp.zeros(3)}
    grads, abstain = normal(params, 2, steps=2), np.zeros((2, 2), bool)
    txs = {"low": powersgd(TXS["sgd"], 2, axis_name=AXIS)}
    want = run_workers(txs, params, grads, abstain)
    with jax.enable_x64(True):
        got = run_workers(txs, params, grads, abstain)  # the scan fails where a dtype changes
    assert_close(got, want, atol=1e-5)


# --- Bytes


def program(tx, workers, params, mesh_of):
    """The compiled update of workers whose state is an argument, and its mesh."""
    mesh = mesh_of(workers)

    def update(params, grads):
        local = jax.tree.map(lambda g: g[0], grads)
        return tx.update(local, tx.init(params), params)[0]

    grads = {n: jax.ShapeDtypeStruct((workers, *p.shape), p.dtype) for n, p in params.items()}
    run = jax.shard_map(update, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P())
    return jax.jit(run).lower(params, grads).compile(), mesh


@pytest.mark.parametrize(("rank", "workers"), [(1, 8), (2, 3)])
def test_the_compiled_program_sends_what_is_predicted(rank, workers, mesh_of):
    params = zeros()
    tx = powersgd(TXS["sgd"], rank, axis_name=AXIS)
    found = compiled.collectives(*program(tx, workers, params, mesh_of))
    told = lc.traffic.of(tx, params, workers)
    assert [(one.op, one.axes, one.gated) for one in found] == [("all-reduce", (AXIS,), False)] * 2
    assert {x.dtype for one in found for x in one.operands} == {"f32"}
    # The paper's r (m + n) for each matrix, vectors as they are, and who takes part.
    first = rank * (7 + 16 + 18) + 5 + 65 + 9 + 1 + 1
    second = rank * (19 + 12 + 20)
    each = [2 * (workers - 1) / workers * 4 * n for n in (first, second)]
    assert [one.sent_bytes for one in told.collectives] == pytest.approx(each)
    assert sorted(one.sent_bytes for one in found) == pytest.approx(sorted(each))
    assert told.sent_bytes == pytest.approx(sum(each))
    assert told.scheme == f"powersgd({rank}), all-reduce, mean"


@pytest.mark.parametrize(("bits", "workers"), [(4, 8), (1, 3)])
def test_codes_are_all_that_the_compiled_program_sends(bits, workers, mesh_of):
    params = zeros()
    tx = powersgd(TXS["sgd"], 2, bits, axis_name=AXIS)
    run, mesh = program(tx, workers, params, mesh_of)
    found, told = compiled.collectives(run, mesh), lc.traffic.of(tx, params, workers)
    assert {x.dtype for one in found for x in one.operands} == {"u32"}
    assert compiled.sent_bytes(found)[(AXIS,)] == pytest.approx(told.sent_bytes)
    assert told.scheme == f"powersgd(2) in {bits} bits, two-phase, mean"


def test_codes_of_a_large_model_cost_their_bits_and_a_scale():
    params, workers = {"w": jax.ShapeDtypeStruct((2**18, 2**17), jnp.float32)}, 64
    sent = lc.traffic.of(powersgd(TXS["sgd"], 16, 4, axis_name=AXIS), params, workers).sent_bytes
    numbers = 16 * (2**18 + 2**17)
    assert sent == pytest.approx(2 * 63 / 64 * numbers * (4 + 1 / 8) / 8, rel=0.02)


def test_one_worker_alone_sends_nothing(mesh_of):
    tx = powersgd(TXS["sgd"], 2, axis_name=AXIS)
    run, mesh = program(tx, 1, zeros(), mesh_of)
    assert lc.traffic.compiled_bytes(run, mesh) == 0
    assert lc.traffic.of(tx, zeros(), 1).sent_bytes == 0


@pytest.mark.parametrize(
    ("shape", "sides"),
    [
        ((3, 3, 64, 128), (576, 128)),
        ((64, 8, 16), (64, 128)),
        ((8, 16, 64), (128, 64)),
        ((32, 48), (32, 48)),
        ((4, 4, 4, 4), (16, 16)),
    ],
)
def test_more_dimensions_are_a_matrix_with_the_fewest_rows_and_columns(shape, sides):
    tx = powersgd(optax.sgd(0.1), 2, axis_name=AXIS)
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    sent = lc.traffic.of(tx, params, 2).collectives
    assert [one.sent_bytes for one in sent] == [4 * (2 * sides[0] + 1), 4 * 2 * sides[1]]
    state = jax.eval_shape(tx.init, params)
    assert state.q["w"].shape == (sides[1], 2) and state.error["w"].shape == shape


# --- Meshes of several axes

CUT = {
    "w": ((24, 40), P(None, "fsdp")), "v": ((48, 10), P("fsdp")), "whole": ((20, 30), P()),
    "b": ((9,), P()), "c": ((8,), P("fsdp")), "empty": ((0, 4), P()),
}  # fmt: skip


def mesh_4x2(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(kind,) * 2)


def shard(x, spec, at, lead):
    """That of a device at an index of the inner axis, of arrays with so many leading dimensions."""
    dims = [dim for dim, axis in enumerate(spec) if axis]
    return np.split(x, 2, axis=lead + dims[0])[at] if dims else x


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        (AxisType.Auto, None),
        (AxisType.Auto, 8),
        pytest.param(AxisType.Explicit, None, marks=pytest.mark.slow),
    ],
)
def test_devices_of_a_worker_compress_their_shards(kind, bits):
    specs, mesh = {n: spec for n, (_, spec) in CUT.items()}, mesh_4x2(kind)
    params = {n: jnp.zeros(shape) for n, (shape, _) in CUT.items()}
    grads = normal(params, 4, steps=3)
    grads["w"][1, 2, 0, 0] = np.nan  # in one shard only; the worker abstains as a whole
    tx = powersgd(TXS["sgd"], 2, bits, axis_name="data")
    tx = lc.on_mesh(tx, mesh, axis_name="data", specs=specs)
    params = {n: jax.device_put(p, NamedSharding(mesh, specs[n])) for n, p in params.items()}
    state, got = tx.init(params), []
    assert {n: q if q is None else q.shape for n, q in state.q.items()} == {
        "w": (40, 2), "v": (20, 2), "whole": (30, 2), "b": None, "c": None, "empty": None
    }  # fmt: skip
    assert state.q["v"].sharding.spec == P("fsdp") and state.q["whole"].sharding.spec == P()
    assert state.error["w"].sharding.spec == P("data", None, "fsdp")
    for step in range(3):
        now = {
            n: jax.device_put(g[step], NamedSharding(mesh, P("data", *specs[n])))
            for n, g in grads.items()
        }
        updates, state = jax.jit(tx.update)(now, state, params)
        got.append(jax.tree.map(np.asarray, updates))
    assert int(state.abstentions) == 1
    grads["w"][1, 2, 0, 0] = 0
    told = np.zeros((3, 4), bool)
    told[1, 2] = True
    for at in range(2):  # as if they were leaves of a worker
        part = {n: shard(g, specs[n], at, 2) for n, g in grads.items()}
        blank = {n: jnp.zeros(x.shape[2:]) for n, x in part.items()}
        oracle = reference_powersgd.powersgd(TXS["sgd"], 2, bits)
        want, wanted = simulated(oracle, blank, part, told)
        mine = {n: shard(np.stack([u[n] for u in got]), specs[n], at, 1) for n in CUT}
        assert_close(mine, want, atol=2e-4)
        kept = dict(zip(sorted(blank), wanted.error, strict=True))
        for n in ("w", "v", "whole"):
            left = shard(np.asarray(state.error[n]), specs[n], at, 1)
            np.testing.assert_allclose(left, kept[n][-1], atol=2e-3, err_msg=n)


@pytest.mark.parametrize("bits", [None, 4])
def test_bytes_of_cut_leaves_are_those_of_shards(bits):
    specs, mesh = {n: spec for n, (_, spec) in CUT.items()}, mesh_4x2()
    params = {n: jnp.zeros(shape) for n, (shape, _) in CUT.items()}
    tx = powersgd(TXS["sgd"], 2, bits, axis_name="data")
    mapped = lc.on_mesh(tx, mesh, axis_name="data", specs=specs)
    grads = {n: jnp.zeros((4, *p.shape)) for n, p in params.items()}
    run = jax.jit(mapped.update).lower(grads, mapped.init(params), params).compile()
    found = compiled.sent_bytes(compiled.collectives(run, mesh))
    told = lc.traffic.of(tx, params, 4, specs=specs, inner_axes={"fsdp": 2})
    numbers = 2 * (24 + 20 + 24 + 10 + 20 + 30) + 9 + 4 + 1
    assert found[("data",)] == told.sent_bytes
    if bits is None:
        assert told.sent_bytes == 1.5 * 4 * numbers


def test_workers_in_two_levels_are_refused():
    mesh = jax.make_mesh((2, 2), (AXIS, "gpu"), devices=jax.devices()[:4],
                         axis_types=(AxisType.Auto,) * 2)  # fmt: skip
    with refused(
        ValueError, "powersgd has no two levels", "group_axis='gpu'", "without a group_axis"
    ):
        powersgd(TXS["sgd"], axis_name=lc.Workers(mesh, AXIS, "gpu"))
    every_device = lc.Workers(mesh, (AXIS, "gpu"))
    tx = powersgd(TXS["sgd"], 1, axis_name=every_device)
    state = lc.init_state(tx, {"w": jnp.zeros((8, 8))}, every_device)
    assert state.opt_state.error["w"].shape == (4, 8, 8)


# --- Training


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(12, (3, 3), strides=2)(x))
        return nn.Dense(4)(nn.relu(nn.Dense(24)(x.reshape(len(x), -1))))


def training(tx, mesh):
    """The first state, and a step on one batch."""
    model, rng = Model(), np.random.default_rng(0)
    images = rng.normal(size=(16, 8, 8, 3)).astype(np.float32)
    batch = {"x": images, "y": rng.integers(0, 4, 16)}

    def loss(params, batch, rng):
        logits = model.apply({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    params = model.init(jax.random.key(0), images[:1])["params"]
    state = lc.init_state(tx, params, mesh, axis_name=AXIS)
    step = lc.make_train_step(loss, tx, mesh, axis_name=AXIS, donate=False)
    return state, lambda state: step(state, batch)


def trained(step, state, steps):
    losses = []
    for _ in range(steps):
        state, metrics = step(state)
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion"])
def test_a_flax_model_learns(name, mesh_of):
    tx = {"sgd": optax.sgd(0.1, momentum=0.9), "adamw": optax.adamw(3e-3), "lion": optax.lion(2e-3)}
    low = powersgd(tx[name], 2, axis_name=AXIS)
    state, step = training(optax.chain(optax.clip(1.0), low), mesh_of(4))
    state, losses = trained(step, state, 20)
    assert np.isfinite(losses).all() and losses[-1] < 0.5 * losses[0]
    assert int(state.opt_state[1].count) == 20
    kernel = state.opt_state[1].q["Conv_0"]["kernel"]
    assert kernel.shape == (12, 2) and kernel.sharding.is_fully_replicated


def test_a_restored_run_goes_on_to_the_bit(tmp_path, mesh_of):
    """And one of fewer workers owes what it owed."""
    tx = powersgd(optax.adamw(3e-3), 2, axis_name=AXIS)
    first, step = training(tx, mesh_of(4))
    half, _ = trained(step, first, 3)
    want, losses = trained(step, half, 2)
    alone, step_alone = training(tx, mesh_of(1))
    with Checkpoints(tmp_path, axis_name=AXIS) as checkpoints:
        checkpoints.save(half)
    with Checkpoints(tmp_path, axis_name=AXIS) as checkpoints:
        restored = checkpoints.restore(first).state
        alone = checkpoints.restore(alone).state
    got, rest = trained(step, restored, 2)
    assert rest == losses
    for a, b in zip(jax.tree.leaves(got.opt_state), jax.tree.leaves(want.opt_state), strict=True):
        np.testing.assert_array_equal(a, b)
    owed, left = jax.tree.leaves(half.opt_state.error), jax.tree.leaves(alone.opt_state.error)
    for a, b in zip(owed, left, strict=True):
        assert len(b) == 1 and np.any(b)
        np.testing.assert_allclose(b[0], np.asarray(a).mean(0), atol=1e-6)
    after, _ = trained(step_alone, alone, 1)  # where nothing is left out
    assert all(np.abs(x).max() < 1e-6 for x in jax.tree.leaves(after.opt_state.error))


def test_it_runs_under_pmap():
    params = {"b": jnp.zeros(5), "w": jnp.zeros((7, 19))}
    grads, abstain = normal(params, 4, steps=2), np.zeros((2, 4), bool)
    abstain[1, 2] = True
    tx = powersgd(TXS["sgd"], 2, axis_name=AXIS)
    copies = jax.tree.map(lambda p: jnp.stack([p] * 4), params)
    state = jax.pmap(tx.init, axis_name=AXIS)(copies)
    update = jax.pmap(lambda g, state, told: tx.update(g, state, abstain=told), axis_name=AXIS)
    want, _ = simulated(reference_powersgd.powersgd(TXS["sgd"], 2), params, grads, abstain)
    for at in range(2):
        updates, state = update({n: g[at] for n, g in grads.items()}, state, abstain[at])
        alike = {n: np.stack([x[at]] * 4) for n, x in want.items()}
        assert_close(jax.tree.map(np.asarray, updates), alike, atol=1e-4)
    assert state.abstentions.tolist() == [1] * 4


# --- Bad input


@pytest.mark.parametrize("rank", [0, -1, 1.0, True, "2", None])
def test_a_rank_that_is_none(rank):
    with refused(ValueError, f"rank={rank!r}", "whole number of at least 1"):
        powersgd(TXS["sgd"], rank, axis_name=AXIS)


@pytest.mark.parametrize(
    ("shapes", "rank", "words"),
    [
        ({"w": (12, 16), "v": (4, 400)}, 9, ["['w'], is 12 x 16", "side of 12", "at most 6"]),
        (
            {"w": (24, 2), "b": (5,)},
            2,
            ["['w'], is 24 x 2", "side of 2: give a rank of at most 1"],
        ),
        ({"w": (1, 16)}, 1, ["['w'], is 1 x 16", "side of 1: give global_gradients"]),
    ],
)
def test_a_rank_above_every_matrix(shapes, rank, words):
    tx = powersgd(TXS["sgd"], rank, axis_name=AXIS)
    said = f"rank={rank}: no leaf would be compressed"
    with refused(ValueError, said, *words):
        tx.init(zeros(shapes))
    with refused(ValueError, said):
        lc.traffic.of(tx, zeros(shapes), 4)


@pytest.mark.parametrize("shapes", [{"b": (5,), "s": ()}, {"w": (0, 4)}, {}])
def test_leaves_without_a_matrix(shapes):
    tx = powersgd(TXS["sgd"], axis_name=AXIS)
    with refused(
        ValueError, f"none of the {len(shapes)} leaves", "global_gradients(tx, axis_name)"
    ):
        tx.init(zeros(shapes))


def test_errors_that_are_not_floating():
    with refused(ValueError, "powersgd(error_dtype=int32)", "floating"):
        powersgd(TXS["sgd"], axis_name=AXIS, error_dtype=jnp.int32)


def test_what_is_no_transform():
    with refused(TypeError, "tx=0.1 is not a GradientTransformation"):
        powersgd(0.1, axis_name=AXIS)


def test_what_names_no_axis():
    with refused(ValueError, "axis_name=3", "a string"):
        powersgd(TXS["sgd"], axis_name=3)


def test_an_update_outside_of_shard_map():
    tx, params = powersgd(TXS["sgd"], 1, axis_name=AXIS), {"w": jnp.ones((4, 4))}
    with refused(ValueError, "axis_name='data'", "is not a mesh axis here"):
        tx.update(params, tx.init(params), params)


def test_gradients_that_were_already_reduced(mesh_of):
    tx = powersgd(TXS["sgd"], 1, axis_name=AXIS)
    mapped = jax.shard_map(
        lambda g: tx.update(g, tx.init(g), g)[0], mesh=mesh_of(4), in_specs=P(), out_specs=P()
    )
    with refused(ValueError, "['w']", "already reduced in full precision"):
        jax.eval_shape(mapped, {"w": jnp.ones((4, 4))})


def test_leaves_that_are_not_floating():
    with refused(TypeError, "['w'] is int32"):
        powersgd(TXS["sgd"], 1, axis_name=AXIS).init({"w": jnp.ones((4, 4), jnp.int32)})
