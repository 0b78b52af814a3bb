"""Uncertainty from twenty labels: variances beside HMC's (Table 3), and active learning (Table 4)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from noisygrad_paper.baselines.hmc import HMCSettings
from noisygrad_paper.experiments import active_learning, hmc_correlation
from noisygrad_paper.experiments.cells import Cell, Results
from noisygrad_paper.experiments.few_labels import LABELLED
from noisygrad_paper.report import paper
from noisygrad_paper.report.comparison import CORRELATION, RMSE_ACTIVE, RMSE_RANDOM, Metric, signed
from noisygrad_paper.report.comparison_table import ComparisonTable, Entry
from noisygrad_paper.report.figures import Curve, Panel, curve_panels, mean_curve, variance_scatter
from noisygrad_paper.report.page import ReportPage
from noisygrad_paper.report.provenance import add_failures, add_provenance, wall_time_table
from noisygrad_paper.report.study import Study, entry, listed

_BEYOND = ("NNG-full", "NNG-MVG/exact", "NNG-MVG/lambda=1.4", "NNG-BlkTri/lambda=1.4", "NNG-MVG/batch", "ridge")
ORDER = ("PBP", "NNG-FFG", "NNG-MVG", "NNG-BlkTri", *_BEYOND, "HMC")
LOG_CORRELATION = Metric(key="log_correlation", title="correlation of log variances with HMC's", better="highest")
RATIO = Metric(key="ratio", title="median ratio of variances to HMC's", better="nearest to 1")
_LARGEST_RHAT = HMCSettings().largest_rhat
_MAGNITUDE = "NNG-BlkTri/lambda=1.4"
"""For variances of the right magnitude, chosen on HMC's for four of the sets (docs/reproduce-few-labels.md)."""
_DRAWN = ("NNG-FFG", "NNG-MVG", "NNG-BlkTri")


def correlation_study(cells: Sequence[Cell]) -> Study:
    """The cells, compared with HMC's."""
    return Study(hmc_correlation.compare(cells), ORDER)


def active_study(cells: Sequence[Cell]) -> Study:
    """The cells as they are."""
    return Study(cells, ORDER)


def correlation_table(
    study: Study, methods: Sequence[str], data: Sequence[str], metric: Metric = CORRELATION, *, legend: bool = True
) -> ComparisonTable:
    """One figure of each method on each data set, over the paper's where it has one."""
    trials = hmc_correlation.TRIALS
    beside = "; below it, where there is one, the paper's figure" if metric is CORRELATION else ""
    return ComparisonTable(
        columns=methods,
        rows={name: [_entry(study, method, name, metric, trials) for method in methods] for name in data},
        caption=f"{metric.title[:1].upper()}{metric.title[1:]}, mean ± standard error over {trials} trials{beside}",
        legend=legend,
    )


def active_table(study: Study, methods: Sequence[str], data: Sequence[str]) -> ComparisonTable:
    """Test RMSE of each method after random acquisitions (_R) and after acquisitions by variance (_A)."""
    trials, ways = active_learning.TRIALS, {"_R": RMSE_RANDOM, "_A": RMSE_ACTIVE}
    columns = [(method, suffix) for method in methods for suffix in ways]

    def row(name: str) -> list[Entry]:
        return [_entry(study, method, name, ways[suffix], trials) for method, suffix in columns]

    return ComparisonTable(
        columns=[method + suffix for method, suffix in columns],
        rows={name: row(name) for name in data},
        caption=f"Test RMSE after {active_learning.ACQUISITIONS} acquisitions, at random (_R) and by variance (_A), "
        f"mean ± standard error over {trials} trials; below it, where there is one, the paper's figure",
    )


def _entry(study: Study, method: str, data: str, metric: Metric, trials: int) -> Entry:
    """A place of either table, with a note where chains of HMC that are in it disagree."""
    found = entry(study, method, data, metric, trials, "trials")
    late = sum(value > _LARGEST_RHAT for value in _rhats(study.of(method, data)))
    note = f"{late} with R̂ > {_LARGEST_RHAT}" if late else ""
    return replace(found, note=", ".join(part for part in (found.note, note) if part))


def _rhats(cells: Sequence[Cell]) -> list[float]:
    return [float(value) for cell in cells if isinstance(value := cell.metrics.get("rhat"), int | float)]


def sections(results: Path, page: ReportPage) -> None:
    """Both tables, with what lies behind them; a word on how to make them where there is nothing."""
    _correlation(results, page)
    _active(results, page)


def _correlation(results: Path, page: ReportPage) -> None:
    cells = Results(results, hmc_correlation.EXPERIMENT).load()
    page.section("Variances beside HMC's")
    study = correlation_study(cells)
    if not study.cells:
        page.absent("variances to compare", "hmc-correlation")
        return
    page.text(
        "Networks of ten hidden units learn from 20 labelled points; the variance of the function at 100 others is "
        "compared with that of Hamiltonian Monte Carlo, the posterior itself. The column ridge is no network at all: "
        "the leverage of a point in ridge regression. The measure flatters what is simple."
    )
    page.tiles(_correlation_tiles(study))
    _convergence(page, cells)
    page.table(correlation_table(study, study.methods, study.data))
    page.text(
        "A correlation does not see the magnitude. The next tables do: the ratio is the median over the points of a "
        "method's variance over HMC's, 1 where it is right."
    )
    page.table(correlation_table(study, study.methods, study.data, RATIO, legend=False))
    page.table(correlation_table(study, study.methods, study.data, LOG_CORRELATION, legend=False))
    _scatter(page, cells, study)
    add_failures(page, study, "trial")
    page.table(wall_time_table(study, "Wall time of the jobs, some of which shared a device"))
    everything = Study(cells, ORDER)
    add_provenance(page, everything)


def _correlation_tiles(study: Study) -> dict[str, str]:
    def means(method: str) -> dict[str, float]:
        found = {name: study.estimate(method, name, CORRELATION) for name in study.data}
        return {name: estimate.mean for name, estimate in found.items() if estimate is not None}

    ffg, mvg, tri = (means(method) for method in _DRAWN)
    both, pairs = mvg.keys() & ffg.keys(), mvg.keys() & tri.keys()
    gain = float(np.mean([tri[name] - mvg[name] for name in pairs])) if pairs else float("nan")
    ratios = [study.estimate(_MAGNITUDE, name, RATIO) for name in study.data]
    known = [estimate.mean for estimate in ratios if estimate is not None]
    near = f"{sum(0.7 <= ratio <= 1.4 for ratio in known)} of {len(known)}"
    return {
        "sets where NNG-MVG is above NNG-FFG": f"{sum(mvg[name] > ffg[name] for name in both)} of {len(both)}",
        "NNG-BlkTri minus NNG-MVG, mean": signed(gain, 3),
        "sets where the best of these three is above the paper's best": _above_best(study),
        f"sets where the variances of {_MAGNITUDE} are within 0.7 to 1.4 of HMC's": near,
    }


def _above_best(study: Study) -> str:
    won = compared = 0
    for name in study.data:
        printed = [paper.quoted(method, name).get(CORRELATION.key) for method in paper.TABLE_3_METHODS]
        theirs = [figure.mean for figure in printed if figure is not None]
        ours = [found.mean for m in _DRAWN if (found := study.estimate(m, name, CORRELATION)) is not None]
        if theirs and ours:
            compared += 1
            won += max(ours) > max(theirs)
    return f"{won} of {compared}"


def _convergence(page: ReportPage, cells: Sequence[Cell]) -> None:
    rhats = _rhats(cells)
    if not rhats:
        return
    late = sum(value > _LARGEST_RHAT for value in rhats)
    page.text(
        f"HMC: the largest R̂ of a prediction is {max(rhats):.4f} over {len(rhats)} trials; "
        + (f"{late} stayed above {_LARGEST_RHAT} after all extensions." if late else f"none is above {_LARGEST_RHAT}.")
    )


def _scatter(page: ReportPage, cells: Sequence[Cell], study: Study) -> None:
    """The variances of one trial of each set, against HMC's."""
    found = {(cell.data, cell.method, cell.replicate): cell for cell in cells if cell.error is None}
    panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for name in study.data:
        truth = found.get((name, hmc_correlation.TRUTH, 0))
        for method in _DRAWN:
            own = found.get((name, method, 0))
            compared = any(cell.replicate == 0 for cell in study.finished(method, name))
            if truth is not None and own is not None and compared:
                pair = hmc_correlation.variances(truth)[0].tolist(), hmc_correlation.variances(own)[0].tolist()
                panels.setdefault(name, {})[method] = pair
    if panels:
        page.figure(
            variance_scatter(panels),
            caption="Predictive variances of the first trial against HMC's, both of standardised targets; on the line "
            "they are equal.",
            alt="Scatter plots of the variances of NNG-FFG, NNG-MVG and NNG-BlkTri against those of HMC for each set.",
        )


def _active(results: Path, page: ReportPage) -> None:
    study = active_study(Results(results, active_learning.EXPERIMENT).load())
    page.section("Active learning")
    if not study.cells:
        page.absent(f"{active_learning.EXPERIMENT}.jsonl", "active-learning")
        return
    page.text(
        "Twenty labelled points, nine more acquired one by one from all others but 100 test points: the one of the "
        "largest predictive variance, or one at random. The network is trained anew after each."
    )
    page.tiles(_active_tiles(study))
    _convergence(page, study.cells)
    page.table(active_table(study, study.methods, study.data))
    _curves(page, study)
    add_failures(page, study, "trial")
    page.table(wall_time_table(study, "Wall time of the jobs, some of which shared a device"))
    add_provenance(page, study)


def _active_tiles(study: Study) -> dict[str, str]:
    tiles = {}
    for method in study.methods:
        pairs = [
            (study.estimate(method, name, RMSE_RANDOM), study.estimate(method, name, RMSE_ACTIVE))
            for name in study.data
        ]
        known = [(a.mean, b.mean) for a, b in pairs if a is not None and b is not None]
        tiles[f"sets where {method} gains by choosing"] = f"{sum(b < a for a, b in known)} of {len(known)}"
    return tiles


def _curves(page: ReportPage, study: Study) -> None:
    """Mean test RMSE by the number of labels, a picture for each data set."""
    panels = []
    for name in study.data:
        curves: dict[str, list[Curve]] = {}
        for method in study.methods:
            for way, suffix in ((active_learning.ACTIVE, ""), (active_learning.RANDOM, "/random")):
                if suffix and method.endswith(active_learning.BATCH):
                    continue  # the same as those of the method itself
                rows = [listed(cell, f"rmse_{way}_by_round") for cell in study.finished(method, name)]
                lines = [Curve([float(LABELLED + k) for k in range(len(row))], row) for row in rows if row]
                if lines:
                    curves[method + suffix] = [mean_curve(lines)]
        panels.append(Panel(title=name, curves=curves, y_label="test RMSE"))
    if panels:
        page.figure(
            curve_panels(panels, x_label="labelled points", columns=2, own_scales=True),
            caption="Mean test RMSE over the trials; dotted lines are of acquisitions at random.",
            alt="; ".join(panel.ends for panel in panels),
        )
