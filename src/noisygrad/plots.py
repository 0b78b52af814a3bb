"""Pictures of predictions and posteriors; every function returns a matplotlib Figure of its own.

Nothing here touches pyplot: no window, no figure kept alive, no display needed. Save with `figure.savefig(path)`.
Where a function takes one thing or several by name, several are drawn as panels with common scales.
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter
from numpy.typing import NDArray
from torch import Tensor

from noisygrad.palette import HEAT, INK, MUTED, SURFACE, VERMILION, colour_of, spaced, styled
from noisygrad.predictions import Prediction, RegressionPrediction

Array: TypeAlias = NDArray[Any]
Values: TypeAlias = Tensor | Array | Sequence[float]

Item = TypeVar("Item")


def array(values: Values) -> Array:
    """Numbers of any kind as a NumPy array on the CPU."""
    return np.asarray(values.detach().cpu().numpy() if isinstance(values, Tensor) else values)


def _named(items: Item | Mapping[str, Item]) -> dict[str, Item]:
    return dict(items) if isinstance(items, Mapping) else {"": items}


def _panels(count: int, width: float, height: float, columns: int) -> tuple[Figure, list[Axes]]:
    """`count` panels in rows of at most `columns`, each `width` × `height` inches, with common axes."""
    if count == 0:
        raise ValueError("nothing to draw: an empty mapping was given")
    columns = min(count, columns)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for spare in grid[count:]:
        spare.set_visible(False)
    return figure, list(grid[:count])


def _title(axes: Axes, name: str, says: str) -> None:
    axes.set_title(f"{name}: {says}" if name else says[:1].upper() + says[1:])


def _flat(values: Values, count: int, what: str) -> Array:
    flat = array(values).reshape(-1).astype(np.float64)
    if flat.size != count:
        raise ValueError(f"{what} has {flat.size} numbers; expected {count}, one for each example")
    return flat


def _interval(prediction: Prediction, level: float) -> tuple[Array, Array]:
    low, high = prediction.interval(level)
    return array(low).reshape(-1), array(high).reshape(-1)


def _shares(axes: Axes) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


@styled
def predictive_intervals(
    predictions: Prediction | Mapping[str, Prediction],
    target: Values,
    *,
    label: str = "target",
    levels: tuple[float, float] = (0.5, 0.9),
) -> Figure:
    """Predictions of a regression in ascending order, with two central intervals and the values observed.

    Args:
        predictions: One prediction, or several by name, for the same examples with one output each.
        target: What was observed, one number per example.
        label: Name and unit of the target.
        levels: Probability of the inner and the outer interval. Points outside the outer one are marked.
    """
    named = _named(predictions)
    inner, outer = levels
    figure, grid = _panels(len(named), 8.6 if len(named) == 1 else 5.0, 3.9, 2)
    for index, (axes, (name, prediction)) in enumerate(zip(grid, named.items(), strict=True)):
        mean = array(prediction.mean).reshape(-1)
        observed = _flat(target, mean.size, "target")
        order = np.argsort(mean, kind="stable")
        rank, colour = np.arange(mean.size), colour_of(name or "kronecker", index)
        low, high = _interval(prediction, outer)
        for level, shade, (bottom, top) in ((outer, 0.22, (low, high)), (inner, 0.38, _interval(prediction, inner))):
            axes.fill_between(
                rank, bottom[order], top[order], step="mid", color=colour, alpha=shade, lw=0, label=_percent(level)
            )
        axes.plot(rank, mean[order], color=colour, lw=1.8, label="mean")
        inside = ((observed >= low) & (observed <= high))[order]
        dots = observed[order]
        axes.scatter(rank[inside], dots[inside], s=15, color=INK, lw=0.6, edgecolor=SURFACE, zorder=3, label="observed")
        axes.scatter(
            rank[~inside], dots[~inside], s=26, facecolor=SURFACE, edgecolor=VERMILION, lw=1.5, zorder=4,
            label=f"outside {_percent(outer)}",
        )  # fmt: skip
        _title(axes, name, f"{_percent(inside.mean())} of values in the {_percent(outer)} interval")
        axes.grid(visible=False, axis="x")
        axes.margins(x=0.01)
        axes.set(xlabel="examples, by predicted mean", ylabel=label)
        axes.label_outer()
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    return figure


@styled
def function_bands(
    predictions: Prediction | Mapping[str, Prediction],
    x: Values,
    *,
    observed: tuple[Values, Values] | None = None,
    truth: Values | None = None,
    levels: tuple[float, float] = (0.5, 0.9),
) -> Figure:
    """A function of one variable as the posterior sees it: mean, two bands, the data and, if known, the truth.

    Args:
        predictions: One prediction at `x`, or several by name.
        x: Where the predictions are, in ascending order.
        observed: The training data as (x, y).
        truth: The function that made the data, at `x`.
        levels: Probability of the inner and the outer band.
    """
    named = _named(predictions)
    figure, grid = _panels(len(named), 8.6 if len(named) == 1 else 3.3, 3.4, 4)
    for index, (axes, (name, prediction)) in enumerate(zip(grid, named.items(), strict=True)):
        mean = array(prediction.mean).reshape(-1)
        place, colour = _flat(x, mean.size, "x"), colour_of(name or "kronecker", index)
        for level, shade in ((levels[1], 0.2), (levels[0], 0.35)):
            low, high = _interval(prediction, level)
            axes.fill_between(place, low, high, color=colour, alpha=shade, lw=0, label=f"{_percent(level)} band")
        if truth is not None:
            axes.plot(place, _flat(truth, mean.size, "truth"), color=MUTED, lw=1.3, ls=(0, (4, 2)), label="truth")
        axes.plot(place, mean, color=colour, label="mean")
        if observed is not None:
            across, up = map(array, observed)
            axes.scatter(across, up, s=16, color=INK, edgecolor=SURFACE, lw=0.5, zorder=3, label="data")
        axes.set_title(name)
        axes.margins(x=0)
        axes.tick_params(length=0)
    handles, labels = grid[0].get_legend_handles_labels()
    if len(named) > 1:  # every panel has its own colour: the legend is in grey
        handles = [copy(handle) for handle in handles]
        for handle, text in zip(handles, labels, strict=True):
            handle.set(color=INK if text == "data" else MUTED)
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    return figure


@dataclass(frozen=True, kw_only=True)
class ReliabilityBins:
    """Equal bins of confidence from 0 to 1; a bin without examples has a share of 0, and its other values are ignored.

    Raises ValueError unless there is one share, confidence and accuracy for each bin.
    """

    share: Array
    confidence: Array
    accuracy: Array

    def __post_init__(self) -> None:
        shapes = {self.share.shape, self.confidence.shape, self.accuracy.shape}
        if len(shapes) > 1 or self.share.ndim != 1 or not self.share.size:
            raise ValueError(f"bins have shapes {sorted(shapes)}; expected one share, confidence and accuracy for each")


def reliability_bins(probabilities: Values, labels: Values, bins: int = 15) -> ReliabilityBins:
    """Sort examples by the confidence of their prediction, given probabilities `[examples, classes]` and labels."""
    if bins < 1:
        raise ValueError(f"bins must be at least 1; got {bins}")
    probs, true = array(probabilities), array(labels)
    if probs.ndim != 2 or true.shape != probs.shape[:1]:
        raise ValueError(
            f"got probabilities of shape {probs.shape} and labels of shape {true.shape}; expected "
            "[examples, classes] and [examples]"
        )
    confidence, right = probs.max(1).astype(np.float64), probs.argmax(1) == true
    edges = np.linspace(0.0, 1.0, bins + 1)
    place = np.clip(np.searchsorted(edges, confidence, side="right") - 1, 0, bins - 1)
    count = np.bincount(place, minlength=bins)
    mean = [np.bincount(place, weights=of, minlength=bins) / np.maximum(count, 1) for of in (confidence, right)]
    return ReliabilityBins(share=count / true.size, confidence=mean[0], accuracy=mean[1])


def reliability_diagram(probabilities: Values | Mapping[str, Values], labels: Values, bins: int = 15) -> Figure:
    """Accuracy against confidence in equal bins, with the expected calibration error and where the confidences lie.

    `probabilities` are `[examples, classes]`, or several such by name; `labels` are the true classes.
    """
    named: dict[str, Values] = _named(probabilities)
    return reliability_of_bins({name: reliability_bins(values, labels, bins) for name, values in named.items()})


@styled
def reliability_of_bins(
    bins: Mapping[str, ReliabilityBins], *, colours: Mapping[str, str] | None = None, columns: int = 4
) -> Figure:
    """The diagram of `reliability_diagram` from bins that are known already, by name; `columns` panels in a row."""
    if not bins:
        raise ValueError("nothing to draw: an empty mapping was given")
    columns = min(len(bins), columns)
    rows = math.ceil(len(bins) / columns)
    figure = Figure(figsize=(4.6 * columns + 0.4, 5.0 * rows + 0.4), layout=spaced())
    grid = figure.subplots(2 * rows, columns, squeeze=False, sharex=True, sharey="row", height_ratios=(3.4, 1.0) * rows)
    for spare in grid[-2:, (len(bins) - 1) % columns + 1 :].flatten():
        spare.set_visible(False)
    for index, (name, found) in enumerate(bins.items()):
        top, bottom = grid[2 * (index // columns) :, index % columns][:2]
        _reliability_panel(top, bottom, name, found, (colours or {}).get(name) or colour_of(name or "kronecker", index))
        if index % columns == 0:
            top.set_ylabel("accuracy")
            bottom.set_ylabel("examples")
    handles, texts = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside lower center", ncols=3)
    return figure


def _reliability_panel(top: Axes, bottom: Axes, name: str, bins: ReliabilityBins, colour: str) -> None:
    count = bins.share.size
    middle, width = (np.arange(count) + 0.5) / count, 0.92 / count
    used = bins.share > 0
    accuracy, missed = bins.accuracy[used], (bins.confidence - bins.accuracy)[used]
    error, excess = (float((bins.share[used] * gap).sum()) for gap in (np.abs(missed), missed))
    top.plot([0, 1], [0, 1], color=MUTED, lw=1.2, ls=(0, (4, 3)), label="calibrated")
    top.bar(middle[used], accuracy, width, color=colour, label="accuracy in the bin")
    top.bar(
        middle[used], missed, width, bottom=accuracy, facecolor="none", edgecolor=VERMILION, hatch="/////", lw=1.0,
        label="gap to its confidence",
    )  # fmt: skip
    verdict = "calibrated" if error < 0.01 else "too sure" if excess > 0 else "not sure enough"
    _title(top, name, f"ECE {error:.3f}, {verdict}")
    bottom.bar(middle, bins.share, width, color=colour)
    top.set(xlim=(0, 1), ylim=(0, 1.02))
    bottom.set(xlabel="confidence", yticks=[0, 0.5, 1], ylim=(0, 1))
    for axes in (top, bottom):
        _shares(axes)
        axes.tick_params(length=0, labelbottom=axes is bottom)


@styled
def coverage_plot(
    predictions: RegressionPrediction | Mapping[str, RegressionPrediction],
    target: Values,
    *,
    levels: Sequence[float] | None = None,
) -> Figure:
    """Nominal against observed coverage of central intervals; the grey band is what chance allows (95 %).

    The band is that of independent examples under a perfectly calibrated prediction, level by level.
    """
    named = _named(predictions)
    nominal = np.linspace(0.02, 0.98, 49) if levels is None else np.asarray(levels, dtype=np.float64)
    figure = Figure(figsize=(6.4, 4.9), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=MUTED, lw=1.2, ls=(0, (4, 3)), label="calibrated")
    for index, (name, prediction) in enumerate(named.items()):
        observed = torch.as_tensor(array(target)).reshape(prediction.target_shape)
        if index == 0:
            margin = 1.96 * np.sqrt(nominal * (1 - nominal) / observed.numel())
            low, high = np.maximum(nominal - margin, 0), np.minimum(nominal + margin, 1)
            axes.fill_between(nominal, low, high, color=MUTED, alpha=0.16, lw=0, label="chance (95 %)")
        # A value is in the central interval of probability p when its own quantile is within p/2 of the median.
        needed = np.abs(2 * array(prediction.cdf(observed)).reshape(-1) - 1)
        covered = [float((needed <= level).mean()) for level in nominal]
        axes.plot(nominal, covered, color=colour_of(name or "kronecker", index), label=name or "observed")
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="probability of the interval", ylabel="share of values inside")
    axes.set_title("Below the diagonal: too sure")
    _shares(axes)
    axes.tick_params(length=0, pad=6)
    axes.legend(loc="upper left")
    return figure


@styled
def precision_matrices(
    matrices: Mapping[str, Values], *, layers: Mapping[str, int] | None = None, columns: int = 4
) -> Figure:
    """Normalised precisions |P_ij| / sqrt(P_ii P_jj) on one colour scale (Figure 1 of the paper).

    Args:
        matrices: Square precision matrices by name.
        layers: Number of weights of each layer by name, in the order of the matrices; marks the layers' bounds.
        columns: Panels in a row.
    """
    figure, grid = _panels(len(matrices), 3.6, 3.5, columns)
    for axes, (name, matrix) in zip(grid, matrices.items(), strict=True):
        normalised = _normalised(array(matrix), name)
        size = len(normalised)
        image = axes.imshow(
            normalised, cmap=HEAT, norm=PowerNorm(0.5, 0.0, 1.0), interpolation="nearest", extent=(0, size, size, 0)
        )
        axes.set_title(name)
        axes.grid(visible=False)
        axes.tick_params(length=0)
        axes.set(xticks=[], yticks=[])
        for spine in axes.spines.values():
            spine.set(visible=True, color=MUTED, linewidth=0.8)
        if layers is not None:
            _mark_layers(axes, layers, size)
    bar = figure.colorbar(image, ax=grid, shrink=0.7, pad=0.02, aspect=30, ticks=[0, 0.05, 0.2, 0.5, 1])
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    bar.set_label("normalised precision, square-root scale")
    if bar.solids is not None:  # no seams between the steps of the scale in a vector image
        bar.solids.set(edgecolor="face", linewidth=0.4)
    bar.outline.set_visible(False)
    return figure


def _normalised(matrix: Array, name: str) -> Array:
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"the matrix {name!r} has shape {matrix.shape}; expected a square one")
    diagonal = np.diagonal(matrix)
    if not bool((diagonal > 0).all()):
        raise ValueError(f"the matrix {name!r} is no precision: its diagonal is not positive")
    normalised: Array = np.abs(matrix) / np.sqrt(np.outer(diagonal, diagonal))
    return normalised


def _mark_layers(axes: Axes, layers: Mapping[str, int], size: int) -> None:
    bounds = np.cumsum([0, *layers.values()])
    if bounds[-1] != size:
        raise ValueError(f"layers has {bounds[-1]} weights in all; the matrices have {size}")
    for bound in bounds[1:-1]:
        axes.axhline(bound, color=VERMILION, lw=0.7, alpha=0.8)
        axes.axvline(bound, color=VERMILION, lw=0.7, alpha=0.8)
    shown = [index for index, weights in enumerate(layers.values()) if weights > 0.05 * size]
    middle, names = (bounds[:-1] + bounds[1:]) / 2, list(layers)
    axes.set_xticks(middle[shown], [names[index] for index in shown])
    axes.set_yticks(middle[shown], [names[index] for index in shown], rotation=90, va="center")


@styled
def learning_curve(curves: Mapping[str, Values], *, label: str = "loss") -> Figure:
    """One line per method over the epochs of a training."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for index, (name, values) in enumerate(curves.items()):
        heights = array(values)
        axes.plot(np.arange(1, len(heights) + 1), heights, color=colour_of(name, index), label=name)
    axes.set(xlabel="epoch", ylabel=label)
    _title(axes, "", f"{label} during training")
    axes.margins(x=0)
    axes.legend()
    return figure
