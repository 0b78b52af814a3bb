import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate
from sklearn.metrics import roc_auc_score
from torch import Tensor

from noisygrad import metrics
from noisygrad.predictions import (
    BernoulliPrediction,
    CategoricalPrediction,
    PoissonPrediction,
    RegressionPrediction,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def crps_by_integration(prediction: RegressionPrediction, y: float) -> float:
    def distribution(x: float) -> float:
        return float(prediction.cdf(torch.tensor(x, dtype=torch.float64)))

    marks = sorted({*prediction.location.flatten().tolist(), y})
    edges = [-np.inf, *marks, np.inf]
    return sum(
        integrate.quad(lambda x, high=low >= y: (distribution(x) - high) ** 2, low, top, epsabs=1e-9)[0]
        for low, top in itertools.pairwise(edges)
    )


@pytest.mark.parametrize("y", [0.3, -4.0, 60.0])
def test_crps_of_gaussian_mixtures_is_exact(y: float) -> None:
    prediction = RegressionPrediction(3 * normal(3, 1, 1), normal(3, 1, 1, seed=1).exp())
    assert metrics.crps(prediction, torch.full((1, 1), y)) == pytest.approx(
        crps_by_integration(prediction, y), rel=1e-6
    )


@pytest.mark.parametrize(("degrees", "tolerance"), [(3.0, 1e-4), (12.0, 1e-5), (1000.0, 1e-5)])
@pytest.mark.parametrize("y", [0.3, -4.0, 60.0])
def test_crps_of_student_mixtures(degrees: float, tolerance: float, y: float) -> None:
    prediction = RegressionPrediction(
        3 * normal(3, 1, 1), torch.full((1,), 0.4).double(), torch.tensor(degrees).double()
    )
    assert metrics.crps(prediction, torch.full((1, 1), y)) == pytest.approx(
        crps_by_integration(prediction, y), rel=tolerance
    )


def test_crps_of_student_tends_to_that_of_gaussian() -> None:
    location, y = 5 * normal(20, 6, 2), 5 * normal(6, 2, seed=1)
    gaussian = RegressionPrediction(location, torch.full((1,), 0.2).double())
    student = RegressionPrediction(location, torch.full((1,), 0.2).double(), torch.tensor(1e8).double())
    assert metrics.crps(student, y) == pytest.approx(metrics.crps(gaussian, y), rel=1e-5)


def test_rmse_log_likelihood_and_coverage() -> None:
    y = normal(4000, 1)
    prediction = RegressionPrediction(torch.zeros(2, 4000, 1).double(), torch.ones(1))
    assert metrics.rmse(prediction, y) == pytest.approx(float(y.square().mean().sqrt()))
    assert metrics.rmse(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])) == pytest.approx(math.sqrt(2))
    expected = float(torch.distributions.Normal(0.0, 1.0).log_prob(y).mean())
    assert metrics.log_likelihood(prediction, y) == pytest.approx(expected)
    assert metrics.nll(prediction, y) == pytest.approx(-expected)
    assert metrics.interval_coverage(prediction, y, 0.8) == pytest.approx(0.8, abs=0.03)
    assert metrics.interval_coverage(prediction.rescaled(0.0, 0.5), y, 0.8) < 0.6


def test_classification_metrics_by_hand() -> None:
    probs = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.3, 0.7], [0.1, 0.9]]).double()
    labels = torch.tensor([0, 1, 1, 1])
    assert metrics.accuracy(probs, labels) == pytest.approx(0.75)
    assert metrics.nll(probs, labels) == pytest.approx(-np.mean(np.log([0.8, 0.4, 0.7, 0.9])))
    assert metrics.brier(probs, labels) == pytest.approx(np.mean([0.08, 0.72, 0.18, 0.02]))
    # One target per bin: |correct − confidence| = 0.2, 0.6, 0.3, 0.1.
    assert metrics.ece(probs, labels) == pytest.approx(0.3, abs=1e-6)
    # In one bin: |3/4 − 0.75|.
    assert metrics.ece(probs, labels, bins=1) == pytest.approx(0.0, abs=1e-6)
    categorical = CategoricalPrediction(probs.log().unsqueeze(0))
    bernoulli = BernoulliPrediction(torch.logit(probs[:, 1]).unsqueeze(0), event_dims=0)
    for metric in (metrics.accuracy, metrics.brier, metrics.ece):
        assert metric(categorical, labels) == pytest.approx(metric(probs, labels), abs=1e-6)
        assert metric(bernoulli, labels) == pytest.approx(metric(probs, labels), abs=1e-6)
    assert metrics.nll(categorical, labels) == pytest.approx(metrics.nll(probs, labels))
    assert metrics.nll(bernoulli, labels) == pytest.approx(metrics.nll(probs, labels))


def test_auroc_equals_sklearn_also_for_large_scores_and_ties() -> None:
    inside, outside = normal(50).mul(3).round(), normal(40, seed=1).mul(3).round() + 1
    truth = roc_auc_score([0] * 50 + [1] * 40, torch.cat([inside, outside]).numpy())
    assert 0.5 < truth < 1
    assert metrics.auroc(inside, outside) == pytest.approx(truth)
    assert metrics.auroc(inside + 1000, outside + 1000) == pytest.approx(truth)
    assert metrics.auroc(torch.ones(3), torch.ones(3)) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.rmse(torch.zeros(4), torch.zeros(4, 1)), r"\[4\].*\[4, 1\]"),
        (lambda: metrics.rmse(torch.zeros(0), torch.zeros(0)), "no targets"),
        (lambda: metrics.crps(PoissonPrediction(torch.zeros(1, 1, 1)), torch.zeros(1, 1)), "Poisson"),  # type: ignore[arg-type]
        (lambda: metrics.accuracy(PoissonPrediction(torch.zeros(1, 1, 1)), torch.zeros(1, 1)), "Poisson"),
        (lambda: metrics.accuracy(torch.zeros(4, 3), torch.zeros(4)), "softmax"),
        (lambda: metrics.accuracy(torch.full((4, 2), 0.5), torch.zeros(3)), r"\[4\].*\[3\]"),
        (lambda: metrics.accuracy(torch.full((4, 2), 0.5), torch.full((4,), 2)), r"0\.\.1"),
        (lambda: metrics.brier(torch.full((4, 2), 0.5), torch.full((4,), 0.5)), "whole numbers"),
        (lambda: metrics.ece(torch.full((4, 2), 0.5), torch.zeros(4), bins=0), "bins"),
        (lambda: metrics.auroc(torch.zeros(0), torch.zeros(2)), "scores_in"),
        (lambda: metrics.auroc(torch.zeros(2), torch.tensor([torch.nan])), "scores_out"),
    ],
)
def test_refusals(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_rounding_above_one_is_no_logit() -> None:
    """The mean of ten sure members, in float32, is 1.0000001."""
    probs = torch.softmax(torch.randn(1000, 3, generator=torch.Generator().manual_seed(0)), -1)
    labels = torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(1)).squeeze(-1)
    probs[0], sure = torch.tensor([1.0, 0.0, 0.0]), probs.clone()
    sure[0] = torch.tensor([1.0000001, 0.0, 0.0])
    assert sure[0, 0] > 1.0
    assert metrics.ece(sure, labels) == metrics.ece(probs, labels)


def test_a_single_class_is_always_right() -> None:
    probs, labels = torch.ones(4, 1), torch.zeros(4)
    assert (metrics.accuracy(probs, labels), metrics.ece(probs, labels), metrics.brier(probs, labels)) == (
        1.0,
        0.0,
        0.0,
    )
