"""A block: one or more units (layers' matrices) that share a covariance family, and its part of the flat vector."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from noisygrad.curvature.passes import MatrixPass, Pass
from noisygrad.curvature.summaries import MomentSummary, SquareSummary
from noisygrad.curvature.units import Unit
from noisygrad.families import dense, diagonal, kronecker, packed, tridiagonal
from noisygrad.families.base import Prior, Statistics, constant_rows, has_constant_rows, joined
from noisygrad.kernels.threads import run_in_threads

Family = Literal["diagonal", "kronecker", "tridiagonal", "full"]
LARGE = 100_000
"""From so many weights on, the statistics of a CPU's layers are taken side by side."""


@dataclass(frozen=True)
class Block:
    """Weights [start, start + size) of the flat vector, with one covariance family."""

    name: str
    family: Family
    units: tuple[Unit, ...]
    start: int
    group: int
    noise: bool

    @cached_property
    def size(self) -> int:
        """How many weights it has (per replica)."""
        return sum(unit.size for unit in self.units)

    @cached_property
    def num_groups(self) -> int:
        """How many independent sub-blocks (groups of a convolution) it consists of; 1 if it is one block."""
        return self.units[0].groups if self.family == "kronecker" else 1

    @property
    def batch(self) -> tuple[int, ...]:
        """Leading dimensions of its family's tensors: replicas, then groups."""
        return self.units[0].replicas + ((self.num_groups,) if self.num_groups > 1 else ())

    def segment(self, flat: Tensor) -> Tensor:
        """Its part of a flat vector, a view `[*replicas, size]`."""
        return flat if self.size == flat.shape[-1] else flat[..., self.start : self.start + self.size]

    def vector(self, flat: Tensor) -> Tensor:
        """Its part of a flat vector in the order of its family, `[*batch, n]`: matrices [W | b] row by row.

        A view for the diagonal and the dense family, to which the order is nothing.
        """
        part = self.segment(flat)
        if self.family == "kronecker":
            part = self.units[0].matrix(part)
        elif self.family == "tridiagonal":
            pieces = part.split([unit.size for unit in self.units], dim=-1)
            part = torch.cat([unit.matrix(piece) for unit, piece in zip(self.units, pieces, strict=True)], dim=-1)
        return self.batched(part)

    def batched(self, part: Tensor) -> Tensor:
        """`[*replicas, size]` in the order of the family as `[*batch, n]`."""
        return part.unflatten(-1, (self.num_groups, -1)) if self.num_groups > 1 else part

    def write_(self, flat: Tensor, values: Tensor) -> None:
        """The inverse of `vector`: put `[*batch, n]` into a flat vector."""
        part = self.segment(flat)
        values = values.flatten(start_dim=-2) if self.num_groups > 1 else values
        if self.family == "kronecker":
            self.units[0].write_matrix_(part, values)
        elif self.family == "tridiagonal":
            sizes = [unit.size for unit in self.units]
            for unit, piece, value in zip(self.units, part.split(sizes, -1), values.split(sizes, -1), strict=True):
                unit.write_matrix_(piece, value)
        else:
            part.copy_(values)

    def to_memory(self, part: Tensor) -> Tensor:
        """A vector of the block, of which every parameter is row by row, as the block's lie; itself, if they do so."""
        return self._each(Unit.to_memory, part)

    def from_memory(self, part: Tensor) -> Tensor:
        """The inverse of `to_memory`."""
        return self._each(Unit.from_memory, part)

    def _each(self, move: Callable[[Unit, Tensor], Tensor], part: Tensor) -> Tensor:
        if has_constant_rows(part) or not any(unit.has_custom_layout for unit in self.units):
            return part
        segments = part.split([unit.size for unit in self.units], dim=-1)
        moved = [move(unit, segment) for unit, segment in zip(self.units, segments, strict=True)]
        return torch.cat(moved, dim=-1)

    def total(self, values: Tensor) -> Tensor:
        """One number per replica from one per sub-block."""
        return values.sum(dim=-1) if self.num_groups > 1 else values

    def identity(self, dtype: torch.dtype, device: torch.device) -> Statistics:
        """The statistics at the start: F̄ = I."""
        first = self.units[0]
        if self.family == "diagonal":
            return diagonal.Statistics.identity(self.batch, self.size, dtype=dtype, device=device)
        if self.family == "kronecker":
            return packed.statistics(
                kronecker.Statistics.identity(self.batch, first.outputs, first.inputs, dtype=dtype, device=device)
            )
        if self.family == "tridiagonal":
            outputs, inputs = [unit.outputs for unit in self.units], [unit.inputs for unit in self.units]
            return tridiagonal.Statistics.identity(self.batch, outputs, inputs, dtype=dtype, device=device)
        return dense.Statistics.identity(self.batch, self.size, dtype=dtype, device=device)

    def measure(self, passes: Mapping[str, Pass], current: Statistics) -> Statistics:
        """The statistics of one pass, for a moving average that is now `current`.

        A layer that took no part has no gradient. It says nothing of its inputs either, which stay as they are.
        """
        seen = [unit for unit in self.units if unit.name in passes]
        if self.family == "diagonal" and seen:
            of_cpu = next(iter(current.tensors().values())).device.type == "cpu"
            works = [partial(passes[unit.name].layout_squares, unit) for unit in seen]
            found = run_in_threads(works, when=of_cpu and self.size >= LARGE)
            sums = self._joined({unit.name: pieces for unit, pieces in zip(seen, found, strict=True)})
            return diagonal.Statistics(sums.div_(passes[seen[0].name].examples))
        if self.family == "full" and seen:
            return dense.Statistics.measure(self._joined({unit.name: [passes[unit.name].rows()] for unit in seen}))
        if not seen:
            nothing = current.map(torch.zeros_like)
            for name, tensor in nothing.tensors().items():
                if name.startswith("inputs"):
                    tensor.copy_(current.tensors()[name])
            return nothing
        if self.family == "kronecker":
            only = passes[self.units[0].name]
            assert isinstance(only, MatrixPass | MomentSummary)
            return only.moments()
        matrices = self._matrices(passes)
        measured = tridiagonal.Statistics.measure(
            [p.activations for p in matrices],
            [p.gradients for p in matrices],
            [p.constant for p in matrices],
            [
                a.gradients.shape[-3:-1] == b.gradients.shape[-3:-1] and before in seen and after in seen
                for (a, b), (before, after) in zip(pairwise(matrices), pairwise(self.units), strict=True)
            ],
        )
        if len(seen) == len(self.units) or not isinstance(current, tridiagonal.Statistics):
            return measured
        pairs = zip(self.units, measured.inputs, current.inputs, strict=True)
        return dataclasses.replace(
            measured, inputs=tuple(new if unit in seen else old for unit, new, old in pairs)
        ).clone()

    def summarise(self, unit: Unit, one: Pass) -> Pass:
        """All that `measure` wants to know of a pass through one of its units."""
        if self.family == "diagonal":
            return SquareSummary.of(one, unit)
        return MomentSummary.of(one) if self.family == "kronecker" and isinstance(one, MatrixPass) else one

    def _matrices(self, passes: Mapping[str, Pass]) -> list[MatrixPass]:
        """The passes of all units; a layer of a chain that took no part has no gradient."""
        found = {unit.name: p for unit in self.units if isinstance(p := passes.get(unit.name), MatrixPass)}
        like = next(iter(found.values()))
        for unit in self.units:
            if unit.name not in found:
                inputs = like.activations.new_zeros(*like.activations.shape[:-1], unit.inputs - unit.constant)
                outputs = like.gradients.new_zeros(*like.gradients.shape[:-1], unit.outputs)
                found[unit.name] = MatrixPass(inputs, outputs, unit.constant)
        return [found[unit.name] for unit in self.units]

    def _joined(self, pieces: Mapping[str, Sequence[Tensor]]) -> Tensor:
        """The units' vectors, each in pieces, end to end; a layer that took no part has no gradient."""
        like = next(iter(pieces.values()))[0]
        found = [pieces.get(unit.name) or [like.new_zeros(*like.shape[:-1], unit.size)] for unit in self.units]
        return joined([piece for several in found for piece in several])

    def prior(self, precision_of: Callable[[str], float], dtype: torch.dtype, device: torch.device) -> Prior:
        """A fresh prior from the precision 1/η of each parameter."""
        different = {precision_of(slot.parameter) for unit in self.units for slot in unit.slots}
        if self.family == "diagonal" and len(different) == 1:
            return diagonal.Prior(constant_rows(different.pop(), (*self.batch, self.size), dtype=dtype, device=device))
        if self.family in {"diagonal", "full"}:
            flat = torch.cat(
                [
                    torch.full((unit.rows * (slot.stop - slot.start),), precision_of(slot.parameter), dtype=dtype)
                    for unit in self.units
                    for slot in unit.slots
                ]
            )
            flat = flat.to(device).repeat(*self.batch, 1)
            return diagonal.Prior(flat) if self.family == "diagonal" else dense.Prior(flat, diagonal=True)
        columns = []
        for unit in self.units:
            values = torch.zeros(*self.batch, unit.inputs, dtype=dtype, device=device)
            for slot in unit.slots:
                values[..., slot.start : slot.stop] = precision_of(slot.parameter)
            columns.append(values)
        if self.family == "kronecker":
            return kronecker.Prior.from_columns(columns[0], self.units[0].outputs)
        return tridiagonal.Prior.from_columns(columns, [unit.outputs for unit in self.units])
