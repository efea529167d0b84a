"""Optax around a vote, on one axis and on cut parameters: what differs between workers, what must not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc

PARAMS = {
    "a": {"kernel": jnp.linspace(-1, 1, 64 * 128).reshape(64, 128), "bias": jnp.ones(128)},
    "b": jnp.linspace(1, -1, 128 * 32).reshape(128, 32),
}
MESHES = {
    "data": ((8,), ("data",), jax.tree.map(lambda _: P(), PARAMS)),
    "data and fsdp": (
        (4, 2), ("data", "fsdp"), {"a": {"kernel": P(None, "fsdp"), "bias": P()}, "b": P("fsdp")}
    ),
}  # fmt: skip
LABELS = {"a": {"kernel": "vote", "bias": "freeze"}, "b": "vote"}
MASK = jax.tree.map(lambda label: label == "vote", LABELS)
REST = jax.tree.map(lambda label: label != "vote", LABELS)
BATCH = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)


def loss(params, batch):
    return jnp.mean(
        (jnp.tanh(batch @ params["a"]["kernel"] + params["a"]["bias"]) @ params["b"]) ** 2
    )


def vote(workers, **options):
    return lc.scale_by_lion_cub(axis_name=workers, **options)


def cub(workers):
    return lc.lion_cub(1e-3, axis_name=workers)


def run(tx, mesh, steps=3):
    """The parameters after some steps of a trainer under jit, and the state of the optimizer."""
    shape, names, specs = MESHES[mesh]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
    workers = lc.Workers(mesh, "data")
    tx = lc.on_mesh(tx(workers), workers, specs=specs)
    grad_fn = lc.worker_value_and_grad(loss, workers, specs=specs)
    params = jax.device_put(PARAMS, jax.tree.map(lambda s: NamedSharding(mesh, s), specs))
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


def differing(opt_state):
    """Paths of the arrays of a state that lie over the workers."""
    leaves = jax.tree_util.tree_leaves_with_path(opt_state)
    return [jax.tree_util.keystr(path) for path, x in leaves if "data" in x.sharding.spec]


SEES_ONLY_UPDATES = {
    "ema": lambda w: optax.chain(vote(w), optax.ema(0.9), optax.scale(-1e-3)),
    "trace": lambda w: optax.chain(vote(w), optax.trace(0.9), optax.scale(-1e-3)),
    "apply_every": lambda w: optax.chain(vote(w), optax.apply_every(2), optax.scale(-1e-3)),
    "scale_by_adam": lambda w: optax.chain(vote(w), optax.scale_by_adam(), optax.scale(-1e-3)),
    "apply_if_finite": lambda w: optax.chain(cub(w), optax.apply_if_finite(optax.ema(0.9), 3)),
    "reduce_on_plateau": lambda w: optax.chain(cub(w), optax.contrib.reduce_on_plateau(patience=1)),
}  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", SEES_ONLY_UPDATES)
def test_what_sees_only_agreed_updates_is_the_same_for_all(name, mesh):
    _, opt_state = run(SEES_ONLY_UPDATES[name], mesh)
    assert all(".mu" in path and path.startswith("[0]") for path in differing(opt_state))
    assert len(differing(opt_state)) == 3


SEES_GRADIENTS = {
    "zero_nans": lambda w: optax.chain(optax.zero_nans(), cub(w)),
    "trace": lambda w: optax.chain(optax.trace(0.9), cub(w)),
    "clip": lambda w: optax.chain(optax.clip_by_global_norm(1.0), cub(w)),
}  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", SEES_GRADIENTS)
def test_what_sees_gradients_is_each_workers_own(name, mesh):
    params, opt_state = run(SEES_GRADIENTS[name], mesh)
    kept = jax.tree.leaves(opt_state[0])
    assert len(differing(opt_state)) == 3 + len(kept)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))


FREEZING = {
    "multi_transform": lambda w: optax.multi_transform(
        {"vote": cub(w), "freeze": optax.set_to_zero()}, LABELS
    ),
    "partition": lambda w: optax.partition({"vote": cub(w), "freeze": optax.set_to_zero()}, LABELS),
    "masked": lambda w: optax.chain(
        optax.masked(cub(w), MASK), optax.masked(optax.set_to_zero(), REST)
    ),
}  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", FREEZING)
def test_frozen_leaves_stay_and_the_others_move(name, mesh):
    params, _ = run(FREEZING[name], mesh)
    np.testing.assert_array_equal(params["a"]["bias"], PARAMS["a"]["bias"])
    assert (np.asarray(params["b"]) != PARAMS["b"]).any()
    alone, _ = run(cub, mesh, steps=1)
    frozen, _ = run(FREEZING[name], mesh, steps=1)
    # All but ties, whose coin is drawn by the place in the buffer.
    assert np.mean(np.asarray(frozen["b"] == alone["b"])) > 0.95


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("make", [lc.lion_cub, lc.owner_lion, lc.distributed_lion])
def test_injected_hyperparameters_change_nothing(make, mesh):
    def injected(workers):
        return optax.inject_hyperparams(make, static_args=("axis_name",))(1e-3, axis_name=workers)

    params, opt_state = run(injected, mesh)
    plain, _ = run(lambda w: make(1e-3, axis_name=w), mesh)
    jax.tree.map(np.testing.assert_array_equal, params, plain)
    assert not any("hyperparams" in path for path in differing(opt_state))


def test_a_mask_that_leaves_gradients_to_the_update_is_named():
    with pytest.raises(ValueError, match=r"the leaves \['a'\]\['bias'\] do, which a mask or label"):
        run(lambda w: optax.masked(cub(w), MASK), "data")
    with pytest.raises(ValueError, match="put a transform that communicates in the chain"):
        run(lambda w: optax.lion(1e-3), "data")


@pytest.mark.parametrize("mesh", MESHES)
def test_apply_if_finite_around_a_vote(mesh):
    with pytest.raises(
        ValueError, match="Leave it out: a worker whose gradient is not finite abstains"
    ):
        run(lambda w: optax.apply_if_finite(cub(w), 3), mesh)


def test_multi_steps_on_one_axis_and_on_cut_parameters():
    def every_second(workers):
        return optax.MultiSteps(cub(workers), 2).gradient_transformation()

    before, _ = run(every_second, "data", steps=1)
    after, _ = run(every_second, "data", steps=2)
    jax.tree.map(np.testing.assert_array_equal, before, PARAMS)
    assert (np.asarray(after["b"]) != PARAMS["b"]).any()
    with pytest.raises(ValueError, match=r"optax.MultiSteps forgets how .*accumulate=k"):
        run(every_second, "data and fsdp")


# --- The whole step in a shard_map of the caller's


@pytest.mark.parametrize("make", [lc.lion_cub, lc.owner_lion])
def test_inside_a_shard_map_the_update_is_the_same(make):
    shape, names, _ = MESHES["data"]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,))
    workers = lc.Workers(mesh, "data")
    tx = lc.on_mesh(make(1e-3, axis_name=workers), workers)

    def step(params, opt_state, batch):
        _, grads = lc.local_value_and_grad(loss, workers)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    lie = P(), tx.specs(PARAMS)
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(*lie, P("data")), out_specs=lie))
    params, opt_state = PARAMS, tx.init(PARAMS)
    for _ in range(3):
        params, opt_state = mapped(params, opt_state, BATCH)
    expected, held = run(lambda w: make(1e-3, axis_name=w), "data")
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    jax.tree.map(np.testing.assert_array_equal, opt_state, held)


def test_where_the_state_lies():
    shape, names, specs = MESHES["data and fsdp"]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * 2)
    workers = lc.Workers(mesh, "data")
    tx = lc.on_mesh(SEES_ONLY_UPDATES["ema"](workers), workers, specs=specs)
    shapes = jax.eval_shape(lambda: PARAMS)
    lie, state = tx.shardings(shapes), tx.init(PARAMS)
    assert jax.tree.structure(lie) == jax.tree.structure(state)
    for sharding, x in zip(jax.tree.leaves(lie), jax.tree.leaves(state), strict=True):
        assert sharding.is_equivalent_to(x.sharding, x.ndim)
    assert tx.specs(shapes)[0].mu["b"] == P("data", "fsdp")
    assert tx.specs(shapes)[1].ema["b"] == P("fsdp")
