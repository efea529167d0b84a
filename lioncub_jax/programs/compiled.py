"""Collectives of a compiled JAX program, read from XLA's own text.

A cost model says what an exchange should cost. Only the compiled program shows a gradient that was
all-reduced behind one's back, a weight gathered over another axis or a sum taken in a wider dtype.
The text is read strictly: a form that this module does not know is an error, because a collective
that is overlooked makes a byte count that looks better than the truth.

Three things the text does not say. What a custom call sends (a Pallas kernel that copies to another
device) is invisible. Whether a branch is taken is decided at run time. And XLA for TPU does not
print how often a loop runs, its own loops around matrix products included: collectives in them are
counted once and marked `looped`.

Read so far: XLA for CPU (jax 0.10.0, 0.10.2, 0.12.0.1), NVIDIA GPU (0.10.2) and TPU (0.10.2,
0.12.0.1), also of several slices.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from lioncub_jax.programs import scopes
from lioncub_jax.programs.replica_groups import PEERS, AnyMesh, Axes, joined, slices_of
from lioncub_jax.programs.units import bytes_text

if TYPE_CHECKING:
    from rich.table import Table

# HLO names a dtype by its bits: "f32", "bf16", "s4", "f8e4m3fn"; and "pred", of a byte.
_DTYPE = re.compile(r"pred|(?:b?f|[csu])(1|2|4|8|16|32|64|128)(?:e\w+)?")

# Bytes one participant puts on the wire, from the group's size g and its n bytes of operands.
SENT: dict[str, Callable[[int, int], float]] = {
    "all-reduce": lambda g, n: 2 * (g - 1) * n / g,
    "all-gather": lambda g, n: float((g - 1) * n),
    "collective-permute": lambda g, n: float(n) if g > 1 else 0.0,
}
_PARTS = "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-broadcast"
SENT |= dict.fromkeys(_PARTS, lambda g, n: (g - 1) * n / g)

# What the runtime between slices of TPUs does with what is sent to it.
_MEGASCALE = {
    "ALL_REDUCE": "all-reduce", "ALL_GATHER": "all-gather", "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all", "ONE_TO_ONE": "collective-permute",
}  # fmt: skip
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
# XLA for TPU reduces numbers below 32 bits, but for bf16, in words, which the reducer casts.
_IN_WORDS = re.compile(r" = ([a-z]\w*)\[\]\S* bitcast-convert\(")

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.* )?\{$", re.M)
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^()]*)\)(.*)$")
_TYPE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) [a-z][\w\-]*\(", re.M)
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\]")
_CALLED = re.compile(
    r", (calls|called_computations|to_apply|body|condition"
    r"|branch_computations|true_computation|false_computation)=(\{[^}]*\}|[^,\s]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CHANNEL = re.compile(r", channel_id=(\d+)")
# In each line that sends something or calls a computation. All others are passed over, for time.
_WORDS = (*SENT, *PEERS, " send(", "=%", "={%")


class Operand(NamedTuple):
    """One array that a collective takes from each participant.

    Example:
        >>> Operand("s4", (3, 5)).bytes
        8
    """

    dtype: str  # as HLO names it: "f32", "u8", "pred"
    shape: tuple[int, ...]  # on one device; the bound where a dimension is dynamic

    @property
    def bytes(self) -> int:
        """Size in bytes, elements smaller than a byte packed together."""
        known = _DTYPE.fullmatch(self.dtype)
        return -(-self.size * int((known and known[1]) or 8) // 8)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        """True for real or complex numbers."""
        return self.dtype[0] in "fbc"  # f32, bf16, c64


class Collective(NamedTuple):
    """One collective of a compiled program, as one participant sees it.

    `sent_bytes` is what the bandwidth-optimal (ring) algorithm sends, for g participants with n
    bytes of operands each: all-reduce 2 (g-1)/g n, all-gather (g-1) n, reduce-scatter and
    all-to-all (g-1)/g n, broadcast the same on average, permute n. A ragged all-to-all counts as
    an even one. The network's own algorithm may differ: a tree, or a switch that adds.

    Example:
        >>> Collective("all-reduce", (Operand("f32", (8,)),), ("data",), 4).sent_bytes
        48.0

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", 2009.
    """

    op: str  # HLO's name without "-start": "all-reduce", "all-gather", "collective-permute", ...
    operands: tuple[Operand, ...]  # several where XLA combined collectives
    axes: Axes  # the mesh axes its groups run along, in the mesh's order; None: of uneven groups
    group_size: int  # participants that exchange with each other; of uneven groups the largest
    times: int = 1  # runs per step: the product of the known trip counts around it
    looped: bool = False  # in a loop whose trip count the text does not say: `times` is too small
    gated: bool = False  # in a branch of a conditional: not every step need run it

    @property
    def payload_bytes(self) -> int:
        """Bytes of the operands on one participant, for one run."""
        return sum(operand.bytes for operand in self.operands)

    @property
    def sent_bytes(self) -> float:
        """Bytes one participant puts on the wire in one step, all `times` runs together."""
        return self.times * SENT[self.op](self.group_size, self.payload_bytes)


def collectives(compiled: jax.stages.Compiled | str, mesh: AnyMesh) -> list[Collective]:
    """Reads every collective of a compiled program, in program order.

    Args:
        compiled: `jax.jit(f).lower(...).compile()`, or the text its `as_text()` gives. Text from
            before compilation will not do: XLA still adds, moves, merges and widens collectives.
        mesh: the mesh the program was compiled for, its devices in the same order. An
            `AbstractMesh` of that shape will do, so text from any machine can be read on any other.

    Returns:
        One entry per collective instruction, an asynchronous start and its done being one. A
        collective in groups of one device is listed too, with axes () and 0 bytes sent.

    Raises:
        ValueError: the text is no compiled program's; the mesh and the program differ in their number of
            devices; or a collective has a form, dtype or place that is not known here, and the message
            holds its line.

    Example:
        >>> text = '''HloModule step, num_partitions=4
        ...
        ... ENTRY %main (x: f32[8]) -> f32[8] {
        ...   %x = f32[8]{0} parameter(0)
        ...   ROOT %sum = f32[8]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
        ... }'''
        >>> [one] = collectives(text, jax.sharding.AbstractMesh((4,), ("data",)))
        >>> one.op, one.axes, one.operands, one.sent_bytes
        ('all-reduce', ('data',), (Operand(dtype='f32', shape=(8,)),), 48.0)
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text() or ""
    return [one for one, _ in placed(text, mesh)]


def placed(text: str, mesh: AnyMesh) -> list[tuple[Collective, str]]:
    """Reads every collective of a compiled program, and the line of its text, as `collectives`."""
    header = _STRING.sub('""', text.lstrip().partition("\n")[0])
    if not header.startswith("HloModule"):
        raise ValueError(
            "this is not the text of a compiled program, which begins with HloModule: give that of "
            "jax.jit(f).lower(...).compile().as_text(). To StableHLO, the text of what is only lowered, "
            "the compiler still adds collectives"
        )
    devices = math.prod(map(int, re.findall(r", (?:replica_count|num_partitions)=(\d+)", header)))
    if devices != mesh.size and (mesh.size % devices or not _BETWEEN_SLICES.search(text)):
        raise ValueError(
            f"the program runs on {devices} devices and the mesh {dict(mesh.shape)} has "
            f"{mesh.size}: pass the mesh that the program was compiled for"
        )
    bodies, entry = computations_of(text)
    lines = {name: _of_interest(body) for name, body in bodies.items()}
    sites = list(_sites(lines, entry, _Run()))
    reached = {site.computation for site in sites}
    for one in itertools.chain(*(lines[name] for name in lines.keys() - reached)):
        if _is_collective(one):
            raise _unknown("how the program gets to the collective", one.line)
    types = {name: dict(_TYPE.findall(bodies[name])) for name in reached}
    vote, ways = scopes.VOTE.search(text), []
    for slices in slices_of(mesh, devices):
        found = []
        for site in _started(sites):
            types_here = types[site.computation]
            found.append((_collective(site, types_here, bodies, mesh, slices), site.at.line))
        if vote is None or _votes_between(found, {*vote[1].split(",")}):
            return found
        ways.append(found)
    return ways[0]


def _votes_between(found: list[tuple[Collective, str]], workers: set[str]) -> bool:
    """True where some words travel between workers, and none between them and inside of them at once."""
    words = []
    for one, _ in found:
        if one.op in ("all-to-all", "all-gather") and all(x.dtype == "u32" for x in one.operands):
            words.append({*(one.axes or ())})
    return any(x and x <= workers for x in words) and all(
        x <= workers or not x & workers for x in words
    )


def sent_bytes(listed: Iterable[Collective], *, gated: bool = False) -> dict[Axes, float]:
    """Adds up the bytes each participant puts on the wire in one step, by mesh axes.

    Args:
        listed: what `collectives` returned.
        gated: False counts what every step sends. True counts what sits in branches of
            conditionals, all branches together: the most that a step which takes them adds.

    Returns:
        Bytes per participant, by `Collective.axes`. Axes over which nothing is sent are left out.

    Example:
        >>> words = (Operand("u8", (64,)),)
        >>> vote = Collective("all-to-all", words, ("data",), 8)
        >>> sync = Collective("all-reduce", words, ("data",), 8, gated=True)
        >>> sent_bytes([vote, vote, sync]), sent_bytes([vote, vote, sync], gated=True)
        ({('data',): 112.0}, {('data',): 112.0})
    """
    totals: dict[Axes, float] = {}
    for one in listed:
        if one.gated == gated and one.sent_bytes:
            totals[one.axes] = totals.get(one.axes, 0.0) + one.sent_bytes
    return totals


def table(listed: Sequence[Collective]) -> "Table":
    """Lays collectives out for people: a row each, and the totals by mesh axes at the foot.

    Args:
        listed: what `collectives` returned.

    Returns:
        A table for `rich.print`. Bytes are per device and step, in decimal units.

    Example:
        >>> shown = table([Collective("all-gather", (Operand("u8", (64,)),), ("data",), 8)])
        >>> [column.header for column in shown.columns]
        ['collective', 'axes', 'arrays', 'devices', 'sent by each', 'when']
    """
    from rich.table import Column, Table  # not needed for the numbers

    numbers = [Column(name, justify="right") for name in ("devices", "sent by each")]
    shown = Table("collective", "axes", "arrays", *numbers, "when")
    for one in listed:
        arrays = "\n".join(
            (f"{count} × " if count > 1 else "") + f"{array.dtype}{list(array.shape)}"
            for array, count in Counter(one.operands).items()
        )
        when = "in a branch" if one.gated else "every step"
        when += f", {one.times} times" if one.times > 1 else ""
        when += ", per loop turn" if one.looped else ""
        sent = bytes_text(one.sent_bytes)
        shown.add_row(one.op, _axes_text(one.axes), arrays, str(one.group_size), sent, when)
    shown.add_section()
    for gated in (False, True):
        for axes, total in sent_bytes(listed, gated=gated).items():
            short = any(one.looped for one in listed if (one.axes, one.gated) == (axes, gated))
            when = ("all branches" if gated else "every step") + (", at least" if short else "")
            shown.add_row("total", _axes_text(axes), "", "", bytes_text(total), when)
    return shown


def _axes_text(axes: Axes) -> str:
    return "unknown" if axes is None else ", ".join(axes) or "none"


class Instruction(NamedTuple):
    """One line of a computation."""

    line: str
    name: str
    result: str  # its type
    opcode: str
    operands: str
    attributes: str  # quoted strings emptied: metadata may quote anything


class _Run(NamedTuple):
    times: int = 1
    looped: bool = False
    gated: bool = False


class _Site(NamedTuple):
    computation: str
    at: Instruction
    run: _Run


_Lines = dict[str, list[Instruction]]


def _unknown(what: str, line: str) -> ValueError:
    return ValueError(f"cannot read {what} in this line of compiled HLO: {line.strip()}")


def computations_of(text: str) -> tuple[dict[str, str], str]:
    """The text of each computation of a program by its name, and the name of the one that runs first."""
    _, *parts = _HEADER.split(text)
    entries = [name for entry, name in zip(parts[::3], parts[1::3], strict=True) if entry]
    if len(entries) != 1:
        raise ValueError(f"expected one compiled HLO module, found {len(entries)} ENTRY lines")
    return dict(zip(parts[1::3], parts[2::3], strict=True)), entries[0]


def instruction(line: str) -> Instruction | None:
    """Reads a line of a computation; None for one that is no instruction."""
    match = _INSTRUCTION.match(_STRING.sub('""', line))
    return Instruction(line, *match.groups()) if match else None


def _of_interest(body: str) -> list[Instruction]:
    """Reads the lines that send something or call a computation."""
    instructions = []
    for line in body.splitlines() if _says(body) else ():  # of a few thousand, most say nothing
        if _says(line):
            one = instruction(line)
            if one is None:
                raise _unknown("what looks like a collective", line)
            instructions.append(one)
    return instructions


def _says(text: str) -> bool:
    return any(word in text for word in _WORDS)


def _is_collective(one: Instruction) -> bool:
    if one.opcode.removesuffix("-start") in SENT:
        return True
    between = one.opcode == "send" and _BETWEEN_SLICES.search(one.line)
    if between and between[1] in _MEGASCALE:
        return True
    sends = one.opcode == "send" and ("is_host_transfer=true" not in one.attributes or between)
    if sends or any(peers in one.attributes for peers in PEERS):
        raise _unknown(f"the collective {one.opcode!r}", one.line)
    return False


def _sites(lines: _Lines, name: str, run: _Run) -> Iterator[_Site]:
    """Walks through a computation and all it calls, to each collective and how often it runs."""
    for one in lines[name]:
        if one.opcode.endswith(("-done", "-update")):
            continue  # repeats what the instruction says that it waits for
        if _is_collective(one):
            yield _Site(name, one, run)
            continue
        for callee, inner in _calls(one, run):
            if callee not in lines:
                raise _unknown(f"where {callee} is", one.line)
            yield from _sites(lines, callee, inner)


def _calls(caller: Instruction, run: _Run) -> Iterator[tuple[str, _Run]]:
    trips = _TRIPS.search(caller.line)
    for key, names in _CALLED.findall(caller.attributes):
        inner = run
        if caller.opcode == "conditional":
            inner = run._replace(gated=True)
        elif caller.opcode == "while" and trips:
            turns = int(trips[1]) + (key == "condition")  # asked once more, to leave the loop
            inner = run._replace(times=run.times * turns)
        elif caller.opcode == "while":
            inner = run._replace(looped=True)
        for name in re.findall(r"[\w.\-]+", names):
            yield name, inner


def _started(sites: list[_Site]) -> Iterator[_Site]:
    """Leaves out what only carries on a collective that another computation started.

    XLA for TPU spreads an asynchronous one over several fusions and repeats it in each, on its channel.
    """
    starts: dict[str, str] = {}
    for site in sites:
        channel = str(_CHANNEL.findall(site.at.attributes))
        spread = '"async_collective_fusion_config"' in site.at.line
        if not spread or starts.setdefault(channel, site.computation) == site.computation:
            yield site


def _collective(
    site: _Site, types: dict[str, str], bodies: dict[str, str], mesh: AnyMesh, slices: np.ndarray
) -> Collective:
    at = site.at
    op, groups = at.opcode.removesuffix("-start"), at.attributes
    if op == "send":
        op, groups = _MEGASCALE[_BETWEEN_SLICES.findall(at.line)[0]], at.line
        at = at._replace(operands=at.operands.partition(",")[0])  # the other is a token
    operands = _operands(at, types)
    if op == "ragged-all-to-all":  # the others: the output's buffer, offsets and sizes
        operands = operands[:1]
    for key, reducer in _CALLED.findall(at.attributes):
        if key == "to_apply":
            operands = _out_of_words(operands, bodies.get(reducer.removeprefix("%"), ""))
    # XLA for TPU writes a fused reduce-scatter as the all-reduce and the slice that it replaces.
    if op == "all-reduce" and site.computation.startswith("all-reduce-scatter"):
        op = "reduce-scatter"
    try:
        axes, size = joined(groups, mesh, slices, pairs=op == "collective-permute")
    except (ValueError, IndexError) as wrong:
        raise _unknown(f"the groups or pairs of {mesh.size} devices", at.line) from wrong
    return Collective(op, operands, axes, size, *site.run)


def _out_of_words(operands: tuple[Operand, ...], reducer: str) -> tuple[Operand, ...]:
    """Operands as what their reducer adds, where XLA has put several short numbers into a word."""
    short = {dtype for dtype in _IN_WORDS.findall(reducer) if dtype[0] != "u"}
    if len(short) != 1 or any(x.dtype != "u32" for x in operands):
        return operands
    [dtype] = short
    in_a_word = 4 // Operand(dtype, ()).bytes
    return tuple([Operand(dtype, (*x.shape[:-1], x.shape[-1] * in_a_word)) for x in operands])


def _operands(at: Instruction, types: dict[str, str]) -> tuple[Operand, ...]:
    names = re.findall(r"%([\w.\-]+)", at.operands)
    arrays = [_ARRAY.findall(types.get(name, "")) for name in names]
    if not arrays or not all(arrays) or "slice_sizes=" in at.attributes:
        raise _unknown("what the collective takes", at.line)
    operands = []
    for dtype, dims in itertools.chain(*arrays):
        sizes = [size.removeprefix("<=") for size in dims.split(",") if size]
        if not _DTYPE.fullmatch(dtype) or not all(size.isdecimal() for size in sizes):
            raise _unknown(f"the operand type {dtype}[{dims}]", at.line)
        operands.append(Operand(dtype, tuple(int(size) for size in sizes)))
    return tuple(operands)
