"""A compiled program as the device runs it: kernels in their order, what each reads and writes."""

import math
import re
from typing import NamedTuple

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_OPERAND = re.compile(r"%([\w.\-]+)")
_PART = re.compile(r"lioncub\.(pack|up|decide|down|unpack|remember)\b")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
COLLECTIVES = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")
_NO_WORK = {
    "parameter",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "constant",
    "after-all",
    "partition-id",
}
_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64}


class Kernel(NamedTuple):
    """What runs as one.

    Attributes:
      name: XLA's.
      opcode: "fusion", "copy", "all-to-all-start", ...
      part: of the step: "pack", "up", "decide", "down", "unpack", "remember", "model" or "other".
      bytes: read from and written to the device's main memory, where slices count as what they take.
      cycles: XLA's own estimate; 0 where it prints none.
      starts: of an asynchronous end, the name of its start.
      collective: the collective that it starts, asynchronously; None for all else.
    """

    name: str
    opcode: str
    part: str
    bytes: int
    cycles: int
    starts: str | None
    collective: str | None


class _Line(NamedTuple):
    name: str
    result: str
    opcode: str
    rest: str
    root: bool


def kernels(text: str) -> list[Kernel]:
    """The instructions of a compiled program's first computation, in the order of its schedule."""
    computations, entry = _computations(text)
    if "is_scheduled=true" not in text.split("\n", 1)[0]:
        raise ValueError("the text has no schedule: give that of a compiled program")
    lines = {line.name: line for line in computations[entry]}
    found = []
    for line in computations[entry]:
        if line.opcode in _NO_WORK:
            continue
        cycles = _CYCLES.search(line.rest)
        operands = _OPERAND.findall(_before_closing(line.rest))
        ends = line.opcode.endswith("-done")
        found.append(
            Kernel(
                line.name, line.opcode, _part(line.rest), _moved(line, operands, lines, computations),
                int(cycles[1]) if cycles else 0, operands[0] if ends and operands else None,
                _started(line, computations),
            )
        )  # fmt: skip
    return found


def by_part(found: list[Kernel]) -> dict[str, int]:
    """Bytes of memory that each part of a step moves."""
    parts: dict[str, int] = {}
    for one in found:
        parts[one.part] = parts.get(one.part, 0) + one.bytes
    return parts


def overlapped(found: list[Kernel]) -> float | None:
    """The share of a step's work that is scheduled while asynchronous collectives are under way.

    Work is XLA's estimate of cycles, or bytes of memory where it prints none. None without any.
    """
    in_cycles = any(one.cycles for one in found)
    total = covered = 0
    under_way: set[str | None] = set()
    for one in found:
        work = one.cycles if in_cycles else one.bytes
        total += work
        if one.starts in under_way:
            under_way.discard(one.starts)
        elif one.collective:
            under_way.add(one.name)
        elif under_way:
            covered += work
    return covered / total if total and any(one.collective for one in found) else None


def _started(line: _Line, computations: dict[str, list[_Line]]) -> str | None:
    """The collective that an instruction starts and does not wait for."""
    if not line.opcode.endswith("-start") or '"is_sync":true' in line.rest:
        return None
    called = re.search(r"calls=%?([\w.\-]+)", line.rest)
    inside = [x.opcode for x in computations.get(called[1], [])] if called else []
    for opcode in (line.opcode.removesuffix("-start"), *inside):
        if opcode in COLLECTIVES:
            return opcode
    return None


def _computations(text: str) -> tuple[dict[str, list[_Line]], str]:
    found: dict[str, list[_Line]] = {}
    entry = current = ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = header[2]
            found[current] = []
            entry = current if header[1] else entry
        elif current and (match := _INSTRUCTION.match(line)):
            root, name, result, opcode, rest = match.groups()
            found[current].append(_Line(name, result, opcode, rest, bool(root)))
    if not entry:
        raise ValueError("this is not the text of a compiled program")
    return found, entry


def _part(rest: str) -> str:
    if part := _PART.search(rest):
        return part[1]
    return "model" if "jvp(" in rest or "/grad" in rest else "other"


def _moved(
    line: _Line, operands: list[str], lines: dict[str, _Line], computations: dict[str, list[_Line]]
) -> int:
    if line.opcode.endswith("-done"):
        return 0
    called = re.search(r"calls=%?([\w.\-]+)", line.rest)
    inside = computations.get(called[1], []) if called else []
    taken = _taken(inside)
    total = _written(line, inside)
    for k, name in enumerate(operands):
        if name in lines:
            total += taken.get(k, _size(lines[name].result))
    return total


def _taken(inside: list[_Line]) -> dict[int, int]:
    """Of parameters of a fusion that are only cut, what is cut out of them."""
    numbers = {}
    for line in inside:
        if line.opcode == "parameter":
            numbers[line.name] = int(line.rest.split(")")[0])
    uses: dict[str, list[_Line]] = {name: [] for name in numbers}
    for line in inside:
        for name in set(_OPERAND.findall(_before_closing(line.rest))) & uses.keys():
            uses[name].append(line)
    found = {}
    for name, users in uses.items():
        if users and all(user.opcode in ("slice", "dynamic-slice") for user in users):
            found[numbers[name]] = sum(_size(user.result) for user in users)
        elif users and all(
            user.opcode == "dynamic-update-slice" and user.rest.startswith(f"%{name},")
            for user in users
        ):
            found[numbers[name]] = 0  # written in place
    return found


def _written(line: _Line, inside: list[_Line]) -> int:
    roots = [x for x in inside if x.root]
    if roots and roots[0].opcode == "dynamic-update-slice":
        update = _OPERAND.findall(_before_closing(roots[0].rest))[1]
        return next((_size(x.result) for x in inside if x.name == update), _size(line.result))
    return _size(line.result)


def _before_closing(rest: str) -> str:
    depth = 1
    for k, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return rest[:k]
    return rest


def _size(result: str) -> int:
    """Bytes of a type, what lies in on-chip memory left out."""
    total = 0
    for dtype, shape, layout in _ARRAY.findall(result):
        if "S(" in layout:
            continue
        if dtype not in _BITS and not re.fullmatch(r"[su]\d+", dtype):
            continue
        bits = _BITS.get(dtype) or int(dtype[1:])
        total += math.prod(int(n) for n in shape.split(",") if n) * bits // 8
    return total
