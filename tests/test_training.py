"""Whole training steps on a mesh: models, metrics, random numbers, placement, faults and bytes."""

import argparse
import functools
import inspect
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax.traffic.compiled import collectives, sent_bytes
from lioncub_jax.traffic.predicted import compiled_bytes, predict

AXIS = "data"
W = 4
ROWS, FEATURES = 128, 6


def make_mesh(workers=W, kind=AxisType.Auto, others=()):
    devices = jax.devices()
    sizes = (workers, *(size for _, size in others))
    names = (AXIS, *(name for name, _ in others))
    assert len(devices) >= np.prod(sizes)
    chosen = devices[: np.prod(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes), devices=chosen)


def start(loss, tx, params, mesh=None, *, accumulate=1, **rest):
    """The first state and the step."""
    mesh = mesh or make_mesh()
    state = lc.init_state(tx, params, mesh, axis_name=AXIS, **rest)
    return state, lc.make_train_step(loss, tx, mesh, axis_name=AXIS, accumulate=accumulate)


def cub(learning_rate=0.01, **options):
    return lc.lion_cub(learning_rate, axis_name=AXIS, **options)


def plain_sgd(learning_rate=1.0):
    """Applies the gradient itself, averaged over the workers: shows what the step made of it."""
    return lc.global_gradients(optax.sgd(learning_rate), AXIS)


def draw(seed=0, rows=ROWS):
    """Features that differ between workers, and targets that are linear in them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, FEATURES))
    by_worker(x)[...] += rng.normal(scale=0.3, size=(W, 1, 1))
    weights = np.arange(1, FEATURES + 1)[:, None] / 4
    return {"x": x.astype(np.float32), "y": (x @ weights).astype(np.float32)}


def by_worker(x, workers=W):
    return np.asarray(x).reshape(workers, -1, *np.shape(x)[1:])


def linear_params():
    return {"w": jnp.zeros((FEATURES, 1)), "b": jnp.zeros(1)}


def linear_loss(params, batch, rng):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def linear_gradients(params, batch):
    """Each worker's own, in numpy: ``[W, features, 1]``."""
    x, y = by_worker(batch["x"]), by_worker(batch["y"])
    error = x @ np.asarray(params["w"]) + np.asarray(params["b"]) - y
    return 2 * np.mean(x * error, axis=1)[..., None]


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


# --- Models


class Net(nnx.Module):
    """Everything a model may keep: parameters, batch statistics and random streams."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(FEATURES, momentum=0.9, rngs=rngs)
        self.hidden = nnx.Linear(FEATURES, 32, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(nnx.relu(self.hidden(self.norm(x)))))


def net_losses(model, batch):
    fit = jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
    size = 1e-4 * jnp.sum(model.out.kernel[...] ** 2)
    return fit + size, {"fit": fit, "size": size, "kept": model.drop(jnp.ones(64)) > 0}


@functools.cache
def trained_net():
    """One run for several tests: model, batch, last state, first mean of the batches, metrics."""
    model, batch = Net(nnx.Rngs(0)), draw()
    loss, params, model_state = lc.from_nnx(model, net_losses)
    state, step = start(loss, cub(0.05), params, model_state=model_state)
    metrics = []
    for i in range(60):
        state, found = step(state, batch)
        metrics.append(jax.tree.map(np.asarray, found))
        if i == 0:
            mean = np.asarray(state.model_state["norm"]["mean"][...])
    assert step.traces == 1
    return model, batch, state, mean, metrics


def test_an_nnx_model_with_dropout_and_batch_statistics_learns():
    *_, metrics = trained_net()
    losses = [float(m["loss"]) for m in metrics]
    assert np.mean(losses[-5:]) < 0.5 * losses[0]  # dropout keeps it up
    assert metrics[0]["fit"] + metrics[0]["size"] == pytest.approx(metrics[0]["loss"], rel=1e-5)
    assert metrics[0]["fit"].shape == metrics[0]["size"].shape == ()


def test_each_nnx_worker_drops_other_units_and_at_each_step_others():
    *_, metrics = trained_net()
    masks = [m["kept"] for m in metrics[:3]]
    assert all(mask.shape == (W, 64) and mask.dtype == bool for mask in masks)
    assert len({row.tobytes() for mask in masks for row in mask}) == 3 * W


def test_nnx_batch_statistics_are_each_workers_own():
    _, batch, _, mean, _ = trained_net()
    assert mean.shape == (W, FEATURES)
    # The running mean starts at 0 and moves a tenth of the way.
    np.testing.assert_allclose(mean, 0.1 * by_worker(batch["x"]).mean(1), rtol=1e-4, atol=1e-6)


def test_a_trained_nnx_model_takes_back_its_parameters_and_the_mean_of_the_statistics():
    model, batch, state, _, metrics = trained_net()
    trained = Net(nnx.Rngs(0))
    statistics = nnx.filter_state(state.model_state, nnx.BatchStat)
    nnx.update(trained, state.params, lc.training.mean_model_state(statistics))
    trained.eval()
    error = float(jnp.mean((trained(batch["x"]) - batch["y"]) ** 2))
    assert error < 0.3 * metrics[0]["fit"]
    assert not np.allclose(model.out.kernel[...], trained.out.kernel[...])  # still the first one


class LinenNet(nn.Module):
    """Dropout from the step's key, batch statistics as a mutable collection."""

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.9, name="norm")(x)
        x = nn.Dropout(0.2, deterministic=False)(nn.relu(nn.Dense(32)(x)))
        return nn.Dense(1)(x)


def linen_loss(params, model_state, batch, rng):
    variables = {"params": params, "batch_stats": model_state}
    out, changed = LinenNet().apply(
        variables, batch["x"], rngs={"dropout": rng}, mutable=["batch_stats"]
    )
    return jnp.mean((out - batch["y"]) ** 2), {}, changed["batch_stats"]


def test_a_linen_model_with_mutable_batch_statistics_learns():
    batch = draw()
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = LinenNet().init(keys, batch["x"])
    state, step = start(
        lc.StatefulLoss(linen_loss),
        cub(0.05),
        variables["params"],
        model_state=variables["batch_stats"],
    )
    losses = []
    for i in range(60):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        if i == 0:
            mean = 0.1 * by_worker(batch["x"]).mean(1)
            np.testing.assert_allclose(
                state.model_state["norm"]["mean"], mean, rtol=1e-4, atol=1e-6
            )
    assert np.mean(losses[-5:]) < 0.5 * losses[0]  # dropout keeps it up


def test_a_linen_model_drops_other_units_on_each_worker():
    drop = nn.Dropout(0.5, deterministic=False)

    def loss(params, batch, rng):
        kept = drop.apply({}, jnp.ones(64), rngs={"dropout": rng})
        return jnp.mean(kept * params["w"]), {"kept": kept > 0}

    state, step = start(loss, cub(), {"w": jnp.ones(64)})
    state, first = step(state, np.zeros(W))
    state, second = step(state, np.zeros(W))
    rows = np.concatenate([first["kept"], second["kept"]])
    assert len({row.tobytes() for row in rows}) == 2 * W


# --- Metrics


def test_floating_numbers_are_averaged_whole_ones_added_and_arrays_stacked():
    def loss(params, batch, rng):
        x = batch["x"]
        aux = {
            "largest": jnp.max(x),
            "nested": {"small": jnp.mean(x).astype(jnp.bfloat16), "literal": 2.0},
            "positive": jnp.sum(x > 0),
            "any": jnp.any(x > 2),
            "columns": jnp.mean(x, axis=0),
        }
        return linear_loss(params, batch, rng), aux

    batch = draw()
    state, step = start(loss, cub(), linear_params())
    _, metrics = step(state, batch)
    x, y = by_worker(batch["x"]), by_worker(batch["y"])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
    close(metrics["loss"], np.mean(y**2))
    close(metrics["largest"], np.mean(x.max((1, 2))))
    close(metrics["columns"], x.mean(1), atol=1e-6)
    assert metrics["nested"]["literal"] == 2
    assert metrics["nested"]["small"].dtype == jnp.bfloat16
    assert int(metrics["positive"]) == np.sum(x > 0)
    assert int(metrics["any"]) == np.any(x > 2, axis=(1, 2)).sum()
    assert metrics["columns"].sharding.spec == P(AXIS)
    assert metrics["loss"].sharding.is_fully_replicated


def test_an_aux_that_is_no_dict_comes_back_under_a_name_of_its_own():
    def loss(params, batch, rng):
        return linear_loss(params, batch, rng), (jnp.max(batch["x"]), batch["x"][0])

    batch = draw()
    state, step = start(loss, cub(), linear_params())
    _, metrics = step(state, batch)
    assert set(metrics) == {"loss", "aux"}
    mean, rows = metrics["aux"]
    x = by_worker(batch["x"])
    np.testing.assert_allclose(mean, np.mean(x.max((1, 2))), rtol=1e-6)
    np.testing.assert_array_equal(rows, x[:, 0])


def test_an_aux_with_a_second_loss_is_refused():
    def loss(params, batch, rng):
        return linear_loss(params, batch, rng), {"loss": 0.0}

    state, step = start(loss, cub(), linear_params())
    with pytest.raises(ValueError, match="'loss', which is taken"):
        step(state, draw())


# --- Random numbers


def bits_loss(params, batch, rng):
    return jnp.mean(params["w"]) * jnp.mean(batch), {"bits": jax.random.bits(rng, (2,))}


def drawn_bits(seed, accumulate, steps=3):
    """``[steps, W, parts, 2]``."""
    params = {"w": jnp.ones(3)}
    key = None if seed is None else jax.random.key(seed)
    state, step = start(bits_loss, cub(), params, accumulate=accumulate, rng=key)
    found = []
    for _ in range(steps):
        state, metrics = step(state, np.ones(2 * W))
        found.append(np.asarray(metrics["bits"]).reshape(W, accumulate, 2))
    return np.stack(found)


def test_steps_workers_and_parts_draw_different_numbers_that_a_seed_repeats():
    found = drawn_bits(7, accumulate=2)
    assert len(np.unique(found)) == found.size == 3 * W * 2 * 2
    np.testing.assert_array_equal(found, drawn_bits(7, accumulate=2))
    assert not np.isin(found, drawn_bits(8, accumulate=2)).any()


def test_without_a_key_the_seed_is_zero():
    np.testing.assert_array_equal(drawn_bits(None, accumulate=1), drawn_bits(0, accumulate=1))


# --- Accumulation


def whole_numbers_loss(params, batch, rng):
    """Its gradients and metrics are exact in float32 for batches of small integers."""
    mean = jnp.mean(batch @ params["w"])
    return mean, {"half": mean / 2, "first": batch[0]}


@pytest.mark.parametrize("make", [plain_sgd, cub], ids=["gradient", "vote"])
def test_accumulating_in_parts_makes_the_update_of_the_whole_batch(make):
    batch = np.random.default_rng(0).integers(-8, 8, (8 * W, 3)).astype(np.float32)
    params, ends = {"w": np.arange(3, dtype=np.float32)}, []
    for accumulate in (1, 2, 4):
        state, step = start(whole_numbers_loss, make(), params, accumulate=accumulate)
        state, metrics = step(state, batch)
        ends.append((state.params, state.opt_state, metrics["loss"], metrics["half"]))
        rows = by_worker(batch, W * accumulate)[:, 0].reshape(np.shape(metrics["first"]))
        np.testing.assert_array_equal(metrics["first"], rows)
    assert_same(ends[0], ends[1])
    assert_same(ends[0], ends[2])
    assert not np.array_equal(ends[0][0]["w"], params["w"])


def test_model_state_is_handed_from_part_to_part():
    def count(params, model_state, batch, rng):
        seen = model_state["seen"] + batch.shape[0]
        last = 2 * model_state["folded"] + jnp.sum(batch)
        return jnp.mean(params["w"]) * jnp.mean(batch), {}, {"seen": seen, "folded": last}

    params, model_state = {"w": jnp.ones(2)}, {"seen": jnp.int32(0), "folded": jnp.float32(0)}
    loss = lc.StatefulLoss(count)
    state, step = start(loss, cub(), params, accumulate=2, model_state=model_state)
    state, _ = step(state, np.arange(4.0 * W, dtype=np.float32))
    parts = np.arange(4 * W).reshape(W, 2, 2).sum(-1)
    np.testing.assert_array_equal(state.model_state["seen"], [4] * W)
    np.testing.assert_array_equal(state.model_state["folded"], 2 * parts[:, 0] + parts[:, 1])


@pytest.mark.parametrize("accumulate", [0, -1, 1.5])
def test_a_useless_number_of_parts_is_refused(accumulate):
    with pytest.raises(ValueError, match="accumulate="):
        start(linear_loss, cub(), linear_params(), accumulate=accumulate)


@pytest.mark.parametrize(
    "x", [np.zeros((W + 2, 3)), np.zeros((0, 3)), np.float32(1)], ids=["odd", "empty", "scalar"]
)
def test_a_batch_that_does_not_divide_is_refused_by_name(x):
    state, step = start(linear_loss, cub(), linear_params(), accumulate=2)
    with pytest.raises(ValueError, match=r"batch\['x'\] has shape .* multiple of 8 \(4 workers, 2"):
        step(state, {"x": x})


# --- Placement


def placements(tree):
    return {
        jax.tree_util.keystr(path): (leaf.shape, leaf.sharding.spec)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


OPTIMIZERS = {
    "vote": cub(sync=lc.sync.every(2)),
    "owner": lc.owner_lion(0.01, axis_name=AXIS),
    "global": lc.global_gradients(optax.adamw(0.01), AXIS),
    "multi": optax.MultiSteps(cub(), 2),
}
# The parts of the state, by their names in a leaf's path, that are the workers' own.
OWN = {"vote": [".mu"], "owner": [".error", ".owner"], "global": [], "multi": [".mu", ".acc_grads"]}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_that_differs_between_workers_is_stacked_and_sharded(name):
    params = {"w": jnp.ones((FEATURES, 1)), "b": jnp.zeros(1)}
    state, step = start(linear_loss, OPTIMIZERS[name], params)
    before = placements(state)
    for part in OWN[name]:
        assert any(part in path for path in before)
    for path, (shape, spec) in before.items():
        if any(part in path for part in OWN[name]) and not path.endswith(".count"):
            assert spec == P(AXIS) and shape[0] == W, path
        else:
            assert spec == P(), path
    state, _ = step(state, draw())
    assert placements(state) == before  # so a second step needs no other program
    for leaf in jax.tree.leaves(state.params):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(copies) == W and all(np.array_equal(copies[0], c) for c in copies)


def test_owner_lion_holds_one_momentum_in_slices():
    params = {"w": jnp.ones((FEATURES, 200)), "b": jnp.zeros(1)}
    mesh = make_mesh()
    state = lc.init_state(lc.owner_lion(0.01, axis_name=AXIS), params, mesh, axis_name=AXIS)
    mu = optax.tree.get(state.opt_state, "mu", filtering=lambda path, x: hasattr(x, "shape"))
    assert mu.shape == (W, 16, 128)  # 1200 + 1 elements in 11 rows, half a block for each worker
    error = state.opt_state[0].error
    assert error["w"].shape == (W, FEATURES, 200) and error["w"].dtype == jnp.bfloat16


def test_what_the_caller_holds_survives_and_what_the_step_holds_is_donated():
    mesh = make_mesh()
    shared = NamedSharding(mesh, P())
    params = jax.device_put(linear_params(), shared)  # in place already: must be copied even so
    model_state = jax.device_put({"seen": jnp.float32(0)}, shared)
    key = jax.device_put(jax.random.key(3), shared)

    def loss(params, model_state, batch, rng):
        return linear_loss(params, batch, rng), {}, {"seen": model_state["seen"] + 1}

    first, step = start(
        lc.StatefulLoss(loss), cub(), params, mesh, model_state=model_state, rng=key
    )
    second, _ = step(first, draw())
    step(second, draw())
    donated = first.params, first.opt_state[0].mu, first.model_state
    assert all(x.is_deleted() for x in jax.tree.leaves(donated))
    assert_same(params, linear_params())
    assert float(model_state["seen"]) == 0
    assert jax.random.key_data(key).tolist() == jax.random.key_data(jax.random.key(3)).tolist()


# --- Meshes, batches and traces


def vote_runs(mesh, place=lambda batch: batch, steps=8):
    state, step = start(linear_loss, cub(quantizer=lc.quantize.midrise(2)), linear_params(), mesh)
    for seed in range(steps):
        state, metrics = step(state, place(draw(seed)))
    return (state.params, state.opt_state, metrics), step


@functools.cache
def usual_run():
    return vote_runs(make_mesh())[0]


def test_one_trace_serves_all_steps_and_kinds_of_batches():
    mesh = make_mesh()
    kinds = itertools.cycle(
        [
            lambda batch: batch,
            lambda batch: jax.tree.map(jnp.asarray, batch),
            lambda batch: jax.device_put(batch, NamedSharding(mesh, P(AXIS))),
            lambda batch: jax.device_put(batch, NamedSharding(mesh, P())),
        ]
    )
    run, step = vote_runs(mesh, lambda batch: next(kinds)(batch))
    assert step.traces == 1
    assert_same(run, usual_run())


@pytest.mark.parametrize(
    "mesh",
    [lambda: make_mesh(kind=AxisType.Explicit), lambda: make_mesh(others=[("model", 2)])],
    ids=["explicit", "unused axis"],
)
def test_other_meshes_of_as_many_workers_give_the_same_run(mesh):
    run, step = vote_runs(mesh())
    assert step.traces == 1
    assert_same(run, usual_run())


def test_an_axis_that_is_not_in_the_mesh_is_refused():
    with pytest.raises(ValueError, match="axis_name='workers' is none of them"):
        lc.init_state(cub(), linear_params(), make_mesh(), axis_name="workers")
    with pytest.raises(ValueError, match="axis_name='workers' is none of them"):
        lc.make_train_step(linear_loss, cub(), make_mesh(), axis_name="workers")


# --- Faults


def with_bad_rows(batch, worker):
    x = batch["x"].copy()
    by_worker(x)[worker] = np.nan
    return {**batch, "x": x}


def test_a_worker_whose_loss_is_not_finite_abstains_and_the_others_decide():
    batch, bad = draw(), 2
    state, step = start(linear_loss, cub(), linear_params())
    state, _ = step(state, with_bad_rows(batch, bad))
    stats = lc.vote_stats(state.opt_state)
    assert (stats.abstained, stats.abstentions) == (1, 1)

    others = [w for w in range(W) if w != bad]
    rest = jax.tree.map(lambda x: by_worker(x)[others].reshape(-1, *x.shape[1:]), batch)
    three, three_step = start(linear_loss, cub(), linear_params(), make_mesh(3))
    three, _ = three_step(three, rest)
    assert_same(state.params, three.params)
    mu, of_three = (s.opt_state[0].mu["w"] for s in (state, three))
    np.testing.assert_array_equal(mu[bad], np.zeros((FEATURES, 1)))
    np.testing.assert_allclose(np.asarray(mu)[others], of_three, rtol=1e-5)

    losses = []
    for seed in range(40):
        state, metrics = step(state, draw(seed))
        losses.append(float(metrics["loss"]))
    stats = lc.vote_stats(state.opt_state)
    assert (stats.abstained, stats.abstentions) == (0, 1)
    assert losses[-1] < losses[0] and step.traces == 1


def test_a_worker_that_abstains_keeps_its_model_state():
    def loss(params, model_state, batch, rng):
        mean = 0.5 * model_state["mean"] + 0.5 * jnp.mean(batch["x"])
        return linear_loss(params, batch, rng), {}, {"mean": mean}

    model_state, bad = {"mean": jnp.float32(3)}, 1
    state, step = start(lc.StatefulLoss(loss), cub(), linear_params(), model_state=model_state)
    state, _ = step(state, with_bad_rows(draw(), bad))
    mean = np.asarray(state.model_state["mean"])
    assert np.isfinite(np.delete(mean, bad)).all() and not (np.delete(mean, bad) == 3).any()
    assert mean[bad] == 3


def test_an_update_that_differs_between_workers_is_refused():
    state, step = start(linear_loss, optax.sgd(0.1), linear_params())
    with pytest.raises(ValueError, match=r"differs between workers.*global_gradients"):
        step(state, draw())


# --- Bytes, and the silent trap


@functools.cache
def compiled_default_step():
    """The default step of 8 workers and 0.6M parameters, compiled and not run."""
    mesh = make_mesh(8)
    params = {"a": jnp.ones((768, 512)), "b": jnp.ones((512, 400)), "c": jnp.ones(400)}

    def loss(params, batch, rng):
        out = jnp.tanh(batch @ params["a"]) @ params["b"] + params["c"]
        return jnp.mean(out**2), {"largest": jnp.max(out), "mean": jnp.mean(out)}

    state, step = start(loss, cub(), params, mesh)
    return params, mesh, step.lower(state, np.ones((8, 768), np.float32)).compile()


def test_a_compiled_step_holds_two_exchanges_of_words_and_no_floats_but_scalars():
    _, mesh, program = compiled_default_step()
    found = collectives(program, mesh)
    words = [one for one in found if any(operand.dtype == "u32" for operand in one.operands)]
    assert sorted(one.op for one in words) == ["all-gather", "all-to-all"]
    for one in found:
        assert one.axes == (AXIS,) and one.group_size == 8 and not one.gated and not one.looped
        if one not in words:
            assert one.op == "all-reduce"
            assert all(operand.shape == () for operand in one.operands)


def test_a_compiled_step_sends_the_predicted_bytes_and_its_metrics():
    params, mesh, program = compiled_default_step()
    sent = compiled_bytes(program, mesh)
    assert sent == sum(sent_bytes(collectives(program, mesh)).values())
    metrics = 3 * 4 * 2 * 7 / 8  # three scalars, all-reduced
    assert sent == predict(params, 8).sent_bytes + metrics
    size = sum(x.size for x in jax.tree.leaves(params))
    assert size >= 500_000
    assert 8 * sent / size <= 2 * 7 / 8 * 1.05


def on_mesh(body, *inputs):
    """Runs ``body`` on replicated parameters and each worker's part of the rest."""
    specs = (P(), *[P(AXIS)] * (len(inputs) - 1))
    run = jax.shard_map(body, mesh=make_mesh(), in_specs=specs, out_specs=P(AXIS))
    return jax.jit(run)(*inputs)


def test_local_gradients_are_each_workers_own():
    params, batch = linear_params(), draw()

    def body(params, batch):
        loss, grads = lc.local_value_and_grad(linear_loss, AXIS)(params, batch, None)
        return loss[None], grads["w"][None]

    loss, grads = on_mesh(body, params, batch)
    np.testing.assert_allclose(loss, np.mean(by_worker(batch["y"]) ** 2, axis=(1, 2)), rtol=1e-5)
    wanted = linear_gradients(params, batch)
    assert np.ptp(wanted, axis=0).min() > 0.1  # the workers do differ
    np.testing.assert_allclose(grads, wanted, rtol=1e-4, atol=1e-5)


def test_plain_gradients_inside_shard_map_were_summed_already_and_are_refused():
    params, batch = linear_params(), draw()
    summed = []

    def body(params, batch):
        _, grads = jax.value_and_grad(linear_loss)(params, batch, None)
        summed.append(jax.typeof(grads["w"]))
        return grads["w"][None] + 0 * batch["x"][0, 0]

    grads = on_mesh(body, params, batch)
    wanted = linear_gradients(params, batch).sum(0)
    np.testing.assert_allclose(grads, np.broadcast_to(wanted, grads.shape), rtol=1e-4, atol=1e-4)

    def trap(params, batch):
        _, grads = jax.value_and_grad(linear_loss)(params, batch, None)
        tx = cub()
        return tx.update(grads, tx.init(params), params)[0]

    with pytest.raises(ValueError, match=r"already reduced.*local_value_and_grad"):
        on_mesh(trap, params, batch)


# --- Every optimizer learns


@functools.cache
def source_bytes():
    """Real text: a module of the standard library, as ``int32[n]`` below 128."""
    return np.frombuffer(inspect.getsource(argparse).encode(), np.uint8).astype(np.int32) % 128


def next_byte_loss(params, batch, rng):
    logits = params["table"][batch["here"]] + params["bias"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"])
    return jnp.mean(losses)


def next_byte_batch(rng, rows=512):
    text = source_bytes()
    at = rng.integers(0, len(text) - 1, rows)
    return {"here": text[at], "next": text[at + 1]}


RATE = 0.03
INJECTED = optax.inject_hyperparams(lc.lion_cub, static_args="axis_name")
LEARNERS = {
    "lion_cub": cub(RATE),
    "lion_cub, 2 bits": cub(RATE, quantizer=lc.quantize.midrise(2)),
    "lion_cub, 4 bits by block": cub(RATE, quantizer=lc.quantize.midrise(4)),
    "lion_cub, int8 counts": cub(RATE, quantizer=lc.quantize.integer(8), wire=lc.wires.counts()),
    "lion_cub, lanes": cub(RATE, quantizer=lc.quantize.integer(5), wire=lc.wires.lanes()),
    "lion_cub, ternary": cub(RATE, quantizer=lc.quantize.ternary()),
    "lion_cub, gathered, synced": cub(RATE, wire=lc.wires.gathered(), sync=lc.sync.every(10)),
    "distributed_lion": lc.distributed_lion(RATE, axis_name=AXIS),
    "distributed_lion, average": lc.distributed_lion(RATE, axis_name=AXIS, average=True),
    "owner_lion": lc.owner_lion(RATE, axis_name=AXIS),
    "global lion": lc.global_gradients(optax.lion(RATE), AXIS),
    "global adamw": lc.global_gradients(optax.adamw(RATE), AXIS),
    "MultiSteps": optax.MultiSteps(cub(2 * RATE), 2),
    "inject_hyperparams": INJECTED(
        learning_rate=optax.linear_schedule(2 * RATE, 0.0, 60), axis_name=AXIS
    ),
}


QUICK = {"lion_cub", "distributed_lion, average", "owner_lion", "MultiSteps", "inject_hyperparams"}


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LEARNERS]
)
def test_every_optimizer_learns_the_next_byte_of_python_source(name):
    params = {"table": jnp.zeros((128, 128)), "bias": jnp.zeros(128)}
    state, step = start(next_byte_loss, LEARNERS[name], params)
    rng, losses = np.random.default_rng(0), []
    for _ in range(60):
        state, metrics = step(state, next_byte_batch(rng))
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(np.log(128), rel=1e-5)
    assert np.mean(losses[-5:]) < 2.6  # nats; all of these reach 2.2 to 2.45
    assert step.traces == 1


def test_inject_hyperparams_needs_to_hold_only_the_axis_name_of_owner_lion_static():
    inject = optax.inject_hyperparams(lc.owner_lion, static_args="axis_name")
    state, step = start(linear_loss, inject(learning_rate=0.01, axis_name=AXIS), linear_params())
    state, _ = step(state, draw())
    assert float(state.opt_state.hyperparams["learning_rate"]) == pytest.approx(0.01)


def test_options_for_overlap_are_those_of_the_mesh(mesh_of):
    workers = lc.Workers(mesh_of(2), "data")
    assert lc.training.overlap_options(workers) == {}
    with pytest.raises(TypeError, match=r"workers=None: give the lioncub_jax.Workers"):
        lc.training.overlap_options(None)


def test_the_compiler_gets_the_options_of_a_step(mesh_of):
    workers = lc.Workers(mesh_of(2), "data")
    tx = lc.lion_cub(1e-3, axis_name=workers)
    state = lc.init_state(tx, {"w": jnp.ones((3, 1))}, workers)

    def loss(params, batch, rng):
        return jnp.mean((batch @ params["w"]) ** 2)

    batch = jnp.ones((8, 3))
    step = lc.make_train_step(loss, tx, workers, compiler_options={"xla_no_such_option": True})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        step(state, batch)
    options = {"xla_cpu_enable_fast_math": False}
    step = lc.make_train_step(loss, tx, workers, compiler_options=options)
    assert float(step(state, batch)[1]["loss"]) == 9.0
