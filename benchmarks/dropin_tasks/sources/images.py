"""Small images: subsets of a few thousand, as bytes."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..store import UnavailableError
from ..task import Arrays
from .folder import data_file

if TYPE_CHECKING:
    from ..store import Store

Images = NDArray[np.uint8]


def digits(_: Store) -> Arrays:
    """Scikit-learn's 1797 digits: 8×8 counts from 0 to 16."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return {"x": found.images.astype(np.uint8), "y": found.target.astype(np.uint8)}


def _mnist_file(name: str) -> Images:
    raw = gzip.decompress(data_file("mnist", name).read_bytes())
    dimensions = raw[3]
    shape = np.frombuffer(raw, ">u4", dimensions, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def mnist(_: Store) -> Arrays:
    """The first 7000 images of MNIST's training set: 28×28."""
    return {
        "x": _mnist_file("train-images-idx3-ubyte.gz")[:7000],
        "y": _mnist_file("train-labels-idx1-ubyte.gz")[:7000],
    }


def halved(images: Images) -> Images:
    """Images `[n, channels, height, width]` at half their resolution."""
    n, channels, height, width = images.shape
    return images.reshape(n, channels, height // 2, 2, width // 2, 2).mean((3, 5)).round().astype(np.uint8)


def cifar10(_: Store) -> Arrays:
    """The first 7000 images of CIFAR-10 at half their resolution: 3×16×16."""
    path = data_file("cifar10", "data_batch_1.webp")
    try:
        from PIL import Image
    except ImportError as error:
        raise UnavailableError("CIFAR-10 is read by Pillow: pip install pillow") from error
    with np.load(data_file("cifar10", "labels.npz")) as file:
        labels = file["y_train"]
    grid = np.asarray(Image.open(path).convert("RGB"))
    rows, columns = grid.shape[0] // 32, grid.shape[1] // 32
    images = grid.reshape(rows, 32, columns, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)
    return {"x": halved(images[:7000]), "y": labels[:7000].astype(np.uint8)}


def svhn(_: Store) -> Arrays:
    """Street numbers, for inputs that are neither CIFAR's nor MNIST's: 3×16×16 and grey 28×28."""
    with np.load(data_file("svhn", "svhn_subset.npz")) as file:
        images = file["x_test"][:500]
    grey = images.mean(1)[:, 2:30, 2:30].round().astype(np.uint8)
    return {"half": halved(images), "grey": grey}


SOURCES: Mapping[str, Callable[[Store], Arrays]] = {
    "digits": digits,
    "mnist": mnist,
    "cifar10": cifar10,
    "svhn": svhn,
}
