"""A unit: the matrix that holds one layer's trainable weights, or a part of them, and where each parameter lies in it.

A flat vector holds unit after unit and, of each, slot after slot, so that every parameter is one piece of memory: row
by row, or as the parameter itself lies in its own memory (`Slot.memory_layout`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["matrix", "elementwise", "embedding", "other"]


@dataclass(frozen=True)
class Slot:
    """Columns [start, stop) of a unit's matrix hold (rows of) one parameter, whose prior is centred on `centre`."""

    parameter: str
    start: int
    stop: int
    rows: tuple[int, int] | None = None
    centre: float = 0.0
    memory_layout: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Shape and strides of the parameter, where its numbers lie in the flat vector as they do in its own memory."""

    @cached_property
    def channels_last(self) -> bool:
        """Whether it is a convolution's weight of which all channels of a tap lie side by side."""
        if self.memory_layout is None:
            return False
        (_, channels, *kernel), strides = self.memory_layout
        steps = [channels * math.prod(kernel[axis:]) for axis in range(len(kernel) + 1)]
        return strides == (steps[0], 1, *steps[1:])

    def shaped(self, part: Tensor) -> Tensor:
        """What lies in memory order, `[..., numbers]`, as a view `[..., *shape]`."""
        assert self.memory_layout is not None
        shape, strides = self.memory_layout
        step = part.stride(-1)  # 0 where all its numbers are one
        inner = [step * stride for stride in strides]
        return part.as_strided((*part.shape[:-1], *shape), (*part.stride()[:-1], *inner), part.storage_offset())

    def of(self, tensor: Tensor, replica_dims: int) -> Tensor:
        """The part of the parameter (or of its gradient) that this slot holds, as a view."""
        if self.rows is None:
            return tensor
        return tensor.narrow(replica_dims, self.rows[0], self.rows[1] - self.rows[0])


@dataclass(frozen=True)
class Unit:
    """One matrix of trainable weights: `groups` blocks of `outputs` × `inputs`, the constant's column included."""

    name: str
    kind: Kind
    outputs: int
    inputs: int
    slots: tuple[Slot, ...]
    layer: str
    groups: int = 1
    constant: bool = False
    chainable: bool = False
    replicas: tuple[int, ...] = ()
    sequence_first: bool = False
    note: str = ""

    @cached_property
    def size(self) -> int:
        """How many weights it has (per replica)."""
        return self.groups * self.outputs * self.inputs

    @property
    def rows(self) -> int:
        """Rows of the matrix, all groups together."""
        return self.groups * self.outputs

    @cached_property
    def has_custom_layout(self) -> bool:
        """Whether some of its numbers lie otherwise than row by row."""
        return any(slot.memory_layout is not None for slot in self.slots)

    def _split(self, segment: Tensor) -> Iterator[tuple[Slot, Tensor]]:
        """Each slot with its part of a flat `[..., size]` segment, which holds slot after slot."""
        sizes = [self.rows * (slot.stop - slot.start) for slot in self.slots]
        return zip(self.slots, segment.split(sizes, dim=-1), strict=True)

    def _rows(self, segment: Tensor) -> list[Tensor]:
        """Each slot's columns as a view `[..., rows, ...]` into a flat `[..., size]` segment."""
        return [
            part.unflatten(-1, (self.rows, -1)) if slot.memory_layout is None else slot.shaped(part)
            for slot, part in self._split(segment)
        ]

    def matrix(self, segment: Tensor) -> Tensor:
        """A flat segment as the unit's matrices, `[..., groups · outputs · inputs]` row by row."""
        if len(self.slots) == 1 and not self.has_custom_layout:
            return segment
        parts = [part.flatten(start_dim=segment.dim()) for part in self._rows(segment)]
        return torch.cat(parts, dim=-1).flatten(start_dim=-2)

    def write_matrix_(self, segment: Tensor, values: Tensor) -> None:
        """The inverse of `matrix`: put `[..., groups · outputs · inputs]`, row by row, into a flat segment."""
        matrix = values.unflatten(-1, (self.rows, self.inputs))
        for slot, part in zip(self.slots, self._rows(segment), strict=True):
            part.copy_(matrix[..., slot.start : slot.stop].unflatten(-1, part.shape[segment.dim() :]))

    def views(self, segment: Tensor, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[Slot, Tensor]]:
        """Each slot with its view into a flat `[..., size]` segment, shaped like the parameter it holds."""
        for slot, part in self._split(segment):
            shape = shapes[slot.parameter][len(self.replicas) :]
            if slot.rows is not None:
                shape = torch.Size((slot.rows[1] - slot.rows[0], *shape[1:]))
            if slot.memory_layout is not None:
                yield slot, slot.shaped(part)
            else:
                yield slot, part.unflatten(-1, shape) if shape else part[..., 0]

    def to_memory(self, segment: Tensor) -> Tensor:
        """A segment whose slots are row by row, in the order in which this unit's numbers lie; a copy."""
        found = torch.empty_like(segment)
        for (slot, mine), (_, theirs) in zip(self._split(found), self._split(segment), strict=True):
            if slot.memory_layout is None:
                mine.copy_(theirs)
            else:
                slot.shaped(mine).copy_(theirs.unflatten(-1, slot.memory_layout[0]))
        return found

    def from_memory(self, segment: Tensor) -> Tensor:
        """The inverse of `to_memory`; a copy."""
        parts = [
            part if slot.memory_layout is None else slot.shaped(part).flatten(start_dim=segment.dim() - 1)
            for slot, part in self._split(segment)
        ]
        return torch.cat(parts, dim=-1)
