"""Slips of the shell that were made once: each has a test of its own."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import noisygrad as ng
from support.truth import OPTIMIZERS, close, normal

KINDS = list(OPTIMIZERS.values())


def net(inputs: int = 3, outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def test_statistics_of_a_closure_do_not_keep_activations_alive() -> None:
    model = net()
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=10, stats_every=1)
    y = normal(8, 1)
    seen: list[weakref.ref[Tensor]] = []

    def closure() -> tuple[Tensor, Tensor]:
        x = normal(8, 3)
        seen.append(weakref.ref(x))
        return model(x), y

    for _ in range(3):
        optimizer.step(closure)
    gc.collect()
    assert [reference() for reference in seen] == [None] * 3


@pytest.mark.parametrize("form", ["closure", "explicit"])
def test_a_loss_that_is_not_finite_is_refused_even_if_its_gradient_is(form: str) -> None:
    model = net().float()
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(noise_variance=1.0), num_data=10, stats_every=5, factor_every=5)
    x, y = normal(8, 3).float(), normal(8, 1).float()
    for _ in range(2):
        optimizer.step(lambda: (model(x), y))
    before = optimizer.weights.mean.flat.clone()
    y[0] = 1e25  # its square overflows, its gradient does not

    def step() -> None:
        if form == "closure":
            optimizer.step(lambda: (model(x), y))
        else:
            with optimizer.sampled() as draw:
                draw.nll(model(x), y).backward()
            optimizer.step()

    with pytest.raises(ng.NonFiniteError, match="the loss itself"):
        step()
    assert torch.equal(optimizer.weights.mean.flat, before)
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()).sort()[0], before.sort()[0])
    assert optimizer.steps == 2


def sampled_covariance(posterior: ng.Posterior) -> Tensor:
    """The covariance that draws have, exactly: a draw is linear in its noise, which the generator can repeat."""
    mean = torch.cat([value.flatten() for value in posterior.mean.values()]).double()
    draws, noise = [], []
    for seed in range(2 * len(mean)):
        draw = posterior.sample(torch.Generator().manual_seed(seed))
        draws.append(torch.cat([value.flatten() for value in draw.values()]).double() - mean)
        noise.append(torch.empty(len(mean)).normal_(generator=torch.Generator().manual_seed(seed)).double())
    root = torch.linalg.lstsq(torch.stack(noise), torch.stack(draws)).solution
    return root.mT @ root


@pytest.mark.parametrize("kind", KINDS)
def test_the_dense_covariance_is_what_samples_have_even_where_float32_is_short_of_digits(kind: type) -> None:
    torch.manual_seed(0)
    column = torch.randn(50, 1)
    x = torch.cat([column, column + 1e-4 * torch.randn(50, 1), torch.randn(50, 1)], dim=1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = kind(model, ng.Gaussian(noise_variance=1e-3), num_data=10_000, lr=1e-4, stats_every=1, factor_every=1)
    for _ in range(30):
        optimizer.step(lambda: (model(x), column))
    posterior = optimizer.posterior()
    covariance = posterior.covariance()
    assert torch.equal(covariance, covariance.mT)
    found = sampled_covariance(posterior)
    scale = found.diagonal().sqrt()
    torch.testing.assert_close(covariance.double() / scale.outer(scale), found / scale.outer(scale), rtol=0, atol=1e-3)
    stds = torch.cat([value.flatten() for value in posterior.std().values()]).double()
    torch.testing.assert_close(stds, scale, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_data": 20}, "num_data is 10 there, 20 here"),
        ({"kl_weight": 0.5}, "kl_weight"),
        ({"prior_variance": 0.1}, "another prior"),
        ({"momentum_mode": "heavy_ball"}, "momentum_mode is average there, heavy_ball here"),
        (
            {"likelihood": ng.Gaussian(0.2)},
            r"Gaussian\(noise_variance=0.1, .* there, Gaussian\(noise_variance=0.2, .* here",
        ),
        ({"likelihood": ng.Poisson()}, r"there, Poisson\(\) here"),
    ],
)
def test_a_state_of_other_settings_is_refused(change: dict[str, Any], message: str) -> None:
    model, usual = net(), {"likelihood": ng.Gaussian(0.1), "num_data": 10}
    state = ng.NoisyKFAC(model, **usual).state_dict()
    other = ng.NoisyKFAC(model, **usual | change)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)


@pytest.mark.parametrize("name", ["momentum_mode", "likelihood"])
def test_a_state_that_does_not_tell_a_setting_is_refused(name: str) -> None:
    optimizer = ng.NoisyKFAC(net(), ng.Gaussian(), num_data=10)
    state = optimizer.state_dict()
    del state["settings"][name]
    with pytest.raises(ValueError, match=f"{name} is not recorded there"):
        optimizer.load_state_dict(state)


def test_a_subclass_with_a_forward_of_its_own_has_no_structure_assumed() -> None:
    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight * torch.tensor([1.0, 0.0]).to(x), self.bias)

    class Renamed(nn.Linear):
        pass

    model = nn.Sequential(Masked(2, 2), Renamed(2, 1)).double()
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=10)
    table = str(optimizer.coverage())
    assert "Masked has a forward of its own" in table
    assert {block.name: block.family.name for block in optimizer.structure.blocks} == {
        "1": "kronecker",
        "diagonal": "diagonal",
    }


def test_numbers_from_numpy_are_numbers() -> None:
    optimizer = ng.NoisyKFAC(
        net(),
        ng.Gaussian(),
        num_data=np.int64(10),
        lr=np.float32(0.1),
        kl_weight=np.float32(0.5),
        prior_variance=np.float32(2.0),
        damping=np.float32(0.01),
        fisher_decay=np.float64(0.9),
        seed=np.int64(3),
    )
    optimizer.step(lambda: (optimizer.model(normal(4, 3)), normal(4, 1)))
    posterior, three = optimizer.posterior(), np.int64(3)
    assert posterior.outputs(normal(4, 3), three, batch_size=three).shape == (3, 4, 1)
    assert posterior.elbo([(normal(4, 3), normal(4, 1))], three).isfinite()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prior": 3}, TypeError, "as_prior"),
        ({"seed": "a"}, ValueError, "seed must be an integer"),
        ({"damping_mode": "exact", "prior_variance": float("inf")}, ValueError, "finite prior_variance"),
        ({"stats_batch": 0}, ValueError, "stats_batch"),
        ({"lr": torch.tensor([0.1, 0.2])}, ValueError, r"lr must be a number .* of shape \[2\]"),
        ({"groups": ["0.*"]}, TypeError, "groups must map patterns"),
        ({"groups": {"0.*": 0.1}}, TypeError, "groups must map patterns"),
        ({"model": nn.ParameterList([torch.zeros(2), torch.zeros(0)])}, ValueError, "^1: without elements"),
        ({"model": nn.EmbeddingBag(5, 1, sparse=True)}, ValueError, "sparse, max_norm"),
        ({"model": nn.Sequential(nn.EmbeddingBag(5, 1, max_norm=1.0))}, ValueError, "embedding '0'"),
        ({"likelihood": ng.Gaussian}, TypeError, "an instance"),
        ({"model": [nn.Parameter(torch.zeros(1))]}, TypeError, "the model itself"),
    ],
)
def test_common_slips_are_named(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    settings = {"model": net(), "likelihood": ng.Gaussian(), "num_data": 10} | arguments
    with pytest.raises(error, match=message):
        ng.NoisyKFAC(settings.pop("model"), settings.pop("likelihood"), **settings)  # type: ignore[arg-type]


def test_a_fitted_prior_and_a_variance_exclude_each_other_and_a_closure_returns_a_pair() -> None:
    model = net()
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=10)
    prior = optimizer.posterior().as_prior()
    with pytest.raises(ValueError, match="either prior or prior_variance"):
        ng.NoisyKFAC(model, ng.Gaussian(), num_data=10, prior=prior, prior_variance=1.0)
    with pytest.raises(TypeError, match="weight must be a tensor; got int"):
        optimizer.step(lambda: (model(normal(4, 3)), normal(4, 1), 1))  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="log_prob needs"):
        optimizer.posterior().log_prob({name: torch.zeros(1) for name, _ in model.named_parameters()})


@pytest.mark.parametrize("target", [[1.0] * 4, np.ones((4, 1))], ids=["list", "numpy"])
@pytest.mark.parametrize("form", ["closure", "explicit"])
def test_a_target_or_an_output_that_is_no_tensor_is_named(form: str, target: Any) -> None:
    model = net()
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(), num_data=10)

    def attempt(output: Any, target: Any) -> None:
        if form == "closure":
            optimizer.step(lambda: (output(), target))
        else:
            with optimizer.sampled() as draw:
                draw.nll(output(), target).backward()

    with pytest.raises(TypeError, match=rf"must be tensors, one each; got Tensor and {type(target).__name__}"):
        attempt(lambda: model(normal(4, 3)), target)
    with pytest.raises(TypeError, match="must be tensors, one each; got tuple and Tensor"):
        attempt(lambda: (model(normal(4, 3)), None), normal(4, 1))
    posterior = optimizer.posterior()
    for call in (lambda: posterior.predict(np.ones((4, 3))), lambda: posterior.elbo([(normal(4, 3), target)])):
        with pytest.raises(TypeError, match="data must be tensors"):
            call()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not ng.NoisyKFAC])
def test_exact_damping_is_for_kronecker_blocks(kind: type) -> None:
    with pytest.raises(ValueError, match="Only NoisyKFAC has the choice"):
        kind(net(), ng.Gaussian(), num_data=10, damping_mode="exact")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda f: f.__name__)
def test_an_optimiser_is_not_copied_but_by_its_state(kind: type, duplicate: Any) -> None:
    with pytest.raises(TypeError, match="load_state_dict"):
        duplicate(kind(net(), ng.Gaussian(), num_data=10))


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_of_a_part_of_the_batch_are_those_of_its_first_examples(kind: type) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 2, groups=1), nn.ReLU(inplace=True), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 2)
    )
    model = model.double()
    found = []
    for stats_batch, examples in ((3, 8), (None, 3)):
        fit = kind(
            model,
            ng.Categorical(),
            num_data=100,
            fisher="exact",
            noise=False,
            damping=1e-3,
            lr=1e-9,
            stats_batch=stats_batch,
        )
        x, y = normal(8, 2, 3, 3)[:examples], torch.arange(8)[:examples] % 2
        fit.step(lambda x=x, y=y: (model(x), y))
        found.append({name: s.clone() for name, s in fit.covariance.statistics.items()})
    for name, statistics in found[0].items():
        for part, tensor in statistics.tensors().items():
            close(tensor, found[1][name].tensors()[part], rtol=1e-5, atol=1e-8)
