"""One step of Algorithm 1 or 2 of the paper: Fisher, factors, mean, noise, from what the draws have left."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from noisygrad.algorithm.step import NoisyNaturalGradient
from noisygrad.distributed import Ranks
from noisygrad.likelihoods import Likelihood
from noisygrad.optim.draw import DrawnWeights
from noisygrad.optim.execution import Executor
from noisygrad.optim.finite import FiniteGuard, RunningStatistics
from noisygrad.optim.measurement import Accumulated, BatchMeasurement
from noisygrad.optim.options import Options
from noisygrad.posterior.weights import FlatWeights


@dataclass(frozen=True)
class ParamGroups:
    """The settings of each param group, with its number among the blocks and its part of the flat vector."""

    settings: Sequence[dict[str, Any]]
    numbers: Sequence[int]
    parts: Sequence[slice]

    def dampings(self) -> dict[int, float]:
        """γ_ex of each param group, by the number that its blocks know it by."""
        return {number: group["damping"] for number, group in zip(self.numbers, self.settings, strict=True)}


@dataclass(frozen=True)
class Scaling:
    """What a GradScaler says of the gradients: the scale they have, and whether one of them is infinite."""

    scale: Tensor | None = None
    found_inf: Tensor | None = None


class DeviceScalars:
    """Learning rates, trust region, decay, loss and mask as tensors on the device, for a replayed step to read."""

    def __init__(self, like: Tensor, groups: int) -> None:
        self._like = like
        self.groups: list[dict[str, Any]] = [{"lr": like.new_zeros(())} for _ in range(groups)]
        self.clip: Tensor | None = None
        self.rate = like.new_zeros(())
        """1 − `fisher_decay`."""
        self.loss = like.new_zeros(())
        self.mask = like.new_zeros(())
        self._known: dict[str, float] = {}

    def set(self, groups: Sequence[Mapping[str, Any]], clip: float | None, rate: float) -> None:
        """Bring the tensors up to date; only what has changed is sent, so a capture after it records nothing of it."""
        for index, (mine, group) in enumerate(zip(self.groups, groups, strict=True)):
            mine["momentum"] = group["momentum"]
            if isinstance(group["lr"], Tensor):
                mine["lr"].copy_(group["lr"])
            else:
                self._send(f"lr {index}", mine["lr"], group["lr"])
        if clip is None:
            self.clip = None
            self._known.pop("clip", None)
        else:
            self.clip = self._like.new_zeros(()) if self.clip is None else self.clip
            self._send("clip", self.clip, clip)
        self._send("rate", self.rate, rate)

    def _send(self, name: str, tensor: Tensor, value: float) -> None:
        if self._known.get(name) != value:
            self._known[name] = value
            tensor.fill_(value)

    def key(self) -> tuple[Any, ...]:
        """Whatever a replayed step has as plain numbers."""
        return (self.clip is None, id(self.clip), *(group["momentum"] for group in self.groups))


@dataclass(kw_only=True)
class Update:
    """What a step is made of, and how it is made."""

    algorithm: NoisyNaturalGradient
    weights: DrawnWeights
    measurement: BatchMeasurement
    guard: FiniteGuard
    running: RunningStatistics
    likelihood: Likelihood
    options: Options
    gradient: FlatWeights
    groups: ParamGroups
    ranks: Ranks
    executor: Executor

    def __post_init__(self) -> None:
        self.scalars = DeviceScalars(self.algorithm.mean, len(self.groups.parts))

    def apply(self, step: int, found: Accumulated, scaling: Scaling) -> None:
        """Fisher, factors, mean and observation noise from what was accumulated, in this order."""
        decay, clip = self.options.decay_at(step), self.options.clip_at(step)
        found.sum_over(self.ranks, self.algorithm.covariance.statistics)
        self.gradient.read_gradients_()
        if self.executor.deferred:
            # As tensors, so that a step that is recorded now reads the numbers of the step that replays it.
            scalars = self.scalars
            scalars.set(self.groups.settings, clip, 1.0 - decay)
            if (loss := found.mean_loss()) is not None:
                scalars.loss.copy_(loss)
            if self._is_plain(step, found, scaling):
                work = lambda: self._move(scalars.groups, scalars.clip, self._watched(found, scalars.loss, scaling))  # noqa: E731
                self.executor.run("step", self.replay_key(), work)
                return
            mask = self._watch_and_measure(step, found, scaling, scalars.rate)
            assert mask is not None
            scalars.mask.copy_(mask)
            work = lambda: self._move(scalars.groups, scalars.clip, scalars.mask)  # noqa: E731
            self.executor.run("move", self.replay_key(), work)
        else:
            mask = self._watch_and_measure(step, found, scaling, 1.0 - decay)
            self._move(self.groups.settings, clip, mask)
        if found.noise is not None:
            self._update_noise(found.noise / found.noise_examples, mask)

    def replay_key(self) -> tuple[Any, ...]:
        """Changes whenever a recorded step would do something else."""
        return (self.weights.memory(), self.scalars.key())

    def _watch_and_measure(
        self, step: int, found: Accumulated, scaling: Scaling, rate: float | Tensor
    ) -> Tensor | None:
        """Whatever there is to scale, to measure and to refresh before the mean moves, and the mask of the step."""
        if scaling.scale is not None:
            self.gradient.flat.div_(scaling.scale)
        if (count := found.calls or found.draws) > 1:  # the mean over losses, of which there is the sum
            self.gradient.flat.div_(count)
        # Ranks must agree on what is finite, and each has a loss of its own.
        mask = self._watched(found, None if self.ranks.active else found.loss, scaling)
        refresh = self.options.factors_due(step)
        fisher = self.algorithm.covariance.fisher
        with fisher.unchanged_on_failure() if refresh else nullcontext():
            if found.statistics:
                self.measurement.warn_uncalled_layers(found)
                used = found.used_by_ranks(mask)
                self.algorithm.measure_(found.statistics, rate, mask=used)
                found.statistics = {}  # as large as the moving averages, and done with
            if refresh:
                self.guard.check()
                self.algorithm.refresh_(self.groups.dampings())
        return mask

    def _is_plain(self, step: int, found: Accumulated, scaling: Scaling) -> bool:
        """Whether this step is one draw and one loss without anything to scale, to measure or to refresh."""
        return (
            not self.ranks.active
            and found.draws == 1
            and found.calls == 1
            and not found.statistics
            and found.noise is None
            and not self.options.factors_due(step)
            and scaling.scale is None
            and scaling.found_inf is None
        )

    def _watched(self, found: Accumulated, loss: Tensor | None, scaling: Scaling) -> Tensor | None:
        """Add Γ (w − m₀), at the sampled weights, to the gradient, and see whether the step may go on."""
        gradient = self.gradient.flat
        self.algorithm.add_prior_(gradient, found.mean_weights())
        doubtful = {} if found.known_finite else found.statistics
        return self.guard.watch(gradient, loss, doubtful, found.traces, scaling.found_inf)

    def _move(self, settings: Sequence[Mapping[str, Any]], clip: float | Tensor | None, mask: Tensor | None) -> None:
        groups = list(zip(settings, self.groups.parts, strict=True))
        self.algorithm.move_(self.gradient.flat, groups, clip=clip, mask=mask)
        self.weights.mean.write_parameters_()

    def _update_noise(self, statistic: Tensor, mask: Tensor | None) -> None:
        likelihood, options = self.likelihood, self.options
        before = [buffer.clone() for buffer in likelihood.buffers()] if mask is not None else []
        likelihood.update_noise_(statistic, options.num_data, options.kl_weight)
        if mask is not None:
            for buffer, old in zip(likelihood.buffers(), before, strict=True):
                buffer.copy_(torch.where(mask > 0, buffer, old))
