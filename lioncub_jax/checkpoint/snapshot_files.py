"""Files of snapshots: a name, a description in JSON, and raw arrays.

Nothing in them is run. What a file or another process gives is read by its type, and refused where it has
another one, or would take memory without bound.
"""

import enum
import functools
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from lioncub_jax.checkpoint import leaves, tiles
from lioncub_jax.checkpoint.leaves import Layout
from lioncub_jax.checkpoint.tiles import Tile
from lioncub_jax.mesh.hosts import told

LENGTH = 8  # bytes before a description: how many it has
MOST = 2**16  # processes of a run, and tiles of an array
_FILE = re.compile(
    r"(\d{1,15})-(\d{1,15})-(\d{1,15})-(\d{1,5})-of-(\d{1,5})\.(own|buddy)", re.ASCII
)
Key = tuple[int, int, int, int]  # of a snapshot: start, save, step, and of how many processes


class Name(NamedTuple):
    """The name of a file: whose snapshot, and when.

    Attributes:
      start: number of the start of the run; one for all processes.
      save: which of this start; a step may come twice, where a run goes back.
      step: of the state.
      process: that wrote it.
      of: how many processes there were.
      kind: ``"own"``: what its devices hold; ``"buddy"``: the slices that others own.
    """

    start: int
    save: int
    step: int
    process: int
    of: int
    kind: str

    @property
    def snapshot(self) -> Key:
        """Of which it is a part."""
        return *self[:3], self.of

    def __str__(self) -> str:
        return f"{self.start}-{self.save}-{self.step}-{self.process}-of-{self.of}.{self.kind}"


def names_in(files: Iterable[str]) -> list[Name]:
    """The names of snapshots among those of files, oldest first."""
    found = []
    for match in filter(None, map(_FILE.fullmatch, files)):
        *numbers, kind = match.groups()
        found.append(Name._make([*map(int, numbers), kind]))
    return sorted(found)


class Description(NamedTuple):
    """What every file of a snapshot says of it.

    Attributes:
      run: the name of the run.
      layout: how the state lay.
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
        found = []
        for stored, shape in zip(self.layout, self.shapes, strict=True):
            found += tiles.cut(stored, shape)
        return found


class Part(NamedTuple):
    """What a file of a snapshot has.

    Attributes:
      about: the snapshot, a text: that of a `Description`.
      numbers: its tiles, by their places among all of the snapshot.
      data: what the caller gave.
    """

    about: str
    numbers: tuple[int, ...]
    data: Any


@functools.lru_cache(maxsize=2)  # many processes say the same
def described(text: str, wanted: Layout) -> tuple[Description, list[Tile]]:
    """A description, and its tiles; some error where it makes no sense, or is far larger than is wanted."""
    about: Description = typed(Description, json.loads(text))
    for stored, tile in zip(about.layout, about.shapes, strict=True):
        shape = stored.leaf.shape
        even = all(tile) and not any(n % size for n, size in zip(shape, tile, strict=True))
        if not even or math.prod(shape) > MOST * math.prod(tile):
            raise ValueError(f"{stored.path}, {shape}, is cut in tiles of {tile}")
    if about.layout != wanted:
        if _bytes(about.layout) > MOST * _bytes(wanted):  # of that many workers
            raise ValueError("its arrays are larger than those of any number of workers")
        leaves.described(about.layout)
    return about, about.tiles


def _bytes(layout: Layout) -> int:
    return sum(math.prod(x.leaf.shape) * x.leaf.at().dtype.itemsize for x in layout)


def packed(about: Description, data: Any, held: Mapping[Tile, np.ndarray]) -> list[Any]:
    """The pieces of a file: the length of what describes it, that, and the tiles it has."""
    numbered = {k: held[tile] for k, tile in enumerate(about.tiles) if tile in held}
    words = json.dumps(about, default=lambda dtype: np.dtype(dtype).name)
    text = json.dumps(Part(words, tuple(numbered), data)).encode()
    return [len(text).to_bytes(LENGTH, "little"), text, *map(tiles.bytes_of, numbered.values())]


def unpacked(content: memoryview, kind: str, wanted: Layout) -> tuple[Part, dict[Tile, np.ndarray]]:
    """What `packed` made a file of, and its tiles; else some error."""
    end = LENGTH + int.from_bytes(content[:LENGTH], "little")
    part = typed(Part, json.loads(bytes(content[LENGTH:end])))
    (about, every), held = described(part.about, wanted), {}
    dtypes = {x.path: x.leaf.at().dtype for x in about.layout}
    for k in part.numbers:
        path, index = every[k]
        shape = tiles.shape_of(index)
        dtype = jnp.bfloat16 if kind == "buddy" else dtypes[path]
        held[path, index] = np.frombuffer(content, dtype, math.prod(shape), end).reshape(shape)
        end += held[path, index].nbytes
    if end != len(content):
        raise ValueError(f"it has {len(content)} bytes, and {end} are described")
    return part, held


# --- What others say


def asked(kind: Any, what: Any, check: Callable[[Any], object] = lambda found: None) -> list[Any]:
    """What each process says, of one type; ``ValueError`` for any other, and for what `check` refuses."""
    found = []
    for process, words in enumerate(told(what)):
        try:
            found.append(typed(kind, words))
            check(found[-1])
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"process {process} says of its snapshots what cannot be ({error}): run the same version "
                "of lioncub_jax in all processes"
            ) from None
    return found


def typed(kind: Any, x: Any) -> Any:
    """A value of a type, of what JSON made of it; raises ``TypeError`` or ``ValueError`` for any other.

    Args:
      kind: a NamedTuple, a tuple or sequence of such types, an enum, a dtype, text, a flag, a number of at
        least 0, None and one of them, or ``Any`` for what stays as it is.
      x: the value.
    """
    origin, kinds = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return x
    if origin is types.UnionType:
        return None if x is None else typed(kinds[0], x)
    if hasattr(kind, "_fields"):
        kinds = tuple(typing.get_type_hints(kind).values())
        return kind(*typed(types.GenericAlias(tuple, kinds), x))
    if isinstance(x, list) and origin in (tuple, Sequence):
        if origin is Sequence:
            kinds = int, ...
        if kinds[-1] is ...:
            kinds = kinds[:1] * len(x)
        return tuple(typed(k, y) for k, y in zip(kinds, x, strict=True))
    if origin is np.dtype and isinstance(x, str):
        return jnp.dtype(x)
    if isinstance(kind, enum.EnumType):
        return kind(x)
    if type(x) is not kind or (kind is int and not 0 <= x < 2**48):
        raise TypeError(f"a {type(x).__name__} is no {getattr(kind, '__name__', kind)} here")
    return x
