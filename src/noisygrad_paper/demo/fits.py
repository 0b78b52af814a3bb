"""The four posteriors and a point estimate on two data sets that come with scikit-learn.

Diabetes (regression) and digits (classification), with the estimators' defaults but for the sizes of the networks. One
split and one training each: an illustration, not a benchmark. `run` takes about a minute; its page is made by
`noisygrad_paper.demo.page`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
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

DataName: TypeAlias = Literal["diabetes", "digits"]
Announce: TypeAlias = Callable[[DataName, str], None]

TEST_SHARE = 0.25
DATA: tuple[DataName, ...] = ("diabetes", "digits")
FAMILIES: tuple[PosteriorName, ...] = ("diagonal", "kronecker", "tridiagonal", "full")
METHODS: dict[str, PosteriorName] = {"point": "kronecker", **{family: family for family in FAMILIES}}
"""The point estimate is K-FAC with the same prior as weight decay: the Kronecker posterior without its noise."""


HIDDEN: dict[DataName, tuple[int, ...]] = {"diabetes": (15, 15), "digits": (10,)}
"""Small: a dense precision can be looked at, and a full covariance is trained like the others."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """What the demonstration fits; raises ValueError when made with values that make no sense."""

    seed: int = 0
    epochs: int | None = None
    """None: as many as the estimator finds right for the data."""
    num_samples: int = 100
    """Weight samples per prediction."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be in 0..2^32 - 1; got {self.seed}")
        for name, value in (("epochs", self.epochs), ("num_samples", self.num_samples)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")

    @classmethod
    def quick(cls, seed: int = 0) -> Self:
        """A trial of the machinery in some seconds: far too few epochs for good numbers."""
        return cls(seed=seed, epochs=4, num_samples=20)


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


@dataclass(frozen=True)
class DemoFit:
    """One method on one data set: what it predicts for the test examples, and how good that is."""

    data: DataName
    method: str
    posterior: Posterior
    prediction: Prediction
    metrics: dict[str, float]
    """With the seconds of the fit; the point estimate has no "kl"."""
    settings: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Everything `run` found."""

    config: DemoConfig
    splits: dict[DataName, Split]
    fits: tuple[DemoFit, ...]

    def of(self, data: DataName) -> dict[str, DemoFit]:
        """The fits to one data set by method."""
        return {fit.method: fit for fit in self.fits if fit.data == data}


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
        x, y, test_size=TEST_SHARE, random_state=config.seed, stratify=y if data == "digits" else None
    )
    return Split(train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y)


def _fit(data: DataName, method: str, split: Split, config: DemoConfig) -> DemoFit:
    regression = data == "diabetes"
    estimator = (NoisyRegressor if regression else NoisyClassifier)(
        posterior=METHODS[method],
        hidden=HIDDEN[data],
        noise=method != "point",
        epochs=config.epochs,
        num_samples=config.num_samples,
        random_state=config.seed,
    )
    start = time.perf_counter()
    estimator.fit(split.train_x, split.train_y)
    seconds = time.perf_counter() - start
    prediction, posterior = estimator.predict_distribution(split.test_x), estimator.posterior_
    target = split.target
    found = {"log_likelihood": metrics.log_likelihood(prediction, target), "seconds": seconds}
    if regression:
        found["rmse"] = metrics.rmse(prediction, target)
        found["coverage"] = metrics.interval_coverage(prediction, target, 0.9)
    else:
        found["accuracy"] = 100 * metrics.accuracy(prediction, target)
        found["ece"] = metrics.ece(prediction, target)
    if method != "point":
        found["kl"] = float(posterior.kl())
    return DemoFit(data, method, posterior, prediction, found, estimator.get_params())
