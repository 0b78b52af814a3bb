"""The supplement's training curves: the ELBO of BBB, NNG-FFG and NNG-MVG against the iteration.

As in the paper, the step size of the mean is tuned for each method and set; all else stays as it is. Tuning sees splits
and seeds that the curves do not, and only the training objective: the step size whose ELBO is highest at the end of a
run as long as the one that is shown. No rate is annealed. Each method's other settings are those of the regression
table (`experiments.methods`), but for what `CHANGES` says.
"""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from noisygrad.kernels.threads import one_thread
from noisygrad.replicas.engine import Execution, ReplicaGenerators, train_replicas
from noisygrad.replicas.variational import VariationalLearner
from noisygrad_paper.data import load_table, splits_of, standardised
from noisygrad_paper.experiments.cells import Cell, Job, Report, device_name
from noisygrad_paper.experiments.methods import find_method
from noisygrad_paper.experiments.regression import problem_of, tensor_for

EXPERIMENT = "convergence"
TUNING = "convergence-tuning"
DATA = ("boston", "concrete")
"""The paper does not say which two of its sets its figure shows."""

_FOLLOWING = {"safeguard": "brief", "fisher_decay": 0.99}
"""What is measured here is how soon a method gets there. With the regression table's settings that is how soon the
moving average of the Fisher forgets: it holds the identity that it starts from, and later the Fisher of a poor fit, for
a thousand iterations. Here it forgets its start at once, and everything else within a hundred."""
CHANGES: dict[str, dict[str, Any]] = {
    # About 1/√N, the width that the others start with. From the table's 0.01 it climbs later and ends no higher.
    "BBB": {"initial_std": 0.05},
    "NNG-FFG": _FOLLOWING,
    "NNG-MVG": _FOLLOWING,
    "NNG-MVG/exact-damping": {**_FOLLOWING, "damping_mode": "exact", "factor_every": 10},
}
"""The methods, with what is set otherwise than in the regression table. Factored damping, the paper's, narrows the
posterior in directions that the data leave open, which costs ELBO where data are few; exact damping does not."""
RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
"""The step sizes that are tried. From 0.1 on the trust region shortens the noisy methods' steps to the same length, so
larger ones would change nothing; BBB is long past its best there."""
REPLICATES = (0, 1, 2, 3, 4)
"""The standard splits whose curves are shown."""
TUNING_REPLICATES = (17, 18, 19)
"""Those that decide the step size."""
ITERATIONS = 6000
"""Of every training, in round epochs."""
ELBO_SAMPLES = 50

Rates: TypeAlias = dict[tuple[str, str], float]
"""A step size by data set and method."""
_LAST = 20
"""The end of a training is the last one of this many parts of its evaluations, as in the report."""


def tuning_plan(
    data: Sequence[str],
    methods: Sequence[str],
    rates: Sequence[float],
    *,
    epochs: int | None = None,
    data_dir: str | Path | None = None,
    seed: int = 0,
) -> list[Job]:
    """A job for each step size of each method on each set; its name ends in the step size, `NNG-FFG/lr=0.03`."""
    return [
        _job(name, method, rate, TUNING_REPLICATES, f"{method}/lr={rate:g}", epochs, data_dir, seed)
        for name in data
        for method in methods
        for rate in rates
    ]


def tuned_rates(cells: Sequence[Cell]) -> Rates:
    """The step size with the highest mean ELBO at the end, of those with which no replicate diverged."""
    ends: dict[tuple[str, str], dict[float, list[float]]] = {}
    for cell in cells:
        method = cell.method.rpartition("/lr=")[0]
        found = ends.setdefault((cell.data, method), {}).setdefault(cell.config["lr"], [])
        value = cell.metrics.get("elbo")
        found.append(value if isinstance(value, int | float) else -math.inf)
    rates: Rates = {}
    for (data, method), by_rate in ends.items():
        means = {rate: statistics.fmean(values) for rate, values in by_rate.items()}
        best = max(means, key=means.__getitem__)
        if means[best] == -math.inf:
            raise ValueError(f"{method} diverged on {data} with every step size of {sorted(means)}: try smaller ones")
        rates[data, method] = best
    return rates


def plan(
    data: Sequence[str],
    methods: Sequence[str],
    rates: Mapping[tuple[str, str], float],
    *,
    epochs: int | None = None,
    data_dir: str | Path | None = None,
    seed: int = 0,
) -> list[Job]:
    """A job for each method on each set, with the step size that was found for it."""
    return [
        _job(name, method, rates[name, method], REPLICATES, method, epochs, data_dir, seed)
        for name in data
        for method in methods
    ]


def _job(
    data: str,
    method: str,
    rate: float,
    replicates: tuple[int, ...],
    name: str,
    epochs: int | None,
    data_dir: str | Path | None,
    seed: int,
) -> Job:
    if method not in CHANGES:
        raise ValueError(f"there is no method {method!r} here; the methods are {', '.join(CHANGES)}")
    table = load_table(data, data_dir)
    entry, problem = find_method(method.partition("/")[0]), problem_of(table)
    config = {**entry.config(problem), **CHANGES[method], "lr": rate, "anneal": 1.0}
    per_epoch = len(splits_of(data)[0][0]) // problem.batch_size
    config["epochs"] = max(1, round(ITERATIONS / per_epoch)) if epochs is None else epochs
    # The regression table's test samples have no part in this.
    del config["test_samples"]
    config |= {"elbo_samples": ELBO_SAMPLES, "seed": seed}
    return Job(
        data=data, method=name, replicates=replicates, config=config, cost=config["epochs"] * per_epoch * entry.cost
    )


def run_job(
    job: Job, report: Report, *, data_dir: str | None = None, device: str = "cpu", execution: Execution | None = None
) -> list[Cell]:
    """Train the splits of a job at once; the ELBO of the training data after every epoch.

    On a CPU the step is eager unless `execution` says otherwise: the runs are too short to pay for a compilation each.
    """
    start = time.perf_counter()
    iterations, curves = _train(job, report, 1, data_dir, device, execution)
    figures = ({"elbo": curve, "iterations": iterations, "lr": job.config["lr"]} for curve in curves)
    return job.cells(EXPERIMENT, figures, seconds=time.perf_counter() - start, device=device_name(device))


def run_tuning(
    job: Job, report: Report, *, data_dir: str | None = None, device: str = "cpu", execution: Execution | None = None
) -> list[Cell]:
    """Train as `run_job` does, for the ELBO at the end alone; that a training diverged is a finding, not a failure."""
    start = time.perf_counter()
    epochs = job.config["epochs"]
    _, curves = _train(job, report, epochs - max(1, epochs // _LAST) + 1, data_dir, device, execution)
    ends = map(statistics.fmean, curves)
    figures = ({"elbo": end, "diverged": 0} if math.isfinite(end) else {"diverged": 1} for end in ends)
    return job.cells(TUNING, figures, seconds=time.perf_counter() - start, device=device_name(device))


def _train(
    job: Job, report: Report, first: int, data_dir: str | None, device: str, execution: Execution | None
) -> tuple[list[int], list[list[float]]]:
    """Iterations, and the ELBO of each replicate there: after each epoch from the `first` on."""
    config, epochs = job.config, job.config["epochs"]
    with one_thread(device == "cpu"):
        splits = splits_of(job.data)
        data = standardised(load_table(job.data, data_dir), [splits[replicate] for replicate in job.replicates])
        streams = ReplicaGenerators.of([config["seed"] * 1000 + replicate for replicate in job.replicates], device)
        learner = find_method(job.method.partition("/")[0]).learner(config, data, streams.start, device)
        assert isinstance(learner, VariationalLearner)
        x, y = (tensor_for(learner, array) for array in (data.x_train, data.y_train))
        steps = x.shape[1] // min(config["batch_size"], x.shape[1])
        iterations: list[int] = []
        found: list[Tensor] = []

        def on_epoch(epoch: int) -> None:
            if epoch >= first:
                # The draws have generators of their own: looking does not change the training.
                found.append(learner.elbo(x, y, config["elbo_samples"], streams.test).cpu())
                iterations.append(epoch * steps)
            report(epoch / epochs, f"epoch {epoch}")

        train_replicas(
            learner,
            x,
            y,
            epochs=epochs,
            batch_size=config["batch_size"],
            streams=streams,
            execution=execution or ("eager" if device == "cpu" else "auto"),
            on_epoch=on_epoch,
        )
    return iterations, torch.stack(found, dim=1).tolist()
