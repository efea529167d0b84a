"""Leaves in files of orbax, with a description and checksums beside them.

A step is a folder of ``orbax.checkpoint.CheckpointManager``. Its item ``state`` has the leaves, for any
program of orbax. ``about.lioncub`` is ours, because orbax restores a changed bit without a word.
"""

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.tree import from_flat_dict

from lioncub_jax.checkpoint.convert import Damaged, Leaves, named, restored
from lioncub_jax.mesh.checksum import host_checksum
from lioncub_jax.mesh.placement import Workers

FORMAT = 5  # 1 to 4: versions 0.1 to 0.4
ABOUT, STATE = "about.lioncub", "state"
PART = 2**25  # bytes that are read back at once, and whole leaves
_KINDS: tuple[Any, ...] = (dict, list, tuple)
# No type of orbax's errors tells damage from a disk or a network that fails, but these words do.
_FAILS = re.compile(
    "OS error|UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|RESOURCE_EXHAUSTED|ABORTED"
)


def restore(item: str | os.PathLike[str], like: Any, workers: Workers) -> Any:
    """Reads a `portable` state that any program saved by orbax, onto any mesh and any number of workers.

    Args:
      item: the folder of the item, such as ``manager.directory / "100" / "default"``.
      like: a fresh state of the kind that was saved, on the present mesh, such as that of
        `init_state`; or a ``ShapeDtypeStruct`` with its sharding for each array. What lies on no mesh comes
        back as the same everywhere.
      workers: the workers, on that mesh. Where there are more or fewer than were saved, each gets the mean
        of what was each worker's own.

    Returns:
      A state like ``like``.

    Raises:
      Damaged: a ``ValueError``, where a leaf cannot be read. Checksums are compared by
        ``lc.Checkpoints`` alone.
      ValueError: for leaves of another model or optimizer.
      Exception: a file, a permission or the memory that fails is raised as it is.

    Example:
      >>> import tempfile, jax.numpy as jnp, lioncub_jax as lc, orbax.checkpoint as ocp
      >>> workers = lc.Workers.one_per_device()
      >>> state = lc.init_state(lc.lion_cub(1e-3, workers=workers), {"w": jnp.ones(3)}, workers)
      >>> folder = tempfile.mkdtemp() + "/item"
      >>> ocp.PyTreeCheckpointer().save(folder, lc.checkpoint.portable(state, workers))
      >>> lc.checkpoint.restore(folder, state, workers).params["w"].shape
      (3,)

    Source: this library.
    """
    folder = check_directory(item)
    if not folder.exists():
        raise FileNotFoundError(f"there is no folder {folder}")
    with damage("its description"):
        tree = ocp.PyTreeCheckpointHandler().metadata(folder).tree
    leaves = named(tree, lambda x: hasattr(x, "shape"))
    saved = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in leaves}
    return restored(like, workers, saved, lambda x: read(folder, x))


def check_directory(given: str | os.PathLike[str]) -> epath.Path:
    """The folder of a run; raises ``ValueError`` where orbax cannot write, or read what it wrote."""
    text = os.fspath(given)
    if not text or text.startswith("~"):
        raise ValueError(
            f"directory={text!r}: give the name of a folder, '.' for this one, and for ~, which only a "
            "shell knows, os.path.expanduser(directory)"
        )
    if re.match(r"(?!gs://)[A-Za-z][\w+.-]*:/", text):
        raise ValueError(
            f"directory={text!r}: orbax saves to folders and to gs://: mount the bucket, and give the "
            "folder where it is mounted"
        )
    if re.search(r"\[.*\]|\\|[\ud800-\udfff]", text):
        raise ValueError(
            f"directory={text!r}: orbax cannot restore what it saves there: give a name without [..], "
            "backslashes and bytes that are no text"
        )
    path = epath.Path(text if is_store(text) else os.path.abspath(text))
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file: give a folder for the checkpoints")
    return path


def is_store(path: Any) -> bool:
    """True for a folder of an object store."""
    return str(path).startswith("gs://")


# --- Leaves


def read(item: epath.Path, places: Leaves) -> dict[str, Any]:
    """Reads leaves to where they shall lie, None for this host; `Damaged` names one that is unreadable."""
    how = {
        name: ocp.RestoreArgs(restore_type=np.ndarray) if x is None
        else ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, strict=False)
        for name, x in places.items()
    }  # fmt: skip
    plan = ocp.args.PyTreeRestore(
        item=from_flat_dict(dict.fromkeys(how, 0), sep="."),
        restore_args=from_flat_dict(how, sep="."),
        partial_restore=True,
    )
    try:
        with damage(", ".join(places)):
            for path in [] if is_store(item) else Path(item).rglob("*"):
                if not (path.is_file() or path.is_dir()):
                    raise Damaged(
                        f"{path.name} is a pipe or a device, on which a reader would wait"
                    )
            return dict(named(ocp.PyTreeCheckpointHandler().restore(item, args=plan)))
    except Damaged:
        if len(places) == 1:
            raise
        return {name: x for one in places for name, x in read(item, {one: places[one]}).items()}


@contextlib.contextmanager
def damage(what: str) -> Iterator[None]:
    """A context that raises `Damaged` for what is unreadable, unless a disk, network or memory fails."""
    try:
        yield
    except (Damaged, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        missing = isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError))
        is_disk = isinstance(error, OSError) and not missing
        if is_disk or _FAILS.search(f"{error} {error.__cause__}"):
            raise
        raise Damaged(f"{what[:80]} cannot be read: {line_of(error)}") from None


def line_of(error: BaseException) -> str:
    """An error in a line: its type, unless its text says enough, and how its text begins."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, (OSError, Damaged)) else f"{type(error).__name__}: {text}"


# --- Descriptions


class About(NamedTuple):
    """The description of a step.

    Attributes:
      step: the name of its folder.
      data: what was saved beside the state.
      leaves: types by their names.
      sums: two words for each leaf.
    """

    step: int
    data: Any
    leaves: Leaves
    sums: Leaves


def write(folder: epath.Path, about: About) -> None:
    """Reads leaves back, and writes the description beside them; raises ``OSError`` for another leaf."""
    size, parts = 0, dict[int, list[str]]()
    for name, leaf in about.leaves.items():  # a part at a time is in memory
        parts.setdefault(size // PART, []).append(name)
        size += leaf.size * leaf.dtype.itemsize
    for part in parts.values():
        for name, x in read(folder / STATE, dict.fromkeys(part)).items():
            x, leaf = np.asarray(x), about.leaves[name]
            if (x.shape, x.dtype, host_checksum(x)) != (leaf.shape, leaf.dtype, about.sums[name]):
                raise OSError(f"the disk does not hold {name} as it was saved")
    leaves = {n: [x.shape, x.dtype.name, about.sums[n]] for n, x in about.leaves.items()}
    body = json.dumps([about.step, encoded(about.data), leaves])
    with (folder / ABOUT).open("w") as file:
        file.write(sealed(body))
        if not is_store(folder):
            file.flush()
            os.fsync(file.fileno())
    if (folder / ABOUT).read_text() != sealed(body):
        raise OSError("the disk does not hold the description as it was saved")


def sealed(body: str) -> str:
    """A description behind its format and its checksum."""
    return f"{FORMAT} {zlib.crc32(body.encode())}\n{body}"


def described(folder: epath.Path) -> About:
    """Reads the description of a step.

    Raises:
      Damaged: if it is not as it was written, or is that of another step.
      ValueError: if it is of format 4.
    """
    if (folder / "about.json").exists():
        raise ValueError(
            f"checkpoint {folder} has format 4, of version 0.4, and this version reads {FORMAT}: restore "
            "it by 0.4, save its parameters there by orbax, and go on from them"
        )
    if not (epath.Path if is_store(folder) else Path)(folder / ABOUT).is_file():  # nor is a pipe
        raise Damaged("its description is missing")
    with damage("its description"):
        text = (folder / ABOUT).read_text()
        body = text.partition("\n")[2]
        if text != sealed(body):
            raise Damaged("its description is not as it was written")
        step, data, leaves = json.loads(body)
        types = {n: jax.ShapeDtypeStruct(shape, dtype) for n, (shape, dtype, _) in leaves.items()}
        sums = {n: tuple(words) for n, (_, _, words) in leaves.items()}
        about = About(step, decoded(data), types, sums)
    if str(step) != folder.name:
        raise Damaged(f"it is that of step {step} under another name; give it its name back")
    return about


def encoded(x: Any) -> Any:
    """Data as JSON holds it: dicts, lists, tuples and numbers of NumPy say what they are."""
    for kind in _KINDS:
        if isinstance(x, kind):
            return {kind.__name__: [encoded(y) for y in (x.items() if kind is dict else x)]}
    if isinstance(x, np.generic) and not isinstance(x, str):
        return {x.dtype.name: x.item()}
    if x is None or isinstance(x, (str, int, float)):
        return x
    raise TypeError(f"data holds {x!r}: give numbers, texts, lists, tuples and dicts")


def decoded(x: Any) -> Any:
    """Undoes `encoded`."""
    if not isinstance(x, dict):
        return x
    [(name, y)] = x.items()
    for kind in _KINDS:
        if kind.__name__ == name:
            return kind(map(decoded, y))
    return jnp.dtype(name).type(y)
