"""Sets of images, from their official files or from scikit-learn, and images that belong to none of their classes."""

import gzip
import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from noisygrad_paper.data.catalogue import DATA_SETS, DataSet, data_directory, data_set
from noisygrad_paper.data.files import (
    DamagedDataError,
    MissingDataError,
    check_size,
    read_official,
    refused,
    unpack_arrays,
)

Pixels: TypeAlias = NDArray[np.uint8]
"""Images as bytes."""
Labels: TypeAlias = NDArray[np.int64]
"""The classes of images, counted from 0."""

_Parts: TypeAlias = tuple[Pixels, Labels, Pixels, Labels]  # for training, then for testing
_CLASSES = 10
_OUT_OF_DISTRIBUTION = "svhn/svhn_subset.npz"


@dataclass(frozen=True, kw_only=True, eq=False)
class Images:
    """Images of several classes with their fixed split, as bytes: nothing is normalised yet.

    Raises ValueError when made with arrays that do not fit together.
    """

    name: str
    x_train: Pixels
    """[n, C, H, W]"""
    y_train: Labels
    """[n]"""
    x_test: Pixels
    """[m, C, H, W]"""
    y_test: Labels
    """[m]"""
    classes: int
    mean: tuple[float, ...]
    """Of each channel, where a byte of 255 is 1."""
    std: tuple[float, ...]
    """Of each channel, where a byte of 255 is 1: (x / 255 − mean) / std is what a network is to see."""

    def __post_init__(self) -> None:
        for part, x, y in (("train", self.x_train, self.y_train), ("test", self.x_test, self.y_test)):
            self._check_part(part, x, y)
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            raise ValueError(
                f"images for training and testing must have one shape; those of {self.name} have "
                f"{self.x_train.shape[1:]} and {self.x_test.shape[1:]}"
            )
        channels = self.x_train.shape[1]
        if len(self.mean) != channels or len(self.std) != channels:
            raise ValueError(
                f"mean and std must have one number for each of the {channels} channels of {self.name}; got "
                f"{len(self.mean)} and {len(self.std)}"
            )
        if not all(math.isfinite(value) for value in self.mean):
            raise ValueError(f"mean must be finite; got {self.mean} for {self.name}")
        if not all(math.isfinite(value) and value > 0.0 for value in self.std):
            raise ValueError(f"std must be positive and finite; got {self.std} for {self.name}")

    def _check_part(self, part: str, x: Pixels, y: Labels) -> None:
        if x.dtype != np.uint8 or y.dtype != np.int64:
            raise ValueError(
                f"x_{part} must be uint8 and y_{part} int64; those of {self.name} are {x.dtype} and {y.dtype}"
            )
        if x.ndim != 4 or y.shape != x.shape[:1] or 0 in x.shape:
            raise ValueError(
                f"x_{part} must be [n, C, H, W] and y_{part} [n], none of them 0; those of {self.name} are {x.shape} "
                f"and {y.shape}"
            )
        if y.min() < 0 or y.max() >= self.classes:
            raise ValueError(
                f"y_{part} of {self.name} has labels in {y.min()}..{y.max()}, expected within 0..{self.classes - 1}"
            )


def load_images(name: str, data_dir: str | Path | None = None) -> Images:
    """The set of images of that name in the catalogue, checksums verified, from the cache (`data_directory`).

    `cifar10` and `mnist` have their official split. `digits`, which comes with scikit-learn, has a fixed one: four
    fifths of each class are for training, and a grey value of 16 becomes a byte of 240. Raises as `load_table` does.
    """
    entry = data_set(name)
    if entry.kind != "images":
        known = ", ".join(entry.name for entry in DATA_SETS.values() if entry.kind == "images")
        raise ValueError(f"{name} is a table, not a set of images; the sets of images are {known}")
    x_train, y_train, x_test, y_test = _LOADERS[name](entry, data_directory(data_dir))
    mean, std = _MOMENTS.get(name) or _moments(x_train)
    return Images(
        name=name, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test, classes=_CLASSES, mean=mean, std=std
    )


def load_out_of_distribution(data_dir: str | Path | None = None) -> Pixels:
    """House numbers, uint8 [n, 3, 32, 32]: a part of SVHN's test images, which no class of CIFAR-10 fits.

    Raises `MissingDataError`, which says where the file is looked for (no command fetches it), or `DamagedDataError`.
    """
    path = data_directory(data_dir) / _OUT_OF_DISTRIBUTION
    form = "an npz file with x_test, uint8 [n, 3, 32, 32]"
    if not path.is_file():
        raise MissingDataError(
            f"the SVHN subset is not at {path}. It has no official address, so no command fetches it: put {form}, there"
        )
    try:
        check_size(path.stat().st_size, "it")
        x = unpack_arrays(path.read_bytes()).get("x_test")
        if x is None:
            raise DamagedDataError("it has no array x_test")
        if x.dtype != np.uint8 or x.ndim != 4 or x.shape[1:] != (3, 32, 32) or not len(x):
            raise DamagedDataError(f"x_test is {x.dtype} {list(x.shape)}")
    except DamagedDataError as error:
        raise DamagedDataError(
            f"{path} is not the SVHN subset: {error}. It is not used, and has no official address: put {form}, there"
        ) from error
    return x


def subset(images: Images, count: int, seed: int) -> Images:
    """The same set with `count` random rows for training, in their order, for quick runs; the test part is whole.

    With one seed, a smaller subset is part of a larger one. ValueError where a class has no row among those drawn.
    """
    rows = len(images.y_train)
    if not 1 <= count <= rows:
        raise ValueError(f"a subset of {images.name} has 1 to {rows} training rows; got {count}")
    # The legacy generator's numbers never change; those of the new one may, with numpy's version.
    chosen = np.sort(np.random.RandomState(seed).permutation(rows)[:count])
    y_train = images.y_train[chosen]
    if missing := sorted(set(range(images.classes)) - set(y_train.tolist())):
        raise ValueError(
            f"{count} training rows of {images.name} drawn with seed {seed} have no image of the classes {missing}: "
            "take more rows"
        )
    return replace(images, x_train=images.x_train[chosen], y_train=y_train)


def _cifar10(entry: DataSet, directory: Path) -> _Parts:
    parts = {relative: _cifar10_batch(entry, directory, relative) for relative in entry.files}
    tests = [part for relative, part in parts.items() if Path(relative).stem == "test_batch"]
    trains = [part for relative, part in parts.items() if Path(relative).stem != "test_batch"]
    (x_train, y_train), (x_test, y_test) = (
        (np.concatenate([x for x, _ in group]), np.concatenate([y for _, y in group])) for group in (trains, tests)
    )
    return x_train, y_train, x_test, y_test


def _cifar10_batch(entry: DataSet, directory: Path, relative: str) -> tuple[Pixels, Labels]:
    """Records of a label and the red, the green and the blue plane, one byte a number."""
    content = read_official(entry, directory, relative)
    size = 1 + entry.features
    try:
        if not content or len(content) % size:
            raise DamagedDataError(f"its {len(content)} bytes are not records of {size}")
        records = np.frombuffer(content, dtype=np.uint8).reshape(-1, size)
        return records[:, 1:].reshape(-1, 3, 32, 32), _labels(records[:, 0])
    except DamagedDataError as error:
        raise refused(entry, directory, directory / relative, str(error)) from error


def _mnist(entry: DataSet, directory: Path) -> _Parts:
    def part(name: str) -> tuple[Pixels, Labels]:
        x = _idx_file(entry, directory, f"mnist/{name}-images-idx3-ubyte.gz", (28, 28))
        labels = f"mnist/{name}-labels-idx1-ubyte.gz"
        numbers = _idx_file(entry, directory, labels, ())
        try:
            if len(numbers) != len(x):
                raise DamagedDataError(f"it has {len(numbers)} labels, but there are {len(x)} images")
            return x[:, None], _labels(numbers)
        except DamagedDataError as error:
            raise refused(entry, directory, directory / labels, str(error)) from error

    return *part("train"), *part("t10k")


def _idx_file(entry: DataSet, directory: Path, relative: str, shape: tuple[int, ...]) -> Pixels:
    """Bytes in the idx format, packed with gzip: a mark, the sizes as big-endian numbers, and the bytes."""
    packed = read_official(entry, directory, relative)
    dimensions = 1 + len(shape)
    start = 4 * (1 + dimensions)
    try:
        content = gzip.decompress(packed)
        if len(content) < start:
            raise DamagedDataError(f"its {len(content)} bytes are less than its header")
        mark, *sizes = struct.unpack_from(f">{1 + dimensions}I", content)
        # The third byte of the mark says that the numbers are bytes; the fourth, how many sizes follow.
        if mark != 0x0800 + dimensions:
            raise DamagedDataError(f"its mark is {mark:#010x}, expected {0x0800 + dimensions:#010x}")
        if tuple(sizes[1:]) != shape or not sizes[0]:
            expected = " × ".join(["n", *map(str, shape)])
            raise DamagedDataError(f"its header says {' × '.join(map(str, sizes))}, expected {expected}")
        if len(content) - start != math.prod(sizes):
            raise DamagedDataError(
                f"it has {len(content) - start} bytes after its header, which says {math.prod(sizes)}"
            )
    except (DamagedDataError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise refused(entry, directory, directory / relative, str(error)) from error
    # A copy, since torch warns of arrays that cannot be written to.
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(sizes).copy()


def _labels(numbers: Pixels) -> Labels:
    if wrong := sorted(set(numbers[numbers >= _CLASSES].tolist())):
        raise DamagedDataError(f"it has the label {wrong[0]}, expected 0..{_CLASSES - 1}")
    return numbers.astype(np.int64)


def _digits(entry: DataSet, directory: Path) -> _Parts:
    # scikit-learn takes a while to import; no other set needs it.
    from sklearn.datasets import load_digits

    found = load_digits()
    x = (np.asarray(found.images)[:, None] * 15).astype(np.uint8)
    y = np.asarray(found.target, dtype=np.int64)
    generator = np.random.RandomState(0)
    orders = [generator.permutation(np.flatnonzero(y == label)) for label in range(_CLASSES)]
    test = np.sort(np.concatenate([order[: round(0.2 * len(order))] for order in orders]))
    train = np.setdiff1d(np.arange(len(y)), test)
    return x[train], y[train], x[test], y[test]


def _moments(x: Pixels) -> tuple[tuple[float, ...], tuple[float, ...]]:
    scaled = x / 255.0
    return tuple(scaled.mean(axis=(0, 2, 3)).tolist()), tuple(scaled.std(axis=(0, 2, 3)).tolist())


_LOADERS: dict[str, Callable[[DataSet, Path], _Parts]] = {"cifar10": _cifar10, "mnist": _mnist, "digits": _digits}

_MOMENTS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "mnist": ((0.1307,), (0.3081,)),
}
"""The usual constants. For CIFAR-10 the deviation is the mean of each image's own; that of all pixels is 0.25."""
