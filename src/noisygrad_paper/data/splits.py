"""Training and test rows, and the standardisation that each split has of its own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from noisygrad_paper.data.catalogue import data_set
from noisygrad_paper.data.tables import DataTable

Split: TypeAlias = tuple[NDArray[np.intp], NDArray[np.intp]]
"""Row numbers for training, and row numbers for testing."""


def standard_splits(rows: int, count: int) -> list[Split]:
    """The splits of Hernández-Lobato & Adams (2015), which need no index files: 90 % of the rows for training.

    The first `count` are the same whatever `count` is.
    """
    if rows < 2 or count < 1:
        raise ValueError(f"splits need at least 2 rows and a count of at least 1; got {rows} and {count}")
    # The legacy generator is the point: the published splits were drawn with it.
    generator = np.random.RandomState(1)
    end = min(math.floor(0.9 * rows + 0.5), rows - 1)
    orders = (generator.choice(rows, rows, replace=False) for _ in range(count))
    return [(order[:end], order[end:]) for order in orders]


def splits_of(name: str) -> list[Split]:
    """The standard splits of a data set: 20; protein 5; year 1, with the rows in their given order."""
    entry = data_set(name)
    if entry.kind != "table":
        raise ValueError(f"{name} holds images, which have one fixed split: load_images gives it")
    if entry.first_rows_train is not None:
        order = np.arange(entry.rows, dtype=np.intp)
        return [(order[: entry.first_rows_train], order[entry.first_rows_train :])]
    return standard_splits(entry.rows, entry.splits)


@dataclass(frozen=True, kw_only=True, eq=False)
class Standardised:
    """R splits of a table, each standardised by its own training rows; the target too."""

    x_train: NDArray[np.float64]
    """[R, n, d]"""
    y_train: NDArray[np.float64]
    """[R, n, 1]"""
    x_test: NDArray[np.float64]
    """[R, m, d]"""
    y_test: NDArray[np.float64]
    """[R, m, 1]"""
    y_mean: NDArray[np.float64]
    """[R], in the target's unit"""
    y_std: NDArray[np.float64]
    """[R], in the target's unit; an error times it, or a density divided by it, is in that unit again"""


def standardised(
    table: DataTable, splits: Sequence[Split], *, ones: Sequence[int] = (), by_all_rows: bool = False
) -> Standardised:
    """Mean 0 and standard deviation 1 (with divisor n) on each split's training rows; a constant becomes 0, not NaN.

    All splits must have the same sizes.

    Args:
        table: The data.
        splits: Rows for training and testing.
        ones: Constant inputs that become 1 instead, by their position: more biases. Where the deviation of a constant
            is a rounding error and not 0, a plain division makes it 1, and published figures contain that.
        by_all_rows: Standardise by the whole table: for splits whose training rows are too few to say much.
    """
    varying = [column for column in ones if np.ptp(table.x[:, column]) > 0.0]
    if varying:
        raise ValueError(f"only a constant input can become 1; the inputs {varying} of {table.name} vary")
    sizes = {(len(train), len(test)) for train, test in splits}
    if len(sizes) != 1:
        raise ValueError(f"all splits must have the same sizes, and there must be one; got {sorted(sizes)}")
    parts: dict[str, list[NDArray[np.float64]]] = {name: [] for name in Standardised.__annotations__}
    for train, test in splits:
        rows = slice(None) if by_all_rows else train
        x_mean, x_std = _moments(table.x[rows])
        y_mean, y_std = _moments(table.y[rows, None])
        parts["x_train"].append((table.x[train] - x_mean) / x_std)
        parts["x_test"].append((table.x[test] - x_mean) / x_std)
        parts["y_train"].append((table.y[train, None] - y_mean) / y_std)
        parts["y_test"].append((table.y[test, None] - y_mean) / y_std)
        parts["y_mean"].append(y_mean[0])
        parts["y_std"].append(y_std[0])
    made = {name: np.stack(values) for name, values in parts.items()}
    for name in ("x_train", "x_test"):
        made[name][..., list(ones)] = 1.0
    return Standardised(**made)


def _moments(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and standard deviation of the columns, where a constant column has exactly its value and 1."""
    # The computed deviation of a constant such as 0.998 is a rounding error, not 0: dividing by it would make noise.
    constant = values.min(axis=0) == values.max(axis=0)
    mean = np.where(constant, values[0], values.mean(axis=0))
    return mean, np.where(constant, 1.0, values.std(axis=0))
