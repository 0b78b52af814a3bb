"""Regression on the UCI sets: ours beside Table 1 and the supplement's table, and where ours falls short."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from noisygrad_paper.experiments.cells import Results
from noisygrad_paper.pages.tables import Column, Table
from noisygrad_paper.report import paper
from noisygrad_paper.report.comparison import ELBO, LOG_LIKELIHOOD, RMSE, Metric, signed
from noisygrad_paper.report.comparison_table import ComparisonTable
from noisygrad_paper.report.figures import difference_plot
from noisygrad_paper.report.page import ReportPage
from noisygrad_paper.report.provenance import add_failures, add_gaps, add_provenance, wall_time_table
from noisygrad_paper.report.reasons import REASONS
from noisygrad_paper.report.study import Standing, Study, entry

METRICS = (RMSE, LOG_LIKELIHOOD)
_OURS, _SIMPLER = "NNG-MVG", "NNG-FFG"


def sections(results: Path, page: ReportPage) -> None:
    """Everything about regression; a word on how to make it where there is nothing."""
    study = Study(Results(results, "regression").load())
    if not study.cells:
        page.section("Regression").absent("regression.jsonl", "regression")
        return
    _summary(page, study)
    _tables(page, study)
    _differences(page, study)
    _beyond(page, study)
    _shortfalls(page, study)
    _provenance(page, study)


def comparison_table(
    study: Study, methods: Sequence[str], data: Sequence[str], metric: Metric, *, legend: bool = True
) -> ComparisonTable:
    """Our figures of one metric, each over the paper's where it has one."""
    rows = {
        paper.DATA.get(name, name): [entry(study, method, name, metric, _expected(name)) for method in methods]
        for name in data
    }
    return ComparisonTable(
        columns=methods,
        rows=rows,
        legend=legend,
        caption=f"{metric.title[:1].upper()}{metric.title[1:]}, mean ± standard error over the splits; "
        "below it, where there is one, the paper's figure",
    )


def _expected(data: str) -> int | None:
    """How many splits there should be; a table of one's own has as many as it has."""
    return paper.replicates_of(data) if data in paper.DATA else None


def _summary(page: ReportPage, study: Study) -> None:
    page.section("Regression in short")
    standings = [standing for standing in study.standings([_OURS], METRICS) if standing.difference is not None]
    counts = _counts(standings)
    expected = len(study.standings([_OURS], METRICS))
    page.text(
        f"{_OURS}, the paper's main method, on nine data sets and two measures: {expected} figures, of which "
        f"{len(standings)} are measured here. Differences are counted in standard errors of the difference, positive "
        "where ours is better."
    )
    both, compared = _better_in_both(study)
    page.tiles(
        {
            "better by more than one": f"{counts['better']} of {expected}",
            "within one": f"{counts['within']} of {expected}",
            "worse by one to two": f"{counts['near']} of {expected}",
            "worse by more than two": f"{counts['far']} of {expected}",
            "mean signed difference": _mean(standings),
            f"sets where our {_OURS} beats our {_SIMPLER} in both measures": f"{both} of {compared}",
        }
    )
    page.table(summary_table(study))


def summary_table(study: Study) -> Table:
    """For every method of the paper, how its figures stand."""
    rows: list[dict[str, str | float | None]] = []
    for method in paper.METHODS:
        every = study.standings([method], METRICS)
        judged = [standing for standing in every if standing.difference is not None]
        counts = _counts(judged)
        measured = f"{len(judged)} of {len(every)}"
        rows.append({"method": method, "measured": measured, **counts, "mean": _mean(judged)})
    columns = (
        Column(key="method", header="method"),
        Column(key="measured", header="figures measured"),
        Column(key="better", header="better", digits=0),
        Column(key="within", header="within one", digits=0),
        Column(key="near", header="worse by one to two", digits=0),
        Column(key="far", header="worse by more than two", digits=0),
        Column(key="mean", header="mean difference"),
    )
    return Table(
        columns=columns,
        rows=rows,
        caption="All methods against the paper's figures for them, in standard errors of the difference; without year",
    )


def _counts(standings: Sequence[Standing]) -> dict[str, int]:
    values = [standing.difference for standing in standings if standing.difference is not None]
    return {
        "better": sum(value > 1 for value in values),
        "within": sum(-1 <= value <= 1 for value in values),
        "near": sum(-2 <= value < -1 for value in values),
        "far": sum(value < -2 for value in values),
    }


def _mean(standings: Sequence[Standing]) -> str:
    values = [standing.difference for standing in standings if standing.difference is not None]
    return signed(statistics.fmean(values)) if values else "–"


def _better_in_both(study: Study) -> tuple[int, int]:
    """On how many of the nine sets the main method beats the simpler one in every measure, and how many have both."""
    won = compared = 0
    for data in paper.rows_of((_OURS,)):
        pairs = [(study.estimate(_OURS, data, m), study.estimate(_SIMPLER, data, m), m) for m in METRICS]
        known = [m.prefers(a.mean, b.mean) for a, b, m in pairs if a is not None and b is not None]
        if data != "year" and len(known) == len(METRICS):
            compared += 1
            won += all(known)
    return won, compared


def _tables(page: ReportPage, study: Study) -> None:
    naval = (
        "Naval is two tasks: the paper's own columns predict the turbine's decay from 17 features, the columns it "
        "takes from other papers the compressor's from 16. Each of ours is compared with the figure for the same task."
    )
    for metric in METRICS:
        page.section(f"Table 1: {metric.title}").text(naval)
        page.table(comparison_table(study, paper.TABLE_1_METHODS, tuple(paper.DATA), metric))
    page.section("Supplement: PBP_MV and VMG")
    for metric in METRICS:
        rows = paper.rows_of(paper.SUPPLEMENT_METHODS)
        page.table(comparison_table(study, paper.SUPPLEMENT_METHODS, rows, metric, legend=metric is METRICS[0]))


def _differences(page: ReportPage, study: Study) -> None:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for metric in METRICS:
        panel = found.setdefault(metric.title[:1].upper() + metric.title[1:], {})
        for standing in study.standings(paper.METHODS, [metric]):
            if standing.difference is not None:
                panel.setdefault(standing.method, {})[standing.data] = standing.difference
    drawn = {data for panel in found.values() for by_data in panel.values() for data in by_data}
    if not drawn:
        return
    means = ", ".join(f"{method} {_mean(study.standings([method], METRICS))}" for method in paper.METHODS)
    page.section("How far from the paper")
    page.figure(
        difference_plot(
            found, {data: label.replace(" (", "\n(") for data, label in paper.DATA.items() if data in drawn}
        ),
        caption="Ours minus the paper's in standard errors of the difference, right is better. The grey band is one "
        "standard error either way, dashed lines are two; what lies beyond six is at the edge with its value.",
        alt=f"Signed differences from the paper for each method and data set. Their means: {means}.",
    )


def _beyond(page: ReportPage, study: Study) -> None:
    variants = [method for method in study.methods if method not in paper.METHODS]
    others = [data for data in study.data if data not in paper.DATA]
    if not variants and not others:
        return
    page.section("Beyond the paper")
    page.text("Methods, variants and data sets of which the paper has no figure, with our own figures beside them.")
    if variants:
        base = [name for name in dict.fromkeys(method.split("/")[0] for method in variants) if name in study.methods]
        columns = list(dict.fromkeys((*(name for name in (_OURS, *base) if name in study.methods), *variants)))
        rows = [data for data in study.data if any(study.of(method, data) for method in variants)]
        _own_tables(page, study, columns, rows)
    if others:
        _own_tables(page, study, [m for m in study.methods if any(study.of(m, data) for data in others)], others)


def _own_tables(page: ReportPage, study: Study, methods: Sequence[str], data: Sequence[str]) -> None:
    for metric in (*METRICS, ELBO):
        known = [m for m in methods if any(study.values(m, name, metric) for name in data)]
        if known:
            page.table(comparison_table(study, known, data, metric, legend=metric is METRICS[0]))


def shortfalls(study: Study) -> list[Standing]:
    """Figures worse than the paper's by more than two standard errors (three for PBP_MV and VMG), the worst first."""
    found = [
        (standing.difference, standing)
        for standing in study.standings(paper.METHODS, METRICS)
        if standing.difference is not None
        and standing.difference < (-3 if standing.method in paper.SUPPLEMENT_METHODS else -2)
    ]
    return [standing for _, standing in sorted(found, key=lambda pair: pair[0])]


def _shortfalls(page: ReportPage, study: Study) -> None:
    found = shortfalls(study)
    page.section("Where it falls short")
    if found:
        page.text("Figures worse than the paper's by more than two standard errors (three for PBP_MV and VMG):")
        page.items(_sentence(standing) for standing in found)
    else:
        page.text("No figure is worse than the paper's by more than two standard errors (three for PBP_MV and VMG).")
    add_gaps(page, _gaps(study))
    add_failures(page, study, "split")


def _sentence(standing: Standing) -> str:
    ours = "not measured" if standing.ours is None else standing.ours.text()
    distance = "" if standing.difference is None else f", {signed(standing.difference)} standard errors"
    reason = REASONS.get((standing.method, standing.data, standing.metric.key), "")
    return (
        f"{standing.method} on {paper.DATA[standing.data]}, {standing.metric.title}: {ours} against "
        f"{standing.theirs.text()}{distance}.{' ' * bool(reason)}{reason}"
    )


def _gaps(study: Study) -> list[str]:
    """One line for each method that lacks replicates of the sets the paper has for it, and for sets never run."""
    absent = [data for data in paper.DATA if data not in study.data]
    found = [f"not run with any method: {', '.join(absent)}"] if absent else []
    for method in paper.METHODS:
        lacking = [
            f"{data} ({done} of {wanted})"
            for data in paper.rows_of((method,))
            if data not in absent
            and (done := len(study.values(method, data, RMSE))) < (wanted := paper.replicates_of(data))
        ]
        if lacking:
            found.append(f"{method}: {', '.join(lacking)}")
    return found


def _provenance(page: ReportPage, study: Study) -> None:
    page.section("How regression was made")
    page.text(
        "Standard splits into nine tenths to train on and one to test on: twenty, five of protein. Times "
        "are of all splits of a set together."
    )
    page.table(wall_time_table(study, "Wall time of the jobs, some of which shared a device"))
    add_provenance(page, study)
