"""Optax around a vote, on one axis and on cut parameters: what differs between workers, what must not."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_on
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc

PARAMS = {
    "a": {"kernel": jnp.linspace(-1, 1, 64 * 128).reshape(64, 128), "bias": jnp.ones(128)},
    "b": jnp.linspace(1, -1, 128 * 32).reshape(128, 32),
}
MESHES = {  # and how the parameters are cut there
    "data=8": jax.tree.map(lambda _: P(), PARAMS),
    "data=4 fsdp=2": {"a": {"kernel": P(None, "fsdp"), "bias": P()}, "b": P("fsdp")},
}
LABELS = {"a": {"kernel": "vote", "bias": "rest"}, "b": "vote"}
MASK = jax.tree.map(lambda label: label == "vote", LABELS)
REST = jax.tree.map(lambda label: label != "vote", LABELS)
BATCH = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)


def loss(params, batch):
    return jnp.mean(
        (jnp.tanh(batch @ params["a"]["kernel"] + params["a"]["bias"]) @ params["b"]) ** 2
    )


def cub(workers):
    return lc.lion_cub(1e-3, workers=workers)


def on_mesh(tx, mesh):
    """The workers, and the transform on their mesh."""
    workers = lc.Workers(mesh_on(mesh), "data")
    return workers, lc.on_mesh(tx(workers), workers, specs=MESHES[mesh])


def run(tx, mesh="data=8", steps=3):
    """The parameters after some steps of a trainer under jit, and the state of the optimizer."""
    workers, tx = on_mesh(tx, mesh)
    grad_fn = lc.worker_value_and_grad(loss, workers, specs=MESHES[mesh])
    params = jax.device_put(PARAMS, workers.shardings(MESHES[mesh]))
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        value, grads = grad_fn(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, value=value)
        return optax.apply_updates(params, updates), opt_state

    for _ in range(steps):
        params, opt_state = step(params, opt_state, BATCH)
    assert step._cache_size() == 1, "the state came out of the step otherwise than it went in"
    return params, opt_state


@pytest.mark.parametrize("mesh", MESHES)
def test_before_the_vote_state_is_each_workers_own_and_after_it_the_same_for_all(mesh):
    before = optax.zero_nans(), optax.trace(0.9), optax.clip_by_global_norm(1.0)
    after = (
        optax.ema(0.9), optax.trace(0.9), optax.apply_every(2), optax.scale_by_adam(),
        optax.apply_if_finite(optax.ema(0.9), 3), optax.contrib.reduce_on_plateau(patience=1),
    )  # fmt: skip

    def tx(workers):
        vote = lc.communicate(workers=workers, memory=lc.momentum.blend())
        return optax.chain(*before, vote, *after, optax.scale(-1e-3))

    params, opt_state = run(tx, mesh)
    own = {
        jax.tree_util.keystr(path)
        for path, x in jax.tree_util.tree_leaves_with_path(opt_state)
        if "data" in x.sharding.spec
    }
    leaves = "['a']['kernel']", "['a']['bias']", "['b']"
    kept = "[0].found_nan", "[1].trace", "[3].mu"
    assert own == {state + leaf for state in kept for leaf in leaves}
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))


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


REFUSED = {
    r"the leaves \['a'\]\['bias'\] do, which a mask or label": lambda w: optax.masked(cub(w), MASK),
    "put a transform that communicates in the chain": lambda w: optax.lion(1e-3),
    "Leave it out: a worker whose gradient is not finite abstains": (
        lambda w: optax.apply_if_finite(cub(w), 3)
    ),
}


def every_second(workers):
    return optax.MultiSteps(cub(workers), 2).gradient_transformation()


def test_what_would_drift_apart_is_named():
    for words, tx in REFUSED.items():
        with pytest.raises(ValueError, match=words):
            run(tx)
    with pytest.raises(ValueError, match=r"optax.MultiSteps forgets how .*accumulate=k"):
        run(every_second, "data=4 fsdp=2")


def test_a_chain_around_on_mesh_is_said_at_the_line_that_calls_it():
    """Gradients of all workers are clipped as one there."""
    workers, tx = on_mesh(cub, "data=8")
    grads = jax.tree.map(lambda p: jnp.ones((8, *p.shape)), PARAMS)
    around = optax.chain(optax.clip_by_global_norm(1.0), tx)
    update = lambda tx, state: tx.update(grads, state, PARAMS)  # noqa: E731
    with pytest.warns(UserWarning, match="on_mesh is in a chain.*clip_by_global_norm") as said:
        jax.eval_shape(lambda state: update(around, state), around.init(PARAMS))
    assert [(x.filename, x.lineno) for x in said] == [(__file__, update.__code__.co_firstlineno)]
    inside = lc.on_mesh(optax.chain(optax.clip_by_global_norm(1.0), cub(workers)), workers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(lambda state: update(inside, state), inside.init(PARAMS))


def test_accumulating_over_steps_moves_at_the_last():
    for steps, moves in ((1, False), (2, True)):
        params, _ = run(every_second, steps=steps)
        assert (np.asarray(params["b"]) != PARAMS["b"]).any() == moves


def test_inside_a_shard_map_of_the_callers_the_step_is_the_same():
    def votes(workers):
        owner = lc.owner_lion(1e-3, workers=workers)
        return optax.partition({"vote": cub(workers), "rest": owner}, LABELS)

    workers, tx = on_mesh(votes, "data=8")

    def step(params, opt_state, batch):
        _, grads = lc.local_value_and_grad(loss, workers=workers)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    lie = P(), tx.specs(PARAMS)
    step = jax.shard_map(step, mesh=workers.mesh, in_specs=(*lie, P("data")), out_specs=lie)
    step, params, opt_state = jax.jit(step), PARAMS, tx.init(PARAMS)
    for _ in range(3):
        params, opt_state = step(params, opt_state, BATCH)
    jax.tree.map(np.testing.assert_array_equal, (params, opt_state), run(votes))
