"""Labelled images for the study, from the files their makers give out, or scikit-learn's digits.

    load(None)                   8x8 digits: a fifth of each class is for testing
    load(Path("fashion-mnist"))  a folder of one of these, told apart by the names of its files:

- IDX files as of MNIST and Fashion-MNIST, plain or ``.gz``;
- one ``.npz`` with ``x_train, y_train, x_test, y_test``, as Keras keeps its data sets.

A file that is missing, damaged or of another kind is a ``ValueError`` that names it, never a guess.
"""

import gzip
import math
import re
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

IDX_FILES = tuple(
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)
CLASSES = 10  # of the IDX files and the digits
NPZ_KEYS = ("x_train", "y_train", "x_test", "y_test")
# By the folder's, letters only.
NAMES = {"mnist": "MNIST", "fashionmnist": "Fashion-MNIST", "cifar": "CIFAR-10"}
ACCEPTED = (
    f"the IDX files of MNIST or Fashion-MNIST ({', '.join(IDX_FILES)}; plain or .gz), or one .npz with "
    f"{', '.join(NPZ_KEYS)}"
)


class Images(NamedTuple):
    name: str
    train_images: np.ndarray  # uint8[n, h, w, c]
    train_labels: np.ndarray  # uint8[n]
    test_images: np.ndarray  # uint8[m, h, w, c]
    test_labels: np.ndarray  # uint8[m]
    classes: int


class Part(NamedTuple):
    """Images and labels that belong together, and where they come from, for errors."""

    images: np.ndarray  # uint8[n, h, w, c]
    labels: np.ndarray  # int[n], not checked yet
    images_from: str
    labels_from: str


def load(folder: Path | None) -> Images:
    """The images of a folder, or scikit-learn's digits for None.

    Raises:
      ValueError: for a folder that is missing, holds none of the formats or more than one, and for files
        that are missing, damaged or not what their names say.
      ModuleNotFoundError: for the digits, without scikit-learn.
    """
    if folder is None:
        return digits()
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give one that holds {ACCEPTED}")
    found = {read: files for find, read in FORMATS if (files := find(folder))}
    if not found:
        raise ValueError(f"{folder} holds no images that can be read here; give {ACCEPTED}")
    if len(found) > 1:
        names = ", ".join(files[0].name for files in found.values())
        raise ValueError(f"{folder} holds more than one set of images ({names}): give one a folder")
    ((read, files),) = found.items()
    return read(folder, files)


def digits() -> Images:
    """1797 digits of scikit-learn, 8x8 in 17 greys; of each class every fifth is for testing."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the digits come with scikit-learn: pip install 'lioncub_jax[study]', or give a folder of "
            "images"
        ) from error
    data = load_digits()
    images = np.round(data.images * (255 / 16)).astype(np.uint8)[..., None]
    held_out = np.zeros(len(images), bool)
    for label in range(CLASSES):
        held_out[np.flatnonzero(data.target == label)[4::5]] = True
    source = "scikit-learn's digits"
    train, test = (Part(images[x], data.target[x], source, source) for x in (~held_out, held_out))
    return joined(source, train, test, CLASSES)


def joined(name: str, train: Part, test: Part, classes: int) -> Images:
    """Checks what holds for every format."""
    for part in (train, test):
        check_part(part, classes)
    if train.images.shape[1:] != test.images.shape[1:]:
        raise ValueError(
            f"{test.images_from} has images of shape {test.images.shape[1:]}, and {train.images_from} of "
            f"{train.images.shape[1:]}: training and test images must be of one shape"
        )
    (x, y), (x_test, y_test) = ((p.images, p.labels.astype(np.uint8)) for p in (train, test))
    return Images(name, x, y, x_test, y_test, classes)


def check_part(part: Part, classes: int) -> None:
    images, labels, images_from, labels_from = part
    if len(images) != len(labels):
        raise ValueError(
            f"{images_from} has {len(images)} images, but {labels_from} has {len(labels)} labels: "
            "give files of one set"
        )
    if not images.size:
        raise ValueError(f"{images_from} has shape {images.shape}: there is not one pixel in it")
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if wrong.size:
        raise ValueError(
            f"{labels_from}: label {labels[wrong[0]]} of example {wrong[0]} is out of range; "
            f"labels go from 0 to {classes - 1}"
        )


def name_of(folder: Path) -> str:
    name = folder.resolve().name
    return NAMES.get(re.sub("[^a-z]", "", name.lower()), name)


def read_bytes(path: Path) -> bytes:
    """What is in a file, unpacked if it is a ``.gz``."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: a damaged or truncated gzip file ({error})") from error
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give a file that can be read") from error


# --- IDX


def find_idx(folder: Path) -> list[Path]:
    """The IDX files there are; a plain one goes before its ``.gz``."""
    found = []
    for name in IDX_FILES:
        paths = (folder / name, folder / f"{name}.gz")
        found += [path for path in paths if path.exists()][:1]
    return found


def read_idx_folder(folder: Path, files: list[Path]) -> Images:
    paths = {path.name.removesuffix(".gz"): path for path in files}
    check_complete(folder, set(paths), IDX_FILES, "or with .gz at its end")
    train, test = (
        Part(
            read_idx(paths[images], 3)[..., None],
            read_idx(paths[labels], 1),
            str(paths[images]),
            str(paths[labels]),
        )
        for images, labels in (IDX_FILES[:2], IDX_FILES[2:])
    )
    return joined(name_of(folder), train, test, CLASSES)


def read_idx(path: Path, axes: int) -> np.ndarray:
    """``uint8`` with so many axes, from a file in the format that MNIST's page describes."""
    content = read_bytes(path)
    start = 4 + 4 * axes
    check_size(path, len(content), start, "of an IDX header", at_least=True)
    magic = int.from_bytes(content[:4], "big")
    expected = 0x0800 + axes  # unsigned bytes, and the number of axes
    if magic != expected:
        raise ValueError(
            f"{path}: the first 4 bytes are the number {magic}, and an IDX file of bytes with {axes} "
            f"{'axis' if axes == 1 else 'axes'} begins with {expected}"
        )
    shape = tuple(np.frombuffer(content, ">u4", axes, offset=4).tolist())
    check_size(path, len(content), start + math.prod(shape), f"for its shape {shape}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def check_size(path: Path, found: int, expected: int, why: str, at_least: bool = False) -> None:
    if found < expected or (found > expected and not at_least):
        wrong = "truncated" if found < expected else "too long"
        raise ValueError(f"{path}: {wrong}: {found} bytes, expected {expected} {why}")


def check_complete(folder: Path, found: set[str], wanted: tuple[str, ...], hint: str) -> None:
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ValueError(f"{folder} has {min(found)} but no {', '.join(missing)} ({hint})")


# --- npz


def find_npz(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.npz"))


def read_npz(folder: Path, files: list[Path]) -> Images:
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise ValueError(f"{folder} holds {len(files)} .npz files ({names}): give one a folder")
    try:
        with np.load(files[0], allow_pickle=False) as archive:
            x, y, x_test, y_test = (archive[key] for key in NPZ_KEYS)
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{files[0]}: not an .npz of the arrays {', '.join(NPZ_KEYS)}, or damaged ({error})"
        ) from error
    for key, array, kind in (("x_train", x, np.uint8), ("x_test", x_test, np.uint8),
                             ("y_train", y, np.integer), ("y_test", y_test, np.integer)):  # fmt: skip
        right = np.issubdtype(array.dtype, kind) and array.max(initial=0) <= 255
        if not right or (kind is np.uint8 and array.ndim not in (3, 4)):
            raise ValueError(
                f"{files[0]}: {key} is {array.dtype}{list(array.shape)}: images are uint8[n, h, w] or "
                "uint8[n, h, w, c], labels integers [n] or [n, 1], to 255"
            )
    train, test = (
        Part(
            images.reshape(*images.shape[:3], -1), labels.reshape(-1), str(files[0]), str(files[0])
        )
        for images, labels in ((x, y), (x_test, y_test))
    )
    return joined(name_of(folder), train, test, int(train.labels.max(initial=0)) + 1)


FORMATS: tuple[tuple[Callable[[Path], list[Path]], Callable[[Path, list[Path]], Images]], ...] = (
    (find_idx, read_idx_folder),
    (find_npz, read_npz),
)
