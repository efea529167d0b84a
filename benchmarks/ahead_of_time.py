"""Bytes of training steps, as the compilers of TPUs and GPUs make them without such a machine at hand.

    python benchmarks/ahead_of_time.py [--machines v5e-8 h100-8] [--models matrix]

Each step is compiled for devices that are described and not there, by shape, in a process of its own,
and the optimised program is read. Rows that are in the file are not compiled again. Nothing is run, so
nothing here is a time but that of compiling. The tables of docs/reports/accelerators.md are written anew:

* temporaries: bytes that the program allocates beside its arguments and results, per parameter of a
  device;
* accessed: bytes that its kernels read and write, per parameter. XLA's own count for a TPU; for a GPU,
  where XLA has none, operands and results of all kernels;
* sent: bytes of collectives over the workers' axis;
* under the backward pass: the matrix work that the schedule puts between start and end of each
  asynchronous all-to-all;
* compiling: processor time of tracing, lowering and XLA together, and as often as that of optax's step.

TPU needs the extra `tpu`, GPU the extra `cuda`. Kernels of GPUs are chosen without trying any.
"""

import itertools
import json
import os
import pathlib
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a compiler without its devices is no platform

import jax
import report
from aot import machines, programs, reading

import lioncub_jax as lc
from lioncub_jax.audit import collectives

ROOT = pathlib.Path(__file__).parents[1]
ROWS = ROOT / "benchmarks" / "results" / "ahead_of_time.jsonl"
DOCUMENT = ROOT / "docs" / "reports" / "accelerators.md"
HIDDEN = "vote, 2 bits", "average"  # from the page
SHOWN = "v5e-8", "h100-8"  # of machines, where a model was compiled for one of these
WIRE = 100e9  # bits a second between machines
FIGURES = {
    "temporaries": ("temporaries", ".1f"), "accessed": ("accessed", ".1f"),
    "sent, bytes": ("sent_bytes", ",.0f"), "compiling, s": ("cpu_s", ".0f"),
    "of optax's": ("of_optax", ".2f"),
}  # fmt: skip
TWO_LEVELS = "vote, 1 bit, two levels of 2"


def one(machine: str, model_name: str, method: str) -> dict[str, Any]:
    """Compiles one step in this process and reads it."""
    model, levels = programs.MODELS[model_name](), 2 if method == TWO_LEVELS else 1
    sizes = programs.sizes(model, machines.MACHINES[machine].devices, levels)
    mesh = machines.mesh_of(machine, sizes)
    first = time.process_time()
    lowered, tx = programs.lowered(model, method.removesuffix(", two levels of 2"), mesh)
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds, processor = time.perf_counter() - start, time.process_time() - first
    text, held = compiled.as_text(), model.size / model.fsdp
    accessed = (compiled.cost_analysis() or {}).get("bytes accessed") or reading.accessed(text)
    rate = machines.MACHINES[machine].matrix_rate
    crossing = [c for c in collectives(text, mesh) if c.axes and "data" in c.axes]
    row = {
        "machine": machine,
        "model": model_name,
        "method": method,
        "compile_s": seconds,
        "cpu_s": processor,
        "temporaries": compiled.memory_analysis().temp_size_in_bytes / held,
        "accessed": accessed / held,
        "collectives": [[c.op, c.operands[0].dtype, c.sent_bytes, c.gated] for c in crossing],
        "sent_bytes": sum(c.sent_bytes for c in crossing if not c.gated),
        # Asynchronous ones: op, bytes that arrive, seconds of matrix work meanwhile.
        "exchanges": [[x.op, x.arrives, x.matrix / rate] for x in reading.exchanges(text)],
    }
    if tx is not None:
        lc.audit.check_votes(compiled)
        row["predicted_bytes"] = predicted(tx, model, mesh)
    return row


def predicted(tx: Any, model: programs.Model, mesh: Any) -> float:
    """Bytes that each device sends to other workers, by the accounting."""
    workers = lc.Workers(mesh, "data", "group" if "group" in mesh.axis_names else None)
    specs = programs.specs_of(model, mesh)
    return lc.audit.of(tx, model.params, workers, specs=specs).sent_bytes


def in_a_process(machine: str, model: str, method: str) -> dict[str, Any]:
    """The row of a step, compiled beside nothing else."""
    environment = os.environ | machines.environment(machines.MACHINES[machine])
    return report.in_a_process(__file__, "--one", machine, model, method, environment=environment)


def main() -> None:
    parser = report.parser(__doc__, ROWS)
    known = list(machines.MACHINES), list(programs.MODELS)
    every = [*programs.PLAIN, *programs.METHODS, TWO_LEVELS, programs.BUCKETS]
    parser.add_argument("--machines", nargs="+", default=["v5e-8", "h100-8"], choices=known[0])
    parser.add_argument("--models", nargs="+", default=["matrix"], choices=known[1])
    parser.add_argument("--methods", nargs="+", default=every, choices=every)
    parser.add_argument(
        "--one", nargs=3, metavar=("MACHINE", "MODEL", "METHOD"), help="this row only"
    )
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(*args.one)))
        return
    done = by_step(report.rows_of(report.read(args.save), jax=jax.__version__))
    for machine, model in itertools.product(args.machines, args.models):
        for method in methods(model):
            if method in args.methods and (machine, model, method) not in done:
                row = in_a_process(machine, model, method)
                report.append(args.save, [row | report.provenance()])
    DOCUMENT.write_text(documented(DOCUMENT.read_text(), report.read(args.save)))


def methods(model: str) -> list[str]:
    """The steps that are compiled of a model."""
    of = programs.MODELS[model]()
    further = [TWO_LEVELS] * (of.fsdp == 1) + [programs.BUCKETS] * (of.loss is not None)
    return [*programs.PLAIN, *programs.METHODS, *further]


def by_step(rows: report.Rows) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The last row of each machine, model and method, with its time over that of optax's."""
    known = {(row["machine"], row["model"], row["method"]): row for row in rows}
    for (machine, model, method), row in known.items():
        plain = known.get((machine, model, programs.OF_OPTAX.get(method, programs.LION)), {})
        if method not in programs.PLAIN and "cpu_s" in row and row["jax"] == plain.get("jax"):
            row["of_optax"] = row["cpu_s"] / plain["cpu_s"]
    return known


def documented(document: str, rows: report.Rows) -> str:
    """The document with a table for each model that was compiled, and one of collectives of buckets."""
    known, tables = by_step(rows), {}
    for model in dict.fromkeys(model for _, model, _ in known):
        of_model = {
            (machine, method): row for (machine, of, method), row in known.items() if of == model
        }
        machines_of, steps = (list(dict.fromkeys(names)) for names in zip(*of_model, strict=True))
        steps = [step for step in steps if step not in HIDDEN]
        lines = []
        some = [machine for machine in machines_of if machine in SHOWN] or machines_of
        for machine, (title, (name, form)) in itertools.product(some, FIGURES.items()):
            numbers = [of_model.get((machine, step), {}).get(name) for step in steps]
            shown = ["" if x is None else format(x, form) for x in numbers]
            lines += [[machine, title, *shown]] if any(shown) else []
        tables[model] = report.markdown(["machine", "", *steps], lines)
    lines = []
    for (machine, _, method), row in known.items():
        if method == programs.BUCKETS:
            sent = [(x * 7 / 8, at) for op, x, at in row["exchanges"] if op == "all-to-all"]
            hidden = [size for size, seconds in sent if seconds > 8 * size / WIRE]
            megabytes = f"{sum(hidden) / 1e6:.1f} of {sum(size for size, _ in sent) / 1e6:.1f}"
            lines.append([machine, f"{len(hidden)} of {len(sent)}", megabytes])
    if lines:
        head = ["machine", "messages that computing hides", "MB of them"]
        tables["buckets"] = report.markdown(head, lines)
    wanted = {name: table for name, table in tables.items() if f"<!-- {name} -->" in document}
    return report.written(document, wanted)


if __name__ == "__main__":
    main()
