"""Checkpoints of the states that trainers have, and of states whose labels lie."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState as FlaxState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax.checkpoint import Checkpoints
from lioncub_jax.mesh.sums import checksums

PARAMS = {"w": np.arange(24, dtype=np.float32).reshape(8, 3) / 8, "b": np.ones(3, np.float32)}
BATCH = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


def workers_of(count, kind=AxisType.Auto, cut=1):
    devices = jax.devices()[: count * cut]
    mesh = jax.make_mesh((count, cut), ("data", "fsdp"), axis_types=(kind,) * 2, devices=devices)
    return lc.Workers(mesh, "data")


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


def refuses(match, call, kind=ValueError):
    with pytest.raises(kind, match=match):
        call()


# --- What trainers have


class Mine(NamedTuple):
    step: Any
    params: Any
    opt_state: Any
    key: Any


def flax_state(params, opt_state, tx):
    return FlaxState(3, loss_fn, params, tx, opt_state)


KINDS = {
    "flax": flax_state,
    "dict": lambda params, opt_state, tx: {
        "step": 3, "params": params, "opt_state": opt_state, "best": np.float32(0.5)
    },
    "tuple": lambda *parts: Mine(jnp.int32(3), *parts[:2], jax.random.key(3)),
    "list of states": lambda *parts: [flax_state(*parts), {"epoch": 2}],
}  # fmt: skip
OPTIMIZERS = {"lion cub": lc.lion_cub, "owner lion": lc.owner_lion}


@functools.cache
def made(kind, optimizer, count, cut=1, steps=3):
    """A trainer's state of some kind, after some steps."""
    workers = workers_of(count, cut=cut)
    specs = {"w": P("fsdp"), "b": P()}
    tx = lc.on_mesh(OPTIMIZERS[optimizer](0.1, axis_name=workers), workers, specs=specs)
    params = jax.tree.map(jax.device_put, PARAMS, workers.shardings(specs))
    opt_state = tx.init(params)
    grad_fn = jax.jit(lc.worker_value_and_grad(loss_fn, workers, specs=specs))
    for _ in range(steps):
        grads = grad_fn(params, BATCH)[1]
        updates, opt_state = jax.jit(tx.update)(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return KINDS[kind](params, opt_state, tx)


def saved(folder, state, **options):
    with Checkpoints(folder, axis_name="data") as checkpoints:
        checkpoints.save(state, wait=True, **options)


def restored(folder, like):
    with Checkpoints(folder, axis_name="data") as checkpoints:
        return checkpoints.restore(like)


def plain(tree):
    found = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
    keys = [
        path for path, x in found.items() if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
    ]
    found |= {path: jax.random.key_data(found[path]) for path in keys}
    return jax.tree.map(np.asarray, found)


@pytest.mark.parametrize("kind", KINDS)
def test_the_states_of_trainers_come_back_to_the_bit_and_on_the_mesh(kind, tmp_path):
    state, like = (made(kind, "lion cub", 4, steps=steps) for steps in (3, 0))
    # Its numbers are not on the mesh; a list has no step.
    assert any(
        not isinstance(getattr(x, "sharding", None), NamedSharding) for x in jax.tree.leaves(state)
    )
    saved(tmp_path, state, **({"step": 3} if isinstance(state, list) else {}))
    found = restored(tmp_path, like)
    assert found.step == 3
    assert jax.tree.structure(found.state) == jax.tree.structure(like)
    got, wanted = plain(found.state), plain(state)
    assert got.keys() == wanted.keys()
    for path, x in wanted.items():
        np.testing.assert_array_equal(got[path], x, err_msg=path)
    meshes = {x.sharding.mesh for x in jax.tree.leaves(found.state)}
    assert meshes == {workers_of(4).mesh}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["flax", "dict"])
def test_they_move_to_other_workers_and_shards_as_ours_do(kind, optimizer, tmp_path):
    state, like = made(kind, optimizer, 4), made(kind, optimizer, 2, cut=4, steps=0)
    saved(tmp_path / "theirs", state)
    found = restored(tmp_path / "theirs", like).state

    def as_ours(state, count, cut=1):
        held = state if isinstance(state, dict) else vars(state)
        everywhere = NamedSharding(workers_of(count, cut=cut).mesh, P())
        step, rng = jax.device_put((jnp.int32(3), jax.random.key(0)), everywhere)
        return lc.TrainState(step, held["params"], (), held["opt_state"], rng)

    saved(tmp_path / "ours", as_ours(state, 4))
    ours = restored(tmp_path / "ours", as_ours(like, 2, 4)).state
    for field in ("params", "opt_state"):
        got = plain(found[field] if isinstance(found, dict) else getattr(found, field))
        for path, x in plain(getattr(ours, field)).items():
            np.testing.assert_array_equal(got[path], x, err_msg=path)


def nnx_trainer(count, optimizer):
    workers, model = workers_of(count), nnx.Linear(8, 3, rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    tx = OPTIMIZERS[optimizer](0.1, axis_name=workers)
    tx = lc.on_mesh(tx, workers, specs=lc.mesh.specs_of(params))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_nnx_optimizer_is_saved_whole(optimizer, tmp_path):
    model, opt = nnx_trainer(4, optimizer)
    state = {"params": nnx.state(model, nnx.Param), "optimizer": opt}
    saved(tmp_path, state, step=int(opt.step[...]) + 5)
    model, opt = nnx_trainer(2, optimizer)
    model.kernel[...] += 1
    found = restored(tmp_path, {"params": nnx.state(model, nnx.Param), "optimizer": opt})
    assert found.step == 5
    nnx.update(model, found.state["params"])
    np.testing.assert_array_equal(model.kernel[...], state["params"]["kernel"][...])
    assert isinstance(found.state["optimizer"], nnx.Optimizer)
    assert found.state["optimizer"].opt_state[0].count[...] == 0


def test_an_nnx_state_of_slices_is_refused(tmp_path):
    _, opt = nnx_trainer(4, "lion cub")
    saved(tmp_path, nnx.state(opt))  # arrays [workers, ...] say whose they are
    _, opt = nnx_trainer(4, "owner lion")
    refuses(r"state\['opt_state'\]\[0\] holds slices of the parameters in a dict that does not say of "
            r"which, as nnx.state\(optimizer\) does: give the optimizer itself",
            lambda: saved(tmp_path, nnx.state(opt), step=7))  # fmt: skip


# --- Labels that lie


def step_of(tx, params, opt_state, batch):
    grads = lc.local_value_and_grad(loss_fn, "data")(params, batch)[1]
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def unchecked(tx, *, mesh):
    return jax.jit(
        jax.shard_map(
            functools.partial(step_of, tx), mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P(),
            check_vma=False,
        )
    )  # fmt: skip


def mapped(tx, *, mesh):
    devices = list(mesh.devices.flat)
    step = jax.pmap(functools.partial(step_of, tx), "data", in_axes=(None, None, 0), out_axes=None,
                    devices=devices)  # fmt: skip
    return lambda params, state, batch: step(params, state, batch.reshape(len(devices), -1, 8))


def labelled(make, tx, folder):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    params, opt_state = make(tx, mesh=mesh)(PARAMS, tx.init(PARAMS), BATCH)
    saved(folder, {"step": 1, "params": params, "opt_state": opt_state})


@pytest.mark.parametrize("make", [unchecked, mapped])
def test_momentum_of_one_worker_is_no_checkpoint(make, tmp_path):
    told = (r"state\['opt_state'\]\[0\].mu\['b'\] has shape \(3,\) and is not cut over the workers, but "
            r"each of 4 has its own, and a checkpoint would keep that of one. Let it out of jax.pmap with "
            r"out_axes=0, or of jax.shard_map with out_specs=P\('data',\), as \[4, ...\]")  # fmt: skip
    refuses(told, lambda: labelled(make, lc.lion_cub(0.1, axis_name="data"), tmp_path))


@pytest.mark.parametrize("make", [unchecked, mapped])
def test_state_that_differs_under_one_label_is_no_checkpoint(make, tmp_path):
    """Of a transform that says nothing of whose its state is."""
    tx = optax.chain(optax.trace(0.9), lc.global_gradients(optax.sgd(0.1), "data"))
    told = (
        r"save\(state\): state\['opt_state'\]\[0\].trace\['b'\] \(and 1 more\) is labelled one value "
        r"and differs between devices 0 and 1: each worker has its own, .* Let it out of jax.pmap with "
        r"out_axes=0, or of jax.shard_map with out_specs=P\('data',\), as \[workers, ...\]"
    )
    refuses(told, lambda: labelled(make, tx, tmp_path))


@pytest.mark.parametrize("make", [unchecked, mapped])
def test_parameters_that_drift_apart_are_no_checkpoint(make, tmp_path):
    told = (
        r"save\(state\): parameters differ between devices 0 and 1, state\['params'\]\['b'\] \(and 1 "
        r"more\), and a checkpoint would keep one copy .* check_vma=True, .* from one copy"
    )
    refuses(told, lambda: labelled(make, optax.sgd(0.1), tmp_path))


def with_copies(x, spec, mesh, change):
    """An array that is labelled by ``spec``, with what ``change`` makes of the part of each device."""
    sharding = NamedSharding(mesh, spec)
    index = sharding.addressable_devices_indices_map(x.shape)
    parts = [jax.device_put(change(d.id, x[i].copy()), d) for d, i in index.items()]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)


def one_bit(device, x):
    if device == 6:
        x.view(np.uint8).reshape(-1)[-1] ^= 1
    return x


SPECS = [P(), P("fsdp"), P(None, "data"), P(("tp", "data")), P("data", "tp")]


@pytest.mark.parametrize("spec", [*SPECS, P(("data", "tp"), "fsdp")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64"])
def test_one_bit_of_one_copy_is_found_and_the_sum_is_the_same_however_it_lies(spec, dtype):
    kinds = (AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 2), ("fsdp", "data", "tp"), axis_types=kinds)
    x = np.random.default_rng(1).integers(0, 2, (8, 4)).astype(jnp.dtype(dtype))
    whole = with_copies(x, spec, mesh, lambda _, part: part)
    sums, apart = checksums({"x": whole})
    alone, _ = checksums({"x": with_copies(x, P(), mesh, lambda _, part: part)})
    assert sums == alone and not apart
    sums, apart = checksums({"x": with_copies(x, spec, mesh, one_bit)})
    if spec in SPECS:
        assert 6 in apart["x"]
        one, other = (np.asarray(s.data) for d in apart["x"] for s in whole.addressable_shards
                      if s.device.id == d)  # fmt: skip
        assert (one == other).all()  # they should hold the same
    else:
        assert not apart and sums != alone  # there is one copy


def test_sums_are_what_they_were():
    """Else checkpoints of earlier versions would be damaged."""
    mesh = workers_of(4).mesh
    x = jax.device_put(np.arange(24, dtype=np.float32).reshape(8, 3), NamedSharding(mesh, P()))
    assert checksums({"x": x})[0] == {"x": [3011141850, 568641112]}
