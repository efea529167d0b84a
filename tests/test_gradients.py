"""Gradients of each worker as global arrays, for trainers under ``jax.jit``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax.traffic.compiled import collectives

W, ROWS = 4, 3
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def mesh_of(kind="auto"):
    return jax.make_mesh((W, 2), ("data", "tp"), axis_types=(KINDS[kind],) * 2)


def data(seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(W * ROWS, 6)).astype(np.float32)


PARAMS = {"w": jnp.arange(6.0) / 8, "b": jnp.float32(0.5)}
SPECS = {"w": P("tp"), "b": P()}


def loss(params, x, scale=1.0):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2) * scale


def placed(mesh):
    return jax.tree.map(lambda s, p: jax.device_put(p, NamedSharding(mesh, s)), SPECS, PARAMS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_worker_has_the_gradient_of_its_own_rows(kind):
    mesh, x = mesh_of(kind), data()
    grad_fn = jax.jit(lc.worker_value_and_grad(loss, mesh, axis_name="data", specs=SPECS))
    batch = jax.device_put(x, NamedSharding(mesh, P("data")))
    value, grads = grad_fn(placed(mesh), batch, 2.0)
    rows = x.reshape(W, ROWS, 6)
    each = [jax.value_and_grad(loss)(PARAMS, rows[i], 2.0) for i in range(W)]
    np.testing.assert_allclose(value, np.mean([v for v, _ in each]), rtol=1e-6)
    for name in PARAMS:
        np.testing.assert_allclose(grads[name], [g[name] for _, g in each], rtol=1e-5)
    assert grads["w"].sharding.is_equivalent_to(NamedSharding(mesh, P("data", "tp")), 2)
    across = [
        one
        for one in collectives(grad_fn.lower(placed(mesh), batch, 2.0).compile(), mesh)
        if "data" in one.axes
    ]
    assert [one.payload_bytes for one in across] == [4]  # the loss


def test_what_a_loss_says_besides_comes_back_as_of_the_whole_batch():
    def with_aux(params, x, y):
        out = x @ params["w"]
        return jnp.mean(out), {"out": out, "mean": jnp.mean(out), "right": jnp.sum(out > y)}

    x, mesh = data(), mesh_of()
    grad_fn = lc.worker_value_and_grad(
        with_aux,
        lc.Workers(mesh, "data"),
        has_aux=True,
        specs=SPECS,
        aux_kinds=lc.training.batch,
    )
    (value, aux), _ = jax.jit(grad_fn)(placed(mesh), x, 0.25)
    out = x @ np.asarray(PARAMS["w"])
    np.testing.assert_allclose(aux["out"], out, rtol=1e-5)
    np.testing.assert_allclose([value, aux["mean"]], [out.mean()] * 2, rtol=1e-5)
    assert int(aux["right"]) == (out > 0.25).sum()
    assert list(aux) == ["mean", "out", "right"]


def test_every_worker_folds_a_key_of_its_own():
    def noise(params, x, key):
        return jnp.sum(params["b"]), jax.random.normal(key, x.shape[:1])

    mesh = mesh_of()
    workers = lc.Workers(mesh, "data")
    grad_fn = lc.worker_value_and_grad(
        noise, workers, has_aux=True, specs=SPECS, aux_kinds=lc.training.batch
    )
    (_, drawn), _ = jax.jit(grad_fn)(placed(mesh), data(), jax.random.key(3))
    assert len({row.tobytes() for row in np.asarray(drawn).reshape(W, ROWS)}) == W


def test_each_device_of_a_group_has_a_gradient():
    mesh = lc.mesh.two_level_mesh(2)
    where = {"axis_name": "node", "group_axis": "device"}
    grad_fn = jax.jit(lc.worker_value_and_grad(loss, mesh, **where))
    x = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
    _, grads = grad_fn(PARAMS, x)
    each = [jax.grad(loss)(PARAMS, x[2 * i : 2 * i + 2])["w"] for i in range(8)]
    np.testing.assert_allclose(grads["w"], each, rtol=1e-5)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((), "give the batch as an argument of the loss"),
        ((1.0,), "give the batch as an argument of the loss"),
        ((np.zeros((6, 6), np.float32),), r"'x' has shape \(6, 6\).*4 workers"),
        (({"text": np.zeros(6)},), r"'x'\['text'\] has shape \(6,\).*4 workers"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(batch, message):
    grad_fn = lc.worker_value_and_grad(loss, mesh_of(), axis_name="data", specs=SPECS)
    with pytest.raises(ValueError, match=message):
        grad_fn(PARAMS, *batch)


# --- What arguments and results are to the workers

BATCH, SAME, OWN, FOLDED = lc.training.Kind


def weighted(params, x, weights, rng=None):
    """Weights of the columns: there are as many as the workers could cut."""
    noise = 0 if rng is None else jax.random.normal(rng, ())
    return jnp.mean((x @ params["w"] + params["b"]) ** 2) * jnp.sum(weights) + 0 * noise


@pytest.mark.parametrize("kind", KINDS)
def test_class_weights_go_whole_to_every_worker(kind):
    mesh, x, weights = mesh_of(kind), data(), np.arange(1000, dtype=np.float32) / 1000
    grad_fn = lc.worker_value_and_grad(
        weighted, lc.Workers(mesh, "data"), specs=SPECS, in_kinds=(BATCH, SAME)
    )
    value, grads = jax.jit(grad_fn)(placed(mesh), x, weights)
    rows = x.reshape(W, ROWS, 6)
    each = [jax.value_and_grad(weighted)(PARAMS, rows[i], weights) for i in range(W)]
    np.testing.assert_allclose(value, np.mean([v for v, _ in each]), rtol=1e-5)
    np.testing.assert_allclose(grads["w"], [g["w"] for _, g in each], rtol=1e-4)


@pytest.mark.parametrize(
    ("kinds", "args", "error", "message"),
    [
        (None, (data(), np.ones(1000)), ValueError, r"'x' is an array of shape \(12, 6\).*in_kinds="),
        ((BATCH, None), (data(), {"c": np.ones(8)}), ValueError, r"'weights'\['c'\] is an array"),
        (None, (1.0, np.zeros(2, np.uint32)), ValueError, "'weights' looks like a raw random key"),
        ((BATCH, None), (data(), np.zeros(2, np.uint32)), ValueError, "'weights' looks like a raw"),
        ((SAME, SAME), (data(), np.ones(8)), ValueError, "give the batch as an argument"),
        ((BATCH, OWN), (data(), np.ones(8)), ValueError, r"'weights' has shape \(8,\).*dimension of 4"),
        ((BATCH, OWN), (data(), 1.0), ValueError, "'weights' is a number"),
        ((BATCH, FOLDED), (data(), np.ones(8)), ValueError, "'weights' is folded, but no typed"),
        ((BATCH,), (data(), np.ones(8)), TypeError, "in_kinds has 1 entries for 2"),
        (("batch", "same"), (data(), np.ones(8)), TypeError, "'batch' is no kind.*training.batch"),
    ],
)  # fmt: skip
def test_an_array_whose_kind_is_missing_or_wrong_is_named(kinds, args, error, message):
    workers = lc.Workers(mesh_of(), "data")
    grad_fn = lc.worker_value_and_grad(weighted, workers, specs=SPECS, in_kinds=kinds)
    with pytest.raises(error, match="(?s)" + message):
        grad_fn(PARAMS, *args)


def test_model_state_of_each_worker_passes_in_and_out():
    def with_state(params, model_state, batch, key):
        new = {"mean": model_state["mean"] + batch["x"].mean(0), "calls": model_state["calls"] + 1}
        return loss(params, batch["x"]) * batch["scale"], new

    x, mesh = data(), mesh_of()
    grad_fn = lc.worker_value_and_grad(
        with_state, lc.Workers(mesh, "data"), specs=SPECS, has_aux=True,
        in_kinds=(OWN, BATCH, None), aux_kinds=OWN,
    )  # fmt: skip
    before = {"mean": np.arange(4 * 6.0).reshape(4, 6), "calls": np.arange(4)}
    batch = {"x": x, "scale": 1.0}
    (_, after), _ = jax.jit(grad_fn)(placed(mesh), before, batch, jax.random.key(0))
    wanted = before["mean"] + x.reshape(W, ROWS, 6).mean(1)
    np.testing.assert_allclose(after["mean"], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(after["calls"], before["calls"] + 1)
    assert after["mean"].sharding.spec[0] == "data"


def test_keys_are_folded_shared_or_cut_as_their_kind_says():
    def draws(params, x, keys):
        bits = jax.vmap(lambda k: jax.random.bits(k))(keys.reshape(-1))
        return jnp.sum(params["b"]), bits

    mesh = mesh_of()
    found = {}
    for kind, keys in [
        (None, jax.random.key(3)),
        (SAME, jax.random.key(3)),
        (FOLDED, jax.random.key(3)),
        (BATCH, jax.random.split(jax.random.key(3), W)),
    ]:
        grad_fn = lc.worker_value_and_grad(
            draws, lc.Workers(mesh, "data"), specs=SPECS, has_aux=True,
            in_kinds=(BATCH, kind), aux_kinds=BATCH,
        )  # fmt: skip
        found[kind] = np.asarray(jax.jit(grad_fn)(placed(mesh), data(), keys)[0][1])
    assert len(set(found[None])) == W and len(set(found[SAME])) == 1
    wanted = [int(jax.random.bits(k)) for k in keys]
    np.testing.assert_array_equal(found[BATCH], wanted)


def test_a_raw_key_is_folded_where_its_kind_says_so():
    def draws(params, x, key):
        return jnp.sum(params["b"]), jax.random.bits(key)[None]

    found, mesh = [], mesh_of()
    for key in (jax.random.key(3), jax.random.PRNGKey(3)):
        grad_fn = lc.worker_value_and_grad(
            draws, lc.Workers(mesh, "data"), specs=SPECS, has_aux=True,
            in_kinds=(BATCH, FOLDED), aux_kinds=BATCH,
        )  # fmt: skip
        found.append(np.asarray(jax.jit(grad_fn)(placed(mesh), data(), key)[0][1]))
    assert len(set(found[0])) == W
    np.testing.assert_array_equal(*found)


def test_an_array_that_a_loss_returns_without_a_kind_is_named():
    def with_aux(params, x):
        return loss(params, x), {"statistics": x.mean(0)}

    workers = lc.Workers(mesh_of(), "data")
    for kinds in (None, SAME):
        grad_fn = lc.worker_value_and_grad(
            with_aux, workers, specs=SPECS, has_aux=True, aux_kinds=kinds
        )
        with pytest.raises(
            ValueError, match=r"aux\['statistics'\] is an array of shape \(6,\).*aux_kinds="
        ):
            grad_fn(PARAMS, data())
