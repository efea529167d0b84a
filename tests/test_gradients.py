"""Each worker's own gradient, of any ordinary model: as global arrays, under jit, shard_map and pmap."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import in_order, normal, on_both_kinds, workers_on
from flax import jax_utils
from flax import linen as nn
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pages import block

import lioncub_jax as lc

W, ROWS = 4, 3


def workers_of(kind=AxisType.Auto):
    return workers_on(f"data={W} tensor=2", kind=kind)


X = normal(W * ROWS, 6)


def grads_of(loss, workers=None):
    """A step that returns the loss and the gradients of each worker, ``[workers, ...]``."""

    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return {"loss": value, "grads": jax.tree.map(lambda g: g[None], grads)}

    return lc.map_step(step, workers or workers_of(), rows=1, out={"grads": "rows"})


def each_alone(loss, params, batch, *args):
    """Values and gradients of the workers, one after the other."""
    found = [jax.value_and_grad(loss)(params, rows, *args) for rows in np.split(batch, W)]
    return jax.tree.map(lambda *parts: np.stack(parts), *found)


def test_within_a_worker_explicit_types_hold_what_a_step_takes():
    workers = workers_of(AxisType.Explicit)
    lie = workers.shardings((P(("data", "tensor")), P("tensor")))
    (x, weights), seen = jax.device_put((X[:8], X[0]), lie), []

    def step(params, x, weights):
        seen.append([str(jax.typeof(x)) for x in (x, weights)])
        return {"rows": x @ params, "state": params + weights}

    found = lc.map_step(step, workers, rows="x")(X[1], x, weights)
    np.testing.assert_allclose(found["rows"], X[:8] @ X[1], rtol=1e-5)
    np.testing.assert_allclose(found["state"], X[1] + X[0], rtol=1e-5)
    assert seen[0] == ["float32[2@tensor,6]", "float32[6@tensor]"]


def contrastive(params, x):
    """Each row against all rows of its worker."""
    x = x @ params
    return against(x, x, jnp.arange(len(x)))


def contrastive_over_workers(params, x):
    """Each row against those of all workers."""
    x = x @ params
    with lc.audit.declared():
        others = lax.all_gather(x, "data", tiled=True)
    return against(x, others, lax.axis_index("data") * len(x) + jnp.arange(len(x)))


def against(x, others, mine):
    return optax.softmax_cross_entropy_with_integer_labels(x @ others.T, mine).mean()


@on_both_kinds
def test_a_loss_that_compares_the_rows_of_all_workers_is_that_of_all_rows(kind):
    """And the mean of the gradients is its gradient; without the gather both are others.

    No inner axis where axes are Explicit: jax 0.12 cannot differentiate an all-gather beside one.
    """
    inner = " tensor=2" if kind is AxisType.Auto else ""
    workers, params = workers_on(f"data={W}{inner}", kind=kind), normal(6, 5)
    wanted, slope = jax.value_and_grad(contrastive)(params, X)
    found = grads_of(contrastive_over_workers, workers)(params, X)
    alone = grads_of(contrastive, workers)(params, X)
    np.testing.assert_allclose(found["loss"], wanted, rtol=1e-5)
    np.testing.assert_allclose(np.mean(found["grads"], 0), slope, rtol=1e-4, atol=1e-5)
    assert abs(alone["loss"] - wanted) > 0.1 * wanted


def test_sam_climbs_by_the_rows_of_a_worker_and_private_noise_is_its_own():
    """As the page has them."""
    params, names = {"w": normal(6, 2)}, {"jax": jax, "jnp": jnp, "optax": optax}
    names |= {"loss_fn": lambda params, x: jnp.mean((x @ params["w"] - 1) ** 2)}
    for mark in ("run: sam", "run: private"):
        exec(block("how_to/trainer.md", mark).partition("\n\n\ndef train_step")[0], names)

    def own(gradient, *args):
        step = lc.map_step(
            lambda params, x, *args: gradient(params, x, *args)["w"], workers_on("data=4"), rows="x",
            out={"result": "each"},
        )  # fmt: skip
        return np.asarray(step(params, X, *args))

    def by_hand(rows):
        slope = jax.grad(names["loss_fn"])(params, rows)["w"]
        return jax.grad(names["loss_fn"])(
            {"w": params["w"] + 0.05 * slope / jnp.linalg.norm(slope)}, rows
        )["w"]

    sharp = own(names["sharpness_aware"])
    np.testing.assert_allclose(sharp, [by_hand(rows) for rows in np.split(X, 4)], rtol=1e-4)
    noisy = own(names["private"], jax.random.key(0))
    still = functools.partial(names["private"], noise=0.0)
    clipped = [still(params, rows, jax.random.key(0))["w"] for rows in np.split(X, 4)]
    assert all(3 * np.linalg.norm(g) <= 3.001 for g in clipped)
    noise = (noisy - clipped).reshape(4, -1)
    assert (np.abs(noise) > 0).all() and 0.05 < noise.std() < 0.4
    assert np.abs(np.corrcoef(noise) - np.eye(4)).max() < 0.9


def test_an_optimizer_is_not_given_what_fp8_layers_keep():
    variables = {"params": jnp.ones(3), "_overwrite_with_gradient": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"_overwrite_with_gradient.*give it variables"):
        lc.lion_cub(1e-3, workers=workers_of()).init(variables)


# --- Ordinary models need no change

TEXT = normal(16, 6, 4)
MATRIX = {"w": jnp.asarray(normal(4, 4, seed=1))}


def in_a_scan(params, batch):
    def step(carry, x):
        largest, total = carry
        score = jnp.sum(x @ params["w"])
        return (jnp.maximum(largest, score), total + score**2), None

    return sum(lax.scan(step, (-jnp.inf, 0.0), batch)[0])


def product(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def constrained(said):
    def loss(params, batch):
        return jnp.mean(lax.with_sharding_constraint(batch @ params["w"], said()) ** 2)

    return loss


def of_a_shard_map(params, batch):
    """Says what it has of the mesh of the caller, if it is in one worker or in none."""
    mesh, cut = workers_of().mesh, lc.mesh.inner(P("data", "tensor"))
    run = jax.shard_map(
        lambda x, w: lax.psum(x @ w, "tensor"), mesh=lc.mesh.inner(mesh),
        in_specs=(cut, P("tensor")), out_specs=lc.mesh.inner(P("data")),
    )  # fmt: skip
    return jnp.mean(run(batch.reshape(-1, 4), params["w"]) ** 2)


def by_rules(params, batch):
    hidden = nn.with_logical_constraint(batch @ params["w"], ("batch", None, "mlp"))
    return jnp.mean(hidden**2)


@jax.custom_vjp
def kernel(x, w):
    def body(x, w, out):
        out[...] = x[...] @ w[...]

    shape = jax.ShapeDtypeStruct((len(x), w.shape[1]), x.dtype)
    return pl.pallas_call(body, out_shape=shape, interpret=True)(x, w)


kernel.defvjp(lambda x, w: (kernel(x, w), (x, w)), lambda xw, g: (g @ xw[1].T, xw[0].T @ g))


def of_pallas(params, batch):
    return jnp.mean(kernel(batch.reshape(-1, 4), params["w"]) ** 2)


RULES = (("batch", "data"), ("mlp", "tensor"), ("both", ("data", "tensor")), ("none", None))
MODELS = {
    "a scan": (in_a_scan, in_a_scan),
    "a spec": (constrained(lambda: lc.mesh.inner(P("data", None, "tensor"))), product),
    "a sharding": (
        constrained(lambda: lc.mesh.inner(NamedSharding(workers_of().mesh, P(("data", "tensor"))))),
        product,
    ),
    "a shard_map": (of_a_shard_map, product),
    "logical rules": (by_rules, product),
    "a Pallas kernel": (of_pallas, product),
}


def test_ordinary_models_and_what_they_say_of_the_mesh():
    with nn.logical_axis_rules(RULES):
        steps = [grads_of(loss) for loss, _ in MODELS.values()]
        found = [step(MATRIX, TEXT)["grads"]["w"] for step in steps]
        assert tuple(nn.get_logical_axis_rules()) == RULES
    for got, (name, (_, same)) in zip(found, MODELS.items(), strict=True):
        wanted = each_alone(same, MATRIX, TEXT)[1]["w"]
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_same_model_runs_outside_a_worker():
    with jax.set_mesh(workers_of().mesh):
        value = jax.jit(of_a_shard_map)(MATRIX, TEXT)
    np.testing.assert_allclose(value, product(MATRIX, TEXT), rtol=1e-5)


def at_the_end(params, batch):
    return jax.reshard(product(params, batch), NamedSharding(workers_of().mesh, P()))


MESH = (
    "runs for one worker, where the axes ('data',) of the mesh are taken ... lioncub_jax.mesh.inner ... "
    "jax.lax.with_sharding_constraint(x, inner(P(...)))"
)
HINTS = [constrained(lambda: P("data", None, "tensor")), at_the_end]


@pytest.mark.parametrize("loss", HINTS)
def test_errors_of_jax_about_the_mesh_say_what_to_write(loss):
    mesh = workers_of().mesh
    with jax.set_mesh(mesh), pytest.raises(Exception) as raised:  # JAX has no class for them
        grads_of(loss).lower(MATRIX, TEXT).compile()
    told = " ".join([str(raised.value), *raised.value.__notes__])
    assert re.search(in_order(MESH), told)


def test_logical_names_become_axes_by_the_rules():
    init = nn.with_logical_partitioning(nn.initializers.ones, ("none", "mlp"))
    params = nn.Dense(8, kernel_init=init).init(jax.random.key(0), TEXT)["params"]
    with nn.logical_axis_rules(RULES):
        assert lc.mesh.specs_of(params) == {"kernel": P(None, "tensor"), "bias": P()}
    with pytest.raises(ValueError, match=r"'none'.* of a logical name flax.linen.logical_to"):
        workers_of().param_specs(nn.meta.unbox(params), lc.mesh.specs_of(params))


def test_what_is_no_spec_nor_mesh_is_refused():
    with pytest.raises(TypeError, match="give a PartitionSpec, a NamedSharding or a Mesh"):
        lc.mesh.inner({"w": P("data")})


# --- Under pmap types do not tell


def run_pmap(alike=False, apart=0.0):
    tx = lc.lion_cub(1e-3, workers="data")

    def step(params, opt_state, batch):
        grads = jax.grad(product)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = {"w": jnp.ones((4, 64))}
    opt_state, params = jax_utils.replicate((tx.init(params), params))
    params["w"] = params["w"].at[3].add(apart)
    step = jax.pmap(step, axis_name="data")
    for batch in normal(2, 8, 2, 4):
        batch = np.broadcast_to(batch[:1], batch.shape) if alike else batch
        params, opt_state = step(params, opt_state, batch)
    jax.block_until_ready(params)
    jax.effects_barrier()


SAME_TO_THE_BIT = "step 0: the gradients of all 8 workers are the same to the bit"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"alike": True}, f"{SAME_TO_THE_BIT} ... leave lax.pmean(grads) out"),
        ({"apart": 1e-3}, "step 0: the parameters of workers 0 and 3 differ"),
    ],
)
def test_workers_that_are_alike_or_drift_apart(given, words):
    with pytest.raises(jax.errors.JaxRuntimeError, match=in_order(words)):
        run_pmap(**given)


def test_the_mode_that_warns_and_the_one_that_does_not_look():
    before = lc.audit.mode("warn")
    try:
        with pytest.warns(UserWarning, match=SAME_TO_THE_BIT.removeprefix("step 0: ")):  # at each
            run_pmap(alike=True)
        lc.audit.mode("allow")
        run_pmap(alike=True)
    finally:
        lc.audit.mode(before)
