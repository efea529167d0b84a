"""The background part of a save: each process writes its file, and the first finishes the checkpoint."""

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from lioncub_jax.checkpoint import files
from lioncub_jax.checkpoint.agreement import barrier, first_line


class Save(NamedTuple):
    """A checkpoint that is to be written.

    Attributes:
      folder: its name when it is complete.
      unfinished: its name until then.
      lock: on ``unfinished``, held by process 0.
      about: its description.
      sizes: the sizes of its files, by their processes.
      pieces: what this process writes.
    """

    folder: Path
    unfinished: Path
    lock: int
    about: str
    sizes: dict[int, int]
    pieces: Sequence[np.ndarray]


def commit(save: Save, timeout: int) -> None:
    """Writes and finishes a checkpoint, in all processes.

    Raises:
      OSError: in all processes, where it fails in one; then nothing is left of the checkpoint.
    """
    first = jax.process_index() == 0
    try:
        error = _write_own(save)
        barrier(save.unfinished.name, timeout)  # a process that failed comes too: none waits for it
        if error:
            raise error
        if first:
            files.finish(save.unfinished, save.folder, save.about, save.sizes)
        else:
            _wait_for_first(save, timeout)
    except Exception as error:
        if first:  # the others wait until it is deleted
            files.remove(save.unfinished)
        raise save_error(save.folder, error) from error
    finally:
        if first:
            os.close(save.lock)


def _write_own(save: Save) -> Exception | None:
    try:
        files.write_arrays(save.unfinished, save.pieces)
    except Exception as error:
        return error
    return None


def _wait_for_first(save: Save, timeout: int) -> None:
    end = time.monotonic() + timeout
    while save.unfinished.exists():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.02)
    if not (save.folder / files.ABOUT).exists():
        raise OSError(errno.EIO, "process 0 did not complete it, and its error says why")


def save_error(folder: Path, error: Exception) -> OSError:
    """The error of a save that failed."""
    why = (isinstance(error, OSError) and error.strerror) or first_line(error)
    if isinstance(error, TimeoutError):
        why = "another process did not write its part in time, and its error says why"
    return OSError(
        f"checkpoint {folder} was not written ({why}), and those before it stay: free or mend that "
        "disk, and start again from the newest"
    )
