"""Types: float64 switched on, leaves of billions of elements, and the dtype of updates."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import AXIS
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc

Q, D, WIRES = lc.quantize, lc.decide, lc.wires

WITH_X64 = """
import jax, jax.numpy as jnp, numpy as np, lioncub_jax as lc
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 2)
assert jax.config.jax_enable_x64
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
params = {"w": jnp.ones((3, 50), jnp.float32), "b": jnp.ones(7, jnp.bfloat16)}
params = jax.device_put(params, NamedSharding(mesh, P()))
grads = {k: jnp.ones((4, 2, *p.shape), p.dtype) for k, p in params.items()}
how = {"learning_rate": 0.1, "weight_decay": 0.1, "axis_name": "data"}
for name, tx in {
    "lion_cub": lc.lion_cub(**how),
    "average": lc.distributed_lion(average=True, **how),
    "integers": lc.lion_cub(quantizer=lc.quantize.integer(8), wire=lc.wires.counts(), **how),
    "stochastic": lc.lion_cub(quantizer=lc.quantize.midrise(2, rounding=lc.quantize.stochastic()), **how),
    "owner_lion": lc.owner_lion(**how),
    "coded sync": lc.lion_cub(sync=lc.sync.coded(lc.sync.every(2)), **how),
    "full sync": lc.lion_cub(sync=lc.sync.every(2), **how),
}.items():
    tx, traced = lc.on_mesh(tx, mesh, axis_name="data"), []

    @jax.jit
    def steps(params, state, grads):
        traced.append(name)

        def step(carry, g):
            params, state = carry
            updates, state = tx.update(g, state, params)
            params = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)
            return (params, state), updates

        return jax.lax.scan(step, (params, state), grads)

    first = state = tx.init(params)
    p = params
    for _ in range(2):
        (p, state), updates = steps(p, state, grads)
    assert len(traced) == 1, name
    types = lambda tree: [(x.dtype, x.shape) for x in jax.tree.leaves(tree)]
    assert types(state) == types(first), name
    wide = [x.dtype for x in jax.tree.leaves(state) if x.dtype.itemsize > 4]
    assert not wide, (name, wide)
    assert {k: u.dtype for k, u in updates.items()} == {k: p.dtype for k, p in params.items()}, name
    assert np.abs(np.asarray(p["w"]) - 1).min() > 0.5, name
print("done")
"""


def test_float64_switched_on_changes_no_type():
    """State that changed its dtype would fail in ``scan``, trace twice and could not be resumed."""
    env = {**os.environ, "JAX_ENABLE_X64": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", WITH_X64], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "done"


# --- By shape alone: nothing is allocated

BLEND = lc.momentum.blend(mu_dtype=jnp.float32)
AT_OWNER = {"owner": D.momentum_at_owner(optax.scale_by_lion(mu_dtype=jnp.float32))}
RANDOM = {"rounding": Q.stochastic()}
METHODS = {
    "sign": {"memory": BLEND},
    "average": {"memory": BLEND, "down": D.average()},
    "3 bits": {"memory": BLEND, "up": Q.midrise(3)},
    "3 bits, stochastic": {"memory": BLEND, "up": Q.midrise(3, **RANDOM)},
    "integers": {"memory": BLEND, "up": Q.integer(8), "wire": WIRES.counts()},
    "integers, stochastic": {"memory": BLEND, "up": Q.integer(6, **RANDOM), "wire": WIRES.lanes()},
    "ternary": {"memory": BLEND, "up": Q.ternary(), "wire": WIRES.gathered()},
    "ternary, stochastic": {"up": Q.ternary(**RANDOM), "down": D.total()},
    "owner, feedback": AT_OWNER | {"up": Q.error_feedback(Q.midrise(3))},
    "owner, 1 bit": AT_OWNER | {"up": Q.midrise(1)},
    "owner, levels": AT_OWNER | {"up": Q.levels(4, norm="l2", **RANDOM), "down": D.floats()},
    "owner, dense": AT_OWNER | {"up": Q.dense()},
    "owner, bfloat16": AT_OWNER | {"up": Q.dense(jnp.bfloat16), "wire": WIRES.all_reduce()},
    "feedback both ways": {
        "up": Q.error_feedback(Q.midrise(1)),
        "owner": D.feedback_at_owner(),
        "down": D.scaled_signs(),
    },
    "feedback both ways, 4 bits": {
        "up": Q.error_feedback(Q.midrise(4)),
        "owner": D.feedback_at_owner(p=4),
        "down": D.scaled(4),
    },
}


def mesh_of_two_by_two():
    devices = jax.devices()[:4]
    return jax.make_mesh((2, 2), (AXIS, "tp"), devices=devices, axis_types=(AxisType.Auto,) * 2)


def shapes_of_a_step(tx, leaves, mesh, spec):
    """Updates and state by shape, of leaves ``[2, ...]`` that differ between workers."""

    def worker(stacked):
        grads = jax.tree.map(lambda x: x[0], stacked)
        updates, state = tx.update(grads, tx.init(grads), grads)
        return updates, jax.tree.map(lambda x: x[None], state)

    # Types are not followed to the outside, where each update is the same on all workers anyway.
    run = jax.shard_map(worker, mesh=mesh, in_specs=spec, out_specs=P(mesh.axis_names))
    return jax.eval_shape(run, leaves)


@pytest.mark.parametrize("name", METHODS)
def test_leaves_of_billions_of_elements_can_be_traced(name):
    tx = lc.communicate(axis_name=AXIS, **{"memory": lc.momentum.nothing()} | METHODS[name])
    n = 2**31 + 300
    whole = jax.ShapeDtypeStruct((2, n), jnp.float32)  # on each device
    cut = jax.ShapeDtypeStruct((2, 2 * n), jnp.float32)  # in two shards, together
    for leaf, spec in ((whole, P(AXIS)), (cut, P(AXIS, "tp"))):
        updates, state = shapes_of_a_step(tx, {"w": leaf}, mesh_of_two_by_two(), spec)
        assert updates["w"].dtype == jnp.float32 and updates["w"].size % n == 0
        assert all(x.dtype.itemsize <= 4 for x in jax.tree.leaves(state))


def test_the_bytes_of_billions_of_elements_are_counted():
    tree = {"w": jax.ShapeDtypeStruct((2**33 + 1,), jnp.float32)}
    for parts in METHODS.values():
        parts = {of: part for of, part in parts.items() if of != "memory"}
        assert lc.traffic.predict(tree, 8, **parts).sent_bytes > 2**33 / 8


@pytest.mark.parametrize("levels", [1, 2])
def test_updates_have_the_dtype_of_the_gradients(levels):
    """Whatever the dtype of the momentum and of what travels."""
    group = {"group_axis": "tp"} if levels == 2 else {}
    mesh = mesh_of_two_by_two()
    kinds = {"a": jnp.bfloat16, "b": jnp.float16, "c": jnp.float32, "d": jnp.bfloat16}
    leaves = {k: jax.ShapeDtypeStruct((4, 130), kind) for k, kind in kinds.items()}
    spec = P((AXIS, "tp")) if levels == 2 else P(AXIS)
    for name, parts in METHODS.items():
        if levels == 2 and parts.get("up", Q.sign()).measure is not None:
            continue  # one scale for a whole leaf, of which a device has a slice
        tx = lc.communicate(axis_name=AXIS, **{"memory": lc.momentum.nothing()} | parts, **group)
        updates, _ = shapes_of_a_step(tx, leaves, mesh, spec)
        assert {k: u.dtype for k, u in updates.items()} == kinds, name


def test_updates_of_bfloat16_gradients_run_with_float32_momentum(run_workers):
    params = {"w": jnp.zeros(300, jnp.bfloat16)}
    txs = {
        "lion_cub": lc.lion_cub(1.0, mu_dtype=jnp.float32, weight_decay=0.0, axis_name=AXIS),
        "owner_lion": lc.owner_lion(1.0, mu_dtype=jnp.float32, weight_decay=0.0, axis_name=AXIS),
    }
    signs = np.resize([1, -1, -1], 300)
    grads = {"w": np.tile(signs, (2, 2, 1)).astype(jnp.bfloat16)}
    for updates, state in run_workers(txs, params, grads, np.zeros((2, 2), bool)).values():
        assert updates["w"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(updates["w"].astype(np.float32), np.stack([-signs] * 2))
        momenta = [x for x in jax.tree.leaves(state) if x.size >= 4 * 300]
        assert {x.dtype for x in momenta} <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}
        assert any(x.dtype == jnp.float32 for x in momenta)
