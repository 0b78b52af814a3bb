"""One pass through a layer: its per-example gradients, their moments and squares.

All layers have one layout, `[..., batch, shared, features]`: `shared` are the positions of a
convolution or a sequence, or the several calls of one layer in a forward pass; `...` are replicas, then groups. A pass
answers two questions, row by row of its unit's weights: the per-example gradients (`rows`) and the sums of their
squares (`square_sums`). The gradients are of the *summed* loss, so they are not divided by a batch size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from noisygrad.families import kronecker, packed
from noisygrad.families.base import Statistics
from noisygrad.families.units import Unit, joined
from noisygrad.kernels import squares
from noisygrad.kernels.products import second_moment
from noisygrad.kernels.squared_products import sum_of_squared_products, sum_of_squares_in_basis
from noisygrad.likelihoods import Counted

UNFLATTENED = (
    "Positions of one example are not examples: do not flatten them into the batch. Give draw.nll the output as "
    "[batch, positions, classes] and the target as [batch, positions]"
)


@dataclass(frozen=True)
class Batch:
    """The batch of a loss: how many examples it has, how many of the first are kept for statistics, in which type."""

    size: int
    kept: int
    dtype: torch.dtype
    counted: Counted | None = None
    """What counts of those that are kept; None where all does."""
    reached: Mapping[str, Tensor] = field(default_factory=dict)
    """`Pass.reached` of layers, by name, where it is known."""

    def first(self, tensor: Tensor, dim: int) -> Tensor:
        """The kept examples, in the statistics' type; `dim` may be the batch folded with positions after it."""
        if self.kept < self.size:
            tensor = tensor.narrow(dim, 0, self.kept * (tensor.shape[dim] // self.size))
        return self.precise(tensor)

    def precise(self, tensor: Tensor) -> Tensor:
        """The tensor in the statistics' type, if it is floating point."""
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def batch_advice(batch: Batch, rows: int) -> str:
    """What to do where a layer has seen this many rows, which are not those of the examples."""
    flattened = rows > 0 and batch.size % rows == 0
    return UNFLATTENED if flattened else "Give the layer inputs with the batch in front, or freeze it."


def arrange(tensor: Tensor, batch: Batch, unit: Unit) -> Tensor:
    """`[*replicas, ..., features]` with the batch somewhere in front, as `[*replicas, kept, shared, features]`.

    Dimension 0 is the batch, except inside a Transformer layer that says otherwise; where its size disagrees,
    dimension 1 is tried, then a batch folded with positions into one dimension.
    """
    lead = len(unit.replicas)
    sizes = tensor.shape[lead:-1]
    if not sizes and batch.size == 1:
        return batch.precise(tensor).reshape(*tensor.shape[:-1], 1, 1, tensor.shape[-1])
    second = len(sizes) > 1 and sizes[1] == batch.size and not unit.folded
    if second and (unit.sequence_first or sizes[0] != batch.size):
        return batch.first(tensor, lead + 1).transpose(lead, lead + 1).flatten(lead + 1, -2)
    if sizes and sizes[0] == batch.size:
        tensor = batch.first(tensor, lead)
        return tensor.unsqueeze(-2) if len(sizes) == 1 else tensor.flatten(lead + 1, -2)
    if sizes and batch.size and sizes[0] % batch.size == 0:
        positions = tensor.shape[lead:-1].numel() // batch.size
        return batch.first(tensor, lead).reshape(*tensor.shape[:lead], batch.kept, positions, tensor.shape[-1])
    raise ValueError(
        f"layer {unit.name!r} saw a tensor of shape {tuple(tensor.shape)} while the loss has a batch of {batch.size}: "
        f"its per-example gradients are not defined. {batch_advice(batch, sizes[0] if sizes else 0)}"
    )


class Pass(ABC):
    """One pass through one unit: its per-example gradients, in the order of the unit's weights."""

    examples: int
    """How many examples it has."""
    counted: Counted | None = None
    """What counts of them, of which the gradients know already; None where all does."""
    reached: Tensor | None = None
    """Which positions the passes of a loss reach, `[*replicas, batch, positions]`; None where this is the only one."""

    @abstractmethod
    def rows(self) -> Tensor:
        """Per-example gradients, `[*replicas, batch, n]`."""

    def square_sums(self) -> list[Tensor]:
        """The sum over the batch of their squares, in pieces `[*replicas, ...]` that make up `[*replicas, n]`."""
        return [self.rows().square().sum(dim=-2)]

    def layout_squares(self, unit: Unit) -> list[Tensor]:
        """The pieces of `square_sums` in the unit's own order of memory."""
        sums = self.square_sums()
        return [unit.to_memory(joined(sums))] if unit.has_custom_layout else sums

    def carried(self) -> dict[str, Tensor]:
        """The `inputs` and `gradients` it was made from: where a number that is not finite can come from.

        Empty where the place in the forward pass is not known.
        """
        return {}

    def takes_part(self) -> Tensor | None:
        """Whether any position counts, in a shape that broadcasts to moments; None where that is sure."""
        return None

    @classmethod
    @abstractmethod
    def joined(cls, passes: Sequence[Self]) -> Pass:
        """One pass for several calls of one layer, whose gradients add up within an example."""


class PositionsPass(Pass):
    """A dataclass of tensors `[..., batch, positions, ...]`, the output gradients and what was put in."""

    gradients: Tensor

    @property
    def examples(self) -> int:  # type: ignore[override]
        return self.gradients.shape[-3]

    @classmethod
    def joined(cls, passes: Sequence[Any]) -> Pass:
        """The positions of all calls, one after another."""
        first = passes[0]
        names = [name for name, value in vars(first).items() if isinstance(value, Tensor)]
        dim = first.gradients.dim() - 2
        return cls(**vars(first) | {name: torch.cat([getattr(one, name) for one in passes], dim) for name in names})


@dataclass
class MatrixPass(PositionsPass):
    """A layer whose output is W a (+ b): activations `[..., B, T, in]`, output gradients `[..., B, T, out]`.

    `grouped` says that the last of the leading dimensions counts the groups of a convolution; `constant` that the
    matrix is [W | b], whose last column multiplies a constant 1 that the activations leave out.
    """

    activations: Tensor
    gradients: Tensor
    constant: bool
    grouped: bool = False

    def rows(self) -> Tensor:
        weight, bias = self.gradients.mT @ self.activations, self.gradients.sum(dim=-2)
        if self.grouped:
            weight, bias = weight.movedim(-4, -3), bias.movedim(-3, -2)
        return torch.cat(self._pieces(weight, bias), dim=-1)

    def _pieces(self, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        """All of W, then all of b, of every group."""
        weight = weight.flatten(start_dim=-3 if self.grouped else -2)
        if bias is None or not self.constant:
            return [weight]
        return [weight, bias.flatten(start_dim=-2) if self.grouped else bias]

    def carried(self) -> dict[str, Tensor]:
        return {"inputs": self.activations, "gradients": self.gradients}

    def input_moment(self) -> Tensor:
        """The mean of a aᵀ over examples and positions that count, the constant included: A of a Kronecker block.

        0 where nothing counts (`takes_part`).
        """
        if self.counted is not None:
            return self.cross_input_moment(self)
        return second_moment(self.activations, self.activations, self.constant, self.constant)

    def cross_input_moment(self, after: MatrixPass) -> Tensor:
        """The mean of a bᵀ, with b the inputs of another layer at the same positions."""
        if self.counted is None:
            return second_moment(self.activations, after.activations, self.constant, after.constant)
        rows = self._weighted_inputs()
        return second_moment(rows, rows if after is self else after._weighted_inputs(), False, False)

    def _weighted_inputs(self) -> Tensor:
        """The inputs with their constant, times the roots of weights of mean 1: those of examples and positions."""
        inputs = self.activations
        if self.constant:
            inputs = torch.cat([inputs, inputs.new_ones(*inputs.shape[:-1], 1)], -1)
        assert self.counted is not None
        return inputs * self._position_weights(self.counted).sqrt().unsqueeze(-1)

    def _position_weights(self, counted: Counted) -> Tensor:
        """Weights `[..., B, T]` of mean 1: that of the example where a position counts, else 0."""
        weights = self._unscaled_weights(counted)
        # Where no gradient arrives there is nothing to divide by.
        weights = weights / weights.mean((-2, -1), keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
        return weights.unsqueeze(-3) if self.grouped else weights

    def _unscaled_weights(self, counted: Counted) -> Tensor:
        """The same of any mean.

        Positions count where the mask says so, or where a gradient arrives in any pass of the loss: what a target is
        not asked of may still be looked at by others. Where the layer has other positions than the mask, gradients
        alone tell.
        """
        reached = self.reached_positions() if self.reached is None else self.reached
        masked, positions = counted.positions, reached.shape[-1]
        if not counted.has_parts or positions == 1:
            counts = torch.ones_like(reached)
        elif masked is not None and masked.shape[-1] == positions:
            counts = masked | reached
        else:
            counts = reached
        return counted.examples.to(self.gradients.dtype).unsqueeze(-1) * counts

    def reached_positions(self) -> Tensor:
        """Where a gradient of this pass arrives, `[*replicas, B, T]`."""
        reached = (self.gradients != 0).any(-1)
        return reached.any(-3) if self.grouped else reached

    def takes_part(self) -> Tensor | None:
        if self.counted is None:
            return None
        some = (self._unscaled_weights(self.counted) > 0).any(-1, keepdim=True).any(-2, keepdim=True)
        return some.unsqueeze(-3) if self.grouped else some

    def output_moment(self) -> Tensor:
        """The mean over examples and the sum over positions of g gᵀ: S of a Kronecker block."""
        return second_moment(self.gradients, self.gradients, False, False) * self.gradients.shape[-2]

    def moments(self) -> Statistics:
        """A and S of a Kronecker block, in the form in which they are stored."""
        return packed.pack_statistics(kronecker.Statistics(self.input_moment(), self.output_moment()))

    def square_sums(self) -> list[Tensor]:
        if (found := self._by_kernel()) is not None:
            return [found]
        bias = self.gradients.sum(dim=-2).square().sum(dim=-2) if self.constant else None
        return self._pieces(self._squared_products(), bias)

    def _by_kernel(self) -> Tensor | None:
        """All pieces as one tensor, by a GPU kernel, if there is one for this pass."""
        g = self.gradients
        if g.dim() != 3 or not squares.applies(g, g.shape[1]):
            return None
        return squares.of_sequences(g, self.activations, self.constant)

    def _squared_products(self) -> Tensor:
        """The sums of squares of the weights without the constant, `[..., out, in]`."""
        return sum_of_squared_products(self.gradients, self.activations)

    def squares_in_basis(self, left: Tensor, right: Tensor) -> Tensor:
        """Σ_b (Lᵀ G_b V)² for the per-example gradients G_b = Σ_t g_t a_tᵀ, `[..., out, in (+ 1)]`.

        L is the basis of the outputs, V of the inputs; its last row is the constant's, if there is one.
        """
        return sum_of_squares_in_basis(self.gradients, self.activations, left, right, self.constant)


@dataclass
class ElementwisePass(PositionsPass):
    """A scale and shift of each channel: normalised inputs and output gradients, both `[..., B, T, channels]`."""

    normalised: Tensor
    gradients: Tensor
    scale: bool
    shift: bool

    def rows(self) -> Tensor:
        columns = []
        if self.scale:
            columns.append((self.gradients * self.normalised).sum(dim=-2))
        if self.shift:
            columns.append(self.gradients.sum(dim=-2))
        return torch.cat(columns, dim=-1)

    def carried(self) -> dict[str, Tensor]:
        return {"inputs": self.normalised, "gradients": self.gradients}


@dataclass
class EmbeddingPass(PositionsPass):
    """A table look-up: indices `[B, T]` and output gradients `[B, T, features]` of a table with `entries` rows."""

    indices: Tensor
    gradients: Tensor
    entries: int

    def rows(self) -> Tensor:
        batch, _, features = self.gradients.shape
        table = self.gradients.new_zeros(batch * self.entries, features)
        return table.index_add_(0, self._keys(), self.gradients.flatten(0, 1)).view(batch, -1)

    def carried(self) -> dict[str, Tensor]:
        return {"gradients": self.gradients}

    def _keys(self) -> Tensor:
        """One number for each pair of example and table entry, `[B·T]`."""
        example = torch.arange(self.indices.shape[0], device=self.indices.device).unsqueeze(-1)
        return (example * self.entries + self.indices).flatten()

    def square_sums(self) -> list[Tensor]:
        # An entry that occurs twice in an example has the square of the *sum* of both gradients. Sorting makes equal
        # keys adjacent, so that no [batch, entries, features] table is made and nothing waits for the device.
        features = self.gradients.shape[-1]
        keys, order = self._keys().sort()
        segment = torch.cat([keys.new_zeros(1), (keys.diff() != 0).cumsum(0)])
        summed = self.gradients.new_zeros(len(keys), features)
        summed.index_add_(0, segment, self.gradients.reshape(-1, features)[order])
        entry = torch.zeros_like(keys).index_copy_(0, segment, keys % self.entries)
        table = summed.new_zeros(self.entries, features).index_add_(0, entry, summed.square())
        return [table.flatten()]


@dataclass
class SummedPass(Pass):
    """A parameter whose use is unknown: only the gradient summed over the batch, each example's with a random sign.

    With signs the square of the sum is an unbiased estimate of the sum of squares, because cross terms average out.
    """

    gradient: Tensor
    examples: int

    def rows(self) -> Tensor:
        raise TypeError(
            "a full covariance needs per-example gradients, and a table that is looked up once for all examples has "
            "none: look positions up for each example (expand the indices to [batch, positions]), or freeze the table"
        )

    def square_sums(self) -> list[Tensor]:
        return [self.gradient.square()]

    @classmethod
    def joined(cls, passes: Sequence[Self]) -> Self:
        return cls(torch.stack([p.gradient for p in passes]).sum(dim=0), passes[0].examples)
