"""What was seen so far, from which a model of the dynamics learns."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from noisygrad_paper.curiosity.recording import Transitions

Array = NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of every column: `standardise` gives columns of mean 0 and deviation 1."""

    mean: Array
    std: Array

    @classmethod
    def of(cls, rows: Array) -> Scale:
        """Of rows `[n, d]`; 1e-8 is added to the deviation, so that a constant column becomes 0."""
        mean, std = rows.mean(0, dtype=np.float64), rows.std(0, dtype=np.float64)
        return cls(mean.astype(np.float32), std.astype(np.float32) + 1e-8)

    def standardise(self, rows: Array) -> Array:
        """(rows − mean) / std."""
        return (rows - self.mean) / self.std


class ReplayPool:
    """The last `capacity` transitions, each with the observation that truly followed: none spans two episodes.

    There must be a `minimum` of them before one may learn; `seed` is that of the batches that `sample` draws.
    """

    def __init__(self, capacity: int = 100_000, minimum: int = 500, seed: int | None = None) -> None:
        if not 1 <= minimum <= capacity:
            raise ValueError(f"a pool needs 1 ≤ minimum ≤ capacity, got minimum {minimum} and capacity {capacity}")
        self.capacity, self.minimum = capacity, minimum
        self._rows: tuple[Array, ...] = ()
        self._added = 0
        self._generator = np.random.default_rng(seed)

    def __len__(self) -> int:
        """How many transitions it holds."""
        return min(self._added, self.capacity)

    @property
    def ready(self) -> bool:
        """Whether it has reached its minimum."""
        return len(self) >= self.minimum

    def add(self, transitions: Transitions) -> None:
        """Put a rollout into the pool."""
        new = transitions.flat()
        if not self._rows:
            self._rows = tuple(np.empty((self.capacity, part.shape[1]), dtype=np.float32) for part in new)
        start = max(0, len(transitions) - self.capacity)
        places = np.arange(self._added + start, self._added + len(transitions)) % self.capacity
        for kept, part in zip(self._rows, new, strict=True):
            kept[places] = part[start:]
        self._added += len(transitions)

    def rows(self) -> tuple[Array, ...]:
        """All observations, actions and next observations, in no particular order; ValueError below the minimum."""
        if not self.ready:
            raise ValueError(
                f"the pool holds {len(self)} transitions and needs {self.minimum}: collect more, or lower its minimum"
            )
        return tuple(part[: len(self)] for part in self._rows)

    def scales(self) -> tuple[Scale, ...]:
        """Of observations, actions and next observations."""
        return tuple(Scale.of(part) for part in self.rows())

    def sample(self, batches: int, size: int) -> tuple[Array, ...]:
        """`batches` batches of `size` transitions, drawn with replacement: arrays `[batches, size, d]`."""
        rows = self.rows()
        chosen = self._generator.integers(len(self), size=(batches, size))
        return tuple(part[chosen] for part in rows)
