"""`stats_batch`: the Fisher of a batch's first examples, wherever in a layer's input the batch is, as by autograd."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import noisygrad as ng

MANY = 10**12
"""So many data leave no noise to speak of, and no prior."""


class Sequences(nn.Module):
    """Takes `[length, batch, 3]`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).mean(0)


class Attention(nn.Module):
    """Takes `[length, batch, 4]`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.attention(x, x, x, need_weights=False)[0].mean(0))


class Normalised(nn.Module):
    """Takes `[batch, 3]`; the running statistics are far from a batch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        nn.init.constant_(self.norm.running_mean, 0.5)
        nn.init.constant_(self.norm.running_var, 4.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


class Folded(nn.Module):
    """Takes `[batch, length, 3, 4]`; where asked, its layers see batch and length as one dimension."""

    def __init__(self, first: nn.Module, fold: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = first, nn.LayerNorm(4), nn.Linear(4, 2)
        self.fold = fold

    def forward(self, x: Tensor) -> Tensor:
        batch = len(x)
        if self.fold:
            hidden = torch.tanh(self.first(x.flatten(0, 1)))
        else:  # a convolution takes one position at a time
            hidden = torch.stack([torch.tanh(self.first(part)) for part in x.unbind(1)], 1)
        hidden = self.last(torch.tanh(self.norm(hidden)))
        return hidden.reshape(batch, -1, 2).square().sum(1)


def truth(model: nn.Module, x: Tensor, examples: int) -> dict[str, Tensor]:
    """The mean over the first examples of Σ_k (∂f_k/∂w)²: the Fisher's diagonal for Gaussian noise of variance 1."""
    parameters, outputs = dict(model.named_parameters()), model(x)[:examples]
    found = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for output in outputs.flatten():
        gradients = torch.autograd.grad(output, list(parameters.values()), retain_graph=True)
        for total, gradient in zip(found.values(), gradients, strict=True):
            total.add_(gradient.square() / examples)
    return found


def measured(model: nn.Module, x: Tensor, batch: int, **options: object) -> dict[str, Tensor]:
    """The same from the first statistics, which are all that the Fisher is made of then."""
    likelihood = ng.Gaussian(noise_variance=1.0)
    optimizer = ng.NoisyAdam(model, likelihood, num_data=MANY, lr=1e-12, fisher="exact", **options)
    optimizer.step(lambda: (model(x), torch.zeros(batch, 2, dtype=x.dtype)))
    variances = {name: std.square() for name, std in optimizer.posterior().std().items()}
    return {name: 1.0 / (MANY * variance) for name, variance in variances.items()}


def check(found: dict[str, Tensor], expected: dict[str, Tensor], *names: str) -> None:
    for name in names or expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kept", [None, 2])
@pytest.mark.parametrize("length", [2, 5, 8])
def test_sequences_with_the_batch_second(length: int, kept: int | None) -> None:
    torch.manual_seed(0)
    model, x = Sequences().double(), torch.randn(length, 4, 3).double()
    check(measured(model, x, 4, stats_batch=kept), truth(model, x, kept or 4))


@pytest.mark.parametrize("kept", [None, 2])
@pytest.mark.parametrize("length", [2, 4, 8])
def test_attention_with_the_batch_second(length: int, kept: int | None) -> None:
    torch.manual_seed(0)
    model, x = Attention().double(), torch.randn(length, 4, 4).double()
    check(measured(model, x, 4, stats_batch=kept), truth(model, x, kept or 4))


@pytest.mark.parametrize("kept", [None, 1, 3])
@pytest.mark.parametrize("length", [2, 5])
@pytest.mark.parametrize("layer", ["linear", "convolution"])
def test_a_batch_folded_with_positions(layer: str, length: int, kept: int | None) -> None:
    """The kept examples have all their positions; what is found is what the batch gives that is not folded."""
    torch.manual_seed(0)
    first = nn.Linear(4, 4) if layer == "linear" else nn.Conv1d(3, 2, 1)
    model, x = Folded(first, fold=False).double(), torch.randn(4, length, 3, 4).double()
    folded = copy.deepcopy(model)
    folded.fold = True
    torch.testing.assert_close(folded(x), model(x))
    expected = truth(model, x, kept or 4)
    check(measured(model, x, 4, stats_batch=kept), expected)
    check(measured(folded, x, 4, stats_batch=kept), expected)


@pytest.mark.parametrize("kept", [None, 3])
def test_batch_norm_is_by_all_examples_of_a_batch(kept: int | None) -> None:
    torch.manual_seed(0)
    model, x = Normalised().double(), torch.randn(8, 3).double()
    # Layers before the norm are another matter: there, examples depend on each other.
    after = "norm.weight", "norm.bias", "last.weight", "last.bias"
    check(measured(model, x, 8, stats_batch=kept), truth(model, x, kept or 8), *after)


@pytest.mark.parametrize("kept", [None, 3])
def test_batch_norm_of_a_fresh_pass_is_by_running_statistics(kept: int | None) -> None:
    torch.manual_seed(0)
    model, x = Normalised().double(), torch.randn(8, 3).double()
    model.norm.momentum = 0.0  # the step's own forward pass leaves them as they are
    found = measured(model, x, 8, stats_batch=kept, fisher_pass="fresh")
    assert model.norm.training
    check(found, truth(model.eval(), x, kept or 8))


@pytest.mark.parametrize(
    ("length", "kept", "shape"), [(3, 3, (-1,)), (5, 3, (1, -1)), (8, None, (-1,)), (8, None, (1, -1))]
)
def test_a_table_looked_up_for_all_examples_at_once(length: int, kept: int | None, shape: tuple[int, ...]) -> None:
    """Its gradients come summed over examples, also where there are as many positions as examples."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Embedding(length, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(x + self.table(torch.arange(x.shape[1]).view(shape)))).mean(1)

    torch.manual_seed(0)
    model, x = Positions().double(), torch.randn(8, length, 3).double()
    expected = truth(model, x, kept or 8)["table.weight"]
    several = torch.stack([measured(model, x, 8, stats_batch=kept, seed=seed)["table.weight"] for seed in range(400)])
    error = several.std(0) / 20.0
    assert ((several.mean(0) - expected).abs() < 5.0 * error + 1e-5).all()
