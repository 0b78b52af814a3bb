"""A training that diverges is warned of, once and in time; one that does not is left alone."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.optim.finite import DivergenceWatch
from support.compare import batches, make, mlp, take_step
from support.replay_executor import replayed

STEPS = 400


def perceptron(*sizes: int, scale: float = 1.0) -> nn.Sequential:
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.mul_(scale)
            layer.bias.mul_(scale)
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])


def regression(outputs: int = 1, scale: float = 1.0, faulty: float | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(800, 8, generator=generator), torch.randn(8, outputs, generator=generator)
    y = torch.sin(x @ weight) + 0.3 * (x @ weight) + 0.1 * torch.randn(800, outputs, generator=generator)
    if faulty is not None:
        y[17, 2] = faulty
    return x, scale * y


def classes(count: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(800, 8, generator=generator), torch.randn(8, count, generator=generator)
    return x, (torch.tanh(x @ weight) + 0.3 * torch.randn(800, count, generator=generator)).argmax(1)


def counts() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 8, generator=generator)
    return x, torch.poisson((0.7 * x[:, :3].sum(1, keepdim=True) + 1.5).exp(), generator=generator)


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(4, (400,), generator=generator)
    return torch.randn(4, 1, 8, 8, generator=generator)[y] + torch.randn(400, 1, 8, 8, generator=generator), y


def convolutions() -> nn.Sequential:
    first, second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, bias=False)
    return nn.Sequential(
        first, nn.BatchNorm2d(8), nn.ReLU(), second, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)
    )


Task = tuple[type, Callable[[], nn.Module], Callable[[], Any], Callable[[], ng.Likelihood], dict[str, Any]]
K, A = ng.NoisyKFAC, ng.NoisyAdam
DIVERGING: dict[str, Task] = {
    "four outputs, one faulty reading": (
        K, lambda: perceptron(8, 50, 50, 4), lambda: regression(4, faulty=1e6), ng.Gaussian, {}
    ),
    "counts": (K, lambda: perceptron(8, 64, 64, 1), counts, ng.Poisson, {}),
    "a deep perceptron": (A, lambda: perceptron(8, *[64] * 6, 1), regression, ng.Gaussian, {}),
    "a large step": (K, lambda: perceptron(8, 50, 4), classes, ng.Categorical, {"lr": 1.0}),
    "a large step of noisy Adam": (A, lambda: perceptron(8, 50, 1), regression, ng.Gaussian, {"lr": 1.0}),
}  # fmt: skip
ORDINARY: dict[str, Task] = {
    "regression": (K, lambda: perceptron(8, 50, 1), regression, ng.Gaussian, {}),
    "classes": (A, lambda: perceptron(8, 50, 4), classes, ng.Categorical, {}),
    "full": (ng.NoisyFull, lambda: perceptron(8, 6, 1), regression, ng.Gaussian, {}),
    "chain": (ng.NoisyBlockTridiagonal, lambda: perceptron(8, 20, 1), regression, ng.Gaussian, {}),
    "eigen": (ng.NoisyEKFAC, lambda: perceptron(8, 20, 4), classes, ng.Categorical, {}),
    "from a small start": (K, lambda: perceptron(8, 50, 4, scale=1e-3), classes, ng.Categorical, {}),
    "from zero": (K, lambda: perceptron(8, 1, scale=0.0), lambda: regression(scale=1e4), ng.Gaussian, {}),
    "unscaled targets": (K, lambda: perceptron(8, 50, 1), lambda: regression(scale=1e3), ng.Gaussian, {}),
    "unscaled targets of known noise": (
        K, lambda: perceptron(8, 50, 1), lambda: regression(scale=1e3), lambda: ng.Gaussian(1e4), {}
    ),
    "unscaled targets without noise": (
        K, lambda: perceptron(8, 50, 1), lambda: regression(scale=1e3), lambda: ng.Gaussian(1.0),
        {"noise": False, "prior_variance": math.inf, "kl_clip": 1e-3},
    ),
    "batch norm": (K, convolutions, images, ng.Categorical, {}),
    "a warm-up": (K, lambda: perceptron(8, 50, 4), classes, ng.Categorical, {"warm_up": 200}),
    "counts within a trust region": (K, lambda: perceptron(8, 64, 1), counts, ng.Poisson, {"kl_clip": 1e-3}),
    "a velocity": (
        K, lambda: perceptron(8, 50, 4), classes, ng.Categorical,
        {"momentum_mode": "heavy_ball", "kl_clip": 1e-3, "lr": 0.1},
    ),
    "noise by input": (K, lambda: perceptron(8, 50, 2), regression, ng.HeteroscedasticGaussian, {}),
}  # fmt: skip


def trained(task: Task, seed: int) -> tuple[list[str], float]:
    """The warnings of a training, and how far the largest weight had grown by the first of them."""
    kind, network, problem, likelihood, options = task
    torch.manual_seed(seed)
    model, (x, y), generator = network(), problem(), torch.Generator().manual_seed(seed)
    warm_up = options.get("warm_up", 1)
    options = {name: value for name, value in options.items() if name != "warm_up"}
    optimizer = kind(model, likelihood(), num_data=len(x), seed=seed, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up))
    start, said, grown = largest(optimizer), [], 0.0
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(STEPS):
            batch = torch.randint(len(x), (32,), generator=generator)
            before = largest(optimizer)
            try:
                optimizer.step(lambda batch=batch: (model(x[batch]), y[batch]))
            except ArithmeticError:
                break
            schedule.step()
            said = [str(each.message) for each in found if "diverge" in str(each.message)]
            if said and not grown:
                grown = before / start
    return said, grown


def largest(optimizer: Any) -> float:
    return float(optimizer.weights.mean.flat.abs().max())


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", DIVERGING)
def test_weights_that_grow_while_the_loss_rises_are_warned_of_in_time(name, seed):
    said, grown = trained(DIVERGING[name], seed)
    (message,) = said
    assert "the loss has risen" in message
    assert "kl_clip" in message
    assert 1.0 < grown < 1000.0


@pytest.mark.parametrize("name", ORDINARY)
def test_no_ordinary_training_is_warned_of(name):
    assert trained(ORDINARY[name], seed=0) == ([], 0.0)


def blown_up(optimizer: Any, factor: float = 100.0) -> None:
    with torch.no_grad():
        for parameter in optimizer.model.parameters():
            parameter.mul_(factor)


@pytest.mark.parametrize("replay", [False, True], ids=["at once", "as a GPU does"])
def test_where_it_is_seen(replay, monkeypatch):
    """On a GPU nothing is read before the next refresh of the factors."""
    if replay:
        replayed(monkeypatch)
    model, data = mlp(), batches(40)
    optimizer = make(ng.NoisyAdam, model, ng.Gaussian(1.0), factor_every=16, lr=1e-4)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for batch in data:
                if optimizer.steps % 64 == 19:
                    blown_up(optimizer)
                take_step(optimizer, model, batch, "closure")
                assert bool(found) == (optimizer.steps % 64 >= (32 if replay else 20)), optimizer.steps
        (warning,) = found
        assert "compare" in warning.filename  # the line that called `step`
        state = optimizer.state_dict()
        optimizer.load_state_dict(state | {"steps": 64})  # other weights: what was seen says nothing of them


@pytest.mark.parametrize("grown", [False, True])
def test_a_loss_that_is_not_finite_says_whether_the_weights_were_large_before(grown):
    model, data = mlp(), batches(25)
    optimizer = make(ng.NoisyKFAC, model, ng.Gaussian(1.0), lr=1e-4)
    for batch in data:
        take_step(optimizer, model, batch, "closure")
    if grown:
        blown_up(optimizer)
    with pytest.raises(ng.NonFiniteError) as raised:
        take_step(optimizer, model, (data[0][0] * math.nan, data[0][1]), "closure")
    assert "are as they were" in str(raised.value)
    assert ("largest weight had grown" in str(raised.value)) == grown


def test_a_loss_that_was_skipped_is_no_lowest():
    watch = DivergenceWatch(torch.ones(3), deferred=True)
    for step in range(1, 4):
        watch.add(step, torch.tensor(math.nan if step == 2 else 4.0))
    watch.look(3)
    assert watch._lowest == 4.0


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", [K, A, ng.NoisyEKFAC])
@pytest.mark.parametrize("rate", [3.0, 10.0, 100.0])
def test_a_training_that_explodes_at_once_is_warned_of(kind, seed, rate):
    """Before there are ten losses, and though the loss falls from its height while the noise is learned."""
    said, _ = trained((kind, lambda: perceptron(8, 16, 16, 1), regression, ng.Gaussian, {"lr": rate}), seed)
    assert len(said) == 1


def watched(losses: list[float], weights: list[float]) -> list[str]:
    """The warnings where the largest weight is each of these in turn, before the step with that loss."""
    mean = torch.tensor([weights[0]])
    watch = DivergenceWatch(mean, deferred=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step, (loss, after) in enumerate(zip(losses, [*weights[1:], weights[-1]], strict=True), start=1):
            watch.add(step, torch.tensor(loss), [torch.tensor([after])])
            mean.fill_(after)
    return [str(each.message) for each in found]


GROWING = [0.3, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 100.0, *[100.0] * 10]


@pytest.mark.parametrize(
    ("losses", "weights", "warns"),
    [
        ([1.1, 500.0, 900.0, *[30.0] * 17], GROWING, True),  # the height passes, the weights stay
        ([1.1, *[20.0] * 19], GROWING, False),  # a first loss that is small by luck
        ([900.0, 1500.0, *[300.0] * 18], GROWING, False),  # targets of another scale
        ([1.1, 500.0, 900.0, *[900.0] * 17], [0.3] * 20, False),  # other data
        ([0.3, 1.5, 0.8, 2.4, 0.4, 1.9, 0.6, 2.2, 0.5, 1.4, *[0.7, 2.5] * 5], [0.01, 0.3, *[2.0] * 18], False),
        ([1.1, 1.2, *[1.1] * 8, *[50.0] * 10], [0.3] * 10 + [9.0] * 10, True),
    ],
)
def test_what_the_first_losses_are_compared_with(losses, weights, warns):
    assert len(watched(losses, weights)) == warns
