"""Files of snapshots: a name, a description in JSON, and raw arrays.

Nothing in them is run. What a file or another process gives is read by its type, and refused where it has
another one, or would take memory without bound.
"""

import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from lioncub_jax.checkpoint import leaves, tiles
from lioncub_jax.checkpoint.layout import Layout
from lioncub_jax.checkpoint.schema import parse
from lioncub_jax.checkpoint.tiles import Tile
from lioncub_jax.mesh.hosts import gathered_json
from lioncub_jax.tools.run.assembly import tiles_of

LENGTH = 8  # bytes before a description: how many it has
MOST = 2**16  # processes of a run, and tiles of an array
_FILE = re.compile(
    r"(\d{1,15})-(\d{1,15})-(\d{1,15})-(\d{1,5})-of-(\d{1,5})\.(own|buddy)", re.ASCII
)
Key = tuple[int, int, int, int]  # of a snapshot: start, save, step, and the number of processes


class Name(NamedTuple):
    """The name of a file of a snapshot.

    Attributes:
      start: number of the start of the run; one for all processes.
      save: counts the snapshots of this start; a step may come twice, where a run goes back.
      step: of the state.
      process: the one that wrote it.
      num_processes: how many processes there were.
      kind: ``"own"``: what its devices hold; ``"buddy"``: the slices that others own.
    """

    start: int
    save: int
    step: int
    process: int
    num_processes: int
    kind: str

    @property
    def snapshot(self) -> Key:
        """The snapshot of which it is a part."""
        return *self[:3], self.num_processes

    def __str__(self) -> str:
        number = f"{self.start}-{self.save}-{self.step}-{self.process}"
        return f"{number}-of-{self.num_processes}.{self.kind}"


def names_in(files: Iterable[str]) -> list[Name]:
    """The names of snapshots among those of files, oldest first."""
    names = []
    for file in files:
        if match := _FILE.fullmatch(file):
            *numbers, kind = match.groups()
            names.append(Name._make([*(int(number) for number in numbers), kind]))
    return sorted(names)


class Description(NamedTuple):
    """The description of a snapshot, in each of its files.

    Attributes:
      run: the name of the run.
      layout: the layout of the state.
      two_levels: whether a worker was a group of devices.
      shapes: of the tiles in which each array of the layout is cut.
    """

    run: str
    layout: Layout
    two_levels: bool
    shapes: tuple[tuple[int, ...], ...]

    @property
    def tiles(self) -> list[Tile]:
        """All tiles; a file has some, by their places in this list."""
        tiles = []
        for array, shape in zip(self.layout, self.shapes, strict=True):
            tiles += tiles_of(array, shape)
        return tiles


class Part(NamedTuple):
    """The head of a file of a snapshot.

    Attributes:
      about: the text of a `Description`.
      numbers: the tiles that follow, by their places among all of the snapshot.
      data: what the caller gave.
    """

    about: str
    numbers: tuple[int, ...]
    data: Any


@functools.lru_cache(maxsize=2)  # many processes say the same
def parse_description(text: str, wanted: Layout) -> tuple[Description, list[Tile]]:
    """Reads a description and its tiles.

    Raises:
      Exception: where it makes no sense, or is far larger than the ``wanted`` layout.
    """
    about: Description = parse(Description, json.loads(text))
    for array, tile in zip(about.layout, about.shapes, strict=True):
        shape = array.info.shape
        even = all(tile) and not any(n % size for n, size in zip(shape, tile, strict=True))
        if not even or math.prod(shape) > MOST * math.prod(tile):
            raise ValueError(f"{array.path}, {shape}, is cut in tiles of {tile}")
    if about.layout != wanted:
        if _num_bytes(about.layout) > MOST * _num_bytes(wanted):  # of that many workers
            raise ValueError("its arrays are larger than those of any number of workers")
        leaves.leaf_infos(about.layout)
    return about, about.tiles


def _num_bytes(layout: Layout) -> int:
    return sum(math.prod(x.info.shape) * x.info.abstract().dtype.itemsize for x in layout)


def to_bytes(about: Description, data: Any, held: Mapping[Tile, np.ndarray]) -> list[Any]:
    """The pieces of a file: the length of its head, the head, and the tiles it has."""
    numbered = {k: held[tile] for k, tile in enumerate(about.tiles) if tile in held}
    words = json.dumps(about, default=lambda dtype: np.dtype(dtype).name)
    head = json.dumps(Part(words, tuple(numbered), data)).encode()
    return [
        len(head).to_bytes(LENGTH, "little"),
        head,
        *[tiles.bytes_of(x) for x in numbered.values()],
    ]


def from_bytes(
    content: memoryview, kind: str, wanted: Layout
) -> tuple[Part, dict[Tile, np.ndarray]]:
    """Undoes `to_bytes`; raises some error for another content."""
    end = LENGTH + int.from_bytes(content[:LENGTH], "little")
    part = parse(Part, json.loads(bytes(content[LENGTH:end])))
    (about, every), held = parse_description(part.about, wanted), {}
    dtypes = {x.path: x.info.abstract().dtype for x in about.layout}
    for k in part.numbers:
        path, index = every[k]
        shape = tiles.shape_of(index)
        dtype = jnp.bfloat16 if kind == "buddy" else dtypes[path]
        held[path, index] = np.frombuffer(content, dtype, math.prod(shape), end).reshape(shape)
        end += held[path, index].nbytes
    if end != len(content):
        raise ValueError(f"it has {len(content)} bytes, and {end} are described")
    return part, held


# --- Messages of other processes


def exchange(
    kind: Any, message: Any, check: Callable[[Any], object] = lambda message: None
) -> list[Any]:
    """Gives a message to all processes, and returns those of each, of one type.

    Raises:
      ValueError: for a message of another type, and where ``check`` raises.
    """
    messages = []
    for process, x in enumerate(gathered_json(message)):
        try:
            messages.append(parse(kind, x))
            check(messages[-1])
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"process {process} says of its snapshots what cannot be ({error}): run the same version "
                "of lioncub_jax in all processes"
            ) from None
    return messages
