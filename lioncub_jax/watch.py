"""Reads every compiled program that votes, when it is compiled: floats between workers are an error.

A trainer can be changed to vote and send more than before, without a word and with a loss that looks right:
momentum that its shardings call the same for all is gathered, gradients are averaged before they are voted
on. Only the compiled program shows it. So the library listens to JAX's compilations, and reads those in
which its votes are.
"""

import contextlib
import math
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from lioncub_jax import checks, wires
from lioncub_jax.units import bytes_text

_MOST_NUMBERS = 128  # losses, metrics and counts; no leaf worth a vote is smaller
_COMPILED = "/jax/core/compile/backend_compile_duration"
_VOTE = re.compile(r'op_name="[^"]*lioncub\.up/(workers\([^"/]*)/')
_ALIKE = re.compile(r"lioncub\.by_count/cond/branch_\d+")  # that all workers take by a count
_PLACE = re.compile(r"workers\(([^)]*)\)of\(([^)]*)\)")
_COLLECTIVE = re.compile(
    r" = (.*?) (all-reduce|all-gather|reduce-scatter|(?:ragged-)?all-to-all|collective-\w+)(?:-start)?\("
)
_FLOATS = re.compile(r"\b(?:bf16|f\d\w*|c64|c128)\[([\d,]*)\]")
_MEANT = re.compile(r'op_name="[^"]*lioncub\.(?:declared|floats((?:\.\d+)*))[^"]*"')
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)", re.M)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) function_name_id=\d+ line=(\d+)", re.M)
_HERE = str(Path(__file__).parent)


class _Voters(NamedTuple):
    """Who votes in a program."""

    axes: tuple[str, ...]
    mesh: jax.sharding.AbstractMesh


def mode(wanted: str) -> str:
    """What to do where workers send floats, have the same gradients, or drift apart.

    Args:
      wanted: "raise" (default), "warn", or "allow", with which nothing is looked at: programs are not read,
        and those that are traced from then on under ``pmap`` have no checksums.

    Returns:
      The mode before.

    Raises:
      ValueError: for another mode.

    Example:
      >>> import lioncub_jax as lc
      >>> before = lc.watch.mode("warn")
      >>> lc.watch.mode(before)
      'warn'

    Source: this library.
    """
    if wanted not in ("raise", "warn", "allow"):
        raise ValueError(f"watch.mode({wanted!r}): give 'raise', 'warn' or 'allow'")
    before, checks.mode = checks.mode, wanted
    return before


@contextlib.contextmanager
def declared() -> Iterator[None]:
    """Says that floats which what is traced inside sends between workers are meant.

    Example:
      Batch statistics over all workers:

      >>> import jax, lioncub_jax as lc
      >>> def statistics(x):
      ...     with lc.watch.declared():
      ...         return jax.lax.pmean(x.mean(0), "data")

    Source: this library.
    """
    # The name is what is read; but a compilation cache on disk does not look at names.
    with jax.named_scope("lioncub.declared"), set_xla_metadata(lioncub="declared"):
        yield


def check_votes(compiled: jax.stages.Compiled | str) -> None:
    """Reads a compiled program that votes, and raises if floats travel between the workers.

    Programs that ``jax.jit`` and ``jax.pmap`` compile are read by themselves, see `mode`; this is for
    those who compile themselves, such as for other machines.

    Args:
      compiled: ``jax.jit(step).lower(...).compile()``, or its text.

    Raises:
      TypeError: for a program that is not compiled yet: XLA still adds collectives.
      ValueError: for a program that does not vote, or that sends arrays of more than 128 floats over the
        workers' axes, the library's own and those in `declared` left out; the text names each array.

    Example:
      >>> import jax, lioncub_jax as lc
      >>> try:
      ...     lc.check_votes(jax.jit(lambda x: x + 1).lower(1.0).compile())
      ... except ValueError as error:
      ...     print(str(error)[:28])
      no vote is in this program:

    Source: this library.
    """
    if not isinstance(compiled, str) and not isinstance(compiled, jax.stages.Compiled):
        raise TypeError(
            f"check_votes is given a {type(compiled).__name__}, and only the compiled program shows what "
            "travels: give jax.jit(step).lower(...).compile()"
        )
    text = compiled if isinstance(compiled, str) else compiled.as_text() or ""
    voters = _voters(text)
    if voters is None:
        raise ValueError(
            "no vote is in this program: it has no exchange of lioncub_jax between two or more workers; "
            "give the step that calls tx.update"
        )
    if wrong := _wrong(text, voters):
        raise ValueError(wrong)


def start() -> None:
    """Begins to listen to compilations."""
    jax.monitoring.register_event_duration_secs_listener(_on_event)


def _on_event(event: str, duration_secs: float, **about: str | int) -> None:
    if event != _COMPILED or checks.mode == "allow" or not wires.voted:
        return
    text = _newest(str(about.get("fun_name", "")))
    voters = _voters(text)
    if voters is None:
        return
    checks.warn_of_masked()
    wrong = _wrong(text, voters)
    if wrong and checks.mode == "raise":
        raise ValueError(wrong)
    if wrong:
        warnings.warn(wrong, stacklevel=2)
    if _only_in_branches(text, voters):
        warnings.warn(
            "all votes of this program are in branches of a lax.cond: if workers do not agree on the "
            "branch, they wait for each other for ever. optax.apply_if_finite does that when one worker "
            "has a NaN; leave it out: a worker whose gradient is not finite abstains by itself",
            stacklevel=2,
        )


def _newest(name: str) -> str:
    """The text of the program of that name that was compiled last."""
    letters = re.sub(r"[\W_]", "", name)
    try:
        for program in jax.devices()[0].client.live_executables():
            for module in program.hlo_modules():
                if re.sub(r"[\W_]", "", module.name) == letters:
                    return module.to_string()
    except (AttributeError, jax.errors.JaxRuntimeError) as error:  # a plugin need not have either
        warnings.warn(
            f"{name} may vote, and this backend does not show compiled programs ({error}), so nobody has "
            "looked whether floats travel beside the votes: compare the bytes at the network's interface "
            "with lioncub_jax.traffic.of(tx, params, workers)",
            stacklevel=4,
        )
    return ""  # compiled for machines that are not here


def _voters(text: str) -> _Voters | None:
    """The workers of a program, as its votes are labelled; None without any."""
    found = _VOTE.search(text)
    place = found and _PLACE.match(found[1])
    if not place or not place[2]:  # workers of a vmap are on no mesh
        return None
    sizes = dict(one.split(":") for one in place[2].split(","))
    mesh = jax.sharding.AbstractMesh(tuple(map(int, sizes.values())), tuple(sizes))
    return _Voters(tuple(place[1].split(",")), mesh)


def _only_in_branches(text: str, voters: _Voters) -> bool:
    if not any("cond/branch_" in _ALIKE.sub("", path[0]) for path in _VOTE.finditer(text)):
        return False
    from lioncub_jax.traffic.compiled import placed

    votes = [one.gated for one, line in placed(text, voters.mesh) if "lioncub.up" in line]
    return bool(votes) and all(votes)


class _Float(NamedTuple):
    """An array of floats that travels between workers."""

    op: str
    what: str
    sent: float
    is_argument: bool


def _wrong(text: str, voters: _Voters) -> str | None:
    """What to say of a program that sends floats between workers; None for one that does not."""
    if not any(map(_may_send_floats, text.splitlines())):
        return None  # to read all of it takes a second for 300 parameter arrays
    from lioncub_jax.traffic.compiled import placed

    found: list[_Float] = []
    votes, meant = 0.0, {gated: _meant(text, gated) for gated in (False, True)}
    for one, line in placed(text, voters.mesh):
        apart = one.axes is None or set(one.axes) & set(voters.axes)
        if not apart or one.group_size == 1:
            continue
        if not any(x.is_float for x in one.operands):
            votes += one.sent_bytes
        for x in one.operands:
            if x.is_float and x.size > _MOST_NUMBERS and not _is_meant(x.size, meant[one.gated]):
                share = one.sent_bytes * x.bytes / one.payload_bytes
                label, is_argument = _called(
                    text, line, f"{x.dtype}[{','.join(map(str, x.shape))}]"
                )
                what = f"{one.op} of {x.dtype}{list(x.shape)}{label}, {bytes_text(share)}"
                found.append(_Float(one.op, what + _written(text, line), share, is_argument))
    return _explained(found, voters, votes) if found else None


def _may_send_floats(line: str) -> bool:
    """Whether a line has a collective with an array of floats in its result that is no number."""
    collective = _COLLECTIVE.search(line)
    if collective is None:
        return False
    fewest = 1 if collective[2] == "reduce-scatter" else _MOST_NUMBERS
    return any(size > fewest for size in _sizes(collective[1]))


def _sizes(types: str) -> list[int]:
    """The sizes of the arrays of floats in the text of a type."""
    return [math.prod(map(int, shape.split(","))) for shape in _FLOATS.findall(types) if shape]


def _meant(text: str, in_branches: bool) -> set[int]:
    """Sizes of arrays that are the library's own or declared, in every step or in branches too.

    By size and not by collective: XLA joins several, and keeps the name of one.
    """
    sizes: set[int] = set()
    for line in text.splitlines():
        name = _MEANT.search(line)
        if name is None or ("cond/branch_" in name[0] and not in_branches):
            continue
        sizes |= {int(n) for part in name.groups() for n in (part or "").split(".") if n}
        if "lioncub.declared" in name[0]:
            sizes |= set(_sizes(line[: line.find("(")]))
    return sizes


def _is_meant(size: int, meant: set[int]) -> bool:
    """Whether an array is one that is meant, or a part of it, as a reduce-scatter makes them."""
    return any(n % size == 0 for n in meant)


def _called(text: str, line: str, shape: str) -> tuple[str, bool]:
    """The name of an argument of the program that has this shape, and whether it is what travels."""
    entry = text[text.find("\nENTRY ") :]
    wanted = re.escape(shape).replace(
        r"\[1,", r"\[\d+,"
    )  # a worker's entry, of one of them or of all
    names = dict(re.findall(rf'%?([\w.\-]+) = {wanted}\S* parameter\(.*?op_name="([^"]+)"', entry))
    for operand, name in names.items():
        if re.search(rf"\(%?{re.escape(operand)}[,)]", line):
            return f" ({name})".replace("\\", ""), True
    like = sorted({name.replace("\\", "") for name in names.values()})
    return (f" (of the shape of {' and '.join(like[:2])})" if like else ""), False


def _written(text: str, line: str) -> str:
    """The line of the caller's program that a collective comes from, where the text says it."""
    frame = re.search(r"stack_frame_id=(\d+)", line)
    head = text[: text.find("\n%")]
    named = head[head.find("FileNames") : head.find("FunctionNames")]
    files = dict(re.findall(r'^(\d+) "([^"]+)"', named, re.M))
    lines = {i: (files.get(file, ""), number) for i, file, number in _LOCATION.findall(head)}
    # A parent is counted from 1, and 1 is none.
    frames = {int(i): (lines.get(at), int(up) - 1) for i, at, up in _FRAME.findall(head)}
    place, parent = frames.get(int(frame[1]) if frame else 0, (None, 0))
    while place and place[0].startswith(_HERE) and parent in frames:
        place, parent = frames[parent]
    file, number = place or ("", "")
    return f", {file}:{number}" if file else ""


def _explained(found: list[_Float], voters: _Voters, votes: float) -> str:
    total = bytes_text(sum(one.sent for one in found))
    largest = sorted(found, key=lambda one: -one.sent)
    rest = f"\n  and {len(found) - 4} more" if len(found) > 4 else ""
    axes = ", ".join(map(repr, voters.axes))
    advice = []
    if any(one.op == "all-reduce" or one.op == "reduce-scatter" for one in found):
        advice.append(
            "an all-reduce: gradients are averaged before the vote. jax.grad of parameters that all "
            "workers share does that, and lax.pmean(grads): take gradients with "
            "lioncub_jax.worker_value_and_grad (under jit) or local_value_and_grad (in shard_map or "
            "pmap), and leave lax.pmean out"
        )
    if any(one.op == "all-gather" and one.is_argument for one in found):
        advice.append(
            "an all-gather of an argument: it lies in parts over the workers' axis. Parameters are cut "
            "over other axes of the mesh only: put the workers on an axis of their own"
        )
    if any(one.op == "all-gather" and not one.is_argument for one in found):
        advice.append(
            "an all-gather: momentum of each worker leaves the step as if it were the same for all, by "
            "out_shardings or a constraint with P(). Give them tx.shardings(params), of the tx that "
            "lioncub_jax.on_mesh returned, for the state of the optimizer; where logical rules say it, "
            f"give the workers' axis a rule, {(voters.axes[0],) * 2}. lax.all_gather(grads) does it too"
        )
    advice.append(
        "if it is meant, trace it inside lioncub_jax.watch.declared(), or call "
        "lioncub_jax.watch.mode('warn')"
    )
    return (
        f"this step votes, and a worker sends {bytes_text(votes)} for it over {axes}, but also {total} of "
        "floats:\n  " + "\n  ".join(one.what for one in largest[:4]) + rest + "\n"
        + "\n".join(f"- {line}" for line in advice)
    )  # fmt: skip
