"""Categorical likelihood: the output is logits, the target a class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from noisygrad.likelihoods.base import Likelihood, widened
from noisygrad.predictions import CategoricalPrediction


class Categorical(Likelihood):
    """Logits `[*replicas, batch, *positions, classes]`, int64 labels `[*replicas, batch, *positions]`.

    Args:
        ignore_index: A negative label, such as -100, of positions whose class is not known (the padding of sequences,
            say): they have no part in the loss and in the Fisher. The loss remains a sum over positions and a mean
            over all examples. Predictions speak of all positions; measure them with the known ones.
    """

    def __init__(self, ignore_index: int | None = None) -> None:
        super().__init__()
        if ignore_index is not None and not (isinstance(ignore_index, int) and ignore_index < 0):
            raise ValueError(
                f"ignore_index must be a negative integer, which is no class; got {ignore_index!r}. Relabel what is to "
                "be ignored: torch.where(target == 0, -100, target), for example"
            )
        self.ignore_index = ignore_index

    def config(self) -> dict[str, Any]:
        """The label that is ignored, where there is one."""
        return {} if self.ignore_index is None else {"ignore_index": self.ignore_index}

    def seen(self, target: Tensor) -> Tensor | None:
        """The positions that have a class."""
        return None if self.ignore_index is None else (target != self.ignore_index).unsqueeze(-1)

    def _check_dtype(self, target: Tensor) -> None:
        if target.dtype != torch.int64:
            raise ValueError(f"Categorical: class labels must be int64; got {target.dtype}: use target.long().")

    def _target_shape(self, output: Tensor) -> torch.Size:
        if self._event_dims(output) == 0:
            raise ValueError(
                f"Categorical: the output must end in a dimension of classes; got shape {list(output.shape)}."
            )
        return output.shape[:-1]

    def _shape_advice(self, given: torch.Size, expected: torch.Size) -> str:
        if torch.Size([*expected, 1]) == given:
            return "Use target.squeeze(-1)."
        return "Labels are indices, not one-hot, and classes are the output's last dimension (permute the output)."

    def harmless(self, output: Tensor, target: Tensor) -> Tensor:
        """Labels clamped to the classes there are: a GPU's own check would end the process."""
        clamped = target.clamp(0, output.shape[-1] - 1)
        return clamped if self.ignore_index is None else clamped.where(target != self.ignore_index, target)

    def invalid(self, output: Tensor, target: Tensor) -> Tensor:
        """Whether any label is outside 0..classes-1."""
        return (self.harmless(output, target) != target).any()

    def _value_advice(self, output: Tensor, target: Tensor) -> str:
        return (
            f"labels must lie in 0..{output.shape[-1] - 1}, since the output has {output.shape[-1]} classes; "
            f"they go from {int(target.min())} to {int(target.max())}. Renumber them, or widen the last layer."
        )

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """Log-softmax at the label, `[*replicas, batch]`, summed over positions."""
        known = self.seen(target)
        index = target.unsqueeze(-1) if known is None else target.unsqueeze(-1).where(known, 0)
        chosen = torch.log_softmax(widened(output), -1).gather(-1, index)
        return self._sum_event((chosen if known is None else chosen.where(known, 0.0)).squeeze(-1))

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """1 at the label and 0 elsewhere, less the probabilities; 0 where the class is not known."""
        probs = torch.softmax(widened(output.detach()), -1)
        classes = torch.arange(output.shape[-1], device=output.device)
        score, known = (target.unsqueeze(-1) == classes).to(probs.dtype).sub_(probs), self.seen(target)
        return score if known is None else score.mul_(known)

    def nll(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy: mean over the batch, summed over positions and replicas."""
        if output.ndim == 2 and self.ignore_index is None:
            return F.cross_entropy(widened(output), target)
        ignored = -100 if self.ignore_index is None else self.ignore_index
        logits, labels = widened(output).flatten(0, -2), target.flatten()
        total = F.cross_entropy(logits, labels, ignore_index=ignored, reduction="sum")
        return total / output.shape[len(self.replicas)]

    def sample(self, output: Tensor, generators: Sequence[torch.Generator] | None = None) -> Tensor:
        """Labels by a race of exponential clocks: argmax of logits − log Exp(1)."""
        logits = widened(output.detach())
        clocks = self._per_replica(
            logits, lambda part, generator: part.new_empty(part.shape).exponential_(generator=generator), generators
        )
        return (logits - clocks.log_()).argmax(-1)

    def output_fisher_factor(self, output: Tensor) -> Tensor:
        """diag(p) − ppᵀ at each position, as the columns √p_k (e_k − p): positions × classes columns."""
        classes = output.shape[-1]
        probs = torch.softmax(widened(output), -1)
        identity = torch.eye(classes, device=probs.device, dtype=probs.dtype)
        columns = probs.sqrt().unsqueeze(-1) * (identity - probs.unsqueeze(-2))  # [..., k, class]
        if self._event_dims(output) == 1:
            return columns.movedim(-2, 0)
        batch_shape = output.shape[: len(self.replicas) + 1]
        columns = columns.reshape(*batch_shape, -1, classes, classes).movedim(-3, -1)  # [..., k, class, position]
        spread = torch.diag_embed(columns)  # a column of one position is 0 at the others
        return spread.movedim((-2, -4), (0, 1)).transpose(-1, -2).reshape(-1, *output.shape)

    def predictive(self, outputs: Tensor) -> CategoricalPrediction:
        """The mean over weight samples of the probabilities."""
        return CategoricalPrediction(outputs, self._event_dims(outputs[0]) - 1)
