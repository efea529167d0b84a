"""Checkpoints of the states that trainers have, and of states whose labels lie."""

import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_same, mesh_on, normal, update_of, workers_on
from flax import nnx
from flax.training.train_state import TrainState as FlaxState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_checkpoint import opened
from test_replicas import damaged

import lioncub_jax as lc
from lioncub_jax.mesh.checksum import checksums, host_checksum

PARAMS = {"w": np.arange(24, dtype=np.float32).reshape(8, 3) / 8, "b": np.ones(3, np.float32)}
BATCH = normal(16, 8)


def workers_of(count, cut=1):
    return workers_on(f"data={count} fsdp={cut}")


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


def saved(folder, state, count=4, cut=1, **options):
    with opened(folder, workers=workers_of(count, cut)) as checkpoints:
        checkpoints.save(state, **options)


def restored(folder, like, count=4, cut=1):
    with opened(folder, workers=workers_of(count, cut)) as checkpoints:
        return checkpoints.restore(like)


# --- What trainers have


class Mine(NamedTuple):
    step: Any
    params: Any
    opt_state: Any
    key: Any


def flax_state(params, opt_state):
    return FlaxState(3, loss_fn, params, optax.identity(), opt_state)


KINDS = {
    "flax": flax_state,
    "dict": lambda *of: dict(zip(("params", "opt_state"), of, strict=True), step=3, best=np.float32(0.5)),
    "tuple": lambda *of: Mine(jnp.int32(3), *of, jax.random.key(3)),
    "list of states": lambda *of: [flax_state(*of), {"epoch": 2}],
}  # fmt: skip


@functools.cache
def numbered(optimizer, count, cut=1, by=1):
    """Parameters and an optimizer's state; no two numbers of an array are the same, unless by 0."""
    workers, specs = workers_of(count, cut), {"w": P("fsdp"), "b": P()}
    tx = optimizer(0.1, workers=workers)
    params = jax.tree.map(jax.device_put, PARAMS, workers.shardings(specs))

    def number(x):
        return jax.device_put(
            x + by * jnp.arange(x.size).reshape(x.shape).astype(x.dtype), x.sharding
        )

    return jax.tree.map(number, (params, tx.init(params)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_states_of_trainers_come_back_to_the_bit_and_on_the_mesh(kind, tmp_path):
    state, like = (KINDS[kind](*numbered(lc.lion_cub, 4, by=by)) for by in (1, 0))
    lies = [getattr(x, "sharding", None) for x in jax.tree.leaves(state)]
    assert not all(isinstance(x, NamedSharding) for x in lies)  # its numbers are not on the mesh
    saved(tmp_path, state, **({"step": 3} if isinstance(state, list) else {}))
    found = restored(tmp_path, like)
    assert found.step == 3
    wanted = map(jnp.asarray, jax.tree.leaves(state))
    assert_same(found.state, jax.tree.unflatten(jax.tree.structure(like), wanted))
    assert {x.sharding.mesh for x in jax.tree.leaves(found.state)} == {workers_of(4).mesh}


def test_they_move_to_other_workers_and_shards_as_ours_do(tmp_path):
    def ours(parts, count, cut=1):
        everywhere = NamedSharding(workers_of(count, cut).mesh, P())
        step, rng = jax.device_put((jnp.int32(3), jax.random.key(0)), everywhere)
        return lc.training.StepState(step, parts[0], (), parts[1], rng)

    old, new = numbered(lc.owner_adamw, 4), numbered(lc.owner_adamw, 2, 4, 0)
    saved(tmp_path / "ours", ours(old, 4))
    saved(tmp_path / "theirs", KINDS["dict"](*old))
    wanted = restored(tmp_path / "ours", ours(new, 2, 4), 2, 4).state
    found = restored(tmp_path / "theirs", KINDS["dict"](*new), 2, 4).state
    assert_same((found["params"], found["opt_state"]), (wanted.params, wanted.opt_state))


class Normed(nnx.Linear):
    def __init__(self, rngs):
        super().__init__(8, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)


def nnx_trainer(count, optimizer=lc.owner_lion):
    workers, model = workers_of(count), Normed(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optimizer(0.1, workers=workers), wrt=nnx.Param)


def whole_of(model, opt):
    params, rest = nnx.state(model, nnx.Param, nnx.Not(nnx.Param))
    return {"params": params, "rest": rest, "optimizer": opt}


def test_an_nnx_optimizer_is_saved_whole_and_its_state_without_classes_is_refused(tmp_path):
    model, opt = nnx_trainer(4)
    model.norm.mean[...] += 2
    state = whole_of(model, opt)
    saved(tmp_path / "whole", state, step=int(opt.step[...]) + 5)
    told = (r"state.opt_state.0.owner.0.value.* holds slices of the parameters in a dict that does "
            r"not say of which, as nnx.state\(optimizer\) does: give the optimizer itself, and all of "
            r"the model, \{'params': nnx.state\(model, nnx.Param\), "
            r"'rest': .*nnx.Not\(nnx.Param\)\)")  # fmt: skip
    with pytest.raises(ValueError, match=told):
        saved(tmp_path / "lost", nnx.state(opt), step=7)
    _, voting = nnx_trainer(4, lc.lion_cub)
    saved(tmp_path / "votes", nnx.state(voting))  # arrays [workers, ...] say whose they are
    model, opt = nnx_trainer(2)
    model.kernel[...] += 1
    found = restored(tmp_path / "whole", whole_of(model, opt), 2)
    assert found.step == 5
    nnx.update(model, found.state["params"], found.state["rest"])
    assert (model.norm.mean[...] == 2).all()
    np.testing.assert_array_equal(model.kernel[...], state["params"]["kernel"][...])
    assert isinstance(found.state["optimizer"], nnx.Optimizer)
    assert found.state["optimizer"].opt_state[0].count[...] == 0


def test_frozen_layers_of_an_nnx_module_move_to_other_workers_as_those_of_a_tree_do(tmp_path):
    def trained(count, by):
        """An nnx optimizer and the state of a plain tree, both after a step with these gradients."""
        model, workers = Normed(nnx.Rngs(0)), workers_of(count)
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        tx = partly(0.1, workers=workers)
        opt = nnx.Optimizer(model, tx, wrt=nnx.Param)
        grads = jax.tree.map(lambda p: by * numbers(count, *p.shape), params)

        def update(model, opt, grads):
            state = nnx.state(model, nnx.Param)
            nnx.replace_by_pure_dict(state, jax.tree.map(lambda g: g[0], grads))
            opt.update(model, state)

        lc.map_step(update, workers)(model, opt, grads)
        updates, opt_state = update_of(tx, workers)(grads, tx.init(params), params)
        tree = {"params": optax.apply_updates(params, updates), "opt_state": opt_state, "step": 1}
        return whole_of(model, opt), tree

    def numbers(*shape):
        return jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape) % 7 - 3

    for name, state in zip(("module", "tree"), trained(4, 1.0), strict=True):
        saved(tmp_path / name, state, step=1)
    like = trained(2, 0.0)
    module = restored(tmp_path / "module", like[0], 2).state["optimizer"].opt_state
    tree = restored(tmp_path / "tree", like[1], 2).state["opt_state"]
    found, wanted = jax.tree.leaves(module), jax.tree.leaves(tree)
    assert len(found) == len(wanted) and any(np.any(np.asarray(x)) for x in wanted)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(x, y)


def partly(rate, *, workers):
    """Adam at the owner for the kernel and the bias, and a norm that is frozen."""

    def label(path, _):
        return "frozen" if "norm" in str(path[0]) else "train"

    def labels(params):
        if isinstance(params, nnx.State):
            return nnx.map_state(label, params)
        return jax.tree.map_with_path(label, params)

    tx = {"train": lc.owner_adamw(rate, workers=workers), "frozen": optax.set_to_zero()}
    return optax.partition(tx, labels)


@pytest.mark.parametrize("group", [None, "dev"])
def test_what_is_restored_has_the_dtype_that_it_had_and_no_moment_is_rounded(group, tmp_path):
    """Of parameters in bfloat16: moments at owners are float32, errors of workers are not."""
    workers = workers_on("data=2 dev=2", group) if group else workers_of(4)
    tx = lc.owner_adamw(0.1, workers=workers)
    first = lc.init_state(tx, {"w": jnp.ones((8, 96), jnp.bfloat16)}, workers)
    thirds = jax.tree.map(
        lambda x: x + jnp.asarray(1 / 3).astype(x.dtype), first.opt_state[0].owner
    )
    state = first._replace(
        opt_state=(first.opt_state[0]._replace(owner=thirds), *first.opt_state[1:])
    )
    with lc.Checkpoints(tmp_path, workers=workers) as checkpoints:
        checkpoints.save(state, wait=True)
        found = checkpoints.restore(first).state
    assert [x.dtype for x in jax.tree.leaves(found)] == [x.dtype for x in jax.tree.leaves(first)]
    (before, after) = (lc.checkpoint.portable(x, workers) for x in (state, found))
    assert_same(after["opt_state"], before["opt_state"])


# --- Labels that lie


def unchecked(tx):
    def step(params, opt_state, batch):
        grads = lc.local_value_and_grad(loss_fn, workers="data")(params, batch)[1]
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    specs = {"in_specs": (P(), P(), P("data")), "out_specs": P(), "check_vma": False}
    return jax.jit(jax.shard_map(step, mesh=workers_of(4).mesh, **specs))


LET_OUT = (
    r"Let it out of jax.pmap with out_axes=0, or of jax.shard_map with out_specs=P\('data',\), "
    r"as \[workers, ...\]"
)
LIES = {
    "momentum of one worker": (
        lc.lion_cub(0.1, workers="data"),
        r"state.opt_state.0.mu.b has shape \(3,\) and is not cut over the workers, but each of 4 has its "
        r"own, and a checkpoint would keep that of one. " + LET_OUT,
    ),
    "state of a transform that says nothing": (
        optax.chain(optax.trace(0.9), lc.global_gradients(optax.sgd(0.1), workers="data")),
        r"state.opt_state.0.trace.b \(one of 2\) is labelled one value and differs between devices 0 and "
        r"1: each worker has its own, .* " + LET_OUT,
    ),
    "parameters that drift apart": (
        optax.sgd(0.1, 0.9),  # whose momentum differs too
        r"parameters differ between devices 0 and 1, state.params.b \(one of 4\), and a checkpoint would "
        r"keep one copy .* check_vma=True, .* from one copy",
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_what_differs_under_one_label_is_no_checkpoint(lie, tmp_path):
    tx, told = LIES[lie]
    params, opt_state = unchecked(tx)(PARAMS, tx.init(PARAMS), BATCH)
    with pytest.raises(ValueError, match=told):
        saved(tmp_path, {"step": 1, "params": params, "opt_state": opt_state})


DTYPES = "float32", "bfloat16", "int8", "bool", "complex64"
ONE_COPY = P(("data", "tp"), "fsdp")


@pytest.mark.parametrize(
    "spec", [P(), P("fsdp"), P(None, "data"), P(("tp", "data")), P("data", "tp"), ONE_COPY]
)
def test_one_bit_of_one_copy_is_found_and_the_sum_is_the_same_however_it_lies(spec):
    mesh = mesh_on("fsdp=2 data=2 tp=2")
    given = np.random.default_rng(1).integers(0, 2, (8, 4))
    given = {dtype: given.astype(jnp.dtype(dtype)) for dtype in DTYPES}
    whole = jax.device_put(given, NamedSharding(mesh, spec))
    wrong = {dtype: damaged(x, 6, at=-1, flip=1 << 24) for dtype, x in whole.items()}
    (sums, unequal), (sums_of_wrong, unequal_in_wrong) = checksums(whole)(), checksums(wrong)()
    assert checksums(jax.device_put(given, NamedSharding(mesh, P())))() == (sums, unequal)
    assert sums == {dtype: host_checksum(x) for dtype, x in given.items()}
    assert not unequal
    if spec == ONE_COPY:
        assert not unequal_in_wrong and all(sums_of_wrong[x] != sums[x] for x in DTYPES)
        return
    for dtype in DTYPES:
        ids = unequal_in_wrong[dtype]
        assert 6 in ids
        one, other = (s.data for s in whole[dtype].addressable_shards if s.device.id in ids)
        np.testing.assert_array_equal(one, other)  # they should hold the same


def test_sums_are_what_they_were():
    """Else checkpoints of earlier versions would be damaged."""
    mesh = workers_of(4).mesh
    x = jax.device_put(np.arange(24, dtype=np.float32).reshape(8, 3), NamedSharding(mesh, P()))
    assert checksums({"x": x})()[0] == {"x": (3484950160, 3732619700)}


# --- Names in files


def workers_in_groups(sizes):
    return workers_on(sizes, "dev")


def grouped(sizes, by):
    """A synced state of `owner_adamw` in groups, no two numbers of which are the same unless by 0."""
    workers = workers_in_groups(sizes)
    params = {"layer": {"kernel": jnp.zeros((6, 40)), "bias": jnp.zeros(5)}}
    tx = lc.owner_adamw(0.1, workers=workers)
    state = lc.init_state(tx, params, workers, model_state={"mean": jnp.zeros(2)})
    step = lc.make_train_step(one_gradient, tx, workers)
    for _ in range(2 * by):
        state, _ = step(state, np.arange(8, dtype=np.float32))
    return state


def one_gradient(params, model_state, batch, rng):
    layer, factor = params["layer"], jnp.mean(batch) + 1
    kernel = jnp.sum(layer["kernel"] * jnp.arange(240.0).reshape(6, 40))
    return factor * (kernel + jnp.sum(layer["bias"])), {}, {"mean": model_state["mean"] + 1}


def test_a_committed_checkpoint_is_read_whatever_classes_and_fields_are_called_now():
    """A name that is in files stays there: who renames a field keeps it in `checkpoint.convert`."""
    folder = Path(__file__).parent / "data" / "checkpoint"
    assert lc.Checkpoints(folder, workers=workers_in_groups("data=2 dev=2")).steps() == [2]
    for sizes in ("data=2 dev=2", "data=4 dev=2"):
        like = grouped(sizes, 0)
        found = lc.Checkpoints(folder, workers=workers_in_groups(sizes)).restore(like)
        assert found.data == {"next": (3, None)} and found.step == 2
        moments = found.state.opt_state[0].owner[0].value.inner
        assert moments.count == 2 and np.count_nonzero(moments.nu) > 200
        assert (found.state.model_state["mean"] == 2).all()
        assert np.count_nonzero(found.state.params["layer"]["kernel"]) > 200
    assert_same(found.state.params, grouped("data=2 dev=2", 1).params, rtol=1e-6)
