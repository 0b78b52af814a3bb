"""Results made up for tests of the report: written as the experiments write them, with figures chosen by the test."""

import json
import random
from pathlib import Path

import numpy as np

from noisygrad_paper.experiments.cells import Cell, Results
from noisygrad_paper.report import image_aims, paper
from noisygrad_paper.report.study import Study

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


def classified(method: str, replicate: int, metrics: dict, data: str = "cifar10", **changes) -> Cell:
    """A cell of the classification experiment with these metrics and no others."""
    configuration = f"/{method}/"
    batch_norm = "/B/" in configuration or "/D+B/" in configuration
    augment = "/D/" in configuration or "/D+B/" in configuration
    config = {"epochs": 150, "augment": augment, "batch_norm": batch_norm, "kl_weight": 0.1 if augment else 0.5}
    values = {"experiment": "classification", "config": config, "seconds": 900.0}
    return cell(data, method, replicate, metrics, **{**values, **changes})


def study_of(*cells: Cell) -> Study:
    return Study(cells, image_aims.ORDER)


def trained(method: str, replicate: int, accuracy: float, ece: float, data: str = "cifar10") -> Cell:
    """A cell with everything that is ever measured, around an accuracy and a calibration."""
    noisy = method.split("/", maxsplit=1)[0] in ("BBB", "noisy-Adam", "noisy-K-FAC")
    draw = random.Random(f"{method} {replicate}")
    epochs = list(range(1, 151))
    climb = [1 - np.exp(-epoch / 25) for epoch in epochs]
    confidence = (np.arange(15) + 0.5) / 15
    share = np.where(confidence > 0.2, confidence**4, 0.0)
    share /= share.sum()
    metrics = {
        "accuracy": accuracy,
        "accuracy_of_mean_logits": accuracy - 0.1 * noisy,
        "accuracy_of_mean_weights": accuracy - 0.9 * noisy,
        "nll": (100 - accuracy) / 30 + 5 * ece,
        "ece": ece,
        "brier": (100 - accuracy) / 70,
        "epochs": epochs,
        "test_accuracy": [10 + (accuracy - 10) * rise + draw.gauss(0, 0.4) for rise in climb],
        "train_loss": [2.3 * (1.02 - rise) * (1.5 if noisy else 1.0) for rise in climb],
        "bin_confidence": np.where(share > 0, confidence, 0).tolist(),
        "bin_accuracy": np.where(share > 0, np.clip(confidence - ece, 0, 1), 0).tolist(),
        "bin_share": share.tolist(),
        "step_ms": 3.4 if noisy else 1.9,
    }
    if data == "cifar10":
        metrics["auroc_entropy"] = 0.9 - ece
        if noisy:
            metrics["auroc_mutual_information"] = 0.91 - ece
        for number, kind in enumerate(("noise", "blur", "contrast"), start=1):
            metrics[f"{kind}_accuracy"] = [accuracy - number * 3 * strength for strength in range(1, 6)]
            metrics[f"{kind}_ece"] = [ece * (1 + number * strength / 3) for strength in range(1, 6)]
            metrics[f"{kind}_nll"] = [1.0 + ece * strength for strength in range(1, 6)]
    return classified(method, replicate, metrics, data)


def write_classification(folder: Path) -> None:
    """All of Table 2 but one place, a failed seed, a variant, and two small data sets."""
    draw = random.Random(2)
    cells = []
    for method in paper.TABLE_2_METHODS:
        for configuration in ("", "/D", "/B", "/D+B"):
            name = method + configuration
            if (method == "K-FAC+WD" and configuration) or name == "SGD/D+B":
                continue
            quoted = paper.quoted(name, "cifar10")
            middle = quoted["accuracy"].mean if quoted else 70.0
            ece = 0.02 if method == "noisy-K-FAC" else 0.05 if method.startswith("noisy") else 0.11
            shift = draw.uniform(-1.2, 1.0)
            cells += [
                trained(name, seed, middle + shift + draw.gauss(0, 0.2), ece + 0.001 * seed)
                for seed in range(3 if method in ("K-FAC", "noisy-K-FAC") else 1)
            ]
    cells += [trained("noisy-K-FAC/B/learned-norm", 0, 88.6, 0.018)]
    cells += [classified("BBB/B", 1, {}, error="not finite: nll = nan")]
    for data, accuracy in (("mnist", 99.2), ("digits", 97.8)):
        cells += [trained(method, seed, accuracy, 0.01, data) for method in ("SGD", "noisy-K-FAC") for seed in (0, 1)]
    Results(folder, "classification").append(cells)


def write_all(folder: Path) -> None:
    write_regression(folder)
    write_classification(folder)
    write_convergence(folder)
    write_precision(folder)
