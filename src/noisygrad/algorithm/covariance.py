"""The covariance side of a step: P = F̄ + Γ of every block, factorised for draws and for steps.

All in place, so that a captured graph sees it, and batched over replicas. A refresh either succeeds or leaves all
factors as they were; `refresh_where_finite_` decides so for each replica by itself, without a look at the host.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from noisygrad.algorithm import stacks
from noisygrad.algorithm.block_factors import BlockFactors
from noisygrad.algorithm.fisher import FisherAverage
from noisygrad.algorithm.stacks import Stack, Stacks, can_stack
from noisygrad.algorithm.start import Safeguard, identity_share
from noisygrad.distributed import Ranks
from noisygrad.families import packed
from noisygrad.families.base import DampingMode, Precision, Prior, Statistics
from noisygrad.families.units import MatrixOrder
from noisygrad.kernels.factorisation import FactorisationError, capturing, deferred, repairs, unchecked
from noisygrad.kernels.switches import full_precision
from noisygrad.kernels.tensors import Backup
from noisygrad.posterior.blocks import Block
from noisygrad.posterior.faults import named_error, warn_repaired

LARGEST_BOUND = 0.3
"""What bounds the noise of networks that are large for their data, in units of the Fisher of an example."""
SMALL = 1 << 15
"""Up to this many weights a gather of all of them is faster than views and copies of every layer."""


class Covariance:
    """F̄ of every block, its prior Γ in units of the Fisher, and P = F̄ + Γ factorised.

    Args:
        priors: Γ of each block, by name.
        safeguard: How the identity fades that steadies the first draws and steps.
        floor: Added to the diagonal of the Fisher as it is measured.
        most_determined: How many weights the data may determine, for each part of a target, before noise is bounded:
            draws cost half as many nats, over all data. None for no bound.
        ranks: The processes that share the work of a refresh.
        lean: Whether to keep only what draws and steps need, in bands where that saves memory; else whole precisions,
            which know their log-determinant.
        repeated: Whether several steps use the same factors, so that preparing them pays.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        priors: Mapping[str, Prior],
        *,
        damping_mode: DampingMode,
        safeguard: Safeguard = "brief",
        floor: float = 0.0,
        most_determined: float | None = None,
        ranks: Ranks | None = None,
        lean: bool = True,
        repeated: bool = True,
    ) -> None:
        self.blocks = list(blocks)
        self.priors = priors
        self.fisher = FisherAverage(self.blocks, priors, floor=floor)
        self.statistics = self.fisher.statistics
        self._safeguard, self._most_determined = safeguard, most_determined
        self.bound = self.fisher.moments.new_full((), 0.0 if most_determined is None else LARGEST_BOUND)
        """A floor under the Fisher, as draws, steps and the posterior have it, where noise would cost too much."""
        self.parts: float | Tensor = 1.0
        """How many parts of its targets, such as positions, count of an example."""
        self.epochs: float | Tensor = 0.0
        """How often the data were seen since the last refresh."""
        self._determined = self.fisher.moments.new_zeros(())
        self.factors: dict[str, BlockFactors] = {}
        self.generation = 0
        """Counts how often a block's factors were replaced by others in another place of memory."""
        self.noisy = any(block.noise for block in self.blocks)
        self._stacks: Stacks | None = None
        self._stacked_at = 0
        self._size = sum(block.size for block in self.blocks)
        self._mode = damping_mode
        self._lean, self._repeated = lean, repeated
        self._ranks = Ranks.alone() if ranks is None else ranks
        self._owners = self._ranks.share_out([block.family.cost(block.units) for block in self.blocks])
        self._device = self.fisher.moments.device
        self._told: set[str] = set()
        self._diagonal = self._diagonal_prior()
        least = self._diagonal if isinstance(self._diagonal, float) else 0.0
        self._least_bound = max(1e-3 * least, 1e-9)
        small = self._size <= SMALL and self._device.type not in stacks.DEVICES
        self._order = MatrixOrder(self.blocks) if small and lean else None

    # ---------------------------------------------------------------- the prior

    def _diagonal_prior(self) -> Tensor | float | None:
        """All of Γ as one flat vector, or as one number, where weights are independent under it."""
        if not all(self.priors[block.name].is_diagonal for block in self.blocks):
            return None
        first = self.blocks[0]
        total = self.fisher.moments.new_zeros(*first.units[0].replicas, self._size)
        for block in self.blocks:
            ones = total.new_ones(*block.batch, block.size // block.num_groups)
            block.write_(total, self.priors[block.name].times(ones))
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

    # ---------------------------------------------------------------- the factors

    def refresh_(
        self,
        dampings: Mapping[int, float],
        between: Callable[[], object] = lambda: None,
        back: Callable[[], None] | None = None,
    ) -> None:
        """Factorise every block anew, with γ_ex by param group; the ranks share the work.

        `between` is called between the blocks, and may raise. Raises FactorisationError with the layer's name, and then
        all factors, on all ranks, are what they were: `back` is their `way_back`, if the caller has it already.
        """
        back = self.way_back() if back is None else back
        self._determined.zero_()

        def factorise() -> None:
            done = self._refresh_stacks(dampings)
            for block, owner in zip(self.blocks, self._owners, strict=True):
                between()
                mine = owner == self._ranks.rank or not self._fits(self.factors.get(block.name), block, dampings)
                if mine and block.name not in done:
                    self._store(block, self._factorise(block, dampings[block.group]))

        try:
            with full_precision():
                if self._ranks.active:
                    self._ranks.run_on_all(factorise, self._device)
                else:
                    factorise()
        except BaseException:  # Ctrl-C too
            back()
            raise
        if self._ranks.active:
            for block, owner in zip(self.blocks, self._owners, strict=True):
                basis = self.statistics[block.name].basis_tensors()
                self._ranks.broadcast([*basis.values(), *self.factors[block.name].tensors().values()], owner)
        self._adjust_bound_()
        if self.generation != self._stacked_at and self._device.type in stacks.DEVICES and self._lean:
            self._stack()

    def refresh_where_finite_(self, dampings: Mapping[int, float]) -> Tensor:
        """Factorise anew; a replica whose factors come out not finite keeps those it had.

        Returns how many factorisations (for draws, for steps) of each replica were refused.
        """
        with unchecked(self.traceable):
            try:
                new = {b.name: self._factorise(b, dampings[b.group]) for b in self.blocks}
            except FactorisationError:
                return self._refresh_replica_by_replica_(dampings)
        return self._keep_finite_(new)

    @property
    def traceable(self) -> bool:
        """Whether a refresh can be compiled and captured."""
        return all(self._mode in block.family.traceable_modes for block in self.blocks)

    def _keep_finite_(self, new: Mapping[str, BlockFactors]) -> Tensor:
        """Where a Cholesky factorisation fails, a pivot is not positive, and the log-determinant is not finite."""
        refused = torch.zeros_like(self._logdets(new, "stepper"))
        for part in next(iter(new.values())).records():
            finite = self._logdets(new, part).isfinite()
            refused.add_((~finite).to(refused.dtype))
            for name, factors in self.factors.items():
                theirs = new[name].records()[part].tensors()
                for key, tensor in factors.records()[part].tensors().items():
                    keep = finite.reshape(-1, *[1] * (tensor.dim() - 1))
                    torch.where(keep, theirs[key], tensor, out=tensor)
        return refused

    def _logdets(self, factors: Mapping[str, BlockFactors], part: str) -> Tensor:
        found = []
        for block in self.blocks:
            record = factors[block.name].records()[part]
            assert isinstance(record, Precision)
            found.append(block.total(record.logdet()))
        return torch.stack(found).sum(0)

    def _refresh_replica_by_replica_(self, dampings: Mapping[int, float]) -> Tensor:
        """Because one of them cannot be factorised."""
        refused = torch.zeros_like(self._logdets(self.factors, "stepper"))
        for replica in range(len(refused)):
            one = slice(replica, replica + 1)
            try:
                new = {}
                for block in self.blocks:
                    statistics = self.statistics[block.name].map(lambda t, one=one: t[one])
                    prior = self.priors[block.name].map(lambda t, one=one: t[one])
                    statistics.refresh_basis_(prior)
                    new[block.name] = self._of(statistics, prior, block, dampings[block.group])
            except FactorisationError:
                refused[replica] += len(next(iter(self.factors.values())).records())
                continue
            for name, factors in self.factors.items():
                theirs = new[name].tensors()
                for key, tensor in factors.tensors().items():
                    tensor[one].copy_(theirs[key])
        return refused

    @staticmethod
    def _fits(factors: BlockFactors | None, block: Block, dampings: Mapping[int, float]) -> bool:
        """Whether there are factors, and of the kind that the damping asks for: one for both uses, or one for each."""
        return factors is not None and factors.shared == (block.noise and dampings[block.group] == 0.0)

    def _factorise(self, block: Block, damping: float) -> BlockFactors:
        """What there is to replace a block's factors, after its basis, if it has one, was rebuilt in place."""
        statistics, prior = self.statistics[block.name], self.priors[block.name]
        try:
            with repairs() as found:
                statistics.refresh_basis_(prior)
                new = self._of(statistics.unpacked(), prior, block, damping)
        except FactorisationError as error:
            raise named_error(error, block.units) from error
        if found:
            warn_repaired(found, block.units, self._told)
        return new

    def _of(
        self, statistics: Statistics, prior: Prior, block: Block, damping: float, *, together: bool = False
    ) -> BlockFactors:
        """P = F̄ + Γ for draws and P + γ_ex I for steps; `together` makes both at once, in more memory."""
        measured = statistics
        statistics = statistics.with_identity(self.identity_share)
        if self._most_determined is not None:
            statistics.add_floor_(self.bound)
        if block.noise and damping == 0.0:
            precision = statistics.factorise(prior, 0.0, self._mode).drop_terms()
            precision = precision.with_inverses() if self._repeated else precision
            self._count_determined(measured, precision)
            both = packed.pack_factors(precision) if self._lean else precision
            return BlockFactors(both, both)
        if together and block.noise:
            draws, steps = statistics.factorise_pair(prior, damping, self._mode)
            self._count_determined(measured, draws)
            return BlockFactors(packed.pack_factors(draws.sampler()), packed.pack_factors(steps.solver()))
        steps = statistics.factorise(prior, damping, self._mode).drop_terms()
        whole = steps.with_inverses() if self._repeated and not self._lean else steps
        stepper = packed.pack_factors(steps.solver()) if self._lean else whole
        del whole, steps  # before the other is made
        if not block.noise:
            return BlockFactors(None, stepper)
        draws = statistics.factorise(prior, 0.0, self._mode)
        self._count_determined(measured, draws)
        return BlockFactors(packed.pack_factors(draws.sampler()) if self._lean else draws.drop_terms(), stepper)

    @property
    def identity_share(self) -> Tensor:
        """Of what factors are made of now; see `algorithm.start`."""
        return identity_share(self._safeguard, self.fisher.updates, self.fisher.seen).reshape(())

    def _count_determined(self, measured: Statistics, precision: Precision) -> None:
        if self._most_determined is not None:
            self._determined += measured.determined(precision).sum()

    def _adjust_bound_(self) -> None:
        """Down to where draws cost as much as they may, at most to half in an epoch, and back up."""
        if self._most_determined is None:
            return
        if self._ranks.active:
            self._ranks.sum_([self._determined])
        least = 0.5 ** torch.as_tensor(self.epochs, dtype=self.bound.dtype, device=self.bound.device)
        change = (self._determined / (self._most_determined * self.parts)).clamp(max=10.0).maximum(least.reshape(()))
        changed = self.bound * torch.where(self.fisher.updates > 0, change, 1.0).reshape(())
        self.bound.copy_(changed.clamp(self._least_bound, LARGEST_BOUND))

    def _store(self, block: Block, new: BlockFactors) -> None:
        old = self.factors.get(block.name)
        if old is None or old.shared != new.shared:
            self.factors[block.name] = new
            self.generation += 1
        else:
            old.copy_(new)

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
            statistics, damping = stack.statistics(self.statistics), dampings[first.group]
            try:
                with deferred() as failures:
                    new = self._of(statistics, stack.prior, first, damping, together=not stack.is_one_large)
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
            self._stacks = Stacks(self.blocks, self.factors, self.priors, self._size, self._device)
            self.factors |= self._stacks.members

    def way_back(self) -> Callable[[], None]:
        """What makes all factors what they are now; it keeps a copy of them."""
        factors, generation = dict(self.factors), self.generation
        if capturing() or not factors:  # nothing can fail where nothing is looked at
            return lambda: None
        unstacked = [t for block in self._unstacked_blocks for t in self.factors[block.name].tensors().values()]
        stacked = [] if self._stacks is None else self._stacks.tensors()
        before, stacks_before = Backup([*stacked, *unstacked, self.bound], elsewhere=self.fisher.bulky), self._stacks

        def back() -> None:
            before.restore()
            if self.generation != generation:
                self.factors, self._stacks = dict(factors), stacks_before
                self.generation += 1

        return back

    # ---------------------------------------------------------------- draws and steps

    @property
    def noise_size(self) -> int:
        """How many normal numbers a draw takes (per replica)."""
        stacked = 0 if self._stacks is None else self._stacks.size
        return stacked + sum(block.size for block in self._unstacked_blocks)

    @property
    def _unstacked_blocks(self) -> list[Block]:
        return self.blocks if self._stacks is None else [block for block in self.blocks if not can_stack(block)]

    @property
    def _single_block(self) -> BlockFactors | None:
        """The factors of the one block there is, if it takes the flat vector unchanged."""
        only = self.blocks[0]
        return self.factors[only.name] if len(self.blocks) == 1 and only.is_flat and self._stacks is None else None

    def perturb(self, mean: Tensor, noise: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
        """Mean + scale · P^(−1/2) ε, into `out` where it is given."""
        if (only := self._single_block) is not None and only.sampler is not None:
            return only.sampler.perturb(mean, noise, scale, out)
        return torch.add(mean, self.sample(noise), alpha=scale, out=out)

    @torch.no_grad()
    def sample(self, noise: Tensor) -> Tensor:
        """P^(−1/2) ε of every block, from `[..., *replicas, noise_size]` numbers; 0 where there is no noise.

        Noise has no order, so it is taken as it comes: stacked blocks first.
        """
        if (only := self._single_block) is not None and only.sampler is not None:
            return only.sampler.sample(noise)
        if self._order is not None:
            parts = zip(self.blocks, self._order.split(noise), strict=True)
            return self._order.joined([self._sample_of(block, part) for block, part in parts])
        start = 0 if self._stacks is None else self._stacks.size
        spread = noise.new_empty(*noise.shape[:-1], self._size) if self._stacks is None else self._stacks.sample(noise)
        for block in self._unstacked_blocks:
            block.write_(spread, self._sample_of(block, block.batched(noise[..., start : start + block.size])))
            start += block.size
        return spread

    def _sample_of(self, block: Block, noise: Tensor) -> Tensor:
        sampler = self.factors[block.name].sampler
        return torch.zeros_like(noise) if sampler is None else sampler.sample(noise)

    def solve(self, gradient: Tensor) -> Tensor:
        """P⁻¹ g of every block, with the damping of the step."""
        if (only := self._single_block) is not None:
            return only.stepper.solve(gradient)
        if self._order is not None:
            parts = zip(self.blocks, self._order.vectors(gradient), strict=True)
            return self._order.joined([self.factors[block.name].stepper.solve(part) for block, part in parts])
        solved = torch.empty_like(gradient) if self._stacks is None else self._stacks.solve(gradient)
        for block in self._unstacked_blocks:
            block.write_(solved, self.factors[block.name].stepper.solve(block.vector(gradient)))
        return solved
