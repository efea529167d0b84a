"""``lioncub bytes``: the collectives of a compiled step."""

import argparse
import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from lioncub_jax import audit
from lioncub_jax.audit import compiled, units, watch
from lioncub_jax.tools.cli import output, targets
from lioncub_jax.tools.cli.options import COUNT, FLAG, Row

SUMMARY = "what a compiled step really sends"

DESCRIPTION = """\
Lists every collective of a compiled JAX program with the mesh axes that it runs
over, and the bytes that each device sends in a step. With --params it compares
them with an all-reduce of float32 gradients. Of a program that votes it says what
travels between the workers, and what inside a worker."""

EPILOG = """\
The target is a function without arguments that returns (program, mesh), where the
program is lowered or compiled, such as `step.lower(state, batch), mesh`, or the
text that `compiled.as_text()` returned, not `lowered.as_text()`, to which the
compiler still adds collectives.

examples:
  lioncub bytes lioncub_jax.tools.cli.examples:lowered --devices 8 --params 229376"""


OPTIONS: list[Row] = [
    ("target", {}, "MODULE:NAME or FILE.py:NAME"),
    ("--devices", COUNT, "run a target on so many devices of the CPU"),
    (
        "--params", COUNT,
        "number of parameters: compare with an all-reduce of float32 gradients, over the axes that vote, "
        "or the first",
    ),
    ("--json", FLAG, "print numbers instead of a table"),
]  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
      ValueError: for options that do not go together, a target that is no program, and a program
        that cannot be read.
    """
    text, mesh = _built(args)
    try:
        collectives = audit.collectives(text, mesh)
    except ValueError as error:
        raise ValueError(f"{args.target}: {error}") from None
    program = watch.read(text)
    over = program.axes if program else tuple(mesh.shape)[:1]
    workers = math.prod(mesh.shape[axis] for axis in over)
    dense = args.params and audit.float32_all_reduce_bytes(args.params, workers)
    if args.json:
        output.write(output.as_text({
            "mesh": dict(mesh.shape),
            "collectives": [{**one._asdict(), "sent_bytes": one.sent_bytes} for one in collectives],
            "workers": program and program.axes,
            "float32_all_reduce": dense,
        }))  # fmt: skip
        return 0
    parts: list[Any] = [compiled.table(collectives)]
    if not collectives:
        parts += ["no collective: the devices send nothing to each other"]
    if program:
        parts += [watch.report(program)]
    if dense:
        sent = sum(audit.sent_bytes(collectives).values())
        least = "at least " if any(x.looped for x in collectives) else ""
        parts += [
            f"A float32 all-reduce of {args.params:,} parameters over {','.join(over)} sends "
            f"{units.bytes_text(dense)} from each worker; this program sends {least}"
            f"{units.bytes_text(sent)} from each device in every step, {sent / dense:.4f} of that."
        ]
    output.show(*parts)
    return 0


def _built(args: argparse.Namespace) -> tuple[str, Mesh | AbstractMesh]:
    """The text of the program that a target returns, and its mesh."""
    if args.devices:
        targets.use_devices(args.devices)
    match target := targets.load(args.target)():
        case (jax.stages.Lowered() as lowered, Mesh() | AbstractMesh() as mesh):
            program = targets.attempt(f"compiling what {args.target} returned", lowered.compile)
        case (jax.stages.Compiled() | str() as program, Mesh() | AbstractMesh() as mesh):
            pass
        case _:
            kinds = [type(x).__name__ for x in (target if isinstance(target, tuple) else [target])]
            raise ValueError(
                f"{args.target} returned {', '.join(kinds)}: return (step.lower(...), mesh)"
            )
    return program if isinstance(program, str) else program.as_text() or "", mesh
