"""The Gaussian's noise: fixed, learned under its Gamma prior, as a point, for each output."""

import math

import pytest
import torch
from scipy import optimize
from scipy import special as scipy_special
from torch import Tensor, distributions, nn

from noisygrad.likelihoods import Categorical, Gaussian


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def outputs(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=dtype)


def learned(replicas: tuple[int, ...] = (), **options: object) -> Gaussian:
    likelihood = Gaussian(**options)  # type: ignore[arg-type]
    likelihood.bind(replicas, "cpu", torch.float64)
    return likelihood


def test_expected_log_likelihood_under_the_gamma_posterior() -> None:
    likelihood = learned(noise_prior=(2.5, 1.5))
    f, y = outputs(1, 1), outputs(1, 1, seed=1)
    taus = distributions.Gamma(torch.tensor(2.5).double(), torch.tensor(1.5).double())
    levels = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    tau = torch.from_numpy(scipy_special.gammaincinv(2.5, levels.numpy())) / taus.rate
    expected = distributions.Normal(f, tau.rsqrt()).log_prob(y).mean()
    torch.testing.assert_close(likelihood.log_prob(f, y)[0], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(likelihood.nll(f, y), -expected, rtol=1e-4, atol=1e-4)


def test_gamma_update_by_hand() -> None:
    likelihood = learned(noise_prior=(6.0, 5.0), noise_decay=0.6)
    f, y = torch.zeros(2, 2).double(), torch.tensor([[1.0, 2.0], [3.0, 0.0]]).double()
    statistic = likelihood.observe(f, y)
    assert statistic is not None
    torch.testing.assert_close(statistic, torch.tensor([[7.0], [2.0]]).double())  # (1 + 4 + 9 + 0) / 2, of 2 outputs
    optimum = (6 + 20 * 2 / (2 * 0.5), 5 + 20 / (2 * 0.5) * 7.0)  # Σ_d E(y−f)² = 7
    shape, rate = 6.0, 5.0
    for step_size in (0.5, 0.4, 0.4):  # max(1/2, 0.4), max(1/3, 0.4), max(1/4, 0.4)
        likelihood.update_noise_(statistic, 20, 0.5)
        shape += step_size * (optimum[0] - shape)
        rate += step_size * (optimum[1] - rate)
        assert float(likelihood.noise_shape) == pytest.approx(shape, rel=1e-12)
        assert float(likelihood.noise_rate) == pytest.approx(rate, rel=1e-12)
        assert float(likelihood.noise_variance) == pytest.approx(rate / (shape - 1), rel=1e-12)
    expected = distributions.kl_divergence(
        distributions.Gamma(likelihood.noise_shape, likelihood.noise_rate),
        distributions.Gamma(torch.tensor(6.0).double(), torch.tensor(5.0).double()),
    )
    torch.testing.assert_close(likelihood.kl(), expected.squeeze())


def test_gamma_fixed_point_maximises_the_elbo() -> None:
    num_data, kl_weight = 40, 0.7
    likelihood = learned(noise_decay=0.0)
    f, y = outputs(num_data, 3), outputs(num_data, 3, seed=1)
    for _ in range(2):
        statistic = likelihood.observe(f, y)
        assert statistic is not None
        likelihood.update_noise_(statistic, num_data, kl_weight)

    def negative_elbo(logs: list[float]) -> float:
        likelihood.noise_shape.fill_(math.exp(logs[0]))
        likelihood.noise_rate.fill_(math.exp(logs[1]))
        likelihood._refresh()
        return float(num_data * likelihood.nll(f, y) + kl_weight * likelihood.kl())

    reached = [math.log(float(likelihood.noise_shape)), math.log(float(likelihood.noise_rate))]
    best = optimize.minimize(negative_elbo, [2.0, 2.0], method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-11})
    assert reached == pytest.approx(list(best.x), abs=1e-5)


def test_noise_per_output_and_as_a_point() -> None:
    f, y = torch.zeros(4, 2).double(), torch.tensor([[1.0, 3.0]] * 4).double()
    likelihood = learned(per_output=True, noise_prior=(6.0, 6.0))
    statistic = likelihood.observe(f, y)
    assert statistic is not None
    torch.testing.assert_close(statistic, torch.tensor([[1.0, 9.0], [1.0, 1.0]]).double())
    likelihood.update_noise_(statistic, 10, 1.0)
    torch.testing.assert_close(likelihood.noise_shape, torch.full((2,), 8.5).double())  # halfway from 6 to 6 + 10/2
    torch.testing.assert_close(likelihood.noise_rate, torch.tensor([8.5, 28.5]).double())
    torch.testing.assert_close(likelihood.nll(f, y), -likelihood.log_prob(f, y).mean())
    drawn = likelihood.sample(torch.zeros(200_000, 2).double(), [generator()])
    torch.testing.assert_close(drawn.var(0), likelihood.noise_rate / likelihood.noise_shape, rtol=0.02, atol=0)
    with pytest.raises(ValueError, match="2 outputs was learned"):
        likelihood.nll(torch.zeros(4, 3), torch.zeros(4, 3))
    point = learned(noise_prior=None, noise_decay=0.0)
    statistic = point.observe(f, y)
    assert statistic is not None
    point.update_noise_(statistic, 10, 1.0)
    assert float(point.noise_variance) == pytest.approx(5.0)
    point.update_noise_(torch.tensor([[0.0], [1.0]]).double(), 10, 1.0)
    assert 0 < float(point.noise_variance) < 1e-9
    assert math.isfinite(float(point.nll(f, y)))
    assert float(point.kl()) == 0
    assert Gaussian(0.1).observe(f, y) is None


@pytest.mark.parametrize("per_output", [False, True])
@pytest.mark.parametrize("prior", [(6.0, 6.0), None])
def test_noise_of_replicas_is_a_loop(per_output: bool, prior: tuple[float, float] | None) -> None:
    options = {"per_output": per_output, "noise_prior": prior}
    together = learned((2, 2), **options)
    f, y = outputs(2, 2, 5, 3), outputs(2, 2, 5, 3, seed=1)
    num_data = torch.tensor([[10.0, 20.0], [30.0, 40.0]]).double()
    for _ in range(3):
        statistic = together.observe(f, y)
        assert statistic is not None
        together.update_noise_(statistic, num_data, 0.5)
    prediction = together.predictive(torch.stack([f, f + 1]))
    for row in range(2):
        for column in range(2):
            alone = learned(**options)
            for _ in range(3):
                statistic = alone.observe(f[row, column], y[row, column])
                assert statistic is not None
                alone.update_noise_(statistic, float(num_data[row, column]), 0.5)
            torch.testing.assert_close(alone.noise_variance, together.noise_variance[row, column])
            torch.testing.assert_close(alone.kl(), together.kl()[row, column])
            torch.testing.assert_close(
                alone.log_prob(f[row, column], y[row, column]), together.log_prob(f, y)[row, column]
            )
            one = alone.predictive(torch.stack([f, f + 1])[:, row, column])
            part = prediction.replica(row).replica(column)
            torch.testing.assert_close(part.log_prob(y[row, column]), one.log_prob(y[row, column]))
            torch.testing.assert_close(part.variance, one.variance)


def test_a_statistic_that_is_not_finite_leaves_the_noise_as_it_was() -> None:
    likelihood = learned((2,))
    statistic = likelihood.observe(torch.zeros(2, 3, 1).double(), torch.ones(2, 3, 1).double())
    assert statistic is not None
    statistic[0, 1] = torch.nan
    likelihood.update_noise_(statistic, 10, 1.0)
    assert likelihood.noise_updates.flatten().tolist() == [1, 0]
    assert likelihood.noise_shape.flatten().tolist() == [8.5, 6.0]
    assert likelihood.noise_rate.flatten().tolist() == [8.5, 6.0]
    with pytest.raises(ValueError, match="kl_weight must be positive"):
        likelihood.update_noise_(statistic, 10, 0.0)
    for refusing in (Gaussian(0.1), Categorical()):
        with pytest.raises(ValueError, match="learn"):
            refusing.update_noise_(statistic, 10, 1.0)


def test_kl_keeps_its_digits_at_a_million_data() -> None:
    single, double = Gaussian(), learned()
    for likelihood, dtype in ((single, torch.float32), (double, torch.float64)):
        statistic = likelihood.observe(torch.zeros(4, 1, dtype=dtype), torch.full((4, 1), 0.5, dtype=dtype))
        assert statistic is not None
        likelihood.update_noise_(statistic, 1_000_000, 1.0)
    torch.testing.assert_close(single.kl().double(), double.kl(), rtol=1e-6, atol=0)


def test_predictive_of_the_gaussian() -> None:
    f = outputs(7, 4, 2)
    likelihood = learned(noise_prior=(3.0, 2.0))
    prediction = likelihood.predictive(f)
    torch.testing.assert_close(prediction.aleatoric, torch.full((4, 2), 2.0 / (3.0 - 1)).double())
    assert prediction.degrees_of_freedom is not None
    assert float(prediction.degrees_of_freedom[0, 0, 0]) == 6.0
    assert Gaussian(0.3).predictive(f).degrees_of_freedom is None
    torch.testing.assert_close(Gaussian(0.3).predictive(f).aleatoric, torch.full((4, 2), 0.3).double())
    assert bool(torch.isinf(learned(noise_prior=(0.5, 1.0)).noise_variance).all())


@pytest.mark.parametrize("replicas", [(), (2,)])
@pytest.mark.parametrize("per_output", [False, True])
@pytest.mark.parametrize("prior", [(6.0, 6.0), None])
def test_state_dict_round_trip(replicas: tuple[int, ...], per_output: bool, prior: tuple[float, float] | None) -> None:
    saved = learned(replicas, per_output=per_output, noise_prior=prior)
    f, y = outputs(*replicas, 5, 3), outputs(*replicas, 5, 3, seed=1)
    statistic = saved.observe(f, y)
    assert statistic is not None
    saved.update_noise_(statistic, 10, 1.0)
    late, early = (Gaussian.from_config(saved.config()) for _ in range(2))
    early.bind(replicas, "cpu", torch.float64)
    nn.ModuleDict({"inner": early}).load_state_dict(nn.ModuleDict({"inner": saved}).state_dict())
    late.load_state_dict(saved.state_dict())
    late.bind(replicas, "cpu", torch.float64)
    for restored in (late, early):
        assert isinstance(restored, Gaussian)
        assert torch.equal(restored.noise_variance, saved.noise_variance)
        assert torch.equal(restored.nll(f, y), saved.nll(f, y))
        statistic = restored.observe(f, y)
        assert statistic is not None
        restored.update_noise_(statistic, 10, 1.0)
    saved.update_noise_(statistic, 10, 1.0)
    assert isinstance(late, Gaussian)
    assert torch.equal(late.noise_variance, saved.noise_variance)


def test_binding_to_other_replicas_is_refused() -> None:
    likelihood = learned((3,))
    with pytest.raises(ValueError, match="make a new one"):
        likelihood.bind((2,), "cpu", torch.float32)
    other = learned((2,))
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(likelihood.state_dict())


def test_a_fixed_variance_is_exact_in_float64() -> None:
    assert float(learned(noise_variance=0.1).noise_variance) == 0.1
    assert float(learned(noise_prior=(0.1, 0.3)).noise_rate) == 0.3
    single = Gaussian(0.1)
    single.bind((), "cpu", torch.bfloat16)
    assert single.noise_variance.dtype == torch.float32
