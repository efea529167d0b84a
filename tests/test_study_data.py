"""What the study reads and how it is shared out: formats, damaged files, and each example to one worker."""

import gzip
import hashlib
import io
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


def npz(**changed):
    file = io.BytesIO()
    arrays = {"x_train": X, "y_train": Y, "x_test": X_TEST, "y_test": Y_TEST} | changed
    np.savez_compressed(file, **{k: x for k, x in arrays.items() if x is not None})
    return file.getvalue()


TRAIN, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
IDX = {TRAIN: idx(X), LABELS: idx(Y), TEST: idx(X_TEST), TEST_LABELS: idx(Y_TEST)}
GZ = {f"{name}.gz": gzip.compress(content) for name, content in IDX.items()}
RECORDS = RNG.integers(0, 10, (30, 1 + 3 * 32 * 32), np.uint8)  # a label, then red, green, blue
BATCHES = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
CIFAR = {name: RECORDS[5 * i :][:5].tobytes() for i, name in enumerate(BATCHES)}


def put(folder, files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("files", [IDX, GZ, {"a.npz": npz()}])
def test_images_are_what_was_written_and_the_folder_names_the_set(tmp_path, files):
    found = images.load(put(tmp_path / "fashion_mnist", files))
    for array, wanted in zip(found[1:5], (X[..., None], Y, X_TEST[..., None], Y_TEST), strict=True):
        np.testing.assert_array_equal(array, wanted, strict=True)
    assert (found.name, found.classes) == ("Fashion-MNIST", 10)


def test_cifar_batches_are_read(monkeypatch, tmp_path):
    monkeypatch.setattr(images, "CIFAR_RECORDS", 5)
    found = images.load(put(tmp_path, CIFAR))
    pixels = RECORDS[:, 1:].reshape(30, 3, 32, 32).transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(found.train_images, pixels[:25])
    np.testing.assert_array_equal(found.train_labels, RECORDS[:25, 0])
    np.testing.assert_array_equal(found.test_images, pixels[25:])


WRONG = [  # files, what is said
    ({}, images.ACCEPTED),
    (IDX | {"a.npz": npz()}, "train-images-idx3-ubyte, a.npz): give one a folder"),
    ({TRAIN: idx(X)}, f"no {LABELS}, {TEST}, {TEST_LABELS} (or with .gz"),
    (IDX | {LABELS: idx(Y)[:-3]}, f"{LABELS}: truncated: 17 bytes, expected 20"),
    (IDX | {TRAIN: idx(Y)}, "number 2049, and an IDX file of bytes with 3 axes begins with 2051"),
    (IDX | {LABELS: idx(Y[:-1])}, f"{LABELS} has 11 labels"),
    (IDX | {LABELS: idx(Y + 1)}, "label 10 of example 9 is out of range; labels go from 0 to 9"),
    (IDX | {TEST: idx(X_TEST[:, :4])}, f"{TEST} has images of shape (4, 5, 1)"),
    (GZ | {f"{TEST}.gz": b"<html>"}, f"{TEST}.gz: a damaged or truncated gzip file"),
    (CIFAR, "data_batch_1.bin: truncated: 15365 bytes, expected 30730000"),
    ({BATCHES[0]: b""}, "no data_batch_2.bin, "),
    ({"a.npz": npz(y_test=None)}, "has no y_test; it holds x_train, y_train, x_test"),
    ({"a.npz": npz(x_train=X / 255)}, "x_train is float64[12, 6, 5]: images are uint8[n, h, w]"),
    ({"a.npz": npz()[:-30]}, "a.npz: not an .npz of plain arrays, or damaged"),
]


# --- Texts

A, B = b"0123456789" * 3, b"abcdefghij" * 2 + b"klmno"


def test_of_each_text_of_a_folder_the_end_validates(tmp_path):
    found = prose.load(put(tmp_path, {"b.txt": B, "a.md": A, "notes.py": b"x = 1"}))
    assert bytes(found.train) == A[:27] + b"\n" + B[:23]
    assert bytes(found.validation) == A[27:] + b"\n" + B[23:]
    assert found.documents == ((0, 28), (28, 51))


def test_the_files_with_the_smallest_hashes_validate():
    """Recorded results are for this split."""
    files = {f"{i}.py": b"%d" % i for i in range(20)}
    train, validation = prose.corpus.files_apart(files)
    names = sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest())
    assert validation + train == [files[n] for n in names] and len(validation) == 2


TEXTS = [
    ({"a.html": A}, "holds no texts (*.txt"),
    ({"a.txt": A, "b.txt": b""}, "b.txt: the file is empty"),
    ({"a.txt": A[:20]}, "context of 2 bytes, since training and validation need 3 bytes each and have"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("load", "files", "said"),
    [(images.load, *row) for row in WRONG] + [(lambda x: prose.load(x, 2), *row) for row in TEXTS],
)
def test_what_cannot_be_read_is_named(tmp_path, load, files, said):
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))) as caught:
        load(put(tmp_path, files))
    assert said in str(caught.value)


# --- Splits

few = settings(max_examples=50, deadline=None, derandomize=True)
counted = st.tuples(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 30))


def shares_all(parts, count, workers):
    """Each example is in one part, and parts are as they are said to be."""
    assert len(parts) == workers and all(part.size for part in parts)
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), range(count))


def spread_of(sizes):
    sizes = list(map(len, sizes))
    return max(sizes) - min(sizes)


@few
@given(counted, st.floats(0.3, 1e3), st.randoms())
def test_every_split_gives_each_example_to_one_worker(drawn, alpha, rng):
    """The lengths are of classes, and of documents."""
    lengths, workers = drawn[0], min(drawn[1], len(drawn[0]))
    count, ends = sum(lengths), np.cumsum(lengths).tolist()
    labels = np.repeat(range(len(lengths)), lengths)
    documents = list(zip([0, *ends], ends, strict=False))
    rng.shuffle(documents)
    for parts in (splits.iid(count, workers), splits.contiguous(count, workers)):
        shares_all(parts, count, workers)
        assert spread_of(parts) <= 1
    shares_all(splits.dirichlet(np.repeat(labels, 50), workers, alpha), 50 * count, workers)
    by_class, by_document = splits.by_class(labels, workers), splits.by_document(documents, workers)
    for parts in (by_class, by_document):  # none is cut
        shares_all(parts, count, workers)
        assert sum(len(set(labels[part])) for part in parts) == len(lengths)
    assert spread_of([set(labels[part]) for part in by_class]) <= 1
    assert spread_of(by_document) <= max(lengths)
    for part, row, size in zip(by_class, *splits.table(by_class), strict=True):
        assert size == len(part)
        np.testing.assert_array_equal(row, np.resize(part, len(row)))


def test_dirichlet_proportions_have_the_mean_and_spread_of_the_formula():
    """A share of Dirichlet(1, 1, 1, 1) has mean 1/4 and variance 3/80."""
    labels = np.repeat(np.arange(200), 400)
    parts, other = (splits.dirichlet(labels, 4, 1.0, seed) for seed in (1, 2))
    assert parts[0].tolist() != other[0].tolist()
    shares = np.array([np.bincount(labels[part], minlength=200) for part in parts]) / 400
    # 200 classes: the mean of a worker's shares has a standard deviation of 0.0137.
    np.testing.assert_allclose(shares.mean(axis=1), 0.25, atol=0.05)
    np.testing.assert_allclose(shares.var(), 3 / 80, rtol=0.2)
    assert 0.4 < (parts[0] % 400 < 200).mean() < 0.6, "drawn at random within a class"
    even, others = (splits.iid(1000, 2, seed)[0] for seed in (1, 2))
    assert 400 < even.mean() < 600 and even.tolist() != others.tolist()


REFUSED = [
    (lambda: splits.iid(3, 4), "workers=4 is more than the 3 examples.*at most 3 workers"),
    (lambda: splits.by_class([0, 1, 1, 1], 3), "workers=3 is more than the 2 classes"),
    (lambda: splits.dirichlet([0, 1], 2, np.nan), "alpha=nan: give a number above zero, from 1e-09 to 1e"),
    (lambda: splits.dirichlet([0] * 10 + [1] * 10, 8, 1e-3), "8 workers .* 20 examples .* 100 draws: give"),
    (lambda: splits.by_class([True, False], 2), "dtype bool: give a 1-D array of integers"),
    (lambda: splits.by_document([(0, 5), (4, 9)], 1), r"document \(4, 9\) after 5"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_be_split_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()
