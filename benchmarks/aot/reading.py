"""A compiled program as the device runs it: kernels in their order, what each reads and writes."""

import math
import re
from collections import Counter
from typing import NamedTuple

from lioncub_jax.audit.compiled import Instruction, Operand, computations_of, instruction

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[:=][\[{]([^\]}]*)[\]}]')
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

Computations = dict[str, list[Instruction]]


class Kernel(NamedTuple):
    """Instructions that run as one.

    Attributes:
      name: XLA's.
      opcode: "fusion", "copy", "all-to-all-start", ...
      bytes: read from and written to the device's main memory, where slices count as what they take.
      starts: of an asynchronous end, the name of its start.
      collective: the collective that it starts, asynchronously; None for all else.
      matrix: of a matrix product XLA's cycles, or where it prints none floating-point operations; else 0.
      arrives: bytes that an asynchronous end hands over; 0 for all else.
    """

    name: str
    opcode: str
    bytes: int
    starts: str | None
    collective: str | None
    matrix: int = 0
    arrives: int = 0


class Exchange(NamedTuple):
    """A collective on votes, asynchronous.

    Attributes:
      op: "all-to-all" or "all-gather".
      arrives: bytes of its result.
      matrix: matrix work that the schedule puts between its start and its end, in units of `Kernel`.
    """

    op: str
    arrives: int
    matrix: int


def kernels(text: str) -> list[Kernel]:
    """The instructions of a compiled program's first computation, in the order of its schedule."""
    if not text.startswith("HloModule"):
        raise ValueError("this is not the text of a compiled program")
    if "is_scheduled=true" not in text.split("\n", 1)[0]:
        raise ValueError("the text has no schedule: give that of a compiled program")
    bodies, entry = computations_of(text)
    computations = {
        name: [*filter(None, map(instruction, body.splitlines()))] for name, body in bodies.items()
    }
    lines = {line.name: line for line in computations[entry]}
    result = []
    for line in computations[entry]:
        if line.opcode in _NO_WORK:
            continue
        cycles = _CYCLES.search(line.line)
        operands = _OPERAND.findall(line.operands)
        ends = line.opcode.endswith("-done")
        inside = _inside(line, computations)
        result.append(
            Kernel(
                line.name, line.opcode, _moved(line, operands, lines, inside),
                operands[0] if ends and operands else None, _started(line, inside),
                _matrix(line, lines, int(cycles[1]) if cycles else 0),
                _size(line.result, anywhere=True) if ends else 0,
            )
        )  # fmt: skip
    return result


def exchanges(result: list[Kernel]) -> list[Exchange]:
    """Asynchronous collectives in the order of their starts, with the matrix work meanwhile."""
    ops: dict[str, str] = {}
    work: dict[str, int] = {}
    arrived: dict[str, int] = {}
    for one in result:
        if one.starts in ops:
            arrived[one.starts] = one.arrives
        elif one.collective in ("all-to-all", "all-gather"):
            ops[one.name], work[one.name] = one.collective, 0
        for name in ops.keys() - arrived.keys():
            work[name] += one.matrix
    return [Exchange(op, arrived[name], work[name]) for name, op in ops.items()]


def _inside(line: Instruction, computations: Computations) -> list[Instruction]:
    """The instructions of a fusion or of an asynchronous start."""
    called = _CALLS.search(line.attributes)
    return computations.get(called[1], []) if called else []


def _started(line: Instruction, inside: list[Instruction]) -> str | None:
    """The collective that an instruction starts and does not wait for."""
    if not line.opcode.endswith("-start") or '"is_sync":true' in line.line:
        return None
    for opcode in (line.opcode.removesuffix("-start"), *[x.opcode for x in inside]):
        if opcode in COLLECTIVES:
            return opcode
    return None


def _matrix(line: Instruction, lines: dict[str, Instruction], cycles: int) -> int:
    if "dot_general" not in line.line or line.opcode not in ("fusion", "custom-call", "dot"):
        return 0
    if cycles:
        return cycles
    contracted = _CONTRACTED.search(line.line)
    left = _ARRAY.search(lines[_OPERAND.findall(line.operands)[0]].result) if contracted else None
    made = _ARRAY.search(line.result)
    if not (contracted and left and made):
        return 0
    sizes = [int(n) for n in left[2].split(",")]
    summed = math.prod(sizes[int(k)] for k in re.findall(r"\d+", contracted[1]))
    return 2 * summed * math.prod(int(n) for n in made[2].split(","))


def _moved(
    line: Instruction,
    operands: list[str],
    lines: dict[str, Instruction],
    inside: list[Instruction],
) -> int:
    if line.opcode.endswith("-done") or '"ConcatBitcast"' in line.line:
        return 0
    if line.opcode in ("copy-start", "slice-start"):  # the result names both ends
        arrays = [
            f"{dtype}[{shape}]{layout}" for dtype, shape, layout in _ARRAY.findall(line.result)
        ]
        ends, piece = arrays[:2], _size(arrays[line.opcode == "slice-start"], anywhere=True)
        return sum(piece for end in ends if _size(end))
    taken, read = _taken(inside), Counter[str]()
    for k, name in enumerate(operands):
        if name in lines:
            read[_array(name, lines)] += taken.get(k, _size(lines[name].result))
    # What a kernel has by several names, it reads from memory once.
    once = sum(min(size, _size(lines[name].result)) for name, size in read.items())
    return _written(line, inside) + once


def _array(name: str, lines: dict[str, Instruction]) -> str:
    """The name of what a name stands for, behind casts of bits and tuples, such as a barrier's."""
    line = lines[name]
    of = [operand for operand in _OPERAND.findall(line.operands) if operand in lines]
    if line.opcode == "bitcast" and of:
        return _array(of[0], lines)
    index = _INDEX.search(line.attributes)
    if index and of and lines[of[0]].opcode == "tuple":
        return _array(_OPERAND.findall(lines[of[0]].operands)[int(index[1])], lines)
    return name


def _taken(inside: list[Instruction]) -> dict[int, int]:
    """Bytes cut out of each parameter of a fusion that is only cut."""
    numbers = {}
    for line in inside:
        if line.opcode == "parameter":
            numbers[line.name] = int(line.operands)
    uses: dict[str, list[Instruction]] = {name: [] for name in numbers}
    for line in inside:
        for name in set(_OPERAND.findall(line.operands)) & uses.keys():
            uses[name].append(line)
    result = {}
    for name, users in uses.items():
        if users and all(user.opcode in ("slice", "dynamic-slice") for user in users):
            result[numbers[name]] = sum(_size(user.result) for user in users)
        elif users and all(
            user.opcode == "dynamic-update-slice" and user.operands.startswith(f"%{name},")
            for user in users
        ):
            result[numbers[name]] = 0  # written in place
    return result


def _written(line: Instruction, inside: list[Instruction]) -> int:
    roots = [x for x in inside if x.line.lstrip().startswith("ROOT ")]
    if roots and roots[0].opcode == "dynamic-update-slice":
        update = _OPERAND.findall(roots[0].operands)[1]
        return next((_size(x.result) for x in inside if x.name == update), _size(line.result))
    return _size(line.result)


def _size(result: str, anywhere: bool = False) -> int:
    """Bytes of a type, what lies in on-chip memory left out, or ``anywhere``."""
    total = 0
    for dtype, shape, layout in _ARRAY.findall(result):
        if (anywhere or "S(" not in layout) and dtype != "token":
            total += Operand(dtype, tuple(int(n) for n in shape.split(",") if n)).bytes
    return total
