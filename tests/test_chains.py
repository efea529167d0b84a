"""Optax around a vote, on one axis and on cut parameters: what differs between workers, what must not."""

import dataclasses
import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_on, normal, update_of
from flax import nnx
from flax.core import FrozenDict
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax import baselines

PARAMS = {
    "a": {"kernel": jnp.linspace(-1, 1, 64 * 128).reshape(64, 128), "bias": jnp.ones(128)},
    "b": jnp.linspace(1, -1, 128 * 32).reshape(128, 32),
    "none": jnp.zeros((0, 3)),
}
MESHES = {  # and how the parameters are cut there
    "data=8": jax.tree.map(lambda _: P(), PARAMS),
    "data=4 fsdp=2": {"a": {"kernel": P(None, "fsdp"), "bias": P()}, "b": P("fsdp"), "none": P()},
}
LABELS = {"a": {"kernel": "vote", "bias": "rest"}, "b": "vote", "none": "vote"}
MASK = jax.tree.map(lambda label: label == "vote", LABELS)
REST = jax.tree.map(lambda label: label != "vote", LABELS)
BATCH = normal(32, 64)


def loss(params, batch):
    return jnp.mean(
        (jnp.tanh(batch @ params["a"]["kernel"] + params["a"]["bias"]) @ params["b"]) ** 2
    )


def cub(workers):
    return lc.lion_cub(1e-3, workers=workers)


def trainer(tx, mesh="data=8"):
    """A trainer's step mapped over the workers, its first parameters and the state of the optimizer."""
    workers = lc.Workers(mesh_on(mesh), "data")
    tx = optax.with_extra_args_support(tx(workers))
    params = jax.device_put(PARAMS, workers.shardings(MESHES[mesh]))

    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        told = {"value": lc.mean_over_workers(value, workers), "diverged": ~jnp.isfinite(value)}
        updates, opt_state = tx.update(grads, opt_state, params, **told)
        return optax.apply_updates(params, updates), opt_state

    step = lc.map_step(step, workers)
    return step, params, step.prepare(tx.init(params))


def run(tx, mesh="data=8", steps=3):
    """The parameters after some steps, and the state of the optimizer."""
    step, params, opt_state = trainer(tx, mesh)
    for _ in range(steps):
        params, opt_state = step(params, opt_state, BATCH)
    return params, opt_state


def steps(tx, **options):
    return optax.MultiSteps(tx, 2, **options).gradient_transformation()


class Tracked(NamedTuple):
    grads: Any
    inner: Any


def tracking(inner, own):
    """Keeps a worker's own gradients around the exchange."""

    def update(updates, state, params=None):
        return inner.update(updates, state.inner, params)[0], state._replace(grads=updates)

    return optax.GradientTransformation(lambda p: Tracked(own(p), inner.init(p)), update)


def in_many(workers):
    before = optax.zero_nans(), optax.trace(0.9), optax.clip_by_global_norm(1.0)
    after = (
        optax.ema(0.9), optax.apply_every(2), optax.scale_by_adam(),
        optax.apply_if_finite(optax.ema(0.9), 3), optax.contrib.reduce_on_plateau(patience=1),
    )  # fmt: skip
    return optax.chain(*before, cub(workers), *after)


OWN = {  # what of the state is each worker's own, counters in front of the vote too
    "[0] [1] [2] [3][0].mu": in_many,
    "[0] [1][0].mu": lambda w: optax.chain(steps(optax.trace(0.9)), cub(w), steps(optax.ema(0.9))),
    "[0].inner_state [1][0].mu": (
        lambda w: optax.chain(optax.inject_hyperparams(optax.trace)(0.9), cub(w))
    ),
    ".acc_grads .inner_opt_state[0].error": (
        lambda w: steps(baselines.powersgd(optax.sgd(1e-3), workers=w))
    ),
    "[0].inner [1][0].mu": (
        lambda w: optax.chain(
            lc.sync_momentum(optax.scale_by_lion(), lc.sync.every(2), workers=w), cub(w)
        )
    ),
    ".grads .inner[0].mu": lambda w: tracking(cub(w), lambda p: lc.training.own(p, w)),
}


def traced(tx, mesh="data=8"):
    """Whether each array of the state is a worker's own; a step is traced, and not compiled."""
    step, params, opt_state = trainer(tx, mesh)
    lines = step.explain(params, opt_state, BATCH).partition("\nreturned\n")[0].splitlines()
    told = dict(x.removeprefix("opt_state").split(": ") for x in lines if x.startswith("opt_state"))
    return {name: role == "each worker's own" for name, role in told.items()}


@pytest.mark.parametrize("own", OWN)
def test_whose_state_is_follows_from_its_place_and_from_what_its_class_declares(own):
    for mesh in MESHES if OWN[own] is in_many else ["data=8"]:
        held = traced(OWN[own], mesh)
        assert held == {path: path.startswith(tuple(own.split())) for path in held}


FREEZING = {
    "partition": lambda w: optax.partition({"vote": cub(w), "rest": optax.set_to_zero()}, LABELS),
    "masked": lambda w: optax.chain(
        optax.masked(cub(w), MASK), optax.masked(optax.set_to_zero(), REST)
    ),
}


@pytest.mark.parametrize("name", FREEZING)
def test_frozen_leaves_stay_and_the_others_move(name):
    params, _ = run(FREEZING[name], "data=4 fsdp=2")
    np.testing.assert_array_equal(params["a"]["bias"], PARAMS["a"]["bias"])
    assert (np.asarray(params["b"]) != PARAMS["b"]).all()


DRIFTS = "would drift apart: .*changed behind it by what each worker has for itself"


def by_own_norm(workers):
    """Scales the agreed update by what a worker has for itself."""
    vote = cub(workers)

    def update(updates, state, params):
        voted, state = vote.update(updates, state, params)
        return optax.tree.scale(jnp.minimum(optax.tree.norm(updates), 1), voted), state

    return optax.GradientTransformation(vote.init, update)


REFUSED = [
    ("nothing in the step lets workers talk", lambda w: optax.lion(1e-3)),
    (DRIFTS, by_own_norm),
    (
        "the same noise on all workers: clip and add noise inside the loss",
        lambda w: optax.chain(optax.contrib.differentially_private_aggregate(1.0, 0.1, key=0), cub(w)),
    ),
    ("Lookahead is .*one tree. Leave it out", lambda w: optax.lookahead(cub(w), 2, 0.5)),
    (r"\.grads\['a'\]\['bias'\], .* differs .*training.own", lambda w: tracking(cub(w), lambda p: p)),
]  # fmt: skip


def every_second(workers):
    return steps(cub(workers))


def test_what_would_drift_apart_or_hang_is_named():
    for words, tx in REFUSED:
        with pytest.raises(ValueError, match=words):
            traced(tx)


@pytest.mark.parametrize("front", [".acc_grads", "[0]"])
def test_one_nan_silences_a_worker_once(front):
    """Its own arrays in front of the vote stay, and its counters go on."""
    adam = optax.chain(optax.trace(0.9), optax.ema(0.9), optax.scale_by_adam())
    tx = every_second if front == ".acc_grads" else lambda w: optax.chain(adam, cub(w))
    step, *first = trainer(tx)
    params, before = step(*first, BATCH)
    assert (np.asarray(params["b"]) == PARAMS["b"]).all() == (front == ".acc_grads")
    params, after = step(params, before, np.where(np.arange(32)[:, None], BATCH, np.nan))
    each = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    for (path, x), y in each:
        if jax.tree_util.keystr(path).startswith(front):
            stays = x + (x.ndim == 1 and x.dtype == np.int32)  # or counts
            np.testing.assert_array_equal(y[0], stays[0], str(path))
            assert not x.size or (y != x)[1:].any(), path
    for _ in range(2):
        params, after = step(params, after, BATCH)
    ((_, votes),) = optax.tree.get_all_with_path(after, "votes")
    assert (votes.abstentions, votes.abstained) == (1, 0)


def test_one_nan_in_one_shard_silences_a_worker_once_too():
    step, params, opt_state = trainer(
        lambda w: optax.chain(optax.trace(0.9), cub(w)), "data=4 fsdp=2"
    )
    bad = np.where(np.arange(32)[:, None] == 9, np.nan, BATCH)  # of worker 1
    _, after = step(params, step(params, opt_state, BATCH)[1], bad)
    [(_, votes)] = optax.tree.get_all_with_path(after, "votes")
    assert votes.abstained == 1
    trace = np.asarray(after[0].trace["b"].value)
    assert trace.shape[0] == 4 and np.isfinite(trace).all()


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    """As those of equinox, which are trees that can be called."""

    w: Any
    b: Any

    def __call__(self, x):
        return x @ self.w + self.b


def on_four(tx, params):
    """A transform on four workers, their gradients 0 to 3, and an update of them."""
    workers = lc.Workers(mesh_on("data=4"), "data")
    tx = tx(workers)
    grads = jax.tree.map(lambda p: jnp.stack([i + 0 * p for i in range(4)]), params)
    return tx, *update_of(tx, workers)(grads, tx.init(params), params)


def test_a_mask_that_can_be_called_is_a_tree():
    masks = {"mask": Model(True, False), "sync_where": Model(True, False), "sync": lc.sync.every(1)}
    tx = functools.partial(lc.lion_cub, 0.5, weight_decay=0.5, **masks)
    _, updates, state = on_four(
        lambda workers: tx(workers=workers), Model(jnp.ones((4, 4)), jnp.ones(4))
    )
    assert updates.w[0, 0] == -0.75 and updates.b[0] == -0.5
    assert state[0].drift.w > 0 and state[0].drift.b == -1


class OfEquinox(eqx.Module):
    w: Any
    b: Any


CONTAINERS = {
    "dict": dict, "FrozenDict": FrozenDict, "State": nnx.State, "Model": lambda x: Model(**x),
    "equinox": lambda x: OfEquinox(**x),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_label_may_have_no_leaf(kind):
    """Then its transform has a tree without arrays, which is not what `optax.tree.map_params` gives."""

    def tx(workers):
        kinds = {"workers": workers, "weight_decay": 0.0}
        labels = {"a": {}, "b": {}, "c": {"sync": lc.sync.every(3)}}
        txs = {label: lc.lion_cub(0.5, **kinds, **more) for label, more in labels.items()}
        txs["d"] = lc.owner_lion(0.5, **kinds)
        return optax.partition(txs, lambda params: jax.tree.map(lambda _: "a", params))

    tx, updates, state = on_four(tx, CONTAINERS[kind]({"w": jnp.ones(4), "b": jnp.ones(4)}))
    assert {float(u) for x in jax.tree.leaves(updates) for u in x} == {-0.5}
    found = [x for x in jax.tree.leaves(optax.tree.map_params(tx, jnp.shape, state)) if x == 4]
    assert len(found) == 4
