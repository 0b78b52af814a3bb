"""Tables: classes, numbers, several numbers, counts; faulty targets and rare classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ..networks.tables import perceptron
from ..networks.widths import scaled
from ..store import Store
from ..task import Data, Part, Task, parts, scaling, split


def table(x: NDArray[Any], y: NDArray[Any], *, test: int, train: int | None = None, standardise: bool = False) -> Data:
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
    """A source's `x`, standardised, and its labels."""
    arrays = store.arrays(source)
    return table(arrays["x"], arrays["y"], test=test, train=train)


def answers(store: Store, source: str, *, test: int, train: int | None = None) -> Data:
    """A source's `x`, standardised, and yes or no as 1.0 or 0.0."""
    arrays = store.arrays(source)
    return table(arrays["x"], arrays["y"].reshape(len(arrays["y"]), -1).astype(np.float64), test=test, train=train)


def columns_of(data: Data) -> int:
    """How many columns the table has."""
    return data.train.inputs[0].shape[1]


def counts(store: Store, source: str, *, test: int, train: int | None = None) -> Data:
    """A source's `x`, standardised, and its counts."""
    arrays = store.arrays(source)
    return table(arrays["x"], arrays["y"].reshape(len(arrays["y"]), -1).astype(np.int64), test=test, train=train)


def faulty(store: Store, source: str, *, test: int, train: int | None = None) -> Data:
    """A regression of which one reading in fifty is ten deviations off; those of the test rows are right."""
    data = regression(store, source, test=test, train=train)

    def spoilt(part: Part) -> Part:
        targets = part.targets.clone()
        targets[::50] += 10.0
        return replace(part, targets=targets)

    return replace(data, train=spoilt(data.train), validation=spoilt(data.validation))


def wine_chemistry(store: Store) -> Data:
    """Acidity, density, pH and alcohol of wines by the other seven measurements."""
    x = store.arrays("uci-wine")["x"]
    predicted = [0, 7, 8, 10]
    return table(np.delete(x, predicted, axis=1), x[:, predicted], test=400, standardise=True)


def naval_decay(store: Store) -> Data:
    """The decay of a ship's compressor and of its turbine."""
    arrays = store.arrays("uci-naval")
    y = np.stack([arrays["y"], arrays["turbine_decay"].reshape(-1)], axis=1)
    return table(arrays["x"], y, test=1500, train=4000, standardise=True)


def shuttle(store: Store) -> Data:
    """Whether a reading is an anomaly, by the logarithms of numbers with long tails."""
    arrays = store.arrays("shuttle")
    x = np.sign(arrays["x"]) * np.log1p(np.abs(arrays["x"]))
    return table(x, arrays["y"][:, None].astype(np.float64), test=2000, train=4000)


def wine_quality(store: Store) -> Data:
    """Six grades of wine of which two are given to 5 of 6 bottles and one to ten bottles."""
    arrays = store.arrays("uci-wine")
    return table(arrays["x"], arrays["y"].astype(np.int64) - 3, test=400)


def digit_counts(store: Store) -> Data:
    """Pixels, counts from 0 to 16, of the last three rows of digits by the first five."""
    images = store.arrays("digits")["x"].astype(np.int64)
    x, y = images[:, :5].reshape(len(images), -1), images[:, 5:].reshape(len(images), -1)
    # All pixels alike: by themselves those that are hardly ever dark would be blown up.
    return Data(*parts(((x - x.mean()) / x.std(),), y, split(len(x), 450)))


def network(hidden: tuple[int, ...], outputs: int) -> Callable[[Data, float], nn.Module]:
    """A perceptron for a table with these widths."""
    return lambda data, width: perceptron(columns_of(data), tuple(scaled(w, width) for w in hidden), outputs)


TASKS = (
    Task(
        name="segments-classification",
        half="tune",
        kind="table, classes",
        about="seven kinds of image segments",
        sources=("segments",),
        data=lambda store: classification(store, "segments", test=500),
        network=network((64, 64), 7),
        likelihood="categorical",
        batch=32,
        steps=4000,
    ),
    Task(
        name="party-classification",
        half="report",
        kind="table, classes",
        about="which of seven degrees of party a voter is",
        sources=("anes96",),
        data=lambda store: classification(store, "anes96", test=300),
        network=network((32, 32), 7),
        likelihood="categorical",
        batch=32,
        steps=800,
    ),
    Task(
        name="concrete-regression",
        half="tune",
        kind="table, regression",
        about="strength of concrete",
        sources=("uci-concrete",),
        data=lambda store: regression(store, "uci-concrete", test=200),
        network=network((64, 64), 1),
        likelihood="gaussian",
        batch=32,
        steps=4000,
    ),
    Task(
        name="energy-regression",
        half="report",
        kind="table, regression",
        about="heating of buildings",
        sources=("uci-energy",),
        data=lambda store: regression(store, "uci-energy", test=150),
        network=network((50, 50), 1),
        likelihood="gaussian",
        batch=16,
        steps=5000,
    ),
    Task(
        name="wine-chemistry",
        half="tune",
        kind="table, several outputs",
        about="four measurements of wines by seven others",
        sources=("uci-wine",),
        data=wine_chemistry,
        network=network((64, 64), 4),
        likelihood="gaussian",
        batch=32,
        steps=4000,
    ),
    Task(
        name="naval-decay",
        half="report",
        kind="table, several outputs",
        about="decay of a ship's compressor and turbine, a noise for each",
        sources=("uci-naval",),
        data=naval_decay,
        network=network((64, 64), 2),
        likelihood="gaussian-per-output",
        batch=64,
        steps=4000,
    ),
    Task(
        name="yeast-functions",
        half="report",
        kind="table, several outputs",
        about="fourteen yes-or-no functions of genes",
        sources=("yeast",),
        data=lambda store: answers(store, "yeast", test=600),
        network=network((64,), 14),
        likelihood="bernoulli",
        batch=32,
        steps=600,
    ),
    Task(
        name="boston-faulty",
        half="tune",
        kind="outliers in targets",
        about="prices of houses, one in fifty ten deviations off",
        sources=("uci-boston",),
        data=lambda store: faulty(store, "uci-boston", test=100),
        network=network((50, 50), 1),
        likelihood="gaussian",
        batch=16,
        steps=1500,
    ),
    Task(
        name="power-faulty",
        half="report",
        kind="outliers in targets",
        about="output of a power plant, one in fifty ten deviations off",
        sources=("uci-power",),
        data=lambda store: faulty(store, "uci-power", test=1500, train=4000),
        network=network((64, 64), 1),
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
        network=network((64, 64), 1),
        likelihood="poisson",
        batch=64,
        steps=4000,
    ),
    Task(
        name="affairs-counts",
        half="report",
        kind="counts",
        about="affairs in a year",
        sources=("affairs",),
        data=lambda store: counts(store, "affairs", test=200),
        network=network((32, 32), 1),
        likelihood="poisson",
        batch=16,
        steps=1000,
    ),
    Task(
        name="digit-counts",
        half="report",
        kind="counts",
        about="pixels of the last rows of digits by the first",
        sources=("digits",),
        data=digit_counts,
        network=network((96, 96), 24),
        likelihood="poisson",
        batch=32,
        steps=3000,
    ),
    Task(
        name="wine-imbalanced",
        half="tune",
        kind="rare classes",
        about="six grades of wine, three of them rare",
        sources=("uci-wine",),
        data=wine_quality,
        network=network((64, 64), 6),
        likelihood="categorical",
        batch=32,
        steps=1500,
    ),
    Task(
        name="shuttle-imbalanced",
        half="report",
        kind="rare classes",
        about="anomalies of the Space Shuttle, 7 %; one logit",
        sources=("shuttle",),
        data=shuttle,
        network=network((32, 32), 1),
        likelihood="bernoulli",
        batch=64,
        steps=4000,
    ),
)
