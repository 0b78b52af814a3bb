"""Random arrays of the shapes of all the data that the drop-in suite reads, so that its tests need none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
COLUMNS = {"boston": 13, "concrete": 8, "energy": 8, "kin8nm": 8, "naval": 16, "power": 4, "protein": 9, "wine": 11}


def _table(rows: int, columns: int, labels: int | None = None) -> Callable[[np.random.RandomState], Arrays]:
    def make(random: np.random.RandomState) -> Arrays:
        y = random.randn(rows) if labels is None else random.randint(labels, size=rows)
        return {"x": random.randn(rows, columns), "y": y, "turbine_decay": random.randn(rows)}

    return make


def _images(rows: int, *shape: int, top: int = 256) -> Callable[[np.random.RandomState], Arrays]:
    return lambda random: {
        "x": random.randint(top, size=(rows, *shape)).astype(np.uint8),
        "y": random.randint(10, size=rows).astype(np.uint8),
    }


def _texts(rows: int, length: int, tokens: int, labels: int) -> Callable[[np.random.RandomState], Arrays]:
    def make(random: np.random.RandomState) -> Arrays:
        x = random.randint(1, tokens, size=(rows, length))
        x[np.arange(length) >= random.randint(1, length + 1, size=(rows, 1))] = 0
        return {"x": x.astype(np.uint16), "y": random.randint(labels, size=rows).astype(np.uint8)}

    return make


def _weights(name: str) -> Callable[[np.random.RandomState], Arrays]:
    def make(_: np.random.RandomState) -> Arrays:
        from dropin_tasks.sources import trunks

        return {key: tensor.numpy() for key, tensor in getattr(trunks, name)().state_dict().items()}

    return make


MADE: dict[str, Callable[[np.random.RandomState], Arrays]] = {
    **{f"uci-{name}": _table(2200, columns) for name, columns in COLUMNS.items()},
    "uci-wine": lambda random: {"x": random.randn(600, 11), "y": 3.0 + random.randint(6, size=600)},
    "sklearn-diabetes": _table(442, 10),
    "randhie": _table(2200, 9, 5),
    "affairs": _table(300, 8, 5),
    "anes96": _table(400, 8, 7),
    "segments": _table(700, 18, 7),
    "shuttle": _table(2200, 9, 2),
    "yeast": lambda random: {"x": random.randn(800, 103), "y": random.randint(2, size=(800, 14))},
    "digits": _images(1797, 8, 8, top=17),
    "mnist": _images(7000, 28, 28),
    "cifar10": _images(2600, 3, 16, 16),
    "svhn": lambda random: {
        "half": random.randint(256, size=(20, 3, 16, 16)).astype(np.uint8),
        "grey": random.randint(256, size=(20, 28, 28)).astype(np.uint8),
    },
    "docstrings": _texts(700, 48, 2000, 9),
    "source-lines": _texts(1200, 64, 97, 9),
    "names": _texts(1200, 24, 97, 1),
    "topics": lambda random: {"x": random.randint(1, 97, size=20_000).astype(np.uint8)},
    "library": lambda random: {"x": random.randint(1, 97, size=20_000).astype(np.uint8)},
    "trunk-mnist": _weights("mnist_trunk"),
    "trunk-mnist-perceptron": _weights("mnist_perceptron"),
    "trunk-cifar10": _weights("cifar_trunk"),
    "trunk-topics": _weights("language_model"),
}


def made(name: str) -> Arrays:
    """The arrays of a source, the same in every process."""
    return MADE[name](np.random.RandomState(sum(map(ord, name))))


def made_folder(folder: Path, *names: str) -> Path:
    """A prepared folder with these sources."""
    for name in names:
        arrays: dict[str, Any] = made(name)
        np.savez(folder / f"{name}.npz", **arrays)
    return folder
