"""What to label next: the points of a pool whose labels would teach the posterior most.

`suggest` asks a posterior for its predictions of a pool of unlabelled points and returns which of them to label. It
draws the weights once, so that all points, and all steps of a greedy choice, see the same S functions.

With f the prediction under one draw of the weights, V = Var f (over the draws, S in the denominator) and σ² the
variance of the observation noise, the strategies score a point x, or a batch of them, by

- `"variance"`: V(x), which the paper's active learning acquires;
- `"bald"`: I(y; w), the information that the label brings about the weights (Houlsby et al. 2011);
- `"batch"`: I(y₁ … yₙ; w), of all labels of the batch together, chosen greedily (BatchBALD, Kirsch et al. 2019).

For real targets the information is that of Gaussians with the same moments: ½ log(1 + V/σ²) for a point and
½ log det(I + K/σ²) for a batch, K the covariance of f over its points. It is exact where f is Gaussian and the noise
Gaussian and known; learned noise (Student-t), noise that depends on the input, and counts enter by their mean variance.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from noisygrad.joint_information import GaussianBatch, LabelBatch, greedy
from noisygrad.posterior.faults import one_of, whole_number
from noisygrad.predictions import (
    BernoulliPrediction,
    CategoricalPrediction,
    PoissonPrediction,
    Prediction,
    RegressionPrediction,
)

if TYPE_CHECKING:
    from noisygrad.estimators.estimators import NoisyClassifier, NoisyRegressor

Strategy = Literal["variance", "bald", "batch"]

_ROUNDING = 1e3
"""Scores that differ by less than this many units in the last place, relative to the largest, are the same."""


class Predicts(Protocol):
    """Anything that predicts as a `Posterior` does; `batch_size` and `generator` are given to it if it takes them."""

    def predict(self, x: Tensor, num_samples: int = ...) -> Prediction:
        """What the model says of `x`, from `num_samples` draws of the weights that all rows share."""


def suggest(
    posterior: Predicts | NoisyRegressor | NoisyClassifier,
    pool: Tensor | ArrayLike,
    n: int,
    *,
    strategy: Strategy | None = None,
    num_samples: int | None = None,
    batch_size: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The indices of the next `n` points of `pool` to label, the best first; ties go to the lower index.

    Args:
        posterior: A `Posterior`, a fitted `NoisyRegressor` or `NoisyClassifier`, or anything whose `predict` returns a
            `Prediction`. The draws of the weights must be shared by all rows, as they are in all of these.
        pool: The unlabelled inputs, one a row, as `predict` takes them: a tensor, or what an estimator takes, in its
            own units.
        n: How many to choose.
        strategy: "variance": the largest variance of the function, summed over outputs (in the units of the
            predictions) or over the probabilities of the classes. "bald": the most information of each label by itself,
            summed over the outputs of a point, whose noises are independent given the weights. "batch": the most
            information of all labels together, so that near-duplicates are not chosen twice; the outputs of a point
            count jointly. The first two rank points one by one, and a batch of theirs is often one place many times
            over. None: "variance" for one point, as in the paper, and "batch" for several.
        num_samples: Draws of the weights, at least 2; None: as many as `posterior` takes by itself. S draws hold no
            more than log S nats about labels and S − 1 directions of a function: for "batch" take several times `n`.
        batch_size: Rows to predict at a time. Estimators bound their memory by themselves.
        generator: For the draws, and for the labels that "batch" samples where there are too many to enumerate. An
            estimator has draws of its own, fixed by its `random_state`. None: the labels have a fixed seed.

    Returns:
        A LongTensor `[n]` on the CPU.

    Raises:
        ValueError: For an argument without sense, a pool smaller than `n` or with values that are not finite, and where
            there is nothing to choose by: a posterior without noise, or scores alike at all points.
        TypeError: When `posterior` does not predict as it should, or `pool` is not a tensor where it must be.
    """
    n = whole_number("n", n)
    num_samples = None if num_samples is None else whole_number("num_samples", num_samples, least=2)
    batch_size = None if batch_size is None else whole_number("batch_size", batch_size)
    if strategy is None:
        strategy = "variance" if n == 1 else "batch"
    one_of("strategy", strategy, get_args(Strategy))
    _check_posterior(posterior)
    size = _check_pool(pool, n)
    found = _predicted(posterior, pool, num_samples, batch_size, generator)
    tolerance = _check_prediction(found, size)
    prediction = found.to(torch.float64)
    if strategy == "batch":
        chosen, differ = greedy(_batch_of(prediction, generator), n, tolerance)
    else:
        scores = _variance(prediction) if strategy == "variance" else _information(prediction)
        differ = float(scores.max() - scores.min()) > tolerance * float(scores.max())
        chosen = scores.argsort(descending=True, stable=True)[:n].cpu()
    if size > 1 and not differ:
        what = "variance" if strategy == "variance" else "information"
        raise ValueError(
            f'all {size} points of the pool have the same {what}: strategy "{strategy}" has nothing to choose by. '
            "What the posterior leaves open does not depend on the input there; is only a bias uncertain?"
        )
    return chosen


# -------------------------------------------------------------------------------------------- what is given


def _is_estimator(posterior: object) -> bool:
    return hasattr(posterior, "predict_distribution")


def _check_posterior(posterior: object) -> None:
    predict = getattr(posterior, "predict", None)
    if not _is_estimator(posterior) and (
        not callable(predict) or "num_samples" not in inspect.signature(predict).parameters
    ):
        raise TypeError(
            "posterior must be a Posterior, a NoisyRegressor or NoisyClassifier (of a Pipeline: its last step, and "
            "the pool transformed by the others), or have predict(x, num_samples=...) that returns a Prediction; "
            f"got {type(posterior).__name__}"
        )


def _check_pool(pool: Tensor | ArrayLike, n: int) -> int:
    """How many points the pool has."""
    # A copy: torch takes neither views that run backwards nor, without a warning, what is read-only.
    values = pool.detach() if isinstance(pool, Tensor) else torch.from_numpy(np.array(pool, np.float64, order="C"))
    if values.ndim == 0:
        raise ValueError(f"pool must hold one point a row, got {type(pool).__name__} without rows")
    if 0 in values.shape:
        raise ValueError(f"the pool is empty: its shape is {list(values.shape)}")
    size = len(values)
    if size < n:
        raise ValueError(f"the pool has {size} points, fewer than the {n} to choose")
    if bad := _bad_rows(values):
        raise ValueError(
            f"the pool holds NaN or infinity in {len(bad)} of its {size} rows, row {bad[0]} first: impute or drop them"
        )
    return size


def _bad_rows(values: Tensor) -> list[int]:
    """The rows in which something is not finite."""
    bad = ~values.isfinite().reshape(len(values), -1).all(1)
    return [int(row) for row in bad.nonzero()]


def _predicted(
    posterior: Any,
    pool: Tensor | ArrayLike,
    num_samples: int | None,
    batch_size: int | None,
    generator: torch.Generator | None,
) -> Prediction:
    if _is_estimator(posterior):
        rows = pool.detach().cpu().numpy() if isinstance(pool, Tensor) else pool
        found = posterior.predict_distribution(rows, num_samples)
    else:
        if not isinstance(pool, Tensor):
            raise TypeError(
                f"pool must be a tensor, as for {type(posterior).__name__}.predict; got {type(pool).__name__}"
            )
        taken = inspect.signature(posterior.predict).parameters
        options = {"num_samples": num_samples, "batch_size": batch_size, "generator": generator}
        given = {name: value for name, value in options.items() if value is not None and name in taken}
        found = posterior.predict(pool, **given)
    if not isinstance(found, Prediction):
        raise TypeError(f"{type(posterior).__name__}.predict must return a Prediction, got {type(found).__name__}")
    return found


def _check_prediction(prediction: Prediction, size: int) -> float:
    """Refuse predictions that cannot tell points apart; returns the relative error of their rounding."""
    rows = prediction.target_shape[: len(prediction.target_shape) - prediction.event_dims]
    if rows != (size,):
        raise ValueError(
            f"the pool has {size} points, but the prediction is of examples of shape {list(rows)}: of several replicas "
            "give one at a time, as an object whose predict returns prediction.replica(index)"
        )
    if prediction.num_samples < 2:
        raise ValueError(
            "the posterior gives one draw, as a point estimate (noise=False) or an estimator with num_samples=1 does: "
            "it has no variance to choose by"
        )
    mean, variance = prediction.mean, prediction.epistemic
    if bad := _bad_rows(mean) or _bad_rows(variance):
        raise ValueError(f"the prediction of row {bad[0]} is not finite: check the network")
    precision = torch.finfo(mean.dtype).eps
    if float(variance.max().sqrt()) <= 4 * precision * float(mean.abs().max()):
        raise ValueError("all draws of the posterior predict the same (noise=False?): it has no variance to choose by")
    return _ROUNDING * precision


# -------------------------------------------------------------------------------------------- what to choose


def _variance(prediction: Prediction) -> Tensor:
    """Var f of each point, summed over its outputs or classes."""
    variance = prediction.epistemic
    return variance.reshape(len(variance), -1).sum(1)


def _information(prediction: Prediction) -> Tensor:
    """I(y; w) of each point in nats, summed over its outputs."""
    if isinstance(prediction, CategoricalPrediction | BernoulliPrediction):
        information = prediction.mutual_information
    else:
        information = 0.5 * torch.log1p(prediction.epistemic / _noise(prediction))
    return information.reshape(len(information), -1).sum(1)


def _noise(prediction: Prediction) -> Tensor:
    noise = prediction.aleatoric
    if not bool((noise > 0).all()):
        raise ValueError('without observation noise a label brings infinite information: use strategy="variance"')
    return noise


def _batch_of(prediction: Prediction, generator: torch.Generator | None) -> GaussianBatch | LabelBatch:
    if isinstance(prediction, RegressionPrediction):
        return GaussianBatch(prediction.location, _noise(prediction))
    if isinstance(prediction, PoissonPrediction):
        return GaussianBatch(prediction.log_rate.exp(), _noise(prediction))
    if isinstance(prediction, CategoricalPrediction):
        return LabelBatch(prediction.log_probs, generator)
    if isinstance(prediction, BernoulliPrediction):
        both = torch.stack([-prediction.logits, prediction.logits], -1)
        return LabelBatch(torch.nn.functional.logsigmoid(both), generator)
    raise TypeError(f'strategy "batch" does not know {type(prediction).__name__}: use "variance" or "bald"')
