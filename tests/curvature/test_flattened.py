"""Positions of an example are not examples: a loss of an output that was flattened is refused, and says so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.optim import NoisyOptimizer
from support.compare import assert_unchanged, each_optimizer, snapshot
from support.truth import close, normal


class LanguageModel(nn.Module):
    """Tokens [batch, positions] to logits [batch, positions, classes], each position seeing all."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(5, 4), Mixing(), nn.Linear(4, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.table(tokens)))


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        key = self.key(x)
        return x + (key @ key.mT).tril().softmax(-1) @ self.value(x)


def tokens(*shape: int) -> Tensor:
    return torch.randint(5, shape, generator=torch.Generator().manual_seed(0))


@each_optimizer
@pytest.mark.parametrize("batch", [1, 3, 6])
@pytest.mark.parametrize("attention", [False, True], ids=["own", "torch's"])
def test_a_flattened_language_model_loss(kind: type[NoisyOptimizer], batch: int, attention: bool) -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    if attention:
        model.body = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)  # type: ignore[assignment]
    model.table.requires_grad_(False)  # a full covariance needs per-example gradients of a table
    x, y = tokens(batch, 6), tokens(batch, 6)
    optimizer = kind(model, ng.Categorical(), num_data=100, seed=0)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"do not flatten.*\[batch, positions, classes\]"):
        optimizer.step(lambda: (model(x).flatten(0, 1), y.flatten()))
    assert_unchanged(before, optimizer)
    optimizer.step(lambda: (model(x), y))


def test_flattened_pixels() -> None:
    model = nn.Conv2d(2, 3, 3, padding=1)
    optimizer = ng.NoisyKFAC(model, ng.Categorical(), num_data=100)
    x, y = torch.randn(2, 2, 4, 4), torch.randint(3, (2, 4, 4))
    with pytest.raises(ValueError, match=r"2 images.*batch of 32.*do not flatten"):
        optimizer.step(lambda: (model(x).movedim(1, -1).flatten(0, 2), y.flatten()))
    optimizer.step(lambda: (model(x).movedim(1, -1), y))


@each_optimizer
def test_examples_may_be_in_the_second_dimension(kind: type[NoisyOptimizer]) -> None:
    """A model that knows no positions, given `[1, batch, features]`, trains as without the first dimension."""
    x, found = normal(6, 3), []
    for lead in ((), (1,)):
        torch.manual_seed(0)
        model = ng.networks.MLP(3, (4,), 2).double()
        optimizer = kind(model, ng.Gaussian(), num_data=100, seed=0, stats_every=1)
        for _ in range(3):
            optimizer.step(lambda model=model, lead=lead: (model(x.reshape(*lead, 6, 3)).reshape(6, 2), x[:, :2]))
        found.append(optimizer.weights.mean.flat.clone())
    close(found[1], found[0])


class Video(nn.Module):
    """Frames folded into the batch for the convolutions, and unfolded for what comes after."""

    def __init__(self, per_frame: bool) -> None:
        super().__init__()
        self.per_frame = per_frame
        self.frame, self.head = nn.Conv2d(1, 2, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.frame(x.flatten(0, 1)).tanh().flatten(1)
        return self.head(hidden) if self.per_frame else self.head(hidden.unflatten(0, x.shape[:2]))


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("per_frame", [False, True])
def test_frames_may_be_folded_inside(batch: int, per_frame: bool) -> None:
    model = Video(per_frame)
    optimizer = ng.NoisyKFAC(model, ng.Categorical(), num_data=100, seed=0, stats_every=1)
    x, y = torch.randn(batch, 5, 1, 3, 3), tokens(batch, 5) % 3
    for _ in range(3):
        optimizer.step(lambda: (model(x), y.flatten() if per_frame else y))
    assert optimizer.steps == 3
