"""The start: F̄ is an average of measurements alone, and a share of the identity steadies the first draws and steps."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.families.base import Statistics
from support.compare import OPTIMIZERS, batches, each_optimizer, make, mlp, train
from support.truth import close, normal

NOISE, POINTS, INPUTS = 0.1, 300, 12
EVERY = {"stats_every": 2, "factor_every": 10}


# ---------------------------------------------------------------- the posterior after few steps


def regression(seed: int) -> tuple[Tensor, Tensor]:
    """Inputs of which some directions have a variance a thousand times that of others."""
    turned = torch.linalg.qr(normal(INPUTS, INPUTS, seed=4 * seed)).Q
    scale = torch.logspace(-1.4, 0.3, INPUTS, dtype=torch.float64)
    x = normal(POINTS, INPUTS, seed=4 * seed + 1) @ (turned * scale) @ turned.mT
    y = x @ normal(INPUTS, 1, seed=4 * seed + 2) + math.sqrt(NOISE) * normal(POINTS, 1, seed=4 * seed + 3)
    return x, y


def optimum(x: Tensor, kind: type[ng.NoisyOptimizer]) -> Tensor:
    """The covariance that is the nearest one of its family to the exact one, with a bias."""
    design = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    precision = design.mT @ design / NOISE + torch.eye(INPUTS + 1, dtype=x.dtype)
    return torch.diag(1 / precision.diagonal()) if kind is ng.NoisyAdam else torch.linalg.inv(precision)


def linear(kind: type[ng.NoisyOptimizer], seed: int, **options: object) -> ng.NoisyOptimizer:
    torch.manual_seed(seed)
    model = nn.Linear(INPUTS, 1).double()
    return kind(model, ng.Gaussian(noise_variance=NOISE), num_data=POINTS, seed=seed, **EVERY | options)  # type: ignore[arg-type]


def fit(optimizer: ng.NoisyOptimizer, x: Tensor, y: Tensor, steps: int, seed: int, size: int = 30) -> None:
    order = torch.Generator().manual_seed(100 + seed)
    for _ in range(steps):
        rows = torch.randint(POINTS, (size,), generator=order)
        optimizer.step(lambda rows=rows: (optimizer.model(x[rows]), y[rows]))


@each_optimizer
def test_the_posterior_of_a_linear_regression_is_as_wide_as_it_should_be_from_the_start(
    kind: type[ng.NoisyOptimizer],
) -> None:
    """With a start that fades the trace was a seventh of this after 300 steps."""
    ratios: dict[int, list[float]] = {300: [], 1000: []}
    for seed in range(2):
        x, y = regression(seed)
        optimizer, done = linear(kind, seed), 0
        for steps, found in ratios.items():
            fit(optimizer, x, y, steps - done, seed + done)
            done = steps
            found.append(float(optimizer.posterior().covariance().trace() / optimum(x, kind).trace()))
    for steps, found in ratios.items():
        assert sum(found) / len(found) == pytest.approx(1.0, abs=0.1), (steps, found)


def test_with_a_share_of_the_identity_left_it_would_not_be() -> None:
    """So that the test above can fail: draws have what the posterior that is handed out has not."""
    x, y = regression(0)
    optimizer = linear(ng.NoisyKFAC, 0, safeguard="fading")
    fit(optimizer, x, y, 300, 0)
    posterior, exact = optimizer.posterior(), float(optimum(x, ng.NoisyKFAC).trace())
    assert float(posterior.covariance().trace()) == pytest.approx(exact, rel=0.15)
    covariance = optimizer.covariance
    (block,) = covariance.blocks
    near = covariance.statistics[block.name].with_identity(covariance.identity_share)
    drawn = torch.linalg.inv(near.factorise(covariance.priors[block.name]).to_dense()) / POINTS
    assert float(drawn.trace()) < 0.5 * exact


# ---------------------------------------------------------------- what draws and steps are made of


RATE = 0.1
DENSE = {"diagonal": ng.NoisyAdam, "kronecker": ng.NoisyKFAC, "full": ng.NoisyFull}


def moments(record: Statistics) -> dict[str, Tensor]:
    """By name, copied."""
    return {name: tensor.clone() for name, tensor in record.averages().items()}


def as_the_identity(name: str, like: Tensor) -> Tensor:
    """The identity, a vector of ones, or, between two layers, nothing."""
    if name.startswith("cross"):
        return torch.zeros_like(like)
    square = like.dim() > 1 and like.shape[-1] == like.shape[-2]
    return torch.eye(len(like), dtype=like.dtype) if square else torch.ones_like(like)


@pytest.mark.parametrize("kind", [k for k in OPTIMIZERS if k is not ng.NoisyEKFAC], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("damping", [0.0, 0.2])
def test_a_fading_safeguard_is_an_average_that_starts_at_the_identity(
    kind: type[ng.NoisyOptimizer], damping: float
) -> None:
    """decay · F + rate · F̂, F₀ = I, as it was before F̄ was of measurements alone: the same draws, the same steps."""
    model = mlp()
    optimizer = make(
        kind, model, safeguard="fading", fisher_decay=1 - RATE, damping=damping, stats_every=2, factor_every=4
    )
    covariance = optimizer.covariance
    seen: list[dict[str, dict[str, Tensor]]] = []
    prepare = covariance.fisher.prepare

    def noted(measured: dict[str, Statistics], *args: object, **more: object) -> None:
        seen.append({name: moments(record) for name, record in measured.items()})
        prepare(measured, *args, **more)

    covariance.fisher.prepare = noted
    naive = {
        name: {key: as_the_identity(key, tensor) for key, tensor in record.unpacked().averages().items()}
        for name, record in covariance.statistics.items()
    }
    counted, checked = 0, 0
    noise, gradient = normal(covariance.noise_size, seed=1), normal(covariance.noise_size, seed=2)
    for step, batch in enumerate(batches(12), start=1):
        train(optimizer, model, [batch])
        for measured in seen[counted:]:
            for name, own in naive.items():
                for key in own:
                    own[key] = (1 - RATE) * own[key] + RATE * measured[name][key]
        counted = len(seen)
        if not optimizer.options.factors_due(step):
            continue
        checked += 1
        for block in covariance.blocks:
            record = covariance.statistics[block.name].unpacked().with_tensors(naive[block.name])
            prior, factors = covariance.priors[block.name], covariance.factors[block.name]
            z, v = block.vector(noise), block.vector(gradient)
            close(factors.sampler.sample(z), record.factorise(prior).sample(z), rtol=1e-9, atol=1e-9)
            close(factors.stepper.solve(v), record.factorise(prior, damping).solve(v), rtol=1e-9, atol=1e-9)
    assert (counted, checked) == (7, 5)


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("safeguard", ["brief", "fading"])
def test_moments_are_mixed_with_the_identity_one_by_one(family: str, safeguard: str) -> None:
    """Not their product: A and S each get their share. The dense P is written down from the definitions."""
    model = mlp()
    options = {"safeguard": safeguard, "fisher_decay": 0.9, "noise": True, "fisher": "exact"}
    optimizer = make(DENSE[family], model, **options)
    covariance = optimizer.covariance
    for count, batch in enumerate(batches(6), start=1):
        train(optimizer, model, [batch])
        share = 1 / (count + 1) ** 2 if safeguard == "brief" else 0.9**count
        assert float(covariance.identity_share) == pytest.approx(share, rel=1e-12)
        for block in covariance.blocks:
            found = {
                key: (1 - share) * tensor + share * as_the_identity(key, tensor)
                for key, tensor in covariance.statistics[block.name].unpacked().averages().items()
            }
            gamma = 1 / (60 * 0.5)
            size = block.size
            if family == "kronecker":
                inputs, outputs = found["inputs"], found["outputs"]
                pi = math.sqrt(float(inputs.diagonal().mean() / outputs.diagonal().mean()))
                eyes = [torch.eye(len(side), dtype=side.dtype) for side in (inputs, outputs)]
                precision = torch.kron(
                    outputs + math.sqrt(gamma) / pi * eyes[1], inputs + pi * math.sqrt(gamma) * eyes[0]
                )
            else:
                fisher = found["fisher"]
                precision = (torch.diag(fisher) if fisher.dim() == 1 else fisher) + gamma * torch.eye(size).double()
            vector = normal(size, seed=count)
            solved = covariance.factors[block.name].stepper.solve(vector)
            close(solved, torch.linalg.solve(precision, vector), rtol=1e-9, atol=1e-9)
            root = torch.stack(
                [covariance.factors[block.name].sampler.sample(unit) for unit in torch.eye(size).double()]
            )
            close(root.mT @ root, torch.linalg.inv(precision), rtol=1e-9, atol=1e-9)


@each_optimizer
def test_with_little_measured_draws_are_narrower_than_the_posterior(kind: type[ng.NoisyOptimizer]) -> None:
    model = mlp()
    optimizer = make(kind, model)
    covariance = optimizer.covariance
    noise = normal(200, covariance.noise_size, seed=3)

    def spread() -> Tensor:
        return covariance.sample(noise).square().mean()

    assert float(covariance.identity_share) == 1.0
    assert 0.6 < float(spread() / noise.square().mean()) < 1.0  # equation (11) adds the prior to both factors
    train(optimizer, model, batches(1))
    assert float(spread()) < 0.5 * float(optimizer.posterior().covariance().diagonal().mean() * 60)


# ---------------------------------------------------------------- before and after the first measurement


@each_optimizer
def test_before_the_first_measurement_the_posterior_is_the_prior(kind: type[ng.NoisyOptimizer]) -> None:
    model = mlp()
    posterior = make(kind, model, stats_every=3, factor_every=1).posterior()
    size = sum(parameter.numel() for parameter in model.parameters())
    close(posterior.covariance(), 0.5 * torch.eye(size, dtype=torch.float64))
    assert all(not t.any() for s in posterior.statistics.values() for t in s.averages().values())


@each_optimizer
@pytest.mark.parametrize("decay", [0.0, 0.6, 0.999])
@pytest.mark.parametrize("safeguard", ["brief", "fading"])
def test_measurements_count_alike_but_for_the_decay(
    kind: type[ng.NoisyOptimizer], decay: float, safeguard: str
) -> None:
    """The first is F̄; after three, of weights 1, d and d², it is their mean, whatever the safeguard."""
    model = mlp()
    optimizer = make(kind, model, fisher_decay=decay, safeguard=safeguard, factor_every=100)
    fisher, seen = optimizer.covariance.fisher, []
    prepare = fisher.prepare

    def noted(measured: dict[str, Statistics], *args: object, **more: object) -> None:
        seen.append({name: moments(record) for name, record in measured.items()})
        prepare(measured, *args, **more)

    fisher.prepare = noted
    for count, batch in enumerate(batches(4), start=1):
        train(optimizer, model, [batch])
        weights = [decay ** (count - i) for i in range(1, count + 1)]
        if kind is ng.NoisyEKFAC and count == 2:
            break  # early factors have other bases now
        for name, record in fisher.statistics.items():
            for key, tensor in record.unpacked().averages().items():
                if kind is ng.NoisyEKFAC and key == "fisher":
                    continue  # seen in bases that were made anew since
                terms = [weight * one[name][key] for weight, one in zip(weights, seen, strict=True)]
                expected = sum(terms) / sum(weights)
                if count == 1:
                    torch.testing.assert_close(tensor, seen[0][name][key], rtol=1e-14, atol=0)
                close(tensor, expected, rtol=1e-12, atol=1e-13)
    assert float(fisher.updates) == len(seen)
    assert float(fisher.seen) == pytest.approx(1 - decay ** len(seen), rel=1e-12)


@pytest.mark.parametrize("family", ["kronecker", "eigen", "tridiagonal"])
@pytest.mark.parametrize("decay", [0.5, 0.99])
def test_a_layer_first_used_later_has_the_inputs_it_has_seen_since(family: str, decay: float) -> None:
    """Its A is a mean over the examples that used it: neither 0 nor the identity, from before, is in it."""
    kinds = {"kronecker": ng.NoisyKFAC, "eigen": ng.NoisyEKFAC, "tridiagonal": ng.NoisyBlockTridiagonal}

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.late, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
            self.used = False

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x).tanh()
            return self.last(self.late(hidden).tanh() if self.used else hidden)

    torch.manual_seed(0)
    model = Late().double()
    seen: list[Tensor] = []
    model.late.register_forward_pre_hook(lambda module, given: seen.append(given[0].detach().clone()))
    optimizer = make(kinds[family], model, fisher_decay=decay, noise=False)
    inputs = {
        unit.name: (block.name, "inputs" if len(block.units) == 1 else f"inputs.{place}")
        for block in optimizer.structure.blocks
        for place, unit in enumerate(block.units)
    }

    def moment() -> Tensor:
        block, name = inputs["late"]
        return optimizer.covariance.statistics[block].unpacked().averages()[name]

    for step, batch in enumerate(batches(6), start=1):
        model.used = step in (3, 4, 6)
        train(optimizer, model, [batch])
        if step < 3:
            assert not moment().any()
            continue
        given = [torch.cat([x, torch.ones_like(x[:, :1])], 1) for x in seen]
        each = [x.mT @ x / len(x) for x in given]
        if step == 3:
            close(moment(), each[0])
        elif step == 4:
            rate = (1 - decay) / (1 - decay**4)
            close(moment(), (1 - rate) * each[0] + rate * each[1])
            before = moment().clone()
        elif step == 5:
            close(moment(), before)  # nobody has used it: its inputs are what they were


# ---------------------------------------------------------------- a bound of the noise


def overparametrised(kind: type[ng.NoisyOptimizer], **options: object) -> tuple[nn.Module, ng.NoisyOptimizer]:
    """A network of several hundred weights for thirty examples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    options = {"num_data": 30, "noise_limit": 0.1, "stats_every": 1, "factor_every": 5, "lr": 0.01, "seed": 0} | options
    return model, kind(model, ng.Gaussian(0.1), **options)  # type: ignore[arg-type]


@each_optimizer
def test_a_bound_goes_away_where_the_data_determine_the_weights(kind: type[ng.NoisyOptimizer]) -> None:
    x, y = regression(0)
    optimizer = linear(kind, 0, noise_limit=0.1)
    assert optimizer.posterior().noise_bound == 0.3
    fit(optimizer, x, y, 600, 0)
    posterior = optimizer.posterior()
    bounded = posterior.covariance()
    posterior.noise_bound = 0.0
    posterior.__dict__.pop("_precisions", None)
    free = posterior.covariance()
    assert 0 < float((free - bounded).norm()) < 0.01 * float(free.norm())


@each_optimizer
def test_a_bound_stays_where_there_are_more_weights_than_data(kind: type[ng.NoisyOptimizer], tmp_path: Path) -> None:
    """Draws of the posterior and of the optimiser are then of one precision, but for the share of the identity."""
    x = normal(30, 3)
    y = torch.sin(x.sum(1, keepdim=True))
    model, optimizer = overparametrised(kind)
    for _ in range(100):
        optimizer.step(lambda: (model(x), y))
    covariance, posterior = optimizer.covariance, optimizer.posterior()
    bound = float(covariance.bound)
    assert posterior.noise_bound == bound > 0.01
    covariance.fisher.updates.fill_(1e12)  # no share of the identity is left
    covariance.refresh_(optimizer.update.groups.dampings())
    covariance.bound.fill_(bound)
    covariance.refresh_(optimizer.update.groups.dampings())
    for block, precision in posterior.noisy_blocks():
        noise = normal(5, block.size, seed=4)
        mine = covariance.factors[block.name].sampler
        root = torch.stack([mine.sample(row) for row in torch.eye(block.size).double()])
        close(root.mT @ root, precision.covariance(noise[0]), rtol=1e-6, atol=1e-9)
    posterior.save(tmp_path / "posterior")
    again = ng.load_posterior(tmp_path / "posterior", overparametrised(kind)[0])
    assert again.noise_bound == bound
    close(again.covariance(), posterior.covariance(), rtol=1e-12)
    _, resumed = overparametrised(kind)
    resumed.load_state_dict(optimizer.state_dict())
    assert float(resumed.covariance.bound) == float(covariance.bound)
    assert make(kind, mlp()).posterior().noise_bound == 0.0
