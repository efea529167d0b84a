"""Deep Gradient Compression against its reference, bit for bit, and its bytes in compiled programs.

Gradients are small integers and momenta powers of two, so that what is gathered, and what is added over
the workers, is exact however a compiler contracts or reorders it.
"""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax import baselines, reference
from lioncub_jax.baselines.dgc import dgc, stages
from lioncub_jax.reference import dgc as reference_dgc
from lioncub_jax.traffic import compiled
from lioncub_jax.traffic import predicted as accounting

dgc_module = sys.modules[dgc.__module__]  # the package has a function of that name

# Sizes that no density divides, a scalar, nothing at all, and a dtype that is not the state's.
SHAPES = {"a": (7, 19), "bf16": (65,), "empty": (0, 4), "one": (1,), "scalar": ()}
SIZES = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
STEPS = 6


def traffic(params, workers, step=None, **options):
    return lc.traffic.of(dgc(1.0, axis_name=AXIS, **options), params, workers, step=step)


def params_of(shapes=None):
    shapes = SHAPES if shapes is None else shapes
    rng = np.random.default_rng(7)
    return {
        name: jnp.asarray(
            rng.integers(-4, 5, shape), jnp.bfloat16 if name == "bf16" else jnp.float32
        )
        for name, shape in shapes.items()
    }


def integers(params, workers, seed=0, steps=STEPS):
    """``[steps, W, ...]``: few values, so that equal magnitudes and zeros are common."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.integers(-3, 4, (steps, workers, *p.shape)).astype(p.dtype)
        for name, p in params.items()
    }


def eventful(params, workers, seed=0):
    """Who is told to abstain; and steps in which one worker, and then everybody, is not finite."""
    grads = integers(params, workers, seed)
    abstain = np.zeros((STEPS, workers), bool)
    abstain[1, 0] = True
    grads["a"][2, -1, 3, 3] = np.inf
    grads["bf16"][3] = np.nan
    grads["a"][4] = 0
    return grads, abstain


def simulated(simulator, params, grads, abstain):
    """The reference, all steps: updates ``[steps, ...]`` and states ``[steps, W, ...]``."""

    @jax.jit
    def run(grads, abstain):
        def step(state, now):
            updates, state = simulator.update(now[0], state, params, now[1])
            return state, (updates, state)

        return jax.lax.scan(step, simulator.init(params, abstain.shape[1]), (grads, abstain))[1]

    return jax.tree.map(np.asarray, run(jax.tree.map(jnp.asarray, grads), jnp.asarray(abstain)))


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        assert a.shape == b.shape and a.dtype == b.dtype, (path, a.shape, b.shape, a.dtype, b.dtype)
        assert np.isfinite(a.astype(np.float32)).all(), path
        np.testing.assert_array_equal(a, b, err_msg=str(path))


def assert_state(state, want):
    assert_same(state.velocity, want.velocity)
    assert_same(state.residual, want.residual)
    for name, counted in (("count", "t"), ("abstained",) * 2, ("abstentions",) * 2):
        on_all, wanted = getattr(state, name), getattr(want, counted)
        np.testing.assert_array_equal(on_all, np.broadcast_to(wanted[:, None], on_all.shape))


# --- Against the reference

CASES = {  # by the number of workers
    8: ({"density": 0.1}, {"density": 1.0}),
    3: ({"density": 0.02}, {"density": 0.25, "factor_masking": False}),
    4: ({"density": 0.02, "warmup": 4},),
    1: ({"density": 0.1},),
}


@pytest.mark.parametrize("workers", CASES)
def test_it_equals_the_reference(workers, run_workers):
    params = params_of()
    grads, abstain = eventful(params, workers, seed=workers)
    given = {i: {"momentum": 0.5, **options} for i, options in enumerate(CASES[workers])}
    txs = {i: dgc(0.5, axis_name=AXIS, **options) for i, options in given.items()}
    for i, (updates, states) in run_workers(txs, params, grads, abstain).items():
        oracle = reference.optimizer(reference_dgc.dgc(**given[i]), 0.5, weight_decay=0.0)
        want, wanted_state = simulated(oracle, params, grads, abstain)
        assert_same(updates, want)
        assert_state(states[0], wanted_state)
        moved = [np.abs(u.astype(np.float32)).max() for u in updates.values() if u.size]
        assert min(moved) > 0
        assert states[0].abstentions[-1, 0] == 2 + workers


def test_long_leaves_in_rows_are_sent_as_short_ones_are(run_workers, monkeypatch):
    """Rows of 2**30 in truth; here of 32, with a last one that is not full."""
    params = params_of()
    grads, abstain = eventful(params, 3)
    txs = {"dgc": dgc(0.5, momentum=0.5, density=0.15, axis_name=AXIS)}
    want = run_workers(txs, params, grads, abstain)
    monkeypatch.setattr(dgc_module, "_MOST", 50)
    monkeypatch.setattr(dgc_module, "_ROW", 32)
    got = run_workers(txs, params, grads, abstain)
    assert_same(got, want)


@pytest.mark.parametrize("name", ["on one device", "on two"])
def test_leaves_of_more_elements_than_int32_counts_are_traced(name):
    """By shape only."""
    sizes = {"data": 2, "tensor": 1 if name == "on one device" else 2}
    size, spec = 2**31 + 2**9, P() if name == "on one device" else P("tensor")
    kinds = (AxisType.Auto,) * 2
    devices = jax.devices()[: np.prod(list(sizes.values()))]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)
    makers = dgc, baselines.terngrad, baselines.qsgd, baselines.ef_signsgd, baselines.signum
    for make in makers:
        tx = lc.on_mesh(make(1.0, axis_name="data"), mesh, axis_name="data", specs={"w": spec})
        params = {"w": jax.ShapeDtypeStruct((size,), jnp.float32)}
        grads = {"w": jax.ShapeDtypeStruct((2, size), jnp.float32)}
        state = jax.eval_shape(tx.init, params)
        updates, _ = jax.eval_shape(tx.update, grads, state, params)
        assert updates["w"].shape == (size,)


@pytest.mark.parametrize(
    ("size", "options", "words"),
    [
        (2**32 + 1, {}, ["['w'] of 4294967297 elements", "at most 2**32", "inner mesh axes"]),
        (2**32, {"warmup": 4}, ["['w']", "a share of 0.25", "fewer than 2**30", "no warm-up"]),
    ],
)
def test_leaves_that_no_index_reaches_are_refused(size, options, words, mesh_of):
    tx = dgc(1.0, axis_name=AXIS, **options)

    def update(params):
        own = jax.lax.pcast(params, AXIS, to="varying")
        return tx.update(own, tx.init(own), own)[0]

    with refused(ValueError, *words):
        trace(update, {"w": jax.ShapeDtypeStruct((size,), jnp.float32)}, mesh_of)


def test_weights_decay_and_the_learning_rate_follows_its_schedule(run_workers):
    """A mean over 8 is exact, so that a compiler may contract its product with what is added."""
    params, given = params_of(), {"momentum": 0.5, "density": 0.1}
    grads, abstain = integers(params, 8), np.zeros((STEPS, 8), bool)
    mask = {name: name != "one" for name in params}

    def rate(count):
        return jnp.where(count < 3, 1.0, 0.25)

    txs = {"dgc": dgc(rate, weight_decay=0.25, mask=mask, axis_name=AXIS, **given)}
    updates, _ = run_workers(txs, params, grads, abstain)["dgc"]
    oracle = reference.optimizer(reference_dgc.dgc(**given), rate, 0.25, mask)
    assert_same(updates, simulated(oracle, params, grads, abstain)[0])


def test_nobody_there_changes_nothing(run_workers):
    params = params_of()
    grads, abstain = integers(params, 4, steps=3), np.zeros((3, 4), bool)
    abstain[1] = True
    grads["one"][2] = np.nan
    tx = dgc(1.0, momentum=0.5, density=0.1, axis_name=AXIS)
    updates, (state, *_) = run_workers({"dgc": tx}, params, grads, abstain)["dgc"]
    for step in (1, 2):
        assert not any(np.any(u[step]) for u in updates.values())
        for kept in (state.velocity, state.residual):
            assert all(np.array_equal(x[step], x[0]) for x in kept.values())
    assert any(np.any(x[0]) for x in state.residual.values())
    assert state.abstained[:, 0].tolist() == [0, 4, 4]
    assert state.abstentions[:, 0].tolist() == [0, 4, 8]


def of_norm(norms, params, seed=0):
    """Gradients ``[1, W, ...]`` of these norms over all leaves: 16 elements of one magnitude."""
    rng = np.random.default_rng(seed)
    grads = {name: np.zeros((1, len(norms), *p.shape), p.dtype) for name, p in params.items()}
    for worker, norm in enumerate(norms):
        for name, count in (("a", 10), ("bf16", 5), ("scalar", 1)):
            flat = grads[name][0, worker].reshape(-1)
            at = rng.choice(flat.size, count, replace=False)
            flat[at] = rng.choice([-norm / 4, norm / 4], count)
            grads[name][0, worker] = flat.reshape(grads[name].shape[2:])
    return grads


def test_a_gradient_is_clipped_before_anything_is_gathered(run_workers):
    """A norm of at most ``clip / sqrt(W)``: here 4 / 2."""
    params, norms = params_of(), [1.0, 2.0, 8.0, 32.0]
    grads, abstain = of_norm(norms, params), np.zeros((1, 4), bool)
    given = {"momentum": 0.5, "density": 0.05, "clip": 4.0}
    txs = {"dgc": dgc(1.0, axis_name=AXIS, **given)}
    updates, (state, *_) = run_workers(txs, params, grads, abstain)["dgc"]
    oracle = reference.optimizer(reference_dgc.dgc(**given), 1.0, weight_decay=0.0)
    want, wanted_state = simulated(oracle, params, grads, abstain)
    assert_same(updates, want)
    assert_state(state, wanted_state)
    # All that was not sent is as large as the clipped gradient's elements.
    for worker, norm in enumerate(norms):
        left = np.abs(np.concatenate([x[0, worker].reshape(-1) for x in state.residual.values()]))
        assert set(left) == {0, min(norm, 2.0) / 4}


def test_a_gradient_whose_norm_is_not_finite_abstains(run_workers):
    """Its square is more than float32 holds, and a scale of zero would lose it in silence."""
    params = {"w": jnp.zeros(9)}
    grads = {"w": np.ones((1, 2, 9), np.float32)}
    grads["w"][0, 1] = 1e30
    txs = {"dgc": dgc(1.0, density=1.0, clip=100.0, axis_name=AXIS)}
    updates, (state, *_) = run_workers(txs, params, grads, np.zeros((1, 2), bool))["dgc"]
    assert updates["w"].tolist() == [[-1.0] * 9]
    assert state.abstained[0].tolist() == [1, 1]


# --- What is sent


def test_nothing_is_lost(run_workers):
    """Without momentum, what was sent and what is left add up to all gradients."""
    params = params_of()
    workers, abstain = 8, np.zeros((STEPS, 8), bool)
    grads = integers(params, workers)
    tx = dgc(1.0, momentum=0.0, density=0.03, warmup=2, axis_name=AXIS)
    updates, (state, *_) = run_workers({"dgc": tx}, params, grads, abstain)["dgc"]
    for name, g in grads.items():
        sent = -workers * updates[name].astype(np.float32).sum(0)
        left = state.residual[name][-1].sum(0)
        np.testing.assert_array_equal(sent + left, g.astype(np.float32).sum((0, 1)), err_msg=name)
    assert np.any(state.residual["a"][-1]) and np.any(updates["a"])


def test_the_largest_magnitudes_are_sent_and_of_equal_ones_the_first(run_workers):
    params = {"w": jnp.zeros(8)}
    grads = {"w": np.array([[[1, -2, 3, 2, -3, 2, 0, 1]] * 2], np.float32)}
    tx = dgc(1.0, density=0.375, axis_name=AXIS)  # three of eight
    updates, (state, *_) = run_workers({"dgc": tx}, params, grads, np.zeros((1, 2), bool))["dgc"]
    assert (-updates["w"]).tolist() == [[0, -2, 3, 0, -3, 0, 0, 0]]
    assert state.residual["w"][0, 0].tolist() == [1, 0, 0, 2, 0, 2, 0, 1]
    np.testing.assert_array_equal(state.velocity["w"], state.residual["w"])


def test_all_sent_is_sgd_on_the_mean(run_workers):
    """Without momentum where masking forgets the velocity of what is sent, and with it otherwise."""
    params, abstain = params_of(), np.zeros((STEPS, 8), bool)
    txs = {
        "masked": dgc(0.5, 0.5, density=1.0, axis_name=AXIS),
        "kept": dgc(0.5, 0.5, density=1.0, factor_masking=False, axis_name=AXIS),
        "sgd": lc.global_gradients(optax.sgd(0.5), AXIS),
        "momentum sgd": lc.global_gradients(optax.sgd(0.5, 0.5, accumulator_dtype="float32"), AXIS),
    }
    grads = integers(params, 8)
    for name in ("bf16",):  # a mean in bfloat16 would be rounded before the velocity is
        del grads[name], params[name]
    done = run_workers(txs, params, grads, abstain)
    assert_same(done["masked"][0], done["sgd"][0])
    assert_same(done["kept"][0], done["momentum sgd"][0])
    assert not np.array_equal(done["sgd"][0]["a"], done["momentum sgd"][0]["a"])


def test_one_worker_alone_is_momentum_sgd(run_workers):
    params, abstain = params_of(), np.zeros((STEPS, 1), bool)
    del params["bf16"]
    txs = {
        "dgc": dgc(0.5, 0.5, density=0.01, weight_decay=0.25, axis_name=AXIS),
        "sgd": optax.chain(
            lc.global_gradients(optax.trace(0.5), AXIS),
            optax.add_decayed_weights(0.25),
            optax.scale_by_learning_rate(0.5),
        ),
    }
    done = run_workers(txs, params, integers(params, 1), abstain)
    assert_same(done["dgc"][0], done["sgd"][0])
    assert not any(np.any(x) for x in done["dgc"][1][0].residual.values())


# --- Warm-up


@pytest.mark.parametrize(
    ("density", "warmup", "want"),
    [
        (0.001, 0, [(0, 0.001)]),
        (0.001, 8, [(0, 0.25), (2, 0.0625), (4, 0.015625), (6, 0.00390625), (8, 0.001)]),
        (0.001, 6, [(0, 0.25), (2, 0.0625), (3, 0.015625), (5, 0.00390625), (6, 0.001)]),
        (0.001, 2, [(0, 0.25), (1, 0.015625), (2, 0.001)]),
        (0.0625, 5, [(0, 0.25), (5, 0.0625)]),
        (0.2, 1, [(0, 0.25), (1, 0.2)]),
        (1, 0, [(0, 1)]),
    ],
)
def test_densities_of_a_warm_up(density, warmup, want):
    assert [tuple(stage) for stage in stages(density, warmup)] == want


def test_a_warm_up_changes_what_is_sent_at_the_steps_it_says(run_workers):
    """Nothing gathered is ever zero here, so the zeros of the residual are what was sent."""
    params = {"long": jnp.zeros(1000), "short": jnp.zeros(10)}
    rng = np.random.default_rng(0)
    grads = {
        n: rng.integers(1, 100, (8, 4, *p.shape)).astype(np.float32) for n, p in params.items()
    }
    txs = {"dgc": dgc(1.0, momentum=0.0, density=0.01, warmup=6, axis_name=AXIS)}
    _, (state, *_) = run_workers(txs, params, grads, np.zeros((8, 4), bool))["dgc"]
    want = {"long": [250, 250, 63, 63, 16, 16, 10, 10], "short": [3, 3, 1, 1, 1, 1, 1, 1]}
    for name, counts in want.items():
        sent = (state.residual[name] == 0).sum(-1)
        assert sent.tolist() == [[n] * 4 for n in counts], name
    for step in range(8):
        entries = want["long"][step] + want["short"][step]
        told = traffic(params, 4, density=0.01, warmup=6, step=step)
        assert told.sent_bytes == 3 * (8 * entries + 4)
    assert told == traffic(params, 4, density=0.01)


# --- Bytes


def program(tx, workers, params, mesh_of):
    """The compiled update of workers whose state is an argument, and its mesh."""
    mesh = mesh_of(workers)

    def update(params, grads):
        local = jax.tree.map(lambda g: g[0], grads)
        return tx.update(local, tx.init(local), params)[0]

    grads = {n: jax.ShapeDtypeStruct((workers, *p.shape), p.dtype) for n, p in params.items()}
    run = jax.shard_map(update, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P())
    return jax.jit(run).lower(params, grads).compile(), mesh


LONG = {"long": jnp.zeros(130_001), **params_of()}


@pytest.mark.parametrize(
    ("density", "workers"), [(1.0, 8), (0.25, 3), (0.015625, 8), (0.001, 3), (0.0002, 2)]
)
def test_the_compiled_program_sends_what_is_predicted(density, workers, mesh_of):
    found = compiled.collectives(
        *program(dgc(0.1, density=density, axis_name=AXIS), workers, LONG, mesh_of)
    )
    (one,) = [c for c in found if c.sent_bytes]
    told = traffic(LONG, workers, density=density)
    assert (one.op, one.axes, one.gated) == ("all-gather", (AXIS,), False)
    assert one.operands[0].dtype == "u32"
    assert one.sent_bytes == told.sent_bytes == told.collectives[0].sent_bytes
    assert told.parameters == sum(SIZES.values()) + 130_001
    entries = sum(max(1, int(np.ceil(density * n))) for n in [130_001, *SIZES.values()] if n)
    words = 2 * entries + 1
    padding = 0 if words < 12_800 else -words % 128
    assert told.sent_bytes == 4 * (workers - 1) * (words + padding)


def test_each_stage_of_a_warm_up_has_an_all_gather_of_its_own(mesh_of):
    params, given = params_of(), {"density": 0.001, "warmup": 8}
    found = compiled.collectives(*program(dgc(0.1, axis_name=AXIS, **given), 8, params, mesh_of))
    assert all(one.gated and one.op == "all-gather" for one in found)
    want = [traffic(params, 8, step=step, **given).sent_bytes for step in (0, 2, 4, 6, 8)]
    assert sorted(one.sent_bytes for one in found) == sorted(want)


def test_one_worker_alone_sends_nothing(mesh_of):
    run, mesh = program(dgc(0.1, axis_name=AXIS), 1, params_of(), mesh_of)
    assert accounting.compiled_bytes(run, mesh) == 0
    assert traffic(params_of(), 1).sent_bytes == 0
    assert traffic({"empty": jnp.zeros((0, 3))}, 8).sent_bytes == 0


def test_a_thousandth_is_hundreds_of_times_less_than_float32():
    told = traffic({"w": jax.ShapeDtypeStruct((25_000_000,), jnp.float32)}, 2)
    assert told.share_of_float32 == pytest.approx(0.002, rel=1e-3)
    assert (told.scheme, told.workers) == ("dgc(0.001)", 2)


# --- Meshes of several axes

# Leaves that the inner axis cuts, and leaves that it does not, must not share a message.
CUT = {"w": ((6, 20), P(None, "tensor")), "v": ((10, 3), P("tensor")), "b": ((9,), P())}
EMPTY = {"nothing": ((0, 4), P())}
INNER = {"data": 4, "tensor": 2}


def mesh_4x2(kind=AxisType.Auto):
    assert len(jax.devices()) >= 8
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(kind,) * 2)


def cut_dims(spec):
    return [dim for dim, axis in enumerate(spec) if axis]


def split(x, spec, at):
    """The shard ``[steps, W, ...]`` of a device at an index of the inner axis."""
    dims = cut_dims(spec)
    return np.split(x, 2, axis=2 + dims[0])[at] if dims else x


def joined(shards, name, spec, lead):
    """Undoes `split`, of arrays with so many leading dimensions."""
    dims = cut_dims(spec)
    both = [shards[name, at] for at in range(2)]
    return np.concatenate(both, axis=lead + dims[0]) if dims else both[0]


@pytest.mark.parametrize(
    "kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)]
)
def test_devices_of_a_worker_send_the_largest_of_their_shards(kind):
    leaves = CUT | EMPTY
    specs = {n: spec for n, (_, spec) in leaves.items()}
    mesh, rng = mesh_4x2(kind), np.random.default_rng(0)
    params = {n: jnp.zeros(shape) for n, (shape, _) in leaves.items()}
    grads = {n: rng.integers(-3, 4, (3, 4, *p.shape)).astype(np.float32) for n, p in params.items()}
    grads["w"][1, 2, 0, 0] = np.nan  # in one shard only; the worker abstains as a whole
    given = {"momentum": 0.5, "density": 0.1, "warmup": 1}
    tx = lc.on_mesh(dgc(1.0, axis_name="data", **given), mesh, axis_name="data", specs=specs)
    params = {n: jax.device_put(p, NamedSharding(mesh, specs[n])) for n, p in params.items()}
    state, got = tx.init(params), []
    for step in range(3):
        now = {
            n: jax.device_put(g[step], NamedSharding(mesh, P("data", *specs[n])))
            for n, g in grads.items()
        }
        updates, state = jax.jit(tx.update)(now, state, params)
        got.append(jax.tree.map(np.asarray, updates))
    assert int(state[0].abstentions) == 1
    told = np.zeros((3, 4), bool)
    told[1, 2] = True
    grads["w"][1, 2, 0, 0] = 0
    # Leaves have nothing to do with each other, so shards may be leaves of one tree.
    shards = {(n, at): split(g, specs[n], at) for n, g in grads.items() for at in range(2)}
    blank = {key: jnp.zeros(x.shape[2:]) for key, x in shards.items()}
    want, wanted_state = simulated(reference_dgc.dgc(**given), blank, shards, told)
    for name, (_, spec) in CUT.items():
        updates = joined(want, name, spec, 1)
        left = joined(wanted_state.residual, name, spec, 2)[-1]
        np.testing.assert_array_equal(np.stack([-u[name] for u in got]), updates, err_msg=name)
        np.testing.assert_array_equal(state[0].residual[name], left, err_msg=name)
        assert np.any(updates) and np.any(left)


def test_a_norm_is_that_of_all_shards():
    """Cut or whole, a leaf counts once."""
    mesh, given = mesh_4x2(), {"momentum": 0.5, "density": 1.0, "clip": 4.0}
    specs = {"w": P("tensor"), "b": P()}
    tx = lc.on_mesh(dgc(1.0, axis_name="data", **given), mesh, axis_name="data", specs=specs)
    params = {"w": jnp.zeros(12), "b": jnp.zeros(4)}
    grads = {n: jnp.full((4, *p.shape), 2.0) for n, p in params.items()}  # 16 elements: a norm of 8
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    for name, p in params.items():
        np.testing.assert_array_equal(updates[name], np.full(p.shape, -0.5), err_msg=name)


def test_training_on_a_mesh_sends_each_shard_over_the_workers_axis_only():
    mesh, specs = mesh_4x2(), {"w": P(None, "tensor"), "b": P()}
    rng = np.random.default_rng(0)
    batch = rng.normal(size=(16, 24)).astype(np.float32)
    params = {"w": jnp.asarray(rng.normal(size=(24, 24)) / 5, jnp.float32), "b": jnp.zeros(24)}

    def loss(params, batch, rng):
        return jnp.mean((jnp.tanh(batch @ params["w"] + params["b"]) - batch) ** 2)

    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        dgc(0.5, density=0.05, warmup=4, clip=2.0, weight_decay=1e-4, axis_name="data"),
    )
    state = lc.init_state(tx, params, mesh, axis_name="data", specs=specs)
    step = lc.make_train_step(loss, tx, mesh, axis_name="data")
    kept = state.opt_state[1][0]
    for tree in (kept.velocity, kept.residual):
        assert tree["w"].sharding.spec == P("data", None, "tensor")
        assert tree["b"].sharding.spec == P("data")
        assert tree["w"].shape == (4, 24, 24)
    assert kept.count.shape == () and kept.count.sharding.is_fully_replicated
    found = compiled.collectives(step.lower(state, batch).compile(), mesh)
    crossing = [one for one in found if one.gated]
    assert {(one.op, one.axes) for one in crossing} >= {("all-gather", ("data",))}
    messages = [one for one in crossing if one.axes == ("data",)]
    half = {"w": jnp.zeros((24, 12))}
    want = [
        traffic(part, 4, density=0.05, warmup=4, step=at).sent_bytes
        for part in (half, {"b": params["b"]})
        for at in (0, 2, 4)
    ]
    assert sorted(one.sent_bytes for one in messages) == sorted(want)
    losses = []
    for _ in range(12):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert step.traces == 1
    assert np.isfinite(losses).all() and losses[-1] < 0.9 * losses[0]
    assert int(state.opt_state[1][0].count) == 12


# --- Bad input


def refused(error, *words):
    return pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, words)))


@pytest.mark.parametrize("density", [0, 0.0, -0.1, 1.5, float("nan"), True, "0.1", None])
def test_a_density_out_of_range(density):
    for make in (stages, lambda d: dgc(0.1, density=d, axis_name=AXIS)):
        with refused(ValueError, f"density={density!r}", "(0, 1]"):
            make(density)
    with refused(ValueError, f"density={density!r}", "(0, 1]"):
        traffic({}, 2, density=density)


@pytest.mark.parametrize("warmup", [-1, 1.5, True, "4", None])
def test_a_warm_up_that_is_no_number_of_steps(warmup):
    with refused(ValueError, f"warmup={warmup!r}", "whole number of steps"):
        dgc(0.1, warmup=warmup, axis_name=AXIS)


def test_a_warm_up_with_nowhere_to_come_down_from():
    with refused(ValueError, "warmup=4 with density=0.5", "25 %", "warmup=0"):
        dgc(0.1, density=0.5, warmup=4, axis_name=AXIS)


@pytest.mark.parametrize("momentum", [1.0, -0.1, float("nan"), "0.9", None])
def test_a_momentum_out_of_range(momentum):
    with refused(ValueError, f"momentum={momentum!r}", "[0, 1)"):
        dgc(0.1, momentum, axis_name=AXIS)


@pytest.mark.parametrize("clip", [0, -1.0, float("inf"), float("nan"), True, "1"])
def test_a_clip_that_is_no_norm(clip):
    with refused(ValueError, f"clip={clip!r}", "above 0, or None"):
        dgc(0.1, clip=clip, axis_name=AXIS)


@pytest.mark.parametrize("step", [-1, 1.0])
def test_a_step_before_the_first(step):
    with refused(ValueError, f"step={step!r}", "from 0"):
        traffic({}, 2, step=step)


def test_fewer_than_one_worker():
    with refused(ValueError, "workers=0", "at least 1"):
        traffic({}, 0)


def test_what_names_no_axis():
    with refused(ValueError, "axis_name=3", "a string"):
        dgc(0.1, axis_name=3)


def test_an_update_outside_of_shard_map():
    tx, params = dgc(0.1, axis_name=AXIS), {"w": jnp.ones(3)}
    with refused(ValueError, "axis_name='data'", "is not a mesh axis here"):
        tx.update(params, tx.init(params), params)


def trace(body, tree, mesh_of):
    mapped = jax.shard_map(body, mesh=mesh_of(4), in_specs=P(), out_specs=P())
    return jax.eval_shape(mapped, tree)


def test_gradients_that_were_already_reduced(mesh_of):
    tx = dgc(0.1, axis_name=AXIS)
    with refused(ValueError, "['w']", "already reduced in full precision"):
        trace(lambda g: tx.update(g, tx.init(g), g)[0], {"w": jnp.ones(3)}, mesh_of)


def test_leaves_that_are_not_floating(mesh_of):
    tx, leaf = dgc(0.1, axis_name=AXIS), {"w": jnp.ones(3, jnp.int32)}
    with refused(TypeError, "['w'] is int32"):
        tx.init(leaf)

    def body(params):
        state = tx.init(params)
        own = {"w": jax.lax.pcast(leaf["w"], AXIS, to="varying")}
        return tx.update(own, state, params)[0]

    with refused(TypeError, "['w'] is int32"):
        trace(body, {"w": jnp.ones(3)}, mesh_of)
