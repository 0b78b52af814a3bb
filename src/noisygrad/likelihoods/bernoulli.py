"""Bernoulli likelihood: the output is logits, the target 0 or 1 (or a probability between)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from noisygrad.likelihoods.base import Likelihood, diagonal_columns, widened
from noisygrad.predictions import BernoulliPrediction


class Bernoulli(Likelihood):
    """Independent binary targets; floating-point, and of the output's shape."""

    def invalid(self, output: Tensor, target: Tensor) -> Tensor:
        """Whether any target is outside [0, 1] or NaN."""
        return ~((target >= 0) & (target <= 1)).all()

    def _shape_advice(self, given: torch.Size, expected: torch.Size) -> str:
        if expected[-1:] == (2,) and 2 * given.numel() == expected.numel():
            return "Two logits for two classes are Categorical's; Bernoulli has one for each target of an example."
        return super()._shape_advice(given, expected)

    def _value_advice(self, output: Tensor, target: Tensor) -> str:
        return (
            f"targets must lie in [0, 1]; they go from {float(target.min())} to {float(target.max())}. "
            "Encode the two classes as 0 and 1."
        )

    def terms(self, output: Tensor, target: Tensor) -> Tensor:
        """y log p + (1 − y) log(1 − p) of each output."""
        return -F.binary_cross_entropy_with_logits(widened(output), target, reduction="none")

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """y log p + (1 − y) log(1 − p), `[*replicas, batch]`, summed over outputs."""
        return self.sum_event(self.terms(output, target))

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """∂ log p / ∂ output: y minus its probability."""
        return target - torch.sigmoid(widened(output.detach()))

    def nll(self, output: Tensor, target: Tensor) -> Tensor:
        """Binary cross-entropy: mean over the batch, summed over outputs and replicas."""
        total = F.binary_cross_entropy_with_logits(widened(output), target, reduction="sum")
        return total / output.shape[len(self.replicas)]

    def sample(self, output: Tensor, generators: Sequence[torch.Generator] | None = None) -> Tensor:
        """1 where a uniform number is below the probability, else 0; of the output's type."""
        probs = torch.sigmoid(widened(output.detach()))
        return (self._noise_like(probs, Tensor.uniform_, generators) < probs).to(probs.dtype)

    def output_fisher_factor(self, output: Tensor) -> Tensor:
        """Diagonal: p(1 − p) for each output."""
        logits = widened(output)
        root = (torch.sigmoid(logits) * torch.sigmoid(-logits)).sqrt()
        return diagonal_columns(root, self.event_dims(output))

    def predictive(self, outputs: Tensor) -> BernoulliPrediction:
        """The mean over weight samples of the probabilities."""
        return BernoulliPrediction(outputs, self.event_dims(outputs[0]))
