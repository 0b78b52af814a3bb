"""Colours and style of every picture, safe for colour-blind readers, and how they change on a dark page."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

import matplotlib
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

# Neutral colours, each as (on light paper, on dark): a page may exchange the first for the second.
INK, MUTED, GRID, SURFACE = "#1b2430", "#5f6b78", "#dde3e9", "#fefefe"
ON_DARK = {INK: "#e8ecf1", MUTED: "#a3aebb", GRID: "#343d49", SURFACE: "#171c24"}

# Okabe and Ito's colours: told apart with any kind of colour vision.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"
_NAMED = {"point": "#7d8794", "diagonal": ORANGE, "kronecker": BLUE, "tridiagonal": GREEN, "full": PURPLE}
_OTHERS = (SKY, VERMILION, BLUE, ORANGE, GREEN, PURPLE)
HEAT = LinearSegmentedColormap.from_list(
    "noisygrad", ["#f4f7fa", "#bcd9ec", "#5fa8d3", "#1f6fa8", "#0b3c66", "#061d36"], N=24
)

_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.titlepad": 10,
    "axes.labelsize": 10,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.facecolor": SURFACE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "figure.facecolor": SURFACE,
    "savefig.facecolor": SURFACE,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 2.0,
    "hatch.linewidth": 0.6,
}

Parameters = ParamSpec("Parameters")


def styled(draw: Callable[Parameters, Figure]) -> Callable[Parameters, Figure]:
    """Draw in the house style, whatever the caller's rcParams are, and leave those as they were."""

    @functools.wraps(draw)
    def drawn(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Figure:
        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(_STYLE)
            figure = draw(*args, **kwargs)
            figure.draw_without_rendering()  # ticks are made at the first drawing: in this style, not the caller's
            return figure

    return drawn


def spaced() -> ConstrainedLayoutEngine:
    """A layout for several rows of panels, with room between the labels of one and the title of the next."""
    return ConstrainedLayoutEngine(h_pad=0.11, w_pad=0.11)


def colour_of(name: str, position: int = 0) -> str:
    """The colour of a method wherever it is drawn; names that are not a posterior's go by their position."""
    return _NAMED.get(name, _OTHERS[position % len(_OTHERS)])
