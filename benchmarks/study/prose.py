"""Text for the study, as bytes.

Of a folder of texts the last tenth of each is for validation; of Python's standard library, which
is there without a folder, a tenth of the files.
"""

from pathlib import Path

from gpt import corpus

SUFFIXES = (".txt", ".md", ".rst")


def load(folder: Path | None, context: int = 1) -> corpus.Corpus:
    """The text of a folder, or Python's standard library for None.

    Args:
      folder: holds the texts, ``*.txt``, ``*.md`` or ``*.rst``; folders inside it are not looked into.
      context: training and validation must each hold one window, so many bytes and the one after.

    Raises:
      ValueError: for a folder that is missing or has no texts, a file that is empty or cannot be read,
        and for less text than a window.
    """
    if folder is None:
        prose = corpus.standard_library()
    else:
        parts = corpus.split_by_position(texts(folder))
        prose = corpus.Corpus(folder.resolve().name, *parts)
    check_length(prose, folder or prose.name, context)
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


def check_length(prose: corpus.Corpus, given: Path | str, context: int) -> None:
    if min(prose.train.size, prose.validation.size) <= context:
        raise ValueError(
            f"{given}: too short for a context of {context} bytes, since training and validation need "
            f"{context + 1} bytes each and have {prose.train.size} and {prose.validation.size}; give "
            f"about {10 * (context + 1)} bytes or more, or a shorter context"
        )
