"""Figures of the report: how far ours are from the paper's, how training went, what a corruption does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from noisygrad.palette import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    SKY,
    SURFACE,
    VERMILION,
    colour_of,
    spaced,
    styled,
)

_COLOURS = {
    "BBB": VERMILION,
    "PBP": SKY,
    "NNG-FFG": ORANGE,
    "NNG-MVG": BLUE,
    "NNG-MVG/exact-damping": GREEN,
    "NNG-BlkTri": GREEN,
    "HMC": INK,
    "PBP_MV": PURPLE,
    "VMG": GREEN,
    "SGD": colour_of("point"),
    "K-FAC": GREEN,
    "K-FAC+WD": PURPLE,
    "noisy-Adam": ORANGE,
    "noisy-K-FAC": BLUE,
    "TRPO": colour_of("point"),
    "TRPO+norm": GREEN,
    "TRPO+BBB": VERMILION,
    "TRPO+NNG-FFG": ORANGE,
    "TRPO+NNG-MVG": BLUE,
}
_WITHOUT_POSTERIOR = ("SGD", "K-FAC", "K-FAC+WD", "TRPO", "TRPO+norm")
_SHAPES = {"BBB": "s", "PBP": "^", "NNG-FFG": "D", "NNG-MVG": "o", "PBP_MV": "v", "VMG": "P"}
_FEW = 8  # values of a line that are marked one by one
_FURTHEST = 6.0  # standard errors: what is beyond is drawn at the edge, with its value


def method_colour(method: str, position: int = 0) -> str:
    """The colour of one of the paper's methods wherever it is drawn; others go by their position."""
    return _COLOURS.get(method) or colour_of(method, position)


def _plain(name: str) -> str:
    """A name for matplotlib, which would read what is between two dollars as mathematics."""
    return name.replace("$", r"\$")


def _grid(
    count: int, columns: int, width: float, height: float, *, least_width: float = 0, below: float = 0, **shared: Any
) -> tuple[Figure, NDArray[Any]]:
    """`count` panels of that size in inches in rows of at most `columns`, with room for a legend below them."""
    if not count:
        raise ValueError("nothing to draw: no panel was given")
    columns = min(count, columns)
    rows = -(-count // columns)
    figure = Figure(figsize=(max(least_width, width * columns), height * rows + below), layout=spaced())
    grid: NDArray[Any] = figure.subplots(rows, columns, squeeze=False, **shared)
    for spare in grid.flatten()[count:]:
        spare.set_visible(False)
    return figure, grid


@styled
def difference_plot(panels: Mapping[str, Mapping[str, Mapping[str, float]]], rows: Mapping[str, str]) -> Figure:
    """Signed differences from the paper in standard errors, a dot for each method on each data set.

    `panels` are by title, by method, by data set; `rows` are the data sets from top to bottom, with their labels.
    """
    methods = list(dict.fromkeys(method for by_method in panels.values() for method in by_method))
    if not methods or not rows:
        raise ValueError("nothing to draw: no method or no data set was given")
    place = {data: len(rows) - 1 - index for index, data in enumerate(rows)}
    figure = Figure(figsize=(4.4 * len(panels), 1.6 + 0.46 * len(rows)), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False, sharex=True, sharey=True)[0]
    for axes, (title, by_method) in zip(grid, panels.items(), strict=True):
        axes.axvspan(-1, 1, color=MUTED, alpha=0.16, lw=0)
        axes.axvline(0, color=MUTED, lw=1.0)
        for bound in (-2, 2):
            axes.axvline(bound, color=MUTED, lw=0.9, ls=(0, (3, 3)))
        for index, method in enumerate(methods):
            shift = 0.56 * (0.5 - (index + 0.5) / len(methods))
            _dots(axes, by_method.get(method, {}), place, shift, method, method_colour(method, index))
        axes.set_title(_plain(title))
        axes.set(xlim=(-_FURTHEST - 0.6, _FURTHEST + 0.6), ylim=(-0.6, len(rows) - 0.4))
        axes.set_yticks(list(place.values()), list(rows.values()))
        axes.set_xlabel("← worse     standard errors     better →")
        axes.tick_params(length=0)
        axes.grid(visible=False, axis="x")
        for line in range(1, len(rows)):
            axes.axhline(line - 0.5, color=MUTED, lw=0.4, alpha=0.35)
        axes.grid(visible=False, axis="y")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6)
    return figure


def _dots(
    axes: Axes, differences: Mapping[str, float], place: Mapping[str, int], shift: float, method: str, colour: str
) -> None:
    shown = {data: value for data, value in differences.items() if data in place}
    heights = [place[data] + shift for data in shown]
    values = np.asarray(list(shown.values()), dtype=np.float64)
    near = np.clip(values, -_FURTHEST, _FURTHEST)
    axes.scatter(
        near, heights, s=36, marker=_SHAPES.get(method, "o"), color=colour, edgecolor=SURFACE, lw=0.6, zorder=3,
        label=method,
    )  # fmt: skip
    for value, height in zip(values, heights, strict=True):
        if abs(value) > _FURTHEST:
            inward = -1 if value > 0 else 1
            axes.annotate(
                f"{value:+.0f}".replace("-", "\N{MINUS SIGN}"),
                (np.sign(value) * _FURTHEST, height),
                xytext=(inward * 6, 0),
                textcoords="offset points",
                ha="left" if inward > 0 else "right",
                va="center",
                fontsize=7,
                color=INK,
            )


@dataclass(frozen=True)
class Curve:
    """One training: a value at each of some iterations, epochs or strengths."""

    iterations: Sequence[float]
    values: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.iterations) != len(self.values) or not len(self.values):
            raise ValueError(
                f"a curve has {len(self.iterations)} iterations and {len(self.values)} values; expected as many of each"
            )

    @property
    def final(self) -> float:
        """Mean of the last twentieth, so that one noisy evaluation does not decide."""
        return float(np.mean(self.values[-max(1, len(self.values) // 20) :]))

    def reaches(self, level: float) -> float | None:
        """The first iteration at which the value is at least `level`; None if it never is."""
        return next((float(at) for at, value in zip(self.iterations, self.values, strict=True) if value >= level), None)


@styled
def training_curves(panels: Mapping[str, Mapping[str, Sequence[Curve]]], levels: Mapping[str, float]) -> Figure:
    """The ELBO against the iteration: a panel for each data set, a colour for each method, a line for each training.

    `levels` are heights to mark across the panels, by title.
    """
    figure, grid = _grid(len(panels), 2, 4.7, 3.8)
    for axes, (title, methods) in zip(grid.flatten(), panels.items(), strict=False):
        for index, (method, curves) in enumerate(methods.items()):
            colour = method_colour(method, index)
            for number, curve in enumerate(curves):
                width, alpha = (1.8, 1.0) if len(curves) == 1 else (0.9, 0.6)
                label = _plain(method) if number == 0 else None
                axes.plot(curve.iterations, curve.values, color=colour, lw=width, alpha=alpha, label=label)
        if title in levels:
            axes.axhline(levels[title], color=MUTED, lw=1.2, ls=(0, (4, 3)), label="BBB at the end")
        axes.set_ylim(*_window([curve for curves in methods.values() for curve in curves]))
        axes.set_title(_plain(title))
        axes.set(xlabel="iteration", ylabel="ELBO (nats)")
        axes.margins(x=0)
        axes.tick_params(length=0)
        axes.legend(loc="lower right")
    return figure


def _window(curves: Sequence[Curve]) -> tuple[float, float]:
    """Limits that show the climb and the end; the first steps, far below, would flatten all else."""
    values: NDArray[Any] = np.concatenate([np.asarray(curve.values, dtype=np.float64) for curve in curves])
    low, high = float(np.quantile(values, 0.06)), float(values.max())
    margin = 0.06 * (high - low) or 1.0
    return low - margin, high + margin


View: TypeAlias = Literal["whole", "climb", "logarithmic"]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One picture of `curve_panels`: the trainings of each method."""

    title: str
    curves: Mapping[str, Sequence[Curve]]
    y_label: str
    view: View = "whole"
    """Show all values, leave the first steps of a climb below the picture, or use a logarithmic scale."""

    @property
    def ends(self) -> str:
        """Where each method ends, in words."""
        last = {method: np.mean([curve.values[-1] for curve in curves]) for method, curves in self.curves.items()}
        return f"{self.title}: " + ", ".join(f"{method} {value:.3g}" for method, value in last.items())


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean of some trainings where all of them have a value; raises ValueError if that is nowhere."""
    by_place = [dict(zip(curve.iterations, curve.values, strict=True)) for curve in curves]
    common = sorted(set(by_place[0]).intersection(*by_place[1:]))
    if not common:
        raise ValueError(f"{len(curves)} trainings have no place in common, so they have no mean")
    return Curve(common, [float(np.mean([values[place] for values in by_place])) for place in common])


@styled
def curve_panels(
    panels: Sequence[Panel], *, x_label: str, columns: int = 2, height: float = 3.3, own_scales: bool = False
) -> Figure:
    """Panels with a line for each method: the mean of its trainings, and each of them thin behind it.

    Methods without a posterior are dashed, variants of a method dash-dotted, `…/random` dotted. Panels in a row share
    their scale, unless each has its own; a panel is so many inches high.
    """
    columns = min(len(panels), columns)
    width, sharey = 9.6 / columns if columns > 1 else 5.6, False if own_scales else "row"
    figure, grid = _grid(len(panels), columns, width, height, below=0.5, sharex=True, sharey=sharey)
    rows, handles = len(grid), dict[str, Any]()
    for index, axes in enumerate(grid.flatten()):
        if index >= len(panels):
            grid[-2, index % columns].tick_params(labelbottom=True)
            grid[-2, index % columns].set_xlabel(x_label)
            continue
        panel = panels[index]
        for number, (method, curves) in enumerate(panel.curves.items()):
            handles.setdefault(method, _method_lines(axes, method, curves, number))
        axes.set_title(_plain(panel.title))
        axes.margins(x=0.02)
        axes.tick_params(length=0)
        if index % columns == 0:
            axes.set_ylabel(panel.y_label)
        if index >= columns * (rows - 1):
            axes.set_xlabel(x_label)
        if panel.view == "logarithmic":
            axes.set_yscale("log")
        row = panels[index - index % columns :][:columns]
        drawn = [curve for other in row for curves in other.curves.values() for curve in curves]
        if panel.view == "climb" and drawn:
            axes.set_ylim(*_window(drawn))
    in_row = 6 if columns > 1 else 3
    lines = -(-len(handles) // in_row)
    figure.legend(
        list(handles.values()),
        list(map(_plain, handles)),
        loc="outside lower center",
        ncols=max(1, -(-len(handles) // lines)),
    )
    return figure


def _method_lines(axes: Axes, method: str, curves: Sequence[Curve], position: int) -> Any:
    colour = method_colour(method.split("/", maxsplit=1)[0], position)
    style: Any = (0, (5, 2)) if method in _WITHOUT_POSTERIOR else "-"
    if "/" in method:
        style = (0, (1, 1.2)) if method.endswith("/random") else (0, (4, 1.5, 1, 1.5))
    if len(curves) > 1:
        for curve in curves:
            axes.plot(curve.iterations, curve.values, color=colour, ls=style, lw=0.7, alpha=0.45)
    middle = mean_curve(curves)
    dot = "o" if len(middle.values) < _FEW else ""
    return axes.plot(middle.iterations, middle.values, color=colour, ls=style, lw=1.8, marker=dot, ms=3.5)[0]


@styled
def quartile_panels(
    panels: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], *, x_label: str, y_label: str, columns: int = 3
) -> Figure:
    """Panels with the median of each method's runs as a line and their interquartile range as a band.

    `panels` are by title, by method: runs of equal length, a value for each iteration.
    """
    figure, grid = _grid(len(panels), columns, 3.5, 3.1, least_width=5.6, below=0.6)
    handles: dict[str, Any] = {}
    for axes, (title, methods) in zip(grid.flatten(), panels.items(), strict=False):
        for position, (method, runs) in enumerate(methods.items()):
            low, middle, high = np.quantile(np.asarray(runs, dtype=np.float64), [0.25, 0.5, 0.75], axis=0)
            colour = method_colour(method.split("/", maxsplit=1)[0], position)
            style: Any = (0, (5, 2)) if method in _WITHOUT_POSTERIOR else "-"
            iterations = np.arange(1, len(middle) + 1)
            axes.fill_between(iterations, low, high, color=colour, alpha=0.18, lw=0)
            line = axes.plot(iterations, middle, color=colour, lw=1.8, ls=style)[0]
            handles.setdefault(method.split("/", maxsplit=1)[0], line)
        axes.set_title(_plain(title))
        axes.margins(x=0.01)
        axes.tick_params(length=0)
    for axes in grid[:, 0]:
        axes.set_ylabel(y_label)
    for axes in grid[-1]:
        axes.set_xlabel(x_label)
    figure.legend(
        list(handles.values()), list(map(_plain, handles)), loc="outside lower center", ncols=min(5, len(handles))
    )
    return figure


@styled
def variance_scatter(panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]]) -> Figure:
    """Variances of methods against the truth's on logarithmic scales, a picture for each data set.

    `panels` are by data set, by method: the truth's variances and the method's.
    """
    figure, rows = _grid(len(panels), 4, 2.4, 2.4, below=0.5)
    grid, columns = rows.flatten(), rows.shape[1]
    handles: dict[str, Any] = {}
    for axes, (name, methods) in zip(grid, panels.items(), strict=False):
        for position, (method, (truth, own)) in enumerate(methods.items()):
            dots = axes.scatter(truth, own, s=7, color=method_colour(method, position), alpha=0.6, linewidths=0)
            handles.setdefault(method, dots)
        low, high = (pick([v for pair in methods.values() for row in pair for v in row]) for pick in (min, max))
        axes.plot([low, high], [low, high], color=MUTED, lw=0.8)
        axes.set(xscale="log", yscale="log", title=_plain(name))
        axes.tick_params(length=0)
        axes.minorticks_off()
    for axes in grid[max(0, len(panels) - columns) : len(panels)]:
        axes.set_xlabel("variance of HMC")
    for axes in grid[: len(panels) : columns]:
        axes.set_ylabel("of the method")
    figure.legend(list(handles.values()), list(map(_plain, handles)), loc="outside lower center", ncols=len(handles))
    return figure
