"""`noisygrad reproduce hmc-correlation` and `active-learning`: Tables 3 and 4."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from noisygrad_paper.extras import require
from noisygrad_paper.reproduce import options

Trials = Annotated[int | None, typer.Option(min=1, help="Only this many trials of each set.")]


def hmc_correlation(
    data: options.Names = None,
    methods: options.Names = None,
    results: options.ResultsFolder = Path("results"),
    data_dir: options.DataFolder = None,
    device: options.Device = "cpu",
    backend: options.Backend = "local",
    workers: options.Workers = 1,
    scheduler: options.Scheduler = None,
    epochs: options.Epochs = None,
    trials: Trials = None,
    seed: options.Seed = 0,
) -> None:
    """Table 3: Pearson correlation of predictive variances with those of HMC, from twenty labelled points.

    Needs the extra paper. Cells that are in the results folder are not computed again: stop it at any moment, and start
    it again.
    """
    from noisygrad_paper.experiments import hmc_correlation as experiment
    from noisygrad_paper.experiments.few_labels import DATA, METHODS

    with options.clear_errors():
        names, asked = options.chosen(data, DATA), options.chosen(methods, METHODS)
        where = _checked(device, backend, scheduler, asked, data_dir)
        jobs = experiment.plan(
            names, asked, trials=trials or experiment.TRIALS, epochs=epochs, data_dir=where, seed=seed
        )
        work = partial(experiment.run_job, data_dir=where, device=device)
        show = partial(_show_correlation, results, names, asked)
        options.run_missing(experiment.EXPERIMENT, jobs, work, results, backend, workers, scheduler, show=show)


def active_learning(
    data: options.Names = None,
    methods: options.Names = None,
    results: options.ResultsFolder = Path("results"),
    data_dir: options.DataFolder = None,
    device: options.Device = "cpu",
    backend: options.Backend = "local",
    workers: options.Workers = 1,
    scheduler: options.Scheduler = None,
    epochs: options.Epochs = None,
    trials: Trials = None,
    seed: options.Seed = 0,
    tuning: options.Tuning = False,
    settings: options.TunedSettings = None,
) -> None:
    """Table 4: test RMSE after nine points were chosen by their variance, against nine chosen at random.

    HMC needs the extra paper. Cells that are in the results folder are not computed again: stop it at any moment, and
    start it again.
    """
    from noisygrad_paper.experiments import active_learning as experiment
    from noisygrad_paper.experiments.few_labels import DATA

    with options.clear_errors():
        names, asked = options.chosen(data, DATA), options.chosen(methods, experiment.METHODS_HERE)
        where = _checked(device, backend, scheduler, asked, data_dir)
        jobs = experiment.plan(
            names,
            asked,
            trials=trials or experiment.TRIALS,
            epochs=epochs,
            data_dir=where,
            seed=seed,
            tuning=tuning,
            changes=options.parsed_settings(settings or []),
        )
        work = partial(experiment.run_job, data_dir=where, device=device)
        kept = experiment.TUNING if tuning else experiment.EXPERIMENT
        show = partial(_show_active, results, kept, names, list(dict.fromkeys(job.method for job in jobs)))
        options.run_missing(kept, jobs, work, results, backend, workers, scheduler, show=show)


def _checked(device: str, backend: str, scheduler: str | None, methods: Sequence[str], data_dir: Path | None) -> str:
    """Refuse what cannot work before anything is computed; where the data are."""
    options.check_device(device)
    options.check_backend(backend, scheduler)
    if "HMC" in methods:
        require("HMC", "jax", "numpyro")
        from noisygrad_paper.baselines.hmc import jax_device

        jax_device(device)
    return options.data_folder(data_dir)


def _show_correlation(results: Path, data: Sequence[str], methods: Sequence[str]) -> None:
    from noisygrad_paper.experiments import hmc_correlation as experiment
    from noisygrad_paper.experiments.cells import Results
    from noisygrad_paper.report.few_labels import correlation_study, correlation_table

    study = correlation_study(Results(results, experiment.EXPERIMENT).load())
    shown = [method for method in methods if method != experiment.TRUTH]
    if shown:
        Console(highlight=False).print(correlation_table(study, shown, data).rich())


def _show_active(results: Path, experiment: str, data: Sequence[str], methods: Sequence[str]) -> None:
    from noisygrad_paper.experiments.cells import Results
    from noisygrad_paper.report.few_labels import active_study, active_table

    study = active_study(Results(results, experiment).load())
    Console(highlight=False).print(active_table(study, methods, data).rich())
