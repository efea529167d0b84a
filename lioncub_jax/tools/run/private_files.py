"""Private files of this user, in folders that no other user can change.

A folder is opened from ``/`` down, by the descriptor of the folder above, and no link is followed. Each
belongs to root or to this user. No other user may write it, or it is sticky, as ``/tmp`` is: there others
can add an entry and change none. A sealed file begins with the SHA-256 of its name and of what follows.
"""

import contextlib
import hashlib
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lioncub_jax.checkpoint.files import PART

DIGEST = 32  # bytes of a SHA-256


@contextlib.contextmanager
def opened(folder: Path, make: bool = False) -> Iterator[int]:
    """Opens a private folder of this user.

    Args:
      folder: an absolute path.
      make: makes the folders that are missing, as private ones.

    Returns:
      A context manager of a descriptor.

    Raises:
      ValueError: for a link, a file, or a folder that another user owns or can change.
      FileNotFoundError: if it is missing.
    """
    path = Path("/")
    with contextlib.ExitStack() as stack:
        here = _open("/", stack)
        for name in folder.parts[1:]:
            _check(path, here, may_be_sticky=True)
            path /= name
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=here)
            try:
                here = _open(name, stack, here)
            except NotADirectoryError:
                raise ValueError(
                    f"{path} is a file or a link: give a folder, by its path without links"
                ) from None
        _check(path, here)
        yield _open(".", stack, here, os.O_RDONLY)


def _open(
    name: str, stack: contextlib.ExitStack, above: int | None = None, how: int = os.O_PATH
) -> int:
    # O_PATH: folders on the way need not be readable.
    folder = os.open(name, how | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    stack.callback(os.close, folder)
    return folder


def _check(path: Path | str, file: int, may_be_sticky: bool = False) -> None:
    """Raises ``ValueError`` for what another user owns or may write."""
    about = os.fstat(file)
    if about.st_uid not in (0, os.geteuid()):
        raise ValueError(
            f"{path} belongs to another user, who can change what is read here: give a folder of your own"
        )
    sticky = may_be_sticky and about.st_mode & stat.S_ISVTX
    if about.st_mode & 0o022 and not sticky:  # also by an access control list
        raise ValueError(
            f"{path} has mode {stat.S_IMODE(about.st_mode):o}: others may write it and change what is read "
            "here. Take that from them (chmod go-w), or give a folder of your own"
        )


def write(name: str, *pieces: Any, folder: int | None = None) -> None:
    """Writes a private file, whole or not at all: first under another name."""
    part = f"{name}.{secrets.token_hex(8)}{PART}"  # its own: two runs may share a folder
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    try:
        with open(file, "wb") as opened_file:
            opened_file.writelines(pieces)
        os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(part, dir_fd=folder)
        raise


def seal(folder: int, name: str, *pieces: Any) -> None:
    """Writes a sealed file, as `write`."""
    write(name, _digest(name, *pieces), *pieces, folder=folder)


def read(folder: int, name: str) -> memoryview:
    """Reads a sealed file of this user; raises ``ValueError`` for another one or another content."""
    # A pipe without a writer would wait for one.
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    with open(file, "rb") as opened_file:
        _check(name, file)
        content = memoryview(opened_file.read())
    if _digest(name, content[DIGEST:]) != content[:DIGEST]:
        raise ValueError(f"{name} is not as it was written")
    return content[DIGEST:]


def _digest(name: str, *pieces: Any) -> bytes:
    digest = hashlib.sha256(name.encode() + b"\0")
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def remove(folder: int, names: Iterable[object]) -> None:
    """Deletes files; another process may have been faster."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(str(name), dir_fd=folder)
