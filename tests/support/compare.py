"""What the tests of promises share: small models and data, one way to train, one way to compare two optimisers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.families import family_named

# Tensors are tiny here: threads would only wait for one another, above all where several tests run at once.
torch.set_num_threads(1)

OPTIMIZERS = (ng.NoisyAdam, ng.NoisyKFAC, ng.NoisyEKFAC, ng.NoisyBlockTridiagonal, ng.NoisyFull)
EIGENBASES = ("–4/factors/stepper.left", "–4/factors/stepper.right")
"""Parts of the block-tridiagonal root that hold eigenvectors, whose signs follow the last digit; no draw sees them."""
REMADE = {ng.NoisyEKFAC: ("/statistics/left", "/statistics/right", "/statistics/fisher", "/factors/")}
"""What a refresh makes anew where nothing was measured: signs of eigenvectors and ties follow the last digit."""
TIES = {ng.NoisyEKFAC: 1e-6}
"""How far two ways to the same state may be apart: where eigenvalues are nearly equal, a digit's difference grows."""
each_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
each_with_improper_prior = pytest.mark.parametrize(
    "kind", [k for k in OPTIMIZERS if not family_named(k.family).proper_prior], ids=lambda kind: kind.__name__
)

Batch = tuple[Tensor, Tensor]


def mlp(seed: int = 0, *, dtype: torch.dtype = torch.float64, sizes: tuple[int, ...] = (3, 5, 4, 2)) -> nn.Sequential:
    """Linear layers with tanh between them, of a start that depends on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    linears = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    with torch.no_grad():
        for parameter in (p for linear in linears for p in linear.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return nn.Sequential(*[m for linear in linears for m in (linear, nn.Tanh())][:-1]).to(dtype)


def batches(
    count: int, size: int = 6, *, seed: int = 0, dtype: torch.dtype = torch.float64, inputs: int = 3, outputs: int = 2
) -> list[Batch]:
    """A regression problem that can be learned, in batches."""
    generator = torch.Generator().manual_seed(1000 + seed)
    x = torch.randn(count, size, inputs, generator=generator, dtype=torch.float64)
    weight = torch.randn(inputs, outputs, generator=generator, dtype=torch.float64)
    y = torch.sin(x @ weight) + 0.1 * torch.randn(count, size, outputs, generator=generator, dtype=torch.float64)
    return list(zip(x.to(dtype), y.to(dtype), strict=True))


def make(
    kind: type[ng.NoisyOptimizer], model: nn.Module, likelihood: ng.Likelihood | None = None, **options: Any
) -> Any:
    """An optimiser with a step, a Fisher and factors at every step, unless the options say otherwise."""
    common = {"num_data": 60, "lr": 0.05, "prior_variance": 0.5, "stats_every": 1, "factor_every": 1, "seed": 11}
    return kind(model, ng.Gaussian() if likelihood is None else likelihood, **common | options)


def take_step(optimizer: Any, model: nn.Module, batch: Batch, form: str) -> None:
    """One step in either form: with a closure, or in a loop of one's own."""
    x, y = batch
    if form == "closure":
        optimizer.step(lambda: (model(x), y))
        return
    with optimizer.sampled() as draw:
        draw.nll(model(x), y).backward()
    optimizer.step()


def train(optimizer: Any, model: nn.Module, data: Iterable[Batch], schedule: Any = None) -> list[float]:
    """One step for each batch, in the closure form; returns the losses."""
    losses = []
    for x, y in data:
        losses.append(float(optimizer.step(lambda x=x, y=y: (model(x), y))))
        if schedule is not None:
            schedule.step()
    return losses


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A nested state as one dictionary from path to tensor, number or string."""
    if isinstance(tree, Mapping):
        items: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    else:
        return {prefix: tree}
    return {path: leaf for key, value in items for path, leaf in leaves(value, f"{prefix}/{key}").items()}


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of an optimiser's state as one dictionary, by "parameter's index/name"."""
    return {f"{index}/{name}": tensor for index, own in state["state"].items() for name, tensor in own.items()}


def snapshot(optimizer: Any) -> dict[str, Any]:
    """A copy of everything an optimiser knows, and of the model's parameters and buffers."""
    model = {name: tensor.detach().clone() for name, tensor in optimizer.model.state_dict().items()}
    return leaves({"optimizer": optimizer.state_dict(), "model": model})


def differences(
    a: Mapping[str, Any], b: Mapping[str, Any], tolerance: float = 0.0, *, but: tuple[str, ...] = ()
) -> dict[str, float]:
    """Which leaves differ by more than `tolerance` (relative to their size, or absolutely), and by how much."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    found = {}
    for name, mine in a.items():
        theirs = b[name]
        if not isinstance(mine, Tensor):
            if mine != theirs:
                found[name] = float("inf")
            continue
        assert mine.shape == theirs.shape, name
        assert mine.dtype == theirs.dtype, name
        if torch.equal(mine, theirs):
            continue
        gap = (mine.double() - theirs.double()).abs().max().item()
        if not gap <= tolerance * max(1.0, theirs.double().abs().max().item()):
            found[name] = gap
    return {name: gap for name, gap in found.items() if not any(part in name for part in but)}


def assert_unchanged(before: Mapping[str, Any], optimizer: Any, *, but: tuple[str, ...] = ()) -> None:
    """Everything is bit for bit as in the snapshot, except leaves whose path holds one of `but`; nothing is pending."""
    found = differences(before, snapshot(optimizer), but=but)
    assert not found, found
    assert_nothing_pending(optimizer)


def assert_nothing_pending(optimizer: Any) -> None:
    """No draw is remembered, no gradient kept, and no hook is left on the model."""
    pending = optimizer.accumulated
    assert (pending.draws, pending.calls, pending.statistics, pending.noise) == (0, 0, {}, None)
    assert all(parameter.grad is None for parameter in optimizer.model.parameters())
    assert all(not module._forward_hooks and "forward" not in vars(module) for module in optimizer.model.modules())
    assert optimizer.weights.current is None


def compare_optimizers(a: Any, b: Any, tolerance: float = 0.0, *, but: tuple[str, ...] = ()) -> None:
    """Two optimisers and their models are equal in everything: bit for bit, or within `tolerance`."""
    if tolerance:
        but += EIGENBASES
    found = differences(snapshot(a), snapshot(b), tolerance, but=but)
    assert not found, found
