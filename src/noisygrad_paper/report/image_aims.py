"""What was aimed at on CIFAR-10, and where classification falls short of it."""

from dataclasses import dataclass

from noisygrad_paper.experiments.configurations import CONFIGURATIONS, PLAIN, full_name, parts
from noisygrad_paper.report import paper
from noisygrad_paper.report.calibration import OURS, WITHOUT_NOISE
from noisygrad_paper.report.comparison import ACCURACY, ACCURACY_OF_MANY, ECE, ECE_OF_MANY, Metric, signed
from noisygrad_paper.report.page import ReportPage
from noisygrad_paper.report.provenance import add_failures, add_gaps
from noisygrad_paper.report.reasons import REASONS
from noisygrad_paper.report.study import Standing, Study

ECE_TARGETS = {OURS: 0.03, f"{OURS}/D": 0.02}
"""The calibration that was aimed at."""

ORDER = tuple(full_name(method, name) for method in paper.TABLE_2_METHODS for name in CONFIGURATIONS)
"""The paper's methods in all configurations."""

_DATA = paper.TABLE_2_DATA
_DECAYED = "K-FAC+WD"


def standings(study: Study) -> list[Standing]:
    """All accuracies of the paper beside ours."""
    found = (study.standing(method, _DATA, ACCURACY) for method in ORDER)
    return [standing for standing in found if standing is not None]


@dataclass(frozen=True)
class Shortfall:
    """A figure that misses what was aimed at, and what it is with more draws, where they were counted."""

    method: str
    metric: Metric
    text: str
    with_many: str = ""

    @property
    def sentence(self) -> str:
        """With the reason, where it is known."""
        reason = REASONS.get((self.method, _DATA, self.metric.key), "")
        many = f" With most draws: {self.with_many}." if self.with_many else ""
        return f"{self.method}, {self.metric.title}: {self.text}.{many}{' ' * bool(reason)}{reason}"


def shortfalls(study: Study) -> list[Shortfall]:
    """Accuracies short of the paper's, the worst first; calibration short of its aim; weight decay as good as noise."""
    found = [
        (standing.difference, standing)
        for standing in standings(study)
        if standing.difference is not None
        and (standing.verdict == "worse" or (parts(standing.method)[0] == OURS and standing.verdict != "better"))
    ]
    missed = [_short_accuracy(study, standing) for _, standing in sorted(found, key=lambda pair: pair[0])]
    for method, most in ECE_TARGETS.items():
        ours = study.estimate(method, _DATA, ECE)
        other = full_name(WITHOUT_NOISE, parts(method)[1])
        plain = study.estimate(other, _DATA, ECE)
        if ours is not None and ours.mean > most:
            many = _with_many(study, method, ECE_OF_MANY, 3)
            missed.append(Shortfall(method, ECE, f"{ours.text(3)}, where at most {most:g} was aimed at", many))
        if ours is not None and plain is not None and 3 * ours.mean > plain.mean:
            missed.append(
                Shortfall(method, ECE, f"{ours.text(3)}, more than a third of the {plain.text(3)} of {other}")
            )
    noisy, decayed = (study.estimate(method, _DATA, ACCURACY) for method in (OURS, _DECAYED))
    if noisy is not None and decayed is not None and decayed.mean >= noisy.mean:
        missed.append(Shortfall(_DECAYED, ACCURACY, f"{decayed.text(2)}, not below the {noisy.text(2)} of {OURS}"))
    return missed


def _short_accuracy(study: Study, standing: Standing) -> Shortfall:
    ours = "–" if standing.ours is None else standing.ours.text(2)
    distance = "" if standing.difference is None else f", {signed(standing.difference)} points"
    text = f"{ours} against the paper's {standing.theirs.text()}{distance}"
    return Shortfall(standing.method, ACCURACY, text, _with_many(study, standing.method, ACCURACY_OF_MANY, 2))


def _with_many(study: Study, method: str, metric: Metric, digits: int) -> str:
    found = study.estimate(method, _DATA, metric)
    return "" if found is None else found.text(digits)


def add_shortfalls(page: ReportPage, study: Study) -> None:
    """What misses its aim, what is missing and what failed."""
    page.section("Where classification falls short")
    if _DATA in study.data:
        page.text(
            f"What was aimed at on CIFAR-10: {OURS} at or above the paper's accuracy, the others at most "
            f"{ACCURACY.tolerance:g} points below theirs, {_DECAYED} below {OURS}; an ECE of {OURS} of at most "
            + " and ".join(f"{most:g} in {parts(method)[1]}" for method, most in ECE_TARGETS.items())
            + f", and at most a third of that of {WITHOUT_NOISE} there."
        )
        found = shortfalls(study)
        if found:
            page.items(shortfall.sentence for shortfall in found)
        else:
            page.text("Nothing that is measured falls short of this.")
        add_gaps(page, _gaps(study))
    add_failures(page, study, "seed")
    if not study.failed and _DATA not in study.data:
        page.text("No training failed.")


def _gaps(study: Study) -> list[str]:
    """Configurations that a method was not run in, and those that want a second seed."""
    found = []
    for method in paper.TABLE_2_METHODS:
        wanted = (PLAIN,) if method == _DECAYED else tuple(CONFIGURATIONS)
        seeds = {name: len(study.values(full_name(method, name), _DATA, ACCURACY)) for name in wanted}
        absent = [name for name, count in seeds.items() if count == 0]
        single = [name for name, count in seeds.items() if count == 1 and method in (OURS, WITHOUT_NOISE)]
        kinds = {"not measured in": absent, "one seed in": single}
        words = [f"{kind} {', '.join(names)}" for kind, names in kinds.items() if names]
        if words:
            found.append(f"{method}: {'; '.join(words)}")
    return found
