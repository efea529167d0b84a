"""From the smallest to the largest numbers and leaves: nothing is silent, and nothing stays broken."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS, absent, mesh_on, run_workers
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc
from lioncub_jax.baselines.compression import behind

Q, D, WIRES = lc.quantize, lc.decide, lc.wires
MEAN = functools.partial(D.at_owner, optax.identity())
MOMENTUM = {"momentum": lc.momentum.blend(0.5, 0.5)}
AT_OWNER = {"decision": D.at_owner(optax.scale_by_lion(0.5, 0.5), D.sign())}
METHODS = {
    "sign": MOMENTUM,
    "integers": MOMENTUM | {"quantizer": Q.integer(8), "wire": WIRES.counts()},
    "ternary": MOMENTUM | {"quantizer": Q.ternary(), "wire": WIRES.gathered()},
    "owner, feedback": AT_OWNER | {"quantizer": Q.error_feedback(Q.midrise(3))},
    "owner, 4 bits": AT_OWNER | {"quantizer": Q.midrise(4)},
    "owner, dense": AT_OWNER | {"quantizer": Q.dense(), "wire": WIRES.all_reduce()},
}


def vote(**parts):
    return lc.communicate(workers=AXIS, **{"momentum": lc.momentum.nothing()} | parts)


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


# Codes of votes follow any numbers by themselves, as test_quantize.py shows: here are sums of values.
OWNERS = [name for name in METHODS if "owner" in name]
POWERS = (0, -120, -64, -1, 64, 120)
SIZES = (1e38, 1e20, 1e19, 1e-19, 1e-30, 1e-36)


@pytest.fixture(scope="module")
def first():
    """Gradients ``[W, n]`` times ``POWERS``, signs ``[n]`` times ``SIZES``, and the first updates."""
    rng = np.random.default_rng(0)
    plain = rng.uniform(0.5, 2, (3, 700)) * rng.choice([-1, 0, 1], (3, 700), p=[0.45, 0.1, 0.45])
    signs = np.resize(np.float32([1, -1, -1]), 700)
    cases = [plain.astype(np.float32) * np.float32(2.0**power) for power in POWERS]
    cases += [np.stack([signs * np.float32(size)] * 3) for size in SIZES]
    txs = {name: vote(**METHODS[name]) for name in OWNERS}
    return plain, signs, first_updates(mesh_on("data=3"), txs, np.stack(cases))


@pytest.mark.parametrize("name", OWNERS)
def test_huge_and_tiny_gradients_are_followed_and_powers_of_two_change_nothing(first, name):
    plain, signs, found = first
    updates, abstained = found[name]
    assert not abstained.any()
    scaled, sized = np.split(updates, [len(POWERS)])
    assert np.abs(scaled[0]).mean() > 0.3
    # A mean near zero, times 2**-120, may be no number that float32 holds.
    decided = np.abs(plain.mean(0)) > 0.3
    np.testing.assert_array_equal(scaled[:, decided], [scaled[0, decided]] * len(POWERS))
    np.testing.assert_array_equal(np.sign(sized), [signs] * len(SIZES))


# --- What is stored comes back


def assert_finite(tree):
    assert all(np.isfinite(leaf.astype(np.float32)).all() for leaf in jax.tree.leaves(tree))


def test_what_is_stored_saturates_and_comes_back():
    """One gradient beyond what float16 holds, and then 39 ordinary ones the other way."""
    slow = {"learning_rate": 1.0, "weight_decay": 0.0, "workers": AXIS, "b2": 0.5}
    half = Q.error_feedback(Q.midrise(3), jnp.float16)
    txs = {
        "local momentum": lc.lion_cub(mu_dtype=jnp.float16, **slow),
        "momentum at the owner": lc.owner_lion(mu_dtype=jnp.float16, **slow),
        "feedback": lc.owner_lion(quantizer=half, **slow),
    }
    # Each half of the leaf has its own rows.
    grads = {"w": np.full((40, 2, 256), -1, np.float32)}
    grads["w"][0] = np.repeat([1e6, 1e8], 128)
    params = {"w": jnp.zeros(256)}
    for name, (updates, state) in run_workers(txs, params, grads, np.zeros((40, 2), bool)).items():
        assert_finite(state)
        assert not optax.tree.get(state, "abstained").any(), name
        assert (updates["w"][0] == -1).all(), name  # downhill: minus the sign
        assert (updates["w"][-1] == 1).all(), (name, updates["w"][:, 0])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16", "bfloat16"])
def test_a_momentum_decays_from_every_number_or_its_beta_is_refused(dtype):
    numbers = np.arange(2 ** (8 * jnp.dtype(dtype).itemsize - 1), dtype=np.uint16)
    numbers = numbers.astype(f"uint{8 * jnp.dtype(dtype).itemsize}").view(dtype).astype(np.float32)
    numbers = numbers[np.isfinite(numbers) & (numbers >= jnp.finfo(dtype).tiny)]
    for b2 in (0.5, 0.9, 0.93, 0.95, 0.99, 0.996, 0.997, 0.999, 0.9995, 0.9996):
        rule, mu = lc.momentum.blend(0.9, b2), jnp.asarray(numbers, dtype)
        kept = rule.update(jnp.zeros_like(mu), mu).astype(dtype) == mu
        try:
            rule.init(mu)
            assert not kept.any(), (b2, numbers[kept][:3])
        except ValueError:
            assert kept.any(), b2


@pytest.mark.parametrize("workers", [1, 2])
def test_betas_are_not_rounded_with_what_they_multiply(workers):
    """To 1, as 0.999 is in bfloat16: a gradient of 1, then one that outweighs it, and zeros."""
    kinds = {"workers": AXIS, "learning_rate": 1.0, "weight_decay": 0.0, "b1": 0.999}
    exact = {"quantizer": Q.dense(), "reply": D.values(), "workers": AXIS}
    txs = {
        "vote": lc.lion_cub(**kinds),
        "owner": lc.owner_lion(mu_dtype="bfloat16", **kinds),
        "adam": lc.owner(optax.scale_by_adam(0.9, 0.999), **exact),
        "behind": behind(
            lc.owner(optax.identity(), **exact), optax.scale_by_adam(0.9, 0.999), AXIS
        ),
    }
    grads = {"w": np.zeros((22, workers, 16, 128), jnp.bfloat16)}
    grads["w"][:2] = [[[[1]]], [[[-10]]]]
    done = run_workers(txs, {"w": jnp.zeros((16, 128), jnp.bfloat16)}, grads)
    for name in ("vote", "owner"):
        assert (done[name][0]["w"][1] == 1).all(), name
    for nu in (done["adam"][1].owner[0].value.inner.nu, done["behind"][1][1].nu["w"]):
        np.testing.assert_allclose(nu[-1, 0], 0.999**20 * (0.999 + 100) / 1000, rtol=1e-5)


def test_a_sum_that_overflows_is_as_with_nobody_there():
    txs = {
        "two-phase": vote(**AT_OWNER, quantizer=Q.dense()),
        "all-reduce": vote(**AT_OWNER, quantizer=Q.dense(), wire=WIRES.all_reduce()),
        "4 bits": vote(**AT_OWNER, quantizer=Q.midrise(4)),
    }
    grads = {"w": np.ones((3, 2, 300), np.float32)}
    grads["w"][1, :, :130] = 3e38
    params = {"w": jnp.zeros(300)}
    done = run_workers(txs, params, grads, np.zeros((3, 2), bool))
    for name, (updates, state) in done.items():
        assert_finite(state)
        assert not state.votes.abstained.any(), name
        # A row of huge values is silent for one step, or is moved up by them; the others go on.
        assert (updates["w"][1, 256:] == 1).all() and (updates["w"][1, :128] >= 0).all(), name
        assert (updates["w"][2] == 1).all(), name
        if name != "4 bits":
            assert not updates["w"][1, :128].any(), name
            # Two elements of a row that moves: without a sign they take the coin, as in any tie.
            assert state.votes.ties[:, 0].tolist() == [0, 2, 0]
            mu = state.owner[0].value.inner.mu.reshape(3, -1)
            np.testing.assert_array_equal(mu[1, :130], mu[0, :130], name)


# --- Leaves of billions of elements, by their shape alone: nothing is allocated

OF_BILLIONS = METHODS | {
    "integers of 6 bits": {"quantizer": Q.integer(6), "wire": WIRES.counts()},
    "owner, values": {"quantizer": Q.midrise(4), "decision": MEAN(D.values())},
    "owner, bfloat16": AT_OWNER | {"quantizer": Q.dense(jnp.bfloat16), "wire": WIRES.all_reduce()},
    "feedback both ways, 4 bits": {
        "quantizer": Q.error_feedback(Q.midrise(4)),
        "decision": MEAN(D.codes(4)),
    },
}


@pytest.mark.parametrize("name", [name for name in OF_BILLIONS if name != "owner, 4 bits"])
def test_leaves_of_billions_of_elements_can_be_traced_and_counted(name):
    mesh, n, tx = mesh_on("data=2 tp=2"), 2**31 + 300, vote(**OF_BILLIONS[name])

    def worker(stacked):
        grads = jax.tree.map(lambda x: x[0], stacked)
        updates, state = tx.update(grads, tx.init(grads), grads)
        return updates, jax.tree.map(lambda x: x[None], state)

    # A leaf that is whole on each device, and one in two shards.
    for size, spec in ((n, P(AXIS)), (2 * n, P(AXIS, "tp"))):
        # Types are not followed to the outside, where each update is the same on all workers anyway.
        run = jax.shard_map(worker, mesh=mesh, in_specs=spec, out_specs=P(mesh.axis_names))
        leaf = jax.ShapeDtypeStruct((2, size), jnp.float32)
        updates, state = jax.eval_shape(run, {"w": leaf})
        assert updates["w"].dtype == jnp.float32 and updates["w"].size % n == 0
        assert all(x.dtype.itemsize <= 4 for x in jax.tree.leaves(state))
    whole = {"w": jax.ShapeDtypeStruct((2**33 + 1,), jnp.float32)}
    assert lc.audit.of(tx, whole, absent(8)).sent_bytes > 2**33 / 8
