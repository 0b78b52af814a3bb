"""`noisygrad reproduce convergence` and `precision-matrices`: the training curves and Figure 1."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from noisygrad_paper.reproduce import options


def convergence(
    data: options.Names = None,
    methods: options.Names = None,
    results: options.ResultsFolder = Path("results"),
    data_dir: options.DataFolder = None,
    device: options.Device = "cpu",
    backend: options.Backend = "local",
    workers: options.Workers = 1,
    scheduler: options.Scheduler = None,
    epochs: options.Epochs = None,
    seed: options.Seed = 0,
) -> None:
    """The supplement's training curves: ELBO against iterations, with the step size tuned for each method first.

    Cells that are in the results folder are not computed again: stop it at any moment, and start it again.
    """
    from noisygrad_paper.experiments import convergence as experiment
    from noisygrad_paper.experiments.cells import Results

    with options.clear_errors():
        options.check_device(device)
        sets, names = options.chosen(data, experiment.DATA), options.chosen(methods, experiment.CHANGES)
        where = options.data_folder(data_dir)
        run = partial(options.run_missing, results=results, backend=backend, workers=workers, scheduler=scheduler)
        tuning = experiment.tuning_plan(sets, names, experiment.RATES, epochs=epochs, data_dir=where, seed=seed)
        run(experiment.TUNING, tuning, partial(experiment.run_tuning, data_dir=where, device=device))
        asked = {(job.data, job.method) for job in tuning}
        tuned = [c for c in Results(results, experiment.TUNING).load() if (c.data, c.method) in asked]
        jobs = experiment.plan(sets, names, experiment.tuned_rates(tuned), epochs=epochs, data_dir=where, seed=seed)
        run(experiment.EXPERIMENT, jobs, partial(experiment.run_job, data_dir=where, device=device))
        _show_convergence(results)


def _show_convergence(results: Path) -> None:
    from noisygrad_paper.experiments.cells import Results
    from noisygrad_paper.report.convergence import convergence_table
    from noisygrad_paper.report.study import Study

    table = convergence_table(Study(Results(results, "convergence").load())).rich()
    for column in table.columns:
        # On a narrow terminal a name goes on in the next line: cut off, the two variants would read the same.
        column.overflow = "fold"
    console = Console(highlight=False)
    console.print()
    console.print(table)


def precision_matrices(
    results: options.ResultsFolder = Path("results"),
    data_dir: options.DataFolder = None,
    device: options.Device = "cpu",
    epochs: options.Epochs = None,
    seed: options.Seed = 0,
    force: Annotated[
        bool, typer.Option("--force", help="Replace matrices that are there, whatever made them.")
    ] = False,
) -> None:
    """Figure 1: the normalised precision matrices of four posteriors of one network, trained on boston.

    Matrices that are in the results folder are not computed again: stop it at any moment, and start it again.
    """
    from noisygrad_paper.experiments import precision_matrices as experiment

    with options.clear_errors():
        options.check_device(device)
        config = experiment.PrecisionConfig(seed=seed)
        if epochs is not None:
            config = replace(config, epochs=epochs)
        todo = experiment.missing(config, results, force=force)
        arrays = results / f"{experiment.EXPERIMENT}.npz"
        if not todo:
            typer.echo(f"{arrays} has all four matrices, made with these settings: nothing to do")
            return
        with options.bar(len(todo) * config.epochs) as advance:
            experiment.run(
                config,
                results,
                data_dir=data_dir,
                device=device,
                force=force,
                report=lambda method, epoch: advance(
                    todo.index(method) * config.epochs + epoch, f"{method} epoch {epoch}"
                ),
            )
        typer.echo(f"The matrices are in {arrays}; noisygrad report draws them")
