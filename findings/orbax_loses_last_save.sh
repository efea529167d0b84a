#!/bin/sh
# orbax-checkpoint 0.12.8, jax 0.10.2: a program that saves asynchronously (the default of CheckpointManager) and ends
# without wait_until_finished loses that checkpoint. It ends with status 0, and the step is left without its name.
# Seen: "status 0, steps [], files ['0.orbax-checkpoint-tmp']; with wait_until_finished: status 0, steps [0]"
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir"
"$dir/bin/pip" install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 orbax-checkpoint==0.12.8
cat > "$dir/save.py" <<'PYTHON'
import sys

import jax.numpy as jnp
import orbax.checkpoint as ocp

manager = ocp.CheckpointManager(sys.argv[1])
manager.save(0, args=ocp.args.StandardSave({"w": jnp.ones(2**26)}))
if sys.argv[2:]:
    manager.wait_until_finished()
PYTHON
JAX_PLATFORMS=cpu "$dir/bin/python" - "$dir" <<'PYTHON' 2> "$dir/log"
import os
import subprocess
import sys

import orbax.checkpoint as ocp

seen = []
for name in ("lost", "wait_until_finished"):
    folder = f"{sys.argv[1]}/{name}"
    waits = [name] if name != "lost" else []
    status = subprocess.run([sys.executable, f"{sys.argv[1]}/save.py", folder, *waits], stderr=subprocess.DEVNULL).returncode
    steps = ocp.CheckpointManager(folder).all_steps()
    seen.append((status, list(steps), sorted(os.listdir(folder))))
(lost, none, files), (status, steps, _) = seen
print(f"status {lost}, steps {none}, files {files}; with wait_until_finished: status {status}, steps {steps}")
assert none == [] and (status, steps) == (0, [0]), seen
PYTHON
