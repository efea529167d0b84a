"""1-bit Adam and 0/1 Adam against their reference, bit for bit, and their bytes in compiled programs.

As in ``test_against_reference``, gradients are small integers and betas powers of two, so that momenta,
magnitudes and sums over workers are exact. Roots and quotients may be fused with what follows, or not:
updates have a tolerance of a few roundings.
"""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_against_reference import (
    EVENTS,
    FLOATING,
    TREES,
    Story,
    assert_equal,
    eventful,
    in_rows,
    integers,
    same_everywhere,
    simulate,
    zeros,
)

import lioncub_jax as lc
from lioncub_jax import baselines, reference
from lioncub_jax.reference import one_bit_adam as oracle
from lioncub_jax.traffic import compiled

BETAS = {"b1": 0.5, "b2": 0.75}
SHAPES = {"a": (5, 13), "b": (7,), "long": (3, 130), "scalar": ()}
TWO_PHASE = lc.wires.two_phase()


# A zero takes a side by its worker's number and its place; among so many values there is none to be found.
ODD = 2 * np.arange(-2000, 2000) + 1


def close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), got, want)


def close_by_dtype(got, want):
    """Of short dtypes one rounding more."""
    for name, u in got.items():
        rtol = max(2e-6, float(jnp.finfo(u.dtype).eps))
        np.testing.assert_allclose(
            *(x.astype(np.float32) for x in (u, want[name])), rtol=rtol, err_msg=name
        )
        assert u.dtype == want[name].dtype


def plain(params, steps, workers, seed=0, values=range(-3, 4)):
    grads = integers(params, steps, workers, values, seed)
    return Story(grads, np.zeros((steps, workers), bool))


# --- The reference itself


@pytest.mark.parametrize("workers", [1, 3])
def test_the_reference_is_adam_of_the_mean_until_the_variance_freezes(workers):
    params, steps = zeros(SHAPES), 5
    story = plain(params, steps, workers)
    simulators = {
        "1-bit": oracle.one_bit_adam(**BETAS, warmup=4),
        "0/1": oracle.zero_one_adam(**BETAS, kappa=3, freeze_after=9),
    }
    tx, want = optax.scale_by_adam(**BETAS), []
    state = tx.init(params)
    for step in range(steps):
        mean = {name: jnp.mean(g[step], 0) for name, g in story.grads.items()}
        update, state = tx.update(mean, state)
        want.append(update)
    want = jax.tree.map(lambda *x: np.stack(x), *want)
    for got, states in simulate(simulators, params, story).values():
        close(*(jax.tree.map(lambda x: x[:4], u) for u in (got, want)))
        assert states.updates.tolist() == [1, 2, 3, 4, 4]
        assert (got["a"][4] != want["a"][4]).any()
        assert_equal(*(jax.tree.map(lambda v, n=n: v[n], states.nu) for n in (3, 4)))


def test_the_gaps_of_the_reference_double_after_kappa_updates():
    params = zeros({"w": (3,)})
    story = plain(params, 40, 2)
    _, states = simulate({0: oracle.zero_one_adam(kappa=4, freeze_after=30)}, params, story)[0]
    updated = np.flatnonzero(np.diff(states.updates, prepend=0))
    assert updated.tolist() == [0, 1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28]


# --- Against the reference

METHODS = {
    "1-bit": (baselines.one_bit_adam, oracle.one_bit_adam, {"warmup": 2}),
    "1-bit, bfloat16": (
        baselines.one_bit_adam, oracle.one_bit_adam, {"warmup": 1, "error_dtype": jnp.bfloat16},
    ),
    "1-bit, coded": (baselines.one_bit_adam, oracle.one_bit_adam, {"warmup": 3, "bits": 4}),
    # In full precision after 0, 1 and 3 steps: at the fourth nobody is there, so at the fifth.
    "0/1": (baselines.zero_one_adam, oracle.zero_one_adam, {"kappa": 1, "freeze_after": 100}),
}  # fmt: skip


def side_by_side(run_workers, params, story, names, lr=0.25):
    """Methods and their references: ``{name: ((updates, state), (updates, state))}``."""
    txs = {n: METHODS[n][0](lr, **BETAS, **METHODS[n][2], axis_name=AXIS) for n in names}
    oracles = {
        n: reference.optimizer(METHODS[n][1](**BETAS, **METHODS[n][2]), lr, 0.0) for n in names
    }
    got, want = run_workers(txs, params, *story), simulate(oracles, params, story)
    return {n: ((got[n][0], got[n][1][0]), want[n]) for n in names}


def assert_state(state, want, of=""):
    """All that is kept after each step."""
    for name in ("count", "updates"):
        assert_equal(same_everywhere(getattr(state, name), of), getattr(want, name), of=of)
    for name in ("abstained", "abstentions"):
        assert_equal(same_everywhere(getattr(state.exchange, name), of), getattr(want, name))
    for name in ("mu", "nu"):
        own = jax.tree.map(same_everywhere, getattr(state, name))
        assert_equal(own, getattr(want, name), of=(of, name))
    assert_equal(state.exchange.error, want.error, of=of)
    owner = in_rows(state.exchange.owner[0].value.error, TWO_PHASE)
    rows = want.owner.shape[1]
    assert_equal(owner[:, :rows], want.owner, of=of)
    assert not owner[:, rows:].any()


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_with_workers_that_abstain_it_is_the_reference_bit_for_bit(run_workers, workers):
    params = zeros(TREES[workers])
    story = eventful(params, workers, seed=workers)
    # The mean of seven is exact, too, if they are multiples of it.
    grads = {n: g * 7 if workers == 8 else g for n, g in story.grads.items()}
    story = story._replace(grads=grads)
    names = list(METHODS) if workers > 1 else ["0/1"]
    for name, (got, want) in side_by_side(run_workers, params, story, names).items():
        assert_state(got[1], want[1], of=name)
        close_by_dtype(got[0], want[0])
        nobody = EVENTS.index("nobody there")
        assert not any(u[nobody].any() for u in got[0].values())
        assert any(u[5].any() for u in got[0].values())
        assert want[1].count[-1] == (3 if workers == 1 else 5)
        if workers == 8:  # of two one has nothing to say of some rows
            assert any(e[-1].any() for e in got[1].exchange.error.values())


def test_leaves_of_mixed_precision(run_workers):
    params = zeros({"a": (65,), "b": (31,), "c": (3, 10), "d": ()}, FLOATING)
    story = Story(integers(params, 4, 2), np.eye(4, dtype=bool)[:, :2])
    for got, want in side_by_side(run_workers, params, story, ["0/1"]).values():
        assert_state(got[1], want[1])
        close_by_dtype(got[0], want[0])
        assert {str(u.dtype) for u in got[0].values()} == set(FLOATING)
        moments = jax.tree.leaves((got[1].mu, got[1].nu))
        assert {str(x.dtype) for x in moments} == {"float32"}


def test_before_the_freeze_it_is_adamw_of_the_mean(run_workers):
    rng = np.random.default_rng(0)
    params = {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in SHAPES.items()}
    story = plain(params, 5, 4)
    mask = {name: name != "b" for name in params}
    given = {**BETAS, "eps": 1e-3, "weight_decay": 0.25, "mask": mask, "axis_name": AXIS}
    rate = lambda count: 0.5 / (1 + count)  # noqa: E731
    txs = {
        "adamw": baselines.adamw(rate, **given),
        "1-bit": baselines.one_bit_adam(rate, **given, warmup=4),
        "0/1": baselines.zero_one_adam(rate, **given, kappa=3),
    }
    done = run_workers(txs, params, *story)
    for name in ("1-bit", "0/1"):
        for leaf, u in done[name][0].items():
            want = done["adamw"][0][leaf]
            np.testing.assert_allclose(u[:4], want[:4], rtol=1e-5, atol=1e-6)
            assert leaf == "scalar" or np.abs(u[4] - want[4]).max() > 1e-3


def test_one_worker_alone_freezes_its_variance_and_has_an_exact_momentum(run_workers):
    params = zeros(SHAPES)
    story = plain(params, 6, 1)
    tx = baselines.one_bit_adam(1.0, **BETAS, warmup=2, axis_name=AXIS)
    got, (state, *_) = run_workers({0: tx}, params, *story)[0]
    mu = np.zeros(SHAPES["long"])
    for step, g in enumerate(story.grads["long"][:, 0]):
        mu = 0.5 * mu + 0.5 * g
        np.testing.assert_array_equal(state.mu["long"][step, 0], mu)
    nu = state.nu["long"][:, 0]
    assert (nu[0] != nu[1]).any() and (nu[1:] == nu[1]).all()
    v = nu[1] / (1 - 0.75**2)
    want = np.where(v > 0, -(mu / (1 - 0.5**6)) / (np.sqrt(v) + 1e-8), 0)
    np.testing.assert_allclose(got["long"][-1], want, rtol=1e-5)
    assert not any(e.any() for e in state.exchange.error.values())


# --- What holds whatever the codes


def test_nothing_is_lost(run_workers):
    """What is owed grows by what the momentum would have been, less what it is."""
    params = zeros({"w": (3, 130), "scalar": ()})
    workers, steps = 4, 8
    story = plain(params, steps, workers)
    tx = baselines.one_bit_adam(1.0, **BETAS, warmup=2, axis_name=AXIS)
    _, (state, *_) = run_workers({0: tx}, params, *story)[0]
    owner = in_rows(state.exchange.owner[0].value.error, TWO_PHASE).reshape(steps, -1)
    places = {"scalar": owner[:, 0], "w": owner[:, 128 : 128 + 390].reshape(steps, 3, 130)}
    for name, late in places.items():
        owed = state.exchange.error[name].mean(1) + late
        mu, g = state.mu[name][:, 0], story.grads[name].mean(1)
        for step in range(1, steps):
            want = 0.5 * mu[step - 1] + 0.5 * g[step] + owed[step - 1] - owed[step]
            np.testing.assert_allclose(mu[step], want, rtol=0, atol=1e-5)
        assert not owed[1].any() and (owed[-1].any() or name == "scalar")


def test_a_leaf_of_one_element_is_sent_whole(run_workers):
    """With values that a bfloat16 holds the codes lose nothing: the momentum is that of the mean."""
    params = zeros({"b": (1,), "scalar": (), "w": (65,)})
    story = plain(params, 4, 2, values=(-3, -1, 1, 5))
    tx = baselines.one_bit_adam(1.0, **BETAS, warmup=1, axis_name=AXIS)
    _, (state, *_) = run_workers({0: tx}, params, *story)[0]
    for name in ("b", "scalar"):
        mu = 0.0
        for step, g in enumerate(story.grads[name].mean(1)):
            mu = 0.5 * mu + 0.5 * g
            np.testing.assert_array_equal(state.mu[name][step, 0], mu)
        assert not state.exchange.error[name].any()
    assert state.exchange.error["w"].any()


def test_it_does_not_matter_which_worker_is_which(run_workers):
    params = zeros({"w": (3, 130), "b": (7,)})
    story = plain(params, 3, 4, values=ODD)
    order = [2, 0, 3, 1]
    moved = Story({n: g[:, order] for n, g in story.grads.items()}, story.abstain[:, order])
    tx = {0: baselines.one_bit_adam(0.5, **BETAS, warmup=1, axis_name=AXIS)}
    (got, (state, *_)), (want, (wanted, *_)) = (
        run_workers(tx, params, *each)[0] for each in (moved, story)
    )
    assert_equal(got, want)
    assert_equal(state.mu, wanted.mu)
    for name, e in wanted.exchange.error.items():
        np.testing.assert_array_equal(state.exchange.error[name], e[:, order])


def test_what_had_no_gradient_before_the_freeze_is_not_moved(run_workers):
    """One bit says something of it all the same, and a variance of 0 would make it huge."""
    params = zeros({"w": (40,)})
    story = plain(params, 6, 2, values=(-3, -1, 1, 3))
    story.grads["w"][:, :, 7] = 0
    story.grads["w"][4:, :, 9] = 0
    txs = {
        "1-bit": baselines.one_bit_adam(1.0, warmup=2, axis_name=AXIS),
        "0/1": baselines.zero_one_adam(1.0, kappa=1, axis_name=AXIS),
    }
    for got, (state, *_) in run_workers(txs, params, *story).values():
        assert not got["w"][:, 7].any() and state.mu["w"][-1, 0, 7] != 0
        assert np.abs(got["w"]).max() < 10 and got["w"][:, 9].all()


def test_64_bits_change_no_dtype_and_no_number(run_workers):
    params = zeros({"w": (40,), "b": (3,)})
    story = plain(params, 4, 2)
    betas = {name: np.float64(beta) for name, beta in BETAS.items()}
    txs = {
        name: METHODS[name][0](0.25, **betas, **METHODS[name][2], axis_name=AXIS)
        for name in ("1-bit", "0/1")
    }
    want = run_workers(txs, params, *story)
    with jax.enable_x64(True):
        got = run_workers(txs, params, *story)  # the scan fails where a dtype changes
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=2e-6)  # powers of betas are in other precision


# --- When


@pytest.mark.parametrize(("kappa", "end"), [(1, 1000), (3, 50), (16, 1000), (2**31 - 1, 7)])
def test_the_steps_in_full_precision(kappa, end):
    from lioncub_jax.baselines.one_bit_adam import _When

    when, want, at, updates = _When(kappa, end), [], 0, 0
    while at < min(end, 1100):
        want.append(at)
        at += 2 ** (updates // kappa)
        updates += 1
    counts = jnp.arange(1100, dtype=jnp.int32)
    assert np.flatnonzero([when.due(n) for n in range(1100)]).tolist() == want
    assert np.flatnonzero(jax.jit(jax.vmap(when.due))(counts)).tolist() == want


# --- Bytes


LARGE = {"w": (256, 130), "b": (130,), "scalar": ()}


def program(tx, workers, params, mesh_of):
    """A compiled update of a state that is an argument, and its mesh."""
    mesh = mesh_of(workers)
    tx = lc.on_mesh(tx, mesh, axis_name=AXIS)
    state = jax.eval_shape(tx.init, params)
    grads = {n: jax.ShapeDtypeStruct((workers, *p.shape), p.dtype) for n, p in params.items()}
    return jax.jit(tx.update).lower(grads, state, params).compile(), mesh


@pytest.mark.parametrize("workers", [3, 8])
@pytest.mark.parametrize("name", ["1-bit", "0/1"])
def test_the_compiled_program_sends_what_is_predicted_in_both_stages(name, workers, mesh_of):
    make, _, options = METHODS[name]
    params = zeros(LARGE, ("float32", "bfloat16"))
    tx = make(0.1, **options, axis_name=AXIS)
    # The count is an argument, so both stages are in the program.
    found = compiled.collectives(*program(tx, workers, params, mesh_of))
    assert all(one.gated for one in found if one.sent_bytes)
    told = {step: lc.traffic.of(tx, params, workers, step=step) for step in (0, 2, None)}
    sent = sorted((one.op, one.sent_bytes) for one in found if one.sent_bytes)
    # XLA may join the number of those who are there with the mean.
    floats = sum(one for op, one in sent if op == "all-reduce")
    assert floats == told[0].sent_bytes
    in_codes = sorted((one.op, one.sent_bytes) for one in told[2].collectives)
    assert [one for one in sent if one[0] != "all-reduce"] == in_codes
    assert told[2] == told[None] and told[0].share_of_float32 > 1 > 10 * told[2].share_of_float32


def test_a_coded_warm_up_sends_no_floats(mesh_of):
    """Codes in both stages, each as long as predicted."""
    params = zeros(LARGE)
    tx = baselines.one_bit_adam(0.1, warmup=2, bits=8, axis_name=AXIS)
    found = compiled.collectives(*program(tx, 8, params, mesh_of))
    sent = sorted((one.op, one.sent_bytes) for one in found if one.sent_bytes)
    told = [lc.traffic.of(tx, params, 8, step=step).collectives for step in (0, 2)]
    assert sent == sorted((one.op, one.sent_bytes) for each in told for one in each)
    shapes = {"w": jax.ShapeDtypeStruct((2**28,), jnp.float32)}
    early = lc.traffic.of(tx, shapes, 64, step=1)
    assert early.bits_per_parameter == pytest.approx(63 / 64 * 16.25, rel=1e-3)


def test_a_coded_warm_up_finds_the_variance_of_the_mean(run_workers):
    """What codes of 8 bits miss of gradients of one size is small, and comes later."""
    rng = np.random.default_rng(0)
    params = {"w": jnp.zeros((20, 128))}
    grads = {"w": rng.normal(size=(6, 4, 20, 128)).astype(np.float32)}
    story, found = (grads, np.zeros((6, 4), bool)), {}
    for bits in (None, 8):
        tx = baselines.one_bit_adam(1.0, **BETAS, warmup=6, bits=bits, axis_name=AXIS)
        found[bits] = run_workers({"tx": tx}, params, *story)["tx"][1][0]
    for name in ("mu", "nu"):
        exact, coded = (np.asarray(getattr(found[bits], name)["w"][-1]) for bits in (None, 8))
        assert 0 < np.abs(coded - exact).mean() < 0.02 * np.abs(exact).mean()


def test_large_models_cost_what_the_papers_say():
    """One bit and a scale of a row each way; the warm-up is an all-reduce of float32."""
    shapes = {"w": jax.ShapeDtypeStruct((2**28,), jnp.float32)}
    tx = baselines.one_bit_adam(1e-3, warmup=100, axis_name=AXIS)
    for workers in (2, 7, 64):
        early, late = (lc.traffic.of(tx, shapes, workers, step=step) for step in (99, 100))
        assert early.bits_per_parameter == pytest.approx((workers - 1) / workers * 64, rel=1e-3)
        assert late.bits_per_parameter == pytest.approx((workers - 1) / workers * 2.25, rel=1e-3)
    assert lc.traffic.of(tx, shapes, 1, step=0).sent_bytes == 0
    tx = baselines.zero_one_adam(1e-3, kappa=2, freeze_after=12, axis_name=AXIS)
    assert tx.scheme == "0/1 Adam(kappa=2)"
    full = [n for n in range(20) if lc.traffic.of(tx, shapes, 2, step=n).bits_per_parameter > 3]
    assert full == [0, 1, 2, 4, 6, 10]


def test_one_worker_alone_sends_nothing(mesh_of):
    tx = baselines.one_bit_adam(1e-3, warmup=1, axis_name=AXIS)
    run, mesh = program(tx, 1, zeros(LARGE), mesh_of)
    assert not [one for one in compiled.collectives(run, mesh) if one.sent_bytes]


# --- Training

MODEL = {"w": (64, 130), "b": (130,), "c": (130, 64)}
SPECS = {"w": P(None, "tensor"), "b": P("tensor"), "c": P("tensor")}
DATA = np.random.default_rng(1).normal(size=(16, 64)).astype(np.float32)


def loss(params, batch, rng):
    hidden = jnp.tanh(batch @ params["w"] + params["b"])
    return jnp.mean((hidden @ params["c"] - batch) ** 2)


def model():
    rng = np.random.default_rng(0)
    return {n: jnp.asarray(rng.normal(size=s) / 8, jnp.float32) for n, s in MODEL.items()}


def workers_of(sizes, group=None, kind=AxisType.Auto):
    devices = jax.devices()[: np.prod(list(sizes.values()))]
    kinds = (kind,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)
    return lc.Workers(mesh, AXIS, group)


def trained(make, workers, steps=6, specs=None, **options):
    """The state after some steps, and the losses."""
    tx = make(1e-2, axis_name=workers, **options)
    state = lc.init_state(tx, model(), workers, specs=specs)
    step, losses = lc.make_train_step(loss, tx, workers), []
    for _ in range(steps):
        state, metrics = step(state, DATA)
        losses.append(float(metrics["loss"]))
    assert step.traces == 1
    return state, losses


@pytest.mark.parametrize(
    ("sizes", "group", "specs"),
    [
        ({AXIS: 4, "tensor": 2}, None, SPECS),
        ({AXIS: 2, "gpu": 2}, "gpu", None),
    ],
    ids=["tensor", "two levels"],
)
def test_training_goes_through_the_freeze_wherever_the_parameters_lie(sizes, group, specs):
    workers = workers_of(sizes, group)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, losses = trained(
            baselines.zero_one_adam, workers, specs=specs, kappa=2, freeze_after=4
        )
    assert losses[-1] < 0.95 * losses[0] and np.isfinite(losses).all()
    kept = state.opt_state[0]
    assert (int(kept.count), int(kept.updates)) == (6, 3)
    for name in MODEL:
        assert (
            kept.mu[name].sharding.spec
            == kept.nu[name].sharding.spec
            == (specs or {}).get(name, P())
        )
    wanted, early = trained(
        baselines.zero_one_adam, workers_of({AXIS: sizes[AXIS]}), kappa=2, freeze_after=4
    )
    # In full precision how leaves are cut makes no difference but roundings; a group is one worker.
    np.testing.assert_allclose(losses[:3], early[:3], rtol=1e-5)
    np.testing.assert_allclose(losses, early, rtol=0.05)
    close_nu = functools.partial(np.testing.assert_allclose, rtol=0.2, atol=1e-6)
    jax.tree.map(close_nu, kept.nu, wanted.opt_state[0].nu)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_whole_rows_do_not_care_how_they_are_cut(kind):
    workers = workers_of({AXIS: 4, "tensor": 2}, kind=kind)
    params = zeros({"w": (2, 128)})
    story = plain(params, 4, 4, values=ODD)
    given = {**BETAS, "warmup": 2}
    tx = baselines.one_bit_adam(0.5, **given, axis_name=workers)
    tx = lc.on_mesh(tx, workers, specs={"w": P("tensor")})
    _, want = simulate({0: oracle.one_bit_adam(**given)}, params, story)[0]
    params = jax.device_put(params, workers.shardings({"w": P("tensor")}))
    state, update = tx.init(params), jax.jit(tx.update)
    for g in story.grads["w"]:
        grads = jax.device_put({"w": g}, workers.shardings({"w": P(AXIS, "tensor")}))
        _, state = update(grads, state, params)
        step = int(state[0].count) - 1
        np.testing.assert_array_equal(state[0].mu["w"], want.mu["w"][step])
        np.testing.assert_array_equal(state[0].exchange.error["w"], want.error["w"][step])
    assert np.any(want.error["w"][-1])


def test_a_group_sends_its_mean_as_one_worker():
    params = {"w": jnp.ones((32, 128))}
    rng = np.random.default_rng(0)
    means = rng.choice(ODD, (3, 2, 32, 128)).astype(np.float32)
    apart = rng.integers(-3, 4, means.shape)
    grads = np.stack([means + apart, means - apart], 2).reshape(3, 4, 32, 128)
    ends = []
    for sizes, group, own in [({AXIS: 2, "gpu": 2}, "gpu", grads), ({AXIS: 2}, None, means)]:
        workers = workers_of(sizes, group)
        tx = lc.on_mesh(baselines.one_bit_adam(0.5, **BETAS, warmup=1, axis_name=workers), workers)
        state, update = tx.init(params), jax.jit(tx.update)
        for g in own:
            _, state = update({"w": jnp.asarray(g, jnp.float32)}, state, params)
        ends.append(state[0])
    for name in ("mu", "nu"):
        assert_equal(*(np.asarray(getattr(end, name)["w"]) for end in ends))
    assert all(int(end.exchange.count) == int(end.count) == 3 for end in ends)


@pytest.mark.parametrize("at", [1, 4])
def test_a_checkpoint_goes_on_to_the_bit_across_the_freeze(at, tmp_path):
    workers = workers_of({AXIS: 4})
    tx = baselines.one_bit_adam(1e-2, warmup=2, axis_name=workers)
    step, states = lc.make_train_step(loss, tx, workers), []
    state = lc.init_state(tx, model(), workers)
    with lc.Checkpoints(tmp_path, axis_name=AXIS) as checkpoints:
        for n in range(6):
            if n == at:
                checkpoints.save(state, wait=True)
            state, _ = step(state, DATA)
        again = checkpoints.restore(lc.init_state(tx, model(), workers)).state
        fewer = checkpoints.restore(lc.init_state(tx, model(), workers_of({AXIS: 2}))).state
    assert int(again.opt_state[0].count) == at
    states = [again, fewer]
    for name in MODEL:  # with half of the workers the same is owed
        owed = [np.asarray(s.opt_state[0].exchange.error[name]).mean(0) for s in states]
        np.testing.assert_allclose(*owed, rtol=1e-5, atol=1e-7)
        assert owed[0].any() == (at > 2)
        assert_equal(*(np.asarray(s.opt_state[0].nu[name]) for s in states))
    for _ in range(at, 6):
        again, _ = step(again, DATA)
    ends = [jax.tree.leaves((s.params, s.opt_state)) for s in (again, state)]
    for got, want in zip(*ends, strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_hyperparameters_may_be_arrays():
    workers = workers_of({AXIS: 2})
    make = optax.inject_hyperparams(
        lambda lr, b1, eps: baselines.one_bit_adam(lr, b1, eps=eps, warmup=2, axis_name=workers)
    )
    tx = make(lr=1e-2, b1=0.5, eps=1e-6)
    state, ends = lc.init_state(tx, model(), workers), []
    step = lc.make_train_step(loss, tx, workers)
    for _ in range(4):
        state, metrics = step(state, DATA)
        ends.append(float(metrics["loss"]))
    _, want = trained(baselines.one_bit_adam, workers, 4, b1=0.5, eps=1e-6, warmup=2)
    np.testing.assert_allclose(ends, want, rtol=1e-5)


# --- What is watched


def watched(tx, *, averaged=False):
    """The compiled step of a trainer of one's own."""

    def step(params, opt_state, batch):
        grads = jax.grad(loss)(params, batch, None)
        grads = jax.lax.pmean(grads, AXIS) if averaged else grads
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    mapped = jax.pmap(step, AXIS, devices=jax.devices()[:2])
    spread = functools.partial(jax.tree.map, lambda x: jnp.stack([x] * 2))
    local = jax.pmap(tx.init, AXIS, devices=jax.devices()[:2])(spread(model()))
    return mapped.lower(spread(model()), local, DATA.reshape(2, 8, 64)).compile()


def test_branches_by_the_count_are_no_reason_to_warn_and_others_are():
    tx = baselines.one_bit_adam(0.1, warmup=2, axis_name=AXIS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lc.check_votes(watched(tx))
    with pytest.warns(UserWarning, match="apply_if_finite does that.*abstains by itself"):
        watched(optax.apply_if_finite(tx, 3))


def test_the_floats_of_the_warm_up_excuse_no_others():
    tx = baselines.one_bit_adam(0.1, warmup=2, axis_name=AXIS)
    with pytest.raises(ValueError, match=r"(?s)also .* of floats.*gradients are averaged before"):
        watched(tx, averaged=True)


# --- Bad input

MAKERS = {
    "1-bit": functools.partial(baselines.one_bit_adam, warmup=1, axis_name=AXIS),
    "0/1": functools.partial(baselines.zero_one_adam, axis_name=AXIS),
}
BAD = [
    ({"b1": 1.0}, "b1=1.0: give a number in [0, 1)"),
    ({"b2": -0.1}, "b2=-0.1: give a number in [0, 1)"),
    ({"eps": 0.0}, "eps=0.0: give a number above 0"),
    ({"eps": float("nan")}, "eps=nan: give a number above 0"),
    ({"eps": "1e-8"}, "eps='1e-8': give a number above 0"),
    ({"error_dtype": jnp.int8}, "give a floating dtype"),
    ({"axis_name": 0}, "axis_name=0: give the name"),
]
STEPS = [("1-bit", "warmup"), ("0/1", "kappa"), ("0/1", "freeze_after")]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("options", "message"), BAD)
def test_arguments_out_of_range(name, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        MAKERS[name](1e-3, **options)


@pytest.mark.parametrize(("name", "argument"), STEPS)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4", None])
def test_numbers_of_steps_that_are_none(name, argument, value):
    with pytest.raises(
        ValueError, match=re.escape(f"{argument}={value!r}: give a whole number of")
    ):
        MAKERS[name](1e-3, **{argument: value})


@pytest.mark.parametrize("bits", [1, 9, 4.0, "8"])
def test_a_warm_up_in_codes_that_are_none(bits):
    wanted = f"bits={bits!r}: codes of the warm-up, from which the variance is found, have 2 to 8"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        MAKERS["1-bit"](1e-3, bits=bits)


def test_a_warm_up_must_be_given_and_a_mask_is_of_bools():
    with pytest.raises(TypeError, match="warmup"):
        baselines.one_bit_adam(1e-3, axis_name=AXIS)
    with pytest.raises(TypeError, match=r"mask\['w'\] is 'no': a mask has a bool for each leaf"):
        MAKERS["1-bit"](1e-3, mask={"w": "no"})


def test_gradients_that_cannot_be_sent(mesh_of):
    tx = MAKERS["1-bit"](1e-3)
    with pytest.raises(ValueError, match="is not a mesh axis here"):
        tx.init({"w": jnp.ones(3)})

    def body(params):
        return tx.update(params, tx.init(params), params)[0]

    mapped = jax.shard_map(body, mesh=mesh_of(4), in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match="already reduced in full precision"):
        jax.eval_shape(mapped, {"w": jnp.ones(3)})
    with pytest.raises(TypeError, match=r"\['w'\] is int32: only floating leaves"):
        jax.eval_shape(mapped, {"w": jnp.ones(3, jnp.int32)})
