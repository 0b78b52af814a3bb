"""The covariance side of a step: statistics, their moving average, and the factors made of it.

Two factorisations are kept for each block: P with the intrinsic damping alone, for sampling, and P with γ_ex added, for
the step. They are one where γ_ex = 0. Refreshing writes into the tensors there are, so a captured graph sees it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from noisygrad.distributed import Ranks
from noisygrad.families import diagonal, kronecker, packed
from noisygrad.families.base import Prior, Statistics, TensorRecord, has_constant_rows
from noisygrad.kernels.factorisation import FactorisationError, capturing, deferred
from noisygrad.kernels.precision import full_precision
from noisygrad.optim import stacks
from noisygrad.optim.backup import Backup
from noisygrad.optim.options import Options
from noisygrad.optim.stacks import BlockFactors, Stack, Stacks, can_stack
from noisygrad.posterior.blocks import Block
from noisygrad.posterior.faults import naming_layers
from noisygrad.posterior.structure import Structure, copied


class Factors:
    """F̄ of every block, with its prior Γ in units of the Fisher, and P = F̄ + Γ factorised."""

    def __init__(
        self,
        structure: Structure,
        priors: Mapping[str, Prior],
        options: Options,
        ranks: Ranks,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.blocks = structure.blocks
        self.priors = priors
        self._moments, self.statistics = _joined({b.name: b.identity(dtype, device) for b in self.blocks})
        self.updates = torch.zeros(len(self.blocks), dtype=dtype, device=device)
        self.generation = 0
        """Counts how often a block's factors were replaced by others in another place of memory."""
        self._seen = [0] * len(self.blocks)
        self.cached: dict[str, BlockFactors] = {}
        self._stacks: Stacks | None = None
        self._stacked_at = 0
        self.noisy = any(block.noise for block in self.blocks)
        self._size = sum(block.size for block in self.blocks)
        self._options = options
        self._ranks = ranks
        self._owners = ranks.share_out([_cost(block) for block in self.blocks])
        self._device = device
        self._bulky = self._moments.numel() > 2 * self._size
        """Whether there are many numbers for each weight, so that a copy of them is put where there is more room."""
        self._diagonal = self._diagonal_prior()

    def _diagonal_prior(self) -> Tensor | float | None:
        """All of Γ as one flat vector, or as one number, where no block's prior is more than a diagonal."""
        only = self.priors[self.blocks[0].name] if len(self.blocks) == 1 else None
        if isinstance(only, diagonal.Prior) and has_constant_rows(only.precision) and not self.blocks[0].batch:
            return only.precision[0].item()
        total = None
        for block in self.blocks:
            prior = self.priors[block.name]
            if not isinstance(prior, diagonal.Prior) and not getattr(prior, "diagonal", False):
                return None
            ones = torch.ones(
                *block.batch, block.size // block.num_groups, dtype=self.updates.dtype, device=self._device
            )
            if total is None:
                total = ones.new_zeros(*block.units[0].replicas, self._size)
            block.write_(total, prior.times(ones))
        assert total is not None
        least, most = total.aminmax()
        return least.item() if bool(least == most) else total

    def add_prior_gradient_(self, gradient: Tensor, weights: Tensor, centre: Tensor | None) -> Tensor:
        """gradient + Γ (w − m₀), in place; no `centre` means m₀ = 0."""
        difference = weights if centre is None else weights - centre
        if isinstance(self._diagonal, float):
            return gradient.add_(difference, alpha=self._diagonal)
        if self._diagonal is not None:
            return gradient.addcmul_(self._diagonal, difference)
        for block in self.blocks:
            pull = torch.zeros_like(gradient)
            block.write_(pull, self.priors[block.name].times(block.vector(difference)))
            gradient.add_(pull)
        return gradient

    def update(
        self,
        means: Mapping[str, Statistics],
        examples: Mapping[str, float | Tensor],
        decay: float | Tensor,
        mask: Tensor | None,
    ) -> None:
        """F̄ ← decay_k F̄ + (1 − decay_k) · new, with decay_k = min(1 − 1/(k+1), decay), or `decay` without forgetting.

        k counts the updates of a block. A mask of 0 leaves everything as it was, and so does a tensor of 0 examples:
        a layer that no rank has used.
        """
        if floor := self._options.fisher_floor:
            for mean in means.values():
                mean.add_floor_(floor)
        together = len(means) == len(self.blocks) and not any(isinstance(share, Tensor) for share in examples.values())
        if together and len(set(self._seen)) == 1:
            # All blocks are at the same k: one rate for all moments.
            self._update_all([tensor for b in self.blocks for tensor in means[b.name].tensors().values()], decay, mask)
        else:
            for index, block in enumerate(self.blocks):
                if block.name in means:
                    self._update_block(index, means[block.name], examples[block.name], decay, mask)
        self.count(means)

    def _update_all(self, new: list[Tensor], decay: float | Tensor, mask: Tensor | None) -> None:
        rate = self._rate(decay, mask)
        if mask is not None:
            masked = mask <= 0
            for tensor in new:
                tensor.masked_fill_(masked, 0.0)
        old = [tensor for block in self.blocks for tensor in self.statistics[block.name].tensors().values()]
        if self._device.type == "cpu":
            for tensor, other in zip(old, new, strict=True):
                tensor.lerp_(other, rate)
        else:
            _average_together(old, new, rate)

    def count(self, names: Container[str]) -> None:
        """Remember on the host that these blocks were updated; a replayed step does so only on the device."""
        self._seen = [seen + (block.name in names) for seen, block in zip(self._seen, self.blocks, strict=True)]

    def _rate(self, decay: float | Tensor, mask: Tensor | None, index: int | None = None) -> Tensor | float:
        """1 − decay_k, with k advanced, of one block or of all at once; 0 where the mask is."""
        counts = self.updates if index is None else self.updates[index]
        counts += 1.0 if mask is None else mask
        count = self.updates[0] if index is None else counts
        forget = self._options.fisher_start == "forgotten"
        if mask is None and self._device.type == "cpu" and not isinstance(decay, Tensor):
            return max(1.0 / (count.item() + 1.0), 1.0 - decay) if forget else 1.0 - decay
        rate = (1.0 / (count + 1.0)).clamp(min=1.0 - decay) if forget else torch.zeros_like(count) + (1.0 - decay)
        return rate if mask is None else rate * mask

    def _update_block(
        self, index: int, mean: Statistics, examples: float | Tensor, decay: float | Tensor, mask: Tensor | None
    ) -> None:
        use = mask
        if isinstance(examples, Tensor):
            use = (examples > 0).to(examples.dtype) if mask is None else mask * (examples > 0)
        rate = self._rate(decay, use, index)
        clean = mean if use is None else mean.map(lambda tensor: torch.where(use > 0, tensor, 0.0))
        self.statistics[self.blocks[index].name].update_(clean, 1.0 - rate)

    def refresh(self, dampings: Mapping[int, float]) -> None:
        """Factorise every block anew; the ranks share the work.

        Raises FactorisationError with the layer's name, and then all factors, on all ranks, are what they were.
        """

        def factorise() -> None:
            done = self._refresh_stacks(dampings)
            for block, owner in zip(self.blocks, self._owners, strict=True):
                mine = owner == self._ranks.rank or not self._fits(self.cached.get(block.name), block, dampings)
                if mine and block.name not in done:
                    self._store(block, self._factorise_block(block, dampings[block.group]))

        with full_precision(), self._same_factors_on_failure():
            self._ranks.run_on_all(factorise, self._device)
        if self._ranks.active:
            for block, owner in zip(self.blocks, self._owners, strict=True):
                self._ranks.broadcast(self.tensors(block).values(), owner)
        if self.generation != self._stacked_at and self._device.type in stacks.DEVICES:
            self._stack()

    @staticmethod
    def _fits(factors: BlockFactors | None, block: Block, dampings: Mapping[int, float]) -> bool:
        """Whether there are factors, and of the kind that the damping asks for: one for both uses, or one for each."""
        return factors is not None and factors.shared == (block.noise and dampings[block.group] == 0.0)

    def _refresh_stacks(self, dampings: Mapping[int, float]) -> set[str]:
        """Blocks of equal shape together, some at a time; returns those that went well, by name.

        The others must be made one by one: what is stored for them now is not to be used. A GPU is waited for once.
        """
        whole = [] if self._stacks is None or self._ranks.active else self._stacks.stacks
        tried: list[Stack] = []
        failed: list[Tensor] = []
        for stack in (part for each in whole for part in each.split()):
            first = stack.blocks[0]
            if not self._fits(stack.factors, first, dampings):
                continue
            statistics = stack.statistics(self.statistics)
            try:
                with deferred() as failures:
                    new = self._factorise(
                        statistics, stack.prior, dampings[first.group], first.noise, twice=not stack.is_one_large
                    )
            except FactorisationError:
                continue
            stack.store_(new)
            del statistics, new  # before the next are made
            tried.append(stack)
            nothing = torch.zeros((), dtype=torch.bool, device=self._device)
            failed.append(torch.stack(failures).any() if failures else nothing)
        answers = torch.stack(failed).tolist() if failed else []
        return {block.name for stack, bad in zip(tried, answers, strict=True) if not bad for block in stack.blocks}

    def _stack(self) -> None:
        """Bring the factors of equal shape together; what is kept of each block becomes a view."""
        self._stacks = None
        self.generation += 1
        self._stacked_at = self.generation
        if any(map(can_stack, self.blocks)):
            self._stacks = Stacks(self.blocks, self.cached, self.priors, self._size, self._device)
            self.cached |= self._stacks.members

    @property
    def noise_size(self) -> int:
        """How many normal numbers a draw takes (per replica)."""
        stacked = 0 if self._stacks is None else self._stacks.size
        return stacked + sum(block.size for block in self._apart)

    @property
    def _apart(self) -> list[Block]:
        """The blocks that are in no stack."""
        return [block for block in self.blocks if self._stacks is None or not can_stack(block)]

    @contextmanager
    def unchanged_on_failure(self) -> Iterator[None]:
        """If a factorisation fails inside, the moving averages and their counts are as they were before."""
        if capturing():  # nothing can fail where nothing is looked at
            yield
            return
        before, seen = Backup([self._moments, self.updates], elsewhere=self._bulky), self._seen
        try:
            yield
        except BaseException:  # Ctrl-C too
            before.restore()
            self._seen = seen
            raise

    @contextmanager
    def _same_factors_on_failure(self) -> Iterator[None]:
        """If a factorisation fails inside, all factors are what they were."""
        cached = dict(self.cached)
        if capturing() or not cached:
            yield
            return
        apart = [tensor for block in self._apart for tensor in self.tensors(block).values()]
        stacked = [] if self._stacks is None else self._stacks.tensors()
        before = Backup([*stacked, *apart], elsewhere=self._bulky)
        try:
            yield
        except BaseException:  # Ctrl-C too
            before.restore()
            self.cached = cached
            raise

    def _factorise(
        self, statistics: Statistics, prior: Prior, damping: float, noise: bool, *, twice: bool = False
    ) -> BlockFactors:
        """Those of a block, or of a stack; `twice` makes what draws and what steps need together, in more memory."""
        mode = self._options.damping_mode
        if noise and damping == 0.0:
            both = packed.factors(statistics.factorise(prior, 0.0, mode).drop_terms().with_inverses())
            return BlockFactors(both, both)
        if twice and noise and mode == "factored":
            assert isinstance(statistics, kronecker.Statistics)
            assert isinstance(prior, kronecker.Prior)
            draws, steps = statistics.factorise_twice(prior, damping)
            return BlockFactors(packed.factors(draws.sampler()), packed.factors(steps.solver()))
        stepper = packed.factors(statistics.factorise(prior, damping, mode).drop_terms().solver())
        sampler = packed.factors(statistics.factorise(prior, 0.0, mode).sampler()) if noise else None
        return BlockFactors(sampler, stepper)

    def _factorise_block(self, block: Block, damping: float) -> BlockFactors:
        with naming_layers(block):
            return self._factorise(
                self.statistics[block.name].unpacked(), self.priors[block.name], damping, block.noise
            )

    def _store(self, block: Block, new: BlockFactors) -> None:
        old = self.cached.get(block.name)
        if old is None or old.shared != new.shared:
            self.cached[block.name] = new
            self.generation += 1
            return
        old.stepper.copy_(new.stepper)
        if old.sampler is not None and new.sampler is not None and not old.shared:
            old.sampler.copy_(new.sampler)

    def snapshot(self) -> dict[str, Statistics]:
        """A copy of the statistics, with every parameter row by row."""
        return {
            block.name: self.statistics[block.name]
            .unpacked()
            .map(lambda tensor, block=block: copied(tensor, block if block.family == "diagonal" else None))
            for block in self.blocks
        }

    def records(self, block: Block) -> dict[str, TensorRecord]:
        """The cached factors of a block by name."""
        cached = self.cached[block.name]
        found: dict[str, TensorRecord] = {"stepper": cached.stepper}
        if cached.sampler is not None and not cached.shared:
            found["sampler"] = cached.sampler
        return found

    def tensors(self, block: Block) -> dict[str, Tensor]:
        """The same as tensors, as they lie."""
        return {f"{part}.{n}": tensor for part, r in self.records(block).items() for n, tensor in r.tensors().items()}

    def perturb(self, mean: Tensor, noise: Tensor, scale: float, out: Tensor) -> None:
        """mean + scale · P^(−1/2) ε, into `out`."""
        if (only := self._only) is not None and isinstance(only.sampler, diagonal.Precision | diagonal.Root):
            torch.addcmul(mean, noise, only.sampler.inverse_root, value=scale, out=out)
        else:
            torch.add(mean, self.sample(noise), alpha=scale, out=out)

    @torch.no_grad()
    def sample(self, noise: Tensor) -> Tensor:
        """P^(−1/2) ε of every block, from `noise_size` numbers; 0 where there is no noise.

        Noise has no order, so it is taken as it lies: stacked blocks first.
        """
        if (only := self._only) is not None and only.sampler is not None:
            return only.sampler.sample(noise)
        start = 0 if self._stacks is None else self._stacks.size
        spread = noise.new_empty(*noise.shape[:-1], self._size) if self._stacks is None else self._stacks.sample(noise)
        for block in self._apart:
            sampler = self.cached[block.name].sampler
            if sampler is None:
                block.segment(spread).zero_()
            else:
                block.write_(spread, sampler.sample(block.batched(noise[..., start : start + block.size])))
            start += block.size
        return spread

    def solve(self, gradient: Tensor) -> Tensor:
        """P⁻¹ g of every block, with the damping of the step."""
        if (only := self._only) is not None:
            return only.stepper.solve(gradient)
        solved = torch.empty_like(gradient) if self._stacks is None else self._stacks.solve(gradient)
        for block in self._apart:
            block.write_(solved, self.cached[block.name].stepper.solve(block.vector(gradient)))
        return solved

    @property
    def _only(self) -> BlockFactors | None:
        """The factors of the one block there is, if it takes the flat vector as it lies."""
        if len(self.blocks) > 1 or self.blocks[0].family not in {"diagonal", "full"}:
            return None
        return self.cached[self.blocks[0].name]


def _average_together(old: list[Tensor], new: list[Tensor], rate: Tensor | float) -> None:
    """Move each tensor towards another, by a few launches on a GPU and in the memory of the others.

    The moments of a deep network are as large as its activations, so none are made anew.
    """
    torch._foreach_sub_(new, old)
    torch._foreach_mul_(new, rate)
    torch._foreach_add_(old, new)


def _joined(records: dict[str, Statistics]) -> tuple[Tensor, dict[str, Statistics]]:
    """All moments in one flat tensor, and the same records as views into it."""
    flat = torch.cat([tensor.reshape(-1) for record in records.values() for tensor in record.tensors().values()])
    start = 0

    def view(tensor: Tensor) -> Tensor:
        nonlocal start
        start += tensor.numel()
        return flat[start - tensor.numel() : start].view(tensor.shape)

    return flat, {name: record.map(view) for name, record in records.items()}


def _cost(block: Block) -> float:
    """Work of a factorisation, up to a constant: the cubes of its matrices' sizes."""
    if block.family == "diagonal":
        return float(block.size)
    if block.family == "full":
        return float(block.size) ** 3
    return float(sum(unit.groups * (unit.outputs**3 + unit.inputs**3) for unit in block.units))
