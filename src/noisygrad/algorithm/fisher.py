"""The moving average F̄ of the Fisher, block by block."""

from collections.abc import Container, Iterator, Mapping, Sequence
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
    """F̄ of every block, all in one piece of memory, and how often each was measured.

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
        self.updates = self.moments.new_zeros(len(self.blocks))
        """k of each block."""
        self.bulky = self.moments.numel() > 2 * sum(block.size for block in self.blocks)
        """Whether there are many numbers for each weight, so that a copy of them is put where there is more room."""
        self._start, self._floor = start, floor
        self._measured = [0] * len(self.blocks)
        """The updates as the host knows them."""
        self._on_cpu = self.moments.device.type == "cpu"

    def update_(
        self,
        measured: Mapping[str, Statistics],
        rate: float | Tensor,
        *,
        mask: Tensor | None = None,
        examples: Mapping[str, float | Tensor] | None = None,
    ) -> None:
        """F̄ ← F̄ + rate_k (F̂ − F̄), with rate_k = max(1/(k+1), rate), or `rate` where the start fades.

        k counts the updates of a block, `count` on the host. A mask of 0 leaves everything as it was, and so does a
        tensor of 0 examples: a layer that no rank has used.
        """
        if self._floor:
            for record in measured.values():
                record.add_floor_(self._floor)
        apart = examples is not None and any(isinstance(share, Tensor) for share in examples.values())
        if len(measured) == len(self.blocks) and not apart and len(set(self._measured)) == 1:
            # All blocks are at the same k: one rate for all moments.
            old = [tensor for b in self.blocks for tensor in self.statistics[b.name].averages().values()]
            new = [tensor for b in self.blocks for tensor in measured[b.name].averages().values()]
            average_(old, new, self._rate(rate, mask), mask)
            return
        for index, block in enumerate(self.blocks):
            if block.name not in measured:
                continue
            found, use = measured[block.name], mask
            share = None if examples is None else examples[block.name]
            if isinstance(share, Tensor):
                use = (share > 0).to(share.dtype) if mask is None else mask * (share > 0)
            own_rate = self._rate(rate, use, index)
            if use is not None:
                found = found.map(lambda tensor, use=use: torch.where(use > 0, tensor, 0.0))
            self.statistics[block.name].update_(found, 1.0 - own_rate)

    def count(self, names: Container[str]) -> None:
        """Remember on the host that these blocks were updated; a replayed step does so only on the device."""
        pairs = zip(self._measured, self.blocks, strict=True)
        self._measured = [seen + (block.name in names) for seen, block in pairs]

    def _rate(self, rate: float | Tensor, mask: Tensor | None, index: int | None = None) -> Tensor | float:
        """rate_k, with k advanced, of one block or of all at once; 0 where the mask is."""
        counts = self.updates if index is None else self.updates[index]
        counts += 1.0 if mask is None else mask
        if self._start == "fading":
            return rate if mask is None else mask * rate
        count = self.updates[:1] if index is None else counts
        if mask is None and self._on_cpu and not isinstance(rate, Tensor):
            return max(1.0 / (count.item() + 1.0), rate)
        own = 1.0 / (count + 1.0)
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
        before, measured = Backup([self.moments, self.updates], elsewhere=self.bulky), self._measured
        try:
            yield
        except BaseException:  # Ctrl-C too
            before.restore()
            self._measured = measured
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
