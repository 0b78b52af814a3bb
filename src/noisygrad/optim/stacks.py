"""Kronecker blocks of equal shape as one, for a GPU: a few large products of matrices in place of many small ones.

The factors of such blocks lie in one tensor each, and what an optimiser keeps for a block are views into it. The input
side, which a constant for the bias makes odd, is padded with zeros to a size that tensor cores like: on an H200 five
layers of 256×2305 take 58 µs so, 210 µs one by one. Matrices [W | b] are brought from the flat vector, and back to it,
by one gather each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from noisygrad.families import kronecker
from noisygrad.families.base import Precision
from noisygrad.posterior.structure import Block

DEVICES = {"cuda"}
"""Where stacking pays; a CPU has no launches to save, and would only copy."""
ALIGNMENT = 8
_PADDED = {"right": (-2, -1), "inverse_right": (-2, -1), "right_basis": (-2, -1), "spectrum": (-1,)}
"""The dimensions of a Kronecker precision's tensors that count inputs."""


@dataclass
class BlockFactors:
    """What one block samples with and steps with."""

    sampler: Precision | None
    stepper: Precision

    @property
    def shared(self) -> bool:
        """Whether both are one."""
        return self.sampler is self.stepper


@dataclass
class Stack:
    """Blocks of equal shape, their factors as one, `[*replicas, blocks, ...]`, and their part of the padded vector."""

    blocks: list[Block]
    factors: BlockFactors
    start: int
    width: int
    """Of a padded matrix."""

    @property
    def height(self) -> int:
        """Of a matrix."""
        return self.blocks[0].units[0].outputs

    @property
    def size(self) -> int:
        """Of its part of the padded vector."""
        return len(self.blocks) * self.height * self.width

    def part(self, padded: Tensor) -> Tensor:
        """Its part, `[*replicas, blocks, height · width]`."""
        mine: Tensor = padded[..., self.start : self.start + self.size].unflatten(-1, (len(self.blocks), -1))
        return mine


class Stacks:
    """All Kronecker blocks without groups, by shape. Only the first `size` numbers of the padded vector are theirs."""

    def __init__(self, blocks: Sequence[Block], cached: Mapping[str, BlockFactors], flat_size: int) -> None:
        alike: dict[object, list[Block]] = {}
        for block in blocks:
            if can_stack(block):
                alike.setdefault(_key(cached[block.name]), []).append(block)
        self.stacks: list[Stack] = []
        self.members: dict[str, BlockFactors] = {}
        self.size = 0
        for some in alike.values():
            stack = self._stacked(some, [cached[block.name] for block in some])
            self.stacks.append(stack)
            self.size += stack.size
        device = next(iter(self.members.values())).stepper.logdet().device
        self._gather, self._scatter = (index.to(device) for index in self._indices(flat_size))

    def _stacked(self, blocks: list[Block], found: list[BlockFactors]) -> Stack:
        lead = len(blocks[0].batch)
        width = -(-blocks[0].units[0].inputs // ALIGNMENT) * ALIGNMENT
        stepper = _stack([factors.stepper for factors in found], lead, width)
        samplers = [factors.sampler for factors in found if factors.sampler is not None]
        sampler = stepper if found[0].shared else _stack(samplers, lead, width) if samplers else None
        for index, (block, factors) in enumerate(zip(blocks, found, strict=True)):
            view = _member(stepper, factors.stepper, lead, index)
            if factors.sampler is None or sampler is None:
                self.members[block.name] = BlockFactors(None, view)
            else:
                own = view if factors.shared else _member(sampler, factors.sampler, lead, index)
                self.members[block.name] = BlockFactors(own, view)
        return Stack(blocks, BlockFactors(sampler, stepper), self.size, width)

    def _indices(self, flat_size: int) -> tuple[Tensor, Tensor]:
        """Where each number of the padded vector comes from, and where each of the flat one is found in it.

        The padding comes from anywhere: the factors are zero there. So does what belongs to other blocks.
        """
        gather = torch.zeros(self.size, dtype=torch.int32)
        scatter = torch.zeros(flat_size, dtype=torch.int32)
        places = torch.arange(flat_size, dtype=torch.int32)
        for stack in self.stacks:
            mine = stack.part(gather).unflatten(-1, (stack.height, stack.width))
            where = stack.start + torch.arange(stack.size, dtype=torch.int32).view(mine.shape)
            for block, matrix, place in zip(stack.blocks, mine, where, strict=True):
                unit = block.units[0]
                matrix[:, : unit.inputs] = unit.matrix(block.segment(places)).view(unit.outputs, unit.inputs)
                unit.write_matrix_(block.segment(scatter), place[:, : unit.inputs].flatten())
        return gather, scatter

    def solve(self, gradient: Tensor) -> Tensor:
        """P⁻¹ g in the order of the flat vector; the numbers of other blocks have no meaning."""
        padded = gradient.index_select(-1, self._gather)
        return self._flat([stack.factors.stepper.solve(stack.part(padded)) for stack in self.stacks])

    def sample(self, noise: Tensor) -> Tensor:
        """P^(−1/2) ε of the padded noise, in the order of the flat vector as `solve` has it."""
        found = []
        for stack in self.stacks:
            part, sampler = stack.part(noise), stack.factors.sampler
            found.append(torch.zeros_like(part) if sampler is None else sampler.sample(part))
        return self._flat(found)

    def _flat(self, found: list[Tensor]) -> Tensor:
        padded = torch.cat([part.flatten(-2) for part in found], dim=-1)
        return padded.index_select(-1, self._scatter)


def can_stack(block: Block) -> bool:
    """Whether the block is one Kronecker product."""
    return block.family == "kronecker" and block.grouped == 1


def _key(factors: BlockFactors) -> object:
    """Equal for what can be stacked."""
    shapes = tuple((name, tensor.shape) for name, tensor in factors.stepper.tensors().items())
    return shapes, factors.sampler is None, factors.shared


def _stack(precisions: Sequence[Precision], lead: int, width: int) -> Precision:
    """Precisions of equal shape as one with another dimension, after the replicas'; the inputs padded to `width`."""
    changes: dict[str, Any] = {}
    for name, first in precisions[0].tensors().items():
        shape = list(first.shape)
        for dim in _PADDED.get(name, ()):
            shape[dim] = width
        shape.insert(lead, len(precisions))
        # A spectrum divides; whatever it divides in the padding is zero.
        changes[name] = (first.new_ones if name == "spectrum" else first.new_zeros)(shape)
    stacked = dataclasses.replace(precisions[0], **changes)
    for index, precision in enumerate(precisions):
        _member(stacked, precision, lead, index).copy_(precision)
    return stacked


def _member(stacked: Precision, like: Precision, lead: int, index: int) -> Precision:
    """One of them as views into the stack."""
    assert isinstance(stacked, kronecker.Precision)
    views: dict[str, Any] = {}
    for name, tensor in stacked.tensors().items():
        view = tensor.select(lead, index)
        for dim, size in enumerate(like.tensors()[name].shape):
            view = view.narrow(dim, 0, size)
        views[name] = view
    return dataclasses.replace(stacked, **views)
