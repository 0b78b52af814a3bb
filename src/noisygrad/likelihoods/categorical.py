"""Categorical likelihood: the output is logits, the target a class."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from noisygrad.likelihoods.base import Likelihood, widened
from noisygrad.predictions import CategoricalPrediction


class Categorical(Likelihood):
    """Logits `[*replicas, batch, *positions, classes]`, int64 labels `[*replicas, batch, *positions]`."""

    def _check_dtype(self, target: Tensor) -> None:
        if target.dtype != torch.int64:
            raise ValueError(f"Categorical: class labels must be int64; got {target.dtype}: use target.long().")

    def target_shape(self, output: Tensor) -> torch.Size:
        """The output's shape without its last dimension, the classes."""
        if self.event_dims(output) == 0:
            raise ValueError(
                f"Categorical: the output must end in a dimension of classes; got shape {list(output.shape)}."
            )
        return output.shape[:-1]

    def _shape_advice(self, given: torch.Size, expected: torch.Size) -> str:
        if torch.Size([*expected, 1]) == given:
            return "Use target.squeeze(-1)."
        return "Labels are indices, not one-hot, and classes are the output's last dimension (permute the output)."

    def clamp_invalid_targets(self, output: Tensor, target: Tensor) -> Tensor:
        """Labels clamped to existing classes: on a GPU torch's own check would end the process."""
        return target.clamp(0, output.shape[-1] - 1)

    def invalid(self, output: Tensor, target: Tensor) -> Tensor:
        """Whether any label is outside 0..classes-1."""
        return (self.clamp_invalid_targets(output, target) != target).any()

    def _value_advice(self, output: Tensor, target: Tensor) -> str:
        return (
            f"labels must lie in 0..{output.shape[-1] - 1}, since the output has {output.shape[-1]} classes; "
            f"they go from {int(target.min())} to {int(target.max())}. Renumber them, or widen the last layer."
        )

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """Log-softmax at the label, `[*replicas, batch]`, summed over positions."""
        chosen = torch.log_softmax(widened(output), -1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
        return self.sum_event(chosen)

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """∂ log p / ∂ output: 1 at the label and 0 elsewhere, minus the probabilities."""
        probs = torch.softmax(widened(output.detach()), -1)
        classes = torch.arange(output.shape[-1], device=output.device)
        return (target.unsqueeze(-1) == classes).to(probs.dtype).sub_(probs)

    def nll(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy: mean over the batch, summed over positions and replicas."""
        if output.ndim == 2:
            return F.cross_entropy(widened(output), target)
        total = F.cross_entropy(widened(output).flatten(0, -2), target.flatten(), reduction="sum")
        return total / output.shape[len(self.replicas)]

    def sample(self, output: Tensor, generators: Sequence[torch.Generator] | None = None) -> Tensor:
        """Labels drawn as the argmax of logits − log e, with e ~ Exp(1) (the Gumbel trick)."""
        logits = widened(output.detach())
        return (logits - self._noise_like(logits, Tensor.exponential_, generators).log_()).argmax(-1)

    def output_fisher_factor(self, output: Tensor) -> Tensor:
        """diag(p) − ppᵀ at each position, as the columns √p_k (e_k − p): positions × classes columns."""
        classes = output.shape[-1]
        probs = torch.softmax(widened(output), -1)
        identity = torch.eye(classes, device=probs.device, dtype=probs.dtype)
        columns = probs.sqrt().unsqueeze(-1) * (identity - probs.unsqueeze(-2))  # [..., k, class]
        if self.event_dims(output) == 1:
            return columns.movedim(-2, 0)
        batch_shape = output.shape[: len(self.replicas) + 1]
        columns = columns.reshape(*batch_shape, -1, classes, classes).movedim(-3, -1)  # [..., k, class, position]
        spread = torch.diag_embed(columns)  # a column of one position is 0 at the others
        return spread.movedim((-2, -4), (0, 1)).transpose(-1, -2).reshape(-1, *output.shape)

    def predictive(self, outputs: Tensor) -> CategoricalPrediction:
        """The mean over weight samples of the probabilities."""
        return CategoricalPrediction(outputs, self.event_dims(outputs[0]) - 1)
