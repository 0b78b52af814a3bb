"""The moving average F̄ of the Fisher, block by block: of measurements alone."""

from collections.abc import Container, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from noisygrad.families import packed
from noisygrad.families.base import Prior, Statistics
from noisygrad.kernels.tensors import Backup, average_into_
from noisygrad.posterior.blocks import Block
from noisygrad.posterior.structure import copied


class FisherAverage:
    """F̄ of every block, all in one piece of memory, and how often it was measured.

    F̄ is 0 before the first measurement; `floor` is added to the diagonal of the Fisher as it is measured.
    """

    def __init__(self, blocks: Sequence[Block], priors: Mapping[str, Prior], *, floor: float) -> None:
        self.blocks = list(blocks)
        empty = {b.name: b.family.identity(priors[b.name]).map_averages(torch.zeros_like) for b in self.blocks}
        self.moments, self.statistics = _joined({name: packed.pack_statistics(s) for name, s in empty.items()})
        self._averages = [tensor for b in self.blocks for tensor in self.statistics[b.name].averages().values()]
        self._unused = {block.name for block in self.blocks}
        """The blocks of which no example is known to have used all layers yet."""
        self.updates = self.moments.new_zeros(1)
        """k, the same for all blocks: one that no example has used is measured, too, as 0."""
        self.seen = self.moments.new_zeros(1)
        """What the weights of k measurements sum to in a moving average that starts from 0; F̄ is divided by it."""
        self.bulky = self.moments.numel() > 2 * sum(block.size for block in self.blocks)
        """Whether there are many numbers for each weight, so that a copy of them is put where there is more room."""
        self._floor = floor
        self.prepared: tuple[list[Tensor], list[Tensor]] | None = None
        """What `commit_` overwrites, and by what."""

    def update_(self, measured: Mapping[str, Statistics], rate: float | Tensor, *, mask: Tensor | None = None) -> None:
        """`prepare` and `commit_` in one."""
        old, new = self._next(measured, rate, mask)
        self._unused = set()
        torch._foreach_copy_(old, new)

    def prepare(
        self,
        measured: Mapping[str, Statistics],
        rate: float | Tensor,
        *,
        mask: Tensor | None = None,
        used: Container[str] | None = None,
    ) -> None:
        """F̄ + rate_k (F̂ − F̄), in the memory of F̂, with rate_k = rate / (1 − Π (1 − rate)), Adam's bias correction.

        k counts the measurements: the first one replaces what was there, and later ones count alike as long as
        k · rate is small. A mask of 0 leaves everything as it was. F̄ itself changes by `commit_`. `used` are the layers
        that examples have used, by name; None for all.
        """
        self.prepared = self._next(measured, rate, mask)
        self._unused -= {b.name for b in self.blocks if used is None or all(unit.name in used for unit in b.units)}

    def _next(
        self, measured: Mapping[str, Statistics], rate: float | Tensor, mask: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        one = 1.0 if mask is None else mask
        updates = self.updates + one
        seen = self.seen + (1.0 - self.seen) * rate * one
        if self._floor:
            for record in measured.values():
                record.add_floor_(self._floor)
        new = [tensor for b in self.blocks for tensor in measured[b.name].averages().values()]
        first = [(old, tensor, tensor.clone()) for old, tensor in self._inputs_of_unused(measured)]
        # A mask comes with a device that is not waited for.
        own = rate * one / seen.clamp_min(torch.finfo(seen.dtype).tiny)
        average_into_(new, self._averages, own if mask is not None or isinstance(rate, Tensor) else own.item(), mask)
        for old, averaged, as_measured in first:
            known = old.any() if mask is None else old.any() | (mask <= 0)
            averaged.copy_(torch.where(known, averaged, as_measured))
        # The counts last: compiled code would work out the weight above once more, from what was written already.
        return [*self._averages, self.updates, self.seen], [*new, updates, seen]

    def _inputs_of_unused(self, measured: Mapping[str, Statistics]) -> Iterator[tuple[Tensor, Tensor]]:
        """Moments of inputs that are a mean over the examples that used a layer, of which there may be none yet."""
        for name in self._unused:
            old, new = self.statistics[name].averages(), measured[name].averages()
            yield from ((old[key], new[key]) for key in old if key.startswith("inputs"))

    def commit_(self) -> None:
        """F̄ becomes what was prepared, if anything was."""
        if self.prepared is not None:
            torch._foreach_copy_(*self.prepared)
        self.prepared = None

    def backup(self) -> Backup:
        """What F̄ and its counts are now."""
        return Backup([self.moments, self.updates, self.seen], elsewhere=self.bulky)

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
