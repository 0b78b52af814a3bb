"""Figures of predictions on held-out rows, in chunks that fit in memory; by torch alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from noisygrad.predictions import BernoulliPrediction, Prediction

from .outcomes import Outcome
from .task import Part

Predict = Callable[[tuple[Tensor, ...]], Prediction]
"""Of the arguments of the network; every call uses the same draws."""
MOST_ELEMENTS = 10_000_000
MOST_ROWS = 500
BINS = 15


def chunks(rows: int, elements: int) -> Iterator[slice]:
    """Slices of rows of which each has this many elements."""
    size = max(1, min(MOST_ROWS, MOST_ELEMENTS // max(1, elements)))
    return (slice(start, start + size) for start in range(0, rows, size))


def nll(predict: Predict, part: Part, outcome: Outcome, elements: int) -> float:
    """The mean negative log-likelihood of the predictive, in nats per target (per position where it has positions)."""
    found = [log_probs(predict(part.rows(s).inputs), part.rows(s), outcome) for s in chunks(len(part), elements)]
    return -float(torch.cat(found).double().mean())


def log_probs(prediction: Prediction, part: Part, outcome: Outcome) -> Tensor:
    """Of every target that counts."""
    values = outcome.log_prob(prediction, part.targets)
    return values.flatten() if part.mask is None else values[part.mask]


def figures(
    predict: Predict, part: Part, outcome: Outcome, elements: int, outside: tuple[Tensor, ...] | None = None
) -> dict[str, float]:
    """`nll` with accuracy and calibration error of labels, or the root mean squared error of numbers.

    With `outside`, also how well the entropy tells out-of-distribution inputs.
    """
    densities, errors, confidences, inside = [], [], [], []
    for where in chunks(len(part), elements):
        rows = part.rows(where)
        prediction = predict(rows.inputs)
        densities.append(log_probs(prediction, rows, outcome))
        if outcome.classes:
            probabilities = class_probabilities(prediction)
            inside.append(torch.special.entr(probabilities).sum(-1))
            confidence, label = probabilities.max(-1)
            right = (label == rows.targets).float()
            keep = torch.ones_like(right, dtype=torch.bool) if rows.mask is None else rows.mask
            errors.append(right[keep])
            confidences.append(confidence[keep])
        else:
            errors.append((prediction.mean - rows.targets).square().flatten())
    found = {"nll": -float(torch.cat(densities).double().mean())}
    error = float(torch.cat(errors).double().mean())
    if not outcome.classes:
        return {**found, "rmse": math.sqrt(error)}
    found |= {"accuracy": error, "ece": calibration_error(torch.cat(confidences), torch.cat(errors))}
    if outside is not None:
        found["auroc"] = area_under_roc(torch.cat(inside), entropies(predict, outside, elements))
    return found


def class_probabilities(prediction: Prediction) -> Tensor:
    """`[..., classes]`, also of yes-or-no answers."""
    if isinstance(prediction, BernoulliPrediction):
        return torch.stack([1 - prediction.probs, prediction.probs], -1)
    return prediction.probs


def calibration_error(confidence: Tensor, right: Tensor) -> float:
    """`noisygrad.metrics.ece`, which needs torchmetrics: 15 equal bins of confidence."""
    edges = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)
    bins = torch.bucketize(confidence.double().clamp(0, 1), edges[1:-1], right=True)
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, (confidence - right).double())
    return float(gaps.abs().sum() / len(right))


def entropies(predict: Predict, inputs: tuple[Tensor, ...], elements: int) -> Tensor:
    """The entropy of the predictive of each row."""
    found = [
        torch.special.entr(class_probabilities(predict(tuple(x[s] for x in inputs)))).sum(-1)
        for s in chunks(len(inputs[0]), elements)
    ]
    return torch.cat(found)


def area_under_roc(inside: Tensor, outside: Tensor) -> float:
    """How often a score is higher outside than inside, ties counting one half, as `noisygrad.metrics.auroc`."""
    if not bool(inside.isfinite().all() and outside.isfinite().all()):
        return math.nan
    ordered = inside.double().sort().values
    below = torch.searchsorted(ordered, outside.double(), right=False)
    up_to = torch.searchsorted(ordered, outside.double(), right=True)
    return float((below + up_to).double().mean() / (2 * len(inside)))
