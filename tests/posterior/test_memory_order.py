"""Flat vectors in the order of the parameters' own memory: the same training. It is for GPUs, and switched on here."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import noisygrad as ng
from noisygrad.algorithm import stacks
from noisygrad.curvature import passes, registry, summaries
from noisygrad.families import units
from noisygrad.optim import draw as base
from noisygrad.posterior.prior import BlockPriors
from noisygrad.posterior.structure import build_structure
from support.compare import tensors_of
from support.devices import follow_memory

FAMILIES = (ng.NoisyAdam, ng.NoisyKFAC, ng.NoisyBlockTridiagonal, ng.NoisyFull)
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)


def network(*, channels_last: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, (3, 1), groups=2, bias=False),
        nn.Conv2d(4, 3, 1),
        nn.Flatten(),
        nn.Linear(24, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    ).double()
    model[6].weight = nn.Parameter(model[6].weight.detach().T.contiguous().T)
    return model.to(memory_format=torch.channels_last) if channels_last else model


@pytest.fixture
def gpu_ways(monkeypatch: pytest.MonkeyPatch):
    """Whether a CPU does what a GPU would; noise then lies as it would lie otherwise."""
    real = base.fill_normal_
    structures = []

    def in_usual_order(noise: Tensor, generators: object) -> None:
        real(noise, generators)
        structure = structures[-1]
        if structure.family.name == "diagonal":
            noise.copy_(structure.to_memory(noise))

    monkeypatch.setattr(base, "fill_normal_", in_usual_order)

    def switch(family, *, on: bool, model: nn.Module | None = None, **more: object):
        devices = {"cpu"} if on else set()
        follow_memory(monkeypatch, devices)
        monkeypatch.setattr(summaries, "DEVICES", devices)
        settings = {"num_data": 100, "stats_every": 1, "factor_every": 2, "seed": 1, "damping": 0.1, **more}
        optimizer = family(model or network(), ng.Categorical(), **settings)
        structures.append(optimizer.structure)
        return optimizer

    switch.current = structures
    return switch


def train(optimizer, structures: list, seed: int = 2, steps: int = 4) -> None:
    structures.append(optimizer.structure)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn((8, 2, 4, 4), generator=generator, dtype=torch.float64)
        y = torch.randint(3, (8,), generator=generator)
        optimizer.step(lambda x=x, y=y: (optimizer.model(x), y))


def same(one, other) -> None:
    saved = tensors_of(one.state_dict())
    for name, tensor in tensors_of(other.state_dict()).items():
        if "–" in name and "/factors/" in name:  # eigenvectors have no sign of their own
            continue
        torch.testing.assert_close(tensor, saved[name], rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}")
    for key, tensor in one.model.state_dict().items():
        torch.testing.assert_close(other.model.state_dict()[key], tensor, rtol=1e-9, atol=1e-11)


@each_family
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"noise": False, "momentum_mode": "heavy_ball", "kl_clip": 1e-3},
        {"prior_variance": {"0.*": 0.5, "*.bias": 2.0, "*": 1.0}},
        {"groups": {"4.*": {"lr": 0.02}}, "damping": 0.0},
        {"mc_samples": 2},
    ],
    ids=str,
)
def test_training_is_the_same(family, more, gpu_ways):
    trained = []
    for on in (False, True):
        optimizer = gpu_ways(family, on=on, **more)
        train(optimizer, gpu_ways.current)
        trained.append(optimizer)
    usual, other = trained
    assert usual.structure is usual._canonical_structure
    assert (other.structure is other._canonical_structure) == (family is ng.NoisyFull)
    same(usual, other)
    posteriors = [optimizer.posterior() for optimizer in trained]
    for name, tensor in posteriors[0].mean.items():
        torch.testing.assert_close(posteriors[1].mean[name], tensor, rtol=1e-9, atol=1e-11)
    if more.get("noise", True):
        torch.testing.assert_close(posteriors[1].kl(), posteriors[0].kl(), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(posteriors[1].precision(), posteriors[0].precision(), rtol=1e-9, atol=1e-9)


@each_family
@pytest.mark.parametrize("first", [False, True])
def test_a_state_is_for_either_order(family, first, gpu_ways):
    """Also for a model with its weights row by row."""
    one = gpu_ways(family, on=first)
    train(one, gpu_ways.current)
    for on, channels_last in ((not first, True), (True, False), (False, False)):
        model = network(channels_last=channels_last)
        other = gpu_ways(family, on=on, model=model)
        other.load_state_dict(one.state_dict())
        model.load_state_dict(one.model.state_dict())
        same(one, other)
        train(other, gpu_ways.current, seed=5)
        again = gpu_ways(family, on=first)
        again.load_state_dict(one.state_dict())
        again.model.load_state_dict(one.model.state_dict())
        train(again, gpu_ways.current, seed=5)
        same(again, other)


@each_family
def test_a_fitted_prior_is_for_either_order(family, gpu_ways):
    first = gpu_ways(family, on=True)
    train(first, gpu_ways.current)
    found = []
    for on in (False, True):
        optimizer = gpu_ways(family, on=on, prior=first.posterior().as_prior())
        train(optimizer, gpu_ways.current)
        found.append(optimizer)
    same(*found)


@pytest.mark.parametrize("family", FAMILIES[:3], ids=lambda family: family.__name__)
def test_nothing_lies_between_parameters_and_flat_vectors(family, gpu_ways):
    optimizer = gpu_ways(family, on=True)
    for weights in (optimizer.weights.mean, optimizer.weights.sample, optimizer.update.gradient):
        assert weights.parameters.staging(weights.flat, weights._views) is None
        for view, parameter in zip(weights._views, weights.parameters.known, strict=True):
            assert view.stride() == parameter.stride()


def test_stacks_take_weights_from_where_they_lie(gpu_ways, monkeypatch):
    usual = gpu_ways(ng.NoisyKFAC, on=False, noise=False)
    monkeypatch.setattr(stacks, "DEVICES", {"cpu"})
    stacked = gpu_ways(ng.NoisyKFAC, on=True, noise=False)
    assert stacked.covariance._stacks is not None
    for optimizer in (usual, stacked):
        train(optimizer, gpu_ways.current)
    same(usual, stacked)


def test_parameters_may_change_their_memory_later(gpu_ways):
    usual, other = (gpu_ways(ng.NoisyAdam, on=on) for on in (False, True))
    for optimizer in (usual, other):
        optimizer.model.to(memory_format=torch.contiguous_format)
        train(optimizer, gpu_ways.current)
    same(usual, other)


class Grouped(nn.Module):
    """A matrix that nobody would guess: one for each group, with its last dimensions swapped in memory."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3, 4, dtype=torch.float64).mT.contiguous().mT)

    def forward(self, x):
        return torch.einsum("goi,bgi->bgo", self.weight, x.unflatten(-1, (2, 4))).flatten(1)


def column() -> nn.Linear:
    """A layer whose bias is a column of another tensor."""
    layer = nn.Linear(8, 1).double()
    layer.bias = nn.Parameter(torch.randn((1, 7), dtype=torch.float64)[:, 0])
    return layer


@pytest.mark.parametrize("family", FAMILIES[:3], ids=lambda family: family.__name__)
@pytest.mark.parametrize("name", ["groups", "column", "frozen weight"])
def test_weights_of_other_shapes_stay_row_by_row(name, family, gpu_ways, monkeypatch):
    entry = registry.Layer(
        lambda n, module, trainable: [
            units.Unit(n, "matrix", 3, 4, (units.Slot(f"{n}.weight", 0, 4),), "Grouped", groups=2)
        ],
        lambda unit, module, inputs, gradient, batch: passes.MatrixPass(
            inputs.unflatten(-1, (2, 1, 4)).movedim(1, 0),
            gradient.unflatten(-1, (2, 1, 3)).movedim(1, 0),
            constant=False,
            grouped=True,
        ),
    )
    monkeypatch.setitem(registry.REGISTRY, Grouped, entry)
    found = []
    for on in (False, True):
        torch.manual_seed(0)
        first = {"groups": Grouped, "column": column, "frozen weight": lambda: nn.Linear(8, 3)}[name]()
        if name == "frozen weight":
            first.weight.requires_grad_(False)
        model = nn.Sequential(nn.Flatten(), nn.Linear(32, 8), first, nn.LazyLinear(3)).double()
        model(torch.zeros(1, 2, 4, 4, dtype=torch.float64))
        model[1].weight = nn.Parameter(model[1].weight.detach().T.contiguous().T)
        optimizer = gpu_ways(family, on=on, model=model)
        train(optimizer, gpu_ways.current)
        found.append(optimizer)
    same(*found)


def test_memory_that_parameters_have_left_is_not_kept(gpu_ways):
    optimizer = gpu_ways(ng.NoisyAdam, on=True)
    left = [StorageWeakRef(parameter.untyped_storage()) for parameter in optimizer.model.parameters()]
    for parameter in optimizer.model.parameters():
        parameter.data = parameter.data.clone()
    train(optimizer, gpu_ways.current, steps=1)
    gc.collect()
    assert all(reference.expired() for reference in left)


def test_a_prior_is_kept_once():
    """Also where it is not one number: a norm layer's scales are centred on 1."""
    structure = build_structure(network(), "diagonal")
    prior_variance = {"*.bias": 2.0, "*": 1.0}
    priors = BlockPriors.build(structure, prior_variance, None, torch.float64, torch.device("cpu"))
    moved = priors.to_memory(structure)
    assert moved.mean is moved.centre is priors.mean
    for name, prior in priors.blocks.items():
        assert moved.blocks[name].tensors()["precision"] is prior.tensors()["precision"]
