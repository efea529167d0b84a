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


def linen_tx(workers, make=lc.lion_cub, specs=True):
    specs = lc.mesh.specs_of(linen_params()) if specs else None
    return lc.on_mesh(make(0.1, workers=workers), workers, specs=specs)


def linen_state(workers, make=lc.lion_cub, boxed=True):
    """A state as trainers make it: made by a compiled program, where its boxes say; and how it lies."""
    model, tx = Linen(boxed), linen_tx(workers, make)

    def create(key):
        params = model.init(key, BATCH[:1])["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    lies = nn.get_sharding(jax.eval_shape(create, jax.random.key(0)), workers.mesh)
    return jax.jit(create, out_shardings=lies)(jax.random.key(0)), lies


def linen_steps(workers, state, lies=None):
    specs = lc.mesh.specs_of(linen_params())

    @functools.partial(jax.jit, out_shardings=lies)
    def step(state):
        def loss(params, batch):
            return square(state.apply_fn({"params": params}, batch))

        grads = lc.worker_value_and_grad(loss, workers, specs=specs)(state.params, BATCH)[1]
        return state.apply_gradients(grads=grads)

    for _ in range(3):
        state = step(state)
    assert step._cache_size() <= 2  # the first step counts in Python
    return state


def test_boxed_linen_parameters_train_as_bare_ones_and_momentum_says_how_it_lies():
    workers = workers_of()
    with jax.set_mesh(workers.mesh):
        state, lies = linen_state(workers, OWNER)
        found = linen_steps(workers, state, lies)
    bare = linen_steps(workers, linen_state(workers, OWNER, boxed=False)[0])
    assert jax.tree.structure(found.opt_state) == jax.tree.structure(state.opt_state)
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(bare), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    lies_as_it_says(workers, found, nn.get_partition_spec(found))


def test_the_names_of_boxes_have_the_workers_in_front():
    made = jax.jit(linen_tx(workers_of(), specs=False).init)(linen_params())  # boxes say how
    specs = nn.get_partition_spec(made)[0]
    assert specs.count == specs.votes.ties == P()
    assert specs.mu["Dense_0"] == {"kernel": P("data", None, "fsdp"), "bias": P("data")}
    assert specs.mu["Dense_1"] == {"kernel": P("data", "fsdp", None), "bias": P("data")}
    several = workers_of("pod=2 data=2 fsdp=2", ("pod", "data"))
    specs = nn.get_partition_spec(linen_tx(several).init(linen_params()))[0]
    assert specs.mu["Dense_0"]["kernel"] == P(("pod", "data"), None, "fsdp")
    tx = linen_tx(workers_of(), OWNER)
    wanted = tx.shardings(jax.eval_shape(linen_params))
    found = jax.jit(tx.init, out_shardings=wanted)(linen_params())
    assert P("data", None, "fsdp") in {x.sharding.spec for x in jax.tree.leaves(found)}


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
        made = jax.jit(lc.on_mesh(lc.lion_cub(0.1, workers=workers), workers).init)(bare)
    assert made[0].mu["a"]["kernel"].sharding.spec == P("data", None, "fsdp")


def test_an_nnx_optimizer_says_how_momentum_lies():
    """As the parameters, whatever metadata for optimizers, or of older names, says."""
    workers = workers_of()
    with jax.set_mesh(workers.mesh):
        model = Model()
        kept = {"optimizer_sharding": ("fsdp", None), "sharding_names": (None, "fsdp")}
        kernel = model.a.kernel
        model.a.kernel = nnx.Param.from_metadata(kernel[...], {**kernel.get_metadata(), **kept})
        specs = lc.mesh.specs_of(nnx.state(model, nnx.Param))
        tx = lc.on_mesh(lc.lion_cub(0.1, workers=workers), workers, specs=specs)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    assert "sharding_names" not in optimizer.opt_state[0].mu["a"]["kernel"].get_metadata()
    specs = nnx.get_partition_spec(nnx.state(optimizer))["opt_state"][0]
    specs = jax.tree.map(lambda x: jax.tree.leaves(x)[0], specs, is_leaf=is_box)
    specs = nnx.to_pure_dict(specs)
    assert specs["count"] == specs["votes"]["ties"] == P()
    assert specs["mu"]["a"] == {"kernel": P("data", None, "fsdp"), "bias": P("data")}
    assert specs["mu"]["b"] == {"kernel": P("data"), "bias": P("data")}


def test_labels_by_a_function_go_inside_on_mesh_as_in_plain_optax():
    """Of nnx: labels of its variables at first, and of arrays in updates; what is frozen stays."""
    workers = workers_of("data=8")
    with jax.set_mesh(workers.mesh):
        model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
        lc.training.place(model, workers)

        def labels(params):
            return jax.tree.map(lambda x: "train" if x.ndim > 1 else "frozen", params)

        tx = optax.partition(
            {"train": lc.owner_adamw(0.1, workers=workers), "frozen": optax.set_to_zero()}, labels
        )
        optimizer = nnx.Optimizer(model, lc.on_mesh(tx, workers), wrt=nnx.Param)
        before = jax.tree.map(jnp.array, nnx.state(model, nnx.Param))
        grads = jax.tree.map(lambda x: jnp.ones((workers.count, *x.shape)), before)
        nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))(
            model, optimizer, grads
        )
    moved = jax.tree.map(lambda x, y: bool((x != y).any()), before, nnx.state(model, nnx.Param))
    assert nnx.to_pure_dict(moved) == {"kernel": True, "bias": False}
