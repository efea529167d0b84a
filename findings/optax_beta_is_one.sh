#!/bin/sh
# optax 0.2.8, jax 0.10.2: optax.lion and optax.adamw round a beta to the dtype of the moments. 0.999 is 1 in
# bfloat16, so a moment never decays: after one gradient of 200 the momentum of lion(b2=0.999,
# mu_dtype="bfloat16") and, of bfloat16 parameters, Adam's second moment (default b2) are the same number after
# 2,000 gradients of zero. In float32 both are 0.135 of it by then.
# Seen: "lion 0.2002 then 0.2002; adamw 40 then 40; float32 lion 0.2 then 0.02704"
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir"
"$dir/bin/pip" install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 optax==0.2.8
JAX_PLATFORMS=cpu "$dir/bin/python" - <<'PYTHON'
import jax
import jax.numpy as jnp
import optax


def kept(tx, dtype, field):
    """A moment after one gradient of 200, and after 2,000 of zero behind it."""
    params = jnp.zeros((), dtype)
    _, state = tx.update(params + 200, tx.init(params), params)
    last = jax.lax.fori_loop(0, 2000, lambda _, s: tx.update(params, s, params)[1], state)
    return [float(optax.tree.get(s, field)) for s in (state, last)]


lion = kept(optax.lion(1e-3, b2=0.999, mu_dtype="bfloat16"), "float32", "mu")
adam = kept(optax.adamw(1e-3), "bfloat16", "nu")
wide = kept(optax.lion(1e-3, b2=0.999), "float32", "mu")
seen = "; ".join(f"{name} {x:.4g} then {y:.4g}" for name, (x, y) in {"lion": lion, "adamw": adam, "float32 lion": wide}.items())
assert lion[0] == lion[1] > 0 and adam[0] == adam[1] > 0, seen
assert wide[1] < 0.15 * wide[0], seen
print(seen)
PYTHON
