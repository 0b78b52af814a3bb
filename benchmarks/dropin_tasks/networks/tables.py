"""Perceptrons for tables: shallow, deep, residual, with a norm."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


def perceptron(
    inputs: int,
    widths: tuple[int, ...],
    outputs: int,
    activation: Callable[[], nn.Module] = nn.ReLU,
    norm: Callable[[int], nn.Module] | None = None,
) -> nn.Sequential:
    """Linear layers with an activation, perhaps a norm before it, and a linear layer at the end."""
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Linear(inputs, width), *([] if norm is None else [norm(width)]), activation()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


class ResidualPerceptronBlock(nn.Module):
    """LayerNorm and two linear layers beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


def residual_perceptron(inputs: int, width: int, blocks: int, outputs: int) -> nn.Sequential:
    """A linear layer, residual blocks, and a norm with a linear layer at the end."""
    return nn.Sequential(
        nn.Linear(inputs, width),
        *(ResidualPerceptronBlock(width) for _ in range(blocks)),
        nn.LayerNorm(width),
        nn.Linear(width, outputs),
    )
