"""What a compiled JAX program really sends: its collectives, read from XLA's own text.

A cost model says what an exchange should cost. Only the compiled program shows a gradient that was
all-reduced behind one's back, a weight gathered over another axis or a sum taken in a wider dtype.
The text is read strictly: a form that this module does not know is an error, because a collective
that is overlooked makes a byte count that looks better than the truth.

Three things the text does not say. What a custom call sends (a Pallas kernel that copies to another
device) is invisible. Whether a branch is taken is decided at run time. And XLA for TPU does not
print how often a loop runs, its own loops around matrix products included: collectives in them are
counted once and marked `looped`.

Read so far: XLA for CPU (jax 0.10.0, 0.10.2, 0.12.0.1), NVIDIA GPU (0.10.2) and TPU (0.12.0.1).
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax

from lioncub_jax.traffic.replica_groups import PEERS, AnyMesh, Axes, grouped, permuted
from lioncub_jax.units import bytes_text

if TYPE_CHECKING:
    from rich.table import Table

_FLOAT8 = ("e5m2", "e4m3", "e3m4", "e4m3fn", "e4m3b11fnuz", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")
_BITS = (
    {"pred": 8, "f4e2m1fn": 4, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128}
    | {f"f8{kind}": 8 for kind in _FLOAT8}
    | {f"{sign}{bits}": bits for sign in "su" for bits in (1, 2, 4, 8, 16, 32, 64)}
)

# Bytes one participant puts on the wire, from the group's size g and its n bytes of operands.
_SENT: dict[str, Callable[[int, int], float]] = {
    "all-reduce": lambda g, n: 2 * (g - 1) * n / g,
    "all-gather": lambda g, n: float((g - 1) * n),
    "reduce-scatter": lambda g, n: (g - 1) * n / g,
    "all-to-all": lambda g, n: (g - 1) * n / g,
    "ragged-all-to-all": lambda g, n: (g - 1) * n / g,
    "collective-broadcast": lambda g, n: (g - 1) * n / g,
    "collective-permute": lambda g, n: float(n) if g > 1 else 0.0,
}

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.* )?\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\]")
_CALLED = re.compile(
    r", (calls|called_computations|to_apply|body|condition"
    r"|branch_computations|true_computation|false_computation)=(\{[^}]*\}|[^,\s]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CHANNEL = re.compile(r", channel_id=(\d+)")
_COLLECTIVE = re.compile(rf" (?:{'|'.join(_SENT)})(?:-start)?\(|{PEERS.pattern}")


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
        return -(-self.size * _BITS[self.dtype] // 8)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether it holds real or complex numbers."""
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
        return self.times * _SENT[self.op](self.group_size, self.payload_bytes)


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
        ValueError: the text is StableHLO, or no program's; the mesh and the program differ in their
            number of devices; or a collective has
            a form, dtype or place that is not known here, and the message holds its line.

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
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    if not text:
        raise ValueError("no text to read: this backend does not print its compiled programs")
    return [one for one, _ in placed(text, mesh)]


def placed(text: str, mesh: AnyMesh) -> list[tuple[Collective, str]]:
    """Every collective of a compiled program, and the line of its text, as `collectives`."""
    _check_compiled(text)
    _check_devices(text, mesh)
    computations, entry = computations_of(text)
    sites = list(_sites(computations, entry, _Run()))
    _check_reached(computations, {id(site) for site, _ in sites})
    return [
        (_collective(site, run, computations[site.computation], mesh), site.line)
        for site, run in _started(sites, computations)
    ]


def sent_bytes(found: Iterable[Collective], *, gated: bool = False) -> dict[Axes, float]:
    """Adds up the bytes each participant puts on the wire in one step, by mesh axes.

    Args:
        found: what `collectives` returned.
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
    for one in found:
        if one.gated == gated and one.sent_bytes:
            totals[one.axes] = totals.get(one.axes, 0.0) + one.sent_bytes
    return totals


def table(found: Sequence[Collective]) -> "Table":
    """Lays collectives out for people: a row each, and the totals by mesh axes at the foot.

    Args:
        found: what `collectives` returned.

    Returns:
        A table for `rich.print`. Bytes are per device and step, in decimal units.

    Example:
        >>> shown = table([Collective("all-gather", (Operand("u8", (64,)),), ("data",), 8)])
        >>> [column.header for column in shown.columns]
        ['collective', 'axes', 'dtype', 'shape', 'devices', 'sent by each', 'when']
    """
    from rich.table import Table  # not needed for numbers alone

    shown = Table()
    for header in ("collective", "axes", "dtype", "shape"):
        shown.add_column(header)
    shown.add_column("devices", justify="right")
    shown.add_column("sent by each", justify="right")
    shown.add_column("when")
    for one in found:
        shown.add_row(*_row(one))
    shown.add_section()
    for gated in (False, True):
        for axes, sent in sent_bytes(found, gated=gated).items():
            short = any(one.looped for one in found if (one.axes, one.gated) == (axes, gated))
            when = ("all branches" if gated else "every step") + (", at least" if short else "")
            shown.add_row("total", _axes_text(axes), "", "", "", bytes_text(sent, 4), when)
    return shown


def _row(one: Collective) -> tuple[str, ...]:
    counts = Counter(one.operands)
    dtypes = "\n".join(operand.dtype for operand in counts)
    shapes = "\n".join(
        (f"{count} × " if count > 1 else "") + str(list(operand.shape))
        for operand, count in counts.items()
    )
    when = "in a branch" if one.gated else "every step"
    when += f", {one.times} times" if one.times > 1 else ""
    when += ", per loop turn" if one.looped else ""
    sent = bytes_text(one.sent_bytes, 4)
    return one.op, _axes_text(one.axes), dtypes, shapes, str(one.group_size), sent, when


def _axes_text(axes: Axes) -> str:
    return "unknown" if axes is None else ", ".join(axes) or "none"


class Instruction(NamedTuple):
    """One line of a computation."""

    computation: str
    name: str
    result: str  # its type
    opcode: str
    operands: str
    attributes: str  # quoted strings emptied: metadata may quote anything
    line: str


class _Run(NamedTuple):
    times: int = 1
    looped: bool = False
    gated: bool = False


_Computations = dict[str, list[Instruction]]
_Site = tuple[Instruction, _Run]


def _unknown(what: str, line: str) -> ValueError:
    return ValueError(f"cannot read {what} in this line of compiled HLO: {line.strip()}")


def _check_compiled(text: str) -> None:
    """Text of another kind has no number of devices where this module looks for it."""
    if text.lstrip().startswith("HloModule"):
        return
    if re.search(r"^\s*module\b|\b(?:stablehlo|mhlo|func)\.", text[:20_000], re.MULTILINE):
        raise ValueError(
            "this is StableHLO, the program before it is compiled, and the compiler still adds, merges "
            "and widens collectives: give the text of lowered.compile().as_text()"
        )
    raise ValueError(
        "this is not the text of a compiled program, which begins with HloModule: give the text of "
        "jax.jit(f).lower(...).compile().as_text()"
    )


def _check_devices(text: str, mesh: AnyMesh) -> None:
    header = _STRING.sub('""', text.lstrip().split("\n", 1)[0])
    devices = math.prod(map(int, re.findall(r", (?:replica_count|num_partitions)=(\d+)", header)))
    if devices != mesh.size:
        raise ValueError(
            f"the program runs on {devices} devices and the mesh {dict(mesh.shape)} has "
            f"{mesh.size}: pass the mesh that the program was compiled for"
        )


def computations_of(text: str) -> tuple[_Computations, str]:
    """Splits the text of a program into its computations, and names the one that runs first."""
    computations: _Computations = {}
    entries, current = [], ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = header[2]
            computations[current] = []
            entries += [current] if header[1] else []
        elif instruction := _instruction(line, current):
            computations[current].append(instruction)
    if len(entries) != 1:
        raise ValueError(f"expected one compiled HLO module, found {len(entries)} ENTRY lines")
    return computations, entries[0]


def _instruction(line: str, computation: str) -> Instruction | None:
    bare = _STRING.sub('""', line)
    match = _INSTRUCTION.match(bare)
    if match and computation:
        name, result, opcode, rest = match.groups()
        end = _closing(rest)
        return Instruction(computation, name, result, opcode, rest[:end], rest[end + 1 :], line)
    if _COLLECTIVE.search(bare):
        raise _unknown("a collective", line)
    return None


def _closing(text: str) -> int:
    """Finds the parenthesis that closes one just before `text`."""
    depth = 1
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)


def _is_end(instruction: Instruction) -> bool:
    """Whether it awaits what another instruction started, and repeats what that one says."""
    return instruction.opcode.endswith(("-done", "-update"))


def _is_collective(instruction: Instruction) -> bool:
    opcode, attributes = instruction.opcode, instruction.attributes
    if opcode.removesuffix("-start") in _SENT:
        return True
    sends = opcode == "send" and "is_host_transfer=true" not in attributes
    if sends or PEERS.search(attributes):
        raise _unknown(f"the collective {opcode!r}", instruction.line)
    return False


def _sites(computations: _Computations, name: str, run: _Run) -> Iterator[_Site]:
    """Walks through a computation and all it calls, to each collective and how often it runs."""
    for instruction in computations[name]:
        if _is_collective(instruction):
            yield instruction, run
        elif not _is_end(instruction):
            for callee, inner in _calls(instruction, run):
                if callee not in computations:
                    raise _unknown(f"where {callee} is", instruction.line)
                yield from _sites(computations, callee, inner)


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


def _check_reached(computations: _Computations, reached: set[int]) -> None:
    for instruction in itertools.chain.from_iterable(computations.values()):
        if id(instruction) not in reached and _is_collective(instruction):
            raise _unknown("how the program gets to the collective", instruction.line)


def _started(sites: list[_Site], computations: _Computations) -> list[_Site]:
    """Leaves out the places that only carry on a collective which another place started.

    XLA for TPU spreads an asynchronous collective over several fusions and repeats it in each, with
    the same channel; the first one hands it to a custom call "AsyncCollectiveStart".
    """
    starting = {
        name
        for name, instructions in computations.items()
        if any('"AsyncCollectiveStart"' in instruction.line for instruction in instructions)
    }
    kept = [
        (site, run)
        for site, run in sites
        if '"async_collective_fusion_config"' not in site.line or site.computation in starting
    ]
    channels = {tuple(_CHANNEL.findall(site.attributes)) for site, _ in kept}
    for site, _ in sites:
        if tuple(_CHANNEL.findall(site.attributes)) not in channels:
            raise _unknown("where to find the start of the collective", site.line)
    return kept


def _collective(
    site: Instruction, run: _Run, around: list[Instruction], mesh: AnyMesh
) -> Collective:
    op, operands = site.opcode.removesuffix("-start"), _operands(site, around)
    if op == "ragged-all-to-all":  # the others: the output's buffer, offsets and sizes
        operands = operands[:1]
    # XLA for TPU writes a fused reduce-scatter as the all-reduce and the slice that it replaces.
    if op == "all-reduce" and site.computation.startswith("all-reduce-scatter"):
        op = "reduce-scatter"
    found = (permuted if op == "collective-permute" else grouped)(site.attributes, mesh)
    if found is None:
        pairs = "pairs" if op == "collective-permute" else "groups"
        raise _unknown(f"{pairs} of {mesh.size} devices", site.line)
    axes, size = found
    return Collective(op, operands, axes, size, *run)


def _operands(site: Instruction, around: list[Instruction]) -> tuple[Operand, ...]:
    types = {instruction.name: instruction.result for instruction in around}
    names = re.findall(r"%([\w.\-]+)", site.operands)
    arrays = [_ARRAY.findall(types.get(name, "")) for name in names]
    if not arrays or not all(arrays) or "slice_sizes=" in site.attributes:
        raise _unknown("what the collective takes", site.line)
    flat = itertools.chain.from_iterable(arrays)
    return tuple(_operand(dtype, dims, site.line) for dtype, dims in flat)


def _operand(dtype: str, dims: str, line: str) -> Operand:
    sizes = [size.removeprefix("<=") for size in dims.split(",") if size]
    if dtype not in _BITS or not all(size.isdecimal() for size in sizes):
        raise _unknown(f"the operand type {dtype}[{dims}]", line)
    return Operand(dtype, tuple(map(int, sizes)))
