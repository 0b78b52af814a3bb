"""What a training leaves behind: one record per epoch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class EpochRecord:
    """One finished epoch."""

    epoch: int
    """1, 2, …"""
    epochs: int
    """How many there will be."""
    loss: float
    """Mean over the epoch of the negative log-likelihood per datum, at the sampled weights; mean over replicas."""
    seconds: float


@dataclass
class History:
    """Loss and seconds of each epoch, and whatever metrics `on_epoch` returned for it."""

    loss: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)

    @property
    def epochs(self) -> int:
        """How many epochs are done."""
        return len(self.loss)

    def append(self, record: EpochRecord, metrics: dict[str, float]) -> None:
        """Add a finished epoch."""
        self.loss.append(record.loss)
        self.seconds.append(record.seconds)
        self.metrics.append(metrics)

    def to_dict(self) -> dict[str, Any]:
        """As plain lists, for a checkpoint or JSON."""
        return {"loss": list(self.loss), "seconds": list(self.seconds), "metrics": [dict(m) for m in self.metrics]}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        """Back from `to_dict`."""
        return cls(list(saved["loss"]), list(saved["seconds"]), [dict(m) for m in saved["metrics"]])
