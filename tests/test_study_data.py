"""What the study reads and how it is shared out: images, damaged files, and each example to one worker."""

import gzip
import re
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from study import images, prose, splits

RNG = np.random.default_rng(0)
X, Y = RNG.integers(0, 256, (12, 6, 5), np.uint8), np.arange(12, dtype=np.uint8) % 10
X_TEST, Y_TEST = X[:4] // 2, Y[3:7]


def idx(array):
    """A file of bytes as MNIST's page describes it."""
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape)
    return header + array.tobytes()


TRAIN, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
IDX = {TRAIN: idx(X), LABELS: idx(Y), TEST: idx(X_TEST), TEST_LABELS: idx(Y_TEST)}
GZ = {f"{name}.gz": gzip.compress(content) for name, content in IDX.items()}


def put(folder, files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("files", [IDX, GZ])
def test_images_are_what_was_written_and_the_folder_names_the_set(tmp_path, files):
    found = images.load(put(tmp_path / "fashion_mnist", files))
    for array, wanted in zip(found[1:5], (X[..., None], Y, X_TEST[..., None], Y_TEST), strict=True):
        np.testing.assert_array_equal(array, wanted, strict=True)
    assert (found.name, found.classes) == ("Fashion-MNIST", 10)


WRONG = [  # files, what is said
    ({}, images.ACCEPTED),
    ({TRAIN: idx(X)}, f"no {LABELS}, {TEST}, {TEST_LABELS} (or with .gz"),
    (IDX | {LABELS: idx(Y)[:-3]}, f"{LABELS}: truncated: 17 bytes, expected 20"),
    (IDX | {LABELS: idx(Y[:-1])}, f"{LABELS} has 11 labels"),
    (IDX | {LABELS: idx(Y + 1)}, "label 10 of example 9 is out of range; labels go from 0 to 9"),
    (GZ | {f"{TEST}.gz": b"<html>"}, f"{TEST}.gz: a damaged or truncated gzip file"),
]


# --- Texts

A, B = b"0123456789" * 3, b"abcdefghij" * 2 + b"klmno"


def test_of_each_text_of_a_folder_the_end_validates(tmp_path):
    found = prose.load(put(tmp_path, {"b.txt": B, "a.md": A, "notes.py": b"x = 1"}))
    assert bytes(found.train) == A[:27] + b"\n" + B[:23]
    assert bytes(found.validation) == A[27:] + b"\n" + B[23:]


@pytest.mark.parametrize(("files", "said"), WRONG)
def test_what_cannot_be_read_is_named(tmp_path, files, said):
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))) as caught:
        images.load(put(tmp_path, files))
    assert said in str(caught.value)


# --- Splits


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 30))
def test_every_split_gives_each_example_to_one_worker(lengths, workers):
    """The lengths are of classes."""
    count, workers = sum(lengths), min(workers, len(lengths))
    labels = np.repeat(range(len(lengths)), lengths)
    even = splits.iid(count, workers), splits.contiguous(count, workers)
    by_class = splits.by_class(labels, workers)
    for parts in (*even, by_class):
        assert len(parts) == workers and all(part.size for part in parts)
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), range(count))
    for own in (*even, [set(labels[part]) for part in by_class]):
        sizes = list(map(len, own))
        assert max(sizes) - min(sizes) <= 1
    assert sum(len(set(labels[part])) for part in by_class) == len(lengths), "none is cut"
    for part, row, size in zip(by_class, *splits.table(by_class), strict=True):
        assert size == len(part)
        np.testing.assert_array_equal(row, np.resize(part, len(row)))


REFUSED = [
    (lambda: splits.iid(3, 4), "workers=4 is more than the 3 examples.*at most 3 workers"),
    (lambda: splits.by_class([0, 1, 1, 1], 3), "workers=3 is more than the 2 classes"),
]


@pytest.mark.parametrize(("call", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_be_split_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()
