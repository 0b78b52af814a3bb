"""Where numbers come from: the settings of each method, versions, devices and wall time of a set of cells."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from noisygrad_paper.experiments.cells import Cell, flat
from noisygrad_paper.pages.tables import Column, Table
from noisygrad_paper.report.page import ReportPage
from noisygrad_paper.report.study import Study

Place: TypeAlias = Callable[[Cell], tuple[str, str]]


def add_provenance(page: ReportPage, study: Study, group: Place = lambda cell: (cell.method, cell.data)) -> None:
    """A folded list of settings for each method; then versions and devices, with all the values that occur.

    `group` says of a cell to which list it belongs and what tells it apart there: the method and the data set.
    """
    groups: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for method in study.methods:
        for cell in (cell for cell in study.cells if cell.method == method):
            heading, name = group(cell)
            groups.setdefault(heading, []).append((name, cell.config))
    for heading, cells in groups.items():
        page.folded_pairs(common_settings(cells), caption=f"Settings of {heading}")
    found: dict[str, Counter[str]] = {}
    for cell in study.cells:
        for name, value in (*cell.versions.items(), ("device", cell.device)):
            found.setdefault(name, Counter())[str(value)] += 1
    page.pairs({name: _counted(counts) for name, counts in found.items()}, caption="Versions and devices")


def wall_time_table(
    study: Study, caption: str, *, corner: str = "data", place: Place = lambda cell: (cell.data, cell.method)
) -> Table:
    """Seconds of all replicates together, with totals; `place` says of a cell its row and its column.

    `corner` is the word for what the rows are.
    """
    seconds: dict[str, dict[str, float]] = {}
    totals = {place(cell)[1]: 0.0 for method in study.methods for data in study.data for cell in study.of(method, data)}
    for cell in (cell for data in study.data for method in study.methods for cell in study.of(method, data)):
        row, column = place(cell)
        found = seconds.setdefault(row, {})
        found[column] = found.get(column, 0.0) + cell.seconds
        totals[column] += cell.seconds
    rows: list[dict[str, str | float | None]] = [{corner: row, **found} for row, found in seconds.items()]
    columns = [Column(key=name, header=name, unit="s", digits=0) for name in totals]
    return Table(
        columns=(Column(key=corner, header=corner), *columns), rows=[*rows, {corner: "all", **totals}], caption=caption
    )


def common_settings(cells: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, str]:
    """Settings by name: one value where all data sets agree, else each value with the sets that have it."""
    by_name: dict[str, dict[str, dict[str, None]]] = {}
    data_sets = dict.fromkeys(data for data, _ in cells)
    for data, config in cells:
        for name, value in flattened(config).items():
            by_name.setdefault(name, {}).setdefault(value, {})[data] = None
    return {
        name: next(iter(values))
        if len(values) == 1 and len(next(iter(values.values()))) == len(data_sets)
        else "; ".join(f"{value} ({', '.join(sets)})" for value, sets in values.items())
        for name, values in by_name.items()
    }


def flattened(config: Mapping[str, Any]) -> dict[str, str]:
    """Nested settings under dotted names, every value as text."""
    texts: dict[str, str] = {}
    for name, value in flat(config):
        texts[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return texts


def _counted(counts: Mapping[str, int]) -> str:
    if len(counts) == 1:
        return next(iter(counts))
    return "; ".join(f"{value} ({count} cells)" for value, count in counts.items())


def add_gaps(page: ReportPage, gaps: Sequence[str]) -> None:
    """What was not run yet."""
    if gaps:
        page.text("Not complete, so that these figures may still change:")
        page.items(gaps)


def add_failures(page: ReportPage, study: Study, replicate: str) -> None:
    """Trainings that went wrong, and how; `replicate` is the word for one of them."""
    if study.failed:
        page.text(f"{len(study.failed)} of {len(study.cells)} trainings failed:")
        page.items(f"{cell.method} on {cell.data}, {replicate} {cell.replicate}: {cell.error}" for cell in study.failed)
