"""Files of a checkpoint: the bytes of its arrays, and a sealed description.

A folder ``<step>`` has a file ``<process>.arrays`` of each process that saved, and ``about.json``. Until
all of it was read back it is unfinished and called ``<step>.<12 hex digits>.part``; then it gets its name.
So every reader sees whole checkpoints only, and has nothing to clean up. What is to be deleted is called
``.gone`` first, which any process that saves may delete.
"""

import collections
import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lioncub_jax.checkpoint import tiles
from lioncub_jax.checkpoint.layout import ArrayInfo
from lioncub_jax.checkpoint.schema import parse
from lioncub_jax.checkpoint.tiles import Index, index_of, shape_of

FORMAT = 4  # 1 to 3: versions 0.1 to 0.3, by orbax
ABOUT, ARRAYS, LOCK = "about.json", ".arrays", "lock"
PART, GONE = ".part", ".gone"
BLOCK = 1 << 24  # bytes that are compared at a time
_STEP = re.compile("0|[1-9][0-9]*")
_UNFINISHED = re.compile(rf"({_STEP.pattern})\.[0-9a-f]{{12}}(\{PART}|\{GONE})")
_OURS = re.compile(rf"({_STEP.pattern})(\.(damaged|abandoned)(-[0-9]+)?|\.orbax-checkpoint-tmp.*)?")
_OF_SYSTEMS = {"lost+found", "@eaDir"}  # beside names that begin with a dot


class Damaged(ValueError):
    """A checkpoint that is not as it was written.

    A checksum or a seal does not match, it has the name of another step, a file is missing or too short,
    and no disk, device or memory says that it failed.
    """


Place = tuple[
    int, int, Index
]  # of a tile: the process that writes it, its first byte in that file, the part
Tiles = dict[str, Sequence[Place]]  # of each array


class Description(NamedTuple):
    """The content of ``about.json``.

    Attributes:
      step: the name of the folder.
      metric: what `Checkpoints.save` was given, a number.
      data: likewise, anything JSON can hold.
      leaves: by name, with checksums.
      tiles: by the names of the leaves.
    """

    step: int
    metric: float | None
    data: Any
    leaves: dict[str, ArrayInfo]
    tiles: Tiles


# --- Folders


class Listing(NamedTuple):
    """The entries of a folder of checkpoints.

    Attributes:
      steps: the steps with a checkpoint, in order.
      unfinished: names of folders that are being written or deleted, or were when their process ended.
      others: names that are not a checkpoint's.
    """

    steps: list[int]
    unfinished: list[str]
    others: list[str]


def listing(directory: Path) -> Listing:
    """Lists a folder by names only: one call of the system for many entries."""
    entries = Listing([], [], [])
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as scanned:  # not made yet
        for entry in scanned:
            name = entry.name
            if _STEP.fullmatch(name) and entry.is_dir():
                entries.steps.append(int(name))
            elif _UNFINISHED.fullmatch(name):
                entries.unfinished.append(name)
            elif not (_OURS.fullmatch(name) or name.startswith(".") or name in _OF_SYSTEMS):
                entries.others.append(name)
    entries.steps.sort()
    return entries


def check_directory(directory: str | os.PathLike[str]) -> tuple[Path, list[int]]:
    """The folder of a run, and the steps there; raises ``ValueError`` for what cannot be one."""
    given = os.fspath(directory)
    if not given:
        raise ValueError("directory='' is no folder: give its name, or '.' for this one")
    if re.match(r"[A-Za-z][\w+.-]*:/", given):
        raise ValueError(
            f"directory={given!r} is a URL, and checkpoints are files of a folder: mount the store and "
            "give the folder where it is mounted"
        )
    if given.startswith("~"):
        raise ValueError(
            f"directory={given!r} begins with ~, which only a shell knows: give "
            f"os.path.expanduser({given!r})"
        )
    path = Path(given).absolute()
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file: give a folder for the checkpoints")
    entries = listing(path)
    if entries.others and not (entries.steps or entries.unfinished):
        names = ", ".join(map(repr, sorted(entries.others)[:3]))
        raise ValueError(
            f"{path} is no folder of checkpoints, it holds {names}: give an empty folder, one that is not "
            "there yet, or one with checkpoints"
        )
    return path, entries.steps


def set_aside(folder: Path, why: str) -> None:
    """Renames a checkpoint to ``<step>.<why>``, so that its step is free; its readers may go on."""
    for number in itertools.count(1):
        other = Path(f"{folder}.{why}{f'-{number}' if number > 1 else ''}")
        if not other.exists():
            folder.rename(other)
            return


def remove(folder: Path) -> str:
    """Deletes a checkpoint or an unfinished one; returns a warning where it cannot, else ""."""
    try:
        if folder.suffix == PART:
            folder = folder.rename(folder.with_suffix(GONE))
        elif folder.suffix != GONE:  # no reader shall see a part of it
            folder = folder.rename(_unique(folder, GONE))
        shutil.rmtree(folder)
    except FileNotFoundError:
        return ""  # another process was faster
    except OSError as error:
        return f"{folder} cannot be removed ({error}), and the next save tries again"
    return ""


def _unique(folder: Path, suffix: str) -> Path:
    return Path(f"{folder}.{uuid.uuid4().hex[:12]}{suffix}")


# --- Unfinished checkpoints


def begin(folder: Path) -> tuple[Path, int]:
    """Makes the unfinished folder of a checkpoint.

    Returns:
      The folder, and a lock on it that ends with this process.
    """
    while True:
        # With this name until it has a lock: what a process leaves that dies before, any save deletes.
        made = _unique(folder, GONE)
        made.mkdir()
        with contextlib.suppress(FileNotFoundError):  # another save was as fast as that
            lock = _lock(made)
            unfinished = made.with_suffix(PART)
            made.rename(unfinished)
            return unfinished, lock


def _lock(unfinished: Path) -> int:
    lock = os.open(unfinished / LOCK, os.O_CREAT | os.O_RDWR, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, _machine())  # now others may trust the lock
    except OSError:
        pass  # a disk without locks: others go by time
    return lock


def is_left(unfinished: Path, new: Path, seconds: float) -> bool:
    """True for an unfinished checkpoint that no process writes any more, and which may be deleted.

    Args:
      unfinished: written by any process of any machine.
      new: one that was made just now: the clock is that of the disk.
      seconds: the age from which one counts that another machine wrote, or that has no lock.
    """
    if unfinished.suffix == GONE:
        return True
    try:
        with _open(unfinished / LOCK, "r+b") as lock:
            here = lock.read() == _machine()  # machines that share a disk may not share its locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if here:
                return True
    except BlockingIOError:
        return False
    except OSError:
        pass
    try:
        times = [unfinished.stat().st_mtime, *(x.stat().st_mtime for x in os.scandir(unfinished))]
        return new.stat().st_mtime - max(times) > seconds
    except OSError:
        return False  # it is deleted just now, has become a checkpoint, or is another user's


def _open(path: Path, mode: str = "rb") -> IO[bytes]:
    # A pipe without a writer would wait for one.
    return open(path, mode, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))


def _machine() -> bytes:
    """An id of this start of this machine; processes with the same id share locks."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes()


# --- Writing


def assign_tiles(arrays: Mapping[str, jax.Array]) -> tuple[Tiles, dict[int, int]]:
    """Assigns each tile to one process that holds it; the same in all processes.

    Returns:
      The tiles, and for each process the size of its file.
    """
    assigned: Tiles = {}
    sizes: collections.Counter[int] = collections.Counter()
    turn = itertools.count()
    for name, x in sorted(arrays.items()):
        parts = []
        for index, processes in sorted(tiles.processes_of(x).items()):
            process = sorted(processes)[next(turn) % len(processes)]
            parts.append((process, sizes[process], index))
            sizes[process] += math.prod(shape_of(index)) * x.dtype.itemsize
        assigned[name] = parts
    return assigned, sizes


def write_arrays(unfinished: Path, pieces: Sequence[np.ndarray]) -> None:
    """Writes the file of this process, and gives it its name when it was read back."""
    if not pieces:
        return
    path = unfinished / f"{jax.process_index()}{ARRAYS}{PART}"
    flat = [tiles.bytes_of(x) for x in pieces]
    with path.open("xb") as file:
        for x in flat:
            file.write(x.data)
        _flush(file)
    with path.open("rb") as file:
        for x in flat:
            for start in range(0, len(x), BLOCK):
                block = x[start : start + BLOCK]
                if not np.array_equal(np.frombuffer(file.read(len(block)), np.uint8), block):
                    raise OSError(errno.EIO, f"{path.name} does not hold what was written to it")
    path.rename(path.with_suffix(""))


def _flush(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def finish(unfinished: Path, folder: Path, about: str, sizes: Mapping[int, int]) -> None:
    """Gives a checkpoint its name, and looks at it once more under that name.

    Args:
      unfinished: written by all processes.
      folder: its name from now on.
      about: its description.
      sizes: the sizes of its files, by their processes.
    """
    with (unfinished / ABOUT).open("x") as file:
        file.write(about)
        _flush(file)
    _flush_entries(unfinished)
    _check_written(unfinished, about, sizes)
    (unfinished / LOCK).unlink()
    unfinished.rename(folder)
    _flush_entries(folder.parent)
    try:
        _check_written(folder, about, sizes)
    except OSError:
        if unfinished.exists() or folder.exists():  # else another run that saves here deleted it
            raise


def _check_written(folder: Path, about: str, sizes: Mapping[int, int]) -> None:
    """Raises ``OSError`` unless a folder is seen where it should be, with what was written."""
    for process, size in sizes.items():
        try:
            on_disk = (folder / f"{process}{ARRAYS}").stat().st_size
        except FileNotFoundError:
            problem = f"process {process} did not write its part, and its error says why"
            raise OSError(errno.EIO, problem) from None
        if on_disk != size:
            problem = f"the part of process {process} has {on_disk} bytes in place of {size}"
            raise OSError(errno.EIO, problem)
    with os.scandir(folder.parent) as entries:
        seen = any(entry.name == folder.name for entry in entries)
    if not seen or (folder / ABOUT).read_bytes() != about.encode():
        raise OSError(errno.EIO, "its description is not what was written")


def _flush_entries(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a disk that knows no such call
            raise
    finally:
        os.close(handle)


# --- Descriptions


def seal(body: Any) -> str:
    """A description as a text, with a checksum over all of it."""
    return json.dumps({"format": FORMAT, "body": body, "sha256": _digest(FORMAT, body)})


def _digest(version: Any, body: Any) -> str:
    # Through JSON once: keys become strings.
    body = json.loads(json.dumps(body))
    text = json.dumps([version, body], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_about(folder: Path) -> Description:
    """Reads the description of a checkpoint.

    Raises:
      Damaged: if it is not as it was written, or is that of another step.
      ValueError: if it is of another format.
    """
    this = f"this version of lioncub_jax reads format {FORMAT}: read it with"
    try:
        with _open(folder / ABOUT) as file:
            content = file.read()
    except FileNotFoundError:
        if not (folder / "about").is_dir():  # as formats 1 to 3 have it
            raise
        raise ValueError(
            f"checkpoint {folder} has a format before {FORMAT}, and {this} version 0.3 or earlier, that "
            "wrote it"
        ) from None
    try:
        sealed = json.loads(content)
        version, body, sha256 = sealed["format"], sealed["body"], sealed["sha256"]
        whole = _digest(version, body) == sha256
    except (ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise Damaged("its description is not as it was written")
    if version != FORMAT:
        raise ValueError(
            f"checkpoint {folder} has format {version}, and {this} the version that wrote it"
        )
    try:
        about = _parse_body(body)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Damaged(f"its description is sealed and cannot be ({error!r})") from None
    if str(about.step) != folder.name:
        raise Damaged(
            f"it is the checkpoint of step {about.step} under another name; give it its name back"
        )
    return about


def _parse_body(body: Any) -> Description:
    """Raises some error unless all is there, by its type."""
    leaves, parts = {}, {}
    for name, fields in body["leaves"].items():
        leaves[name] = parse(ArrayInfo, fields)
        parse(tuple[int, int], fields[-1])
        parts[name] = parse(tuple[Place, ...], body["tiles"][name])
        if any(len(index) != leaves[name].abstract().ndim for _, _, index in parts[name]):
            raise ValueError(f"tiles of {name} have another number of dimensions")
    return Description(body["step"], body["metric"], body["data"], leaves, parts)


# --- Reading


def read_array(folder: Path, parts: Sequence[Place], place: jax.ShapeDtypeStruct) -> jax.Array:
    """Reads an array; this process reads what its devices hold.

    Args:
      folder: of the checkpoint.
      parts: the tiles of the array.
      place: its shape, dtype and sharding.
    """
    read: dict[Index, np.ndarray] = {}  # copies are read once

    def shard(slices: Any) -> np.ndarray:
        index = index_of(slices, place.shape)
        if index not in read:
            read[index] = _read_part(folder, parts, index, jnp.dtype(place.dtype))
        return read[index]

    return jax.make_array_from_callback(place.shape, place.sharding, shard)


def _read_part(folder: Path, parts: Sequence[Place], wanted: Index, dtype: np.dtype) -> np.ndarray:
    read = np.empty(shape_of(wanted), dtype)
    for process, offset, index in parts:
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, index, strict=True)]
        if any(start >= end for start, end in both):
            continue
        rows = *both[:1], *index[1:]  # of a tile those of its first dimension that are wanted
        size = math.prod(shape_of(rows)) * dtype.itemsize
        if index:
            offset += (rows[0][0] - index[0][0]) * size // shape_of(rows)[0]
        path = folder / f"{process}{ARRAYS}"
        with _open(path) as file:
            file.seek(offset)
            content = file.read(size)
        if len(content) < size:
            raise Damaged(f"{path.name} is too short")
        tile = np.frombuffer(content, dtype).reshape(shape_of(rows))
        read[_slices(both, wanted)] = tile[_slices(both, rows)]
    return read


def _slices(part: Sequence[tuple[int, int]], whole: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(part, whole, strict=True))
