"""What a task is: rows, a network, a likelihood, and how long it is trained. Nothing here trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

if TYPE_CHECKING:
    from .store import Store

Half = Literal["tune", "report"]
Arrays = Mapping[str, NDArray[Any]]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """Some rows: the arguments of the network, the targets and, where targets have positions, which of them count."""

    inputs: tuple[Tensor, ...]
    targets: Tensor
    mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def rows(self, index: Tensor | slice) -> Part:
        """Some of the rows."""
        mask = None if self.mask is None else self.mask[index]
        return Part(tuple(x[index] for x in self.inputs), self.targets[index], mask)


@dataclass(frozen=True)
class Data:
    """The rows of a task, split once and for all."""

    train: Part
    validation: Part
    test: Part
    outside: tuple[Tensor, ...] | None = None
    """Out-of-distribution inputs, of classification only."""
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    """Of a network that was trained before, for fine-tuning."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One small training that somebody might do."""

    name: str
    half: Half
    kind: str
    about: str
    sources: tuple[str, ...]
    """Which files of the store it needs."""
    data: Callable[[Store], Data]
    network: Callable[[Data, float], nn.Module]
    """Of the data and a factor of its width, initialised from torch's global generator."""
    likelihood: str
    """A name in `outcomes.OUTCOMES`."""
    batch: int
    steps: int


def split(count: int, test: int, train: int | None = None) -> tuple[Rows, Rows, Rows]:
    """Rows for training, validation (a tenth of them, taken out) and test: the same for every seed and method."""
    order = np.random.RandomState(0).permutation(count)
    rest = order[test:][:train]
    held = max(1, len(rest) // 10)
    return rest[held:], rest[:held], order[:test]


def tensors(*arrays: NDArray[Any]) -> tuple[Tensor, ...]:
    """Float32 for real numbers and int64 for whole ones."""
    return tuple(
        torch.from_numpy(np.ascontiguousarray(a)).to(torch.float32 if a.dtype.kind == "f" else torch.int64)
        for a in arrays
    )


def scaling(values: NDArray[Any]) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
    """Mean and standard deviation of each column, 1 for a constant one."""
    deviation = values.std(0)
    return values.mean(0), np.where(deviation > 0, deviation, 1.0)


def parts(
    inputs: tuple[NDArray[Any], ...], targets: NDArray[Any], rows: tuple[Rows, Rows, Rows]
) -> tuple[Part, Part, Part]:
    """Training, validation and test rows as tensors."""
    train, validation, test = (Part(tensors(*(x[index] for x in inputs)), *tensors(targets[index])) for index in rows)
    return train, validation, test
