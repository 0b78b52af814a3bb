"""What a user holds inside `optimizer.sampled()`, and what the draws leave behind for `step()`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from noisygrad.curvature.passes import Pass
from noisygrad.families.base import Statistics
from noisygrad.posterior.structure import Block


@dataclass
class Pending:
    """Sums over the draws since the last step; divided only when the step is made."""

    weights: Tensor
    """Σ over draws of the sampled weights, a flat vector."""
    draws: int = 0
    calls: int = 0
    """How many losses were computed: the gradient is the mean over them."""
    loss: Tensor | None = None
    statistics: dict[str, Statistics] = field(default_factory=dict)
    """Σ over passes of batch size × moments, by block."""
    examples: dict[str, float] = field(default_factory=dict)
    noise: Tensor | None = None
    """Σ over losses of batch size × the likelihood's own statistic."""
    noise_examples: float = 0.0
    expected_statistics: bool = False

    def clear(self) -> None:
        """Forget everything."""
        self.weights.zero_()
        self.draws = self.calls = 0
        self.loss = self.noise = None
        self.noise_examples = 0.0
        self.statistics.clear()
        self.examples.clear()
        self.expected_statistics = False

    @torch.no_grad()
    def add_statistics(self, blocks: Sequence[Block], passes: Mapping[str, Pass], weight: float) -> None:
        """Add one pass, counted as `weight` examples."""
        for block in blocks:
            measured = block.measure(passes)
            if measured is None:
                continue
            if block.name not in self.statistics:
                self.statistics[block.name] = measured.map(lambda tensor: tensor * weight)
                self.examples[block.name] = weight
                continue
            for total, new in zip(
                self.statistics[block.name].tensors().values(), measured.tensors().values(), strict=True
            ):
                total.add_(new, alpha=weight)
            self.examples[block.name] += weight

    def add_loss(self, loss: Tensor) -> None:
        """Count one loss; the value is kept for reporting."""
        self.calls += 1
        self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()

    def add_noise(self, statistic: Tensor | None, batch: int) -> None:
        """Add what one batch says about the observation noise."""
        if statistic is None:
            return
        self.noise = statistic * batch if self.noise is None else self.noise + statistic * batch
        self.noise_examples += batch


class Draw:
    """One draw of the weights, valid inside `with optimizer.sampled() as draw`."""

    def __init__(self, measure: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._measure = measure
        self._open = True
        self._waiting: dict[int, str] = {}

    def nll(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss to differentiate: the mean negative log-likelihood over the batch.

        Where this step takes statistics, they are taken here. Call `backward()` on the result (scaled by a GradScaler
        if you like) before leaving the context. Several calls, in one context or in several, are averaged by `step()`:
        do not divide the loss yourself.
        """
        if not self._open:
            raise RuntimeError(
                "this draw is over: its weights are gone. Compute the loss inside `with optimizer.sampled()`"
            )
        loss = self._measure(output, target)
        if loss.requires_grad:
            key = len(self._waiting) if not self._waiting else max(self._waiting) + 1
            self._waiting[key] = "loss"
            loss.register_hook(lambda gradient: self._waiting.pop(key, None) and None)
        return loss

    def close(self, *, failed: bool) -> None:
        """End the draw; raises if a loss was never differentiated, unless something else went wrong already."""
        self._open = False
        if self._waiting and not failed:
            raise RuntimeError(
                "leaving sampled() with a loss that was not differentiated: its graph belongs to weights that are now "
                "replaced by the mean. Call backward() inside the context (or compute it under torch.no_grad())"
            )
