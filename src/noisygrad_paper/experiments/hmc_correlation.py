"""Table 3 of the paper: how well the predictive variances of a method agree with those of HMC.

A cell is a trial: twenty labelled points, and the variances of a hundred others. Cells keep the variances themselves,
so each method is computed by itself; correlations with HMC are taken when they are shown (`compare`).
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from noisygrad.kernels.threads import one_thread
from noisygrad.replicas.engine import Execution
from noisygrad_paper.data import load_table, standardised
from noisygrad_paper.experiments.cells import Cell, Job, Report, device_name
from noisygrad_paper.experiments.few_labels import METHODS, FewPoints, trial

EXPERIMENT = "hmc-correlation"
TRIALS = 10
SEEDS = 2
"""Trainings of each trial; HMC and ridge have one."""
_SAMPLES = 10_000
_ONCE = ("HMC", "ridge")
_DIGITS = 6

TRUTH = "HMC"


def plan(
    data: Sequence[str],
    methods: Sequence[str],
    *,
    trials: int = TRIALS,
    epochs: int | None = None,
    data_dir: str | Path | None = None,
    seed: int = 0,
) -> list[Job]:
    """A job for each data set and method; its replicates are the trials."""
    jobs = []
    for name in data:
        trial(load_table(name, data_dir), 0)
        for method in methods:
            config = METHODS[method].config | {"seed": seed, "seeds": 1 if method in _ONCE else SEEDS}
            if "epochs" in config:
                config |= {"test_samples": _SAMPLES} | ({} if epochs is None else {"epochs": epochs})
            jobs.append(Job(data=name, method=method, replicates=tuple(range(trials)), config=config))
    return jobs


def run_job(
    job: Job, report: Report, *, data_dir: str | None = None, device: str = "cpu", execution: Execution = "auto"
) -> list[Cell]:
    """Fit all trials of a job at once, and take the variances of their unlabelled points."""
    config, start = job.config, time.perf_counter()
    table = load_table(job.data, data_dir)
    chosen = [trial(table, replicate) for replicate in job.replicates]
    data = standardised(table, [(each.labelled, each.others) for each in chosen], by_all_rows=True)
    repeats = config["seeds"]
    x, y, others = (
        torch.from_numpy(part).repeat_interleave(repeats, 0) for part in (data.x_train, data.y_train, data.x_test)
    )
    seeds = [config["seed"] * 10_000 + SEEDS * number + k for number in job.replicates for k in range(repeats)]

    with one_thread(device == "cpu"):
        fitted = METHODS[job.method].fit(FewPoints(x, y, others, device, execution), seeds, config, report)
        mean, variance = fitted.moments(others)
        figures = {name: values.unflatten(0, (-1, repeats)) for name, values in fitted.diagnostics().items()}
    mean, variance = (part.cpu().unflatten(0, (-1, repeats)) for part in (mean, variance))
    found = (
        {
            **{f"variance_{k}": _short(variance[index, k]) for k in range(repeats)},
            **{f"mean_{k}": _short(mean[index, k]) for k in range(repeats)},
            **{name: float(values[index].mean()) for name, values in figures.items()},
        }
        for index in range(len(job.replicates))
    )
    return job.cells(EXPERIMENT, found, seconds=time.perf_counter() - start, device=device_name(device))


def _short(values: torch.Tensor) -> list[float]:
    """With as many digits as matter to a correlation."""
    return [float(f"{value:.{_DIGITS}g}") for value in values.tolist()]


def variances(cell: Cell) -> NDArray[np.float64]:
    """The variances of a cell, `[seeds, points]`; raises ValueError for one that has none, or not as many of each."""
    found = [value for name, value in sorted(cell.metrics.items()) if name.startswith("variance_")]
    lengths = {len(value) if isinstance(value, list) else 0 for value in found}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"{cell.label}: lists variance_0, variance_1 and so on of one length were expected")
    return np.array(found, dtype=np.float64)


def compare(cells: Iterable[Cell]) -> list[Cell]:
    """The cells of all methods but HMC, their variances compared with HMC's for the same trial.

    Each has `correlation` (Pearson), `log_correlation` (of log variances) and `ratio` (the median over the points of
    variance over HMC's), means over the seeds, and the `rhat` of HMC's chains. A trial without HMC is left out.
    """
    cells = list(cells)
    truth = {(cell.data, cell.replicate): cell for cell in cells if cell.method == TRUTH and not cell.error}
    found = []
    for cell in cells:
        known = truth.get((cell.data, cell.replicate))
        if cell.method == TRUTH or cell.error or known is None:
            continue
        try:
            rows = [_compared(row, variances(known)[0]) for row in variances(cell)]
            figures = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
            spread = [row["correlation"] for row in rows]
            chains = {name: value for name, value in known.metrics.items() if name == "rhat"}
            found.append(replace(cell, metrics={**figures, "correlations": spread, **chains}))
        except ValueError as error:
            found.append(replace(cell, metrics={}, error=str(error)))
    return found


def _compared(variance: NDArray[np.float64], truth: NDArray[np.float64]) -> dict[str, float]:
    if variance.shape != truth.shape:
        raise ValueError(f"there are {len(variance)} predictive variances, and {len(truth)} of HMC's")
    if not (np.ptp(variance) > 1e-12 * variance.mean() and np.ptp(truth) > 0 and variance.min() > 0):
        raise ValueError("the predictive variance is 0 somewhere or the same everywhere: there is nothing to correlate")
    return {
        "correlation": float(np.corrcoef(variance, truth)[0, 1]),
        "log_correlation": float(np.corrcoef(np.log(variance), np.log(truth))[0, 1]),
        "ratio": float(np.median(variance / truth)),
    }
