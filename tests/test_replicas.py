"""Replicas that go wrong: what is found and healed."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import AXIS, mesh_on, normal, workers_on
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lioncub_jax as lc


def damaged(x, device, at=0, flip=1 << 30):
    """The array, labelled as before, with one bit flipped of what one device holds."""
    parts = []
    for shard in x.addressable_shards:
        part = np.array(shard.data)
        if shard.device.id == device:
            part.reshape(-1).view(np.uint32)[at] ^= flip
        parts.append(jax.device_put(part, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


def assert_copies(found, wanted):
    assert found.sharding == wanted.sharding
    for got, want in zip(found.addressable_shards, wanted.addressable_shards, strict=True):
        np.testing.assert_array_equal(got.data, want.data)


DTYPES = "bfloat16", "bool", "complex64", "float16", "float32", "int8", "uint8"


@pytest.mark.parametrize(
    ("sizes", "kind", "spec", "axis"),
    [
        ("data=8", AxisType.Auto, P(), AXIS),
        ("data=4 tp=2", AxisType.Explicit, P(None, "tp"), AXIS),
        ("pod=2 data=4", AxisType.Auto, P(), ("pod", AXIS)),
    ],
)
def test_a_flipped_bit_is_named_and_healed(sizes, kind, spec, axis):
    mesh = mesh_on(sizes, kind)
    lies = {"own": P(AXIS), "w": spec}
    bits = np.random.default_rng(0).integers(0, 2, 64)
    whole = {k: bits.astype(jnp.dtype(k)) for k in DTYPES} | {
        "own": normal(8, 2),
        "w": normal(3, 8),
    }
    whole = {k: jax.device_put(x, NamedSharding(mesh, lies.get(k, P()))) for k, x in whole.items()}
    # What is a worker's own may differ.
    state = {k: damaged(x, 3, flip=1) for k, x in whole.items()}
    state["w"] = damaged(whole["w"], 5, at=1)
    key = jax.device_put(jax.random.key(7), NamedSharding(mesh, P()))
    whole["key"] = jax.random.key_data(key)
    state["key"] = jax.random.wrap_key_data(damaged(whole["key"], 0))
    replicas = lc.audit.Replicas(lc.Workers(mesh, axis), every=2)
    assert replicas(state) is state and not replicas.differences, (
        "the first call of two compares nothing"
    )
    with pytest.warns(lc.audit.ReplicaHealed, match="has the majority's copy now") as warned:
        healed = replicas(state)
    inner = mesh.shape.get("tp", 1)
    wrong = [(f"['{k}']", 3 // inner, 3) for k in DTYPES]
    found = [(d.leaf, d.worker, d.device) for d in replicas.differences]
    assert found == sorted([*wrong, ("['key']", 0, 0), ("['w']", 5 // inner, 5)])
    assert f"['w'] on worker {5 // inner} (device 5) after step 2" in str(warned[-1].message)
    healed["key"] = jax.random.key_data(healed["key"])
    for name in whole.keys() - {"own"}:
        assert_copies(healed[name], whole[name])
    replicas.check(healed)
    assert len(replicas.differences) == len(found)
    told = r"a replica is wrong: .* on worker .* and heal=False.*checkpoint of before"
    with pytest.raises(lc.audit.ReplicasDiffer, match=told):
        lc.audit.Replicas(lc.Workers(mesh, axis), every=1, heal=False)(state)


def test_without_a_majority_the_run_stops():
    x = jax.device_put(np.ones(4, np.float32), NamedSharding(mesh_on("data=2"), P()))
    replicas = lc.audit.Replicas(workers_on("data=2"), every=1)
    said = (
        r"which is right: after step 1 \['x'\] is the same on the workers of each list of \[\[0\], \[1\]\]"
        r"\. .*go back to a state or a checkpoint of before"
    )
    with pytest.raises(lc.audit.ReplicasDiffer, match=said):
        replicas({"x": damaged(x, 1)})
    assert replicas.differences == []


# --- Bad input


def test_what_cannot_be_is_refused():
    four = workers_on("data=4")

    for said, call in [
        ("every=0", lambda: lc.audit.Replicas(four, every=0)),
        ("compares workers, and there is one",
         lambda: lc.audit.Replicas(workers_on("data=1"))),
        ("['w'] is not on the mesh of the workers",
         lambda: lc.audit.Replicas(four).check({"w": jnp.ones(3)})),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(said)):
            call()
