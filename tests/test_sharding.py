"""Meshes of several axes: each device votes on its own shard or slice, and nothing else moves.

Updates are compared with the `oracle`, which is run on every shard as on a tree of its own; gradients are
small integers and betas powers of two, so that sums are exact. What travels is in test_accounting.py.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import in_order, mesh_on, run_on_mesh, scanned
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import coding
from test_against_reference import B1, B2, Method

import lioncub_jax as lc
from lioncub_jax.mesh.axes import all_finite, total_over_shards

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def on(sizes, kind=AUTO):
    """The workers of a mesh such as ``"data=4 tp=2"``; devices along an axis gpu are of one worker."""
    mesh = mesh_on(sizes, kind)
    voters = tuple(name for name in mesh.axis_names if name in ("pod", "data", "node"))
    return lc.Workers(mesh, voters, "gpu" if "gpu" in mesh.axis_names else None)


def inner_axes(workers):
    return [name for name in workers.mesh.axis_names if name not in workers.axes]


def group_size(workers):
    return workers.mesh.shape.get(workers.group, 1)


# Ragged shards, shards below a word, replicated ones; and the axes that cut each dimension, if they are
# there.
LEAVES = {
    "both": ((16, 24), ("fsdp", "tp")),
    "below a word": ((4, 3), ("tp",)),
    "bias": ((8,), ("fsdp",)),
    "empty": ((0, 4), ("", "tp")),
    "one dimension": ((64, 5), ("fsdp tp",)),
    "ragged": ((12, 20), ("", "tp")),
    "replicated": ((3, 43), ()),
    "scalar": ((), ()),
    "long": ((4, 100), ("tp",)),
}
# More than 512 rows of 128 on a device lie by themselves, and small ones behind them.
LARGE = {"a": ((10, 6), ("", "tp")), "large": ((2, 140_000), ("", "tp")), "z": ((300, 4), ())}


def specs_of(leaves, workers):
    inner = inner_axes(workers)
    return {
        name: P(*[tuple(axis for axis in cut.split() if axis in inner) or None for cut in cuts])
        for name, (_, cuts) in leaves.items()
    }


# --- The reference on every shard


class Bucket(NamedTuple):
    """Leaves that travel together, and where their words lie; read from the documentation of the layout."""

    names: list
    axes: list  # over which words differ: those that cut the leaves, and the group's
    first_row: int
    slice_rows: int  # rows that one device holds: all, or a group's share of them


def chunk_rows(sizes, parts):
    """How many rows each of so many parts takes of leaves that are joined in one buffer."""
    rows = coding.buffer_of([np.zeros((1, size)) for size in sizes]).rows
    return coding.chunk_rows(sum(rows), parts, max(rows) > coding.BIG)


def buckets_of(sizes, specs, workers):
    """Leaves that are cut over the same axes are a bucket, in the order of the axes' names; all rows."""
    mesh, groups = workers.mesh.shape, {}
    for name in sorted(filter(sizes.get, sizes)):
        cut = {axis for axis in jax.tree.leaves(tuple(specs[name])) if mesh[axis] > 1}
        groups.setdefault(tuple(sorted({*cut, *workers.axes})), []).append(name)
    voters = workers.num_gradients // group_size(workers)
    found, rows = [], 0
    for axes, names in sorted(groups.items()):
        own = [sizes[name] for name in names]
        share = chunk_rows(own, group_size(workers))
        apart = {*inner_axes(workers), workers.group}
        found.append(Bucket(names, [a for a in axes if a in apart], rows, share))
        rows += voters * chunk_rows([128 * share] if workers.group else own, voters)
    return found, rows


def expected(oracle, workers, specs, grads, absent):
    """Updates ``[steps, ...]`` of the shards, by places on the inner axes; and counts of the last."""
    mesh = workers.mesh
    lies = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    index = {n: lies[n].devices_indices_map(g.shape[2:]) for n, g in grads.items()}
    sizes = {n: math.prod(lies[n].shard_shape(g.shape[2:])) for n, g in grads.items()}
    buckets, rows = buckets_of(sizes, specs, workers)
    found, counted = {}, 0
    for at, device in np.ndenumerate(mesh.devices):
        here = dict(zip(mesh.axis_names, at, strict=True))
        updates = found.setdefault(tuple(here[axis] for axis in inner_axes(workers)), {})
        for bucket in () if updates else buckets:
            part = np.zeros(group_size(workers), np.int64)
            for axis in bucket.axes:
                own = np.arange(len(part)) if axis == workers.group else here[axis]
                part = part * mesh.shape[axis] + own
            first_words = (4 * (bucket.first_row + part * rows)).astype(np.uint32)
            shards = {name: grads[name][:, :, *index[name][device]] for name in bucket.names}
            own, each = run_reference(oracle, shards, absent, first_words, bucket.slice_rows)
            updates |= own
            copies = [here[axis] for axis in inner_axes(workers) if axis not in bucket.axes]
            counted += 0 if any(copies) else each[-1]
    return found, counted


@functools.partial(jax.jit, static_argnums=(0, 4))
def run_reference(simulator, grads, absent, first_words, slice_rows):
    """Updates ``[steps, ...]``; ties, alike pairs and pairs ``[steps, 3]``; compiled once for a shape."""

    def places(rows, workers, big):
        if len(first_words) == 1:
            return coding.words(rows, workers, big, first_words[0])
        big = slice_rows > coding.BIG
        slices = [coding.words(slice_rows, workers, big, first) for first in first_words]
        return [jnp.concatenate(x)[:rows] for x in zip(*slices, strict=True)]

    params = jax.tree.map(lambda g: jnp.zeros(g.shape[2:]), grads)

    here = simulator._replace(update=functools.partial(simulator.update, places=places))
    first = simulator.init(params, absent.shape[1])
    updates, states = scanned({0: here}, {0: first}, params, grads, absent)[0]
    pairs = states.get("pairs", 0 * states.ties)
    alike = states.get("agreement", 0.0) * pairs
    return updates, jnp.stack([states.ties, alike, pairs], axis=1)


# --- Updates


METHODS = {
    "sign": Method("sign()", "majority").of_workers,
    "ternary": Method("ternary()", "ternary").of_workers,
    "average": Method("sign()", "average").of_workers,
    "owner": Method("midrise(2)", "sign").of_owners,
    "owes": Method("error_feedback(midrise(2), float32)", "sign").of_owners,
    "dense": Method("dense()", "sign").of_owners,
}


def story(workers, leaves):
    """Gradients ``[4, W, G, ...]`` of integers whose means over a group are whole; who abstains."""
    rng, group = np.random.default_rng(0), group_size(workers)
    lead = 4, workers.num_gradients // group, group
    grads = {
        name: group * rng.integers(-2, 3, (*lead, *shape)).astype(np.float32)
        for name, (shape, _) in leaves.items()
    }
    first, *_, last = grads
    grads[last][:, 0] = 0  # a worker that has nothing to say of some rows
    grads[first][2, -1, 0, 3, 3] = np.inf
    abstain = np.zeros(lead[:2], bool)
    abstain[1, 0] = True
    return grads, abstain


CASES = [
    ("tp=2 data=4 fsdp=1", EXPLICIT, "sign owner", LEAVES),
    ("data=2 fsdp=2 tp=2", AUTO, "owner average", LEAVES),
    ("data=1 tp=4", AUTO, "sign owner", LEAVES),
    ("node=2 gpu=4", AUTO, "ternary dense", LEAVES),
    ("node=2 gpu=2 tp=2", EXPLICIT, "sign owes", LEAVES),
    ("data=4 tp=2", AUTO, "sign", LARGE),
    ("node=4 gpu=2", AUTO, "owner", LARGE),
    pytest.param("node=1 gpu=4", AUTO, "sign owner", LEAVES, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("sizes", "kind", "methods", "leaves"), CASES)
def test_updates_are_those_of_the_reference(sizes, kind, methods, leaves):
    workers = on(sizes, kind)
    specs, (grads, abstain) = specs_of(leaves, workers), story(workers, leaves)
    pairs = {method: METHODS[method](None, workers) for method in methods.split()}
    txs = {method: tx for method, (tx, _) in pairs.items()}
    rows = {n: g.reshape(len(g), workers.num_gradients, *g.shape[3:]) for n, g in grads.items()}
    each = np.repeat(abstain, group_size(workers), axis=1)
    done = run_on_mesh(txs, workers, specs, rows, each)
    means = {name: g.mean(2) for name, g in grads.items()}
    absent = abstain | ~np.isfinite(next(iter(means.values()))).all((2, 3))
    for method, (_, oracle) in pairs.items():
        want, counted = expected(oracle, workers, specs, means, absent)
        got, state = done[method]
        for name, x in got.items():
            if x.size:  # XLA replicates what is empty
                lies = NamedSharding(workers.mesh, P(None, *specs[name]))
                assert x.sharding.is_equivalent_to(lies, x.ndim), (method, name)
                compare_shards(x, name, workers, want, method)
        assert any(map(np.any, got.values()))
        found = lc.metrics(state)
        assert int(found["votes/abstentions"]) == absent.sum()
        ties, alike, pairs = counted
        assert float(found["votes/ties"]) == pytest.approx(
            ties / sum(g[0, 0].size for g in means.values())
        )
        share = alike / pairs if pairs else math.nan  # of one worker there are none
        told = float(found.get("votes/agreement", math.nan))
        assert told == pytest.approx(share, nan_ok=True)


def compare_shards(x, name, workers, want, method):
    inner = [workers.mesh.axis_names.index(axis) for axis in inner_axes(workers)]
    places = {device: at for at, device in np.ndenumerate(workers.mesh.devices)}
    for shard in x.addressable_shards:
        at = tuple(places[shard.device][axis] for axis in inner)
        np.testing.assert_array_equal(shard.data, want[at][name], err_msg=f"{method}, {name}")


# --- Counts


@pytest.mark.parametrize("sizes", ["data=2 tp=3", "data=1 tp=7"])
def test_what_all_devices_of_a_worker_have_is_counted_once(sizes):
    """Exactly: a count that is divided by their number and added up again is another."""
    workers = on(sizes)
    shape = *workers.mesh.devices.shape, 64
    own = np.random.default_rng(0).integers(2**20, size=shape).astype(np.uint32)
    copies = own[:, 0]

    def total(own, copies):
        return total_over_shards([own[0, 0], copies[0]], [*copies[0]], ("data",))[None]

    specs = {"in_specs": (P("data", "tp"), P("data")), "out_specs": P("data")}
    found = jax.jit(jax.shard_map(total, mesh=workers.mesh, **specs))(own, copies)
    np.testing.assert_array_equal(found, np.concatenate([own.sum(1) + copies, copies], 1))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_what_is_not_finite_is_seen_on_every_shard(kind):
    workers = on("data=2 tp=4", kind)
    for bad in (np.nan, np.inf, -np.inf):
        x = np.ones((2, 8), np.float32)
        x[1, 5] = bad
        lies = workers.shardings(P("data", "tp"))
        found = jax.jit(all_finite)(jax.device_put({"x": x, "y": np.abs(x) > 0}, lies))
        assert not found, bad
    assert all_finite({}) and all_finite([x[0], x[:, :4]])


# --- Whole leaves, and what of them is cut


def updated(tx, workers, grads, specs):
    """The first update of parameters that are zeros, and the state behind it."""
    once = jax.tree.map(lambda g: g[None].astype(np.float32), grads)
    found, state = run_on_mesh({0: tx}, workers, specs, once)[0]
    return jax.tree.map(lambda u: u[0], found), state


def test_chains_see_whole_gradients_and_momenta_are_averaged_over_all_shards():
    """A norm over a shard would be smaller, and clip less."""
    workers, rng = on("data=4 tp=2", EXPLICIT), np.random.default_rng(0)
    grads = {"w": rng.normal(size=(4, 6, 8)), "b": rng.normal(size=(4, 3))}
    vote = lc.lion_cub(1.0, B1, B2, sync=lc.sync.every(1), workers=workers)
    tx = optax.chain(optax.clip_by_global_norm(1.0), vote)
    _, state = updated(tx, workers, grads, {"w": P(None, "tp"), "b": P()})
    norms = np.sqrt((grads["w"] ** 2).sum((1, 2)) + (grads["b"] ** 2).sum(1))
    for name, g in grads.items():
        own, synced = g.reshape(4, -1) / norms[:, None], state[1][0]
        mean = (1 - B2) * own.mean(0).reshape(g.shape[1:])
        np.testing.assert_allclose(synced.inner.mu[name], [mean] * 4, rtol=1e-5, atol=1e-7)
        apart = 1 - (own.mean(0) ** 2).sum() / (own**2).sum(1).mean()
        np.testing.assert_allclose(synced.drift[name], apart, rtol=1e-5)


def test_a_scale_for_a_whole_leaf_is_that_of_all_its_shards():
    workers = on("data=4 tp=2", EXPLICIT)
    grads = {"w": np.random.default_rng(0).integers(-3, 4, (4, 6, 40)).astype(np.float32)}
    grads["w"][..., :20] *= 8  # shards of very different size
    vote, oracle = Method("integer(8)", "ternary").of_workers(lc.wires.counts(), workers)
    found, _ = updated(vote, workers, grads, {"w": P(None, "tp")})
    want, _ = oracle.update(grads, oracle.init({"w": jnp.zeros((6, 40))}, 4))
    np.testing.assert_array_equal(found["w"], want["w"])


def test_arrays_and_boxes_say_how_parameters_are_cut():
    array = jax.device_put(jnp.ones((4, 6)), on("data=4 tp=2").shardings(P(None, "tp")))
    shaped = jax.ShapeDtypeStruct((4, 6), jnp.float32, sharding=array.sharding)
    boxed = nn.Partitioned(array, (None, "tp"))
    for cut in (array, shaped, boxed):
        assert lc.mesh.specs_of({"w": cut, "b": np.ones(3)}) == {"w": P(None, "tp"), "b": P()}


def test_groups_are_neighbours_on_a_two_level_mesh():
    mesh = lc.mesh.two_level_mesh(2)
    assert mesh.axis_names == ("node", "device")
    assert mesh.devices.tolist() == [list(jax.devices()[i : i + 2]) for i in (0, 2, 4, 6)]
    assert lc.mesh.two_level_mesh().devices.shape == (1, 8)


# --- Bad input


def prepare(sizes, spec=None, shape=(6, 8), voters=None, **options):
    """The first state of one parameter, of workers on a mesh and of an optimizer for these or others."""
    workers = on(sizes)
    tx = lc.lion_cub(1e-3, workers=voters or workers, **options)
    specs = spec if spec is None or isinstance(spec, dict) else {"w": spec}
    return tx, lc.init_state(tx, {"w": jnp.zeros(shape)}, workers, specs=specs)


def train(sizes, spec):
    """A step with 12 rows, cut as the spec says."""
    tx, state = prepare(sizes)
    loss = lambda params, batch, rng: jnp.sum(params["w"])  # noqa: E731
    step = lc.make_train_step(loss, tx, on(sizes), batch_spec=spec)
    step(state, np.ones((12, 1), np.float32))


def left_to_the_compiler():
    """A vote in a partly manual region would gather what is cut over the other axes."""
    tx = lc.lion_cub(1e-3, workers="data")
    run = jax.shard_map(
        lambda p, g: tx.update(g, tx.init(p))[0], mesh=on(TP).mesh,
        in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"},
    )  # fmt: skip
    jax.jit(run)(jnp.zeros((2, 4)), jnp.zeros((8, 4)))


TP = "data=4 tp=2"
BATCH_SPECS = [P(("fsdp", "data")), P(("data", "nowhere")), P()]


REFUSED = [
    (
        lambda: prepare(TP, P("data")),
        "['w'] of shape ... has spec ... 'data' is an axis of the workers ... inner",
    ),
    (
        lambda: prepare(TP, P("fsdp")),
        "['w'] ... cannot lie as ... 'tp': 2 ... fsdp ... logical_to_mesh",
    ),
    (
        lambda: prepare(TP, P("tp"), (7, 8)),
        "['w'] has shape (7, 8) ... axis 0 is partitioned 2 times ... size is 7",
    ),
    (lambda: prepare(TP, {"w": P(), "v": P()}), "specs has 2 leaves ... 1 ... PartitionSpec"),
    *(
        (
            lambda spec=spec: train("data=2 fsdp=2 tp=2", spec),
            f"batch_spec={spec} ... axes ('data',), in this order ... ('data', 'fsdp', 'tp')",
        )
        for spec in BATCH_SPECS
    ),
    (lambda: train("pod=2 data=2", P(("data", "pod"))), "('pod', 'data'), in this order"),
    (
        lambda: train("data=4 fsdp=2", P(("data", "fsdp"))),
        "(12, 1): 4 workers do not divide ... multiple of 8 ... 2 parts of each worker's",
    ),
    (
        lambda: prepare("node=2", voters=on("node=2 gpu=2")),
        "'gpu' is not an axis of the workers here ... name different axes",
    ),
    (
        lambda: lc.lion_cub(1e-3, workers=on("node=2 gpu=2"), quantizer=lc.quantize.integer(8)),
        "integer(8) ... one scale for a whole leaf ... sign()",
    ),
    (
        lambda: prepare("node=2 gpu=4", sync=lc.sync.every(2), sync_where={"w": True}),
        "sync_where is given ... in two levels",
    ),
    *(
        (
            lambda size=size: lc.mesh.two_level_mesh(size),
            f"group_size={size!r} ... 8 devices ... divides 8",
        )
        for size in (0, 3, 2.0)
    ),
    (
        lambda: jax.jit(lc.lion_cub(1e-3, workers=on(TP)).init)(jnp.zeros((4, 4))),
        "['tp'] ... cannot be seen inside jax.jit",
    ),
    (left_to_the_compiler, "['tp'] ... left to the compiler"),
]


@pytest.mark.parametrize(("build", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_does_not_fit_a_mesh_is_refused(build, words):
    with pytest.raises(ValueError, match=in_order(words)):
        build()


# --- Without types


def untyped(make, sizes, at="update"):
    """Traces ``init``, or ``update`` too, where types do not tell what varies over the axes."""
    workers = on(sizes)

    def worker(grads):
        tx = make(workers)
        state = tx.init(grads)
        return grads if at == "init" else tx.update(grads, state, grads)[0]

    every = P(workers.mesh.axis_names)
    specs = {"in_specs": every, "out_specs": every}
    run = jax.shard_map(worker, mesh=workers.mesh, check_vma=False, **specs)
    return jax.eval_shape(run, jnp.ones((8, 4)))


def synced(workers, schedule):
    inner = optax.scale_by_lion()  # which does not communicate itself
    return lc.sync_momentum(inner, schedule, workers=workers)


CUB = functools.partial(lc.lion_cub, 1e-3)
B = lc.baselines
UNTYPED = {
    "a vote": (lambda w: CUB(workers=w), "data=2 tp=2", "update"),
    "in a group": (lambda w: CUB(workers=w), "node=2 gpu=2", "init"),
    "one worker": (lambda w: CUB(workers=w), "data=1 tp=2", "update"),
    "an owner": (lambda w: lc.owner_lion(1e-3, workers=w), "data=2 tp=2", "init"),
    "a sync": (lambda w: synced(w, lc.sync.every(1)), "data=2 tp=2", "update"),
    "means": (lambda w: lc.global_gradients(optax.sgd(1.0), workers=w), "data=2 tp=2", "update"),
    "1-bit Adam": (lambda w: B.one_bit_adam(1e-3, warmup=2, workers=w), "data=2 tp=2", "update"),
    "PowerSGD": (lambda w: B.powersgd(optax.sgd(0.1), 1, workers=w), "data=2 tp=2", "update"),
    "DiLoCo": (lambda w: B.diloco(workers=w), "data=2 tp=2", "update"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "sizes", "at"), UNTYPED.values(), ids=UNTYPED)
def test_devices_of_one_worker_need_types(make, sizes, at):
    words = (
        "each of workers= ... has several devices, on the mesh axes { ... : 2} ... check_vma=False ... "
        "types do not tell ... make_train_step ... check_vma=True"
    )
    with pytest.raises(ValueError, match=in_order(words)):
        untyped(make, sizes, at)
    # A worker that is one device needs none.
    untyped(make, sizes.replace("tp=2", "tp=1").replace("gpu=2", "gpu=1"), at)
