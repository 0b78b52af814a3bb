"""Figure 1: the precision matrices of four posteriors of the same network."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisygrad import plots
from noisygrad_paper.experiments.precision_matrices import read_matrices
from noisygrad_paper.report.page import ReportPage
from noisygrad_paper.report.provenance import flattened

_NAMES = {
    "NNG-FFG": "fully factorised",
    "NNG-MVG": "matrix-variate",
    "NNG-BlkTri": "block tridiagonal",
    "NNG-full": "full covariance",
}
_BOUNDARIES = "boundaries"


def sections(results: Path, page: ReportPage) -> None:
    """The four matrices as one figure, and how they were made."""
    page.section("Figure 1: precision matrices")
    arrays = results / "precision-matrices.npz"
    if not arrays.is_file():
        page.absent("precision-matrices.npz", "precision-matrices")
        return
    found = read_matrices(arrays)
    matrices = {f"{name}: {_NAMES[name]}": found[name] for name in _NAMES if name in found}
    if not matrices:
        raise ValueError(f"{arrays} has {', '.join(found) or 'nothing'}; expected matrices named {', '.join(_NAMES)}")
    size = len(next(iter(matrices.values())))
    page.text(
        "The posterior's precision over all weights of one network, scaled to a unit diagonal, as each family can "
        "express it: single weights, weights of a layer, of neighbouring layers, of all. Of the block-tridiagonal "
        "posterior it is the covariance that has nothing between layers further apart; its precision has what the "
        "layers between them carry."
    )
    page.figure(
        plots.precision_matrices(matrices, layers=layer_sizes(found.get(_BOUNDARIES), size), columns=2),
        caption="Absolute normalised precision on one colour scale; lines divide the layers.",
        alt=f"Normalised precision matrices of {size} weights: {', '.join(matrices)}.",
    )
    absent = [name for name in _NAMES if name not in found]
    if absent:
        page.text(f"Not among the results: {', '.join(absent)}.")
    settings = results / "precision-matrices.json"
    if settings.is_file():
        page.folded_pairs(
            flattened(json.loads(settings.read_text(encoding="utf-8"))), caption="How the precision matrices were made"
        )


def layer_sizes(boundaries: NDArray[Any] | None, size: int) -> dict[str, int] | None:
    """Weights per layer from the places where layers begin or end; with or without the outermost two."""
    if boundaries is None:
        return None
    places = sorted({0, size, *(int(place) for place in boundaries)})
    if places[0] < 0 or places[-1] > size:
        raise ValueError(f"the boundaries {places} lie outside of matrices of {size} weights")
    return {f"layer {number}": int(count) for number, count in enumerate(np.diff(places), start=1)}
