"""The part of the page of step times that says how cost grows, from what `benchmarks/scaling.py` measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from noisygrad.palette import BLUE, MUTED, ORANGE, styled

COLOURS = {"SGD": MUTED, "NoisyAdam": ORANGE, "NoisyKFAC": BLUE}
KINDS = ("plain", "statistics", "refresh")
REASONS = """
**Why with the width w.** The products of a convolution grow as w², but narrow layers leave most of the GPU idle, so
SGD's slope starts below 1 and rises. What NoisyAdam adds to a plain step, noise and the move of the mean, is one pass
over the weights: w² too. Its statistics form the gradient of every example apart, as many products as the gradient of
the weights takes, also w²; narrow layers seem to hide them less. NoisyKFAC multiplies the draw and the gradient by
factors of 9·w·channels rows, w³ in all; from ×2 to ×4 that begins to show. Its refresh is Cholesky factorisations and
triangular inverses of those factors, w³ again; at ×1 it is a chain of small kernels that wait for each other.

**Why with the batch.** The network's own cost approaches slope 1 once the batch fills the GPU. What the optimisers add
to a plain step hardly depends on the batch ({adam} ms of NoisyAdam's, {kfac} of NoisyKFAC's), so their share falls.
Statistics are sums over examples, slope 1 in the end. A refresh looks at the factors alone: what grows in its row is
the statistics and the plain step that belong to the same step.
"""
Times = dict[str, dict[str, float]]


def growth(path: Path, picture: Path) -> str:
    """The section, as Markdown; draws its picture."""
    record = json.loads(path.read_text())
    series = {
        "width": {row["width"]: row["seconds"] for row in record["steps"] if row["batch"] == 128},
        "batch": {row["batch"]: row["seconds"] for row in record["steps"] if row["width"] == 1.0},
    }
    draw(series).savefig(picture, dpi=160, metadata={"Software": None})
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    prediction, every = record["prediction"], record["every"]
    parts = [
        f"\n## How cost grows\n\n`{record['command']}`; {record['device']}; {versions}. "
        f"All steps but K-FAC's refreshes are CUDA graphs, with statistics every {every['statistics']} steps and "
        f"factors every {every['factors']}.\n\n"
        f"![Mean step time against width and batch](assets/{picture.name})\n",
        *(f"\n{table(name, found)}" for name, found in series.items()),
        REASONS.format(adam=_added("NoisyAdam", series["batch"]), kfac=_added("NoisyKFAC", series["batch"])),
        f"\n{prediction['samples']} weight samples for {prediction['images']} images take "
        f"{prediction['draws'] * 1e3:.0f} ms, {prediction['ratio']:.1f} times one pass of the plain network "
        f"({prediction['plain'] * 1e3:.1f} ms).\n",
    ]
    return "".join(parts)


@styled
def draw(series: dict[str, dict[float, Times]]) -> Figure:
    """Mean step times on logarithmic axes, with a line of slope 1 (batch) or 2 (width) to compare with."""
    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    for axes, (name, found) in zip(figure.subplots(1, 2, sharey=True), series.items(), strict=True):
        _panel(axes, name, found)
    return figure


def _panel(axes: Axes, name: str, found: dict[float, Times]) -> None:
    at = sorted(found)
    for method, colour in COLOURS.items():
        axes.plot(at, [1e3 * found[x][method]["step"] for x in at], "o-", color=colour, label=method)
    power = 2 if name == "width" else 1
    start = 1e3 * found[at[0]]["SGD"]["step"]
    guide = [start * (x / at[0]) ** power for x in at]
    axes.plot(at, guide, ":", color=MUTED, lw=1, label=f"slope {power}")
    axes.set(xscale="log", yscale="log", xlabel=f"{name} (×)" if name == "width" else "batch")
    axes.set_xticks(at, [f"{x:g}" for x in at])
    highest = 1e3 * max(times["NoisyKFAC"]["step"] for times in found.values())
    ticks = [tick for tick in (2, 5, 10, 20, 50, 100) if tick <= highest]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.legend(frameon=False)
    if name == "width":
        axes.set_ylabel("mean step (ms)")


def table(name: str, found: dict[float, Times]) -> str:
    """Each kind of step at each size, and the slope of the mean on logarithmic axes between neighbours."""
    at = sorted(found)
    heads = [f"{name} {x:g}" for x in at]
    rows = [f"| (ms) | {' | '.join(heads)} | slopes |", f"|{'---|' * (len(at) + 2)}"]
    for method in COLOURS:
        for kind in (*KINDS, "step"):
            values = [found[x][method].get(kind) for x in at]
            if any(value is None for value in values) or (kind == "plain" and method == "SGD"):
                continue
            numbers = [float(value) for value in values if value is not None]
            slopes = [_slope(numbers[i], numbers[i + 1], at[i], at[i + 1]) for i in range(len(at) - 1)]
            cells = " | ".join(f"{1e3 * value:.2f}" for value in numbers)
            label = f"**{method}**, mean" if kind == "step" else f"{method}, {kind}"
            rows.append(f"| {label} | {cells} | {', '.join(f'{slope:.1f}' for slope in slopes)} |")
    return "\n".join(rows) + "\n"


def _added(method: str, found: dict[float, Times]) -> str:
    """What a method adds to a plain step of SGD, the least and the most of all sizes, in ms."""
    added = [1e3 * (times[method]["plain"] - times["SGD"]["plain"]) for times in found.values()]
    return f"{min(added):.2f} to {max(added):.2f}"


def _slope(first: float, second: float, start: float, stop: float) -> float:
    return math.log(second / first) / math.log(stop / start)
