"""The library on a mesh against `reference`, bit for bit: what one page says is what devices do.

Gradients are small integers and the betas powers of two, so that the blend, the sums of squares and
the sums over workers are exact, however a compiler contracts or reorders them. Then codes, votes,
ties and momenta must be equal, not close. Where sums cannot be exact, the test says so and bounds how
many elements may differ.
"""

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS

import lioncub_jax as lc
from lioncub_jax import reference

# Every size of a leaf around the edges of bytes, words and rows, in four trees that tests take in turn.
TREES = [
    {"scalar": (), "64": (64,), "129": (3, 43), "empty": (0,)},
    {"7": (7,), "33": (33,), "65": (5, 13)},
    {"8": (8,), "empty": (2, 0), "31": (31,), "127": (127,)},
    {"63": (7, 3, 3), "1000": (1000,), "9": (9,)},
]
B1, B2 = 0.75, 0.5  # of local momentum; at the owner both are 0.5, for means have no bits to spare
FLOATING = ("float32", "bfloat16", "float16")

two_phase, gathered, counts, lanes = (
    lc.wires.two_phase(),
    lc.wires.gathered(),
    lc.wires.counts(),
    lc.wires.lanes(),
)
counts16, counts32, all_reduce = (
    lc.wires.counts(jnp.int16),
    lc.wires.counts(jnp.int32),
    lc.wires.all_reduce(),
)


def zeros(tree, dtypes=(jnp.float32,)):
    shapes = tree.items()
    return {k: jnp.zeros(s, dtypes[i % len(dtypes)]) for i, (k, s) in enumerate(shapes)}


def integers(params, steps, workers, values=range(-3, 4), seed=0):
    """Gradients ``[steps, workers, ...]`` of a few integers."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: rng.choice(values, (steps, workers, *p.shape)).astype(p.dtype), params
    )


class Story(NamedTuple):
    """What happens to the workers: gradients ``[steps, W, ...]`` and who is told to abstain."""

    grads: Any
    abstain: np.ndarray


EVENTS = ("plain", "one not finite", "one told to abstain", "nobody there", "one huge", "all zero")


def eventful(params, workers, seed):
    """Rows of zeros, of everybody and of some; then one event of ``EVENTS`` a step."""
    grads = integers(params, len(EVENTS), workers, seed=seed)
    abstain = np.zeros((len(EVENTS), workers), bool)
    full = [g.reshape(*g.shape[:2], -1) for g in grads.values() if g.size]
    for n, g in enumerate(full):  # views: what is written here is in grads
        g[:, n % workers, :64] = 0
        g[:, :, 64:128] = 0
    full[0][1, 1 % workers, 0] = [np.nan, np.inf][seed % 2]
    abstain[2, 0] = True
    abstain[3] = True
    for g in full:
        g[4, -1] *= 16
        g[5] = 0
    return Story(grads, abstain)


def simulate(simulator, params, story):
    """The reference, all steps: updates and states ``[steps, ...]``."""

    @jax.jit
    def steps(story):
        def step(state, now):
            updates, state = simulator.update(now.grads, state, params, now.abstain)
            return state, (updates, state)

        return jax.lax.scan(step, simulator.init(params, story.abstain.shape[1]), story)[1]

    return jax.tree.map(np.asarray, steps(jax.tree.map(jnp.asarray, story)))


def assert_equal(got, want, but=0):
    """Trees are equal, but for at most so many elements of each leaf."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        assert a.shape == b.shape and a.dtype == b.dtype, (path, a.shape, b.shape, a.dtype, b.dtype)
        assert np.isfinite(a.astype(np.float32)).all(), path
        differ = np.argwhere(a != b)
        assert len(differ) <= but, (path, differ[:4].tolist(), a[a != b][:4], b[a != b][:4])


def assert_same_everywhere(x):
    """``[steps, W, ...]`` without its workers, who all hold the same."""
    assert_equal(x, np.broadcast_to(x[:, :1], x.shape))
    return x[:, 0]


def assert_statistics(state, want):
    for got, wanted in [
        (state.count, want.t),
        (state.ties, want.ties),
        (state.abstained, want.abstained),
        (state.abstentions, want.abstentions),
    ]:
        assert_equal(assert_same_everywhere(got), wanted)


def in_rows(mu, wire):
    """The owners' slices ``[steps, W, words, 32]`` as one buffer ``[steps, rows, 64]``."""
    whole = mu.reshape(len(mu), -1) if wire.owns_slice else assert_same_everywhere(mu)
    return whole.reshape(len(mu), -1, 64)


class Vote(NamedTuple):
    """A way to vote with local momentum, in the words of the library and of the reference."""

    up: Any
    codes: Any
    down: Any
    decide: Any
    wires: tuple
    workers: tuple


MAJORITY = (lc.decide.majority(), reference.majority)
AVERAGE = (lc.decide.average(), reference.average)
TERNARY = (lc.decide.ternary_sum(), reference.ternary_sum)
EVERY_WIRE = (two_phase, gathered, counts, lanes)
RANDOM = lc.quantize.stochastic(3)

VOTES = [
    Vote(lc.quantize.sign(), reference.sign(), *MAJORITY, EVERY_WIRE, (1, 2, 3, 5, 8)),
    Vote(lc.quantize.sign(), reference.sign(), *AVERAGE, (two_phase, lanes), (1, 2, 5)),
    Vote(lc.quantize.sign(), reference.sign(), *TERNARY, (gathered, counts32), (2,)),
    Vote(
        lc.quantize.midrise(2), reference.midrise(2), *MAJORITY, (two_phase, counts, lanes), (2, 8)
    ),
    Vote(
        lc.quantize.midrise(3), reference.midrise(3), *AVERAGE, (two_phase, gathered, lanes), (3, 8)
    ),
    Vote(lc.quantize.midrise(8), reference.midrise(8), *MAJORITY, (two_phase, counts16), (5,)),
    Vote(lc.quantize.midrise(1, block=64), reference.midrise(1, 64), *MAJORITY, (lanes,), (3,)),
    Vote(lc.quantize.midrise(4, block=64), reference.midrise(4, 64), *TERNARY, (two_phase,), (8,)),
    Vote(
        lc.quantize.midrise(2, block=128),
        reference.midrise(2, 128),
        *MAJORITY,
        (two_phase, counts),
        (5,),
    ),
    Vote(
        lc.quantize.midrise(2, rounding=RANDOM),
        reference.midrise(2, seed=3),
        *MAJORITY,
        (two_phase,),
        (3,),
    ),
    Vote(lc.quantize.integer(8), reference.integer(8), *TERNARY, EVERY_WIRE, (1, 3, 8)),
    Vote(lc.quantize.integer(5), reference.integer(5), *AVERAGE, (two_phase, counts, lanes), (3,)),
    Vote(
        lc.quantize.integer(8, rounding=RANDOM),
        reference.integer(8, seed=3),
        *TERNARY,
        (counts,),
        (2, 5),
    ),
    Vote(
        lc.quantize.ternary(), reference.ternary(), *TERNARY, (two_phase, gathered, lanes), (2, 8)
    ),
    Vote(lc.quantize.ternary(), reference.ternary(), *AVERAGE, (two_phase, counts), (5,)),
]


class Owned(NamedTuple):
    """A way to keep momentum at the owner, in the words of both."""

    up: Any
    codes: Any
    feedback: Any
    dominance: float
    down: Any
    decide: Any
    wires: tuple
    workers: tuple


def fed_back(p, block, dtype):
    up = lc.quantize.error_feedback(lc.quantize.midrise(p, block=block), dtype)
    return up, reference.midrise(p, block), dtype


def without_feedback(p, block, seed=None):
    rounding = None if seed is None else lc.quantize.stochastic(seed)
    return (
        lc.quantize.midrise(p, block=block, rounding=rounding),
        reference.midrise(p, block, seed),
        None,
    )


def exact(dtype):
    return lc.quantize.dense(dtype), reference.dense(dtype), None


FLOATS = (
    lc.decide.floats(),
    reference.ternary_sum,
)  # Lion's update is a sign: as floats, a tie is 0
PACKED = (two_phase, gathered)
OWNED = [
    Owned(*fed_back(3, 128, jnp.bfloat16), 16.0, *MAJORITY, PACKED, (1, 2, 5, 8)),
    Owned(*fed_back(1, 64, jnp.float32), 16.0, *MAJORITY, PACKED, (3, 8)),
    Owned(*fed_back(2, 64, jnp.float16), 2.0, *MAJORITY, (two_phase,), (3,)),
    Owned(*without_feedback(4, 128), 2.0, *MAJORITY, PACKED, (1, 3, 8)),
    Owned(*without_feedback(2, 64), 2.0, *TERNARY, (two_phase,), (5,)),
    Owned(*without_feedback(8, 64), np.inf, *FLOATS, PACKED, (2,)),
    Owned(*without_feedback(4, 128, seed=5), 16.0, *MAJORITY, (two_phase,), (2, 8)),
    Owned(*exact(jnp.float32), 16.0, *MAJORITY, (*PACKED, all_reduce), (1, 2, 3, 5, 8)),
    Owned(*exact(jnp.bfloat16), 16.0, *MAJORITY, (*PACKED, all_reduce), (2, 5)),
    Owned(*exact(jnp.float32), 16.0, *FLOATS, (two_phase, all_reduce), (3,)),
]


def cases(methods):
    """Every method with each of its numbers of workers, and a tree and a seed for each."""
    for number, method in enumerate(methods):
        for workers in method.workers:
            name = f"{method.up.name}, {method.down.name}, {workers} workers"
            yield pytest.param(method, workers, TREES[(number + workers) % 4], id=name)


def seed_of(request):
    return zlib.crc32(request.node.name.encode())


def owner_vote(up, wire, *, b1=0.5, b2=0.5, dominance=16.0, down=None, **options):
    owner = lc.decide.momentum_at_owner(optax.scale_by_lion(b1, b2), dominance=dominance)
    return lc.communicate(axis_name=AXIS, up=up, owner=owner, down=down, wire=wire, **options)


def local_vote(up, wire, *, b1=B1, b2=B2, mu_dtype=None, down=None, **options):
    memory = lc.momentum.blend(b1, b2, mu_dtype)
    return lc.communicate(axis_name=AXIS, memory=memory, up=up, down=down, wire=wire, **options)


@pytest.mark.parametrize(("vote", "workers", "tree"), cases(VOTES))
def test_votes_with_local_momentum(run_workers, request, vote, workers, tree):
    params = zeros(tree)
    story = eventful(params, workers, seed_of(request))
    txs = {wire.name: local_vote(vote.up, wire, down=vote.down) for wire in vote.wires}
    simulator = reference.local_momentum(B1, B2, codes=vote.codes, decide=vote.decide)
    updates, want = simulate(simulator, params, story)
    for got, state in run_workers(txs, params, *story).values():
        if vote.decide is reference.average:  # a division by a constant may become a product
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-22), got, updates)
        else:
            assert_equal(got, updates)
        assert_equal(state.mu, want.mu)
        assert_statistics(state, want)


@pytest.mark.parametrize(("owned", "workers", "tree"), cases(OWNED))
def test_momentum_at_the_owner(run_workers, request, owned, workers, tree):
    params = zeros(tree)
    story = eventful(params, workers, seed_of(request))
    txs = {
        wire.name: owner_vote(owned.up, wire, dominance=owned.dominance, down=owned.down)
        for wire in owned.wires
    }
    simulator = reference.momentum_at_owner(
        0.5, 0.5, None, owned.codes, owned.feedback, owned.dominance, owned.decide
    )
    updates, want = simulate(simulator, params, story)
    # Errors have more bits than the sum of their squares can hold: added in another order it may round
    # to the neighbouring step, of a block in thousands. So one block of one worker may differ.
    but = 0 if owned.feedback is None else owned.up.block
    done = run_workers(txs, params, *story)
    for wire in owned.wires:
        got, state = done[wire.name]
        assert_equal(got, updates, but)
        if not but and owned.down.name != "floats":  # which counts no ties
            assert_statistics(state, want)
        mu, rows = in_rows(state.owner[0].value.mu, wire), want.mu.shape[1]
        assert_equal(mu[:, :rows], want.mu, but)
        assert not mu[:, rows:].any()
        if owned.feedback:
            assert_equal(state.error, want.error, but)


@pytest.mark.parametrize("mu_dtype", [None, "float32"])
def test_leaves_of_mixed_precision_vote_together(run_workers, mu_dtype):
    params = zeros({"a": (65,), "b": (31,), "c": (3, 10), "d": ()}, FLOATING)
    # In three steps the blends of such integers fill the 8 bits of a bfloat16, and no more.
    story = Story(integers(params, 3, 3), np.eye(3, dtype=bool))
    tx = local_vote(lc.quantize.midrise(2), two_phase, mu_dtype=mu_dtype)
    simulator = reference.local_momentum(B1, B2, mu_dtype, reference.midrise(2))
    updates, want = simulate(simulator, params, story)
    got, state = run_workers({0: tx}, params, *story)[0]
    assert_equal(got, updates)
    assert_equal(state.mu, want.mu)


@pytest.mark.parametrize("dtypes", [FLOATING, ("bfloat16",), ("float16",)])
def test_momentum_at_the_owner_has_the_widest_dtype_of_the_gradients(run_workers, dtypes):
    params = zeros({"a": (65,), "b": (31,), "c": (3, 10), "d": ()}, dtypes)
    story = Story(integers(params, 3, 2), np.zeros((3, 2), bool))
    updates, want = simulate(
        reference.momentum_at_owner(0.5, 0.5, codes=reference.dense()), params, story
    )
    got, state = run_workers({0: owner_vote(lc.quantize.dense(), gathered)}, params, *story)[0]
    assert_equal(got, updates)
    assert_equal(in_rows(state.owner[0].value.mu, gathered)[:, : want.mu.shape[1]], want.mu)
    assert state.owner[0].value.mu.dtype == jnp.result_type(*dtypes)


@pytest.mark.parametrize("bucket_size", [1, 200])
def test_buckets_change_nothing_but_the_coin(run_workers, bucket_size):
    params = zeros({"a": (129,), "b": (65,), "empty": (0,), "c": (33,), "d": (1,)})
    # Odd integers blend to odd multiples of a power of two, never to zero; three signs never cancel.
    story = Story(integers(params, 3, 3, values=(-3, -1, 1, 3)), np.zeros((3, 3), bool))
    updates, want = simulate(reference.local_momentum(B1, B2), params, story)
    assert not want.ties.any()
    tx = local_vote(lc.quantize.sign(), two_phase, bucket_size=bucket_size)
    got, state = run_workers({0: tx}, params, *story)[0]
    assert_equal(got, updates)
    assert_equal(state.mu, want.mu)
    assert_statistics(state, want)


# Ordinary numbers and betas: a multiply-add rounds once if the compiler contracts it and twice if not,
# which may differ between the two programs and moves a message by 2**-24 of itself. A code flips where
# that crosses the edge between two codes: less than one element in 10**5, and none or one here. With
# feedback a step may round to its neighbour as well, see above.
ORDINARY = {
    "sign": (lc.quantize.sign(), reference.local_momentum(), 1),
    "two bits": (lc.quantize.midrise(2), reference.local_momentum(codes=reference.midrise(2)), 1),
    "integers": (lc.quantize.integer(8), reference.local_momentum(codes=reference.integer(8)), 1),
    "owner": (
        lc.quantize.error_feedback(lc.quantize.midrise(3, block=128)),
        reference.momentum_at_owner(feedback=jnp.bfloat16),
        128,
    ),
}


@pytest.mark.parametrize(("up", "simulator", "but"), ORDINARY.values(), ids=ORDINARY)
def test_ordinary_numbers_and_default_betas(run_workers, up, simulator, but):
    params = zeros({"1000": (1000,), "129": (129,)})
    rng = np.random.default_rng(7)
    grads = {k: rng.normal(size=(4, 5, *p.shape)).astype(np.float32) for k, p in params.items()}
    story = Story(grads, np.zeros((4, 5), bool))
    updates, want = simulate(simulator, params, story)
    usual = {"b1": 0.9, "b2": 0.99}
    tx = owner_vote(up, two_phase, **usual) if up.feedback else local_vote(up, two_phase, **usual)
    got, state = run_workers({0: tx}, params, *story)[0]
    assert_equal(got, updates, but)
    mu = (
        in_rows(state.owner[0].value.mu, two_phase)[:, : want.mu.shape[1]]
        if up.feedback
        else state.mu
    )
    for a, b in zip(jax.tree.leaves(mu), jax.tree.leaves(want.mu), strict=True):
        assert np.sum(~np.isclose(a, b, rtol=1e-5, atol=1e-7)) <= but


def learning_rate(count):
    return 0.01 / (1 + count)


LEARNING = {"learning_rate": learning_rate, "weight_decay": 0.1, "axis_name": AXIS}
OPTIMIZERS = {
    "lion_cub": (
        lc.lion_cub(
            b1=B1, b2=B2, quantizer=lc.quantize.midrise(2), sync=lc.sync.every(2), **LEARNING
        ),
        reference.local_momentum(B1, B2, codes=reference.midrise(2)),
        lambda t: t % 2 == 0,
    ),
    "distributed_lion": (
        lc.distributed_lion(b1=B1, b2=B2, average=True, **LEARNING),
        reference.local_momentum(B1, B2, decide=reference.average),
        None,
    ),
    "owner_lion": (
        lc.owner_lion(b1=0.5, b2=0.5, **LEARNING),
        reference.momentum_at_owner(0.5, 0.5, feedback=jnp.bfloat16),
        None,
    ),
}


@pytest.mark.parametrize(("tx", "votes", "sync_due"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_descend_decay_and_sync(run_workers, tx, votes, sync_due):
    params = {"w": jnp.linspace(-1, 1, 70), "b": jnp.full(5, 0.5)}
    story = Story(integers(params, 3, 2), np.zeros((3, 2), bool))
    simulator = reference.optimizer(votes, learning_rate, 0.1, sync_due=sync_due)
    updates, want = simulate(simulator, params, story)
    got, state = run_workers({0: tx}, params, *story)[0]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(updates), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)  # u + wd p may be one multiply-add
    if sync_due:
        assert_equal(optax.tree.get(state, "mu"), want.mu)


def test_the_drift_is_measured_before_the_sync(run_workers):
    params = zeros({"w": (70,), "b": (5,)})
    story = Story(integers(params, 3, 4), np.zeros((3, 4), bool))
    tx = lc.lion_cub(0.01, B1, B2, axis_name=AXIS, sync=lc.sync.every(2))
    _, state = run_workers({0: tx}, params, *story)[0]
    _, apart = simulate(reference.local_momentum(B1, B2), params, story)
    want = reference.drift(jax.tree.map(lambda m: m[1], apart.mu))
    for name, drift in optax.tree.get(state, "drift").items():
        got = assert_same_everywhere(drift)
        np.testing.assert_allclose(got, [0, want[name], want[name]], rtol=1e-5)
