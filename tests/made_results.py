"""Results made up for tests of the report: written as the experiments write them, with figures chosen by the test."""

import json
import random
from pathlib import Path

import numpy as np

from noisygrad.experiments.cells import Cell, Results
from noisygrad.report import paper

VERSIONS = {"python": "3.11.2", "noisygrad": "0.1.0", "torch": "2.13.0"}


def cell(data: str, method: str, replicate: int, metrics: dict, **changes) -> Cell:
    values = {
        "experiment": "regression",
        "config": {"epochs": 1000, "batch_size": 10 if data in ("boston", "yacht") else 100, "optim": {"lr": 0.01}},
        "seconds": 1.5,
        "versions": VERSIONS,
        "device": "cuda: NVIDIA H200",
    }
    return Cell(**{**values, **changes}, data=data, method=method, replicate=replicate, metrics=metrics)


def failed(data: str, method: str, replicate: int, error: str) -> Cell:
    return cell(data, method, replicate, {}, error=error)


def around(mean: float, standard_error: float, count: int) -> list[float]:
    """Values with exactly this mean and standard error."""
    draw = random.Random(count)
    raw = np.array([draw.gauss(0, 1) for _ in range(count)])
    raw = (raw - raw.mean()) / raw.std(ddof=1)
    return (mean + standard_error * count**0.5 * raw).tolist()


def shifted(method: str, data: str, shift: float, count: int | None = None) -> list[Cell]:
    """Cells whose figures differ from the paper's by `shift` standard errors of the difference, plus for better."""
    quoted = paper.quoted(method, data)
    count = count or paper.replicates_of(data)
    columns = {}
    for key, up in (("rmse", -1), ("log_likelihood", 1)):
        error = quoted[key].standard_error or 0.01
        columns[key] = around(quoted[key].mean + up * shift * error * 2**0.5, error, count) if count > 1 else [1.0]
    rows = zip(*columns.values(), strict=True)
    return [cell(data, method, number, dict(zip(columns, row, strict=True))) for number, row in enumerate(rows)]


def write_regression(folder: Path) -> None:
    """All methods with figures all over the range, gaps, a failure, variants, and a data set of the user's own."""
    draw = random.Random(1)
    cells = []
    for method in paper.METHODS:
        for data in paper.rows_of((method,)):
            if (method, data) in {("VMG", "protein"), ("PBP", "wine")} or data == "year":
                continue
            count = 12 if (method, data) == ("NNG-FFG", "kin8nm") else None
            cells += shifted(method, data, draw.uniform(-2.5, 2.5), count)
    cells += [cell("year", "NNG-MVG", 0, {"rmse": 8.9, "log_likelihood": -3.6})]
    for variant in ("NNG-MVG/point-noise", "NNG-BlkTri", "NNG-full", "point"):
        for data in ("boston", "energy", "yacht"):
            rows = zip(around(2.8, 0.1, 20), around(-2.4, 0.05, 20), strict=True)
            cells += [
                cell(data, variant, k, {"rmse": rmse, "log_likelihood": value}) for k, (rmse, value) in enumerate(rows)
            ]
    cells += [cell("my-table", "NNG-MVG", k, {"rmse": 1.0 + 0.1 * k, "log_likelihood": -1.0}) for k in range(3)]
    cells += [failed("wine", "PBP", 3, "not finite: rmse = nan")]
    Results(folder, "regression").append(cells)


def write_convergence(folder: Path) -> None:
    iterations = np.arange(10, 4001, 10)
    ends = {"BBB": (-900.0, 900.0, 0.01), "NNG-FFG": (-880.0, 500.0, 0.01), "NNG-MVG": (-700.0, 400.0, 0.02)}
    cells = []
    for data in ("boston", "concrete"):
        for method, (end, scale, lr) in ends.items():
            elbo = end - 6000 * np.exp(-iterations / scale)
            metrics = {"iterations": iterations.tolist(), "elbo": elbo.tolist(), "lr": lr}
            cells.append(cell(data, method, 0, metrics, experiment="convergence", config={"kl_weight": 1.0}))
    Results(folder, "convergence").append(cells)


def write_precision(folder: Path, sizes: tuple[int, ...] = (210, 240, 16)) -> None:
    total, bounds = sum(sizes), np.cumsum((0, *sizes))
    noise = np.random.default_rng(0).standard_normal((total, total // 4))
    dense = noise @ noise.T / (total // 4) + 0.3 * np.eye(total)
    scale = np.sqrt(np.diagonal(dense))
    dense /= np.outer(scale, scale)
    layer = np.searchsorted(bounds, np.arange(total), side="right")
    apart = np.abs(layer[:, None] - layer[None])
    np.savez(
        folder / "precision-matrices.npz",
        boundaries=bounds,
        **{
            "NNG-FFG": np.eye(total),
            "NNG-MVG": dense * (apart == 0),
            "NNG-BlkTri": dense * (apart <= 1),
            "NNG-full": dense,
        },
    )
    settings = {"settings": {"data": "boston", "hidden": [15, 15]}, "versions": VERSIONS, "seconds": 12.0}
    (folder / "precision-matrices.json").write_text(json.dumps(settings))


def write_all(folder: Path) -> None:
    write_regression(folder)
    write_convergence(folder)
    write_precision(folder)
