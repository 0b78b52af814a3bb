"""Classification: ours beside Table 2, how the trainings went, and where ours falls short."""

import math
import statistics
from dataclasses import replace
from pathlib import Path

from noisygrad_paper.experiments.cells import Cell, Results
from noisygrad_paper.experiments.configurations import CONFIGURATIONS, full_name, heading, parts
from noisygrad_paper.pages.tables import Column, Table
from noisygrad_paper.report import paper
from noisygrad_paper.report.calibration import (
    add_corruption,
    add_reliability,
    add_scores,
    draws_table,
    methods_in,
)
from noisygrad_paper.report.comparison import ACCURACY, ACCURACY_OF_MANY, Metric, signed
from noisygrad_paper.report.comparison_table import ComparisonTable, Entry
from noisygrad_paper.report.figures import Curve, Panel, View, curve_panels
from noisygrad_paper.report.image_aims import ORDER, add_shortfalls, standings
from noisygrad_paper.report.page import ReportPage
from noisygrad_paper.report.provenance import add_provenance, wall_time_table
from noisygrad_paper.report.study import Study, entry, listed

_DATA = paper.TABLE_2_DATA
_LEARNED_NORM = "learned-norm"
_TITLES = {_DATA: "CIFAR-10", "mnist": "MNIST", "digits": "Digits"}
_LOGITS = Metric(key="accuracy_of_mean_logits", title="accuracy of the mean logits", better="highest")
_WEIGHTS = Metric(key="accuracy_of_mean_weights", title="accuracy of the mean weights", better="highest")
_OWN_NORM = Metric(key="accuracy_own_norm", title="accuracy with each draw's own batch statistics", better="highest")
_REMARKS: dict[View, str] = {
    "climb": " The first epochs lie below the picture.",
    "logarithmic": " The scale is logarithmic.",
    "whole": "",
}
_STEP = Metric(key="step_ms", title="time of a step", better="lowest")


def sections(results: Path, page: ReportPage) -> None:
    """Everything about classification; a word on how to make it where there is nothing."""
    study = Study(Results(results, "classification").load(), ORDER)
    if not study.cells:
        page.section("Classification").absent("classification.jsonl", "classification")
        return
    _table_2(page, study)
    if _DATA in study.data:
        _details(page, study, _DATA, "Classification")
        _averages(page, study)
    for data in study.data:
        if data != _DATA:
            _details(page, study, data, _TITLES.get(data, data))
    add_shortfalls(page, study)
    _provenance(page, study)


def _details(page: ReportPage, study: Study, data: str, topic: str) -> None:
    """Calibration, how the trainings went, and what corrupted images do, of one data set."""
    add_scores(page, study, data, topic)
    add_reliability(page, study, data, topic)
    _curves(page, study, data, topic)
    add_corruption(page, study, data, topic)


def accuracy_table(study: Study) -> ComparisonTable:
    """Table 2: methods by configurations, ours over the paper's; variants of a method follow the paper's rows."""
    rows = dict.fromkeys((*paper.TABLE_2_METHODS, *(parts(name)[0] for name in study.methods if study.of(name, _DATA))))
    return _compared(
        study,
        list(rows),
        ACCURACY,
        "Test accuracy in per cent: mean ± standard error over the seeds, or the one seed there is; below it, where "
        "there is one, the paper's figure. D is augmentation, B batch norm.",
    )


def many_draws_table(study: Study) -> ComparisonTable | None:
    """The same of the methods that draw, with as many draws as were counted; None where nobody counted."""
    counted = [name for name in study.methods if study.values(name, _DATA, ACCURACY_OF_MANY)]
    if not counted:
        return None
    last = {listed(cell, "draws")[-1] for name in counted for cell in study.of(name, _DATA) if listed(cell, "draws")}
    most = " or ".join(f"{count:g}" for count in sorted(last))
    return _compared(
        study,
        list(dict.fromkeys(parts(name)[0] for name in counted)),
        ACCURACY_OF_MANY,
        f"The same with {most} draws of the weights, of the seeds for which that was measured.",
    )


def _compared(study: Study, rows: list[str], metric: Metric, caption: str) -> ComparisonTable:
    return ComparisonTable(
        columns=list(CONFIGURATIONS),
        rows={row: [_entry(study, full_name(row, name), metric) for name in CONFIGURATIONS] for row in rows},
        corner="method",
        meanings=metric.meanings,
        caption=caption,
    )


def _entry(study: Study, method: str, metric: Metric) -> Entry:
    count = len(study.values(method, _DATA, metric))
    found = entry(study, method, _DATA, metric, count, digits=2)
    notes = [f"{count} seeds"] * (count > 1) + [found.note] * bool(found.note)
    return replace(found, note=", ".join(notes))


def _table_2(page: ReportPage, study: Study) -> None:
    page.section("Classification: Table 2")
    if _DATA not in study.data:
        page.absent("cells of CIFAR-10", "classification")
        return
    known = standings(study)
    verdicts = [standing.verdict for standing in known if standing.verdict is not None]
    page.text(
        f"CIFAR-10 with the paper's VGG16. Of the paper's {len(known)} figures {len(verdicts)} are measured here: "
        f"{verdicts.count('better')} at or above the paper's, {verdicts.count('within')} short by at most "
        f"{ACCURACY.tolerance:g} points, {verdicts.count('worse')} by more. The paper gives no errors.{_spread(study)}"
    )
    page.table(accuracy_table(study))
    many = many_draws_table(study)
    if many is not None:
        page.text(
            "A prediction is a mean over the posterior, and ten draws of the weights, which the paper takes, leave it "
            "with an error of its own."
        )
        page.table(many)
    page.text(
        "The paper leaves BBB and noisy-Adam with batch norm empty: extremely unstable, it says, and working only with "
        "a very small KL weight."
    )
    if any(_LEARNED_NORM in method for method in study.methods):
        page.text(f"{_LEARNED_NORM}: batch norm's scale and shift are learned. The paper's stay at 1 and 0.")


def _spread(study: Study) -> str:
    """How much seeds of one method differ: what a difference from the paper has to be read against."""
    repeated = [values for name in study.methods if len(values := study.values(name, _DATA, ACCURACY)) > 1]
    if not repeated:
        return ""
    deviation = math.sqrt(statistics.fmean(statistics.variance(values) for values in repeated))
    return f" Our own differ by {deviation:.2f} points from seed to seed (standard deviation)."


def _curves(page: ReportPage, study: Study, data: str, topic: str) -> None:
    figures = {
        "Test accuracy": training_panels(study, data, "test_accuracy", "test accuracy (%)"),
        "Training loss": training_panels(study, data, "train_loss", "training loss (nats)"),
        "Median training loss": training_panels(study, data, "train_loss_median", "median loss of a batch (nats)"),
    }
    if not any(figures.values()):
        return
    page.section(f"{topic}: training")
    for title, panels in figures.items():
        if panels:
            page.figure(
                curve_panels(panels, x_label="epoch"),
                caption=f"{title} against the epoch, a panel for each configuration: the mean over the seeds; thin "
                f"lines are single seeds, dashed ones methods without a posterior.{_REMARKS[panels[0].view]}",
                alt=f"{title} against the epoch. At the end: {'; '.join(panel.ends for panel in panels)}.",
            )


def training_panels(study: Study, data: str, key: str, y_label: str) -> list[Panel]:
    """A panel for each configuration that has the metric, with the methods' trainings."""
    found: dict[str, dict[str, list[Curve]]] = {}
    for configuration in CONFIGURATIONS:
        for short, method in methods_in(study, data, configuration).items():
            curves = [_curve(cell, key) for cell in study.of(method, data) if listed(cell, key)]
            if curves:
                found.setdefault(configuration, {})[short] = curves
    every = [curve for methods in found.values() for curves in methods.values() for curve in curves]
    positive = all(min(curve.values) > 0 for curve in every)
    view: View = "climb" if key == "test_accuracy" else "logarithmic" if positive else "whole"
    return [
        Panel(title=heading(configuration), curves=methods, y_label=y_label, view=view)
        for configuration, methods in found.items()
    ]


def _curve(cell: Cell, key: str) -> Curve:
    epochs, values = listed(cell, "epochs"), listed(cell, key)
    if len(epochs) != len(values):
        raise ValueError(f"{cell.label}: {len(values)} values of {key} for {len(epochs)} epochs; expected one for each")
    return Curve(epochs, values)


def averages_table(study: Study) -> Table | None:
    """What is averaged over the posterior's draws, and what it brings; None where no cell has more than one answer."""
    rows: list[dict[str, str | float | None]] = []
    for configuration in CONFIGURATIONS:
        for short, method in methods_in(study, _DATA, configuration).items():
            metrics = (ACCURACY, _LOGITS, _WEIGHTS, _OWN_NORM)
            found = {metric.key: study.estimate(method, _DATA, metric) for metric in metrics}
            means = {key: None if estimate is None else estimate.mean for key, estimate in found.items()}
            alone = all(cell.config.get("test_samples") == 1 for cell in study.of(method, _DATA))
            if alone or len({value for value in means.values() if value is not None}) < 2:
                continue  # a method without a posterior has nothing to average
            own, plain = means[ACCURACY.key], means[_WEIGHTS.key]
            gain = None if own is None or plain is None else signed(own - plain)
            rows.append({"method": short, "configuration": configuration, **means, "gain": gain})
    if not rows:
        return None
    columns = [
        Column(key="method", header="method"),
        Column(key="configuration", header="configuration"),
        Column(key=ACCURACY.key, header="probabilities", unit="%", digits=2),
        Column(key=_LOGITS.key, header="logits", unit="%", digits=2),
        Column(key=_WEIGHTS.key, header="weights", unit="%", digits=2),
        Column(key="gain", header="gain", unit="points"),
    ]
    if any(row[_OWN_NORM.key] is not None for row in rows):
        columns.append(Column(key=_OWN_NORM.key, header="probabilities, own norm", unit="%", digits=2))
    return Table(
        columns=tuple(columns),
        rows=rows,
        caption="Test accuracy by what is averaged, in the mean over the seeds; gain: probabilities over weights",
    )


def _averages(page: ReportPage, study: Study) -> None:
    table = averages_table(study)
    if table is None:
        return
    page.section("Classification: what made the difference")
    page.text(
        "The same posteriors asked in three ways: the probabilities of several draws of the weights averaged, which is "
        "what all other tables show; their logits averaged, as the authors' code does; and the mean weights used once. "
        "With batch norm also, where measured, each draw normalised by the statistics that it has on 1000 training "
        "images (own norm), in place of the running ones, which are averages over draws."
    )
    page.table(table)
    page.table(draws_table(study, _DATA))


def _settings_group(cell: Cell) -> tuple[str, str]:
    short, configuration = parts(cell.method)
    return short, configuration if cell.data == _DATA else f"{cell.data} {configuration}"


def step_table(study: Study) -> Table | None:
    """Milliseconds of a training step; None where no cell has them."""
    rows: dict[str, dict[str, str | float | None]] = {}
    for method in study.methods:
        estimate = study.estimate(method, _DATA, _STEP)
        if estimate is not None:
            short, configuration = parts(method)
            rows.setdefault(short, {"method": short})[configuration] = estimate.mean
    columns = [Column(key=name, header=name, unit="ms", digits=2) for name in CONFIGURATIONS]
    if not rows:
        return None
    caption = "Time of a training step on CIFAR-10 in these runs, some of which shared a device"
    return Table(columns=(Column(key="method", header="method"), *columns), rows=list(rows.values()), caption=caption)


def _provenance(page: ReportPage, study: Study) -> None:
    page.section("How classification was made")
    for data in sorted(study.data, key=lambda name: name != _DATA):
        alone = Study([cell for cell in study.cells if cell.data == data], ORDER)
        caption = f"Wall time on {_TITLES.get(data, data)}, all seeds together"
        if data == _DATA:
            caption += "; trainings that ran side by side shared a device"
        page.table(wall_time_table(alone, caption, corner="method", place=lambda cell: parts(cell.method)))
    page.table(step_table(study))
    add_provenance(page, study, _settings_group)
