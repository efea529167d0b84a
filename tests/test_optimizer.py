"""The optimizers against optax, against each other and against what the compiled program holds."""

import functools
import itertools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax import layout
from lioncub_jax.mesh import border
from lioncub_jax.traffic.compiled import collectives, sent_bytes

AXIS = "data"


class Trace(NamedTuple):
    """What each worker holds after each step: every leaf ``[steps, workers, ...]``."""

    updates: Any
    params: Any
    state: Any


# Options under which nothing is rounded if gradients are small whole numbers, and at most the sum of
# exact products otherwise. So it does not matter whether XLA contracts a multiplication and an addition
# to a fused one, in which it differs from program to program.
EXACT = {"learning_rate": 2**-6, "b1": 0.75, "b2": 0.5, "weight_decay": 0.125}


def cub(**options):
    return lc.lion_cub(**{**EXACT, **options}, axis_name=AXIS)


def owner_lion(**options):
    return lc.owner_lion(**{**EXACT, **options}, axis_name=AXIS)


def make_mesh(workers, kind=AxisType.Auto):
    devices = jax.devices()
    assert len(devices) >= workers
    return jax.make_mesh((workers,), (AXIS,), axis_types=(kind,), devices=devices[:workers])


def worker_run(tx, params, grads, abstain=None):
    """All steps of one worker; ``grads`` are ``[steps, 1, ...]``, its own."""

    def step(carry, inputs):
        params, state = carry
        g, sits_out = jax.tree.map(lambda x: x[0], inputs)
        told = {} if abstain is None else {"abstain": sits_out}
        updates, state = tx.update(g, state, params, **told)
        params = optax.apply_updates(params, updates)
        return (params, state), jax.tree.map(lambda x: x[None], Trace(updates, params, state))

    state = tx.init(jax.tree.map(lambda p: jax.lax.pcast(p, AXIS, to="varying"), params))
    return jax.lax.scan(step, (params, state), (grads, abstain))[1]


def program(tx, params, grads, abstain=None, *, check_vma=True, kind=AxisType.Auto):
    """The compiled program of all steps, its arguments and its mesh."""
    tx = optax.with_extra_args_support(tx)
    mesh = make_mesh(jax.tree.leaves(grads)[0].shape[1], kind)
    stepwise = NamedSharding(mesh, P(None, AXIS))
    params = jax.device_put(params, NamedSharding(mesh, P()))
    arguments = (params, *jax.device_put((grads, abstain), stepwise))
    body = jax.shard_map(
        functools.partial(worker_run, tx), mesh=mesh, in_specs=(P(), P(None, AXIS), P(None, AXIS)),
        out_specs=P(None, AXIS), check_vma=check_vma,
    )  # fmt: skip
    return jax.jit(body).lower(*arguments).compile(), arguments, mesh


def run(tx, params, grads, abstain=None, **options):
    """Runs ``tx`` on gradients ``[steps, workers, ...]``; what comes back is each device's own copy.

    With ``check_vma`` the types prove besides that all workers hold the same parameters: they are
    carried from step to step as a value that does not vary.
    """
    compiled, arguments, _ = program(tx, params, grads, abstain, **options)
    return jax.tree.map(np.asarray, compiled(*arguments))


def jitted_optax(tx, params, grads):
    """Plain optax on gradients ``[steps, ...]``: a trace without workers."""

    @jax.jit
    def steps(params, grads):
        def step(carry, g):
            params, state = carry
            updates, state = tx.update(g, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), Trace(updates, params, state)

        return jax.lax.scan(step, (params, tx.init(params)), grads)[1]

    return jax.tree.map(np.asarray, steps(params, grads))


def normal(shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def gradients(params, steps, workers, seed=0):
    """Normal gradients of the dtypes of the parameters."""
    return jax.tree.map(
        lambda p: jnp.asarray(normal((steps, workers, *p.shape), seed), p.dtype), params
    )


def whole_gradients(params, steps, workers, most=3, unit=1, seed=0):
    """Whole multiples of ``unit``, so that sums are exact in float32; many are zeros and ties."""
    rng = np.random.default_rng(seed)

    def draw(p):
        return (unit * rng.integers(-most, most + 1, (steps, workers, *p.shape))).astype(np.float32)

    return jax.tree.map(draw, params)


def with_odd_sums(grads):
    """Their means and dyadic blends of means are never zero, as an odd number of halves is not."""
    return jax.tree.map(
        lambda g: np.concatenate([g[:, :1] + (g.sum(1, keepdims=True) % 2 == 0), g[:, 1:]], 1),
        grads,
    )


def assert_equal(a, b):
    """Exactly, bit patterns included: -0 is not 0 and dtypes count."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
    ):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape), path
        np.testing.assert_array_equal(
            np.frombuffer(x.tobytes(), np.uint8), np.frombuffer(y.tobytes(), np.uint8), str(path)
        )


def assert_replicas_agree(tree):
    """Every worker's copy ``[steps, workers, ...]`` has the bits of worker 0's."""
    for w in range(1, jax.tree.leaves(tree)[0].shape[1]):
        assert_equal(jax.tree.map(lambda x, w=w: x[:, w], tree), worker(tree))


def worker(tree, index=0):
    return jax.tree.map(lambda x: x[:, index], tree)


def last(tree):
    """Worker 0's copy after the last step."""
    return jax.tree.map(lambda x: x[-1, 0], tree)


def owner_momentum(state, params):
    """The one momentum of ``owner_lion``, ``[steps, ...]`` in the shapes of the parameters.

    The slices of all workers joined are the flat buffer, in which each small leaf is padded to rows.
    """
    (slices,) = state.owner  # value.mu: [(steps,) workers, rows, 128]
    mu = slices.value.mu
    flat = mu.reshape(*mu.shape[:-3], -1)
    leaves, first = [], 0
    for p in jax.tree.leaves(params):
        leaves.append(flat[..., first : first + p.size].reshape(*flat.shape[:-1], *p.shape))
        first += -(-p.size // 128) * 128
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


# --- one worker is optax.lion -----------------------------------------------------------------------

TREE = {"w": normal((9, 15), 1), "b": normal((64,), 2), "c": normal((), 3)}

ONE_WORKER = {
    "lion_cub": lc.lion_cub,
    "midrise(3)": functools.partial(lc.lion_cub, quantizer=lc.quantize.midrise(3)),
    "integer(8), counts": functools.partial(
        lc.lion_cub, quantizer=lc.quantize.integer(8), wire=lc.wires.counts()
    ),
    "majority": lc.distributed_lion,
    "average": functools.partial(lc.distributed_lion, average=True),
    "owner": lc.owner_lion,
}
SETTINGS = {
    "float32": (jnp.float32, {}),
    "bfloat16 parameters": (jnp.bfloat16, {"weight_decay": 0.125}),
    "bfloat16 momentum, schedule, masked decay": (
        jnp.float32,
        {
            "learning_rate": optax.linear_schedule(0.1, 0.01, 15),
            "b1": 0.8,
            "b2": 0.95,
            "mu_dtype": jnp.bfloat16,
            "weight_decay": 0.3,
            "mask": {"w": True, "b": False},
        },
    ),
    # With betas of 1/2 all products are exact. With others XLA may round b2 mu + (1 - b2) g twice or
    # (as a fused multiply-add) once. It chooses alike for the arrays in the two programs compared
    # here, but not for a single number.
    "scalar": (jnp.float32, {"b1": 0.5, "b2": 0.5}),
}
QUICK = {  # every optimizer and every setting; the other pairs are slow
    ("lion_cub", "bfloat16 momentum, schedule, masked decay"), ("midrise(3)", "float32"),
    ("integer(8), counts", "bfloat16 parameters"), ("majority", "bfloat16 parameters"),
    ("average", "bfloat16 momentum, schedule, masked decay"), ("owner", "float32"),
    ("lion_cub", "scalar"), ("owner", "scalar"),
}  # fmt: skip
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in itertools.product(ONE_WORKER, SETTINGS)
    if case in QUICK or case[1] != "scalar"
]


def one_worker_case(setting):
    dtype, options = SETTINGS[setting]
    names = "wbc" if setting == "scalar" else "wb"
    params = {k: jnp.asarray(TREE[k], dtype) for k in names}
    drawn = gradients(params, 20, 1)
    drawn["w"] = drawn["w"].at[:, :, 4:].set(0)  # sign(0) is 0, in all of Lion
    drawn["b"] = drawn["b"].at[::3].set(0)
    grads = [jax.tree.map(lambda g, t=t: g[t], drawn) for t in range(20)]
    return {"learning_rate": 0.01, **options}, params, grads


@functools.cache
def lion_alone(setting):
    options, params, grads = one_worker_case(setting)
    tx = optax.lion(**options)

    @jax.jit
    def step(params, state, g):
        updates, state = tx.update(g, state, params)
        return optax.apply_updates(params, updates), state

    state, trace = tx.init(params), []
    for g in grads:
        params, state = step(params, state, jax.tree.map(lambda x: x[0], g))
        trace.append((params, state[0].mu))
    return trace


def inner_product(params, batch, rng):
    """A loss whose gradient is the batch."""
    return sum(jnp.sum(p * batch[k][0]) for k, p in params.items())


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_one_worker_is_optax_lion_bit_for_bit(name, setting):
    options, params, grads = one_worker_case(setting)
    mesh = make_mesh(1)
    tx = ONE_WORKER[name](**options, axis_name=AXIS)
    state = lc.init_state(tx, params, mesh, axis_name=AXIS)
    step = lc.make_train_step(inner_product, tx, mesh, axis_name=AXIS)
    for g, (want_params, want_mu) in zip(grads, lion_alone(setting), strict=True):
        state, _ = step(state, g)
        assert_equal(state.params, want_params)
        vote = state.opt_state[0]
        own = jax.tree.map(lambda x: x[0], vote.mu)
        assert_equal(owner_momentum(vote, params) if name == "owner" else own, want_mu)
    assert (int(vote.count), int(vote.abstentions)) == (20, 0)


@pytest.mark.parametrize("make", [lc.lion_cub, lc.distributed_lion, lc.owner_lion])
def test_a_state_made_outside_jit_can_be_donated(make):
    """No two arrays of it are one: XLA refuses a buffer that is donated twice."""
    tx, params = make(0.5, axis_name=None), {"w": jnp.ones(130), "b": jnp.ones(3)}
    step = jax.jit(tx.update, donate_argnums=1)
    state = tx.init(params)
    for _ in range(2):
        _, state = step(params, state, params)
    assert int(state[0].count) == 2


def test_one_worker_with_a_nan_stands_still():
    params = {"w": np.ones((70,), np.float32)}
    grads = whole_gradients(params, 3, 1)
    grads["w"][1, 0, 69] = np.nan
    for make in (lc.lion_cub, lc.owner_lion):
        got = run(make(0.5, weight_decay=0.0, axis_name=AXIS), params, grads)
        assert (got.updates["w"][1] == 0).all() and (got.updates["w"][2] != 0).any()
        momentum = got.state[0].mu["w"] if make is lc.lion_cub else got.state[0].owner[0].value.mu
        assert_equal(momentum[1], momentum[0])
        assert got.state[0].abstained[:, 0].tolist() == [0, 1, 0]


# --- momentum at the owner --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantizer", "wire"),
    [
        (lc.quantize.dense(), lc.wires.two_phase()),
        pytest.param(lc.quantize.dense(), lc.wires.gathered(), marks=pytest.mark.slow),
        (lc.quantize.dense(jnp.bfloat16), lc.wires.two_phase()),
        (lc.quantize.dense(), lc.wires.all_reduce()),
    ],
    ids=lambda part: part.name,
)
def test_owner_momentum_of_exact_means_is_lion_on_the_mean_gradient(quantizer, wire):
    params = jax.tree.map(jnp.asarray, TREE)
    grads = whole_gradients(params, 10, 8, most=100)
    told = np.zeros((10, 8), bool)
    told[3:6, 1::2] = True  # so that four are left
    for g in grads.values():
        g[told] = 2 * np.round(g[told] / 2)
    grads = with_odd_sums(grads)
    mask = {"w": True, "b": True, "c": False}
    tx = owner_lion(mask=mask, quantizer=quantizer, wire=wire)
    got = run(tx, params, grads, told)
    means = jax.tree.map(
        lambda g: np.stack([x[~absent].mean(0) for x, absent in zip(g, told, strict=True)]), grads
    )
    want = jitted_optax(optax.lion(**EXACT, mask=mask), params, means)
    assert_replicas_agree(got.params)
    assert_equal(worker(got.params), want.params)
    slices = got.state[0]
    if not wire.owns_slice:  # everybody owns all
        assert_replicas_agree(slices.owner)
        slices = slices._replace(owner=jax.tree.map(lambda x: x[:, :1], slices.owner))
    assert_equal(owner_momentum(slices, params), want.state[0].mu)


def argument_bytes(tx, size=8 * 64 * 256):
    """Bytes of a device's arguments of a compiled training step: parameters, state, batch."""
    mesh = make_mesh(8)
    state = lc.init_state(tx, {"w": jnp.ones((size,))}, mesh, axis_name=AXIS)
    step = lc.make_train_step(
        lambda params, batch, rng: jnp.mean(batch) * jnp.sum(params["w"] ** 2),
        tx,
        mesh,
        axis_name=AXIS,
    )
    compiled = step.lower(state, jnp.ones((8, 1))).compile()
    return compiled.memory_analysis().argument_size_in_bytes


def test_owner_momentum_takes_one_eighth_of_the_memory_on_each_of_8_devices():
    size = 8 * 64 * 256
    plain = argument_bytes(lc.global_gradients(optax.sgd(0.1), AXIS))
    lion = argument_bytes(lc.global_gradients(optax.lion(0.1), AXIS)) - plain
    local = argument_bytes(cub()) - plain
    owner = argument_bytes(owner_lion(quantizer=lc.quantize.dense())) - plain
    counters = 64  # bytes of counts and statistics, at most
    assert 4 * size <= lion <= 4 * size + counters
    assert 4 * size <= local <= 4 * size + counters
    assert 4 * size / 8 <= owner <= 4 * size / 8 + counters


# --- replicas, and workers that sit out -------------------------------------------------------------

STEPS, BAD = 100, 3
SICK = {0: np.nan, 7: np.nan, 8: np.inf, 40: -np.inf, 99: np.nan}
ALL_SICK = 60
ABSENT = np.array([8 if t == ALL_SICK else int(t in SICK) for t in range(STEPS)])
MAKERS = {
    "lion_cub": lc.lion_cub,
    "average": functools.partial(lc.distributed_lion, average=True),
    "ternary": functools.partial(lc.lion_cub, quantizer=lc.quantize.ternary()),
    "owner": lc.owner_lion,
}


@functools.cache
def sick_runs(name):
    """100 steps on 8 workers, twice: workers are not finite at times, or are told to sit out then.

    Of the embedding's rows some are seen by nobody, and some by one worker alone.
    """
    params = {
        "embedding": jnp.ones((50, 16)),
        "tail": jnp.ones((129,)),
        "c": jnp.ones(()),
        "d": jnp.ones(9),
    }
    healthy = whole_gradients(params, STEPS, 8)
    healthy["embedding"][:, :, 8:] = 0
    healthy["embedding"][:, 1, 32:40] = normal((STEPS, 8, 16))
    healthy["tail"][:, :, 128:] = 0
    healthy["d"][:] = 0
    sick = jax.tree.map(np.copy, healthy)
    told = np.zeros((STEPS, 8), bool)
    for step, value in SICK.items():
        sick["embedding"][step, BAD, step % 50, 15] = value
        told[step, BAD] = True
    sick["c"][ALL_SICK] = np.nan
    told[ALL_SICK] = True
    # Without checked types nothing but the arithmetic keeps the replicas alike.
    tx = MAKERS[name](2**-6, weight_decay=0.0, axis_name=AXIS)
    compiled, arguments, _ = program(tx, params, sick, np.zeros_like(told), check_vma=False)
    placed = jax.device_put((healthy, told), arguments[2].sharding)
    return [jax.tree.map(np.asarray, compiled(*a)) for a in (arguments, (arguments[0], *placed))]


@pytest.mark.parametrize("name", MAKERS)
def test_replicas_stay_equal_through_ties_zeros_and_nans(name):
    for got in sick_runs(name):
        assert got.params["embedding"].shape == (STEPS, 8, 50, 16)
        assert_replicas_agree((got.params, got.updates))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(got.params))
        moved = np.abs(got.params["embedding"][-1] - 1).max()
        assert 4 * 2**-6 < moved <= STEPS * 2**-6


@pytest.mark.parametrize("name", MAKERS)
def test_abstentions_are_exactly_those_that_were_not_finite(name):
    for got in sick_runs(name):
        for copy in range(8):
            np.testing.assert_array_equal(got.state[0].abstained[:, copy], ABSENT)
            np.testing.assert_array_equal(got.state[0].abstentions[:, copy], np.cumsum(ABSENT))
        stats = lc.vote_stats(last(got.state))
        assert (int(stats.abstained), int(stats.abstentions)) == (1, len(SICK) + 8)


@pytest.mark.parametrize("name", MAKERS)
def test_a_worker_that_sits_out_remembers_nothing_of_it(name):
    for got in sick_runs(name):
        vote = got.state[0]
        own = vote.error if name == "owner" else vote.mu
        assert all(np.isfinite(x.astype(np.float32)).all() for x in jax.tree.leaves(vote))
        same = np.all(
            [(x[1:] == x[:-1]).reshape(STEPS - 1, 8, -1).all(-1) for x in own.values()], 0
        )
        for step, index in itertools.product(range(1, STEPS), range(8)):
            sits_out = step == ALL_SICK or (index == BAD and step in SICK)
            assert same[step - 1, index] == sits_out, (step, index)
        assert not own["embedding"][0, BAD].any() and own["embedding"][0, BAD - 1].any()


@pytest.mark.parametrize("name", MAKERS)
def test_a_step_in_which_all_sit_out_changes_nothing(name):
    for got in sick_runs(name):
        assert not any(u[ALL_SICK].any() for u in got.updates.values())
        # The slice of the momentum; the counter beside it goes on.
        slices = [x for x in jax.tree.leaves(got.state[0].owner) if x.ndim > 2]
        assert len(slices) == (name == "owner")
        for kept in (got.params, slices):
            now, before = (
                jax.tree.map(lambda x, t=t: x[t], kept) for t in (ALL_SICK, ALL_SICK - 1)
            )
            assert_equal(now, before)


@pytest.mark.parametrize("name", MAKERS)
def test_told_to_sit_out_is_the_same_as_not_finite(name):
    sick, told = sick_runs(name)
    assert_equal(sick, told)


@pytest.mark.parametrize("name", MAKERS)
def test_rows_that_are_never_touched_do_not_move(name):
    """Embedding rows have 16 elements; a row of votes is eight of them."""
    for got in sick_runs(name):
        moved = (got.params["embedding"] != 1).any((0, 1, 3))
        np.testing.assert_array_equal(np.flatnonzero(moved), [*range(8), *range(32, 40)])
        assert (got.params["d"] == 1).all()
        assert (got.params["tail"][..., :128] != 1).any((0, 1)).all()
        assert (got.params["tail"][..., 128] == 1).all()


def test_every_wire_leaves_out_the_worker_that_abstains(run_workers):
    params = {"w": jnp.zeros((9, 15))}
    grads = whole_gradients(params, 6, 3)
    told = np.zeros((6, 3), bool)
    told[1:4, 2] = True
    wires = [lc.wires.two_phase(), lc.wires.gathered(), lc.wires.counts(), lc.wires.lanes()]
    done = run_workers({wire.name: cub(wire=wire) for wire in wires}, params, grads, told)
    want, *others = done.values()
    assert want[1][0].abstained[:, 0].tolist() == [0, 1, 1, 1, 0, 0]
    for got in others:
        assert_equal(got, want)


# --- zeros and ties ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "quantizer"),
    [
        (2, lc.quantize.sign()),
        (3, lc.quantize.midrise(2)),
        pytest.param(3, lc.quantize.sign(), marks=pytest.mark.slow),
        pytest.param(4, lc.quantize.sign(), marks=pytest.mark.slow),
        pytest.param(4, lc.quantize.midrise(2), marks=pytest.mark.slow),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_zeros_in_voted_rows_and_ties_do_not_drift(workers, quantizer):
    """Zeros beside a voted element take fair sides; so do ties, which W = 2 and 4 have.

    A fair coin tossed n times has a mean of standard deviation 1 / sqrt(n). The bounds are 4.5 of
    them, for one mean over all elements and steps and for each element's own (the largest of 600).
    """
    steps, size = 1000, 640
    params = {"w": jnp.zeros((size,))}
    g = np.zeros((1, workers, size), np.float32)
    g[..., ::64] = 1.0  # every row is voted on
    g[..., 320:] = 1 - 2 * (np.arange(workers) % 2)[:, None]  # ties, if workers are even
    grads = {"w": np.broadcast_to(g, (steps, workers, size))}
    tx = lc.communicate(axis_name=AXIS, memory=lc.momentum.nothing(), up=quantizer)
    u = worker(run(tx, params, grads).updates["w"])
    assert set(np.unique(u)) == {-1.0, 1.0}
    zeros = [i for i in range(320) if i % 64]
    balanced = [zeros] if workers % 2 else [zeros, range(320, 640)]
    for picked in balanced:
        moves = u[:, list(picked)]
        assert abs(moves.mean()) < 4.5 / math.sqrt(moves.size)
        assert np.abs(moves.mean(0)).max() < 4.5 / math.sqrt(steps)
        neighbours = moves[:, 1:] * moves[:, :-1]
        assert abs(neighbours.mean()) < 4.5 / math.sqrt(neighbours.size)
        assert abs((moves[1:] * moves[:-1]).mean()) < 4.5 / math.sqrt(moves[1:].size)
    assert (u[:, 0:320:64] == 1).all()
    if workers % 2:
        assert (u[:, 320:] == 1).all()


@pytest.mark.parametrize(
    ("workers", "quantizer", "wins"),
    [
        # A second worker takes the voter's side or makes a tie, of which a coin gives half.
        (2, lc.quantize.sign(), 3 / 4),
        # Of two zeros both fall on one side, which may outvote, if the voter is second of three.
        (3, lc.quantize.midrise(2), 5 / 6),
        # Seven zeros are four on one side and three on the other.
        (8, lc.quantize.sign(), 3 / 4),
    ],
    ids=["2", "3", "8"],
)
def test_one_voter_among_zeros_wins_equally_often_whatever_its_index(workers, quantizer, wins):
    """So zeros are no ties, and permuting the workers changes nothing in distribution."""
    steps = 400
    g = np.zeros((1, workers, workers, 128), np.float32)
    g[..., 0] = 1.0  # everybody votes on every row
    for voter in range(workers):  # alone on the rest of its row
        g[:, voter, voter, 1:64], g[:, voter, voter, 64:] = 1.0, -1.0
    grads = {"w": np.broadcast_to(g, (steps, *g.shape[1:]))}
    tx = lc.communicate(axis_name=AXIS, memory=lc.momentum.nothing(), up=quantizer)
    u = worker(run(tx, {"w": jnp.zeros((workers, 128))}, grads).updates["w"])
    won = u[..., 1:] * np.where(np.arange(1, 128) < 64, 1, -1) > 0
    # 4.5 standard deviations: of all elements, and of what all of a step share, who pairs with whom.
    spread = 4.5 * math.sqrt(wins * (1 - wins) / (127 * steps) + (workers == 3) * 0.06 / steps)
    np.testing.assert_allclose(won.mean((0, 2)), wins, atol=spread)


def test_zeros_and_ties_of_exact_codes_are_zeros():
    params = {"w": jnp.zeros((70,))}
    g = np.zeros((1, 4, 70), np.float32)
    g[0, :, 1] = [1, 1, -1, -1]  # a tie
    g[0, :, 2] = [0, 0, 0, -1e-30]  # one vote decides
    g[0, :, 3] = [5, 1, -1, 0]
    g[0, :, 4] = [5, -0.01, 0, 0]  # a tie of signs
    for quantizer in (lc.quantize.ternary(), lc.quantize.integer(8)):
        u = run(
            lc.communicate(axis_name=AXIS, memory=lc.momentum.nothing(), up=quantizer),
            params,
            {"w": g},
        ).updates["w"][0, 0]
        want = np.zeros(70)
        # integer(8) rounds next to its scale, so that -1e-30 is a zero, and counts how large 5 is.
        want[2:5] = [-1, 1, 0] if quantizer.name == "ternary" else [0, 1, 1]
        np.testing.assert_array_equal(u, want)


# --- in chains --------------------------------------------------------------------------------------

SMALL = {"w": normal((9, 15), 1), "b": normal((70,), 2)}


def test_clipping_before_the_vote_clips_each_workers_own_gradient():
    grads = gradients(SMALL, 8, 3)
    grads["w"] = grads["w"].at[::2].multiply(100)
    got = run(optax.chain(optax.clip_by_global_norm(2.0), cub()), SMALL, grads)
    flat = np.concatenate([np.asarray(g).reshape(8, 3, -1) for g in grads.values()], -1)
    norms = np.linalg.norm(flat.astype(np.float64), axis=-1)
    assert (norms > 2).all()
    factor = np.minimum(1, 2 / norms)
    clipped = {
        k: (g * factor.reshape(8, 3, *[1] * (g.ndim - 2))).astype(np.float32)
        for k, g in grads.items()
    }
    want = run(cub(), SMALL, clipped)
    assert_equal(got.params, want.params)
    # Clipped here in another order of operations: a few roundings of the last bit.
    for k, mu in got.state[1][0].mu.items():
        np.testing.assert_allclose(mu, want.state[0].mu[k], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "make", [pytest.param(cub, marks=pytest.mark.slow), owner_lion], ids=["lion_cub", "owner"]
)
def test_accumulating_over_three_steps_votes_with_their_mean(make):
    grads = whole_gradients(SMALL, 9, 2, unit=12)  # so that running means of three are exact
    got = run(optax.MultiSteps(make(), 3).gradient_transformation(), SMALL, grads)
    means = jax.tree.map(lambda g: g.reshape(3, 3, *g.shape[1:]).mean(1, dtype=np.float32), grads)
    want = run(make(), SMALL, means)
    for k, path in got.params.items():
        before = np.concatenate([np.broadcast_to(SMALL[k], (1, *path.shape[1:])), path])
        still = (before[1:] == before[:-1]).all(tuple(range(1, path.ndim)))
        assert still.tolist() == [True, True, False] * 3
    assert_equal(jax.tree.map(lambda x: x[2::3], got.params), want.params)
    assert got.state.inner_opt_state[0].count[:, 0].tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 3]


def test_hyperparameters_can_be_injected_and_scheduled():
    schedule = optax.piecewise_constant_schedule(2**-3, {2: 2**-1, 4: 2**-2})
    inject = optax.inject_hyperparams(lc.lion_cub, static_args=("axis_name",))
    grads = gradients(SMALL, 6, 3)
    options = {**EXACT, "learning_rate": schedule, "sync": lc.sync.every(2)}
    got = run(inject(**options, axis_name=AXIS), SMALL, grads)
    want = run(cub(**options), SMALL, grads)
    assert_equal(got.params, want.params)
    rates = got.state.hyperparams["learning_rate"][:, 0].tolist()
    assert rates == [2**-3, 2**-3, 2**-4, 2**-4, 2**-6, 2**-6]


def test_leaves_masked_out_pass_through_as_they_came():
    grads = gradients(SMALL, 3, 3)
    vote = lc.communicate(axis_name=AXIS, memory=lc.momentum.blend())
    alone = run(vote, {"w": SMALL["w"]}, {"w": grads["w"]})

    def local(grads):
        tx = optax.masked(vote, {"w": True, "b": False})
        g = jax.tree.map(lambda x: x[0, 0], grads)
        updates, _ = tx.update(g, tx.init(g))
        return jax.tree.map(lambda x: x[None], updates)

    spec = P(None, AXIS)
    got = jax.jit(jax.shard_map(local, mesh=make_mesh(3), in_specs=spec, out_specs=P(AXIS)))(grads)
    assert_equal(got["b"], grads["b"][0])
    assert_equal(got["w"], alone.updates["w"][0])


def test_groups_of_leaves_with_optimizers_of_their_own():
    grads = gradients(SMALL, 4, 3)
    dense = lc.global_gradients(optax.adamw(0.01), AXIS)
    tx = optax.partition({"vote": cub(), "dense": dense}, {"w": "vote", "b": "dense"})
    got = run(tx, SMALL, grads)
    want = run(cub(), {"w": SMALL["w"]}, {"w": grads["w"]})
    assert_equal(got.params["w"], want.params["w"])
    mean = {"b": np.asarray(grads["b"]).mean(1)}
    want = jitted_optax(optax.adamw(0.01), {"b": SMALL["b"]}, mean)
    assert_replicas_agree(got.params)
    # Averaged in another order, and compiled in another program: roundings of the last bits.
    np.testing.assert_allclose(got.params["b"][:, 0], want.params["b"], rtol=1e-5, atol=1e-6)
    stats = lc.vote_stats(last(got.state))
    assert int(stats.abstained) == 0


def test_global_gradients_is_the_inner_optimizer_on_the_mean():
    grads = whole_gradients(SMALL, 6, 4)
    got = run(lc.global_gradients(optax.lion(**EXACT), AXIS), SMALL, grads)
    want = jitted_optax(optax.lion(**EXACT), SMALL, jax.tree.map(lambda g: g.mean(1), grads))
    assert_replicas_agree(got.params)
    assert_equal(worker(got.params), want.params)
    assert_equal(worker(got.state.inner[0].mu), want.state[0].mu)


def test_global_gradients_may_travel_in_bfloat16():
    exact = {"w": jnp.array([1.0, 256.0, -3.0])}  # their sums are exact in bfloat16, too
    fine = {"w": jnp.array([1.0, 1.00390625, 2.0**-9])}  # between two numbers of bfloat16
    for grads, same in ((exact, True), (fine, False)):
        every = jax.tree.map(lambda g: jnp.broadcast_to(g, (1, 4, *g.shape)), grads)
        got = run(lc.global_gradients(optax.sgd(1.0), AXIS, jnp.bfloat16), grads, every)
        moved = grads["w"] - worker(got.params)["w"][-1]
        assert moved.dtype == jnp.float32
        assert bool(jnp.all(moved == grads["w"])) == same
        np.testing.assert_allclose(moved, grads["w"], rtol=2**-8)


def test_coded_gradients_is_the_inner_optimizer_on_the_mean_that_codes_say():
    grads = gradients(SMALL, 6, 4)
    said = run(lc.coded_gradients(optax.identity(), AXIS, 3), SMALL, grads)
    adamw = optax.adamw(2**-6, weight_decay=0.125)
    got = run(lc.coded_gradients(adamw, AXIS, 3), SMALL, grads)
    want = jitted_optax(adamw, SMALL, worker(said.updates))
    assert_replicas_agree(got.params)
    for x, y in zip(jax.tree.leaves(worker(got.params)), jax.tree.leaves(want.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    mean = jax.tree.map(lambda g: g.mean(1), grads)
    for said_, mean_ in zip(
        jax.tree.leaves(worker(said.updates)), jax.tree.leaves(mean), strict=True
    ):
        # What was not said is at most the error of a code, however many steps there were.
        owed = np.abs((mean_ - said_).sum(0)).max()
        assert 0 < owed < 2 * np.abs(mean_).max()


def test_coded_gradients_of_other_units_are_the_same_for_adam():
    grads = gradients(SMALL, 5, 4)
    tx = lc.coded_gradients(optax.adam(2**-6, eps=0.0), AXIS, 4)
    plain, scaled = (run(tx, SMALL, jax.tree.map(lambda g, u=u: u * g, grads)) for u in (1, 64))
    assert_equal(plain.params, scaled.params)


def test_coded_gradients_of_workers_that_abstain_wait():
    grads = gradients(SMALL, 4, 4)
    away = jnp.zeros((4, 4), bool).at[:, 3].set(True)
    spoilt = jax.tree.map(lambda g: g.at[:, 3].set(jnp.nan), grads)
    tx = lc.coded_gradients(optax.adamw(2**-6), AXIS, 4)
    told, found = run(tx, SMALL, grads, away), run(tx, SMALL, spoilt)
    assert_equal(told.params, found.params)
    assert lc.vote_stats(last(found.state)).abstentions == 4
    assert np.isfinite(found.params["w"]).all()


def test_coded_gradients_of_one_worker_code_nothing():
    grads = gradients(SMALL, 4, 1)
    adamw = optax.adamw(2**-6)
    got = run(lc.coded_gradients(adamw, AXIS, 2), SMALL, grads)
    want = jitted_optax(adamw, SMALL, worker(grads))
    for x, y in zip(jax.tree.leaves(worker(got.params)), jax.tree.leaves(want.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    alone = jitted_optax(lc.coded_gradients(adamw, None), SMALL, worker(grads))
    assert_equal(alone.params, want.params)


# --- shapes, dtypes, traces -------------------------------------------------------------------------


class Layer(NamedTuple):
    kernel: Any
    bias: Any


NESTED = {
    "layers": [
        Layer(jnp.ones((3, 5, 7)), None),
        Layer(jnp.ones((65,), jnp.bfloat16), jnp.ones(())),
    ],
    "half": (jnp.ones((2, 33), jnp.float16), {}),
    "empty": jnp.zeros((0, 4)),
}


@pytest.mark.parametrize("name", ["lion_cub", "owner"])
def test_structure_shapes_and_dtypes_are_kept(name):
    grads = gradients(NESTED, 2, 2)
    got = run(MAKERS[name](0.25, axis_name=AXIS), NESTED, grads)
    for tree in (got.params, got.updates):
        assert jax.tree.structure(tree) == jax.tree.structure(NESTED)
        for x, p in zip(jax.tree.leaves(tree), jax.tree.leaves(NESTED), strict=True):
            assert (x.dtype, x.shape) == (p.dtype, (2, 2, *p.shape))
    assert_replicas_agree(got.params)
    for x, p in zip(jax.tree.leaves(got.params), jax.tree.leaves(NESTED), strict=True):
        assert p.size == 0 or (x != np.asarray(p)).any()


@pytest.mark.parametrize("tree", [{}, {"empty": jnp.zeros((0, 3))}], ids=["no leaf", "empty leaf"])
@pytest.mark.parametrize("make", [lc.lion_cub, lc.owner_lion], ids=["lion_cub", "owner"])
def test_trees_without_a_parameter(tree, make):
    tx = make(0.1, axis_name=AXIS)

    def update(g):
        return tx.update(g, tx.init(g), g)[0]

    mapped = jax.shard_map(update, mesh=make_mesh(2), in_specs=P(), out_specs=P(), check_vma=False)
    assert_equal(jax.jit(mapped)(tree), tree)


def test_updates_have_the_dtype_of_the_gradients_whatever_the_momentum_has():
    tree = {str(t): jnp.ones((3,), t) for t in ("float32", "bfloat16", "float16")}
    makers = lc.lion_cub, lc.owner_lion, functools.partial(lc.distributed_lion, average=True)
    mesh = jax.make_mesh((2, 2), (AXIS, "dev"), axis_types=(AxisType.Auto,) * 2)
    for make, mu_dtype, group in itertools.product(
        makers, (None, jnp.float32, jnp.bfloat16), (None, "dev")
    ):
        tx = make(0.1, mu_dtype=mu_dtype, axis_name=AXIS, group_axis=group)

        def update(g, tx=tx, local=make is lc.lion_cub):
            updates, state = tx.update(g, tx.init(g), g)
            return updates, optax.tree.get(state, "mu") if local else ()

        body = jax.shard_map(update, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        updates, mu = jax.tree.map(lambda x: str(x.dtype), jax.eval_shape(body, tree))
        assert updates == {t: t for t in tree}
        if mu and not group:
            assert mu == {t: t if mu_dtype is None else jnp.dtype(mu_dtype).name for t in tree}


@pytest.mark.parametrize("make", [lc.lion_cub, lc.owner_lion], ids=["lion_cub", "owner"])
def test_five_steps_compile_once(make, caplog):
    mesh = make_mesh(2)
    tx = make(optax.linear_schedule(0.1, 0.01, 3), axis_name=AXIS)
    state = lc.init_state(tx, {"w": jnp.ones((5, 3)), "b": jnp.ones(3)}, mesh, axis_name=AXIS)
    step = lc.make_train_step(
        lambda params, x, rng: jnp.mean((x @ params["w"] + params["b"]) ** 2),
        tx,
        mesh,
        axis_name=AXIS,
    )
    compiled = []
    for t in range(5):
        caplog.clear()
        with jax.log_compiles():
            state, _ = step(state, normal((4, 5), t))
        compiled.append(
            any(r.getMessage().startswith("Compiling jit(traced)") for r in caplog.records)
        )
    assert compiled == [True, False, False, False, False]
    assert step.traces == 1
    assert int(state.step) == 5


# --- where it runs ----------------------------------------------------------------------------------


@functools.cache
def in_checked_shard_map():
    return run(everything(), SMALL, gradients(SMALL, 5, 4))


def everything():
    """A vote with a sync and a momentum at the owner, on a leaf each."""
    vote = cub(sync=lc.sync.every(2), quantizer=lc.quantize.midrise(2))
    return optax.partition({"vote": vote, "owner": owner_lion()}, {"w": "vote", "b": "owner"})


@pytest.mark.parametrize(
    ("check_vma", "kind"),
    [
        (True, AxisType.Explicit),
        (False, AxisType.Auto),
        pytest.param(False, AxisType.Explicit, marks=pytest.mark.slow),
    ],
)
def test_all_kinds_of_shard_map_give_the_same_parameters(check_vma, kind):
    grads = gradients(SMALL, 5, 4)
    got = run(everything(), SMALL, grads, check_vma=check_vma, kind=kind)
    assert_equal(got.params, in_checked_shard_map().params)
    # Arrays only: what a bucket knows of mesh axes is read off types, and there are none unchecked.
    assert_equal(jax.tree.leaves(got.state), jax.tree.leaves(in_checked_shard_map().state))


@pytest.mark.filterwarnings("ignore:.*pmap.*:DeprecationWarning")
def test_pmap_gives_the_same_parameters():
    tx = everything()

    def worker(params, grads):
        state = tx.init(params)

        def step(carry, g):
            updates, state = tx.update(g, carry[1], carry[0])
            params = optax.apply_updates(carry[0], updates)
            return (params, state), params

        return jax.lax.scan(step, (params, state), grads)[1]

    grads = jax.tree.map(lambda g: np.moveaxis(np.asarray(g), 1, 0), gradients(SMALL, 5, 4))
    got = jax.pmap(worker, axis_name=AXIS, in_axes=(None, 0))(SMALL, grads)
    got = jax.tree.map(lambda x: np.moveaxis(np.asarray(x), 1, 0), got)
    assert_equal(got, in_checked_shard_map().params)


# --- what the compiled program sends ----------------------------------------------------------------


def compiled_step(tx, leaves, size, workers=8):
    """Collectives of the training step of ``make_train_step`` for some leaves of one size."""
    mesh = make_mesh(workers)
    params = {f"leaf{i}": jnp.zeros((size,)) for i in range(leaves)}
    state = lc.init_state(tx, params, mesh, axis_name=AXIS)

    def loss(params, batch, rng):
        return jnp.mean(batch) * sum(jnp.sum(jnp.sin(p)) for p in params.values())

    step = lc.make_train_step(loss, tx, mesh, axis_name=AXIS)
    return collectives(step.lower(state, jnp.ones((workers, 1))).compile(), mesh)


def by_kind(found):
    """``(integer collectives' names in order, float operands)``."""
    integer = [c for c in found if all(o.dtype[0] in "us" for o in c.operands)]
    floats = [o for c in found if c not in integer for o in c.operands]
    return integer, floats


@pytest.mark.parametrize(
    ("leaves", "size"), [(1, 2**20), pytest.param(20, 53_000, marks=pytest.mark.slow)]
)
def test_default_step_sends_two_bits_a_parameter_in_two_collectives(leaves, size):
    workers = 8
    found = compiled_step(cub(), leaves, size)
    integer, floats = by_kind(found)
    assert sorted(c.op for c in integer) == ["all-gather", "all-to-all"]
    assert all(
        c.axes == (AXIS,) and (c.times, c.looped, c.gated) == (1, False, False) for c in found
    )
    assert floats and all(math.prod(o.shape) == 1 for o in floats)  # the loss
    bits = 8 * sent_bytes(integer)[(AXIS,)] / (leaves * size)
    least = 2 * (workers - 1) / workers
    assert least <= bits <= 1.05 * least


def test_default_owner_step_sends_four_bits_a_parameter_in_two_collectives():
    integer, floats = by_kind(compiled_step(owner_lion(), 3, 2**18, 4))
    assert sorted(c.op for c in integer) == ["all-gather", "all-to-all"]
    assert all(math.prod(o.shape) == 1 for o in floats)
    bits = 8 * sent_bytes(integer)[(AXIS,)] / (3 * 2**18)
    least = (3 + 1 + 16 / 128) * 3 / 4  # three up, one down, a bfloat16 step for each block of 128
    assert least <= bits <= 1.05 * least


def test_buckets_are_a_pair_of_collectives_each_and_change_nothing():
    params = {k: normal((n,)) for k, n in zip("abcdef", (100, 100, 50, 300, 64, 64), strict=True)}
    grads = gradients(params, 3, 3)  # without ties, whose coins depend on the place in the buffer

    def results(tx):
        compiled, arguments, mesh = program(tx, params, grads)
        ops = [c.op for c in collectives(compiled, mesh)]
        return ops.count("all-to-all"), ops.count("all-gather"), len(ops), compiled(*arguments)

    *one, want = results(cub())
    *four, got = results(cub(bucket_size=200))
    assert one == [1, 1, 2]
    assert four == [4, 4, 8]  # a b | c | d | e f
    assert_equal(got.params, want.params)
    assert_equal(got.state[0].mu, want.state[0].mu)


def on_two_axes():
    """A vote of 4 workers of two devices each, on leaves of 100 elements for each device."""
    mesh = jax.make_mesh((4, 2), (AXIS, "tp"), axis_types=(AxisType.Auto,) * 2)
    tx = lc.communicate(axis_name=AXIS, memory=lc.momentum.blend())
    specs = {"sharded": P("tp", AXIS), "bias": P(AXIS), "sharded too": P("tp", AXIS)}
    out = {"sharded": P("tp"), "bias": P(), "sharded too": P("tp")}

    def local(grads):
        g = {k: x.reshape(100) for k, x in grads.items()}
        updates, state = tx.update(g, tx.init(g))
        return {k: u[None] if k != "bias" else u for k, u in updates.items()}, state.abstained

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=(out, P()))
    return jax.jit(mapped), mesh


def test_leaves_that_vary_over_other_axes_travel_apart():
    """A worker is a group of two devices here; each votes on its own shard, and on the bias alike."""
    sign = np.sign(normal((2, 1, 100), 7))
    flip = np.array([-1, 1, 1, 1])[:, None]  # three of four agree
    grads = {
        "sharded": (flip * sign).astype(np.float32),
        "bias": (flip * sign[0]).astype(np.float32),
        "sharded too": (-flip * sign).astype(np.float32),
    }
    f, mesh = on_two_axes()
    got, _ = f(grads)
    np.testing.assert_array_equal(got["sharded"], sign[:, 0])
    np.testing.assert_array_equal(got["bias"], sign[0, 0])
    np.testing.assert_array_equal(got["sharded too"], -sign[:, 0])
    found = collectives(f.lower(grads).compile(), mesh)
    pairs = [c for c in found if c.op != "all-reduce"]
    assert sorted(c.op for c in pairs) == ["all-gather"] * 2 + ["all-to-all"] * 2
    assert {o.dtype for c in pairs for o in c.operands} == {"u32"}
    assert {c.axes for c in pairs} == {(AXIS,)}
    # A worker's devices agree on whether it votes, and add up two numbers of the statistics.
    assert all(math.prod(o.shape) <= 2 for c in found if c not in pairs for o in c.operands)


def test_a_worker_of_two_devices_sits_out_as_one():
    f, _ = on_two_axes()
    signs = np.array([1, 1, -1, -1])[:, None] * np.ones((4, 100), np.float32)
    grads = {
        "sharded": np.stack([signs, signs]),
        "bias": signs,
        "sharded too": np.stack([signs, signs]),
    }
    grads["sharded"][1, 2, 7] = np.nan  # of the four, one of the minuses
    got, abstained = f(grads)
    assert int(abstained) == 1
    for u in got.values():
        assert (np.asarray(u) == 1).all()


# --- statistics -------------------------------------------------------------------------------------


def tied(size, ties):
    """Gradients of 4 workers: the first ``ties`` elements two against two, the others unanimous."""
    g = np.ones((1, 4, size), np.float32)
    g[:, :2, :ties] = -1
    return g


def test_tie_rate_is_the_share_of_parameters_whose_votes_cancel(run_workers):
    grads = {"a": tied(10, 3), "b": tied(65, 1), "untouched": np.zeros((1, 4, 5), np.float32)}
    params = jax.tree.map(lambda g: jnp.zeros(g.shape[2:]), grads)
    txs = {
        "sign": cub(),
        "ternary": cub(quantizer=lc.quantize.ternary()),
        "counts": cub(wire=lc.wires.counts()),
    }
    for name, (_, state) in run_workers(txs, params, grads, np.zeros((1, 4), bool)).items():
        stats = lc.vote_stats(last(state))
        # An exact code says that "untouched" is zero, and so do all: its five cancel too.
        ties = 3 + 1 + (5 if name == "ternary" else 0)
        assert stats.tie_rate == np.float32(ties) / np.float32(80), name
        assert stats.tie_rate.dtype == np.float32 and stats.abstained.dtype == np.int32


def test_statistics_of_several_votes_are_joined():
    grads = {"a": tied(10, 3), "b": tied(30, 1)}
    grads["b"][0, 2, 5] = np.nan  # sits out of one vote only: two against one where it was a tie
    params = jax.tree.map(lambda g: jnp.zeros(g.shape[2:]), grads)
    tx = optax.partition({"a": cub(), "b": cub()}, {"a": "a", "b": "b"})
    got = run(tx, params, grads)
    stats = lc.vote_stats(last(got.state))
    assert stats.tie_rate == np.float32(3) / np.float32(40)
    assert (int(stats.abstained), int(stats.abstentions)) == (1, 1)


def test_without_votes_there_are_no_statistics():
    params = {"w": jnp.ones(3)}
    assert lc.vote_stats(optax.lion(0.1).init(params)) is None
    assert lc.vote_stats(cub().init(params)) == (0.0, 0, 0)


# --- Programs


def test_numbers_that_xla_does_not_know_are_the_numbers():
    for numbers in ([], [7], [0, 5, 2**31], list(range(0, 90, 2))):
        for step in (0, 3, 2**31 - 1):
            found = jax.jit(lambda step, numbers=numbers: layout.at_run_time(numbers, step))
            assert list(map(int, found(jnp.int32(step)))) == numbers


@pytest.mark.parametrize(
    ("optimizer", "size", "few"), [(lc.lion_cub, 128 * layout.SMALL, 4), (lc.owner_lion, 1000, 10)]
)
def test_the_program_grows_with_the_number_of_leaves_and_no_faster(mesh_of, optimizer, size, few):
    """Flags of all leaves that were found anew for each leaf made it grow with the square."""
    workers = lc.Workers(mesh_of(2), "data")
    tx = optimizer(1e-3, axis_name=workers)
    on_mesh = lc.on_mesh(tx, workers)
    lines = []
    for leaves in (few, 2 * few, 4 * few):
        params = {str(i): jax.ShapeDtypeStruct((size,), jnp.float32) for i in range(leaves)}
        state = lc.training.abstract_state(tx, params, workers).opt_state
        grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, size), x.dtype), params)
        program = jax.jit(on_mesh.update).lower(grads, state, params).compile().as_text()
        lines.append(len(program.splitlines()))
    assert lines[2] - lines[1] < 2.4 * (lines[1] - lines[0]), lines


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_many_arrays_enter_joined_and_the_program_is_the_one_without(kind, monkeypatch):
    mesh = jax.make_mesh((2,), (AXIS,), devices=jax.devices()[:2], axis_types=(kind,))
    workers, same, own = lc.Workers(mesh, AXIS), [], []
    for i in range(13):
        for shape in [(3, 4), (5, 4), (6,), (), (0, 4), (2, 3, 4)]:
            dtype = [jnp.float32, jnp.bfloat16, jnp.int32][i % 3]
            same.append((jnp.arange(math.prod(shape)).reshape(shape) + i).astype(dtype))
            own.append(jnp.stack([same[-1], 2 * same[-1]]))
    lie = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))
    given = *jax.device_put((same, own), lie), jnp.float32(4)

    def double(same, own, one):
        return [3 * x + (x > one) for x in same], [3 * x + (x > one) for x in own]

    def program():
        specs = P(), P(AXIS)
        return jax.jit(workers.map(double, (*specs, P()), specs, explicit=True)).lower(*given)

    def enter(lowered):
        [names] = re.findall(r"sdy.manual_computation\(([^)]*)\)", lowered.as_text())
        return len(names.split(","))

    joined = program()
    # A few of each dtype and kind; and those without a dimension, or an element.
    assert enter(joined) <= 2 * (3 * 3 + 2 * 13) + 1
    for x, y in zip(*map(jax.tree.leaves, (joined.compile()(*given), double(*given))), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert not x.size or np.array_equal(x, y)
    monkeypatch.setattr(border, "MANY", 1000)
    assert enter(program()) == 2 * len(same) + 1
    texts = [x.compile().as_text() for x in (joined, program())]
    for op in ("concatenate(", "slice(", "copy(", "fusion("):
        assert texts[0].count(op) == texts[1].count(op), op
    assert "concatenate(" not in texts[0]
