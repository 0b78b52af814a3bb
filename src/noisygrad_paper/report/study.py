"""The cells of an experiment, gathered: estimates over the replicates, beside the paper's, and what is missing."""

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass

from noisygrad_paper.experiments.cells import Cell
from noisygrad_paper.experiments.plain_values import is_finite
from noisygrad_paper.report import paper
from noisygrad_paper.report.comparison import Estimate, Metric, Verdict, signed, signed_difference, verdict
from noisygrad_paper.report.comparison_table import Entry


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One of the paper's figures beside ours, if we have it."""

    method: str
    data: str
    metric: Metric
    ours: Estimate | None
    theirs: Estimate
    difference: float | None
    """In standard errors of the difference, or in the unit of a metric with a tolerance.

    Positive where ours is better; None where it cannot be said.
    """

    @property
    def verdict(self) -> Verdict | None:
        """Better, as good within the margin, or worse; None where it cannot be said."""
        return None if self.difference is None else verdict(self.difference, self.metric.tolerance)


class Study:
    """Finished and failed cells by method and data set; methods are shown in the `order` given, others follow."""

    def __init__(self, cells: Sequence[Cell], order: Sequence[str] = paper.METHODS) -> None:
        self.cells = list(cells)
        self._order = order
        self._groups: dict[tuple[str, str], list[Cell]] = {}
        for cell in self.cells:
            self._groups.setdefault((cell.method, cell.data), []).append(cell)

    @property
    def methods(self) -> list[str]:
        """The methods in the order given, then the others in that of their first cell."""
        found = {cell.method: None for cell in self.cells}
        return [name for name in self._order if name in found] + [name for name in found if name not in self._order]

    @property
    def data(self) -> list[str]:
        """The paper's data sets in its order, then the others in that of their first cell."""
        found = {cell.data: None for cell in self.cells}
        return [name for name in paper.DATA if name in found] + [name for name in found if name not in paper.DATA]

    def of(self, method: str, data: str) -> list[Cell]:
        """The cells of one method on one data set."""
        return self._groups.get((method, data), [])

    def finished(self, method: str, data: str) -> list[Cell]:
        """Those of them that have figures."""
        return [cell for cell in self.of(method, data) if cell.error is None]

    @property
    def failed(self) -> list[Cell]:
        """Cells whose training went wrong."""
        return [cell for cell in self.cells if cell.error is not None]

    def values(self, method: str, data: str, metric: Metric) -> list[float]:
        """The metric in every replicate that has a finite one."""
        found = (_value(cell, metric) for cell in self.finished(method, data))
        return [float(value) for value in found if isinstance(value, int | float) and math.isfinite(value)]

    def estimate(self, method: str, data: str, metric: Metric) -> Estimate | None:
        """Mean and standard error over the replicates; None if there is none."""
        values = self.values(method, data, metric)
        return Estimate.of(values) if values else None

    def standing(self, method: str, data: str, metric: Metric) -> Standing | None:
        """Ours beside the paper's figure; None where the paper has none."""
        theirs = paper.quoted(method, data).get(metric.quoted_as or metric.key)
        if theirs is None:
            return None
        ours = self.estimate(method, data, metric)
        difference = None if ours is None else signed_difference(ours, theirs, metric)
        return Standing(method=method, data=data, metric=metric, ours=ours, theirs=theirs, difference=difference)

    def standings(self, methods: Sequence[str], metrics: Sequence[Metric]) -> list[Standing]:
        """Every figure that the paper has of these methods, year excepted: it has no standard errors."""
        found = (
            self.standing(method, data, metric)
            for method in methods
            for data in paper.DATA
            for metric in metrics
            if data != "year"
        )
        return [standing for standing in found if standing is not None]


def entry(
    study: Study,
    method: str,
    data: str,
    metric: Metric,
    expected: int | None,
    replicates: str = "splits",
    digits: int | None = None,
) -> Entry:
    """Ours and the paper's of one method on one data set; `expected` replicates, or None for as many as there are."""
    ours, standing = study.estimate(method, data, metric), study.standing(method, data, metric)
    theirs = "" if standing is None else f"paper {standing.theirs.text()}"
    failed = sum(cell.error is not None for cell in study.of(method, data))
    if ours is None:
        return Entry(theirs=theirs, note=f"{failed} failed" if failed else "")
    count = len(study.values(method, data, metric))
    wanted = count + failed if expected is None else expected
    notes = [f"{count} of {wanted} {replicates}"] * (count < wanted) + [f"{failed} failed"] * bool(failed)
    return Entry(
        ours=ours.text(digits),
        theirs=theirs,
        verdict=None if standing is None else standing.verdict,
        tooltip="" if standing is None else _tooltip(standing),
        note=", ".join(notes),
    )


def _tooltip(standing: Standing) -> str:
    if standing.difference is not None and standing.metric.tolerance is not None:
        return f"ours minus the paper's: {signed(standing.difference)} {standing.metric.unit}"
    if standing.difference is None:
        return "without two standard errors the difference cannot be judged"
    side = "better" if standing.difference > 0 else "worse"
    return (
        f"z = {signed(standing.difference)}: ours is {side} by {abs(standing.difference):.2f} standard errors of the "
        "difference"
    )


def list_of(cell: Cell, name: str) -> list[float]:
    """A list among the metrics of a cell that must have it."""
    values = cell.metrics.get(name)
    if not isinstance(values, list) or not values:
        raise ValueError(f"{cell.label}: a list {name!r} was expected among the metrics; got {reprlib.repr(values)}")
    return values


def listed(cell: Cell, name: str) -> list[float]:
    """A list among the metrics of a cell; empty where it was not measured."""
    values = cell.metrics.get(name)
    return values if isinstance(values, list) else []


def setting_of(cell: Cell, name: str) -> float:
    """A number among the settings of a cell that must have it."""
    value = cell.config.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not is_finite(value):
        raise ValueError(f"{cell.label}: a number {name!r} was expected in config; got {reprlib.repr(value)}")
    return value


def _value(cell: Cell, metric: Metric) -> object:
    found = cell.metrics.get(metric.key)
    if metric.entry is None:
        return found
    return found[metric.entry] if isinstance(found, list) and found else None
