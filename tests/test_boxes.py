"""Flax's boxes: momentum of boxed parameters says how it lies, with the workers' axis in front."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax.mesh.boxes import is_box

BATCH = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
OPTIMIZERS = {
    "lion cub": lc.lion_cub,
    "owner lion": lc.owner_lion,
    "chain": lambda lr, **axes: optax.chain(
        optax.clip_by_global_norm(1.0), lc.scale_by_lion_cub(**axes), optax.scale(-lr)
    ),
}


@functools.cache
def workers_of(kind=AxisType.Auto, names=("data", "fsdp"), axis="data"):
    sizes = (4, 2) if len(names) == 2 else (2, 2, 2)
    mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * len(names))
    return lc.Workers(mesh, axis)


class Linen(nn.Module):
    """Of each layer the kernel is boxed and the bias is not."""

    boxed: bool = True

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        for width, names in ((8, (None, "fsdp")), (2, ("fsdp", None))):
            boxed = nn.with_partitioning(init, names) if self.boxed else init
            x = nn.relu(nn.Dense(width, kernel_init=boxed)(x))
        return x


def linen_state(workers, optimizer, boxed=True):
    """A state as trainers make it: made by a compiled program, where its boxes say; and how it lies."""
    model = Linen(boxed)
    tx = lc.on_mesh(OPTIMIZERS[optimizer](0.1, axis_name=workers), workers, specs=linen_specs())

    def create(key):
        params = model.init(key, BATCH[:1])["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    abstract = jax.eval_shape(create, jax.random.key(0))
    lies = nn.get_sharding(abstract, workers.mesh)
    return jax.jit(create, out_shardings=lies)(jax.random.key(0)), lies


def linen_specs():
    params = jax.eval_shape(Linen().init, jax.random.key(0), BATCH[:1])["params"]
    return lc.mesh.specs_of(params)


def linen_steps(workers, state, lies=None):
    @functools.partial(jax.jit, out_shardings=lies)
    def step(state, batch):
        def loss(params, batch):
            return jnp.mean((state.apply_fn({"params": params}, batch) - 1) ** 2)

        grads = lc.worker_value_and_grad(loss, workers, specs=linen_specs())(state.params, batch)[1]
        return state.apply_gradients(grads=grads)

    for _ in range(3):
        state = step(state, BATCH)
    assert step._cache_size() <= 2  # the first step counts in Python
    return state


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("context", [False, True], ids=["no mesh set", "mesh set"])
def test_boxed_linen_parameters_train_as_bare_ones_and_momentum_says_how_it_lies(
    optimizer, context
):
    workers = workers_of()
    with jax.set_mesh(workers.mesh) if context else contextlib.nullcontext():
        state, lies = linen_state(workers, optimizer)
        found = linen_steps(workers, state, lies)
    bare = linen_steps(workers, linen_state(workers, optimizer, boxed=False)[0])
    assert jax.tree.structure(found.opt_state) == jax.tree.structure(state.opt_state)
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(bare), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    specs = nn.get_partition_spec(found)
    for x, spec in zip(jax.tree.leaves(found), jax.tree.leaves(specs), strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(workers.mesh, spec), x.ndim)


def test_the_names_of_boxes_have_the_workers_in_front():
    specs = nn.get_partition_spec(linen_state(workers_of(), "lion cub")[0]).opt_state[0]
    assert specs.count == specs.ties == P()
    assert specs.mu["Dense_0"] == {"kernel": P("data", None, "fsdp"), "bias": P("data")}
    assert specs.mu["Dense_1"] == {"kernel": P("data", "fsdp", None), "bias": P("data")}
    several = workers_of(names=("pod", "data", "fsdp"), axis=("pod", "data"))
    specs = nn.get_partition_spec(linen_state(several, "lion cub")[0]).opt_state[0]
    assert specs.mu["Dense_0"]["kernel"] == P(("pod", "data"), None, "fsdp")


def test_boxes_say_by_themselves_how_parameters_are_cut_in_a_trace():
    workers = workers_of()
    tx = lc.on_mesh(lc.lion_cub(0.1, axis_name=workers), workers)
    params = Linen().init(jax.random.key(0), BATCH[:1])["params"]
    assert jax.jit(tx.init)(params)[0].mu["Dense_0"]["kernel"].names == ("data", None, "fsdp")


def test_state_whose_boxes_lack_the_axis_is_taken_too():
    """As a checkpoint of before has it."""
    workers = workers_of()
    tx = lc.on_mesh(lc.lion_cub(0.1, axis_name=workers), workers, specs=linen_specs())
    params = Linen().init(jax.random.key(0), BATCH[:1])["params"]
    state = tx.init(params)
    old = (
        state[0]._replace(mu=jax.tree.map(jnp.zeros_like, boxed_as(params, state[0].mu))),
        *state[1:],
    )
    grads = jax.tree.map(lambda x: jnp.ones((4, *x.shape)), params)
    wanted, new = jax.jit(tx.update)(grads, state, params)
    found, after = jax.jit(tx.update)(grads, old, params)
    assert jax.tree.structure(after) == jax.tree.structure(new)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def boxed_as(like, tree):
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(tree))


def test_the_state_of_another_optimizer_is_refused_in_boxes_too():
    workers = workers_of()
    params = Linen().init(jax.random.key(0), BATCH[:1])["params"]
    cub, owner = (
        lc.on_mesh(OPTIMIZERS[name](0.1, axis_name=workers), workers, specs=linen_specs())
        for name in ("lion cub", "owner lion")
    )
    grads = jax.tree.map(lambda x: jnp.ones((4, *x.shape)), params)
    with pytest.raises(
        ValueError, match="the state is not one of this optimizer: make the state by"
    ):
        cub.update(grads, owner.init(params), params)


@pytest.mark.parametrize("optimizer", ["lion cub", "owner lion"])
def test_a_boxed_state_is_saved_and_moves_to_other_workers(optimizer, tmp_path):
    state = linen_steps(workers_of(), linen_state(workers_of(), optimizer)[0])
    few = workers_of(names=("fsdp", "data", "tp"))
    like, _ = linen_state(few, optimizer)
    with lc.Checkpoints(tmp_path, axis_name="data") as checkpoints:
        checkpoints.save(state, wait=True)
        same = checkpoints.restore(state).state
        found = checkpoints.restore(like).state
    assert jax.tree.structure(same) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, same, state)
    assert jax.tree.structure(found.opt_state) == jax.tree.structure(like.opt_state)
    jax.tree.map(np.testing.assert_array_equal, found.params, state.params)


# --- nnx


class Model(nnx.Module):
    def __init__(self, rngs, boxed=True):
        init = nnx.initializers.lecun_normal()
        cut = nnx.with_partitioning(init, (None, "fsdp")) if boxed else init
        self.a = nnx.Linear(4, 8, rngs=rngs, kernel_init=cut)
        self.b = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


def nnx_optimizer(workers, model, optimizer):
    specs = lc.mesh.specs_of(nnx.state(model, nnx.Param))
    tx = lc.on_mesh(OPTIMIZERS[optimizer](0.1, axis_name=workers), workers, specs=specs)
    return nnx.Optimizer(model, tx, wrt=nnx.Param), specs


def nnx_step(workers, specs):
    @nnx.jit
    def step(model, optimizer, batch):
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params, batch):
            return jnp.mean((nnx.merge(graph, params, rest)(batch) - 1) ** 2)

        value, grads = lc.worker_value_and_grad(loss, workers, specs=specs)(params, batch)
        optimizer.update(model, grads)
        return value

    return step


def lies_as_it_says(mesh, state):
    for x, spec in zip(
        jax.tree.leaves(state), jax.tree.leaves(nnx.get_partition_spec(state)), strict=True
    ):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_an_nnx_optimizer_of_cut_parameters_trains_as_one_of_whole_ones(optimizer, kind):
    workers, weights, specs = workers_of(kind), [], None
    for boxed in (True, False):
        with jax.set_mesh(workers.mesh) if boxed else contextlib.nullcontext():
            model = Model(nnx.Rngs(0), boxed)
            if not boxed:  # but cut as well
                lies = workers.shardings(boxed_as(nnx.state(model), specs))
                nnx.update(model, jax.device_put(nnx.state(model), lies))
            opt, specs = nnx_optimizer(workers, model, optimizer)
            step = nnx_step(workers, specs)
            batch = jax.device_put(BATCH, NamedSharding(workers.mesh, P("data")))
            before = nnx.state(opt)
            losses = [float(step(model, opt, batch)) for _ in range(3)]
            assert losses[-1] < losses[0]
            # What is made stays as it is, and what it says of itself too.
            assert jax.tree.structure(nnx.state(opt)) == jax.tree.structure(before)
            if kind is AxisType.Auto:
                lies_as_it_says(workers.mesh, nnx.state(opt)["opt_state"])
        weights.append(jax.tree.leaves(nnx.state(model)))
    for got, wanted in zip(*weights, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_an_nnx_optimizer_says_how_momentum_lies():
    workers = workers_of()
    with jax.set_mesh(workers.mesh):
        opt, _ = nnx_optimizer(workers, Model(nnx.Rngs(0)), "lion cub")
    specs = nnx.get_partition_spec(nnx.state(opt))["opt_state"][0]
    specs = jax.tree.map(lambda x: jax.tree.leaves(x)[0], specs, is_leaf=is_box)
    specs = nnx.to_pure_dict(specs)
    assert specs["count"] == specs["ties"] == P()
    assert specs["mu"]["a"] == {"kernel": P("data", None, "fsdp"), "bias": P("data")}
    assert specs["mu"]["b"] == {"kernel": P("data"), "bias": P("data")}


def test_an_nnx_optimizer_is_made_in_a_compiled_program_where_it_says():
    workers = workers_of()

    @nnx.jit
    def create():
        model = Model(nnx.Rngs(0))
        opt, _ = nnx_optimizer(workers, model, "owner lion")
        for made in (model, opt):
            state = nnx.state(made)
            nnx.update(made, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
        return model, opt

    with jax.set_mesh(workers.mesh):
        model, opt = create()
        lies_as_it_says(workers.mesh, nnx.state(opt)["opt_state"])
        step = nnx_step(workers, lc.mesh.specs_of(nnx.state(model, nnx.Param)))
        losses = [float(step(model, opt, BATCH)) for _ in range(3)]
    assert losses[-1] < losses[0]


def test_how_an_optimizer_of_other_kinds_would_be_cut_does_not_matter():
    """nnx has metadata for optimizers that are cut otherwise than parameters, which here it never is."""
    workers = workers_of()
    with jax.set_mesh(workers.mesh):
        model = Model(nnx.Rngs(0))
        model.a.kernel.set_metadata(optimizer_sharding=("fsdp", None))
        opt, _ = nnx_optimizer(workers, model, "lion cub")
    spec = nnx.get_partition_spec(nnx.state(opt))["opt_state"][0]["mu"]["a"]["kernel"]
    assert jax.tree.leaves(spec) == [P("data", None, "fsdp")]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_shardings_of_a_boxed_state_are_those_that_jit_wants(optimizer):
    workers, specs = workers_of(), linen_specs()
    tx = lc.on_mesh(OPTIMIZERS[optimizer](0.1, axis_name=workers), workers, specs=specs)
    params = Linen().init(jax.random.key(0), BATCH[:1])["params"]
    lie = tx.shardings(jax.eval_shape(lambda: params))
    state = jax.jit(tx.init, out_shardings=lie)(params)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
    names = {x.sharding.spec for x in jax.tree.leaves(state)}
    assert P("data", None, "fsdp") in names or P("data", "fsdp") in names
