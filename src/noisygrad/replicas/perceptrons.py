"""Many multi-layer perceptrons at once, forward and backward by hand: replicas, and weight samples of each.

A network's weights are one flat vector, layer after layer, each the matrix [W | b] row by row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Perceptrons:
    """The shape of a network with ReLU units: its sizes from the inputs to the outputs."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.sizes) < 2 or min(self.sizes) < 1:
            raise ValueError(f"sizes are those of inputs, hidden layers and outputs, all at least 1; got {self.sizes}")

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(outputs, inputs + 1) of every layer's [W | b]."""
        return [(after, before + 1) for before, after in pairwise(self.sizes)]

    @property
    def num_weights(self) -> int:
        """n, of one network."""
        return sum(math.prod(shape) for shape in self.shapes)

    def matrices(self, flat: Tensor) -> list[Tensor]:
        """`[..., n]` as views `[..., outputs, inputs + 1]`, one for each layer."""
        parts = flat.split([math.prod(shape) for shape in self.shapes], dim=-1)
        return [part.unflatten(-1, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def initial(self, generators: Sequence[torch.Generator], dtype: torch.dtype, device: torch.device) -> Tensor:
        """`[R, n]` by Glorot's uniform rule on all of [W | b], one generator (on the CPU) for each replica."""
        rows = []
        for generator in generators:
            parts = [
                torch.empty(shape, dtype=torch.float64).uniform_(-1.0, 1.0, generator=generator)
                * math.sqrt(6.0 / sum(shape))
                for shape in self.shapes
            ]
            rows.append(torch.cat([part.flatten() for part in parts]))
        return torch.stack(rows).to(device=device, dtype=dtype)

    def forward(self, weights: Tensor, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """The inputs of every layer and the outputs, for weights `[R, S, n]` and x `[R, B, inputs]`.

        Returns:
            One tensor `[R, S, B, inputs of the layer]` for each layer, without the constant 1; `[R, S, B, outputs]`.
        """
        samples = weights.shape[1]
        inputs = [x.unsqueeze(1).expand(-1, samples, -1, -1)]
        first, *rest = self.matrices(weights)
        # All samples see the same inputs: one product for each replica.
        products = torch.matmul(x, first[..., :-1].flatten(1, 2).mT)
        hidden = products.unflatten(-1, (samples, -1)).movedim(2, 1) + first[..., -1].unsqueeze(-2)
        for matrix in rest:
            inputs.append(hidden.relu())
            hidden = torch.matmul(inputs[-1], matrix[..., :-1].mT) + matrix[..., -1].unsqueeze(-2)
        return inputs, hidden

    def backward(self, weights: Tensor, inputs: Sequence[Tensor], gradients: Tensor) -> list[Tensor]:
        """Gradients at every layer's output, `[R, S, B, outputs of the layer]`, from those at the last."""
        found = [gradients]
        for matrix, below in zip(self.matrices(weights)[:0:-1], inputs[:0:-1], strict=True):
            found.append(torch.matmul(found[-1], matrix[..., :-1]) * (below > 0))
        return found[::-1]
