#!/bin/sh
# libtpu 0.0.42.1, jax 0.10.2, compiled for described TPU v5e chips: lax.psum of float16 (and of float8 and int8)
# becomes an all-reduce of uint32 words. The optimised program names the dtype only in the reducer, which casts
# each half of a word; a reader of all-reduces takes it for whole numbers. bfloat16 and float32 stay themselves.
# Seen: "float16 u32[8,1,128], reducer casts to f16; bfloat16 bf16[2048]; float32 f32[2048]"
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

chips = topologies.get_topology_desc("v5e:2x4", "tpu").devices
mesh = jax.sharding.Mesh(np.array(chips), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
add = jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P())
seen = []
for dtype in ("float16", "bfloat16", "float32"):
    x = jax.ShapeDtypeStruct((8 * 2048,), dtype, sharding=jax.NamedSharding(mesh, jax.P("x")))
    text = jax.jit(add).lower(x).compile().as_text()
    [found] = re.findall(r"= (\w+\[[\d,]+\])\S* all-reduce\(", text)
    casts = ", reducer casts to f16" if "= f16[]{:T(256)S(6)} bitcast-convert(" in text else ""
    seen.append(f"{dtype} {found}{casts}")
seen = "; ".join(seen)
print(seen)
assert seen == "float16 u32[8,1,128], reducer casts to f16; bfloat16 bf16[2048]; float32 f32[2048]"
PYTHON
