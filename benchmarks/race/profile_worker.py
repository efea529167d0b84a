"""One worker of `benchmarks/step_parts.py`: a few steps under XLA's own profiler."""

import argparse
import json
import re
from collections import Counter
from pathlib import Path

import jax
from jax_worker import on, prepared
from meeting import largest

SCOPE = re.compile(r'op_name="[^"]*lioncub\.(\w+)')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--method", required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    jax.distributed.initialize()
    mesh = on(jax.devices())
    once, _, program = prepared(args.method, mesh)
    most = largest(mesh)
    for _ in range(4):
        once()
    most(0)
    worker = jax.process_index()
    trace = args.out / f"trace{worker}"
    with jax.profiler.trace(str(trace)):
        for _ in range(args.steps):
            once()
    most(0)
    spent = by_part(next(trace.rglob("*.xplane.pb")), parts_of(program.as_text()))
    each = {part: ns / 1e6 / args.steps for part, ns in spent.items()}
    (args.out / f"worker{worker}.json").write_text(json.dumps(each))


def parts_of(program: str) -> dict[str, str]:
    """The part of the step that each instruction of a compiled program belongs to."""
    found = {}
    for line in program.splitlines():
        name, _, rest = line.strip().removeprefix("ROOT ").removeprefix("%").partition(" = ")
        if rest:
            scope = SCOPE.search(rest)
            found[name] = scope[1] if scope else "model and update"
    return found


def by_part(trace: Path, parts: dict[str, str]) -> Counter[str]:
    """Nanoseconds of the instructions of a trace, by part; threads added up."""
    spent: Counter[str] = Counter()
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        for line in plane.lines:
            for event in line.events:
                if event.name in parts:
                    spent[parts[event.name]] += event.duration_ns
    return spent


if __name__ == "__main__":
    main()
