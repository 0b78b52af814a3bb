"""What `suggest` refuses: arguments without sense, before any work, and posteriors that cannot choose."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

import noisygrad as ng
from noisygrad import NoisyRegressor
from noisygrad.active import suggest
from noisygrad.predictions import CategoricalPrediction, RegressionPrediction
from support.made_predictions import Fixed, chosen, exact_draws, fitted, gaussian
from support.truth import normal

POOL = torch.zeros(12, 1)


@pytest.fixture(scope="module")
def regressor() -> NoisyRegressor:
    X = 50 + 10 * normal(30, 2).numpy()
    return NoisyRegressor(hidden=(6,), epochs=20, num_samples=40, random_state=0).fit(X, 1000 + 30 * X[:, 0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n must be an integer of at least 1, got 0"),
        ({"n": 2.0}, "n must be an integer of at least 1, got 2.0"),
        ({"n": True}, "n must be an integer"),
        ({"n": None}, "n must be an integer"),
        ({"n": 13}, "the pool has 12 points, fewer than the 13 to choose"),
        ({"pool": POOL[:0]}, "the pool is empty"),
        ({"pool": torch.tensor(3.0)}, "one point a row"),
        ({"strategy": "entropy"}, "one of variance, bald, batch; got 'entropy'"),
        ({"num_samples": 1}, "num_samples must be an integer of at least 2, got 1"),
        ({"batch_size": 0}, "batch_size must be"),
    ],
    ids=str,
)
def test_an_argument_without_sense_is_refused_before_any_work(options: dict[str, object], message: str) -> None:
    posterior = Fixed(gaussian())
    given = {"pool": POOL, "n": 3} | options
    with pytest.raises(ValueError, match=message):
        suggest(posterior, **given)
    assert posterior.calls == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_first_bad_row_of_a_pool_is_named(value: float, regressor: NoisyRegressor) -> None:
    pool = normal(12, 2)
    pool[7, 1] = pool[9, 0] = value
    posterior = Fixed(gaussian())
    for ask, given in ((posterior, pool), (regressor, pool.numpy()), (regressor, pool.numpy().astype(object))):
        with pytest.raises(ValueError, match="in 2 of its 12 rows, row 7 first"):
            suggest(ask, given, 3)
    assert posterior.calls == 0


def test_what_does_not_predict_is_refused(regressor: NoisyRegressor) -> None:
    class Array:
        def predict(self, x: Tensor, num_samples: int = 3) -> Tensor:
            return x

    pipeline = make_pipeline(StandardScaler(), regressor)
    for posterior in (pipeline, gaussian(), None):
        with pytest.raises(TypeError, match="posterior must be"):
            suggest(posterior, POOL, 3)
    with pytest.raises(TypeError, match="must return a Prediction, got Tensor"):
        suggest(Array(), POOL, 3)
    with pytest.raises(TypeError, match="pool must be a tensor"):
        suggest(fitted(ng.Gaussian(), 1), normal(5, 2).numpy(), 3)


def test_predictions_that_do_not_fit_the_pool_are_refused() -> None:
    with pytest.raises(ValueError, match=r"12 points, but the prediction is of examples of shape \[9\]"):
        suggest(Fixed(gaussian(points=9)), POOL, 3)
    with pytest.raises(ValueError, match="replica"):
        suggest(Fixed(RegressionPrediction(normal(5, 2, 12, 1), torch.ones(1))), POOL, 3)
    location = normal(5, 12, 1)
    location[2, 4] = math.nan
    with pytest.raises(ValueError, match="row 4 is not finite"):
        suggest(Fixed(RegressionPrediction(location, torch.ones(1))), POOL, 3)
    for strategy in ("bald", "batch"):
        with pytest.raises(ValueError, match="without observation noise"):
            suggest(Fixed(RegressionPrediction(normal(5, 12, 1), torch.zeros(1))), POOL, 3, strategy=strategy)


@pytest.mark.parametrize("strategy", ["variance", "bald", "batch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_posterior_without_noise_cannot_choose(strategy: str, dtype: torch.dtype) -> None:
    point = fitted(ng.Gaussian(), 1, noise=False)
    with pytest.raises(ValueError, match="one draw"):
        suggest(point, normal(12, 2), 3, strategy=strategy)
    same = normal(1, 12, 1).to(dtype).repeat(50, 1, 1)
    same[::2] = torch.nextafter(same[::2], torch.tensor(torch.inf, dtype=dtype))
    with pytest.raises(ValueError, match="all draws of the posterior predict the same"):
        suggest(Fixed(RegressionPrediction(same, torch.ones(1))), POOL, 3, strategy=strategy)
    with pytest.raises(ValueError, match="all draws of the posterior predict the same"):
        suggest(Fixed(CategoricalPrediction(normal(1, 12, 3).to(dtype).expand(50, 12, 3))), POOL, 3, strategy=strategy)


@pytest.mark.parametrize("strategy", ["variance", "bald", "batch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_variance_everywhere_leaves_nothing_to_choose_by(strategy: str, dtype: torch.dtype) -> None:
    """An uncertain bias and nothing else: all points are alike, up to rounding."""
    location = 20 * normal(1, 12, 1) + normal(50, 1, 1, seed=2)
    constant = RegressionPrediction(location.to(dtype), torch.ones(1))
    with pytest.raises(ValueError, match=r"all 12 points of the pool have the same .* nothing to choose by"):
        suggest(Fixed(constant), POOL, 3, strategy=strategy)
    labels = CategoricalPrediction(normal(50, 1, 3).to(dtype).expand(50, 12, 3))
    with pytest.raises(ValueError, match="nothing to choose by"):
        suggest(Fixed(labels), POOL, 3, strategy=strategy)
    nearly = location.clone()
    nearly[:, 5] += 0.001 * (nearly[:, 5] - nearly[:, 5].mean())
    assert chosen(RegressionPrediction(nearly.to(dtype), torch.ones(1)), 1, strategy) == [5]


def test_equal_variances_are_no_obstacle_to_a_batch_of_different_points() -> None:
    pool = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]).double()
    weights = exact_draws(torch.eye(2).double())
    prediction = RegressionPrediction((weights @ pool.T).unsqueeze(-1), torch.ones(1))
    assert sorted(chosen(prediction, 2, "batch")) in ([0, 2], [1, 2])
    with pytest.raises(ValueError, match="nothing to choose by"):
        chosen(prediction, 2, "variance")


@pytest.mark.parametrize("strategy", ["variance", "bald", "batch"])
def test_a_pool_of_one_point_has_it_chosen(strategy: str) -> None:
    assert chosen(gaussian(points=1), 1, strategy) == [0]
