"""No worker counts for more than another, where votes are mixed with zeros and ties, on real devices.

Steps are the sample: all elements of a step share the draw of which zeros cancel. The share of wins in a
step lies between 0 and 1, so its mean over n steps has a standard deviation of at most 1 / (2 sqrt n), a
binomial's, and five of them are the tolerance. The bits are fixed: what passes once passes always.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc

STEPS = 1024
TOLERANCE = 5 / (2 * STEPS**0.5)

AT_OWNER = lc.decide.momentum_at_owner(optax.scale_by_lion(0.0, 0.0), dominance=jnp.inf)
VOTES = {
    "sign": lc.communicate(axis_name=AXIS, memory=lc.momentum.nothing()),
    "owner": lc.communicate(
        axis_name=AXIS, memory=lc.momentum.nothing(), up=lc.quantize.midrise(2), owner=AT_OWNER
    ),
}


def shares_of_wins(mesh, patterns):
    """How often each pattern of values, one for each worker, moves an element up: ``[patterns]``.

    Each pattern has a row. Its first elements are not zero, so that everybody votes on it.
    """
    rows = np.repeat(np.array(patterns, np.float32).T[:, :, None], 128, axis=2)
    rows[:, :, :8] = [1, -1] * 4
    grads = jnp.asarray(rows.reshape(len(rows), -1))

    def worker(grads):
        g = grads[0]

        def step(carry, _):
            states, sums = carry
            done = {name: tx.update(g, states[name]) for name, tx in VOTES.items()}
            sums = {name: sums[name] + u for name, (u, _) in done.items()}
            return ({name: state for name, (_, state) in done.items()}, sums), None

        states = {name: tx.init(g) for name, tx in VOTES.items()}
        sums = dict.fromkeys(VOTES, jnp.zeros(g.shape))
        return jax.lax.scan(step, (states, sums), length=STEPS)[0][1]

    run = jax.jit(jax.shard_map(worker, mesh=mesh, in_specs=P(AXIS), out_specs=P()))
    return {
        name: (np.asarray(total).reshape(-1, 128)[:, 8:].mean(1) / STEPS + 1) / 2
        for name, total in run(grads).items()
    }


def orders(workers):
    """Patterns with zeros and ties, each in several orders, and one voter among zeros."""
    if workers == 2:
        return list(itertools.product((-1, 0, 1), repeat=2))
    some = [(1,) + (0,) * 7, (1,) * 4 + (-1,) * 3 + (0,)]
    some += [tuple(-v for v in pattern) for pattern in some]
    some += [(1,) * 4 + (-1,) * 4, (1, -1) * 2 + (0,) * 4]
    return [tuple(np.roll(pattern, k).tolist()) for pattern in some for k in range(8)]


@pytest.mark.parametrize("workers", [2, 8])
def test_the_order_of_the_workers_changes_nothing(mesh_of, workers):
    patterns = orders(workers)
    for name, shares in shares_of_wins(mesh_of(workers), patterns).items():
        kinds = {}
        for pattern, share in zip(patterns, shares, strict=True):
            kinds.setdefault(tuple(sorted(pattern)), []).append(share)
        for kind, found in kinds.items():
            assert np.ptp(found) <= 2 * TOLERANCE, (name, kind, found)
            opposite = kinds[tuple(sorted(-v for v in kind))]
            assert abs(np.mean(found) + np.mean(opposite) - 1) <= 2 * TOLERANCE, (name, kind)
        # The other zeros cancel in pairs but for one: it agrees and the voter wins, or it is a tie and
        # the coin decides.
        lone = [
            s for p, s in zip(patterns, shares, strict=True) if np.sum(p) == np.sum(np.abs(p)) == 1
        ]
        assert len(lone) == workers
        if name == "sign":
            np.testing.assert_allclose(lone, 3 / 4, atol=TOLERANCE)
