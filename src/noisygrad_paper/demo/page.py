"""The page of `noisygrad demo`: two tables, what lies behind their numbers, and how they were made."""

from collections.abc import Mapping

from noisygrad import plots
from noisygrad.predictions import RegressionPrediction
from noisygrad.versions import versions
from noisygrad_paper.demo.fits import FAMILIES, HIDDEN, TEST_SHARE, DataName, Demo, DemoFit
from noisygrad_paper.pages.page import Page
from noisygrad_paper.pages.tables import Cell, Column, Table

_COMMON = (
    Column(key="kl", header="KL", unit="nats", digits=0),
    Column(key="seconds", header="time", unit="s", digits=1),
)
_METHOD = Column(key="method", header="posterior")
_LOG_LIKELIHOOD = Column(key="log_likelihood", header="log-lik.", unit="nats", digits=3, best="highest")
_COLUMNS: dict[DataName, tuple[Column, ...]] = {
    "diabetes": (
        _METHOD,
        Column(key="rmse", header="RMSE", digits=2, best="lowest"),
        _LOG_LIKELIHOOD,
        Column(key="coverage", header="in 90 % interval", unit="%", digits=1, best=90.0),
        *_COMMON,
    ),
    "digits": (
        _METHOD,
        Column(key="accuracy", header="accuracy", unit="%", digits=1, best="highest"),
        _LOG_LIKELIHOOD,
        Column(key="ece", header="ECE", unit="%", digits=1, best="lowest"),
        *_COMMON,
    ),
}
_SHARES = ("coverage", "ece")
_COMPARED = ("point", "kronecker")
_CAPTIONS: dict[DataName, str] = {"diabetes": "Diabetes, regression", "digits": "Digits, classification"}


def demo_table(demo: Demo, data: DataName) -> Table:
    """The results on one data set, for a terminal and for the page."""
    split = demo.splits[data]
    caption = f"{_CAPTIONS[data]}: {len(split.train_y)} examples to train on, {len(split.test_y)} to test"
    return Table(columns=_COLUMNS[data], rows=[_row(fit) for fit in demo.of(data).values()], caption=caption)


def _row(fit: DemoFit) -> dict[str, Cell]:
    shown = {name: 100 * value if name in _SHARES else value for name, value in fit.metrics.items()}
    return {"method": fit.method, **shown}


def demo_page(demo: Demo) -> Page:
    """The whole page."""
    page = Page(
        "Four posteriors and a point estimate",
        lead="The same networks on the same data, fitted by noisy natural gradient with four shapes of covariance, and "
        "once without noise. Only the posteriors know what the data left open.",
        footer=f"Made by noisygrad {versions()['noisygrad']}: noisygrad demo --seed {demo.config.seed}",
    )
    _regression(page, demo)
    _precisions(page, demo)
    _classification(page, demo)
    _settings(page, demo)
    return page


def _regression(page: Page, demo: Demo) -> None:
    fits, target = demo.of("diabetes"), demo.splits["diabetes"].target
    every = {method: fit.prediction for method, fit in fits.items()}
    predictions = {method: one for method, one in every.items() if isinstance(one, RegressionPrediction)}
    coverage = {method: fit.metrics["coverage"] for method, fit in fits.items()}
    page.section("Regression: how far will diabetes progress in a year?")
    page.text(
        "Ten measurements of a patient, one number to predict. An interval of 90 % should hold nine in ten of the "
        "values that come true. The point estimate has the same learned noise, but takes its weights for certain; the "
        "posteriors average over many draws of them."
    )
    page.table(demo_table(demo, "diabetes"))
    page.figure(
        plots.predictive_intervals({name: predictions[name] for name in _COMPARED}, target, label="progression"),
        caption="Test patients in the order of the predicted mean, with central intervals of 50 % and 90 %. Rings are "
        "values outside the wider one.",
        alt="Predictive intervals for the test patients. Of the values observed, "
        f"{coverage['point']:.0%} lie in the 90 % interval of the point estimate and {coverage['kronecker']:.0%} in "
        "that of the Kronecker posterior.",
    )
    page.figure(
        plots.coverage_plot(predictions, target),
        caption="Intervals of every width: the share of values inside against the share promised. The grey band is "
        "where 95 % of such shares would fall by chance if a prediction were calibrated.",
        alt="Observed against nominal coverage. At 90 % nominal: "
        + ", ".join(f"{method} {share:.0%}" for method, share in coverage.items())
        + ".",
    )


def _precisions(page: Page, demo: Demo) -> None:
    fits = demo.of("diabetes")
    page.section("What each posterior can see")
    page.text(
        "The posterior's precision matrix over all weights of the regression network, scaled to a unit diagonal. Off "
        "the diagonal is what one weight says about another: nothing for the diagonal posterior, a Kronecker product "
        "within each layer, then neighbouring layers too, then everything. This is Figure 1 of the paper on other data."
    )
    page.figure(
        plots.precision_matrices(
            {family: fits[family].posterior.precision() for family in FAMILIES},
            layers={f"layer {n}": u.size for n, u in enumerate(fits["full"].posterior.structure.units, start=1)},
            columns=2,
        ),
        caption="Absolute normalised precision on one colour scale; lines divide the layers. Each method trains a "
        "network of its own, so the blocks agree in kind, not entry by entry.",
        alt="Four normalised precision matrices: diagonal, one block per layer, blocks that also couple neighbouring "
        "layers, and dense.",
    )


def _classification(page: Page, demo: Demo) -> None:
    fits = demo.of("digits")
    errors = {method: 100 * fit.metrics["ece"] for method, fit in fits.items()}
    probabilities = {method: fit.prediction.probs for method, fit in fits.items()}
    page.section("Classification: which digit is it?")
    page.text(
        "Images of 8 × 8 pixels, ten classes. The expected calibration error (ECE) is the mean distance between how "
        "sure a prediction is and how often such predictions are right. Averaging over a posterior makes predictions "
        "less sure: a cure where a network is too sure, a cost where its weight decay alone had it right."
    )
    page.table(demo_table(demo, "digits"))
    page.figure(
        plots.reliability_diagram({name: probabilities[name] for name in _COMPARED}, demo.splits["digits"].target),
        caption="Above: accuracy in each bin of confidence; the hatched gap is what is missing to the bin's mean "
        "confidence. Below: how many predictions are in the bin. Sparse bins are noisy.",
        alt="Reliability diagrams. The expected calibration error is "
        f"{errors['point']:.1f} % for the point estimate and {errors['kronecker']:.1f} % for the Kronecker posterior.",
    )


def _settings(page: Page, demo: Demo) -> None:
    page.section("How this was made")
    page.text(
        "One random split of each data set and one training of each method: another seed changes the order of methods "
        "that are close, so try a few. All settings are the estimators' defaults, but for the sizes of the networks, "
        "which are small so that a full covariance is feasible. Marked in the tables is the best value of a column, "
        "which need not be a difference beyond chance."
    )
    config = demo.config
    shared = demo.fits[-1].settings
    settings = {
        "seed": config.seed,
        "share of test examples": f"{TEST_SHARE:.0%}",
        **{f"hidden layers, {data}": " + ".join(map(str, sizes)) for data, sizes in HIDDEN.items()},
        "epochs": config.epochs or "chosen by the estimator",
        "weight of the KL (λ)": shared["kl_weight"],
        "prior variance (η)": shared["prior_variance"],
        "weight samples per prediction": config.num_samples,
        "point estimate": "K-FAC without noise, with the prior as weight decay",
    }
    page.table(_pairs(settings, "Settings")).table(_pairs(versions(), "Versions"))


def _pairs(pairs: Mapping[str, object], caption: str) -> Table:
    columns = Column(key="name", header="name"), Column(key="value", header="value")
    rows = [{"name": name, "value": str(value)} for name, value in pairs.items()]
    return Table(columns=columns, rows=rows, caption=caption)
