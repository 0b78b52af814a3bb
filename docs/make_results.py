"""The documentation's page of results with its pictures, and the README's few figures, from `results/` alone.

python docs/make_results.py     # writes docs/results.md, two pictures into docs/assets, and a part of README.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from noisygrad_paper.experiments import active_learning, exploration_conditions, hmc_correlation
from noisygrad_paper.experiments.cells import Results
from noisygrad_paper.experiments.configurations import CONFIGURATIONS, full_name, heading
from noisygrad_paper.pages.tables import Column, Table
from noisygrad_paper.report import calibration, classification, exploration, few_labels, image_aims, paper, regression
from noisygrad_paper.report.comparison import ACCURACY, ECE, ELBO, NLL
from noisygrad_paper.report.markdown import markdown
from noisygrad_paper.report.study import Study

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
ASSETS = ROOT / "docs" / "assets"
CIFAR = paper.TABLE_2_DATA
MARKS = ("<!-- results: made by docs/make_results.py -->", "<!-- end of results -->")

HEAD = """# Results

The paper's tables and figures beside ours. `docs/make_results.py` makes this page from the files in `results/`, and
`noisygrad report` a longer one, with every method, every plot and the settings, versions and devices of each cell.
Marks compare ours with the paper's figure, which stands below it. How each experiment was done, and what differs from
the paper and why, is on the pages of [regression](reproduce-regression.md),
[classification](reproduce-classification.md), [few labels](reproduce-few-labels.md) and [exploration](exploration.md).
"""


def studies() -> dict[str, Study]:
    """The cells of each experiment."""
    return {
        "regression": Study(Results(RESULTS, "regression").load()),
        "classification": Study(Results(RESULTS, "classification").load(), image_aims.ORDER),
        "held out": Study(Results(RESULTS, "classification-validation").load()),
        "correlation": few_labels.correlation_study(Results(RESULTS, hmc_correlation.EXPERIMENT).load()),
        "active": few_labels.active_study(Results(RESULTS, active_learning.EXPERIMENT).load()),
        "exploration": exploration.exploration_study(Results(RESULTS, exploration_conditions.EXPERIMENT).load()),
    }


def page(found: dict[str, Study]) -> str:
    """The whole page."""
    parts = [HEAD, *_regression(found["regression"]), *_classification(found["classification"])]
    parts += _held_out(found["held out"])
    parts += [*_few_labels(found["correlation"], found["active"]), *_exploration(found["exploration"])]
    return "\n".join(parts)


def readme(text: str, found: dict[str, Study]) -> str:
    """The README with the figures between its two marks made anew."""
    before, start, rest = text.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not start or not end:
        raise ValueError(f"the README has no place for the results: {' … '.join(MARKS)}")
    return f"{before}{start}\n\n{_headline(found['classification'])}\n{end}{after}"


def _headline(study: Study) -> str:
    """Noisy K-FAC beside K-FAC: accuracy, and whether they know when they are wrong."""
    columns = [Column(key="data", header="CIFAR-10, VGG16")]
    for method in (calibration.WITHOUT_NOISE, calibration.OURS):
        columns += [
            Column(key=f"{method} {ACCURACY.key}", header=method, unit="%", digits=1),
            Column(key=f"{method} {ECE.key}", header=f"ECE of {method}", digits=3),
        ]
    rows = []
    for configuration in CONFIGURATIONS:
        row: dict[str, str | float | None] = {"data": CONFIGURATIONS[configuration]}
        for method in (calibration.WITHOUT_NOISE, calibration.OURS):
            for metric in (ACCURACY, ECE):
                estimate = study.estimate(full_name(method, configuration), CIFAR, metric)
                row[f"{method} {metric.key}"] = None if estimate is None else estimate.mean
        rows.append(row)
    return markdown(Table(columns=columns, rows=rows, caption="accuracy and calibration"))


def pictures(found: dict[str, Study]) -> None:
    """The reliability diagrams and the learning curves."""
    reliability = calibration.reliability_figure(found["classification"], CIFAR)
    assert reliability is not None
    reliability[0].savefig(ASSETS / "reliability.png", dpi=110)
    exploration.returns_figure(found["exploration"]).savefig(ASSETS / "exploration.png", dpi=110)


def _regression(study: Study) -> list[str]:
    parts = [
        "## Regression: Table 1\n",
        "Mean ± standard error over the splits. Naval is two tasks, and each figure is compared with that for the "
        "same one.\n",
    ]
    for metric in regression.METRICS:
        table = regression.comparison_table(study, paper.TABLE_1_METHODS, study.data, metric)
        parts += [f"### {metric.title[:1].upper()}{metric.title[1:]}\n", table.markdown()]
    return parts + _variants(study)


def _variants(study: Study) -> list[str]:
    """What the paper has not: the public optimiser in place of the engine, the eigenvalue-corrected family."""
    methods = ("NNG-MVG", "NNG-MVG/optimizer", "NNG-EMVG")
    data = [name for name in study.data if any(study.of(method, name) for method in methods[1:])]
    parts = [
        "### The public optimiser, and the eigenvalue-corrected family\n",
        "NNG-MVG is made by the replica engine, `NNG-MVG/optimizer` by `NoisyKFAC` with a replica for each split. "
        "NNG-EMVG is the engine with the family of `NoisyEKFAC`, whose basis is refreshed every 20 steps and whose "
        "damping is exact.\n",
    ]
    for metric in (*regression.METRICS, ELBO):
        known = [method for method in methods if any(study.values(method, name, metric) for name in data)]
        title = f"{metric.title[:1].upper()}{metric.title[1:]}"
        parts += [f"{title}:\n", regression.comparison_table(study, known, data, metric, legend=False).markdown()]
    return [*parts, *_nearness()]


def _nearness() -> list[str]:
    """How often R in the eigenbasis is nearer to the exact Fisher than S ⊗ A, from `benchmarks/eigen_fisher.py`."""
    stored = json.loads((RESULTS / "eigen-fisher.json").read_text(encoding="utf-8"))
    rows: list[dict[str, str | float | None]] = [
        {
            "networks": f"{found['networks']} networks {kind}",
            "share": 100 * found["share of networks nearer"],
            "eigen": found["mean relative distance"],
            "product": found["mean relative distance of the Kronecker product"],
        }
        for kind, found in stored["found"].items()
    ]
    columns = [
        Column(key="networks", header="small networks"),
        Column(key="share", header="nearer than S ⊗ A", unit="%", digits=0),
        Column(key="eigen", header="relative distance of R", digits=3),
        Column(key="product", header="of S ⊗ A", digits=3),
    ]
    settings = stored["settings"]
    return [
        f"Distances in Frobenius norm to the exact Fisher after {settings['steps']} training steps, with moving "
        f"averages, a basis refreshed every {settings['factor_every']} steps and batches of {settings['batch']} "
        f"(`{stored['command']}`). That R is nearer is a theorem only for one set of examples and its own basis. "
        "Without weight sharing it rarely is here, most likely because R, of which each entry is estimated by itself, "
        "is noisier than a product of two averages:\n",
        markdown(Table(columns=columns, rows=rows, caption="distance to the exact Fisher")),
    ]


def _classification(study: Study) -> list[str]:
    table, many = classification.accuracy_table(study), classification.many_draws_table(study)
    parts = ["## Classification: Table 2\n", f"CIFAR-10 with the paper's VGG16. {table.caption}\n", table.markdown()]
    if many is not None:
        parts += [f"{many.caption}\n", many.markdown()]
    parts.append("### Calibration\n")
    for configuration in CONFIGURATIONS:
        methods = calibration.methods_in(study, CIFAR, configuration)
        title = heading(configuration)
        parts += [f"{title}:\n", markdown(calibration.scores_table(study, CIFAR, methods, title))]
    parts += [
        "H is the entropy of a prediction and MI the mutual information of label and weights: how well each tells "
        "images of SVHN from the test images.\n",
        "![Reliability diagrams of K-FAC and noisy K-FAC, plain and with batch norm](assets/reliability.png)\n",
        "### Where it falls short\n",
    ]
    missed = image_aims.shortfalls(study)
    parts.append("".join(f"- {each.sentence}\n" for each in missed) or "Nothing that is measured falls short.\n")
    return parts


def _held_out(study: Study) -> list[str]:
    metrics = {ACCURACY: ("accuracy", "%", 2), NLL: ("nll", "nats", 3), ECE: ("ECE", "", 3)}
    rows = []
    for method in sorted(study.methods):
        cell = study.of(method, CIFAR)[0]
        name, _, changes = method.partition(" ")
        figures = {metric.key: cell.metrics.get(metric.key) for metric in metrics}
        rows.append({"method": name, "with": changes, "epochs": str(cell.config["epochs"]), **figures})
    texts = {"method": "method", "with": "with", "epochs": "epochs"}
    columns = [Column(key=key, header=header) for key, header in texts.items()]
    columns += [Column(key=m.key, header=title, unit=unit, digits=n) for m, (title, unit, n) in metrics.items()]
    table = Table(columns=columns, rows=rows, caption="held out")
    return [
        "### Settings tried on held-out images\n",
        "Each one training on nine tenths of the training images, measured on the other tenth; a dash where the loss "
        "was no longer finite. What is not named is as in the table above, or as it then was.\n",
        markdown(table),
    ]


def _few_labels(correlation: Study, active: Study) -> list[str]:
    first = few_labels.correlation_table(correlation, paper.TABLE_3_METHODS, correlation.data)
    second = few_labels.active_table(active, paper.TABLE_4_METHODS, active.data)
    return [
        "## Variances beside HMC's: Table 3\n",
        f"{first.caption}.\n",
        first.markdown(),
        "## Active learning: Table 4\n",
        f"{second.caption}.\n",
        second.markdown(),
    ]


def _exploration(study: Study) -> list[str]:
    tasks = [task for task in exploration_conditions.ITERATIONS if task in study.data]
    table = exploration.area_table(study, study.methods, tasks)
    return [
        "## Exploration: Figure 3\n",
        "![Returns on three tasks with sparse rewards: medians and quartiles over the seeds](assets/exploration.png)\n",
        f"{table.caption}.\n",
        markdown(table),
    ]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    made = studies()
    (ROOT / "docs" / "results.md").write_text(page(made), encoding="utf-8")
    page_of_all = ROOT / "README.md"
    page_of_all.write_text(readme(page_of_all.read_text(encoding="utf-8"), made), encoding="utf-8")
    pictures(made)
