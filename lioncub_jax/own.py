"""Files that are run or gone on from: written whole or not at all, sealed, and by no other user.

A sealed file begins with the SHA-256 of all that follows.
"""

import hashlib
import os
import tempfile
from pathlib import Path

PART = ".part"  # behind the name of a file that is being written
DIGEST = 32  # bytes of a SHA-256


def check(name: str, found: os.stat_result) -> None:
    """Raises ``ValueError`` for a folder or a file that another user may write."""
    if found.st_uid != os.getuid():
        raise ValueError(
            f"{name} belongs to another user, who could change what runs here: give a folder of your own"
        )
    if found.st_mode & 0o022:  # also where an access control list lets others in
        raise ValueError(
            f"{name} has mode {found.st_mode & 0o777:o}: others may write it and change what runs here. "
            "Take that from them (chmod go-w), or give a folder of your own"
        )


def write(path: Path, *pieces: bytes) -> None:
    """Whole or not at all, for this user alone: under another name first, since a process may be killed."""
    # A name of its own: two runs may share a folder.
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=path.name, suffix=PART, delete=False
    ) as file:
        try:
            for piece in pieces:
                file.write(piece)
            file.flush()
        except BaseException:
            os.unlink(file.name)
            raise
    os.replace(file.name, path)


def seal(path: Path, content: bytes) -> None:
    """Writes a sealed file, as `write`."""
    write(path, hashlib.sha256(content).digest(), content)


def read(path: Path) -> memoryview:
    """What is in a sealed file that no other user may write; raises as `check`, and for another content.

    It is the open file that is looked at. Who may rename a folder above it can put another file in its
    place, but none that this user did not write: so folders above are not looked at.
    """
    with path.open("rb") as file:
        check(str(path), os.fstat(file.fileno()))
        kept = memoryview(file.read())
    if hashlib.sha256(kept[DIGEST:]).digest() != kept[:DIGEST]:
        raise ValueError("it is not as it was written")
    return kept[DIGEST:]
