"""`noisygrad reproduce classification`: Table 2 and the reliability diagrams."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from noisygrad_paper.reproduce import options

if TYPE_CHECKING:
    from noisygrad_paper.experiments.cells import Cell, Job, Report
    from noisygrad_paper.experiments.runner import Work


def classification(
    data: Annotated[Literal["cifar10", "mnist", "digits"], typer.Option(help="Small sets take minutes on a CPU.")] = (
        "cifar10"
    ),
    methods: options.Names = None,
    configurations: Annotated[
        str | None, typer.Option(metavar="NAME,NAME…", help="Of plain, D (augmented), B (batch norm), D+B.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each; they show the spread.")] = 1,
    results: options.ResultsFolder = Path("results"),
    data_dir: options.DataFolder = None,
    device: options.Device = "cpu",
    workers: options.Workers = 1,
    epochs: options.Epochs = None,
    train_size: Annotated[int | None, typer.Option(min=1, help="Only this many training images.")] = None,
    learned_norm: Annotated[
        bool, typer.Option("--learned-norm", help="Learn scales and shifts of batch norm, unlike the paper.")
    ] = False,
    bf16: Annotated[
        bool, typer.Option("--bf16", help="Train the network in bfloat16; the posterior stays in float32.")
    ] = False,
    checkpoints: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Of trainings at work; a folder beside the results else.")
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="In epochs.")] = 1,
    validation: options.Validation = False,
    settings: options.Settings = None,
) -> None:
    """Table 2 and the reliability diagrams: VGG16 on CIFAR-10, or a small network on digits.

    A training that is stopped goes on at its last checkpoint. Under torchrun the processes share each training.
    """
    from noisygrad_paper.experiments import classification as experiment
    from noisygrad_paper.experiments.cells import Results
    from noisygrad_paper.experiments.configurations import CONFIGURATIONS
    from noisygrad_paper.experiments.image_methods import METHODS
    from noisygrad_paper.experiments.processes import join_processes, of_first_process

    options.check_device(device)
    with options.clear_errors(), join_processes(device) as processes:
        asked = options.chosen(methods, METHODS)
        named = options.chosen(configurations, CONFIGURATIONS)
        if processes.size > 1 and workers > 1:
            raise typer.BadParameter("--workers trains networks side by side, torchrun one in all processes: not both")
        jobs = experiment.plan(
            data,
            asked,
            named,
            seeds=seeds,
            epochs=epochs,
            train_size=train_size,
            learned_norm=learned_norm,
            bf16=bf16,
            validation=validation,
            changes=options.parsed_settings(settings or []),
        )
        experiment.check_data(jobs, options.data_folder(data_dir))
        name = experiment.VALIDATION if validation else experiment.EXPERIMENT
        folder = (results / "checkpoints" if checkpoints is None else checkpoints).resolve()
        options.make_folder("--results", results)
        train = partial(
            experiment.run_job,
            data_dir=options.data_folder(data_dir),
            device=device,
            checkpoints=os.fspath(folder),
            checkpoint_every=checkpoint_every,
        )
        left = of_first_process(lambda: Results(results, name).missing(jobs))
        if left:
            options.make_folder("--checkpoints", folder)
        if processes.rank > 0:
            for job in left:
                with suppress(Exception):  # the first process tells of it
                    _together(train, job, lambda fraction, text: None)
            return
        forget = partial(experiment.clear_checkpoints, folder=os.fspath(folder))
        for job in jobs:
            if job not in left:
                forget(job)

        def show() -> None:
            if checkpoints is None:
                with suppress(OSError):  # where something is left in it
                    folder.rmdir()
            _show_classification(results, name, data)

        options.run_missing(
            name, jobs, partial(_together, train), results, "local", workers, None, on_stored=forget, show=show
        )


def _together(train: Work, job: Job, report: Report) -> list[Cell]:
    """A job that fails in one process has failed in all of them, and they go on with the next."""
    from noisygrad.distributed import processes
    from noisygrad_paper.experiments.processes import in_all_processes

    def told() -> list[Cell]:
        try:
            return train(job, report)
        except Exception as error:
            if processes().size > 1:  # at once: the others may be waiting for this process in vain
                typer.echo(f"process {processes().rank}, {job.name}: {type(error).__name__}: {error}", err=True)
            raise

    return in_all_processes(told)


def _show_classification(results: Path, experiment: str, data: str) -> None:
    from noisygrad_paper.experiments.cells import Results
    from noisygrad_paper.experiments.configurations import CONFIGURATIONS, full_name
    from noisygrad_paper.experiments.image_methods import METHODS
    from noisygrad_paper.report.calibration import scores_table
    from noisygrad_paper.report.classification import accuracy_table
    from noisygrad_paper.report.study import Study

    cells = [cell for cell in Results(results, experiment).load() if cell.data == data]
    study = Study(cells, [full_name(method, configuration) for method in METHODS for configuration in CONFIGURATIONS])
    console = Console(highlight=False)
    console.print()
    if (experiment, data) == ("classification", "cifar10"):
        console.print(accuracy_table(study).rich())
    names = {method: method for method in study.methods}
    console.print(scores_table(study, data, names, f"{data}: accuracy and calibration").rich())
