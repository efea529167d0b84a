"""The library on a mesh against the `oracle`, bit for bit: what one page says is what devices do.

Gradients are small integers and the betas powers of two, so that the blend, the sums of magnitudes and
the sums over workers are exact, however a compiler contracts or reorders them. Then codes, votes,
ties and momenta must be equal, not close. Where sums cannot be exact, the test says so and bounds how
many elements may differ. All methods of a mesh run in one compiled program.
"""

import functools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS, FLAGS, assert_same, nobody, run_workers, scanned
from oracle import coding, lion

import lioncub_jax as lc

# Sizes around the edges of bytes, words and rows, a tree for each number of workers. Three workers own a
# block and two rows each, eight two rows.
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


def nobody_abstains(grads):
    return Story(grads, nobody(grads))


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


@functools.partial(jax.jit, static_argnums=0)
def simulated(simulators, params, story):
    first = {name: one.init(params, story.abstain.shape[1]) for name, one in simulators}
    return scanned(dict(simulators), first, params, *story)


def simulate(simulators, params, story):
    """The reference, all steps, of some simulators in one program: updates and states ``[steps, ...]``."""
    return jax.tree.map(np.asarray, simulated((*simulators.items(),), params, story))


def same_everywhere(x, of=""):
    """``[steps, W, ...]`` without its workers, who all hold the same."""
    assert_same(x, np.broadcast_to(x[:, :1], x.shape), of=of)
    return x[:, 0]


def assert_statistics(state, want, of):
    for got, wanted in [
        (state.count, want.t),
        (state.votes.ties, want.ties),
        (state.votes.abstained, want.abstained),
        (state.votes.abstentions, want.abstentions),
    ]:
        assert_same(same_everywhere(got, of), wanted, of=of)
    if isinstance(state.votes.pairs, tuple):
        return
    unlike, pairs = same_everywhere(state.votes.unlike, of), same_everywhere(state.votes.pairs, of)
    np.testing.assert_array_equal(pairs, want.pairs, of)
    found = 1 - unlike / np.where(pairs, pairs, 1)
    np.testing.assert_allclose(found * (pairs > 0), want.agreement, 2**-22, err_msg=of)


def in_rows(mu, wire):
    """The owners' slices ``[steps, W, rows, 128]`` as one buffer ``[steps, rows, 128]``."""
    whole = mu if wire.sharded else same_everywhere(mu)
    return whole.reshape(len(mu), -1, 128)


Q, D, WIRES = lc.quantize, lc.decide, lc.wires
TWO_PHASE, GATHERED = WIRES.two_phase(), WIRES.gathered()
BY_THREE = {3: TWO_PHASE}
REDUCED, COUNTS = WIRES.all_reduce(), WIRES.counts()


def both(words):
    """What some words make in the library, and in the reference."""
    return tuple(eval(words, {**vars(jnp), **vars(of)}) for of in (Q, coding))


REPLIES = {
    "majority": (D.majority(), lion.majority),
    "average": (D.average(), lion.average),
    "ternary": (D.ternary(), lion.ternary_sum),
    "sign": (D.sign(), lion.majority),
    "values": (D.values(), lambda update, moves, coins: update),
} | {f"codes({p})": (D.codes(p), p) for p in (1, 2, 3, 4)}


class Method(NamedTuple):
    """What is sent and what comes back, in words that the library and the reference share."""

    codes: str
    reply: str
    on: dict[int, Any] = BY_THREE  # number of workers -> wire
    tx: str = "scale_by_lion(0.5, 0.5)"  # of optax, at the owner

    def of_workers(self, wire, workers=AXIS, mu_dtype=None, **options):
        """The transform and the simulator of workers with momenta of their own."""
        (up, codes), (decision, rule) = both(self.codes), REPLIES[self.reply]
        options |= {"workers": workers, "momentum": lc.momentum.blend(B1, B2, mu_dtype)}
        tx = lc.communicate(quantizer=up, decision=decision, wire=wire, **options)
        return tx, lion.local_momentum(B1, B2, mu_dtype, codes, rule)

    def of_owners(self, wire, workers=AXIS, **options):
        """Those of one state, in slices."""
        (up, codes), (reply, rule) = both(self.codes), REPLIES[self.reply]
        tx, theirs = eval(self.tx, vars(optax)), "reply" if isinstance(rule, int) else "decide"
        oracle = lion.at_owner(tx, codes, **{theirs: rule})
        options |= {"workers": workers, "quantizer": up, "reply": reply, "wire": wire}
        return lc.owner(tx, **options), oracle


VOTES = [
    Method("sign()", "majority", {1: TWO_PHASE, 3: COUNTS, 8: TWO_PHASE}),
    Method("sign()", "average", {1: TWO_PHASE, 3: COUNTS}),
    Method("sign()", "ternary", {8: WIRES.counts("int32")}),
    Method("midrise(2)", "majority", {3: COUNTS, 8: TWO_PHASE}),
    Method("midrise(3)", "average", {3: TWO_PHASE, 8: GATHERED}),
    Method("midrise(4)", "ternary"),
    Method("midrise(8)", "majority", {3: TWO_PHASE, 8: WIRES.counts("int16")}),
    Method("integer(8)", "ternary", {3: COUNTS, 8: COUNTS}),
    Method("integer(5)", "average", {3: GATHERED}),
    Method("integer(8)", "ternary", {3: TWO_PHASE, 8: TWO_PHASE}),
    Method("ternary()", "ternary", {3: GATHERED, 8: TWO_PHASE}),
    Method("ternary()", "average", {8: WIRES.counts("int16")}),
]
FED_BACK = "error_feedback(midrise(3))"
OWNED = [
    Method(FED_BACK, "sign", {1: TWO_PHASE, 3: GATHERED, 8: TWO_PHASE}),
    Method("error_feedback(midrise(2), float16)", "sign", {3: TWO_PHASE, 8: TWO_PHASE}),
    Method("midrise(2)", "values"),
    Method("midrise(8)", "values", {8: TWO_PHASE}),
    Method("midrise(4)", "sign"),
    Method("error_feedback(midrise(1), float32)", "sign", {3: TWO_PHASE, 8: GATHERED}),
    Method("dense()", "sign", {1: TWO_PHASE, 3: REDUCED}),
    Method("dense(bfloat16)", "sign", {3: GATHERED, 8: REDUCED}),
    Method("dense()", "values", {3: TWO_PHASE, 8: TWO_PHASE}),
]
# With powers of two for betas XLA has nothing to contract in the moments. What divides them by one number,
# which corrects their bias, may multiply by its inverse, so updates are as near as float32 can say.
ADAM, TRACE = "scale_by_adam(0.5, 0.5)", "trace(0.5, nesterov=True)"
ANY = [
    Method(FED_BACK, "codes(2)", {1: TWO_PHASE, 3: TWO_PHASE, 8: TWO_PHASE}, tx=ADAM),
    Method("midrise(4)", "codes(1)", {3: GATHERED}, tx=ADAM),
    Method("midrise(2)", "sign", tx=ADAM),
    Method("dense()", "values", {3: REDUCED}, tx=ADAM),
    Method(FED_BACK, "codes(3)", {1: GATHERED, 3: TWO_PHASE}, tx=TRACE),
    Method("midrise(2)", "codes(1)", {8: TWO_PHASE}, tx=TRACE),
    Method(FED_BACK, "codes(4)", {3: GATHERED, 8: TWO_PHASE}, tx="identity()"),
    Method("dense()", "codes(2)", {1: TWO_PHASE, 8: REDUCED}, tx="identity()"),
]
MESHES = pytest.mark.parametrize("workers", [1, 3, pytest.param(8, marks=pytest.mark.long)])


def both_done(pairs, params, story):
    """Runs transforms, and their simulators; yields the two side by side, by name."""
    want = simulate({name: oracle for name, (_, oracle) in pairs.items()}, params, story)
    done = run_workers({name: tx for name, (tx, _) in pairs.items()}, params, *story)
    for name, (got, state) in done.items():
        yield name, got, state, *want[name]


def check(methods, make, params, story):
    """Those that have a wire for so many workers: updates, states, errors and statistics."""
    workers = story.abstain.shape[1]
    running = {f"{i}: {m.codes}, {m.reply}": m for i, m in enumerate(methods) if workers in m.on}
    pairs = {of: make(m, m.on[workers]) for of, m in running.items()}
    for of, got, state, updates, want in both_done(pairs, params, story):
        m, wire = running[of], running[of].on[workers]
        # Errors have more bits than the sum of their magnitudes can hold: added in another order it may
        # round to the neighboring step, of a row in thousands. So one row of one worker may differ.
        coded = "codes" in m.reply
        but = 128 if coded or "feedback" in m.codes else 0
        # A mean over 7 workers is a quotient, which rounds otherwise where XLA has not the flags of tests.
        quotient = coded and m.codes == "dense()" and os.environ["XLA_FLAGS"] != FLAGS
        near = {"rtol": 2e-6, "atol": 2e-6} if m.tx == ADAM or quotient else {}
        if m.reply == "average":  # a division by a constant may become a product
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(updates), strict=True):
                np.testing.assert_allclose(a, b, rtol=2**-22, err_msg=of)
        else:
            assert_same(got, updates, but, of, **near)
        if not but and m.reply != "values":  # which counts no ties
            assert_statistics(state, want, of)
        if "feedback" in m.codes:
            assert_same(state.error, want.error, but, of)
        if make is Method.of_owners:
            owner = state.owner[0].value
            assert_owned(owner.inner, want.inner, wire, but, of)
            if coded:
                assert_owned(owner.error, want.owner, wire, but, of, **near)
        else:
            assert_same(state.mu, want.mu, but, of)


def assert_owned(got, want, wire, but=0, of="", **near):
    """Slices of owners are those of one buffer, with zeros behind it; counters are the same everywhere."""
    for x, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if wanted.ndim > 1:
            x, rows = in_rows(x, wire), wanted.shape[1]
            assert not x[:, rows:].any()
            assert_same(x[:, :rows], wanted, but, of, **near)
        else:
            assert_same(same_everywhere(x, of), wanted, of=of)


@MESHES
def test_votes_with_local_momentum(workers):
    params = zeros(TREES[workers])
    check(VOTES, Method.of_workers, params, eventful(params, workers, workers))


@MESHES
def test_momentum_at_the_owner(workers):
    params = zeros(TREES[workers])
    check(OWNED, Method.of_owners, params, eventful(params, workers, workers + 1))


@MESHES
def test_any_transform_at_the_owner(workers):
    params = zeros(TREES[workers])
    check(ANY, Method.of_owners, params, eventful(params, workers, workers + 2))


def test_large_leaves_take_whole_blocks_before_all_others():
    """Each is unpacked by itself: replies of one bit, two, three and four, and of values."""
    params = zeros({"a": (130,), "large": (257, 259), "empty": (0,), "larger": (2, 512, 70)})
    story = nobody_abstains(integers(params, 2, 3))
    for g in story.grads.values():
        g.reshape(2, 3, -1)[:, :2, 256:384] = 0  # a row on which one worker votes
    votes = [
        Method("midrise(2)", "average"),
        Method("integer(8)", "ternary", {3: COUNTS}),
        Method("ternary()", "ternary"),
    ]
    check(votes, Method.of_workers, params, story)
    owned = [
        Method("midrise(4)", "sign"),
        Method("dense()", "values"),
        Method(FED_BACK, "codes(3)", tx="identity()"),
    ]
    check(owned, Method.of_owners, params, story)


def test_leaves_of_mixed_precision_vote_together():
    """Local momentum has the dtype of its leaf or one for all, an owner's is float32."""
    shapes = {"bfloat16": [(65,), (3, 10)], "float16": [(31,), ()]}
    params = {kind: [jnp.zeros(s, kind) for s in each] for kind, each in shapes.items()}
    # In three steps the blends of such integers fill the 8 bits of a bfloat16, and no more.
    story = Story(integers(params, 3, 3), np.eye(3, dtype=bool))
    vote = Method("midrise(2)", "majority")
    pairs = {
        "own": vote.of_workers(TWO_PHASE),
        "float32": vote.of_workers(TWO_PHASE, mu_dtype="float32"),
        "owner": Method("dense()", "sign").of_owners(GATHERED),
    }
    for name, got, state, updates, want in both_done(pairs, params, story):
        assert_same(got, updates, of=name)
        if name == "owner":
            assert state.owner[0].value.inner.mu.dtype == jnp.float32
            assert_owned(state.owner[0].value.inner, want.inner, GATHERED, of=name)
        else:
            assert_same(state.mu, want.mu, of=name)


def test_a_bucket_is_as_a_transform_of_its_own():
    """Whatever becomes of the others: a worker abstains from each by itself."""
    buckets = {"a": (300,)}, {"b": (16, 130)}, {"c": (33,), "empty": (0,), "d": (129,)}
    params = zeros({name: shape for bucket in buckets for name, shape in bucket.items()})
    # Of odd numbers of voters there are no ties, whose coins depend on the place.
    grads = integers(params, 4, 5, seed=4, values=(-3, -1, 1, 3))
    grads["a"][1, [2, 4], 7] = np.nan
    grads["a"][2, :, 0] = np.inf  # nobody is left there
    grads["b"][2, :2, 5, 5] = -np.inf
    story = nobody_abstains(grads)
    pairs = {
        "vote": Method("midrise(2)", "majority").of_workers(TWO_PHASE, bucket_size=200),
        "owner": Method(FED_BACK, "sign").of_owners(TWO_PHASE, bucket_size=200),
    }
    simulators = {name: oracle for name, (_, oracle) in pairs.items()}
    done = run_workers({name: tx for name, (tx, _) in pairs.items()}, params, *story)
    for bucket in buckets:
        alone = Story({name: grads[name] for name in bucket}, story.abstain)
        want = simulate(simulators, zeros(bucket), alone)
        for of, (got, state) in done.items():
            updates, reached = want[of]
            assert not reached.ties.any()
            kept = (state.error, reached.error) if of == "owner" else (state.mu, reached.mu)
            for name in bucket:
                assert_same(got[name], updates[name], of=of)
                assert_same(kept[0][name], kept[1][name], of=of)
    for _, state in done.values():
        assert same_everywhere(state.votes.abstained).tolist() == [0, 2, 5, 0]
    counts = [same_everywhere(flat.value.inner.count)[-1] for flat in done["owner"][1].owner]
    assert counts == [3, 4, 4]
