"""Each worker's own gradient, of any ordinary model: as global arrays, under jit, shard_map and pmap."""

import functools
import itertools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import in_order, normal, on_both_kinds, workers_on
from flax import jax_utils, nnx
from flax import linen as nn
from flax.training import train_state
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pages import block

import lioncub_jax as lc

W, ROWS = 4, 3
SPLIT, SHARED, PER_WORKER, FOLDED_KEY = lc.Kind


def workers_of(kind=AxisType.Auto):
    return workers_on(f"data={W} tensor=2", kind=kind)


X = normal(W * ROWS, 6)
PARAMS = {"w": jnp.arange(6.0) / 8, "b": jnp.float32(0.5)}
SPECS = {"w": P("tensor"), "b": P()}
WEIGHTS = np.arange(1000, dtype=np.float32) / 1000


def grad_of(loss, workers=None, **options):
    return lc.worker_value_and_grad(loss, workers or workers_of(), specs=SPECS, **options)


def plain(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def weighted(params, x, weights, scale=1.0):
    """Weights of the columns: there are as many as the workers could cut."""
    return plain(params, x) * jnp.sum(weights) * scale


def each_alone(loss, params, batch, *args):
    """Values and gradients of the workers, one after the other."""
    found = [jax.value_and_grad(loss)(params, rows, *args) for rows in np.split(batch, W)]
    return jax.tree.map(lambda *parts: np.stack(parts), *found)


@on_both_kinds
def test_every_worker_has_the_gradient_of_its_own_rows_and_of_all_class_weights(kind):
    workers = workers_of(kind)
    grad_fn = jax.jit(grad_of(weighted, workers, in_kinds=(SPLIT, SHARED, None)))
    given = {n: NamedSharding(workers.mesh, spec) for n, spec in {**SPECS, "x": P("data")}.items()}
    given = jax.device_put({**PARAMS, "x": X}, given)
    args = given, given.pop("x"), WEIGHTS, 2.0
    value, grads = grad_fn(*args)
    values, wanted = each_alone(weighted, PARAMS, X, WEIGHTS, 2.0)
    np.testing.assert_allclose(value, values.mean(), rtol=1e-5)
    for name in PARAMS:
        np.testing.assert_allclose(grads[name], wanted[name], rtol=1e-4)
    lies = NamedSharding(workers.mesh, P("data", "tensor"))
    assert grads["w"].sharding.is_equivalent_to(lies, 2)
    found = lc.audit.collectives(grad_fn.lower(*args).compile(), workers.mesh)
    assert [one.payload_bytes for one in found if "data" in one.axes] == [4]  # the loss


def test_within_a_worker_explicit_types_hold_what_a_loss_takes_and_returns():
    workers, rows = workers_of(AxisType.Explicit), P(("data", "tensor"))
    specs = rows, P("tensor"), P("data", "tensor")
    lie = tuple(NamedSharding(workers.mesh, spec) for spec in specs)
    given = jax.device_put((X[:8], X[0], X[:W]), lie)

    def loss(params, *args):
        assert [*map(str, map(jax.typeof, args))] == SEEN
        x, weights, state = args
        out = x @ params["w"]
        return jnp.mean(out**2), (out, state + weights)

    kinds = {
        "in_kinds": (SPLIT, SHARED, PER_WORKER),
        "aux_kinds": (SPLIT, PER_WORKER),
        "has_aux": True,
    }

    @jax.jit
    def step(*args):
        return lc.worker_value_and_grad(loss, workers, **kinds)(*args)[0][1]

    args = PARAMS, *given
    out, state = step(*args)
    np.testing.assert_allclose(out, X[:8] @ PARAMS["w"], rtol=1e-5)
    np.testing.assert_allclose(state, X[:W] + X[0], rtol=1e-5)
    assert out.sharding.spec == rows and state.sharding.spec == specs[2]
    assert not lc.audit.collectives(step.lower(*args).compile(), workers.mesh)


SEEN = ["float32[2@tensor,6]", "float32[6@tensor]", "float32[6@tensor]"]


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
    with jax.set_mesh(workers.mesh):
        grad_fn = lc.worker_value_and_grad(contrastive_over_workers, workers)
        value, grads = jax.jit(grad_fn)(params, X)
        alone, _ = jax.jit(lc.worker_value_and_grad(contrastive, workers))(params, X)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(np.mean(grads, 0), slope, rtol=1e-4, atol=1e-5)
    assert abs(alone - wanted) > 0.1 * wanted


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_masked_mean_is_that_of_the_whole_batch(accumulate):
    """Workers have 0 to 3 of their three rows; what each divides by its own number is another loss."""
    names = {"jnp": jnp}
    exec(block("how_to/trainer.md", "run: masked").partition("mask = ")[0], names)
    mask, params = np.float32([0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0]), {"w": normal(6, 2)}

    def step(loss, batch):
        tx = lc.global_gradients(optax.sgd(1.0), workers=workers_of())
        state = lc.init_state(tx, params, workers_of())
        state, metrics = lc.make_train_step(loss, tx, workers_of(), accumulate=accumulate)(
            state, batch
        )
        return params["w"] - state.params["w"], metrics["loss"]

    def of_its_own(params, batch, rng=None):
        return names["masked"](params, (*batch, batch[1].mean() + 1e-6))

    whole = X, mask, mask.mean()
    wanted, slope = jax.value_and_grad(names["masked"])(params, whole)
    found, value = step(names["masked"], whole)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(found, slope["w"], rtol=1e-4)
    assert abs(step(of_its_own, whole[:2])[1] - wanted) > 0.05 * wanted


def test_sam_inside_the_loss_climbs_by_the_rows_of_a_worker_and_private_noise_is_its_own():
    """As the page has them."""
    params, given = {"w": normal(6, 2)}, {"jax": jax, "jnp": jnp, "optax": optax}
    names = given | {"loss": lambda params, x, rng: jnp.mean((x @ params["w"] - 1) ** 2)}
    for mark in ("run: sam", "run: private"):
        exec(block("how_to/trainer.md", mark).partition("step = ")[0], names)

    def grads_of(loss, *args):
        return np.asarray(
            lc.worker_value_and_grad(loss, workers_on("data=4"))(params, X, *args)[1]["w"]
        )

    def by_hand(rows):
        slope = jax.grad(names["loss"])(params, rows, None)["w"]
        return jax.grad(names["loss"])(
            {"w": params["w"] + 0.05 * slope / jnp.linalg.norm(slope)}, rows, None
        )["w"]

    sharp = grads_of(names["sharpness_aware"])
    np.testing.assert_allclose(sharp, [by_hand(rows) for rows in np.split(X, 4)], rtol=1e-4)
    noisy = grads_of(names["private"], jax.random.key(0))
    still = functools.partial(names["clipped_and_noisy"], noise=0.0)
    clipped = [still(params, rows, jax.random.key(0))[1]["w"] for rows in np.split(X, 4)]
    assert all(3 * np.linalg.norm(g) <= 3.001 for g in clipped)
    noise = (noisy - clipped).reshape(4, -1)
    assert (np.abs(noise) > 0).all() and 0.05 < noise.std() < 0.4
    assert np.abs(np.corrcoef(noise) - np.eye(4)).max() < 0.9


def test_scales_of_fp8_layers_are_overwritten_by_those_of_all_workers():
    """As by flax's own trainer, which is given the rows of all."""
    model = nn.Dense(8, dot_general_cls=nn.fp8_ops.Fp8DirectDotGeneralOp)
    x, workers = normal(16, 16), workers_on("data=4")
    variables = model.init(jax.random.key(0), x)
    fp8 = "_overwrite_with_gradient"

    def trained(tx, gradient):
        state = train_state.TrainState.create(apply_fn=None, params=variables, tx=tx)

        @jax.jit
        def step(state):
            return state.apply_gradients(grads=gradient(state.params, x))

        return step(step(state)).params[fp8]

    def loss(variables, x):
        return jnp.mean((model.apply(variables, x) - 1) ** 2)

    tx = lc.on_mesh(lc.lion_cub(0.0, workers=workers), workers)
    of_workers = trained(tx, lambda *given: lc.worker_value_and_grad(loss, workers)(*given)[1])
    whole = trained(optax.sgd(0.0), jax.grad(loss))
    for name, scale in jax.tree_util.tree_leaves_with_path(whole):
        found = dict(jax.tree_util.tree_leaves_with_path(of_workers))[name]
        # The loss of a worker is a mean of a fourth of the rows.
        gradients = "output_grad" in jax.tree_util.keystr(name)
        assert (
            (scale > 0).any() and (found >= scale).all() if gradients else (found == scale).all()
        ), name
    for make in (
        lc.lion_cub,
        lambda rate, workers: lc.global_gradients(optax.adam(rate), workers=workers),
    ):
        with pytest.raises(ValueError, match=r"_overwrite_with_gradient.*give it variables"):
            lc.init_state(make(1e-3, workers=workers), variables, workers)


# --- What arguments and results are to the workers


@on_both_kinds
def test_a_sum_beside_a_count_is_warned_of_once_and_own_ones_make_a_ratio(kind):
    def loss(params, x):
        return plain(params, x), {"sums": {"xent": jnp.sum(x), "count": jnp.sum(x > 0)}, "n": 1}

    def ratio(**kinds):
        grad_fn = jax.jit(grad_of(loss, workers_of(kind), has_aux=True, **kinds))
        with jax.set_mesh(workers_of(kind).mesh):
            sums = grad_fn(PARAMS, X)[0][1]["sums"]
        return sums["xent"].sum() / sums["count"].sum()

    wanted = X.sum() / (X > 0).sum()
    words = r"aux\['sums'\]\['xent'\] is a floating .* aux\['sums'\]\['count'\] a whole one, added"
    with pytest.warns(UserWarning, match=words) as told:
        np.testing.assert_allclose(ratio(), wanted / W, rtol=1e-4)
    assert len(told) == 1
    with warnings.catch_warnings(action="error"):
        np.testing.assert_allclose(ratio(aux_kinds=SHARED), wanted / W, rtol=1e-4)
        np.testing.assert_allclose(ratio(aux_kinds=PER_WORKER), wanted, rtol=1e-4)


def test_keys_are_folded_shared_or_cut_as_their_kind_says():
    def draws(params, x, keys):
        own = keys | {"cut": keys["cut"][0]}
        return plain(params, x), {name: jax.random.bits(key)[None] for name, key in own.items()}

    key = jax.random.key(3)
    cut = jax.random.split(key, W)
    keys = {"typed": key, "same": key, "folded": key, "raw": jax.random.PRNGKey(3), "cut": cut}
    kinds = {"typed": None, "same": SHARED, "folded": FOLDED_KEY, "raw": FOLDED_KEY, "cut": SPLIT}
    grad_fn = grad_of(draws, has_aux=True, in_kinds=(SPLIT, kinds), aux_kinds=SPLIT)
    found = jax.tree.map(list, jax.tree.map(np.asarray, jax.jit(grad_fn)(PARAMS, X, keys)[0][1]))
    assert len({*found["typed"]}) == W and len({*found["same"]}) == 1
    assert found["typed"] == found["folded"] == found["raw"]
    assert found["cut"] == [int(jax.random.bits(k)) for k in cut]


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
}


def test_ordinary_models_and_what_they_say_of_the_mesh():
    grads = [lc.worker_value_and_grad(loss, workers_of()) for loss, _ in MODELS.values()]
    with nn.logical_axis_rules(RULES):
        found = jax.jit(lambda *args: [grad(*args)[1]["w"] for grad in grads])(MATRIX, TEXT)
        assert tuple(nn.get_logical_axis_rules()) == RULES
    for got, (name, (_, same)) in zip(found, MODELS.items(), strict=True):
        wanted = each_alone(same, MATRIX, TEXT)[1]["w"]
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_same_model_runs_outside_a_worker():
    with jax.set_mesh(workers_of().mesh):
        value = jax.jit(of_a_shard_map)(MATRIX, TEXT)
    np.testing.assert_allclose(value, product(MATRIX, TEXT), rtol=1e-5)


def at_once(params, batch):
    with jax.ensure_compile_time_eval():
        weights = jnp.sin(jnp.arange(4.0))
    return product(params, batch * weights)


def looked_up(params, batch):
    table = nnx.Embed(4, 4, rngs=nnx.Rngs(0))
    return product(params, table(batch.astype(int), out_sharding=P("tensor")))


RNGS = nnx.Rngs(0)


def drawn(params, batch):
    return product(params, batch) * jax.random.uniform(RNGS())


def at_the_end(params, batch):
    return jax.reshard(product(params, batch), NamedSharding(workers_of().mesh, P()))


class General(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.ones, (None, "tensor", None))
        return nn.DenseGeneral((2, 2), kernel_init=init)(x)


def general(params, batch):
    layer = General().init(jax.random.key(0), batch)["params"]
    return jnp.mean(General().apply({"params": layer}, batch @ params["w"]))


MESH = (
    "runs for one worker, where the axes ('data',) of the mesh are taken ... lioncub_jax.mesh.inner ... "
    "jax.lax.with_sharding_constraint(x, inner(P(...)))"
)
HINTS = [
    (constrained(lambda: P("data", None, "tensor")), MESH),
    (at_the_end, MESH),
    (general, "more names than the array ... nn.DenseGeneral ... give them as specs to init_state"),
    (at_once, "jax.ensure_compile_time_eval ... compute with NumPy, or before the loss"),
    (looked_up, "nnx.Embed(out_sharding=...) ... leave it out ... .at[tokens].get(out_sharding="),
    (drawn, "closes over ... give nnx.Rngs as an argument of the loss"),
]


@pytest.mark.parametrize(("loss", "words"), HINTS)
def test_errors_of_jax_and_flax_in_a_loss_say_what_to_write(loss, words):
    mesh = workers_of().mesh
    with jax.set_mesh(mesh), pytest.raises(Exception) as raised:  # JAX has no class for them
        jax.jit(lc.worker_value_and_grad(loss, workers_of())).lower(MATRIX, TEXT).compile()
    told = " ".join([str(raised.value), *raised.value.__notes__])
    assert re.search(in_order(words), told)


def test_logical_names_become_axes_by_the_rules():
    init = nn.with_logical_partitioning(nn.initializers.ones, ("none", "mlp"))
    params = nn.Dense(8, kernel_init=init).init(jax.random.key(0), TEXT)["params"]
    with nn.logical_axis_rules(RULES):
        assert lc.mesh.specs_of(params) == {"kernel": P(None, "tensor"), "bias": P()}
    with pytest.raises(ValueError, match=r"'none'.* of a logical name flax.linen.logical_to"):
        workers_of().param_specs(nn.meta.unbox(params), lc.mesh.specs_of(params))


# --- nnx modules


def net(*more):
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(6, 32, rngs=rngs), nnx.Dropout(0.5, rngs=rngs), *more)


def of_net(model, x):
    out = model(x)
    return jnp.mean(out**2), jnp.sum(out == 0, dtype=jnp.int32)


@on_both_kinds
def test_a_module_stands_for_its_parameters_and_what_it_keeps_besides_goes_on(kind):
    """Statistics of a worker whose loss is no number stay."""
    norm, workers = nnx.BatchNorm(32, momentum=0.5, rngs=nnx.Rngs(0)), workers_of(kind)
    model, same = net(norm), np.broadcast_to(X[:1], X.shape).copy()
    assert lc.training.place(model, workers) is model
    assert model.layers[0].kernel[...].sharding == workers.shardings(P())
    grad_fn = nnx.jit(lc.worker_value_and_grad(of_net, workers, has_aux=True))
    found, means = [], [norm.mean[...]]
    for i in range(2):
        same[:ROWS] *= np.nan if i else 1
        with jax.set_mesh(workers.mesh):
            _, grads = grad_fn(model, same)
        assert model.layers[1].rngs.count[...] == i + 1
        found += [row.tobytes() for row in np.asarray(grads["layers"][0]["kernel"][...])]
        means.append(norm.mean[...])
    assert len({*found}) == 2 * W  # the batch is the same, so the masks are not
    changed = [(new != old).any(1).tolist() for old, new in itertools.pairwise(means)]
    assert changed == [[True] * W, [False] + [True] * (W - 1)]
    average = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    for trained in (None, average):
        one = lc.training.for_evaluation(model, workers, trained)
        assert norm.mean.shape == (W, 32) and one.layers[1].deterministic
        np.testing.assert_allclose(one.layers[2].mean[...], means[-1].mean(0), rtol=1e-6)
        kernel = one.layers[0].kernel[...]
        assert (kernel == (0 if trained else model.layers[0].kernel[...])).all()


def test_variables_of_linen_are_placed_as_boxes_say_and_statistics_for_each_worker():
    workers = workers_of()
    kernel = nn.with_partitioning(nn.initializers.ones, (None, "tensor"))
    model = nn.Sequential([nn.Dense(4, kernel_init=kernel), nn.BatchNorm(True)])
    variables = lc.training.place(model.init(jax.random.key(0), X), workers)
    box = variables["params"]["layers_0"]["kernel"]
    assert isinstance(box, nn.Partitioned) and box.value.sharding.spec == P(None, "tensor")
    assert variables["batch_stats"]["layers_1"]["mean"].shape == (W, 4)


@on_both_kinds
def test_from_rngs_each_worker_draws_its_own_and_they_go_on_as_often_as_a_loss_draws(kind):
    def draws(params, x, *given):
        bits = [jax.random.bits(rngs.dropout()) for rngs in (*given, given[0])]
        return plain(params, x), jnp.stack(bits)

    kinds = {"in_kinds": (SPLIT, None, SHARED), "aux_kinds": PER_WORKER}
    step = nnx.jit(grad_of(draws, workers_of(kind), has_aux=True, **kinds))
    rngs, alike, found = nnx.Rngs(dropout=1), nnx.Rngs(dropout=1), set()
    for i in range(2):
        with jax.set_mesh(workers_of(kind).mesh):
            (_, bits), _ = step(PARAMS, X, rngs, alike)
        assert [rngs.dropout.count[...], alike.dropout.count[...]] == [2 * i + 2, i + 1]
        found |= {*bits[:, ::2].ravel().tolist()}
        assert len({*bits[:, 1].tolist()}) == 1
    assert len(found) == 2 * 2 * W


# --- Bad input


class Wrapped:
    """As a Variable of keras."""

    shape, dtype = (3,), jnp.dtype("float32")

    def __jax_array__(self):
        return jnp.zeros(3)


def with_statistics(params, x):
    return plain(params, x), {"statistics": x.mean(0)}


def of_workers(loss, *args, **options):
    return lambda: grad_of(loss, **options)(PARAMS, *args)


def kinds_of(kinds, *args):
    return of_workers(weighted, *args, in_kinds=kinds)


RAW = np.zeros(2, np.uint32)
REFUSED = [
    (
        of_workers(plain, X, has_aux=True),
        "the loss returned one value(s), and (loss, aux) is wanted ... has_aux=True",
    ),
    (of_workers(plain, X[:6]), "'x' has shape (6, 6) ... 4 workers ... drop or pad the last rows"),
    (kinds_of(None, X, WEIGHTS), "'x' is an array of shape (12, 6) ... in_kinds= ... one argument"),
    (kinds_of((SPLIT, None), X, {"c": WEIGHTS}), "'weights'['c'] is an array"),
    (of_workers(plain, {"x": X, "key": RAW}), "'x'['key'] looks like a raw random key"),
    (kinds_of(None, X, RAW), "'weights' looks like a raw random key ... FOLDED_KEY"),
    (lambda: lc.training.place({"w": X}, workers_of()), "give a flax.nnx.Module, or the variables"),
    (lambda: lc.training.for_evaluation({"w": X}, workers_of()), "give a flax.nnx.Module"),
    (
        lambda: lc.training.own_state(lc.training.own_state({"m": X}, workers_of()), workers_of()),
        "'m'] ... shape (4, 12, 6), lies over the workers already",
    ),
    (
        lambda: lc.training.for_evaluation(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), workers_of()),
        "'mean' ... of the module has shape (3,) ... training.place(model, workers)",
    ),
    (
        lambda: lc.training.own_state({"mean": Wrapped()}, workers_of()),
        "model_state['mean'] is ... of a Variable of keras its value",
    ),
    (
        of_workers(lambda params, x: plain(params, x["x"]), {"x": X, "weights": WEIGHTS}),
        "'x'['x'] has 12 rows ... in_kinds of",
    ),
    (of_workers(plain, {"x": Wrapped()}), "'x'['x'] is test_gradients.Wrapped ... np.asarray"),
    (kinds_of((SHARED, SHARED), X, WEIGHTS), "give the batch as an argument of the loss"),
    (kinds_of((SPLIT, PER_WORKER), X, WEIGHTS), "'weights' has shape (1000,) ... dimension of 4"),
    (kinds_of((SPLIT, FOLDED_KEY), X, WEIGHTS), "'weights' is FOLDED_KEY, and no random key"),
    (kinds_of((SPLIT,), X, WEIGHTS), "in_kinds has 1 entries for 2"),
    (kinds_of(("batch", "same"), X, WEIGHTS), "'batch' is no kind ... Kind.SPLIT"),
    (
        of_workers(with_statistics, X, has_aux=True, aux_kinds=SHARED),
        "aux['statistics'] is an array of shape (6,) ... SHARED is for numbers ... aux_kinds=",
    ),
    (
        of_workers(with_statistics, X, has_aux=True),
        "aux['statistics'] is an array ... what becomes of it is not given ... aux_kinds=",
    ),
    (
        lambda: grad_of(of_net, has_aux=True)(net(nnx.BatchNorm(32, rngs=nnx.Rngs(0))), X),
        "state of its own: ... mean ... training.place( ... make_train_step what from_nnx",
    ),
    (
        lambda: lc.mesh.inner({"w": P("data")}),
        "give a PartitionSpec, a NamedSharding or a Mesh",
    ),
]


@pytest.mark.parametrize(("build", "words"), REFUSED)
def test_what_no_worker_can_have_is_refused(build, words):
    with pytest.raises((ValueError, TypeError), match=in_order(words)):
        build()


def test_a_key_that_the_loss_closes_over_is_warned_of():
    words = "closes over the random key 'key', so all workers draw the same"
    key = jax.random.key(0)
    with pytest.warns(UserWarning, match=words):
        grad_of(lambda params, batch: plain(params, batch) * jax.random.normal(key))
    with pytest.warns(UserWarning, match="closes over the random key 'scale'"):
        grad_of(functools.partial(weighted, scale=jax.random.PRNGKey(0)))
    with pytest.warns(
        UserWarning, match=in_order("'key' ... is SHARED: all workers ... FOLDED_KEY")
    ):
        grad_of(dropped, in_kinds=(SPLIT, SHARED))(PARAMS, X, RAW)


def dropped(params, x, key):
    return plain(params, x * jax.random.bernoulli(key, 0.5, x.shape))


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
