"""From the smallest to the largest numbers: nothing is silent, and nothing stays broken."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax import reference

Q, D, WIRES = lc.quantize, lc.decide, lc.wires
MEMORY = {"memory": lc.momentum.blend(0.5, 0.5)}
AT_OWNER = {"owner": D.momentum_at_owner(optax.scale_by_lion(0.5, 0.5))}
METHODS = {
    "sign": MEMORY,
    "sign, average": MEMORY | {"down": D.average()},
    "2 bits": MEMORY | {"up": Q.midrise(2)},
    "3 bits, stochastic": MEMORY | {"up": Q.midrise(3, rounding=Q.stochastic())},
    "integers": MEMORY | {"up": Q.integer(8), "wire": WIRES.counts()},
    "ternary": MEMORY | {"up": Q.ternary(), "wire": WIRES.gathered()},
    "owner, feedback": AT_OWNER | {"up": Q.error_feedback(Q.midrise(3))},
    "owner, 4 bits": AT_OWNER | {"up": Q.midrise(4)},
    "owner, dense": AT_OWNER | {"up": Q.dense(), "wire": WIRES.all_reduce()},
}


def first_updates(mesh, txs, grads):
    """Each transform's first update, of gradients ``[cases, W, n]``: ``[cases, n]``, and who abstained."""

    def worker(grads):
        def first(_, g):
            done = {name: tx.update(g[0], tx.init(g[0])) for name, tx in txs.items()}
            found = {name: (u, optax.tree.get(s, "abstained")) for name, (u, s) in done.items()}
            return None, found

        return jax.lax.scan(first, None, grads)[1]

    run = jax.shard_map(worker, mesh=mesh, in_specs=P(None, AXIS), out_specs=P())
    return jax.tree.map(np.asarray, jax.jit(run)(jnp.asarray(grads)))


def votes(parts):
    return {
        name: lc.communicate(axis_name=AXIS, **{"memory": lc.momentum.nothing()} | how)
        for name, how in parts.items()
    }


POWERS = (0, -120, -64, -1, 64, 120)
SIZES = (1e38, 1e20, 1e19, 1e-19, 1e-30, 1e-36)
RENAMED = {
    f"{name}, mine": {
        of: part if of == "memory" else part._replace(name="mine")
        for of, part in METHODS[name].items()
    }
    for name in ("2 bits", "sign, average", "integers", "ternary", "owner, feedback")
}


class First(NamedTuple):
    """Gradients ``[W, n]`` times ``POWERS``, signs ``[n]`` times ``SIZES``, and the first updates."""

    plain: np.ndarray
    signs: np.ndarray
    updates: dict
    abstained: dict


@pytest.fixture(scope="module")
def first(mesh_of):
    rng = np.random.default_rng(0)
    plain = rng.uniform(0.5, 2, (3, 700)) * rng.choice([-1, 0, 1], (3, 700), p=[0.45, 0.1, 0.45])
    signs = np.resize(np.float32([1, -1, -1]), 700)
    cases = [plain.astype(np.float32) * np.float32(2.0**power) for power in POWERS]
    cases += [np.stack([signs * np.float32(size)] * 3) for size in SIZES]
    found = first_updates(mesh_of(3), votes(METHODS | RENAMED), np.stack(cases))
    updates, abstained = ({name: x[i] for name, x in found.items()} for i in (0, 1))
    return First(plain, signs, updates, abstained)


def test_no_worker_abstains_because_numbers_are_huge_or_tiny(first):
    for name, abstained in first.abstained.items():
        assert not abstained.any(), name


def test_a_power_of_two_changes_no_first_update(first):
    for name in METHODS:
        updates = first.updates[name][: len(POWERS)]
        assert np.abs(updates[0]).mean() > 0.3, name
        for power, update in zip(POWERS, updates, strict=True):
            # A mean near zero, times 2**-120, may be no number that float32 holds.
            decided = np.abs(first.plain.mean(0)) > (0.3 if "owner" in name else -1)
            got, want = update[decided], updates[0][decided]
            np.testing.assert_array_equal(got, want, err_msg=f"{name}, 2**{power}")


def test_huge_and_tiny_gradients_are_followed(first):
    for name in METHODS:
        for size, update in zip(SIZES, first.updates[name][len(POWERS) :], strict=True):
            np.testing.assert_array_equal(np.sign(update), first.signs, f"{name}, {size}")


def test_what_is_not_built_by_us_behaves_by_its_fields(first):
    """A part of another name is the same part."""
    for name in RENAMED:
        same = first.updates[name.removesuffix(", mine")]
        np.testing.assert_array_equal(first.updates[name], same, name)


# --- What is stored comes back


def assert_finite(tree):
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        assert np.isfinite(np.asarray(leaf, np.float32)).all(), path


def test_what_is_stored_saturates_and_comes_back(run_workers):
    """One gradient beyond what float16 holds, and then 39 ordinary ones the other way."""
    slow = {"learning_rate": 1.0, "weight_decay": 0.0, "axis_name": AXIS, "b2": 0.5}
    half = Q.error_feedback(Q.midrise(3), jnp.float16)
    txs = {
        "local momentum": lc.lion_cub(mu_dtype=jnp.float16, **slow),
        "momentum at the owner": lc.owner_lion(mu_dtype=jnp.float16, **slow),
        "feedback": lc.owner_lion(quantizer=half, **slow),
    }
    params = {"w": jnp.zeros(130)}
    for size in (1e6, 1e8):
        grads = {"w": np.full((40, 2, 130), -1, np.float32)}
        grads["w"][0] = size
        done = run_workers(txs, params, grads, np.zeros((40, 2), bool))
        for name, (updates, state) in done.items():
            assert_finite(state)
            assert not optax.tree.get(state, "abstained").any(), name
            assert (updates["w"][0] == -1).all(), name  # downhill: minus the sign
            assert (updates["w"][-1] == 1).all(), (name, updates["w"][:, 0])


def by_reference(simulator, grads):
    """The updates of gradients ``[steps, W, n]``, all steps."""
    state, updates = simulator.init({"w": jnp.zeros(grads["w"].shape[2])}, grads["w"].shape[1]), []
    for g in grads["w"]:
        update, state = jax.jit(simulator.update)({"w": jnp.asarray(g)}, state)
        updates.append(update["w"])
    return np.stack(updates)


def test_a_sum_that_overflows_is_as_with_nobody_there(run_workers):
    workers = 2
    parts = {
        "two-phase": {"up": Q.dense()},
        "all-reduce": {"up": Q.dense(), "wire": WIRES.all_reduce()},
        "4 bits": {"up": Q.midrise(4)},
    }
    txs = {
        name: lc.communicate(axis_name=AXIS, memory=lc.momentum.nothing(), **AT_OWNER, **how)
        for name, how in parts.items()
    }
    grads = {"w": np.ones((3, workers, 300), np.float32)}
    grads["w"][1, :, :130] = 3e38
    params = {"w": jnp.zeros(300)}
    done = run_workers(txs, params, grads, np.zeros((3, workers), bool))
    want = by_reference(reference.momentum_at_owner(0.5, 0.5, codes=reference.dense()), grads)
    for name, (updates, state) in done.items():
        assert_finite(state)
        assert not state.abstained.any(), name
        # A row of huge values is silent for one step, or is moved up by them; the others go on.
        assert (updates["w"][1, 256:] == 1).all() and (updates["w"][1, :128] >= 0).all(), name
        assert (updates["w"][2] == 1).all(), name
        if name != "4 bits":
            assert not updates["w"][1, :128].any(), name
            # Two elements of a row that moves: without a sign they take the coin, as in any tie.
            assert state.ties[:, 0].tolist() == [0, 2, 0]
            np.testing.assert_array_equal(updates["w"], want, name)
            mu = state.owner[0].value.mu.reshape(3, -1)
            np.testing.assert_array_equal(mu[1, :130], mu[0, :130], name)


def test_counters_at_the_owner_stand_still_with_nobody_there(run_workers):
    """Adam corrects its bias by the number of steps: two empty ones must not count."""
    owner = D.momentum_at_owner(optax.scale_by_adam())
    parts = {"owner": owner, "up": Q.dense(), "down": D.floats()}
    txs = {
        wire.name: lc.communicate(axis_name=AXIS, memory=lc.momentum.nothing(), wire=wire, **parts)
        for wire in (WIRES.two_phase(), WIRES.all_reduce())
    }
    params = {"w": jnp.zeros(200)}
    rng = np.random.default_rng(0)
    grads = {"w": rng.choice([-3, -1, 1, 2], (5, 1, 200)).astype(np.float32).repeat(2, 1)}
    abstain = np.zeros((5, 2), bool)
    plain = run_workers(txs, params, jax.tree.map(lambda g: g[2:], grads), abstain[2:])
    abstain[:2] = True
    done = run_workers(txs, params, grads, abstain)
    for name, (updates, state) in done.items():
        assert not updates["w"][:2].any()
        np.testing.assert_allclose(np.abs(updates["w"][2]), 1, rtol=1e-4)
        np.testing.assert_array_equal(updates["w"][2:], plain[name][0]["w"])
        assert state.owner[0].value.count[:, 0].tolist() == [0, 0, 1, 2, 3]
        assert state.abstentions[:, 0].tolist() == [2, 4, 4, 4, 4]
