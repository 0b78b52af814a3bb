"""What to label next: every strategy against brute force, designs that are known, and input that makes no sense."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

import noisygrad as ng
from noisygrad import NoisyClassifier, NoisyRegressor, active, joint_information
from noisygrad.active import suggest
from noisygrad.joint_information import GaussianBatch, LabelBatch
from noisygrad.predictions import (
    BernoulliPrediction,
    CategoricalPrediction,
    PoissonPrediction,
    Prediction,
    RegressionPrediction,
)
from support.made_predictions import chosen, classes, exact_draws, fitted, gaussian
from support.truth import normal


def ranking(scores: Tensor, n: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda index: -float(scores[index]))[:n]


def joint_log_det(prediction: RegressionPrediction, points: list[int]) -> float:
    """½ log det(I + N^-½ K N^-½) from the dense covariance over points and outputs."""
    functions = prediction.location[:, points].flatten(1)
    noise = prediction.scale.square().mean(0)[points].flatten()
    covariance = torch.cov(functions.T, correction=0).reshape(len(noise), len(noise))
    return 0.5 * float(torch.logdet(torch.eye(len(noise)).double() + covariance / (noise[:, None] * noise).sqrt()))


def joint_information_of(probs: Tensor, points: list[int]) -> float:
    """H(labels) − E H(labels | weights) by listing every configuration."""
    listed = torch.tensor(list(itertools.product(range(probs.shape[-1]), repeat=len(points))))
    given_weights = torch.stack([probs[:, point, listed[:, place]] for place, point in enumerate(points)]).prod(0)
    joint = given_weights.mean(0)
    return float((given_weights * given_weights.log()).sum(1).mean() - (joint * joint.log()).sum())


def brute_greedy(value, points: int, n: int) -> list[int]:
    found: list[int] = []
    for _ in range(n):
        left = [index for index in range(points) if index not in found]
        found.append(max(left, key=lambda index: value([*found, index])))
    return found


# ------------------------------------------------------------------------------------------------ one by one


@pytest.mark.parametrize("outputs", [1, 3])
def test_variance_and_bald_of_a_regression_equal_brute_force(outputs: int) -> None:
    prediction = gaussian(outputs)
    location, noise = prediction.location, prediction.scale.square()[0]
    variance = ((location - location.mean(0)) ** 2).mean(0)
    assert chosen(prediction, 12, "variance") == ranking(variance.sum(1), 12)
    information = (0.5 * torch.log((variance + noise) / noise)).sum(1)
    assert chosen(prediction, 12, "bald") == ranking(information, 12)
    assert chosen(prediction, 12, "bald") != chosen(prediction, 12, "variance")


def test_variance_and_bald_of_classes_equal_brute_force() -> None:
    prediction = classes(points=20)
    probs = prediction.log_probs.exp()
    assert chosen(prediction, 20, "variance") == ranking(((probs - probs.mean(0)) ** 2).mean(0).sum(1), 20)
    information = torch.tensor([joint_information_of(probs, [point]) for point in range(20)])
    assert chosen(prediction, 20, "bald") == ranking(information, 20)
    assert chosen(prediction, 20, "bald") != chosen(prediction, 20, "variance")


def test_several_labels_a_point_are_summed() -> None:
    logits = normal(20, 6, 2)
    probs = torch.sigmoid(logits)
    prediction = BernoulliPrediction(logits)
    assert chosen(prediction, 6, "variance") == ranking(probs.var(0, correction=0).sum(1), 6)
    both = torch.stack([1 - probs, probs], -1)
    parts = [[joint_information_of(both[:, :, output], [point]) for point in range(6)] for output in range(2)]
    assert chosen(prediction, 6, "bald") == ranking(torch.tensor(parts).sum(0), 6)


def test_counts_enter_by_their_moments() -> None:
    prediction = PoissonPrediction(normal(20, 8, 1))
    rate = prediction.log_rate.exp()[..., 0]
    assert chosen(prediction, 8, "bald") == ranking(torch.log1p(rate.var(0, correction=0) / rate.mean(0)), 8)
    assert chosen(prediction, 1, "batch") == chosen(prediction, 1, "bald")


def test_one_point_by_variance_and_several_together() -> None:
    prediction = gaussian()
    assert chosen(prediction, 1) == chosen(prediction, 1, "variance") != chosen(prediction, 1, "bald")
    assert chosen(prediction, 4) == chosen(prediction, 4, "batch") != chosen(prediction, 4, "variance")


@pytest.mark.parametrize("strategy", ["variance", "bald", "batch"])
def test_ties_go_to_the_lower_index(strategy: str) -> None:
    one = classes(points=4).log_probs
    prediction = CategoricalPrediction(one[:, [1, 0, 1, 2, 3, 1]])
    top = chosen(prediction, 1, strategy)[0]
    order = chosen(CategoricalPrediction(one), 1, strategy)[0]
    assert top == [1, 0, 3, 4][order]
    if strategy != "batch":
        assert [index for index in chosen(prediction, 6, strategy) if index in (0, 2, 5)] == [0, 2, 5]


# ------------------------------------------------------------------------------------------------ together


@pytest.mark.parametrize("outputs", [1, 3])
def test_a_batch_is_the_greedy_log_determinant(outputs: int) -> None:
    prediction = gaussian(outputs)
    expected = brute_greedy(lambda points: joint_log_det(prediction, points), 12, 7)
    assert chosen(prediction, 7, "batch") == expected
    batch = GaussianBatch(prediction.location, prediction.aleatoric)
    for place, point in enumerate(expected):
        before = joint_log_det(prediction, expected[:place]) if place else 0.0
        truth = [joint_log_det(prediction, [*expected[:place], index]) - before for index in range(12)]
        assert batch.gains(torch.arange(12)).tolist() == pytest.approx(truth, rel=1e-10)
        batch.add(point)


def test_more_points_than_draws_and_all_of_the_pool() -> None:
    prediction = gaussian(draws=4)
    assert chosen(prediction, 12, "batch") == brute_greedy(lambda points: joint_log_det(prediction, points), 12, 12)


def test_linear_regression_gets_its_known_design() -> None:
    """Given w ~ N(0, Σ) and noise σ², each point is the largest xᵀΣx, after which Σ⁻¹ grows by xxᵀ/σ²."""
    pool, noise, mixing = normal(50, 4), 0.3, normal(4, 4, seed=5)
    covariance = mixing @ mixing.T + 0.1 * torch.eye(4).double()
    weights = exact_draws(covariance)
    prediction = RegressionPrediction((weights @ pool.T).unsqueeze(-1), torch.tensor(noise).double().sqrt())
    precision, design = torch.linalg.inv(covariance), []
    for _ in range(8):
        variance = (pool @ torch.linalg.inv(precision) * pool).sum(1)
        variance[design] = -math.inf
        design.append(int(variance.argmax()))
        precision = precision + torch.outer(pool[design[-1]], pool[design[-1]]) / noise
    assert chosen(prediction, 8, "batch") == design
    assert chosen(prediction, 8, "variance") != design


def test_a_batch_is_spread_where_variance_takes_near_duplicates() -> None:
    """Two directions of w: five near-copies of the longest x, and one of the other direction."""
    pool = torch.tensor([[2.0, 0.01 * k] for k in range(5)] + [[0.0, 1.0], [0.1, 0.1]]).double()
    weights = exact_draws(torch.eye(2).double())
    prediction = RegressionPrediction((weights @ pool.T).unsqueeze(-1), torch.tensor(0.5).double())
    assert set(chosen(prediction, 2, "variance")) <= set(range(5))
    assert chosen(prediction, 2, "batch") == [4, 5]
    # Labels: a batch of logits along the same directions.
    logits = 3 * (weights @ pool.T)
    labels = BernoulliPrediction(logits, event_dims=0)
    assert set(chosen(labels, 2, "bald")) <= set(range(5))
    first, second = chosen(labels, 2, "batch")
    assert (first < 5, second) == (True, 5)


@pytest.mark.parametrize("count", [2, 3])
def test_a_batch_of_labels_has_the_largest_joint_information(count: int) -> None:
    prediction = classes(count, draws=8, points=7)
    probs = prediction.log_probs.exp()
    expected = brute_greedy(lambda points: joint_information_of(probs, points), 7, 4)
    assert chosen(prediction, 4, "batch") == expected
    batch = LabelBatch(prediction.log_probs)
    for place, point in enumerate(expected):
        before = joint_information_of(probs, expected[:place]) if place else 0.0
        truth = [joint_information_of(probs, [*expected[:place], index]) - before for index in range(7)]
        assert batch.gains(torch.arange(7)).tolist() == pytest.approx(truth, abs=1e-12)
        batch.add(point)


def test_two_classes_are_a_bernoulli() -> None:
    logits = 2 * normal(20, 9, seed=4)
    two = CategoricalPrediction(torch.stack([torch.zeros_like(logits), logits], -1))
    for n in (1, 5):
        assert chosen(two, n, "batch") == chosen(BernoulliPrediction(logits, event_dims=0), n, "batch")


def test_several_labels_a_point_are_joint_in_a_batch() -> None:
    logits = 2 * normal(10, 6, 2, seed=4)
    probs = torch.stack([torch.sigmoid(-logits), torch.sigmoid(logits)], -1)
    joint = torch.einsum("spi,spj->spij", probs[:, :, 0], probs[:, :, 1]).flatten(2)
    expected = brute_greedy(lambda points: joint_information_of(joint, points), 6, 3)
    assert chosen(BernoulliPrediction(logits), 3, "batch") == expected
    with pytest.raises(ValueError, match="11 labels of 2 classes"):
        chosen(BernoulliPrediction(normal(10, 6, 11)), 3, "batch")


@pytest.mark.parametrize("prediction", [classes(points=60), gaussian(points=60)])
def test_points_that_are_skipped_would_not_have_been_chosen(
    prediction: Prediction, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = chosen(prediction, 6, "batch")
    monkeypatch.setattr(joint_information, "_AT_ONCE", 1)
    asked: list[int] = []
    for kind in (GaussianBatch, LabelBatch):
        gains = kind.gains
        monkeypatch.setattr(
            kind, "gains", lambda self, points, gains=gains: (asked.append(len(points)), gains(self, points))[1]
        )
    assert chosen(prediction, 6, "batch") == everything
    assert set(asked) == {1}
    assert 60 < len(asked) < 6 * 40


def test_sampled_labels_are_close_to_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    prediction = classes(points=12)
    exact = LabelBatch(prediction.log_probs)
    monkeypatch.setattr(joint_information, "_EXACT", 1)
    monkeypatch.setattr(joint_information, "_SAMPLED", 60_000)
    sampled = LabelBatch(prediction.log_probs, torch.Generator().manual_seed(3))
    for point in (4, 7, 0, 2):
        sampled.add(point)
    monkeypatch.undo()
    for point in (4, 7, 0, 2):
        exact.add(point)
    truth, estimate = (batch.gains(torch.arange(12)) for batch in (exact, sampled))
    assert sampled._log_joint.shape == (20, 20_000)
    assert exact._log_joint.shape == (20, 81)
    torch.testing.assert_close(estimate, truth, rtol=0, atol=0.005)
    assert (estimate != truth).all()
    assert float(truth.max() - truth.min()) > 0.05


def test_a_large_batch_of_labels_samples_and_repeats_itself() -> None:
    prediction = classes(5, draws=60, points=40, scale=0.5)
    first = chosen(prediction, 12, "batch")
    assert first == chosen(prediction, 12, "batch")
    assert len(set(first)) == 12
    seeded = [chosen(prediction, 12, "batch", generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1]
    # What is listed does not depend on the generator: 5^5 configurations are, the candidate's label included.
    assert first[:5] == seeded[0][:5] == seeded[2][:5]
    probs = prediction.log_probs.exp()
    left = [point for point in range(40) if point not in first[:5]]
    best = max(joint_information_of(probs, [*first[:5], point]) for point in left)
    assert best - min(joint_information_of(probs, points[:6]) for points in (first, seeded[0], seeded[2])) < 0.005
    assert best - joint_information_of(probs, chosen(prediction, 6, "bald")) > 0.02


def test_a_class_that_cannot_be_is_no_trouble() -> None:
    logits = normal(20, 9, 3)
    logits[..., 2] = -torch.inf
    assert chosen(CategoricalPrediction(logits), 4, "batch") == chosen(
        CategoricalPrediction(logits[..., :2]), 4, "batch"
    )


# ------------------------------------------------------------------------------------------------ posteriors


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", ["regression", "classification"])
@pytest.mark.parametrize("strategy", ["variance", "bald", "batch"])
def test_a_posterior_is_asked_once(kind: str, strategy: str) -> None:
    posterior = fitted(ng.Gaussian(), 1) if kind == "regression" else fitted(ng.Categorical(), 3)
    pool = 3 * normal(60, 2, seed=4)
    found = suggest(posterior, pool, 5, strategy=strategy, num_samples=30, generator=seeded())
    assert found.tolist() == chosen(posterior.predict(pool, 30, generator=seeded()), 5, strategy)
    again = suggest(posterior, pool, 5, strategy=strategy, num_samples=30, batch_size=7, generator=seeded())
    assert torch.equal(found, again)
    state = torch.get_rng_state()
    assert pool[found].shape == (5, 2)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_default_number_of_draws_is_the_posteriors() -> None:
    posterior, pool = fitted(ng.Gaussian(), 1), 3 * normal(60, 2, seed=4)
    found = suggest(posterior, pool, 5, generator=seeded())
    assert torch.equal(found, suggest(posterior, pool, 5, strategy="batch", num_samples=100, generator=seeded()))


def test_one_precision_or_the_other() -> None:
    prediction = gaussian()
    for strategy in ("variance", "bald", "batch"):
        assert chosen(prediction.to(torch.float32), 5, strategy) == chosen(prediction, 5, strategy)


@pytest.fixture(scope="module")
def regressor() -> NoisyRegressor:
    X = 50 + 10 * normal(30, 2).numpy()
    return NoisyRegressor(hidden=(6,), epochs=20, num_samples=40, random_state=0).fit(X, 1000 + 30 * X[:, 0])


@pytest.fixture(scope="module")
def classifier() -> NoisyClassifier:
    X = 50 + 10 * normal(30, 2).numpy()
    return NoisyClassifier(hidden=(6,), epochs=20, num_samples=40, random_state=0).fit(X, np.sign(X[:, 0] - 50))


@pytest.mark.parametrize("kind", ["regressor", "classifier"])
@pytest.mark.parametrize("strategy", ["variance", "bald", "batch"])
def test_an_estimator_and_its_posterior_agree(kind: str, strategy: str, request: pytest.FixtureRequest) -> None:
    """In the estimator's own units, and in the standardised ones of the posterior that it fitted."""
    estimator = request.getfixturevalue(kind)
    pool = 50 + 15 * normal(80, 2, seed=4).numpy()
    found = suggest(estimator, pool, 6, strategy=strategy)
    assert pool[found].shape == (6, 2)
    inside = torch.from_numpy(estimator._standardised(pool)).float()
    draws = seeded(estimator._draws.seed)
    direct = suggest(estimator.posterior_, inside, 6, strategy=strategy, num_samples=40, generator=draws)
    assert torch.equal(found, direct)
    assert torch.equal(found, suggest(estimator, torch.from_numpy(pool), 6, strategy=strategy, batch_size=3))
    assert torch.equal(found, suggest(estimator, pool.tolist(), 6, strategy=strategy, num_samples=40))


def test_an_estimator_draws_as_often_as_it_is_told(regressor: NoisyRegressor) -> None:
    pool = 50 + 15 * normal(80, 2, seed=4).numpy()
    assert regressor.predict_distribution(pool, 300).num_samples == 300
    few = regressor.predict_distribution(pool, 15)
    assert torch.equal(few.location, regressor.predict_distribution(pool).location[:15])
    assert suggest(regressor, pool, 6, num_samples=15).tolist() == chosen(few, 6, "batch")


def test_it_is_reached_from_the_package() -> None:
    assert ng.active.suggest is active.suggest


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("strategy", ["variance", "bald", "batch"])
@pytest.mark.parametrize("prediction", [gaussian(), gaussian(3), classes()], ids=["one output", "three", "labels"])
def test_a_gpu_chooses_the_same(prediction: Prediction, strategy: str) -> None:
    assert chosen(prediction.to("cuda"), 5, strategy) == chosen(prediction, 5, strategy)
    labels = classes(5, draws=60, points=40).to("cuda")
    assert len(set(chosen(labels, 8, "batch", generator=torch.Generator("cuda").manual_seed(0)))) == 8
