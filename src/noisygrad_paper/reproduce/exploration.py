"""`noisygrad reproduce exploration`: Figure 3."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from noisygrad_paper.experiments.exploration_conditions import EXPERIMENT, ITERATIONS, METHODS, MORE_METHODS, TUNING
from noisygrad_paper.extras import require
from noisygrad_paper.reproduce import options

Seeds = Annotated[int | None, typer.Option(min=1, help="Of each condition, instead of its own number.")]
Iterations = Annotated[int | None, typer.Option(min=1, help="Of TRPO, instead of each task's own number.")]


def exploration(
    tasks: options.Names = None,
    methods: options.Names = None,
    results: options.ResultsFolder = Path("results"),
    backend: options.Backend = "local",
    workers: options.Workers = 1,
    scheduler: options.Scheduler = None,
    seeds: Seeds = None,
    iterations: Iterations = None,
    seed: options.Seed = 0,
    tuning: options.Tuning = False,
    settings: options.TunedSettings = None,
) -> None:
    """Figure 3: returns of TRPO on sparse tasks, alone and with an information gain as its bonus.

    Needs the extra paper. Cells that are in the results folder are not computed again: stop it at any moment, and start
    it again.
    """
    with options.clear_errors():
        options.check_backend(backend, scheduler)
        names, asked = options.chosen(tasks, ITERATIONS), options.chosen(methods, METHODS, MORE_METHODS)
        require("the exploration experiment", "gymnasium", "stable_baselines3", "sb3_contrib", "Box2D", "PIL")
        from noisygrad_paper.experiments import exploration as experiment

        changes = options.parsed_settings(settings or [])
        jobs = experiment.plan(
            names, asked, seeds=seeds, iterations=iterations, seed=seed, tuning=tuning, changes=changes
        )
        kept = TUNING if tuning else EXPERIMENT
        show = partial(_show, results, kept, names, list(dict.fromkeys(job.method for job in jobs)))
        options.run_missing(kept, jobs, experiment.run_job, results, backend, workers, scheduler, show=show)


def _show(results: Path, experiment: str, tasks: Sequence[str], methods: Sequence[str]) -> None:
    from noisygrad_paper.experiments.cells import Results
    from noisygrad_paper.report.exploration import area_table, exploration_study, paired_table

    study = exploration_study(Results(results, experiment).load())
    console = Console(highlight=False)
    console.print(area_table(study, methods, tasks).rich())
    pairs = paired_table(study, tasks)
    if pairs is not None:
        console.print(pairs.rich())
