"""The baselines: against their reference, on shards and in groups, the papers' claims, and bad input.

As in ``test_against_reference``, gradients are small integers, and learning rates, momenta and decays
are powers of two, so that sums are exact in any order and equal means equal. Tolerances say why.
1-bit Adam, DGC and PowerSGD meet their reference in files of their own.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_against_reference import (
    TREES,
    Story,
    assert_equal,
    assert_statistics,
    eventful,
    in_rows,
    integers,
    same_everywhere,
    simulate,
    zeros,
)

import lioncub_jax as lc
from lioncub_jax import baselines, reference
from lioncub_jax.reference import baselines as oracles
from lioncub_jax.reference import dgc, one_bit_adam, powersgd

TWO_PHASE = lc.wires.two_phase()
SGD = optax.sgd(0.5, momentum=0.5)


def rate(count):
    return jnp.where(count % 2 == 0, 0.25, 0.5)


def nobody_abstains(grads):
    return Story(grads, np.zeros(jax.tree.leaves(grads)[0].shape[:2], bool))


def workers_of(sizes, group=None, kind=AxisType.Auto):
    devices = jax.devices()[: np.prod(list(sizes.values()))]
    kinds = (kind,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)
    return lc.Workers(mesh, AXIS, group)


def refused(*words, kind=ValueError):
    return pytest.raises(kind, match="(?s)" + ".*".join(map(re.escape, words)))


# --- Against the reference


def pair(make, simulator, *args, **options):
    """A baseline and what it should be."""
    tx = make(rate, *args, axis_name=AXIS, **options)
    return tx, reference.optimizer(simulator, rate, 0.0)


def fed_back(name, *args, **options):
    tx = getattr(baselines, name)(rate, *args, axis_name=AXIS, **options)
    return tx, getattr(oracles, name)(rate, *args, **options)


VOTED = {
    1: {
        "ef_signsgd": fed_back("ef_signsgd"),
        "terngrad": pair(baselines.terngrad, oracles.terngrad(None, 3, 0.5), 0.5, None, 3),
        "qsgd": pair(baselines.qsgd, oracles.qsgd(2, momentum=0.5), 2, 0.5),
    },
    3: {  # leaves of mixed precision
        "signsgd": pair(baselines.signsgd, reference.local_momentum(0, 0)),
        "ef_signsgd": fed_back("ef_signsgd"),
        "terngrad": pair(baselines.terngrad, oracles.terngrad(None, 3), 0.0, None, 3),
        "qsgd": pair(baselines.qsgd, oracles.qsgd(2, 5, 0.5), 2, 0.5, 5),
    },
    8: {
        "signum": pair(baselines.signum, reference.local_momentum(0.75, 0.75), 0.75),
        "terngrad": pair(baselines.terngrad, oracles.terngrad(momentum=0.5), 0.5),
        "qsgd": pair(baselines.qsgd, oracles.qsgd()),
        "diloco, 1 bit": fed_back("diloco", 0.5, 1),
        "diloco, 4 bits": fed_back("diloco", 0.5, 4),
    },
}  # fmt: skip


@pytest.mark.parametrize("workers", VOTED)
def test_with_workers_that_abstain_it_is_the_reference_bit_for_bit(run_workers, workers):
    params, methods = zeros(TREES[workers]), VOTED[workers]
    if workers == 3:
        kinds = {"12000": jnp.bfloat16, "129": jnp.float16}
        params = {n: p.astype(kinds.get(n, p.dtype)) for n, p in params.items()}
    story = eventful(params, workers, seed=workers)
    done = run_workers({name: tx for name, (tx, _) in methods.items()}, params, *story)
    simulated = simulate({name: oracle for name, (_, oracle) in methods.items()}, params, story)
    for name, (got, state) in done.items():
        updates, want = simulated[name]
        assert_equal(got, updates, of=name)
        assert any(u.any() for u in got.values()), name
        abstained = same_everywhere(optax.tree.get(state, "abstained"))
        assert (abstained == [0, 1, 1, workers, 0, 0]).all()
        if name.startswith("sign"):
            assert_statistics(state[0], want)
        if name == "signum":
            assert_equal(state[0].mu, want.mu)
        if getattr(want, "error", None) is not None:
            votes = state[1 if name == "ef_signsgd" else 0]
            assert_equal(votes.error, want.error, of=name)
            owner = in_rows(votes.owner[0].value.error, TWO_PHASE)
            assert_equal(owner[:, : want.owner.shape[1]], want.owner)
            assert not owner[:, want.owner.shape[1] :].any()
            assert owner.any() == (workers > 1)


def decays(params):
    return {name: name != "b" for name in params}


def eighths(shapes):
    """Parameters with few bits, so that their decay is exact too."""
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(rng.integers(-8, 9, s) / 8, jnp.float32) for k, s in shapes.items()}


def optax_of_mean(make, optimizer, *args):
    decay = {"weight_decay": 0.5, "mask": decays}
    tx = make(rate, *args, **decay, axis_name=AXIS)
    return tx, oracles.averaged(optimizer(rate, *args, **decay))


SHAPES = {"w": (5, 13), "b": (7,), "scalar": ()}
MEANS = {
    "sgd": (
        baselines.sgd(rate, 0.5, 0.5, decays, axis_name=AXIS),
        reference.optimizer(oracles.averaged(optax.trace(0.5)), rate, 0.5, decays(SHAPES)),
    ),
    "diloco": fed_back("diloco", 0.5),
    "lion": optax_of_mean(baselines.lion, optax.lion, 0.5, 0.25),
    "adamw": optax_of_mean(baselines.adamw, optax.adamw, 0.5, 0.75, 0.25),
}


def test_means_go_into_the_optimizers_of_optax(run_workers):
    params = eighths(SHAPES)
    story = nobody_abstains(integers(params, 4, 8))
    done = run_workers({name: tx for name, (tx, _) in MEANS.items()}, params, *story)
    want = simulate({name: oracle for name, (_, oracle) in MEANS.items()}, params, story)
    for name, (got, _) in done.items():
        # Roots and quotients may be fused with what follows, or not.
        rtol = 2e-6 if name == "adamw" else 0
        for leaf, u in got.items():
            np.testing.assert_allclose(u, want[name][0][leaf], rtol=rtol, err_msg=name)


MEANS_OF = [baselines.sgd, baselines.adamw, baselines.lion]
DECAYING = [
    baselines.signsgd, baselines.signum, baselines.ef_signsgd, baselines.terngrad, baselines.qsgd,
    baselines.dgc, baselines.one_bit_adam, baselines.zero_one_adam,
]  # fmt: skip
NEEDED = {baselines.one_bit_adam: {"warmup": 1}, baselines.diloco: {"bits": 4}}


def decaying(make, mask, share=0.5):
    how = {"weight_decay": share, "mask": mask, **NEEDED.get(make, {})}
    return make(rate, **how, axis_name=AXIS)


def test_decay_is_decoupled_and_masked(run_workers):
    """Without gradients it is all that moves: ``-lr wd p`` of the leaves that decay."""
    params = eighths({"w": (5, 13), "b": (7,)})
    story = nobody_abstains({n: np.zeros((2, 1, *p.shape), np.float32) for n, p in params.items()})
    txs = {make.__name__: decaying(make, decays) for make in DECAYING}
    txs["scheduled"] = decaying(baselines.ef_signsgd, decays, lambda count: 0.5)
    for name, (got, _) in run_workers(txs, params, *story).items():
        want = np.stack([-lr * 0.5 * params["w"] for lr in (0.25, 0.5)])
        np.testing.assert_array_equal(got["w"], want, err_msg=name)
        assert not got["b"].any(), name


@pytest.mark.parametrize("make", [*MEANS_OF, *DECAYING])
def test_a_mask_that_is_not_of_bools(make):
    with refused("mask['w'] is 'no': a mask has a bool for each leaf", kind=TypeError):
        decaying(make, {"w": "no"})


# --- What the papers claim, of the reference, which the library equals


def test_random_codes_are_right_on_average():
    """Within 6 standard errors of 500 steps, each with random numbers of its own."""
    steps, workers = 500, 4
    params = zeros({"w": (130,), "b": (3,)})
    own = jax.tree.map(lambda g: 1.0 * g[0], integers(params, 1, workers, seed=1))
    grads = jax.tree.map(lambda g: np.broadcast_to(g, (steps, *g.shape)), own)
    # The spread of one code is at most half of what lies between two levels.
    simulators = {
        3.0: oracles.terngrad(clip=None),
        3 / 3: oracles.qsgd(3),
    }
    for unit, (got, _) in simulate(simulators, params, nobody_abstains(grads)).items():
        for leaf in params:
            off = got[leaf].mean(0) - own[leaf].mean(0)
            assert np.abs(off).max() < 6 * unit / 2 / np.sqrt(steps * workers), (unit, leaf)
        assert got["w"].std(0).any()


OWING = {
    "ef_signsgd": oracles.ef_signsgd(1.0),
    **{f"diloco, {p} bits": oracles.diloco(1.0, 0.0, p) for p in (1, 4, 8)},
    "dgc": reference.optimizer(dgc.dgc(0.0, 0.03, warmup=2), 1.0, 0.0),
    **{f"powersgd, bits={p}": powersgd.powersgd(optax.sgd(1.0), 1, p) for p in (None, 1, 4)},
}


def test_nothing_is_lost():
    """All updates, and what workers and owners still owe, add up to all gradients."""
    params = zeros({"a": (5, 77), "one": ()})
    rng = np.random.default_rng(0)
    grads = {
        "a": rng.normal(size=(6, 4, 5, 77)).astype(np.float32),
        "one": rng.integers(-3, 4, (6, 4)).astype(np.float32),
    }
    for name, (got, state) in simulate(OWING, params, nobody_abstains(grads)).items():
        kept = state.residual if name == "dgc" else state.error
        first, *single = jax.tree.leaves(kept)
        owed = first[-1].mean(0)
        if hasattr(state, "owner"):
            owed = owed + state.owner[-1].reshape(-1)[:385].reshape(5, 77)
        owed = -owed if name == "ef_signsgd" else owed  # whose errors are of what is added
        want = grads["a"].mean(1).sum(0)
        np.testing.assert_allclose(owed - got["a"].sum(0), want, atol=2e-5, err_msg=name)
        assert np.abs(owed).max() > 0.01
        # One bit, or one element of some, says a single number as it is: padding is in no scale.
        if name in ("ef_signsgd", "diloco, 1 bits", "dgc", "powersgd, bits=None"):
            np.testing.assert_array_equal(got["one"], -grads["one"].mean(1), err_msg=name)
            assert not any(x.any() for x in single)


# --- Leaves that are cut, and groups

CUT = {
    "w": ((6, 256), P(None, "tensor")), "v": ((16, 128), P("tensor")), "whole": ((20, 30), P()),
    "b": ((9,), P()), "empty": ((0, 4), P()),
}  # fmt: skip
ADAM = {"b1": 0.5, "b2": 0.75, "warmup": 1}
ON_SHARDS = {  # transform, reference, and the updates' and errors' tolerance
    "ef_signsgd": (*fed_back("ef_signsgd"), 0),
    "one_bit_adam": (
        baselines.one_bit_adam(0.5, **ADAM, axis_name=AXIS),
        reference.optimizer(one_bit_adam.one_bit_adam(**ADAM), 0.5, 0.0),
        2e-6,
    ),
    "dgc": (*pair(baselines.dgc, dgc.dgc(0.5, 0.1, 1), 0.5, density=0.1, warmup=1), 0),
    "powersgd": (
        baselines.powersgd(SGD, 2, axis_name=AXIS), powersgd.powersgd(SGD, 2), 2e-3,
    ),
}  # fmt: skip


def shard(x, spec, at, lead):
    """That of a device at an index of the inner axis, of arrays with so many leading dimensions."""
    dims = [dim for dim, axis in enumerate(spec) if axis]
    return np.split(x, 2, axis=lead + dims[0])[at] if dims else x


def errors_of(state):
    """What workers owe, or leave for later, of whichever of these."""
    for part in (state, *state):
        part = getattr(part, "exchange", part)
        for field in ("error", "residual"):
            if hasattr(part, field):
                return getattr(part, field)
    raise AssertionError(state)


def test_devices_of_a_worker_treat_shards_as_leaves():
    """In whole rows, for those with a scale of each, and without zeros, whose sides depend on the place."""
    specs = {n: spec for n, (_, spec) in CUT.items()}
    workers = workers_of({AXIS: 4, "tensor": 2}, kind=AxisType.Explicit)
    put = lambda tree, *lead: {  # noqa: E731
        n: jax.device_put(x, NamedSharding(workers.mesh, P(*lead, *specs[n])))
        for n, x in tree.items()
    }
    odd = 2 * np.arange(-500, 500) + 1
    whole = zeros({n: shape for n, (shape, _) in CUT.items()})
    grads = integers(whole, 3, 4, values=odd)
    for g in grads.values():  # no two workers cancel, and no two steps
        g *= 2.0 ** np.arange(-10, -6).reshape(4, *[1] * (g.ndim - 2))
        g[2] *= 2
    # In one shard only; the worker abstains as a whole. A mean of two is exact.
    grads["w"][2, 2, 0, 0] = grads["v"][2, 1, -1, 0] = np.nan
    on = {n: lc.on_mesh(tx, workers, specs=specs) for n, (tx, _, _) in ON_SHARDS.items()}
    params = put(whole)
    states, got = {n: tx.init(params) for n, tx in on.items()}, []

    @jax.jit
    def update(grads, states):
        done = {n: tx.update(grads, states[n], params) for n, tx in on.items()}
        return {n: u for n, (u, _) in done.items()}, {n: s for n, (_, s) in done.items()}

    for step in range(3):
        now = put({n: g[step] for n, g in grads.items()}, AXIS)
        updates, states = update(now, states)
        got.append(jax.tree.map(np.asarray, updates))
    for g in grads.values():
        g[2, 1:3] = 0
    told = np.zeros((3, 4), bool)
    told[2, 1:3] = True
    for at in range(2):
        part = {n: shard(g, specs[n], at, 2) for n, g in grads.items()}
        blank = {n: jnp.zeros(x.shape[2:]) for n, x in part.items()}
        want = simulate({n: o for n, (_, o, _) in ON_SHARDS.items()}, blank, Story(part, told))
        for name, (updates, wanted) in want.items():
            near = dict.fromkeys(("rtol", "atol"), ON_SHARDS[name][2])
            owed = errors_of(wanted)
            if name == "powersgd":
                owed = dict(zip(sorted(blank), owed, strict=True))
            for leaf in CUT:
                mine = shard(np.stack([u[name][leaf] for u in got]), specs[leaf], at, 1)
                np.testing.assert_allclose(mine, updates[leaf], **near, err_msg=(name, leaf))
                assert leaf == "empty" or mine.any()
                if leaf != "empty" and owed[leaf] is not None:
                    left = shard(np.asarray(errors_of(states[name])[leaf]), specs[leaf], at, 1)
                    np.testing.assert_allclose(left, owed[leaf][-1], **near, err_msg=(name, leaf))


def test_norms_and_scales_are_those_of_all_shards():
    """Of terngrad's scales and deviations."""
    workers = workers_of({AXIS: 4, "tensor": 2})
    grads = {"w": np.ones((4, 2, 32), np.float32), "b": np.full((4, 16), 1.0, np.float32)}
    grads["w"][:, 0, :3] = 4
    single = {n: np.zeros_like(g) for n, g in grads.items()}
    single["w"][:, 1, 5] = -16
    txs = {
        "scaled": (baselines.terngrad(1.0, clip=None, axis_name=AXIS), grads),
        "clipped": (baselines.terngrad(1.0, axis_name=AXIS), single),
    }

    @jax.jit
    def all_of_them():
        done = {}
        for name, (tx, g) in txs.items():
            on = lc.on_mesh(tx, workers, specs={"w": P("tensor"), "b": P()})
            params = {n: jnp.zeros(x.shape[1:]) for n, x in g.items()}
            done[name], _ = on.update(g, on.init(params), params)
        return done

    got = jax.tree.map(np.asarray, all_of_them())
    assert (got["scaled"]["w"][0, :3] == -4).all() and (got["scaled"]["b"] == -1).all()
    assert set(got["scaled"]["w"][1]) <= {0, -1, -2, -3, -4}
    assert len(set(got["scaled"]["w"][1])) > 2
    want = np.zeros((2, 32))
    want[1, 5] = 2.5 * 16 / 8  # the root of 64 elements
    np.testing.assert_array_equal(got["clipped"]["w"], want)


GROUPED = {
    "signsgd": lambda w: baselines.signsgd(0.5, axis_name=w),
    "ef_signsgd": lambda w: baselines.ef_signsgd(0.5, axis_name=w),
    "qsgd": lambda w: baselines.qsgd(0.5, 4, 0.5, axis_name=w),
    "sgd": lambda w: baselines.sgd(0.5, 0.5, axis_name=w),
    "one_bit_adam": lambda w: baselines.one_bit_adam(0.5, **ADAM, axis_name=w),
}


def test_a_group_sends_its_mean_as_one_worker():
    """Each slice is of whole rows, so codes and scales are those of workers that have the means."""
    params, rng = {"w": jnp.ones((32, 128))}, np.random.default_rng(0)
    alone, grouped = {}, {}
    # Odd means of three workers do not tie. Four bits tell -7 to 7 exactly, so nothing is at random;
    # feedback would find zeros among so few values, and their coins lie elsewhere.
    for most in (4, 2000):
        means = 2.0 * rng.integers(-most, most, (2, 3, 32, 128)).astype(np.float32) + 1
        means[..., 0] = 2 * most - 1
        means[1] *= 2  # nor do they cancel what is owed
        apart = rng.integers(-3, 4, means.shape)
        alone[most] = means
        grouped[most] = np.stack([means + apart, means - apart], 2).reshape(2, 6, 32, 128)
    ends = []
    for sizes, group, own in [({AXIS: 3, "gpu": 2}, "gpu", grouped), ({AXIS: 3}, None, alone)]:
        workers = workers_of(sizes, group)
        on = {n: lc.on_mesh(make(workers), workers) for n, make in GROUPED.items()}

        @jax.jit
        def steps(own, on=on):
            done = {}
            for name, tx in on.items():
                state, updates = tx.init(params), []
                for g in own[4 if name.startswith("qsgd") else 2000]:
                    u, state = tx.update({"w": g}, state, params)
                    updates.append(u["w"])
                done[name] = jnp.stack(updates)
            return done

        ends.append(jax.tree.map(np.asarray, steps(own)))
    for name in GROUPED:
        # Roots and quotients may be fused with what follows, or not.
        rtol = 2e-6 if "adam" in name else 0
        np.testing.assert_allclose(*(end[name] for end in ends), rtol=rtol, err_msg=name)
        assert np.abs(ends[0][name]).min() > 0


def test_what_is_owed_survives_a_changed_number_of_workers(tmp_path):
    params = {"w": jnp.ones((20, 130))}
    txs = {n: tx for n, (tx, _, _) in ON_SHARDS.items()}

    def state(workers, grads=None):
        on = {n: lc.on_mesh(tx, workers) for n, tx in txs.items()}
        states = {n: tx.init(params) for n, tx in on.items()}
        if grads is not None:  # two steps, the second in codes
            both = jax.jit(lambda s: {n: tx.update(grads, s[n], params)[1] for n, tx in on.items()})
            states = both(both(states))
        return lc.TrainState(jnp.int32(0), params, (), states, jax.random.key(0))

    grads = np.random.default_rng(0).normal(size=(4, 20, 130)).astype(np.float32)
    four = state(workers_of({AXIS: 4}), {"w": grads})
    with lc.Checkpoints(tmp_path, axis_name=AXIS) as checkpoints:
        checkpoints.save(four, wait=True)
        two = checkpoints.restore(state(workers_of({AXIS: 2}))).state
    for name in txs:
        kept = [errors_of(s.opt_state[name])["w"] for s in (four, two)]
        assert [len(x) for x in kept] == [4, 2] and np.abs(kept[1]).max() > 0.01
        means = [np.asarray(x).mean(0) for x in kept]
        np.testing.assert_allclose(*means, rtol=1e-5, atol=1e-6, err_msg=name)
    votes = [s.opt_state["ef_signsgd"][1] for s in (four, two)]
    owners = [np.asarray(v.owner[0].value.error).reshape(-1, 128) for v in votes]
    rows = 21  # of the leaf; the rest fills slices
    np.testing.assert_array_equal(*(owner[:rows] for owner in owners))
    assert owners[0].any() and not any(owner[rows:].any() for owner in owners)


# --- Bytes

PAPERS = [  # bits that each worker sends for a parameter of a large model
    (baselines.sgd, {}, lambda w: 2 * (w - 1) / w * 32),
    (baselines.signsgd, {}, lambda w: (w - 1) / w * (2 + 2 / 128)),
    (baselines.ef_signsgd, {}, lambda w: (w - 1) / w * (1 + 16 / 128 + 1 + 16 / 128)),
    (baselines.terngrad, {"clip": None}, lambda w: (w - 1) / w * (2 + (2 * w).bit_length())),
    (baselines.qsgd, {"bits": 2}, lambda w: (w - 1) * (2 + 16 / 128)),
    (baselines.diloco, {"bits": 4}, lambda w: (w - 1) / w * 2 * (4 + 16 / 128)),
    (baselines.dgc, {"warmup": 9}, lambda w: (w - 1) * 64 / 1000),
    (baselines.one_bit_adam, {"warmup": 100}, lambda w: (w - 1) / w * 2.25),
]  # fmt: skip


@pytest.mark.parametrize(("make", "options", "bits"), PAPERS)
def test_large_models_cost_what_the_papers_say(make, options, bits):
    tx = make(1e-3, axis_name=AXIS, **options)
    shapes = {"w": jax.ShapeDtypeStruct((2**28,), jnp.float32)}
    for workers in (2, 7, 64):
        sent = lc.traffic.of(tx, shapes, workers)
        assert sent.bits_per_parameter == pytest.approx(bits(workers), rel=1e-3)
    assert lc.traffic.of(tx, shapes, 1).sent_bytes == 0


def test_one_worker_alone_sends_nothing():
    workers, params = workers_of({AXIS: 1}), eighths({"w": (20, 130), "b": (7,)})
    txs = [tx for tx, _, _ in ON_SHARDS.values()] + [baselines.terngrad(0.1, axis_name=AXIS)]
    on = [lc.on_mesh(tx, workers) for tx in txs]
    grads = {n: p[None] for n, p in params.items()}
    run = jax.jit(lambda g: [tx.update(g, tx.init(params), params) for tx in on])
    assert lc.traffic.compiled_bytes(run.lower(grads).compile(), workers.mesh) == 0


# --- What is refused

B = baselines
NUMBERS = [0, -1, 1.5, True, "4", None]
BAD = [  # makers, an argument, its values, and words of the message
    (
        [B.sgd, B.signum, B.terngrad, B.qsgd, B.dgc, B.diloco], "momentum",
        [1.0, -0.1, "0.9"], "momentum={!r}", "[0, 1)",
    ),
    ([B.adamw, B.lion, B.one_bit_adam, B.zero_one_adam], "b1", [1.0, -1], "b1={!r}", "[0, 1)"),
    ([B.adamw, B.lion, B.one_bit_adam, B.zero_one_adam], "b2", [1.0], "b2={!r}", "[0, 1)"),
    ([B.sgd, B.adamw, B.lion], "dtype", [jnp.int8], "float32 or bfloat16"),
    ([B.one_bit_adam, B.zero_one_adam], "eps", [0.0, np.nan, "1"], "eps={!r}: give a number above 0"),
    ([B.terngrad], "clip", [0, -1.0, np.nan, "2.5"], "clip={!r}", "above 0", "or None"),
    ([B.qsgd], "bits", [1, 9, 4.0], "2 to 8 bits"),
    ([B.diloco, B.powersgd], "bits", [0, 9, 4.0], "1 to 8 bits"),
    ([B.one_bit_adam], "warmup", NUMBERS, "warmup={!r}: give a whole number of"),
    ([B.zero_one_adam], "kappa", NUMBERS, "kappa={!r}: give a whole number of"),
    ([B.zero_one_adam], "freeze_after", NUMBERS, "freeze_after={!r}: give a whole number of"),
    ([B.dgc], "density", [0, -0.1, 1.5, np.nan, True, "0.1", None], "density={!r}", "(0, 1]"),
    ([B.dgc], "warmup", [-1, 1.5, True, "4", None], "warmup={!r}", "whole number of steps"),
    ([B.powersgd], "rank", NUMBERS, "rank={!r}", "whole number of at least 1"),
    (
        [B.terngrad, B.dgc, B.powersgd], "axis_name", [workers_of({AXIS: 2, "gpu": 2}, "gpu")],
        "has no two levels", "group_axis='gpu'", "without a group_axis",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("makers", "name", "values", "words"), [(*x[:3], x[3:]) for x in BAD])
def test_arguments_out_of_range(makers, name, values, words):
    for make in makers:
        first = SGD if make is B.powersgd else 1e-3
        for value in values:
            options = {"axis_name": AXIS, **NEEDED.get(make, {}), name: value}
            with refused(*(word.format(value) for word in words)):
                make(first, **options)


FEEDBACK = {"up": lc.quantize.midrise(1), "owner": lc.decide.feedback_at_owner()}
GROUPLESS = B.signsgd(1e-3, axis_name=AXIS)
CALLS = [
    (lambda: B.dgc(0.1, density=0.5, warmup=4, axis_name=AXIS), "warmup=4 with density=0.5", "25 %"),
    (lambda: lc.traffic.of(GROUPLESS, {}, 4, group_size=2), "group_size=2", "has no group_axis"),
    (lambda: combined(**FEEDBACK, down=lc.decide.floats()), "scaled_signs"),
    (lambda: combined(down=lc.decide.scaled_signs()), "feedback_at_owner"),
    (
        lambda: combined(**FEEDBACK, down=lc.decide.scaled(2)),
        "down=scaled(2) does not fit", "of as many bits",
    ),
]  # fmt: skip


def combined(**parts):
    return lc.communicate(axis_name=AXIS, memory=lc.momentum.nothing(), **parts)


@pytest.mark.parametrize(("call", "words"), [(x[0], x[1:]) for x in CALLS])
def test_what_does_not_fit_together(call, words):
    with refused(*words):
        call()
