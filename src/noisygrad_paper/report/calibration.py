"""Whether a classifier knows when it may be wrong: scores, reliability diagrams, and what corrupted images do."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from noisygrad.plots import ReliabilityBins, reliability_of_bins
from noisygrad_paper.experiments.cells import Cell
from noisygrad_paper.experiments.configurations import CONFIGURATIONS, full_name, heading, parts
from noisygrad_paper.pages.tables import Column, Table
from noisygrad_paper.report.comparison import ACCURACY, BRIER, ECE, NLL, Metric
from noisygrad_paper.report.figures import Curve, Panel, curve_panels, method_colour
from noisygrad_paper.report.page import ReportPage
from noisygrad_paper.report.study import Study, listed

OURS, WITHOUT_NOISE = "noisy-K-FAC", "K-FAC"

_AUROC = (
    Metric(key="auroc_entropy", title="AUROC of H", better="highest"),
    Metric(key="auroc_mutual_information", title="AUROC of MI", better="highest"),
)
_COLUMNS: dict[Metric, Column] = {
    ACCURACY: Column(key=ACCURACY.key, header="accuracy", unit="%", digits=2, best="highest"),
    NLL: Column(key=NLL.key, header="nll", unit="nats", digits=3, best="lowest"),
    ECE: Column(key=ECE.key, header="ECE", digits=3, best="lowest"),
    BRIER: Column(key=BRIER.key, header="Brier", digits=3, best="lowest"),
    **{metric: Column(key=metric.key, header=metric.title, digits=3, best="highest") for metric in _AUROC},
}
_DIAGRAMS = ("plain", "B")
_CORRUPTIONS = {"noise": "Gaussian noise", "blur": "Blur", "contrast": "Low contrast"}


def draws_table(study: Study, data: str) -> Table | None:
    """Accuracy and ECE by how many draws are averaged, in the mean over the seeds; None where nobody counted."""
    rows: list[dict[str, str | float | None]] = []
    counts: list[float] = []
    for method in study.methods:
        cells = [cell for cell in study.of(method, data) if listed(cell, "draws")]
        if not cells:
            continue
        counts = listed(cells[0], "draws")
        row: dict[str, str | float | None] = {"method": method}
        for key in (ACCURACY.key, ECE.key):
            means = np.mean([listed(cell, f"{key}_by_draws") for cell in cells], axis=0)
            row |= {f"{key}{count:g}": float(mean) for count, mean in zip(counts, means, strict=True)}
        rows.append(row)
    if not rows:
        return None
    columns = [Column(key="method", header="method")]
    columns += [Column(key=f"{ACCURACY.key}{count:g}", header=f"{count:g}", unit="%", digits=2) for count in counts]
    columns += [Column(key=f"{ECE.key}{count:g}", header=f"ECE of {count:g}", digits=3) for count in counts]
    return Table(
        columns=tuple(columns),
        rows=rows,
        caption="Test accuracy and ECE by how many draws of the weights are averaged, in the mean over the seeds",
    )


def scores_table(study: Study, data: str, methods: Mapping[str, str], caption: str) -> Table:
    """Accuracy, likelihood and calibration, in the mean over the seeds; full names of `methods` by what is written."""
    rows: list[dict[str, str | float | None]] = []
    for label, method in methods.items():
        row: dict[str, str | float | None] = {"method": label, "seeds": _seeds(study.of(method, data))}
        for metric in _COLUMNS:
            estimate = study.estimate(method, data, metric)
            row[metric.key] = None if estimate is None else estimate.mean
        rows.append(row)
    shown = [
        column
        for metric, column in _COLUMNS.items()
        if metric not in _AUROC or any(row[metric.key] is not None for row in rows)
    ]
    columns = (Column(key="method", header="method"), *shown, Column(key="seeds", header="seeds"))
    return Table(columns=columns, rows=rows, caption=caption)


def _seeds(cells: Sequence[Cell]) -> str:
    failed = sum(cell.error is not None for cell in cells)
    return f"{len(cells) - failed}" + (f", {failed} failed" if failed else "")


def methods_in(study: Study, data: str, configuration: str) -> dict[str, str]:
    """The methods that were run in a configuration: by their names without it, their full names."""
    names = [method for method in study.methods if study.of(method, data)]
    return {short: name for name in names for short, found in [parts(name)] if found == configuration}


def add_scores(page: ReportPage, study: Study, data: str, topic: str) -> None:
    """A table for each configuration, and how much better calibrated noise makes K-FAC."""
    page.section(f"{topic}: calibration")
    page.text(
        "ECE is the mean distance between confidence and accuracy in 15 bins, nll the mean negative log-likelihood of "
        "a test image."
    )
    if any(study.values(method, data, metric) for method in study.methods for metric in _AUROC):
        page.text(
            "AUROC says how well images of house numbers (SVHN) are told from the test images, 1 being perfect and 0.5 "
            "chance: by the entropy H of the prediction, or by the mutual information MI of label and weights, which a "
            "method without a posterior does not have."
        )
    for configuration in CONFIGURATIONS:
        methods = methods_in(study, data, configuration)
        if methods:
            page.table(scores_table(study, data, methods, heading(configuration)))
    sentence = ratio_sentence(study, data)
    if sentence:
        page.text(sentence)


def ratio_sentence(study: Study, data: str) -> str:
    """How many times the ECE of K-FAC is that of noisy K-FAC; empty where no configuration has both."""
    found = []
    for configuration in CONFIGURATIONS:
        plain, ours = (study.estimate(full_name(name, configuration), data, ECE) for name in (WITHOUT_NOISE, OURS))
        if plain is not None and ours is not None and ours.mean > 0:
            ratio = f"{plain.mean / ours.mean:.1f} times"
            found.append(f"{configuration} {ratio} ({plain.mean:.3f} against {ours.mean:.3f})")
    return f"The ECE of {WITHOUT_NOISE} as a multiple of that of {OURS}: {', '.join(found)}." if found else ""


def reliability_figure(study: Study, data: str) -> tuple[Figure, list[str]] | None:
    """K-FAC and noisy K-FAC, plain and with batch norm, with the names of the panels; None where no cell has bins."""
    bins: dict[str, ReliabilityBins] = {}
    colours: dict[str, str] = {}
    for configuration in _DIAGRAMS:
        for method in (WITHOUT_NOISE, OURS):
            cells = study.of(full_name(method, configuration), data)
            shared = (cell for cell in cells if listed(cell, "bin_share"))
            first = min(shared, key=lambda cell: cell.replicate, default=None)
            if first is not None:
                name = f"{method}, {configuration}"
                bins[name], colours[name] = reliability_of(first), method_colour(method)
    return (reliability_of_bins(bins, colours=colours, columns=2), list(bins)) if bins else None


def add_reliability(page: ReportPage, study: Study, data: str, topic: str) -> None:
    """The reliability diagrams, where there are any."""
    found = reliability_figure(study, data)
    if found is None:
        return
    figure, names = found
    page.section(f"{topic}: reliability")
    page.figure(
        figure,
        caption="How often a prediction is right, by how sure it is; below, the share of the test images in each bin. "
        "Of each method its first seed. Hatched is the gap between confidence and accuracy, the ECE its mean.",
        alt=f"Reliability diagrams of {'; '.join(names)}.",
    )


def reliability_of(cell: Cell) -> ReliabilityBins:
    """The bins that a cell has stored; raises ValueError if they do not fit together."""
    share, confidence, accuracy = (listed(cell, f"bin_{name}") for name in ("share", "confidence", "accuracy"))
    if not len(share) == len(confidence) == len(accuracy):
        raise ValueError(
            f"{cell.label}: bin_share, bin_confidence and bin_accuracy have {len(share)}, {len(confidence)} and "
            f"{len(accuracy)} values; expected as many of each"
        )
    return ReliabilityBins(share=np.array(share), confidence=np.array(confidence), accuracy=np.array(accuracy))


def add_corruption(page: ReportPage, study: Study, data: str, topic: str) -> None:
    """Accuracy and ECE against the strength of three corruptions; nothing where no cell has them."""
    figures = {name: panels for name in CONFIGURATIONS if (panels := corruption_panels(study, data, name))}
    if not figures:
        return
    page.section(f"{topic}: corrupted images")
    page.text(
        "The test images with noise, blur or less contrast, in five strengths; 0 is as they are. A method that knew "
        "what it does not know would lose accuracy like the others, but become less sure as it does, and keep its ECE "
        "low. The table says how far that is so."
    )
    page.table(corruption_table(study, data))
    for configuration, panels in figures.items():
        page.figure(
            curve_panels(panels, x_label="strength", columns=len(panels) // 2, height=2.7),
            caption=f"{heading(configuration)}. Mean over the seeds, thin lines are "
            "single seeds; dashed are methods without a posterior.",
            alt=f"Accuracy and ECE against the strength of a corruption, {configuration}. At the strongest: "
            + "; ".join(f"{panel.y_label}, {panel.ends}" for panel in panels)
            + ".",
        )


def corruption_table(study: Study, data: str) -> Table | None:
    """K-FAC and noisy K-FAC at the greatest strength of each corruption; None where no configuration has both."""
    rows: list[dict[str, str | float | None]] = []
    for configuration in CONFIGURATIONS:
        for kind, title in _CORRUPTIONS.items():
            row: dict[str, str | float | None] = {"configuration": configuration, "corruption": title}
            for method in (WITHOUT_NOISE, OURS):
                cells = study.of(full_name(method, configuration), data)
                for metric in (ACCURACY, ECE):
                    ends = [values[-1] for cell in cells if (values := listed(cell, f"{kind}_{metric.key}"))]
                    row[f"{method} {metric.key}"] = float(np.mean(ends)) if ends else None
            if None not in row.values():
                rows.append(row)
    if not rows:
        return None
    columns = [Column(key=name, header=name) for name in ("configuration", "corruption")]
    for method in (WITHOUT_NOISE, OURS):
        columns.append(Column(key=f"{method} {ACCURACY.key}", header=method, unit="%", digits=1))
        columns.append(Column(key=f"{method} {ECE.key}", header=f"ECE of {method}", digits=3))
    caption = "At the greatest strength, in the mean over the seeds"
    return Table(columns=tuple(columns), rows=rows, caption=caption)


def corruption_panels(study: Study, data: str, configuration: str) -> list[Panel]:
    """A row of panels of the accuracy, one of the ECE; a panel for each kind that any method has."""
    methods = methods_in(study, data, configuration)
    rows: list[list[Panel]] = []
    for metric, y_label in ((ACCURACY, "accuracy (%)"), (ECE, "ECE")):
        row = []
        for kind, title in _CORRUPTIONS.items():
            curves = {
                short: found
                for short, name in methods.items()
                if (found := _corrupted(study.of(name, data), kind, metric))
            }
            row.append(Panel(title=title, curves=curves, y_label=y_label))
        rows.append(row)
    kept = [index for index in range(len(_CORRUPTIONS)) if any(row[index].curves for row in rows)]
    return [row[index] for row in rows for index in kept]


def _corrupted(cells: Sequence[Cell], kind: str, metric: Metric) -> list[Curve]:
    """A curve for each seed that has it, from the clean test set on."""
    found = []
    for cell in cells:
        values, clean = listed(cell, f"{kind}_{metric.key}"), cell.metrics.get(metric.key)
        if values and isinstance(clean, int | float):
            found.append(Curve(range(len(values) + 1), [clean, *values]))
    return found
