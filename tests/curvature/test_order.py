"""Rows in another order than the loss's, inside a model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.curvature import fisher
from noisygrad.optim import NoisyOptimizer
from support.truth import Model, close, normal

ORDER = torch.tensor([3, 1, 5, 0, 2, 4])


def sorted_inside(m: nn.Module, x: Tensor) -> Tensor:
    return m.b(m.a(x[ORDER]).tanh()[ORDER.argsort()])


def turned_inside(m: nn.Module, x: Tensor) -> Tensor:
    hidden = m.a(x.flip(0))
    return m.b(torch.stack(hidden.tanh().unbind(0)[::-1]))


def moved_and_kept(m: nn.Module, x: Tensor) -> Tensor:
    """Operations that could change the order, and do not."""
    hidden = torch.cat([m.a(x)[:2], m.a(x)[2:]]).tanh()
    return m.b(hidden[torch.arange(len(x))])


def pulled_apart(m: nn.Module, x: Tensor) -> Tensor:
    """A loss of each example and its neighbour: rows of several examples say nothing of an order."""
    hidden = m.a(x).tanh()
    return m.b(hidden - hidden.roll(1, 0))


def step_of(
    kind: type[NoisyOptimizer], run: Callable[[nn.Module, Tensor], Tensor], weight: Tensor | None, **options: object
) -> NoisyOptimizer:
    torch.manual_seed(0)
    model = Model(run, a=nn.Linear(3, 3), b=nn.Linear(3, 2)).double()
    x, y = normal(6, 3), normal(6, 2, seed=2)
    optimizer = kind(model, ng.Gaussian(0.5), num_data=50, noise=False, fisher="exact", seed=1, **options)
    optimizer.step(lambda: (model(x), y, weight))
    return optimizer


WEIGHT = torch.tensor([1.0, 0.0, 0.0, 5.0, 1.0, 2.0], dtype=torch.float64)
PAIRED: list[tuple[type[NoisyOptimizer], dict[str, object]]] = [
    (ng.NoisyFull, {}),
    (ng.NoisyBlockTridiagonal, {}),
    (ng.NoisyKFAC, {"weight": WEIGHT}),
    (ng.NoisyEKFAC, {"weight": WEIGHT}),
    (ng.NoisyKFAC, {"stats_batch": 3}),
    (ng.NoisyAdam, {"stats_batch": 3}),
]


@pytest.mark.parametrize(("kind", "options"), PAIRED)
@pytest.mark.parametrize("run", [sorted_inside, turned_inside])
def test_another_order_of_examples_is_refused_where_it_matters(kind, options, run) -> None:
    """Else A, S and what the layers have in common would be of wrong pairs, by up to 80 %."""
    with pytest.raises(ValueError, match="layer 'a' saw the examples in another order than the loss has them"):
        step_of(kind, run, **{"weight": None} | options)


@pytest.mark.parametrize(("kind", "options"), PAIRED)
@pytest.mark.parametrize("run", [moved_and_kept, pulled_apart])
def test_rows_that_are_moved_without_another_order_are_taken(kind, options, run) -> None:
    assert step_of(kind, run, **{"weight": None} | options).steps == 1


@pytest.mark.parametrize(("kind", "weight"), [(ng.NoisyAdam, None), (ng.NoisyAdam, WEIGHT), (ng.NoisyKFAC, None)])
def test_another_order_is_nothing_to_layers_by_themselves(kind, weight) -> None:
    def plain(m: nn.Module, x: Tensor) -> Tensor:
        return m.b(m.a(x).tanh())

    first, second = (step_of(kind, run, weight).covariance.statistics for run in (plain, sorted_inside))
    for name, statistics in first.items():
        for key, tensor in statistics.tensors().items():
            close(second[name].tensors()[key], tensor)


def test_the_order_is_measured_once_and_only_where_rows_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    real = fisher._reached
    monkeypatch.setattr(fisher, "_reached", lambda *given: passes.append(1) or real(*given))
    for run, expected in ((lambda m, x: m.b(m.a(x).tanh()), 0), (moved_and_kept, 6)):  # three bits of six examples
        model, x, y = Model(run, a=nn.Linear(3, 3), b=nn.Linear(3, 2)).double(), normal(6, 3), normal(6, 2)
        optimizer = ng.NoisyFull(model, ng.Gaussian(0.5), num_data=50, stats_every=1, seed=1)
        for _ in range(3):
            optimizer.step(lambda model=model, x=x, y=y: (model(x), y))
        assert len(passes) == expected
