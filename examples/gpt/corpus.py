"""Text as bytes, split into training and validation, and how well counting alone predicts it."""

import hashlib
import math
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
    return Corpus(STANDARD_LIBRARY, *split_by_file(standard_library_files()))


def standard_library_files() -> dict[str, bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    files = {}
    for folder, inner, names in os.walk(root):
        inner[:] = set(inner) - NOT_SOURCES  # what is not entered is not read
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            files[path.relative_to(root).as_posix()] = path.read_bytes()
    if len(files) < 10:
        raise ValueError(f"{root} has no sources of the standard library: give --text FILE...")
    return files


def from_files(paths: list[Path]) -> Corpus:
    """Ten files or more are split by file; fewer give up the end of each."""
    paths = list(dict.fromkeys(path.resolve() for path in paths))
    common = Path(os.path.commonpath([path.parent for path in paths]))
    files = {path.relative_to(common).as_posix(): _read(path) for path in paths}
    split = split_by_file if len(files) >= 10 else split_by_position
    name = paths[0].name if len(paths) == 1 else f"{len(paths)} files"
    return Corpus(name, *split(files))


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"--text {path}: {error.strerror}; give files that can be read") from None
    if not content:
        raise ValueError(f"--text {path}: the file is empty")
    return content


def split_by_file(files: dict[str, bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The tenth of the files whose names have the smallest hashes is for validation."""
    names = sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest())
    held_out = len(names) // 10
    train, validation = names[held_out:], names[:held_out]
    return joined([files[name] for name in train]), joined([files[name] for name in validation])


def split_by_position(files: dict[str, bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The last tenth of each file is for validation."""
    cut = [(content, len(content) - len(content) // 10) for content in files.values()]
    return joined([content[:at] for content, at in cut]), joined(
        [content[at:] for content, at in cut]
    )


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


class Baselines(NamedTuple):
    """Bits per byte when windows are predicted by counts of the training text."""

    unigram: float
    bigram: float


def baselines(train: np.ndarray, windows: np.ndarray) -> Baselines:
    before, byte = windows[..., :-1], windows[..., 1:]
    single = unigram(train)
    pair = bigram(train, single)
    return Baselines(_bits(single[byte]), _bits(pair[before, byte]))


def unigram(train: np.ndarray) -> np.ndarray:
    """``float[256]``: how often each byte occurs, one added to each count."""
    counts = np.bincount(train, minlength=256) + 1
    return counts / counts.sum()


def bigram(train: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """``float[256, 256]``: what follows each byte, the prior counted as 16 further bytes."""
    pairs = train[:-1].astype(np.uint16) * 256 + train[1:]
    counts = np.bincount(pairs, minlength=256 * 256).reshape(256, 256) + 16 * prior
    return counts / counts.sum(axis=1, keepdims=True)


def _bits(probabilities: np.ndarray) -> float:
    return float(-np.log(probabilities).mean() / math.log(2))
