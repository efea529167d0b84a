"""Bytes on the wire: what each wire predicts beside what the compiled program sends.

    python benchmarks/wire_bytes.py

Every wire with the codes it carries, for W = 2..8 workers on forced CPU devices and a tree of leaves
whose sizes do not divide. Compiled bytes are read from the optimised program of one update inside
``shard_map``, all collectives counted.
"""

from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
import report  # noqa: E402
from jax.sharding import AxisType  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from rich.console import Console  # noqa: E402

import lioncub_jax as lc  # noqa: E402
from lioncub_jax import decide  # noqa: E402

SHAPES = {
    "embedding": (257, 96),
    "kernel": (384, 128),
    "bias": (130,),
    "scalar": (),
    "empty": (0, 4),
}


def schemes() -> list[dict[str, Any]]:
    """The parts of `communicate` for every wire."""
    at_owner = decide.at_owner(optax.scale_by_lion(), decide.sign())
    voted = [
        {},
        {"quantizer": lc.quantize.midrise(2)},
        {"quantizer": lc.quantize.midrise(4)},
        {"decision": lc.decide.average()},
        {"quantizer": lc.quantize.ternary()},
        {"quantizer": lc.quantize.integer(8)},
        {"wire": lc.wires.gathered()},
        {"wire": lc.wires.counts()},
        {"wire": lc.wires.counts(jnp.int16), "quantizer": lc.quantize.midrise(4)},
        {"wire": lc.wires.counts(), "quantizer": lc.quantize.integer(8)},
    ]
    valued = [
        {"quantizer": lc.quantize.error_feedback(lc.quantize.midrise(p)), "decision": at_owner}
        for p in (1, 2, 3)
    ]
    valued += [
        {"quantizer": lc.quantize.dense(dtype), "decision": at_owner, "wire": wire}
        for dtype in (jnp.float32, jnp.bfloat16)
        for wire in (lc.wires.two_phase(), lc.wires.gathered(), lc.wires.all_reduce())
    ]
    return voted + valued


def both(parts: dict[str, Any], workers: int) -> tuple[lc.audit.Traffic, float]:
    """What is predicted of one update, and the bytes that a worker sends by the compiled program."""
    devices = jax.devices()[:workers]
    mesh = jax.make_mesh((workers,), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    tx = lc.communicate(workers="data", memory=lc.momentum.nothing(), **parts)
    grads = {name: jnp.ones((workers, *shape)) for name, shape in SHAPES.items()}

    def update(grads: Any) -> Any:
        local = jax.tree.map(lambda g: g[0], grads)
        return tx.update(local, tx.init(local))[0]

    run = jax.shard_map(update, mesh=mesh, in_specs=P("data"), out_specs=P())
    found = lc.audit.collectives(jax.jit(run).lower(grads).compile(), mesh)
    params = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in SHAPES.items()}
    traffic = lc.audit.of(tx, params, lc.Workers(mesh, "data"))
    return traffic, sum(lc.audit.sent_bytes(found).values())


def main() -> None:
    args = report.parser(__doc__).parse_args()
    errors, rows = [], []
    for parts in schemes():
        for workers in range(2, 9):
            traffic, seen = both(parts, workers)
            errors.append(abs(seen - traffic.sent_bytes) / traffic.sent_bytes)
            bits = 8 * seen / traffic.parameters
            scheme = ", ".join(getattr(part, "name", "?") for part in parts.values()) or "sign"
            rows.append([scheme, workers, traffic.bits_per_parameter, bits])
    columns = ["scheme", "workers", "predicted bits/param", "compiled bits/param"]
    lines = [[str(x if i < 2 else round(x, 3)) for i, x in enumerate(row)] for row in rows]
    Console(width=110).print(report.table("Bytes on the wire", columns, lines))
    summary = {
        "benchmark": "wire_bytes",
        "max_relative_error": max(errors),
        "columns": columns,
        "rows": rows,
    }
    report.finish(summary, args.save)


if __name__ == "__main__":
    main()
