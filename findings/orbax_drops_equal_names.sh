#!/bin/sh
# orbax-checkpoint 0.12.8, jax 0.10.2: two leaves whose paths are the same when they are joined by dots, {"a.b": ...}
# and {"a": {"b": ...}}, are saved one over the other without a word; both come back with the numbers of one.
# Seen: "saved a.b = 1, a/b = 2; restored a.b = 2, a/b = 2"
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir"
"$dir/bin/pip" install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 orbax-checkpoint==0.12.8
JAX_PLATFORMS=cpu "$dir/bin/python" - "$dir/saved" <<'PYTHON' 2> "$dir/log"
import sys

import jax.numpy as jnp
import orbax.checkpoint as ocp

tree = {"a.b": jnp.full(3, 1), "a": {"b": jnp.full(3, 2)}}
with ocp.CheckpointManager(sys.argv[1]) as manager:
    manager.save(0, args=ocp.args.StandardSave(tree))
    manager.wait_until_finished()
    found = manager.restore(0, args=ocp.args.StandardRestore(tree))
one, other = int(found["a.b"][0]), int(found["a"]["b"][0])
seen = f"saved a.b = 1, a/b = 2; restored a.b = {one}, a/b = {other}"
print(seen)
assert one == other, seen
PYTHON
