"""What one block samples with and steps with: P with the intrinsic damping alone, and P with γ_ex added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from noisygrad.families.base import Sampler, Solver, SolverSampler, TensorRecord

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

    @classmethod
    def made_of(cls, several: Sequence[BlockFactors], make: Callable[[Sequence[Any]], Any]) -> BlockFactors:
        """Factors whose records are made of the same record of each of several; what was one stays one."""
        stepper = make([factors.stepper for factors in several])
        if several[0].shared:
            return cls(stepper, stepper)
        samplers = [factors.sampler for factors in several if factors.sampler is not None]
        return cls(make(samplers) if samplers else None, stepper)

    def member(self, like: BlockFactors, lead: int, index: int) -> BlockFactors:
        """Those of one block in a stack's, as views of the sizes of `like`."""
        return self.made_of([self, like], lambda pair: member_of(pair[0], pair[1], lead, index))

    def records(self) -> dict[str, TensorRecord]:
        """What there is, by name: `stepper`, and `sampler` where that is another."""
        found: dict[str, TensorRecord] = {"stepper": self.stepper}
        if self.sampler is not None and not self.shared:
            found["sampler"] = self.sampler
        return found

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by dotted names; no copies."""
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
