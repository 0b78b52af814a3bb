"""The moving average F̄ of the Fisher, block by block."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from noisygrad.families import packed
from noisygrad.families.base import Prior, Statistics
from noisygrad.kernels.factorisation import capturing
from noisygrad.kernels.tensors import Backup, average_
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
        self.updates = self.moments.new_zeros(1)
        """k, the same for all blocks: one that no example has used is measured, too, as 0."""
        self.bulky = self.moments.numel() > 2 * sum(block.size for block in self.blocks)
        """Whether there are many numbers for each weight, so that a copy of them is put where there is more room."""
        self._start, self._floor = start, floor

    def update_(self, measured: Mapping[str, Statistics], rate: float | Tensor, *, mask: Tensor | None = None) -> None:
        """F̄ ← F̄ + rate_k (F̂ − F̄), with rate_k = max(1/(k+1), rate), or `rate` where the start fades.

        k counts the updates. A mask of 0 leaves everything as it was.
        """
        if self._floor:
            for record in measured.values():
                record.add_floor_(self._floor)
        old = [tensor for b in self.blocks for tensor in self.statistics[b.name].averages().values()]
        new = [tensor for b in self.blocks for tensor in measured[b.name].averages().values()]
        self.updates += 1.0 if mask is None else mask
        average_(old, new, self._rate(rate, mask), mask)

    def _rate(self, rate: float | Tensor, mask: Tensor | None) -> Tensor | float:
        """rate_k; 0 where the mask is."""
        if self._start == "fading":
            return rate if mask is None else mask * rate
        if mask is None and not isinstance(rate, Tensor):  # only on a CPU, which waits for nothing
            return max(1.0 / (self.updates.item() + 1.0), rate)
        own = 1.0 / (self.updates + 1.0)
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

    @contextmanager
    def unchanged_on_failure(self) -> Iterator[None]:
        """If a factorisation fails inside, the moving averages and their counts are as they were before."""
        if capturing():  # nothing can fail where nothing is looked at
            yield
            return
        before = Backup([self.moments, self.updates], elsewhere=self.bulky)
        try:
            yield
        except BaseException:  # Ctrl-C too
            before.restore()
            raise


def _joined(records: dict[str, Statistics]) -> tuple[Tensor, dict[str, Statistics]]:
    """All moments in one flat tensor, and the same records as views into it."""
    flat = torch.cat([tensor.reshape(-1) for record in records.values() for tensor in record.tensors().values()])
    start = 0

    def view(tensor: Tensor) -> Tensor:
        nonlocal start
        start += tensor.numel()
        return flat[start - tensor.numel() : start].view(tensor.shape)

    return flat, {name: record.map(view) for name, record in records.items()}
