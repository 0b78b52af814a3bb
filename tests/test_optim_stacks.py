"""Blocks of equal shape as one: the same numbers as one by one. Stacking is for GPUs, so it is switched on here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.families.factorisation import FactorisationError, deferred, inverse_root
from noisygrad.optim import stacks


def network(replicas: tuple[int, ...] = ()) -> nn.Module:
    torch.manual_seed(0)
    if replicas:
        return ng.networks.ReplicatedMLP(replicas, 5, (7, 7, 7), 3).double()
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Flatten(),
        nn.Linear(64, 4),
        nn.Linear(4, 4, bias=False),
        nn.Linear(4, 4, bias=False),
    ).double()


def trained(monkeypatch: pytest.MonkeyPatch, stacked: bool, **more: object) -> ng.NoisyKFAC:
    monkeypatch.setattr(stacks, "DEVICES", {"cpu"} if stacked else set())
    replicas = more.pop("replicas", ())
    model = network(replicas)
    optimizer = ng.NoisyKFAC(
        model, ng.Categorical(), num_data=100, stats_every=1, factor_every=2, seed=1, **{"noise": False, **more}
    )
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        shape = (*replicas, 8, 5) if replicas else (8, 2, 4, 4)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (*replicas, 8), generator=generator)
        optimizer.step(lambda x=x, y=y: (model(x), y))
    return optimizer


CASES = [
    {"damping": 0.0},
    {"damping": 0.1},
    {"damping": 0.1, "damping_mode": "exact"},
    {"damping": 0.1, "replicas": (2,)},
    {"damping": 0.1, "damping_mode": "exact", "replicas": (2,)},
]


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_a_stacked_step_is_that_of_single_blocks(settings, monkeypatch):
    one, other = (trained(monkeypatch, stacked, **settings) for stacked in (False, True))
    assert one.factors._stacks is None
    assert other.factors._stacks is not None
    assert any(len(stack.blocks) > 1 for stack in other.factors._stacks.stacks)
    torch.testing.assert_close(other.mean.flat, one.mean.flat, rtol=1e-10, atol=1e-12)
    saved = one.state_dict()["tensors"]
    for name, tensor in other.state_dict()["tensors"].items():
        assert tensor.shape == saved[name].shape
        if "damping_mode" not in settings or "/factors/" not in name:  # eigenvectors have no sign of their own
            torch.testing.assert_close(tensor, saved[name], rtol=1e-9, atol=1e-11)
    other.load_state_dict(one.state_dict())  # a checkpoint of a GPU is one of a CPU


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_stacked_draws_have_the_covariance_of_single_ones(settings, monkeypatch):
    found: list[Tensor] = []
    for stacked in (False, True):
        optimizer = trained(monkeypatch, stacked, **settings, noise=True)
        posterior_free = trained(monkeypatch, False, **settings)  # the same statistics, whatever was drawn
        optimizer.factors._moments.copy_(posterior_free.factors._moments)
        optimizer.factors.refresh({0: settings["damping"]})
        replicas = settings.get("replicas", ())
        size = optimizer.factors.noise_size
        units = torch.eye(size, dtype=torch.float64)
        rows = torch.stack([optimizer.factors.sample(unit.expand(*replicas, size)) for unit in units])
        found.append(torch.einsum("k...i,k...j->...ij", rows, rows))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)


def test_groups_without_noise_are_stacked_apart(monkeypatch):
    optimizer = trained(monkeypatch, True, damping=0.1, noise=True, groups={"8.*": {"noise": False}})
    spread = optimizer.factors.sample(torch.ones(optimizer.factors.noise_size, dtype=torch.float64))
    silent = [block for block in optimizer.factors.blocks if not block.noise]
    assert [block.name for block in silent] == ["8@1"]
    for block in optimizer.factors.blocks:
        assert bool((block.segment(spread) == 0).all()) == (not block.noise)


def test_another_damping_makes_other_stacks(monkeypatch):
    optimizer = trained(monkeypatch, True, damping=0.0, noise=True)
    shared = [stack.factors.shared for stack in optimizer.factors._stacks.stacks]
    optimizer.factors.refresh({0: 0.1})
    apart = [stack.factors.shared for stack in optimizer.factors._stacks.stacks]
    assert all(shared)
    assert not any(apart)
    for stack in optimizer.factors._stacks.stacks:
        for index, block in enumerate(stack.blocks):
            own = optimizer.factors.cached[block.name].stepper
            assert own.left.data_ptr() == stack.factors.stepper.left[index].data_ptr()


def test_deferred_failures_are_told_at_the_end_and_then_raised():
    good, bad = torch.eye(3), torch.full((3, 3), float("nan"))
    with deferred() as failures:
        inverse_root(good, 0.5)
        inverse_root(bad, 0.5)
    assert [bool(failure) for failure in failures] == [False, True]
    with pytest.raises(FactorisationError):
        inverse_root(bad, 0.5)
