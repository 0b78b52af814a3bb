"""What can be trained as replicas: R independent networks whose state is tensors, and a step that is only arithmetic.

A `Learner` draws nothing and looks at nothing: its random numbers, its batch and its place in the schedule come from
outside, as tensors. So its step can be compiled, or recorded once as a CUDA graph and replayed (`training.replicas`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from noisygrad.algorithm.step import refresh_due
from noisygrad.predictions import RegressionPrediction


class Learner(ABC):
    """R networks for regression, trained at once; every tensor of the state has the replicas in front.

    Attributes:
        replicas: R.
        dtype: Of the weights, which are on `device`.
        anneal: A tensor `[1]` that the engine sets before each epoch; the learner multiplies its rates by it.
        refresh_every: `refresh_` is due in each step whose number this divides, and in steps 1, 2, 4, … below it; 0
            means never.
        compile_options: What `torch.compile` needs to be told for this learner's step.
        traceable: Whether `step_` and `move_` can be compiled and captured.
        refresh_traceable: Whether `refresh_` can be compiled and captured (a Cholesky can, an `eigh` can not).
    """

    replicas: int
    device: torch.device
    dtype: torch.dtype
    anneal: Tensor
    refresh_every: int = 0
    traceable: ClassVar[bool] = True
    refresh_traceable: bool = True
    compile_options: ClassVar[dict[str, str | int | bool | Callable[..., object]] | None] = None

    @abstractmethod
    def noise_shapes(self, batch_size: int) -> dict[str, tuple[int, ...]]:
        """The standard normal numbers that one step takes, per replica, by name."""

    @abstractmethod
    def step_(self, x: Tensor, y: Tensor, noise: Mapping[str, Tensor]) -> None:
        """One step on a batch, in place: x `[R, B, inputs]`, y `[R, B, outputs]`, noise `[R, *shape]` by name.

        No host synchronisation, no random numbers, no branch on a value; the state's tensors stay where they are, and
        what is no tensor does not change in a training.
        """

    def refresh_due(self, step: int) -> bool:
        """Whether `refresh_` is due in a step (1, 2, …): see `refresh_every`."""
        return self.refresh_every > 0 and refresh_due(step, self.refresh_every)

    def refresh_(self) -> None:
        """Recompute what several steps share, in place; where it is due, between `step_` and `move_`."""
        return

    def move_(self) -> None:
        """What is left of a step after the refresh, under the rules of `step_`."""
        return

    def end_epoch_(self) -> None:
        """Called after each pass over the data; what it does may be slow and need not be traceable."""
        return

    @abstractmethod
    def predict(self, x: Tensor, num_samples: int, generators: Sequence[torch.Generator]) -> RegressionPrediction:
        """The predictive of targets `[R, n, outputs]` for x `[R, n, inputs]`, each replica from its own generator."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What was learned, and what learning goes on from, by name; replicas in front."""

    def diagnostics(self) -> dict[str, Tensor]:
        """Figures about the fit, `[R]` by name, beside those of its predictions."""
        return {}
