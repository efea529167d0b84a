"""The baselines: each against its oracle, on shards and in groups, their bytes, and bad input.

As in ``test_against_reference``, gradients are small integers, and learning rates, momenta and decays
are powers of two, so that sums are exact in any order and equal means equal. Tolerances say why.
What is special of 1-bit Adam and PowerSGD is in files of their own.
"""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS, absent, assert_same, blank, run_on_mesh, run_workers, workers_on
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from oracle import baselines as oracles
from oracle import lion as reference
from oracle import one_bit_adam, powersgd
from test_against_reference import (
    EVENTS,
    TREES,
    Story,
    eventful,
    in_rows,
    integers,
    same_everywhere,
    simulate,
    zeros,
)

import lioncub_jax as lc
from lioncub_jax import baselines as B

SGD = optax.sgd(0.5, momentum=0.5, accumulator_dtype=jnp.float32)


def rate(count):
    return jnp.where(count % 2 == 0, 0.25, 0.5)


def refused(*words, kind=(ValueError, TypeError)):
    return pytest.raises(kind, match="(?s)" + ".*".join(map(re.escape, words)))


# --- Against the oracle


class Peer(NamedTuple):
    """A baseline, what it should be, and how near its updates and its state are to that."""

    make: Any  # ``workers -> transform``
    oracle: Any
    near: float = 0
    near_kept: float = 0


def fed_back(name, *args):
    make = functools.partial(getattr(B, name), rate, *args)
    return Peer(make, getattr(oracles, name)(rate, *args))


def of_adam(name, **options):
    """Roots and quotients may be fused with what follows, or not: updates differ by a few roundings."""
    options |= {"b1": 0.5, "b2": 0.75}
    simulator = reference.optimizer(getattr(one_bit_adam, name)(**options), 0.25, 0.0)
    return Peer(functools.partial(getattr(B, name), 0.25, **options), simulator, 2e-6)


def low_rank(*args, tx=SGD):
    make = functools.partial(B.powersgd, tx, *args)
    return Peer(make, powersgd.powersgd(tx, *args), 2e-4, 1e-3)


PEERS = {  # by the number of workers, and what gradients are multiples of
    (1, 1): {
        "diloco, 1 bit": fed_back("diloco", 0.5, 1),
    },
    (3, 1): {
        "diloco, 1 bit": fed_back("diloco", 0.5, 1),
    },
    (3, 2): {
        "powersgd": low_rank(2),
        "powersgd, adamw": low_rank(1, tx=optax.adamw(0.5, eps=0.1)),
    },
    (8, 7): {
        "1-bit": of_adam("one_bit_adam", warmup=2, eps=2.0**-6),
        "diloco, 4 bits": fed_back("diloco", 0.5, 4),
    },
}


def kept(state, names):
    """What a state keeps: of each field its leaves by name, the first of that field."""
    found = {}
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        fields = [key.name for key in path if hasattr(key, "name")]
        last = getattr(path[-1], "key", None) or names[getattr(path[-1], "idx", 0)]
        field = "owner" if "owner" in fields else fields[-1]
        found.setdefault(field, {}).setdefault(last, x)
    return found


def assert_near(got, want, near, of, params):
    """Equal, or where there is a tolerance, within that and a rounding of the parameters' dtype."""
    assert got.keys() == want.keys(), of
    for name, x in got.items():
        off = near and max(near, 2 * float(jnp.finfo(params[name].dtype).eps))
        assert_same(x, want[name], of=f"{of} {name}", rtol=off, atol=off)


@pytest.mark.parametrize(("workers", "unit"), PEERS)
def test_with_workers_that_abstain_it_is_the_oracle(workers, unit):
    kinds = {"12000": jnp.bfloat16, "65": jnp.bfloat16, "127": jnp.float16, "129": jnp.float16}
    if unit == 2:
        kinds = {"12000": jnp.bfloat16}
    params = {n: p.astype(kinds.get(n, p.dtype)) for n, p in zeros(TREES[workers]).items()}
    story = eventful(params, workers, seed=workers)
    for g in story.grads.values():
        g *= unit  # the mean of seven is exact, too
        g[5] = g[5 - 5 * (unit == 2)]  # without a gradient directions are those of roundings
    if unit == 7:  # before the freeze no gradient: a variance of 0 would make one bit of it huge
        story.grads["1000"].reshape(len(EVENTS), workers, 1000)[:, :, 300] = 0
    peers = PEERS[workers, unit]
    done = run_workers({n: peer.make(workers=AXIS) for n, peer in peers.items()}, params, *story)
    simulated = simulate({n: peer.oracle for n, peer in peers.items()}, params, story)
    for name, (got, state) in done.items():
        updates, want = simulated[name]
        assert_near(got, updates, peers[name].near, name, params)
        assert any(u.any() for u in got.values()), name
        mine, theirs = kept(state, sorted(params)), kept(want, sorted(params))
        mine |= {} if "count" in theirs else {"t": mine["count"]}
        [abstained] = mine["abstained"].values()
        assert (same_everywhere(abstained) == [0, 1, 1, workers, 0, 0]).all()
        for field in theirs.keys() & mine.keys():
            wanted, near = theirs[field], peers[name].near_kept
            found = {leaf: as_theirs(field, mine[field][leaf], x) for leaf, x in wanted.items()}
            if field == "q":  # whose columns have no sign
                found, wanted = jax.tree.map(np.abs, (found, wanted))
            like = params if found.keys() <= params.keys() else found
            assert_near(found, wanted, near, f"{name}, {field}", like)


def as_theirs(field, x, wanted):
    """What workers keep as the oracle keeps it."""
    if field == "owner":
        x, rows = in_rows(x, lc.wires.two_phase()), wanted.shape[1]
        assert not x[:, rows:].any()
        x = x[:, :rows]
    return x if x.ndim == wanted.ndim else same_everywhere(x)


# --- Decay


def decays(params):
    return {name: name != "b" for name in params}


NEEDED = {B.one_bit_adam: {"warmup": 1}}


def test_decay_is_decoupled_and_masked():
    """Without gradients it is all that moves: ``-lr wd p`` of the leaves that decay."""
    params = {"w": jnp.arange(65.0) / 8, "b": jnp.ones(7)}  # few bits, so that all is exact
    grads = {n: np.zeros((2, 1, *p.shape), np.float32) for n, p in params.items()}
    how = {"mask": decays, "workers": AXIS}
    tx = B.one_bit_adam(rate, weight_decay=0.5, warmup=1, **how)
    got, _ = run_workers({0: tx}, params, grads)[0]
    want = np.stack([-lr * 0.5 * params["w"] for lr in (0.25, 0.5)])
    np.testing.assert_array_equal(got["w"], want)
    assert not got["b"].any()


# --- Leaves that are cut, and groups

CUT = {
    "w": ((6, 256), P(None, "tensor")), "v": ((16, 128), P("tensor")), "whole": ((20, 30), P()),
    "b": ((9,), P()), "empty": ((0, 4), P()),
}  # fmt: skip
ON_SHARDS = {
    "error": fed_back("diloco", 0.5, 8),
    "error of Adam": of_adam("one_bit_adam", warmup=1),
    "error of PowerSGD": low_rank(2)._replace(near=2e-3, near_kept=2e-3),
}


def shard(x, spec, at, lead):
    """That of a device at an index of the inner axis, of arrays with so many leading dimensions."""
    dims = [dim for dim, axis in enumerate(spec) if axis]
    return np.split(x, 2, axis=lead + dims[0])[at] if dims else x


def test_devices_of_a_worker_treat_shards_as_leaves():
    """In whole rows, for those with a scale of each, and without zeros, whose sides depend on the place."""
    specs = {n: spec for n, (_, spec) in CUT.items()}
    workers = workers_on("data=4 tensor=2", kind=AxisType.Explicit)
    whole = zeros({n: shape for n, (shape, _) in CUT.items()})
    grads = integers(whole, 3, 4, values=2 * np.arange(-500, 500) + 1)
    for g in grads.values():  # no two workers cancel, and no two steps
        g *= 2.0 ** np.arange(-10, -6).reshape(4, *[1] * (g.ndim - 2))
        g[2] *= 2
    # In one shard only; the worker abstains as a whole. A mean of two is exact.
    grads["w"][2, 2, 0, 0] = grads["v"][2, 1, -1, 0] = np.nan
    txs = {n: peer.make(workers=workers) for n, peer in ON_SHARDS.items()}
    done = jax.tree.map(np.asarray, run_on_mesh(txs, workers, specs, grads))
    for g in grads.values():
        g[2, 1:3] = 0
    abstain = np.zeros((3, 4), bool)
    abstain[2, 1:3] = True
    for at in range(2):
        part = {n: shard(g, specs[n], at, 2) for n, g in grads.items()}
        params = blank(part)
        want = simulate({n: p.oracle for n, p in ON_SHARDS.items()}, params, Story(part, abstain))
        for name, (updates, wanted) in want.items():
            got, state = done[name]
            mine = {n: shard(u, specs[n], at, 1) for n, u in got.items()}
            assert_near(mine, updates, ON_SHARDS[name].near, name, params)
            assert all(u.any() for n, u in mine.items() if n != "empty")
            field = name.split()[0]
            errors, left = (kept(x, sorted(CUT))[field] for x in (wanted, state))
            left = {n: shard(np.asarray(left[n]), specs[n], at, 1) for n in errors}
            last = {n: x[-1] for n, x in errors.items()}
            assert_near(left, last, ON_SHARDS[name].near_kept, name, params)


GROUPED = {
    "diloco": functools.partial(B.diloco, 0.5, 0.0, 1),
    "adam": functools.partial(B.one_bit_adam, 0.5, b1=0.5, b2=0.75, warmup=1),
}


def test_a_group_sends_its_mean_as_one_worker():
    """Each slice is of whole rows, so codes and scales are those of workers that have the means."""
    # Odd means of three workers do not tie, nor do they cancel what is left of a code.
    rng = np.random.default_rng(0)
    means = 2.0 * rng.integers(-2000, 2000, (2, 3, 32, 128)).astype(np.float32) + 1
    means[1] *= 2
    off = rng.integers(-3, 4, means.shape).astype(np.float32)
    grouped = np.stack([means + off, means - off], 2).reshape(2, 6, 32, 128)
    ends = []
    for sizes, group, own in [("data=3 gpu=2", "gpu", grouped), ("data=3", None, means)]:
        workers = workers_on(sizes, group)
        txs = {name: make(workers=workers) for name, make in GROUPED.items()}
        ends.append(run_on_mesh(txs, workers, {"w": P()}, {"w": own}))
    for name in GROUPED:
        # Roots and quotients may be fused with what follows, or not.
        rtol = 2e-6 if name == "adam" else 0
        found, want = (end[name][0]["w"] for end in ends)
        np.testing.assert_allclose(found, want, rtol=rtol, err_msg=name)
        assert np.abs(found).min() > 0


# --- Bytes

PAPERS = [  # bits that each worker sends for a parameter of a large model
    (B.diloco, {}, lambda w: 2 * (w - 1) / w * 32),
    (B.diloco, {"bits": 4}, lambda w: (w - 1) / w * 2 * (4 + 16 / 128)),
    (B.one_bit_adam, {"warmup": 100}, lambda w: (w - 1) / w * 2.25),
    (  # 16 (m + n) in place of m n
        lambda rate, **how: B.powersgd(SGD, 16, **how), {},
        lambda w: (w - 1) / w * 2 * 32 * 16 * (2**-17 + 2**-18),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "options", "bits"), PAPERS)
def test_large_models_cost_what_the_papers_say(make, options, bits):
    tx = make(1e-3, workers=AXIS, **options)
    shapes = {"w": jax.ShapeDtypeStruct((2**18, 2**17), jnp.float32)}
    for workers in (7, 64):
        sent = lc.audit.of(tx, shapes, absent(workers))
        assert sent.bits_per_parameter == pytest.approx(bits(workers), rel=0.01)


# --- What is refused

NUMBERS = [0, -1, 1.5, True, "4", None]
BAD = [  # makers, an argument, its values, and words of the message
    (
        [B.diloco], "momentum",
        [1.0, -0.1, "0.9"], "momentum={!r}", "[0, 1)",
    ),
    ([B.one_bit_adam], "b1", [1.0, -1], "b1={!r}", "[0, 1)"),
    ([B.one_bit_adam], "b2", [1.0], "b2={!r}", "[0, 1)"),
    (
        [B.one_bit_adam], "mask", [{"w": "no"}],
        "mask['w'] is 'no': a mask has a bool for each leaf",
    ),
    ([B.one_bit_adam], "eps", [0.0, np.nan, "1"], "eps={!r}: give a number above 0"),
    ([B.diloco], "bits", [0, 9, 4.0], "1 to 8 bits"),
    ([B.one_bit_adam], "warmup", NUMBERS, "warmup={!r}: give a whole number of"),
    ([B.powersgd], "rank", NUMBERS, "rank={!r}", "whole number of at least 1"),
    (
        [B.powersgd], "workers", [workers_on("data=2 gpu=2", "gpu")],
        "has no two levels", "group='gpu'", "without a group",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("makers", "name", "values", "words"), [(*x[:3], x[3:]) for x in BAD])
def test_arguments_out_of_range(makers, name, values, words):
    for make in makers:
        for value in values:
            options = {"workers": AXIS, **NEEDED.get(make, {}), name: value}
            with refused(*(word.format(value) for word in words)):
                make(SGD if make is B.powersgd else 1e-3, **options)
