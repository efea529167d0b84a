"""The oracle by itself: what must hold of any rule, however the library computes it.

Every algorithm of `oracle` stands in one table, and what is proved here of it need not be proved of the
library, which equals it bit for bit. Where a property holds on average only, steps are the sample: all
elements of a step share the draw of which zeros cancel. The share of wins in a step lies between 0 and 1,
so its mean over n steps has a standard deviation of at most 1 / (2 sqrt n), a binomial's, and five of them
are the tolerance.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import blank, normal
from oracle import baselines, coding, dgc, lion, one_bit_adam, powersgd, sync
from test_against_reference import nobody_abstains, simulate

SGD = optax.sgd(0.5, 0.5)
VOTE = lion.local_momentum()


class Rule(NamedTuple):
    """A simulator and what is promised of it."""

    simulator: Any
    power: int = 0  # gradients times c give updates times c to this power
    # Of gradients in which no random code errs the order of the workers does not matter: of all, of +-7.
    exact: Any = np.asarray


def even(t):
    return t % 2 == 0


def sevens(g):
    return 7 * np.sign(g)


def at_owner(codes, **how):
    return Rule(lion.momentum_at_owner(codes=codes, **how))


RULES = {
    "sign": Rule(VOTE),
    "2 bits": Rule(lion.local_momentum(codes=coding.midrise(2))),
    "integers": Rule(lion.local_momentum(codes=coding.integer(8))),
    "ternary": Rule(lion.local_momentum(codes=coding.ternary())),
    "average": Rule(lion.local_momentum(decide=lion.average)),
    "owner": at_owner(coding.error_feedback(coding.midrise(3))),
    "owner, Adam": Rule(
        lion.at_owner(optax.scale_by_adam(eps=0.0), coding.error_feedback(coding.midrise(3)), 2)
    ),
    "owner, dense": at_owner(coding.dense()),
    "sync": Rule(sync.synced(VOTE, even)),
    "mean": Rule(baselines.averaged(optax.trace(0.5)), 1),
    "coded mean": Rule(baselines.diloco(0.7, 0.9, 4), 1),
    "TernGrad": Rule(baselines.terngrad(momentum=0.5), 1, sevens),
    "QSGD": Rule(baselines.qsgd(4, momentum=0.5), 1, sevens),
    "DGC": Rule(dgc.dgc(0.5, 0.1), 1),
    "PowerSGD": Rule(powersgd.powersgd(SGD, 1), 1),
    "1-bit Adam": Rule(one_bit_adam.one_bit_adam(eps=0.0, warmup=1)),
}
LEAVES = {"a": (5, 43), "b": (200,), "empty": (0, 2)}
STEPS, WORKERS = 3, 3


def run(name, grads):
    """Updates and states ``[steps, ...]`` of gradients ``[steps, W, ...]``."""
    simulator = RULES[name].simulator
    return simulate({0: simulator}, blank(grads), nobody_abstains(grads))[0]


def ordinary():
    return {k: normal(STEPS, WORKERS, *s, seed=len(s)) for k, s in LEAVES.items()}


def of_workers(state):
    """What each worker keeps for itself, ``[steps, W, ...]``."""
    return [x for x in jax.tree.leaves(state) if x.ndim > 1 and x.shape[1] == WORKERS]


def same(a, b, **tolerance):
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), a, b)


@pytest.mark.parametrize("name", RULES)
def test_the_order_of_the_workers_does_not_matter(name):
    grads, order = jax.tree.map(RULES[name].exact, ordinary()), [2, 0, 1]
    want, before = run(name, grads)
    got, after = run(name, {k: g[:, order] for k, g in grads.items()})
    close = {"rtol": 1e-4, "atol": 1e-4}  # sums in another order
    same(got, want, **close)
    same(of_workers(after), [x[:, order] for x in of_workers(before)], **close)


@pytest.mark.parametrize("name", RULES)
def test_the_scale_of_the_gradients_does_not_matter(name):
    want, _ = run(name, ordinary())
    assert all(np.any(u[-1]) for u in want.values() if u.size)
    for power in (-30, 30):
        got, _ = run(name, {k: np.ldexp(g, power) for k, g in ordinary().items()})
        same(got, {k: np.ldexp(u, power * RULES[name].power) for k, u in want.items()}, rtol=0)


@pytest.mark.parametrize("name", RULES)
def test_one_leaf_changes_no_other(name):
    grads = ordinary()
    want, _ = run(name, grads)
    for changed in ("a", "b"):
        got, _ = run(name, grads | {changed: -3 * grads[changed][::-1]})
        for leaf in LEAVES:
            assert np.array_equal(got[leaf], want[leaf]) == (leaf != changed)


# --- Agreement


@pytest.mark.parametrize("workers", [2, 3, 8, 32])
@pytest.mark.parametrize("p", [0.5, 0.8])
def test_the_agreement_of_votes_does_not_depend_on_the_number_of_workers(workers, p):
    """Each votes for the better side with probability ``p``: ``p**2 + (1 - p)**2``, 0.5 of coins."""
    rng, size = np.random.default_rng(workers), 20_000
    better = rng.choice([-1, 1], size)
    g = np.where(rng.random((1, workers, size)) < p, better, -better).astype(np.float32)
    _, state = run("sign", {"w": g})
    assert state.pairs[0] == size * workers * (workers - 1) / 2
    assert abs(state.agreement[0] - (p**2 + (1 - p) ** 2)) < 5 / (2 * math.sqrt(size))


# --- Zeros and ties: no worker counts for more than another


def test_unused_entries_move_beside_used_ones_of_their_row_and_how_to_keep_them():
    """Of embeddings: a row of 128 is of eight entries, or of one."""
    grads = {"narrow": normal(6, 4, 8, 16), "wide": normal(6, 4, 2, 128)}
    grads["narrow"][..., 4:, :], grads["wide"][..., 1:, :] = 0, 0
    vote, ternary = (run(name, grads)[0] for name in ("sign", "ternary"))
    assert (np.abs(vote["narrow"]) == 1).all()
    assert not vote["wide"][:, 1:].any() and not ternary["narrow"][:, 4:].any()


TOSSES = 1024
TOLERANCE = 5 / (2 * TOSSES**0.5)
VOTES = {
    "sign": lion.local_momentum(0.0, 0.0),
    "3 bits": lion.local_momentum(0.0, 0.0, codes=coding.midrise(3)),
    "ternary": lion.local_momentum(0.0, 0.0, codes=coding.ternary(), decide=lion.majority),
    "owner": lion.momentum_at_owner(0.0, 0.0, codes=coding.midrise(2)),
}


def shares_of_wins(patterns):
    """How often each pattern of values, one for each worker, moves an element up, by method.

    Each pattern has a row. Its first elements are not zero, so that everybody votes on it.
    """
    rows = np.repeat(np.array(patterns, np.float32).T[:, :, None], 128, axis=2)
    rows[:, :, :8] = [1, -1] * 4
    grads = jnp.asarray(rows.reshape(len(rows), -1))

    @jax.jit
    def means():
        def step(t, _):
            moved = {}
            for name, rule in VOTES.items():
                # Only what is counted here is remembered: the same question again, at another step.
                state = lion.State(rule.init(grads[0], len(rows)), t=t)
                moved[name], _ = rule.update(grads, state, grads[0])
            return t + 1, moved

        return jax.tree.map(
            lambda u: jnp.mean(u, axis=0), jax.lax.scan(step, jnp.int32(0), length=TOSSES)[1]
        )

    return {k: (x.reshape(-1, 128)[:, 8:].mean(1) + 1) / 2 for k, x in means().items()}


# Of an even number of workers the other zeros cancel in pairs but for one: it agrees and the voter wins,
# or it is a tie and the coin decides. Of three both cancel, or (1 in 3) they side together.
@pytest.mark.parametrize(("workers", "lone"), [(2, 3 / 4), (3, 5 / 6), (4, 3 / 4)])
def test_no_worker_counts_for_more_than_another(workers, lone):
    patterns = list(itertools.product((-1, 0, 1), repeat=workers))
    for name, shares in shares_of_wins(patterns).items():
        kinds = {}
        for pattern, share in zip(patterns, shares, strict=True):
            kinds.setdefault(tuple(sorted(pattern)), []).append(share)
        for kind, found in kinds.items():
            assert np.ptp(found) <= 2 * TOLERANCE, (name, kind, found)
            opposite = kinds[tuple(sorted(-v for v in kind))]
            assert abs(np.mean(found) + np.mean(opposite) - 1) <= 2 * TOLERANCE, (name, kind)
        alone = kinds[(0,) * (workers - 1) + (1,)]
        assert len(alone) == workers
        if name == "sign":
            np.testing.assert_allclose(alone, lone, atol=TOLERANCE)
