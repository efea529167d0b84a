"""The oracle by itself: what must hold of any rule, however the library computes it.

Where a property holds on average only, steps are the sample: all elements of a step share the draw of
which zeros cancel. The share of wins in a step lies between 0 and 1, so its mean over n steps has a
standard deviation of at most 1 / (2 sqrt n), a binomial's, and five of them are the tolerance.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lioncub_jax import reference
from lioncub_jax.reference import baselines, dgc, lion, powersgd, simulate, sync

STEPS = 2048
TOLERANCE = 5 / (2 * STEPS**0.5)
SIMULATORS = {
    "sign": reference.local_momentum(),
    "2 bits": reference.local_momentum(codes=reference.midrise(2)),
    "3 bits, stochastic": reference.local_momentum(codes=reference.midrise(3, seed=1)),
    "integers": reference.local_momentum(codes=reference.integer(8)),
    "ternary": reference.local_momentum(codes=reference.ternary()),
    "average": reference.local_momentum(decide=reference.average),
    "owner": reference.momentum_at_owner(feedback=jnp.bfloat16),
    "owner, 4 bits": reference.momentum_at_owner(codes=reference.midrise(4)),
    "owner, dense": reference.momentum_at_owner(codes=reference.dense()),
}
OTHERS = {
    "sync": sync.synced(reference.local_momentum(), lambda t: t % 2 == 0),
    "coded sync": sync.synced(reference.local_momentum(), lambda t: t % 2 == 0, coded=1),
    "adaptive sync": sync.synced(reference.local_momentum(), adaptive=(2, 8, 1.5)),
    "EF-signSGD": baselines.ef_signsgd(0.125),
    "TernGrad": baselines.terngrad(momentum=0.5),
    "QSGD": baselines.qsgd(4, momentum=0.5),
    "QSGD, l2": baselines.qsgd(3, norm="l2"),
    "DGC": dgc.dgc(0.5, 0.1, warmup=2),
    "PowerSGD": powersgd.powersgd(optax.sgd(0.5, 0.5, accumulator_dtype=jnp.float32), 1),
    "mean": baselines.averaged(optax.trace(0.5)),
}
CODES = {
    **{f"midrise({p})": reference.midrise(p) for p in range(1, 9)},
    "midrise(3, stochastic)": reference.midrise(3, seed=2),
    "integer(8)": reference.integer(8),
    "integer(6, stochastic)": reference.integer(6, seed=2),
    "ternary": reference.ternary(),
}


# Gradients of most tests have this shape, so that one program of a simulator serves them all.
LEAVES = {"a": (3, 43), "b": (200,), "empty": (0, 2)}
RUN, WORKERS = 3, 3


@functools.cache
def compiled(simulator):
    @jax.jit
    def steps(params, grads, abstain):
        def step(state, now):
            updates, state = simulator.update(now[0], state, params, now[1])
            return state, (updates, state)

        return jax.lax.scan(step, simulator.init(params, abstain.shape[1]), (grads, abstain))[1]

    return steps


def run(simulator, grads, abstain=None):
    """Updates and states ``[steps, ...]`` of gradients ``[steps, W, ...]``."""
    params = jax.tree.map(lambda g: jnp.zeros(g.shape[2:], g.dtype), grads)
    if abstain is None:
        abstain = np.zeros(jax.tree.leaves(grads)[0].shape[:2], bool)
    done = compiled(simulator)(params, jax.tree.map(jnp.asarray, grads), abstain)
    return jax.tree.map(np.asarray, done)


def ordinary(seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=(RUN, WORKERS, *shape)).astype(np.float32)
        for name, shape in LEAVES.items()
    }


def assert_same(got, want, but=()):
    for name in want:
        if name not in but:
            np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def assert_finite(tree):
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        assert np.isfinite(np.asarray(leaf, np.float32)).all(), path


# --- Where elements lie


def test_every_element_has_a_bit_of_its_own_in_the_chunk_of_its_owner():
    for workers, shapes in itertools.product((1, 2, 3, 8), ([(3, 43), (0,), (640,)], [(4100,)])):
        buffer = reference.buffer_of(shapes, workers)
        rows = len(buffer.real)
        chunk = 16 * math.ceil(math.ceil(rows / workers) / 16)
        word, bit = np.asarray(buffer.word, np.int64), np.asarray(buffer.bit, np.int64)
        assert len(np.unique(32 * word + bit)) == rows * 128 and bit.max() < 32
        owner = np.broadcast_to(np.arange(rows)[:, None] // chunk, word.shape)
        np.testing.assert_array_equal(word // (4 * chunk), owner)


def test_whole_blocks_lie_across_rows_and_a_last_half_block_folds_its_lanes():
    buffer = reference.buffer_of([(48 * 128 * 2,)], 2)  # chunks of 48 rows
    word, bit = np.asarray(buffer.word), np.asarray(buffer.bit)
    for row, lane, want in [
        (0, 0, (0, 0)), (31, 127, (127, 31)), (32, 5, (133, 0)), (47, 63, (191, 15)),
        (32, 64, (128, 16)), (47, 127, (191, 31)), (48, 0, (192, 0)), (80, 100, (192 + 128 + 36, 16)),
    ]:  # fmt: skip
        assert (word[row, lane], bit[row, lane]) == want, (row, lane)


def test_big_leaves_come_first_in_whole_blocks():
    below, big = 512 * 128, 512 * 128 + 1
    buffer = reference.buffer_of([(5,), (big,), (below,), (0,), (big + 128,)], 4)
    assert buffer.rows == (1, 544, 512, 0, 544) and buffer.order == (1, 4, 0, 2, 3)
    assert np.asarray(buffer.word)[416 - 1 :, 0][:2].tolist() == [12 * 128, 13 * 128]
    leaves = [jnp.arange(n, dtype=jnp.float32)[None] + n for n in (5, big, below, 0, big + 128)]
    joined = buffer.join(leaves)
    for got, want in zip(buffer.split(joined, [jnp.float32] * 5), leaves, strict=True):
        np.testing.assert_array_equal(got, want)
    assert joined[0, 544, 0] == big + 128 and buffer.real.sum() == sum(x.size for x in leaves)


def test_coins_can_begin_elsewhere():
    plain = reference.words(96, 2, 16)
    later = reference.words(96, 2, 16, first_word=1000)
    np.testing.assert_array_equal(plain[0] + 1000, later[0])
    np.testing.assert_array_equal(plain[1], later[1])


# --- Scales


def test_mean_magnitudes_are_right_from_the_smallest_to_the_largest_numbers():
    rng = np.random.default_rng(0)
    plain = rng.uniform(0.5, 1, (2, 300)).astype(np.float32)
    buffer = reference.buffer_of([(300,)], 2)
    for power in (-125, -60, 0, 60, 120, 127):
        x = buffer.join([jnp.asarray(plain * 2.0**power, jnp.float32)])
        rows = np.asarray(lion.row_mean(x, buffer), np.float64)[..., 0]
        want = [np.abs(plain[:, i : i + 128]).mean(1) for i in (0, 128, 256)]
        largest = [np.abs(plain[:, i : i + 128]).max(1) for i in (0, 128, 256)]
        want = largest if power > 121 else want  # where the sum of a row would overflow
        np.testing.assert_allclose(rows[:, :2], np.stack(want, 1)[:, :2] * 2.0**power, rtol=1e-6)
        leaf = np.asarray(lion.leaf_mean(x, buffer), np.float64)[:, 0, 0]
        np.testing.assert_allclose(leaf, plain.mean(1) * 2.0**power, rtol=1e-6)
    most = np.full((1, 300), np.finfo(np.float32).max)
    x = buffer.join([jnp.asarray(most)])
    assert_finite([lion.row_mean(x, buffer), lion.leaf_mean(x, buffer)])


@pytest.mark.parametrize("name", CODES)
def test_a_power_of_two_changes_no_code(name):
    codes, buffer = CODES[name], reference.buffer_of([(3, 43), (300,)], 3)
    rng = np.random.default_rng(1)
    sizes = (129, 300)
    plain = [rng.choice([-1, 1], (3, n)) * rng.uniform(2**-5, 2, (3, n)) for n in sizes]

    @jax.jit
    def encode(scale):
        x = buffer.join([jnp.asarray(part, jnp.float32) * scale for part in plain])
        return codes.encode(x, buffer, 5)

    want = encode(1.0)
    assert len(np.unique(want.q)) > 1
    for power in (-120, -64, -1, 1, 64, 120):
        got = encode(2.0**power)
        np.testing.assert_array_equal(got.q, want.q, err_msg=str(power))


@pytest.mark.parametrize("name", [name for name in CODES if "stochastic" not in name])
def test_the_code_of_minus_x_is_the_mirrored_code_of_x(name):
    codes, buffer = CODES[name], reference.buffer_of([(640,)], 2)
    x = buffer.join([jax.random.normal(jax.random.key(0), (2, 640))])
    top = codes.top(2)
    encode = jax.jit(lambda x: codes.encode(x, buffer, 0).q)
    q, mirrored = encode(x), encode(-x)
    np.testing.assert_array_equal(q + mirrored, top)


def test_a_power_of_two_changes_no_first_update_of_momentum_at_the_owner():
    rng = np.random.default_rng(2)
    plain = rng.choice([-2, -1, -0.5, 0.5, 1, 2], (RUN, WORKERS, 300)).astype(np.float32)
    for codes in (reference.midrise(2), reference.midrise(5), reference.dense()):
        simulator = reference.momentum_at_owner(0.0, codes=codes)
        want, _ = run(simulator, {"a": plain})
        assert len(np.unique(want["a"][0])) == 2
        for power in (-100, -64, 64, 120):
            got, state = run(simulator, {"a": plain * np.float32(2.0**power)})
            np.testing.assert_array_equal(got["a"][0], want["a"][0], err_msg=str(power))
            assert_finite(state)


# --- Zeros and ties: no worker counts for more than another


def shares_of_wins(simulator, patterns):
    """How often each pattern of values, one for each worker, moves an element up: ``[patterns]``.

    Each pattern has a row. Its first elements are not zero, so that everybody votes on it.
    """
    rows = np.repeat(np.array(patterns, np.float32).T[:, :, None], 128, axis=2)
    rows[:, :, :8] = [1, -1] * 4
    grads = jnp.asarray(rows.reshape(len(rows), -1))
    params = jnp.zeros(grads.shape[1])

    @jax.jit
    def mean():
        def step(state, _):
            updates, state = simulator.update(grads, state, params)
            # Only what is counted here is remembered: the same question again, at another step.
            return simulator.init(params, len(rows))._replace(t=state.t), updates

        start = simulator.init(params, len(rows))
        return jnp.mean(jax.lax.scan(step, start, length=STEPS)[1], axis=0)

    return (np.asarray(mean()).reshape(-1, 128)[:, 8:].mean(1) + 1) / 2


def orders(workers):
    """Patterns with zeros and ties, each in several orders."""
    if workers <= 3:
        return list(itertools.product((-1, 0, 1), repeat=workers))
    some = [(1,) + (0,) * 7, (1, 1) + (0,) * 6, (1, -1, 1) + (0,) * 5, (1,) * 4 + (0,) * 4]
    some += [(1,) * 4 + (-1,) * 3 + (0,), (1,) * 4 + (-1,) * 4, (1, -1) * 2 + (0,) * 4, (0,) * 8]
    some += [tuple(-v for v in pattern) for pattern in some]
    rng = np.random.default_rng(0)
    turned = [np.roll(pattern, k) for pattern in some for k in (0, 1, 2, 5)]
    return [tuple(p) for p in turned] + [tuple(rng.permutation(p)) for p in some]


VOTES = {
    "sign": reference.local_momentum(0.0, 0.0),
    "3 bits": reference.local_momentum(0.0, 0.0, codes=reference.midrise(3)),
    "ternary": reference.local_momentum(
        0.0, 0.0, codes=reference.ternary(), decide=reference.majority
    ),
    "owner": reference.momentum_at_owner(0.0, 0.0, codes=reference.midrise(2), dominance=np.inf),
}


@pytest.mark.parametrize("workers", [2, 3, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", VOTES)
def test_the_order_of_the_workers_changes_nothing_and_a_sign_mirrors(name, workers):
    patterns = orders(workers)
    shares = dict(zip(patterns, shares_of_wins(VOTES[name], patterns), strict=True))
    kinds = {}
    for pattern, share in shares.items():
        kinds.setdefault(tuple(sorted(pattern)), []).append(share)
    for kind, found in kinds.items():
        assert np.ptp(found) <= 2 * TOLERANCE, (kind, found)
        opposite = kinds[tuple(sorted(-v for v in kind))]
        assert abs(np.mean(found) + np.mean(opposite) - 1) <= 2 * TOLERANCE, kind


def test_one_voter_among_zeros_wins_as_often_whatever_its_index():
    # Of an even number of workers the other zeros cancel in pairs but for one: it agrees and the voter
    # wins, or it is a tie and the coin decides. Of three both cancel, or (1 in 3) they side together.
    for workers, want in ((2, 3 / 4), (3, 5 / 6), (8, 3 / 4)):
        voters = [tuple(float(i == j) for j in range(workers)) for i in range(workers)]
        found = shares_of_wins(VOTES["sign"], voters)
        np.testing.assert_allclose(found, want, atol=TOLERANCE, err_msg=str(workers))


def test_the_side_of_a_zero_says_nothing_of_the_coin():
    buffer = reference.buffer_of([(640,)], 2)
    both = [
        np.stack([reference.coin(buffer, t), *reference.zero_side(buffer, t, 2)]) for t in range(64)
    ]
    coins, first, second = np.stack(both, 1).reshape(3, -1)
    np.testing.assert_array_equal(first, 1 - second)  # two zeros cancel
    spread = 5 / (2 * coins.size**0.5)
    for bits in (coins, first, coins ^ first):
        assert abs(bits.mean() - 0.5) < spread


# --- What does not concern a leaf or a worker


@pytest.mark.parametrize("name", SIMULATORS)
def test_one_leaf_changes_no_other_leaf(name):
    grads = ordinary()
    want, _ = run(SIMULATORS[name], grads)
    for changed in ("a", "b"):
        got, _ = run(SIMULATORS[name], grads | {changed: -3 * grads[changed]})
        assert_same(got, want, but=(changed,))
        assert not np.array_equal(got[changed], want[changed])


@pytest.mark.parametrize("name", SIMULATORS)
def test_a_worker_with_a_nan_is_as_one_that_is_asked_to_abstain(name):
    grads, asked = ordinary(), np.zeros((RUN, WORKERS), bool)
    asked[1, 2] = True
    want, state = run(SIMULATORS[name], grads, asked)
    assert state.abstained.tolist() == [0, 1, 0] and state.abstentions.tolist() == [0, 1, 1]
    for value in (np.nan, np.inf, -np.inf):
        broken = jax.tree.map(np.copy, grads)
        broken["b"][1, 2, 7] = value
        got, after = run(SIMULATORS[name], broken)
        assert_same(got, want)
        jax.tree.map(np.testing.assert_array_equal, after, state)
    assert_finite((want, state))


def test_only_the_worker_that_abstains_forgets_the_step():
    grads, asked = ordinary(), np.zeros((RUN, WORKERS), bool)
    asked[1, 1] = True
    _, all_there = run(SIMULATORS["sign"], grads)
    _, without = run(SIMULATORS["sign"], grads, asked)
    for name in grads:
        mu = without.mu[name]
        np.testing.assert_array_equal(mu[1, 1], mu[0, 1])
        np.testing.assert_array_equal(mu[1, ::2], all_there.mu[name][1, ::2])


@pytest.mark.parametrize("name", SIMULATORS)
def test_with_nobody_there_nothing_changes(name):
    asked = np.zeros((RUN, WORKERS), bool)
    asked[1] = True
    updates, state = run(SIMULATORS[name], ordinary(), asked)
    for u in updates.values():
        assert not u[1].any()
    for kept in jax.tree.leaves((state.mu, state.error)):
        np.testing.assert_array_equal(kept[1], kept[0])


# --- Numbers at the ends of their range


@pytest.mark.parametrize("name", SIMULATORS)
def test_huge_and_tiny_gradients_are_followed(name):
    signs = {k: np.resize([1, 1, -1], shape) for k, shape in LEAVES.items()}
    for size in (1e38, 1e-30, 1e-36):
        grads = {
            k: np.broadcast_to(np.float32(size) * s, (RUN, WORKERS, *s.shape)).astype(np.float32)
            for k, s in signs.items()
        }
        updates, state = run(SIMULATORS[name], grads)
        assert_finite((updates, state))
        assert not state.abstained.any()
        for k, s in signs.items():
            np.testing.assert_array_equal(np.sign(updates[k]), np.broadcast_to(s, updates[k].shape))


@pytest.mark.parametrize("name", [*SIMULATORS, "coded sync", "EF-signSGD", "QSGD", "QSGD, l2"])
def test_gradients_whose_sum_overflows_leave_the_state_finite(name):
    grads = ordinary()
    for g in grads.values():
        g[0] = 3e38 * np.sign(g[0])
    _, state = run((SIMULATORS | OTHERS)[name], grads)
    assert_finite(state)


def test_a_sum_that_overflows_is_as_with_nobody_there():
    simulator = reference.momentum_at_owner(codes=reference.dense())
    grads = {"a": np.ones((3, 4, 5), np.float32)}
    grads["a"][1, :, 2] = 3e38
    updates, state = run(simulator, grads)
    tied = updates["a"][1]  # in a row that moves: it takes the coin
    assert np.delete(tied, 2).tolist() == [1, 1, 1, 1] and abs(tied[2]) == 1
    assert state.ties.tolist() == [0, 1, 0] and (updates["a"][2] == 1).all()
    assert state.mu[1, 0, 2] == state.mu[0, 0, 2] and state.mu[1, 0, 1] > state.mu[0, 0, 1]
    assert not state.abstained.any()


def test_float16_comes_back_after_one_gradient_of_1e8():
    for simulator in (
        reference.local_momentum(0.9, 0.5, mu_dtype=jnp.float16),
        reference.momentum_at_owner(0.9, 0.5, mu_dtype=jnp.float16),
        reference.momentum_at_owner(0.9, 0.5, feedback=jnp.float16),
    ):
        grads = {"a": np.full((40, WORKERS, 130), -1, np.float32)}
        grads["a"][0] = 1e8
        updates, state = run(simulator, grads)
        assert_finite((updates, state))
        assert not state.abstained.any()
        assert (updates["a"][0] == 1).all() and (updates["a"][-1] == -1).all()


# --- Types


def test_updates_have_the_dtype_of_the_gradients():
    for dtype, mu_dtype in (
        (jnp.bfloat16, jnp.float32),
        (jnp.float16, None),
        (jnp.float32, jnp.bfloat16),
    ):
        grads = {"a": jnp.ones((2, 5), dtype), "b": jnp.ones((2, 3), jnp.float32)}
        params = jax.tree.map(lambda g: g[0], grads)
        for simulator in (
            reference.local_momentum(mu_dtype=mu_dtype),
            reference.momentum_at_owner(mu_dtype=mu_dtype),
        ):
            updates, _ = jax.eval_shape(simulator.update, grads, simulator.init(params, 2), params)
            for name in grads:
                assert updates[name].dtype == grads[name].dtype


@pytest.mark.parametrize("name", [*SIMULATORS, *OTHERS])
def test_64_bits_change_no_dtype(name):
    simulator = (SIMULATORS | OTHERS)[name]

    def dtypes():
        params = {"a": jnp.zeros((3, 43), jnp.float32), "b": jnp.zeros(5, jnp.bfloat16)}
        grads = jax.tree.map(lambda p: jnp.ones((3, *p.shape), p.dtype), params)
        state = simulator.init(params, 3)
        abstain = jnp.zeros(3, bool)
        found = jax.eval_shape(lambda s: simulator.update(grads, s, params, abstain), state)
        return [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (state, *found)]

    plain = dtypes()
    assert plain[0] == plain[2]  # a scan keeps the types of its carry
    with jax.enable_x64(True):
        assert dtypes() == plain


def test_64_bits_change_no_simulated_run():
    def loss(params, batch, rng):
        return jnp.sum(params["w"] * batch)

    def parameters():
        votes = reference.local_momentum(codes=reference.midrise(3))
        simulator = reference.optimizer(votes, lambda t: 0.125 / (1 + t))
        state = simulate.start(simulator, {"w": jnp.ones(130, jnp.float32)}, WORKERS)
        batch = jnp.linspace(-1, 2, WORKERS * 130, dtype=jnp.float32).reshape(WORKERS, 130)
        step = jax.jit(lambda state, batch: simulate.step(loss, simulator, state, batch))
        state, losses = step(state, batch)
        assert state.step.dtype == jnp.int32 and losses.dtype == jnp.float32
        return np.asarray(state.params["w"])

    plain = parameters()
    with jax.enable_x64(True):
        np.testing.assert_array_equal(parameters(), plain)
