"""Figure 1: the precision matrices of four posteriors of the same network."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisygrad import plots
from noisygrad_paper.experiments.plain_values import plain_config
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
    if not all(isinstance(each, np.ndarray) for each in found.values()):  # numpy hands out other files as bytes
        raise ValueError(f"{arrays} has files that are no arrays")
    matrices = {f"{name}: {_NAMES[name]}": found[name] for name in _NAMES if name in found}
    if not matrices:
        raise ValueError(f"{arrays} has {', '.join(found) or 'nothing'}; expected matrices named {', '.join(_NAMES)}")
    size = _common_size(matrices)
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
        page.folded_pairs(flattened(_settings(settings)), caption="How the precision matrices were made")


def _common_size(matrices: Mapping[str, NDArray[Any]]) -> int:
    """Of precision matrices that can be drawn; raises ValueError for others."""
    first = next(iter(matrices.values()))
    for name, matrix in matrices.items():
        square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] > 0
        if not square or matrix.shape != first.shape or matrix.dtype.kind not in "fiu":
            raise ValueError(f"{name} has shape {matrix.shape} of {matrix.dtype}; expected square matrices of one size")
        if not bool(np.isfinite(matrix).all()):
            raise ValueError(f"{name} has NaN or infinite entries")
    return len(first)


def _settings(path: Path) -> dict[str, Any]:
    try:
        return plain_config(json.loads(path.read_text(encoding="utf-8")), path.name)
    except (TypeError, ValueError, RecursionError) as reason:
        raise ValueError(f"{path} is not a description of precision matrices ({reason}): delete it") from reason


def layer_sizes(boundaries: NDArray[Any] | None, size: int) -> dict[str, int] | None:
    """Weights per layer from the places where layers begin or end; with or without the outermost two."""
    if boundaries is None:
        return None
    if boundaries.ndim != 1 or boundaries.dtype.kind not in "iu":
        raise ValueError(
            f"the boundaries are of shape {boundaries.shape} and {boundaries.dtype}; expected whole numbers"
        )
    places = sorted({0, size, *(int(place) for place in boundaries)})
    if places[0] < 0 or places[-1] > size:
        raise ValueError(f"the boundaries {places} lie outside of matrices of {size} weights")
    return {f"layer {number}": int(count) for number, count in enumerate(np.diff(places), start=1)}
