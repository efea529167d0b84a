#!/bin/sh
# jax 0.10.2 on CPU: the maximum, the minimum and the infinity norm of an array that is cut over devices lose a
# NaN, and so does lax.pmax; of the same array on one device they are NaN, as NumPy's are. A sum and isfinite
# keep it. The NaN can stand in any shard.
# Seen: "one device [nan, nan, nan], 4 devices [1.0, 1.0, 1.0], pmax 1.0; sum nan, finite False"
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir"
"$dir/bin/pip" install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4 "$dir/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np

mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
cut = jax.sharding.NamedSharding(mesh, jax.P("x"))
pmax = jax.shard_map(lambda x: jax.lax.pmax(x.max(), "x"), mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P())


@jax.jit
def largest(x):
    return jnp.stack([jnp.max(x), jnp.min(x), jnp.linalg.norm(x, jnp.inf)])


for place in range(16):
    x = np.ones(16, np.float32)
    x[place] = np.nan
    one, four = largest(x).tolist(), largest(jax.device_put(x, cut)).tolist()
    total = jax.jit(jnp.sum)(jax.device_put(x, cut))
    finite = jax.jit(lambda x: jnp.isfinite(x).all())(jax.device_put(x, cut))
    seen = f"one device {one}, 4 devices {four}, pmax {pmax(x)}; sum {total}, finite {finite}"
    assert np.isnan(one).all() and four == [1, 1, 1] and pmax(x) == 1, seen
    assert np.isnan(total) and not finite, seen
print(seen)
PYTHON
