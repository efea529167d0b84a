"""Meshes of several axes: each device votes on its own shard or slice, and nothing else moves.

Updates are compared with `reference`, which is run on every shard as on a tree of its own; gradients are
small integers and betas powers of two, so that sums are exact. What travels is read from the compiled
program, axis by axis, and compared with the same model under optax.lion.
"""

import functools
import itertools
import re
from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax import reference
from lioncub_jax.traffic.compiled import collectives

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


class Shape(NamedTuple):
    """A mesh, and who the workers are on it."""

    sizes: dict
    axis: str | tuple = "data"
    group: str | None = None
    inner: tuple = ()

    @property
    def workers(self):
        return int(np.prod([self.sizes[n] for n in self.worker_axes]))

    @property
    def worker_axes(self):
        return (self.axis,) if isinstance(self.axis, str) else self.axis

    @property
    def group_size(self):
        return self.sizes[self.group] if self.group else 1

    def mesh(self, kind=AxisType.Auto):
        devices = jax.devices()[: np.prod(list(self.sizes.values()))]
        return jax.make_mesh(
            tuple(self.sizes.values()),
            tuple(self.sizes),
            axis_types=(kind,) * len(self.sizes),
            devices=devices,
        )

    def of(self, **rest):
        return {"axis_name": self.axis, "group_axis": self.group, **rest}


MESHES = {
    "8": Shape({"data": 8}),
    "4 x 2": Shape({"data": 4, "tp": 2}, inner=("tp",)),
    "2 x 4": Shape({"data": 2, "tp": 4}, inner=("tp",)),
    "tp first": Shape({"tp": 2, "data": 4}, inner=("tp",)),
    "2 x 2 x 2": Shape({"data": 2, "fsdp": 2, "tp": 2}, inner=("fsdp", "tp")),
    "pods": Shape({"pod": 2, "data": 2, "tp": 2}, axis=("pod", "data"), inner=("tp",)),
    "axis of one": Shape({"data": 4, "tp": 1, "fsdp": 2}, inner=("tp", "fsdp")),
    "one worker": Shape({"data": 1, "tp": 4}, inner=("tp",)),
    "two-level 2 x 4": Shape({"node": 2, "gpu": 4}, axis="node", group="gpu"),
    "two-level 4 x 2": Shape({"node": 4, "gpu": 2}, axis="node", group="gpu"),
    "two-level with tp": Shape(
        {"node": 2, "gpu": 2, "tp": 2}, axis="node", group="gpu", inner=("tp",)
    ),
    "two-level, one worker": Shape({"node": 1, "gpu": 4}, axis="node", group="gpu"),
}

# Ragged shards, shards below a word, replicated ones; "*" is the first inner axis, "+" the last.
LEAVES = {
    "ragged": ((12, 20), (None, "*")),
    "below a word": ((4, 3), ("*",)),
    "bias": ((8,), ("+",)),
    "replicated": ((3, 43), ()),
    "scalar": ((), ()),
    "empty": ((0, 4), (None, "*")),
    "both": ((16, 24), ("*", "+")),
    "one dimension": ((64, 5), (("*", "+"),)),
    "long": ((4, 100), ("+",)),
}


def specs_for(shape):
    """LEAVES on the inner axes of a mesh; an axis cuts a leaf once."""
    if not shape.inner:
        return {name: P() for name in LEAVES}
    names = {"*": shape.inner[0], "+": shape.inner[-1]}

    def entry(mark, seen):
        marks = mark if isinstance(mark, tuple) else (mark,)
        axes = tuple(names[m] for m in marks if m is not None)
        axes = tuple(a for a in dict.fromkeys(axes) if a not in seen)
        seen.update(axes)
        return axes or None

    specs = {}
    for name, (_, marks) in LEAVES.items():
        seen = set()
        specs[name] = P(*[entry(mark, seen) for mark in marks])
    return specs


def zeros():
    return {name: jnp.zeros(shape) for name, (shape, _) in LEAVES.items()}


def placed(tree, specs, mesh):
    return jax.tree.map(lambda s, x: jax.device_put(x, NamedSharding(mesh, s)), specs, tree)


# --- The reference on every shard


def axes_of(spec):
    entries = [e if isinstance(e, tuple) else (e,) for e in spec if e is not None]
    return frozenset(itertools.chain(*entries))


def shard(x, spec, sizes, at):
    """The part of ``[steps, W, ...]`` that the device at these indices of the inner axes holds."""
    for dim, e in enumerate(spec):
        axes = () if e is None else e if isinstance(e, tuple) else (e,)
        for axis in axes:
            x = np.split(x, sizes[axis], axis=dim + 2)[at[axis]]
    return x


def unshard(parts, spec, sizes, inner):
    """Undoes `shard`: ``parts[at]`` for all indices of the inner axes, to the whole ``[steps, ...]``."""

    def whole(at, left):
        if not left:
            return parts[tuple(at.get(n, 0) for n in inner)]
        (dim, axis), *rest = left
        return np.concatenate(
            [whole({**at, axis: i}, rest) for i in range(sizes[axis])], axis=dim + 1
        )

    cuts = []
    for dim, e in enumerate(spec):
        axes = () if e is None else e if isinstance(e, tuple) else (e,)
        cuts += [(dim, axis) for axis in axes]
    return whole({}, cuts)


def simulated(oracle, shape, specs, grads, abstain):
    """Updates ``[steps, ...]`` by the reference, run on every shard of a worker as on a tree of its own."""
    local = {
        name: shard(g, specs[name], shape.sizes, dict.fromkeys(shape.inner, 0))
        for name, g in grads.items()
    }
    plan = planned(local, specs, shape)
    parts = {name: {} for name in grads}
    for at in itertools.product(*[range(shape.sizes[n]) for n in shape.inner]):
        here = dict(zip(shape.inner, at, strict=True))
        for bucket in plan:
            mine = {n: shard(grads[n], specs[n], shape.sizes, here) for n in bucket.names}
            updates = run_reference(
                oracle, mine, abstain, bucket.first_words(here, shape), bucket.slice_rows
            )
            for name in bucket.names:
                parts[name][at] = np.asarray(updates[name])
    full = {n: unshard(parts[n], specs[n], shape.sizes, shape.inner) for n in grads if parts[n]}
    empty = {n: np.zeros((len(abstain), *grads[n].shape[2:])) for n in grads}
    return {n: full.get(n, empty[n]) for n in grads}


class Placed(NamedTuple):
    """Leaves that travel together, and where their words lie; read from the documentation of the layout."""

    names: list
    axes: tuple
    first_row: int
    total_rows: int
    slice_rows: int  # rows that one device holds: all, or a group's share of them

    def first_words(self, here, shape):
        """Where the words of the slice on each device of a group begin, ``uint32[G]``."""
        index = np.zeros(shape.group_size, np.int64)
        for axis in sorted([*self.axes, *([shape.group] if shape.group else [])]):
            at = np.arange(shape.group_size) if axis == shape.group else here[axis]
            index = index * shape.sizes[axis] + at
        return (4 * (self.first_row + index * self.total_rows)).astype(np.uint32)


def cut_rows(sizes, parts):
    """How many rows each of so many parts takes of leaves that are joined in one buffer."""
    rows = [-(-size // 128) for size in sizes]
    big = [n > 512 for n in rows]
    total = sum(-(-n // 32) * 32 if b else n for n, b in zip(rows, big, strict=True))
    unit = 32 if any(big) else 16
    return -(-total // (parts * unit)) * unit


def planned(local, specs, shape):
    """The buckets: leaves that are cut over the same axes, in the order of the axes' names."""
    groups = {}
    for name in sorted(local):
        if local[name].size:
            cut = [axis for axis in axes_of(specs[name]) if shape.sizes[axis] > 1]
            groups.setdefault(frozenset(cut), []).append(name)
    workers = shape.worker_axes + ((shape.group,) if shape.group else ())
    plan, before = [], 0
    for axes in sorted(groups, key=lambda axes: tuple(sorted([*axes, *workers]))):
        sizes = [np.prod(local[name].shape[2:], dtype=int) for name in groups[axes]]
        own = cut_rows(sizes, shape.group_size)
        plan.append(Placed(groups[axes], tuple(axes), before, 0, own))
        slices = [128 * own] if shape.group else sizes
        before += shape.workers * cut_rows(slices, shape.workers)
    return [placed._replace(total_rows=before) for placed in plan]


@functools.partial(jax.jit, static_argnums=(0, 4))
def run_reference(oracle, grads, abstain, first_words, slice_rows):
    """Updates ``[steps, ...]``; compiled once for shards of the same shapes."""

    def places(rows, workers, unit):
        if len(first_words) == 1:
            return reference.words(rows, workers, unit, first_words[0])
        unit = 32 if slice_rows > 512 else 16
        slices = [reference.words(slice_rows, workers, unit, first) for first in first_words]
        return [jnp.concatenate(x)[:rows] for x in zip(*slices, strict=True)]

    simulator = oracle(places)
    params = jax.tree.map(lambda g: jnp.zeros(g.shape[2:]), grads)

    def step(state, now):
        updates, state = simulator.update(now[0], state, params, now[1])
        return state, updates

    return jax.lax.scan(step, simulator.init(params, abstain.shape[1]), (grads, abstain))[1]


# --- Updates


B1, B2 = 0.75, 0.5
HALF = {"b1": 0.5, "b2": 0.5}


def lion_at_owner(quantizer, group_axis, axis_name):
    return lc.communicate(
        axis_name=axis_name, group_axis=group_axis, memory=lc.momentum.nothing(), up=quantizer,
        owner=lc.decide.momentum_at_owner(optax.scale_by_lion(**HALF)),
    )  # fmt: skip


def voting(quantizer=None, **parts):
    return lambda **where: lc.communicate(
        memory=lc.momentum.blend(B1, B2), up=quantizer or lc.quantize.sign(), **parts, **where
    )


METHODS = {
    "sign": (voting(), lambda p: reference.local_momentum(B1, B2, places=p)),
    "gathered": (
        voting(wire=lc.wires.gathered()), lambda p: reference.local_momentum(B1, B2, places=p)
    ),
    "ternary": (
        voting(lc.quantize.ternary()),
        lambda p: reference.local_momentum(B1, B2, codes=reference.ternary(), places=p),
    ),
    "average": (
        voting(down=lc.decide.average()),
        lambda p: reference.local_momentum(B1, B2, decide=reference.average, places=p),
    ),
    "owner": (
        lambda **where: lion_at_owner(lc.quantize.midrise(2), **where),
        lambda p: reference.momentum_at_owner(**HALF, codes=reference.midrise(2), places=p),
    ),
    "owner turned": (
        lambda **where: lion_at_owner(lc.quantize.rotated(lc.quantize.midrise(1)), **where),
        lambda p: reference.momentum_at_owner(
            **HALF, codes=reference.rotated(reference.midrise(1)), places=p
        ),
    ),
    "owner dense": (
        lambda **where: lion_at_owner(lc.quantize.dense(), **where),
        lambda p: reference.momentum_at_owner(**HALF, codes=reference.dense(), places=p),
    ),
}  # fmt: skip


def story(shape, steps=4, seed=0):
    """Gradients ``[steps, W, G, ...]`` of integers whose means over a group are whole; who abstains."""
    rng = np.random.default_rng(seed)
    lead = steps, shape.workers, shape.group_size
    grads = {
        name: shape.group_size * rng.integers(-2, 3, (*lead, *size)).astype(np.float32)
        for name, (size, _) in LEAVES.items()
    }
    grads["long"][:, 0] = 0  # a worker that has nothing to say of some rows
    grads["both"][2, -1, 0, 3, 3] = np.inf
    abstain = np.zeros((steps, shape.workers), bool)
    abstain[1, 0] = True
    return grads, abstain


def run_on_mesh(txs, shape, kind, specs, grads, abstain):
    """Updates ``[steps, ...]`` and the last state of each transform; all of them in one program."""
    mesh = shape.mesh(kind)
    params = placed({n: jnp.zeros(g.shape[3:]) for n, g in grads.items()}, specs, mesh)
    txs = {name: lc.on_mesh(tx, mesh, specs=specs, **shape.of()) for name, tx in txs.items()}
    lead = shape.worker_axes + ((shape.group,) if shape.group else ())
    stacked = jax.tree.map(lambda s: P(None, lead, *s), specs)

    @jax.jit
    def run(params, grads, abstain):
        def step(states, now):
            done = {
                name: tx.update(now[0], states[name], params, abstain=now[1])
                for name, tx in txs.items()
            }
            return {n: state for n, (_, state) in done.items()}, {
                n: u for n, (u, _) in done.items()
            }

        states = {name: tx.init(params) for name, tx in txs.items()}
        return jax.lax.scan(step, states, (grads, abstain))

    flat = {n: g.reshape(len(g), g.shape[1] * g.shape[2], *g.shape[3:]) for n, g in grads.items()}
    told = np.repeat(abstain, shape.group_size, axis=1)
    told = jax.device_put(told, NamedSharding(mesh, P(None, lead)))
    states, updates = run(params, placed(flat, stacked, mesh), told)
    for name, spec in specs.items():
        lies = NamedSharding(mesh, P(None, *spec))
        for u in updates.values():  # XLA replicates what is empty
            assert not u[name].size or u[name].sharding.is_equivalent_to(lies, u[name].ndim), name
    return jax.tree.map(np.asarray, updates), states


# Every kind of mesh with local momentum and with momentum at the owner; other methods where most happens.
# What is slow here has a neighbour that is not.
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
CASES = [
    ("8", "explicit", "owner"),
    ("tp first", "explicit", "sign"),
    ("2 x 2 x 2", "auto", "sign, owner, average"),
    ("pods", "auto", "sign, owner"),
    ("axis of one", "explicit", "owner"),
    ("one worker", "auto", "sign, owner"),
    ("two-level 2 x 4", "auto", "ternary, owner dense"),
    ("two-level with tp", "auto", "sign, owner, owner turned"),
    ("two-level with tp", "explicit", "owner"),
    ("two-level, one worker", "auto", "sign, owner"),
    *[
        slow(name, kind, ", ".join(METHODS))
        for name in ("4 x 2", "2 x 2 x 2", "pods", "two-level 4 x 2", "two-level with tp")
        for kind in KINDS
    ],
    *[slow(name, "explicit", "sign, owner") for name in ("one worker", "two-level, one worker")],
]


@pytest.mark.parametrize(("name", "kind", "methods"), CASES)
def test_updates_are_those_of_the_reference(name, kind, methods):
    shape, methods = MESHES[name], methods.split(", ")
    specs = specs_for(shape)
    grads, abstain = story(shape)
    txs = {method: METHODS[method][0](**shape.of()) for method in methods}
    got, states = run_on_mesh(txs, shape, KINDS[kind], specs, grads, abstain)
    means = {n: g.mean(2) for n, g in grads.items()}
    absent = abstain | ~np.isfinite(means["both"]).all((2, 3))
    for method in methods:
        want = simulated(METHODS[method][1], shape, specs, means, absent)
        for leaf in LEAVES:
            np.testing.assert_array_equal(
                got[method][leaf], want[leaf], err_msg=f"{method}, {leaf}"
            )
        assert any(np.abs(u).max() > 0 for u in got[method].values() if u.size)
        assert int(lc.vote_stats(states[method]).abstentions) == absent.sum()


@pytest.mark.parametrize(("name", "spec"), [("4 x 2", P(None, "tp")), ("two-level 4 x 2", P())])
def test_large_leaves_lie_by_themselves_and_small_ones_behind_them(name, spec):
    """Large are more than 512 rows of 128 on a device."""
    shape, steps = MESHES[name], 2
    rng = np.random.default_rng(0)
    sizes = {"a": (10, 6), "large": (4, 131_200), "z": (300, 4)}
    lead = steps, shape.workers, shape.group_size
    grads = {n: rng.integers(-2, 3, (*lead, *s)).astype(np.float32) for n, s in sizes.items()}
    grads = {n: shape.group_size * g for n, g in grads.items()}
    specs, absent = dict.fromkeys(sizes, spec), np.zeros((steps, shape.workers), bool)
    txs = {method: METHODS[method][0](**shape.of()) for method in ("sign", "owner")}
    got, _ = run_on_mesh(txs, shape, AxisType.Auto, specs, grads, absent)
    means = {n: g.mean(2) for n, g in grads.items()}
    for method in txs:
        want = simulated(METHODS[method][1], shape, specs, means, absent)
        for leaf in sizes:
            np.testing.assert_array_equal(
                got[method][leaf], want[leaf], err_msg=f"{method}, {leaf}"
            )


# --- What travels


class Travels(NamedTuple):
    """A model on a mesh whose program is read."""

    shape: Shape
    specs: dict
    batch_spec: P


# A two-layer model, large enough that headers and padding do not count: 2 * 512 * 2048 parameters and some.
TRAVELS = {
    "8": Travels(MESHES["8"], {}, P("data")),
    "tensor 4 x 2": Travels(
        Shape({"data": 4, "tp": 2}, inner=("tp",)), {"a": P(None, "tp"), "b": P("tp")}, P("data")
    ),
    "fsdp 4 x 2": Travels(
        Shape({"data": 4, "fsdp": 2}, inner=("fsdp",)),
        {"a": P("fsdp"), "b": P("fsdp")},
        P(("data", "fsdp")),
    ),
    "fsdp 2 x 4": Travels(
        Shape({"data": 2, "fsdp": 4}, inner=("fsdp",)),
        {"a": P("fsdp"), "b": P("fsdp")},
        P(("data", "fsdp")),
    ),
    "2 x 2 x 2": Travels(
        MESHES["2 x 2 x 2"],
        {"a": P("fsdp", "tp"), "b": P("tp", "fsdp")},
        P(("data", "fsdp")),
    ),
    "two-level 2 x 4": Travels(MESHES["two-level 2 x 4"], {}, P(("node", "gpu"))),
    "two-level 4 x 2": Travels(MESHES["two-level 4 x 2"], {}, P(("node", "gpu"))),
}


BATCH = np.random.default_rng(1).normal(size=(32, 512)).astype(np.float32)


@functools.cache
def model_params():
    rng = np.random.default_rng(0)
    sizes = {"a": (512, 2048), "b": (2048, 512), "norm": (512,)}
    return {n: jnp.asarray(rng.normal(size=s) / 16, jnp.float32) for n, s in sizes.items()}


def model_loss(kind):
    def loss(params, batch, rng):
        a, b = params["a"], params["b"]
        if kind == AxisType.Explicit:  # an explicit model says where it gathers
            inner = [n for n in ("fsdp", "tp") if n in jax.sharding.get_abstract_mesh().axis_names]
            if inner:
                tp = "tp" if "tp" in inner else None
                a, b = jax.sharding.reshard(a, P(None, tp)), jax.sharding.reshard(b, P(tp))
                rows = jax.typeof(batch).sharding.spec[0]
                hidden = jnp.tanh((batch * params["norm"]) @ a)
                out = jnp.einsum("bh,ho->bo", hidden, b, out_sharding=P(rows))
                return jnp.mean((out - batch) ** 2)
        hidden = jnp.tanh((batch * params["norm"]) @ a)
        return jnp.mean((hidden @ b - batch) ** 2)

    return loss


def prepared(tx_of, name, kind):
    """The state by shape, and the step."""
    travels = TRAVELS[name]
    mesh, where = travels.shape.mesh(kind), travels.shape.of()
    tx = tx_of(**where)
    state = lc.training.abstract_state(tx, model_params(), mesh, specs=cuts_of(travels), **where)
    step = lc.make_train_step(model_loss(kind), tx, mesh, batch_spec=travels.batch_spec, **where)
    return state, step


def program(tx_of, name, kind):
    """What the compiled step sends, and its state by shape."""
    state, step = prepared(tx_of, name, kind)
    return collectives(step.lower(state, BATCH).compile(), TRAVELS[name].shape.mesh(kind)), state


def cuts_of(travels):
    return {n: travels.specs.get(n, P()) for n in model_params()}


def lion_of_all(axis_name, group_axis):
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    return lc.global_gradients(optax.lion(1e-3), (*names, *([group_axis] if group_axis else [])))


def is_integer(one):
    return all(o.dtype[0] in "su" for o in one.operands)


def is_scalar(one):
    return sum(o.bytes for o in one.operands) <= 8


VOTERS = {
    "lion_cub": (lambda **where: lc.lion_cub(1e-3, **where), 2.0),
    "owner_lion": (lambda **where: lc.owner_lion(1e-3, **where), 4.0 + 16 / 128),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("8", "explicit"),
        ("tensor 4 x 2", "explicit"),
        ("fsdp 4 x 2", "auto"),
        ("2 x 2 x 2", "auto"),
        ("two-level 2 x 4", "auto"),
        slow("8", "auto"),
        slow("tensor 4 x 2", "auto"),
        slow("fsdp 4 x 2", "explicit"),
        slow("fsdp 2 x 4", "auto"),
        slow("fsdp 2 x 4", "explicit"),
        slow("2 x 2 x 2", "explicit"),
        slow("two-level 2 x 4", "explicit"),
        slow("two-level 4 x 2", "auto"),
        slow("two-level 4 x 2", "explicit"),
    ],
)
def test_what_travels_and_what_is_kept(name, kind):
    """Only packed votes cross the workers' axis; inside a worker nothing is new; state is no larger."""
    lion, lion_state = program(lion_of_all, name, KINDS[kind])
    for optimizer, (make, bits_each) in VOTERS.items():
        found, state = program(make, name, KINDS[kind])
        check_across(found, state, TRAVELS[name], bits_each)
        check_inside(found, lion, state, TRAVELS[name])
        check_memory(state, lion_state, TRAVELS[name], optimizer)


def check_across(found, state, travels, bits_each):
    """Words of codes, as many bits as were promised, in two collectives for each set of axes."""
    shape = travels.shape
    workers = set(shape.worker_axes)
    across = [one for one in found if set(one.axes) & workers and not is_scalar(one)]
    assert {one.axes for one in across} == {shape.worker_axes}
    assert all(is_integer(one) and not one.looped and not one.gated for one in across), across
    here = sum(np.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(state.params))
    here /= shape.group_size
    bits_sent = 8 * sum(one.sent_bytes for one in across) / here
    assert bits_sent <= 1.05 * bits_each * (shape.workers - 1) / shape.workers
    assert len(across) == 2 * len({axes_of(s) for s in cuts_of(travels).values()})


def check_inside(ours, lion, state, travels):
    """What optax.lion moves, one word by which devices abstain together, one for the statistics."""
    shape = travels.shape

    def inside(found):
        own = [one for one in found if one.axes and not set(one.axes) & set(shape.worker_axes)]
        # The order in one collective is the compiler's.
        return Counter((one.op, one.axes, tuple(sorted(one.operands, key=str))) for one in own)

    more = inside(ours) - inside(lion)
    words = [key for key in more if sum(o.bytes for o in key[2]) <= 8]
    rest = [key for key in more if key not in words]
    assert more.total() <= 4 and len(words) <= 2
    if not shape.group:
        assert not rest
        assert len(words) == (2 if shape.inner else 0)
        return
    (scatter,) = [key for key in rest if key[0] == "reduce-scatter"]
    (gather,) = [key for key in rest if key[0] == "all-gather"]
    assert len(rest) == 2 and scatter[1] == gather[1] == (shape.group,)
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    assert scatter[2][0].dtype == "f32" and sum(o.bytes for o in scatter[2]) < 4.1 * parameters
    assert gather[2][0].dtype == "u32"
    assert 8 * sum(o.bytes for o in gather[2]) < 1.05 * parameters / shape.group_size


def check_memory(ours, lion, travels, optimizer):
    """State no larger than that of optax.lion; in a group, than its share of it."""

    def on_a_device(tree):
        return sum(
            np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in tree if x.ndim
        )

    allowed = on_a_device(jax.tree.leaves(lion.opt_state)) / travels.shape.group_size
    if optimizer == "owner_lion":
        # The momentum of a worker is a slice, and errors are half as wide.
        allowed *= 1 / travels.shape.workers + 0.5
    assert on_a_device(jax.tree.leaves(ours.opt_state)) <= 1.02 * allowed


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("2 x 2 x 2", "lion_cub"),
        ("two-level 2 x 4", "owner_lion"),
        *[slow(name, "owner_lion") for name in ("8", "tensor 4 x 2", "fsdp 2 x 4", "2 x 2 x 2")],
        slow("two-level 4 x 2", "lion_cub"),
    ],
)
def test_a_training_step_is_traced_once(name, optimizer):
    travels = TRAVELS[name]
    mesh, where = travels.shape.mesh(), travels.shape.of()
    tx = VOTERS[optimizer][0](**where)
    state = lc.init_state(tx, model_params(), mesh, specs=cuts_of(travels), **where)
    loss = model_loss(AxisType.Auto)
    step = lc.make_train_step(loss, tx, mesh, batch_spec=travels.batch_spec, **where)
    for _ in range(3):
        state, metrics = step(state, BATCH)
    assert step.traces == 1 and np.isfinite(metrics["loss"])


# --- Chains, models and metadata


@pytest.mark.parametrize("name", [slow("4 x 2"), "2 x 2 x 2"])
def test_other_transforms_of_a_chain_see_whole_gradients(name):
    """A norm over a shard would be smaller, and clip less."""
    shape = MESHES[name]
    specs, mesh = specs_for(shape), shape.mesh()
    grads = {n: g[0, :, 0] for n, g in story(shape)[0].items()}
    chain = optax.chain(optax.clip_by_global_norm(1.0), voting()(**shape.of()))
    tx = lc.on_mesh(chain, mesh, specs=specs, **shape.of())
    params = placed(zeros(), specs, mesh)
    _, state = jax.jit(tx.update)(grads, tx.init(params), params)
    for worker in range(shape.workers):
        own = {n: g[worker] for n, g in grads.items()}
        norm = np.sqrt(sum(np.sum(g * g) for g in own.values()))
        for n, g in own.items():
            got = np.asarray(state[1].mu[n])[worker]
            np.testing.assert_allclose(got, (1 - B2) * g / norm, rtol=1e-5, err_msg=n)


def test_random_rounding_differs_between_shards():
    """Two shards with the same gradient draw different numbers."""
    shape = MESHES["2 x 4"]
    mesh, specs = shape.mesh(), {"w": P("tp")}
    quantizer = lc.quantize.midrise(2, rounding=lc.quantize.stochastic(0))
    tx = lc.on_mesh(lion_at_owner(quantizer, **shape.of()), mesh, specs=specs, **shape.of())
    params = placed({"w": jnp.zeros((4, 640))}, specs, mesh)
    row = np.random.default_rng(0).normal(size=640)
    grads = {"w": np.broadcast_to(row, (2, 4, 640)).astype(np.float32)}
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    shards = np.asarray(updates["w"])
    assert len({row.tobytes() for row in shards}) == 4


@pytest.mark.parametrize("kind", ["explicit", slow("auto")])
def test_a_scale_for_a_whole_leaf_is_that_of_all_its_shards(kind):
    shape = MESHES["4 x 2"]
    specs = {"w": P(None, "tp")}
    rng = np.random.default_rng(0)
    grads = {"w": rng.integers(-3, 4, (1, 4, 6, 40)).astype(np.float32)}
    grads["w"][..., :20] *= 8  # shards of very different size
    abstain = np.zeros((1, 4), bool)
    mesh = shape.mesh(KINDS[kind])
    params = placed({"w": jnp.zeros((6, 40))}, specs, mesh)
    vote = voting(lc.quantize.integer(8), wire=lc.wires.counts())(**shape.of())
    tx = lc.on_mesh(vote, mesh, specs=specs, **shape.of())
    stacked = NamedSharding(mesh, P("data", None, "tp"))
    now = {"w": jax.device_put(grads["w"][0], stacked)}
    updates, _ = jax.jit(tx.update)(now, tx.init(params), params)
    want = run_reference(
        lambda p: reference.local_momentum(B1, B2, codes=reference.integer(8), places=p),
        grads, abstain, np.zeros(1, np.uint32), 2
    )  # fmt: skip
    np.testing.assert_array_equal(updates["w"], want["w"][0])


@pytest.mark.parametrize("kind", ["explicit", slow("auto")])
def test_momentum_is_averaged_and_drift_measured_over_all_shards(kind):
    shape = MESHES["4 x 2"]
    mesh, specs = shape.mesh(KINDS[kind]), {"w": P(None, "tp"), "b": P()}
    rng = np.random.default_rng(0)
    grads = {"w": rng.normal(size=(4, 6, 8)), "b": rng.normal(size=(4, 3))}
    grads = {n: g.astype(np.float32) for n, g in grads.items()}
    tx = lc.lion_cub(1.0, B1, B2, sync=lc.sync.every(1), **shape.of())
    tx = lc.on_mesh(tx, mesh, specs=specs, **shape.of())
    params = placed({"w": jnp.zeros((6, 8)), "b": jnp.zeros(3)}, specs, mesh)
    stacked = {"w": P("data", None, "tp"), "b": P("data")}
    _, state = jax.jit(tx.update)(placed(grads, stacked, mesh), tx.init(params), params)
    for n, g in grads.items():
        mean = (1 - B2) * g.mean(0)
        np.testing.assert_allclose(np.asarray(state[0].inner.mu[n]), [mean] * 4, rtol=1e-6)
        share = 1 - (g.mean(0) ** 2).sum() / (g**2).sum((1, 2) if g.ndim == 3 else 1).mean()
        np.testing.assert_allclose(state[0].drift[n], share, rtol=1e-5)


def test_specs_are_read_off_arrays_boxes_and_nnx_metadata():
    mesh = MESHES["4 x 2"].mesh()
    array = jax.device_put(jnp.ones((4, 6)), NamedSharding(mesh, P(None, "tp")))
    assert lc.mesh.specs_of({"w": array, "b": np.ones(3)}) == {"w": P(None, "tp"), "b": P()}
    assert lc.mesh.specs_of(
        jax.ShapeDtypeStruct((4, 6), jnp.float32, sharding=array.sharding)
    ) == P(None, "tp")
    init = nn.with_partitioning(nn.initializers.ones, ("tp", None))
    boxed = nn.Dense(4, kernel_init=init).init(jax.random.key(0), jnp.ones((1, 6)))
    assert lc.mesh.specs_of(boxed)["params"] == {"kernel": P("tp", None), "bias": P()}


def linear_step(model_or_params, mesh, loss, **rest):
    tx = lc.lion_cub(1e-2, axis_name="data")
    state = lc.init_state(tx, model_or_params, mesh, axis_name="data", **rest)
    step = lc.make_train_step(loss, tx, mesh, axis_name="data")
    batch = {"x": np.ones((8, 6), np.float32), "y": np.zeros((8, 4), np.float32)}
    for _ in range(2):
        state, metrics = step(state, batch)
    assert step.traces == 1
    return state, float(metrics["loss"])


def test_flax_metadata_says_how_a_model_is_cut():
    """Boxes of linen and metadata of nnx give the same step as specs by hand."""
    mesh = MESHES["4 x 2"].mesh()
    init = nn.with_partitioning(nn.initializers.ones, (None, "tp"))
    dense = nn.Dense(4, kernel_init=init)
    boxed = dense.init(jax.random.key(0), jnp.ones((1, 6)))["params"]

    def linen_loss(params, batch, rng):
        return jnp.mean((dense.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)

    state, loss = linear_step(boxed, mesh, linen_loss)
    assert state.params["kernel"].sharding.spec == P(None, "tp")
    assert state.opt_state[0].mu["kernel"].sharding.spec == P("data", None, "tp")

    with jax.set_mesh(mesh):
        kernel_init = nnx.with_partitioning(nnx.initializers.ones, (None, "tp"))
        model = nnx.Linear(6, 4, kernel_init=kernel_init, rngs=nnx.Rngs(0))
    nnx_loss, params, model_state = lc.from_nnx(
        model, lambda m, batch: jnp.mean((m(batch["x"]) - batch["y"]) ** 2)
    )
    other, same = linear_step(params, mesh, nnx_loss, model_state=model_state)
    assert other.params["kernel"].get_value().sharding.spec == P(None, "tp")
    assert same == loss
    np.testing.assert_array_equal(other.params["kernel"].get_value(), state.params["kernel"])


# --- Bad input


def refused(*words):
    """The message holds all of these."""
    return pytest.raises(ValueError, match="(?s)" + "".join(f"(?=.*{re.escape(w)})" for w in words))


def prepare(shape, specs=None, params=None, tx=None, **rest):
    tx = tx or lc.lion_cub(1e-3, **shape.of())
    params = {"w": jnp.zeros((6, 8))} if params is None else params
    return lc.init_state(tx, params, shape.mesh(), specs=specs, **shape.of(**rest))


def test_a_mesh_without_the_axis():
    with refused("('data', 'tp')", "axis_name='batch'", "none of them"):
        prepare(Shape({"data": 4, "tp": 2}, axis="batch"))
    with refused("axis_name='pod'"):
        prepare(Shape({"data": 4, "tp": 2}, axis=("pod", "data")))
    with refused("('data', 'tp')", "group_axis='gpu'"):
        prepare(Shape({"data": 4, "tp": 2}, group="gpu"))
    with refused("group_axis", "twice"):
        lc.on_mesh(optax.identity(), MESHES["8"].mesh(), axis_name="data", group_axis="data")


def test_specs_that_do_not_fit():
    shape = MESHES["4 x 2"]
    with refused("['w'] has spec", "'data' is an axis of the workers", "inner axes"):
        prepare(shape, {"w": P("data")})
    with refused("['w']", "('data', 'tp')", "has 'fsdp'"):
        prepare(shape, {"w": P("fsdp")})
    with refused("['w'] has shape (7, 8)", "dimension 0 is cut into 2 parts", "do not divide 7"):
        prepare(shape, {"w": P("tp")}, {"w": jnp.zeros((7, 8))})
    with refused("['w'] has shape (6, 8)", "3 entries"):
        prepare(shape, {"w": P(None, None, "tp")})
    with refused("specs has 2 leaves", "1", "PartitionSpec"):
        prepare(shape, {"w": P(), "v": P()})
    with refused("specs has 1 leaves", "PartitionSpec"):
        prepare(shape, {"w": "tp"})


def test_axes_of_the_workers_come_first_in_a_batch():
    shape = MESHES["2 x 2 x 2"]
    for spec in (P("fsdp"), P(("fsdp", "data")), P(None, "data"), P(("data", "nowhere")), P()):
        with refused(
            f"batch_spec={spec}", "axes ('data',), in this order", "('data', 'fsdp', 'tp')"
        ):
            lc.make_train_step(
                lambda *_: 0.0, optax.identity(), shape.mesh(), batch_spec=spec, axis_name="data"
            )
    two = MESHES["two-level 2 x 4"]
    with refused("('node', 'gpu')"):
        lc.make_train_step(
            lambda *_: 0.0, optax.identity(), two.mesh(), batch_spec=P("node"), **two.of()
        )


def test_a_batch_that_the_parts_do_not_divide():
    state, step = prepared(VOTERS["lion_cub"][0], "fsdp 4 x 2", AxisType.Auto)
    with refused("(12, 512)", "multiple of 8", "4 workers", "2 parts of each worker's"):
        step(state, np.ones((12, 512), np.float32))


def test_a_group_axis_that_is_given_to_one_side_only():
    shape = MESHES["two-level 2 x 4"]
    alone = lc.lion_cub(1e-3, axis_name="node")
    with refused("differs between workers", "group_axis must be given to both"):
        prepare_and_trace(shape, alone)
    with refused("'gpu' is not an axis of the workers here", "name different axes"):
        prepare(Shape(shape.sizes, axis="node"), tx=lc.lion_cub(1e-3, **shape.of()))


def prepare_and_trace(shape, tx):
    state = prepare(shape, tx=tx)
    step = lc.make_train_step(
        lambda p, batch, rng: jnp.sum(p["w"] * batch[0, 0]), tx, shape.mesh(), **shape.of()
    )
    step(state, np.ones((8, 1), np.float32))


def test_group_axes_and_quantisers_that_do_not_go_together():
    with refused("integer(8)", "one scale for a whole leaf", "sign()"):
        lc.lion_cub(1e-3, axis_name="node", group_axis="gpu", quantizer=lc.quantize.integer(8))
    with refused("group_axis='node' is an axis of the workers"):
        lc.lion_cub(1e-3, axis_name="node", group_axis="node")
    for group in (3, (), ("gpu", "gpu"), ["gpu"]):
        with refused(
            f"group_axis={group!r}", "name of a mesh axis", "None for workers of one level"
        ):
            lc.lion_cub(1e-3, axis_name="node", group_axis=group)


def test_two_levels_have_no_leaves_to_choose_for_a_sync():
    shape = MESHES["two-level 2 x 4"]
    tx = lc.lion_cub(1e-3, sync=lc.sync.every(2), sync_where={"w": True}, **shape.of())
    with refused("the mask does not match"):
        prepare(shape, tx=tx)


@pytest.mark.parametrize("size", [0, 3, 5, 16, 2.0, -4])
def test_a_group_that_does_not_divide_the_devices(size):
    with refused(f"group_size={size!r}", "8 devices", "divides 8"):
        lc.mesh.two_level_mesh(size)


def test_groups_are_neighbours_on_a_two_level_mesh():
    mesh = lc.mesh.two_level_mesh(2, axis_names=("node", "gpu"))
    assert dict(mesh.shape) == {"node": 4, "gpu": 2}
    assert mesh.devices.tolist() == [list(jax.devices()[i : i + 2]) for i in (0, 2, 4, 6)]
    assert dict(lc.mesh.two_level_mesh().shape) == {"node": 1, "device": 8}


def test_how_parameters_are_cut_must_be_known_in_a_trace():
    shape = MESHES["4 x 2"]
    tx = lc.on_mesh(lc.lion_cub(1e-3, **shape.of()), shape.mesh(), **shape.of())
    with refused(
        "['tp']", "cannot be seen inside jax.jit", "specs=lioncub_jax.mesh.specs_of(params)"
    ):
        jax.jit(tx.init)({"w": jnp.zeros((4, 4))})


def test_axes_that_are_left_to_the_compiler():
    """A vote in a partly manual region would gather what is cut over the other axes."""
    shape = MESHES["4 x 2"]
    tx = lc.lion_cub(1e-3, **shape.of())

    def worker(p, g):
        return tx.update({"w": g}, tx.init({"w": p}))[0]["w"]

    run = jax.shard_map(
        worker, mesh=shape.mesh(), in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}
    )
    with refused("['tp']", "left to the compiler", "on_mesh"):
        jax.jit(run)(jnp.zeros((2, 4)), jnp.zeros((8, 4)))


def test_an_update_on_a_mesh_needs_the_parameters():
    shape = MESHES["8"]
    tx = lc.on_mesh(lc.lion_cub(1e-3, **shape.of()), shape.mesh(), **shape.of())
    state = tx.init({"w": jnp.zeros(4)})
    with refused("needs params"):
        tx.update({"w": jnp.zeros((8, 4))}, state)


@pytest.mark.parametrize(
    ("optimizer", "name", "kind"),
    [
        ("lion_cub", "2 x 2 x 2", "auto"),
        ("owner_lion", "two-level with tp", "explicit"),
        ("owner_lion", "one worker", "auto"),
        slow("owner_lion", "2 x 2 x 2", "explicit"),
        slow("lion_cub", "two-level with tp", "auto"),
        slow("lion_cub", "one worker", "explicit"),
    ],
)
def test_an_abstract_state_is_the_state_without_its_numbers(name, kind, optimizer):
    shape = MESHES[name]
    mesh, specs, tx = shape.mesh(KINDS[kind]), specs_for(shape), VOTERS[optimizer][0](**shape.of())
    given = {"specs": specs, "model_state": {"key": jax.random.key(1), "n": jnp.zeros(3)}}
    state = lc.init_state(tx, zeros(), mesh, **given, **shape.of())
    shapes = jax.eval_shape(zeros)
    abstract = lc.training.abstract_state(tx, shapes, mesh, **given, **shape.of())
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for (path, x), want in zip(
        jax.tree_util.tree_leaves_with_path(abstract), jax.tree.leaves(state), strict=True
    ):
        assert isinstance(x, jax.ShapeDtypeStruct)
        assert (x.shape, x.dtype) == (want.shape, want.dtype), path
        assert not x.size or x.sharding.is_equivalent_to(want.sharding, x.ndim), path
