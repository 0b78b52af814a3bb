"""A block: one or more units (layers' matrices) that share a covariance family, and its part of the flat vector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from noisygrad.curvature.passes import MatrixPass, Pass
from noisygrad.curvature.summaries import BasisSummary, MomentSummary, SquareSummary
from noisygrad.families.base import Prior, Statistics, has_constant_rows
from noisygrad.families.family import Family, PrecisionOf
from noisygrad.families.units import Unit


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
        return self.units[0].groups if self.family.layout == "matrix" else 1

    @cached_property
    def is_flat(self) -> bool:
        """Whether `vector` is its part of the flat vector as it lies."""
        plain = all(len(unit.slots) == 1 and not unit.has_custom_layout for unit in self.units)
        return self.num_groups == 1 and (self.family.layout != "matrix" or (plain and len(self.units) == 1))

    @property
    def follows_memory(self) -> bool:
        """Whether its tensors have a number for each weight, in the order in which the weights lie."""
        return self.family.layout == "memory"

    @cached_property
    def batch(self) -> tuple[int, ...]:
        """Leading dimensions of its family's tensors: replicas, then groups."""
        return self.units[0].replicas + ((self.num_groups,) if self.num_groups > 1 else ())

    def segment(self, flat: Tensor) -> Tensor:
        """Its part of a flat vector, a view `[*replicas, size]`."""
        return flat if self.size == flat.shape[-1] else flat[..., self.start : self.start + self.size]

    def vector(self, flat: Tensor) -> Tensor:
        """Its part of a flat vector in the layout of its family, `[*batch, n]`; a view where that has no matrices."""
        part = self.segment(flat)
        if self.family.layout == "matrix":
            if len(self.units) == 1:
                part = self.units[0].matrix(part)
            else:
                pieces = part.split([unit.size for unit in self.units], dim=-1)
                part = torch.cat([unit.matrix(piece) for unit, piece in zip(self.units, pieces, strict=True)], dim=-1)
        return self.batched(part)

    def batched(self, part: Tensor) -> Tensor:
        """`[*replicas, size]` in the layout of the family as `[*batch, n]`."""
        return part.unflatten(-1, (self.num_groups, -1)) if self.num_groups > 1 else part

    def write_(self, flat: Tensor, values: Tensor) -> None:
        """The inverse of `vector`: put `[*batch, n]` into a flat vector."""
        part = self.segment(flat)
        values = values.flatten(start_dim=-2) if self.num_groups > 1 else values
        if self.family.layout != "matrix":
            part.copy_(values)
        elif len(self.units) == 1:
            self.units[0].write_matrix_(part, values)
        else:
            sizes = [unit.size for unit in self.units]
            for unit, piece, value in zip(self.units, part.split(sizes, -1), values.split(sizes, -1), strict=True):
                unit.write_matrix_(piece, value)

    def to_memory(self, part: Tensor) -> Tensor:
        """A vector of which every parameter is row by row, in the order of memory; itself where that is the same."""
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

    def identity(self, prior: Prior, dtype: torch.dtype, device: torch.device) -> Statistics:
        """The statistics at the start: F̄ = I, under a prior in units of the Fisher."""
        return self.family.identity(self.units, self.batch, prior, dtype=dtype, device=device)

    def measure(self, passes: Mapping[str, Pass], current: Statistics) -> Statistics:
        """The statistics of one pass, for a moving average that is now `current`."""
        if not any(unit.name in passes for unit in self.units):
            return self.family.unmeasured(current)
        return self.family.measure(self.units, passes, current)

    def summarise(self, unit: Unit, one: Pass, current: Statistics) -> Pass:
        """All that `measure` wants to know of a pass through one of its units, for a moving average `current`."""
        if self.family.reads == "squares":
            return SquareSummary.of(one, unit)
        if self.family.reads == "rows" or not isinstance(one, MatrixPass):
            return one
        if self.family.reads == "moments":
            return MomentSummary.of(one)
        basis = current.tensors()
        return BasisSummary.of(one, basis["left"], basis["right"])

    def prior(self, precision_of: PrecisionOf, dtype: torch.dtype, device: torch.device) -> Prior:
        """A fresh prior from the precision 1/η of each parameter."""
        return self.family.prior(self.units, self.batch, precision_of, dtype=dtype, device=device)

    def pieces(self, statistics: Statistics) -> list[tuple[str, Tensor]]:
        """Tensors that are finite if all statistics are, each with the name of the layer that it is about."""
        return self.family.pieces(self.units, statistics)
