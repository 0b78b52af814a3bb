"""How good predictions are. Every function returns a Python float, averaged over all targets given.

`log_likelihood` and `nll` are those of the predictive mixture, in nats per example; the expected log-likelihood that
enters the ELBO is another quantity and has another name.

From torchmetrics where it has them, imported when called: the import takes a second.
"""

from __future__ import annotations

import math

import numpy as np
import scipy
import torch
from torch import Tensor

from noisygrad.predictions import BernoulliPrediction, CategoricalPrediction, Prediction, RegressionPrediction

_NODES = 128
_TAIL = 1e-6


def rmse(prediction: Prediction | Tensor, target: Tensor) -> float:
    """Root mean squared error of the predictive mean (or of a tensor of means)."""
    mean = prediction.mean if isinstance(prediction, Prediction) else prediction
    _require_equal_shapes(mean, target)
    return math.sqrt(float((mean.double() - target.double()).square().mean()))


def log_likelihood(prediction: Prediction, target: Tensor) -> float:
    """Mean over examples of the log-density of the predictive mixture, in nats."""
    _require_targets(target)
    return float(prediction.log_prob(target).double().mean())


def nll(prediction: Prediction | Tensor, target: Tensor) -> float:
    """Mean over examples of minus the log-probability under the mixture; a tensor is taken as class probabilities."""
    if isinstance(prediction, Prediction):
        return -log_likelihood(prediction, target)
    probs, labels = _probs_and_labels(prediction, target)
    return -float(probs.double().gather(-1, labels.unsqueeze(-1)).log().mean())


def interval_coverage(prediction: Prediction, target: Tensor, level: float = 0.95) -> float:
    """The share of targets inside the central interval of probability `level`; calibrated when it equals `level`."""
    low, high = prediction.interval(level)
    _require_equal_shapes(low, target)
    return float(((target >= low) & (target <= high)).double().mean())


def crps(prediction: RegressionPrediction, target: Tensor) -> float:
    """Continuous ranked probability score of each output's marginal, averaged; in the units of the target.

    Exact for mixtures of Gaussians. For Student-t mixtures ∫(F(x) − 1{x ≥ y})² dx is integrated by Gauss-Legendre
    quadrature; the relative error is below 1e-4 down to 3 degrees of freedom and far smaller above 10, unless the
    draws lie apart by a hundred times their noise or more (0.002 at a thousand times, seen with 50 draws).
    """
    if not isinstance(prediction, RegressionPrediction):
        raise ValueError(f"crps needs the prediction of a Gaussian likelihood; got {type(prediction).__name__}.")
    _require_equal_shapes(prediction.mean, target)
    if prediction.degrees_of_freedom is None:
        return float(_crps_gaussian(prediction, target.double()).mean())
    return float(_crps_by_quadrature(prediction, target.double()).mean())


def _expected_distance(offset: Tensor, scale: Tensor) -> Tensor:
    """E|X| for X ~ N(offset, scale²)."""
    standard = offset / scale
    density = torch.exp(-0.5 * standard.square()) / math.sqrt(2 * math.pi)
    distance: Tensor = 2 * scale * density + offset * torch.special.erf(standard / math.sqrt(2))
    return distance


def _crps_gaussian(prediction: RegressionPrediction, target: Tensor) -> Tensor:
    """E|Y − y| − ½ E|Y − Y'|, both over the mixture; one sample at a time, to keep S² pairs out of memory."""
    location, scale = prediction.location.double(), prediction.scale.double()
    spread = torch.zeros_like(target)
    for one_location, one_scale in zip(location, scale, strict=True):
        spread += _expected_distance(location - one_location, torch.hypot(scale, one_scale)).mean(0)
    return _expected_distance(target - location, scale).mean(0) - 0.5 * spread / location.shape[0]


def _crps_by_quadrature(prediction: RegressionPrediction, target: Tensor) -> Tensor:
    """The integral of the squared difference of distribution functions, on either side of the target.

    x = centre + width·sinh(z) puts the nodes where the mixture is, yet reaches far into heavy tails. Beyond the
    extreme quantiles the integrand is 0, or 1 towards a target that lies out there.
    """
    location, scale = prediction.location.double(), prediction.scale.double()
    degrees = prediction.degrees_of_freedom
    assert degrees is not None  # the caller's branch
    reach = torch.from_numpy(-scipy.special.stdtrit(degrees.double().cpu().numpy(), _TAIL)).to(scale.device) * scale
    low, high = (location - reach).amin(0), (location + reach).amax(0)
    centre = location.mean(0)
    width = torch.maximum(location.std(0, correction=0), scale.mean(0))
    inside = target.clamp(low, high)
    total = (target - inside).abs()
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    middle = torch.asinh((inside - centre) / width)
    for end, above in ((torch.asinh((low - centre) / width), False), (torch.asinh((high - centre) / width), True)):
        half = 0.5 * (end - middle)
        for node, weight in zip(nodes.tolist(), weights.tolist(), strict=True):
            z = middle + half * (1 + node)
            probability = prediction.cdf(centre + width * torch.sinh(z))
            difference = 1 - probability if above else probability
            total += weight * half.abs() * width * torch.cosh(z) * difference.square()
    return total


def accuracy(prediction: Prediction | Tensor, target: Tensor) -> float:
    """The share of labels that are the most probable class, in [0, 1]. A tensor is taken as class probabilities."""
    probs, labels = _probs_and_labels(prediction, target)
    from torchmetrics.functional.classification import multiclass_accuracy

    if probs.shape[-1] == 1:  # which torchmetrics refuses
        return 1.0
    return float(multiclass_accuracy(probs, labels, num_classes=probs.shape[-1], average="micro"))


def brier(prediction: Prediction | Tensor, target: Tensor) -> float:
    """Mean over targets of Σ_c (p_c − 1{y = c})², in [0, 2]."""
    probs, labels = _probs_and_labels(prediction, target)
    one_hot = torch.nn.functional.one_hot(labels, probs.shape[-1])
    return float((probs.double() - one_hot).square().sum(-1).mean())


def ece(prediction: Prediction | Tensor, target: Tensor, bins: int = 15) -> float:
    """Expected calibration error of the most probable class, in [0, 1], with `bins` equal bins of confidence."""
    if bins < 1:
        raise ValueError(f"bins must be at least 1; got {bins}.")
    probs, labels = _probs_and_labels(prediction, target)
    from torchmetrics.functional.classification import multiclass_calibration_error

    if probs.shape[-1] == 1:
        return 0.0
    return float(multiclass_calibration_error(probs, labels, num_classes=probs.shape[-1], n_bins=bins, norm="l1"))


def auroc(scores_in: Tensor, scores_out: Tensor) -> float:
    """Area under the ROC curve of a score that should be higher out of distribution; ties count one half.

    `scores_in` and `scores_out` are 1-d: one score (entropy, mutual information, variance, ...) per example.
    """
    for name, scores in (("scores_in", scores_in), ("scores_out", scores_out)):
        if scores.ndim != 1 or scores.numel() == 0 or bool(scores.isnan().any()):
            raise ValueError(f"{name} must be 1-d, not empty and without NaN; got shape {list(scores.shape)}.")
    scores = torch.cat([scores_in.double(), scores_out.double()])
    # Ranks, since torchmetrics squashes scores outside [0, 1] by a sigmoid, which ties the large ones.
    distinct, ranks = scores.unique(return_inverse=True)
    labels = torch.cat([torch.zeros_like(scores_in, dtype=torch.long), torch.ones_like(scores_out, dtype=torch.long)])
    from torchmetrics.functional.classification import binary_auroc

    return float(binary_auroc(ranks.double() / max(1, distinct.numel() - 1), labels))


def _probs_and_labels(prediction: Prediction | Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities `[targets, classes]` and int64 labels `[targets]`, whatever was given."""
    if isinstance(prediction, BernoulliPrediction):
        probs = torch.stack([1 - prediction.probs, prediction.probs], -1)
    elif isinstance(prediction, CategoricalPrediction):
        probs = prediction.probs
    elif isinstance(prediction, Prediction):
        raise ValueError(f"class probabilities are needed; {type(prediction).__name__} has none.")
    else:
        probs = prediction
        total = probs.double().sum(-1)
        if probs.ndim < 2 or bool((probs < 0).any()) or not torch.allclose(total, torch.ones_like(total), atol=1e-3):
            raise ValueError(
                f"a tensor of class probabilities [..., classes] that sum to 1 is needed; got shape "
                f"{list(probs.shape)}: use torch.softmax on logits."
            )
    _require_targets(target)
    if target.shape != probs.shape[:-1]:
        raise ValueError(f"labels must have shape {list(probs.shape[:-1])}; got {list(target.shape)}.")
    labels = target.long()
    if bool((labels != target).any()) or bool(((labels < 0) | (labels >= probs.shape[-1])).any()):
        raise ValueError(f"labels must be whole numbers in 0..{probs.shape[-1] - 1}; some are not.")
    # Torchmetrics takes numbers above 1, by rounding even, for logits.
    return probs.flatten(0, -2).clamp(max=1.0), labels.flatten()


def _require_targets(target: Tensor) -> None:
    if target.numel() == 0:
        raise ValueError(f"no targets were given (shape {list(target.shape)}): a mean over none does not exist.")


def _require_equal_shapes(predicted: Tensor, target: Tensor) -> None:
    _require_targets(target)
    if predicted.shape != target.shape:
        raise ValueError(
            f"the prediction has shape {list(predicted.shape)}, the target {list(target.shape)}: reshape one of them."
        )
