"""One run of a trainer's file for `benchmarks/trainers.py`, which reads the last line: what was compiled.

python benchmarks/trainer_child.py examples/large/flax_nnx.py
"""

import json
import os
import runpy
import sys
from typing import Any

import jax

import lioncub_jax as lc
from lioncub_jax.programs import watch
from lioncub_jax.programs.compilations import compiled_programs, texts_of

COMPILED = "/jax/core/compile/backend_compile_duration"


def main(file: str) -> None:
    seconds, programs, known = list[float](), list[dict[str, object]](), set[Any]()

    def read(event: str, duration: float, **_: object) -> None:
        if event == COMPILED:
            seconds.append(duration)
            new = compiled_programs() - known
            known.update(new)
            programs.extend(filter(None, map(about, texts_of(new))))

    if "RANK" in os.environ:
        lc.mesh.join()
    jax.monitoring.register_event_duration_secs_listener(read)
    runpy.run_path(file, run_name="__main__")
    # Where a step is compiled twice, as for a state that is not on the mesh yet, the last is what goes on.
    print(json.dumps({"compile": sum(seconds), "program": programs[-1] if programs else None}))


def about(text: str) -> dict[str, object] | None:
    """What a device sends between workers in a program that votes, and the floats among it."""
    program = watch.read(text)
    if program is None:
        return None
    sent = [x for x in program.arrays if x.between_workers]
    floats = [f"{x.array.dtype}{list(x.array.shape)}" for x in sent if x.array.is_float]
    return {"bytes": sum(x.num_bytes for x in sent), "floats": sorted(floats)}


if __name__ == "__main__":
    main(sys.argv[1])
