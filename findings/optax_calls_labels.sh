#!/bin/sh
# optax 0.2.8: a tree of bools or labels that has a __call__, as a model of equinox mapped to them has, is a mask to
# optax.masked, which asks the leaves, and a function to optax.partition, which asks the tree and calls it.
# Seen: "masked takes the tree; partition: TypeError: unsupported operand type(s) for @: 'Model' and 'str'"
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir"
"$dir/bin/pip" install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 optax==0.2.8
JAX_PLATFORMS=cpu "$dir/bin/python" - <<'PYTHON'
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    w: Any

    def __call__(self, x):
        return x @ self.w


params = Model(jnp.ones(3))
optax.masked(optax.adam(1e-3), jax.tree.map(lambda _: True, params)).init(params)
try:
    optax.partition({"a": optax.adam(1e-3)}, jax.tree.map(lambda _: "a", params)).init(params)
    seen = "partition takes the tree"
except TypeError as error:
    seen = f"masked takes the tree; partition: TypeError: {error}"
print(seen)
assert seen.startswith("masked takes the tree; partition: TypeError: unsupported operand"), seen
PYTHON
