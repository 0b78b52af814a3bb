"""Images: their files, made up and real, what is wrong with files, and subsets of them."""

import gzip
import hashlib
import struct
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from noisygrad_paper.data import (
    DATA_SETS,
    DamagedDataError,
    Images,
    MissingDataError,
    UnknownDataSetError,
    load_images,
    load_out_of_distribution,
    splits_of,
    subset,
)
from noisygrad_paper.data.commands import app


def put(monkeypatch, folder, name, contents):
    """Make the catalogue's files the given bytes, and lay them into a cache."""
    files = {path: hashlib.sha256(content).hexdigest() for path, content in contents.items()}
    monkeypatch.setitem(DATA_SETS, name, replace(DATA_SETS[name], files=files))
    for path, content in contents.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(content)


def cifar_contents(records=4):
    """Six batches; the label and the first byte of every plane tell a record from every other."""
    contents = {}
    for batch, path in enumerate(DATA_SETS["cifar10"].files):
        made = np.random.default_rng(batch).integers(0, 256, (records, 3073), dtype=np.uint8)
        made[:, 0] = (np.arange(records) + batch) % 10
        for plane in range(3):
            made[:, 1 + 1024 * plane] = 100 * plane + 10 * batch + np.arange(records)
        contents[path] = made.tobytes()
    return contents


def idx(array, mark=None):
    mark = 0x0800 + array.ndim if mark is None else mark
    return struct.pack(f">{1 + array.ndim}I", mark, *array.shape) + array.astype(np.uint8).tobytes()


def mnist_arrays(train=12, test=5):
    generator = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", train), ("t10k", test)):
        arrays[f"mnist/{part}-images-idx3-ubyte.gz"] = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"mnist/{part}-labels-idx1-ubyte.gz"] = np.arange(count) % 10
    return arrays


def mnist_contents(**sizes):
    return {path: gzip.compress(idx(array)) for path, array in mnist_arrays(**sizes).items()}


def made(count=40, **changes):
    generator = np.random.default_rng(0)
    fields = {
        "name": "made",
        "x_train": generator.integers(0, 256, (count, 3, 4, 4), dtype=np.uint8),
        "y_train": np.arange(count) % 4,
        "x_test": generator.integers(0, 256, (8, 3, 4, 4), dtype=np.uint8),
        "y_test": np.arange(8) % 4,
        "classes": 4,
        "mean": (0.5, 0.5, 0.5),
        "std": (0.2, 0.2, 0.2),
    }
    return Images(**(fields | changes))


# The official formats


def test_small_cifar_is_loaded(monkeypatch, tmp_path):
    put(monkeypatch, tmp_path, "cifar10", cifar_contents())
    found = load_images("cifar10", tmp_path)
    assert (found.name, found.classes) == ("cifar10", 10)
    assert found.x_train.shape == (20, 3, 32, 32)
    assert found.x_test.shape == (4, 3, 32, 32)
    assert found.y_train.tolist() == [(record + batch) % 10 for batch in range(5) for record in range(4)]
    assert found.y_test.tolist() == [5, 6, 7, 8]
    for plane in range(3):
        assert found.x_train[7, plane, 0, 0] == 100 * plane + 10 * 1 + 3
        assert found.x_test[2, plane, 0, 0] == 100 * plane + 10 * 5 + 2
    first = np.frombuffer(cifar_contents()["cifar-10-batches-bin/data_batch_1.bin"], dtype=np.uint8)
    assert found.x_train[0, 1, 2, 3] == first[1 + 1024 + 2 * 32 + 3]
    assert found.mean == (0.4914, 0.4822, 0.4465)
    assert found.std == (0.2023, 0.1994, 0.2010)


def test_small_mnist_is_loaded(monkeypatch, tmp_path):
    put(monkeypatch, tmp_path, "mnist", mnist_contents())
    found = load_images("mnist", tmp_path)
    train, train_labels, test, test_labels = mnist_arrays().values()
    np.testing.assert_array_equal(found.x_train, train[:, None])
    np.testing.assert_array_equal(found.y_train, train_labels)
    np.testing.assert_array_equal(found.x_test, test[:, None])
    np.testing.assert_array_equal(found.y_test, test_labels)
    assert (found.mean, found.std) == ((0.1307,), (0.3081,))


@pytest.mark.parametrize(("name", "contents"), [("cifar10", cifar_contents), ("mnist", mnist_contents)])
def test_arrays_become_tensors_without_a_warning(monkeypatch, tmp_path, name, contents):
    put(monkeypatch, tmp_path, name, contents())
    found = load_images(name, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for array in (found.x_train, found.y_train, found.x_test, found.y_test):
            assert torch.from_numpy(array).is_contiguous()


@pytest.mark.parametrize(("name", "contents"), [("cifar10", cifar_contents), ("mnist", mnist_contents)])
@pytest.mark.parametrize("position", [0, -1])
def test_wrong_checksum_is_refused_and_kept_aside(monkeypatch, tmp_path, name, contents, position):
    put(monkeypatch, tmp_path, name, contents())
    path = tmp_path / list(DATA_SETS[name].files)[position]
    path.write_bytes(path.read_bytes()[:-100])
    match = rf"{path.name} is not the {name} data: its checksum .*{path.name}\.rejected .*noisygrad data fetch {name}"
    with pytest.raises(DamagedDataError, match=match):
        load_images(name, tmp_path)
    assert not path.exists()
    with pytest.raises(MissingDataError, match=f"is not at {path}"):
        load_images(name, tmp_path)


@pytest.mark.parametrize("name", ["cifar10", "mnist"])
def test_missing_files_name_the_command(monkeypatch, tmp_path, name):
    monkeypatch.setenv("NOISYGRAD_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"To fetch it: noisygrad data fetch {name}$"):
        load_images(name)
    with pytest.raises(MissingDataError, match=f"noisygrad data fetch {name} --data-dir {tmp_path / 'other'}$"):
        load_images(name, tmp_path / "other")


# Files that have their checksum but not their form


def other_label(content):
    return content[: 3073 * 2] + b"\x0a" + content[3073 * 2 + 1 :]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda content: content[:-1], r"its 12291 bytes are not records of 3073"),
        (lambda content: content + b"\0", "not records of 3073"),
        (lambda content: b"", "its 0 bytes are not records"),
        (other_label, r"it has the label 10, expected 0\.\.9"),
    ],
    ids=["short", "long", "empty", "label"],
)
def test_wrong_batches_are_refused(monkeypatch, tmp_path, spoil, reason):
    path = "cifar-10-batches-bin/test_batch.bin"
    contents = cifar_contents()
    put(monkeypatch, tmp_path, "cifar10", contents | {path: spoil(contents[path])})
    with pytest.raises(DamagedDataError, match=f"{reason}.*renamed to test_batch.bin.rejected"):
        load_images("cifar10", tmp_path)
    assert not (tmp_path / path).exists()


LABELS = np.arange(12) % 10
PICTURES = np.zeros((12, 28, 28))


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("images-idx3", b"not packed", "gzip"),
        ("images-idx3", gzip.compress(idx(PICTURES))[:-12], "end-of-stream"),
        ("images-idx3", gzip.compress(idx(PICTURES)[:10]), "its 10 bytes are less than its header"),
        ("images-idx3", gzip.compress(b""), "its 0 bytes are less than its header"),
        ("images-idx3", gzip.compress(idx(LABELS) + bytes(9)), "its mark is 0x00000801, expected 0x00000803"),
        ("images-idx3", gzip.compress(idx(PICTURES, mark=0x0D03)), "its mark is 0x00000d03"),
        ("images-idx3", gzip.compress(idx(PICTURES[:, :27])), "its header says 12 × 27 × 28, expected n × 28 × 28"),
        ("images-idx3", gzip.compress(idx(PICTURES[:0])), "its header says 0 × 28 × 28"),
        ("images-idx3", gzip.compress(idx(PICTURES)[:-1]), "it has 9407 bytes after its header, which says 9408"),
        ("images-idx3", gzip.compress(idx(PICTURES) + b"\0"), "it has 9409 bytes after its header"),
        ("labels-idx1", gzip.compress(idx(LABELS[:-1])), "it has 11 labels, but there are 12 images"),
        ("labels-idx1", gzip.compress(idx(LABELS + 1)), r"it has the label 10, expected 0\.\.9"),
    ],
)
def test_wrong_idx_files_are_refused(monkeypatch, tmp_path, file, content, reason):
    path = f"mnist/train-{file}-ubyte.gz"
    put(monkeypatch, tmp_path, "mnist", mnist_contents() | {path: content})
    with pytest.raises(DamagedDataError, match=f"train-{file}-ubyte.gz is not the mnist data.*{reason}"):
        load_images("mnist", tmp_path)
    assert not (tmp_path / path).exists()
    assert (tmp_path / f"{path}.rejected").exists()


# Names, and the digits


def test_unknown_names_and_tables():
    with pytest.raises(UnknownDataSetError, match=r"there is no data set 'cifar'; the known ones are .*cifar10, mnist"):
        load_images("cifar")
    with pytest.raises(ValueError, match=r"boston is a table, .* the sets of images are cifar10, mnist, digits$"):
        load_images("boston")
    with pytest.raises(ValueError, match="load_images gives it"):
        splits_of("digits")


def test_digits_need_no_file(tmp_path):
    found, again = load_images("digits", tmp_path), load_images("digits", tmp_path)
    assert found.x_train.shape == (1438, 1, 8, 8)
    assert found.x_test.shape == (359, 1, 8, 8)
    np.testing.assert_array_equal(found.x_train, again.x_train)
    assert found.x_train.max() == 240
    assert not (found.x_train % 15).any()
    train, test = np.bincount(found.y_train), np.bincount(found.y_test)
    np.testing.assert_allclose(test / (train + test), 0.2, atol=0.003)
    # Every row of the whole is in one part, and the labels came along.
    from sklearn.datasets import load_digits

    whole = load_digits()
    rows = np.concatenate([found.x_train, found.x_test]).reshape(1797, 64) // 15
    parts = np.column_stack([rows, np.concatenate([found.y_train, found.y_test])])
    expected = np.column_stack([whole.data, whole.target])
    np.testing.assert_array_equal(np.array(sorted(parts.tolist())), np.array(sorted(expected.tolist())))
    assert found.mean == pytest.approx((found.x_train.mean() / 255,))
    assert found.std == pytest.approx((found.x_train.std() / 255,))


def test_commands_know_the_digits(tmp_path):
    run = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}).invoke
    listed = run(app, ["list", "--data-dir", str(tmp_path)]).output
    assert "digits  comes with scikit-learn" in listed
    assert "1797 images of 64 numbers; 1 fixed split" in listed
    verified = run(app, ["verify", "--data-dir", str(tmp_path)]).output
    line = next(line for line in verified.splitlines() if line.startswith("digits"))
    assert line.split() == ["digits", "yes", "1797", "×", "64", "1", "with", "scikit-learn"]
    assert "digits: comes with scikit-learn" in run(app, ["fetch", "digits", "--data-dir", str(tmp_path)]).output


# Images as an object, and subsets


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"x_train": np.zeros((40, 3, 4, 4))}, "x_train must be uint8 and y_train int64; those of made are float64"),
        ({"y_test": np.zeros(8, dtype=np.int32)}, "y_test int64; .* and int32"),
        ({"x_test": np.zeros((8, 48), dtype=np.uint8)}, r"x_test must be \[n, C, H, W\]"),
        ({"y_train": np.zeros(39, dtype=np.int64)}, r"y_train \[n\].*\(39,\)"),
        ({"x_test": np.zeros((0, 3, 4, 4), dtype=np.uint8), "y_test": np.zeros(0, dtype=np.int64)}, "none of them 0"),
        ({"x_test": np.zeros((8, 3, 4, 5), dtype=np.uint8)}, r"one shape; .*\(3, 4, 4\) and \(3, 4, 5\)"),
        ({"classes": 3}, r"y_train of made has labels in 0\.\.3, expected within 0\.\.2"),
        ({"y_test": np.arange(8) - 1}, r"y_test of made has labels in -1\.\.6"),
        ({"mean": (0.5,)}, "each of the 3 channels of made; got 1 and 3"),
        ({"mean": (0.5, np.nan, 0.5)}, "mean must be finite"),
        ({"std": (0.2, 0.0, 0.2)}, "std must be positive"),
    ],
)
def test_images_are_checked_when_made(changes, reason):
    with pytest.raises(ValueError, match=reason):
        made(**changes)


def test_subset_is_of_the_training_rows():
    whole = made()
    few, more = subset(whole, 20, seed=3), subset(whole, 30, seed=3)
    assert few.x_train.shape == (20, 3, 4, 4)
    assert few.x_test is whole.x_test
    assert (few.mean, few.classes, few.name) == (whole.mean, 4, "made")
    place = {image.tobytes(): row for row, image in enumerate(whole.x_train)}
    rows = [place[image.tobytes()] for image in few.x_train]
    assert rows == sorted(set(rows))
    np.testing.assert_array_equal(few.y_train, whole.y_train[rows])
    assert set(rows) < {place[image.tobytes()] for image in more.x_train}
    np.testing.assert_array_equal(few.x_train, subset(whole, 20, seed=3).x_train)
    assert not np.array_equal(few.x_train, subset(whole, 20, seed=4).x_train)
    np.testing.assert_array_equal(subset(whole, 40, seed=5).x_train, whole.x_train)


def test_subset_mistakes():
    for count in (0, 41):
        with pytest.raises(ValueError, match=f"has 1 to 40 training rows; got {count}"):
            subset(made(), count, seed=0)
    with pytest.raises(ValueError, match=r"no image of the classes \[\d, \d, \d\]: take more rows"):
        subset(made(), 1, seed=0)


# Out of distribution


def put_svhn(folder, **arrays):
    (folder / "svhn").mkdir(exist_ok=True)
    np.savez(folder / "svhn" / "svhn_subset.npz", **arrays)


def test_only_the_test_images_are_out_of_distribution(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (5, 3, 32, 32), dtype=np.uint8)
    put_svhn(tmp_path, x_test=x, y_test=np.zeros(5, dtype=np.uint8), x_train=x[:2])
    np.testing.assert_array_equal(load_out_of_distribution(tmp_path), x)


def test_missing_svhn_says_where_it_is_looked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("NOISYGRAD_DATA", str(tmp_path))
    place = tmp_path / "svhn" / "svhn_subset.npz"
    with pytest.raises(MissingDataError, match=f"is not at {place}. It has no official address"):
        load_out_of_distribution()


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"x_train": np.zeros((2, 3, 32, 32), dtype=np.uint8)}, "no array x_test"),
        ({"x_test": np.zeros((2, 3, 32, 32))}, "x_test is float64"),
        ({"x_test": np.zeros((2, 32, 32, 3), dtype=np.uint8)}, r"\[2, 32, 32, 3\]"),
        ({"x_test": np.zeros((0, 3, 32, 32), dtype=np.uint8)}, r"\[0, 3, 32, 32\]"),
        ({"x_test": np.array([{}], dtype=object)}, "cannot be read as an npz file .*allow_pickle"),
    ],
)
def test_wrong_svhn_is_refused(tmp_path, arrays, reason):
    put_svhn(tmp_path, **arrays)
    with pytest.raises(DamagedDataError, match=f"is not the SVHN subset: .*{reason}.*has no official address"):
        load_out_of_distribution(tmp_path)


def test_truncated_svhn_is_refused(tmp_path):
    put_svhn(tmp_path, x_test=np.zeros((2, 3, 32, 32), dtype=np.uint8))
    file = tmp_path / "svhn" / "svhn_subset.npz"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DamagedDataError, match="cannot be read as an npz file"):
        load_out_of_distribution(tmp_path)


# The real data


def test_real_mnist(real):
    found = load_images("mnist", real("mnist"))
    assert found.x_train.shape == (60000, 1, 28, 28)
    assert found.x_test.shape == (10000, 1, 28, 28)
    assert found.y_train[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert np.bincount(found.y_train).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert found.x_train.mean() / 255 == pytest.approx(found.mean[0], abs=1e-4)
    assert found.x_train.std() / 255 == pytest.approx(found.std[0], abs=1e-4)


def test_real_cifar(real):
    found = load_images("cifar10", real("cifar-10-batches-bin"))
    assert found.x_train.shape == (50000, 3, 32, 32)
    assert np.bincount(found.y_train).tolist() == [5000] * 10
    assert np.bincount(found.y_test).tolist() == [1000] * 10
    assert found.x_train.mean(axis=(0, 2, 3)) / 255 == pytest.approx(found.mean, abs=1e-4)


def test_real_svhn(real):
    found = load_out_of_distribution(real("svhn"))
    assert found.shape == (949, 3, 32, 32)
    assert found.dtype == np.uint8
