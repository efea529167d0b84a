#!/bin/sh
# jax 0.10.2, in a shard_map over ("data", "model"): lax.optimization_barrier of two arrays, of which one varies over both
# axes and the other over "data" alone, gives results that both vary over both axes. An array that is whole over "model"
# then cannot leave by a spec that says so, although a barrier changes no value. jax 0.12.0.1 keeps each type.
# Seen, the whole array itself, behind a barrier alone, and beside the other: "data, data, data+model"
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir"
"$dir/bin/pip" install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$dir/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp

mesh = jax.sharding.AbstractMesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
said = []


def f(whole, cut):
    alone, (beside, _) = jax.lax.optimization_barrier(whole), jax.lax.optimization_barrier((whole, cut))
    said.extend(sorted(jax.typeof(x).manual_axis_type.varying) for x in (whole, alone, beside))
    return cut


specs = jax.P("data"), jax.P(("data", "model"))
jax.eval_shape(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs[1]), jnp.ones(4), jnp.ones(4))
seen = ", ".join("+".join(x) for x in said)
print(seen)
assert seen == "data, data, data+model"
PYTHON
