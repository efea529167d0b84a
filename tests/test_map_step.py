"""A trainer's own step mapped over the workers: what runs, what comes out of it, and what is an error."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_same, in_order, normal, workers_on
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc

BATCH = normal(16, 6), normal(16, 5, seed=1)
WORKERS = functools.cache(
    lambda sizes="data=4", group=None, axis="data": workers_on(sizes, group, axis=axis)
)


def fresh():
    return {"w": jnp.ones((6, 5)) / 9, "b": jnp.zeros(5)}


def loss_fn(params, batch):
    return jnp.mean((batch[0] @ params["w"] + params["b"] - batch[1]) ** 2)


def owner(workers):
    return lc.owner_adamw(1e-3, workers=workers)


def step_of(tx, metrics=lambda **_: {}, change=lambda grads: grads, update=None):
    """A step as users write it, with metrics of what it has."""

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = (update or tx.update)(change(grads), opt_state, params)
        more = metrics(grads=grads, batch=batch, loss=loss)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss, **more}

    return step


def run(tx, step, workers=None, steps=2, batch=BATCH, prepare=False, **options):
    mapped = lc.map_step(step, workers or WORKERS(), **options)
    state = fresh(), tx.init(fresh())
    state = mapped.prepare(state) if prepare else state
    for _ in range(steps):
        state, metrics = mapped(state, batch)
    return state, metrics


# --- What is wrong in a step is an error that says where and what to do


def by_norm(tx, grads, state, params):
    talks = optax.global_norm(grads) < 9
    return lax.cond(talks, lambda: tx.update(grads, state, params), lambda: (grads, state))


def by_count(tx, grads, state, params):
    none = jax.tree.map(jnp.zeros_like, grads)
    even = state[0].count % 2 == 0
    return lax.cond(even, lambda: tx.update(grads, state, params), lambda: (none, state))


def picked_by_norm(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    chosen = lax.cond(optax.global_norm(grads) < 9, lambda: updates, lambda: grads)
    return chosen, state


def told(mean):
    """A step that tells a plateau the worker's own loss, or that of all."""

    def make(tx):
        def step(state, batch):
            params, opt_state = state
            loss, grads = jax.value_and_grad(loss_fn)(params, batch)
            value = lc.mean_over_workers(loss, WORKERS()) if mean else loss
            updates, opt_state = tx.update(grads, opt_state, params, value=value)
            return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

        return step

    return make


def closing_over(make):
    def of(tx):
        around = make()
        return lambda state, batch: step_of(tx, change=lambda g: jax.tree.map(around, g))(
            state, batch
        )

    return of


def rows_around():
    whole = jax.device_put(BATCH[0], WORKERS().shardings(P("data")))
    return lambda g: g + whole.sum()


def key_around():
    key = jax.random.key(0)
    return lambda g: g + jax.random.normal(key, g.shape)


def masked(workers):
    return optax.masked(owner(workers), {"w": True, "b": False})


def frozen(workers):
    labels = {"w": "train", "b": "freeze"}
    return optax.partition({"train": owner(workers), "freeze": optax.set_to_zero()}, labels)


def in_front(workers):
    return optax.chain(optax.trace(0.9), owner(workers))


def plateau(workers):
    return optax.chain(owner(workers), optax.contrib.reduce_on_plateau())


def finite(workers):
    return optax.apply_if_finite(owner(workers), 3)


def of(**how):
    """A step of `step_of` with an update or metrics, by the transform."""

    def make(tx):
        known = dict(how)
        if "update" in known:
            known["update"] = functools.partial(known["update"], tx)
        return step_of(tx, **known)

    return make


def whole_gradients(grads, **_):
    return {"g": grads["w"]}


def averaged_gradient(grads, **_):
    return {"g": lax.pmean(jnp.tile(grads["w"], (9, 9)), "data")}


def gathered_gradient(grads, **_):
    return {"g": lax.all_gather(jnp.tile(grads["w"], (9, 9)), "data").sum()}


def no_rows(tx):
    return lambda state, batch: step_of(tx)(state, jax.tree.map(jnp.ones_like, batch))


RIGHT = None
AUDIT = {
    "nothing is wrong": (owner, step_of, RIGHT),
    "gradients are returned": (
        owner, of(metrics=whole_gradients),
        "result[1]['g'] is an array of shape (6, 5) that differs between workers ... a number of it",
    ),
    "gradients are averaged": (
        owner, of(change=lambda g: lax.pmean(g, "data")),
        "gradients of ['b'], ['w'] are the same on all workers ... averaged in front of the exchange",
    ),
    "an array is averaged for a metric": (
        owner, of(metrics=averaged_gradient),
        "this step votes, and a worker sends ... all-reduce of f32[54, 45] ... test_map_step.py",
    ),
    "an array is gathered": (
        owner, of(metrics=gathered_gradient), "also ... all-gather of f32[1, 54, 45] ... test_map_step.py",
    ),
    "an optimizer in which nobody talks": (
        lambda _: optax.adamw(1e-3), step_of, "state[0]['b'], float32[5], differs ... lets workers talk",
    ),
    "a mask keeps a leaf": (
        masked, step_of, "state[0]['b'], float32[5], differs between workers ... a mask or label keeps it",
    ),
    "a frozen leaf": (frozen, step_of, RIGHT),
    "apply_if_finite": (finite, step_of, "cond or a loop whose predicate differs ... abstains by itself"),
    "a cond by a norm around the exchange": (
        owner, of(update=by_norm), "cond or a loop whose predicate differs ... Decide by what all",
    ),
    "a cond by a count around the exchange": (owner, of(update=by_count), RIGHT),
    "a cond by a norm picks the update": (
        owner, of(update=picked_by_norm), "state[0]['b'], float32[5], differs ... changed behind it",
    ),
    "momentum in front": (
        in_front, step_of, "state[1][0].trace['b'], float32[5], differs ... state = step.prepare(state)",
    ),
    "momentum in front, prepared": (in_front, step_of, RIGHT),
    "a plateau of a worker's own loss": (
        plateau, told(mean=False), "state[0]['b'], float32[5], differs ... mean_over_workers",
    ),
    "a plateau of the mean loss": (plateau, told(mean=True), RIGHT),
    "rows from around the step": (
        owner, closing_over(rows_around),
    "closes over an array of shape (16, 6) that is cut over the workers", ),
    "a key from around the step": (owner, closing_over(key_around), "closes over a random key"),
    "no rows in the gradients": (owner, no_rows, "are the same on all workers: they are made of no rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", AUDIT)
def test_what_is_wrong_in_a_step_is_named_and_what_is_right_runs(name):
    make, how, words = AUDIT[name]
    tx = make(WORKERS())
    if words is RIGHT:
        run(tx, how(tx), prepare=name.endswith("prepared"))
    else:
        with pytest.raises(ValueError, match=in_order(words)):
            run(tx, how(tx))


# --- The same as make_train_step


METHODS = {
    "vote": lambda w: lc.lion_cub(1e-3, workers=w),
    "owner": owner,
    "mean": lambda w: lc.global_gradients(optax.adamw(1e-3), workers=w),
    "synced": lambda w: lc.lion_cub(1e-3, workers=w, sync=lc.sync.every(2)),
}
MESHES = {
    "data=4": {},
    "data=2 fsdp=2": {},
    "node=2 device=2": {"group": "device", "axis": "node"},
    "pod=2 data=2": {"axis": ("pod", "data")},
}


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("name", METHODS)
def test_updates_and_state_are_those_of_make_train_step(name, sizes):
    workers = WORKERS(sizes, **MESHES[sizes])
    cut = {"w": P("fsdp") if "fsdp" in sizes else P(), "b": P()}
    params = jax.device_put(fresh(), workers.shardings(cut))
    tx = METHODS[name](workers)
    state = lc.init_state(tx, params, workers)
    step = lc.make_train_step(lambda p, b, rng: loss_fn(p, b), tx, workers)
    mapped, found = lc.map_step(step_of(tx), workers), (params, tx.init(params))
    for _ in range(3):
        state, metrics = step(state, BATCH)
        found, mine = mapped(found, BATCH)
    assert_same(found, (state.params, state.opt_state))
    assert float(metrics["loss"]) == float(mine["loss"])
    programs = step.lower(state, BATCH), mapped.lower(found, BATCH)
    theirs, ours = ([
        (x.op, x.axes, sorted(str(a) for a in x.operands)) for x in lc.audit.collectives(p.compile(),
    workers.mesh) ] for p in programs)  # fmt: skip
    assert theirs == ours
    assert found[0]["w"].sharding.spec == cut["w"]


# --- What goes in, and what comes out


def mapped(step, workers=None, **options):
    return lc.map_step(step, workers or WORKERS(), **options)


def test_a_key_is_each_workers_own_in_the_step_and_that_of_one_device_outside():
    """However it is split, folded or added to, typed or raw, kept in state, stacked, in a jit or a scan."""

    def step(state, x):
        key, sub = jax.random.split(state["key"])
        added = state["count"].astype(jnp.uint32) + state["added"]
        state = state | {"key": key, "count": state["count"] + 1}
        folded = jax.random.fold_in(state["folded"], state["count"])
        drawn = [jax.random.uniform(k) for k in (sub, folded, added, state["raw"])]
        drawn.append(jax.jit(jax.random.uniform)(state["keys"][1]))
        raw, _ = lax.scan(lambda k, _: (jax.random.split(k)[0], None), state["raw"], None, length=3)
        return state | {"raw": raw}, [jnp.broadcast_to(d, x.shape) for d in drawn]

    def first():
        keys = jax.random.split(jax.random.key(3), 2)
        named = {"key": jax.random.key(1), "folded": jax.random.key(2), "keys": keys}
        raw = {"raw": jax.random.PRNGKey(4), "added": jax.random.PRNGKey(5)}
        return named | raw | {"count": jnp.int32(0)}

    state, one = first(), first()
    for _ in range(2):
        state, drawn = mapped(step)(state, np.zeros(8, np.float32))
        one, _ = step(one, np.zeros(8, np.float32))
    assert_same(state, one)
    for each in np.asarray(drawn):
        assert len(np.unique(each)) == 4 and (each[::2] == each[1::2]).all()


def test_an_optimizers_own_key_stays_the_same_for_all():
    tx = optax.chain(owner(WORKERS()), optax.add_noise(0.01, 0.5, jax.random.key(0)))
    (params, _), _ = run(tx, step_of(tx))
    assert np.isfinite(params["w"]).all()


def test_statistics_are_averaged_over_the_workers_with_finite_ones():
    def step(state, batch):
        x, _ = batch
        stats = {
            "mean": 0.5 * state["batch_stats"]["mean"] + 0.5 * x.mean(0),
            "seen": state["batch_stats"]["seen"] + 1,
        }
        return state | {"batch_stats": stats}, x.sum()

    first = {"batch_stats": {"mean": jnp.ones(6), "seen": jnp.int32(3)}}
    state, _ = mapped(step)(first, BATCH)
    wanted = 0.5 + 0.5 * BATCH[0].mean(0)
    np.testing.assert_allclose(state["batch_stats"]["mean"], wanted, rtol=1e-6)
    assert state["batch_stats"]["seen"] == 4
    one_bad = np.where(np.arange(16)[:, None] == 5, np.nan, BATCH[0])
    state, _ = mapped(step)(first, (one_bad, BATCH[1]))
    others = np.delete(BATCH[0].reshape(4, 4, 6), 1, 0).reshape(12, 6)
    np.testing.assert_allclose(state["batch_stats"]["mean"], 0.5 + 0.5 * others.mean(0), rtol=1e-6)
    state, _ = mapped(step)(first, (np.full_like(one_bad, np.nan), BATCH[1]))
    assert_same(state["batch_stats"]["mean"], first["batch_stats"]["mean"])


def of_linen(dense, tx):
    """Two steps of a TrainState; those of flax's own trainer without workers in ``around``."""
    variables = dense.init(jax.random.key(0), BATCH[0])
    state = TrainState.create(apply_fn=None, params=variables, tx=tx)

    def step(state, x):
        grads = jax.grad(lambda v: jnp.mean((dense.apply(v, x) - 1) ** 2))(state.params)
        return state.apply_gradients(grads=grads)

    def run(around):
        mapped = around(step)
        return mapped(mapped(state, BATCH[0]), BATCH[0]).params["_overwrite_with_gradient"]

    return run


def of_nnx(dense, tx):
    """The same of nnx, where the collection is a kind of variable."""
    model = nnx.bridge.ToNNX(dense, rngs=nnx.Rngs(0)).lazy_init(BATCH[0])
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    overwritten = nnx.variable_type_from_name("_overwrite_with_gradient")
    trained = nnx.DiffState(0, (nnx.Param, overwritten))

    def step(model, optimizer, x):
        def loss(model):
            return jnp.mean((model(x) - 1) ** 2)

        grads, scales = nnx.split_state(nnx.grad(loss, argnums=trained)(model), nnx.Param, ...)
        optimizer.update(model, grads)
        nnx.update(model, scales)

    def run(around):
        mapped = around(step)
        for _ in range(2):
            mapped(model, optimizer, BATCH[0])
        return nnx.to_pure_dict(nnx.state(model, overwritten))

    return run


@pytest.mark.parametrize("trainer", [of_linen, of_nnx])
def test_scales_of_fp8_layers_are_overwritten_by_the_largest_of_all_workers(trainer):
    dense = nn.Dense(8, dot_general_cls=nn.fp8_ops.Fp8DirectDotGeneralOp)
    found = trainer(dense, lc.lion_cub(0.0, workers=WORKERS()))(lambda f: lc.map_step(f, WORKERS()))
    wanted = trainer(dense, optax.lion(0.0))(nnx.jit)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, x), scale in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        # The loss of a worker is the mean of a fourth of the rows.
        times = 4 if "output_grad" in jax.tree_util.keystr(path) else 1
        assert (scale > 0).any() and not (scale == 1).all(), path
        np.testing.assert_array_equal(x, times * scale, err_msg=str(path))


def test_numbers_are_averaged_or_added_and_rows_are_joined():
    def step(_, x):
        return {
            "mean": {"loss": x.mean(), "same": jnp.float32(2)},
            "count": {"some": (x > 0).sum(), "short": (x > 0).sum(dtype=jnp.int8), "any": (x > 9).any()},
            "rows": x * 2, "each": x.sum(0), "words": "text", "two": 2,
        }  # fmt: skip

    x = BATCH[0]
    found = mapped(step, out={"each": "each", "any": "max"})((), x)
    np.testing.assert_allclose(found["mean"]["loss"], x.mean(), rtol=1e-6)
    assert found["count"]["some"] == found["count"]["short"] == (x > 0).sum()
    assert found["mean"]["same"] == 2 and found["count"]["any"] == 0
    assert (found["words"], found["two"]) == ("text", 2)
    assert_same(found["rows"], 2 * x)
    np.testing.assert_allclose(found["each"], x.reshape(4, 4, 6).sum(1), rtol=1e-6)
    assert found["rows"].sharding.spec == found["each"].sharding.spec == P("data")


def test_gradients_that_look_like_parameters_are_what_is_said_of_them():
    """Of a state that holds momentum of the same shapes, too."""

    def step(params, momentum, batch):
        grads = jax.grad(loss_fn)(params, batch)
        return {"all": grads, "seen": jax.tree.map(jnp.abs, grads)}

    args = fresh(), fresh(), BATCH
    with pytest.raises(
        ValueError, match=in_order("params['b'], float32[5], differs ... looks like it ... out={")
    ):
        mapped(step)(*args)
    found = mapped(step, rows="batch", out={"all": "mean", "seen": "each"})(*args)
    assert_same(found["all"], jax.grad(loss_fn)(fresh(), BATCH), atol=1e-6)
    assert found["seen"]["w"].shape == (4, 6, 5)
    only = mapped(
        lambda params, batch: jax.grad(loss_fn)(params, batch),
        rows="batch",
        out={"result": "mean"},
    )
    assert_same(only(fresh(), BATCH), found["all"])


SIZED = "is an array of shape (4,) that differs ... its first dimension does not grow with the rows"
OUT = [
    (
        lambda x: {"sum": x.sum(), "count": (x > 0).sum()},
        {},
        "'sum'] is a floating ... 'count'] a whole one",
    ),
    (
        lambda x: {"sum": x.sum(), "count": (x > 0).sum()},
        {"out": {"sum": "sum", "count": "sum"}},
        None,
    ),
    (
        lambda x: {"most": x.max()},
        {},
        "'most'], float32[], is made by reduce_max ... out={'most': 'max'}",
    ),
    (lambda x: {"at": jnp.argmin(x[:, 0])}, {}, "'at'], int32[] ... argmin ... out={'at': 'min'}"),
    (
        lambda x: {"longest": jax.jit(jnp.max)((9 * x).astype(int))},
        {},
        "reduce_max of one worker's rows",
    ),
    (
        lambda x: {"finite": jnp.isfinite(x.sum())},
        {},
        "'finite'], bool[], is made by is_finite ... 'min'",
    ),
    (
        lambda x: {"any": (x > 2).any().astype(jnp.float32)},
        {},
        "made by reduce_or ... out={'any': 'max'}",
    ),
    (
        lambda x: {"count": len(x)},
        {},
        "'count'] is 4 ... workers.num_gradients * len(batch) ... {'count': 'sum'}",
    ),
    (lambda x: {"count": jnp.int32(len(x))}, {}, "'count'] is 4, the number of one worker's rows"),
    (lambda x: {"loss": x.mean(), "clipped": jnp.maximum(x.mean(), 0)}, {}, None),
    (lambda x: x.sum(0)[:4], {}, SIZED),  # as many as a worker has rows
    (lambda x: x.sum(0)[:4], {"out": {"result": "mean"}}, None),
    (
        lambda x: {"grads": {"b": x.sum(0), "w": x.sum(0)}},
        {},
        "['grads']['b'] ... out={'grads': ...}",
    ),
    (lambda x: jax.random.fold_in(jax.random.key(0), (x > 0).sum()), {}, "random key that differs"),
]


@pytest.mark.parametrize(("made", "options", "words"), OUT)
def test_what_no_one_can_know_of_a_result_is_to_be_said(made, options, words):
    if words is None:
        mapped(lambda _, x: made(x), **options)((), BATCH[0])
        return
    with pytest.raises(ValueError, match=in_order(words)):
        mapped(lambda _, x: made(x), **options)((), BATCH[0])


def test_state_that_counts_rows_counts_those_of_all_workers():
    def counting(rows):
        return lambda seen, x: (jax.jit(lambda seen: seen + rows(x))(seen), x.mean())

    with pytest.raises(ValueError, match="4 is added, the number of one worker's rows"):
        mapped(counting(len))(jnp.int32(0), BATCH[0])
    for rows, seen in ((lambda x: 4 * len(x), 16), (lambda _: 4, 4)):  # 4 that is no number of rows
        assert mapped(counting(rows))(jnp.int32(0), BATCH[0])[0] == seen
    # With totals that are averaged a count of one worker gives the ratio of all.
    totals, x = {"mae": {"total": jnp.float32(0), "count": jnp.float32(0)}}, BATCH[0]

    def measuring(state, x):
        mae = state["mae"]
        return {"mae": {"total": mae["total"] + x.sum(), "count": mae["count"] + len(x)}}, x.mean()

    found = mapped(measuring, averaged=("mae",))(totals, x)[0]["mae"]
    np.testing.assert_allclose(found["total"] / found["count"], x.sum() / len(x), rtol=1e-5)
    one = workers_on("data=1")
    assert mapped(counting(len), one)(jnp.int32(0), BATCH[0])[0] == 16


def picked(x):
    return {
        "most": x.max(), "least": x.min(), "longest": (9 * x).astype(jnp.int32).max(),
        "finite": jnp.isfinite(x.sum()), "any": (x > 2).any(), "count": len(x), "size": jnp.int32(x.size),
        "four": 4, "columns": x.max(0),
    }  # fmt: skip


@pytest.mark.parametrize("sizes", MESHES)
def test_the_largest_the_smallest_and_counts_of_all_workers_are_those_of_one_device(sizes):
    """Of floats, whole numbers, bools and arrays, and of constants, which each worker has alike."""
    out = dict.fromkeys(("most", "longest", "any", "columns"), "max")
    out |= {"least": "min", "finite": "min", "count": "sum", "size": "sum", "four": "mean"}
    run = mapped(lambda _, x: picked(x), WORKERS(sizes, **MESHES[sizes]), out=out)
    row = np.arange(16)[:, None] == 5
    for batch in (BATCH[0], np.where(row, np.inf, BATCH[0]), np.where(row, np.nan, BATCH[0])):
        found, wanted = run((), batch), picked(jnp.asarray(batch))
        for name, x in wanted.items():
            np.testing.assert_array_equal(found[name], x, err_msg=name)


ROWS = [
    ({"rows": "x"}, lambda x, w: (x * w).sum(), (BATCH[0], np.ones(6, np.float32)), None),
    ({"rows": {"x": 1}}, lambda x: x.sum(), (BATCH[0].T,), None),
    ({}, lambda s, b: b[0].sum(), ((), (BATCH[0], BATCH[1][:8])), "b[1] has 8 rows and b[0] 16"),
    ({}, lambda x: x.sum(), (BATCH[0][:6],), "x has shape (6, 6): 4 workers do not divide its rows"),
    ({"rows": "y"}, lambda x: x.sum(), (BATCH[0],), "'y' is no argument of the step, which has ['x']"),
    ({}, lambda x, n: x.sum() * n, (BATCH[0], 2), "no argument has rows for the workers: ['x', 'n']"),
    ({"rows": {"x": 2}}, lambda x: x.sum(), (BATCH[0],), "x has shape (16, 6), and no dimension 2"),
]  # fmt: skip


def weighed(state, batch, weights):
    return state, (batch[0] * weights).mean()


def told_apart(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def drawn(state, key, scale, batch):
    return state, scale * (batch + jax.random.normal(key, batch.shape)).mean()


def layer():
    return nnx.Linear(6, 5, rngs=nnx.Rngs(0))


WEIGHTS = np.ones((16, 6), np.float32)
UNNAMED = {
    "weights behind the batch": (
        weighed, (jnp.ones(3), BATCH, WEIGHTS),
        "rows='batch'), rows=('batch', 'weights'), or rows='weights'",
    ),
    "a batch in two, that does not fit": (told_apart, (layer(), *BATCH), "rows='x'), rows=('x', 'y')"),
    "parameters that are only read": (loss_fn, (fresh(), BATCH), "'params' ... or rows='batch'"),
    "keys and numbers": (drawn, (jnp.ones(3), jax.random.PRNGKey(0), 2.0, BATCH[0]), None),
}  # fmt: skip


@pytest.mark.parametrize("name", UNNAMED)
def test_a_batch_that_may_be_another_argument_than_the_last_is_to_be_named(name):
    fn, args, words = UNNAMED[name]
    if words is None:
        mapped(fn)(*args)
        return
    with pytest.raises(
        ValueError, match=in_order(f"only the last argument ... whole on each ... {words}")
    ):
        mapped(fn)(*args)


def test_an_error_of_a_step_that_runs_with_all_rows_alone_has_a_note_of_what_a_worker_has():
    def around(model, x):
        return told_apart(model, x, BATCH[1])

    for fn, args in ((told_apart, BATCH), (around, BATCH[:1])):
        with pytest.raises((TypeError, ValueError), match="shapes") as caught:
            mapped(fn, rows="x")(layer(), *args)
        notes = "".join(caught.value.__notes__)
        assert "x has 1/4 of its rows, and other arguments and arrays from around" in notes


def test_a_batch_that_is_named_is_that_of_one_device():
    for fn, args, rows in (
        (lambda s, b, weights: weighed(s, b, weights)[1], (0, BATCH, WEIGHTS[0]), 1),
        (told_apart, (layer(), *BATCH), ("x", "y")),
        (loss_fn, (fresh(), BATCH), "batch"),
    ):
        assert_same(mapped(fn, rows=rows)(*args), fn(*args), rtol=1e-5)


@pytest.mark.parametrize(("options", "fn", "args", "words"), ROWS)
def test_rows_are_those_that_are_named_and_all_of_one_number(options, fn, args, words):
    if words is None:
        np.testing.assert_allclose(mapped(fn, **options)(*args) * 4, BATCH[0].sum(), rtol=1e-5)
        return
    with pytest.raises(ValueError, match=in_order(words)):
        mapped(fn, **options)(*args)


def test_rows_are_also_what_lies_over_the_workers_and_go_on_as_rows():
    """A hidden state that is carried from batch to batch."""
    hidden = jax.device_put(np.zeros((16, 6), np.float32), WORKERS().shardings(P("data")))
    found, _ = mapped(lambda h, x: (0.5 * h + x, x.mean()))(hidden, BATCH[0])
    assert_same(found, jnp.asarray(BATCH[0]))
    assert found.sharding.spec == P("data")


def test_a_step_runs_in_jit_around_jit_and_in_scan_and_compiles_once():
    tx, traces = owner(WORKERS()), []

    def step(state, batch):
        traces.append(1)
        return step_of(tx)(state, batch)

    state = fresh(), tx.init(fresh())
    alone, around = mapped(step), jax.jit(mapped(jax.jit(step)))
    wanted = state
    for _ in range(3):
        wanted, _ = alone(wanted, BATCH)
    assert len(traces) == 1  # arrays lie elsewhere before the first step than behind it
    found = state
    for _ in range(3):
        found, _ = around(found, BATCH)
    assert_same(found, wanted, atol=1e-7)
    many = jax.tree.map(lambda x: np.stack([x] * 3), BATCH)
    found, _ = jax.jit(lambda state: lax.scan(mapped(step), state, many))(state)
    assert_same(found, wanted, atol=1e-7)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit])
def test_steps_in_a_scan_are_no_rows_and_an_error_names_the_dimension_that_has_them(around):
    tx = owner(WORKERS())

    def steps(state, batches):
        state, metrics = around(lambda s, b: lax.scan(step_of(tx), s, b))(state, batches)
        return state, metrics["loss"].mean()

    state, many = (fresh(), tx.init(fresh())), jax.tree.map(lambda x: np.stack([x] * 4), BATCH)
    words = "batches[0] has shape (4, 16, 6) ... would take other steps ... rows={'batches': 1}"
    for rows in (None, "batches"):
        with pytest.raises(ValueError, match=in_order(words)):
            mapped(steps, rows=rows)(state, many)
    found, _ = mapped(steps, rows={"batches": 1})(state, many)
    assert found[1][0].count == 4


def test_a_scan_over_the_rows_of_one_exchange_runs():
    """Gradients that are added up in a scan, and exchanged once."""
    tx = owner(WORKERS())

    def step(state, batch):
        params, opt_state = state
        one = lambda total, b: (optax.tree.add(total, jax.grad(loss_fn)(params, b)), None)  # noqa: E731
        grads, _ = lax.scan(one, optax.tree.zeros_like(params), batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    mapped(step)((fresh(), tx.init(fresh())), BATCH)


def test_what_was_read_is_what_runs_also_where_jax_has_dropped_the_trace():
    traces = []

    def step(params, rows):
        traces.append(1)
        return params * len(traces), rows.mean()

    run, args = mapped(step), (jnp.ones(3), BATCH[0])
    run.explain(*args)
    jax.clear_caches()
    params, _ = run(*args)
    assert len(traces) == 1
    assert_same(params, jnp.ones(3))


def test_donated_arrays_are_taken_and_an_error_names_one_that_is_given_again():
    tx = owner(WORKERS())
    state = jax.device_put(fresh(), WORKERS().shardings(P())), tx.init(fresh())
    step = mapped(step_of(tx), donate="state")
    after, _ = step(state, BATCH)
    assert all(x.is_deleted() for x in jax.tree.leaves((state[0], state[1][0].error)))
    with pytest.raises(
        ValueError, match=in_order("state[0]['b'] was given to an earlier step ... donated")
    ):
        step(state, BATCH)
    step(after, BATCH)


def test_one_worker_alone_is_one_device():
    workers = WORKERS("data=1")
    tx = optax.chain(optax.trace(0.9), lc.global_gradients(optax.adamw(1e-3), workers=workers))
    step = step_of(
        tx, metrics=lambda grads, batch, **_: {"g": grads["w"], "n": (batch[0] > 0).sum()}
    )
    found = run(tx, step, workers)
    plain = optax.chain(optax.trace(0.9), optax.adamw(1e-3))
    state = fresh(), plain.init(fresh())
    for _ in range(2):
        state, metrics = jax.jit(
            step_of(
                plain,
                metrics=lambda grads, batch, **_: {"g": grads["w"], "n": (batch[0] > 0).sum()},
            )
        )(state, BATCH)
    assert_same((found[0][0], found[1]), (state[0], metrics), atol=1e-6)


def test_sums_in_front_of_an_exchange_are_each_workers_own_once_prepared():
    """Of MultiSteps, and of a loop of one's own in a box; a worker with a NaN keeps its own."""
    tx = optax.MultiSteps(owner(WORKERS()), 2)
    (_, state), _ = run(tx, step_of(tx), prepare=True, steps=4)
    assert state.acc_grads["w"].value.shape == (4, 6, 5) and state.gradient_step == 2

    inner = owner(WORKERS())

    def summed(state, batch):
        params, opt_state, total = state
        grads = jax.grad(loss_fn)(params, batch)
        total = jax.tree.map(jnp.add, total, grads)
        updates, opt_state = inner.update(total, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, total), ()

    first = (
        fresh(),
        inner.init(fresh()),
        lc.training.own(jax.tree.map(jnp.zeros_like, fresh()), WORKERS()),
    )
    state, _ = mapped(summed)(first, BATCH)
    bad = np.where(np.arange(16)[:, None] == 5, np.nan, BATCH[0]), BATCH[1]
    after, _ = mapped(summed)(state, bad)
    changed = np.asarray(
        [(a != b).any() for a, b in zip(after[2].value["w"], state[2].value["w"], strict=True)]
    )
    assert changed.tolist() == [True, False, True, True] and np.isfinite(after[0]["w"]).all()


def test_a_worker_whose_loss_is_not_finite_abstains_where_the_step_gives_its_loss():
    tx = owner(WORKERS())

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        loss = jnp.where((batch[0] > 90).any(), jnp.nan, loss)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return (optax.apply_updates(params, updates), opt_state), loss

    bad = np.where(np.arange(16)[:, None] == 5, 99, BATCH[0]), BATCH[1]
    (_, state), _ = run(tx, step, batch=bad, steps=1)
    assert state[0].votes.abstained == 1


def test_a_loss_over_the_tokens_of_all_is_that_of_one_device():
    mask = (BATCH[1] > 0).astype(np.float32)

    def loss(params, batch, count=lambda n: n):
        x, y, mask = batch
        each = mask * (x @ params["w"] + params["b"] - y) ** 2
        return each.sum() / count(mask.sum())

    def step(params, batch):
        of_all = lambda n: lc.mean_over_workers(n, WORKERS())  # noqa: E731
        value, grads = jax.value_and_grad(loss)(params, batch, of_all)
        return {
            "loss": value,
            "own": loss(params, batch),
            "norm": optax.tree.norm(lc.mean_over_workers(grads, WORKERS())),
        }

    found = mapped(step, rows="batch")(fresh(), (*BATCH, mask))
    value, grads = jax.value_and_grad(loss)(fresh(), (*BATCH, mask))
    np.testing.assert_allclose(
        [found["loss"], found["norm"]], [value, optax.tree.norm(grads)], rtol=1e-5
    )
    assert abs(found["own"] - value) > 1e-4  # divided by each worker's own count


def test_what_goes_in_and_out_is_told():
    tx = owner(WORKERS())
    told = mapped(step_of(tx)).explain((fresh(), tx.init(fresh())), BATCH)
    for line in (
        "state[0]['w']: the same for all", "state[1][0].error['w']: each worker's own", "batch[0]: rows",
        "result[1]['loss']: averaged",
    ):  # fmt: skip
        assert line in told.splitlines()


class Layer(nnx.Module):
    def __init__(self):
        self.w, self.b = (nnx.Param(x) for x in (fresh()["w"], fresh()["b"]))


@pytest.mark.parametrize("trainer", ["TrainState", "nnx.Optimizer"])
def test_a_step_of_flax_is_compiled_once_though_its_counter_begins_off_the_mesh(trainer):
    tx, compiled = owner(WORKERS()), []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **about: compiled.append(about)
        if event == "/jax/core/compile/backend_compile_duration" and "step" in str(about) else None
    )  # fmt: skip

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    def module_step(both, batch):
        model, optimizer = both
        grads = nnx.grad(lambda m: loss_fn({"w": m.w[...], "b": m.b[...]}, batch))(model)
        optimizer.update(model, grads)
        return both, 0.0

    state = TrainState.create(apply_fn=None, params=fresh(), tx=tx)
    if trainer != "TrainState":
        model = Layer()
        step, state = module_step, (model, nnx.Optimizer(model, tx, wrt=nnx.Param))
    step.__name__ = "step"
    mapped = lc.map_step(step, WORKERS())
    for _ in range(3):
        state, _ = mapped(state, BATCH)
    assert len(compiled) == 1, compiled


# --- What real trainers hold


def test_a_cure_names_a_key_and_no_index():
    def step(params, stats, batch):
        grads = jax.grad(loss_fn)(params, batch)
        updates, _ = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates), [batch[0].mean(0)]

    tx = owner(WORKERS())
    args = fresh(), [jnp.zeros(6)], BATCH
    with pytest.raises(ValueError, match=in_order("stats[0] ... by averaged=('stats',)")):
        lc.map_step(step, WORKERS())(*args)
    _, [mean] = lc.map_step(step, WORKERS(), averaged=("stats",))(*args)
    assert_same(mean, BATCH[0].mean(0), rtol=1e-4, atol=1e-6)


def with_average(state, batch):
    """A running loss beside parameters that are one array."""
    tx = owner(WORKERS())
    w, opt_state, average = state
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch[0] @ w - batch[1]) ** 2))(w)
    updates, opt_state = tx.update(grads, opt_state, w)
    return w + updates, opt_state, 0.9 * average + 0.1 * loss


def with_masked(state, batch):
    return step_of(masked(WORKERS()))(state, batch)[0]


CURES = {
    "a running loss": (
        with_average, lambda: (fresh()["w"], owner(WORKERS()).init(fresh()["w"]), jnp.float32(0)),
        "state[2], float32[], differs ... mean_over_workers ... training.own(x, workers)",
    ),
    "a parameter": (
        with_masked, lambda: (fresh(), masked(WORKERS()).init(fresh())),
        "state[0]['b'], float32[5], differs ... optax.set_to_zero() ... mean_over_workers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CURES)
def test_no_cure_averages_parameters(name):
    """``averaged=('state',)`` would let each of them differ."""
    step, state, words = CURES[name]
    with pytest.raises(ValueError, match=in_order(words)) as raised:
        mapped(step)(state(), BATCH)
    assert "averaged" not in str(raised.value)


@jax.tree_util.register_pytree_node_class
class Scale:
    """A class whose constructor wants an array, and as JAX advises lets its bare objects pass."""

    def __init__(self, value):
        assert type(value) is object or jnp.issubdtype(value.dtype, jnp.floating)
        self.value = value

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Rows:
    """A class whose constructor looks at shapes, as GPJax's `Dataset`."""

    x: Any
    y: Any

    def __post_init__(self):
        assert len(self.x.shape) == 2 and self.x.shape[0] == self.y.shape[0]


def test_a_class_that_looks_at_shapes_holds_the_rows():
    step = lc.map_step(lambda rows: rows.y.mean() + 0 * rows.x.mean(), WORKERS())
    assert step(Rows(np.ones((8, 2), np.float32), np.arange(8, dtype=np.float32))) == 3.5


def test_a_class_that_wants_arrays_is_state_and_result():
    step = lc.map_step(lambda scale, rows: (Scale(scale.value * 2), Scale(rows.mean())), WORKERS())
    scale, mean = step(Scale(jnp.ones(())), BATCH[0])
    assert float(scale.value) == 2
    assert_same(mean.value, BATCH[0].mean(), rtol=1e-5)


def test_a_class_that_wants_arrays_goes_beside_a_module():
    module = nnx.Linear(6, 5, rngs=nnx.Rngs(0))
    step = lc.map_step(lambda module, scale, rows: Scale(scale.value * 2), WORKERS())
    assert float(step(module, Scale(jnp.ones(())), BATCH[0]).value) == 2


def test_a_key_that_a_step_makes_of_a_seed_is_warned_of_and_can_be_folded():
    """As Kauldron's: of a constant and the count of steps, so that all workers drop out alike."""

    def step(fold, count, x):
        key = jax.random.fold_in(jax.random.key(0), count)
        key = jax.random.fold_in(key, lax.axis_index("data")) if fold else key
        return x * jax.random.bernoulli(key, 0.5, x.shape)

    warned = {
        "expected_warning": UserWarning,
        "match": "draw alike, such as one dropout mask.*axis_index",
    }
    with pytest.warns(**warned) as alone:
        alike = mapped(functools.partial(step, False))(1, np.ones((8, 9), np.float32))
    with pytest.warns(**warned) as inside:
        jax.jit(lambda x: mapped(functools.partial(step, False))(1, x))(np.ones((8, 9), np.float32))
    # The line that calls it, however deep that is in us.
    assert [x[0].filename for x in (alone, inside)] == [__file__] * 2
    assert (alike[:2] == alike[2:4]).all()
    own = mapped(functools.partial(step, True))(1, np.ones((8, 9), np.float32))
    assert (own[:2] != own[2:4]).any()


def test_pairs_of_rows_stay_together_where_the_rows_are_a_second_dimension():
    """As of DPO, whose batch has the chosen answers in front of the rejected ones."""
    pairs = np.stack([BATCH[0], BATCH[0] + 1])
    found = mapped(lambda batch: batch[1] - batch[0], rows={"batch": 1}, out={"result": "rows"})(
        pairs
    )
    assert_same(found, jnp.ones((16, 6)), atol=1e-6)


def test_rows_of_environments_live_on_in_the_state_with_their_keys():
    """As brax's: each environment has a key, typed or raw."""

    def step(env, params):
        keys = jax.vmap(jax.random.split)(env["key"])
        raw = jax.vmap(jax.random.split)(env["raw"])
        noise = jax.vmap(jax.random.uniform)(keys[:, 1]) + jax.vmap(jax.random.uniform)(raw[:, 1])
        return {"key": keys[:, 0], "raw": raw[:, 0], "at": env["at"] + params * noise}

    first = {
        "key": jax.random.split(jax.random.key(0), 8),
        "raw": jax.random.split(jax.random.PRNGKey(1), 8),
    }
    found = one = first | {"at": jnp.zeros(8)}
    run = mapped(step, rows="env")

    for _ in range(2):
        found, one = run(found, 2.0), step(one, 2.0)
    assert_same(found, one, atol=1e-6)
    assert found["at"].sharding.spec == P("data")


def welford(state, x):
    """Running statistics of rows, with a count in two words."""
    count = state["count"][0] + x.shape[0]
    delta = x - state["mean"]
    mean = state["mean"] + delta.sum(0) / count
    return {
        "count": (count, state["count"][1]),
        "mean": mean,
        "m2": state["m2"] + (delta * (x - mean)).sum(0),
    }


def counted(state, x):
    return state + (x > 0).sum()


def routed(params, x):
    """A bias that goes behind the optimizer by what each worker has seen, as MaxText's experts."""
    return params + 0.1 * jnp.sign(x.mean() - (x > 0).mean(0))


KEPT = {
    "Welford": (
        welford, {"count": (jnp.uint32(0), jnp.uint32(0)), "mean": jnp.zeros(6), "m2": jnp.zeros(6)},
        "state['m2'], float32[6], differs between workers after the step",
    ),
    "a count of tokens": (
        counted, jnp.ones((1,), jnp.int32), "state, int32[1], differs ... sum_over_workers(new, workers)",
    ),
    "a bias behind the optimizer": (
        routed, jnp.zeros(6), "state, float32[6], differs ... mean_over_workers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_state_that_would_differ_is_refused_by_its_name(name):
    fn, state, words = KEPT[name]
    tx = owner(WORKERS())

    def step(state, params, opt_state, x):
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return fn(state, x), optax.apply_updates(params, updates), opt_state

    with pytest.raises(ValueError, match=in_order(words)):
        mapped(step)(state, fresh(), tx.init(fresh()), BATCH[0])


def test_state_is_right_where_the_step_says_how_workers_join_it():
    workers = WORKERS()

    def step(state, x):
        seen = state["seen"] + lc.training.sum_over_workers((x > 0).sum(), workers)
        load = lc.mean_over_workers((x > 0).mean(0), workers)
        return {"seen": seen, "bias": state["bias"] + 0.1 * jnp.sign(load.mean() - load)}

    first = {"seen": jnp.int32(5), "bias": jnp.zeros(6)}
    assert_same(mapped(step)(first, BATCH[0]), step(first, BATCH[0]))


WRAPPED = {
    "mechanize": (optax.contrib.mechanize, "differs between workers"),
    "skipping large updates": (
        lambda tx: optax.MultiSteps(
            tx, 1, should_skip_update_fn=functools.partial(optax.skip_large_updates, max_squared_norm=9.0)
        ),
        "cond or a loop whose predicate differs",
    ),
    "a cautious update": (
        lambda tx: optax.chain(tx, optax.contrib.ademamix(1e-3)), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapper_that_sees_a_workers_own_gradient_is_refused_and_what_stands_behind_runs(name):
    wrap, words = WRAPPED[name]
    tx = wrap(owner(WORKERS()))
    if words is None:
        run(tx, step_of(tx))
        return
    with pytest.raises(ValueError, match=words):
        run(tx, step_of(tx))


def test_a_step_may_return_its_batch_beside_rows_and_run_where_transfers_are_forbidden():
    """As Kauldron's, whose context has the batch: with other rows, the batch goes on from no argument."""

    def step(params, batch):
        outputs = batch[0] @ params["w"]
        return params, {"a": jnp.mean(outputs), "batch": batch, "outputs": outputs}

    mapped, given = lc.map_step(step, WORKERS()), jax.device_put((fresh(), BATCH))
    with jax.transfer_guard_host_to_device("disallow"):
        _, out = jax.jit(mapped)(*given)
    jax.tree.map(np.testing.assert_array_equal, out["batch"], BATCH)
    np.testing.assert_allclose(out["outputs"], BATCH[0] @ fresh()["w"], rtol=1e-6)
    np.testing.assert_allclose(out["a"], out["outputs"].mean(), rtol=1e-6)
