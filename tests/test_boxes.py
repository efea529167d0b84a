"""Flax's boxes: momentum of boxed parameters says how it lies, with the workers' axis in front."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from conftest import assert_same, normal, workers_on
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax.mesh.boxes import is_box

BATCH = normal(8, 4)
OWNER = lc.owner_lion


def workers_of(sizes="data=4 fsdp=2", axis="data", kind=AxisType.Auto):
    return workers_on(sizes, None, kind, axis)


def square(out):
    return jnp.mean((out - 1) ** 2)


def lies_as_it_says(workers, state, specs):
    for x, spec in zip(jax.tree.leaves(state), jax.tree.leaves(specs), strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(workers.mesh, spec), x.ndim)


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


@functools.cache
def linen_params():
    return Linen().init(jax.random.key(0), BATCH[:1])["params"]


def linen_state(workers, make=lc.lion_cub):
    """A state as trainers make it: made by a compiled program, where its boxes say; and how it lies."""
    model, tx = Linen(), make(0.1, workers=workers)

    def create(key):
        params = model.init(key, BATCH[:1])["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    lies = nn.get_sharding(jax.eval_shape(create, jax.random.key(0)), workers.mesh)
    return jax.jit(create, out_shardings=lies)(jax.random.key(0)), lies


def bare_state(workers, make):
    params = nn.unbox(linen_params())
    lies = workers.shardings(lc.mesh.specs_of(linen_params()))
    given = {"params": jax.device_put(params, lies), "tx": make(0.1, workers=workers)}
    return TrainState.create(apply_fn=Linen(False).apply, **given)


def linen_steps(workers, state):
    def step(state, batch):
        def loss(params):
            return square(state.apply_fn({"params": params}, batch))

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    mapped = lc.map_step(step, workers)
    for _ in range(3):
        state = mapped(state, BATCH)
    return state


def test_boxed_linen_parameters_train_as_bare_ones_and_momentum_says_how_it_lies():
    workers = workers_of()
    with jax.set_mesh(workers.mesh):
        state, _ = linen_state(workers, OWNER)
        found = linen_steps(workers, state)
    bare = linen_steps(workers, bare_state(workers, OWNER))
    assert jax.tree.structure(found.opt_state) == jax.tree.structure(state.opt_state)
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(bare), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    lies_as_it_says(workers, found, nn.get_partition_spec(found))


def test_the_names_of_boxes_have_the_workers_in_front():
    def momentum(workers):
        tx = lc.lion_cub(0.1, workers=workers)
        return nn.get_partition_spec(jax.jit(tx.init)(linen_params()))[0]  # boxes say how

    specs = momentum(workers_of())
    assert specs.count == specs.votes.ties == P()
    assert specs.mu["Dense_0"] == {"kernel": P("data", None, "fsdp"), "bias": P("data")}
    assert specs.mu["Dense_1"] == {"kernel": P("data", "fsdp", None), "bias": P("data")}
    several = workers_of("pod=2 data=2 fsdp=2", ("pod", "data"))
    assert momentum(several).mu["Dense_0"]["kernel"] == P(("pod", "data"), None, "fsdp")


def test_a_boxed_state_is_saved_and_moves_to_other_workers(tmp_path):
    state = linen_steps(workers_of(), linen_state(workers_of(), OWNER)[0])
    other = workers_of("fsdp=2 data=2 tp=2")
    like, _ = linen_state(other, OWNER)
    with lc.Checkpoints(tmp_path, workers=workers_of()) as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        same = checkpoints.restore(state).state
    found = lc.Checkpoints(tmp_path, workers=other).restore(like).state
    assert jax.tree.structure(same) == jax.tree.structure(state)
    for kept in (same, found):
        assert_same(kept.params, state.params)
    # Of an owner's slice the padding is not kept.
    errors = [s.opt_state[0].error for s in (same, state)]
    assert_same(*errors)
    assert jax.tree.structure(found.opt_state) == jax.tree.structure(like.opt_state)


# --- nnx


class Model(nnx.Module):
    def __init__(self):
        cut = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "fsdp"))
        self.a = nnx.Linear(4, 8, rngs=nnx.Rngs(0), kernel_init=cut)
        self.b = nnx.Linear(8, 2, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


def test_where_axes_are_explicit_types_say_how_parameters_of_nnx_are_cut():
    workers = workers_of(kind=AxisType.Explicit)
    with jax.set_mesh(workers.mesh):
        bare = nnx.as_pure(nnx.state(Model(), nnx.Param))  # so nnx.Optimizer gives them to update
        made = jax.jit(lc.lion_cub(0.1, workers=workers).init)(bare)
    assert made[0].mu["a"]["kernel"].sharding.spec == P("data", None, "fsdp")


def test_an_nnx_optimizer_says_how_momentum_lies():
    """As the parameters, whatever metadata for optimizers, or of older names, says."""
    workers = workers_of()
    with jax.set_mesh(workers.mesh):
        model = Model()
        kept = {"optimizer_sharding": ("fsdp", None), "sharding_names": (None, "fsdp")}
        kernel = model.a.kernel
        model.a.kernel = nnx.Param.from_metadata(kernel[...], {**kernel.get_metadata(), **kept})
        optimizer = nnx.Optimizer(model, lc.lion_cub(0.1, workers=workers), wrt=nnx.Param)
    assert "sharding_names" not in optimizer.opt_state[0].mu["a"]["kernel"].get_metadata()
    specs = nnx.get_partition_spec(nnx.state(optimizer))["opt_state"][0]
    specs = jax.tree.map(lambda x: jax.tree.leaves(x)[0], specs, is_leaf=is_box)
    specs = nnx.to_pure_dict(specs)
    assert specs["count"] == specs["votes"]["ties"] == P()
    assert specs["mu"]["a"] == {"kernel": P("data", None, "fsdp"), "bias": P("data")}
    assert specs["mu"]["b"] == {"kernel": P("data"), "bias": P("data")}


def test_labels_by_a_function_are_those_of_plain_optax():
    """Of nnx: labels of its variables at first, and of arrays in updates; what is frozen stays."""
    workers, model = workers_of("data=8"), nnx.Linear(4, 2, rngs=nnx.Rngs(0))

    def labels(params):
        return jax.tree.map(lambda x: "train" if x.ndim > 1 else "frozen", params)

    tx = optax.partition(
        {"train": lc.owner_adamw(0.1, workers=workers), "frozen": optax.set_to_zero()}, labels
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    before = jax.tree.map(jnp.array, nnx.state(model, nnx.Param))

    def step(model, optimizer, batch):
        optimizer.update(model, nnx.grad(lambda model: square(model(batch)))(model))

    lc.map_step(step, workers)(model, optimizer, BATCH)
    moved = jax.tree.map(lambda x, y: bool((x != y).any()), before, nnx.state(model, nnx.Param))
    assert nnx.to_pure_dict(moved) == {"kernel": True, "bias": False}
