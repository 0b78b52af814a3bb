"""The moving average F̄ of the Fisher, block by block."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from noisygrad.families import packed
from noisygrad.families.base import Prior, Statistics
from noisygrad.kernels.tensors import Backup, average_into_
from noisygrad.posterior.blocks import Block
from noisygrad.posterior.structure import copied

FisherStart = Literal["forgotten", "fading"]
"""What becomes of the identity that F̄ starts from: forgotten as soon as there are statistics, or fading slowly."""


class FisherAverage:
    """F̄ of every block, all in one piece of memory, and how often it was measured.

    F̄ starts from the identity; `floor` is added to the diagonal of the Fisher as it is measured.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        priors: Mapping[str, Prior],
        *,
        start: FisherStart,
        floor: float,
    ) -> None:
        self.blocks = list(blocks)
        identities = {b.name: packed.pack_statistics(b.family.identity(priors[b.name])) for b in self.blocks}
        self.moments, self.statistics = _joined(identities)
        self._averages = [tensor for b in self.blocks for tensor in self.statistics[b.name].averages().values()]
        self.updates = self.moments.new_zeros(1)
        """k, the same for all blocks: one that no example has used is measured, too, as 0."""
        self.bulky = self.moments.numel() > 2 * sum(block.size for block in self.blocks)
        """Whether there are many numbers for each weight, so that a copy of them is put where there is more room."""
        self._start, self._floor = start, floor
        self.prepared: tuple[list[Tensor], list[Tensor]] | None = None
        """What `commit_` overwrites, and by what."""

    def update_(self, measured: Mapping[str, Statistics], rate: float | Tensor, *, mask: Tensor | None = None) -> None:
        """`prepare` and `commit_` in one."""
        self.updates += 1.0 if mask is None else mask  # first: a compiler was seen to count twice otherwise
        torch._foreach_copy_(self._averages, self._averaged(measured, self.updates, rate, mask))

    def prepare(self, measured: Mapping[str, Statistics], rate: float | Tensor, *, mask: Tensor | None = None) -> None:
        """F̄ + rate_k (F̂ − F̄), in the memory of F̂, with rate_k = max(1/(k+1), rate), or `rate` where the start fades.

        k counts the updates. A mask of 0 leaves everything as it was. F̄ itself changes by `commit_`.
        """
        updates = self.updates + (1.0 if mask is None else mask)
        new = self._averaged(measured, updates, rate, mask)
        self.prepared = [self.updates, *self._averages], [updates, *new]

    def _averaged(
        self, measured: Mapping[str, Statistics], updates: Tensor, rate: float | Tensor, mask: Tensor | None
    ) -> list[Tensor]:
        if self._floor:
            for record in measured.values():
                record.add_floor_(self._floor)
        new = [tensor for b in self.blocks for tensor in measured[b.name].averages().values()]
        average_into_(new, self._averages, self._rate(updates, rate, mask), mask)
        return new

    def commit_(self) -> None:
        """F̄ becomes what was prepared, if anything was."""
        if self.prepared is not None:
            torch._foreach_copy_(*self.prepared)
        self.prepared = None

    def backup(self) -> Backup:
        """What F̄ and its count are now."""
        return Backup([self.moments, self.updates], elsewhere=self.bulky)

    def _rate(self, updates: Tensor, rate: float | Tensor, mask: Tensor | None) -> Tensor | float:
        """rate_k; 0 where the mask is."""
        if self._start == "fading":
            return rate if mask is None else mask * rate
        if mask is None and not isinstance(rate, Tensor):  # only on a CPU, which waits for nothing
            return max(1.0 / (updates.item() + 1.0), rate)
        own = 1.0 / (updates + 1.0)
        own = own.maximum(rate) if isinstance(rate, Tensor) else own.clamp(min=rate)
        return own if mask is None else own * mask

    def snapshot(self) -> dict[str, Statistics]:
        """A copy, large moments as whole matrices, with every parameter row by row."""
        return {
            block.name: self.statistics[block.name]
            .unpacked()
            .map(lambda tensor, block=block: copied(tensor, block if block.follows_memory else None))
            for block in self.blocks
        }


def _joined(records: dict[str, Statistics]) -> tuple[Tensor, dict[str, Statistics]]:
    """All moments in one flat tensor, and the same records as views into it."""
    flat = torch.cat([tensor.reshape(-1) for record in records.values() for tensor in record.tensors().values()])
    start = 0

    def view(tensor: Tensor) -> Tensor:
        nonlocal start
        start += tensor.numel()
        return flat[start - tensor.numel() : start].view(tensor.shape)

    return flat, {name: record.map(view) for name, record in records.items()}
