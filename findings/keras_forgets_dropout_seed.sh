#!/bin/sh
# keras 3.15.1: save_weights does not save the state of a Dropout layer's seeds, though it is a variable of the model, and
# so a run that BackupAndRestore brings back draws other masks than one that went on.
# Seen: "seeds of Dropout [1337    1] when saved, [1337    0] when loaded"
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir"
"$dir/bin/pip" install --quiet --disable-pip-version-check keras==3.15.1 jax==0.10.2 jaxlib==0.10.2
KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$dir/bin/python" - "$dir" <<'PYTHON' 2> "$dir/log"
import sys

import keras
import numpy as np


def model():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5, seed=1337)])


first, second = model(), model()
first(np.ones((2, 4)), training=True)
first.save_weights(sys.argv[1] + "/a.weights.h5")
second.load_weights(sys.argv[1] + "/a.weights.h5")
saved, loaded = [np.asarray(x.layers[0].seed_generator.state) for x in (first, second)]
seen = f"seeds of Dropout {saved} when saved, {loaded} when loaded"
print(seen)
assert saved[1] == 1 and loaded[1] == 0, seen
PYTHON
