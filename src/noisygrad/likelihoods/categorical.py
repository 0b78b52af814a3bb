"""Categorical likelihood: the output is logits, the target a class."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from noisygrad.likelihoods.base import Likelihood, widened
from noisygrad.predictions import CategoricalPrediction

_ADVICE = (
    "Give the last layer one unit for each class; a single logit for two classes is Bernoulli's, with targets 0.0 and "
    "1.0 of the output's shape."
)


class Categorical(Likelihood):
    """Logits `[*replicas, batch, *positions, classes]`, int64 labels `[*replicas, batch, *positions]`.

    Positions whose label is `ignore_index` have no part in anything. With `class_weights` a part weighs what its
    class does, as in `torch.nn.CrossEntropyLoss(weight=...)`; the Fisher is that of the weighted loss. With
    `label_smoothing` the loss is that of smoothed labels, whose Fisher is the one without. With both a part weighs what
    the class of its label does; torch weighs each class of the smoothed label by its own.
    """

    ignore_index: int | None
    label_smoothing: float
    _class_weights: Tensor | None

    def __init__(
        self,
        ignore_index: int | None = None,
        class_weights: Sequence[float] | Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        if ignore_index is not None and (isinstance(ignore_index, bool) or not isinstance(ignore_index, Integral)):
            raise ValueError(f"ignore_index must be an integer, such as -100, or None; got {ignore_index!r}.")
        if isinstance(label_smoothing, bool) or not isinstance(label_smoothing, Real) or not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing must lie in [0, 1); got {label_smoothing!r}.")
        self.ignore_index = None if ignore_index is None else int(ignore_index)
        self.label_smoothing = float(label_smoothing)
        self._class_weights = None if class_weights is None else _class_weights(class_weights)

    def bind(self, replicas: Sequence[int], device: torch.device | str, dtype: torch.dtype) -> None:
        """Also takes the weights of classes to the device, once."""
        super().bind(replicas, device, dtype)
        if self._class_weights is not None:
            self._class_weights = self._class_weights.to(device)

    def config(self) -> dict[str, Any]:
        """The constructor's arguments, as values that JSON can hold."""
        weights = None if self._class_weights is None else self._class_weights.tolist()
        return {"ignore_index": self.ignore_index, "class_weights": weights, "label_smoothing": self.label_smoothing}

    def part_weights(self, target: Tensor) -> Tensor | None:
        """0 for labels to be ignored; else the weight of the class, or 1."""
        if (self.ignore_index is None and self._class_weights is None) or target.dtype != torch.int64:
            return None
        counts = None if self.ignore_index is None else target != self.ignore_index
        if self._class_weights is None:
            return counts
        weights = self._class_weights.to(target.device)
        found = weights[target.clamp(0, len(weights) - 1)]
        return found if counts is None else torch.where(counts, found, torch.zeros_like(found))

    def _check_dtype(self, target: Tensor) -> None:
        if target.dtype != torch.int64:
            raise ValueError(f"Categorical: class labels must be int64; got {target.dtype}: use target.long().")

    def target_shape(self, output: Tensor) -> torch.Size:
        """The output's shape without its last dimension, the classes."""
        if self.event_dims(output) == 0:
            raise ValueError(
                f"Categorical: the output must end in a dimension of classes; got shape {list(output.shape)}. {_ADVICE}"
            )
        weights = self._class_weights
        if weights is not None and output.shape[-1] != len(weights):
            raise ValueError(
                f"Categorical: there are {len(weights)} class_weights, but {output.shape[-1]} classes in an output of "
                f"shape {list(output.shape)}: give a weight for each class."
            )
        return output.shape[:-1]

    def _shape_advice(self, given: torch.Size, expected: torch.Size) -> str:
        if torch.Size([*expected, 1]) == given:
            return "Use target.squeeze(-1)."
        if given[:-1] == expected:
            return "Labels are indices, not one-hot or probabilities: use target.argmax(-1)."
        return "Classes are the output's last dimension (permute the output), and labels are indices, not one-hot."

    def clamp_invalid_targets(self, output: Tensor, target: Tensor) -> Tensor:
        """Labels clamped to existing classes: on a GPU torch's own check would end the process."""
        return target.clamp(0, output.shape[-1] - 1)

    def invalid(self, output: Tensor, target: Tensor) -> Tensor:
        """Whether any label is outside 0..classes-1."""
        return (self.clamp_invalid_targets(output, target) != target).any()

    def _value_advice(self, output: Tensor, target: Tensor) -> str:
        least = int(target.min())
        advice = "Renumber them, or widen the last layer."
        if output.shape[-1] == 1:
            advice = f"The output is of shape {list(output.shape)}, the target {list(target.shape)}. {_ADVICE}"
        if least < 0 and bool(((target == least) | (target >= 0)).all()):
            advice += f" If {least} marks positions that do not count, use Categorical(ignore_index={least})."
        return (
            f"labels must lie in 0..{output.shape[-1] - 1}, since the output has {output.shape[-1]} classes; "
            f"they go from {int(target.min())} to {int(target.max())}. {advice}"
        )

    def terms(self, output: Tensor, target: Tensor) -> Tensor:
        """Log-softmax at the label, or at the smoothed one, `[*replicas, batch, *positions]`."""
        log_probs = torch.log_softmax(widened(output), -1)
        chosen = log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        return torch.lerp(chosen, log_probs.mean(-1), self.label_smoothing) if self.label_smoothing else chosen

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """Log-softmax at the label, `[*replicas, batch]`, summed over positions."""
        return self.sum_event(self.terms(output, target))

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """∂ log p / ∂ output: the label as a vector of 0 and 1, or the smoothed one, minus the probabilities."""
        score = self._residual(output, target)
        if self.label_smoothing:
            mean = 1 / output.shape[-1]
            score += self.label_smoothing * (mean - (score + torch.softmax(widened(output.detach()), -1)))
        return score

    def sampled_score(self, output: Tensor, generators: Sequence[torch.Generator] | None = None) -> Tensor:
        """Of labels as they are drawn: smoothing them changes the loss's gradient, but not its curvature."""
        return self._residual(output, self.sample(output, generators))

    @staticmethod
    def _residual(output: Tensor, target: Tensor) -> Tensor:
        probs = torch.softmax(widened(output.detach()), -1)
        classes = torch.arange(output.shape[-1], device=output.device)
        return (target.unsqueeze(-1) == classes).to(probs.dtype).sub_(probs)

    def nll(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy: mean over the batch, summed over positions and replicas."""
        smooth = self.label_smoothing
        if output.ndim == 2:
            return F.cross_entropy(widened(output), target, label_smoothing=smooth)
        rows, labels = widened(output).flatten(0, -2), target.flatten()
        total = F.cross_entropy(rows, labels, reduction="sum", label_smoothing=smooth)
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


def _class_weights(given: Sequence[float] | Tensor) -> Tensor:
    weights = torch.as_tensor(given, dtype=torch.float64).detach().cpu()
    if weights.dim() != 1 or len(weights) == 0 or not bool(((weights >= 0) & weights.isfinite()).all()):
        raise ValueError(f"class_weights must be finite numbers of at least 0, one per class; got {given!r}.")
    return weights
