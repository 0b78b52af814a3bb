"""A model that is no longer the one the optimiser was made of: said at the next step, before anything changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import noisygrad as ng


def replaced(model: nn.Sequential) -> None:
    model[2] = nn.Linear(4, 1)


def parameter_replaced(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(torch.zeros(1, 4))


def added(model: nn.Sequential) -> None:
    model.add_module("more", nn.Linear(1, 1))


def unfrozen(model: nn.Sequential) -> None:
    model[3].weight.requires_grad_(True)


def removed(model: nn.Sequential) -> None:
    model[2] = nn.Identity()


def frozen(model: nn.Sequential) -> None:
    model[0].bias.requires_grad_(False)


def made() -> tuple[nn.Sequential, ng.NoisyKFAC]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Linear(1, 1))
    model[3].requires_grad_(False)
    return model, ng.NoisyKFAC(model, ng.Gaussian(), num_data=20, seed=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced, r"2\.weight, 2\.bias: not trained by this optimiser.*Make a new optimiser"),
        (parameter_replaced, r"2\.weight: not trained"),
        (added, r"more\.weight, more\.bias: not trained"),
        (unfrozen, r"3\.weight: not trained"),
        (removed, r"2\.weight, 2\.bias: no longer in the model"),
        (frozen, r"0\.bias: frozen"),
    ],
)
def test_a_change_is_said_at_the_next_step(change: Callable[[nn.Sequential], None], message: str) -> None:
    model, optimizer = made()
    x, y = torch.randn(5, 3), torch.randn(5, 1)
    optimizer.step(lambda: (model(x), y))
    change(model)
    for _ in range(2):  # it is not forgotten
        with pytest.raises(RuntimeError, match=message):
            optimizer.step(lambda: (model(x), y))
        with pytest.raises(RuntimeError, match=message), optimizer.sampled():
            pass
    assert optimizer.steps == 1


def test_parts_without_trained_parameters_may_change() -> None:
    model, optimizer = made()
    x, y = torch.randn(5, 3), torch.randn(5, 1)
    model[1], model[3] = nn.ReLU(), nn.Identity()
    model.add_module("last", nn.Linear(1, 1).requires_grad_(False))
    optimizer.step(lambda: (model(x), y))
    assert optimizer.steps == 1


def test_two_optimisers_of_one_model_do_not_draw_at_once() -> None:
    model = ng.networks.MLP(3, (4,), 1)
    one, other = (ng.NoisyAdam(model, ng.Gaussian(), num_data=20, seed=seed) for seed in (0, 1))
    apart = ng.NoisyAdam(ng.networks.MLP(3, (4,), 1), ng.Gaussian(), num_data=20)
    x, y = torch.randn(5, 3), torch.randn(5, 1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with one.sampled() as draw:
        for use in (other.sampled().__enter__, lambda: other.step(lambda: (model(x), y)), other.posterior):
            with pytest.raises(RuntimeError, match=r"another optimiser has drawn weights in this model"):
                use()
        with apart.sampled():
            pass
        draw.nll(model(x), y).backward()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
    one.step()
    other.step(lambda: (model(x), y))
    assert (one.steps, other.steps) == (1, 1)
