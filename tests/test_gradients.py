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
    grad_fn = lc.worker_value_and_grad(with_aux, mesh, axis_name="data", has_aux=True, specs=SPECS)
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
    grad_fn = lc.worker_value_and_grad(noise, mesh, axis_name="data", has_aux=True, specs=SPECS)
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
        ((np.zeros((6, 6), np.float32),), r"\[0\] has shape \(6, 6\).*4 workers"),
        ((data(), np.zeros(2, np.uint32)), r"\[1\] looks like a raw random key"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(batch, message):
    grad_fn = lc.worker_value_and_grad(loss, mesh_of(), axis_name="data", specs=SPECS)
    with pytest.raises(ValueError, match=message):
        grad_fn(PARAMS, *batch)
