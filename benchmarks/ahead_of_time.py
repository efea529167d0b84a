"""What the compilers of TPUs and GPUs make of a training step, without such a machine at hand.

    python benchmarks/ahead_of_time.py [--machines v5e-8 h100-8] [--models matrix] [--save FILE]

Each step is compiled for devices that are described and not there, by shape, in a process of its own,
and the optimised program is read. Rows that are in the file are not compiled again. Nothing is run, so
nothing here is a time but that of compiling:

* temporaries: bytes that the program allocates beside its arguments and results, per parameter of a
  device;
* accessed: bytes that its kernels read and write, per parameter. XLA's own count for a TPU; for a GPU,
  where XLA gives none, operands and results of all kernels, slices as what they take;
* collectives over the workers' axis: dtype, bytes, whether asynchronous, and the matrix work that the
  schedule puts between their starts and ends.

TPU needs the extra `tpu`, GPU the extra `cuda`. Kernels of GPUs are chosen without trying any.
"""

import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a compiler without its devices is no platform

import jax
import report
from aot import machines, programs, reading
from aot.programs import LION
from rich.console import Console

import lioncub_jax as lc
from lioncub_jax.audit import collectives
from lioncub_jax.tools import plan as planner

COLUMNS = [
    "machine", "model", "step", "compile s", "temporaries", "accessed", "kernels", "sent", "asynchronous",
]  # fmt: skip
TWO_LEVELS = "vote, 1 bit, two levels of 2"


def one(machine: str, model_name: str, method: str) -> dict[str, Any]:
    """Compiles one step in this process and reads it."""
    model, levels = programs.named(model_name), 2 if method == TWO_LEVELS else 1
    sizes = programs.sizes(model, machines.named(machine).devices, levels)
    mesh = machines.mesh_of(machine, sizes)
    lowered, tx = programs.lowered(model, method.removesuffix(", two levels of 2"), mesh)
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    text, held = compiled.as_text(), model.size / model.fsdp
    kernels = reading.kernels(text)
    cost = compiled.cost_analysis() or {}
    accessed = cost.get("bytes accessed", sum(k.bytes for k in kernels))
    crossing = [c for c in collectives(text, mesh) if c.axes and "data" in c.axes]
    row = {
        "machine": machine,
        "model": model_name,
        "method": method,
        "compile_s": seconds,
        "temporaries": compiled.memory_analysis().temp_size_in_bytes / held,
        "accessed": accessed / held,
        "kernels": len(kernels),
        "collectives": [[c.op, c.operands[0].dtype, c.sent_bytes, c.gated] for c in crossing],
        "sent_bytes": sum(c.sent_bytes for c in crossing if not c.gated),
        "asynchronous": [k.collective for k in kernels if k.collective],
        "exchanges": exchanges(kernels, machine),
    }
    if tx is not None:
        lc.check_votes(compiled)
        row["predicted_bytes"] = predicted(tx, model, mesh)
    return row


def exchanges(kernels: list[reading.Kernel], machine: str) -> list[list[Any]]:
    """Of what travels asynchronously: op, bytes that arrive, seconds of matrix work meanwhile (None)."""
    rate, found = machines.named(machine).matrix_rate, []
    for one in reading.exchanges(kernels):
        found.append([one.op, one.arrives, one.matrix / rate if rate else None])
    return found


def covered(row: dict[str, Any]) -> float:
    """The share of a step's bytes for whose time on the wire there is matrix work between start and end.

    By the link that the planner knows of that machine, a device a worker; 0 where it knows none.
    """
    at = planner.cluster_named(row["machine"]).cluster
    workers, hidden = machines.named(row["machine"]).devices, 0.0
    if at.num_workers != workers:
        return 0.0
    for op, arrives, work in row["exchanges"]:
        sent = arrives * (workers - 1) / workers
        share = at.all_to_all_share if op == "all-to-all" else 1.0
        if work is not None and work >= 8 * sent / (at.link.bandwidth * share):
            hidden += sent
    return hidden / row["sent_bytes"]


def predicted(tx: Any, model: programs.Model, mesh: Any) -> float:
    """What the accounting says that each device sends to other workers."""
    workers = lc.Workers(mesh, "data", "group" if "group" in mesh.axis_names else None)
    specs = programs.specs_of(model, mesh)
    return lc.audit.of(tx, model.params, workers, specs=specs).sent_bytes


def in_a_process(machine: str, model: str, method: str) -> dict[str, Any]:
    """The row of a step, compiled beside nothing else."""
    environment = os.environ | machines.environment(machines.named(machine))
    asked = [sys.executable, __file__, "--one", machine, model, method]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise SystemExit(f"error: {machine}, {model}, {method}: {said[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What must hold: of the first machine and model, ours over float32 Lion."""
    machine, model = rows[0]["machine"], rows[0]["model"]
    found = {r["method"]: r for r in rows if (r["machine"], r["model"]) == (machine, model)}
    lion, keys = found[LION], {"of": [machine, model]}
    for name, method in (("vote", "vote, 1 bit"), ("owner", "owner, 3 bits")):
        row = found[method]
        keys[f"temp_over_lion_{name}"] = row["temporaries"] - lion["temporaries"]
        keys[f"accessed_over_lion_{name}"] = row["accessed"] / lion["accessed"]
        keys[f"compile_over_lion_{name}"] = row["compile_s"] / lion["compile_s"]
    keys["overlapped_share"] = covered(found.get(programs.BUCKETS, found["vote, 1 bit"]))
    return keys


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--machines", nargs="+", default=["v5e-8", "h100-8"], metavar="NAME")
    parser.add_argument("--models", nargs="+", default=["matrix"], metavar="NAME")
    parser.add_argument(
        "--one", nargs=3, metavar=("MACHINE", "MODEL", "METHOD"), help="this row only"
    )
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(*args.one)))
        return
    try:
        asked = [
            (machine, model, method)
            for machine in args.machines
            for model in args.models
            for method in methods(machine, model)
        ]
    except ValueError as error:
        parser.error(str(error))
    known = kept(args.save)
    for each in asked:
        if each not in known:
            known[each] = in_a_process(*each) | report.provenance()
            report.append(args.save, [known[each]])
    rows = [known[each] for each in asked]
    table = report.table("compiled, not run", COLUMNS, [shown(row) for row in rows])
    Console(width=140).print(table)
    report.finish({"benchmark": "ahead_of_time"} | summary(rows), None)


def methods(machine: str, model: str) -> list[str]:
    """The steps that are compiled of a model."""
    machines.named(machine)
    of = programs.named(model)
    further = [TWO_LEVELS] * (of.fsdp == 1) + [programs.BUCKETS] * (of.loss is not None)
    return [LION, *programs.METHODS, *further]


def kept(path: pathlib.Path | None) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The rows of a file that this jax compiled: they are not compiled again."""
    rows = report.rows_of(report.read(path) if path else [], jax=jax.__version__)
    return {(row["machine"], row["model"], row["method"]): row for row in rows}


def shown(row: dict[str, Any]) -> list[str]:
    """A row, for people."""
    dtypes = sorted({dtype for _, dtype, size, _ in row["collectives"] if size > 64})
    return [
        row["machine"], row["model"], row["method"], f"{row['compile_s']:.1f}",
        f"{row['temporaries']:.2f}", f"{row['accessed']:.1f}", str(row["kernels"]),
        f"{row['sent_bytes'] / 1e6:.2f} MB {' '.join(dtypes)}", str(len(row["asynchronous"])),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
