"""Parameters as one piece of memory: the same numbers as one by one. It is for GPUs, so it is switched on here."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.posterior.structure import build_structure
from noisygrad.posterior.weights import FlatWeights
from support.compare import tensors_of
from support.devices import follow_memory


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, (3, 1), groups=2),
        nn.Conv2d(4, 3, 1),
        nn.Flatten(),
        nn.Linear(24, 3),
    ).to(memory_format=torch.channels_last)


def transposed() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    model[0].weight = nn.Parameter(torch.randn(4, 6).T)
    model[1].weight = nn.Parameter(torch.randn(6, 6).T[::2])  # not dense
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "channels last": images,
    "replicas": lambda: ng.networks.ReplicatedMLP((2, 3), 4, (5,), 3),
    "transposed": transposed,
    "parts of a parameter": lambda: nn.ModuleList([nn.MultiheadAttention(4, 2), images()]),
}


def read(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Parameters and gradients in one flat vector each; every third gradient is missing."""
    structure = build_structure(model, "diagonal")
    flat, gradient = (FlatWeights.zeros(structure, torch.float32, torch.device("cpu")) for _ in range(2))
    flat.read_parameters_()
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = None if index % 3 == 2 else parameter.detach() + 1.0
    gradient.flat.fill_(7.0)
    gradient.read_gradients_()
    with torch.no_grad():
        FlatWeights(structure, flat.flat * 2.0).write_parameters_()
    return flat.flat, gradient.flat


@pytest.mark.parametrize("name", MODELS)
def test_copies_are_the_same_in_any_order_of_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for devices in (set(), {"cpu"}):
        follow_memory(monkeypatch, devices)
        torch.manual_seed(0)
        model = MODELS[name]()
        found.append((*read(model), *(parameter.detach() for parameter in model.parameters())))
    assert all(map(torch.equal, *found))


def test_copies_of_equal_strides_take_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU asks for: the strides of the two lists agree, tensor by tensor, and all are dense."""
    follow_memory(monkeypatch, {"cpu"})
    for name in ("channels last", "replicas"):
        structure = build_structure(MODELS[name](), "kronecker")
        weights = FlatWeights.zeros(structure, torch.float32, torch.device("cpu"))
        pairs = list(zip(weights._places(), weights.parameters.known, strict=True))
        assert all(place.stride() == parameter.stride() for place, parameter in pairs)
        assert weights._places() is not weights._views
    structure = build_structure(ng.networks.MLP(3, (4,), 2), "kronecker")
    usual = FlatWeights.zeros(structure, torch.float32, torch.device("cpu"))
    assert usual._places() is usual._views  # nothing to put in between


def train_on(model: nn.Module, optimizer: ng.NoisyOptimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(optimizer.steps)
    for _ in range(steps):
        x = torch.randn(6, 2, 4, 4, generator=generator).contiguous(memory_format=torch.channels_last)
        y = torch.randint(3, (6,), generator=generator)
        optimizer.step(lambda x=x, y=y: (model(x), y))


@pytest.mark.parametrize("kind", [ng.NoisyAdam, ng.NoisyKFAC])
def test_a_training_is_the_same_and_follows_parameters_to_another_order(
    kind: type[ng.NoisyOptimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = []
    for devices in (set(), {"cpu"}):
        follow_memory(monkeypatch, devices)
        torch.manual_seed(0)
        model = images()
        noise = kind is not ng.NoisyAdam  # noise of a diagonal has the order of its weights: test_memory_order
        settings = {"lr": 0.01, "stats_every": 2, "factor_every": 4, "seed": 1, "noise": noise}
        optimizer = kind(model, ng.Categorical(), num_data=100, **settings)
        train_on(model, optimizer, 5)
        model.to(memory_format=torch.contiguous_format)
        train_on(model, optimizer, 3)
        model.to(memory_format=torch.channels_last)
        with torch.no_grad():
            next(model.parameters()).add_(0.1)  # what a user writes between steps is the mean
        train_on(model, optimizer, 3)
        states.append(tensors_of(optimizer.state_dict()))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_draw_that_fails_leaves_the_weights_that_were_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = ng.NoisyAdam(model, ng.Gaussian(noise_variance=0.1), num_data=50, seed=0)
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    optimizer.step(lambda: (model(x), y))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)  # what a user might load

    def no_memory(*args: object, **more: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(optimizer.covariance, "perturb", no_memory)
    with pytest.raises(RuntimeError, match="out of memory"), optimizer.sampled():
        pass
    assert all(bool((parameter == 7.0).all()) for parameter in model.parameters())


def test_staging_stays_as_long_as_the_parameters_and_is_not_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    follow_memory(monkeypatch, {"cpu"})
    model = MODELS["replicas"]()
    optimizer = ng.NoisyAdam(model, ng.Gaussian(noise_variance=0.1), num_data=50, seed=0)
    views = optimizer.weights.mean.parameters
    before = views.staging(optimizer.weights.mean.flat, optimizer.weights.mean._views)
    assert before is not None
    FlatWeights.zeros(optimizer.structure, torch.float64, torch.device("cpu"))._places()
    assert views.staging(optimizer.weights.mean.flat, optimizer.weights.mean._views) is before
    assert not pickle.loads(pickle.dumps(views))._staging
