"""Checkpoints as files: the bytes of arrays, and a description that is sealed.

A folder ``<step>`` has a file ``<process>.arrays`` of each process that saved, and ``about.json``. Until
all of it was read back the folder is a half, ``<step>.<12 hex digits>.part``; then it gets its name.
So whoever sees a checkpoint sees a whole one, and who only reads has nothing to clean up. What is to go
is called ``.gone`` first, which any process that saves may take away.
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

from lioncub_jax.checkpoint import leaves, private_files, tiles
from lioncub_jax.checkpoint.snapshot_files import typed
from lioncub_jax.checkpoint.tiles import Index, index_of, shape_of

FORMAT = 4  # 1 to 3: versions 0.1 to 0.3, by orbax
ABOUT, ARRAYS, LOCK = "about.json", ".arrays", "lock"
RUN = "run"  # a file beside the checkpoints: the name of their run
BLOCK = 1 << 24  # bytes that are compared at a time
_STEP = re.compile("0|[1-9][0-9]*")
GONE = ".gone"
_HALF = re.compile(rf"({_STEP.pattern})\.[0-9a-f]{{12}}(\{private_files.PART}|\{GONE})")
_OURS = re.compile(
    rf"{RUN}(.*\{private_files.PART})?|({_STEP.pattern})(\.(damaged|abandoned)(-[0-9]+)?|\.orbax-checkpoint-tmp.*)?"
)
_OF_SYSTEMS = {"lost+found", "@eaDir"}  # beside names that begin with a dot


class Damaged(ValueError):
    """A checkpoint that is not as it was written.

    A checksum or a seal does not match, it has the name of another step, a file is missing or too short,
    and no disk, device or memory says that it failed.
    """


# By the names of arrays their tiles: whose file, the first byte there, and which part.
Plan = dict[str, list[tuple[int, int, Index]]]


# --- Folders


class Listing(NamedTuple):
    """What is in a folder of checkpoints.

    Attributes:
      steps: of which there is a checkpoint, in order.
      halves: names of folders that are being written or taken away, or were when their process ended.
      others: names that are not a checkpoint's.
    """

    steps: list[int]
    halves: list[str]
    others: list[str]


def listing(directory: Path) -> Listing:
    """Looks at names alone: one call of the system for many entries."""
    found = Listing([], [], [])
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                name = entry.name
                if _STEP.fullmatch(name) and entry.is_dir():
                    found.steps.append(int(name))
                elif _HALF.fullmatch(name):
                    found.halves.append(name)
                elif not (_OURS.fullmatch(name) or name.startswith(".") or name in _OF_SYSTEMS):
                    found.others.append(name)
    except FileNotFoundError:
        pass  # not made yet
    found.steps.sort()
    return found


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
    found = listing(path)
    if found.others and not (found.steps or found.halves or (path / RUN).exists()):
        raise ValueError(
            f"{path} is no folder of checkpoints, it holds "
            f"{', '.join(map(repr, sorted(found.others)[:3]))}: give an empty folder, one that is not "
            "there yet, or one with checkpoints"
        )
    return path, found.steps


def set_aside(folder: Path, why: str) -> None:
    """Renames a checkpoint to ``<step>.<why>``, so that its step is free; somebody may still read it."""
    for number in itertools.count(1):
        other = Path(f"{folder}.{why}{f'-{number}' if number > 1 else ''}")
        if not other.exists():
            folder.rename(other)
            return


def remove(folder: Path) -> str:
    """Takes a checkpoint or a half away, and says what keeps it from that."""
    try:
        if folder.suffix == private_files.PART:
            folder = folder.rename(folder.with_suffix(GONE))
        elif folder.suffix != GONE:  # nobody shall see a part of it
            folder = folder.rename(_named(folder, GONE))
        shutil.rmtree(folder)
    except FileNotFoundError:
        return ""  # another process was faster
    except OSError as problem:
        return f"{folder} cannot be removed ({problem}), and the next save tries again"
    return ""


def _named(folder: Path, suffix: str) -> Path:
    return Path(f"{folder}.{uuid.uuid4().hex[:12]}{suffix}")


# --- Halves


def new_half(folder: Path) -> tuple[Path, int]:
    """Makes the half of a checkpoint, with a lock that the end of this process opens; and the lock."""
    while True:
        made = _named(
            folder, GONE
        )  # who dies before there is a lock leaves what any save takes away
        made.mkdir()
        with contextlib.suppress(FileNotFoundError):  # another save was as fast as that
            lock = _locked(made)
            half = made.with_suffix(private_files.PART)
            made.rename(half)
            return half, lock


def _locked(half: Path) -> int:
    lock = os.open(half / LOCK, os.O_CREAT | os.O_RDWR, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, _machine())  # now others may trust the lock
    except OSError:
        pass  # a disk without locks: others go by time alone
    return lock


def is_left(half: Path, like: Path, seconds: float) -> bool:
    """Whether nobody writes to a half any more, or it is to go.

    Args:
      half: which; of any process on any machine.
      like: a half that was made just now: the clock is that of the disk.
      seconds: after which one is given up that another machine has written, or that has no lock.
    """
    if half.suffix == GONE:
        return True
    try:
        with _opened(half / LOCK, "r+b") as lock:
            here = lock.read() == _machine()  # machines that share a disk may not share its locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if here:
                return True
    except BlockingIOError:
        return False
    except OSError:
        pass
    try:
        times = [half.stat().st_mtime, *(x.stat().st_mtime for x in os.scandir(half))]
        return like.stat().st_mtime - max(times) > seconds
    except OSError:
        return False  # it goes, has become a checkpoint, or is another user's


def _opened(path: Path, mode: str = "rb") -> IO[bytes]:
    # A pipe without a writer would wait for one.
    return open(path, mode, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))


def _machine() -> bytes:
    """This start of this machine; who shares it shares locks."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes()


# --- Writing


def plan(arrays: Mapping[str, jax.Array]) -> tuple[Plan, dict[int, int]]:
    """What each process writes, each part once, and the sizes of their files; the same in all."""
    found: Plan = {}
    ends: collections.Counter[int] = collections.Counter()
    turn = itertools.count()
    for name, x in sorted(arrays.items()):
        found[name] = []
        for index, processes in sorted(tiles.holders(x).items()):
            process = sorted(processes)[next(turn) % len(processes)]
            found[name].append((process, ends[process], index))
            ends[process] += math.prod(shape_of(index)) * x.dtype.itemsize
    return found, ends


def copied(arrays: Mapping[str, jax.Array], planned: Plan) -> list[np.ndarray]:
    """What this process writes, in its order."""
    mine = []
    for name, places in planned.items():
        mine += [(name, part) for process, _, part in places if process == jax.process_index()]
    return [*tiles.copied(arrays, mine).values()]


def write_arrays(half: Path, pieces: Sequence[np.ndarray]) -> None:
    """Writes the file of this process, and gives it its name when it was read back."""
    if not pieces:
        return
    path = half / f"{jax.process_index()}{ARRAYS}{private_files.PART}"
    flat = [*map(tiles.bytes_of, pieces)]
    with path.open("xb") as file:
        for x in flat:
            file.write(x.data)
        _to_disk(file)
    with path.open("rb") as file:
        for x in flat:
            for start in range(0, len(x), BLOCK):
                block = x[start : start + BLOCK]
                if not np.array_equal(np.frombuffer(file.read(len(block)), np.uint8), block):
                    raise OSError(errno.EIO, f"{path.name} does not hold what was written to it")
    path.rename(path.with_suffix(""))


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def complete(half: Path, folder: Path, about: str, wanted: Mapping[int, int]) -> None:
    """Makes a half a checkpoint, and looks at it once more under its name.

    Args:
      half: what all processes have written.
      folder: its name from now on.
      about: its description.
      wanted: the sizes of its files, by their processes.
    """
    with (half / ABOUT).open("x") as file:
        file.write(about)
        _to_disk(file)
    _entries_to_disk(half)
    _look(half, about, wanted)
    (half / LOCK).unlink()
    half.rename(folder)
    _entries_to_disk(folder.parent)
    try:
        _look(folder, about, wanted)
    except OSError:
        if half.exists() or folder.exists():  # else another run that saves here took it away
            raise


def _look(folder: Path, about: str, wanted: Mapping[int, int]) -> None:
    """Raises ``OSError`` unless a folder is seen where it should be, with what was written."""
    for process, size in wanted.items():
        try:
            found = (folder / f"{process}{ARRAYS}").stat().st_size
        except FileNotFoundError:
            raise OSError(
                errno.EIO, f"process {process} did not write its part, and its error says why"
            ) from None
        if found != size:
            raise OSError(
                errno.EIO, f"the part of process {process} has {found} bytes in place of {size}"
            )
    with os.scandir(folder.parent) as entries:
        seen = any(entry.name == folder.name for entry in entries)
    if not seen or (folder / ABOUT).read_bytes() != about.encode():
        raise OSError(errno.EIO, "its description is not what was written")


def _entries_to_disk(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.ENOTSUP):  # a disk that knows no such call
            raise
    finally:
        os.close(handle)


# --- Descriptions


def sealed(body: Any) -> str:
    """A description as a text, with a checksum over all of it."""
    return json.dumps({"format": FORMAT, "body": body, "sha256": _digest(FORMAT, body)})


def _digest(version: Any, body: Any) -> str:
    # Through JSON once: keys become strings.
    body = json.loads(json.dumps(body))
    text = json.dumps([version, body], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_about(folder: Path) -> dict[str, Any]:
    """The description of a checkpoint.

    Raises:
      Damaged: if it is not as it was written, or is that of another step.
      ValueError: if it is of another format.
    """
    try:
        with _opened(folder / ABOUT) as file:
            content = file.read()
    except FileNotFoundError:
        if not (folder / "about").is_dir():  # as formats 1 to 3 have it
            raise
        raise ValueError(
            f"checkpoint {folder} has a format before {FORMAT}, and this version of lioncub_jax reads "
            f"format {FORMAT}: read it with version 0.3 or earlier, that wrote it"
        ) from None
    try:
        about = json.loads(content)
        version, body, seal = about["format"], about["body"], about["sha256"]
        whole = _digest(version, body) == seal
    except (ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise Damaged("its description is not as it was written")
    if version != FORMAT:
        raise ValueError(
            f"checkpoint {folder} has format {version}, and this version of lioncub_jax reads format "
            f"{FORMAT}: read it with the version that wrote it"
        )
    try:
        _check_body(body)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Damaged(f"its description is sealed and cannot be ({error!r})") from None
    if str(body["step"]) != folder.name:
        raise Damaged(
            f"it is the checkpoint of step {body['step']} under another name; give it its name back"
        )
    return body


def _check_body(body: Any) -> None:
    """Raises some error unless all is there that is read of it, by its type."""
    saved = leaves.from_json(body["leaves"])
    body["step"], body["metric"], body["data"]
    for name, leaf in saved.items():
        planned = typed(tuple[tuple[int, int, Index], ...], body["tiles"][name])
        if any(len(index) != leaf.at().ndim for _, _, index in planned):
            raise ValueError(f"tiles of {name} have another number of dimensions")
        typed(tuple[tuple[int, ...], tuple[int, int]], [[*leaf.shape], leaf.sums])


# --- Reading


def read_array(folder: Path, planned: Sequence[Any], place: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of which this process reads what its devices hold.

    Args:
      folder: of the checkpoint.
      planned: the tiles of the array, as JSON gives them back.
      place: its shape, dtype and sharding.
    """
    parts: dict[Index, np.ndarray] = {}  # copies are read once

    def part(slices: Any) -> np.ndarray:
        index = index_of(slices, place.shape)
        if index not in parts:
            parts[index] = _read_part(folder, planned, index, jnp.dtype(place.dtype))
        return parts[index]

    return jax.make_array_from_callback(place.shape, place.sharding, part)


def _read_part(folder: Path, planned: Sequence[Any], wanted: Index, dtype: np.dtype) -> np.ndarray:
    found = np.empty(shape_of(wanted), dtype)
    for process, offset, index in planned:
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, index, strict=True)]
        if any(start >= end for start, end in both):
            continue
        rows = *both[:1], *index[1:]  # of a tile those of its first dimension that are wanted
        size = math.prod(shape_of(rows)) * dtype.itemsize
        if index:
            offset += (rows[0][0] - index[0][0]) * size // shape_of(rows)[0]
        path = folder / f"{process}{ARRAYS}"
        with _opened(path) as file:
            file.seek(offset)
            read = file.read(size)
        if len(read) < size:
            raise Damaged(f"{path.name} is too short")
        tile = np.frombuffer(read, dtype).reshape(shape_of(rows))
        found[_inside(both, wanted)] = tile[_inside(both, rows)]
    return found


def _inside(part: Sequence[Any], whole: Sequence[Any]) -> tuple[slice, ...]:
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(part, whole, strict=True))
