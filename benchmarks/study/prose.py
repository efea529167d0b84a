"""Text for the study, as bytes, with the place of each document, so that workers can get whole ones.

Of a folder of texts the last tenth of each is for validation; of Python's standard library, which
is there without a folder, a tenth of the files.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from gpt import corpus

SUFFIXES = (".txt", ".md", ".rst")


class Prose(NamedTuple):
    name: str
    train: np.ndarray  # uint8[n]
    validation: np.ndarray  # uint8[m]
    documents: tuple[tuple[int, int], ...]  # (start, end) in `train`, which they fill


def load(folder: Path | None, context: int = 1) -> Prose:
    """The text of a folder, or Python's standard library for None.

    Args:
      folder: holds the texts, ``*.txt``, ``*.md`` or ``*.rst``; folders inside it are not looked into.
      context: training and validation must each hold one window, so many bytes and the one after.

    Returns:
      Where a folder's documents are the first nine tenths of its files, in the order of their names.

    Raises:
      ValueError: for a folder that is missing or has no texts, a file that is empty or cannot be read,
        and for less text than a window.
    """
    if folder is None:
        name, files = corpus.STANDARD_LIBRARY, corpus.standard_library_files()
        train, validation = corpus.files_apart(files)
    else:
        name, files = folder.resolve().name, texts(folder)
        train, validation = corpus.ends_apart(files)
    prose = Prose(name, corpus.joined(train), corpus.joined(validation), documents(train))
    check_length(prose, folder or name, context)
    return prose


def texts(folder: Path) -> dict[str, bytes]:
    """The texts of a folder by name, in the order of the names."""
    looked_for = "texts (" + ", ".join(f"*{suffix}" for suffix in SUFFIXES) + ")"
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give one that holds {looked_for}")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise ValueError(f"{folder} holds no {looked_for}; folders inside it are not looked into")
    return {path.name: read(path) for path in paths}


def read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; texts are files that can be read") from error
    if not content:
        raise ValueError(f"{path}: the file is empty; remove it, or put its text there")
    return content


def documents(contents: list[bytes]) -> tuple[tuple[int, int], ...]:
    """Where each lies in ``corpus.joined(contents)``, with the line feed that follows it."""
    ends = np.cumsum([len(content) + 1 for content in contents]).tolist()
    ends[-1] -= 1  # no line feed follows the last
    places = zip([0, *ends[:-1]], ends, strict=True)
    return tuple((start, end) for start, end in places if start < end)


def check_length(prose: Prose, given: Path | str, context: int) -> None:
    if min(prose.train.size, prose.validation.size) <= context:
        raise ValueError(
            f"{given}: too short for a context of {context} bytes, since training and validation need "
            f"{context + 1} bytes each and have {prose.train.size} and {prose.validation.size}; give "
            f"about {10 * (context + 1)} bytes or more, or a shorter context"
        )
