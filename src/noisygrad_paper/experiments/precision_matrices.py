"""Figure 1 of the paper: the precision matrices of four posteriors of one network.

A network with two hidden layers of 15 units, trained by noisy natural gradient on all rows of boston (nothing is
tested, and the paper names no split), once with each family of posteriors, from the same seed. What is kept is the
posterior's precision over all 466 weights, scaled to a unit diagonal. Weights are in the order of the layers, each the
matrix [W | b] row by row: the weights into one unit lie together.
"""

import io
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noisygrad.archive import write_atomically
from noisygrad.kernels.threads import one_thread
from noisygrad.likelihoods import Gaussian
from noisygrad.optim.options import positive
from noisygrad.replicas.engine import Execution, ReplicaGenerators, train_replicas
from noisygrad.replicas.noisy import NoisyLearner, NoisySettings
from noisygrad.replicas.perceptrons import Perceptrons
from noisygrad.versions import versions
from noisygrad_paper.data import DamagedDataError, Standardised, load_table, standardised
from noisygrad_paper.data.files import unpack_arrays
from noisygrad_paper.experiments.cells import ConfigurationError, ResultsError, device_name, difference
from noisygrad_paper.experiments.regression import annealing

EXPERIMENT = "precision-matrices"
FAMILIES: dict[str, str] = {
    "NNG-FFG": "diagonal",
    "NNG-MVG": "kronecker",
    "NNG-BlkTri": "tridiagonal",
    "NNG-full": "full",
}
BOUNDARIES = "boundaries"
"""Name of the array with the places where layers begin and end."""

Report: TypeAlias = Callable[[str, int], None]
"""Called after each epoch with the method and the number of the epoch."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """What is trained; raises ValueError when made with values that make no sense."""

    data: str = "boston"
    hidden: tuple[int, ...] = (15, 15)
    epochs: int = 300
    batch_size: int = 10
    lr: float = 0.01  # α̃
    fisher_decay: float = 0.999  # 1 − β̃
    anneal: float = 0.1
    """What both rates are multiplied by in the second half of the epochs."""
    kl_clip: float = 1e-3  # c
    factor_every: int = 20  # T_inv
    """Of the families whose factorisation is expensive: block tridiagonal and full."""
    noise_prior: tuple[float, float] = (6.0, 6.0)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "anneal"):
            positive(name, getattr(self, name))
        if not self.hidden or min(self.hidden) < 1:
            raise ValueError(f"hidden has the sizes of the hidden layers, each at least 1; got {self.hidden}")

    def settings(self, method: str) -> NoisySettings:
        """Of one method."""
        family = FAMILIES[method]
        return NoisySettings(
            family=family,
            lr=self.lr,
            fisher_decay=self.fisher_decay,
            kl_clip=self.kl_clip,
            factor_every=self.factor_every if family in ("tridiagonal", "full") else 1,
        )

    def plain(self) -> dict[str, Any]:
        """The whole as JSON gives it back, with the settings of each method."""
        whole = {**asdict(self), "methods": {method: asdict(self.settings(method)) for method in FAMILIES}}
        plain: dict[str, Any] = json.loads(json.dumps(whole))
        return plain


def missing(config: PrecisionConfig, results: Path, *, force: bool = False) -> list[str]:
    """The methods whose matrices are not in the results folder yet; all of them with `force`.

    Raises ConfigurationError where they were made by another configuration, ResultsError where it cannot be read.
    """
    arrays, about = _paths(results)
    if force or not (arrays.is_file() and about.is_file()):
        return list(FAMILIES)
    stored = _read(about)
    if stored["config"] != config.plain():
        raise ConfigurationError(
            f"{arrays} was made by another configuration:\n{difference(stored['config'], config.plain())}\n"
            "Choose another folder with --results, go back to the stored configuration, or replace it with --force."
        )
    found = read_matrices(arrays)
    return [method for method in FAMILIES if method not in found or method not in stored["seconds"]]


def run(
    config: PrecisionConfig,
    results: Path,
    *,
    data_dir: str | Path | None = None,
    device: str = "cpu",
    execution: Execution = "auto",
    force: bool = False,
    report: Report = lambda method, epoch: None,
) -> list[str]:
    """Train what is missing and write `precision-matrices.npz` and `.json`, after each method; gives those trained.

    The arrays are one float32 matrix [n, n] for each method, and `boundaries`. Raises as `missing` does.
    """
    todo = missing(config, results, force=force)
    if not todo:
        return []
    table = load_table(config.data, data_dir)
    every = np.arange(table.rows, dtype=np.intp)
    data = standardised(table, [(every, every[:0])])
    arrays, about = _paths(results)
    matrices: dict[str, NDArray[Any]] = {}
    found: dict[str, dict[str, float]] = {"seconds": {}, "elbo": {}}
    if len(todo) < len(FAMILIES):
        matrices = read_matrices(arrays)
        found = {name: _read(about)[name] for name in found}
    for method in todo:
        with one_thread(device == "cpu"):
            start = time.perf_counter()
            learner, elbo = trained(method, config, data, device=device, execution=execution, report=report)
            matrices[method] = normalised(precision(learner)).astype(np.float32)
            found["seconds"][method] = time.perf_counter() - start
            found["elbo"][method] = elbo
        sizes = [rows * columns for rows, columns in learner.network.shapes]
        matrices[BOUNDARIES] = np.cumsum([0, *sizes])
        described = {
            "config": config.plain(),
            "rows": table.rows,
            "weights": sum(sizes),
            **found,
            "device": device_name(device),
            "versions": versions(),
        }
        results.mkdir(parents=True, exist_ok=True)
        packed = io.BytesIO()
        np.savez_compressed(packed, **matrices)  # type: ignore[arg-type]
        # The description last: arrays without one count as missing.
        write_atomically(arrays, packed.getvalue())
        write_atomically(about, (json.dumps(described, indent=1, allow_nan=False) + "\n").encode())
    return todo


def trained(
    method: str,
    config: PrecisionConfig,
    data: Standardised,
    *,
    device: str = "cpu",
    execution: Execution = "auto",
    report: Report = lambda method, epoch: None,
) -> tuple[NoisyLearner, float]:
    """The trained network of one method, and its ELBO on the data it was trained on."""
    streams = ReplicaGenerators.of([config.seed], device)
    learner = NoisyLearner(
        Perceptrons((data.x_train.shape[-1], *config.hidden, data.y_train.shape[-1])),
        Gaussian(noise_prior=config.noise_prior),
        config.settings(method),
        num_data=data.x_train.shape[1],
        generators=streams.start,
        device=device,
    )
    x, y = (torch.from_numpy(array).to(learner.mean) for array in (data.x_train, data.y_train))
    train_replicas(
        learner,
        x,
        y,
        epochs=config.epochs,
        batch_size=config.batch_size,
        streams=streams,
        anneal=lambda epoch: annealing(epoch, epochs=config.epochs, factor=config.anneal),
        execution=execution,
        on_epoch=lambda epoch: report(method, epoch),
    )
    return learner, float(learner.elbo(x, y, 100, streams.test)[0])


def precision(learner: NoisyLearner) -> Tensor:
    """P of the first replica over all weights, `[n, n]`: zero between blocks."""
    whole: Tensor = torch.block_diag(*[block.to_dense()[0].double() for block in learner.precisions()])
    return whole


def normalised(matrix: Tensor) -> NDArray[np.float64]:
    """P_ij / √(P_ii P_jj), with its sign, in float64; raises ValueError for what is no precision."""
    diagonal = matrix.diagonal()
    if not bool(matrix.isfinite().all() and (diagonal > 0).all()):
        raise ValueError("the precision is not finite or its diagonal is not positive: the training diverged")
    scale = diagonal.rsqrt()
    scaled = scale[:, None] * matrix * scale
    # Products in float32 are symmetric up to rounding only.
    scaled = 0.5 * (scaled + scaled.mT)
    scaled.fill_diagonal_(1.0)
    array: NDArray[np.float64] = scaled.cpu().numpy()
    return array


def _paths(results: Path) -> tuple[Path, Path]:
    return results / f"{EXPERIMENT}.npz", results / f"{EXPERIMENT}.json"


def read_matrices(arrays: Path) -> dict[str, NDArray[Any]]:
    """The matrices and the boundaries in a file; raises ResultsError where it cannot be read."""
    try:
        return unpack_arrays(arrays.read_bytes())
    except DamagedDataError as reason:
        raise ResultsError(f"{arrays} has no precision matrices: {reason}. Delete it") from reason


def _read(about: Path) -> dict[str, Any]:
    try:
        stored: dict[str, Any] = json.loads(about.read_text(encoding="utf-8"))
        if not all(isinstance(stored[name], dict) for name in ("config", "seconds", "elbo")):
            raise TypeError("config, seconds and elbo must be objects")
    except (KeyError, TypeError, ValueError) as reason:
        raise ResultsError(f"{about} is not a description of precision matrices ({reason}): delete it") from reason
    return stored
