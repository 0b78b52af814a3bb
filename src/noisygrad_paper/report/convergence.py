"""Training curves: the ELBO of each method against the iteration, as in the supplement's figure."""

import statistics
from collections.abc import Iterable
from pathlib import Path

from noisygrad_paper.experiments.cells import Results
from noisygrad_paper.pages.tables import Column, Table
from noisygrad_paper.report.figures import Curve, training_curves
from noisygrad_paper.report.page import ReportPage
from noisygrad_paper.report.provenance import add_failures, add_provenance
from noisygrad_paper.report.study import Study, list_of, setting_of

_REFERENCE = "BBB"
_EXACT = "NNG-MVG/exact-damping"


def sections(results: Path, page: ReportPage) -> None:
    """The curves and a table of how soon each method has what BBB ends with."""
    study = Study(Results(results, "convergence").load())
    page.section("Training curves")
    if not study.cells:
        page.absent("convergence.jsonl", "convergence")
        return
    page.text(
        "The evidence lower bound on the training data, in nats, for the three methods of the paper's figure, each "
        "with the step size that was best for it. BBB and NNG-FFG fit the same kind of posterior; NNG-MVG a richer one."
    )
    if _EXACT in study.methods:
        page.text(
            f"{_EXACT} damps the same posterior in its eigenbasis. The paper's factored damping makes a posterior "
            "narrower than the prior in directions that the data leave open; where data are few, that costs ELBO."
        )
    curves = {data: _curves(study, data) for data in study.data}
    curves = {data: methods for data, methods in curves.items() if methods}
    if not curves:
        page.text("Every training failed.")
        return
    levels = {data: _final(methods[_REFERENCE]) for data, methods in curves.items() if _REFERENCE in methods}
    drawn = {data: {name: list(found.values()) for name, found in methods.items()} for data, methods in curves.items()}
    page.figure(
        training_curves(drawn, levels),
        caption="A line for each training; dashed is the ELBO that BBB ends with, in the mean. "
        "The first steps lie below the picture.",
        alt="ELBO against iteration. At the end: "
        + "; ".join(
            f"{data}: " + ", ".join(f"{method} {_final(found):.0f}" for method, found in methods.items())
            for data, methods in curves.items()
        )
        + ".",
    )
    page.table(convergence_table(study))
    tuning = Study(Results(results, "convergence-tuning").load())
    if tuning.cells:
        page.table(tuning_table(tuning))
    add_failures(page, study, "split")
    add_provenance(page, study)


def convergence_table(study: Study) -> Table:
    """Where each method ends; when its mean first has the ELBO that BBB ends with, and how many trainings have it."""
    rows: list[dict[str, str | float | None]] = []
    for data in study.data:
        methods = _curves(study, data)
        reference = methods.get(_REFERENCE, {})
        for method, curves in methods.items():
            reached = own = trainings = None
            if common := sorted(curves.keys() & reference.keys()):
                theirs = _together(reference, common)
                reached, own = _together(curves, common).reaches(theirs.final), theirs.reaches(theirs.final)
                alone = [curves[number].reaches(reference[number].final) is not None for number in common]
                trainings = f"{sum(alone)} of {len(alone)}"
            rows.append(
                {
                    "data": data,
                    "method": method,
                    "lr": _step_size(study, method, data),
                    "final": _final(curves),
                    "reached": "never" if trainings is not None and reached is None else reached,
                    "trainings": trainings,
                    "speed": own / reached if own and reached else None,
                }
            )
    columns = (
        Column(key="data", header="data"),
        Column(key="method", header="method"),
        Column(key="lr", header="step size"),
        Column(key="final", header="final ELBO", unit="nats", digits=1),
        Column(key="reached", header=f"{_REFERENCE}'s at iteration", digits=0),
        Column(key="trainings", header="trainings"),
        Column(key="speed", header="times faster", digits=1),
    )
    return Table(
        columns=columns,
        rows=rows,
        caption=f"Convergence, in the mean over the trainings: the final ELBO (mean of the last twentieth of the "
        f"evaluations), how soon a method has that of {_REFERENCE}, and how many single trainings do",
    )


def tuning_table(study: Study) -> Table:
    """The ELBO that each step size ended with while tuning, on replicates that the curves do not show."""
    ends: dict[tuple[str, str], dict[float, list[float | None]]] = {}
    for cell in study.cells:
        if cell.error is None:
            by_rate = ends.setdefault((cell.data, cell.method.rpartition("/lr=")[0]), {})
            value = cell.metrics.get("elbo")
            by_rate.setdefault(setting_of(cell, "lr"), []).append(None if isinstance(value, list) else value)
    rows: list[dict[str, str | float | None]] = [
        {"data": data, "method": method, **{f"{rate:g}": _mean(values) for rate, values in by_rate.items()}}
        for (data, method), by_rate in ends.items()
    ]
    rates = sorted({rate for by_rate in ends.values() for rate in by_rate})
    columns = (
        Column(key="data", header="data"),
        Column(key="method", header="method"),
        *(Column(key=f"{rate:g}", header=f"step size {rate:g}", digits=1) for rate in rates),
    )
    return Table(columns=columns, rows=rows, caption="Tuning: the final ELBO in nats on other splits, by step size")


def _mean(values: list[float | None]) -> float | str:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else "diverged"


def _curves(study: Study, data: str) -> dict[str, dict[int, Curve]]:
    """The trainings on one data set by method and replicate; those that failed are left out."""
    found: dict[str, dict[int, Curve]] = {}
    for method in study.methods:
        for cell in study.finished(method, data):
            curve = Curve(list_of(cell, "iterations"), list_of(cell, "elbo"))
            found.setdefault(method, {})[cell.replicate] = curve
    return found


def _final(curves: dict[int, Curve]) -> float:
    return statistics.fmean(curve.final for curve in curves.values())


def _together(curves: dict[int, Curve], numbers: Iterable[int]) -> Curve:
    """The mean of some trainings: each may end in an optimum of its own, and their mean is what is compared."""
    chosen = [curves[number] for number in numbers]
    if any(list(curve.iterations) != list(chosen[0].iterations) for curve in chosen):
        raise ValueError("the trainings of a method on a data set must be evaluated at the same iterations")
    values = zip(*(curve.values for curve in chosen), strict=True)
    return Curve(chosen[0].iterations, [statistics.fmean(at) for at in values])


def _step_size(study: Study, method: str, data: str) -> str:
    sizes = (cell.metrics.get("lr") for cell in study.finished(method, data))
    return ", ".join(dict.fromkeys(f"{size:g}" if isinstance(size, int | float) else "–" for size in sizes))
