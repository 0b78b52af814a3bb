"""What one block samples with and steps with: P with the intrinsic damping alone, and P with γ_ex added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from noisygrad.families import packed
from noisygrad.families.base import DampingMode, Prior, Sampler, Solver, SolverSampler, Statistics, TensorRecord

Record = TypeVar("Record", bound=TensorRecord)


@dataclass
class BlockFactors:
    """The factors of one block, or of several of equal shape; both uses have one where γ_ex = 0."""

    sampler: Sampler | None
    stepper: Solver

    @property
    def shared(self) -> bool:
        """Whether both are one."""
        return isinstance(self.sampler, SolverSampler) and self.sampler is self.stepper

    def member(self, like: BlockFactors, lead: int, index: int) -> BlockFactors:
        """Those of one block in a stack's, as views of the sizes of `like`."""
        stepper = member_of(self.stepper, like.stepper, lead, index)
        if self.sampler is None or like.sampler is None:
            return BlockFactors(None, stepper)
        if self.shared:
            assert isinstance(stepper, SolverSampler)
            return BlockFactors(stepper, stepper)
        return BlockFactors(member_of(self.sampler, like.sampler, lead, index), stepper)

    @classmethod
    def of(
        cls,
        statistics: Statistics,
        prior: Prior,
        damping: float,
        mode: DampingMode,
        *,
        noise: bool,
        lean: bool = True,
        repeated: bool = True,
        together: bool = False,
    ) -> BlockFactors:
        """Factorise P = F̄ + Γ, and P + γ_ex I.

        `lean` keeps only what sampling and solving need, in bands where that saves memory; else whole precisions, which
        know their log-determinant. `repeated` says that several steps use the same factors, so that preparing them
        pays; `together` makes both at once, in more memory.
        """
        if noise and damping == 0.0:
            precision = statistics.factorise(prior, 0.0, mode).drop_terms()
            precision = precision.with_inverses() if repeated else precision
            both = packed.pack_factors(precision) if lean else precision
            return cls(both, both)
        if together and noise:
            draws, steps = statistics.factorise_pair(prior, damping, mode)
            return cls(packed.pack_factors(draws.sampler()), packed.pack_factors(steps.solver()))
        steps = statistics.factorise(prior, damping, mode).drop_terms()
        whole = steps.with_inverses() if repeated and not lean else steps
        stepper = packed.pack_factors(steps.solver()) if lean else whole
        del whole, steps  # before the other is made
        if not noise:
            return cls(None, stepper)
        draws = statistics.factorise(prior, 0.0, mode)
        return cls(packed.pack_factors(draws.sampler()) if lean else draws.drop_terms(), stepper)

    def records(self) -> dict[str, TensorRecord]:
        """What there is, by name: `stepper`, and `sampler` where that is another."""
        found: dict[str, TensorRecord] = {"stepper": self.stepper}
        if self.sampler is not None and not self.shared:
            found["sampler"] = self.sampler
        return found

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, as they lie, by dotted names."""
        return {f"{part}.{n}": tensor for part, r in self.records().items() for n, tensor in r.tensors().items()}

    def copy_(self, new: BlockFactors) -> None:
        """Overwrite the tensors in place with those of factors of the same kind."""
        theirs = new.records()
        for name, record in self.records().items():
            record.copy_(theirs[name])


def member_of(stacked: Record, like: Record, lead: int, index: int) -> Record:
    """One of them as views into the stack."""
    return cropped_to(stacked.map(lambda tensor: tensor.select(lead, index)), like)


def cropped_to(padded: Record, like: Record) -> Record:
    """Views into the tensors, of the sizes of another record's."""
    views: dict[str, Tensor] = {}
    for name, tensor in like.tensors().items():
        view = padded.tensors()[name]
        for dim, size in enumerate(tensor.shape):
            view = view.narrow(dim, 0, size)
        views[name] = view
    return padded.with_tensors(views)
