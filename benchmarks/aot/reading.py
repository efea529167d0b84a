"""A compiled program: bytes of its kernels, and the matrix work between start and end of each exchange."""

import math
import re
from typing import NamedTuple

from lioncub_jax.programs.compiled import Instruction, Operand, computations_of, instruction

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[:=][\[{]([^\]}]*)[\]}]')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_EXCHANGES = "all-to-all", "all-gather"
_NO_WORK = (
    "parameter",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "constant",
    "after-all",
    "partition-id",
)


class Exchange(NamedTuple):
    """A collective on votes, asynchronous.

    Attributes:
      op: "all-to-all" or "all-gather".
      arrives: bytes of its result.
      matrix: work of matrix products between its start and its end, in XLA's cycles, or where XLA prints
        none in floating-point operations.
    """

    op: str
    arrives: int
    matrix: int


def exchanges(text: str) -> list[Exchange]:
    """Asynchronous exchanges in the order of their starts.

    Raises:
      ValueError: for a text that is not of a compiled program.
    """
    computations, lines = _scheduled(text)
    ops: dict[str, str] = {}
    work: dict[str, int] = {}
    arrived: dict[str, int] = {}
    for line in lines.values():
        operands, op = _OPERAND.findall(line.operands), _started(line, computations)
        if line.opcode.endswith("-done") and operands and operands[0] in ops:
            arrived[operands[0]] = _size(line.result)
        elif op:
            ops[line.name], work[line.name] = op, 0
        for name in ops.keys() - arrived.keys():
            work[name] += _matrix(line, lines)
    return [Exchange(op, arrived[name], work[name]) for name, op in ops.items()]


def accessed(text: str) -> int:
    """Bytes that kernels read and write: results, and of each operand once what is cut out of it.

    Loops count as one kernel, and asynchronous collectives by their ends.

    Raises:
      ValueError: for a text that is not of a compiled program.
    """
    computations, lines = _scheduled(text)
    total = 0
    for line in lines.values():
        if line.opcode in _NO_WORK or line.opcode.endswith("-start"):
            continue
        called = _CALLS.search(line.attributes)
        inside = computations.get(called[1], []) if called else []
        cut, read = _cut(inside), dict[str, int]()
        operands = [name for name in _OPERAND.findall(line.operands) if name in lines]
        if line.opcode.endswith("-done"):
            operands = _OPERAND.findall(lines[operands[0]].operands)
        for k, name in enumerate(operands):
            name, size = _behind(name, lines), _size(lines[name].result)
            read[name] = min(size, read.get(name, 0) + cut.get(k, size))
        total += sum(read.values()) + _written(line, inside)
    return total


def _cut(inside: list[Instruction]) -> dict[int, int]:
    """Bytes cut out of each operand of a fusion that is only cut, or written in place."""
    found = {}
    for one in inside:
        users = [x for x in inside if one.name in _OPERAND.findall(x.operands)]
        if one.opcode != "parameter" or not users:
            continue
        if all(x.opcode in ("slice", "dynamic-slice") for x in users):
            found[int(one.operands)] = sum(_size(x.result) for x in users)
        elif all(_updated(x) == one.name for x in users):
            found[int(one.operands)] = 0
    return found


def _updated(line: Instruction) -> str | None:
    """What an instruction writes a slice of."""
    return _OPERAND.findall(line.operands)[0] if line.opcode == "dynamic-update-slice" else None


def _written(line: Instruction, inside: list[Instruction]) -> int:
    """Bytes of a result, of an updated slice those of the slice."""
    root = next((x for x in inside if x.line.lstrip().startswith("ROOT ")), line)
    if _updated(root):
        slice_of = _OPERAND.findall(root.operands)[1]
        return sum(_size(x.result) for x in inside if x.name == slice_of)
    return _size(line.result)


def _behind(name: str, lines: dict[str, Instruction]) -> str:
    """The array that a name stands for."""
    line = lines[name]
    of = [x for x in _OPERAND.findall(line.operands) if x in lines]
    return _behind(of[0], lines) if line.opcode == "bitcast" and of else name


def _scheduled(text: str) -> tuple[dict[str, list[Instruction]], dict[str, Instruction]]:
    """The instructions of each computation, and those of the first by name, in their order."""
    if not re.match("HloModule.*is_scheduled=true", text):
        raise ValueError("the text has no schedule: give that of a compiled program")
    bodies, entry = computations_of(text)
    computations = {
        name: [*filter(None, map(instruction, body.splitlines()))] for name, body in bodies.items()
    }
    return computations, {line.name: line for line in computations[entry]}


def _started(line: Instruction, computations: dict[str, list[Instruction]]) -> str | None:
    """The exchange that an instruction starts and does not wait for."""
    if not line.opcode.endswith("-start") or '"is_sync":true' in line.line:
        return None
    called = _CALLS.search(line.attributes)
    inside = computations.get(called[1], []) if called else []
    opcodes = [line.opcode.removesuffix("-start"), *(x.opcode for x in inside)]
    return next((opcode for opcode in opcodes if opcode in _EXCHANGES), None)


def _matrix(line: Instruction, lines: dict[str, Instruction]) -> int:
    """Work of a matrix product; 0 for all else."""
    if "dot_general" not in line.line or line.opcode not in ("fusion", "custom-call", "dot"):
        return 0
    if cycles := _CYCLES.search(line.line):
        return int(cycles[1])
    contracted = _CONTRACTED.search(line.line)
    left = _ARRAY.search(lines[_OPERAND.findall(line.operands)[0]].result) if contracted else None
    made = _ARRAY.search(line.result)
    if not (contracted and left and made):
        return 0
    sizes = [int(n) for n in left[2].split(",")]
    summed = math.prod(sizes[int(k)] for k in re.findall(r"\d+", contracted[1]))
    return 2 * summed * math.prod(int(n) for n in made[2].split(","))


def _size(result: str) -> int:
    """Bytes of a type."""
    return sum(
        Operand(dtype, tuple(int(n) for n in shape.split(",") if n)).bytes
        for dtype, shape in _ARRAY.findall(result)
        if dtype != "token"
    )
