"""Poisson likelihood: the output is the log of the rate, the target a count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from noisygrad.likelihoods.base import Likelihood, diagonal_columns, widened
from noisygrad.predictions import PoissonPrediction


class Poisson(Likelihood):
    """Independent counts; integer or floating-point, and of the output's shape."""

    integer_targets: ClassVar[bool] = True

    def invalid(self, output: Tensor, target: Tensor) -> Tensor:
        """Whether any target is not a count: negative, fractional, infinite or NaN."""
        return ~((target >= 0) & target.isfinite() & (target == target.floor())).all()

    def _value_advice(self, output: Tensor, target: Tensor) -> str:
        return (
            "targets must be counts 0, 1, 2, ...; some are negative, fractional, infinite or NaN "
            f"(least {float(target.min())}, greatest {float(target.max())}). Give counts, or use Gaussian."
        )

    def terms(self, output: Tensor, target: Tensor) -> Tensor:
        """y log r − r − log y! of each output."""
        log_rate = widened(output)
        count = target.to(log_rate.dtype)
        return count * log_rate - log_rate.exp() - torch.lgamma(count + 1)

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """y log r − r − log y!, `[*replicas, batch]`, summed over outputs."""
        return self.sum_event(self.terms(output, target))

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """∂ log p / ∂ output: the count minus the rate."""
        return target - widened(output.detach()).exp()

    def sample(self, output: Tensor, generators: Sequence[torch.Generator] | None = None) -> Tensor:
        """Drawn counts, of the output's type."""
        # torch.poisson would raise for NaN; the loss is NaN too, and the optimiser's own error says where.
        return self.per_replica(widened(output.detach()).exp().nan_to_num(0.0, torch.inf), torch.poisson, generators)

    def output_fisher_factor(self, output: Tensor) -> Tensor:
        """Diagonal: the rate."""
        return diagonal_columns(torch.exp(0.5 * widened(output)), self.event_dims(output))

    def predictive(self, outputs: Tensor) -> PoissonPrediction:
        """A mixture of Poissons."""
        return PoissonPrediction(outputs, self.event_dims(outputs[0]))
