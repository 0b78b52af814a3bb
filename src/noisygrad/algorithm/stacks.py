"""Kronecker blocks of equal shape as one, for a GPU: a few large products of matrices in place of many small ones.

The factors of such blocks lie in one tensor each, and what an optimiser keeps for a block are views into it. The input
side, which a constant for the bias makes odd, is padded with zeros to a size that tensor cores like: on an H200 five
layers of 256×2305 take 58 µs so, 210 µs one by one. Matrices [W | b] are brought from the flat vector, and back to it,
by one gather each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from noisygrad.algorithm.block_factors import BlockFactors, cropped_to, member_of
from noisygrad.families.base import Prior, Statistics, TensorRecord
from noisygrad.posterior.blocks import Block

Record = TypeVar("Record", bound=TensorRecord)
DEVICES = {"cuda"}
"""Where stacking pays; a CPU has no launches to save, and would only copy."""
ALIGNMENT = 8
LARGE = 1024
TOGETHER = 1 << 23
"""Matrices of up to this many numbers are factorised together: it takes several times their memory."""


@dataclass
class Stack:
    """Blocks of equal shape, their factors as one, `[*replicas, blocks, ...]`, and their part of the padded vector."""

    blocks: list[Block]
    factors: BlockFactors
    prior: Prior
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

    @property
    def is_one_large(self) -> bool:
        """Whether it is one block with a large factor: Cholesky of several at once is made for smaller ones."""
        return len(self.blocks) == 1 and max(self.width, self.height) >= LARGE

    def part(self, padded: Tensor) -> Tensor:
        """Its part, `[*replicas, blocks, height · width]`."""
        mine: Tensor = padded[..., self.start : self.start + self.size].unflatten(-1, (len(self.blocks), -1))
        return mine

    def statistics(self, of_blocks: Mapping[str, Statistics]) -> Statistics:
        """Its blocks' statistics, as one; not to be written to."""
        return _together([of_blocks[block.name].unpacked() for block in self.blocks], len(self.blocks[0].batch))

    def split(self) -> list[Stack]:
        """Itself in parts that are small enough to be factorised together, as views."""
        numbers = math.prod(self.blocks[0].batch) * max(self.width, self.height) ** 2
        size = max(1, TOGETHER // numbers)
        lead, count = len(self.blocks[0].batch), len(self.blocks)
        return [self] if size >= count else [self._part(lead, k, min(k + size, count)) for k in range(0, count, size)]

    def _part(self, lead: int, first: int, stop: int) -> Stack:
        factors = BlockFactors.made_of([self.factors], lambda records: _narrow(records[0], lead, first, stop))
        start = self.start + first * self.height * self.width
        return Stack(self.blocks[first:stop], factors, _narrow(self.prior, lead, first, stop), start, self.width)

    def store_(self, new: BlockFactors) -> None:
        """Replace the factors by others, which are not padded."""
        theirs = new.records()
        for name, record in self.factors.records().items():
            cropped_to(record, theirs[name]).copy_(theirs[name])


class Stacks:
    """All Kronecker blocks without groups, by shape. Only the first `size` numbers of the padded vector are theirs."""

    def __init__(
        self,
        blocks: Sequence[Block],
        cached: Mapping[str, BlockFactors],
        priors: Mapping[str, Prior],
        flat_size: int,
        device: torch.device,
    ) -> None:
        alike: dict[object, list[Block]] = {}
        for block in blocks:
            if can_stack(block):
                alike.setdefault((block.group, _key(cached[block.name], priors[block.name])), []).append(block)
        self.stacks: list[Stack] = []
        self.members: dict[str, BlockFactors] = {}
        self.size = 0
        for some in alike.values():
            prior = _together([priors[block.name] for block in some], len(some[0].batch))
            stack = self._stacked(some, [cached[block.name] for block in some], prior)
            self.stacks.append(stack)
            self.size += stack.size
        self._gather, self._scatter = (index.to(device) for index in self._indices(flat_size))

    def tensors(self) -> list[Tensor]:
        """All factors; no copies."""
        return [tensor for stack in self.stacks for tensor in stack.factors.tensors().values()]

    def _stacked(self, blocks: list[Block], found: list[BlockFactors], prior: Prior) -> Stack:
        lead = len(blocks[0].batch)
        inputs = blocks[0].units[0].inputs
        width = -(-inputs // ALIGNMENT) * ALIGNMENT
        padded = blocks[0].family.stacking or {}
        factors = BlockFactors.made_of(found, lambda records: _stack(records, lead, width - inputs, padded))
        for index, (block, own) in enumerate(zip(blocks, found, strict=True)):
            self.members[block.name] = factors.member(own, lead, index)
        return Stack(blocks, factors, prior, self.size, width)

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
    """Whether the block is one matrix, of a family that can be stacked."""
    return block.family.stacking is not None and block.num_groups == 1


def _key(factors: BlockFactors, prior: Prior) -> object:
    """Equal for what can be stacked."""
    tensors = {**factors.stepper.tensors(), **{f"prior.{name}": tensor for name, tensor in prior.tensors().items()}}
    shapes = tuple((name, tensor.shape) for name, tensor in tensors.items())
    return shapes, str(prior.settings()), factors.sampler is None, factors.shared


def _narrow(record: Record, dim: int, first: int, stop: int) -> Record:
    return record.map(lambda tensor: tensor.narrow(dim, first, stop - first))


def _together(records: Sequence[Record], lead: int) -> Record:
    """Records of equal shape as one with another dimension, after the replicas'."""
    if len(records) == 1:
        return records[0].map(lambda tensor: tensor.unsqueeze(lead))
    all_tensors = [record.tensors() for record in records]
    return records[0].with_tensors(
        {name: torch.stack([tensors[name] for tensors in all_tensors], dim=lead) for name in all_tensors[0]}
    )


def _stack(records: Sequence[Record], lead: int, padding: int, inputs: Mapping[str, tuple[int, ...]]) -> Record:
    """The same with `padding` zeros after the inputs, which the dimensions `inputs` of each tensor count."""
    changes: dict[str, Tensor] = {}
    named = records[0].tensors()
    for name, first in named.items():
        kind, _, band = name.partition(".")
        dims = inputs.get(kind, ())  # of a band (`right.0`) all have the first, the last both
        if band and f"{kind}.{int(band) + 1}" in named:
            dims = dims[:1]
        shape = list(first.shape)
        for dim in dims:
            shape[dim] += padding
        shape.insert(lead, len(records))
        # A spectrum divides; whatever it divides in the padding is zero.
        changes[name] = (first.new_ones if name == "spectrum" else first.new_zeros)(shape)
    stacked = records[0].with_tensors(changes)
    for index, record in enumerate(records):
        member_of(stacked, record, lead, index).copy_(record)
    return stacked
