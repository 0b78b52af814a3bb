"""`noisygrad reproduce regression`: Table 1 and its supplement."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from noisygrad_paper.reproduce import options


def regression(
    data: options.Names = None,
    methods: options.Names = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A table of your own, with a header, instead of the UCI sets.")
    ] = None,
    target: Annotated[str | None, typer.Option(metavar="COLUMN", help="What to predict in it.")] = None,
    results: options.ResultsFolder = Path("results"),
    data_dir: options.DataFolder = None,
    device: options.Device = "cpu",
    backend: options.Backend = "local",
    workers: options.Workers = 1,
    scheduler: options.Scheduler = None,
    epochs: options.Epochs = None,
    splits: options.Splits = None,
    seed: options.Seed = 0,
    validation: options.Validation = False,
    settings: options.Settings = None,
) -> None:
    """Table 1 and its supplement: test RMSE and log-likelihood on the UCI regression sets.

    Cells that are in the results folder are not computed again: stop it at any moment, and start it again.
    """
    from noisygrad_paper.experiments import regression as experiment
    from noisygrad_paper.experiments.methods import METHODS

    with options.clear_errors():
        options.check_device(device)
        options.check_backend(backend, scheduler)
        table = _own_table(csv, target)
        if csv is not None and data is not None:
            raise typer.BadParameter("--csv is instead of --data: give one of them")
        names = [f"csv-{csv.stem}"] if csv is not None else options.chosen(data, experiment.DATA, experiment.MORE_DATA)
        asked = options.chosen(methods, METHODS)
        where = options.data_folder(data_dir)
        jobs = experiment.plan(
            names,
            asked,
            epochs=epochs,
            splits=splits,
            data_dir=where,
            csv=table,
            seed=seed,
            validation=validation,
            settings=options.parsed_settings(settings or []),
        )
        if not jobs:
            raise ValueError(f"{', '.join(asked)} on {', '.join(names)} would be too large: it is for small sets")
        work = partial(experiment.run_job, data_dir=where, csv=table, device=device)
        name = experiment.VALIDATION if validation else experiment.EXPERIMENT
        show = partial(_show_regression, results, name, names, list(dict.fromkeys(job.method for job in jobs)))
        options.run_missing(name, jobs, work, results, backend, workers, scheduler, show=show)


def _show_regression(results: Path, experiment: str, data: Sequence[str], methods: Sequence[str]) -> None:
    from noisygrad_paper.experiments.cells import Results
    from noisygrad_paper.report.comparison import LOG_LIKELIHOOD, RMSE
    from noisygrad_paper.report.regression import comparison_table
    from noisygrad_paper.report.study import Study

    study = Study(Results(results, experiment).load())
    console = Console(highlight=False)
    if experiment != "regression":
        console.print("On held-out training rows; the paper's figures are of the test rows.")
    for metric in (RMSE, LOG_LIKELIHOOD):
        console.print()
        console.print(comparison_table(study, methods, data, metric).rich())


def _own_table(csv: Path | None, target: str | None) -> tuple[str, str] | None:
    if (csv is None) != (target is None):
        raise typer.BadParameter("--csv FILE and --target COLUMN go together")
    return None if csv is None or target is None else (os.fspath(csv.resolve()), target)
