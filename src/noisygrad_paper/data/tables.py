"""Regression data as tables of numbers, from the cache or from scikit-learn."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from noisygrad_paper.data.catalogue import DATA_SETS, data_directory, data_set
from noisygrad_paper.data.files import read_arrays


@dataclass(frozen=True, kw_only=True, eq=False)
class DataTable:
    """Inputs and a target, as they were measured: nothing is standardised yet.

    Raises ValueError when made with shapes that do not fit, or with numbers that are not finite.
    """

    name: str
    label: str
    """How results name the task; it tells naval's two tasks apart."""
    x: NDArray[np.float64]
    """[n, d]"""
    y: NDArray[np.float64]
    """[n]"""
    target: str = ""
    """What the target is, with its unit."""

    def __post_init__(self) -> None:
        if self.x.ndim != 2 or self.y.shape != self.x.shape[:1]:
            raise ValueError(f"x must be [n, d] and y [n]; got {self.x.shape} and {self.y.shape}")
        if not (np.isfinite(self.x).all() and np.isfinite(self.y).all()):
            raise ValueError(f"{self.name} has numbers that are not finite")

    @property
    def rows(self) -> int:
        """How many examples there are."""
        return int(self.x.shape[0])

    @property
    def features(self) -> int:
        """How many inputs an example has."""
        return int(self.x.shape[1])


def load_table(name: str, data_dir: str | Path | None = None) -> DataTable:
    """The regression set of that name in the catalogue, its checksum verified, from the cache (`data_directory`).

    Raises `UnknownDataSetError` with the names there are, `MissingDataError` with the command that fetches the file,
    `DamagedDataError` for a wrong file, which is renamed and not used, and ValueError for a set of images.
    """
    entry = data_set(name)
    if entry.kind != "table":
        tables = ", ".join(entry.name for entry in DATA_SETS.values() if entry.kind == "table")
        raise ValueError(f"{name} holds images, not a table; the tables are {tables}")
    if not entry.files:
        x, y = _diabetes()
    else:
        arrays = read_arrays(entry, data_directory(data_dir))
        x, y = arrays["x"], arrays["y"]
        if name == "naval-turbine":
            x, y = np.column_stack([x, y]), arrays["turbine_decay"]
    x = np.ascontiguousarray(x)
    return DataTable(name=name, label=entry.label, x=x, y=y, target=entry.target)


def _diabetes() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    # scikit-learn takes a while to import; no other set needs it.
    from sklearn.datasets import load_diabetes

    found = load_diabetes(scaled=False)
    return np.asarray(found.data, dtype=np.float64), np.asarray(found.target, dtype=np.float64)
