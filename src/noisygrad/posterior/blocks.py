"""A block: one or more units (layers' matrices) that share a covariance family, and its part of the flat vector."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from noisygrad.curvature.passes import Pass
from noisygrad.curvature.summaries import summarised
from noisygrad.families.base import Prior, Statistics, has_constant_rows
from noisygrad.families.family import Family, PrecisionOf
from noisygrad.families.units import Span, Unit


@dataclass(frozen=True)
class Block(Span):
    """Weights [start, start + size) of the flat vector, with one covariance family."""

    name: str
    family: Family
    units: tuple[Unit, ...]
    start: int
    group: int
    noise: bool

    @cached_property
    def by_matrix(self) -> bool:  # type: ignore[override]
        """Whether the family takes its vector as matrices [W | b], row by row."""
        return self.family.layout == "matrix"

    @property
    def follows_memory(self) -> bool:
        """Whether its tensors have a number for each weight, in the order in which the weights lie."""
        return self.family.layout == "memory"

    def to_memory(self, part: Tensor) -> Tensor:
        """A vector of which every parameter is row by row, in the order of memory; itself where that is the same."""
        return reordered(self.units, part, Unit.to_memory)

    def from_memory(self, part: Tensor) -> Tensor:
        """The inverse of `to_memory`."""
        return reordered(self.units, part, Unit.from_memory)

    def summarise(self, unit: Unit, one: Pass, current: Statistics) -> Pass:
        """All that `measure` wants to know of a pass through one of its units, for a moving average `current`."""
        return summarised(one, unit, self.family.reads, current)

    def prior(self, precision_of: PrecisionOf, like: Tensor) -> Prior:
        """A fresh prior from the precision 1/η of each parameter, of the type and on the device of `like`."""
        return self.family.prior(self, precision_of, like)

    def pieces(self, statistics: Statistics) -> list[tuple[str, Tensor]]:
        """Tensors that are finite if all statistics are, each with the name of the layer that it is about."""
        return self.family.pieces(self.units, statistics)


def reordered(units: Sequence[Unit], part: Tensor, move: Callable[[Unit, Tensor], Tensor]) -> Tensor:
    """A vector of these units after `Unit.to_memory` or `from_memory` of each; itself where no order is changed."""
    if has_constant_rows(part) or not any(unit.has_custom_layout for unit in units):
        return part
    segments = part.split([unit.size for unit in units], dim=-1)
    return torch.cat([move(unit, segment) for unit, segment in zip(units, segments, strict=True)], dim=-1)
