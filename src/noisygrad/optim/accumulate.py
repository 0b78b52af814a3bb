"""What the draws since the last step have left behind for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from noisygrad.curvature.passes import Pass
from noisygrad.distributed import Ranks
from noisygrad.families.base import Statistics
from noisygrad.optim.finite import FiniteTrace, known_finite
from noisygrad.posterior.blocks import Block


@dataclass
class Accumulated:
    """Sums over the draws, losses and statistics since the last step."""

    weights: Tensor | None = None
    """Σ over draws of the sampled weights, a flat vector."""
    draws: int = 0
    calls: int = 0
    """How many losses were computed: the gradient is the mean over them."""
    loss: Tensor | None = None
    statistics: dict[str, Statistics] = field(default_factory=dict)
    """The mean over examples of the moments, by block."""
    examples: dict[str, float | Tensor] = field(default_factory=dict)
    """How many examples each of them stands for: a tensor once averaged over ranks."""
    units: set[str] = field(default_factory=set)
    """Those that some statistics are of."""
    known_finite: bool = True
    """Whether all statistics were looked at and are finite; a GPU is not waited for."""
    traces: list[FiniteTrace] = field(default_factory=list)
    """Of each pass that is not known to be finite, where its numbers were."""
    noise: Tensor | None = None
    """Σ over losses of batch size × the likelihood's own statistic."""
    noise_examples: float | Tensor = 0.0
    expected_statistics: bool = False

    def add_draw(self, weights: Tensor) -> None:
        """Count one draw of the weights. The first is kept by reference: see `own_buffer`."""
        self.draws += 1
        self.weights = weights if self.weights is None else self.weights + weights

    def own_buffer(self) -> None:
        """Own the sum, since the buffer of the last draw is about to be overwritten."""
        if self.draws == 1 and self.weights is not None:
            self.weights = self.weights.clone()

    def mean_weights(self) -> Tensor:
        """The mean of the sampled weights over draws (and over ranks, once summed over them)."""
        assert self.weights is not None
        return self.weights if self.draws == 1 else self.weights / self.draws

    def check_complete(self) -> None:
        """Raise where there is nothing to make a step of, or where statistics are missing."""
        if self.draws == 0:
            raise RuntimeError("step() has nothing to work with: no sampled() context was entered since the last step")
        if self.expected_statistics and self.calls == 0:
            raise RuntimeError(
                "this step was due to take statistics, but no loss was computed by draw.nll(output, target): the "
                "Fisher, and so the width of the posterior, would be wrong"
            )

    def sum_over(self, ranks: Ranks, statistics: Mapping[str, Statistics]) -> None:
        """Add up what all ranks have; batches may differ in size, and layers unused on one rank may be used on others.

        `statistics` are those of the optimiser: every rank must send tensors for the same blocks in the same order.
        """
        if not ranks.active:
            return
        assert self.weights is not None
        self.weights = self.weights.clone()
        if self.expected_statistics:
            self.known_finite = False  # this rank's may be, and another's not
            self.statistics = {n: self.statistics.get(n, s.map(torch.zeros_like)) for n, s in statistics.items()}
            self.examples = {n: self.weights.new_tensor(self.examples.get(n, 0.0)) for n in statistics}
        self.noise_examples = self.weights.new_tensor(self.noise_examples)
        counts = {name: count for name, count in self.examples.items() if isinstance(count, Tensor)}
        for name, count in counts.items():
            self.statistics[name] = self.statistics[name].map(lambda tensor, count=count: tensor * count)
        sums = [tensor for s in self.statistics.values() for tensor in s.averages().values()]
        noise = [] if self.noise is None else [self.noise]
        ranks.sum_([self.weights, *sums, *counts.values(), self.noise_examples, *noise])
        self.weights /= ranks.size
        for name, count in counts.items():
            self.statistics[name] = self.statistics[name].map(lambda t, count=count: t / count.clamp_min(1e-30))

    @torch.no_grad()
    def add_statistics(
        self, blocks: Sequence[Block], passes: Mapping[str, Pass], weight: float, current: Mapping[str, Statistics]
    ) -> None:
        """Add one pass, counted as `weight` examples; `current` are the moving averages."""
        finite = True
        self.units.update(passes)
        for block in blocks if passes else ():
            measured = block.measure(passes, current[block.name])
            finite = finite and known_finite(measured)
            if block.name not in self.statistics:
                self.statistics[block.name], self.examples[block.name] = measured, weight
                continue
            self.examples[block.name] += weight
            self.statistics[block.name].update_(measured, 1.0 - weight / self.examples[block.name])
        if not finite:
            self.known_finite = False
            self.traces += FiniteTrace.of(passes)

    def drop_statistics(self) -> None:
        """Give up what was measured, to measure again."""
        self.statistics, self.examples, self.traces, self.known_finite = {}, {}, [], True

    def add_loss(self, loss: Tensor) -> None:
        """Count one loss; the value is kept for reporting."""
        self.calls += 1
        self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()

    def mean_loss(self) -> Tensor | None:
        """The mean of the losses, if there was one."""
        return self.loss if self.loss is None or self.calls == 1 else self.loss / self.calls

    def add_noise(self, statistic: Tensor | None, batch: int) -> None:
        """Add what one batch says about the observation noise."""
        if statistic is None:
            return
        self.noise = statistic * batch if self.noise is None else self.noise + statistic * batch
        self.noise_examples += batch
