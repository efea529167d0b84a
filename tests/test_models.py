"""Ordinary models inside a worker: they run unchanged, and each worker's gradient is its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils, nnx
from flax import linen as nn
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc

MESHES = {"data": ((8,), ("data",)), "data and tensor": ((4, 2), ("data", "tensor"))}
X = np.random.default_rng(0).normal(size=(16, 6, 4)).astype(np.float32)
PARAMS = {"w": jnp.asarray(np.random.default_rng(1).normal(size=(4, 4)), jnp.float32)}
LSTM = nn.RNN(nn.LSTMCell(5))


def mesh_of(name="data and tensor"):
    shape, names = MESHES[name]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


def gradients(loss, params, mesh, **options):
    workers = lc.Workers(mesh, "data")
    return jax.jit(lc.worker_value_and_grad(loss, workers, **options))(params, X)[1]


def each_alone(loss, params, workers):
    found = [jax.grad(loss)(params, part) for part in np.split(X, workers)]
    return jax.tree.map(lambda *parts: jnp.stack(parts), *found)


def in_a_scan(params, batch):
    total, _ = lax.scan(lambda t, x: (t + jnp.sum((x @ params["w"]) ** 2), None), 0.0, batch)
    return total / len(batch)


def online_softmax(params, batch):
    def step(carry, x):
        largest, total = carry
        score = jnp.sum(x @ params["w"])
        new = jnp.maximum(largest, score)
        return (new, total * jnp.exp(largest - new) + jnp.exp(score - new)), None

    (largest, total), _ = lax.scan(step, (-jnp.inf, 0.0), batch)
    return largest + jnp.log(total)


def with_a_constant_branch(params, batch):
    branch = lax.cond(batch[0, 0, 0] > 0, lambda x: x @ params["w"], jnp.ones_like, batch)
    return jnp.mean(branch**2)


def _product(x, w, out):
    out[...] = x[...] @ w[...]


@jax.custom_vjp
def kernel(x, w):
    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return pl.pallas_call(_product, out_shape=shape, interpret=True)(x, w)


kernel.defvjp(lambda x, w: (kernel(x, w), (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))

ORDINARY = {
    "an LSTM": (lambda p, x: jnp.mean(LSTM.apply(p, x) ** 2), LSTM.init(jax.random.key(0), X)),
    "a scan": (in_a_scan, PARAMS),
    "an online softmax": (online_softmax, PARAMS),
    "a constant branch": (with_a_constant_branch, PARAMS),
    "a Pallas kernel": (lambda p, x: jnp.mean(kernel(x.reshape(-1, 4), p["w"]) ** 2), PARAMS),
}  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_model_needs_no_change(name, mesh):
    loss, params = ORDINARY[name]
    mesh = mesh_of(mesh)
    found = gradients(loss, params, mesh)
    expected = each_alone(loss, params, mesh.shape["data"])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected
    )


# --- What a model says of the mesh


def plain(params, batch):
    return jnp.mean((batch.reshape(-1, 4) @ params["w"]) ** 2)


def constrained(said):
    def loss(params, batch):
        return jnp.mean(lax.with_sharding_constraint(batch @ params["w"], said()) ** 2)

    return loss


def of_a_shard_map(mesh):
    def own(x, w):
        return lax.psum(x @ w, "tensor")

    def loss(params, batch):
        cut = lc.mesh.inner(P("data", "tensor"))
        run = jax.shard_map(
            own, mesh=lc.mesh.inner(mesh), in_specs=(cut, P("tensor")),
            out_specs=lc.mesh.inner(P("data")),
        )  # fmt: skip
        return jnp.mean(run(batch.reshape(-1, 4), params["w"]) ** 2)

    return loss


def by_rules(params, batch):
    hidden = nn.with_logical_constraint(batch @ params["w"], ("batch", None, "mlp"))
    return jnp.mean(hidden**2)


RULES = (("batch", "data"), ("mlp", "tensor"), ("both", ("data", "tensor")), ("none", None))
SAYS = {
    "a spec": lambda mesh: constrained(lambda: lc.mesh.inner(P("data", None, "tensor"))),
    "a sharding": lambda mesh: constrained(
        lambda: lc.mesh.inner(NamedSharding(mesh, P(("data", "tensor"))))
    ),
    "a shard_map": of_a_shard_map,
    "logical rules": lambda mesh: by_rules,
}  # fmt: skip


@pytest.mark.parametrize("name", SAYS)
def test_what_a_model_says_of_the_mesh(name):
    mesh = mesh_of()
    with nn.logical_axis_rules(RULES):
        found = gradients(SAYS[name](mesh), PARAMS, mesh)
        assert tuple(nn.get_logical_axis_rules()) == RULES
    np.testing.assert_allclose(found["w"], each_alone(plain, PARAMS, 4)["w"], rtol=1e-5, atol=1e-6)


def test_the_same_model_runs_outside_a_worker():
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        value = jax.jit(of_a_shard_map(mesh))(PARAMS, X)
    np.testing.assert_allclose(value, plain(PARAMS, X), rtol=1e-5)
    assert lc.mesh.inner(mesh) is mesh
    with pytest.raises(TypeError, match="give a PartitionSpec, a NamedSharding or a Mesh"):
        lc.mesh.inner({"w": P("data")})


def in_the_outer_mesh(params, batch):
    run = jax.shard_map(
        lambda x, w: x @ w, mesh=mesh_of(), in_specs=(P("data"), P()), out_specs=P("data")
    )
    return jnp.mean(run(batch.reshape(-1, 4), params["w"]))


@pytest.mark.parametrize(
    "loss", [constrained(lambda: P("data", None, "tensor")), in_the_outer_mesh],
    ids=["constraint", "shard_map"],
)  # fmt: skip
def test_errors_about_the_mesh_say_what_to_write(loss):
    with pytest.raises(ValueError) as raised:
        gradients(loss, PARAMS, mesh_of())
    notes = " ".join(raised.value.__notes__)
    assert "runs for one worker, where the axes ('data',) of the mesh are taken" in notes
    assert "jax.lax.with_sharding_constraint(x, inner(P(...)))" in notes


def test_logical_names_become_axes_by_the_rules():
    layer = nn.Dense(
        8, kernel_init=nn.with_logical_partitioning(nn.initializers.ones, ("none", "mlp"))
    )
    params = layer.init(jax.random.key(0), X)["params"]
    with nn.logical_axis_rules(RULES):
        specs = lc.mesh.specs_of(params)
    assert specs == {"kernel": P(None, "tensor"), "bias": P()}
    workers = lc.Workers(mesh_of(), "data")
    tx = lc.on_mesh(lc.lion_cub(1e-3, axis_name=workers), workers, specs=lc.mesh.specs_of(params))
    with pytest.raises(
        ValueError, match=r"has 'none'; of a logical name flax.linen.logical_to_mesh"
    ):
        tx.init(nn.meta.unbox(params))


# --- nnx modules


class Net(nnx.Module):
    def __init__(self, rngs, norm=False):
        self.up = nnx.Linear(4, 32, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs) if norm else None

    def __call__(self, x):
        x = self.drop(nnx.relu(self.up(x)))
        return x if self.norm is None else self.norm(x)


def of_net(model, x):
    out = model(x)
    return jnp.mean(out**2), jnp.sum(out == 0, dtype=jnp.int32)


def test_a_module_stands_for_its_parameters_and_its_streams_go_on():
    workers = lc.Workers(mesh_of("data"), "data")
    model = Net(nnx.Rngs(0))
    tx = lc.on_mesh(lc.lion_cub(1e-2, axis_name=workers), workers)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    same = np.broadcast_to(X[:1], X.shape)

    @nnx.jit
    def step(model, optimizer, batch):
        (loss, zeros), grads = lc.worker_value_and_grad(of_net, workers, has_aux=True)(model, batch)
        optimizer.update(model, grads)
        return loss, zeros, grads

    losses = []
    for i in range(5):
        loss, zeros, grads = step(model, optimizer, same)
        losses.append(float(loss))
        assert model.drop.rngs.count[...] == i + 1
    assert losses[-1] < losses[0] and int(zeros) > 0
    first, second = np.asarray(grads["up"]["kernel"][...])[:2]
    assert (first != second).any()  # the batch is the same, so the masks are not


def test_a_module_with_statistics_is_sent_elsewhere():
    workers = lc.Workers(mesh_of("data"), "data")
    with pytest.raises(
        ValueError, match=r"state of its own: .*norm.*make_train_step what from_nnx"
    ):
        lc.worker_value_and_grad(of_net, workers, has_aux=True)(Net(nnx.Rngs(0), norm=True), X)


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["typed", "raw"])
def test_a_key_that_the_loss_closes_over_is_warned_of(key):
    def loss(params, batch):
        return jnp.mean(batch) * params["w"].sum() * jax.random.normal(key)

    with pytest.warns(
        UserWarning, match="closes over the random key 'key', so all workers draw the same"
    ):
        lc.worker_value_and_grad(loss, lc.Workers(mesh_of(), "data"))
    with pytest.warns(UserWarning, match="closes over the random key 'rng'"):
        of_key = functools.partial(lambda params, batch, rng: jnp.mean(batch), rng=key)
        lc.worker_value_and_grad(of_key, lc.Workers(mesh_of(), "data"))


def test_arguments_of_a_gradient_have_places():
    grad_fn = lc.worker_value_and_grad(plain, lc.Workers(mesh_of(), "data"))
    with pytest.raises(TypeError, match=r"\['batch'\] are given by name: give them by place"):
        grad_fn(PARAMS, batch=X)


def test_own_state_is_a_copy_for_each_worker():
    workers = lc.Workers(mesh_of("data"), "data")
    own = lc.training.own_state({"mean": jnp.ones(3), "key": jax.random.key(0)}, workers)
    assert own["mean"].shape == (8, 3) and own["mean"].sharding.spec == P("data")
    assert len({str(jax.random.key_data(k)) for k in own["key"]}) == 8


# --- Under pmap types do not tell


def run_pmap(tx, batches, mean=False, params=None):
    def loss(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2) + jnp.sum(params["b"] * batch.mean())

    def step(params, opt_state, batch):
        grads = jax.grad(loss)(params, batch)
        grads = lax.pmean(grads, "data") if mean else grads
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    alike = {"w": jnp.ones((4, 64)), "b": jnp.ones(200)}
    opt_state = jax_utils.replicate(tx.init(alike))
    params = jax_utils.replicate(alike) if params is None else params(jax_utils.replicate(alike))
    step = jax.pmap(step, axis_name="data")
    for batch in batches:
        params, opt_state = step(params, opt_state, batch)
    return jax.block_until_ready(params)


APART = np.random.default_rng(0).normal(size=(4, 8, 2, 4)).astype(np.float32)


@pytest.fixture
def unread(monkeypatch):
    """Programs are compiled without being read, but for their checksums."""
    monkeypatch.setattr(lc.watch, "_wrong", lambda text, voters: None)


def cub():
    return lc.lion_cub(1e-3, axis_name="data")


def test_workers_with_data_of_their_own_are_no_error():
    run_pmap(cub(), APART)


@pytest.mark.parametrize("case", ["averaged", "one batch for all"])
def test_gradients_that_all_workers_have_alike(case, unread):
    batches = APART if case == "averaged" else np.broadcast_to(APART[:, :1], APART.shape)
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        run_pmap(cub(), batches, mean=case == "averaged")
    assert "step 0: the gradients of all 8 workers are the same to the bit" in str(raised.value)
    assert "leave lax.pmean(grads) out" in str(raised.value)


def test_parameters_that_drift_apart():
    def other(params):
        return params | {"w": params["w"].at[3].add(1e-3)}

    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        run_pmap(cub(), APART, params=other)
    assert "step 0: the parameters of workers 0 and 3 differ" in str(raised.value)


def test_the_mode_that_warns_and_the_one_that_does_not_look():
    before = lc.watch.mode("warn")
    try:
        with pytest.warns(UserWarning, match="step 0: the gradients of all 8 workers are the same"):
            run_pmap(cub(), np.broadcast_to(APART[:, :1], APART.shape))
            jax.effects_barrier()
        lc.watch.mode("allow")
        run_pmap(cub(), np.broadcast_to(APART[:, :1], APART.shape))
    finally:
        lc.watch.mode(before)


def test_leaves_that_are_masked_from_the_vote_are_warned_of():
    tx = optax.masked(cub(), {"w": True, "b": False})
    with pytest.warns(UserWarning, match=r"the leaves \['b'\] are masked from the vote"):
        run_pmap(tx, APART)
