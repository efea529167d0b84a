"""Text as bytes, split into training and validation."""

import hashlib
import os
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
STANDARD_LIBRARY = "Python's standard library"


class Corpus(NamedTuple):
    name: str
    train: np.ndarray  # uint8[n]
    validation: np.ndarray  # uint8[m]


def standard_library() -> Corpus:
    """The sources of the Python that runs this, without its tests: about 12 MB."""
    root = Path(sysconfig.get_path("stdlib"))
    files = {}
    for folder, inner, names in os.walk(root):
        inner[:] = set(inner) - NOT_SOURCES  # what is not entered is not read
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            files[path.relative_to(root).as_posix()] = path.read_bytes()
    if len(files) < 10:
        raise ValueError(f"{root} has no sources of the standard library: give --text FILE...")
    return Corpus(STANDARD_LIBRARY, *split_by_file(files))


def from_files(paths: list[Path]) -> Corpus:
    """Files of one's own; the last tenth of each is for validation."""
    paths = list(dict.fromkeys(path.resolve() for path in paths))
    train, validation = [], []
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"--text {path}: {error.strerror}; give files that can be read"
            ) from None
        if not content:
            raise ValueError(f"--text {path}: the file is empty")
        cut = len(content) - len(content) // 10
        train.append(content[:cut])
        validation.append(content[cut:])
    name = paths[0].name if len(paths) == 1 else f"{len(paths)} files"
    return Corpus(name, joined(train), joined(validation))


def split_by_file(files: dict[str, bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The tenth of the files whose names have the smallest hashes is for validation."""
    names = sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest())
    held_out = len(names) // 10
    train, validation = names[held_out:], names[:held_out]
    return joined([files[name] for name in train]), joined([files[name] for name in validation])


def joined(contents: list[bytes]) -> np.ndarray:
    """``uint8[n]``: one after the other, a line feed between them."""
    return np.frombuffer(b"\n".join(contents), np.uint8)


def check_length(corpus: Corpus, context: int) -> None:
    """Each part must hold one window: `context` bytes and the one after."""
    shortest = min(corpus.train.size, corpus.validation.size)
    if shortest > context:
        return
    total = corpus.train.size + corpus.validation.size
    raise ValueError(
        f"--text is too short: of its {total} bytes {corpus.train.size} are for training and "
        f"{corpus.validation.size} for validation, and each part needs {context + 1} with "
        f"--context {context}; give about {10 * (context + 1)} bytes or more, or a smaller --context"
    )


def draw(text: np.ndarray, count: int, context: int, seed: tuple[int, int]) -> np.ndarray:
    """``uint8[count, context + 1]``: windows from random places; the same seed, the same windows."""
    starts = np.random.default_rng(seed).integers(0, text.size - context, size=count)
    return text[starts[:, None] + np.arange(context + 1)]


def spread(text: np.ndarray, count: int, context: int) -> np.ndarray:
    """``uint8[count, context + 1]``: windows at even distances over the whole text."""
    starts = np.linspace(0, text.size - context - 1, count).astype(int)
    return text[starts[:, None] + np.arange(context + 1)]
