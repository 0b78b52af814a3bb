"""What a classifier's posterior is worth: accuracy, calibration, out-of-distribution and corrupted images."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from noisygrad import metrics
from noisygrad.plots import reliability_bins
from noisygrad.posterior.posterior import Posterior
from noisygrad.predictions import CategoricalPrediction
from noisygrad_paper.data.corruptions import CORRUPTIONS, corrupted

BINS = 15
STRENGTHS = (1, 2, 3, 4, 5)
DRAWS = (1, 3, 10, 30, 100)
_BATCH = 1000

Figures = dict[str, float | list[float]]
Normalise = Callable[[Tensor], Tensor]
"""From images in [0, 1] to what the network is given."""


def measured(posterior: Posterior, images: Tensor, labels: Tensor, normalise: Normalise, samples: int) -> Figures:
    """On test images `[n, C, H, W]` of bytes: accuracies in per cent, nll, ece, brier and the bins of a diagram.

    Three ways to use the draws are measured: the mean of their probabilities, which all else is about, the mean of
    their logits, and the network of mean weights, which is the model's own between steps.
    """
    logits = _logits(posterior, _unit(images), normalise, samples)
    prediction = CategoricalPrediction(logits)
    probabilities = prediction.probs
    bins = reliability_bins(probabilities, labels, BINS)
    return {
        "accuracy": 100.0 * metrics.accuracy(probabilities, labels),
        "nll": metrics.nll(prediction, labels),
        "ece": metrics.ece(probabilities, labels, BINS),
        "brier": metrics.brier(probabilities, labels),
        "accuracy_of_mean_logits": _right(logits.mean(0), labels),
        "accuracy_of_mean_weights": accuracy_of(posterior.model, images, labels, normalise),
        "bin_confidence": bins.confidence.tolist(),
        "bin_accuracy": bins.accuracy.tolist(),
        "bin_share": bins.share.tolist(),
    }


def by_draws(posterior: Posterior, images: Tensor, labels: Tensor, normalise: Normalise) -> Figures:
    """Accuracy (per cent), ece and nll by how many draws of the weights a prediction averages."""
    logits = _logits(posterior, _unit(images), normalise, max(DRAWS))
    rows = [_scores(CategoricalPrediction(logits[:count]), labels) for count in DRAWS]
    found: Figures = {"draws": [float(count) for count in DRAWS]}
    return found | {f"{name}_by_draws": [row[name] for row in rows] for name in rows[0]}


def nll_of_draws(
    posterior: Posterior, images: Tensor, labels: Tensor, normalise: Normalise, samples: int
) -> list[float]:
    """The mean nll of each draw of the weights by itself: whether they all fit, or some of them not at all."""
    logits = _logits(posterior, _unit(images), normalise, samples)
    return [float(F.cross_entropy(one, labels)) for one in logits]


def with_own_norm(
    posterior: Posterior, images: Tensor, labels: Tensor, normalise: Normalise, samples: int, seen: Tensor
) -> Figures:
    """Accuracy (per cent), ece and nll where each draw has the batch statistics that it makes of training images."""
    logits = _logits(posterior, _unit(images), normalise, samples, normalise(_unit(seen)))
    return {f"{name}_own_norm": value for name, value in _scores(CategoricalPrediction(logits), labels).items()}


def out_of_distribution(
    posterior: Posterior, images: Tensor, others: Tensor, normalise: Normalise, samples: int
) -> Figures:
    """How well entropy and mutual information tell images of the data set from out-of-distribution ones, by AUROC."""
    inside, outside = (
        CategoricalPrediction(_logits(posterior, _unit(each), normalise, samples)) for each in (images, others)
    )
    found: Figures = {"auroc_entropy": metrics.auroc(inside.entropy, outside.entropy)}
    if inside.num_samples > 1:  # one draw has no information about the weights
        found["auroc_mutual_information"] = metrics.auroc(inside.mutual_information, outside.mutual_information)
    return found


def under_corruption(
    posterior: Posterior,
    images: Tensor,
    labels: Tensor,
    normalise: Normalise,
    samples: int,
    *,
    seed: int = 0,
    say: Callable[[str], None] = lambda word: None,
) -> Figures:
    """Accuracy (per cent), ece and nll at the five strengths of each corruption; `say` is told which is under way."""
    found: dict[str, float | list[float]] = {}
    for kind in CORRUPTIONS:
        rows: list[dict[str, float]] = []
        for strength in STRENGTHS:
            say(f"{kind} {strength}")
            generator = torch.Generator().manual_seed(seed)
            worse = corrupted(_unit(images), kind, strength, generator)
            rows.append(_scores(CategoricalPrediction(_logits(posterior, worse, normalise, samples)), labels))
        for name in rows[0]:
            found[f"{kind}_{name}"] = [row[name] for row in rows]
    return found


def _scores(prediction: CategoricalPrediction, labels: Tensor) -> dict[str, float]:
    probabilities = prediction.probs
    return {
        "accuracy": 100.0 * metrics.accuracy(probabilities, labels),
        "ece": metrics.ece(probabilities, labels, BINS),
        "nll": metrics.nll(prediction, labels),
    }


def accuracy_of(model: torch.nn.Module, images: Tensor, labels: Tensor, normalise: Normalise) -> float:
    """Of the network as it is, in evaluation mode, in per cent; the mode is left as it was."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            outputs = [model(normalise(_unit(part))) for part in images.split(_BATCH)]
    finally:
        model.train(training)
    return _right(torch.cat(outputs), labels)


def _unit(images: Tensor) -> Tensor:
    return images.float() / 255.0


def _logits(
    posterior: Posterior, images: Tensor, normalise: Normalise, samples: int, norm_data: Tensor | None = None
) -> Tensor:
    # The same draws for all that a posterior is asked, so that differences are the images'.
    generator = torch.Generator(images.device).manual_seed(0)
    return posterior.outputs(normalise(images), samples, batch_size=_BATCH, norm_data=norm_data, generator=generator)


def _right(logits: Tensor, labels: Tensor) -> float:
    return 100.0 * float((logits.argmax(-1) == labels).double().mean())
