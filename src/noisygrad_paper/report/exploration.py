"""Exploration: learning curves on the sparse tasks (Figure 3), a paired test, and what lies behind them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy import stats

from noisygrad_paper.experiments import exploration_conditions as conditions
from noisygrad_paper.experiments.cells import Cell, Results
from noisygrad_paper.pages.tables import Cell as Value
from noisygrad_paper.pages.tables import Column, Table
from noisygrad_paper.report.figures import quartile_panels
from noisygrad_paper.report.page import ReportPage
from noisygrad_paper.report.provenance import add_failures, add_gaps, add_provenance, wall_time_table
from noisygrad_paper.report.study import Study, list_of

Array = NDArray[np.float64]

_WHICH = (Column(key="task", header="task"), Column(key="method", header="condition"))
_LAST = 10
"""Iterations whose prediction errors stand for the end."""


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Two conditions, seed by seed, by the area under the curve of returns."""

    seeds: int
    wins: int
    """Seeds in which the first has the larger area."""
    difference: float
    """The median of first minus second."""
    p_value: float
    """Of Wilcoxon's signed-rank test, two-sided: how often chance alone would tell them apart so clearly."""


def exploration_study(cells: Sequence[Cell]) -> Study:
    """The cells in the order of the conditions."""
    return Study(cells, (*conditions.METHODS, *conditions.MORE_METHODS))


def curves(study: Study, method: str, task: str) -> dict[int, list[float]]:
    """Returns by iteration, for each seed that was finished; as many as every run of the task has."""
    cells = sorted(study.finished(method, task), key=lambda cell: cell.replicate)
    shared = min(_lengths(study, task), default=0)
    return {cell.replicate: list_of(cell, "returns")[:shared] for cell in cells}


def _lengths(study: Study, task: str) -> set[int]:
    """The numbers of iterations that finished runs of a task have."""
    return {len(list_of(cell, "returns")) for method in study.methods for cell in study.finished(method, task)}


def median_area(study: Study, method: str, task: str) -> float | None:
    """The area under the curve of median returns, divided by the number of iterations; None without a run."""
    runs = list(curves(study, method, task).values())
    return float(np.median(np.asarray(runs), axis=0).mean()) if runs else None


def paired(study: Study, first: str, second: str, task: str) -> Paired | None:
    """Both on the seeds that both have; None where they share none."""
    ours, theirs = curves(study, first, task), curves(study, second, task)
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        return None
    differences = np.array([np.mean(ours[seed]) - np.mean(theirs[seed]) for seed in common])
    # Seeds that tie say nothing; where all do, there is nothing to test.
    p_value = float(stats.wilcoxon(differences).pvalue) if differences.any() else 1.0
    return Paired(
        seeds=len(common), wins=int((differences > 0).sum()), difference=float(np.median(differences)), p_value=p_value
    )


def area_table(study: Study, methods: Sequence[str], tasks: Sequence[str]) -> Table:
    """The area under the median curve of each condition on each task."""
    rows: list[dict[str, Value]] = []
    for method in methods:
        areas: dict[str, Value] = {task: median_area(study, method, task) for task in tasks}
        rows.append({"method": method, **areas, "seeds": _seed_counts(study, method, tasks)})
    columns = [Column(key=task, header=task, digits=3, best="highest") for task in tasks]
    return Table(
        columns=(Column(key="method", header="condition"), *columns, Column(key="seeds", header="seeds")),
        rows=rows,
        caption="Area under the curve of median returns, divided by the number of iterations: the mean height of the "
        "curve in the figure. Seeds are by task where they differ",
    )


def paired_table(study: Study, tasks: Sequence[str]) -> Table | None:
    """NNG-MVG against BBB with the same settings, seed by seed; None where there is no pair."""
    rows: list[dict[str, Value]] = []
    for suffix, settings in (("", "ours"), (conditions.RELEASED, "released")):
        for task in tasks:
            found = paired(study, conditions.MVG + suffix, conditions.BBB + suffix, task)
            if found is not None:
                wins = f"{found.wins} of {found.seeds}"
                figures: dict[str, Value] = {"difference": found.difference, "p": found.p_value}
                rows.append({"task": task, "settings": settings, "wins": wins, **figures})
    if not rows:
        return None
    columns = (
        Column(key="task", header="task"),
        Column(key="settings", header="settings"),
        Column(key="wins", header="seeds won by NNG-MVG"),
        Column(key="difference", header="median difference", digits=3),
        Column(key="p", header="p", digits=3),
    )
    return Table(
        columns=columns,
        rows=rows,
        caption="TRPO+NNG-MVG against TRPO+BBB on the same seeds, by the area under each run's curve; p is of "
        "Wilcoxon's signed-rank test, two-sided",
    )


def error_table(study: Study, methods: Sequence[str], tasks: Sequence[str]) -> Table | None:
    """How well the models predicted rollouts they had not seen, beside the prediction that nothing changes."""
    rows: list[dict[str, Value]] = []
    for task in tasks:
        for method in methods:
            cells = study.finished(method, task)
            model, persistence = (_ends(cells, name) for name in ("model_error", "persistence_error"))
            if model is not None and persistence is not None:
                ratio = model / persistence if persistence else None
                figures: dict[str, Value] = {"model": model, "persistence": persistence, "ratio": ratio}
                rows.append({"task": task, "method": method, **figures})
    if not rows:
        return None
    columns = (
        *_WHICH,
        Column(key="model", header="model", digits=4),
        Column(key="persistence", header="persistence", digits=4),
        Column(key="ratio", header="ratio", digits=2),
    )
    return Table(
        columns=columns,
        rows=rows,
        caption=f"Squared error of the predicted next observation, standardised, in the last {_LAST} rollouts before "
        "the model learned from them; median over the seeds. Persistence predicts that nothing changes",
    )


def time_table(study: Study, methods: Sequence[str], tasks: Sequence[str]) -> Table:
    """Processor seconds of an iteration, and where they go."""
    rows: list[dict[str, Value]] = []
    for task in tasks:
        for method in methods:
            if cells := study.finished(method, task):
                parts = {part: _mean(cells, f"seconds_{part}") for part in conditions.PARTS}
                rows.append({"task": task, "method": method, **parts, "all": sum(parts.values())})
    columns = (*_WHICH, *(Column(key=part, header=part, unit="s", digits=3) for part in (*conditions.PARTS, "all")))
    return Table(
        columns=columns,
        rows=rows,
        caption="Processor seconds of an iteration of one seed: 5000 steps of the task, their bonus, a step of the "
        "policy, and the updates of the model",
    )


def sections(results: Path, page: ReportPage) -> None:
    """The figure, and all that belongs to it; a word on how to make it where there is nothing."""
    study = exploration_study(Results(results, conditions.EXPERIMENT).load())
    page.section("Exploration")
    tasks, methods = _tasks(study), study.methods
    if not any(cell.error is None for cell in study.cells):
        page.absent(f"finished run in {conditions.EXPERIMENT}.jsonl", "exploration")
        add_failures(page, study, "seed")
        return
    page.text(
        "Three tasks whose reward is 0 nearly everywhere. TRPO is run alone, with a bonus that needs no model (the "
        "norm of what is observed), and with the information gain of a Bayesian network that learns the dynamics, "
        "fitted by Bayes by Backprop (BBB) or by noisy natural gradient (NNG, with a matrix-variate or a diagonal "
        "posterior: MVG, FFG). An iteration is 5000 actions and one step of the policy; returns are sums of the task's "
        "own reward over an episode, without the bonus."
    )
    if any(conditions.RELEASED in method for method in methods):
        page.text(
            "The settings of the released code are reported apart: with a noise of five standard deviations of the "
            "data its models hardly learn to predict: their errors are among those below."
        )
    for task in tasks:
        if len(lengths := sorted(_lengths(study, task))) > 1:
            page.text(
                f"{task} was run with {', '.join(map(str, lengths))} iterations: all runs are compared by their first "
                f"{lengths[0]}."
            )
    page.tiles(_tiles(study, tasks))
    panels = _panels(study, tasks)
    page.figure(
        returns_figure(study),
        caption="Median over the seeds, and interquartile range; dashed are conditions without a model.",
        alt="Learning curves. Area under the median curve: "
        + "; ".join(
            f"{title}: "
            + ", ".join(f"{method} {np.median(np.asarray(runs), axis=0).mean():.3g}" for method, runs in found.items())
            for title, found in panels.items()
        ),
    )
    page.table(area_table(study, methods, tasks))
    page.table(paired_table(study, tasks)).table(error_table(study, methods, tasks))
    page.table(time_table(study, methods, tasks))
    add_gaps(page, gaps(study, tasks))
    add_failures(page, study, "seed")
    page.table(wall_time_table(study, "Wall time of the jobs, some of which shared a processor", corner="task"))
    add_provenance(page, study)


def returns_figure(study: Study) -> Figure:
    """Figure 3: the returns of all conditions, a panel for each task."""
    tasks = _tasks(study)
    return quartile_panels(_panels(study, tasks), x_label="iteration", y_label="return", columns=min(3, len(tasks)))


def gaps(study: Study, tasks: Sequence[str]) -> list[str]:
    """Conditions with fewer seeds than are asked for."""
    found = []
    for task in tasks:
        for method in conditions.METHODS:
            wanted = conditions.usual_seeds(task, method)
            count = len(curves(study, method, task))
            if count < wanted:
                found.append(f"{method} on {task}: {count} of {wanted} seeds")
    return found


def _tiles(study: Study, tasks: Sequence[str]) -> dict[str, str]:
    areas = {task: {method: median_area(study, method, task) for method in conditions.COMPARED} for task in tasks}
    whole = [task for task in tasks if None not in areas[task].values()]

    def above(first: str, second: str) -> set[str]:
        return {task for task in whole if (areas[task][first] or 0.0) > (areas[task][second] or 0.0)}

    both = above(conditions.MVG, conditions.ALONE) & above(conditions.BBB, conditions.ALONE)
    tiles = {
        "tasks where both bonuses are above TRPO alone": f"{len(both)} of {len(whole)}",
        "tasks where NNG-MVG is above BBB": f"{len(above(conditions.MVG, conditions.BBB))} of {len(whole)}",
    }
    for task in tasks:
        found = paired(study, conditions.MVG, conditions.BBB, task)
        if found is not None:
            tiles[f"p of NNG-MVG against BBB, {task}"] = f"{found.p_value:.2g}"
    return tiles


def _panels(study: Study, tasks: Sequence[str]) -> dict[str, dict[str, list[list[float]]]]:
    """A row of panels with our settings; with the released ones, and the paper's gain, where there are runs of them."""
    controls, models = (conditions.ALONE, conditions.NORM), (conditions.BBB, conditions.FFG, conditions.MVG)
    rows = {
        "": (*controls, *models),
        ", as released": (*controls, *(model + conditions.RELEASED for model in models)),
        ", the paper's gain": (*controls, conditions.MVG, conditions.MVG + conditions.BLOCKWISE),
    }
    found: dict[str, dict[str, list[list[float]]]] = {}
    for suffix, methods in rows.items():
        for task in tasks:
            runs = {method: list(curves(study, method, task).values()) for method in methods}
            runs = {method: given for method, given in runs.items() if given}
            if runs and (not suffix or runs.keys() - set(rows[""])):
                found[task + suffix] = runs
    return found


def _tasks(study: Study) -> list[str]:
    finished = {cell.data for cell in study.cells if cell.error is None}
    return [task for task in conditions.ITERATIONS if task in finished]


def _seed_counts(study: Study, method: str, tasks: Sequence[str]) -> str:
    """One number where all tasks have as many, otherwise one for each."""
    counts = [str(len(curves(study, method, task))) for task in tasks]
    return counts[0] if len(set(counts)) == 1 else ", ".join(counts)


def _ends(cells: Sequence[Cell], name: str) -> float | None:
    """The median over the seeds of the mean over the last rollouts; a run of one iteration has none."""
    ends = [np.mean(values[-_LAST:]) for cell in cells if isinstance(values := cell.metrics.get(name), list) and values]
    return float(np.median(ends)) if ends else None


def _mean(cells: Sequence[Cell], name: str) -> float:
    found = [value for cell in cells if isinstance(value := cell.metrics.get(name), int | float)]
    return float(np.mean(found)) if found else float("nan")
