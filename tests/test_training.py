"""Whole training steps on a mesh: models, metrics, accumulation, batches and what is donated."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_same, workers_on
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc

W, ROWS, FEATURES = 4, 128, 6


FOUR = f"data={W}"


def start(loss, tx, params, workers=None, local=None, **options):
    """The first state and the step."""
    workers = workers or workers_on(FOUR)
    made = {x: options.pop(x) for x in ("specs", "model_state", "rng") if x in options}
    state = lc.init_state(tx, params, workers, local=local, **made)
    return state, lc.make_train_step(loss, tx, workers, local=local, **options)


def cub(learning_rate=0.01, **options):
    return lc.lion_cub(learning_rate, workers="data", **options)


def draw(seed=0, rows=ROWS):
    """Features that differ between workers, and targets that are linear in them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, FEATURES))
    by_worker(x)[...] += rng.normal(scale=0.3, size=(W, 1, 1))
    weights = np.arange(1, FEATURES + 1)[:, None] / 4
    return {"x": x.astype(np.float32), "y": (x @ weights).astype(np.float32)}


def by_worker(x, parts=W):
    return np.asarray(x).reshape(parts, -1, *np.shape(x)[1:])


def linear_params():
    return {"w": jnp.zeros((FEATURES, 1)), "b": jnp.zeros(1)}


def linear_loss(params, batch, rng):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


# --- Models


class Net(nnx.Module):
    """Everything a model may keep: parameters, batch statistics and random streams."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(FEATURES, momentum=0.9, rngs=rngs)
        self.hidden = nnx.Linear(FEATURES, 32, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(nnx.relu(self.hidden(self.norm(x)))))


def net_losses(model, batch):
    fit = jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
    return fit, {"kept": model.drop(jnp.ones(64)) > 0}


def test_an_nnx_model_with_dropout_and_batch_statistics_learns_and_is_taken_back():
    model, batch, metrics = Net(), draw(), []
    loss, params, model_state = lc.from_nnx(model, net_losses)
    state, step = start(loss, cub(0.05), params, model_state=model_state)
    for i in range(60):
        state, found = step(state, batch)
        metrics.append(jax.tree.map(np.asarray, found))
        if i == 0:  # the running mean starts at 0 and moves a tenth of the way
            mean, wanted = (
                state.model_state["norm"]["mean"][...],
                by_worker(batch["x"]).mean(1) / 10,
            )
            np.testing.assert_allclose(mean, wanted, rtol=1e-4, atol=1e-6)
    losses = [float(m["loss"]) for m in metrics]
    assert np.mean(losses[-5:]) < 0.5 * losses[0]  # dropout keeps it up
    assert step.traces == 1
    masks = [mask for m in metrics[:3] for mask in m["kept"]]
    assert len({mask.tobytes() for mask in masks}) == 3 * W and masks[0].dtype == bool

    nnx.update(model, state.params, lc.training.mean_model_state(state))
    model.eval()
    assert float(jnp.mean((model(batch["x"]) - batch["y"]) ** 2)) < 0.3 * losses[0]


# --- Metrics and accumulation


def test_accumulating_in_parts_makes_the_update_of_the_whole_batch():
    """Floating numbers are averaged, whole ones added up, arrays stacked; all exact for small integers."""

    def loss(params, batch, rng):
        rows = batch["rows"]
        mean = jnp.mean(rows @ params["w"]) * jnp.sum(weights) * batch["scale"]
        nested = {"any": jnp.any(rows > 6), "literal": 2.0}
        return mean, {"half": mean / 2, "rows": len(rows), "first": rows[0], "nested": nested}

    batch = np.random.default_rng(0).integers(-8, 8, (8 * W, 3)).astype(np.float32)
    weights = np.arange(8, dtype=np.float32)  # whole to each worker, as numbers of a batch are
    params, ends = {"w": np.arange(3, dtype=np.float32)}, []
    for accumulate in (1, 4):
        state, step = start(loss, cub(), params, accumulate=accumulate)
        state, metrics = step(state, {"rows": batch, "scale": 2.0})
        ends.append((state.params, state.opt_state, metrics["loss"], metrics["half"]))
        parts = by_worker(batch, W * accumulate)
        rows = parts[:, 0].reshape(np.shape(metrics["first"]))
        np.testing.assert_array_equal(metrics["first"], rows)
        assert int(metrics["rows"]) == len(batch)
        assert metrics["nested"] == {"any": np.any(parts > 6, axis=(1, 2)).sum(), "literal": 2}
        assert next(iter(metrics)) == "loss" and metrics["loss"] == 56 * np.mean(
            batch @ params["w"]
        )
        assert metrics["loss"].sharding.is_fully_replicated
        assert metrics["first"].sharding.spec == P("data")
    assert_same(ends[0], ends[1])
    assert ends[0][1][0].mu["w"].any()


def test_a_transform_that_asks_for_the_loss_gets_the_mean_over_workers_and_parts():
    """And where steps are local each worker's own."""
    sees = optax.GradientTransformationExtraArgs(
        lambda params: jnp.float32(0),
        lambda updates, state, params, *, value, **_: (updates, value),
    )
    batch, workers = draw(), workers_on(FOUR)
    tx = optax.chain(cub(0.0), optax.contrib.reduce_on_plateau(patience=1, factor=0.5), sees)
    state, step = start(linear_loss, tx, linear_params(), accumulate=2)
    for _ in range(2):
        state, metrics = step(state, batch)
    assert state.opt_state[1].scale == 0.5  # the loss stayed
    assert state.opt_state[2] == metrics["loss"]
    tx, local = lc.global_gradients(optax.sgd(1.0), workers=workers), {"local": sees}
    state = lc.init_state(tx, linear_params(), workers, **local)
    seen = lc.make_train_step(linear_loss, tx, workers, **local)(state, batch)[0].local_state
    np.testing.assert_allclose(seen, (by_worker(batch["y"]) ** 2).mean((1, 2)), rtol=1e-5)


LONG = [("float16", 64, 2e3), ("bfloat16", 1024, 1), ("float8_e5m2", 4, 2)]


@pytest.mark.parametrize(("dtype", "parts", "value"), LONG)
def test_short_floats_of_many_parts_are_added_up_in_long_ones(dtype, parts, value):
    def loss(params, batch, rng):
        x = jnp.mean(batch).astype(dtype)
        return params["w"] * x, {"x": x}

    tx = lc.global_gradients(optax.sgd(1.0), workers="data")
    workers, params = workers_on("data=2"), {"w": jnp.zeros((), dtype)}
    state, step = start(loss, tx, params, workers, accumulate=parts)
    state, metrics = step(state, np.full(2 * parts, value, np.float32))
    assert (float(state.params["w"]), float(metrics["x"])) == (-value, value)
    assert state.params["w"].dtype == metrics["x"].dtype == dtype


@pytest.mark.parametrize("accumulate", [1, 2])
def test_numbers_keep_their_precision_and_their_imaginary_part_on_the_way(accumulate):
    """Under x64 what float32 takes for 1 is more, and what it cannot hold stays finite."""

    def loss(params, batch, rng):
        x = jnp.mean(batch)
        aux = {"large": 1e39 * x, "complex": lax.complex(x, 2 * x), "small": jnp.uint8(100)}
        return jnp.real(params["c"] * aux["complex"]) + params["w"] * x + x, aux

    with jax.enable_x64(True):
        params = {"c": jnp.zeros((), complex), "w": jnp.zeros((), float)}
        tx = lc.global_gradients(optax.sgd(1.0), workers="data")
        state, step = start(loss, tx, params, workers_on("data=2"), accumulate=accumulate)
        state, metrics = step(state, 1 + 1e-12 * np.arange(4))
        mean = 1 + 1.5e-12
        near = functools.partial(np.testing.assert_allclose, rtol=1e-15)
        near(metrics["loss"], mean)
        near(metrics["large"], 1e39 * mean)
        near(metrics["complex"], mean + 2j * mean)
        assert int(metrics["small"]) == 200 * accumulate
        near(state.params["w"], -mean)
        near(state.params["c"], -(mean + 2j * mean))
        found = lc.training.Meter()(1, state, metrics)
        near(found["complex/imag"], 2 * mean)


# --- Batches, meshes and traces


def vote_runs(workers, *places):
    state, step = start(linear_loss, cub(), linear_params(), workers)
    for seed, place in zip(range(8), itertools.cycle(places)):
        state, metrics = step(state, place(draw(seed)))
    assert step.traces == 1
    return state.params, state.opt_state, metrics


def test_batches_of_all_kinds_and_other_meshes_of_as_many_workers_give_the_same_run():
    workers = workers_on(FOUR)
    cut, whole = (NamedSharding(workers.mesh, spec) for spec in (P("data"), P()))
    as_it_is, on_a_device = (lambda batch: batch), functools.partial(jax.tree.map, jnp.asarray)
    placed = [functools.partial(jax.device_put, device=lies) for lies in (cut, whole)]
    run = vote_runs(workers, as_it_is, on_a_device, *placed)
    assert_same(run, vote_runs(workers_on("data=4 other=2"), as_it_is))


def test_what_the_caller_holds_survives_and_what_the_step_holds_is_donated():
    workers = workers_on(FOUR)
    weak = {"model_state": jnp.asarray(0.0), "params": {**linear_params(), "c": jnp.asarray(1.0)}}
    given = {**weak, "rng": jax.random.key(3)}
    # In place already: must be copied even so.
    given = jax.device_put(given, NamedSharding(workers.mesh, P()))

    def loss(params, model_state, batch, rng):
        return linear_loss(params, batch, rng), {}, model_state + 1

    first, step = start(loss, cub(), workers=workers, **given)
    second, _ = step(first, draw())
    step(second, draw())
    donated = first.params, first.opt_state[0].mu, first.model_state
    assert all(x.is_deleted() for x in jax.tree.leaves(donated))
    assert_same(given["params"], weak["params"])
    assert float(given["model_state"]) == 0 and given["rng"] == jax.random.key(3)
    assert step.traces == 1  # a weak type would go in, and none come out


# --- Bad input


def step_once(loss=linear_loss, rows=None, **options):
    workers = workers_on(FOUR)
    state = lc.init_state(cub(), linear_params(), workers)
    step = lc.make_train_step(loss, cub(), workers, **options)
    step(state, draw() if rows is None else rows if isinstance(rows, dict) else {"x": rows})


WEIGHTED = {"x": draw()["x"], "weights": np.ones(8)}
ODD = r"batch\['x'\] has shape .* multiple of 8 \(4 workers, .*, 2 gradient accumulation steps\)"
REFUSED = [
    ({"accumulate": 0}, "accumulate=0"),
    ({"accumulate": 2, "rows": np.zeros((W + 2, 3))}, ODD),
    ({"accumulate": 2, "rows": np.zeros((0, 3))}, ODD),
    ({"rows": np.float32(1)}, "no argument has rows for the workers"),
    ({"loss": lambda *given: (linear_loss(*given), {"loss": 0.0})}, "'loss', which is taken"),
    (
        {"rows": WEIGHTED},
        r"batch\['x'\] has 128 rows and batch\['weights'\] 8.* what is no row of the batch, such as class",
    ),
    ({"rows": {"x": draw()["x"], "text": "a"}}, r"batch\['text'\] is builtins.str: give an array"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED)
def test_what_a_step_cannot_run_is_refused(given, words):
    with pytest.raises((ValueError, TypeError), match=words):
        step_once(**given)


def test_the_compiler_gets_the_options_of_a_step():
    workers = workers_on("data=2")
    state, step = start(linear_loss, cub(), linear_params(), workers)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        step.compiled({"xla_no_such_option": True})(state, draw())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_sum_beyond_its_dtype_is_the_largest_that_this_holds(accumulate):
    """And any other is exact."""
    numbers = {
        "int32": [2**30, -(2**30), 2**28 - 1, -7],
        "uint32": [2**31, 3, 2**29 - 1, 0],
        "int16": [30_000],
    }

    def counting(params, batch, rng):
        zero = batch[0, 0].astype(jnp.int32) * 0
        aux = {
            f"{dtype}, {x}": jnp.asarray(x, dtype) + zero.astype(dtype)
            for dtype, each in numbers.items()
            for x in each
        }
        return jnp.mean(batch @ params["w"]), aux

    workers, params = workers_on("data=4"), {"w": jnp.ones((2, 1))}
    tx = lc.lion_cub(1e-3, workers=workers)
    step = lc.make_train_step(counting, tx, workers, accumulate=accumulate)
    _, found = step(lc.init_state(tx, params, workers), np.ones((8, 2), np.float32))
    for dtype, each in numbers.items():
        kind = jnp.iinfo("int32" if dtype == "int16" else dtype)
        for x in each:
            assert found[f"{dtype}, {x}"] == np.clip(4 * accumulate * x, kind.min, kind.max), (
                dtype,
                x,
            )
