"""The prior of every block of a structure: its mean as a flat vector, its precision in the block's family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from noisygrad.families.base import Prior, constant_rows
from noisygrad.posterior.blocks import Block
from noisygrad.posterior.structure import Structure
from noisygrad.posterior.weights import FlatWeights
from noisygrad.priors import FittedPrior, PriorVariance, check_patterns, prior_precision


@dataclass(frozen=True)
class BlockPriors:
    """N(mean, precision⁻¹) over all weights, block by block, in absolute units (not the Fisher's)."""

    mean: Tensor
    blocks: dict[str, Prior]

    @classmethod
    def build(
        cls,
        structure: Structure,
        prior_variance: PriorVariance,
        fitted: FittedPrior | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> BlockPriors:
        """From η, or from a fitted posterior of the same family and the same model."""
        mean = FlatWeights.zeros(structure, dtype, device)
        if fitted is None:
            check_patterns(prior_variance, structure.parameters)
            mean.fill_centres_()
            centred = not bool(mean.flat.any())
            return cls(
                constant_rows(0.0, mean.flat.shape, mean.flat) if centred else mean.flat,
                {
                    block.name: block.prior(lambda name: prior_precision(prior_variance, name), mean.flat)
                    for block in structure.blocks
                },
            )
        family = structure.family.name
        if fitted.family != family:
            raise ValueError(
                f"the prior comes from a posterior of the family {fitted.family!r}, this fit is {family!r}; "
                "continue with the optimiser that fitted it"
            )
        shapes = {name: tensor.shape for name, tensor in fitted.means.items()}
        if shapes != structure.shapes or list(fitted.blocks) != [block.name for block in structure.blocks]:
            raise ValueError("the prior comes from another model: names, shapes or param groups differ")
        mean.load_dict_(fitted.means)
        return cls(
            mean.flat,
            {name: prior.map(lambda t: t.to(device=device, dtype=dtype)) for name, prior in fitted.blocks.items()},
        )

    @cached_property
    def centre(self) -> Tensor | None:
        """The mean, or None where it is 0 throughout: a subtraction less in every step."""
        return self.mean if bool(self.mean.any()) else None

    def to_memory(self, structure: Structure) -> BlockPriors:
        """The same in the order of a structure's memory."""
        return self._moved(structure, lambda owner, tensor: owner.to_memory(tensor))

    def from_memory(self, structure: Structure) -> BlockPriors:
        """The inverse of `to_memory`."""
        return self._moved(structure, lambda owner, tensor: owner.from_memory(tensor))

    def _moved(self, structure: Structure, move: Callable[[Block | Structure, Tensor], Tensor]) -> BlockPriors:
        moved = {b.name: self.blocks[b.name].map(partial(move, b)) for b in structure.blocks if b.follows_memory}
        return BlockPriors(move(structure, self.mean), self.blocks | moved)

    def scaled(self, factor: float) -> dict[str, Prior]:
        """Γ of each block: the precision in units of the Fisher, for `factor` = λ/N."""
        return {name: prior.scaled(factor) for name, prior in self.blocks.items()}
