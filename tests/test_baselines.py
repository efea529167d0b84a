"""The baselines of the papers: against their references, optax, the papers' claims and compiled bytes.

As in ``test_against_reference``, gradients are small integers, and learning rates, momenta and decays
are powers of two, so that sums are exact in any order and equal means equal. Tolerances say why.
"""

import functools
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_against_reference import (
    FLOATING,
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
from lioncub_jax import baselines, bits, layout, quantize, reference
from lioncub_jax.reference import baselines as reference_baselines

TWO_PHASE = lc.wires.two_phase()


def learning_rate(count):
    return jnp.where(count % 2 == 0, 0.25, 0.5)


def decays(params):
    return {name: i % 2 == 0 for i, name in enumerate(sorted(params))}


def eighths(tree, seed=0):
    """Parameters with few bits, so that their decay is exact too."""
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.integers(-8, 9, s) / 8, jnp.float32) for k, s in tree.items()}


class Method(NamedTuple):
    """A baseline and what it should be, ``params -> Simulator``, from the same ``learning_rate``."""

    tx: Any
    simulator: Any


def method(make, simulator, *args, **options):
    tx = make(learning_rate, *args, axis_name=AXIS, **options)
    return Method(tx, reference.optimizer(simulator, learning_rate, 0.0))


def feedback(**options):
    tx = baselines.ef_signsgd(learning_rate, axis_name=AXIS, **options)
    return Method(tx, reference_baselines.ef_signsgd(learning_rate, **options))


def outer(momentum, bits, **options):
    tx = baselines.diloco(learning_rate, momentum, bits, axis_name=AXIS, **options)
    return Method(tx, reference_baselines.diloco(learning_rate, momentum, bits, **options))


VOTED = {
    "signsgd": method(baselines.signsgd, reference.local_momentum(0, 0)),
    "signum": method(
        baselines.signum, reference.local_momentum(0.75, 0.75), 0.75, wire=lc.wires.gathered()
    ),
    "ef_signsgd": feedback(),
    "ef_signsgd, bfloat16": feedback(error_dtype=jnp.bfloat16),
    "terngrad": method(
        baselines.terngrad, reference_baselines.terngrad(None, 3, 0.5), 0.5, None, 3
    ),
    "terngrad, clipped": method(baselines.terngrad, reference_baselines.terngrad()),
    "qsgd": method(baselines.qsgd, reference_baselines.qsgd()),
    "qsgd, l2": method(
        baselines.qsgd, reference_baselines.qsgd(2, 5, 0.5, "l2"), 2, 0.5, 5, "l2",
        wire=TWO_PHASE,
    ),
    "diloco, 1 bit": outer(0.5, 1),
    "diloco, 4 bits": outer(0.5, 4, error_dtype=jnp.bfloat16),
    "diloco, 8 bits": outer(0, 8),
}  # fmt: skip
STORIES = {  # by the number of workers
    1: ("ef_signsgd", "terngrad", "qsgd, l2", "diloco, 1 bit"),
    2: ("ef_signsgd, bfloat16", "terngrad", "diloco, 8 bits"),
    3: ("ef_signsgd", "terngrad, clipped", "qsgd, l2", "diloco, 4 bits"),
    8: ("signsgd", "signum", "ef_signsgd", "terngrad, clipped", "qsgd", "diloco, 1 bit"),
}


def side_by_side(run_workers, methods, params, story):
    """Methods and their references, each kind in one program: ``{name: (got, wanted)}``."""
    got = run_workers({name: m.tx for name, m in methods.items()}, params, *story)
    want = simulate({name: m.simulator for name, m in methods.items()}, params, story)
    return {name: (got[name], want[name]) for name in methods}


@pytest.mark.parametrize(
    "workers", [n if n != 2 else pytest.param(n, marks=pytest.mark.slow) for n in STORIES]
)
def test_with_workers_that_abstain_it_is_the_reference_bit_for_bit(run_workers, workers):
    params = zeros(TREES[workers])
    story = eventful(params, workers, seed=workers)
    methods = {name: VOTED[name] for name in STORIES[workers]}
    done = side_by_side(run_workers, methods, params, story)
    for name, ((got, state), (updates, want)) in done.items():
        assert_equal(got, updates, of=name)
        assert any(u.any() for u in got.values()), name
        abstained = same_everywhere(optax.tree.get(state, "abstained"))
        assert (abstained == [0, 1, 1, workers, 0, 0]).all()
        if name.startswith("sign"):
            assert_statistics(state[0], want)
        if name.startswith(("ef", "diloco")) and workers > 1:
            votes = state[1 if name.startswith("ef") else 0]
            assert_equal(votes.error, want.error)
            owner = in_rows(votes.owner[0].value.error, TWO_PHASE)
            assert_equal(owner[:, : want.owner.shape[1]], want.owner)
            assert not owner[:, want.owner.shape[1] :].any()
            # Of two workers one has nothing to say of a row, so all magnitudes are equal there.
            assert np.abs(owner).max() > 0 or workers == 2
            assert {str(x.dtype) for x in votes.error.values()} == {str(owner.dtype)}


def test_leaves_of_mixed_precision(run_workers):
    params = zeros({"a": (65,), "b": (31,), "c": (3, 10), "d": ()}, FLOATING)
    story = Story(integers(params, 2, 4), np.eye(4, dtype=bool)[:2])
    methods = {name: VOTED[name] for name in ("ef_signsgd", "terngrad")}
    for (got, _), (updates, _) in side_by_side(run_workers, methods, params, story).values():
        assert_equal(got, updates)
        assert {str(u.dtype) for u in got.values()} == set(FLOATING)


def test_decay_is_decoupled_and_masked(run_workers):
    """It changes updates by ``-lr wd p`` of the leaves that decay, and by nothing else."""
    params = eighths({"w": (5, 13), "b": (7,)})
    story = Story(integers(params, 2, 2), np.zeros((2, 2), bool))
    makers = baselines.ef_signsgd, baselines.terngrad
    both = {
        f"{make.__name__} {decay}": make(
            learning_rate, weight_decay=decay, mask=decays, axis_name=AXIS
        )
        for make in makers
        for decay in (0.0, 0.5)
    }
    done = run_workers(both, params, *story)
    for make in makers:
        without, with_ = (done[f"{make.__name__} {decay}"][0] for decay in (0.0, 0.5))
        np.testing.assert_array_equal(with_["w"], without["w"])
        for step, lr in enumerate((0.25, 0.5)):
            change = with_["b"][step] - without["b"][step]
            # Two roundings of numbers below 4.
            np.testing.assert_allclose(change, -lr * 0.5 * params["b"], atol=1e-6)


# --- The mean of all gradients


MEANS = {
    "sgd": method(baselines.sgd, reference_baselines.averaged(optax.trace(0.5)), 0.5),
    "sgd, nesterov": method(
        baselines.sgd, reference_baselines.averaged(optax.trace(0.5, True)), 0.5, True
    ),
    "diloco": outer(0.5, None),
    "sgd, no momentum": method(
        baselines.sgd, reference_baselines.averaged(optax.identity()), 0.0
    ),
    "lion": Method(
        baselines.lion(learning_rate, 0.5, 0.5, None, 0.5, decays, axis_name=AXIS),
        reference_baselines.averaged(optax.lion(learning_rate, 0.5, 0.5, None, 0.5, decays)),
    ),
    "adamw": Method(
        baselines.adamw(
            learning_rate, 0.5, 0.75, weight_decay=0.5, mask=decays, nesterov=True, axis_name=AXIS
        ),
        reference_baselines.averaged(
            optax.adamw(learning_rate, 0.5, 0.75, weight_decay=0.5, mask=decays, nesterov=True)
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("workers", [1, 8])
def test_means_go_into_the_optimizers_of_optax(run_workers, workers):
    params = eighths({"w": (5, 13), "b": (7,), "scalar": ()})
    story = Story(integers(params, 4, workers), np.zeros((4, workers), bool))
    done = side_by_side(run_workers, MEANS, params, story)
    for name, ((got, _), (updates, _)) in done.items():
        if name == "adamw":  # roots and quotients may be fused with what follows, or not
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6), got, updates)
        else:
            assert_equal(got, updates)


ALONE = {
    "signsgd": (baselines.signsgd(0.25, axis_name=AXIS), optax.sign_sgd(0.25)),
    "signum": (
        baselines.signum(0.25, 0.5, axis_name=AXIS),
        optax.lion(0.25, 0.5, 0.5, weight_decay=0.0),
    ),
    "ef_signsgd": (baselines.ef_signsgd(0.25, axis_name=AXIS), optax.sgd(0.25)),
    "terngrad": (baselines.terngrad(0.25, 0.5, axis_name=AXIS), optax.sgd(0.25, 0.5)),
    "qsgd": (baselines.qsgd(0.25, momentum=0.5, axis_name=AXIS), optax.sgd(0.25, 0.5)),
    "sgd": (baselines.sgd(0.25, 0.5, True, axis_name=AXIS), optax.sgd(0.25, 0.5, True)),
    "diloco": (baselines.diloco(0.25, 0.5, 3, axis_name=AXIS), optax.sgd(0.25, 0.5, True)),
}


def test_one_worker_alone_runs_the_plain_optimizer(run_workers):
    params = zeros({"w": (5, 13), "scalar": ()})
    story = Story(integers(params, 4, 1), np.zeros((4, 1), bool))
    done = run_workers({name: tx for name, (tx, _) in ALONE.items()}, params, *story)
    own = jax.tree.map(lambda g: jnp.asarray(g[:, 0]), story.grads)
    for name, (_, plain) in ALONE.items():

        def step(state, g, plain=plain):
            updates, state = plain.update(g, state, params)
            return state, updates

        _, want = jax.lax.scan(step, plain.init(params), own)
        assert_equal(done[name][0], jax.tree.map(np.asarray, want))


# --- What the papers claim


def test_random_codes_are_right_on_average(run_workers):
    """Within 6 standard errors of 500 steps, each with random numbers of its own."""
    steps, workers = 500, 4
    params = zeros({"w": (130,), "b": (3,)})
    own = jax.tree.map(lambda g: 1.0 * g[0], integers(params, 1, workers, seed=1))
    grads = jax.tree.map(lambda g: np.broadcast_to(g, (steps, *g.shape)), own)
    txs = {
        "terngrad": baselines.terngrad(1.0, clip=None, axis_name=AXIS),
        "qsgd": baselines.qsgd(1.0, 3, axis_name=AXIS),
        "qsgd, l2": baselines.qsgd(1.0, 3, norm="l2", axis_name=AXIS),
    }
    # The spread of one code is at most half of what lies between two levels.
    units = {"terngrad": 3.0, "qsgd": 3 / 3, "qsgd, l2": np.sqrt(128 * 9) / 3}
    for name, (got, _) in run_workers(txs, params, grads, np.zeros((steps, workers), bool)).items():
        allowed = 6 * units[name] / 2 / np.sqrt(steps * workers)
        for leaf in params:
            off = got[leaf].mean(0) + own[leaf].mean(0)
            assert np.abs(off).max() < allowed, (name, leaf)
            exact = name == "qsgd" and leaf == "b"
            assert (got[leaf].std(0) > 0).any() or exact, (name, leaf)


def test_feedback_loses_nothing(run_workers):
    """All updates, and what workers and owners still owe, add up to all gradients."""
    params = zeros({"w": (130,), "scalar": ()})
    story = Story(integers(params, 12, 8), np.zeros((12, 8), bool))
    txs = {p: baselines.diloco(1.0, 0.0, p, axis_name=AXIS) for p in (1, 3, 8)}
    txs[0] = baselines.ef_signsgd(0.25, axis_name=AXIS)
    for p, (got, state) in run_workers(txs, params, *story).items():
        rate, votes = (1, state[0]) if p else (0.25, state[1])
        loses_nothing(got, story.grads, votes, rate, back=-1 if p else 1)


def loses_nothing(got, grads, votes, rate, back):
    owed = back * in_rows(votes.owner[0].value.error, TWO_PHASE)[-1].reshape(-1)
    owed = {"scalar": owed[0], "w": owed[128 : 128 + 130]}  # a leaf takes whole rows
    for name in got:
        late = back * votes.error[name][-1].mean(0) + owed[name]
        all_ = -rate * grads[name].mean(1).sum(0)
        # Twelve steps add some bits to those of the integers; a scale that was lost would be 0.1.
        np.testing.assert_allclose(got[name].sum(0) + late, all_, rtol=0, atol=1e-4)


def test_feedback_leaves_padding_out_of_scales(run_workers):
    """A leaf of one element is sent whole, there and back, whatever shares its rows."""
    params = zeros({"a": (), "b": (1,), "w": (64,)})
    story = Story(integers(params, 3, 2, values=(-3, -1, 1, 5)), np.zeros((3, 2), bool))
    got, state = run_workers({0: baselines.ef_signsgd(0.5, axis_name=AXIS)}, params, *story)[0]
    for name in ("a", "b"):
        np.testing.assert_array_equal(got[name], -0.5 * story.grads[name].mean(1))
        assert not state[1].error[name].any()
    assert state[1].error["w"].any()


def test_what_is_not_finite_does_not_reach_the_scale_of_others(run_workers):
    params = zeros({"w": (40,), "b": (3,)})
    grads = {"w": np.full((1, 3, 40), 2.0, np.float32), "b": np.ones((1, 3, 3), np.float32)}
    grads["w"][0, 1, 7] = np.inf
    grads["b"][0, 1] = 1e30  # of the same worker, finite
    grads["w"][0, 2] = 1e30
    told = np.array([[False, False, True]])
    txs = {str(c): baselines.terngrad(1.0, clip=c, axis_name=AXIS) for c in (None, 1.0)}
    for got, _ in run_workers(txs, params, grads, told).values():
        assert_equal(got, {"w": np.full((1, 40), -2, np.float32), "b": -grads["b"][:, 0]})


def test_64_bits_change_no_dtype_and_no_number(run_workers):
    params = zeros({"w": (40,), "b": (3,)})
    story = Story(integers(params, 2, 2), np.eye(2, dtype=bool))
    txs = {
        "sgd": baselines.sgd(learning_rate, 0.5, axis_name=AXIS),
        "dgc": baselines.dgc(
            0.5, np.float64(0.5), density=0.25, clip=np.float64(4), axis_name=AXIS
        ),
        **{name: VOTED[name].tx for name in ("ef_signsgd", "terngrad, clipped", "qsgd, l2")},
    }
    want = run_workers(txs, params, *story)
    with jax.enable_x64(True):
        got = run_workers(txs, params, *story)  # the scan fails where a dtype changes
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        assert x.dtype == y.dtype, path
        if "adamw" not in jax.tree_util.keystr(
            path
        ):  # powers of betas are taken in other precision
            np.testing.assert_array_equal(x, y, err_msg=str(path))


# --- Codes


@functools.partial(jax.jit, static_argnums=0)
def encode(quantizer, x, step):
    """The message of the second of four workers about a leaf of whole rows, and its decoded values."""
    (bucket,) = layout.buckets([x], 4)
    (piece,) = bucket.pieces
    place = quantize.Place(
        bucket, piece, 0, step, jnp.int32(1), 4, bits.draw(step, 1, 4), None, True
    )
    message = quantizer.encode(layout.in_rows(x, piece), place)
    planes = [x.reshape(4, -1) for x in message.planes]
    codes = bits.unpack(planes, bucket.chunk)
    codes = codes.reshape(-1)[: x.size].astype(jnp.int32) - quantizer.top(4) // 2
    if message.steps is None:
        return message, codes, None
    steps = message.steps.reshape(4, -1)
    values = quantizer.values(planes, steps, bucket.chunk, 4).reshape(-1)[: x.size]
    return message._replace(steps=message.steps[: x.size // 128]), codes, values


def encoded(quantizer, x, step=0):
    """Codes with zero in the middle, steps, and values, of rows of 128."""
    message, codes, values = encode(quantizer, jnp.asarray(x, jnp.float32), jnp.int32(step))
    assert bool(message.finite)
    steps = None if message.steps is None else np.asarray(message.steps, np.float32)
    return np.asarray(codes), steps, None if values is None else np.asarray(values)


@pytest.mark.parametrize(("p", "norm"), [(2, "max"), (3, "l2"), (8, "max"), (8, "l2")])
def test_levels_reach_the_norm_and_are_not_clipped(p, norm):
    x = np.random.default_rng(p).normal(size=512).astype(np.float32)
    s = 2 ** (p - 1) - 1
    q, steps, values = encoded(quantize.levels(p, norm=norm), x)
    blocks = x.astype(np.float64).reshape(-1, 128)
    wanted = (np.abs(blocks).max(1) if norm == "max" else np.sqrt((blocks**2).sum(1))) / s
    assert (wanted * (1 - 1e-6) <= steps).all() and (steps <= wanted * (1 + 2**-7)).all()
    assert np.abs(q).max() <= s and (norm == "l2" or np.abs(q).max() == s)
    np.testing.assert_array_equal(values.reshape(-1, 128), q.reshape(-1, 128) * steps[:, None])
    assert (np.abs(values.reshape(-1, 128) - blocks) <= steps[:, None] * 0.50001).all()


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_levels_do_not_depend_on_the_scale(norm):
    """Squares neither over- nor underflow."""
    x = np.random.default_rng(0).normal(size=256).astype(np.float32)
    quantizer = quantize.levels(4, norm=norm)
    codes, steps, _ = encoded(quantizer, x)
    for power in (-118, -60, 60, 118):
        scaled, its_steps, _ = encoded(quantizer, x * np.float32(2.0**power))
        np.testing.assert_array_equal(scaled, codes)
        np.testing.assert_array_equal(its_steps, steps * np.float32(2.0**power))


def test_random_levels_are_the_two_neighbours():
    x = np.random.default_rng(0).normal(size=128).astype(np.float32)
    quantizer = quantize.levels(3, rounding=lc.quantize.stochastic(1))
    drawn = np.stack([encoded(quantizer, x, step)[0] for step in range(20)])
    _, steps, _ = encoded(quantizer, x)
    exact = x / steps
    assert (np.abs(drawn - exact) < 1).all() and (drawn.std(0) > 0).mean() > 0.8


def test_levels_of_nothing_and_of_almost_nothing_are_zero():
    x = np.zeros(256, np.float32)
    x[128:] = 1e-38
    q, steps, _ = encoded(quantize.levels(2), x)
    assert not q.any() and not steps.any()


def test_random_ternary_codes_keep_signs_zeros_and_ones():
    x = np.resize(np.float32([0, 1, -1, 0.5, -0.25]), 640)
    drawn = np.stack(
        [encoded(quantize.ternary(rounding=lc.quantize.stochastic(2)), x, t)[0] for t in range(9)]
    )
    assert ((drawn == 0) | (drawn == np.sign(x))).all()
    whole = np.abs(x) != np.abs(x) ** 2
    assert (drawn == x)[:, ~whole].all()
    for value in (0.5, -0.25):
        assert np.abs(drawn[:, x == value].mean() - value) < 0.1  # 5 standard errors of 1152 codes


# --- Bytes


SHAPES = {"w": (256, 130), "b": (130,), "c": (130, 256)}


def model(params, batch, rng):
    hidden = jnp.tanh(batch @ params["w"] + params["b"])
    return jnp.mean((hidden @ params["c"] - batch) ** 2)


def model_params():
    rng = np.random.default_rng(0)
    return {n: jnp.asarray(rng.normal(size=s) / 16, jnp.float32) for n, s in SHAPES.items()}


BATCH = np.random.default_rng(1).normal(size=(16, 256)).astype(np.float32)
SPECS = {"w": P(None, "tensor"), "b": P("tensor"), "c": P("tensor")}


def trained(tx, sizes, specs=None):
    """What a step sends, and parameters and losses of three steps."""
    kinds = (AxisType.Auto,) * len(sizes)
    devices = jax.devices()[: np.prod(list(sizes.values()))]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)
    state = lc.init_state(tx, model_params(), mesh, axis_name=AXIS, specs=specs)
    step = lc.make_train_step(model, tx, mesh, axis_name=AXIS)
    found = lc.traffic.collectives(step.lower(state, BATCH).compile(), mesh)
    losses = []
    for _ in range(3):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[0]
    return found, state.params


def is_scalar(one):
    """The mean loss, a flag, the statistics."""
    return sum(operand.bytes for operand in one.operands) <= 8


SENT = {
    "sgd": (baselines.sgd, {}),
    "sgd, bfloat16": (baselines.sgd, {"dtype": jnp.bfloat16}),
    "adamw": (baselines.adamw, {}),
    "lion": (baselines.lion, {}),
    "signsgd": (baselines.signsgd, {}),
    "signum": (baselines.signum, {"momentum": 0.5}),
    "ef_signsgd": (baselines.ef_signsgd, {}),
    "terngrad": (baselines.terngrad, {"clip": None}),
    "qsgd": (baselines.qsgd, {"bits": 2, "momentum": 0.5}),
    "qsgd, two-phase": (baselines.qsgd, {"bits": 3, "wire": TWO_PHASE}),
    "diloco": (baselines.diloco, {}),
    "diloco, 4 bits": (baselines.diloco, {"bits": 4}),
}


@pytest.mark.parametrize("name", SENT)
def test_the_prediction_is_what_a_compiled_update_sends(mesh_of, name):
    make, options = SENT[name]
    tx, mesh = make(1e-3, axis_name=AXIS, **options), mesh_of(8)

    def worker(params):
        own = jax.lax.pcast(params, AXIS, to="varying")
        return tx.update(own, tx.init(params), params)[0]

    mapped = jax.shard_map(worker, mesh=mesh, in_specs=P(), out_specs=P())
    found = lc.traffic.collectives(jax.jit(mapped).lower(model_params()).compile(), mesh)
    predicted = lc.traffic.of(tx, model_params(), 8, platform="cpu")
    assert by_op(found) == by_op(predicted.collectives)
    assert predicted.sent_bytes == sum(by_op(found).values()) > 0
    assert predicted.parameters == sum(np.prod(s) for s in SHAPES.values())


def by_op(collectives):
    sent = Counter()
    for one in collectives:
        sent[one.op] += one.sent_bytes
    return sent


PAPERS = {  # bits that each worker sends for a parameter of a large model
    "sgd": lambda w: 2 * (w - 1) / w * 32,
    "signsgd": lambda w: (w - 1) / w * (2 + 2 / 128),
    "signum": lambda w: (w - 1) / w * (2 + 2 / 128),
    "ef_signsgd": lambda w: (w - 1) / w * (1 + 16 / 128 + 1 + 16 / 128),
    "terngrad": lambda w: (w - 1) / w * (2 + (2 * w).bit_length()),
    "qsgd": lambda w: (w - 1) * (2 + 16 / 128),
    "qsgd, two-phase": lambda w: (w - 1) / w * (3 + 16 / 128 + 32),
    "diloco": lambda w: 2 * (w - 1) / w * 32,
    "diloco, 4 bits": lambda w: (w - 1) / w * 2 * (4 + 16 / 128),
}


@pytest.mark.parametrize("name", PAPERS)
def test_large_models_cost_what_the_papers_say(name):
    make, options = SENT[name]
    tx = make(1e-3, axis_name=AXIS, **options)
    shapes = {"w": jax.ShapeDtypeStruct((2**28,), jnp.float32)}
    for workers in (2, 7, 64):
        sent = lc.traffic.of(tx, shapes, workers)
        assert sent.bits_per_parameter == pytest.approx(PAPERS[name](workers), rel=1e-3)
    assert lc.traffic.of(tx, shapes, 1).sent_bytes == 0


@pytest.mark.parametrize("name", ["ef_signsgd", "terngrad", "qsgd, two-phase", "diloco, 4 bits"])
def test_only_packed_words_cross_the_workers_axis_where_leaves_are_cut(name):
    make, options = SENT[name]
    tx = make(1e-2, axis_name=AXIS, **options)
    found, params = trained(tx, {AXIS: 4, "tensor": 2}, SPECS)
    across = [one for one in found if AXIS in one.axes and not is_scalar(one)]
    assert across and {one.axes for one in across} == {(AXIS,)}
    scales = [one for one in across if any(o.dtype == "f32" for o in one.operands)]
    assert [o.shape for one in scales for o in one.operands] == [(3,)] * (name == "terngrad")
    words = [one for one in across if one not in scales]
    assert all(o.dtype == "u32" for one in words for o in one.operands)
    for leaf, spec in SPECS.items():
        assert params[leaf].sharding.spec == spec
        assert np.isfinite(np.asarray(params[leaf])).all()


# --- Leaves that are cut


def on_shards(tx, grads, specs, sizes):
    """Updates of one step for gradients ``[W, ...]``."""
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * 2)
    params = {
        n: jax.device_put(jnp.zeros(g.shape[1:]), NamedSharding(mesh, specs[n]))
        for n, g in grads.items()
    }
    tx = lc.on_mesh(tx, mesh, axis_name=AXIS, specs=specs)
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    return jax.tree.map(np.asarray, updates), state


CUT = {AXIS: 4, "tensor": 2}


def test_terngrad_has_one_scale_for_all_shards_of_a_leaf():
    grads = {"w": np.ones((4, 2, 64), np.float32)}
    grads["w"][:, 0, :3] = 4
    tx = baselines.terngrad(1.0, clip=None, axis_name=AXIS)
    got, _ = on_shards(tx, grads, {"w": P("tensor")}, CUT)
    assert (got["w"][0, :3] == -4).all()
    assert set(got["w"][1]) <= {0, -1, -2, -3, -4} and len(set(got["w"][1])) > 2


def test_terngrad_clips_at_the_deviation_of_all_shards():
    grads = {"w": np.zeros((4, 2, 32), np.float32)}
    grads["w"][:, 1, 5] = -16
    got, _ = on_shards(baselines.terngrad(1.0, axis_name=AXIS), grads, {"w": P("tensor")}, CUT)
    want = np.zeros((2, 32))
    want[1, 5] = 2.5 * 16 / 8  # the root of 64 elements
    np.testing.assert_array_equal(got["w"], want)


def test_feedback_on_whole_blocks_does_not_care_how_they_are_cut():
    # Odd integers, for a zero would take a coin, and its coin lies elsewhere.
    params = zeros({"w": (2, 128)})
    grads = integers(params, 1, 4, values=(-5, -3, -1, 1, 3))
    tx = baselines.ef_signsgd(0.5, axis_name=AXIS)
    got, state = on_shards(tx, {"w": grads["w"][0]}, {"w": P("tensor")}, CUT)
    story = Story(grads, np.zeros((1, 4), bool))
    updates, want = simulate({0: reference_baselines.ef_signsgd(0.5)}, params, story)[0]
    np.testing.assert_array_equal(got["w"], updates["w"][0])
    np.testing.assert_array_equal(state[1].error["w"], want.error["w"][0])


def test_what_is_owed_survives_a_changed_number_of_workers(mesh_of, tmp_path):
    tx = optax.inject_hyperparams(lambda lr: baselines.ef_signsgd(lr, axis_name=AXIS))(lr=1e-3)
    state = lc.init_state(tx, model_params(), mesh_of(4), axis_name=AXIS)
    state, _ = lc.make_train_step(model, tx, mesh_of(4), axis_name=AXIS)(state, BATCH)
    with lc.Checkpoints(tmp_path, axis_name=AXIS) as checkpoints:
        checkpoints.save(state, wait=True)
        like = lc.init_state(tx, model_params(), mesh_of(2), axis_name=AXIS)
        fewer = checkpoints.restore(like).state
    four, two = (s.opt_state.inner_state[1] for s in (state, fewer))
    for name in SHAPES:
        means = [np.asarray(votes.error[name]).mean(0) for votes in (four, two)]
        np.testing.assert_allclose(*means, rtol=1e-5, atol=1e-9)  # a mean of means
        assert means[0].any()
    owners = [np.asarray(votes.owner[0].value.error).reshape(-1, 128) for votes in (four, two)]
    rows = 2 * 260 + 2  # of the leaves; the rest fills slices
    np.testing.assert_array_equal(owners[0][:rows], owners[1][:rows])
    assert owners[0].any() and not owners[0][rows:].any() and not owners[1][rows:].any()


# --- What is refused

MAKERS = list(dict.fromkeys(make for make, _ in SENT.values()))
BAD = [
    (baselines.sgd, {"momentum": 1.0}, "momentum=1.0"),
    (baselines.signum, {"momentum": -0.1}, "momentum=-0.1"),
    (baselines.signum, {"momentum": "0.9"}, "momentum='0.9'"),
    (baselines.terngrad, {"momentum": 1.5}, "momentum=1.5"),
    (baselines.qsgd, {"momentum": 2}, "momentum=2"),
    (baselines.adamw, {"b2": 1.0}, "b2=1.0"),
    (baselines.lion, {"b1": -1}, "b1=-1"),
    (baselines.sgd, {"dtype": jnp.int8}, "float32 or bfloat16"),
    (baselines.terngrad, {"clip": 0}, "clip=0"),
    (baselines.terngrad, {"clip": -1.0}, "clip=-1.0"),
    (baselines.terngrad, {"clip": float("nan")}, "clip=nan"),
    (baselines.terngrad, {"clip": "2.5"}, "clip='2.5'"),
    (baselines.qsgd, {"bits": 1}, "2 to 8 bits"),
    (baselines.qsgd, {"bits": 9}, "2 to 8 bits"),
    (baselines.qsgd, {"bits": 4.0}, "2 to 8 bits"),
    (baselines.qsgd, {"norm": "l1"}, "'max', 'l2'"),
    (baselines.qsgd, {"wire": lc.wires.counts()}, "give owner=count"),
    (baselines.qsgd, {"wire": lc.wires.all_reduce()}, "give up=dense"),
    (baselines.ef_signsgd, {"error_dtype": jnp.int8}, "floating dtype"),
    (baselines.signsgd, {"wire": lc.wires.all_reduce()}, "give up=dense"),
    (baselines.diloco, {"momentum": 1.0}, "momentum=1.0"),
    (baselines.diloco, {"bits": 0}, "1 to 8 bits"),
    (baselines.diloco, {"bits": 9}, "1 to 8 bits"),
    (baselines.diloco, {"bits": 4.0}, "1 to 8 bits"),
    (baselines.diloco, {"bits": 4, "error_dtype": jnp.int8}, "floating dtype"),
]


@pytest.mark.parametrize(("make", "options", "message"), BAD)
def test_arguments_out_of_range(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(1e-3, axis_name=AXIS, **options)


def test_an_axis_must_be_named_and_bound():
    params = {"w": jnp.ones(3)}
    for make in MAKERS:
        with pytest.raises(TypeError, match="axis_name"):
            make(1e-3)
        with pytest.raises(ValueError, match="axis_name=0: give the name"):
            make(1e-3, axis_name=0)
        tx = make(1e-3, axis_name=AXIS)
        with pytest.raises(ValueError, match="is not a mesh axis here"):
            tx.update(params, jax.eval_shape(functools.partial(bound_init, tx), params), params)


def bound_init(tx, params):
    """State of one worker, where the axis is bound."""
    mesh = jax.make_mesh((1,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    return jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(params)


FEEDBACK = {"up": lc.quantize.midrise(1), "owner": lc.decide.feedback_at_owner()}
SCALED, TOTAL = lc.decide.scaled_signs(), lc.decide.total()
MISFITS = [
    (FEEDBACK, "scaled_signs"),
    ({**FEEDBACK, "down": lc.decide.floats()}, "scaled_signs"),
    ({**FEEDBACK, "down": SCALED, "up": lc.quantize.dense()}, r"midrise\(p\)"),
    ({"down": SCALED}, "feedback_at_owner"),
    (
        {**FEEDBACK, "down": lc.decide.scaled(2)},
        r"down=scaled\(2\) does not fit .* of as many bits",
    ),
    ({"down": TOTAL}, "no code for zero"),
    ({"up": quantize.levels(4), "owner": FEEDBACK["owner"], "down": TOTAL}, "total"),
]


@pytest.mark.parametrize(("parts", "message"), MISFITS)
def test_parts_that_do_not_fit_together(parts, message):
    with pytest.raises(ValueError, match=message):
        lc.communicate(axis_name=AXIS, memory=lc.momentum.nothing(), **parts)


def test_every_optimizer_and_baseline_can_be_asked_what_it_sends():
    params = {"w": jax.ShapeDtypeStruct((2**20,), jnp.float32)}
    where = {"axis_name": AXIS}
    vote = lc.communicate(memory=lc.momentum.blend(), **where)
    one_bit = lc.traffic.predict(params, 8)
    for tx in (
        vote, lc.lion_cub(1e-3, **where), lc.scale_by_lion_cub(**where), lc.distributed_lion(1e-3, **where),
        lc.lion_cub(1e-3, sync=lc.sync.every(9), **where), lc.sync_momentum(vote, AXIS, lc.sync.coded()),
        baselines.signsgd(1e-3, **where), vote._replace(init=vote.init),
    ):  # fmt: skip
        assert isinstance(tx, optax.GradientTransformationExtraArgs)
        assert lc.traffic.of(tx, params, 8) == one_bit
    mean = lc.traffic.predict_mean(params, 8)
    for tx in (lc.global_gradients(optax.adam(1e-3), AXIS), baselines.lion(1e-3, **where)):
        assert lc.traffic.of(tx, params, 8) == mean
    for make in MAKERS:
        with pytest.raises(ValueError, match="workers=0"):
            lc.traffic.of(make(1e-3, **where), params, 0)


def test_bytes_of_a_device_on_a_mesh_of_several_axes():
    params = {"w": jax.ShapeDtypeStruct((2048, 1024), jnp.float32)}
    group = lc.owner_lion(1e-3, axis_name="node", group_axis="gpu")
    parts = {"up": lc.quantize.error_feedback(lc.quantize.midrise(3))}
    parts["owner"] = lc.decide.momentum_at_owner(optax.scale_by_lion())
    got = lc.traffic.of(group, params, 4, group_size=2)
    assert got == lc.traffic.predict(params, 4, group_size=2, **parts) and got.group_bytes > 0
    cut = {"specs": {"w": P(None, "tensor")}, "inner_axes": {"tensor": 2}}
    half = {"w": jax.ShapeDtypeStruct((2048, 512), jnp.float32)}
    for tx in (baselines.qsgd(1e-3, axis_name=AXIS), baselines.dgc(1e-3, axis_name=AXIS)):
        assert lc.traffic.of(tx, params, 4, **cut) == lc.traffic.of(tx, half, 4)


def test_what_says_not_what_it_sends():
    params, vote = {"w": jnp.ones(3)}, lc.lion_cub(1e-3, axis_name=AXIS)
    for tx in (optax.adam(1e-3), optax.chain(optax.clip(1.0), vote), lc.lion_cub):
        with pytest.raises(TypeError, match="does not say what it sends: give what lion_cub"):
            lc.traffic.of(tx, params, 4)
    with pytest.raises(ValueError, match="group_size=2: the transform has no group_axis"):
        lc.traffic.of(vote, params, 4, group_size=2)


# --- Workers that are named once

TWO_LEVELS = {
    "signsgd": functools.partial(baselines.signsgd, 0.5),
    "signum": functools.partial(baselines.signum, 0.5, 0.5, wire=lc.wires.gathered()),
    "ef_signsgd": functools.partial(baselines.ef_signsgd, 0.5),
    "qsgd": functools.partial(baselines.qsgd, 0.5, 4),
    "qsgd, momentum of all at each": functools.partial(baselines.qsgd, 0.5, 4, 0.5),
    "qsgd, two-phase": functools.partial(baselines.qsgd, 0.5, 4, 0.5, wire=TWO_PHASE),
    "sgd": functools.partial(baselines.sgd, 0.5, 0.5),
    "adamw": functools.partial(baselines.adamw, 0.5, 0.5, 0.75, weight_decay=0.5),
    "lion": functools.partial(baselines.lion, 0.5, 0.5, 0.5),
}


def workers_of(axes, axis_name, group_axis=None):
    devices = jax.devices()[: np.prod(list(axes.values()))]
    kinds = (AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=devices)
    return lc.Workers(mesh, axis_name, group_axis)


@pytest.mark.parametrize(
    "name",
    [n if n in ("sgd", "qsgd") else pytest.param(n, marks=pytest.mark.slow) for n in SENT],
)
def test_workers_and_the_name_of_their_axis_make_the_same_step(name):
    make, options = SENT[name]
    if name == "sgd":
        make, options = baselines.dgc, {"density": 0.25}
    workers = workers_of({AXIS: 2}, AXIS)
    ends = []
    for axis_name in (workers, AXIS):
        tx = make(1e-2, axis_name=axis_name, **options)
        state = lc.init_state(tx, model_params(), workers)
        ends.append(lc.make_train_step(model, tx, workers)(state, BATCH)[0].params)
    assert_equal(*ends)
    assert not np.array_equal(ends[0]["w"], model_params()["w"])


@pytest.mark.parametrize("name", TWO_LEVELS)
def test_a_group_sends_its_mean_as_one_worker(name):
    """Each slice is of whole rows, so codes and scales are those of workers that have the means."""
    rows, steps = 32, 3
    params = {"w": jnp.ones((rows, 128))}
    rng = np.random.default_rng(0)
    # Odd means of three workers do not tie. Four bits tell -7 to 7 exactly, so nothing is at random;
    # feedback would find zeros among so few values, and their coins lie elsewhere.
    most = 4 if name.startswith("qsgd") else 2000
    means = 2.0 * rng.integers(-most, most, (steps, 3, rows, 128)) + 1
    means[..., 0] = 2 * most - 1
    apart = rng.integers(-3, 4, means.shape)
    grads = np.stack([means + apart, means - apart], 2).reshape(steps, 6, rows, 128)
    ends = []
    for axes, group, own in [({AXIS: 3, "gpu": 2}, "gpu", grads), ({AXIS: 3}, None, means)]:
        workers = workers_of(axes, AXIS, group)
        tx = lc.on_mesh(TWO_LEVELS[name](axis_name=workers), workers)
        state, updates = tx.init(params), []
        for step in range(steps):
            g = {"w": jnp.asarray(own[step], jnp.float32)}
            update, state = jax.jit(tx.update)(g, state, params)
            updates.append(np.asarray(update["w"]))
        ends.append(np.stack(updates))
    if name == "adamw":  # roots and quotients may be fused with what follows, or not
        np.testing.assert_allclose(*ends, rtol=2e-6)
    else:
        np.testing.assert_array_equal(*ends)
    assert np.abs(ends[0]).min() > 0


@pytest.mark.parametrize("make", [baselines.terngrad, baselines.dgc])
def test_two_levels_that_a_baseline_cannot_serve_are_refused(make):
    workers = workers_of({AXIS: 2, "gpu": 2}, AXIS, "gpu")
    message = f"{make.__name__} has no two levels, .*group_axis='gpu'.*without a group_axis"
    with pytest.raises(ValueError, match=message):
        make(0.1, axis_name=workers)
    every_device = lc.Workers(workers.mesh, (AXIS, "gpu"))
    state = lc.init_state(make(0.1, axis_name=every_device), model_params(), every_device)
    assert optax.tree.get(state.opt_state, "abstained").shape == ()


MASKED = [make for make in (*MAKERS, baselines.dgc) if make is not baselines.diloco]


@pytest.mark.parametrize("make", MASKED)
def test_a_mask_that_is_not_of_bools(make):
    options = {"weight_decay": 0.1, "axis_name": AXIS}
    message = (
        r"mask\['w'\] is 'no': a mask has a bool for each leaf of the parameters; give True or"
    )
    with pytest.raises(TypeError, match=message):
        make(1e-3, mask={"w": "no"}, **options)
    tx = make(1e-3, mask=lambda params: {"w": "no"}, **options)
    with pytest.raises(TypeError, match=message):
        jax.eval_shape(functools.partial(bound_init, tx), {"w": jnp.ones(3)})
    make(1e-3, mask={"w": np.bool_(False)}, **options)
