"""Files that are run or gone on from, which no other user may write."""

import os
from pathlib import Path


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


def read(path: Path) -> bytes:
    """What is in a file that no other user may write; raises as `check`.

    It is the open file that is looked at. Who may rename a folder above it can put another file in its
    place, but none that this user did not write: so folders above are not looked at.
    """
    with path.open("rb") as file:
        check(str(path), os.fstat(file.fileno()))
        return file.read()
