import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, distributions

from noisygrad.predictions import (
    BernoulliPrediction,
    CategoricalPrediction,
    PoissonPrediction,
    Prediction,
    RegressionPrediction,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def student(samples: int = 6, degrees: float = 5.0, event: int = 2) -> RegressionPrediction:
    location = 3 * normal(samples, 4, event)
    scale = normal(samples, 4, event, seed=1).exp()
    return RegressionPrediction(location, scale, torch.tensor(degrees).double())


@pytest.mark.parametrize("degrees", [1.5, 5.0, 300.0])
def test_student_mixture_equals_scipy(degrees: float) -> None:
    prediction = student(degrees=degrees)
    y = normal(4, 2, seed=2)
    frozen = stats.t(degrees, loc=prediction.location.numpy(), scale=prediction.scale.numpy())
    joint = np.logaddexp.reduce(frozen.logpdf(y.numpy()).sum(-1), axis=0) - math.log(6)
    np.testing.assert_allclose(prediction.log_prob(y).numpy(), joint, rtol=1e-10)
    np.testing.assert_allclose(prediction.cdf(y).numpy(), frozen.cdf(y.numpy()).mean(0), rtol=1e-10)
    np.testing.assert_allclose(prediction.aleatoric.numpy(), frozen.var().mean(0), rtol=1e-10)


def test_student_keeps_its_digits_with_many_degrees_of_freedom() -> None:
    y = torch.tensor([[0.7]])
    for degrees in (2e4, 5e5, 1e12):
        prediction = RegressionPrediction(torch.zeros(1, 1, 1), torch.ones(1), torch.tensor(degrees))
        expected = stats.t(degrees).logpdf(0.7) if degrees < 1e6 else stats.norm.logpdf(0.7)
        assert float(prediction.log_prob(y)) == pytest.approx(expected, abs=1e-6)


def test_gaussian_mixture_equals_torch_distributions() -> None:
    location, scale, y = normal(6, 4), normal(6, 4, seed=1).exp(), normal(4, seed=2)
    prediction = RegressionPrediction(location, scale, event_dims=0)
    mixture = distributions.MixtureSameFamily(
        distributions.Categorical(torch.ones(4, 6).double()), distributions.Normal(location.T, scale.T)
    )
    torch.testing.assert_close(prediction.log_prob(y), mixture.log_prob(y))
    torch.testing.assert_close(prediction.mean, mixture.mean)
    torch.testing.assert_close(prediction.variance, mixture.variance)
    torch.testing.assert_close(prediction.epistemic, ((location - location.mean(0)) ** 2).sum(0) / 6)
    torch.testing.assert_close(prediction.cdf(y), mixture.cdf(y))


@pytest.mark.parametrize("degrees", [None, 3.0, 40.0])
def test_quantiles_invert_the_distribution_function(degrees: float | None) -> None:
    freedom = None if degrees is None else torch.tensor(degrees).double()
    prediction = RegressionPrediction(5 * normal(6, 4, 2), normal(6, 4, 2, seed=1).exp(), freedom)
    levels = torch.tensor([1e-4, 0.05, 0.5, 0.975]).double()
    found = prediction.quantile(levels)
    assert found.shape == (4, 4, 2)
    for level, quantile in zip(levels.tolist(), found, strict=True):
        torch.testing.assert_close(prediction.cdf(quantile), torch.full((4, 2), level).double(), rtol=1e-7, atol=0)
    torch.testing.assert_close(prediction.quantile(0.5), found[2])
    low, high = prediction.interval(0.9)
    torch.testing.assert_close(prediction.cdf(high) - prediction.cdf(low), torch.full((4, 2), 0.9).double())


def test_rescaling_moves_everything_with_the_jacobian() -> None:
    prediction = student()
    shift, scale = torch.tensor([10.0, -3.0]).double(), torch.tensor([2.0, 0.5]).double()
    rescaled = prediction.rescaled(shift, scale)
    y = normal(4, 2, seed=2)
    torch.testing.assert_close(rescaled.log_prob(shift + scale * y), prediction.log_prob(y) - scale.log().sum())
    torch.testing.assert_close(rescaled.mean, shift + scale * prediction.mean)
    torch.testing.assert_close(rescaled.variance, scale**2 * prediction.variance)
    torch.testing.assert_close(rescaled.quantile(0.1), shift + scale * prediction.quantile(0.1))
    torch.testing.assert_close(prediction.rescaled(1.0, 3.0).mean, 1 + 3 * prediction.mean)
    with pytest.raises(ValueError, match="positive"):
        prediction.rescaled(0.0, 0.0)


def test_categorical_mixture() -> None:
    logits = normal(6, 4, 3)
    labels = torch.tensor([0, 2, 1, 1])
    prediction = CategoricalPrediction(logits)
    probs = torch.softmax(logits, -1)
    torch.testing.assert_close(prediction.probs, probs.mean(0))
    torch.testing.assert_close(prediction.mean, prediction.probs)
    torch.testing.assert_close(prediction.log_prob(labels), probs.mean(0)[torch.arange(4), labels].log())
    torch.testing.assert_close(prediction.variance, prediction.probs * (1 - prediction.probs))
    torch.testing.assert_close(prediction.epistemic, probs.var(0, correction=0))
    assert torch.equal(prediction.labels, probs.mean(0).argmax(-1))
    entropy = distributions.Categorical(probs.mean(0)).entropy()
    torch.testing.assert_close(prediction.entropy, entropy)
    information = entropy - distributions.Categorical(probs).entropy().mean(0)
    torch.testing.assert_close(prediction.mutual_information, information)
    same = CategoricalPrediction(logits[:1].expand(6, 4, 3))
    torch.testing.assert_close(same.mutual_information, torch.zeros(4).double())


def test_positions_are_summed_inside_each_sample() -> None:
    logits = normal(6, 4, 5, 3)
    labels = torch.ones(4, 5, dtype=torch.long)
    expected = torch.log_softmax(logits, -1)[..., 1].sum(-1).exp().mean(0).log()
    torch.testing.assert_close(CategoricalPrediction(logits, event_dims=1).log_prob(labels), expected)


def test_bernoulli_mixture() -> None:
    logits, y = 2 * normal(6, 4, 1), torch.tensor([[0.0], [1.0], [1.0], [0.0]]).double()
    prediction = BernoulliPrediction(logits)
    probs = torch.sigmoid(logits).mean(0)
    torch.testing.assert_close(prediction.probs, probs)
    torch.testing.assert_close(prediction.log_prob(y), distributions.Bernoulli(probs).log_prob(y).squeeze(-1))
    torch.testing.assert_close(prediction.variance, probs * (1 - probs))
    entropy = distributions.Bernoulli(probs).entropy()
    torch.testing.assert_close(prediction.entropy, entropy)
    conditional = distributions.Bernoulli(logits=logits).entropy().mean(0)
    torch.testing.assert_close(prediction.mutual_information, entropy - conditional)
    assert torch.equal(prediction.labels, (probs > 0.5).long())
    assert torch.equal(prediction.quantile(0.3), (probs > 0.7).double())
    extreme = BernoulliPrediction(torch.tensor([[200.0]]), event_dims=0)
    assert float(extreme.log_prob(torch.zeros(1))) == pytest.approx(-200)


@pytest.mark.parametrize("kind", [BernoulliPrediction, CategoricalPrediction])
def test_draws_that_agree_have_no_information_left_not_even_less_than_none(kind: type[Prediction]) -> None:
    information = kind(normal(1, 1000, 3).float().expand(7, 1000, 3)).mutual_information
    assert float(information.min()) == 0.0
    assert float(information.max()) < 1e-5


def test_poisson_mixture() -> None:
    log_rate = 1 + normal(6, 4, 1)
    prediction = PoissonPrediction(log_rate)
    frozen = stats.poisson(log_rate.exp().numpy())
    counts = torch.tensor([[0.0], [2.0], [5.0], [40.0]]).double()
    expected = np.log(frozen.pmf(counts.numpy()).mean(0))[:, 0]
    np.testing.assert_allclose(prediction.log_prob(counts).numpy(), expected, rtol=1e-9)
    np.testing.assert_allclose(prediction.cdf(counts).numpy(), frozen.cdf(counts.numpy()).mean(0), rtol=1e-9)
    assert torch.equal(prediction.cdf(torch.tensor(-1.0)), torch.zeros(4, 1).double())
    torch.testing.assert_close(prediction.aleatoric, prediction.mean)
    grid = torch.arange(0, 200).double()
    table = torch.stack([prediction.cdf(value) for value in grid])
    for level in (0.001, 0.5, 0.999):
        smallest = grid[(table >= level).double().argmax(0)]
        assert torch.equal(prediction.quantile(level), smallest)


@pytest.mark.parametrize(
    "prediction",
    [
        student(),
        CategoricalPrediction(normal(6, 4, 2)),
        BernoulliPrediction(normal(6, 4, 2)),
        PoissonPrediction(normal(6, 4, 2)),
    ],
)
def test_shared_promises(prediction: Prediction) -> None:
    assert prediction.num_samples == 6
    torch.testing.assert_close(prediction.variance, prediction.epistemic + prediction.aleatoric)
    assert prediction.to(torch.float32).mean.dtype == torch.float32
    torch.testing.assert_close(prediction.to(torch.float32).mean, prediction.mean.float())
    with pytest.raises(ValueError, match=r"shape \[4, 7\]"):
        prediction.log_prob(torch.zeros(4, 7))
    with pytest.raises(ValueError, match="no replicas"):
        prediction.replica(0)
    for bad in (0.0, 1.0, torch.zeros(0), torch.full((1, 1), 0.5)):
        with pytest.raises(ValueError, match="strictly between 0 and 1"):
            prediction.quantile(bad)
    with pytest.raises(ValueError, match="level must be"):
        prediction.interval(1.0)


def test_what_makes_no_sense_says_who_has_it() -> None:
    with pytest.raises(AttributeError, match="only Categorical and Bernoulli"):
        _ = student().probs
    with pytest.raises(ValueError, match="ordered target"):
        CategoricalPrediction(normal(6, 4, 2)).quantile(0.5)
    with pytest.raises(ValueError, match=r"target\.long"):
        CategoricalPrediction(normal(6, 4, 2)).log_prob(torch.zeros(4))
    with pytest.raises(ValueError, match=r"0\.\.1"):
        CategoricalPrediction(normal(6, 4, 2)).log_prob(torch.full((4,), 2))


def test_a_replica_is_its_part() -> None:
    location = normal(6, 3, 4, 1)
    scale = normal(3, 1, 1, seed=1).exp()
    together = RegressionPrediction(location, scale, torch.tensor(7.0).double())
    alone = RegressionPrediction(location[:, 2], scale[2], torch.tensor(7.0).double())
    y = normal(3, 4, 1, seed=2)
    torch.testing.assert_close(together.replica(2).log_prob(y[2]), alone.log_prob(y[2]))
    torch.testing.assert_close(together.log_prob(y)[2], alone.log_prob(y[2]))
    torch.testing.assert_close(together.quantile(0.2)[2], alone.quantile(0.2))


def test_half_precision_and_gradients_stay_outside() -> None:
    location = torch.zeros(2, 3, 1, dtype=torch.bfloat16, requires_grad=True)
    prediction = RegressionPrediction(location, torch.ones(1))
    assert prediction.mean.dtype == torch.float32
    assert not prediction.log_prob(torch.zeros(3, 1)).requires_grad


@pytest.mark.parametrize("log_rate", [20.0, 38.0, 60.0])
def test_quantiles_of_huge_counts_are_found(log_rate: float) -> None:
    """Above 2^53 neighbouring integers are one number: a search for the smallest one must end all the same."""
    prediction = PoissonPrediction(torch.full((3, 1, 1), log_rate, dtype=torch.float64))
    torch.testing.assert_close(prediction.quantile(0.5), prediction.mean, rtol=1e-6, atol=0.0)
