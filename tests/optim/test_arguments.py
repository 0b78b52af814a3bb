"""What the constructor says to arguments of torch's optimisers, to misspelt ones, and to parameters for a model."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import noisygrad as ng
from noisygrad.optim.arguments import OF_TORCH
from support.compare import each_optimizer, make, mlp


@each_optimizer
@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"weight_decay": 1e-4}, r"weight_decay: .*prior_variance = kl_weight / \(num_data \* weight_decay\)"),
        ({"betas": (0.9, 0.999)}, r"betas: momentum .* fisher_decay"),
        ({"eps": 1e-8}, "eps: damping"),
        ({"nesterov": True}, "nesterov: .*heavy_ball"),
        ({"amsgrad": True, "eps": 1e-8}, "amsgrad: leave it out.*; eps: damping"),
        ({"params": []}, "params: the model itself is the first argument"),
        *(({name: True}, f"{name}: ") for name in ("maximize", "foreach", "fused", "differentiable")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_stands_for_an_argument_of_torch(kind, given, advice):
    with pytest.raises(TypeError, match=rf"^{kind.__name__} has no .*{advice}"):
        make(kind, mlp(), **given)


def test_every_argument_of_the_usual_optimizers_is_known():
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        arguments = set(inspect.signature(kind).parameters) - {"kwargs", "decoupled_weight_decay"}
        assert arguments <= {*OF_TORCH, *inspect.signature(ng.NoisyKFAC).parameters}
    assert not set(OF_TORCH) & set(inspect.signature(ng.NoisyKFAC).parameters)


@each_optimizer
@pytest.mark.parametrize(
    ("name", "hint"),
    [("dampng", r"\. Did you mean 'damping'\?$"), ("momentun", "'momentum'"), ("zzz", "argument 'zzz'$")],
)
def test_a_misspelt_argument_is_refused(kind, name, hint):
    with pytest.raises(TypeError, match=rf"^{kind.__name__}\(\) got an unexpected keyword argument {name!r}") as caught:
        make(kind, mlp(), **{name: 0.1})
    assert caught.match(hint)


def test_weight_decay_is_what_the_message_says():
    """The pull of the prior on the mean is that of an L2 term with that factor."""
    decay, weight, n = 0.3, 0.7, 50
    model = nn.Linear(2, 1).double()
    variance = weight / (n * decay)
    optimizer = ng.NoisyAdam(model, ng.Gaussian(), num_data=n, kl_weight=weight, prior_variance=variance)
    pull = torch.zeros_like(optimizer.weights.mean.flat)
    optimizer.algorithm.add_prior_(pull, optimizer.weights.mean.flat)
    torch.testing.assert_close(pull, decay * optimizer.weights.mean.flat)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (lambda model: model.parameters(), "generator"),
        (lambda model: list(model.parameters()), "list"),
        (lambda model: [{"params": model.parameters(), "lr": 0.1}], "list"),
        (lambda model: model.state_dict(), "OrderedDict"),
        (lambda model: None, "NoneType"),
    ],
)
@pytest.mark.parametrize(
    "call",
    [
        lambda given: ng.NoisyKFAC(given, lr=1e-3, weight_decay=0.1),
        lambda given: ng.NoisyKFAC(given, ng.Gaussian(), num_data=10),
        lambda given: ng.NoisyKFAC(model=given, likelihood=ng.Gaussian(), num_data=10),
    ],
    ids=["as torch's", "positional", "by name"],
)
def test_parameters_for_a_model_are_refused(given, name, call):
    with pytest.raises(TypeError, match=rf"the model itself.*got {name}\..*groups="):
        call(given(mlp()))


def test_what_is_left_out_is_told_by_python():
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'num_data'"):
        ng.NoisyKFAC(mlp(), ng.Gaussian())
    assert list(inspect.signature(ng.NoisyKFAC).parameters)[:3] == ["model", "likelihood", "num_data"]
