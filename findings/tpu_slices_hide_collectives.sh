#!/bin/sh
# libtpu 0.0.42.1, jax 0.10.2, compiled for two described slices of 8 TPU v5e chips: of an all-reduce over all 16
# the optimised program says num_partitions=8, and shows an all-reduce of 8; what goes to the other slice is a
# send with is_host_transfer=true, as a host callback's is, without op_name. An all-to-all is such a send alone,
# so that the program shows no collective at all.
# Seen: "psum: 8 devices, all-reduce, send ALL_REDUCE; all_to_all: 8 devices, send ALL_TO_ALL"
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir"
"$dir/bin/pip" install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 libtpu==0.0.42.1
export JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost TPU_ACCELERATOR_TYPE=v5litepod-8
"$dir/bin/python" - <<'PYTHON'
import re

import jax
import numpy as np
from jax.experimental import topologies

chips = topologies.get_topology_desc("v5e:2x4", "tpu", num_slices=2).devices
mesh = jax.sharding.Mesh(np.array(chips), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.ShapeDtypeStruct((16 * 2048,), "uint32", sharding=jax.NamedSharding(mesh, jax.P("x")))
seen = []
for name, over, out in [
    ("psum", lambda x: jax.lax.psum(x, "x"), jax.P()),
    ("all_to_all", lambda x: jax.lax.all_to_all(x, "x", 0, 0, tiled=True), jax.P("x")),
]:
    run = jax.shard_map(over, mesh=mesh, in_specs=jax.P("x"), out_specs=out)
    text = jax.jit(run).lower(x).compile().as_text()
    lines = re.findall(r" (all-reduce|all-to-all|send)\((.*)", text)
    kinds = [" ".join([op, *re.findall(r'_transfer_type="(\w+)"', rest)]) for op, rest in lines]
    assert all("is_host_transfer=true" in rest and "op_name" not in rest for op, rest in lines if op == "send")
    seen.append(f"{name}: {re.search('num_partitions=([0-9]+)', text)[1]} devices, {', '.join(kinds)}")
seen = "; ".join(seen)
print(seen)
assert seen == "psum: 8 devices, all-reduce, send ALL_REDUCE; all_to_all: 8 devices, send ALL_TO_ALL"
PYTHON
