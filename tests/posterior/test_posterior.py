"""A fitted posterior against torch.distributions on its dense covariance; predictions; its file."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence

import noisygrad as ng
from noisygrad.posterior.weights import parameter_order
from support.fitted_posterior import MODELS, PRIORS, fitted, generator, mlp, vector
from support.truth import FAMILIES, close, normal


def dense(posterior: ng.Posterior) -> MultivariateNormal:
    precision = posterior.precision()
    return MultivariateNormal(vector(posterior.mean), precision_matrix=0.5 * (precision + precision.mT))


CASES = [
    (family, name, "factored") for family in FAMILIES for name in MODELS
] + [("kronecker", name, "exact") for name in MODELS]  # fmt: skip


@pytest.mark.parametrize(("family", "name", "mode"), CASES)
def test_density_and_kl_are_those_of_the_dense_gaussian(family: str, name: str, mode: str) -> None:
    posterior, _, _ = fitted(family, name, damping_mode=mode)
    weights = posterior.sample(generator())
    gaussian = dense(posterior)
    close(posterior.log_prob(weights), gaussian.log_prob(vector(weights)), rtol=1e-10)
    moved = {n: w + 0.1 for n, w in weights.items()}
    close(posterior.log_prob(moved), gaussian.log_prob(vector(moved)), rtol=1e-10)

    variances = [w.new_full((w.numel(),), PRIORS["*bias" if n.endswith("bias") else "*"]) for n, w in weights.items()]
    norms = {"mlp": "3.weight", "convolutions": "1.weight"}
    centres = [w.new_full((w.numel(),), float(n == norms[name])) for n, w in weights.items()]
    prior = MultivariateNormal(torch.cat(centres), torch.diag(torch.cat(variances)))
    close(posterior.kl(), kl_divergence(gaussian, prior), rtol=1e-10)
    assert posterior.kl() > 1
    close(torch.stack(list(posterior.kl_by_block().values())).sum(), posterior.kl())
    assert len(posterior.kl_by_block()) == len(posterior.structure.blocks)


@pytest.mark.parametrize("family", FAMILIES)
def test_kl_to_a_fitted_prior(family: str) -> None:
    first, _, _ = fitted(family)
    second, _, _ = fitted(family, steps=8, prior=first.as_prior(), prior_variance=None)
    close(second.kl(), kl_divergence(dense(second), dense(first)), rtol=1e-9)
    assert second.kl() > 0.1


@pytest.mark.parametrize(("family", "name", "mode"), CASES)
def test_covariance_is_the_inverse_and_in_the_order_of_the_parameters(family: str, name: str, mode: str) -> None:
    posterior, _, _ = fitted(family, name, damping_mode=mode)
    precision, covariance = posterior.precision(), posterior.covariance()
    close(precision @ covariance, torch.eye(len(precision), dtype=precision.dtype), atol=1e-8)
    std = posterior.std()
    assert list(std) == [n for n, _ in posterior.model.named_parameters()]
    close(vector(std), covariance.diagonal().sqrt())
    # Moving one entry of one parameter changes the density by the precision's diagonal at its index.
    mean = posterior.mean
    index = 0
    for parameter, tensor in mean.items():
        moved = {n: t.clone() for n, t in mean.items()}
        place = tensor.numel() - 1
        moved[parameter].view(-1)[place] += 0.1
        fall = posterior.log_prob(mean) - posterior.log_prob(moved)
        close(fall, 0.5 * 0.01 * precision[index + place, index + place], rtol=1e-6)
        index += tensor.numel()
    assert index == len(precision)


@pytest.mark.parametrize(("family", "name", "mode"), CASES)
def test_samples_have_the_covariance(family: str, name: str, mode: str) -> None:
    posterior, _, _ = fitted(family, name, steps=40, damping_mode=mode)
    count = 100_000
    noise = torch.randn(count, posterior.structure.size, generator=generator(), dtype=torch.float64)
    spread = torch.zeros_like(noise)
    for block, precision in posterior._precisions:
        block.write_(spread, precision.sample(block.batched(block.segment(noise))))
    order = parameter_order(posterior.structure)
    draws = vector(posterior.mean) + (0.6 / 30) ** 0.5 * spread[:, order]
    covariance = posterior.covariance()
    scale = covariance.diagonal().rsqrt()
    found = torch.cov(draws.mT) * scale[:, None] * scale
    # An entry is off by at most sqrt(2 / count) = 0.0045, one standard deviation.
    assert (found - covariance * scale[:, None] * scale).abs().max() < 0.025
    assert ((draws.mean(0) - vector(posterior.mean)) * scale).abs().max() < 5 / count**0.5
    # And `sample` is that map, of its own noise.
    one = torch.empty_like(noise[0]).normal_(generator=generator(9))
    spread = torch.zeros_like(one)
    for block, precision in posterior._precisions:
        block.write_(spread, precision.sample(block.batched(block.segment(one))))
    close(vector(posterior.sample(generator(9))), vector(posterior.mean) + (0.6 / 30) ** 0.5 * spread[order])


def test_elbo_is_made_of_its_parts() -> None:
    likelihood = ng.Gaussian(noise_prior=(3.0, 2.0))
    posterior, x, y = fitted("kronecker", likelihood=likelihood)
    loader = [(x[:4], y[:4]), (x[4:], y[4:])]
    nll = posterior.expected_nll(loader, 5, generator())
    kl = posterior.kl() + posterior.likelihood.kl()
    close(posterior.elbo(loader, 5, generator()), -30 * nll - kl)
    close(posterior.objective(loader, 5, generator()), -30 * nll - 0.6 * kl)
    assert posterior.likelihood.kl() > 0
    # By hand: the mean over the same draws and all data of −E[log p].
    source, total = generator(), 0.0
    model = copy.deepcopy(posterior.model)
    for _ in range(5):
        model.load_state_dict(posterior.sample(source), strict=True)
        a, b = posterior.likelihood.noise_shape, posterior.likelihood.noise_rate
        log_precision = torch.digamma(a) - b.log()
        errors = (model(x) - y).detach().square()
        total += (-0.5 * (log_precision - a / b * errors - torch.log(torch.tensor(2 * torch.pi)))).sum() / (6 * 5)
    close(nll, total, rtol=1e-6)
    with pytest.raises(ValueError, match="empty"):
        posterior.expected_nll([], 5)


def test_a_snapshot_stays() -> None:
    torch.manual_seed(0)
    model = mlp().double()
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=30, stats_every=1, factor_every=1)
    x, y = normal(6, 2), normal(6, 2, seed=2)
    optimizer.step(lambda: (model(x), y))
    posterior = optimizer.posterior()
    mean, noise = vector(posterior.mean).clone(), float(posterior.likelihood.noise_rate)
    before = copy.deepcopy(posterior).covariance()
    for _ in range(3):
        optimizer.step(lambda: (model(x), y))
    assert torch.equal(vector(posterior.mean), mean)
    close(posterior.covariance(), before)
    assert float(posterior.likelihood.noise_rate) == noise != float(optimizer.likelihood.noise_rate)


# ---------------------------------------------------------------- predictions


@pytest.mark.parametrize("family", FAMILIES)
def test_predictions(family: str) -> None:
    posterior, x, _ = fitted(family, "convolutions")
    model = posterior.model
    model.train()
    model[4].eval()
    modes = [m.training for m in model.modules()]
    state = copy.deepcopy(model.state_dict())
    whole = posterior.predict(x, 7, generator=generator())
    parts = posterior.predict(x, 7, batch_size=4, generator=generator())
    close(parts.mean, whole.mean)
    close(parts.variance, whole.variance)
    assert (whole.epistemic > 0).all()
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    # By hand: the mean output over the same draws, in evaluation mode.
    source, twin = generator(), copy.deepcopy(model).eval()
    outputs = []
    for _ in range(7):
        twin.load_state_dict(posterior.sample(source), strict=False)
        outputs.append(twin(x).detach())
    close(whole.mean, torch.stack(outputs).mean(0))
    with pytest.raises(ValueError, match="num_samples"):
        posterior.predict(x, 0)


def test_modes_are_restored_after_an_exception() -> None:
    posterior, _, _ = fitted("diagonal")
    posterior.model.train()
    with pytest.raises(RuntimeError):
        posterior.predict(normal(2, 5), 3)
    assert all(m.training for m in posterior.model.modules())


def test_a_point_estimate() -> None:
    posterior, x, _ = fitted("kronecker", noise=False)
    prediction = posterior.predict(x, 20)
    close(prediction.mean, posterior.model(x).detach())
    assert (prediction.num_samples, float(prediction.epistemic.abs().max())) == (1, 0.0)
    assert torch.equal(vector(posterior.sample()), vector(posterior.mean))
    for ask in (posterior.kl, posterior.covariance, lambda: posterior.log_prob(posterior.mean)):
        with pytest.raises(ValueError, match="point estimate"):
            ask()


def test_groups_without_noise() -> None:
    posterior, _, _ = fitted("kronecker", groups={"5.*": {"noise": False}})
    covariance = posterior.covariance()
    assert (covariance.diagonal()[-8:] == 0).all()
    assert (covariance.diagonal()[:-8] > 0).all()
    draw = posterior.sample(generator())
    assert torch.equal(draw["5.weight"], posterior.mean["5.weight"])
    assert not torch.equal(draw["0.weight"], posterior.mean["0.weight"])
    with pytest.raises(ValueError, match="no finite precision"):
        posterior.precision()


# ---------------------------------------------------------------- the file

SAVED = {
    **{family: {"family": family} for family in FAMILIES},
    "exact damping": {"family": "kronecker", "damping_mode": "exact"},
    "batch norm, groups of a convolution": {"family": "kronecker", "name": "convolutions"},
    "learned noise": {"family": "kronecker", "likelihood": lambda: ng.Gaussian(noise_prior=(3.0, 2.0))},
    "noise per output": {"family": "full", "likelihood": lambda: ng.Gaussian(noise_prior=None, per_output=True)},
    "a group without noise": {"family": "tridiagonal", "groups": {"0.*": {"noise": False}}},
    "fitted prior": {"family": "tridiagonal", "fitted": True},
    "fitted dense prior": {"family": "full", "fitted": True},
}


@pytest.mark.parametrize("case", SAVED.values(), ids=SAVED.keys())
def test_a_file_gives_the_posterior_back(case: dict, tmp_path: Path) -> None:
    case = dict(case)
    family, name = case.pop("family"), case.get("name", "mlp")
    if case.pop("fitted", False):
        case |= {"prior": fitted(family)[0].as_prior(), "prior_variance": None}
    if "likelihood" in case:
        case["likelihood"] = case["likelihood"]()
    posterior, x, y = fitted(family, **case)
    path = tmp_path / "posterior.safetensors"
    posterior.save(path)
    torch.manual_seed(77)
    model = MODELS[name][0]().double()
    loaded = ng.load_posterior(path, model, family=family)
    assert loaded.family == family
    for a, b in zip(posterior.model.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for n, drawn in posterior.sample(generator()).items():
        assert torch.equal(drawn, loaded.sample(generator())[n])
    assert torch.equal(posterior.kl(), loaded.kl())
    first, second = (p.predict(x, 5, generator=generator()) for p in (posterior, loaded))
    assert torch.equal(first.mean, second.mean)
    assert torch.equal(first.log_prob(y), second.log_prob(y))
    assert torch.equal(posterior.elbo([(x, y)], 3, generator()), loaded.elbo([(x, y)], 3, generator()))
    assert str(posterior.coverage()) == str(loaded.coverage())
    assert [p.name for p in tmp_path.iterdir()] == ["posterior.safetensors"]


def test_frozen_parameters_come_back_too(tmp_path: Path) -> None:
    def frozen(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = mlp().double()
        model[0].requires_grad_(False)
        return model

    model = frozen(1)
    posterior = ng.NoisyKFAC(model, ng.Gaussian(noise_variance=0.5), num_data=10).posterior()
    posterior.save(tmp_path / "p")
    loaded = ng.load_posterior(tmp_path / "p", frozen(2))
    x = normal(3, 2)
    first, second = (p.outputs(x, 2, generator=generator()) for p in (posterior, loaded))
    assert torch.equal(first, second)


class Merging(torch.nn.Linear):
    """Does something of its own when its mode changes, as layers with adapters do."""

    def train(self, mode: bool = True) -> Any:
        self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + float(self.merged)


@pytest.mark.parametrize("training", [True, False])
def test_prediction_changes_the_mode_by_the_models_own_function(training: bool) -> None:
    model = torch.nn.Sequential(Merging(3, 1), torch.nn.Dropout()).train(training)
    model[1].train(not training)
    posterior = ng.NoisyAdam(model, ng.Gaussian(), num_data=8, noise=False).posterior()
    x = torch.randn(4, 3)
    with torch.no_grad():
        expected = torch.nn.functional.linear(x, model[0].weight, model[0].bias) + 1.0
    torch.testing.assert_close(posterior.predict(x).mean, expected)
    assert [module.training for module in model.modules()] == [training, training, not training]
    assert model[0].merged is not training
