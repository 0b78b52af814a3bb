"""Gaussian likelihood whose noise the network predicts, output by output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from noisygrad.likelihoods.base import Likelihood, diagonal_columns, widened
from noisygrad.predictions import RegressionPrediction


class HeteroscedasticGaussian(Likelihood):
    """The last dimension of the output is 2D: D means, then D log-variances; the target's is D."""

    _units: ClassVar[str] = "two units (a mean and a log-variance)"

    def target_shape(self, output: Tensor) -> torch.Size:
        """The output's shape with half its last dimension."""
        if self.event_dims(output) == 0 or output.shape[-1] % 2:
            raise ValueError(
                f"HeteroscedasticGaussian: the output's last dimension must be 2D (D means, then D log-variances); "
                f"got shape {list(output.shape)}: give the last layer twice as many units as there are targets."
            )
        return torch.Size([*output.shape[:-1], output.shape[-1] // 2])

    def terms(self, output: Tensor, target: Tensor) -> Tensor:
        """log N(y | mean, exp(log-variance)) of each output."""
        mean, log_variance = widened(output).chunk(2, -1)
        squared = (target - mean).square() * torch.exp(-log_variance)
        return -0.5 * (squared + log_variance + math.log(2 * math.pi))

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """log N(y | mean, exp(log-variance)), `[*replicas, batch]`, summed over outputs."""
        return self.sum_event(self.terms(output, target))

    def weights_of_outputs(self, weight: Tensor, output: Tensor) -> Tensor:
        """A target's weight is that of its mean and of its log-variance."""
        if weight.dim() == output.dim():
            weight = torch.cat([weight, weight], -1)
        return super().weights_of_outputs(weight, output)

    def sample(self, output: Tensor, generators: Sequence[torch.Generator] | None = None) -> Tensor:
        """mean + ε·exp(log-variance / 2), `[*replicas, batch, *event]` with half the last dimension."""
        mean, log_variance = widened(output.detach()).chunk(2, -1)
        noise = self._noise_like(mean, Tensor.normal_, generators)
        return mean + noise * torch.exp(0.5 * log_variance)

    def output_fisher_factor(self, output: Tensor) -> Tensor:
        """Diagonal: 1/variance for a mean, ½ for a log-variance."""
        log_variance = widened(output).chunk(2, -1)[1]
        root = torch.cat([torch.exp(-0.5 * log_variance), torch.full_like(log_variance, math.sqrt(0.5))], -1)
        return diagonal_columns(root, self.event_dims(output))

    def predictive(self, outputs: Tensor) -> RegressionPrediction:
        """A mixture of Gaussians, each sample with its own variance."""
        mean, log_variance = widened(outputs).chunk(2, -1)
        return RegressionPrediction(mean, torch.exp(0.5 * log_variance), None, self.event_dims(outputs[0]))
