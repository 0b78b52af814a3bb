"""Two figures side by side: how far ours is from the paper's, in standard errors of their difference."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias

Verdict: TypeAlias = Literal["better", "within", "worse"]

MARKS: dict[Verdict, str] = {"better": "▲", "within": "≈", "worse": "▼"}
"""A sign for each verdict, so that colour is never the only difference."""

_MINUS = "\N{MINUS SIGN}"
_DIGITS = 3  # as the paper prints
_MOST_DIGITS = 6


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A measure of a method: where its values are, what it is called, and which way is up."""

    key: str
    title: str
    better: Literal["lowest", "highest"]

    def prefers(self, first: float, second: float) -> bool:
        """Whether the first value is the better one."""
        return first < second if self.better == "lowest" else first > second


RMSE = Metric(key="rmse", title="test RMSE", better="lowest")
LOG_LIKELIHOOD = Metric(key="log_likelihood", title="test log-likelihood", better="highest")


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

    def text(self) -> str:
        """As it is written: three decimals, and more where the standard error would vanish."""
        digits = self._digits()
        error = "" if self.standard_error is None else f" ± {self.standard_error:.{digits}f}"
        return f"{self.mean:.{digits}f}".replace("-", _MINUS) + error

    def _digits(self) -> int:
        scale = self.standard_error or 0.1 * abs(self.mean)
        if scale == 0:
            return _DIGITS
        return min(max(_DIGITS, 1 - math.floor(math.log10(scale))), _MOST_DIGITS)


def signed_difference(ours: Estimate, theirs: Estimate, metric: Metric) -> float | None:
    """Ours minus theirs over sqrt(s₁² + s₂²), positive where ours is better; None without two standard errors."""
    if ours.standard_error is None or theirs.standard_error is None:
        return None
    error = math.hypot(ours.standard_error, theirs.standard_error)
    if error == 0:
        raise ValueError(f"neither {ours} nor {theirs} has an error: read a printed 0.000 as ±0.0005")
    better = ours.mean - theirs.mean if metric.better == "highest" else theirs.mean - ours.mean
    return better / error


def verdict(difference: float) -> Verdict:
    """Within one standard error of the difference, or better or worse by more than that."""
    if abs(difference) <= 1:
        return "within"
    return "better" if difference > 0 else "worse"


def signed(value: float, digits: int = 2) -> str:
    """A number that always has its sign."""
    return f"{value:+.{digits}f}".replace("-", _MINUS)
