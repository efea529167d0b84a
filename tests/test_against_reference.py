"""The library on a mesh against `reference`, bit for bit: what one page says is what devices do.

Gradients are small integers and the betas powers of two, so that the blend, the sums of magnitudes and
the sums over workers are exact, however a compiler contracts or reorders them. Then codes, votes,
ties and momenta must be equal, not close. Where sums cannot be exact, the test says so and bounds how
many elements may differ. All methods of a mesh run in one compiled program.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS

import lioncub_jax as lc
from lioncub_jax import reference
from lioncub_jax.reference.sync import synced

# Sizes around the edges of bytes, words and rows, a tree for each number of workers. Three workers own a
# block and a half each, eight a half block.
TREES = {
    1: {"scalar": (), "128": (128,), "empty": (0,), "1000": (1000,)},
    3: {"scalar": (), "12000": (12_000,), "129": (3, 43), "empty": (0,)},
    8: {"1000": (8, 125), "empty": (2, 0), "127": (127,), "65": (5, 13)},
}
B1, B2 = 0.75, 0.5  # of local momentum; at the owner both are 0.5, for means have no bits to spare


def zeros(tree):
    return {name: jnp.zeros(shape) for name, shape in tree.items()}


def integers(params, steps, workers, values=range(-3, 4), seed=0):
    """Gradients ``[steps, workers, ...]`` of a few integers."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: rng.choice(values, (steps, workers, *p.shape)).astype(p.dtype), params
    )


class Story(NamedTuple):
    """What happens to the workers: gradients ``[steps, W, ...]`` and who is asked to abstain."""

    grads: Any
    abstain: np.ndarray


EVENTS = ("plain", "one not finite", "one asked to abstain", "nobody there", "one huge", "all zero")


def eventful(params, workers, seed):
    """Rows of zeros, of everybody and of some; then one event of ``EVENTS`` a step."""
    grads = integers(params, len(EVENTS), workers, seed=seed)
    abstain = np.zeros((len(EVENTS), workers), bool)
    full = [g.reshape(*g.shape[:2], -1) for g in grads.values() if g.size]
    for n, g in enumerate(full):  # views: what is written here is in grads
        g[:, n % workers, :128] = 0
        g[:, :, 128:256] = 0
        g[:, :, 256:320] = 0  # half of a row
    full[0][1, 1 % workers, 0] = [np.nan, np.inf][seed % 2]
    abstain[2, 0] = True
    abstain[3] = True
    for g in full:
        g[4, -1] *= 16
        g[5] = 0
    return Story(grads, abstain)


def simulate(simulators, params, story):
    """The reference, all steps, of some simulators in one program: updates and states ``[steps, ...]``."""
    workers = story.abstain.shape[1]

    @jax.jit
    def steps(story):
        def step(states, now):
            done = {
                name: one.update(now.grads, states[name], params, now.abstain)
                for name, one in simulators.items()
            }
            return {name: state for name, (_, state) in done.items()}, done

        first = {name: one.init(params, workers) for name, one in simulators.items()}
        return jax.lax.scan(step, first, story)[1]

    return jax.tree.map(np.asarray, steps(jax.tree.map(jnp.asarray, story)))


def assert_equal(got, want, but=0, of=""):
    """Trees are equal, but for at most so many elements of each leaf."""

    def same(path, a, b):
        assert a.shape == b.shape and a.dtype == b.dtype, (of, path, a.shape, b.shape, a.dtype)
        assert np.isfinite(a.astype(np.float32)).all(), (of, path)
        differ = np.argwhere(a != b)
        assert len(differ) <= but, (of, path, len(differ), differ[:4], a[a != b][:4], b[a != b][:4])

    jax.tree_util.tree_map_with_path(same, got, want)


def same_everywhere(x, of=""):
    """``[steps, W, ...]`` without its workers, who all hold the same."""
    assert_equal(x, np.broadcast_to(x[:, :1], x.shape), of=of)
    return x[:, 0]


def assert_statistics(state, want, of=""):
    for got, wanted in [
        (state.count, want.t),
        (state.ties, want.ties),
        (state.abstained, want.abstained),
        (state.abstentions, want.abstentions),
    ]:
        assert_equal(same_everywhere(got, of), wanted, of=of)


def in_rows(mu, wire):
    """The owners' slices ``[steps, W, rows, 128]`` as one buffer ``[steps, rows, 128]``."""
    whole = mu if wire.owns_slice else same_everywhere(mu)
    return whole.reshape(len(mu), -1, 128)


Q, D, WIRES = lc.quantize, lc.decide, lc.wires
TWO_PHASE, GATHERED, LANES = WIRES.two_phase(), WIRES.gathered(), WIRES.lanes()
REDUCED, COUNTS = WIRES.all_reduce(), WIRES.counts()
MAJORITY = (D.majority(), reference.majority)
AVERAGE = (D.average(), reference.average)
TERNARY = (D.ternary_sum(), reference.ternary_sum)
FLOATS = (D.floats(), reference.ternary_sum)  # Lion's update is a sign: as floats, a tie is 0


class Method(NamedTuple):
    """What is sent and what comes back, in the words of the library and of the reference."""

    up: Any
    codes: Any
    reply: tuple[Any, Any]
    on: dict[int, Any]  # number of workers -> wire
    dominance: float | None = None
    trim: int = 0


def both(make, *args, seed=None):
    """A quantiser of that name, and the reference's."""
    of_library = getattr(Q, make)
    if seed is None:
        return of_library(*args), getattr(reference, make)(*args)
    rounding = Q.stochastic(seed)
    return of_library(*args, rounding=rounding), getattr(reference, make)(*args, seed=seed)


VOTES = [
    Method(*both("sign"), MAJORITY, {1: TWO_PHASE, 3: LANES, 8: TWO_PHASE}),
    Method(*both("sign"), AVERAGE, {1: TWO_PHASE, 3: LANES}),
    Method(*both("sign"), TERNARY, {8: WIRES.counts("int32")}),
    Method(*both("midrise", 2), MAJORITY, {3: COUNTS, 8: TWO_PHASE}),
    Method(*both("midrise", 3), AVERAGE, {3: TWO_PHASE, 8: GATHERED}),
    Method(*both("midrise", 4), TERNARY, {3: TWO_PHASE}),
    Method(*both("midrise", 8), MAJORITY, {3: TWO_PHASE, 8: WIRES.counts("int16")}),
    Method(*both("midrise", 2, seed=3), MAJORITY, {3: TWO_PHASE}),
    Method(*both("integer", 8), TERNARY, {3: LANES, 8: COUNTS}),
    Method(*both("integer", 5), AVERAGE, {3: GATHERED}),
    Method(*both("integer", 8, seed=3), TERNARY, {8: TWO_PHASE}),
    Method(*both("ternary"), TERNARY, {3: GATHERED, 8: TWO_PHASE}),
    Method(*both("ternary"), AVERAGE, {8: WIRES.counts("int16")}),
]


def fed_back(p, dtype):
    return Q.error_feedback(Q.midrise(p), dtype), reference.midrise(p)


def turned(p, dtype, keep=1.0):
    up = Q.rotated(Q.midrise(p))
    up = Q.error_feedback(up, dtype, keep=keep) if dtype else up
    return up, reference.rotated(reference.midrise(p))


OWNED = [
    Method(*fed_back(3, jnp.bfloat16), MAJORITY, {1: TWO_PHASE, 3: GATHERED, 8: TWO_PHASE}),
    Method(*fed_back(2, jnp.float16), MAJORITY, {8: TWO_PHASE}, 1.0),
    Method(*both("midrise", 2), TERNARY, {3: TWO_PHASE}, 16.0),
    Method(*both("midrise", 8), FLOATS, {8: TWO_PHASE}, np.inf),
    Method(*both("midrise", 4, seed=5), MAJORITY, {3: TWO_PHASE}),
    Method(*turned(1, None), MAJORITY, {8: TWO_PHASE}),
    Method(*turned(4, None), TERNARY, {3: TWO_PHASE}, 2.0),
    Method(*turned(1, jnp.float32, 0.5), MAJORITY, {3: TWO_PHASE}),
    Method(*turned(2, jnp.bfloat16), FLOATS, {3: TWO_PHASE}, np.inf),
    Method(*both("dense", jnp.float32), MAJORITY, {1: TWO_PHASE, 3: REDUCED}),
    Method(*both("dense", jnp.bfloat16), MAJORITY, {3: GATHERED, 8: REDUCED}),
    Method(*both("dense", jnp.float32), FLOATS, {3: TWO_PHASE}),
    Method(*fed_back(3, jnp.bfloat16), MAJORITY, {1: TWO_PHASE, 3: TWO_PHASE}, trim=1),
    Method(*both("midrise", 4), TERNARY, {8: TWO_PHASE}, np.inf, trim=3),
    Method(*turned(1, None), MAJORITY, {8: GATHERED}, trim=2),
    Method(*both("dense", jnp.float32), FLOATS, {8: TWO_PHASE}, trim=3),
]
MESHES = pytest.mark.parametrize("workers", TREES)


def owner_vote(up, wire, *, b1=0.5, b2=0.5, dominance=None, trim=0, down=None, **options):
    owner = D.momentum_at_owner(optax.scale_by_lion(b1, b2), dominance=dominance, trim=trim)
    options = {"memory": lc.momentum.nothing()} | options
    return lc.communicate(axis_name=AXIS, up=up, owner=owner, down=down, wire=wire, **options)


def local_vote(up, wire, *, b1=B1, b2=B2, mu_dtype=None, down=None, **options):
    memory = lc.momentum.blend(b1, b2, mu_dtype)
    return lc.communicate(axis_name=AXIS, memory=memory, up=up, down=down, wire=wire, **options)


def done_by_all(run_workers, make, simulator_of, methods, params, story):
    """Runs methods on their wires, and the reference; yields the two side by side."""
    workers = story.abstain.shape[1]
    running = [m for m in methods if workers in m.on]
    want = simulate({i: simulator_of(m) for i, m in enumerate(running)}, params, story)
    txs = {i: make(m, m.on[workers]) for i, m in enumerate(running)}
    for i, got in run_workers(txs, params, *story).items():
        m = running[i]
        wire = m.on[workers]
        yield f"{m.up.name}, {m.reply[0].name}, {wire.name}, trim {m.trim}", m, wire, got, want[i]


def check_votes(run_workers, methods, params, story):
    found = done_by_all(
        run_workers,
        lambda m, wire: local_vote(m.up, wire, down=m.reply[0]),
        lambda m: reference.local_momentum(B1, B2, codes=m.codes, decide=m.reply[1]),
        methods, params, story,
    )  # fmt: skip
    for of, m, _, (got, state), (updates, want) in found:
        if m.reply is AVERAGE:  # a division by a constant may become a product
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(updates), strict=True):
                np.testing.assert_allclose(a, b, rtol=2**-22, err_msg=of)
        else:
            assert_equal(got, updates, of=of)
        assert_equal(state.mu, want.mu, of=of)
        assert_statistics(state, want, of)


def check_owners(run_workers, methods, params, story):
    found = done_by_all(
        run_workers,
        lambda m, wire: owner_vote(m.up, wire, dominance=m.dominance, trim=m.trim, down=m.reply[0]),
        lambda m: reference.momentum_at_owner(
            0.5, 0.5, None, m.codes, m.up.feedback, m.dominance, m.reply[1], keep=m.up.keep,
            trim=m.trim,
        ),
        methods, params, story,
    )  # fmt: skip
    for of, m, wire, (got, state), (updates, want) in found:
        # Errors have more bits than the sum of their magnitudes can hold: added in another order it may
        # round to the neighbouring step, of a row in thousands. So one row of one worker may differ.
        but = 0 if m.up.feedback is None else 128
        assert_equal(got, updates, but, of)
        if not but and m.reply is not FLOATS:  # which counts no ties
            assert_statistics(state, want, of)
        mu, rows = in_rows(state.owner[0].value.mu, wire), want.mu.shape[1]
        assert_equal(mu[:, :rows], want.mu, but, of)
        assert not mu[:, rows:].any()
        if but:
            assert_equal(state.error, want.error, but, of)


@MESHES
def test_votes_with_local_momentum(run_workers, workers):
    params = zeros(TREES[workers])
    check_votes(run_workers, VOTES, params, eventful(params, workers, workers))


@MESHES
def test_momentum_at_the_owner(run_workers, workers):
    params = zeros(TREES[workers])
    check_owners(run_workers, OWNED, params, eventful(params, workers, workers + 1))


def test_large_leaves_take_whole_blocks_before_all_others(run_workers):
    params = zeros({"a": (130,), "large": (257, 259), "empty": (0,), "larger": (2, 512, 70)})
    story = Story(integers(params, 2, 3), np.zeros((2, 3), bool))
    for g in story.grads.values():
        g.reshape(2, 3, -1)[:, :2, 256:384] = 0  # a row on which one worker votes
    votes = [
        Method(*both("midrise", 2), AVERAGE, {3: TWO_PHASE}),
        Method(*both("integer", 8), TERNARY, {3: COUNTS}),
    ]
    check_votes(run_workers, votes, params, story)
    owned = [Method(*both("midrise", 4, seed=3), MAJORITY, {3: GATHERED})]
    check_owners(run_workers, owned, params, story)


def test_leaves_of_mixed_precision_vote_together(run_workers):
    """Local momentum has the dtype of its leaf or one for all, an owner's the widest of its leaves."""
    shapes = {"bfloat16": [(65,), (3, 10)], "float16": [(31,), ()]}
    params = {kind: [jnp.zeros(s, kind) for s in each] for kind, each in shapes.items()}
    # In three steps the blends of such integers fill the 8 bits of a bfloat16, and no more.
    story = Story(integers(params, 3, 3), np.eye(3, dtype=bool))
    codes = reference.midrise(2)
    both_of = {
        "own": (local_vote(Q.midrise(2), TWO_PHASE), reference.local_momentum(B1, B2, None, codes)),
        "float32": (
            local_vote(Q.midrise(2), TWO_PHASE, mu_dtype="float32"),
            reference.local_momentum(B1, B2, "float32", codes),
        ),
        "owner": (
            owner_vote(Q.dense(), GATHERED),
            reference.momentum_at_owner(0.5, 0.5, codes=reference.dense()),
        ),
    }
    want = simulate({name: simulator for name, (_, simulator) in both_of.items()}, params, story)
    done = run_workers({name: tx for name, (tx, _) in both_of.items()}, params, *story)
    for name, (got, state) in done.items():
        updates, reached = want[name]
        assert_equal(got, updates, of=name)
        mu = state.mu
        if name == "owner":
            assert state.owner[0].value.mu.dtype == jnp.float32
            mu = in_rows(state.owner[0].value.mu, GATHERED)[:, : reached.mu.shape[1]]
        assert_equal(mu, reached.mu, of=name)


def test_a_bucket_is_as_a_transform_of_its_own(run_workers):
    """Whatever becomes of the others: a worker abstains from each by itself."""
    buckets = {"a": (300,)}, {"b": (16, 130)}, {"c": (33,), "empty": (0,), "d": (129,)}
    params = zeros({name: shape for bucket in buckets for name, shape in bucket.items()})
    # Of odd numbers of voters there are no ties, whose coins depend on the place.
    grads = integers(params, 4, 5, seed=4, values=(-3, -1, 1, 3))
    grads["a"][1, [2, 4], 7] = np.nan
    grads["a"][2, :, 0] = np.inf  # nobody is left there
    grads["b"][2, :2, 5, 5] = -np.inf
    story = Story(grads, np.zeros((4, 5), bool))
    txs = {
        "vote": local_vote(Q.midrise(2), TWO_PHASE, bucket_size=200),
        "owner": owner_vote(Q.error_feedback(Q.midrise(3)), TWO_PHASE, bucket_size=200),
    }
    simulators = {
        "vote": reference.local_momentum(B1, B2, codes=reference.midrise(2)),
        "owner": reference.momentum_at_owner(
            0.5, 0.5, codes=reference.midrise(3), feedback=jnp.bfloat16
        ),
    }
    done = run_workers(txs, params, *story)
    for bucket in buckets:
        alone = Story({name: grads[name] for name in bucket}, story.abstain)
        want = simulate(simulators, zeros(bucket), alone)
        for of, (got, state) in done.items():
            updates, reached = want[of]
            assert not reached.ties.any()
            kept = (state.error, reached.error) if of == "owner" else (state.mu, reached.mu)
            for name in bucket:
                assert_equal(got[name], updates[name], of=of)
                assert_equal(kept[0][name], kept[1][name], of=of)
    for _, state in done.values():
        assert same_everywhere(state.abstained).tolist() == [0, 2, 5, 0]
    counts = [same_everywhere(flat.value.count)[-1] for flat in done["owner"][1].owner]
    assert counts == [3, 4, 4]


def learning_rate(count):
    return 0.01 / (1 + count)


def test_optimizers_descend_decay_and_sync(run_workers):
    params = {"w": jnp.linspace(-1, 1, 70), "b": jnp.full(5, 0.5)}
    story = Story(integers(params, 3, 2), np.zeros((3, 2), bool))
    how = {"learning_rate": learning_rate, "weight_decay": 0.1, "axis_name": AXIS}
    txs = {
        "lion_cub": lc.lion_cub(b1=B1, b2=B2, quantizer=Q.midrise(2), sync=lc.sync.every(2), **how),
        "distributed_lion": lc.distributed_lion(b1=B1, b2=B2, average=True, **how),
        "owner_lion": lc.owner_lion(b1=0.5, b2=0.5, **how),
    }
    votes = {
        "lion_cub": synced(
            reference.local_momentum(B1, B2, codes=reference.midrise(2)), lambda t: t % 2 == 0
        ),
        "distributed_lion": reference.local_momentum(B1, B2, decide=reference.average),
        "owner_lion": reference.momentum_at_owner(0.5, 0.5, feedback=jnp.bfloat16),
    }
    simulators = {k: reference.optimizer(one, learning_rate, 0.1) for k, one in votes.items()}
    want = simulate(simulators, params, story)
    done = run_workers(txs, params, *story)
    for name, (got, state) in done.items():
        updates, reached = want[name]
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(updates), strict=True):
            # u + wd p may be one multiply-add
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9, err_msg=name)
        if name == "lion_cub":
            assert_equal(optax.tree.get(state, "mu"), reached.mu)
    check_drift(done["lion_cub"][1], params, story)


def check_drift(state, params, story):
    """It is measured before the sync, at the second of three steps."""
    _, apart = simulate({0: reference.local_momentum(B1, B2)}, params, story)[0]
    want = reference.drift(jax.tree.map(lambda m: m[1], apart.mu))
    for name, drift in optax.tree.get(state, "drift").items():
        got = same_everywhere(drift)
        np.testing.assert_allclose(got, [-1, want[name], want[name]], rtol=1e-5)
