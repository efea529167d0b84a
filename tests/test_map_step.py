"""A trainer's own step mapped over the workers: what runs, what comes out of it, and what is an error."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import assert_same, in_order, normal, workers_on
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
    "synced": lambda w: lc.lion_cub(1e-3, workers=w, sync=lc.sync.coded(lc.sync.every(2))),
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
