"""Reads compiled programs that vote: floats that travel between workers are an error.

A trainer can vote and still send more than float32 would: momentum that its shardings call replicated is
gathered, or gradients are averaged before the vote. The loss looks right, and only the compiled program
shows it. `programs.compilations` hands each program that votes to `look`, when it is compiled.
"""

import contextlib
import math
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from lioncub_jax.programs import scopes
from lioncub_jax.programs.compiled import Collective, Operand, placed
from lioncub_jax.programs.units import bytes_text

__all__ = ["check_votes", "declared"]

_MOST_NUMBERS = 128  # losses, metrics and counts; no leaf worth a vote is smaller
_FLOATS = re.compile(r"\b(?:bf16|f\d\w*|c64|c128)\[([\d,]+)\]")
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)", re.M)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) function_name_id=\d+ line=(\d+)", re.M)
_HERE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))


@contextlib.contextmanager
def declared() -> Iterator[None]:
    """Says that floats which what is traced inside sends between workers are meant.

    Example:
      Batch statistics over all workers:

      >>> import jax, lioncub_jax as lc
      >>> def statistics(x):
      ...     with lc.audit.declared():
      ...         return jax.lax.pmean(x.mean(0), "data")

    Source: this library.
    """
    # The name is what is read; but a compilation cache on disk does not look at names.
    with jax.named_scope(scopes.DECLARED), set_xla_metadata(lioncub="declared"):
        yield


def check_votes(compiled: jax.stages.Compiled | str) -> str:
    """Reads a compiled program that votes, and raises if floats travel between the workers.

    Programs that ``jax.jit`` and ``jax.pmap`` compile are read by themselves, see `audit.mode`; this is for
    those who compile themselves, such as for other machines, and tells what a step sends.

    Args:
      compiled: ``jax.jit(step).lower(...).compile()``, also of ``nnx.jit``, or its text.

    Returns:
      What a device sends in a step, for people: the bytes between the workers, and those inside a worker
      by the axes of the mesh, with the largest arrays and the lines that they come from. Nothing inside a
      worker is an error, yet what lies otherwise than the parameters travels there unseen.

    Raises:
      TypeError: for a program that is not compiled yet: XLA still adds collectives.
      ValueError: for a program that does not vote, or that sends arrays of more than 128 floats over the
        workers' axes, the library's own and those in `declared` left out; the text names each array.

    Example:
      >>> import jax, lioncub_jax as lc
      >>> try:
      ...     lc.audit.check_votes(jax.jit(lambda x: x + 1).lower(1.0).compile())
      ... except ValueError as error:
      ...     print(str(error)[:28])
      no vote is in this program:

    Source: this library.
    """
    inner = getattr(compiled, "compiled", None)  # nnx.jit wraps what jax.jit compiles
    compiled = inner if isinstance(inner, jax.stages.Compiled) else compiled
    if not isinstance(compiled, str) and not isinstance(compiled, jax.stages.Compiled):
        raise TypeError(
            f"check_votes is given a {type(compiled).__name__}, and only the compiled program shows what "
            "travels: give jax.jit(step).lower(...).compile()"
        )
    text = compiled if isinstance(compiled, str) else compiled.as_text() or ""
    program = read(text)
    if program is None:
        raise ValueError(
            "no vote is in this program: it has no exchange of lioncub_jax between two or more workers; "
            "give the step that calls tx.update"
        )
    if wrong := _wrong(program):
        raise ValueError(wrong)
    return report(program)


def look(name: str, texts: list[str], votes: bool, mode: str) -> None:
    """Reads what was compiled of a function that votes, or of one of its name.

    Args:
      name: of the function.
      texts: of the programs that are new.
      votes: True if it is certain that it votes.
      mode: as `compilations.mode` takes it.

    Raises:
      ValueError: for a program that votes and sends floats too; a warning in mode "warn".
    """
    # Where the compiler fails, nothing is there to read.
    if votes and not any("op_name=" in x for x in texts) and not sys.exc_info()[1]:
        warnings.warn(
            f"{name} votes, and no backend shows its compiled program, so nobody has looked whether floats "
            "travel beside the votes: give what is compiled to lioncub_jax.audit.check_votes, or compare "
            "the bytes at the network's interface with lioncub_jax.audit.of(tx, params, workers)",
            stacklevel=3,
        )
    for text in texts:
        program = read(text)
        if program is None:
            continue
        wrong = _wrong(program)
        if wrong and mode == "raise":
            raise ValueError(wrong)
        if wrong:
            warnings.warn(wrong, stacklevel=3)
        # By its name one may be in a branch that XLA has made a choice between values of. The branches of
        # a mapped step are checked.
        branches = [
            x.collective.gated
            and "cond/branch_" in scopes.BRANCH_BY_COUNT.sub("", x.line)
            and scopes.DECIDED not in x.line
            for x in program.arrays
            if scopes.VOTE.search(x.line)
        ]
        if branches and all(branches):
            warnings.warn(
                "all votes of this program are in branches of a lax.cond: if workers do not agree on the "
                "branch, they wait for each other for ever. optax.apply_if_finite does that when one "
                "worker has a NaN; leave it out: a worker whose gradient is not finite abstains by itself",
                stacklevel=3,
            )


class _Sent(NamedTuple):
    """An array that a collective sends.

    Attributes:
      collective: the collective.
      array: its operand.
      line: its line in the program's text.
      num_bytes: that each device sends of the array.
      between_workers: True between workers, False inside one.
    """

    collective: Collective
    array: Operand
    line: str
    num_bytes: float
    between_workers: bool


class Program(NamedTuple):
    """A compiled program that votes.

    Attributes:
      text: of the program.
      axes: of the workers.
      arrays: that its collectives send.
    """

    text: str
    axes: tuple[str, ...]
    arrays: list[_Sent]


def read(text: str) -> Program | None:
    """Reads a program with votes that are labelled with the workers and their mesh; None without any."""
    vote = scopes.VOTE.search(text)
    if vote is None:
        return None
    axes = tuple(vote[1].split(","))
    sizes = dict(one.split(":") for one in vote[2].split(","))
    mesh = jax.sharding.AbstractMesh(tuple(map(int, sizes.values())), tuple(sizes))
    arrays = []
    for one, line in placed(text, mesh):
        between = one.axes is None or bool(set(one.axes) & set(axes))
        for x in one.operands if one.sent_bytes else ():
            num_bytes = one.sent_bytes * x.bytes / one.payload_bytes
            arrays.append(_Sent(one, x, line, num_bytes, between))
    return Program(text, axes, arrays)


def _wrong(program: Program) -> str | None:
    """The error's text for a program that sends floats between workers; None for one that does not."""
    floats = [x for x in program.arrays if x.between_workers and x.array.is_float]
    floats = [x for x in floats if x.array.size > _MOST_NUMBERS]
    meant = _meant(program.text) if floats else []
    wrong = []
    for x in floats:
        sizes = [n for n, gated in meant if x.collective.gated or not gated]
        if all(n % x.array.size for n in sizes):  # a reduce-scatter makes parts of what is meant
            wrong.append(x)
    return _explained(program, wrong) + _inside(program) if wrong else None


def report(program: Program) -> str:
    """Bytes that a device sends in a step of a program that votes, for people."""
    sent = bytes_text(sum(x.num_bytes for x in program.arrays if x.between_workers))
    between = f"between the workers of {_names(program.axes)}"
    return f"A device sends {sent} {between} in a step{_inside(program)}"


def _names(axes: tuple[str, ...]) -> str:
    return ", ".join(map(repr, axes))


def _inside(program: Program) -> str:
    """Bytes that travel inside a worker, by axes; an empty text without any."""
    inside = [x for x in program.arrays if not x.between_workers]
    sent: dict[str, float] = {}
    for x in inside:
        axes = _names(x.collective.axes or ())
        sent[axes] = sent.get(axes, 0) + x.num_bytes
    each = " and ".join(f"{bytes_text(n)} over {axes}" for axes, n in sent.items())
    return f"\nInside a worker it sends {each}:{_largest(program.text, inside)}" if each else ""


def _largest(text: str, arrays: list[_Sent]) -> str:
    """The four largest arrays, a line for each."""
    lines = []
    for x in sorted(arrays, key=lambda x: -x.num_bytes)[:4]:
        what = f"{x.collective.op} of {x.array.dtype}{list(x.array.shape)}{_like(text, x.array)}"
        lines.append(f"\n  {what}, {bytes_text(x.num_bytes)}{_written(text, x.line)}")
    return "".join(lines) + (f"\n  and {len(arrays) - 4} more" if len(arrays) > 4 else "")


def _meant(text: str) -> list[tuple[int, bool]]:
    """Sizes of arrays that are the library's own or declared, and whether in a branch only.

    By size and not by collective: XLA joins several, and keeps the name of one.
    """
    meant = []
    for line in text.splitlines():
        name = scopes.MEANT.search(line)
        if name is None:
            continue
        counts = [int(n) for n in (name[1] or "").split(".") if n]
        if scopes.DECLARED in name[0]:
            made = _FLOATS.findall(line.partition("(")[0])
            counts += [math.prod(map(int, shape.split(","))) for shape in made]
        meant += [(n, "cond/branch_" in name[0]) for n in counts]
    return meant


def _like(text: str, array: Any) -> str:
    """The names of arguments of the program that have this shape."""
    entry, shape = text[text.find("\nENTRY ") :], ",".join(map(str, array.shape))
    # A worker's entry, of one of them or of all.
    wanted = re.escape(f"{array.dtype}[{shape}]").replace(r"\[1,", r"\[\d+,")
    names = set(re.findall(rf' = {wanted}\S* parameter\(.*?op_name="([^"]+)"', entry))
    named = " and ".join(sorted(names)[:2]).replace("\\", "")
    return f" (of the shape of {named})" if named else ""


def _written(text: str, line: str) -> str:
    """The lines of the caller's program that a collective comes from, where the text says them."""
    frame = re.search(r"stack_frame_id=(\d+)", line)
    head = text[: text.find("\n%")]
    named = head[head.find("FileNames") : head.find("FunctionNames")]
    files = dict(re.findall(r'^(\d+) "([^"]+)"', named, re.M))
    lines = {i: (files.get(file, ""), at) for i, file, at in _LOCATION.findall(head)}
    # A parent is counted from 1, and 1 is none.
    frames = {int(i): (lines.get(at), int(up) - 1) for i, at, up in _FRAME.findall(head)}
    places, at = [], int(frame[1]) if frame else 0
    while at in frames:
        place, at = frames[at]
        if place and place[0] and not place[0].startswith(_HERE):
            places.append(place)
    # A library that wraps functions of JAX stands between: who called it is told too.
    users = [x for x in places if not x[0].startswith(_LIBRARIES)]
    told = ", {}:{}".format(*places[0]) if places else ""
    return told + (", called at {}:{}".format(*users[0]) if users and users[0] != places[0] else "")


def _explained(program: Program, wrong: list[_Sent]) -> str:
    """The error's text for arrays of floats that travel between workers, and advice for each kind."""
    coded = 0.0
    for x in program.arrays:
        if x.between_workers and not any(y.is_float for y in x.collective.operands):
            coded += x.num_bytes
    advice = []
    if any(x.collective.op in ("all-reduce", "reduce-scatter") for x in wrong):
        advice.append(
            "an all-reduce: gradients are averaged before the vote. jax.grad of parameters that all "
            "workers share does that, and lax.pmean(grads): take gradients with "
            "lioncub_jax.local_value_and_grad (in shard_map or pmap), or map the whole step, "
            "lioncub_jax.map_step, and leave lax.pmean out"
        )
    gathers = [x for x in wrong if x.collective.op == "all-gather"]
    entering = []  # arguments of the program, as they are
    for x in gathers:
        operand = re.search(r"\((%[\w.-]+)[,)]", x.line)
        if operand and re.search(rf" {re.escape(operand[1])} = .* parameter\(", program.text):
            entering.append(x)
    if entering:
        advice.append(
            "an all-gather of parameters: they lie in parts over the workers' axis. Parameters are cut "
            "over other axes of the mesh only: put the workers on an axis of their own. Or of an array "
            "that the loss closes over, such as a batch: give it as an argument of the loss"
        )
    if len(gathers) > len(entering):
        advice.append(
            "an all-gather of gradients or momentum, which are [workers, ...]: a constraint or "
            "out_shardings makes them the same for all. A constraint on gradients has the workers' axes in "
            f"front, with_sharding_constraint(grads, P({program.axes[0]!r}, *spec)), or is left out. "
            "Momentum lies as init of the optimizer lays it, which has the workers' axes in front; where "
            f"rules say it, give the workers' axis a rule, {(program.axes[0],) * 2}. "
            "lax.all_gather(grads) does it too"
        )
    advice.append(
        "if it is meant, trace it inside lioncub_jax.audit.declared(), or call "
        "lioncub_jax.audit.mode('warn')"
    )
    return (
        f"this step votes, and a worker sends {bytes_text(coded)} for it over {_names(program.axes)}, but "
        f"also {bytes_text(sum(x.num_bytes for x in wrong))} of floats:{_largest(program.text, wrong)}\n"
        + "\n".join(f"- {line}" for line in advice)
    )
