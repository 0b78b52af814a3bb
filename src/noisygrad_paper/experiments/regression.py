"""Table 1 of the paper and its supplement: test RMSE and log-likelihood on the UCI sets.

A job is a data set and a method; its cells are the standard splits, trained together as replicas of one network.
Protocol and constants are the paper's and its released code's (`docs/reproduce-regression.md`).
"""

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noisygrad.kernels.threads import one_thread
from noisygrad.replicas.engine import Execution, ReplicaGenerators, train_replicas
from noisygrad.replicas.learner import Learner
from noisygrad.replicas.variational import VariationalLearner
from noisygrad_paper.data import DataTable, Split, Standardised, load_table, splits_of, standard_splits, standardised
from noisygrad_paper.data.own_csv import read_csv_table
from noisygrad_paper.experiments.cells import Cell, Job, Report, device_name
from noisygrad_paper.experiments.changes import check_changes, named_after
from noisygrad_paper.experiments.methods import Problem, find_method

EXPERIMENT = "regression"
VALIDATION = "regression-validation"
"""The same on rows held out of the training part: settings are chosen there, and the test rows stay unseen."""
DATA = ("boston", "concrete", "energy", "kin8nm", "naval-turbine", "naval", "power", "protein", "wine", "yacht")
"""The paper's nine sets, naval as both tasks."""
MORE_DATA = ("year", "diabetes")
"""Sets that are run if asked for: the paper's largest, which is fetched apart, and scikit-learn's own."""

_LARGE = 3000
"""From this many rows on, batches are of 100, as the paper says; of 500 for year."""
_WIDE = ("protein", "year")
OWN_SPLITS = 20
_HELD_OUT = 0.2


def plan(
    data: Sequence[str],
    methods: Sequence[str],
    *,
    epochs: int | None = None,
    splits: int | None = None,
    data_dir: str | Path | None = None,
    csv: tuple[str, str] | None = None,
    seed: int = 0,
    validation: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> list[Job]:
    """The jobs of a run, the cheap ones first.

    `csv` is a file of the user's own with its target column. `validation` measures on a fifth of each training part,
    held out of it, instead of the test rows; for it alone there may be other `settings`, which name the jobs.
    """
    if settings and not validation:
        raise ValueError("settings are chosen on rows held out of the training part: ask for validation")
    jobs = []
    for name in data:
        table = _table(name, data_dir, csv)
        count = len(_splits(table, csv))
        for method in methods:
            entry, problem = find_method(method), problem_of(table)
            if not entry.fits(problem):
                continue
            config = entry.config(problem) | {"seed": seed} | ({} if epochs is None else {"epochs": epochs})
            check_changes(method, config, settings or {})
            config |= dict(settings or {}) | ({"validation": True} if validation else {})
            if csv is not None:
                content = hashlib.sha256(Path(csv[0]).read_bytes()).hexdigest()
                config |= {"csv": Path(csv[0]).name, "sha256": content, "target": csv[1]}
            steps = config["epochs"] * table.rows / config["batch_size"]
            replicates = tuple(range(count if splits is None else min(splits, count)))
            label = named_after(method, settings or {})
            jobs.append(Job(data=name, method=label, replicates=replicates, config=config, cost=steps * entry.cost))
    return sorted(jobs, key=lambda job: job.cost)


def problem_of(table: DataTable) -> Problem:
    """What a method's settings depend on."""
    hidden = 100 if table.name in _WIDE else 50
    return Problem(
        name=table.name,
        batch_size=500 if table.name == "year" else 100 if table.rows > _LARGE else 10,
        hidden=hidden,
        weights=hidden * (table.features + 2) + 1,
    )


def run_job(
    job: Job,
    report: Report,
    *,
    data_dir: str | None = None,
    csv: tuple[str, str] | None = None,
    device: str = "cpu",
    execution: Execution = "auto",
) -> list[Cell]:
    """Train the splits of a job at once and measure each on its test rows."""
    table = _table(job.data, data_dir, csv)
    validation = job.config.get("validation", False)
    splits = _splits(table, csv)
    if validation:
        splits = [held_out(split) for split in splits]
    with one_thread(device == "cpu"):
        start = time.perf_counter()
        data = standardised(table, [splits[replicate] for replicate in job.replicates], ones=job.config.get("ones", ()))
        learner, streams = fit(job, data, device, execution, report)
        metrics = measure(learner, data, streams, job.config["test_samples"])
        seconds = time.perf_counter() - start
    figures = ({name: float(values[i]) for name, values in metrics.items()} for i in range(len(job.replicates)))
    experiment = VALIDATION if validation else EXPERIMENT
    return job.cells(experiment, figures, seconds=seconds, device=device_name(device))


def fit(
    job: Job, data: Standardised, device: str, execution: Execution, report: Report
) -> tuple[Learner, ReplicaGenerators]:
    """The trained learner of a job."""
    config, epochs = job.config, job.config["epochs"]
    streams = ReplicaGenerators.of([config["seed"] * 1000 + replicate for replicate in job.replicates], device)
    learner = find_method(job.method.partition(" ")[0]).learner(config, data, streams.start, device)
    x, y = (tensor_for(learner, array) for array in (data.x_train, data.y_train))
    train_replicas(
        learner,
        x,
        y,
        epochs=epochs,
        batch_size=config["batch_size"],
        streams=streams,
        anneal=partial(annealing, epochs=epochs, factor=config["anneal"]),
        execution=execution,
        on_epoch=lambda epoch: report(epoch / epochs, f"epoch {epoch} of {epochs}"),
    )
    return learner, streams


def annealing(epoch: int, *, epochs: int, factor: float | str) -> float:
    """1 in the first half of the epochs and `factor` in the second; "cosine" falls from 1 to 0 along half a cosine."""
    if isinstance(factor, str):
        return 0.5 * (1.0 + math.cos(math.pi * (epoch - 1) / epochs))
    return 1.0 if epoch <= epochs // 2 else factor


def measure(learner: Learner, data: Standardised, streams: ReplicaGenerators, samples: int) -> dict[str, Tensor]:
    """Figures of each replica, in the unit of the target: `[R]` by name."""
    x, y, std = (tensor_for(learner, array) for array in (data.x_test, data.y_test, data.y_std))
    prediction = learner.predict(x, samples, streams.test)
    errors = (prediction.mean - y).squeeze(-1)
    found = {
        "rmse": errors.square().mean(-1).sqrt() * std,
        "log_likelihood": prediction.log_prob(y).mean(-1) - std.log(),
    }
    if len(prediction.location) > 1:  # one component does not tell the two apart
        found["noise_std"] = prediction.aleatoric.mean((-2, -1)).sqrt() * std
        found["epistemic_std"] = prediction.epistemic.mean((-2, -1)).sqrt() * std
    diagnostics = learner.diagnostics()
    if isinstance(learner, VariationalLearner) and "kl" in diagnostics:  # a point estimate has no bound
        x_train, y_train = (tensor_for(learner, array) for array in (data.x_train, data.y_train))
        found["elbo"] = learner.elbo(x_train, y_train, samples, streams.test)
    return {**found, **diagnostics}


def held_out(split: Split) -> Split:
    """The training rows alone, of which the last fifth is held out; in the standard splits their order is random."""
    train, _ = split
    kept = len(train) - max(1, round(_HELD_OUT * len(train)))
    return train[:kept], train[kept:]


def tensor_for(learner: Learner, array: np.ndarray[Any, Any]) -> Tensor:
    """The array as the learner computes, where it does."""
    return torch.from_numpy(array).to(device=learner.device, dtype=learner.dtype)


def _table(name: str, data_dir: str | Path | None, csv: tuple[str, str] | None) -> DataTable:
    # A table of one's own must not pass for one of ours, whatever its file is called.
    return load_table(name, data_dir) if csv is None else replace(read_csv_table(*csv), name=name)


def _splits(table: DataTable, csv: tuple[str, str] | None) -> list[Split]:
    return splits_of(table.name) if csv is None else standard_splits(table.rows, OWN_SPLITS)
