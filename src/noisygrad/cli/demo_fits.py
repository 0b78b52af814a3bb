"""The four posteriors and a point estimate on two data sets that come with scikit-learn.

Diabetes (regression) and digits (classification), with the estimators' defaults but for the sizes of the networks. One
split and one training each: an illustration, not a benchmark. `run` takes about a minute; its page is made by
`noisygrad.cli.demo_page`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_diabetes, load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from noisygrad import metrics
from noisygrad.estimators.estimators import NoisyClassifier, NoisyRegressor, PosteriorName
from noisygrad.kernels.threads import one_thread
from noisygrad.posterior import Posterior
from noisygrad.predictions import Prediction
from noisygrad.versions import versions

DataName: TypeAlias = Literal["diabetes", "digits"]
Announce: TypeAlias = Callable[[DataName, str], None]

DATA: tuple[DataName, ...] = ("diabetes", "digits")
FAMILIES: tuple[PosteriorName, ...] = ("diagonal", "kronecker", "tridiagonal", "full")
METHODS: dict[str, PosteriorName] = {"point": "kronecker", **{family: family for family in FAMILIES}}
"""The point estimate is K-FAC with the same prior as weight decay: the Kronecker posterior without its noise."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """What the demonstration fits; raises ValueError when made with values that make no sense."""

    seed: int = 0
    test_share: float = 0.25
    regression_hidden: tuple[int, ...] = (15, 15)
    """As in the paper's Figure 1; small, so that a dense precision can be looked at."""
    classification_hidden: tuple[int, ...] = (10,)
    """Fewer than a thousand weights, so that a full covariance is trained like the others."""
    regression_epochs: int | None = None
    """None: as many as the estimator finds right for the data."""
    classification_epochs: int | None = None
    num_samples: int = 100
    """Weight samples per prediction."""

    def __post_init__(self) -> None:
        if self.seed < 0 or self.seed >= 2**32:
            raise ValueError(f"seed must be in 0..2^32 - 1; got {self.seed}")
        if not 0 < self.test_share < 1:
            raise ValueError(f"test_share must be strictly between 0 and 1; got {self.test_share}")
        for name in ("regression_hidden", "classification_hidden"):
            if any(width < 1 for width in getattr(self, name)):
                raise ValueError(f"{name} must be widths of at least 1; got {getattr(self, name)}")
        for name in ("regression_epochs", "classification_epochs", "num_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")

    @classmethod
    def quick(cls, seed: int = 0) -> Self:
        """A trial of the machinery in some seconds: far too few epochs for good numbers."""
        return cls(seed=seed, regression_epochs=4, classification_epochs=4, num_samples=20)


@dataclass(frozen=True, kw_only=True)
class Split:
    """Training and test examples, the same for every method."""

    train_x: NDArray[np.float64]
    train_y: NDArray[Any]
    test_x: NDArray[np.float64]
    test_y: NDArray[Any]

    @property
    def target(self) -> Tensor:
        """The test targets as a tensor."""
        return torch.from_numpy(self.test_y)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One method on one data set: what it predicts for the test examples, and how good that is."""

    data: DataName
    method: str
    posterior: Posterior
    prediction: Prediction
    metrics: dict[str, float]
    seconds: float
    """Of the fit alone."""
    settings: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Everything `run` found."""

    config: DemoConfig
    splits: dict[DataName, Split]
    fits: tuple[Fit, ...]

    def of(self, data: DataName) -> dict[str, Fit]:
        """The fits to one data set by method."""
        return {fit.method: fit for fit in self.fits if fit.data == data}

    def rows(self) -> list[dict[str, Any]]:
        """One row per fit, as `results/` keeps them."""
        shared = {"experiment": "demo", "replicate": self.config.seed, "versions": versions(), "device": "cpu"}
        return [
            {
                **shared,
                "data": fit.data,
                "method": fit.method,
                "config": asdict(self.config) | {"estimator": fit.settings},
                "metrics": fit.metrics,
                "seconds": fit.seconds,
            }
            for fit in self.fits
        ]


def run(config: DemoConfig, announce: Announce | None = None) -> Demo:
    """Fit every method to both data sets; `announce(data, method)` is called before each fit.

    The same seed gives the same numbers on the same machine. Torch uses one thread meanwhile: the networks are small.
    """
    splits = {data: load_split(data, config) for data in DATA}
    fits = []
    with one_thread():
        for data, split in splits.items():
            for method in METHODS:
                if announce is not None:
                    announce(data, method)
                fits.append(_fit(data, method, split, config))
    return Demo(config=config, splits=splits, fits=tuple(fits))


def load_split(data: DataName, config: DemoConfig) -> Split:
    """A data set of scikit-learn's, divided at random by the seed (digits: with every class in proportion)."""
    x, y = (load_diabetes if data == "diabetes" else load_digits)(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        x, y, test_size=config.test_share, random_state=config.seed, stratify=y if data == "digits" else None
    )
    return Split(train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y)


def _fit(data: DataName, method: str, split: Split, config: DemoConfig) -> Fit:
    regression = data == "diabetes"
    estimator = (NoisyRegressor if regression else NoisyClassifier)(
        posterior=METHODS[method],
        hidden=config.regression_hidden if regression else config.classification_hidden,
        noise=method != "point",
        epochs=config.regression_epochs if regression else config.classification_epochs,
        num_samples=config.num_samples,
        random_state=config.seed,
    )
    start = time.perf_counter()
    estimator.fit(split.train_x, split.train_y)
    seconds = time.perf_counter() - start
    prediction, posterior = estimator.predict_distribution(split.test_x), estimator.posterior_
    found = _regression_metrics(prediction, split) if regression else _classification_metrics(prediction, split)
    return Fit(
        data=data,
        method=method,
        posterior=posterior,
        prediction=prediction,
        metrics={**found, "kl": float(posterior.kl()) if method != "point" else math.nan},
        seconds=seconds,
        settings=estimator.get_params(),
    )


def _regression_metrics(prediction: Prediction, split: Split) -> dict[str, float]:
    return {
        "rmse": metrics.rmse(prediction, split.target),
        "log_likelihood": metrics.log_likelihood(prediction, split.target),
        "coverage": metrics.interval_coverage(prediction, split.target, 0.9),
    }


def _classification_metrics(prediction: Prediction, split: Split) -> dict[str, float]:
    return {
        "accuracy": 100 * metrics.accuracy(prediction, split.target),
        "log_likelihood": metrics.log_likelihood(prediction, split.target),
        "ece": metrics.ece(prediction, split.target),
    }
