"""Where numbers come from: the settings of each method, versions, devices and wall time of a set of cells."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from noisygrad.report.page import Page
from noisygrad.report.study import Study
from noisygrad.report.tables import Column, Table


def add_settings(page: Page, study: Study) -> None:
    """A folded list of settings for each method."""
    for method in study.methods:
        cells = [(cell.data, cell.config) for cell in study.cells if cell.method == method]
        page.pairs(common_settings(cells), caption=f"Settings of {method}", folded=True)


def add_environment(page: Page, study: Study) -> None:
    """Versions and devices, with all the values that occur."""
    found: dict[str, dict[str, int]] = {}
    for cell in study.cells:
        for name, value in (*cell.versions.items(), ("device", cell.device)):
            counts = found.setdefault(name, {})
            counts[str(value)] = counts.get(str(value), 0) + 1
    page.pairs({name: _counted(counts) for name, counts in found.items()}, caption="Versions and devices")


def wall_time_table(study: Study, caption: str) -> Table:
    """Seconds of all replicates together, by data set and method, with totals."""
    columns = [Column(key=method, header=method, unit="s", digits=0) for method in study.methods]
    rows: list[dict[str, str | float | None]] = []
    totals = dict.fromkeys(study.methods, 0.0)
    for data in study.data:
        seconds = {method: sum(cell.seconds for cell in study.of(method, data)) for method in study.methods}
        rows.append({"data": data, **{name: value for name, value in seconds.items() if study.of(name, data)}})
        totals = {name: totals[name] + value for name, value in seconds.items()}
    rows.append({"data": "all", **totals})
    return Table(columns=(Column(key="data", header="data"), *columns), rows=rows, caption=caption)


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


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings under dotted names, every value as text."""
    found: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= flattened(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return found


def _counted(counts: Mapping[str, int]) -> str:
    if len(counts) == 1:
        return next(iter(counts))
    return "; ".join(f"{value} ({count} cells)" for value, count in counts.items())
