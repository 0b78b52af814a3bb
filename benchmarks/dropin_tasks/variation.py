"""What a run changes about every task, to see how far a method depends on it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from .task import Data, Part


@dataclass(frozen=True, kw_only=True)
class Variation:
    """Factors of 1 and a share of 0 leave a task as it is."""

    batch_factor: float = 1.0
    """Of the batch; the number of epochs stays, so that steps become fewer."""
    epoch_factor: float = 1.0
    width_factor: float = 1.0
    """Of the layers' widths; networks that were trained before keep theirs."""
    input_scale: float = 1.0
    """Multiplies inputs that are real numbers."""
    outliers: float = 0.0
    """Share of targets that are replaced: labels by those of other rows, numbers by ones 10 deviations away.

    Of training and validation rows, which a user has from the same source; test rows stay right.
    """

    def __post_init__(self) -> None:
        for name in ("batch_factor", "epoch_factor", "width_factor", "input_scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.outliers < 1:
            raise ValueError(f"outliers must be a share from 0 to 1, got {self.outliers}")

    @property
    def label(self) -> str:
        """What stands behind a method's name; empty where nothing is changed."""
        changed = [f"{f.name.replace('_', '-')}={getattr(self, f.name):g}" for f in fields(self)]
        usual = [f"{f.name.replace('_', '-')}={f.default:g}" for f in fields(self)]
        different = [one for one, other in zip(changed, usual, strict=True) if one != other]
        return f"@{','.join(different)}" if different else ""

    def batch(self, batch: int, rows: int) -> int:
        """The batch of a task with this many training rows."""
        return max(1, min(rows, round(batch * self.batch_factor)))

    def steps(self, steps: int) -> int:
        """The steps of a task."""
        return max(1, round(steps * self.epoch_factor / self.batch_factor))

    def data(self, data: Data, likelihood: str) -> Data:
        """The task's data with other inputs and other targets to learn from."""
        train, validation = (
            replace(part, targets=self._spoilt(part.targets, likelihood)) for part in (data.train, data.validation)
        )
        outside = None if data.outside is None else self._inputs(data.outside)
        return replace(
            data,
            train=self._part(train),
            validation=self._part(validation),
            test=self._part(data.test),
            outside=outside,
        )

    def _part(self, part: Part) -> Part:
        return replace(part, inputs=self._inputs(part.inputs))

    def _inputs(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(x * self.input_scale if x.is_floating_point() else x for x in inputs)

    def _spoilt(self, targets: Tensor, likelihood: str) -> Tensor:
        if not self.outliers:
            return targets
        chosen = np.random.RandomState(2)
        where = torch.from_numpy(chosen.rand(*targets.shape) < self.outliers)
        if likelihood.startswith("gaussian"):
            return torch.where(where, targets + 10 * targets.std(0), targets)
        if likelihood == "poisson":
            return torch.where(where, targets + (10 * targets.float().std(0)).round().to(targets.dtype), targets)
        # Labels of other rows: as frequent as they are.
        others = targets.flatten()[torch.from_numpy(chosen.permutation(targets.numel()))].view(targets.shape)
        return torch.where(where, others, targets)
