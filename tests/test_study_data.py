"""What the study reads: images and texts in their makers' formats, and what it says of damaged ones."""

import gzip
import hashlib
import io
import struct
import sys

import numpy as np
import pytest
from study import images, prose

RNG = np.random.default_rng(0)
X, Y = RNG.integers(0, 256, (12, 6, 5), np.uint8), np.arange(12, dtype=np.uint8) % 10
X_TEST, Y_TEST = X[:4] // 2, Y[3:7]


def idx(array):
    """A file of bytes as MNIST's page describes it."""
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape)
    return header + array.tobytes()


IDX = {
    "train-images-idx3-ubyte": idx(X),
    "train-labels-idx1-ubyte": idx(Y),
    "t10k-images-idx3-ubyte": idx(X_TEST),
    "t10k-labels-idx1-ubyte": idx(Y_TEST),
}
IDX_GZ = {f"{name}.gz": gzip.compress(content) for name, content in IDX.items()}


def put(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def refuses(load, folder, *said):
    """The error has each of these in it."""
    with pytest.raises(ValueError, match=r"(?s).") as caught:
        load(folder)
    for words in said:
        assert words in str(caught.value)


def is_what_was_written(found):
    np.testing.assert_array_equal(found.train_images, X[..., None])
    np.testing.assert_array_equal(found.train_labels, Y)
    np.testing.assert_array_equal(found.test_images, X_TEST[..., None])
    np.testing.assert_array_equal(found.test_labels, Y_TEST)
    assert all(array.dtype == np.uint8 for array in found[1:5])
    assert found.classes == 10


# --- Digits


def test_the_digits_are_split_by_class_and_fill_a_byte():
    found = images.load(None)
    sizes = [len(array) for array in found[1:5]]
    assert sizes[0] == sizes[1] and sizes[2] == sizes[3] and sizes[0] + sizes[2] == 1797
    assert found.train_images.shape[1:] == found.test_images.shape[1:] == (8, 8, 1)
    assert all(array.dtype == np.uint8 for array in found[1:5])
    values = np.unique(found.train_images)
    np.testing.assert_array_equal(values, np.round(np.arange(17) * 255 / 16))
    train, test = np.bincount(found.train_labels), np.bincount(found.test_labels)
    np.testing.assert_array_equal(test, (train + test) // 5)
    assert found.classes == len(train) == 10


def test_the_digits_and_their_split_are_the_same_every_time():
    for one, other in zip(images.load(None)[1:5], images.load(None)[1:5], strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_digits_can_be_learned():
    """So images and labels belong together: the nearest training image has the right label."""
    found = images.load(None)
    train, test = (x.reshape(len(x), -1).astype(int) for x in (found[1], found[3]))
    distances = ((test[:, None] - train) ** 2).sum(-1)
    assert (found.train_labels[distances.argmin(1)] == found.test_labels).mean() > 0.97


def test_without_scikit_learn_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lioncub_jax\[study\]'"):
        images.load(None)


# --- IDX


@pytest.mark.parametrize("files", [IDX, IDX_GZ], ids=["plain", "gz"])
def test_idx_files_are_read(tmp_path, files):
    is_what_was_written(images.load(put(tmp_path, files)))


def test_a_plain_file_goes_before_its_gz(tmp_path):
    is_what_was_written(images.load(put(tmp_path, IDX | dict.fromkeys(IDX_GZ, b"not gzip"))))


NAMES = [
    ("mnist", "MNIST"),
    ("Fashion-MNIST", "Fashion-MNIST"),
    ("fashion_mnist", "Fashion-MNIST"),
    ("my-clothes-2", "my-clothes-2"),
]


@pytest.mark.parametrize(("folder", "name"), NAMES)
def test_the_folder_names_the_set(tmp_path, folder, name):
    assert images.load(put(tmp_path / folder, IDX)).name == name


@pytest.mark.parametrize("missing", IDX)
def test_a_missing_idx_file_is_named(tmp_path, missing):
    put(tmp_path, {name: content for name, content in IDX.items() if name != missing})
    refuses(images.load, tmp_path, f"no {missing} (or with .gz", str(tmp_path))


@pytest.mark.parametrize("name", IDX)
@pytest.mark.parametrize("cut", [1, 3])
def test_a_truncated_idx_file_is_named_with_its_bytes(tmp_path, name, cut):
    whole = len(IDX[name])
    path = put(tmp_path, IDX | {name: IDX[name][:-cut]}) / name
    refuses(images.load, tmp_path, f"{path}: truncated: {whole - cut} bytes, expected {whole}")


DAMAGED = [  # file, what is in it, what is said
    ("train-images-idx3-ubyte", b"", "truncated: 0 bytes, expected 16 of an IDX header"),
    ("train-images-idx3-ubyte", idx(X)[:9], "truncated: 9 bytes, expected 16 of an IDX header"),
    ("train-images-idx3-ubyte", idx(X) + b"x", "too long: 377 bytes, expected 376"),
    ("train-images-idx3-ubyte", idx(Y), "number 2049, and an IDX file of bytes with 3 axes begins"),
    ("train-labels-idx1-ubyte", idx(X), "number 2051, and an IDX file of bytes with 1 axis begins"),
    ("train-labels-idx1-ubyte", idx(Y[:-1]), "has 11 labels: give files of one set"),
    ("train-labels-idx1-ubyte", idx(Y + 1), "label 10 of example 9 is out of range; labels go from 0 to 9"),
    ("t10k-labels-idx1-ubyte", idx(Y_TEST[:2]), "has 4 images, but"),
    ("t10k-images-idx3-ubyte", idx(X_TEST[:, :4]), "shape (4, 5, 1)"),
    ("t10k-images-idx3-ubyte", idx(X_TEST[:0]), "has 0 images, but"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "said"), DAMAGED)
def test_a_damaged_idx_file_is_named(tmp_path, name, content, said):
    put(tmp_path, IDX | {name: content})
    refuses(images.load, tmp_path, str(tmp_path / name), said)


def test_files_without_images_are_refused(tmp_path):
    empty = {"t10k-images-idx3-ubyte": idx(X[:0]), "t10k-labels-idx1-ubyte": idx(Y[:0])}
    path = put(tmp_path, IDX | empty) / "t10k-images-idx3-ubyte"
    refuses(images.load, tmp_path, f"{path} has shape (0, 6, 5, 1)")


DAMAGED_GZ = {
    "truncated": lambda content: content[:-10],
    "of half its length": lambda content: content[: len(content) // 2],
    "changed": lambda content: content[:40] + bytes([content[40] ^ 255]) + content[41:],
    "with a block of no kind": lambda content: content[:10] + b"\xff" + content[11:],
    "with a wrong checksum": lambda content: content[:-8] + bytes(4) + content[-4:],
    "not gzip": lambda content: b"<html>404 Not Found</html>",
}


@pytest.mark.parametrize("damage", DAMAGED_GZ.values(), ids=DAMAGED_GZ.keys())
@pytest.mark.parametrize("name", ["train-images-idx3-ubyte.gz", "t10k-images-idx3-ubyte.gz"])
def test_a_damaged_gz_is_named(tmp_path, name, damage):
    path = put(tmp_path, IDX_GZ | {name: damage(IDX_GZ[name])}) / name
    refuses(images.load, tmp_path, f"{path}: a damaged or truncated gzip file")


def test_a_folder_in_place_of_a_file_is_named(tmp_path):
    name = "train-labels-idx1-ubyte"
    put(tmp_path, {other: content for other, content in IDX.items() if other != name})
    (tmp_path / name).mkdir()
    refuses(
        images.load, tmp_path, f"{tmp_path / name}: Is a directory; give a file that can be read"
    )


# --- CIFAR-10

PIXELS = RNG.integers(0, 256, (30, 32, 32, 3), np.uint8)
CLASSES = RNG.integers(0, 10, 30).astype(np.uint8)


def records(of):
    """Of each image its label, then all red, all green and all blue bytes, row by row."""
    return b"".join(
        bytes([label]) + b"".join(pixels[:, :, colour].tobytes() for colour in range(3))
        for pixels, label in zip(PIXELS[of], CLASSES[of], strict=True)
    )


BATCHES = [f"data_batch_{i}.bin" for i in range(1, 6)]
CIFAR = {
    name: records(slice(5 * i, 5 * i + 5)) for i, name in enumerate([*BATCHES, "test_batch.bin"])
}


@pytest.fixture
def small_batches(monkeypatch):
    """As CIFAR-10's, but of 5 images and not 10000."""
    assert images.CIFAR_RECORDS == 10_000
    monkeypatch.setattr(images, "CIFAR_RECORDS", 5)
    return images


@pytest.mark.parametrize("inside", [".", "cifar-10-batches-bin"])
def test_cifar_batches_are_read(small_batches, tmp_path, inside):
    put(tmp_path / inside, CIFAR)
    found = small_batches.load(tmp_path)
    np.testing.assert_array_equal(found.train_images, PIXELS[:25])
    np.testing.assert_array_equal(found.train_labels, CLASSES[:25])
    np.testing.assert_array_equal(found.test_images, PIXELS[25:])
    np.testing.assert_array_equal(found.test_labels, CLASSES[25:])
    assert all(array.dtype == np.uint8 for array in found[1:5])
    assert (found.name, found.classes) == ("CIFAR-10", 10)


@pytest.mark.parametrize("missing", CIFAR)
def test_a_missing_cifar_batch_is_named(small_batches, tmp_path, missing):
    put(tmp_path, {name: content for name, content in CIFAR.items() if name != missing})
    refuses(small_batches.load, tmp_path, f"no {missing} (CIFAR-10's binary version)")


@pytest.mark.parametrize("name", ["data_batch_3.bin", "test_batch.bin"])
@pytest.mark.parametrize(("cut", "bytes_left"), [(1, 15364), (3073, 12292)])
def test_a_truncated_cifar_batch_is_named(small_batches, tmp_path, name, cut, bytes_left):
    path = put(tmp_path, CIFAR | {name: CIFAR[name][:-cut]}) / name
    said = f"{path}: truncated: {bytes_left} bytes, expected 15365 (5 times 3073)"
    refuses(small_batches.load, tmp_path, said)


def test_a_cifar_batch_of_another_size_is_refused_as_it_comes(tmp_path):
    put(tmp_path, CIFAR)
    refuses(images.load, tmp_path, "data_batch_1.bin: truncated: 15365 bytes, expected 30730000")


def test_a_wrong_label_of_a_cifar_batch_is_named(small_batches, tmp_path):
    content = bytearray(CIFAR["data_batch_2.bin"])
    content[2 * 3073] = 200
    path = put(tmp_path, CIFAR | {"data_batch_2.bin": bytes(content)}) / "data_batch_2.bin"
    refuses(small_batches.load, tmp_path, f"{path}: label 200 of example 2 is out of range")


# --- npz

ARRAYS = {"x_train": X, "y_train": Y, "x_test": X_TEST, "y_test": Y_TEST}


def npz(**changed):
    file = io.BytesIO()
    kept = {key: value for key, value in (ARRAYS | changed).items() if value is not None}
    np.savez_compressed(file, **kept)
    return file.getvalue()


COLUMNS = {"y_train": Y[:, None].astype(np.int64), "y_test": Y_TEST[:, None].astype(np.int64)}
CHANNELS = {"x_train": X[..., None], "x_test": X_TEST[..., None]}


@pytest.mark.parametrize("changed", [{}, COLUMNS, CHANNELS], ids=["plain", "columns", "channels"])
def test_an_npz_is_read(tmp_path, changed):
    found = images.load(put(tmp_path / "sets", {"mnist.npz": npz(**changed)}))
    is_what_was_written(found)
    assert found.name == "sets"


def test_an_npz_has_as_many_classes_as_its_labels(tmp_path):
    put(tmp_path, {"a.npz": npz(y_train=Y * 9, x_train=np.stack([X] * 3, -1), x_test=CHANNELS_3)})
    found = images.load(tmp_path)
    assert found.classes == 82
    assert found.train_images.shape == (12, 6, 5, 3)


CHANNELS_3 = np.stack([X_TEST] * 3, -1)
BAD_NPZ = [  # what is in it, what is said
    (npz(y_test=None), "has no y_test; it holds x_train, y_train, x_test"),
    (npz(x_train=None, y_train=None), "has no x_train, y_train; it holds x_test, y_test"),
    (npz(x_train=X / 255), "x_train is float64[12, 6, 5]: images are uint8[n, h, w]"),
    (npz(x_test=X_TEST[0]), "x_test is uint8[6, 5]: images are uint8[n, h, w]"),
    (npz(y_train=Y / 1), "y_train is float64[12]: labels are integers, [n] or [n, 1]"),
    (npz(y_train=np.eye(12, 10, dtype=int)), "y_train is int64[12, 10]: labels are integers"),
    (npz(y_train=Y[:9]), "x_train has 12 images, but"),
    (npz(y_test=Y_TEST + 9), "y_test: label 12 of example 0 is out of range; labels go from 0 to 9"),
    (npz(y_train=Y.astype(int) - 1), "y_train: label -1 of example 0 is out of range"),
    (npz(y_train=Y.astype(int) * 100), "y_train goes to 900: labels go from 0 to 255"),
    (npz(x_test=X_TEST[:, 1:]), "shape (5, 5, 1)"),
    (npz(x_test=CHANNELS_3), "shape (6, 5, 3)"),
    (npz(x_train=X[:0], y_train=Y[:0]), "x_train has shape (0, 6, 5, 1)"),
    (npz(y_train=np.array([{}] * 12)), "not an .npz of plain arrays"),
    (npz()[:-30], "not an .npz of plain arrays, or damaged"),
    (npz()[:200] + bytes(20) + npz()[220:], "not an .npz of plain arrays, or damaged"),
    (b"", "not an .npz of plain arrays, or damaged"),
    (b"hello", "not an .npz of plain arrays, or damaged"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "said"), BAD_NPZ, ids=[said for _, said in BAD_NPZ])
def test_a_bad_npz_is_named(tmp_path, content, said):
    path = put(tmp_path, {"set.npz": content}) / "set.npz"
    refuses(images.load, tmp_path, str(path), said)


def test_two_npz_are_one_too_many(tmp_path):
    put(tmp_path, {"a.npz": npz(), "b.npz": npz()})
    refuses(images.load, tmp_path, "holds 2 .npz files (a.npz, b.npz)")


# --- Folders of images


def test_a_missing_folder_is_named_with_what_is_accepted(tmp_path):
    refuses(images.load, tmp_path / "no", f"{tmp_path / 'no'}: no such folder", images.ACCEPTED)


def test_a_folder_of_other_files_is_named_with_what_is_accepted(tmp_path):
    put(tmp_path, {"data_batch_1": b"a pickle", "README": b"x"})
    refuses(images.load, tmp_path, f"{tmp_path} holds no images", images.ACCEPTED)
    for name in (*IDX, "data_batch_1.bin", "test_batch.bin", ".gz", "x_train", ".npz"):
        assert name in images.ACCEPTED


def test_a_folder_with_two_sets_is_refused(tmp_path):
    put(tmp_path, IDX_GZ | {"mnist.npz": npz()})
    refuses(images.load, tmp_path, "(train-images-idx3-ubyte.gz, mnist.npz): give one a folder")


# --- Texts

A, B, C = b"0123456789" * 3, b"abcdefghij" * 2 + b"klmno", "zwölf Boxkämpfer".encode()


def test_of_each_text_of_a_folder_the_end_validates(tmp_path):
    put(tmp_path / "books", {"b.txt": B, "a.md": A, "c.RST": C, "notes.py": b"x = 1", "d": b"no"})
    (tmp_path / "books" / "inside").mkdir()
    put(tmp_path / "books" / "inside", {"e.txt": b"not looked at"})
    found = prose.load(tmp_path / "books")
    assert bytes(found.train) == A[:27] + b"\n" + B[:23] + b"\n" + C[:17]
    assert bytes(found.validation) == A[27:] + b"\n" + B[23:] + b"\n" + C[17:]
    assert found.name == "books"
    assert found.train.dtype == found.validation.dtype == np.uint8
    assert [bytes(found.train[slice(*place)]) for place in found.documents] == [
        A[:27] + b"\n", B[:23] + b"\n", C[:17],
    ]  # fmt: skip


def test_without_a_folder_it_is_the_text_of_the_examples():
    found, example = prose.load(None), prose.corpus.standard_library()
    assert found.name == example.name == "Python's standard library"
    np.testing.assert_array_equal(found.train, example.train)
    np.testing.assert_array_equal(found.validation, example.validation)
    starts, ends = np.array(found.documents).T
    assert starts[0] == 0 and ends[-1] == found.train.size and len(starts) > 100
    np.testing.assert_array_equal(starts[1:], ends[:-1])
    files = {content + b"\n" for content in prose.corpus.standard_library_files().values()}
    texts = [bytes(found.train[start:end]) for start, end in found.documents]
    assert all(text in files for text in texts[:-1]) and texts[-1] + b"\n" in files


def test_the_files_with_the_smallest_hashes_validate():
    """Recorded results are for this split."""
    files = {f"{i}.py": bytes([i]) for i in range(20)}
    train, validation = prose.corpus.files_apart(files)
    hashes = {content: hashlib.sha256(name.encode()).digest() for name, content in files.items()}
    assert len(validation) == 2
    assert validation + train == sorted(files.values(), key=hashes.get)


def test_an_empty_document_has_its_line_feed_unless_it_is_the_last():
    contents = [b"ab", b"", b"c", b""]
    assert bytes(prose.corpus.joined(contents)) == b"ab\n\nc\n"
    assert prose.documents(contents) == ((0, 3), (3, 4), (4, 6))


def test_documents_can_be_dealt_to_workers(tmp_path):
    from study import splits

    found = prose.load(put(tmp_path, {f"{i}.txt": A * (i + 1) for i in range(5)}))
    parts = splits.by_document(found.documents, 3)
    assert sorted(np.concatenate(parts).tolist()) == list(range(found.train.size))


def test_a_folder_without_texts_is_refused(tmp_path):
    put(tmp_path, {"a.html": A})
    looked_for = "texts (*.txt, *.md, *.rst)"
    refuses(prose.load, tmp_path, f"{tmp_path} holds no {looked_for}")
    refuses(prose.load, tmp_path / "no", f"{tmp_path / 'no'}: no such folder", looked_for)
    refuses(prose.load, tmp_path / "a.html", "a.html: no such folder")


def test_an_empty_text_is_named(tmp_path):
    put(tmp_path, {"a.txt": A, "b.txt": b""})
    refuses(prose.load, tmp_path, f"{tmp_path / 'b.txt'}: the file is empty")


def test_a_text_that_cannot_be_read_is_named(tmp_path):
    put(tmp_path, {"a.txt": A})
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone.txt")
    refuses(prose.load, tmp_path, f"{tmp_path / 'b.txt'}: No such file or directory")
    (tmp_path / "b.txt").unlink()
    (tmp_path / "b.txt").mkdir()
    refuses(prose.load, tmp_path, f"{tmp_path / 'b.txt'}: Is a directory")


@pytest.mark.parametrize(("context", "fits"), [(1, True), (5, True), (6, False), (27, False)])
def test_training_and_validation_each_hold_a_window(tmp_path, context, fits):
    put(tmp_path, {"a.txt": A * 2})  # 54 and 6 bytes
    if fits:
        assert prose.load(tmp_path, context).validation.size == 6
        return
    needs = f"context of {context} bytes, since training and validation need {context + 1} bytes each and"
    refuses(lambda folder: prose.load(folder, context), tmp_path, str(tmp_path), needs, "54 and 6")
