"""Steps that are not finite: refused at once on a CPU, masked on a GPU and reported at the next refresh."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from noisygrad.families.base import Statistics
from noisygrad.posterior.structure import Structure


class NonFiniteError(ArithmeticError):
    """A gradient or a statistic was NaN or infinite; mean, Fisher and step count are as they were before."""


class FiniteGuard:
    """Watches gradient and statistics; remembers on the device which of them went bad."""

    def __init__(self, structure: Structure, device: torch.device) -> None:
        self._structure = structure
        self._device = device
        # Each flag stands for the gradient (""), the statistics of a block (its name) or the targets (the last).
        self._bad = torch.zeros(len(structure.blocks) + 2, dtype=torch.bool, device=device)

    def note_targets(self, invalid: Tensor) -> None:
        """Remember a batch with impossible targets, found on the device; the step is masked and `check` raises."""
        self._bad[-1] |= invalid

    def watch(
        self, gradient: Tensor, loss: Tensor | None, statistics: Mapping[str, Statistics], found_inf: Tensor | None
    ) -> Tensor | None:
        """None for a step that may go on (CPU), or 1.0 / 0.0 to mask it with (GPU, and under a GradScaler).

        `found_inf` is a GradScaler's verdict: such a step is skipped without complaint. The gradient is zeroed in place
        where the step is masked.
        """
        plain = self._device.type == "cpu" and found_inf is None
        total = gradient.sum() if loss is None else gradient.sum() + loss
        if plain and not statistics and math.isfinite(total.item()):
            return None
        bad = ~self._sizes(total, statistics).isfinite()
        if plain:
            if bool(bad.any()):
                self._raise(bad)
            return None
        skip = torch.zeros((), dtype=torch.bool, device=self._device)
        if found_inf is not None:
            skip = found_inf.to(self._device).reshape(()) > 0
        self._bad[: len(bad)] |= bad & ~skip
        if self._device.type == "cpu":
            self.check()
        fine = ~(bad.any() | skip | self._bad[-1])
        gradient.copy_(torch.where(fine, gradient, 0.0))
        return fine.to(gradient.dtype)

    def _sizes(self, total: Tensor, statistics: Mapping[str, Statistics]) -> Tensor:
        """The total of gradient and loss, and a number for each block which is finite if everything in it is."""
        if not statistics:
            return total.unsqueeze(0)
        owners, tensors = [], []
        for block in self._structure.blocks:
            if block.name in statistics:
                mine = list(statistics[block.name].tensors().values())
                owners += [block.name] * len(mine)
                tensors += mine
        norms = torch._foreach_norm(tensors, 1)
        sizes: dict[str, Tensor] = {}
        for owner, norm in zip(owners, norms, strict=True):
            sizes[owner] = sizes[owner] + norm if owner in sizes else norm
        zero = torch.zeros_like(total)
        return torch.stack([total, *(sizes.get(block.name, zero) for block in self._structure.blocks)])

    def check(self) -> None:
        """Raise for a step masked since the last check; waits for the device, so only where the factors do."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        if bool(self._bad.any()):
            bad = self._bad.clone()
            self._bad.zero_()
            self._raise(bad)

    def _raise(self, bad: Tensor) -> None:
        if bool(bad[-1]) and len(bad) == len(self._bad):
            raise NonFiniteError(
                "a batch had targets that its likelihood cannot have (labels out of range, NaN, …); the steps since "
                "then were left out. Check the targets: on a CPU the message is exact"
            )
        blocks = [block for block, wrong in zip(self._structure.blocks, bad[1:].tolist(), strict=False) if wrong]
        names = [unit.name for block in blocks for unit in block.units]
        bad_parameters = self._parameters()
        if names:
            where = f"the statistics of {_some(names)} went bad"
        else:
            where = f"the gradient of {bad_parameters} went bad" if bad_parameters else "the loss itself"
        raise NonFiniteError(
            f"a loss or gradient was NaN or infinite: {where}. Mean, Fisher and step count are as they were. "
            "Look for bad inputs, lower lr, set kl_clip (1e-3 is a good start) or raise damping"
        )

    def _parameters(self) -> str:
        parameters = self._structure.parameters.items()
        return _some([n for n, p in parameters if p.grad is not None and not bool(p.grad.isfinite().all())])


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
