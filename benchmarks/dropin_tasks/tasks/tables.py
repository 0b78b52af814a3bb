"""Tables: classes, numbers, several numbers, counts; faulty targets and rare classes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..networks.tables import perceptron
from ..networks.widths import scaled
from ..store import Store
from ..task import Data, Task, parts, scaling, split


def table(
    x: NDArray[np.generic], y: NDArray[np.generic], *, test: int, train: int | None = None, standardise: bool = False
) -> Data:
    """A table with standardised columns and, with `standardise`, targets (by the training rows)."""
    rows = split(len(x), test, train)
    shift, scale = scaling(x[rows[0]])
    if standardise:
        y = y[:, None] if y.ndim == 1 else y
        y_shift, y_scale = scaling(y[rows[0]])
        y = (y - y_shift) / y_scale
    return Data(*parts(((x - shift) / scale,), y, rows))


def regression(store: Store, source: str, *, test: int, train: int | None = None) -> Data:
    """A source's `x` and `y`, both standardised."""
    arrays = store.arrays(source)
    return table(arrays["x"], arrays["y"], test=test, train=train, standardise=True)


def classification(store: Store, source: str, *, test: int, train: int | None = None) -> Data:
    """A source's `x`, standardised, and its labels or counts as they are."""
    arrays = store.arrays(source)
    y = arrays["y"]
    return table(arrays["x"], y[:, None] if y.dtype.kind == "f" and y.ndim == 1 else y, test=test, train=train)


def outputs_of(data: Data) -> int:
    """How many numbers a target has."""
    return data.train.targets.shape[1]


def columns_of(data: Data) -> int:
    """How many columns the table has."""
    return data.train.inputs[0].shape[1]


def counts(store: Store, source: str, *, test: int, train: int | None = None) -> Data:
    """A source's `x`, standardised, and its counts."""
    arrays = store.arrays(source)
    return table(arrays["x"], arrays["y"].reshape(len(arrays["y"]), -1).astype(np.int64), test=test, train=train)


TASKS = (
    Task(
        name="kin8nm-deep",
        half="tune",
        kind="deep, plain",
        about="eight tanh layers on a robot arm",
        sources=("uci-kin8nm",),
        data=lambda store: regression(store, "uci-kin8nm", test=1500, train=5000),
        network=lambda d, width: perceptron(columns_of(d), (scaled(64, width),) * 8, 1),
        likelihood="gaussian",
        batch=64,
        steps=4000,
    ),
    Task(
        name="randhie-counts",
        half="tune",
        kind="counts",
        about="visits to a doctor",
        sources=("randhie",),
        data=lambda store: counts(store, "randhie", test=2000, train=5000),
        network=lambda d, width: perceptron(columns_of(d), (scaled(64, width), scaled(64, width)), 1),
        likelihood="poisson",
        batch=64,
        steps=3000,
    ),
    Task(
        name="concrete-regression",
        half="tune",
        kind="table, regression",
        about="strength of concrete",
        sources=("uci-concrete",),
        data=lambda store: regression(store, "uci-concrete", test=200),
        network=lambda d, width: perceptron(columns_of(d), (scaled(64, width), scaled(64, width)), 1),
        likelihood="gaussian",
        batch=32,
        steps=4000,
    ),
)
