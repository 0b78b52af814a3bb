"""Two figures side by side: how far ours is from the paper's, in standard errors or in the figure's own unit."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias

Verdict: TypeAlias = Literal["better", "within", "worse"]

MARKS: dict[Verdict, str] = {"better": "▲", "within": "≈", "worse": "▼"}
"""A sign for each verdict, so that colour is never the only difference."""

IN_STANDARD_ERRORS: dict[Verdict, str] = {
    "better": "better than the paper's by more than one standard error of the difference",
    "within": "within one standard error",
    "worse": "worse by more than one",
}
"""What the verdicts say of figures that have standard errors."""

_MINUS = "\N{MINUS SIGN}"
_ROUNDING = 1e-9  # a mean of printed figures may miss a bound by the last bit
_DIGITS = 3  # as the paper prints
_MOST_DIGITS = 6


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A measure of a method: where its values are, what it is called, and which way is up."""

    key: str
    title: str
    better: Literal["lowest", "highest", "nearest to 1"]
    tolerance: float | None = None
    """What still counts as near, where the paper gives no standard errors; None to judge by those."""
    unit: str = ""
    """Of a difference between two values."""
    entry: int | None = None
    """Which of them, where a cell has a list."""
    quoted_as: str | None = None
    """The key of the paper's figure, where it is another."""

    @property
    def meanings(self) -> dict[Verdict, str]:
        """What the verdicts say of this metric, for the legend of a table."""
        if self.tolerance is None:
            return IN_STANDARD_ERRORS
        allowed = f"{self.tolerance:g} {self.unit}".rstrip()
        return {
            "better": "the paper's figure or better",
            "within": f"worse by at most {allowed}",
            "worse": f"worse by more than {allowed}",
        }

    def prefers(self, first: float, second: float) -> bool:
        """Whether the first value is the better one."""
        if self.better == "nearest to 1":
            first, second = (max(value, 1 / value) if value > 0 else math.inf for value in (first, second))
            return first < second
        return first < second if self.better == "lowest" else first > second


RMSE = Metric(key="rmse", title="test RMSE", better="lowest")
LOG_LIKELIHOOD = Metric(key="log_likelihood", title="test log-likelihood", better="highest")
ELBO = Metric(key="elbo", title="ELBO of the training rows in nats, targets standardised", better="highest")
CORRELATION = Metric(key="correlation", title="correlation of predictive variances with HMC's", better="highest")
RMSE_RANDOM = Metric(key="rmse_random", title="test RMSE after random acquisitions", better="lowest")
RMSE_ACTIVE = Metric(key="rmse_active", title="test RMSE after acquisitions by variance", better="lowest")
ACCURACY = Metric(key="accuracy", title="test accuracy", better="highest", tolerance=0.7, unit="points")
ACCURACY_OF_MANY = Metric(
    key="accuracy_by_draws",
    title="test accuracy with most draws",
    better="highest",
    tolerance=ACCURACY.tolerance,
    unit=ACCURACY.unit,
    entry=-1,
    quoted_as=ACCURACY.key,
)
NLL = Metric(key="nll", title="negative log-likelihood", better="lowest")
ECE = Metric(key="ece", title="ECE", better="lowest")
ECE_OF_MANY = Metric(key="ece_by_draws", title="ECE with most draws", better="lowest", entry=-1)
BRIER = Metric(key="brier", title="Brier score", better="lowest")


@dataclass(frozen=True)
class Estimate:
    """A mean over repetitions and its standard error; None where one repetition gives none."""

    mean: float
    standard_error: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Mean and standard error (with n − 1 degrees of freedom) of independent repetitions."""
        if not values:
            raise ValueError("an estimate needs at least one value; got none")
        spread = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(statistics.fmean(values), spread)

    def text(self, digits: int | None = None) -> str:
        """As it is written: with these decimals, or three, and more where the standard error would vanish."""
        digits = self._digits() if digits is None else digits
        error = "" if self.standard_error is None else f" ± {self.standard_error:.{digits}f}"
        return f"{self.mean:.{digits}f}".replace("-", _MINUS) + error

    def _digits(self) -> int:
        scale = self.standard_error or 0.1 * abs(self.mean)
        if scale == 0:
            return _DIGITS
        return min(max(_DIGITS, 1 - math.floor(math.log10(scale))), _MOST_DIGITS)


def signed_difference(ours: Estimate, theirs: Estimate, metric: Metric) -> float | None:
    """Ours minus theirs over sqrt(s₁² + s₂²), positive where ours is better; None without two standard errors.

    For a metric with a tolerance it is the plain difference, in the metric's unit.
    """
    better = ours.mean - theirs.mean if metric.better == "highest" else theirs.mean - ours.mean
    if metric.tolerance is not None:
        return better
    if ours.standard_error is None or theirs.standard_error is None:
        return None
    error = math.hypot(ours.standard_error, theirs.standard_error)
    if error == 0:
        raise ValueError(f"neither {ours} nor {theirs} has an error: read a printed 0.000 as ±0.0005")
    return better / error


def verdict(difference: float, tolerance: float | None = None) -> Verdict:
    """Within one standard error of the difference, or better or worse by more than that.

    With a tolerance: better when at least equal, within when short by no more than it, and worse beyond.
    """
    if tolerance is not None:
        if difference >= -_ROUNDING:
            return "better"
        return "within" if difference >= -tolerance - _ROUNDING else "worse"
    if abs(difference) <= 1:
        return "within"
    return "better" if difference > 0 else "worse"


def signed(value: float, digits: int = 2) -> str:
    """A number that always has its sign."""
    return f"{value:+.{digits}f}".replace("-", _MINUS)
