"""``lioncub bytes``: what a compiled step really sends."""

import argparse
import math
from pathlib import Path
from typing import Any

from lioncub_jax import units
from lioncub_jax.cli import options, output

SUMMARY = "what a compiled step really sends"

DESCRIPTION = """\
Lists every collective of a compiled JAX program with the mesh axes that it runs
over, and the bytes that each device sends in a step. With --params it compares
them with an all-reduce of float32 gradients. Of a program that votes it says what
travels between the workers, and what inside a worker."""

EPILOG = """\
TARGET is MODULE:NAME or FILE.py:NAME, a function without arguments that returns
(program, mesh), where the program is compiled or lowered, such as
`step.lower(state, batch), mesh`; or a text file with what `compiled.as_text()`
returned, not `lowered.as_text()`, to which the compiler still adds collectives.
With --json the bytes of branches that a step may take or not are apart.

examples:
  lioncub bytes lioncub_jax.cli.examples:lowered --devices 8 --params 229376
  python -m lioncub_jax.cli.examples > step.hlo
  lioncub bytes step.hlo --mesh data=8"""


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser."""
    count = options.reads(units.count)
    command.add_argument(
        "target", metavar="TARGET", help="MODULE:NAME, FILE.py:NAME or a text file"
    )
    command.add_argument(
        "--mesh", type=options.reads(_sizes), metavar="NAME=SIZE,...",
        help="the axes of the mesh in its order, for a text file, such as data=4,tp=2",
    )  # fmt: skip
    command.add_argument(
        "--devices", type=count, metavar="N", help="run a target on so many devices of the CPU"
    )
    command.add_argument(
        "--params", type=count, metavar="N",
        help="number of parameters: compare with an all-reduce of float32 gradients, over the axes that "
        "vote, or the first",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print numbers instead of a table")


def _sizes(text: str) -> dict[str, int]:
    parts = [part.partition("=") for part in text.split(",")]
    names = [name.strip() for name, _, _ in parts]
    sizes = [int(size) if size.strip().isdecimal() else 0 for _, _, size in parts]
    if not all(names) or not all(sizes) or len(set(names)) < len(names):
        raise ValueError(
            f"mesh {text!r}: give names and sizes, each name once, such as data=4,tp=2"
        )
    return dict(zip(names, sizes, strict=True))


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
      ValueError: for options that do not go together, a target that is no program, and a program
        that cannot be read.
    """
    from lioncub_jax import traffic, watch
    from lioncub_jax.traffic import compiled  # brings jax

    program, mesh = _saved(args) if _is_text(args.target) else _built(args)
    found = _read(args.target, program, mesh)
    every, gated = (compiled.sent_bytes(found, gated=flag) for flag in (False, True))
    text = program if isinstance(program, str) else program.as_text()
    voters = watch.voters_of(text)
    over = voters.axes if voters else tuple(mesh.shape)[:1]
    workers = math.prod(mesh.shape[axis] for axis in over)
    dense = args.params and traffic.float32_all_reduce_bytes(args.params, workers)
    if args.json:
        output.show_json({
            "mesh": dict(mesh.shape),
            "collectives": [{**one._asdict(), "sent_bytes": one.sent_bytes} for one in found],
            "every_step": {_axes(axes): sent for axes, sent in every.items()},
            "in_branches": {_axes(axes): sent for axes, sent in gated.items()},
            "workers": voters and voters.axes,
            "float32_all_reduce": dense,
        })  # fmt: skip
        return 0
    parts: list[Any] = [compiled.table(found)]
    if not found:
        parts += ["no collective: the devices send nothing to each other"]
    if voters:
        parts += [watch.report(text, voters)]
    if dense:
        least = "at least " if any(one.looped for one in found) else ""
        parts += [_comparison(args.params, _axes(over), sum(every.values()), dense, least)]
    output.show(*parts)
    return 0


def _axes(axes: tuple[str, ...] | None) -> str:
    return "unknown" if axes is None else ",".join(axes)


def _is_text(target: str) -> bool:
    path = Path(target)
    return path.suffix != ".py" and (path.is_file() or ":" not in target)


def _saved(args: argparse.Namespace) -> tuple[str, Any]:
    """A program that was saved as text, and the mesh that the options give."""
    import jax

    path = Path(args.target)
    if not path.is_file():
        what = "a folder" if path.is_dir() else "no such file"
        raise ValueError(f"{path}: {what}; give compiled.as_text() in a file, or MODULE:NAME")
    options.refuse(args, ["devices"], f"it has no effect, because {path} is compiled")
    if args.mesh is None:
        raise ValueError(f"{path} does not say which mesh it is for: give --mesh data=4,tp=2")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text: give what compiled.as_text() returned") from None
    return text, jax.sharding.AbstractMesh(tuple(args.mesh.values()), tuple(args.mesh))


def _built(args: argparse.Namespace) -> tuple[Any, Any]:
    """The program and the mesh that a function returns."""
    import jax

    from lioncub_jax.cli import targets

    if args.mesh is not None:
        raise ValueError(f"--mesh is for a text file; {args.target} returns its own: leave it out")
    if args.devices is not None:
        _force_devices(args.devices)
    made = targets.load(args.target)()
    wanted = f"{args.target} returned {type(made).__name__}: return (step.lower(...), mesh)"
    if not (isinstance(made, tuple) and len(made) == 2):
        raise ValueError(wanted)
    program, mesh = made
    kinds = jax.stages.Lowered | jax.stages.Compiled | str
    if not (
        isinstance(program, kinds)
        and isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh)
    ):
        raise ValueError(f"{wanted}, not ({type(program).__name__}, {type(mesh).__name__})")
    if isinstance(program, jax.stages.Lowered):
        program = targets.attempt(f"compiling what {args.target} returned", program.compile)
    return program, mesh


def _read(name: str, program: Any, mesh: Any) -> Any:
    from lioncub_jax.traffic import compiled

    try:
        return compiled.collectives(program, mesh)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _force_devices(devices: int) -> None:
    import jax

    try:
        jax.config.update("jax_num_cpu_devices", devices)  # fails if it is too late
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError as started:
        raise ValueError(f"--devices {devices}: jax has started already: {started}") from None


def _comparison(params: int, over: str, sent: float, dense: float, least: str) -> str:
    return (
        f"A float32 all-reduce of {params:,} parameters over {over} sends "
        f"{units.bytes_text(dense)} from each worker; this program sends {least}"
        f"{units.bytes_text(sent)} from each device in every step, {sent / dense:.4f} of that."
    )
