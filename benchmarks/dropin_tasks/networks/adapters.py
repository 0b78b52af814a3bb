"""Parts of a trained network that learn again: its last layer, or low-rank adapters written in plain torch."""

from __future__ import annotations

import math
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FrozenTrunk(nn.Module):
    """A trained network that only computes features; always in evaluation mode."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk.eval().requires_grad_(False)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.trunk.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.trunk(x)


class LowRankLinear(nn.Module):
    """A frozen linear layer plus a product of two small matrices, which are parameters of this module."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.empty(rank, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class AdaptedLinear(nn.Module):
    """A frozen linear layer plus two small linear layers behind each other."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(model: nn.Module, kind: type[LowRankLinear] | type[AdaptedLinear], rank: int) -> nn.Module:
    """`model` with all its parameters frozen and an adapter around each linear layer."""
    model.requires_grad_(False)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name in linear:
        parent, _, own = name.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, own, kind(getattr(owner, own), rank))
    return model
