"""A unit: the matrix that holds one layer's trainable weights, or a part of them, and where each parameter is in it.

A flat vector holds unit after unit and, of each, slot after slot, so that every parameter is one piece of memory: row
by row, or in the parameter's own order of memory (`Slot.memory_layout`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["matrix", "elementwise", "embedding", "other"]


@dataclass(frozen=True)
class Slot:
    """Columns [start, stop) of a unit's matrix hold one parameter, whose prior is centred on `centre`.

    With `rows` they hold only this range of the parameter's first dimension; all after it is flattened into columns.
    """

    parameter: str
    start: int
    stop: int
    rows: tuple[int, int] | None = None
    centre: float = 0.0
    memory_layout: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Shape and strides of the parameter, if the flat vector holds its numbers in the parameter's order of memory."""

    @cached_property
    def channels_last(self) -> bool:
        """Whether it is a convolution's weight in channels-last order: the channels of a tap are adjacent in memory."""
        if self.memory_layout is None:
            return False
        (_, channels, *kernel), strides = self.memory_layout
        steps = [channels * math.prod(kernel[axis:]) for axis in range(len(kernel) + 1)]
        return strides == (steps[0], 1, *steps[1:])

    def shaped(self, part: Tensor) -> Tensor:
        """Numbers in memory order, `[..., numbers]`, as a view `[..., *shape]`."""
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
    folded: bool = False
    """Whether the first dimension is the batch with others, even where the second is as long as the batch."""
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
        """Whether some of its numbers are stored in another order than row by row."""
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
        """A segment whose slots are row by row, copied into this unit's own order of memory."""
        found = torch.empty_like(segment)
        for (slot, mine), (_, theirs) in zip(self._split(found), self._split(segment), strict=True):
            if slot.memory_layout is None:
                mine.copy_(theirs)
            else:
                slot.shaped(mine).copy_(theirs.unflatten(-1, slot.memory_layout[0]))
        return found

    def from_memory(self, segment: Tensor) -> Tensor:
        """The inverse of `to_memory`, also a copy."""
        parts = [
            part if slot.memory_layout is None else slot.shaped(part).flatten(start_dim=segment.dim() - 1)
            for slot, part in self._split(segment)
        ]
        return torch.cat(parts, dim=-1)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts of a vector end to end; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=-1)


def by_unit(units: Sequence[Unit], vector: Tensor) -> list[tuple[Unit, Tensor]]:
    """Each unit with its part of a vector `[..., n]` of all of them, as a view."""
    if len(units) == 1:
        return [(units[0], vector)]
    return list(zip(units, vector.split([unit.size for unit in units], dim=-1), strict=True))


class Span:
    """A piece of the flat vector that several units share: [start, start + size), as a family takes it."""

    units: tuple[Unit, ...]
    start: int
    by_matrix: bool
    """Whether it is taken as matrices [W | b], row by row; else parameter after parameter."""

    @cached_property
    def size(self) -> int:
        """How many weights it has (per replica)."""
        return sum(unit.size for unit in self.units)

    @cached_property
    def num_groups(self) -> int:
        """How many independent sub-blocks (groups of a convolution) it consists of; 1 if it is one block."""
        return self.units[0].groups if self.by_matrix else 1

    @cached_property
    def is_flat(self) -> bool:
        """Whether `vector` is a plain slice of the flat vector."""
        plain = all(len(unit.slots) == 1 and not unit.has_custom_layout for unit in self.units)
        return self.num_groups == 1 and (not self.by_matrix or (plain and len(self.units) == 1))

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
        if self.by_matrix:
            part = joined([unit.matrix(piece) for unit, piece in by_unit(self.units, part)])
        return self.batched(part)

    def batched(self, part: Tensor) -> Tensor:
        """`[*replicas, size]` in the layout of the family as `[*batch, n]`."""
        return part.unflatten(-1, (self.num_groups, -1)) if self.num_groups > 1 else part

    def write_(self, flat: Tensor, values: Tensor) -> None:
        """The inverse of `vector`: put `[*batch, n]` into a flat vector."""
        part = self.segment(flat)
        values = values.flatten(start_dim=-2) if self.num_groups > 1 else values
        if not self.by_matrix:
            part.copy_(values)
            return
        for (unit, piece), (_, value) in zip(by_unit(self.units, part), by_unit(self.units, values), strict=True):
            unit.write_matrix_(piece, value)

    def total(self, values: Tensor) -> Tensor:
        """One number per replica from one per sub-block."""
        return values.sum(dim=-1) if self.num_groups > 1 else values


class MatrixOrder:
    """Vectors of all blocks side by side, each as its family takes it: one gather away from the flat vector.

    For small networks, where views and copies of every layer's slots cost more than the products.
    """

    def __init__(self, blocks: Sequence[Span]) -> None:
        self._blocks = list(blocks)
        places = torch.arange(sum(block.size for block in blocks))
        lead, size = len(blocks[0].units[0].replicas), len(places)
        flat = places.expand(*[1] * lead, size)
        self._gather = torch.cat([block.vector(flat).reshape(-1) for block in blocks])
        self._scatter = torch.empty_like(places)
        self._scatter[self._gather] = places
        self._sizes = [block.size for block in blocks]

    def vectors(self, flat: Tensor) -> list[Tensor]:
        """What `Span.vector` is of each block: `[*replicas, size]` as `[*batch, n]`."""
        return self.split(flat.index_select(-1, self._gather))

    def split(self, ordered: Tensor) -> list[Tensor]:
        """A vector in this order, such as noise, which has none, block by block."""
        parts = ordered.split_with_sizes(self._sizes, dim=-1)
        return [block.batched(part) for block, part in zip(self._blocks, parts, strict=True)]

    def joined(self, vectors: Sequence[Tensor]) -> Tensor:
        """The inverse of `vectors`."""
        flat = [
            vector.flatten(-2) if block.num_groups > 1 else vector
            for block, vector in zip(self._blocks, vectors, strict=True)
        ]
        return torch.cat(flat, dim=-1).index_select(-1, self._scatter)
